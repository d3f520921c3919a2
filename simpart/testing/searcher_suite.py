"""What every searcher must do, whatever its algorithm: `check_searcher(make, problem)` raises AssertionError if not.

from simpart.testing.searcher_suite import check_searcher
check_searcher(MySearcher, problem)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from simpart.plan import Plan
from simpart.plan.partition import check_plan
from simpart.problem import Problem
from simpart.searching import Budget, Candidate, Control, Proposal, Searcher, SearchResult, search

__all__ = ["check_candidate", "check_searcher"]


class _Recorded:
    """A searcher whose proposals are kept."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.name = searcher.name
        self.candidates: list[Candidate] = []

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        for proposal in self.searcher.propose(problem, rng, control):
            self.candidates.extend([proposal] if isinstance(proposal, Candidate) else proposal)
            yield proposal


def check_searcher(make: Callable[[], Searcher], problem: Problem, *, candidates: int = 40) -> SearchResult:
    """Valid plans within the space, reasons where there are none, the same for the same seed, an end when time is up.

    Looks at the first `candidates` proposals; returns the result of the search.
    """
    first, again = _Recorded(make()), _Recorded(make())
    result = search(problem, first, Budget(candidates=candidates), seed=3)
    assert first.candidates, "a searcher proposes a plan or says why there is none"
    for candidate in first.candidates:
        check_candidate(problem, candidate)
    search(problem, again, Budget(candidates=candidates), seed=3)
    assert [c.plan for c in again.candidates] == [c.plan for c in first.candidates], "same seed, same plans"
    assert again.candidates == first.candidates, "same seed, same estimates and reasons"
    if result.bound_s is not None and result.stopped == "finished":
        least = min((c.objective_s for c in first.candidates), default=math.inf)
        assert result.bound_s <= least * (1 + 1e-9), "a bound is below every estimate of its own objective"
    _check_deadline(make(), problem)
    return result


def check_candidate(problem: Problem, candidate: Candidate) -> None:
    """A plan that can be run in this space, or a reason in one line."""
    assert candidate.family, "a candidate names its family"
    if candidate.plan is None:
        assert candidate.why and "\n" not in candidate.why, "without a plan, a candidate says why in one line"
        return
    plan, space = candidate.plan, problem.space
    check_plan(plan, problem.graph.at(plan.batch.sizes[0][0]))
    assert plan.global_batch == problem.global_batch, "a step takes the global batch"
    assert math.isfinite(candidate.objective_s) and candidate.objective_s > 0, "an estimate is a positive time"
    _check_devices(problem, plan)
    stages = len(plan.stages)
    assert space.min_stages <= stages <= (space.max_stages or stages), f"{stages} stages are outside the space"
    assert plan.schedule.kind in space.schedules, f"schedule {plan.schedule.kind} is outside the space"
    if "full" not in space.recompute:
        assert not any(stage.recompute for stage in plan.stages), "recomputation is outside the space"
    most = space.max_micro_batches or plan.batch.micro_batches
    assert plan.batch.micro_batches <= most, f"{plan.batch.micro_batches} micro-batches are outside the space"


def _check_devices(problem: Problem, plan: Plan) -> None:
    devices = [d for group in plan.groups for d in group.devices]
    assert set(devices) <= set(range(problem.cluster.size)), "devices are of the cluster"
    if not problem.space.use_fewer_devices:
        assert len(devices) == problem.cluster.size, f"{len(devices)} of {problem.cluster.size} devices are used"


def _check_deadline(searcher: Searcher, problem: Problem) -> None:
    """A clock that runs a second per look: the search must look, and end without an error."""
    ticks = itertools.count()
    result = search(problem, searcher, Budget(seconds=5.0), clock=lambda: float(next(ticks)))
    looks = next(ticks)
    assert result.stopped in ("budget", "finished")
    assert looks <= 100, "a searcher stops soon after its time is up"
