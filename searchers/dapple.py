"""DAPPLE: synchronous pipelines whose stages also choose which machines their devices are on.

A stage's devices come from unused machines, from partly used ones, or one by one from all machines. For each number of
stages the plan of least filling time + (M - 1) × slowest block is found, where blocks are stages and the transfers
between them. Reference: Fan et al., PPoPP 2021; https://github.com/AlibabaPAI/DAPPLE. Mended here: each stage counts
with its own replicas while the pipeline fills, memory is limited, machines may have any number of devices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.machine_code import compiled
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
from simpart.searchers._lines import lines
from simpart.searchers._machines import (
    Placement,
    Profile,
    Situations,
    one_machine,
    placements,
    profile,
    same_machine,
    situations,
    state_of,
)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DappleCosts:
    """Costs of blocks [i, j) on `replicas[k]` devices, (n, n + 1, K), for one micro-batch; infinite where it cannot be.

    `inside_s` and `across_s` [i, k]: what enters block i, forward and back, to a stage on that many devices, if both
    stages are on one machine and if not. `later` is how many stages may follow, from memory. On devices of several
    kinds, `kinds` are those of the machines and `profiles[k]` says how many devices of each kind choice k has.
    """

    replicas: tuple[int, ...]
    time_s: Floats
    later: Integers
    inside_s: Floats
    across_s: Floats
    allreduce_inside_s: Floats
    allreduce_across_s: Floats
    kinds: tuple[int, ...] | None = None
    profiles: tuple[Profile, ...] | None = None

    @property
    def blocks(self) -> int:
        """Length n of the chain."""
        return int(self.time_s.shape[0])

    @property
    def choices(self) -> dict[Profile, int]:
        """The number of each choice."""
        return {each: k for k, each in enumerate(self.profiles or [(r,) for r in self.replicas])}

    def choice(self, placement: Sequence[int]) -> int:
        """Number of the choice that a placement is."""
        return self.choices[profile(placement, self.kinds)]


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


def _blocks_s(costs: DappleCosts, stages: Sequence[DappleStage]) -> Iterator[tuple[float, float]]:
    """(stage, transfer into it) seconds, stage by stage."""
    before: DappleStage | None = None
    for stage in stages:
        k = costs.choice(stage.placement)
        sent = 0.0
        if before is not None:
            table = costs.inside_s if same_machine(before.placement, stage.placement) else costs.across_s
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
        table = costs.allreduce_inside_s if one_machine(stage.placement) else costs.allreduce_across_s
        visible = max(visible, float(table[stage.start, stage.end, costs.choice(stage.placement)]) - x * slowest)
    return plan_latency_s(costs, stages, micro_batches) + visible


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
        self.choices = costs.choices
        self.places = places or situations(machines, self.choices, check=check, kinds=costs.kinds)
        self._constant = bool(((costs.later < 0) | (costs.later >= self.most_stages - 1)).all())
        self._latest: tuple[tuple[float, int], Floats] | None = None
        self._totals: dict[float, list[float]] = {}
        self._tables: dict[float, list[Floats]] = {}
        self._plans: dict[tuple[float, int], tuple[DappleStage, ...]] = {}

    def best(self, stage_count: int, *, below: float = math.inf, relaxed: Dapple | None = None) -> DapplePlan | None:
        """A plan of least latency with this number of stages on all devices; None if there is none, or none `below`.

        `relaxed` is a problem with fewer situations that bounds this one from below.
        """
        if not 1 <= stage_count <= self.most_stages:
            return None
        cap, value_s, _ = least_sum_and_maximum(
            self.caps,
            self.micro_batches - 1,
            lambda cap: self._least(cap, stage_count),
            below=below,
            relaxed=None if relaxed is None else lambda cap: relaxed._total(cap, stage_count),
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
        key = cap, 0 if self._constant else left
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._steps_within(cap, left)
        return self._latest[1]

    def _steps_within(self, cap: float, left: int) -> Floats:
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
        n, steps, ends = self.costs.blocks, self.places.steps, self.places.ends
        first = np.full((len(self.places.numbers), n + 1), np.inf)
        first[self.places.full, n] = 0.0
        table = [first]
        work = self.most_stages * (ends.shape[1] * n + steps.shape[1]) * n // 4
        loop = compiled(_relax, TABLES * work) or _relax_by_row
        reached = np.empty((ends.shape[1], n))
        for left in range(1, self.most_stages + 1):
            self.check()
            now = np.full_like(first, np.inf)
            loop(steps, ends, self._steps_s(cap, left), table[-1], now, reached, left)
            table.append(now)
        return table

    def _trace(self, table: list[Floats], cap: float, count: int) -> tuple[DappleStage, ...]:
        """Walk the table on real machines; the first choice that gives the table's value."""
        used, last, block = [0] * len(self.machines), None, 0
        stages: list[DappleStage] = []
        for left in range(count, 0, -1):
            value = table[left][self.places.numbers[state_of(used, self.machines, last, self.costs.kinds)], block]
            stage = self._stage_of_value(
                table[left - 1], self._steps_s(cap, left)[:, :, block], used, last, block, value
            )
            stages.append(stage)
            used = [a + b for a, b in zip(used, stage.placement, strict=True)]
            last, block = stage.placement, stage.end
        return tuple(stages)

    def _followers(self, used: tuple[int, ...], last: Placement | None) -> list[tuple[int, Placement, int, int]]:
        """Choice, placement, whether across machines and situation after it of every stage that can come next."""
        found, kinds = self.places.followers.get((used, last)), self.costs.kinds
        if found is None:
            found = self.places.followers[used, last] = []
            for r in sorted(set(self.costs.replicas)):
                for taken in placements(used, self.machines, r, last, self.places.ways, kinds):
                    if (k := self.choices.get(profile(taken, kinds))) is not None:
                        now = [a + b for a, b in zip(used, taken, strict=True)]
                        state = self.places.numbers[state_of(now, self.machines, taken, kinds)]
                        found.append((k, taken, int(last is None or not same_machine(last, taken)), state))
        return found

    def _stage_of_value(
        self, after: Floats, steps_s: Floats, used: list[int], last: Placement | None, block: int, value: float
    ) -> DappleStage:
        for k, taken, across, state in self._followers(tuple(used), last):
            ends = np.flatnonzero(steps_s[k, across] + after[state] == value)
            if ends.size:
                return DappleStage(start=block, end=int(ends[0]), placement=taken)
        raise AssertionError("some stage gave the table's value")


