"""From a plan to a Program, coarse grain: a task per stage, micro-batch and phase, transfers on links, gradient collectives, updates.

What is assumed, beyond the plan: a group takes as long as its slowest replica; a transfer between stages is one message per
value and pair of replicas that share samples, sent one after the other; gradients are reduced once per step, when a group's last backward
is done; a parameter held by several groups is reduced over all their devices at once; recomputing a region runs its forward again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from simpart.engines.compiled import peaks
from simpart.errors import MismatchError, UnsupportedError
from simpart.flops import model_flops
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.ledger import ANALYTIC, Ledger, Priced
from simpart.memory import (
    ALLOCATOR_FACTOR,
    StageActivations,
    StateBytes,
    activations_of,
    state_of,
    state_values,
    update_transient_bytes,
)
from simpart.partition import Partition, check_plan, partition_of
from simpart.plan import Plan
from simpart.pricing import Amount
from simpart.problem import Problem
from simpart.program import MEMORY_KINDS, Durations, MemoryDeltas, Program, StepFacts, Topology
from simpart.topology import Reduction, Shape, StageEdge, class_of_action, class_of_send, topology_of
from simpart.transfers import CommPrices, all_reduces, messages, slowest_device

__all__ = ["lower"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
ACTIVATIONS, INPUTS, TRANSIENTS, BUFFERS = map(
    MEMORY_KINDS.index, ("activations", "stage inputs", "transients", "communication buffers")
)

BUCKET_BYTES = 25 << 20
"""Gradients are flattened into buckets of this size for their all-reduce: the default of torch's DistributedDataParallel."""


def lower(problem: Problem, plan: Plan, grain: Literal["coarse"] = "coarse") -> Program:
    """The plan as tasks with durations and memory. Raises UnsupportedError for what is not lowered yet, UserError for a plan that does
    not fit its problem."""
    if grain != "coarse":
        raise UnsupportedError(f"grain {grain!r} is not lowered in this version; use coarse")
    _refuse_unsupported(problem, plan)
    known = _kept.setdefault(problem, _Kept(CommPrices(problem.costs.communication, problem.cluster)))
    layout = _layout(known, problem, plan)
    shape = _shape(problem, plan, layout)
    topology = topology_of(shape)
    variants = _variants(problem, plan)
    ledger = Ledger(len(topology.class_names))
    _price_actions(known, problem, plan, layout, variants, ledger)
    _price_transfers(known, plan, layout, shape, ledger)
    _price_reductions(known, problem, plan, layout, shape, ledger)
    _price_updates(problem, plan, layout, shape, ledger)
    memory, devices = _memory(known, problem, plan, layout, topology, shape, variants)
    return Program(
        topology=topology,
        durations=Durations(task_s=ledger.total, lag_s=np.zeros(1)),
        memory=memory,
        multiplicity=tuple(group.replicas for group in plan.groups),
        spread=ledger.spread(),
        facts=_facts(known, problem, plan, shape, devices),
    )


def _refuse_unsupported(problem: Problem, plan: Plan) -> None:
    axes = [name for group in plan.groups for name, size in group.sharding_axes if size > 1]
    if axes:
        raise UnsupportedError(
            f"mesh axis {axes[0]!r} splits kernels, which is not lowered yet; use pipeline stages and dp"
        )
    if plan.state:
        raise UnsupportedError(
            "sharded parameters, gradients or optimizer state are not lowered yet; leave the plan's state empty"
        )
    if plan.shardings:
        raise UnsupportedError("kernel strategies are not lowered yet; leave the plan's shardings empty")
    if plan.mode != "eager":
        raise UnsupportedError(f"mode {plan.mode!r} is not lowered yet; use eager")
    if plan.mode != problem.mode:
        raise MismatchError(f"the plan runs {plan.mode}, the problem is priced {problem.mode}; make them equal")
    if plan.global_batch != problem.global_batch:
        raise MismatchError(
            f"the plan's global batch is {plan.global_batch}, the problem's {problem.global_batch}; make them equal"
        )
    last = max(device for group in plan.groups for device in group.devices)
    if last >= problem.cluster.size:
        raise MismatchError(f"the plan uses device {last}, cluster {problem.cluster.name} has {problem.cluster.size}")


