"""Hill climbing from a chain plan by simulated step time: what closed forms of a schedule leave on the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searchers._chain import ChainStage
from simpart.simulation import evaluate

__all__ = ["climb", "neighbours"]

Stages = tuple[ChainStage, ...]


def climb(
    problem: Problem,
    start: Stages,
    allowed: Sequence[int],
    plan_of: Callable[[Stages], Plan],
    *,
    rounds: int = 16,
) -> Iterator[Stages]:
    """Better and better feasible neighbours of `start`, each the best of its round; ends at a local optimum."""
    here, step_s = start, _steps(problem, [plan_of(start)])[0]
    for _ in range(rounds):
        options = list(neighbours(here, allowed))
        times = _steps(problem, [plan_of(option) for option in options])
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


def _steps(problem: Problem, plans: Sequence[Plan]) -> list[float]:
    return [e.step_s if e.feasible else float("inf") for e in evaluate(problem, plans)] if plans else []
