"""The readable reference: every resource is a process that runs its queue, every task an event that others wait for.

Orders are fixed. Without `flows` transfers don't disturb one another, so answers equal those of the compiled engine to
rounding; with them, transfers and collectives share the links they meet on.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from simpart.engines.fabric import Fabric
from simpart.engines.result import Peaks, Times, check_durations, completes_backward
from simpart.program import Durations, Flows, MemoryDeltas, Topology

__all__ = ["simulate_events"]


def simulate_events(
    topology: Topology, durations: Durations, memory: MemoryDeltas | None = None, flows: Flows | None = None
) -> tuple[Times, Peaks | None]:
    """Run the step event by event; with `memory`, follow each group's level as tasks start and end."""
    check_durations(topology, durations)
    environment = simpy.Environment()
    start, end = np.zeros(topology.size), np.zeros(topology.size)
    done = [environment.event() for _ in range(topology.size)]
    levels = None if memory is None else Levels(topology, memory)
    fabric = None if flows is None else Fabric(environment, flows, durations)
    task_s, lag_s = durations.task_s.tolist(), durations.lag_s.tolist()
    classes, indptr = topology.task_class.tolist(), topology.indptr.tolist()
    predecessors, lags = topology.predecessors.tolist(), topology.lag.tolist()

    def run(tasks: list[int], group: int) -> Generator[simpy.Event, Any, None]:
        for task in tasks:
            ready = environment.now
            for k in range(indptr[task], indptr[task + 1]):
                if not done[predecessors[k]].processed:
                    yield done[predecessors[k]]
                ready = max(ready, end[predecessors[k]] + (lag_s[lags[k]] if lags[k] >= 0 else 0.0))
            if ready > environment.now:
                yield environment.timeout(ready - environment.now)
            start[task] = environment.now
            if levels is not None and group >= 0:
                levels.starts(group, task)
            if fabric is not None and fabric.carries(classes[task]):
                yield fabric.transfer(classes[task], task_s[classes[task]])
            else:
                yield environment.timeout(task_s[classes[task]])
            end[task] = environment.now
            if levels is not None and group >= 0:
                levels.ends(group, task)
            done[task].succeed()

    for r in range(topology.resource_indptr.size - 1):
        row = topology.resource_order[topology.resource_indptr[r] : topology.resource_indptr[r + 1]]
        environment.process(run(row.tolist(), r if r < topology.groups else -1))
    for task in np.flatnonzero(topology.resource < 0).tolist():
        environment.process(run([task], -1))
    environment.run()
    return Times(start_s=start, end_s=end), None if levels is None else levels.peaks()


class Levels:
    """The bytes each group holds now and the most it has held."""

    def __init__(self, topology: Topology, memory: MemoryDeltas) -> None:
        self.topology, self.memory = topology, memory
        self.now = memory.static.copy()
        self.highest = memory.static.copy()
        self.task = np.full(topology.groups, -1, dtype=np.int64)
        self.completes = completes_backward(topology)
        self.has_gradients = np.zeros(topology.groups, dtype=bool)

    def starts(self, group: int, task: int) -> None:
        c = self.topology.task_class[task]
        self.now[group] += self.memory.start[c]
        held = self.now[group] + self.memory.within[c]
        if held.sum() > self.highest[group].sum():
            self.highest[group], self.task[group] = held, task

    def ends(self, group: int, task: int) -> None:
        self.now[group] += self.memory.end[self.topology.task_class[task]]
        if self.completes[task] and not self.has_gradients[group]:
            self.has_gradients[group] = True
            self.now[group] += self.memory.late[group]

    def peaks(self) -> Peaks:
        return Peaks(bytes=self.highest.sum(axis=1), by_kind=self.highest, task=self.task)
