"""Named parallelisms as pins, found by rule in any model that has the structure for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from weakref import WeakKeyDictionary

from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph
from simpart.kernels.ops import family_of
from simpart.placement import Placement, Shard, StatePlacement
from simpart.plan import REPLICA_AXIS
from simpart.sharding._greedy import Spread
from simpart.sharding._pairs import Lookahead, Pair
from simpart.sharding.patterns import by_pattern
from simpart.sharding.pins import Pin, divisors
from simpart.tdl import splits_following, splits_of
from simpart.tdl.layout import chunk

__all__ = ["Preset", "context_parallel", "expert_parallel", "state_at_rest", "tensor_parallel"]

LARGEST = 64
"""Axis sizes up to this are tried when a message names those that work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Pins on one axis. `parameters` are where they rest, by op-level value number, gradients and optimizer state with
    them; `spread` as in `propagate`."""

    pins: tuple[Pin, ...]
    parameters: Mapping[int, Placement]
    spread: Spread | None = None


_lookaheads: WeakKeyDictionary[Graph, dict[int, Lookahead]] = WeakKeyDictionary()


def _lookahead(graph: Graph, micro_batch: int) -> Lookahead:
    known = _lookaheads.setdefault(graph, {})
    if micro_batch not in known:
        known[micro_batch] = Lookahead(graph, micro_batch)
    return known[micro_batch]


# --- tensor parallel -------------------------------------------------------------------------------------------------
def tensor_parallel(
    graph: Graph, micro_batch: int, size: int, *, vocabulary: bool | None = None, sequence: bool = False
) -> Preset:
    """Megatron's rule: products in pairs, the first by output features, the second by the features it sums over.

    `vocabulary`: tables looked up by tokens, and the last product with its loss, are split too (None: where the size
    divides them). `sequence`: what lies between pairs is split along the sequence. Raises UserError with sizes that
    work, UnsupportedError where the model has no pair.
    """
    ahead = _lookahead(graph, micro_batch)
    pairs = ahead.pairs(size, exchanges=False)
    _check_pairs(graph, ahead, pairs, size)
    taken = {value for pair in pairs for value in pair.parameters}
    tables = ahead.pairs(size, exchanges=True, taken=taken) if vocabulary is not False else []
    if vocabulary and not tables:
        rows = sorted({ahead.shape_of[value][0] for value in ahead.tables()})
        if not rows:
            raise UnsupportedError("vocab-parallel: no table is looked up by tokens in this model; leave it out")
        raise UserError(
            f"tp must divide the vocabulary of {' and '.join(map(str, rows))} to split it, got tp={size}; "
            f"try tp {divisors(gcd(*rows))}, or leave it whole with --no-vocab-parallel"
        )
    found = {ahead.parameters[v]: place for pair in (*pairs, *tables) for v, place in pair.parameters.items()}
    pins = tuple(Pin("parameter", pattern, place) for pattern, place in by_pattern(graph, found))
    spread = _sequence_spread(graph, ahead, pairs, micro_batch, size) if sequence else None
    return Preset(pins=pins, parameters=found, spread=spread)


def _check_pairs(graph: Graph, ahead: Lookahead, pairs: Sequence[Pair], size: int) -> None:
    """Refuse a size that splits less than another would."""
    covered = {value for pair in pairs for value in pair.parameters}
    best: list[Pair] = list(pairs)
    for other in (2, 3, 5, 7) if not covered else (2,):
        if other != size:
            found = ahead.pairs(other, exchanges=False)
            if _count(found) > _count(best):
                best = found
    if not best:
        raise UnsupportedError(
            f"tp={size}: no product of this model leaves a split that lasts until another product sums over it; "
            "use pp and dp"
        )
    missing = [pair for pair in best if not set(pair.parameters) <= covered]
    if not missing or _count(best) <= len(covered):
        return
    first = missing[0]
    names = [graph.parameters[ahead.parameters[v]].name for v in first.parameters]
    limits = sorted(
        {n for pair in missing for heads in pair.heads for n in heads}
        | {ahead.shape_of[v][p.dim] for pair in missing for v, p in pair.parameters.items()}
    )
    works = [
        str(n)
        for n in range(2, LARGEST + 1)
        if not any(limit % n for limit in limits) and _count(ahead.pairs(n, exchanges=False)) >= _count(best)
    ]
    advice = f"try tp {', '.join(works)}" if works else "no larger tp works"
    if first.heads and (first.heads[0][0] % size or first.heads[0][1] % size):
        heads, shared = first.heads[0]
        what = f"the {heads} heads of attention" + (f" and its {shared} key-value heads" if shared != heads else "")
    else:
        what = f"the features that {names[0]} and {names[-1]} share"
    raise UserError(f"tp must divide {what}, got tp={size}; {advice}")


def _count(pairs: Sequence[Pair]) -> int:
    return sum(len(pair.parameters) for pair in pairs)


def _sequence_spread(graph: Graph, ahead: Lookahead, pairs: Sequence[Pair], micro_batch: int, size: int) -> Spread:
    """Cuts tensors along the dim behind the batch that pending sums have."""
    lengths: Counter[int] = Counter()
    specs = graph.flat.kernel_value_spec
    for pair in pairs:
        for end in pair.ends:
            value = ahead.outputs[end]
            while len(specs[value].dims) < 3:
                after = [k for k in ahead.readers.get(value, ()) if graph.kernel_classes[ahead.class_of[k]].view]
                if not after:
                    break
                value = ahead.outputs[after[0]]
            dims = specs[value].dims
            if len(dims) == 3 and not isinstance(dims[0], int) and isinstance(dims[1], int):
                lengths[dims[1]] += 1
    if not lengths:
        raise UnsupportedError(
            "sp: between the products of this model there is no dim for a sequence; use tp without sp"
        )
    length = lengths.most_common(1)[0][0]
    if length % size:
        raise UserError(f"tp must divide the sequence of {length} for sp, got tp={size}; try {divisors(length)}")

    def spread(shape: tuple[int, ...]) -> Shard | None:
        if len(shape) > 1 and shape[:2] == (micro_batch, length):
            return Shard(1)
        if shape and shape[0] == micro_batch * length:
            return Shard(0, length) if micro_batch > 1 else Shard(0)
        return Shard(0) if shape and shape[0] == length else None

    return spread


# --- experts, context ------------------------------------------------------------------------------------------------
def expert_parallel(graph: Graph, micro_batch: int, size: int) -> Preset:
    """Parameters that hold a matrix per expert are split by experts, samples too where the size divides them."""
    ahead = _lookahead(graph, micro_batch)
    found: dict[int, Placement] = {}
    experts: set[int] = set()
    for value, number in ahead.parameters.items():
        if len(ahead.shape_of[value]) < 3:
            continue
        if _multiplies_per_entry(ahead, value):
            experts.add(ahead.shape_of[value][0])
            found[number] = Shard(0)
    if not found:
        raise UnsupportedError(
            f"ep={size}: no parameter of this model holds one matrix per expert (a batched product reads none); use tp"
        )
    wrong = [n for n in sorted(experts) if n % size]
    if wrong:
        raise UserError(f"ep must divide the {wrong[0]} experts, got ep={size}; try {divisors(wrong[0])}")
    pins = [Pin("parameter", pattern, place) for pattern, place in by_pattern(graph, found)]
    if micro_batch % size == 0:
        pins.append(Pin("input", "*", Shard(0)))
    return Preset(pins=tuple(pins), parameters=found)


def _multiplies_per_entry(ahead: Lookahead, parameter: int) -> bool:
    """Whether a batched product takes one matrix of this parameter per entry of another tensor."""
    stack = [parameter]
    while stack:
        value = stack.pop()
        for k in ahead.readers.get(value, ()):
            call, kernel = ahead.call(k), ahead.classes[ahead.class_of[k]]
            if kernel.view:
                stack += [ahead.outputs[k] + n for n in range(len(kernel.outputs))]
            elif family_of(call.target) == "bgemm" and len(call.inputs[ahead.inputs[k].index(value)]) == 3:
                return True
    return False


def context_parallel(graph: Graph, micro_batch: int, size: int) -> Preset:
    """Samples are split along their sequence; attention gathers keys and values.

    Raises UnsupportedError where attention cannot be cut along its queries.
    """
    ahead = _lookahead(graph, micro_batch)
    inputs = [s for s in graph.sources if s.kind == "input" and len(s.spec.dims) > 1]
    lengths = {s.spec.dims[1] for s in inputs if isinstance(s.spec.dims[1], int)}
    attention = [c for c in dict.fromkeys(ahead.calls) if family_of(c.target) == "attention" and len(c.outputs) == 2]
    if not inputs or len(lengths) != 1 or not attention:
        raise UnsupportedError(f"cp={size}: this model has no attention over one sequence of its inputs; use tp or dp")
    length = lengths.pop()
    assert isinstance(length, int)
    if length % size:
        raise UserError(f"cp must divide the sequence of {length}, got cp={size}; try {divisors(length)}")
    for call in attention:
        if not splits_following(call, size, 0, Shard(2)):
            known = ", ".join(str(s.strategy.inputs[0]) for s in splits_of(call, size)[1:]) or "R"
            raise UnsupportedError(
                f"cp={size}: attention over {list(call.inputs[0])} cannot be cut along its queries (a causal mask "
                f"counts their positions), only by {known}; use tp or sp"
            )
    return Preset(pins=(Pin("input", "*", Shard(1)),), parameters={})


# --- state at rest ---------------------------------------------------------------------------------------------------
def state_at_rest(
    graph: Graph, parameters: Mapping[str, Mapping[int, Placement]], zero: int, replicas: int
) -> tuple[tuple[str, StatePlacement], ...]:
    """Where state rests: `parameters` by axis, and what a ZeRO level (0 to 3, 3 is FSDP) divides among replicas.

    Replicas take the first dim that no other axis splits and that they divide, else the longest that gives each of
    them a part (chunks of one size, the last one smaller); a tensor without one is whole on every replica. Raises
    UserError where that is so of all.
    """
    if zero not in (0, 1, 2, 3):
        raise UserError(f"zero is 0, 1, 2 or 3, got {zero}")
    table: dict[int, StatePlacement] = {}
    for value, source in graph.parameters.items():
        own = tuple((axis, places[value]) for axis, places in parameters.items() if value in places)
        dims = {p.dim for _, p in own if isinstance(p, Shard)}
        shape = source.spec.shape(1)
        dim = _shared_dim(shape, dims, replicas)
        split = ((REPLICA_AXIS, Shard(dim)),) if dim is not None and zero else ()
        table[value] = StatePlacement(
            parameter=(*(split if zero > 2 else ()), *own),
            gradient=(*(split if zero > 1 else ()), *own),
            optimizer=(*split, *own),
        )
    if zero and replicas > 1 and not any(axis == REPLICA_AXIS for rest in table.values() for axis, _ in rest.optimizer):
        longest = max((n for source in graph.parameters.values() for n in source.spec.shape(1)), default=0)
        raise UserError(
            f"zero={zero} divides nothing: no parameter has a dim that {replicas} replicas could share (the longest is "
            f"{longest}); use fewer replicas or zero=0"
        )
    plain = StatePlacement()
    if plain in table.values():
        return by_pattern(graph, {value: rest for value, rest in table.items() if rest != plain})
    return by_pattern(graph, table, rest=Counter(table.values()).most_common(1)[0][0] if table else None)


def _shared_dim(shape: tuple[int, ...], taken: Collection[int], replicas: int) -> int | None:
    """The dim along which replicas share a tensor; None where there is none, or one replica."""
    free = [d for d in range(len(shape)) if d not in taken] if replicas > 1 else []
    even = [d for d in free if shape[d] % replicas == 0]
    uneven = [d for d in free if chunk(shape[d], replicas, replicas - 1)[1] > 0]
    return even[0] if even else max(uneven, key=lambda d: shape[d], default=None)
