"""From a plan to a Program, coarse grain: a task per stage, micro-batch and phase, transfers, gradient collectives,
updates.

What is assumed beyond the plan: a group takes as long as its slowest replica; a transfer between stages is one message
per value and pair of replicas that share samples, one after the other; gradients are reduced once per step, when a
group's last backward is done, a parameter held by several groups over all their devices at once; recomputing a region
runs its forward again. Copies, zeroing and clipping are priced by the bytes they move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from simpart.errors import MismatchError, UnsupportedError
from simpart.flops import model_flops
from simpart.footprint import Footprints
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.layout import Layout, Layouts, Variant, value_bytes, variants_of
from simpart.ledger import ANALYTIC, Ledger, Priced
from simpart.memory import ALLOCATOR_FACTOR, state_of
from simpart.plan import Plan
from simpart.pricing import Amount
from simpart.problem import Problem
from simpart.program import Durations, Program, StepFacts
from simpart.sharded import StageShare, StageShares, bucketed, is_sharded, kernel_value, local_share
from simpart.topology import (
    Reduction,
    Shape,
    class_of_action,
    class_of_reduction,
    class_of_send,
    class_of_update,
    topology_of,
)
from simpart.transfers import CommPrices, Message, all_reduces, messages, slowest_device

__all__ = ["lower"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

BUCKET_BYTES = 25 << 20
"""Largest all-reduce of gradients: the default bucket of torch's DistributedDataParallel, and what validate sends."""
MOVING_LOG_SD = 0.3
"""Spread of times estimated as bytes over memory bandwidth. Assumption."""


@dataclass(slots=True)
class _Kept:
    """What the plans of one problem share."""

    layouts: Layouts
    footprints: Footprints
    communication: CommPrices
    shares: StageShares
    stages: dict[tuple[Any, ...], tuple[list[Amount], list[Amount]]] = field(default_factory=dict)
    transfers: dict[tuple[Any, ...], list[Priced]] = field(default_factory=dict)
    flops: dict[int, int] = field(default_factory=dict)


_kept: WeakKeyDictionary[Problem, _Kept] = WeakKeyDictionary()


def lower(problem: Problem, plan: Plan, grain: Literal["coarse"] = "coarse") -> Program:
    """The plan as tasks with durations and memory.

    Raises UnsupportedError for what is not lowered yet, UserError for a plan that does not fit its problem.
    """
    if grain != "coarse":
        raise UnsupportedError(f"grain {grain!r} is not lowered in this version; use coarse")
    _refuse_unsupported(problem, plan)
    if problem not in _kept:
        layouts = Layouts(problem)
        all_shares = StageShares(problem)
        communication = CommPrices(problem.costs.communication, problem.cluster)
        _kept[problem] = _Kept(layouts, Footprints(layouts, all_shares), communication, all_shares)
    known = _kept[problem]
    layout = known.layouts.of(plan)
    variants = variants_of(problem, plan)
    shares = _shares(known, plan, layout, variants) if is_sharded(plan) else None
    shape = _shape(problem, plan, layout, shares)
    topology = topology_of(shape)
    ledger = Ledger(len(topology.class_names))
    inside = _price_actions(known, plan, layout, variants, ledger)
    _price_transfers(known, plan, layout, shape, shares, ledger)
    _price_reductions(known.communication, problem, plan, layout, shape, shares, ledger)
    _price_updates(known.communication, problem, plan, layout, shape, shares, ledger)
    memory, chosen = known.footprints.of(plan, layout, topology, variants)
    return Program(
        topology=topology,
        durations=Durations(task_s=ledger.total, lag_s=np.zeros(1)),
        memory=memory,
        multiplicity=tuple(group.replicas for group in plan.groups),
        spread=ledger.spread(),
        facts=_facts(known, problem, plan, shape, [variant.device for variant in chosen], inside),
    )


