"""The ops of a graph as planners cut it: times, what each reads of which other, and which ops go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpart.plan.partition import clone_groups

__all__ = ["OpDag", "block_numbers", "crossing_values"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpDag:
    """Ops 0 … n-1 in a topological order, and which of them read which value of which other.

    Edge e says that op `edge_target[e]` reads value `edge_value[e]` made by op `edge_source[e]`. `group` holds, per op,
    the smallest op of its indivisible group; `cloned` marks ops that are repeated wherever they are needed.
    """

    time_s: Floats  # forward + backward
    memory_bytes: Floats
    edge_source: Integers
    edge_target: Integers
    edge_value: Integers
    value_bytes: Floats  # by value number
    group: Integers
    cloned: npt.NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Number of ops."""
        return len(self.time_s)

    def clones(self) -> list[tuple[Integers, Integers]]:
        """Cloned ops that go together, with the ops outside that read one of them; readers come first."""
        return clone_groups(self.cloned, self.group, self.edge_source, self.edge_target)


def block_numbers(dag: OpDag, chain: Sequence[Integers]) -> Integers:
    """The block of each op, -1 for clones."""
    block = np.full(dag.size, -1, dtype=np.int64)
    for b, ops in enumerate(chain):
        block[ops] = b
    return block


def crossing_values(dag: OpDag, chain: Sequence[Integers]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Values by the block that makes them and all other blocks that read them."""
    block = block_numbers(dag, chain)
    made, read = block[dag.edge_source], block[dag.edge_target]
    readers: dict[int, tuple[int, set[int]]] = {}
    for e in np.flatnonzero((made >= 0) & (read >= 0) & (made != read)).tolist():
        readers.setdefault(int(dag.edge_value[e]), (int(made[e]), set()))[1].add(int(read[e]))
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for value, (maker, others) in readers.items():
        found.setdefault((maker, tuple(sorted(others))), []).append(value)
    return found
