"""Simulated annealing on the simulated step, the kind of search that FlexFlow does (Jia et al., MLSys 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpart.problem import Problem
from simpart.searchers._chain_plans import why_no_plans
from simpart.searchers._points import SLOWEST, Point, Points
from simpart.searching import Control, Proposal

__all__ = ["Annealing"]

OUT_OF_MEMORY = 10.0
"""How many times longer a plan counts that does not fit, so that a walk that starts there finds its way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """`walks` walks side by side, `moves` moves in all: a worse plan is taken with probability
    exp(-loss / temperature), which falls. A walk that is far behind the best goes on from there, now and then."""

    name: str = "annealing"
    objective: str = SLOWEST
    most_blocks: int = 32
    moves: int = 400
    walks: int = 4
    first_temperature: float = 0.1
    last_temperature: float = 0.002
    rejoin_every: int = 25

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        """One plan of every walk at a time; a reason if there is none at all."""
        points = Points(problem, control, self.most_blocks)
        if not len(points):
            yield from why_no_plans(problem, {}, set())
            return
        here: list[Point | None] = [None] * self.walks
        here_s = [math.inf] * self.walks
        rounds = -(-self.moves // self.walks)
        for turn in range(rounds):
            control.check()
            tried = [points.draw(rng) if point is None else points.move(rng, point) for point in here]
            tried = tried[: self.moves - turn * self.walks]
            control.report(done=turn * self.walks, total=self.moves)
            yield [points.candidate(point) for point in tried]
            cooled = (self.last_temperature / self.first_temperature) ** (turn / max(1, rounds - 1))
            for walk, (point, result) in enumerate(zip(tried, control.results, strict=False)):
                if result is None:
                    continue
                step_s = result.evaluation.step_s * (1 if result.evaluation.feasible else OUT_OF_MEMORY)
                loss = 0.0 if here[walk] is None else step_s / here_s[walk] - 1
                if loss <= 0 or rng.random() < math.exp(-loss / (self.first_temperature * cooled)):
                    here[walk], here_s[walk] = point, step_s
            if (turn + 1) % self.rejoin_every == 0:
                best, worst = int(np.argmin(here_s)), int(np.argmax(here_s))
                here[worst], here_s[worst] = here[best], here_s[best]
