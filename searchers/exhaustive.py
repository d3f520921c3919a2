"""Every plan there is, on a chain short enough to list them all: what other searchers are measured against."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpart.problem import Problem
from simpart.searchers._chain_plans import why_no_plans
from simpart.searchers._points import BATCH, SLOWEST, Points, batched
from simpart.searching import Candidate, Control, Proposal

__all__ = ["Exhaustive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive:
    """All cuts, replica counts, pipelines, micro-batches, schedules and recomputation.

    The chain has as many blocks as `most_plans` allows.
    """

    name: str = "exhaustive"
    objective: str = SLOWEST
    most_blocks: int = 12
    most_plans: int = 2_000

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        """Every plan, in a fixed order; a reason where even whole models on one stage are too many."""
        points = Points(problem, control, self.most_blocks)
        for blocks in range(self.most_blocks - 1, 0, -1):
            if len(points) <= self.most_plans:
                break
            control.check()
            points = Points(problem, control, blocks)
        if len(points) > self.most_plans:
            why = f"{len(points)} plans are more than {self.most_plans}; narrow the space, or use another searcher"
            yield Candidate(plan=None, family="any stages", why=why)
            return
        least_s, done = math.inf, 0
        for batch in batched(points, BATCH):
            control.check()
            control.report(done=done, total=len(points))
            candidates = [points.candidate(point) for point in batch]
            least_s, done = min([least_s, *(c.objective_s for c in candidates)]), done + len(batch)
            yield candidates
        if done:
            control.report(done=done, total=done, bound=least_s)
        else:
            yield from why_no_plans(problem, {}, set())
