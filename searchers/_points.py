"""The plans on a chain of blocks as points: counted, drawn at random, moved a little, and listed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searchers._chain_plans import Answer, ChainCase, both_ways_s, chain_cases, chain_plan, stages_text
from simpart.searchers._stages import ChainStage, StageCosts
from simpart.searching import Candidate, Control

__all__ = ["BATCH", "SLOWEST", "Point", "Points", "batched"]

T = TypeVar("T")
BATCH = 16
"""Candidates that are proposed together by searchers that need not see one before they make the next."""
SLOWEST = "micro-batches × the slowest stage with its transfers"
"""The estimate of `Points`, in words."""


def batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """The items in order, `size` at a time."""
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Stages under the case with this number."""

    case: int
    stages: tuple[ChainStage, ...]


class Points:
    """All plans of a problem on a chain of at most `most_blocks` blocks."""

    def __init__(self, problem: Problem, control: Control, most_blocks: int) -> None:
        self.problem = problem
        self.cases: list[ChainCase] = [c for g in chain_cases(problem, control, most_blocks=most_blocks) for c in g]
        space = problem.space
        self.counts: list[range] = []
        self.totals: list[list[int]] = []
        self.ways: list[list[list[int]]] = []
        for case in self.cases:
            devices, n = case.shape.devices, case.chain.size
            most = min(space.max_stages or devices, devices, n)
            ways = _ways(case.costs.counts, devices, most)
            self.ways.append(ways)
            self.counts.append(range(space.min_stages, most + 1))
            self.totals.append(
                [math.comb(n - 1, s - 1) * sum(ways[s][d] for d in self._used(case)) for s in self.counts[-1]]
            )

    def _used(self, case: ChainCase) -> Sequence[int]:
        """Numbers of devices that a plan may use."""
        devices = case.shape.devices
        return range(1, devices + 1) if self.problem.space.use_fewer_devices else [devices]

    def __len__(self) -> int:
        return sum(map(sum, self.totals))

    def __iter__(self) -> Iterator[Point]:
        for number, case in enumerate(self.cases):
            for count, total in zip(self.counts[number], self.totals[number], strict=True):
                if total:
                    for ends in _cuts(case.chain.size, count):
                        for replicas in itertools.product(case.costs.counts, repeat=count):
                            if sum(replicas) in self._used(case):
                                yield _point(number, ends, replicas)

    def draw(self, rng: np.random.Generator) -> Point:
        """A case with plans, then a number of stages, then a plan of it, each with equal chances."""
        usable = [x for x, totals in enumerate(self.totals) if any(totals)]
        return self._draw_in(rng, usable[int(rng.integers(len(usable)))])

    def _draw_in(self, rng: np.random.Generator, number: int) -> Point:
        case, ways = self.cases[number], self.ways[number]
        counts = [s for s, total in zip(self.counts[number], self.totals[number], strict=True) if total]
        count = counts[int(rng.integers(len(counts)))]
        cuts = np.sort(rng.choice(case.chain.size - 1, count - 1, replace=False)) + 1
        used = [d for d in self._used(case) if ways[count][d]]
        left = used[_weighted(rng, [ways[count][d] for d in used])]
        replicas = []
        for s in range(count, 0, -1):
            options = [r for r in case.costs.counts if r <= left and ways[s - 1][left - r]]
            r = options[_weighted(rng, [ways[s - 1][left - x] for x in options])]
            replicas.append(r)
            left -= r
        return _point(number, (*cuts.tolist(), case.chain.size), replicas)

    def move(self, rng: np.random.Generator, point: Point) -> Point:
        """A neighbour: a cut moved, devices moved, the same stages in another case, or any plan."""
        kind, stages = int(rng.integers(4)), list(point.stages)
        if kind == 0:
            return self.draw(rng)
        if kind == 1:
            same = [x for x in range(len(self.cases)) if self._is_possible(x, point.stages)]
            return replace(point, case=same[int(rng.integers(len(same)))])
        if len(stages) < 2:
            return self.draw(rng)
        x = int(rng.integers(len(stages) - 1))
        first, second = stages[x], stages[x + 1]
        if kind == 2:
            cut = int(rng.integers(first.start + 1, second.end))
            stages[x : x + 2] = [replace(first, end=cut), replace(second, start=cut)]
        else:
            total, allowed = first.replicas + second.replicas, self.cases[point.case].costs.counts
            options = [r for r in allowed if total - r in allowed]
            r = options[int(rng.integers(len(options)))]
            stages[x : x + 2] = [replace(first, replicas=r), replace(second, replicas=total - r)]
        return replace(point, stages=tuple(stages))

    def _is_possible(self, number: int, stages: tuple[ChainStage, ...]) -> bool:
        case = self.cases[number]
        return (
            len(stages) in self.counts[number]
            and sum(s.replicas for s in stages) in self._used(case)
            and all(s.replicas in case.costs.counts for s in stages)
            and stages[-1].end == case.chain.size
        )

    def plan(self, point: Point) -> Plan:
        case = self.cases[point.case]
        answer = Answer(stages=point.stages, objective_s=0.0)
        return chain_plan(self.problem, case.chain, case.shape, answer, case.schedule)

    def candidate(self, point: Point) -> Candidate:
        """The plan of a point, with its estimate, in the family of its number of stages."""
        family = stages_text(len(point.stages))
        return Candidate(plan=self.plan(point), family=family, objective_s=self.estimate_s(point))

    def estimate_s(self, point: Point) -> float:
        """M × the slowest stage with its transfers."""
        return slowest_s(self.cases[point.case].costs, point.stages)


def slowest_s(costs: StageCosts, stages: Sequence[ChainStage]) -> float:
    """M × the slowest stage with its transfers, computed from the stages alone."""
    compute_s, transfer_s = both_ways_s(costs)
    return costs.micro_batches * max(float(compute_s[a] + transfer_s[a]) for a in costs.entries(stages))


def _point(number: int, ends: Sequence[int], replicas: Sequence[int]) -> Point:
    starts = (0, *ends[:-1])
    stages = tuple(ChainStage(start=i, end=j, replicas=r) for i, j, r in zip(starts, ends, replicas, strict=True))
    return Point(case=number, stages=stages)


def _cuts(n: int, count: int) -> Iterator[tuple[int, ...]]:
    return ((*cuts, n) for cuts in itertools.combinations(range(1, n), count - 1))


def _ways(parts: Sequence[int], devices: int, most: int) -> list[list[int]]:
    """[stages][devices] in how many ways replica counts add up."""
    ways = [[1] + [0] * devices]
    for _ in range(most):
        ways.append([sum(ways[-1][d - r] for r in parts if r <= d) for d in range(devices + 1)])
    return ways


def _weighted(rng: np.random.Generator, weights: Sequence[int]) -> int:
    """An index, with chances as the weights, which may be large."""
    total = float(sum(weights))
    return int(rng.choice(len(weights), p=np.array([w / total for w in weights])))
