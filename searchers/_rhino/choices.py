"""Strategies of every kernel class on a mesh, with what each takes: the options of Rhino's cost graph.

Along one axis these are the splits that descriptions derive, and strided ones that other kernels ask for: the closure
over the links between classes. Along several, each axis divides what the axes before it left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from weakref import WeakKeyDictionary

import numpy as np

from simpart.cost import Collective, Costs, Signature, SignatureTable, TensorForm
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES
from simpart.hardware import Cluster
from simpart.lowering.transfers import CommPrices, sharing
from simpart.placement import AxisStrategy, Halo, Placement, Replicate, Shard, Strategy
from simpart.plan import DeviceGroup
from simpart.searchers._cost_graph import Floats
from simpart.searchers._rhino.settings import slowest_row
from simpart.searchers._rhino.wires import Wires, wires_of
from simpart.sharding.mesh import Axes, Layout, axis_members, calls_of
from simpart.tdl import Call, Split, splits_following, splits_of
from simpart.tdl.local import local_shape

__all__ = ["Choices", "along_axis", "choices"]

MOST_ALONG_AN_AXIS = 14
"""Splits of a kernel along one axis; strided ones beyond are left out."""
R = Replicate()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """The options of one kernel class: a layout per input and output, and seconds of one device. Replicating first."""

    splits: tuple[tuple[AxisStrategy, ...], ...]
    inputs: tuple[tuple[Layout, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]
    compute_s: Floats
    exchange_s: Floats

    def strategy(self, option: int, axes: Axes) -> Strategy | None:
        """What a plan says of it; None where it replicates."""
        named = tuple(
            (name, split)
            for (name, _), split in zip(axes, self.splits[option], strict=True)
            if any(not isinstance(p, Replicate) for p in (*split.inputs, *split.outputs))
        )
        return Strategy(named) if named else None


_along: WeakKeyDictionary[Graph, dict[tuple[int, int], list[tuple[Split, ...]]]] = WeakKeyDictionary()


def along_axis(graph: Graph, micro_batch: int, members: int) -> list[tuple[Split, ...]]:
    """Splits of every kernel class along one axis, closed under what neighbours ask for; kept per graph."""
    known = _along.setdefault(graph, {})
    key = (micro_batch, members)
    if key not in known:
        known[key] = _closed(calls_of(graph, micro_batch), wires_of(graph), members)
    return known[key]


def _closed(calls: Sequence[Call], wires: Wires, members: int) -> list[tuple[Split, ...]]:
    found = [dict.fromkeys(splits_of(call, members)) for call in calls]
    waiting = list(wires.links)
    for _ in range(12):
        grown: set[int] = set()
        for maker, output, reader, position in waiting:
            left = {s.strategy.outputs[output] for s in found[maker]}
            needed = {s.strategy.inputs[position] for s in found[reader]}
            for cls, number, places, out in (
                (reader, position, left - needed, False),
                (maker, output, needed - left, True),
            ):
                for place in sorted((p for p in places if isinstance(p, Shard) and p.block is not None), key=str):
                    if len(found[cls]) >= MOST_ALONG_AN_AXIS:
                        continue
                    fresh = splits_following(calls[cls], members, number, place, output=out)
                    if any(s not in found[cls] for s in fresh):
                        found[cls].update(dict.fromkeys(fresh))
                        grown.add(cls)
        if not grown:
            break
        waiting = [link for link in wires.links if link[0] in grown or link[2] in grown]
    return [tuple(splits) for splits in found]


def choices(
    graph: Graph,
    micro_batch: int,
    group: DeviceGroup,
    axes: Axes,
    cluster: Cluster,
    costs: Costs,
    communication: CommPrices,
    allowed: Mapping[tuple[int, str], Mapping[tuple[str, int], Placement]],
) -> list[Choices]:
    """All options of all kernel classes along the sharding axes; `allowed` keeps, per (class, axis), those whose
    tensor `("input" or "output", number)` lies as given (pins)."""
    calls = calls_of(graph, micro_batch)
    signatures = signatures_of(graph, micro_batch)
    members = {name: axis_members(group, name) for name, _ in axes}
    slowest = {name: slowest_row(cluster, rows) for name, rows in members.items()}
    shared = {name: max(sharing(cluster, rows)) for name, rows in members.items()}
    lists = [along_axis(graph, micro_batch, size) for _, size in axes]
    rows: dict[Signature, int] = {}
    talks: dict[Collective, int] = {}
    drafts = []
    made: dict[object, tuple[list[tuple[Split, ...]], list[int], list[tuple[int, int]]]] = {}
    for cls, (call, signature) in enumerate(zip(calls, signatures, strict=True)):
        per_axis = []
        for (name, _), found in zip(axes, lists, strict=True):
            wanted = allowed.get((cls, name), {})
            per_axis.append(tuple(s for s in found[cls] if _lies(s, wanted)))
        key = (call, signature, tuple(per_axis))
        if key not in made:
            combined: list[tuple[Split, ...]] = []
            priced: list[int] = []
            inside: list[tuple[int, int]] = []
            for splits in product(*per_axis):
                local = _localised(call, splits, axes)
                if local is None:
                    continue
                form = _local_signature(signature, *local)
                priced.append(rows.setdefault(form, len(rows)))
                for number, (split, (name, _)) in enumerate(zip(splits, axes, strict=True)):
                    for exchange in split.exchanges:
                        outer = [(s, n) for s, (_, n) in zip(splits[:number], axes, strict=False) if _divides(s)]
                        elements = exchange.elements // int(np.prod([n for _, n in outer], initial=1))
                        itemsize = next((DTYPE_BYTES[d] for d in call.dtypes if d.startswith(("float", "bfl"))), 4)
                        talk = Collective("all_reduce", elements * itemsize, slowest[name], shared[name])
                        inside.append((len(combined), talks.setdefault(talk, len(talks))))
                combined.append(splits)
            made[key] = (combined, priced, inside)
        drafts.append(made[key])
    device = cluster.device(next(iter(group.devices)))
    seconds = costs.compute.estimate(SignatureTable(tuple(rows)), device).mean_s
    times = np.array([p.seconds for p in communication.of(talks)])
    finished: dict[int, Choices] = {}
    result = []
    for call, draft in zip(calls, drafts, strict=True):
        if id(draft) not in finished:
            combined, priced, inside = draft
            exchange_s = np.zeros(len(combined))
            for option, talk_number in inside:
                exchange_s[option] += times[talk_number]
            strategies = tuple(tuple(s.strategy for s in splits) for splits in combined)
            finished[id(draft)] = Choices(
                splits=strategies,
                inputs=tuple(_layouts(chosen, "inputs", len(call.inputs)) for chosen in strategies),
                outputs=tuple(_layouts(chosen, "outputs", len(call.outputs)) for chosen in strategies),
                compute_s=seconds[np.array(priced, dtype=np.int64)] if priced else np.zeros(0),
                exchange_s=exchange_s,
            )
        result.append(finished[id(draft)])
    return result


def _layouts(chosen: Sequence[AxisStrategy], side: str, count: int) -> tuple[Layout, ...]:
    return tuple(tuple(getattr(split, side)[k] for split in chosen) for k in range(count))


def _lies(split: Split, wanted: Mapping[tuple[str, int], Placement]) -> bool:
    places = {"input": split.strategy.inputs, "output": split.strategy.outputs}
    return all(places[side][number] == place for (side, number), place in wanted.items())


def _divides(split: Split) -> bool:
    return any(isinstance(p, Shard | Halo) for p in (*split.strategy.inputs, *split.strategy.outputs))


def _localised(
    call: Call, splits: Sequence[Split], axes: Axes
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] | None:
    """Local shapes of inputs and outputs; None where an axis does not divide what the axes before it left."""
    shapes = [list(call.inputs), list(call.outputs)]
    for split, (_, size) in zip(splits, axes, strict=True):
        for side, places in zip(shapes, (split.strategy.inputs, split.strategy.outputs), strict=True):
            for k, place in enumerate(places):
                shard = place.shard if isinstance(place, Halo) else place
                if isinstance(shard, Shard):
                    span = shard.block or side[k][shard.dim]
                    if span % size or side[k][shard.dim] % span:
                        return None
                    side[k] = local_shape(side[k], place, size)
    return tuple(shapes[0]), tuple(shapes[1])


def _local_signature(
    signature: Signature, inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]
) -> Signature:
    def forms(old: tuple[TensorForm, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[TensorForm, ...]:
        return tuple(TensorForm(s, f.dtype, f.order, f.strides) for f, s in zip(old, shapes, strict=True))

    return Signature(
        signature.target,
        forms(signature.inputs, inputs),
        forms(signature.outputs, outputs),
        signature.arguments,
        signature.mode,
        signature.view,
    )
