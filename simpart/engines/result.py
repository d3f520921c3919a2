"""What every engine answers, and what none accepts."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from simpart.errors import UserError
from simpart.program import Durations, TaskKind, Topology

__all__ = ["Peaks", "Times", "check_durations", "completes_backward", "task_name"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_LETTERS = {
    TaskKind.FORWARD: "F",
    TaskKind.BACKWARD: "B",
    TaskKind.BACKWARD_INPUT: "I",
    TaskKind.BACKWARD_WEIGHT: "W",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Start and end of each task in seconds from the beginning of the step."""

    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Per group: the most bytes held at once, those bytes by `MEMORY_KINDS`, and the task that runs then (-1: none)."""

    bytes: Floats
    by_kind: Table
    task: Ints


def task_name(topology: Topology, task: int) -> str:
    """Schedule grammar for actions (`2F5`), the class and micro-batch for others.

    Tasks that are no actions are named by their class: `send 0>1 F, micro-batch 3`.
    """
    letter = _LETTERS.get(TaskKind(int(topology.kind[task])))
    m = int(topology.micro_batch[task])
    if letter is not None:
        return f"{int(topology.stage[task])}{letter}{m}"
    name = topology.class_names[int(topology.task_class[task])]
    return name if m < 0 else f"{name}, micro-batch {m}"


_completes: WeakKeyDictionary[Topology, Bools] = WeakKeyDictionary()


def completes_backward(topology: Topology) -> Bools:
    """Tasks after which the gradients of a stage's parameters are there; found once per topology."""
    found = _completes.get(topology)
    if found is None:
        found = _completes[topology] = _find_completing(topology)
    return found


def _find_completing(topology: Topology) -> Bools:
    kind = topology.kind
    found: Bools = (kind == int(TaskKind.BACKWARD)) | (kind == int(TaskKind.BACKWARD_WEIGHT))
    if topology.parts:  # of an action's tasks the last
        row = topology.resource_order[: topology.resource_indptr[topology.groups]]
        row = row[kind[row] < TaskKind.SEND]
        same = np.ones(max(0, row.size - 1), dtype=bool)
        for column in (topology.resource, kind, topology.stage, topology.micro_batch):
            same &= column[row[1:]] == column[row[:-1]]
        found[row[:-1][same]] = False
    return found


def check_durations(topology: Topology, durations: Durations) -> None:
    """Raise UserError naming the first task whose duration, or the first lag that, is negative, NaN or infinite."""
    bad = np.flatnonzero(~((durations.task_s >= 0) & np.isfinite(durations.task_s)))
    tasks = np.flatnonzero(np.isin(topology.task_class, bad)) if bad.size else bad
    if tasks.size:
        task = int(tasks[0])
        value = durations.task_s[topology.task_class[task]]
        raise UserError(f"a duration must be finite and at least 0 s, got {value} for task {task_name(topology, task)}")
    bad = np.flatnonzero(~((durations.lag_s >= 0) & np.isfinite(durations.lag_s)))
    edges = np.flatnonzero(np.isin(topology.lag, bad)) if bad.size else bad
    if edges.size:
        edge = int(edges[0])
        after = int(np.searchsorted(topology.indptr, edge, side="right")) - 1
        before, value = int(topology.predecessors[edge]), durations.lag_s[topology.lag[edge]]
        names = f"{task_name(topology, before)} to {task_name(topology, after)}"
        raise UserError(f"a latency must be finite and at least 0 s, got {value} from task {names}")
