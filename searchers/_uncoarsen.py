"""Uncoarsening: parts of coarse nodes moved across their borders where that saves transfers, coarse parts first.

Reference: Tanaka et al., IPDPS 2021 (arXiv 2103.16063), phase 2. Mended here: a fixed order, and no node grows beyond
the weight that coarsening allowed, since transfers alone would always favour one large node.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["uncoarsen"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
SWEEPS = 4
"""Times that a level is gone through at most."""


@dataclass(slots=True)
class _Moves:
    """Ops with the node each is in; values as (maker, readers), all among ops that are no clones."""

    node: dict[int, int]
    values: list[tuple[int, tuple[int, ...], float]]
    touching: dict[int, list[int]]

    def cost(self, value: int) -> float:
        """Bytes times nodes that receive it."""
        maker, readers, size = self.values[value]
        own = self.node[maker]
        return size * len({self.node[r] for r in readers} - {own})

    def is_acyclic(self) -> bool:
        """Whether nodes can still be put in an order."""
        after: dict[int, set[int]] = defaultdict(set)
        for maker, readers, _ in self.values:
            after[self.node[maker]] |= {self.node[r] for r in readers} - {self.node[maker]}
        waiting: dict[int, int] = defaultdict(int)
        for readers_of in after.values():
            for node in readers_of:
                waiting[node] += 1
        ready = [node for node in after if not waiting[node]]
        done = 0
        while ready:
            done += 1
            for node in after.get(ready.pop(), ()):
                waiting[node] -= 1
                if not waiting[node]:
                    ready.append(node)
        return done == len(after.keys() | waiting.keys())


def uncoarsen(
    levels: Sequence[Integers],
    edges: tuple[Integers, Integers, Integers],
    value_bytes: Floats,
    time_s: Floats,
    memory_bytes: Floats,
    limit_bytes: float,
) -> Integers:
    """The node of each op, -1 for clones, after moves that each save bytes.

    `levels[l]` is the node of each op after pass l of coarsening, the first level being the atoms; `edges` are maker,
    reader and value of everything read.
    """
    own = np.flatnonzero(levels[0] >= 0).tolist()
    readers: dict[int, tuple[int, set[int]]] = {}
    for maker, reader, value in zip(*(x.tolist() for x in edges), strict=True):
        if levels[0][maker] >= 0 and levels[0][reader] >= 0:
            readers.setdefault(value, (maker, set()))[1].add(reader)
    values = [(maker, tuple(sorted(read)), float(value_bytes[v])) for v, (maker, read) in readers.items()]
    touching: dict[int, list[int]] = defaultdict(list)
    for v, (maker, read, _) in enumerate(values):
        for op in {maker, *read}:
            touching[op].append(v)
    moves = _Moves({op: int(levels[-1][op]) for op in own}, values, touching)
    weight_s: dict[int, float] = defaultdict(float)
    held: dict[int, float] = defaultdict(float)
    for op in own:
        weight_s[moves.node[op]] += time_s[op]
        held[moves.node[op]] += memory_bytes[op]
    most_s = statistics.fmean(weight_s.values()) + 2 * statistics.pstdev(weight_s.values())
    most_s = max(most_s, *weight_s.values())
    for level in reversed(levels[:-1]):
        units: dict[int, list[int]] = defaultdict(list)
        for op in own:
            units[int(level[op])].append(op)
        parts: dict[int, int] = defaultdict(int)
        for ops in units.values():
            parts[moves.node[ops[0]]] += 1
        for _ in range(SWEEPS):
            if not sum(_move(moves, ops, parts, weight_s, held, time_s, memory_bytes, most_s, limit_bytes)
                       for _, ops in sorted(units.items())):  # fmt: skip
                break
    result = np.full(len(levels[0]), -1, dtype=np.int64)
    result[own] = [moves.node[op] for op in own]
    return result


def _move(
    moves: _Moves, ops: list[int], parts: dict[int, int], weight_s: dict[int, float], held: dict[int, float],
    time_s: Floats, memory_bytes: Floats, most_s: float, limit_bytes: float,
) -> bool:  # fmt: skip
    """Move ops that are together to the neighbouring node that saves most; False if none saves anything."""
    here = moves.node[ops[0]]
    if parts[here] < 2:
        return False  # a node keeps a part at least
    near = sorted({v for op in ops for v in moves.touching[op]})
    around = {moves.node[op] for v in near for op in (moves.values[v][0], *moves.values[v][1])} - {here}
    seconds, size, before = float(time_s[ops].sum()), float(memory_bytes[ops].sum()), sum(map(moves.cost, near))
    options = []
    for there in sorted(around):
        if weight_s[there] + seconds <= most_s and held[there] + size < limit_bytes:
            moves.node.update(dict.fromkeys(ops, there))
            saved = before - sum(map(moves.cost, near))
            if saved > 0:
                options.append((-saved, there))
    for _, there in sorted(options):
        moves.node.update(dict.fromkeys(ops, there))
        if moves.is_acyclic():
            for node, sign in ((here, -1), (there, 1)):
                parts[node] += sign
                weight_s[node] += sign * seconds
                held[node] += sign * size
            return True
    moves.node.update(dict.fromkeys(ops, here))
    return False