# --- what a plan's stages are, apart from the batch -------------------------------------------------------------------
@dataclass(slots=True)
class _Kept:
    """What plans of one problem share."""

    communication: CommPrices
    layouts: dict[tuple[Any, ...], _Layout] = field(default_factory=dict)
    stages: dict[tuple[Any, ...], tuple[Ints, tuple[Ints, ...]]] = field(default_factory=dict)
    activations: dict[tuple[Any, ...], StageActivations] = field(default_factory=dict)
    flops: dict[int, int] = field(default_factory=dict)


_kept: WeakKeyDictionary[Problem, _Kept] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Layout:
    """A plan's stages on its graph, and what moves between them. `loads[e]` are the values of edge e and whether a gradient
    returns; `inputs[s]` the graph inputs of stage s; `held[g]` the parameters and buffers on group g; `own[s]` the trained parameters that
    stage s reduces within its group; `tied` those that several groups share."""

    graph: Graph
    partition: Partition
    edges: tuple[StageEdge, ...]
    loads: tuple[tuple[tuple[int, bool], ...], ...]
    inputs: tuple[Ints, ...]
    held: tuple[Ints, ...]
    own: tuple[Ints, ...]
    tied: tuple[tuple[tuple[int, ...], Ints], ...]
    states: tuple[StateBytes, ...]


class _Variant(NamedTuple):
    """Replicas of a group that are alike: samples of a micro-batch, on a device."""

    micro_batch: int
    device: Device


def _layout(known: _Kept, problem: Problem, plan: Plan) -> _Layout:
    key = (plan.graph, plan.stages, plan.skips)
    if key in known.layouts:
        return known.layouts[key]
    graph = problem.graph
    if plan.graph != graph.fingerprint and graph.at_one is not None and plan.graph == graph.at_one.fingerprint:
        graph = graph.at_one
        largest = max(size for sizes in plan.batch.sizes for size in sizes)
        if largest > 1:
            raise MismatchError(
                f"the plan belongs to the graph of micro-batch 1 but has replicas of {largest}; use the general graph"
            )
    partition = check_plan(plan, graph)
    edges, loads = _edges(partition, plan)
    values = [state_values(graph, ops) for ops in partition.ops]
    of_group = [[s for s, stage in enumerate(plan.stages) if stage.group == g] for g in range(len(plan.groups))]
    held = tuple(np.unique(np.concatenate([values[s] for s in stages])) for stages in of_group)
    trained = {v for v, s in graph.parameters.items() if s.trainable and problem.training.trains(s.name)}
    tied: dict[tuple[int, ...], list[int]] = {}
    reduced: set[int] = set()
    for value, stages in partition.shared.items():
        members = tuple(sorted({plan.stages[s].group for s in stages}))
        if len(members) > 1 and value in trained:
            tied.setdefault(members, []).append(value)
            reduced.add(value)
    own = []
    for found in partition.parameters:
        mine = [v for v in found.tolist() if v in trained and v not in reduced]
        reduced.update(mine)
        own.append(np.array(mine, dtype=np.int64))
    inputs = {value for value, source in graph.all_sources() if source.kind == "input"}
    reads = [np.unique(_inputs_of(graph, ops)).tolist() for ops in partition.ops]
    known.layouts[key] = _Layout(
        graph=graph,
        partition=partition,
        edges=edges,
        loads=loads,
        inputs=tuple(np.array([v for v in found if v in inputs], dtype=np.int64) for found in reads),
        held=held,
        own=tuple(own),
        tied=tuple((members, np.array(found, dtype=np.int64)) for members, found in sorted(tied.items())),
        states=tuple(state_of(graph, problem.training, values.tolist()) for values in held),
    )
    return known.layouts[key]


def _inputs_of(graph: Graph, ops: Ints) -> Ints:
    flat = graph.flat
    member = np.zeros(len(flat.op_class), dtype=bool)
    member[ops] = True
    return flat.op_inputs[np.repeat(member, np.diff(flat.op_indptr))]


def _edges(partition: Partition, plan: Plan) -> tuple[tuple[StageEdge, ...], tuple[tuple[tuple[int, bool], ...], ...]]:
    """Stage pairs that exchange values and what each carries, sent directly or relayed from stage to stage."""
    loads: dict[tuple[int, int], dict[int, bool]] = {}
    for crossing in partition.crossings:
        if plan.skips == "relay":
            hops = [(s, s + 1) for s in range(crossing.source, crossing.destinations[-1])]
        else:
            hops = [(crossing.source, d) for d in crossing.destinations]
        for hop in hops:
            loads.setdefault(hop, {})[crossing.value] = crossing.carries_gradient
    pairs = sorted(loads)
    edges = tuple(StageEdge(a, b, any(loads[a, b].values())) for a, b in pairs)
    return edges, tuple(tuple(sorted(loads[pair].items())) for pair in pairs)