def _refuse_unsupported(problem: Problem, plan: Plan) -> None:
    if plan.mode != "eager" and is_sharded(plan):
        raise UnsupportedError(f"mode {plan.mode!r} is not lowered yet for split kernels or state; use eager")
    if plan.mode != problem.mode:
        raise MismatchError(f"the plan runs {plan.mode}, the problem is priced {problem.mode}; make them equal")
    if plan.global_batch != problem.global_batch:
        raise MismatchError(
            f"the plan's global batch is {plan.global_batch}, the problem's {problem.global_batch}; make them equal"
        )
    last = max(device for group in plan.groups for device in group.devices)
    if last >= problem.cluster.size:
        raise MismatchError(f"the plan uses device {last}, cluster {problem.cluster.name} has {problem.cluster.size}")


def _shares(known: _Kept, plan: Plan, layout: Layout, variants: list[list[Variant]]) -> list[StageShare]:
    """What one device of every stage does, of the largest replica: for what happens once per step or between stages."""
    found = []
    for s, stage in enumerate(plan.stages):
        variant = max(variants[stage.group], key=lambda v: v.micro_batch)
        found.append(_share(known, plan, layout, s, variant))
    return found


def _share(known: _Kept, plan: Plan, layout: Layout, s: int, variant: Variant) -> StageShare:
    graph, _, regions = known.layouts.stage(plan, layout, s, variant.micro_batch)
    return known.shares.of(plan, graph, s, variant.micro_batch, variant.device, regions)


def _shape(problem: Problem, plan: Plan, layout: Layout, shares: list[StageShare] | None) -> Shape:
    reductions = []
    for s, stage in enumerate(plan.stages):
        if shares is None:
            axes = ["dp"] if plan.groups[stage.group].replicas > 1 and layout.own[s].size else []
        else:
            axes = [sent.axis for sent in shares[s].sent if sent.per_step and sent.role == "gradient"]
        if axes:
            axis = "dp" if "dp" in axes else axes[0]
            reductions.append(Reduction(f"gradient reduction of stage {s}", axis, s, (stage.group,)))
    reductions += [
        Reduction(f"gradient all-reduce among groups {', '.join(map(str, members))}", "tied", -1, members)
        for members, _ in layout.tied
    ]
    if problem.training.gradient_clip_norm is not None and plan.device_count > 1:
        reductions.append(Reduction("gradient norm", "norm", -1, tuple(range(len(plan.groups)))))
    count = plan.batch.micro_batches
    return Shape(plan.group_of_stage, plan.schedule, count, layout.edges, "tasks", tuple(reductions), True)


# --- actions ----------------------------------------------------------------------------------------------------------
def _price_actions(
    known: _Kept, plan: Plan, layout: Layout, variants: list[list[Variant]], ledger: Ledger
) -> dict[str, Floats]:
    """Forward and backward of every stage: of the replica that takes longest. A split backward is half I, half W.

    Returns the seconds of collectives inside the actions, per axis and task class.
    """
    problem = known.layouts.problem
    inside: dict[str, Floats] = {}
    for device in dict.fromkeys(v.device for group in variants for v in group):
        problem.prices(sorted({v.micro_batch for group in variants for v in group if v.device == device}), device)
    sent = _copied(plan, layout)
    for s, stage in enumerate(plan.stages):
        slowest: dict[str, tuple[float, list[Amount], Device]] = {}
        copies = 0.0
        for variant in variants[stage.group]:
            b, device = variant
            forward, backward = _stage_amounts(known, plan, layout, s, variant)
            backward = [*backward, _accumulation(problem, plan, layout, s, device)]
            for kind, amounts in (("F", forward), ("B", backward)):
                seconds = sum(float(a.seconds[0]) for a in amounts)
                if kind not in slowest or seconds > slowest[kind][0]:
                    slowest[kind] = (seconds, amounts, device)
            moved = 2 * sum(value_bytes(layout.graph, value, b) for value in sent[s])
            copies = max(copies, moved / device.memory_bytes_per_s + len(sent[s]) * device.kernel_launch_s)
        sending = _sent_inside(known, plan, layout, s, variants[stage.group])
        for kind, share, source in (("F", 1.0, "F"), ("B", 1.0, "B"), ("I", 0.5, "B"), ("W", 0.5, "B")):
            row = class_of_action(s, kind)
            _, amounts, device = slowest[source]
            for axis, priced, times in sending[source]:
                ledger.add_priced(row, priced, share * times)
                inside.setdefault(axis, np.zeros(ledger.total.size))[row] += priced.seconds * share * times
            for amount in amounts:
                ledger.add_amount(row, amount if share == 1.0 else amount.total(np.array([share])), device.name)
            ledger.errs_with(row, f"{device.name} {source}")
            ledger.add_fixed(row, problem.costs.action_overhead_s)
        _, _, device = slowest["F"]
        ledger.add_priced(class_of_action(s, "F"), _moving(copies, device))
    return inside


