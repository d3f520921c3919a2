"""From a description to strategies along one mesh axis: which loops can be cut, and which inputs may come in as
partial sums.

One abstract interpreter decides both. It follows, through the expression, which cut loops a value depends on and
whether it is a partial result, given how the inputs lie. What it cannot follow is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Any

from simpart.placement import AxisStrategy, Halo, Partial, Placement, Replicate, Shard
from simpart.tdl.expression import Access
from simpart.tdl.follow import Exchange, Follower
from simpart.tdl.index import Index
from simpart.tdl.layout import Cut, Cuts, DimCut, Key, Unsplittable, Window, cut_for, cuts_of, dim_cut
from simpart.tdl.linearity import linear_sets
from simpart.tdl.tracing import Call, Description, Output, trace

__all__ = ["Split", "described", "following", "splits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to divide a kernel along a mesh axis, and what its local form must mind.

    `scales`: factor on each local output (a mean sees fewer elements). `masked`: integer inputs whose values count
    from the start of the cut dim, and are out of range on the other members. `windows`: (input, dim) read with a
    halo, exactly.
    """

    label: str
    strategy: AxisStrategy
    exchanges: tuple[Exchange, ...] = ()
    scales: tuple[Fraction, ...] = ()
    masked: tuple[int, ...] = ()
    windows: tuple[tuple[int, int, Window], ...] = ()

    @property
    def exact_alone(self) -> bool:
        """No communication inside the kernel."""
        return not self.exchanges


@lru_cache(maxsize=65536)
def described(function: Callable[..., Any], call: Call) -> Description:
    """The traced description of a call, kept."""
    return trace(function, call)


@lru_cache(maxsize=65536)
def splits(function: Callable[..., Any], call: Call, members: int, uneven: bool = False) -> tuple[Split, ...]:
    """All ways to divide a call along an axis of `members`, replicating first; sizes that do not divide only if
    `uneven`."""
    description = described(function, call)
    found = [_replicated(description)]
    if members > 1:
        for key, chain in description.breaks.items():
            for low, high in pairwise(chain):
                steps = high // low
                whole = low == 1 and high == key[1] and uneven and (members - 1) * ceil(steps / members) < steps
                if steps % members == 0 or whole:
                    found += _solutions(description, {key: Cut(low, high)}, members)
        for chosen in linear_sets(description):
            found += _attempt(description, {}, dict.fromkeys(chosen, "sum"), members)
    distinct: dict[AxisStrategy, Split] = {}
    for split in found:
        known = distinct.setdefault(split.strategy, split)
        if len(split.exchanges) < len(known.exchanges):
            distinct[split.strategy] = split
    return tuple(distinct.values())


