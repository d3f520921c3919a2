"""Hill climbing from a chain plan by simulated step time: what closed forms of a schedule leave on the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from simpart.problem import Problem
from simpart.searchers._chain_plans import Answer, ChainCase, chain_plan
from simpart.searchers._pipelines import plan_lockstep_s
from simpart.searchers._stages import ChainStage
from simpart.searching import Control
from simpart.simulation import evaluate

__all__ = ["climb", "neighbours"]

Stages = tuple[ChainStage, ...]


def climb(
    problem: Problem, control: Control, case: ChainCase, start: Stages, *, rounds: int = 16, looked_at: int = 32
) -> Iterator[Stages]:
    """Better and better feasible neighbours of `start`, each the best of its round; ends at a local optimum.

    Of each round's neighbours, the `looked_at` of least lock-step estimate are simulated.
    """

    def steps(options: Sequence[Stages]) -> list[float]:
        plans = [
            chain_plan(problem, case.chain, case.shape, Answer(stages=o, objective_s=0.0), case.schedule)
            for o in options
        ]
        return [e.step_s if e.feasible else float("inf") for e in evaluate(problem, plans)] if plans else []

    here, step_s = start, steps([start])[0]
    for _ in range(rounds):
        control.check()
        options = sorted(neighbours(here, case.costs.counts), key=lambda o: plan_lockstep_s(case.costs, o))[:looked_at]
        times = steps(options)
        best = min(range(len(options)), key=times.__getitem__, default=None)
        if best is None or not times[best] < step_s * (1 - 1e-9):
            return
        here, step_s = options[best], times[best]
        yield here


def neighbours(stages: Stages, allowed: Sequence[int]) -> Iterator[Stages]:
    """Every cut anywhere between its neighbours; devices moved between two stages, among `allowed` replica counts.

    Near moves alone would be caught between layers, since much crosses in the middle of one.
    """
    for x in range(len(stages) - 1):
        for cut in range(stages[x].start + 1, stages[x + 1].end):
            if cut != stages[x].end:
                yield _replaced(stages, {x: {"end": cut}, x + 1: {"start": cut}})
    for x in range(len(stages)):
        for y in range(len(stages)):
            total = stages[x].replicas + stages[y].replicas
            for mine in allowed:
                if x < y and mine != stages[x].replicas and total - mine in allowed:
                    yield _replaced(stages, {x: {"replicas": mine}, y: {"replicas": total - mine}})


def _replaced(stages: Stages, changes: dict[int, dict[str, int]]) -> Stages:
    return tuple(dataclasses.replace(stage, **changes.get(x, {})) for x, stage in enumerate(stages))
