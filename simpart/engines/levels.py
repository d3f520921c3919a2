"""Peak memory of many plans that share a topology, without a walk through the tasks of each.

Along a group's row only some combinations occur of micro-batches between F and I (or B), micro-batches between I and
W, and the task that runs. They are found once per topology; a plan's level at each is a short sum. This holds where a
stage takes and keeps no less than nothing, and gives back after W (or B) all that F took, as `lower` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from simpart.engines.compiled import peaks
from simpart.engines.result import completes_backward
from simpart.program import MemoryDeltas, TaskKind, Topology

__all__ = ["Levels", "highest", "levels_of", "peak_bytes"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Levels(NamedTuple):
    """The distinct combinations of all groups, group by group from `first[g]` on. In each, stage `stage[i, j]` has
    `whole[i, j]` micro-batches before and `half[i, j]` after their input gradient."""

    first: Ints
    group: Ints
    task_class: Ints  # of the task that runs; -1 before any
    late: Floats  # 1 after the first backward
    stage: Rows
    whole: Table
    half: Table
    stages: int


_known: WeakKeyDictionary[Topology, Levels] = WeakKeyDictionary()
_asked: WeakKeyDictionary[Topology, int] = WeakKeyDictionary()
WORTH_FINDING = 16
"""Plans from which the combinations are found sooner than all tasks are walked through."""


def peak_bytes(topology: Topology, memory: Sequence[MemoryDeltas]) -> Table:
    """The most bytes each group holds at once, plans × groups; equal to those of `compiled.peaks`."""
    levels = _known.get(topology)
    if levels is None:
        asked = _asked[topology] = _asked.get(topology, 0) + len(memory)
        if asked < WORTH_FINDING:
            return np.stack([peaks(topology, m).bytes for m in memory])
        levels = levels_of(topology)
    tables = [[m.static for m in memory], [m.late for m in memory], [m.start for m in memory]]
    tables += [[m.end for m in memory], [m.within for m in memory]]
    found = highest(levels, *(np.stack(table, axis=1).sum(axis=2) for table in tables))
    return np.stack([peaks(topology, m).bytes for m in memory]) if found is None else found


def highest(levels: Levels, static: Table, late: Table, start: Table, end: Table, within: Table) -> Table | None:
    """The same from sums over kinds, groups or classes × plans. None where they are of no such form."""
    of_stage = np.arange(levels.stages) * 4
    whole, kept = start[of_stage], -end[of_stage + 3]
    rest = [start[4 * levels.stages :], end[4 * levels.stages :], *(start[of_stage + k] for k in (1, 2, 3))]
    balanced = np.array_equal(whole, -end[of_stage + 1]) and np.array_equal(whole, kept - end[of_stage + 2])
    balanced = balanced and min(whole.min(), kept.min(), late.min()) >= 0
    if not balanced or end[of_stage].any() or any(table.any() for table in rest):
        return None
    held = static[levels.group] + levels.late[:, None] * late[levels.group]
    for j in range(levels.stage.shape[1]):
        held += levels.whole[:, j, None] * whole[levels.stage[:, j]]
        if levels.half[:, j].any():
            held += levels.half[:, j, None] * kept[levels.stage[:, j]]
    busy = levels.task_class >= 0
    held[busy] += within[levels.task_class[busy]]
    most: Table = np.maximum.reduceat(held, levels.first, axis=0).T
    return most


def levels_of(topology: Topology) -> Levels:
    """The combinations of a topology; found once."""
    if topology not in _known:
        _known[topology] = _find(topology)
    return _known[topology]


def _find(topology: Topology) -> Levels:
    stages = int(topology.stage.max(initial=-1)) + 1
    completes = completes_backward(topology)
    parts: list[tuple[int, list[int], Rows]] = []
    for g in range(topology.groups):
        row = topology.resource_order[topology.resource_indptr[g] : topology.resource_indptr[g + 1]]
        kind, stage = topology.kind[row], topology.stage[row]
        action = kind < TaskKind.SEND
        mine = np.unique(stage[action]).tolist()
        columns = [topology.task_class[row]]
        done: Ints = np.cumsum(completes[row]) - completes[row]
        columns.append(np.minimum(done, 1))
        for s in mine:
            here = action & (stage == s)
            begun = np.cumsum(here & (kind == TaskKind.FORWARD))
            ended = here & ((kind == TaskKind.BACKWARD) | (kind == TaskKind.BACKWARD_INPUT))
            split, last = here & (kind == TaskKind.BACKWARD_INPUT), here & (kind == TaskKind.BACKWARD_WEIGHT)
            columns.append(begun - np.cumsum(ended) + ended)  # what a task gives back it holds while it runs
            columns.append(np.cumsum(split) - split - np.cumsum(last) + last)
        before = np.array([[-1] + [0] * (len(columns) - 1)])
        parts.append((g, mine, _highest(np.concatenate([before, np.stack(columns, axis=1)]))))
    width = max(len(mine) for _, mine, _ in parts)
    sizes = [len(table) for _, _, table in parts]
    stage_of = np.zeros((sum(sizes), width), dtype=np.int64)
    whole, half = np.zeros((2, sum(sizes), width))
    first = np.cumsum([0, *sizes[:-1]])
    for begin, (_, mine, table) in zip(first.tolist(), parts, strict=True):
        block = slice(begin, begin + len(table))
        stage_of[block, : len(mine)] = mine
        whole[block, : len(mine)], half[block, : len(mine)] = table[:, 2::2], table[:, 3::2]
    every = [table for _, _, table in parts]
    return Levels(
        first=first, group=np.repeat([g for g, _, _ in parts], sizes),
        task_class=np.concatenate([table[:, 0] for table in every]),
        late=np.concatenate([table[:, 1] for table in every]).astype(np.float64),
        stage=stage_of, whole=whole, half=half, stages=stages,
    )  # fmt: skip


def _highest(table: Rows) -> Rows:
    """Of the rows only those that may be the highest, where all but the first column count towards a level: of rows
    equal but for one column that with most in it."""
    for column in range(1, table.shape[1]):
        rest = np.delete(table, column, axis=1)
        low = rest.min(axis=0)
        extent = rest.max(axis=0) - low + 1
        if float(np.prod(extent.astype(np.float64))) > 2.0**62:
            continue
        order = np.lexsort((table[:, column], number := (rest - low) @ (np.cumprod(extent) // extent)))
        table = table[order[np.append(np.diff(number[order]) != 0, True)]]
    return table