def _sent_inside(
    known: _Kept, plan: Plan, layout: Layout, s: int, variants: list[Variant]
) -> dict[str, list[tuple[str, Priced, int]]]:
    """Collectives of one micro-batch inside a stage's forward and backward: (axis, price of one, how many)."""
    found: dict[str, list[tuple[str, Priced, int]]] = {"F": [], "B": []}
    if is_sharded(plan):
        share = _share(known, plan, layout, s, max(variants, key=lambda v: v.micro_batch))
        rows = [sent for sent in share.sent if not sent.per_step]
        again = [sent._replace(phase="B") for sent in share.sent_again]
        for sent, priced in zip(
            rows + again, known.communication.of([x.collective for x in rows + again]), strict=True
        ):
            found[sent.phase].append((sent.axis, priced, sent.times))
    return found


def _stage_amounts(
    known: _Kept, plan: Plan, layout: Layout, s: int, variant: Variant
) -> tuple[list[Amount], list[Amount]]:
    """Forward and backward of one micro-batch, recomputation included."""
    graph, ops, regions = known.layouts.stage(plan, layout, s, variant.micro_batch)
    if is_sharded(plan):
        share = known.shares.of(plan, graph, s, variant.micro_batch, variant.device, regions)
        return [share.forward], [share.backward, *([share.again] if share.again is not None else [])]
    key = (graph.fingerprint, plan.stages[s], variant)
    if key not in known.stages:
        price = known.layouts.problem.prices([variant.micro_batch], variant.device)[variant.micro_batch]
        counts = _counts(graph, ops)
        backward = [price.backward.total(counts)]
        if regions:
            backward.append(price.forward.total(_counts(graph, np.concatenate(regions))))
        known.stages[key] = ([price.forward.total(counts)], backward)
    return known.stages[key]


def _counts(graph: Graph, ops: Ints) -> Floats:
    return np.bincount(graph.flat.op_class[ops], minlength=len(graph.op_classes)).astype(np.float64)


def _copied(plan: Plan, layout: Layout) -> list[list[int]]:
    """Values that each stage makes and sends away: it sends copies."""
    group = plan.group_of_stage
    found: list[set[int]] = [set() for _ in plan.stages]
    for edge, load in zip(layout.edges, layout.loads, strict=True):
        if group[edge.source] != group[edge.target]:
            found[edge.source] |= {value for value, _ in load if layout.made_in[value] == edge.source}
    return [sorted(values) for values in found]


def _accumulation(problem: Problem, plan: Plan, layout: Layout, s: int, device: Device) -> Amount:
    """Adding a micro-batch's gradients: each time into a buffer that is reduced, else all but the first time."""
    count = plan.batch.micro_batches
    reduced = plan.groups[plan.stages[s].group].replicas > 1
    tied = {value for _, values in layout.tied for value in values.tolist()}
    rows, _, accumulate = problem.update_prices(device)
    weights = np.zeros(accumulate.seconds.size)
    for value in layout.partition.parameters[s].tolist():
        if value in rows:
            part = local_share(plan, plan.groups[plan.stages[s].group], layout.graph.parameters[value], "gradient")
            weights[rows[value]] += part * (1.0 if reduced or value in tied else (count - 1) / count)
    return accumulate.total(weights)


