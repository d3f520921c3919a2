"""What the rest of simpart asks: the strategies of a kernel along an axis, along several, or given how one tensor
lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from simpart.placement import AxisStrategy, Placement, Replicate
from simpart.tdl.index import DescriptionError
from simpart.tdl.local import local_call
from simpart.tdl.registry import Describe, description_of, reason_against
from simpart.tdl.splitting import Split, described, following, splits
from simpart.tdl.tracing import Call

__all__ = ["is_elementwise", "mesh_strategies", "splits_following", "splits_of", "strategies", "undescribed_reason"]


def splits_of(call: Call, members: int, *, uneven: bool = False) -> tuple[Split, ...]:
    """All ways to divide a kernel along an axis of `members`, replicating first. An undescribed kernel only
    replicates."""
    function, _ = _usable(call)
    if function is None:
        return (_replicated(call),)
    return splits(function, call, members, uneven)


def strategies(call: Call, axis_size: int) -> list[AxisStrategy]:
    """Placements of inputs and outputs of every split of `splits_of`.

    >>> mm = Call("aten.mm.default", ((4, 8), (8, 6)), ((4, 6),))
    >>> for s in strategies(mm, 2):
    ...     print(*s.inputs, "->", *s.outputs)
    R R -> R
    S(0) R -> S(0)
    R S(1) -> S(1)
    S(1) S(0) -> P(sum)
    P(sum) R -> P(sum)
    R P(sum) -> P(sum)
    """
    return [split.strategy for split in splits_of(call, axis_size)]


def splits_following(
    call: Call, members: int, argument: int, placement: Placement, *, output: bool = False
) -> tuple[Split, ...]:
    """The splits in which one input (or output) lies as given: what propagation asks. Strided shards keep their
    element stride."""
    function, _ = _usable(call)
    if function is None:
        return (_replicated(call),) if isinstance(placement, Replicate) else ()
    return following(function, call, members, argument, placement, output=output)


def mesh_strategies(call: Call, axis_sizes: tuple[int, ...]) -> tuple[tuple[Split, ...], ...]:
    """Combinations of one split per mesh axis, outermost first: each axis divides what the axes before it left."""
    if not axis_sizes:
        return ((),)
    first, rest = axis_sizes[0], axis_sizes[1:]
    found = []
    for split in splits_of(call, first):
        found += [(split, *tail) for tail in mesh_strategies(local_call(call, split, first), rest)]
    return tuple(found)


def is_elementwise(call: Call) -> bool:
    """Derived from the description: every output element reads its own coordinates only. False if undescribed."""
    function, _ = _usable(call)
    return function is not None and described(function, call).elementwise


def undescribed_reason(call: Call) -> str | None:
    """Why this kernel can only replicate, None if it is described."""
    return _usable(call)[1]


def _usable(call: Call) -> tuple[Describe | None, str | None]:
    """The description of a kernel, or why there is none. A description of ours that does not fit this call counts as
    none; a user's raises DescriptionError, for its author to see."""
    function = description_of(call.target)
    return (None, reason_against(call.target)) if function is None else _fitting(function, call)


@lru_cache(maxsize=65536)
def _fitting(function: Describe, call: Call) -> tuple[Describe | None, str | None]:
    try:
        described(function, call)
    except DescriptionError as error:
        if not function.__module__.startswith("simpart.tdl."):
            raise
        return None, str(error)
    return function, None


def _replicated(call: Call) -> Split:
    whole: Sequence[Placement] = [Replicate()]
    return Split(
        label="replicate", strategy=AxisStrategy(tuple(whole) * len(call.inputs), tuple(whole) * len(call.outputs))
    )
