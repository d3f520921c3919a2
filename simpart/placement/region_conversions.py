"""Tofu's conversion costs: elements received by all devices together when a region of a tensor lies one way and is
needed another.

Counted per step of the recursion, in the first worker group (`step_cost`), and exactly over all devices
(`device_level_cost`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from simpart.placement import Partial, Placement, Replicate, Shard

__all__ = ["Box", "box_of", "device_level_cost", "overlap", "part_of", "step_cost"]

Box = tuple[tuple[int, int], ...]
"""Half-open range per dim."""


def box_of(shape: Sequence[int]) -> Box:
    """The whole of a tensor."""
    return tuple((0, size) for size in shape)


def area(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> int:
    """Elements in both boxes."""
    return prod(max(0, min(p[1], q[1]) - max(p[0], q[0])) for p, q in zip(a, b, strict=True))


def part_of(box: Box, scheme: Placement, parts: int, number: int) -> Box | None:
    """Part `number` of a box under a scheme: a chunk, or all of it for Whole and Reduce; None if the cut does not
    divide."""
    if not isinstance(scheme, Shard):
        return box
    start, stop = box[scheme.dim]
    if (stop - start) % parts:
        return None
    each = (stop - start) // parts
    chunk = (start + number * each, start + (number + 1) * each)
    return (*box[: scheme.dim], chunk, *box[scheme.dim + 1 :])


def step_cost(source: Box, lies: Placement, target: Box, needed: Placement, parts: int) -> int | None:
    """Elements received in one worker group when its `source` box, lying one way, is needed as `target` another way.

    What lies outside the source was fetched by an earlier step, and what of a pending sum lies outside the target goes
    to other groups; where a group needs or sums all of it, it moves within the group once more. None if a cut does not
    divide its box.
    """
    if any(part_of(b, p, parts, 0) is None for b, p in ((source, lies), (target, needed))):
        return None
    if isinstance(lies, Partial):
        return (parts - 1) * area(source) * (2 if isinstance(needed, Replicate) else 1)
    if isinstance(lies, Replicate):
        return 0
    total = 0
    for number in range(parts):
        held, wanted = part_of(source, lies, parts, number), part_of(target, needed, parts, number)
        assert held is not None and wanted is not None
        total += overlap(wanted, source) - overlap(wanted, held)
    return total + ((parts - 1) * (area(target) - overlap(source, target)) if isinstance(needed, Replicate) else 0)


def device_level_cost(
    shape: Sequence[int], lies: Sequence[Placement], needed: Sequence[Placement], factors: Sequence[int]
) -> int | None:
    """Elements received when every device fetches what it needs and does not hold; cuts nest in the order of the
    steps."""
    total = 0
    for device in product(*(range(k) for k in factors)):
        held: Box | None = box_of(shape)
        wanted: Box | None = box_of(shape)
        for own, use, parts, number in zip(lies, needed, factors, device, strict=True):
            held = held and part_of(held, own, parts, number)
            wanted = wanted and part_of(wanted, use, parts, number)
        if held is None or wanted is None:
            return None
        total += area(wanted) - overlap(wanted, held)
    return total