def _moving(seconds: float, device: Device) -> Priced:
    return Priced(seconds, f"{device.name}: moving bytes", MOVING_LOG_SD, 0.0, ANALYTIC)


# --- communication and updates ----------------------------------------------------------------------------------------
def _price_transfers(
    known: _Kept, plan: Plan, layout: Layout, shape: Shape, shares: list[StageShare] | None, ledger: Ledger
) -> None:
    """Where groups split kernels, every device of a replica sends its part to its counterpart (of a smaller group: in
    turn)."""
    for e, (edge, load) in enumerate(zip(layout.edges, layout.loads, strict=True)):
        source, target = plan.stages[edge.source].group, plan.stages[edge.target].group
        if source == target:
            continue
        ends = [
            (plan.batch.sizes[g], tuple(plan.groups[g].replica_devices(r) for r in range(plan.groups[g].replicas)))
            for g in (source, target)
        ]
        parts = {} if shares is None else _boundary_parts(layout, shares[edge.source], [v for v, _ in load])
        for back in (False, True) if edge.backward else (False,):
            here, there = reversed(ends) if back else ends
            values = [value for value, gradient in load if gradient or not back]
            row = class_of_send(shape, e, back)
            key = (layout.graph.fingerprint, *here, *there, *values, *parts.values())
            if key not in known.transfers:
                sizes = partial(_sizes, layout.graph, values, parts)
                known.transfers[key] = slowest_device(known.communication, _counterparts(here, there), sizes)
            for priced in known.transfers[key]:
                ledger.add_priced(row, priced)
            ledger.errs_with(row, "transfers")


