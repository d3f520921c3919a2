"""Task classes of a fine-grain program while they are collected: equal tasks share one."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import numpy as np

from simpart.cost import Collective
from simpart.graph import Graph
from simpart.kernels.ops import base_name
from simpart.lowering.ledger import ClassCost

__all__ = ["Classes", "collective_words", "kernel_words"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Classes:
    """Costs, names, axes and overheads by class; the coarse class that each belongs to (for memory; -1: none), and
    whether it is the first and the last task of its action on the compute stream. `sent` are the group, axis and
    collectives of those that are communication; `known` finds a class by what makes it."""

    def __init__(self) -> None:
        self.costs: list[ClassCost] = []
        self.names: list[str] = []
        self.axes: list[str] = []
        self.overhead_s: list[float] = []
        self.coarse: list[int] = []
        self.ends: list[tuple[bool, bool]] = []
        self.sent: dict[int, tuple[int, str, tuple[Collective, ...]]] = {}
        self.known: dict[Hashable, int] = {}

    def add(
        self, cost: ClassCost, name: str, *, axis: str = "", overhead_s: float = 0.0, coarse: int = -1,
        ends: tuple[bool, bool] = (False, False),
    ) -> int:  # fmt: skip
        """A new class."""
        self.costs.append(cost)
        self.names.append(name)
        self.axes.append(axis)
        self.overhead_s.append(overhead_s)
        self.coarse.append(coarse)
        self.ends.append(ends)
        return len(self.costs) - 1

    def rows(self, table: Table, end: int | None) -> Table:
        """Rows of a coarse table for these classes: for tasks at one end of their action, or (None) for all of them."""
        found = np.zeros((len(self.coarse), table.shape[1]))
        for c, coarse in enumerate(self.coarse):
            if coarse >= 0 and (end is None or self.ends[c][end]):
                found[c] = table[coarse]
        return found


def collective_words(axis: str, collectives: Sequence[Collective], what: str) -> str:
    """In which order they come is left out.

    >>> collective_words("dp", [Collective("all_gather", 8, (0, 1))] * 2, "parameters")
    'dp 2 × all-gather of parameters'
    """
    kinds: dict[str, int] = {}
    for collective in collectives:
        kinds[collective.kind] = kinds.get(collective.kind, 0) + 1
    words = [f"{n} × {k}" if n > 1 else k for k, n in kinds.items()]
    return f"{axis} {', '.join(words).replace('_', '-')} of {what}"


def kernel_words(graph: Graph, kernels: Ints) -> str:
    """The modules and ops of a run of kernels, from the first to the last; `*` stands for the number of a layer."""
    named = [
        f"{op.path} {base_name(op.target)}".strip()
        for kernel in kernels[[0, -1]].tolist()
        for op in [graph.op_classes[int(graph.flat.op_class[graph.flat.kernel_op[kernel]])]]
    ]
    return " … ".join(dict.fromkeys(re.sub(r"\{\d+\}", "*", name) for name in named))