def _shape(problem: Problem, plan: Plan, layout: _Layout) -> Shape:
    reductions = [
        Reduction(f"gradient all-reduce of stage {s}", "dp", s, (stage.group,))
        for s, stage in enumerate(plan.stages)
        if plan.groups[stage.group].replicas > 1 and layout.own[s].size
    ]
    reductions += [
        Reduction(f"gradient all-reduce among groups {', '.join(map(str, members))}", "tied", -1, members)
        for members, _ in layout.tied
    ]
    if problem.training.gradient_clip_norm is not None and len(plan.groups) > 1:
        reductions.append(Reduction("gradient norm", "norm", -1, tuple(range(len(plan.groups)))))
    groups = plan.group_of_stage
    return Shape(groups, plan.schedule, plan.batch.micro_batches, layout.edges, "tasks", tuple(reductions), True)


def _variants(problem: Problem, plan: Plan) -> list[list[_Variant]]:
    """Per group the distinct kinds of replica."""
    found = []
    for group, sizes in zip(plan.groups, plan.batch.sizes, strict=True):
        devices = [problem.cluster.device(d) for d in group.devices]
        found.append(list(dict.fromkeys(map(_Variant, sizes, devices))))
    return found


def _stage_ops(
    known: _Kept, problem: Problem, plan: Plan, layout: _Layout, s: int, b: int
) -> tuple[Graph, Ints, tuple[Ints, ...]]:
    """Ops of stage s and its recomputed regions, in the structure that runs at micro-batch b (1 may have its own)."""
    graph = layout.graph if layout.graph is problem.graph.at_one else problem.graph.at(b)
    key = (graph.fingerprint, plan.stages, s)
    if key not in known.stages:
        partition = layout.partition if graph is layout.graph else partition_of(graph, plan)
        regions = tuple(region.indices(graph) for region in plan.stages[s].recompute)
        known.stages[key] = (partition.ops[s], regions)
    return graph, *known.stages[key]


# --- seconds ------------------------------------------------------------------------------------------------------------
def _price_actions(
    known: _Kept, problem: Problem, plan: Plan, layout: _Layout, variants: list[list[_Variant]], ledger: Ledger
) -> None:
    """Forward and backward of every stage: of the replica that takes longest. A split backward is half I, half W."""
    again = (
        plan.batch.micro_batches - 1
    ) / plan.batch.micro_batches  # the first micro-batch's gradients need no addition
    for device in dict.fromkeys(v.device for group in variants for v in group):
        problem.prices(sorted({v.micro_batch for group in variants for v in group if v.device == device}), device)
    for s, stage in enumerate(plan.stages):
        slowest: dict[str, tuple[float, list[Amount], Device]] = {}
        for b, device in variants[stage.group]:
            graph, ops, regions = _stage_ops(known, problem, plan, layout, s, b)
            price = problem.prices([b], device)[b]
            forward = [price.forward.total(_counts(graph, ops))]
            backward = [price.backward.total(_counts(graph, ops))]
            if regions:
                repeated = sum(_counts(graph, region) for region in regions)
                backward.append(price.forward.total(np.asarray(repeated)))
            rows, _, accumulate = problem.update_prices(device)
            weights = np.zeros(accumulate.seconds.size)
            for value in layout.partition.parameters[s].tolist():
                if value in rows:
                    weights[rows[value]] += again
            backward.append(accumulate.total(weights))
            for kind, amounts in (("F", forward), ("B", backward)):
                seconds = sum(float(a.seconds[0]) for a in amounts)
                if kind not in slowest or seconds > slowest[kind][0]:
                    slowest[kind] = (seconds, amounts, device)
        for kind, share, source in (("F", 1.0, "F"), ("B", 1.0, "B"), ("I", 0.5, "B"), ("W", 0.5, "B")):
            row = class_of_action(s, kind)
            _, amounts, device = slowest[source]
            for amount in amounts:
                ledger.add_amount(row, amount if share == 1.0 else amount.total(np.array([share])), device.name)
            ledger.errs_with(row, f"{device.name} {source}")
            ledger.add_fixed(row, problem.costs.action_overhead_s)


def _counts(graph: Graph, ops: Ints) -> Floats:
    return np.bincount(graph.flat.op_class[ops], minlength=len(graph.op_classes)).astype(np.float64)


