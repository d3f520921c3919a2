"""Simulated annealing on the simulated step, the kind of search that FlexFlow does (Jia et al., MLSys 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpart.problem import Problem
from simpart.searchers._chain_plans import stages_text, why_no_plans
from simpart.searchers._points import Points
from simpart.searching import Candidate, Control

__all__ = ["Annealing"]

OUT_OF_MEMORY = 10.0
"""How many times longer a plan counts that does not fit, so that a walk that starts there finds its way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """A walk of `moves` moves: a worse plan is taken with probability exp(-loss / temperature), which falls."""

    name: str = "annealing"
    most_blocks: int = 32
    moves: int = 400
    first_temperature: float = 0.1
    last_temperature: float = 0.002

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """Every plan looked at, in the order of the walk; a reason if there is none at all."""
        points = Points(problem, control, self.most_blocks)
        if not len(points):
            yield from why_no_plans(problem, {}, set())
            return
        here, here_s = None, math.inf
        for move in range(self.moves):
            control.check()
            point = points.draw(rng) if here is None else points.move(rng, here)
            control.report(done=move, total=self.moves)
            yield Candidate(
                plan=points.plan(point), family=stages_text(len(point.stages)), objective_s=points.estimate_s(point)
            )
            if control.latest is None:
                continue
            evaluation = control.latest.evaluation
            step_s = evaluation.step_s * (1 if evaluation.feasible else OUT_OF_MEMORY)
            cooled = (self.last_temperature / self.first_temperature) ** (move / max(1, self.moves - 1))
            loss = 0.0 if here is None else step_s / here_s - 1
            if here is None or loss <= 0 or rng.random() < math.exp(-loss / (self.first_temperature * cooled)):
                here, here_s = point, step_s
