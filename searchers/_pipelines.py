"""The search around the stage problem: nodes per pipeline, micro-batches and recomputation, for every number of stages.

A shape fixes all but the stages: nodes per pipeline (hence R identical pipelines of D devices), micro-batches and
recomputation. Within a shape the stage problem is solved exactly; shapes are compared by the lock-step estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from simpart.searchers._bounds import lockstep_s
from simpart.searchers._chain import ChainPlan, Tables, Unplannable, plan_value_s
from simpart.searchers._stages import ChainStage, Floats, StageCosts, later_stages_allowed

__all__ = [
    "PipelineChoice",
    "PipelineSearch",
    "PipelineShape",
    "all_shapes",
    "least_sums",
    "lockstep_answers",
    "plan_lockstep_s",
    "released_search",
    "search_pipelines",
]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PipelineShape:
    """R = `pipelines` identical pipelines of `devices` devices (`nodes` nodes) each.

    `kinds`: on unequal devices, the order in which a pipeline goes through its equal part of each kind; empty: devices
    as they come.
    """

    nodes: int
    pipelines: int
    devices: int
    micro_batches: int
    recompute: bool
    kinds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """A shape, the stages found for it and its estimated time of one step."""

    shape: PipelineShape
    plan: ChainPlan
    lockstep_s: float


@dataclass(slots=True, kw_only=True)
class PipelineSearch:
    """What a search found: the best choice for each number of stages, or why there is none.

    `choices` are all plans that were solved for, in the order found: leaders to re-rank by simulation.
    """

    by_stage_count: dict[int, PipelineChoice | Unplannable] = field(default_factory=dict)
    choices: list[PipelineChoice] = field(default_factory=list)
    solved: int = 0
    pruned: int = 0

    @property
    def best(self) -> PipelineChoice | None:
        """The choice of least lock-step estimate; fewer stages win ties."""
        found = [choice for _, choice in sorted(self.by_stage_count.items()) if isinstance(choice, PipelineChoice)]
        return min(found, key=lambda choice: choice.lockstep_s, default=None)

    def record(self, stage_count: int, answer: PipelineChoice | Unplannable) -> None:
        """Keep the better of `answer` and what is known: a plan beats a reason, a small shortfall a larger one."""
        if isinstance(answer, PipelineChoice):
            self.choices.append(answer)
        known = self.by_stage_count.get(stage_count)
        if known is None or _rank(answer) < _rank(known):
            self.by_stage_count[stage_count] = answer


def _rank(answer: PipelineChoice | Unplannable) -> tuple[int, float]:
    if isinstance(answer, PipelineChoice):
        return 0, answer.lockstep_s
    return (1, answer.shortfall.bytes_over) if answer.shortfall is not None else (2, 0.0)


def plan_lockstep_s(costs: StageCosts, stages: tuple[ChainStage, ...], *, include_allreduce: bool = True) -> float:
    """Lock-step estimate of a plan, plus its longest gradient all-reduce."""
    at = costs.entries(stages)
    forward = [float(costs.forward_s[x] + costs.transfer_s[x]) for x in at]
    backward = [float(costs.backward_s[x] + costs.transfer_s[x]) for x in at]
    allreduce = max(float(costs.allreduce_s[x]) for x in at) if include_allreduce else 0.0
    return lockstep_s(forward, backward, costs.micro_batches) + allreduce


def all_shapes(
    nodes: int, devices_per_node: int, micro_batch_counts: Iterable[int], recompute: Iterable[bool] = (False, True)
) -> list[PipelineShape]:
    """Every divisor of `nodes` as nodes per pipeline, with every number of micro-batches and recomputation."""
    recompute, counts = tuple(recompute), tuple(micro_batch_counts)
    return [
        PipelineShape(
            nodes=nu, pipelines=nodes // nu, devices=devices_per_node * nu, micro_batches=count, recompute=choice
        )
        for nu in _divisors(nodes)
        for count in counts
        for choice in recompute
    ]


def search_pipelines(
    shapes: Iterable[PipelineShape],
    costs_of: Callable[[PipelineShape], StageCosts | None],
    *,
    max_stages: int,
    include_allreduce: bool = True,
    tie_limit: int = 64,
) -> Iterator[PipelineSearch]:
    """Search all shapes and numbers of stages; yields the same growing result after every shape: stop when you like.

    A number of stages of a shape is skipped only when a lower bound of its lock-step estimate reaches the best known
    for that number. `costs_of` may answer None for a shape that cannot be; it is asked up to twice per shape.
    `tie_limit` bounds the steps spent on plans of equal value, among which the least estimate is taken.
    """
    result = PipelineSearch()
    bounded = [
        (shape, _bounds(costs, shape.devices, max_stages)) for shape in shapes if (costs := costs_of(shape)) is not None
    ]
    order = sorted(range(len(bounded)), key=lambda x: (bounded[x][1].least_s, x))
    for x in order:
        shape, bounds = bounded[x]
        counts = range(1, len(bounds.sums_s) + 1)
        open_counts = [
            count for count in counts if not _reaches(bounds.lockstep_s(count), result.by_stage_count.get(count))
        ]
        result.pruned += len(counts) - len(open_counts)
        costs = costs_of(shape) if open_counts else None
        if costs is not None:
            tables = Tables(costs, shape.devices, max(open_counts))
            for count in open_counts:
                value_s = tables.bound_s(count)
                if value_s < math.inf and _reaches(bounds.lockstep_s(count, value_s), result.by_stage_count.get(count)):
                    result.pruned += 1
                    continue
                result.solved += 1
                result.record(count, _choose(shape, tables, count, include_allreduce, tie_limit))
        yield result


def released_search(
    nodes: int,
    devices_per_node: int,
    blocks: int,
    global_batch: int,
    costs_of: Callable[[PipelineShape], StageCosts | None],
    *,
    max_micro_batches: int = 32,
    stop_at_first: bool = True,
    include_allreduce: bool = True,
    tie_limit: int = 10_000,
) -> PipelineSearch:
    """The released search order, for comparison.

    S starts where the previous number of nodes ended, micro-batches are powers of two, recomputation is on iff there
    are several, and (`stop_at_first`) the first S with any plan ends the search.
    """
    result = PipelineSearch()
    tried = 0
    for nu in _divisors(nodes):
        devices = devices_per_node * nu
        most = min(global_batch, max_micro_batches)
        shapes = [
            PipelineShape(nodes=nu, pipelines=nodes // nu, devices=devices, micro_batches=1 << e, recompute=e > 0)
            for e in range(most.bit_length())
        ]
        last = min(devices, blocks)
        tables = [(shape, Tables(costs, devices, last)) for shape in shapes if (costs := costs_of(shape)) is not None]
        for count in range(tried + 1, last + 1):
            for shape, table in tables:
                result.solved += 1
                result.record(count, _choose(shape, table, count, include_allreduce, tie_limit))
            if stop_at_first and isinstance(result.by_stage_count.get(count), PipelineChoice):
                return result
        tried = max(tried, last)
    return result


def _choose(
    shape: PipelineShape, tables: Tables, count: int, include_allreduce: bool, tie_limit: int
) -> PipelineChoice | Unplannable:
    plan = tables.best(count)
    if isinstance(plan, Unplannable):
        return plan
    chosen, time_s = _least_of_ties(tables, plan, count, include_allreduce, tie_limit)
    return PipelineChoice(shape=shape, plan=chosen, lockstep_s=time_s)


def lockstep_answers(
    costs: StageCosts,
    devices: int,
    max_stages: int,
    below: Mapping[int, float],
    *,
    all_devices: bool = True,
    tie_limit: int = 64,
) -> dict[int, tuple[ChainPlan, float, float] | None]:
    """(plan of least value, its lock-step estimate, a bound of any plan's) for numbers of stages; None if none fits.

    Numbers whose bound is not `below` what is known are left out.
    """
    bounds = _bounds(costs, devices, max_stages)
    wanted = [
        count
        for count in range(1, len(bounds.sums_s) + 1)
        if count not in below or bounds.lockstep_s(count) < below[count] * (1 - 1e-12)
    ]
    answers: dict[int, tuple[ChainPlan, float, float] | None] = {}
    if not wanted:
        return answers
    tables = Tables(costs, devices, max(wanted))
    for count in wanted:
        value_s = tables.bound_s(count, all_devices=all_devices)
        bound_s = math.inf if value_s == math.inf else bounds.lockstep_s(count, value_s)
        if bound_s < below.get(count, math.inf) * (1 - 1e-12):
            plan = tables.best(count, all_devices=all_devices)
            assert isinstance(plan, ChainPlan)  # the bound is finite
            answers[count] = *_least_of_ties(tables, plan, count, True, tie_limit), bound_s
        elif value_s == math.inf and count not in below:
            answers[count] = None
    return answers


def _least_of_ties(
    tables: Tables, plan: ChainPlan, count: int, include_allreduce: bool, tie_limit: int
) -> tuple[ChainPlan, float]:
    """The plan of least estimate among those of the value of `plan` (within `tie_limit` steps), and the estimate."""
    costs = tables.costs
    options = [plan.stages, *tables.ties(count, plan.value_s, tie_limit, sum(stage.replicas for stage in plan.stages))]
    timed = [
        (plan_lockstep_s(costs, stages, include_allreduce=include_allreduce), x) for x, stages in enumerate(options)
    ]
    time_s, x = min(timed)
    return ChainPlan(stages=options[x], value_s=plan_value_s(costs, options[x])), time_s


def _reaches(bound_s: float, known: PipelineChoice | Unplannable | None) -> bool:
    """Whether nothing better than what is known can come; the margin keeps rounding from cutting an equal optimum."""
    return isinstance(known, PipelineChoice) and bound_s * (1 - 1e-12) >= known.lockstep_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Parts of a lower bound: least sums of f + g for 1, 2, … stages, least max f + max g for any number."""

    sums_s: tuple[float, ...]
    value_s: float
    micro_batches: int

    def lockstep_s(self, stage_count: int, value_s: float = 0.0) -> float:
        """Lock-step is never below GPipe's makespan, which is sum f + sum g + (MB - 1)(max f + max g)."""
        steady = self.micro_batches - 1
        return self.sums_s[stage_count - 1] + (steady * max(self.value_s, value_s) if steady else 0.0)

    @property
    def least_s(self) -> float:
        """Lower bound over all numbers of stages."""
        return min((self.lockstep_s(count + 1) for count in range(len(self.sums_s))), default=math.inf)


def _bounds(costs: StageCosts, devices: int, max_stages: int) -> _Bounds:
    """Bounds that need no table over devices: from covering each block, and from total device time."""
    n = costs.blocks
    most = min(max_stages, n, devices)
    f, g = _masked(costs)
    if f.size == 0:
        return _Bounds(sums_s=(math.inf,) * most, value_s=math.inf, micro_batches=costs.micro_batches)
    covers = []
    for cost in (f, g):
        least = np.minimum.accumulate(np.minimum.accumulate(cost.min(axis=2), axis=0)[:, ::-1], axis=1)[:, ::-1]
        covers.append(max(float(least[b, b + 1]) for b in range(n)))
    work = min(least_sums((f + g) * np.asarray(costs.replicas), n))
    value_s = max(covers[0] + covers[1], work / devices)
    return _Bounds(sums_s=tuple(least_sums(f + g, most)), value_s=value_s, micro_batches=costs.micro_batches)


def _masked(costs: StageCosts) -> tuple[Floats, Floats]:
    fits = later_stages_allowed(costs) >= 0
    return (
        np.where(fits, costs.forward_s + costs.transfer_s, np.inf),
        np.where(fits, costs.backward_s + costs.transfer_s, np.inf),
    )


def least_sums(cost: Floats, most: int) -> list[float]:
    """Least sum of stage costs with exactly 1, 2, … `most` stages, whatever the devices."""
    least = cost.min(axis=2)
    after = np.full(least.shape[1], np.inf)
    after[-1] = 0.0
    sums = []
    for _ in range(most):
        after = np.append((least + after[None, :]).min(axis=1), np.inf)
        sums.append(float(after[0]))
    return sums


def _divisors(number: int) -> list[int]:
    return [x for x in range(1, number + 1) if number % x == 0]
