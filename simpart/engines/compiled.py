"""The engine for search and sampling: the longest path through the tasks in static order, for one or many plans.

With the order on every resource fixed, a task starts at the latest of its predecessors' ends and its resource's last
end, so one pass in topological order gives all times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from simpart.engines._loops import highest_levels, longest_path, longest_path_held, replay_block
from simpart.engines.result import Peaks, Times, check_durations, completes_backward
from simpart.engines.tape import Tape, tape_of, worth_a_tape
from simpart.machine_code import compiled
from simpart.program import Durations, MemoryDeltas, Topology

__all__ = ["makespans", "peaks", "times", "times_and_peaks"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

CACHE_BYTES = 1 << 18
"""Registers of one block of plans: they should stay near a core (half of a second-level cache, or less)."""
WIDEST, NARROWEST = 64, 8
"""Plans in a block: enough to fill vector registers, few enough that a block's rows are read at once."""


def times(topology: Topology, durations: Durations) -> Times:
    """Start and end of every task of one plan."""
    size, resources = topology.size, topology.resource_indptr.size - 1
    arrays = (
        topology.order,
        topology.resource,
        topology.indptr,
        topology.predecessors,
        topology.lag,
        topology.task_class,
        np.asarray(durations.task_s, dtype=np.float64),
        np.asarray(durations.lag_s, dtype=np.float64),
    )
    jitted = compiled(longest_path, size)
    if jitted is not None:
        start, end = np.empty((2, size))
        sound = jitted(*arrays, np.zeros(resources), start, end)
    else:
        starts, ends = [0.0] * size, [0.0] * size
        lists: list[Any] = [*(a.tolist() for a in arrays), [0.0] * resources, starts, ends]
        sound = longest_path(*lists)
        start, end = np.array(starts), np.array(ends)
    if not sound:
        check_durations(topology, durations)
    return Times(start_s=start, end_s=end)


def times_and_peaks(topology: Topology, durations: Durations, memory: MemoryDeltas) -> tuple[Times, Peaks]:
    """`times` and `peaks` in one pass."""
    jitted = compiled(longest_path_held, topology.size)
    if jitted is None:
        return times(topology, durations), peaks(topology, memory)
    start, end = np.empty((2, topology.size))
    by_kind, where, total = memory.static.copy(), np.empty(topology.groups, dtype=np.int64), np.empty(topology.groups)
    sound = jitted(
        topology.order, topology.resource, topology.indptr, topology.predecessors, topology.lag, topology.task_class,
        np.asarray(durations.task_s, dtype=np.float64), np.asarray(durations.lag_s, dtype=np.float64),
        np.zeros(topology.resource_indptr.size - 1), start, end, topology.resource_indptr, topology.resource_order,
        topology.groups, completes_backward(topology), memory.late, memory.start, memory.end, memory.within,
        by_kind, where, total,
    )  # fmt: skip
    if not sound:
        check_durations(topology, durations)
    return Times(start_s=start, end_s=end), Peaks(bytes=total, by_kind=by_kind, task=where)


def makespans(topology: Topology, task_s: Table, lag_s: Table | None = None) -> Floats:
    """Seconds until the last task ends for each row of `task_s` (plans × classes) and `lag_s`."""
    plans = len(task_s)
    lag_s = np.zeros((plans, 1)) if lag_s is None else lag_s
    bad = np.flatnonzero(
        ~((task_s >= 0) & np.isfinite(task_s)).all(axis=1) | ~((lag_s >= 0) & np.isfinite(lag_s)).all(axis=1)
    )
    if bad.size:
        check_durations(topology, Durations(task_s=task_s[bad[0]], lag_s=lag_s[bad[0]]))
    if not worth_a_tape(topology, plans):
        one_by_one = (Durations(task_s=task, lag_s=lag) for task, lag in zip(task_s, lag_s, strict=True))
        return np.array([times(topology, durations).makespan_s for durations in one_by_one], dtype=np.float64)
    tape, latest = tape_of(topology), np.zeros(plans)
    jitted = compiled(
        replay_block, topology.size * plans // 64
    )  # numpy does about 64 plans in the time of one in Python
    fitting = CACHE_BYTES // (8 * max(1, tape.registers)) // NARROWEST * NARROWEST
    block = max(NARROWEST, min(WIDEST, fitting)) if jitted is not None else max(1, plans)
    for first in range(0, plans, block):
        rows = slice(first, min(first + block, plans))
        width = rows.stop - first
        durations = (np.ascontiguousarray(task_s[rows].T), np.ascontiguousarray(lag_s[rows].T))
        end = np.empty((tape.registers, width))
        if jitted is not None:
            jitted(*tape[:-1], *durations, end, latest[rows])
        else:
            _replay_numpy(tape, *durations, end, latest[rows])
    return latest


def _peaks_of(topology: Topology, memory: MemoryDeltas, group: int) -> Peaks:
    rows, one = topology.resource_indptr[group : group + 2], slice(group, group + 1)
    alone = replace(topology, resource_indptr=rows, groups=1)
    return peaks(alone, replace(memory, static=memory.static[one], late=memory.late[one]))


def _replay_numpy(tape: Tape, task_s: Table, lag_s: Table, end: Table, latest: Floats) -> None:
    """`replay_block` with numpy over the plans and Python over the tasks."""
    classes, write, indptr, read, lag = (array.tolist() for array in tape[:5])
    for i, last in enumerate(tape.last.tolist()):
        ready: Floats | float = 0.0
        for k in range(indptr[i], indptr[i + 1]):
            arrival = end[read[k]] + lag_s[lag[k]] if lag[k] >= 0 else end[read[k]]
            ready = arrival if k == indptr[i] else np.maximum(ready, arrival)
        np.add(ready, task_s[classes[i]], out=end[write[i]])
        if last:
            np.maximum(latest, end[write[i]], out=latest)


def peaks(topology: Topology, memory: MemoryDeltas, group: int | None = None) -> Peaks:
    """The most bytes each group holds at once, when, and of what; with `group` that of this one alone."""
    if group is not None:
        return _peaks_of(topology, memory, group)
    by_kind, where = memory.static.copy(), np.full(topology.groups, -1, dtype=np.int64)
    completes = completes_backward(topology)
    queues = (topology.resource_indptr, topology.resource_order, topology.groups, topology.task_class, completes)
    tables = (memory.static, memory.late, memory.start, memory.end, memory.within)
    jitted = compiled(highest_levels, topology.size)
    if jitted is not None:
        jitted(*queues, *tables, by_kind, where)
    else:
        lists: list[Any] = [a if isinstance(a, int) else a.tolist() for a in (*queues, *tables)]
        highest_levels(*[*lists, by_kind, where])
    return Peaks(bytes=by_kind.sum(axis=1), by_kind=by_kind, task=where)