def following(
    function: Callable[..., Any], call: Call, members: int, argument: int, placement: Placement, *, output: bool = False
) -> tuple[Split, ...]:
    """Strategies in which one input (or output) lies as given; strided shards are carried through by element
    strides."""
    description = described(function, call)
    if isinstance(placement, Partial) and not output:
        placement = Partial(placement.reducer)  # masked rows are zeros by now
    found = [s for s in splits(function, call, members) if _lying(s, output)[argument] == placement]
    if found or isinstance(placement, Replicate):
        return tuple(found)
    if isinstance(placement, Partial):
        for chosen in linear_sets(description):
            if output or argument in chosen:
                found += _attempt(description, {}, dict.fromkeys(chosen, placement.reducer), members)
    else:
        for index, size in _places(description, argument, placement.dim, output):
            try:
                key, cut = cut_for(index, placement, size, description.breaks)
            except Unsplittable:
                continue
            if (cut.high // cut.low) % members == 0:
                found += _solutions(description, {key: cut}, members)
    return tuple({s.strategy: s for s in found if _lying(s, output)[argument] == placement}.values())


def _lying(split: Split, output: bool) -> tuple[Placement | Halo, ...]:
    return split.strategy.outputs if output else split.strategy.inputs


def _places(description: Description, argument: int, dim: int, output: bool) -> Iterator[tuple[Index, int]]:
    if output:
        variable = description.outputs[argument].coordinates[dim]
        yield Index.of(variable), variable.key[1]
        return
    for access in description.accesses:
        if access.tensor.position == argument and (index := access.indices[dim]) is not None:
            yield index, access.tensor.shape[dim]


def _replicated(description: Description) -> Split:
    whole = Replicate()
    strategy = AxisStrategy((whole,) * len(description.tensors), (whole,) * len(description.outputs))
    return Split(label="replicate", strategy=strategy, scales=(Fraction(1),) * len(description.outputs))


# --- trying a cut ----------------------------------------------------------------------------------------------------
def _solutions(description: Description, cuts: dict[Key, Cut], members: int) -> list[Split]:
    """Cut these loops and those that must go with them; inputs of terms outside the cut sums come in as partial."""
    try:
        closed = _close(description, cuts, members)
    except Unsplittable:
        return []
    alone = _attempt(description, closed, {}, members)
    if alone:
        return alone
    touched = {a.tensor.position for a in description.accesses if _touches(a, closed)}
    for chosen in linear_sets(description):
        rest = chosen - touched
        if rest and (found := _attempt(description, closed, dict.fromkeys(rest, "sum"), members)):
            return found
    return []


def _touches(access: Access, cuts: Cuts) -> bool:
    return any(index is not None and cuts_of(index, cuts) for index in access.indices)


def _close(description: Description, cuts: dict[Key, Cut], members: int) -> dict[Key, Cut]:
    """Add the loops that read a tensor which other accesses have cut, until nothing changes."""
    closed = dict(cuts)
    while True:
        lying = _placements(description, closed, members)
        grown = False
        for access in description.accesses:
            given = lying.get(access.tensor.position)
            if given is None or _access_cut(description, access, closed, members) == given:
                continue
            placement = next(iter(given.values())).placement
            if isinstance(placement, Halo) or _touches(access, closed):
                raise Unsplittable
            index = access.indices[placement.dim]
            if index is None:
                raise Unsplittable
            key, cut = cut_for(index, placement, access.tensor.shape[placement.dim], description.breaks)
            if key in closed:
                raise Unsplittable
            closed[key] = cut
            grown = True
        if not grown:
            return closed


def _access_cut(description: Description, access: Access, cuts: Cuts, members: int) -> dict[int, DimCut]:
    found = {}
    for dim, index in enumerate(access.indices):
        if index is None:
            continue
        cut = dim_cut(index, dim, access.tensor.shape[dim], cuts, members, description.fixed)
        if cut is not None:
            found[dim] = cut
    if len(found) > 1:
        raise Unsplittable
    return found


def _placements(description: Description, cuts: Cuts, members: int) -> dict[int, dict[int, DimCut]]:
    """How each touched input lies, {input: {dim: cut}}; one dim each, the first access deciding."""
    found: dict[int, dict[int, DimCut]] = {}
    for access in description.accesses:
        if cut := _access_cut(description, access, cuts, members):
            found.setdefault(access.tensor.position, cut)
    return found


def _attempt(description: Description, cuts: Cuts, partial: Mapping[int, str], members: int) -> list[Split]:
    """The split these cuts and partial inputs give, or none if the description does not allow it."""
    try:
        lying = _placements(description, cuts, members)
        if set(lying) & set(partial):
            return []
        if any(
            _access_cut(description, a, cuts, members) != lying.get(a.tensor.position, {}) for a in description.accesses
        ):
            return []
        follower = Follower(cuts, partial)
        results = [_result(output, cuts, members, follower) for output in description.outputs]
    except Unsplittable:
        return []
    if not lying and not partial and not cuts:
        return []
    inputs: list[Placement | Halo] = []
    windows = []
    for position in range(len(description.tensors)):
        if position in partial:
            inputs.append(Partial(partial[position]))  # type: ignore[arg-type]
        elif position in lying:
            ((dim, cut),) = lying[position].items()
            inputs.append(cut.placement)
            if cut.window is not None:
                windows.append((position, dim, cut.window))
        else:
            inputs.append(Replicate())
    mask = _mask_dim(inputs, follower.masked)
    outputs = []
    for placement, _ in results:
        masked = isinstance(placement, Partial) and mask is not None
        outputs.append(Partial(placement.reducer, mask) if masked and isinstance(placement, Partial) else placement)
    uneven = any((cut.high // cut.low) % members for cut in cuts.values())
    if (follower.masked and windows) or (uneven and any(power for _, power in results)):
        return []
    strategy = AxisStrategy(tuple(inputs), tuple(outputs))
    if all(isinstance(p, Replicate) for p in (*strategy.inputs, *strategy.outputs)):
        return []
    names = [key[0] if cut == Cut(1, key[1]) else f"{key[0]}[{cut.low}:{cut.high}]" for key, cut in cuts.items()]
    names += [f"partial {description.tensors[i].name}" for i in sorted(partial)]
    return [
        Split(
            label=", ".join(names),
            strategy=strategy,
            exchanges=tuple(follower.exchanges.values()),
            scales=tuple(Fraction(members) ** power for _, power in results),
            masked=tuple(sorted(follower.masked)),
            windows=tuple(windows),
        )
    ]


def _mask_dim(inputs: list[Placement | Halo], masked: set[int]) -> int | None:
    """The dim of another input along which rows are masked."""
    dims = [p.dim for i, p in enumerate(inputs) if isinstance(p, Shard) and i not in masked]
    return dims[0] if masked and dims else None


def _result(output: Output, cuts: Cuts, members: int, follower: Follower) -> tuple[Placement, int]:
    """Placement of an output and the power of `members` by which its local value must be multiplied."""
    value = follower.value(output.body)
    own = {v.key for v in output.coordinates}
    if not value.loops <= own:
        raise Unsplittable
    shards = []
    for dim, variable in enumerate(output.coordinates):
        cut = dim_cut(Index.of(variable), dim, variable.key[1], cuts, members)
        if cut is not None:
            shards.append(cut.placement)
    if len(shards) > 1 or (shards and value.partial):
        raise Unsplittable
    if shards:
        assert isinstance(shards[0], Shard)
        return shards[0], value.power
    if value.partial:
        return Partial(value.partial), value.power  # type: ignore[arg-type]
    return Replicate(), value.power