def _price_transfers(known: _Kept, plan: Plan, layout: _Layout, shape: Shape, ledger: Ledger) -> None:
    for e, (edge, load) in enumerate(zip(layout.edges, layout.loads, strict=True)):
        source, target = plan.stages[edge.source].group, plan.stages[edge.target].group
        if source == target:
            continue
        ends = [(plan.batch.sizes[g], tuple(plan.groups[g].devices)) for g in (source, target)]
        for back in (False, True) if edge.backward else (False,):
            here, there = reversed(ends) if back else ends
            found = messages(*here, *there)
            values = [value for value, gradient in load if gradient or not back]
            row = class_of_send(shape, e, back)
            for priced in slowest_device(known.communication, found, partial(_sizes, layout.graph, values)):
                ledger.add_priced(row, priced)
            ledger.errs_with(row, "transfers")


def _price_reductions(
    known: _Kept, problem: Problem, plan: Plan, layout: _Layout, shape: Shape, ledger: Ledger
) -> None:
    cluster, training = problem.cluster, problem.training
    first = 4 * len(plan.stages) + 2 * len(layout.edges)
    ranks = [tuple(d for g in r.groups for d in plan.groups[g].devices) for r in shape.reductions]
    tied = dict(layout.tied)
    sizes = []
    for r, reduction in enumerate(shape.reductions):
        values = (
            layout.own[reduction.stage] if reduction.axis == "dp" else tied.get(reduction.groups, np.zeros(0, np.int64))
        )
        if reduction.axis == "norm":
            ranks[r], values = (
                tuple(next(iter(plan.groups[g].devices)) for g in reduction.groups),
                np.zeros(0, np.int64),
            )
        sizes.append(state_of(layout.graph, training, values.tolist()).gradients or 4)
    dtype = training.gradient_dtype or training.precision
    calls = all_reduces(cluster, ranks, sizes, BUCKET_BYTES, dtype)
    for r, found in enumerate(calls):
        for priced, (_, times) in zip(known.communication.of([c for c, _ in found]), found, strict=True):
            ledger.add_priced(first + r, priced, times)
        ledger.errs_with(first + r, "reductions")


def _price_updates(problem: Problem, plan: Plan, layout: _Layout, shape: Shape, ledger: Ledger) -> None:
    """Optimizer updates, and with clipping three passes over the gradients (read for the norm, read and written to scale)."""
    first = 4 * len(plan.stages) + 2 * len(layout.edges) + len(shape.reductions)
    for g, group in enumerate(plan.groups):
        slowest: tuple[float, Amount, Device] | None = None
        for device in dict.fromkeys(problem.cluster.device(d) for d in group.devices):
            rows, update, _ = problem.update_prices(device)
            weights = np.zeros(update.seconds.size)
            for value in layout.held[g].tolist():
                if value in rows:
                    weights[rows[value]] += 1
            amount = update.total(weights)
            if slowest is None or amount.seconds[0] > slowest[0]:
                slowest = (float(amount.seconds[0]), amount, device)
        assert slowest is not None  # a group has devices
        _, amount, device = slowest
        ledger.add_amount(first + g, amount, device.name)
        ledger.errs_with(first + g, f"{device.name} update")
        if problem.training.gradient_clip_norm is not None:
            seconds = 3 * layout.states[g].gradients / device.memory_bytes_per_s
            ledger.add_priced(first + g, Priced(seconds, f"{device.name}: clipping", 0.3, 0.0, ANALYTIC))


# --- bytes --------------------------------------------------------------------------------------------------------------
def _memory(
    known: _Kept,
    problem: Problem,
    plan: Plan,
    layout: _Layout,
    topology: Topology,
    shape: Shape,
    variants: list[list[_Variant]],
) -> tuple[MemoryDeltas, list[Device]]:
    """Deltas per task class, and the device of each group they hold for: where replicas differ, the one with the least room."""
    chosen = [group[0] for group in variants]
    for number in range(1, max(map(len, variants))):
        other = [group[min(number, len(group) - 1)] for group in variants]
        room = [_room(topology, _deltas(known, problem, plan, layout, topology, shape, v), v) for v in (chosen, other)]
        chosen = [a if x <= y else b for a, b, x, y in zip(chosen, other, *room, strict=True)]
    deltas = _deltas(known, problem, plan, layout, topology, shape, chosen)
    return deltas, [variant.device for variant in chosen]


