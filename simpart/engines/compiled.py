"""The engine for search and sampling: the longest path through the tasks in static order, for one or many plans.

With the order on every resource fixed, a task starts at the latest of its predecessors' ends and its resource's last
end, so one pass in topological order gives all times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simpart.engines._jit import compiled
from simpart.engines._loops import highest_levels, longest_path, longest_paths
from simpart.engines.result import Peaks, Times, check_durations, completes_backward
from simpart.program import Durations, MemoryDeltas, Topology

__all__ = ["makespans", "peaks", "times"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

CACHE_BYTES = 1 << 20
"""Ends of one block of plans should stay in a core's second-level cache (1–2 MiB on current server cores)."""
NUMPY_BYTES = 64 << 20
"""Ends of one block of plans where numpy does the work: few blocks, little memory."""


def times(topology: Topology, durations: Durations) -> Times:
    """Start and end of every task of one plan."""
    check_durations(topology, durations)
    size, resources = topology.size, topology.resource_indptr.size - 1
    arrays = (
        topology.order,
        topology.resource,
        topology.indptr,
        topology.predecessors,
        topology.lag,
        topology.task_class,
    )
    task_s, lag_s = durations.task_s.astype(np.float64), durations.lag_s.astype(np.float64)
    start, end = np.empty(size), np.empty(size)
    jitted = compiled(longest_path, size)
    if jitted is not None:
        jitted(*arrays, task_s, lag_s, np.zeros(resources), start, end)
        return Times(start_s=start, end_s=end)
    starts, ends = [0.0] * size, [0.0] * size
    lists: list[Any] = [*(a.tolist() for a in (*arrays, task_s, lag_s)), [0.0] * resources, starts, ends]
    longest_path(*lists)
    return Times(start_s=np.array(starts), end_s=np.array(ends))


def makespans(topology: Topology, task_s: Table, lag_s: Table | None = None) -> Floats:
    """Seconds until the last task ends for each row of `task_s` (plans × classes) and `lag_s`."""
    plans, size = len(task_s), topology.size
    lag_s = np.zeros((plans, 1)) if lag_s is None else lag_s
    bad = np.flatnonzero(
        ~((task_s >= 0) & np.isfinite(task_s)).all(axis=1) | ~((lag_s >= 0) & np.isfinite(lag_s)).all(axis=1)
    )
    if bad.size:
        check_durations(topology, Durations(task_s=task_s[bad[0]], lag_s=lag_s[bad[0]]))
    resources = topology.resource_indptr.size - 1
    latest = np.zeros(plans)
    block = max(8, min(64, CACHE_BYTES // (8 * max(1, size)) // 8 * 8))
    arrays = (
        topology.order,
        topology.resource,
        topology.indptr,
        topology.predecessors,
        topology.lag,
        topology.task_class,
    )
    jitted = compiled(longest_paths, size * plans // 64)  # numpy does about 64 plans in the time of one in Python
    run = jitted or _longest_paths_numpy
    if jitted is None:
        block = max(1, NUMPY_BYTES // (8 * max(1, size)))
    for first in range(0, plans, block):
        rows = slice(first, min(first + block, plans))
        width = rows.stop - first
        durations = (np.ascontiguousarray(task_s[rows].T), np.ascontiguousarray(lag_s[rows].T))
        run(*arrays, *durations, np.zeros((resources, width)), np.empty((size, width)), latest[rows])
    return latest


def _longest_paths_numpy(
    order: Ints, resource: Ints, indptr: Ints, predecessors: Ints, lag: Ints, task_class: Ints,
    task_s: Table, lag_s: Table, free: Table, end: Table, latest: Floats,
) -> None:  # fmt: skip
    """`longest_paths` with numpy over the plans and Python over the tasks."""
    pointers, before, lags = indptr.tolist(), predecessors.tolist(), lag.tolist()
    resources, classes = resource.tolist(), task_class.tolist()
    zero = np.zeros(task_s.shape[1])
    for i in order.tolist():
        r = resources[i]
        ready = free[r] if r >= 0 else zero
        for k in range(pointers[i], pointers[i + 1]):
            arrival = end[before[k]]
            ready = np.maximum(ready, arrival + lag_s[lags[k]] if lags[k] >= 0 else arrival)
        np.add(ready, task_s[classes[i]], out=end[i])
        if r >= 0:
            free[r] = end[i]
    np.maximum(latest, end.max(axis=0, initial=0.0), out=latest)


def peaks(topology: Topology, memory: MemoryDeltas) -> Peaks:
    """The most bytes each group holds at once, when, and of what."""
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
