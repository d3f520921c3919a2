"""A hand rule for plans in tests: say where parameters rest and how a few kernels work; the others follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpart.graph import Graph, Source, named
from simpart.kernels.ops import base_name
from simpart.placement import AxisStrategy, Halo, Partial, Placement, Replicate, Shard, Sharding, Strategy
from simpart.plan import kernel_ids

__all__ = ["Conversion", "conversions", "follow", "kernel_inputs", "kernel_sources", "sharding_of", "strategies_of"]

R, P = Replicate(), Partial()
MICRO_BATCH = 7  # a prime no other dim has: recognises the batch dim in merged ones
Shape = tuple[int, ...]
Wish = Callable[[str], AxisStrategy | str | None]
"""What the author wants of a kernel, by id: a strategy, the dim of a matrix product that is split, or nothing."""


def kernel_sources(graph: Graph) -> dict[int, Source]:
    """Sources by kernel-level value number."""
    found = dict(enumerate(graph.sources))
    for first, call in zip(graph.kernel_value_offsets.tolist(), graph.calls, strict=True):
        for i, source in enumerate(graph.templates[call.template].sources):
            found[first + i] = named(source, call.variables)
    return found


def kernel_inputs(graph: Graph) -> list[list[int]]:
    """Values that each kernel of `graph.flat` reads."""
    flat = graph.flat
    return [part.tolist() for part in np.split(flat.kernel_inputs, flat.kernel_indptr[1:-1])]


def running_order(graph: Graph) -> list[int]:
    """Kernels as they run: forward ones in order, then the backwards of the calls from the last to the first."""
    flat = graph.flat
    call = flat.op_call[flat.kernel_op]
    forward, backward = np.flatnonzero(flat.kernel_forward), np.flatnonzero(~flat.kernel_forward)
    return [*forward.tolist(), *backward[np.argsort(-call[backward], kind="stable")].tolist()]


def follow(graph: Graph, rest: Callable[[Source], Placement], wish: Wish) -> dict[str, AxisStrategy]:
    """A strategy of every kernel along one axis."""
    flat, ids, inputs = graph.flat, kernel_ids(graph), kernel_inputs(graph)
    place: dict[int, Placement] = {value: rest(source) for value, source in kernel_sources(graph).items()}
    found = {}
    for k in running_order(graph):
        name, values, first = ids[k], inputs[k], int(flat.kernel_outputs[k])
        kernel = graph.kernel_classes[flat.kernel_class[k]]
        shapes = [flat.kernel_value_spec[v].shape(MICRO_BATCH) for v in values]
        outputs = [spec.shape(MICRO_BATCH) for spec in kernel.outputs]
        wanted = wish(name)
        if isinstance(wanted, AxisStrategy):
            strategy = wanted
        else:
            having = [place[v] for v in values]
            strategy = _rule(base_name(kernel.target), json.loads(kernel.arguments), shapes, outputs, having, wanted)
        place.update({first + i: p for i, p in enumerate(strategy.outputs)})
        found[name] = strategy
    return found


def _rule(
    name: str, arguments: dict[str, Any], shapes: list[Shape], outputs: list[Shape], having: list[Placement],
    split: str | None,
) -> AxisStrategy:  # fmt: skip
    shard = next((p for p in having if isinstance(p, Shard)), None)
    if name in ("view", "_unsafe_view"):
        out = _viewed(having[0], shapes[0], outputs[0])
        return AxisStrategy((R if out is None else having[0],), (R if out is None else out,))
    if name == "t":
        out = Shard(1 - shard.dim) if shard else having[0]
        return AxisStrategy((having[0],), (out,))
    if name == "transpose":
        _, one, other = arguments["positional"]
        out = Shard({one: other, other: one}.get(shard.dim, shard.dim)) if shard else having[0]
        return AxisStrategy((having[0],), (out,))
    if name in ("mm", "addmm"):
        return _product(having, split)
    if name == "sum":
        inside = shard is not None and shard.dim in arguments["positional"][1]
        return AxisStrategy((shard or R,), (P if inside else shard or R,))
    if name == "mean":
        return AxisStrategy((shard or R,), (Partial("avg") if shard else R,))
    if name == "embedding":
        indices = having[1] if isinstance(having[1], Shard) else R
        return AxisStrategy((R, indices), (indices,))
    if name == "embedding_dense_backward":
        rows = having[0] if isinstance(having[0], Shard) and having[0].dim < len(shapes[1]) else R
        return AxisStrategy((rows, rows), (R if rows == R else P,))
    if name == "native_layer_norm_backward" and shard:
        return AxisStrategy((shard,) * 4 + (R, R), (shard, P, P))
    if name == "native_layer_norm" and shard:
        return AxisStrategy((shard, R, R), (shard,) * 3)
    if name == "_log_softmax":
        return AxisStrategy((shard or R,), (shard or R,))
    if name == "nll_loss_forward" and shard:  # each member picks the labels it holds
        return AxisStrategy((shard, R), (P, R))
    if name == "nll_loss_backward" and shard:
        return AxisStrategy((R, shard, R, R), (shard,))
    if shard is None:
        return AxisStrategy((R,) * len(having), (R,) * len(outputs))
    if all(shape == outputs[0] for shape in shapes) or name in ("split", "cat") or "attention" in name:
        return AxisStrategy((shard,) * len(having), (shard,) * len(outputs))
    raise AssertionError(f"no rule for {name} of {having}; wish a strategy")


def _product(having: list[Placement], split: str | None) -> AxisStrategy:
    """Matrix product of (m, k) by (k, n), after the bias if there is one."""
    a, b = having[-2:]
    if split is None:
        split = "k" if Shard(1) == a or Shard(0) == b else "m" if Shard(0) == a else "n" if Shard(1) == b else ""
    table: dict[str, tuple[Placement, Placement, Placement, Placement]] = {
        "m": (Shard(0), R, Shard(0), R),
        "n": (R, Shard(1), Shard(1), Shard(0)),
        "k": (Shard(1), Shard(0), P, P),  # the bias is added once: by one member
        "": (R, R, R, R),
    }
    rows, columns, out, bias = table[split]
    inputs = (rows, columns) if len(having) == 2 else (bias, rows, columns)
    return AxisStrategy(inputs, (out,))


def _viewed(placement: Placement, source: Shape, target: Shape) -> Placement | None:
    """Where a shard lies after a view; None when it is no plain shard there: the view needs the whole tensor."""
    if not isinstance(placement, Shard):
        return placement
    before = [int(np.prod(source[:d])) for d in range(len(source) + 1)]
    after = [int(np.prod(target[:d])) for d in range(len(target) + 1)]
    if before[placement.dim] not in after[:-1]:
        return None
    dim = max(d for d in range(len(target)) if after[d] == before[placement.dim])
    return Shard(dim)


# --- strategies in a plan --------------------------------------------------------------------------------------------
def sharding_of(graph: Graph, axes: Mapping[str, Mapping[str, AxisStrategy]]) -> Sharding:
    """Classes by their first instance, other instances where they differ; what replicates on every axis is left out."""
    ids, classes = kernel_ids(graph), graph.flat.kernel_class.tolist()
    first: dict[int, str] = {}
    shared: dict[str, Strategy] = {}
    overrides: dict[str, Strategy] = {}
    for name, cls in zip(ids, classes, strict=True):
        parts = [
            (axis, found[name]) for axis, found in axes.items() if {*found[name].inputs, *found[name].outputs} != {R}
        ]
        strategy = Strategy(tuple(parts))
        if cls not in first:
            first[cls] = name
            if parts:
                shared[name] = strategy
        elif strategy != shared.get(first[cls], Strategy(())):
            overrides[name] = strategy
    return Sharding(classes=tuple(shared.items()), overrides=tuple(overrides.items()))


def strategies_of(graph: Graph, sharding: Sharding) -> list[dict[str, AxisStrategy]]:
    """The strategy of every kernel of `graph.flat` per axis, as the plan says."""
    shared, overrides = dict(sharding.classes), dict(sharding.overrides)
    first: dict[int, str] = {}
    found = []
    for name, cls in zip(kernel_ids(graph), graph.flat.kernel_class.tolist(), strict=True):
        strategy = overrides.get(name) or shared.get(first.setdefault(cls, name)) or Strategy(())
        found.append(dict(strategy.axes))
    return found


@dataclass(frozen=True, slots=True)
class Conversion:
    """On one axis, a value whose reader wants another placement than its producer, a kernel or source, left."""

    producer: str
    consumer: str
    before: Placement
    after: Placement | Halo

    @property
    def collective(self) -> str | None:
        """None when no byte moves: a replica gives away its share, or counts as one term."""
        if isinstance(self.before, Replicate):
            return None
        if isinstance(self.before, Partial):
            return "all-reduce" if self.after == R else "reduce-scatter"
        return "all-gather" if self.after == R else "all-to-all"


def conversions(graph: Graph, sharding: Sharding, rest: Callable[[Source], Placement], axis: str) -> list[Conversion]:
    """All of one axis, one per value and target placement, by first reader; then gradients coming to rest as their
    parameters do."""
    flat, ids = graph.flat, kernel_ids(graph)
    sources = kernel_sources(graph)
    place: dict[int, tuple[str, Placement]] = {v: (f"{s.kind} {s.name}", rest(s)) for v, s in sources.items()}
    strategies, inputs = strategies_of(graph, sharding), kernel_inputs(graph)
    found: dict[tuple[int, Placement | Halo], Conversion] = {}
    for k in running_order(graph):
        name, strategy = ids[k], strategies[k].get(axis)
        first, count = int(flat.kernel_outputs[k]), len(graph.kernel_classes[flat.kernel_class[k]].outputs)
        for i, value in enumerate(inputs[k]):
            producer, before = place[value]
            after = strategy.inputs[i] if strategy else R
            if before != after:
                found.setdefault((value, after), Conversion(producer, name, before, after))
        place.update({first + i: (name, strategy.outputs[i] if strategy else R) for i in range(count)})
    for parameter, gradient in graph.gradients.items():
        producer, before = place[gradient]
        after = rest(graph.parameters[parameter])
        if before != after:
            found[gradient, after] = Conversion(producer, f"gradient {graph.parameters[parameter].name}", before, after)
    return list(found.values())