def _room(topology: Topology, deltas: MemoryDeltas, variants: list[_Variant]) -> list[float]:
    held = peaks(topology, deltas).bytes
    return [v.device.usable_bytes - ALLOCATOR_FACTOR[v.device.kind] * h for v, h in zip(variants, held, strict=True)]


def _deltas(
    known: _Kept,
    problem: Problem,
    plan: Plan,
    layout: _Layout,
    topology: Topology,
    shape: Shape,
    variants: list[_Variant],
) -> MemoryDeltas:
    classes, kinds = len(topology.class_names), len(MEMORY_KINDS)
    static = np.zeros((len(plan.groups), kinds))
    start, end, within = np.zeros((3, classes, kinds))
    update = 4 * len(plan.stages) + 2 * len(layout.edges) + len(shape.reductions)
    for g, (state, variant) in enumerate(zip(layout.states, variants, strict=True)):
        static[g, :3] = state.parameters, state.gradients, state.optimizer_state
        within[update + g, TRANSIENTS] = update_transient_bytes(problem.training, variant.device, state)
        collective = plan.groups[g].replicas > 1 or any(g in members for members, _ in layout.tied)
        static[g, BUFFERS] = min(BUCKET_BYTES, state.gradients) if collective else 0
    for edge, load in zip(layout.edges, layout.loads, strict=True):
        source, target = plan.stages[edge.source].group, plan.stages[edge.target].group
        for g, stage in ((source, edge.source), (target, edge.target)):
            b = variants[g].micro_batch
            size = sum(_value_bytes(layout.graph, value, b) for value, _ in load)
            back = sum(_value_bytes(layout.graph, value, b) for value, gradient in load if gradient)
            if source != target:
                static[g, BUFFERS] += size + back
            if stage == edge.target:
                start[class_of_action(stage, "F"), INPUTS] += size
    for s, stage in enumerate(plan.stages):
        b = variants[stage.group].micro_batch
        key = (layout.graph.fingerprint, stage, b)
        if key not in known.activations:
            graph, ops, regions = _stage_ops(known, problem, plan, layout, s, b)
            known.activations[key] = activations_of(graph, ops, b, regions)
        held = known.activations[key]
        forward = class_of_action(s, "F")
        start[forward, INPUTS] += sum(_value_bytes(layout.graph, value, b) for value in layout.inputs[s].tolist())
        start[forward, ACTIVATIONS] = held.stash
        within[forward, TRANSIENTS] = held.forward_transient
        for kind in "BI":
            within[class_of_action(s, kind), TRANSIENTS] = held.backward_transient
        for kind in "BW":
            end[class_of_action(s, kind)] = -start[forward]
    return MemoryDeltas(static=static, start=start, end=end, within=within)


def _value_bytes(graph: Graph, value: int, micro_batch: int) -> int:
    return graph.flat.value_spec[value].bytes(micro_batch)


def _sizes(graph: Graph, values: list[int], micro_batch: int) -> list[tuple[int, bool, str]]:
    """See `transfers.slowest_device`."""
    specs = [graph.flat.value_spec[value] for value in values]
    return [(spec.bytes(micro_batch), spec.batched, spec.dtype) for spec in specs]


def _facts(known: _Kept, problem: Problem, plan: Plan, shape: Shape, devices: list[Device]) -> StepFacts:
    count = plan.batch.micro_batches
    for size in plan.batch.sizes[0]:
        if size not in known.flops:
            known.flops[size] = model_flops(problem.graph, size)
    used = [problem.cluster.device(d) for group in plan.groups for d in group.devices]
    return StepFacts(
        samples=plan.global_batch,
        tokens=plan.global_batch * problem.graph.tokens_per_sample,
        model_flops=float(count * sum(known.flops[size] for size in plan.batch.sizes[0])),
        peak_flops_per_s=sum(device.peak(problem.training.precision) for device in used),
        overhead_s=problem.costs.step_overhead_s,
        action_overhead_s=problem.costs.action_overhead_s,
        reduction_axes=tuple(reduction.axis for reduction in shape.reductions),
        stages_of_group=tuple(
            tuple(s for s, stage in enumerate(plan.stages) if stage.group == g) for g in range(len(plan.groups))
        ),
        device_names=tuple(device.name for device in devices),
        capacity_bytes=tuple(device.memory_bytes for device in devices),
        reserved_bytes=tuple(device.reserved_bytes for device in devices),
        allocator_factor=tuple(ALLOCATOR_FACTOR[device.kind] for device in devices),
    )