Replicas = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Samples of each replica of a group, and its devices."""


def _counterparts(here: Replicas, there: Replicas) -> list[Message]:
    """Messages between replicas, one for each device of the larger replica."""
    width = max(len(devices) for _, replicas in (here, there) for devices in replicas)
    found: list[Message] = []
    for k in range(width):
        (ours, mine), (theirs, yours) = here, there
        found += messages(ours, tuple(d[k % len(d)] for d in mine), theirs, tuple(d[k % len(d)] for d in yours))
    return found


def _boundary_parts(layout: Layout, share: StageShare, values: list[int]) -> dict[int, float]:
    """Part of each value that one device of the sending stage holds."""
    found = {}
    for value in values:
        at = kernel_value(layout.graph, value)
        whole = layout.graph.flat.kernel_value_spec[at].bytes(share.flow.micro_batch)
        found[value] = float(share.value_bytes[at]) / max(1, whole)
    return found


def _sizes(graph: Graph, values: list[int], parts: dict[int, float], micro_batch: int) -> list[tuple[int, bool, str]]:
    """See `transfers.slowest_device`."""
    specs = [(graph.flat.value_spec[value], parts.get(value, 1.0)) for value in values]
    return [(int(spec.bytes(micro_batch) * part), spec.batched, spec.dtype) for spec, part in specs]


def _price_reductions(
    prices: CommPrices,
    problem: Problem,
    plan: Plan,
    layout: Layout,
    shape: Shape,
    shares: list[StageShare] | None,
    ledger: Ledger,
) -> None:
    training, tied = problem.training, dict(layout.tied)
    ranks = [tuple(d for g in r.groups for d in plan.groups[g].devices) for r in shape.reductions]
    sizes = []
    for reduction in shape.reductions:
        if reduction.axis == "norm":
            sizes.append(8)
        else:
            values = layout.own[reduction.stage] if reduction.stage >= 0 else tied[reduction.groups]
            sizes.append(state_of(layout.graph, training, values.tolist()).gradients)
    dtype = training.gradient_dtype or training.precision
    calls = all_reduces(problem.cluster, ranks, sizes, BUCKET_BYTES, dtype)
    for r, found in enumerate(calls):
        row = class_of_reduction(shape, r)
        reduction = shape.reductions[r]
        if shares is not None and reduction.stage >= 0:
            found = bucketed(shares[reduction.stage].sent, "gradient", BUCKET_BYTES)
        for priced, (_, times) in zip(prices.of([c for c, _ in found]), found, strict=True):
            ledger.add_priced(row, priced, times)
        ledger.errs_with(row, "reductions")


def _price_updates(
    prices: CommPrices,
    problem: Problem,
    plan: Plan,
    layout: Layout,
    shape: Shape,
    shares: list[StageShare] | None,
    ledger: Ledger,
) -> None:
    """Optimizer updates; zeroing gradient buffers that are reduced (one pass), clipping (three: read, read and
    write); bringing updated parameters back to where they rest."""
    tied = {g for members, _ in layout.tied for g in members}
    for g, group in enumerate(plan.groups):
        slowest: tuple[float, Amount, Device] | None = None
        for device in dict.fromkeys(problem.cluster.device(d) for d in group.devices):
            rows, update, _ = problem.update_prices(device)
            weights = np.zeros(update.seconds.size)
            for value in layout.held[g].tolist():
                if value in rows:
                    weights[rows[value]] += local_share(plan, group, layout.graph.parameters[value], "optimizer")
            amount = update.total(weights)
            if slowest is None or amount.seconds[0] > slowest[0]:
                slowest = (float(amount.seconds[0]), amount, device)
        assert slowest is not None  # a group has devices
        _, amount, device = slowest
        row = class_of_update(shape, g)
        ledger.add_amount(row, amount, device.name)
        ledger.errs_with(row, f"{device.name} update")
        sent = [x for s, stage in enumerate(plan.stages) if shares and stage.group == g for x in shares[s].sent]
        calls = bucketed(sent, "update", BUCKET_BYTES)
        for priced, (_, times) in zip(prices.of([c for c, _ in calls]), calls, strict=True):
            ledger.add_priced(row, priced, times)
        passes = (group.replicas > 1 or g in tied) + 3 * (problem.training.gradient_clip_norm is not None)
        ledger.add_priced(row, _moving(passes * layout.states[g].gradients / device.memory_bytes_per_s, device))


def _facts(
    known: _Kept, problem: Problem, plan: Plan, shape: Shape, devices: list[Device], inside: dict[str, Floats]
) -> StepFacts:
    """`devices` are those that the groups' memory is given for."""
    for size in set(plan.batch.sizes[0]) - set(known.flops):
        known.flops[size] = model_flops(problem.graph, size)
    per_micro_batch = sum(known.flops[size] for size in plan.batch.sizes[0])
    used = [problem.cluster.device(d) for group in plan.groups for d in group.devices]
    homes = plan.group_of_stage
    return StepFacts(
        samples=plan.global_batch,
        tokens=plan.global_batch * problem.graph.tokens_per_sample,
        model_flops=float(plan.batch.micro_batches * per_micro_batch),
        peak_flops_per_s=sum(device.peak(problem.training.precision) for device in used),
        overhead_s=problem.costs.step_overhead_s,
        action_overhead_s=problem.costs.action_overhead_s,
        reduction_axes=tuple(reduction.axis for reduction in shape.reductions),
        inside=tuple(sorted(inside.items())),
        stages_of_group=tuple(tuple(s for s, home in enumerate(homes) if home == g) for g in range(len(plan.groups))),
        device_names=tuple(device.name for device in devices),
        capacity_bytes=tuple(device.memory_bytes for device in devices),
        reserved_bytes=tuple(device.reserved_bytes for device in devices),
        allocator_factor=tuple(ALLOCATOR_FACTOR[device.kind] for device in devices),
    )
