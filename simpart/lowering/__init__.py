"""From a plan to a Program. Here the coarse grain: a task per stage, micro-batch and phase, transfers, gradient
collectives, updates (`simpart.lowering.fine` is the other).

What is assumed beyond the plan: a group takes as long as its slowest replica; a transfer between stages is one message
per value and pair of replicas that share samples, one after the other; gradients are reduced once per step, when a
group's last backward is done, a parameter held by several groups over all their devices at once; recomputing a region
runs its forward again. Copies, zeroing and clipping are priced by the bytes they move.

Whatever plans of one problem have in common is worked out once: plans that share stages, groups and batch share all
costs, those that share a stage share its costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np

from simpart.errors import MismatchError, UnknownNameError, UnsupportedError
from simpart.kernels.flops import model_flops
from simpart.lowering.action_costs import ActionCosts
from simpart.lowering.flows import flows_of
from simpart.lowering.footprint import Footprints
from simpart.lowering.group_costs import GroupCosts
from simpart.lowering.layout import Arrangement, Layout, Layouts, Variant
from simpart.lowering.ledger import ClassCost, Ledger
from simpart.lowering.sharded import StageShares, is_sharded
from simpart.lowering.topology import Reduction, Shape, Transfers, actions_of, build_topology
from simpart.lowering.transfers import CommPrices
from simpart.memory import ALLOCATOR_FACTOR
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.program import Durations, MemoryDeltas, Program, StepFacts, Topology

if TYPE_CHECKING:
    from simpart.lowering.fine import FineSettings

__all__ = ["Costed", "Grain", "Lowering", "lower", "lowering_of"]

Grain = Literal["coarse", "fine"]
"""Tasks are actions, or kernels and collectives."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costed:
    """A plan but for its schedule: what one task of each class takes, in the order of the topology's classes. `exact`
    says that no transfer can wait for its link, unless actions overlap, so that transfers are as good as delays."""

    layout: Layout
    arrangement: Arrangement
    sharded: int
    reductions: tuple[Reduction, ...]
    costs: tuple[ClassCost, ...]
    seconds: Floats
    exact: bool


