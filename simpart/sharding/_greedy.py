"""One kernel at a time: the split that a placement of its inputs asks for, by least bytes, then least work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Literal

from simpart.errors import UnsupportedError
from simpart.graph.sizes import DTYPE_BYTES
from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.placement.conversions import conversions, received_bytes
from simpart.tdl import Call, Split, local_call, splits_following, splits_of

__all__ = ["Lie", "Spread", "choose", "converted_bytes"]

R = Replicate()
MOVED = 1e18
"""Bytes that moving a pinned parameter counts for: done only where pins contradict each other."""
PER_STEP = 1 / 8
"""Weight of bytes that move once per step, as gradients do that rest whole, against those of every micro-batch: a step
of eight is assumed."""
Spread = Callable[[tuple[int, ...]], Shard | None]
"""Where a tensor of this shape may be cut to spread replicated work, if anywhere."""


@dataclass(frozen=True, slots=True)
class Lie:
    """How a value lies on one axis. A `pinned` parameter is not moved; other parameters may count as one term."""

    placement: Placement
    kind: Literal["value", "parameter", "pinned"] = "value"


def choose(
    call: Call,
    members: int,
    lies: Sequence[Lie],
    reached: Callable[[int, Placement | Halo], bool],
    *,
    view: bool,
    wants: Mapping[int, Placement],
    spread: Spread | None,
) -> Split:
    """`reached(i, placement)` says that input i is already there for another reader; `wants` are placements that
    outputs will be brought to. Candidates follow how an input lies, or what is wanted of an output; replicating always
    is one. Deterministic: ties go to the first."""
    candidates = _candidates(call, members, lies, view, wants, spread)
    if len(candidates) == 1:
        return candidates[0]
    best, found = (inf, inf), candidates[0]
    for split in candidates:
        size = _bytes(call, members, lies, reached, wants, spread, split)
        if size > best[0]:
            continue
        local = local_call(call, split, members)
        cost = (size, float(sum(map(prod, (*local.inputs, *local.outputs)))))
        if cost < best:
            best, found = cost, split
    return found


def _candidates(
    call: Call, members: int, lies: Sequence[Lie], view: bool, wants: Mapping[int, Placement], spread: Spread | None
) -> list[Split]:
    found: dict[Split, None] = {splits_of(call, members)[0]: None}
    for i, lie in enumerate(lies):
        if lie.placement != R:
            found.update(dict.fromkeys(splits_following(call, members, i, lie.placement)))
    for k, want in wants.items():
        if want != R:
            found.update(dict.fromkeys(splits_following(call, members, k, want, output=True)))
    if spread is not None and not view:
        for i, lie in enumerate(lies):
            place = spread(call.inputs[i]) if lie.kind == "value" and not isinstance(lie.placement, Shard) else None
            if place is not None:
                found.update(dict.fromkeys(splits_following(call, members, i, place)))
    kept = [split for split in found if _sensible(split, lies)]
    if view:  # what is pending stays so: reducing before or after a view is the same, after it an op is done
        passing = [s for s in kept if s.strategy.inputs and s.strategy.inputs[0] == lies[0].placement]
        return passing or kept
    return kept


def _sensible(split: Split, lies: Sequence[Lie]) -> bool:
    """A pending sum goes on only where all that a kernel reads is pending; whole values are no terms."""
    pending = [isinstance(p, Partial) for p in split.strategy.inputs]
    if not any(pending):
        return True
    inputs = zip(split.strategy.inputs, lies, strict=True)
    if any(
        isinstance(p, Partial) and lie.kind == "value" and not isinstance(lie.placement, Partial) for p, lie in inputs
    ):
        return False
    contracted = any(isinstance(p, Shard) for p in split.strategy.inputs)
    return contracted or all(p for p, lie in zip(pending, lies, strict=True) if lie.kind == "value")


def _bytes(
    call: Call,
    members: int,
    lies: Sequence[Lie],
    reached: Callable[[int, Placement | Halo], bool],
    wants: Mapping[int, Placement],
    spread: Spread | None,
    split: Split,
) -> float:
    total = 0.0
    for i, (lie, target) in enumerate(zip(lies, split.strategy.inputs, strict=True)):
        if lie.placement == target or reached(i, target):
            continue
        itemsize = DTYPE_BYTES[call.dtypes[i]] if call.dtypes else 4
        total += converted_bytes(call.inputs[i], itemsize, lie.placement, target, members)
        if lie.kind == "pinned":
            total += MOVED
        elif lie.kind == "parameter" and isinstance(target, Shard):  # its gradient comes in shards and must be whole
            total += PER_STEP * converted_bytes(call.inputs[i], itemsize, target, R, members)
    share = (members - 1) / members
    for exchange in split.exchanges:
        total += 2 * share * 4 * exchange.elements
    for k, place in enumerate(split.strategy.outputs):
        if k in wants:
            share_of_step = PER_STEP if wants[k] == R else 1.0
            total += share_of_step * converted_bytes(call.outputs[k], 4, place, wants[k], members)
        elif isinstance(place, Partial):  # it will be reduced, or spread
            spreads = spread is not None and spread(call.outputs[k]) is not None
            total += (1 if spreads else 2) * share * 4 * prod(call.outputs[k])
    return total


def converted_bytes(
    shape: tuple[int, ...], itemsize: int, source: Placement, target: Placement | Halo, members: int
) -> float:
    """Bytes that the busiest member receives; infinite where no conversion leads."""
    if source == target:
        return 0.0
    try:
        return float(received_bytes(conversions(shape, itemsize, (source,), (target,), (members,))))
    except UnsupportedError:
        return inf
