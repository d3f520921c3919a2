"""DAPPLE: synchronous pipelines whose stages also choose which machines their devices are on.

A stage's devices come from unused machines, from partly used ones, or one by one from all machines. For each number of
stages the plan of least filling time + (M - 1) × slowest block is found, where blocks are stages and the transfers
between them. Reference: Fan et al., PPoPP 2021; https://github.com/AlibabaPAI/DAPPLE. Mended here: each stage counts
with its own replicas while the pipeline fills, memory is limited, machines may have any number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.engines._jit import compiled
from simpart.problem import Problem
from simpart.searchers._caps import least_sum_and_maximum
from simpart.searchers._chain import ChainStage, later_stages_allowed
from simpart.searchers._chain_plans import (
    Answer,
    Answers,
    ChainCase,
    below_cutoffs,
    both_ways_s,
    chain_cases,
    least_totals,
    propose_answers,
)
from simpart.searchers._inputs import costs_array
from simpart.searchers._pipelines import PipelineShape
from simpart.searching import Candidate, Control

__all__ = [
    "Dapple",
    "DappleCosts",
    "DapplePlan",
    "DappleSearcher",
    "DappleStage",
    "Placement",
    "Situations",
    "placements",
    "plan_estimate_s",
    "plan_latency_s",
    "situations",
]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
TABLES = 16
"""Tables that one search fills, roughly: what compiling their loop has to pay for."""
KEPT_BYTES = 64e6
"""Of tables that may be walked again."""
Placement = tuple[int, ...]
"""Devices that a stage takes on each machine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DappleCosts:
    """Costs of blocks [i, j) on `replicas[k]` devices, (n, n + 1, K), for one micro-batch; infinite where it cannot be.

    `inside_s` and `across_s` [i, k]: what enters block i, forward and back, to a stage on that many devices, if both
    stages are on one machine and if not. `later` is how many stages may follow, from memory.
    """

    replicas: tuple[int, ...]
    time_s: Floats
    later: Integers
    inside_s: Floats
    across_s: Floats
    allreduce_inside_s: Floats
    allreduce_across_s: Floats

    @property
    def blocks(self) -> int:
        """Length n of the chain."""
        return int(self.time_s.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class DappleStage:
    """Blocks [start, end) with devices on each machine."""

    start: int
    end: int
    placement: Placement

    @property
    def replicas(self) -> int:
        return sum(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class DapplePlan:
    """`latency_s` is minimised: sum of all blocks + (M - 1) × the slowest. `estimate_s` adds all-reduces not hidden."""

    stages: tuple[DappleStage, ...]
    latency_s: float
    estimate_s: float


def placements(
    used: Sequence[int], sizes: Sequence[int], count: int, last: Placement | None = None, kinds: int = 3
) -> list[Placement]:
    """The first `kinds` of three ways to take `count` free devices, where `last` are those of the stage before.

    Unused machines whole; partly used machines first; one by one from every machine with free devices.

    >>> placements([1, 0], [4, 4], 2)
    [(0, 2), (2, 0), (1, 1)]
    """
    machines = range(len(sizes))
    free = [sizes[m] - used[m] for m in machines]
    if sum(free) < count:
        return []
    # The fullest first, then by the stage before, so that equal situations are met in equal order on any machines.
    order = sorted(machines, key=lambda m: (-used[m], -(last[m] if last else 0), sizes[m], m))
    fresh, partly = [m for m in order if used[m] == 0], [m for m in order if used[m] > 0]
    found = [_fill(fresh + partly, free, count), _fill(partly + fresh, free, count), _scatter(order, free, count)]
    return list(dict.fromkeys(found[:kinds]))


def _fill(order: Sequence[int], free: Sequence[int], count: int) -> Placement:
    taken = [0] * len(free)
    for m in order:
        taken[m] = min(free[m], count)
        count -= taken[m]
    return tuple(taken)


def _scatter(order: Sequence[int], free: Sequence[int], count: int) -> Placement:
    taken = [0] * len(free)
    while count:
        for m in order:
            if count and taken[m] < free[m]:
                taken[m] += 1
                count -= 1
    return tuple(taken)


def _one_machine(placement: Sequence[int]) -> bool:
    return sum(x > 0 for x in placement) == 1


def _same_machine(a: Sequence[int], b: Sequence[int]) -> bool:
    return _one_machine([x + y for x, y in zip(a, b, strict=True)])


def _blocks_s(costs: DappleCosts, stages: Sequence[DappleStage]) -> Iterator[tuple[float, float]]:
    """(stage, transfer into it) seconds, stage by stage."""
    before: DappleStage | None = None
    for stage in stages:
        k = costs.replicas.index(stage.replicas)
        sent = 0.0
        if before is not None:
            table = costs.inside_s if _same_machine(before.placement, stage.placement) else costs.across_s
            sent = float(table[stage.start, k])
        yield float(costs.time_s[stage.start, stage.end, k]), sent
        before = stage


def plan_latency_s(costs: DappleCosts, stages: Sequence[DappleStage], micro_batches: int) -> float:
    """What is minimised, computed from the plan alone."""
    blocks = list(_blocks_s(costs, stages))
    return sum(a + b for a, b in blocks) + (micro_batches - 1) * max(max(pair) for pair in blocks)


def plan_estimate_s(costs: DappleCosts, stages: Sequence[DappleStage], micro_batches: int) -> float:
    """The planner's time of a step: latency and the longest all-reduce that stages before do not hide."""
    slowest = max(max(pair) for pair in _blocks_s(costs, stages))
    visible = 0.0
    for x, stage in enumerate(stages):
        table = costs.allreduce_inside_s if _one_machine(stage.placement) else costs.allreduce_across_s
        visible = max(visible, float(table[stage.start, stage.end, costs.replicas.index(stage.replicas)]) - x * slowest)
    return plan_latency_s(costs, stages, micro_batches) + visible


# Free devices, used devices, and those of the stage before where it and the next could share the machine; sorted.
_State = tuple[tuple[int, int, int], ...]


def _state(used: Sequence[int], sizes: Sequence[int], last: Placement | None) -> _State:
    shared = last is not None and _one_machine(last)
    marks = [
        last[m] if shared and last is not None and last[m] and used[m] < sizes[m] else 0 for m in range(len(sizes))
    ]
    return tuple(sorted((sizes[m], used[m], marks[m]) for m in range(len(sizes))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situations:
    """How stages can leave the machines, and the steps between: rows from, to, replica choice k, across machines.

    `kinds` of placements are looked at; `full` are the situations without free devices.
    """

    kinds: int
    numbers: dict[_State, int]
    steps: Integers
    full: list[int]


def situations(
    machines: Sequence[int],
    replicas: Sequence[int],
    most: int = 3_000,
    check: Callable[[], None] = lambda: None,
) -> Situations:
    """Of all three kinds of placements, or of fewer where those lead to more than `most` situations.

    First stages are no longer spread over all machines, then they do not prefer partly used ones.
    """
    for kinds in (3, 2):
        if (found := _situations(machines, replicas, kinds, most, check)) is not None:
            return found
    found = _situations(machines, replicas, 1, 1 << 60, check)
    assert found is not None
    return found


def _situations(
    machines: Sequence[int], replicas: Sequence[int], kinds: int, most: int, check: Callable[[], None]
) -> Situations | None:
    start = _state([0] * len(machines), machines, None)
    numbers: dict[_State, int] = {start: 0}
    steps: set[tuple[int, int, int, int]] = set()
    waiting = [start]
    while waiting:
        check()
        if len(numbers) > most:
            return None
        state = waiting.pop()
        sizes, used, marks = ([row[x] for row in state] for x in range(3))
        for k, r in enumerate(replicas):
            for taken in placements(used, sizes, r, tuple(marks), kinds):
                after = _state([a + b for a, b in zip(used, taken, strict=True)], sizes, taken)
                if after not in numbers:
                    numbers[after] = len(numbers)
                    waiting.append(after)
                across = not any(marks) or not _same_machine(marks, taken)
                steps.add((numbers[state], numbers[after], k, int(across)))
    return Situations(
        kinds=kinds,
        numbers=numbers,
        steps=np.array(sorted(steps), dtype=np.int64).reshape(-1, 4).T,
        full=[x for state, x in numbers.items() if all(size == used for size, used, _ in state)],
    )


class Dapple:
    """One problem: costs, the machines of one pipeline, number of micro-batches M.

    `places` are the situations of these machines and replica counts, where they are known already.
    """

    def __init__(
        self,
        costs: DappleCosts,
        machines: Sequence[int],
        micro_batches: int,
        *,
        most_stages: int | None = None,
        places: Situations | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.costs, self.machines, self.micro_batches, self.check = costs, tuple(machines), micro_batches, check
        for name in ("time_s", "inside_s", "across_s", "allreduce_inside_s", "allreduce_across_s"):
            costs_array(name, getattr(costs, name))
        n = costs.blocks
        self.most_stages = min(n, sum(machines), most_stages or n)
        real = np.arange(n + 1)[None, :, None] > np.arange(n)[:, None, None]
        self.time_s = np.where(real & (costs.later >= 0), costs.time_s, np.inf)
        values = np.concatenate([x.ravel() for x in (self.time_s, costs.inside_s[1:], costs.across_s[1:])])
        self.caps: list[float] = np.unique(values[np.isfinite(values)]).tolist()
        self.places = places or situations(machines, costs.replicas, check=check)
        self._totals: dict[float, list[float]] = {}
        self._tables: dict[float, list[Floats]] = {}
        self._plans: dict[tuple[float, int], tuple[DappleStage, ...]] = {}

    def best(self, stage_count: int, *, below: float = math.inf) -> DapplePlan | None:
        """A plan of least latency with this number of stages on all devices; None if there is none, or none `below`."""
        if not 1 <= stage_count <= self.most_stages:
            return None
        cap, value_s, _ = least_sum_and_maximum(
            self.caps, self.micro_batches - 1, lambda cap: self._least(cap, stage_count), below=below
        )
        if value_s == math.inf:
            return None
        stages = self._stages(cap, stage_count)
        return DapplePlan(
            stages=stages,
            latency_s=plan_latency_s(self.costs, stages, self.micro_batches),
            estimate_s=plan_estimate_s(self.costs, stages, self.micro_batches),
        )

    def _least(self, cap: float, count: int) -> tuple[float, float]:
        """(least sum, its slowest block) of plans with no block above `cap`."""
        total = self._total(cap, count)
        if total == math.inf:
            return math.inf, math.inf
        return total, max(max(pair) for pair in _blocks_s(self.costs, self._stages(cap, count)))

    def _total(self, cap: float, count: int) -> float:
        if cap not in self._totals:
            self._totals[cap] = [float(row[0, 0]) for row in self._table(cap)]
        return self._totals[cap][count]

    def _stages(self, cap: float, count: int) -> tuple[DappleStage, ...]:
        if (cap, count) not in self._plans:
            self._plans[cap, count] = self._trace(self._table(cap), cap, count)
        return self._plans[cap, count]

    def _steps_s(self, cap: float, left: int) -> Floats:
        """[k, across, i, j] seconds that a stage and the transfer into it add, infinite above the cap or the memory."""
        fits = (self.time_s <= cap) & (self.costs.later >= left - 1)
        time_s = np.where(fits, self.time_s, np.inf).transpose(2, 0, 1)
        sent = np.stack([self.costs.inside_s.T, self.costs.across_s.T], axis=1)
        sent[:, :, 0] = 0.0
        sent[sent > cap] = np.inf
        return time_s[:, None] + sent[:, :, :, None]

    def _table(self, cap: float) -> list[Floats]:
        """[stages left][situation, first block] least sum. The last tables are kept."""
        if cap not in self._tables:
            size = 8 * (self.most_stages + 1) * len(self.places.numbers) * (self.costs.blocks + 1)
            if len(self._tables) * size >= KEPT_BYTES:
                del self._tables[next(iter(self._tables))]
            self._tables[cap] = self._fill_table(cap)
        return self._tables[cap]

    def _fill_table(self, cap: float) -> list[Floats]:
        n, steps = self.costs.blocks, self.places.steps
        first = np.full((len(self.places.numbers), n + 1), np.inf)
        first[self.places.full, n] = 0.0
        table = [first]
        loop = compiled(_relax, TABLES * self.most_stages * steps.shape[1] * n * n // 2) or _relax_by_row
        for left in range(1, self.most_stages + 1):
            self.check()
            now = np.full_like(first, np.inf)
            loop(steps, self._steps_s(cap, left), table[-1], now)
            table.append(now)
        return table

    def _trace(self, table: list[Floats], cap: float, count: int) -> tuple[DappleStage, ...]:
        """Walk the table on real machines; the first choice that gives the table's value."""
        used, last, block = [0] * len(self.machines), None, 0
        stages: list[DappleStage] = []
        for left in range(count, 0, -1):
            value = table[left][self.places.numbers[_state(used, self.machines, last)], block]
            stage = self._stage_of_value(
                table[left - 1], self._steps_s(cap, left)[:, :, block], used, last, block, value
            )
            stages.append(stage)
            used = [a + b for a, b in zip(used, stage.placement, strict=True)]
            last, block = stage.placement, stage.end
        return tuple(stages)

    def _stage_of_value(
        self, after: Floats, steps_s: Floats, used: list[int], last: Placement | None, block: int, value: float
    ) -> DappleStage:
        for k, r in enumerate(self.costs.replicas):
            for taken in placements(used, self.machines, r, last, self.places.kinds):
                across = last is None or not _same_machine(last, taken)
                state = _state([a + b for a, b in zip(used, taken, strict=True)], self.machines, taken)
                ends = np.flatnonzero(steps_s[k, int(across)] + after[self.places.numbers[state]] == value)
                if ends.size:
                    return DappleStage(start=block, end=int(ends[0]), placement=taken)
        raise AssertionError("some stage gave the table's value")


def _relax(steps: Any, steps_s: Any, after: Any, now: Any) -> None:
    """One more stage before what `after` describes; compiled."""
    n = now.shape[1] - 1
    for x in range(steps.shape[1]):
        source, target, k, across = steps[0, x], steps[1, x], steps[2, x], steps[3, x]
        for i in range(n):
            least = now[source, i]
            for j in range(i + 1, n + 1):
                total = steps_s[k, across, i, j] + after[target, j]
                if total < least:
                    least = total
            now[source, i] = least


def _relax_by_row(steps: Integers, steps_s: Floats, after: Floats, now: Floats) -> None:
    """The same with numpy."""
    for source, target, k, across in steps.T.tolist():
        np.minimum(now[source, :-1], (steps_s[k, across] + after[target]).min(axis=1), out=now[source, :-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DappleSearcher:
    """The planner on simpart's prices; the time it estimates a step to take ranks its plans.

    Pipelines that exist several times lie on equal machines, or are left out. On several machines the chain is cut
    into fewer blocks, since each stage has many places.
    """

    name: str = "dapple"
    most_blocks: int = 32
    most_blocks_across: int = 16
    most_stages: int = 16

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages; a reason where none fits."""
        across = len(list(problem.cluster.hosts())) > 1
        places: dict[tuple[tuple[int, ...], tuple[int, ...]], Situations] = {}

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            machines = _machines(problem, case.shape)
            if machines is None:
                return {}
            replicas, costs = case.costs.replicas, _costs(problem, case)
            bounds = least_totals(problem, case, costs.time_s)

            @cache
            def problem_with(most: int) -> Dapple:
                if (machines, replicas) not in places:
                    places[machines, replicas] = situations(machines, replicas, check=control.check)
                return Dapple(
                    costs,
                    machines,
                    case.costs.micro_batches,
                    most_stages=most,
                    places=places[machines, replicas],
                    check=control.check,
                )

            return below_cutoffs(
                {count: bound for count, bound in bounds.items() if count <= self.most_stages},
                below,
                lambda n, s, most: self._answer(problem_with(most).best(n, below=s), machines),
            )

        blocks = self.most_blocks_across if across else self.most_blocks
        groups = chain_cases(problem, control, most_blocks=blocks, fewer_devices=False)
        return propose_answers(problem, control, groups, answers)

    def _answer(self, plan: DapplePlan | None, machines: Sequence[int]) -> Answer | None:
        if plan is None:
            return None
        free = [sum(machines[:m]) for m in range(len(machines))]
        devices = []
        for stage in plan.stages:
            devices.append(tuple(free[m] + x for m, taken in enumerate(stage.placement) for x in range(taken)))
            free = [a + b for a, b in zip(free, stage.placement, strict=True)]
        stages = tuple(ChainStage(start=s.start, end=s.end, replicas=s.replicas) for s in plan.stages)
        return Answer(stages=stages, objective_s=plan.estimate_s, devices=tuple(devices))


def _machines(problem: Problem, shape: PipelineShape) -> tuple[int, ...] | None:
    """Devices of one pipeline on each machine, where that is the same for all pipelines."""
    hosts = list(problem.cluster.hosts())
    found = set()
    for p in range(shape.pipelines):
        first, end = p * shape.devices, (p + 1) * shape.devices
        held = [len(range(max(host.start, first), min(host.stop, end))) for host in hosts]
        found.add(tuple(x for x in held if x))
    return found.pop() if len(found) == 1 else None


def _costs(problem: Problem, case: ChainCase) -> DappleCosts:
    """Transfers and all-reduces by place: between neighbours, or as far apart as the pipelines' devices get."""
    costs, shape, chain = case.costs, case.shape, case.chain
    samples = problem.global_batch // (shape.pipelines * shape.micro_batches)
    far = shape.devices - 1
    compute_s, _ = both_ways_s(costs)
    inside, across, reduce_inside, reduce_across = [], [], [], []
    for k, r in enumerate(costs.replicas):
        inside.append(2 * chain.entering_s(samples // r, (0, min(1, far))))
        across.append(2 * chain.entering_s(samples // r, (0, far)))
        copies = range(0, problem.cluster.size // shape.devices * shape.devices, shape.devices)
        near = tuple(p + x for p in copies for x in range(r))
        spread = tuple(p + x * shape.devices // r for p in copies for x in range(r))
        reduce_inside.append(chain.all_reduce_s(near))
        reduce_across.append(chain.all_reduce_s(spread))
        # The costs spread an all-reduce over the micro-batches of a stage; here it stands apart.
        compute_s[:, :, k] = np.maximum(compute_s[:, :, k] - chain.all_reduce_s(near) / shape.micro_batches, 0.0)
    return DappleCosts(
        replicas=costs.replicas,
        time_s=compute_s,
        later=later_stages_allowed(costs),
        inside_s=np.stack(inside, axis=-1),
        across_s=np.stack(across, axis=-1),
        allreduce_inside_s=np.stack(reduce_inside, axis=-1),
        allreduce_across_s=np.stack(reduce_across, axis=-1),
    )
