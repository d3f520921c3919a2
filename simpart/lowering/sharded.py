"""Stages whose kernels or state are split: what one of their devices computes, sends and holds.

Everything follows from the stage's `sharding.Flow`: local signatures are priced like whole ones, conversions and the
exchanges inside kernels become collectives on the axis of the group they run on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from simpart.cost import Collective, ComputeModel, Signature, unique
from simpart.cost.pricing import Amount, sum_rows
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph, Phase, Source
from simpart.graph.sizes import DTYPE_BYTES
from simpart.hardware import Cluster, Device
from simpart.kernels import Mode
from simpart.kernels.split_backward import weight_share
from simpart.lowering.interning import Interner
from simpart.lowering.local_prices import LocalPrices
from simpart.lowering.transfers import sharing
from simpart.memory import StateBytes, state_table, storages_of
from simpart.placement.conversions import collective_of
from simpart.plan import REPLICA_AXIS, DeviceGroup, Plan
from simpart.problem import Problem
from simpart.sharding.flow import Conversion, Flow, flows
from simpart.sharding.mesh import Axes, Layout, Use, axis_members, local_signature, mesh_of, rest_layout
from simpart.tdl.local import local_shape
from simpart.training import TrainingSpec

__all__ = [
    "LocalParts",
    "Sent",
    "StageShare",
    "StageShares",
    "bucketed",
    "converted_by_kernel",
    "converted_bytes",
    "is_sharded",
    "kernel_value",
    "local_bytes",
    "local_elements",
    "local_parts",
    "local_share",
    "local_state",
    "only_at",
    "price_kernels",
    "sent_by",
    "split_axes",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Role = Literal["value", "boundary", "parameter", "gradient", "update", "exchange"]


class Sent(NamedTuple):
    """A collective that every device of a stage takes part in, `times` per micro-batch, or per step."""

    phase: Phase
    per_step: bool
    role: Role
    axis: str
    collective: Collective
    times: int


def price_kernels(
    graph: Graph, flow: Flow, compute: ComputeModel, device: Device, mode: Mode, kernels: Iterable[int] | None = None
) -> tuple[Amount, Amount]:
    """Forward and backward of one micro-batch on one device, one row each; of these kernels of `graph.flat` only, if
    given."""
    flat = graph.flat
    whole = signatures_of(graph, flow.micro_batch, mode)
    counts: Counter[tuple[int, int]] = Counter()
    uses: dict[int, Use] = {}
    chosen = flow.uses if kernels is None else {k: flow.uses[k] for k in kernels if k in flow.uses}
    for kernel, use in chosen.items():
        uses[id(use)] = use
        counts[int(flat.kernel_class[kernel]), id(use)] += 1
    rows: list[Signature] = [local_signature(whole[cls], uses[use]) for cls, use in counts]
    table, index = unique(rows)
    estimate = compute.estimate(table, device)
    times = np.array(list(counts.values()), dtype=np.float64)
    forward = np.array([graph.kernel_classes[cls].phase == "F" for cls, _ in counts], dtype=bool)
    amounts = sum_rows(estimate, index, np.arange(len(rows)), len(rows))
    return amounts.total(np.where(forward, times, 0.0)), amounts.total(np.where(forward, 0.0, times))


def sent_by(flow: Flow, group: DeviceGroup, cluster: Cluster) -> list[Sent]:
    """All collectives of a stage on its group, equal ones together."""
    members = {name: axis_members(group, name) for name, _ in flow.axes}
    shared = {name: max(sharing(cluster, rows)) for name, rows in members.items()}
    found: Counter[tuple[Phase, bool, Role, str, Collective]] = Counter()
    for conversion in flow.conversions:
        for step in conversion.steps:
            name = flow.axes[step.axis][0]
            collective = collective_of(step, members[name][0], shared[name], conversion.dtype)
            if collective is not None:
                found[conversion.phase, conversion.per_step, conversion.role, name, collective] += conversion.times
    for exchange in flow.exchanges:
        name = flow.axes[exchange.axis][0]
        collective = Collective("all_reduce", exchange.bytes, members[name][0], shared[name])
        found[exchange.phase, False, "exchange", name, collective] += len(exchange.kernels)
    return [Sent(*key, times) for key, times in found.items()]


def bucketed(sent: Iterable[Sent], role: Role, bucket_bytes: int) -> list[tuple[Collective, int]]:
    """Collectives of one role that happen once per step, those of one kind and group merged into buckets."""
    total: Counter[Collective] = Counter()
    for x in sent:
        if x.per_step and x.role == role:
            total[replace(x.collective, bytes=0)] += x.times * x.collective.bytes
    found = []
    for kind, size in total.items():
        full, rest = divmod(size, bucket_bytes)
        found += [(replace(kind, bytes=b), n) for b, n in ((bucket_bytes, full), (rest, 1)) if b and n]
    return found


def local_elements(shape: tuple[int, ...], layout: Layout, axes: Axes) -> int:
    """Elements that the first device holds."""
    for place, (_, size) in zip(layout, axes, strict=True):
        shape = local_shape(shape, place, size)
    return prod(shape)


def local_bytes(graph: Graph, flow: Flow) -> Ints:
    """Bytes that one device holds of each kernel-level value; whole where the flow does not know it."""
    specs, axes = graph.flat.kernel_value_spec, flow.axes
    sizes: Ints = storages_of(graph, flow.micro_batch).bytes.copy()
    known: dict[tuple[int, int], int] = {}
    for value, layout in flow.layouts.items():
        spec = specs[value]
        key = (id(spec), id(layout))
        size = known.get(key)
        if size is None:
            shape = spec.shape(flow.micro_batch)
            size = known[key] = local_elements(shape, layout, axes) * DTYPE_BYTES[spec.dtype]
        sizes[value] = size
    return sizes


def converted_bytes(flow: Flow) -> tuple[int, int]:
    """(bytes of converted values that backward reads again, largest one) of one micro-batch on one device."""
    kept, largest = converted_by_kernel(flow)
    return sum(kept.values()), largest


def converted_by_kernel(flow: Flow) -> tuple[Counter[int], int]:
    """The same, the bytes kept by the kernel before which they are converted.

    A value that forward and backward read in the same other layout is converted once and kept; the rest lives while
    its kernel runs.
    """
    kept: Counter[int] = Counter()
    largest = 0
    late = _read_late(flow)
    for conversion in flow.conversions:
        if conversion.role not in ("value", "parameter") or conversion.per_step:
            continue
        size = _converted(flow, conversion)
        largest = max(largest, size)
        if conversion.phase == "F" and conversion.role == "value":
            for value, kernel in zip(conversion.values, conversion.kernels, strict=True):
                if value in late:
                    kept[kernel] += size
    return kept, largest


def _converted(flow: Flow, conversion: Conversion) -> int:
    return local_elements(conversion.shape, conversion.after, flow.axes) * DTYPE_BYTES[conversion.dtype]


def _read_late(flow: Flow) -> set[int]:
    """Kernel-level values that backward kernels of the flow read."""
    flat = flow.graph.flat
    found: set[int] = set()
    for kernel in flow.uses:
        if not flat.kernel_forward[kernel]:
            found.update(flat.kernel_inputs[flat.kernel_indptr[kernel] : flat.kernel_indptr[kernel + 1]].tolist())
    return found


# --- stages of a plan -------------------------------------------------------------------------------------------------
def is_sharded(plan: Plan) -> bool:
    """Whether devices of a group do different things, or keep different state."""
    return bool(plan.shardings or plan.state or any(n > 1 for g in plan.groups for _, n in g.sharding_axes))


def split_axes(plan: Plan, group: DeviceGroup) -> tuple[tuple[str, int], ...]:
    """Axes that decide what a device does: of how many replicas there are, only whether there are several, unless state
    is split among them."""
    if REPLICA_AXIS in _state_axes(plan):
        return group.axes
    return tuple((name, min(size, 2) if name == REPLICA_AXIS else size) for name, size in group.axes)


def _state_axes(plan: Plan) -> set[str]:
    """Axes on which some state rests in shards."""
    rests = [rest for _, rest in plan.state]
    return {name for r in rests for places in (r.parameter, r.gradient, r.optimizer) for name, _ in places}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """One device's share of a stage at one micro-batch size. `inputs` and `weights` are the two parts of a split
    backward; `again` is the forward of recomputed regions, of which `sent_again` holds the collectives."""

    flow: Flow
    forward: Amount
    backward: Amount
    inputs: Amount
    weights: Amount
    again: Amount | None
    sent: tuple[Sent, ...]
    sent_again: tuple[Sent, ...]
    value_bytes: Ints  # of kernel-level values, as they lie
    kept_bytes: int
    largest_bytes: int


@dataclass(slots=True)
class StageShares:
    """Shares of the stages of one problem's plans; equal stages are analysed once."""

    problem: Problem
    prices: LocalPrices = field(init=False)
    numbers: Interner = field(default_factory=Interner)
    known: dict[tuple[Any, ...], StageShare] = field(default_factory=dict)
    flows: dict[tuple[Any, ...], Flow] = field(default_factory=dict)
    sizes: dict[int, tuple[Flow, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prices = LocalPrices(self.problem.costs.compute, self.problem.mode)

    def of(
        self, plan: Plan, graph: Graph, s: int, micro_batch: int, device: Device, regions: Sequence[Ints]
    ) -> StageShare:
        """The share of stage s on a replica of this micro-batch and kind of device."""
        stage, number = plan.stages[s], self.numbers.of
        shapes = (number(plan.stages), number(tuple(group.axes for group in plan.groups)))
        split = (number(plan.shardings), number(plan.state))
        group = plan.groups[stage.group]
        key = (graph.fingerprint, *shapes, *split, number(group), s, micro_batch, device.name)
        if key not in self.known:
            # Regions that are run again change what a stage costs, not how its values lie.
            axes = [split_axes(plan, group) for group in plan.groups]
            bare = tuple((axes[x.group], x.ops, x.sharding) for x in plan.stages)
            flow_key = (graph.fingerprint, number(bare), *split, micro_batch, s)
            if flow_key not in self.flows:
                if len(self.flows) >= KEPT_FLOWS:
                    self.flows.clear()
                    self.sizes.clear()
                (self.flows[flow_key],) = flows(plan, graph, [micro_batch] * len(plan.stages), [s])
            self.known[key] = self._share(self.flows[flow_key], group, device, graph, regions)
        return self.known[key]

    def _share(
        self, found: Flow, group: DeviceGroup, device: Device, graph: Graph, regions: Sequence[Ints]
    ) -> StageShare:
        cluster, forward = self.problem.cluster, graph.flat.kernel_forward
        prices = self.prices.of(graph, found, device)
        there = forward[prices.kernels].astype(np.float64)
        share = (1.0 - there) * weight_share(graph)[prices.kernels]
        again: Amount | None = None
        sent_again: tuple[Sent, ...] = ()
        if regions:
            inside = np.isin(graph.flat.kernel_op, np.concatenate(regions)) & forward
            again = prices.total(inside[prices.kernels].astype(np.float64))
            sent_again = tuple(sent_by(only_at(found, inside), group, cluster))
        kept, largest = converted_bytes(found)
        if id(found) not in self.sizes:
            self.sizes[id(found)] = (found, local_bytes(graph, found))
        return StageShare(
            flow=found, forward=prices.total(there), backward=prices.total(1.0 - there),
            inputs=prices.total(1.0 - there - share), weights=prices.total(share), again=again,
            sent=tuple(sent_by(found, group, cluster)), sent_again=sent_again, value_bytes=self.sizes[id(found)][1],
            kept_bytes=kept, largest_bytes=largest,
        )  # fmt: skip


KEPT_FLOWS = 1024
"""Flows of stages kept at once; that of a hundred layers takes some megabytes."""


def only_at(found: Flow, inside: npt.NDArray[np.bool_]) -> Flow:
    """The part of a flow that happens at these kernels, per micro-batch and in forward."""
    conversions = []
    for conversion in found.conversions:
        rows = [i for i, kernel in enumerate(conversion.kernels) if kernel >= 0 and inside[kernel]]
        if rows and conversion.phase == "F" and not conversion.per_step:
            values, kernels = conversion.values, conversion.kernels
            conversions.append(
                replace(conversion, values=tuple(values[i] for i in rows), kernels=tuple(kernels[i] for i in rows))
            )
    exchanges = [
        replace(e, kernels=kernels) for e in found.exchanges if (kernels := tuple(k for k in e.kernels if inside[k]))
    ]
    return replace(found, conversions=tuple(conversions), exchanges=tuple(exchanges))


def local_share(
    plan: Plan, group: DeviceGroup, source: Source, what: Literal["parameter", "gradient", "optimizer"]
) -> float:
    """Part of a parameter, its gradient or its optimizer state that one device of the group keeps between uses."""
    axes = mesh_of(group.axes)
    layout = rest_layout(getattr(plan.state_of(source)[1], what), axes)
    shape = source.spec.shape(1)
    return local_elements(shape, layout, axes) / max(1, prod(shape))


class LocalParts(NamedTuple):
    """By op-level value number, the part of a parameter, of its gradient and of its optimizer state that one device
    keeps between uses: 1 where nothing divides it."""

    parameter: Floats
    gradient: Floats
    optimizer: Floats


_parts: WeakKeyDictionary[Graph, dict[tuple[Any, ...], LocalParts]] = WeakKeyDictionary()


def local_parts(graph: Graph, plan: Plan, group: DeviceGroup) -> LocalParts:
    """What a device of the group keeps of every parameter; worked out once per placement of state and mesh."""
    named = _state_axes(plan)
    axes = mesh_of([axis for axis in group.axes if axis[0] in named])
    known = _parts.setdefault(graph, {})
    key = (plan.state, axes)
    if key not in known:
        if len(known) >= KEPT_FLOWS:
            known.clear()
        table = np.ones((3, len(graph.flat.value_op)))
        for value, source in graph.parameters.items() if plan.state else ():
            rest, shape = plan.state_of(source)[1], source.spec.shape(1)
            for row, places in enumerate((rest.parameter, rest.gradient, rest.optimizer)):
                if places:
                    table[row, value] = local_elements(shape, rest_layout(places, axes), axes) / max(1, prod(shape))
        known[key] = LocalParts(*table)
    return known[key]


def local_state(graph: Graph, training: TrainingSpec, plan: Plan, group: DeviceGroup, values: Ints) -> StateBytes:
    """Bytes of state that one device of the group keeps, see `memory.state_of`."""
    parts = local_parts(graph, plan, group)
    whole = state_table(graph, training)[:, values]
    parameters, gradients, optimizer = (
        int((row * part[values]).sum()) for row, part in zip(whole[:3], parts, strict=True)
    )
    elements = whole[3] * parts.optimizer[values]
    return StateBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=optimizer,
        largest_elements=int(elements.max(initial=0)),
        elements=int(elements.sum()),
    )


def kernel_value(graph: Graph, value: int) -> int:
    """The kernel-level value that an op-level one ends up as: the output of its op's last forward kernel."""
    flat = graph.flat
    op = int(flat.value_op[value])
    if op < 0:
        return value
    mine = np.flatnonzero((flat.kernel_op == op) & flat.kernel_forward)
    if mine.size == 0:
        return kernel_value(graph, int(flat.op_inputs[flat.op_indptr[op]]))
    last = int(mine[-1])
    outputs = len(graph.kernel_classes[flat.kernel_class[last]].outputs)
    return int(flat.kernel_outputs[last]) + min(value - int(flat.op_outputs[op]), outputs - 1)
