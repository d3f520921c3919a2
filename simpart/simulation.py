"""Replaying a lowered plan: how long a step takes, how sure that is, what it holds, what limits it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simpart.engines import compiled
from simpart.errors import UserError
from simpart.program import Durations
from simpart.schedule import Rows, Schedule, check_rows
from simpart.topology import Shape, StageEdge, actions_of_rows, build_topology, class_of_action

__all__ = ["makespan", "peak_in_flight"]


def makespan(
    rows: Rows, forward_s: Sequence[float], backward_s: Sequence[float], latency_s: float = 0.0
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a chain of stages under a schedule, and the most micro-batches in flight per stage.

    Micro-batches take `forward_s[s]` and `backward_s[s]` on stage s (a split backward half each in I and W);
    `latency_s` is a pure delay between neighbours, both ways, that occupies nothing.

    >>> from simpart.schedule import one_f_one_b
    >>> makespan(one_f_one_b([0, 1], 2), [1, 1], [2, 2])
    (9.0, (2, 1))
    """
    stages = len(forward_s)
    group_of_stage = tuple(
        next((g for g, row in enumerate(rows) if any(a.stage == s for a in row)), -1) for s in range(stages)
    )
    if -1 in group_of_stage:
        raise UserError(f"stage {group_of_stage.index(-1)} has no action in the schedule; give it a row or drop it")
    micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    check_rows(rows, group_of_stage, micro_batches)
    chain = tuple(StageEdge(s, s + 1) for s in range(stages - 1))
    shape = Shape(group_of_stage, Schedule(kind="explicit"), micro_batches, chain, transfers="lags")
    topology = build_topology(shape, actions_of_rows(rows))
    task_s = np.zeros(len(topology.class_names))
    for s in range(stages):
        for kind, seconds in (
            ("F", forward_s[s]),
            ("B", backward_s[s]),
            ("I", backward_s[s] / 2),
            ("W", backward_s[s] / 2),
        ):
            task_s[class_of_action(s, kind)] = seconds
    durations = Durations(task_s=task_s, lag_s=np.full(max(1, 2 * len(chain)), float(latency_s)))
    return compiled.times(topology, durations).makespan_s, peak_in_flight(rows, stages)


def peak_in_flight(rows: Rows, stages: int) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose forward has run and whose backward (or weight gradient) has not."""
    now, most = [0] * stages, [0] * stages
    for row in rows:
        for action in row:
            now[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)