def _relax(steps: Any, ends: Any, steps_s: Any, after: Any, now: Any, reached: Any, left: int) -> None:
    """One more stage, `left` with it, before what `after` describes; compiled. Each stage takes a block at least."""
    n = now.shape[1] - 1
    last = n - left + 1
    for x in range(ends.shape[1]):
        target, k, across = ends[0, x], ends[1, x], ends[2, x]
        for i in range(last):
            least = np.inf
            for j in range(i + 1, last + 1):
                total = steps_s[k, across, i, j] + after[target, j]
                if total < least:
                    least = total
            reached[x, i] = least
    for x in range(steps.shape[1]):
        source, end = steps[0, x], steps[1, x]
        for i in range(last):
            if reached[end, i] < now[source, i]:
                now[source, i] = reached[end, i]


def _relax_by_row(
    steps: Integers, ends: Integers, steps_s: Floats, after: Floats, now: Floats, reached: Floats, left: int
) -> None:
    """The same with numpy."""
    for x, (target, k, across) in enumerate(ends.T.tolist()):
        reached[x] = (steps_s[k, across] + after[target]).min(axis=1)
    np.minimum.at(now[:, :-1], steps[0], reached[steps[1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class DappleSearcher:
    """The planner on simpart's prices; the time it estimates a step to take ranks its plans.

    Pipelines that exist several times lie on equal machines, or are left out. On several machines the chain is cut
    into fewer blocks, since each stage has many places.
    """

    name: str = "dapple"
    objective: str = "DAPPLE's estimate: fill, drain, the slowest stage or transfer, gradient all-reduces left over"
    most_blocks: int = 32
    most_blocks_across: int = 16
    most_stages: int = 16

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages; a reason where none fits."""
        across = len(list(problem.cluster.hosts())) > 1
        everywhere: dict[tuple[Any, ...], tuple[dict[Profile, int], Situations]] = {}
        places: dict[tuple[Any, ...], Situations] = {}

        def planner(costs: DappleCosts, machines: Sequence[int], micro_batches: int, most: int) -> Dapple:
            key = tuple(machines), costs.kinds, tuple(costs.choices)
            if key not in places:
                known, _ = everywhere.get(key[:2], ({}, None))
                if not costs.choices.keys() <= known.keys():
                    numbers = {each: k for k, each in enumerate(dict.fromkeys((*known, *costs.choices)))}
                    found = situations(machines, numbers, check=control.check, kinds=costs.kinds)
                    everywhere[key[:2]] = numbers, found
                places[key] = everywhere[key[:2]][1].restricted(everywhere[key[:2]][0], costs.choices)
            return Dapple(costs, machines, micro_batches, most_stages=most, places=places[key], check=control.check)

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            found = _machines(problem, case.shape)
            if found is None:
                return {}
            machines, kinds = found
            costs = dapple_costs(problem, case, kinds)
            most = min(most, self.most_stages)
            if kinds is None:
                least = {c: bound for c, bound in least_totals(problem, case, costs.time_s).items() if c <= most}
            else:
                least = dict.fromkeys(range(1, most + 1), 0.0)
            exact = cache(lambda most: planner(costs, machines, case.costs.micro_batches, most))
            near = cache(lambda most: planner(_near(costs), (sum(machines),), case.costs.micro_batches, most))

            def best(count: int, below_s: float, most: int) -> Answer | None:
                """Where no plan is good enough even if all devices were on one machine, none is on these."""
                together = near(most) if kinds is None and len(machines) > 1 else None
                if together is not None and together.best(count, below=below_s) is None:
                    return None
                return self._answer(exact(most).best(count, below=below_s, relaxed=together), machines)

            return below_cutoffs(least, below, best)

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


def _near(costs: DappleCosts) -> DappleCosts:
    """The same as if all devices were on one machine, with the better of both links."""
    least = np.minimum(costs.inside_s, costs.across_s)
    return replace(costs, inside_s=least, across_s=least)


def _machines(problem: Problem, shape: PipelineShape) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Devices of one pipeline on each machine, and the kinds of these where they differ.

    None where not all pipelines are alike, and for all but one order of the kinds: the planner tries them all.
    """
    cluster, found = problem.cluster, set()
    if shape.kinds != tuple(sorted(shape.kinds)):
        return None
    for line in lines(cluster, shape):
        held = Counter((cluster.host_of(d).start, cluster.kinds.index(cluster.device(d))) for d in line)
        found.add(tuple((count, kind) for (_, kind), count in held.items()))
    if len(found) > 1:
        return None
    machines = found.pop()
    kinds = tuple(kind for _, kind in machines) if len(cluster.kinds) > 1 else None
    return tuple(count for count, _ in machines), kinds


def dapple_costs(problem: Problem, case: ChainCase, kinds: tuple[int, ...] | None) -> DappleCosts:
    """Transfers and all-reduces by place: between neighbours, or as far apart as the pipelines' devices get.

    `kinds`: those of the machines of a pipeline, where they differ.
    """
    chain, shape, on = case.chain, case.shape, lines(problem.cluster, case.shape)
    own = [[d for d, device in enumerate(on[0]) if problem.cluster.device(device) == kind] for kind in chain.cut.kinds]
    profiles: list[Profile] = [(r,) for r in case.costs.replicas]
    if kinds is not None:
        profiles = sorted(itertools.product(*(range(len(part) + 1) for part in own)), key=lambda p: (sum(p), p))[1:]
    else:
        own = [list(range(shape.devices))]
    kept, packed, spread = [], [], []
    for each in profiles:
        together = tuple(line[part[x]] for line in on for part, r in zip(own, each, strict=True) for x in range(r))
        if chain.places.shares(shape, together) is not None:
            kept.append(each)
            packed.append(together)
            spread.append(
                tuple(
                    line[part[x * len(part) // r]]
                    for line in on
                    for part, r in zip(own, each, strict=True)
                    for x in range(r)
                )
            )
    alone = chain.costs_of(shape, case.schedule, packed)
    far = shape.devices - 1
    near_pair, far_pair = (on[0][0], on[0][min(1, far)]), (on[0][0], on[0][far])
    largest = [max(chain.places.shares(shape, together) or ()) for together in packed]
    return DappleCosts(
        replicas=tuple(sum(each) for each in kept),
        time_s=both_ways_s(alone)[0],
        later=later_stages_allowed(alone),
        inside_s=np.stack([2 * chain.runs.entering_s(b, near_pair) for b in largest], axis=-1),
        across_s=np.stack([2 * chain.runs.entering_s(b, far_pair) for b in largest], axis=-1),
        allreduce_inside_s=np.stack([chain.runs.all_reduce_s(ranks) for ranks in packed], axis=-1),
        allreduce_across_s=np.stack([chain.runs.all_reduce_s(ranks) for ranks in spread], axis=-1),
        kinds=kinds,
        profiles=tuple(kept) if kinds is not None else None,
    )
