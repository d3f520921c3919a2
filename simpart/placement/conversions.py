"""Conversions between placements on a mesh: which collectives, in which order, and how many bytes each device
receives."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import ceil, prod
from typing import Literal

from simpart.cost import Collective, CollectiveKind
from simpart.errors import UnsupportedError
from simpart.placement import Halo, Partial, Placement, Replicate, Shard

__all__ = [
    "ConversionKind",
    "Step",
    "collective_of",
    "conversions",
    "convertible",
    "received_bytes",
    "single_steps",
]

Shape = tuple[int, ...]
State = tuple[Placement | Halo, ...]
ConversionKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "halo", "local"]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective on one mesh axis, or a local step (slice, zero padding) that moves nothing.

    `bytes` is the buffer as nccl-tests count it: gathered output, full input of a reduce-scatter, all-reduced
    buffer, local buffer of an all-to-all, the larger message of a halo exchange. `received_bytes` is what the
    busiest device receives.
    """

    kind: ConversionKind
    axis: int
    source: Placement | Halo
    target: Placement | Halo
    bytes: int
    received_bytes: int


def conversions(
    shape: Shape,
    itemsize: int,
    source: Sequence[Placement],
    target: Sequence[Placement | Halo],
    axis_sizes: Sequence[int],
    price: Callable[[Step], float] | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another, axis by axis; by bytes received unless `price` gives seconds.

    Two axes that shard one dim are nested, the first one outermost, so the inner one must be undone first.
    Raises UnsupportedError, naming the placements, if no path leads there.

    >>> [s.kind for s in conversions((8, 8), 4, (Partial(), Shard(1)), (Shard(0), Replicate()), (2, 2))]
    ['reduce_scatter', 'all_gather']
    """
    start, goal, sizes = tuple(source), tuple(target), tuple(axis_sizes)
    if price is None:
        return _cheapest(shape, itemsize, start, goal, sizes)
    return _search(shape, itemsize, start, goal, sizes, price)


@lru_cache(maxsize=65536)
def _cheapest(shape: Shape, itemsize: int, source: State, target: State, sizes: tuple[int, ...]) -> tuple[Step, ...]:
    return _search(shape, itemsize, source, target, sizes, lambda step: step.received_bytes)


def convertible(
    shape: Shape, source: Sequence[Placement], target: Sequence[Placement | Halo], sizes: Sequence[int]
) -> bool:
    """Whether a path of conversions exists."""
    try:
        conversions(shape, 1, source, target, sizes)
    except UnsupportedError:
        return False
    return True


def received_bytes(steps: Sequence[Step]) -> int:
    """Bytes that the busiest device receives over all steps."""
    return sum(step.received_bytes for step in steps)


def collective_of(step: Step, ranks: tuple[int, ...], concurrent: int = 1, dtype: str = "float32") -> Collective | None:
    """What the communication model prices; None for a local step. A halo is a message from a neighbour."""
    if step.kind == "local":
        return None
    kind: CollectiveKind = "p2p" if step.kind == "halo" else step.kind
    members = ranks[:2] if kind == "p2p" else ranks
    return Collective(kind, step.bytes, members, concurrent, dtype)


def single_steps(
    shape: Shape, itemsize: int, state: State, axis: int, targets: Iterable[Placement | Halo], sizes: Sequence[int]
) -> Iterator[tuple[State, Step]]:
    """The layouts that one step on one axis leads to, of these targets, each with its step."""
    before, all_sizes = state[axis], tuple(sizes)
    if isinstance(before, Halo) or _group_shape(shape, state, all_sizes, None) is None:
        return
    group, outer = _group_shape(shape, state, all_sizes, axis), _outer_shape(shape, state, all_sizes, axis)
    for after in targets:
        following = (*state[:axis], after, *state[axis + 1 :])
        if after == before or group is None or _blocked(before, after, state[axis + 1 :], outer, all_sizes[axis]):
            continue
        if _group_shape(shape, following, all_sizes, None) is not None:
            step = _step(axis, before, after, group, itemsize, all_sizes[axis])
            if step is not None:
                yield following, step


# --- the search ------------------------------------------------------------------------------------------------------
def _search(
    shape: Shape, itemsize: int, source: State, target: State, sizes: tuple[int, ...], price: Callable[[Step], float]
) -> tuple[Step, ...]:
    """Dijkstra over layouts; one step changes the placement on one axis. Fewer steps win ties."""
    _check(shape, source, sizes)
    _check(shape, target, sizes)
    order = count()
    queue: list[tuple[float, int, int, State, tuple[Step, ...]]] = [(0.0, 0, next(order), source, ())]
    done: set[State] = set()
    while queue:
        cost, _, _, state, path = heapq.heappop(queue)
        if state == target:
            return tuple(step for step in path if step.source != step.target)
        if state in done:
            continue
        done.add(state)
        for following, step in _moves(shape, itemsize, state, source, target, sizes):
            if following not in done:
                found = (*path, step)
                heapq.heappush(queue, (cost + price(step), len(found), next(order), following, found))
    raise UnsupportedError(
        f"no conversion leads from {_text(source)} to {_text(target)} for shape {list(shape)} on axes of "
        f"{', '.join(map(str, sizes))}; shard dims that the axes divide, or replicate"
    )


def _check(shape: Shape, state: State, sizes: tuple[int, ...]) -> None:
    if len(state) != len(sizes):
        raise UnsupportedError(f"a layout names one placement per mesh axis, got {_text(state)} for {len(sizes)} axes")
    if _group_shape(shape, state, sizes, None) is None:
        raise UnsupportedError(
            f"{_text(state)} does not divide shape {list(shape)} on axes of {', '.join(map(str, sizes))}; "
            "shard a dim at least as long as the axis, or a block that it divides"
        )


def _text(state: Sequence[Placement | Halo]) -> str:
    return "(" + ", ".join(map(str, state)) + ")"


def _shard(placement: Placement | Halo) -> Shard | None:
    return placement if isinstance(placement, Shard) else placement.shard if isinstance(placement, Halo) else None


def _group_shape(shape: Shape, state: State, sizes: tuple[int, ...], skipped: int | None) -> Shape | None:
    """Shape of what the members of axis `skipped` hold together (largest share on uneven axes); None if it cannot
    be divided."""
    local = list(shape)
    for axis, placement in enumerate(state):
        shard = _shard(placement)
        if axis == skipped or shard is None or sizes[axis] == 1:
            continue
        if not 0 <= shard.dim < len(shape):
            return None
        size = local[shard.dim]
        if shard.block is not None:
            inner = shard.block
            if inner % sizes[axis] or size % inner:
                return None
            local[shard.dim] = size // sizes[axis]
        else:
            if size < sizes[axis] or ceil(size / sizes[axis]) * (sizes[axis] - 1) >= size:
                return None
            local[shard.dim] = ceil(size / sizes[axis])
    return tuple(local)


def _moves(
    shape: Shape, itemsize: int, state: State, source: State, target: State, sizes: tuple[int, ...]
) -> Iterator[tuple[State, Step]]:
    shards = dict.fromkeys(s for p in (*source, *target) if (s := _shard(p)) is not None)
    for axis, before in enumerate(state):
        if isinstance(before, Halo):
            continue
        for after in dict.fromkeys([Replicate(), *shards, target[axis]]):
            if after == before or (isinstance(after, Halo | Partial) and after != target[axis]):
                continue
            following = (*state[:axis], after, *state[axis + 1 :])
            group = _group_shape(shape, state, sizes, axis)
            if _blocked(before, after, state[axis + 1 :], _outer_shape(shape, state, sizes, axis), sizes[axis]):
                continue
            if _group_shape(shape, following, sizes, None) is None:
                continue
            if group is not None and (step := _step(axis, before, after, group, itemsize, sizes[axis])) is not None:
                yield following, step


def _outer_shape(shape: Shape, state: State, sizes: tuple[int, ...], axis: int) -> Shape:
    """What the axes outside this one leave of a shape."""
    left = _group_shape(shape, state[:axis], sizes, None)
    return shape if left is None else left


def _blocked(before: Placement | Halo, after: Placement | Halo, inner: Sequence[Placement | Halo], outer: Shape,
             members: int) -> bool:  # fmt: skip
    """A dim that an inner axis shards cannot be divided or put together outside it, unless what is divided are whole
    runs of the inner one's blocks."""
    changed = [shard for p in (before, after) if (shard := _shard(p)) is not None]
    if _shard(before) is not None and _shard(before) == _shard(after):
        return False
    for p in inner:
        if (shard := _shard(p)) is None:
            continue
        for mine in changed:
            runs = shard.block is not None and mine.block is None and outer[mine.dim] % (members * shard.block) == 0
            if mine.dim == shard.dim and not runs:
                return True
    return False


def _step(axis: int, before: Placement, after: Placement | Halo, group: Shape, itemsize: int, n: int) -> Step | None:
    """The step between two placements on one axis whose members hold `group` together; None if there is none."""
    area = prod(group) * itemsize

    def step(kind: ConversionKind, size: int, received: int) -> Step:
        return Step(kind, axis, before, after, size, received)

    if n == 1:
        return step("local", 0, 0)
    if isinstance(before, Partial):
        if isinstance(after, Replicate):
            return step("all_reduce", area, -(-2 * (n - 1) * area // n))
        if isinstance(after, Shard):
            return step("reduce_scatter", area, -(-(n - 1) * area // n))
        if isinstance(after, Partial) and after.reducer == before.reducer:
            return step("local", 0, 0)
        return None
    if isinstance(before, Replicate) or isinstance(after, Partial):
        if isinstance(before, Shard) and isinstance(after, Partial) and after.reducer != "sum":
            return None  # zeros in the other members' parts stand for nothing under max, min or avg
        return step("local", 0, 0)
    if isinstance(after, Replicate):
        least = min(_lengths(group[before.dim], before, n))
        return step("all_gather", area, area - area // group[before.dim] * least)
    if isinstance(after, Halo):
        if after.shard != before:
            return None
        row = area // group[before.dim]
        return step("halo", max(after.before, after.after) * row, (after.before + after.after) * row)
    received = _moved(group, before, after, n) * itemsize
    return step("all_to_all", ceil(area / n), received)


def _lengths(size: int, shard: Shard, n: int) -> list[int]:
    return [sum(stop - start for start, stop in _runs(size, shard, n, part)) for part in range(n)]


def _runs(size: int, shard: Shard, n: int, part: int) -> list[tuple[int, int]]:
    """The runs of a dim that a member holds."""
    span = shard.block or size
    each = ceil(span / n)
    return [(first + min(part * each, span), first + min((part + 1) * each, span)) for first in range(0, size, span)]


def _moved(group: Shape, before: Shard, after: Shard, n: int) -> int:
    """Elements that the busiest member needs and does not hold, when both are shards."""
    worst = 0
    for part in range(n):
        held, needed = _runs(group[before.dim], before, n, part), _runs(group[after.dim], after, n, part)
        width = sum(stop - start for start, stop in needed)
        if before.dim == after.dim:
            common = _overlap(held, needed)
            missing = (width - common) * prod(group) // group[before.dim]
        else:
            share = sum(stop - start for start, stop in held)
            rest = prod(group) // (group[before.dim] * group[after.dim])
            missing = width * (group[before.dim] - share) * rest
        worst = max(worst, missing)
    return worst


def _overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    """Length that two sorted lists of runs have in common."""
    total = i = j = 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total
