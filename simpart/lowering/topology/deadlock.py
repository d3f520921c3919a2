"""What to say of a schedule whose actions wait for one another."""

from __future__ import annotations

from typing import Any

import numpy as np

from simpart.engines.order import Deadlock
from simpart.errors import ScheduleError
from simpart.lowering.topology.arrays import KINDS, Actions
from simpart.program import TaskKind
from simpart.schedule import Action, grid

__all__ = ["deadlock_error"]

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]


def deadlock_error(
    actions: Actions, task_of: Ints, deadlock: Deadlock, indptr: Ints, predecessors: Ints,
    kind: Ints, stage: Ints, micro_batch: Ints,
) -> ScheduleError:  # fmt: skip
    """Names the earliest action that is stuck and what it waits for, with the part of the grid around it."""

    def action(task: int) -> Action:
        return Action(int(stage[task]), KINDS[kind[task]], int(micro_batch[task]))  # type: ignore[arg-type]

    columns = np.arange(actions.stage.size) - np.repeat(actions.indptr[:-1], np.diff(actions.indptr))
    stuck = [
        i
        for i in np.searchsorted(task_of, deadlock.stuck).tolist()
        if i < task_of.size and task_of[i] in deadlock.stuck
    ]
    at = min(stuck, key=lambda i: (columns[i], i))
    column, row = int(columns[at]), int(np.searchsorted(actions.indptr, at, side="right")) - 1
    cause = int(predecessors[indptr[task_of[at]]])
    for task in predecessors[indptr[task_of[at]] : indptr[task_of[at] + 1]].tolist():
        cause = task if kind[task] != TaskKind.SEND else int(predecessors[indptr[task]])
        if cause in set(task_of[_behind(actions, task_of, deadlock.stuck)].tolist()):
            break
    rows = [
        [action(int(t)) for t in task_of[actions.indptr[g] : actions.indptr[g + 1]][: column + 9]]
        if abs(g - row) < 9
        else []
        for g in range(len(actions.indptr) - 1)
    ]
    name = str(action(int(task_of[at])))
    return ScheduleError(
        f"the schedule deadlocks: group {row} cannot run {name} (action {column}), which waits for {action(cause)}; "
        f"move {name} behind what {action(cause)} needs",
        grid(rows, (row, column)),
    )


def _behind(actions: Actions, task_of: Ints, stuck: tuple[int, ...]) -> Ints:
    """Indices of actions that stand at or behind a stuck one in its row, hence never run."""
    parts = [np.zeros(0, dtype=np.int64)]
    for i in np.searchsorted(task_of, stuck).tolist():
        if i < task_of.size and task_of[i] in stuck:
            row = int(np.searchsorted(actions.indptr, i, side="right")) - 1
            parts.append(np.arange(i, actions.indptr[row + 1]))
    return np.concatenate(parts)
