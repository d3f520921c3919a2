"""Alpa's inter-operator pass: stages and submeshes that minimise the sum of stage times + (B - 1) times the largest.

Reference: Zheng et al., OSDI 2022; https://github.com/alpa-projects/alpa. For a cap on stage times a dynamic program
gives the least sum. The release tries caps in ascending order; here whole ranges of caps fall to a bound, so that few
programs are solved, and no gap between caps depends on the unit of time. Submeshes may have any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.machine_code import compiled
from simpart.problem import Problem
from simpart.searchers._caps import least_sum_and_maximum
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
from simpart.searchers._stages import Bools, ChainStage, later_stages_allowed
from simpart.searching import Candidate, Control

__all__ = [
    "Alpa",
    "AlpaPlan",
    "AlpaStage",
    "InterOp",
    "InterOpCosts",
    "interop_total_s",
    "solve_golden",
    "successors_allowed",
]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

TABLES = 16
"""Tables that one search fills, roughly: what compiling their loop has to pay for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InterOpCosts:
    """Seconds of layers [i, j) for one micro-batch under each option, (n, n + 1, options); infinite where it cannot be.

    Option o takes `sizes[o]` devices: one per submesh and way to shard it. `successors` is how many stages may come
    after, from memory. `places[o, d]`, on unequal devices: the option is for stages with d devices left.
    """

    time_s: Floats
    successors: Integers
    sizes: tuple[int, ...]
    places: Bools | None = None

    @property
    def layers(self) -> int:
        """Length n of the chain."""
        return int(self.time_s.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaStage:
    """Layers [start, end) under an option."""

    start: int
    end: int
    option: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaPlan:
    """`total_s` = sum + (B - 1) largest; `bound_s` bounds it from below (equal unless a gap was allowed)."""

    stages: tuple[AlpaStage, ...]
    total_s: float
    bound_s: float


def successors_allowed(
    free_bytes: Floats, peak_bytes: Floats, initial_bytes: Floats, intermediate_bytes: Floats
) -> Integers:
    """How many stages may follow in 1F1B, where one with x successors keeps x + 1 micro-batches; -1: it does not fit.

    `initial` are parameters and states, `peak` what one micro-batch needs while it runs, `intermediate` what it leaves.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.floor((free_bytes - peak_bytes - initial_bytes) / intermediate_bytes) - 1
    count = np.where(np.isnan(count), np.where(free_bytes >= peak_bytes + initial_bytes, 4096, -1), count)
    return np.asarray(np.clip(count, -1, 4096), dtype=np.int64)


def interop_total_s(costs: InterOpCosts, stages: Sequence[AlpaStage], micro_batches: int) -> float:
    """Value of a plan, computed from the plan alone."""
    times = [float(costs.time_s[s.start, s.end, s.option]) for s in stages]
    return sum(times) + (micro_batches - 1) * max(times)


class InterOp:
    """The problem for one array of costs, device count and number of micro-batches B."""

    def __init__(
        self,
        costs: InterOpCosts,
        devices: int,
        micro_batches: int,
        *,
        most_stages: int | None = None,
        all_devices: bool = True,
    ) -> None:
        n = costs.layers
        self.costs, self.devices, self.micro_batches, self.all_devices = costs, devices, micro_batches, all_devices
        self.most_stages = min(n, devices, most_stages or n)
        self.sizes = np.asarray(costs.sizes, dtype=np.int64)
        time_s = costs_array("stage times", costs.time_s)
        self.places = np.arange(devices + 1)[None, :] >= self.sizes[:, None]
        if costs.places is not None:
            self.places &= costs.places
        option, left = np.nonzero(self.places)  # by option, the numbers of devices left where it may stand
        self._left = np.searchsorted(option, np.arange(len(self.sizes) + 1)), left
        real = np.arange(n + 1)[None, :, None] > np.arange(n)[:, None, None]
        self.time_s = np.where(real & (costs.successors >= 0) & (self.sizes <= devices), time_s, np.inf)
        self.caps: list[float] = np.unique(self.time_s[np.isfinite(self.time_s)]).tolist()
        self._solved: dict[float, tuple[Floats, Floats]] = {}

    def best(
        self, stage_count: int | None = None, *, relative_gap: float = 0.0, below: float = math.inf
    ) -> AlpaPlan | None:
        """A best plan, of `stage_count` stages if given; None if there is none, or none whose total is `below`."""
        if not self.caps or (stage_count is not None and not 1 <= stage_count <= self.most_stages):
            return None
        cap, value_s, bound_s = least_sum_and_maximum(
            self.caps,
            self.micro_batches - 1,
            lambda cap: self._least(cap, stage_count),
            relative_gap=relative_gap,
            below=below,
        )
        if value_s == math.inf:
            return None
        stages = self._trace(cap, stage_count)
        total_s = interop_total_s(self.costs, stages, self.micro_batches)
        return AlpaPlan(stages=stages, total_s=total_s, bound_s=min(bound_s, total_s))

    def _least(self, cap: float, stage_count: int | None) -> tuple[float, float]:
        """(least sum, its largest time) of plans with no stage above `cap`."""
        if cap not in self._solved:
            total, largest = self._table(cap)
            self._solved[cap] = total[:, 0].copy(), largest[:, 0].copy()
        totals, largests = self._solved[cap]
        if stage_count is not None:
            return self._pick(totals[stage_count], largests[stage_count])
        return min(self._pick(total, largest) for total, largest in zip(totals[1:], largests[1:], strict=True))

    def _pick(self, total: Floats, largest: Floats) -> tuple[float, float]:
        d = self._devices_used(total, largest)
        return float(total[d]), float(largest[d])

    def _devices_used(self, total: Floats, largest: Floats) -> int:
        return self.devices if self.all_devices else int(np.lexsort((largest, total))[0])

    def _table(self, cap: float) -> tuple[Floats, Floats]:
        """[stages left, first layer, devices left]."""
        n, width = self.costs.layers, self.devices + 1
        total, largest = (
            np.full((self.most_stages + 1, n + 1, width), np.inf),
            np.zeros((self.most_stages + 1, n + 1, width)),
        )
        total[0, n, 0] = 0.0
        loop = compiled(_fill, TABLES * self.most_stages * n * n * len(self.sizes))
        if loop is not None:
            loop(self.time_s, self.costs.successors, self.sizes, *self._left, cap, total, largest)
            return total, largest
        for s in range(1, self.most_stages + 1):
            fits = (self.time_s <= cap) & (self.costs.successors >= s - 1)
            for o, size in enumerate(self.costs.sizes):
                left = np.flatnonzero(self.places[o])
                if left.size:
                    for i in range(n):
                        row = np.where(fits[i, i + 1 :, o], self.time_s[i, i + 1 :, o], np.inf)[:, None]
                        after, most = total[s - 1, i + 1 :, left - size].T, largest[s - 1, i + 1 :, left - size].T
                        _improve(total[s, i], largest[s, i], left, row + after, np.maximum(row, most))
        return total, largest

    def _trace(self, cap: float, stage_count: int | None) -> tuple[AlpaStage, ...]:
        """The plan behind the table of a cap: always the first choice that gives the table's value."""
        total, largest = self._table(cap)
        starts = [self._pick(total[s, 0], largest[s, 0]) for s in range(self.most_stages + 1)]
        left = stage_count or min(range(1, len(starts)), key=starts.__getitem__)
        i, d = 0, self._devices_used(total[left, 0], largest[left, 0])
        stages = []
        for s in range(left, 0, -1):
            usable = np.flatnonzero(self.places[:, d])
            rest = d - self.sizes[usable]
            time_s = self.time_s[i, i + 1 :, usable].T
            later = self.costs.successors[i, i + 1 :, usable].T
            fits = (time_s <= cap) & (later >= s - 1)
            reached = np.maximum(time_s, largest[s - 1, i + 1 :, rest].T)
            same = fits & (time_s + total[s - 1, i + 1 :, rest].T == total[s, i, d]) & (reached == largest[s, i, d])
            k, o = (int(x) for x in np.argwhere(same)[0])
            stages.append(AlpaStage(start=i, end=i + 1 + k, option=int(usable[o])))
            i, d = i + 1 + k, int(rest[o])
        return tuple(stages)


def _improve(total: Floats, largest: Floats, at: Integers, candidates: Floats, reached: Floats) -> None:
    """Take the least candidate of each column, by sum, then by largest time, where it beats what is there."""
    least = candidates.min(axis=0)
    most = np.where(candidates == least, reached, np.inf).min(axis=0)
    better = (least < total[at]) | ((least == total[at]) & (most < largest[at]) & (least < np.inf))
    total[at[better]], largest[at[better]] = least[better], most[better]


def _fill(
    time_s: Any, successors: Any, sizes: Any, first: Any, lefts: Any, cap: float, total: Any, largest: Any
) -> None:
    """The same table, compiled."""
    n, options = time_s.shape[0], time_s.shape[2]
    for s in range(1, total.shape[0]):
        for i in range(n):
            for k in range(i + 1, n + 1):
                for o in range(options):
                    t = time_s[i, k, o]
                    if t > cap or t == np.inf or successors[i, k, o] < s - 1:
                        continue
                    size = sizes[o]
                    for x in range(first[o], first[o + 1]):
                        d = lefts[x]
                        candidate = t + total[s - 1, k, d - size]
                        if candidate == np.inf:
                            continue
                        most = max(t, largest[s - 1, k, d - size])
                        if candidate < total[s, i, d] or (candidate == total[s, i, d] and most < largest[s, i, d]):
                            total[s, i, d] = candidate
                            largest[s, i, d] = most


@dataclass(frozen=True, slots=True, kw_only=True)
class Alpa:
    """The inter-operator pass on simpart's prices; a submesh of any size runs data parallel.

    Its objective, sum of stages + (M - 1) × the slowest, takes no account of the schedule; transfers count both ways.
    """

    name: str = "alpa"
    objective: str = "sum of stages + (micro-batches - 1) × the slowest, with transfers"
    most_blocks: int = 32

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages; a reason where none fits."""

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            costs = case.costs
            compute_s, transfer_s = both_ways_s(costs)
            time_s = compute_s + transfer_s

            @cache
            def problem_with(most: int) -> InterOp:
                inter_op = InterOpCosts(
                    time_s=time_s,
                    successors=later_stages_allowed(costs),
                    sizes=costs.replicas,
                    places=costs.places,
                )
                every = not problem.space.use_fewer_devices
                return InterOp(inter_op, case.shape.devices, costs.micro_batches, most_stages=most, all_devices=every)

            return below_cutoffs(
                least_totals(problem, case, time_s),
                below,
                lambda n, s, most: self._answer(costs.replicas, problem_with(most).best(n, below=s)),
            )

        groups = chain_cases(problem, control, most_blocks=self.most_blocks)
        return propose_answers(problem, control, groups, answers)

    def _answer(self, sizes: tuple[int, ...], plan: AlpaPlan | None) -> Answer | None:
        if plan is None:
            return None
        stages = tuple(ChainStage(start=s.start, end=s.end, replicas=sizes[s.option]) for s in plan.stages)
        return Answer(stages=stages, objective_s=plan.total_s)


def solve_golden(inputs: dict[str, Any]) -> dict[str, Any]:
    """Toy cases (t = scale × sum of w / speedup, memory rule by X) and the random instance of the published tests."""
    sizes = [int(x) for x in inputs["submesh_sizes"]]
    configs = 1
    if "w" in inputs:
        n = len(inputs["w"])
        time_s, successors = np.full((n, n + 1, len(sizes)), np.inf), np.full((n, n + 1, len(sizes)), 4096)
        for i in range(n):
            for j in range(i + 1, n + 1):
                for o, size in enumerate(sizes):
                    time_s[i, j, o] = inputs["scale"] * sum(inputs["w"][i:j]) / inputs["speedup"][o]
                    if inputs["max_successors"] is not None:
                        successors[i, j, o] = inputs["X"] * size // (j - i) - 2
    else:
        drawn = np.random.RandomState(42).rand(8, 8, 4, 5)  # the published instance is drawn this way
        n, configs = 8, 5
        time_s = np.full((n, n + 1, 20), np.inf)
        time_s[:, 1:] = drawn.reshape(n, n, 20)
        successors = np.full(time_s.shape, int(inputs["max_successors"]))
    costs = InterOpCosts(time_s=time_s, successors=successors, sizes=tuple(s for s in sizes for _ in range(configs)))
    plan = InterOp(costs, int(inputs["D"]), int(inputs["B"])).best()
    if plan is None:
        return {"feasible": False, "total": None, "plan": None}
    return {
        "feasible": True,
        "total": plan.total_s,
        "plan": [[s.start, s.end, costs.sizes[s.option]] for s in plan.stages],
        "config": [s.option % configs for s in plan.stages],
    }