@dataclass(slots=True)
class Lowering:
    """Plans of one problem on their way to Programs."""

    problem: Problem
    layouts: Layouts
    footprints: Footprints
    actions: ActionCosts
    groups: GroupCosts
    costed: dict[tuple[Any, ...], Costed] = field(default_factory=dict)
    topologies: dict[tuple[Any, ...], Topology] = field(default_factory=dict)
    tasks: int = 0
    flops: dict[int, int] = field(default_factory=dict)

    def cost(self, plan: Plan) -> Costed:
        """Prices of everything in the plan; raises UserError for one that does not fit its problem."""
        number, twice = self.layouts.numbers.of, plan.schedule.kind == "dualpipe"
        parts = (plan.stages, plan.groups, plan.batch, plan.shardings, plan.state)
        key = (plan.graph, plan.skips, plan.mode, twice, *map(number, parts))
        found = self.costed.get(key)
        if found is None:
            if len(self.costed) > 4096:
                self.costed.clear()
            _refuse_unsupported(self.problem, plan)
            found = self.costed[key] = self._cost(plan, self.layouts.of(plan), self.layouts.arrangement(plan))
        return found

    def _cost(self, plan: Plan, layout: Layout, arrangement: Arrangement) -> Costed:
        sharded, shares = -1, None
        if is_sharded(plan):
            sharded = self.layouts.numbers.of((plan.shardings, plan.state))
            shares = [
                self.actions.alike.of(plan, layout, s, arrangement.largest[stage.group])
                for s, stage in enumerate(plan.stages)
            ]
        kinds = dict.fromkeys(v.device for group in arrangement.variants for v in group) if shares is None else ()
        for device in kinds:
            sizes = {v.micro_batch for group in arrangement.variants for v in group if v.device == device}
            self.problem.prices(sorted(sizes), device)
        reductions = self._reductions(plan, layout, shares)
        actions = [self.actions.of(plan, layout, arrangement, s, sharded) for s in range(len(plan.stages))]
        costs = (
            *(cost for stage in actions for cost in stage),
            *self.groups.transfers(plan, layout, arrangement, shares),
            *self.groups.reductions(plan, layout, arrangement, reductions, shares),
            *self.groups.updates(plan, layout, arrangement, shares, sharded),
        )
        costs = self._overlapped(plan, layout, costs)
        seconds = np.array([cost.seconds for cost in costs])
        return Costed(
            layout=layout,
            arrangement=arrangement,
            sharded=sharded,
            reductions=reductions,
            costs=costs,
            seconds=seconds,
            exact=_transfers_never_wait(plan, layout, seconds),
        )

    def _overlapped(self, plan: Plan, layout: Layout, costs: tuple[ClassCost, ...]) -> tuple[ClassCost, ...]:
        """Actions slowed down by the transfers of their group that go on beside them: those of a micro-batch, spread
        evenly over its actions."""
        slowdown, stages = self.problem.costs.overlap_slowdown, len(plan.stages)
        if slowdown == 0:
            return costs
        sending, working = np.zeros((2, len(plan.groups)))
        for s, stage in enumerate(plan.stages):
            working[stage.group] += costs[4 * s].seconds + costs[4 * s + 1].seconds
        for e, edge in enumerate(layout.edges):
            for end in (edge.source, edge.target):
                sending[plan.stages[end].group] += (
                    costs[4 * stages + 2 * e].seconds + costs[4 * stages + 2 * e + 1].seconds
                )
        part = np.minimum(1.0, np.divide(sending, working, out=np.zeros_like(working), where=working > 0))
        slowed = list(costs)
        for c in range(4 * stages):
            extra = costs[c].seconds * slowdown * float(part[plan.stages[c // 4].group])
            slowed[c] = costs[c]._replace(seconds=costs[c].seconds + extra, fixed_s=costs[c].fixed_s + extra)
        return tuple(slowed)

    def _reductions(self, plan: Plan, layout: Layout, shares: Any) -> tuple[Reduction, ...]:
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
        if self.problem.training.gradient_clip_norm is not None and plan.device_count > 1:
            reductions.append(Reduction("gradient norm", "norm", -1, tuple(range(len(plan.groups)))))
        return tuple(reductions)

    def topology(self, plan: Plan, costed: Costed, transfers: Transfers) -> Topology:
        """The plan's tasks."""
        number = self.layouts.numbers.of
        homes, edges = plan.group_of_stage, costed.layout.edges
        numbers = (number(homes), number(plan.schedule), number(edges), number(costed.reductions))
        key = (*numbers, plan.batch.micro_batches, transfers)
        found = self.topologies.get(key)
        if found is None:
            shape = Shape(homes, plan.schedule, plan.batch.micro_batches, edges, transfers, costed.reductions, True)
            found = self.topologies[key] = build_topology(shape, actions_of(shape))
            self.tasks += found.size
            while self.tasks > KEPT_TASKS and len(self.topologies) > 1:
                self.tasks -= self.topologies.pop(next(iter(self.topologies))).size
        return found

    def memory(self, plan: Plan, costed: Costed, topology: Topology) -> tuple[MemoryDeltas, tuple[Variant, ...]]:
        """What tasks hold, and the replicas (one per group) that this is said of."""
        return self.footprints.of(plan, costed.layout, costed.arrangement, costed.sharded, topology)

    def facts(self, plan: Plan, costed: Costed, variants: tuple[Variant, ...]) -> StepFacts:
        """What the step achieves; `variants` are those that the groups' memory is given for."""
        problem, devices = self.problem, [variant.device for variant in variants]
        for size in set(plan.batch.sizes[0]) - set(self.flops):
            self.flops[size] = model_flops(problem.graph, size)
        per_micro_batch = sum(self.flops[size] for size in plan.batch.sizes[0])
        axes = dict.fromkeys(axis for cost in costed.costs for axis, _ in cost.inside)
        inside = {axis: np.array([dict(cost.inside).get(axis, 0.0) for cost in costed.costs]) for axis in axes}
        return StepFacts(
            samples=plan.global_batch,
            tokens=plan.global_batch * problem.graph.tokens_per_sample,
            model_flops=float(plan.batch.micro_batches * per_micro_batch),
            peak_flops_per_s=costed.arrangement.peak_flops_per_s,
            overhead_s=problem.costs.step_overhead_s,
            class_overhead_s=np.array([cost.overhead_s for cost in costed.costs]),
            step_log_sd=problem.costs.step_log_sd,
            reduction_axes=tuple(reduction.axis for reduction in costed.reductions),
            inside=tuple(sorted(inside.items())),
            stages_of_group=_stages_of_group(plan, costed.layout),
            devices=tuple(tuple(group.devices) for group in plan.groups),
            device_names=tuple(device.name for device in devices),
            capacity_bytes=tuple(device.memory_bytes for device in devices),
            reserved_bytes=tuple(device.reserved_bytes for device in devices),
            allocator_factor=tuple(ALLOCATOR_FACTOR[device.kind] for device in devices),
        )


KEPT_TASKS = 8_000_000
"""Tasks of the topologies kept at once: about 600 MB; the oldest go."""
_kept: WeakKeyDictionary[Problem, Lowering] = WeakKeyDictionary()


def lowering_of(problem: Problem) -> Lowering:
    """The Lowering that all plans of a problem share."""
    if problem not in _kept:
        layouts, shares = Layouts(problem), StageShares(problem)
        actions = ActionCosts(layouts, shares, CommPrices(problem.costs.communication, problem.cluster))
        _kept[problem] = Lowering(problem, layouts, Footprints(layouts, actions.alike), actions, GroupCosts(actions))
    return _kept[problem]


def lower(problem: Problem, plan: Plan, grain: Grain = "coarse", settings: FineSettings | None = None) -> Program:
    """The plan as tasks with durations and memory; `settings` are those of the fine grain.

    Raises UnsupportedError for what is not lowered yet, UserError for a plan that does not fit its problem.
    """
    if grain == "fine":
        from simpart.lowering.fine import FineSettings, lower_fine

        return lower_fine(lowering_of(problem), plan, settings or FineSettings())
    if grain != "coarse":
        raise UnknownNameError("grain", grain, get_args(Grain))
    lowering = lowering_of(problem)
    costed = lowering.cost(plan)
    topology = lowering.topology(plan, costed, "tasks")
    ledger = Ledger(len(topology.class_names))
    for row, cost in enumerate(costed.costs):
        ledger.add(row, cost)
    memory, chosen = lowering.memory(plan, costed, topology)
    return Program(
        topology=topology,
        durations=Durations(task_s=ledger.total, lag_s=np.zeros(1)),
        memory=memory,
        multiplicity=tuple(group.replicas for group in plan.groups),
        spread=ledger.spread(),
        facts=lowering.facts(plan, costed, chosen),
        flows=flows_of(problem.cluster, lowering.groups.uses(plan, costed)),
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
    last = max(range(*run)[-1] for group in plan.groups for run in group.devices.runs)
    if last >= problem.cluster.size:
        raise MismatchError(f"the plan uses device {last}, cluster {problem.cluster.name} has {problem.cluster.size}")


def _transfers_never_wait(plan: Plan, layout: Layout, seconds: Floats) -> bool:
    """Whether each transfer is over before the next that its link carries can begin: the actions of a group, which
    come one after the other, all take at least as long as any transfer from it."""
    homes, stages = plan.group_of_stage, len(plan.stages)
    longest = np.zeros(len(plan.groups))
    for e, edge in enumerate(layout.edges):
        there, back = seconds[4 * stages + 2 * e : 4 * stages + 2 * e + 2]
        longest[homes[edge.source]] = max(longest[homes[edge.source]], there)
        longest[homes[edge.target]] = max(longest[homes[edge.target]], back)
    makers = seconds[: 4 * stages].reshape(stages, 4)[:, :3].min(axis=1)  # F, B and I make what is sent
    return bool((makers >= longest[list(homes)]).all())


def _stages_of_group(plan: Plan, layout: Layout) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in plan.groups]
    for s, held in enumerate(layout.holders):
        for g in held:
            found[g].append(s)
    return tuple(map(tuple, found))
