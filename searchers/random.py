"""Plans drawn at random: the plainest baseline of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpart.problem import Problem
from simpart.searchers._chain_plans import why_no_plans
from simpart.searchers._points import BATCH, SLOWEST, Points
from simpart.searching import Control, Proposal

__all__ = ["Random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """`draws` plans: a shape, a number of stages, cuts and replica counts, each with equal chances."""

    name: str = "random"
    objective: str = SLOWEST
    most_blocks: int = 32
    draws: int = 256

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        """Plans in the order drawn, several at a time; a reason if there is none at all."""
        points = Points(problem, control, self.most_blocks)
        if not len(points):
            yield from why_no_plans(problem, {}, set())
            return
        for done in range(0, self.draws, BATCH):
            control.check()
            control.report(done=done, total=self.draws)
            yield [points.candidate(points.draw(rng)) for _ in range(min(BATCH, self.draws - done))]
