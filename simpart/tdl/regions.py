"""Partition-n-reduce as the paper states it: for every loop, what each worker reads when the loop is cut among workers.

Here regions may overlap or leave the tensor, as they do for halos; `splitting` turns those that a kernel can run on
into placements. Reference: Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph
Partitioning" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from simpart.tdl.expression import Reduction
from simpart.tdl.follow import Follower
from simpart.tdl.interval import interval_of
from simpart.tdl.layout import Cut, Unsplittable, chunk
from simpart.tdl.tracing import Description

__all__ = ["LoopSplit", "loop_splits", "loops_of"]

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSplit:
    """One loop cut among workers. `output` is the dim of output 0 that is cut, or None if the workers' outputs are
    reduced by
    `reducer`; `regions[w]` maps inputs to what worker w reads, inclusive bounds per dim."""

    loop: str
    output: int | None
    reducer: str | None
    regions: tuple[dict[int, Region], ...]


def loops_of(description: Description) -> list[tuple[str, int]]:
    """All loops of output 0: its coordinates, then the variables of its reductions, each once."""
    output = description.outputs[0]
    keys = [variable.key for variable in output.coordinates]
    keys += [v.key for node in output.body.walk() if isinstance(node, Reduction) for v in node.variables]
    return list(dict.fromkeys(keys))


def loop_splits(description: Description, workers: int = 2) -> list[LoopSplit]:
    """Every loop of the first output that can be cut; those inside opaque functions cannot."""
    output = description.outputs[0]
    own = [variable.key for variable in output.coordinates]
    found = []
    for key in loops_of(description):
        follower = Follower({key: Cut(1, key[1])}, {})
        try:
            value = follower.value(output.body)
        except Unsplittable:
            continue
        if key[1] < workers or (key not in own and not value.partial):
            continue
        regions = []
        for worker in range(workers):
            start, size = chunk(key[1], workers, worker)
            regions.append(_regions(description, {key: (start, start + size - 1)}))
        dim = own.index(key) if key in own else None
        found.append(LoopSplit(loop=key[0], output=dim, reducer=value.partial, regions=tuple(regions)))
    return found


def _regions(description: Description, ranges: dict[tuple[str, int], tuple[int, int]]) -> dict[int, Region]:
    """What is read of each input while some loops run over part of their range; several reads are united dim by dim."""
    found: dict[int, list[tuple[int, int]]] = {}
    for access in description.accesses:
        bounds = []
        for dim, index in enumerate(access.indices):
            if index is None:
                bounds.append((0, access.tensor.shape[dim] - 1))
            else:
                low, high = interval_of(index, ranges)
                bounds.append((-floor(-low), floor(high)))
        before = found.setdefault(access.tensor.position, bounds)
        found[access.tensor.position] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(before, bounds, strict=True)]
    return {position: tuple(bounds) for position, bounds in found.items()}
