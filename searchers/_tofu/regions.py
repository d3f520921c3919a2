"""Regions of the first worker group as the recursion descends, and what moving between two of them costs.

A region is the first part of a tensor along each of its coordinates. Coordinates are the tensor's dims and, where a
cut is strided (`Shard(dim, block)`), the position inside the block, taken as independent of the dim: which it is
wherever the runs divide, as with heads inside a fused projection or gates inside an LSTM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.placement.region_conversions import box_of, overlap, part_of, step_cost

__all__ = ["Region", "cut", "device_received", "divides", "received"]


@dataclass(frozen=True, slots=True)
class Region:
    """`extents[d]` of the first elements of each dim; `runs` are (dim, whole block, extent left) of strided cuts."""

    extents: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the piece as a device holds it."""
        return _shape(self)


@lru_cache(maxsize=65536)
def _shape(region: Region) -> tuple[int, ...]:
    sizes = list(region.extents)
    for dim, block, extent in region.runs:
        sizes[dim] = sizes[dim] * extent // block
    return tuple(sizes)


def _run(region: Region, shard: Shard) -> int | None:
    """Which strided coordinate a cut continues; None for a new one."""
    for number, (dim, _, extent) in enumerate(region.runs):
        if dim == shard.dim and extent == shard.block:
            return number
    return None


def _is_strided(region: Region, shard: Shard) -> bool:
    return shard.block is not None and shard.block != region.shape[shard.dim]


def divides(region: Region, placement: Placement, parts: int) -> bool:
    """Whether a region can be cut that way."""
    if not isinstance(placement, Shard):
        return True
    if placement.dim >= len(region.extents):
        return False
    if _is_strided(region, placement):
        assert placement.block is not None
        return placement.block % parts == 0 and region.shape[placement.dim] % placement.block == 0
    return region.extents[placement.dim] % parts == 0 and region.shape[placement.dim] % parts == 0


@lru_cache(maxsize=262144)
def cut(region: Region, placement: Placement | Halo, parts: int) -> Region:
    """The first part: Whole and Reduce leave a region as it is."""
    if not isinstance(placement, Shard):
        return region
    if _is_strided(region, placement):
        assert placement.block is not None
        number = _run(region, placement)
        runs = list(region.runs)
        if number is None:
            runs.append((placement.dim, placement.block, placement.block // parts))
        else:
            dim, block, extent = runs[number]
            runs[number] = (dim, block, extent // parts)
        return Region(region.extents, tuple(sorted(runs)))
    sizes = list(region.extents)
    sizes[placement.dim] //= parts
    return Region(tuple(sizes), region.runs)


@lru_cache(maxsize=1048576)
def received(source: Region, lies: Placement, target: Region, needed: Placement, parts: int) -> float:
    """Elements received in one worker group when its source region, lying one way, is needed as its target region
    another way; see `region_conversions.step_cost`. Infinite where a cut does not divide."""
    if isinstance(needed, Partial) or isinstance(lies, Replicate):
        return 0.0  # zeros elsewhere, or a slice
    if not divides(source, lies, parts) or not divides(target, needed, parts):
        return float("inf")
    if not source.runs and not target.runs and not any(_strided(p) for p in (lies, needed)):
        cost = step_cost(_box(source.extents), lies, _box(target.extents), needed, parts)
        return float("inf") if cost is None else float(cost)
    names, sizes = _coordinates((source, target), ((source, lies), (target, needed)))
    boxes = [_box(_extents(region, names)) for region in (source, target)]
    ways = [_renumbered(region, place, names) for region, place in ((source, lies), (target, needed))]
    cost = step_cost(boxes[0], ways[0], boxes[1], ways[1], parts)
    return float("inf") if cost is None else cost / prod(sizes)


def _strided(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.block is not None


def _box(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in sizes)


Names = tuple[tuple[int, int], ...]


def _coordinates(regions: Sequence[Region], cuts: Sequence[tuple[Region, Placement]]) -> tuple[Names, tuple[int, ...]]:
    """(dim, block) of all strided coordinates, and their whole sizes."""
    found = {(dim, block) for region in regions for dim, block, _ in region.runs}
    for region, place in cuts:
        if isinstance(place, Shard) and _is_strided(region, place) and _run(region, place) is None:
            assert place.block is not None
            found.add((place.dim, place.block))
    names = tuple(sorted(found))
    return names, tuple(block for _, block in names)


def _extents(region: Region, names: Names) -> tuple[int, ...]:
    known = {(dim, block): extent for dim, block, extent in region.runs}
    return (*region.extents, *(known.get(name, name[1]) for name in names))


def _renumbered(region: Region, place: Placement, names: Names) -> Placement:
    """A placement in numbered coordinates."""
    if not isinstance(place, Shard):
        return place
    if not _is_strided(region, place):
        return Shard(place.dim)
    number = _run(region, place)
    assert place.block is not None
    name = (place.dim, place.block) if number is None else region.runs[number][:2]
    return Shard(len(region.extents) + names.index(name))


# --- all devices -----------------------------------------------------------------------------------------------------
@lru_cache(maxsize=65536)
def device_received(
    shape: tuple[int, ...], lies: tuple[Placement, ...], needed: tuple[Placement, ...], factors: tuple[int, ...]
) -> float:
    """Elements received by all devices, each of which fetches what it needs and does not hold; of a pending sum, every
    term of what it keeps. Cuts nest in the order of the steps."""
    start = Region(shape)
    ways: list[list[Placement]] = []
    regions, chains = [], []
    for places in (lies, needed):
        region, chain = start, []
        for place, parts in zip(places, factors, strict=True):
            if not divides(region, place, parts):
                return float("inf")
            chain.append((region, place))
            region = cut(region, place, parts)
        regions.append(region)
        chains.append(chain)
    names, sizes = _coordinates(regions, ())
    for chain in chains:
        ways.append([_renumbered(region, place, names) for region, place in chain])
    if any(isinstance(place, Partial) for place in needed):
        return 0.0
    terms = prod(k for place, k in zip(lies, factors, strict=True) if isinstance(place, Partial))
    whole = box_of((*shape, *sizes))
    total = 0
    for device in product(*(range(k) for k in factors)):
        held = wanted = whole
        for own, use, parts, number in zip(*ways, factors, device, strict=True):
            held = part_of(held, own, parts, number) or held
            wanted = part_of(wanted, use, parts, number) or wanted
        total += terms * prod(stop - start for start, stop in wanted) - overlap(wanted, held)
    return total / prod(sizes)
