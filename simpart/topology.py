"""From a schedule to tasks: which run, on what, after what. Depends on a plan's shape alone, and is cached by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from simpart.engines.order import Deadlock, static_order
from simpart.errors import ScheduleError, UserError
from simpart.program import TaskKind, Topology
from simpart.schedule import Action, Overlapped, Rows, Schedule, grid

__all__ = [
    "Reduction", "Shape", "StageEdge", "Transfers", "build_topology", "class_of_action", "class_of_reduction",
    "class_of_send", "class_of_update", "topology_of",
]  # fmt: skip

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
INDEX = np.int32
Transfers = Literal["tasks", "lags"]
NONE = np.zeros(0, dtype=np.int64)
KINDS = "FBIW"
"""Actions by the number of their `TaskKind`."""


class StageEdge(NamedTuple):
    """Stage `target` reads a value of stage `source`; with `backward` a gradient comes back."""

    source: int
    target: int
    backward: bool = True


class Reduction(NamedTuple):
    """A gradient collective in which whole `groups` take part, after their backward passes. `stage` is -1 where it
    serves several; `axis` is what exposed time is reported under."""

    name: str
    axis: str
    stage: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Topology depends on. With `transfers` "tasks", a transfer occupies the link between its two groups, which
    sends in the order of production; with "lags", it is a pure delay (and links have no limit)."""

    group_of_stage: tuple[int, ...]
    schedule: Schedule
    micro_batches: int
    edges: tuple[StageEdge, ...]
    transfers: Transfers = "tasks"
    reductions: tuple[Reduction, ...] = ()
    optimizer: bool = False


def class_of_action(stage: int, kind: str) -> int:
    return 4 * stage + KINDS.index(kind)


def class_of_send(shape: Shape, edge: int, backward: bool) -> int:
    """Task class of an edge's transfers; its lag class is `2 * edge + backward`."""
    return 4 * len(shape.group_of_stage) + 2 * edge + backward


def class_of_reduction(shape: Shape, reduction: int) -> int:
    return 4 * len(shape.group_of_stage) + 2 * len(shape.edges) + reduction


def class_of_update(shape: Shape, group: int) -> int:
    """Task class of a group's optimizer update."""
    return class_of_reduction(shape, len(shape.reductions)) + group


@lru_cache(maxsize=32)  # one can take tens of megabytes
def topology_of(shape: Shape) -> Topology:
    """The tasks of this shape; raises UserError with the grid where the schedule deadlocks.

    Classes of tasks: 4 per stage (F, B, I, W), 2 per edge (there and back), one per reduction, one optimizer update per
    group. That a backward follows its own forward is left to the row both stand in (`schedule.check_rows`).
    """
    return build_topology(shape, actions_of(shape))


class Actions(NamedTuple):
    """All rows one after the other, as arrays; `kind` indexes KINDS, `pairs` are the places of overlapped forwards."""

    indptr: Ints
    stage: Ints
    kind: Ints
    micro_batch: Ints
    pairs: Ints


def actions_of(shape: Shape) -> Actions:
    """The schedule's rows; those of GPipe and 1F1B without a Python object per action (equal to `schedule.rows`)."""
    stages, count = len(shape.group_of_stage), shape.micro_batches
    one_each = len(set(shape.group_of_stage)) == stages
    if shape.schedule.kind == "1f1b" and one_each:
        order = np.argsort(np.array(shape.group_of_stage))
        warm_up = np.minimum(stages - order, count).astype(INDEX)[:, None]
        m = np.arange(count, dtype=INDEX)[None, :]
        forward_at = np.where(m < warm_up, m, 2 * m - warm_up + 1)
        backward_at = warm_up + m + np.minimum(m, count - warm_up)
        kind, micro_batch = np.empty((2, stages, 2 * count), dtype=INDEX)
        for at, number in ((forward_at, 0), (backward_at, 1)):
            np.put_along_axis(kind, at, number, axis=1)
            np.put_along_axis(micro_batch, at, np.broadcast_to(m, at.shape), axis=1)
        return Actions(
            np.arange(stages + 1) * 2 * count,
            np.repeat(order.astype(INDEX), 2 * count),
            kind.ravel(),
            micro_batch.ravel(),
            NONE,
        )
    if shape.schedule.kind == "gpipe":
        home = np.array(shape.group_of_stage)
        order = np.argsort(home, kind="stable").astype(INDEX)
        parts = np.split(order, np.flatnonzero(np.diff(home[order])) + 1)
        there = np.concatenate([np.concatenate([found, found[::-1]]) for found in parts])
        kinds = np.concatenate([np.repeat(np.array([0, 1], dtype=INDEX), found.size) for found in parts])
        indptr = np.cumsum([0] + [2 * count * found.size for found in parts])
        each = np.tile(np.arange(count, dtype=INDEX), there.size)
        return Actions(indptr, np.repeat(there, count), np.repeat(kinds, count), each, NONE)
    return actions_of_rows(shape.schedule.rows(shape.group_of_stage, count))


def actions_of_rows(rows: Rows) -> Actions:
    flat = [action for row in rows for action in row]
    indptr = np.cumsum([0] + [len(row) for row in rows])
    number = {kind: i for i, kind in enumerate(KINDS)}
    stages, letters, micro_batches = zip(*flat, strict=True) if flat else ((), (), ())
    stage, micro_batch = np.array(stages, dtype=INDEX), np.array(micro_batches, dtype=INDEX)
    kind = np.array([number[letter] for letter in letters], dtype=INDEX)
    pairs = np.array([i for i, a in enumerate(flat) if type(a) is Overlapped], dtype=np.int64)
    return Actions(indptr, stage, kind, micro_batch, pairs)


def build_topology(shape: Shape, actions: Actions) -> Topology:
    """Tasks are numbered resource by resource, in queue order: groups (actions, reductions, update), then links."""
    groups, stages, count = len(actions.indptr) - 1, len(shape.group_of_stage), shape.micro_batches
    tails = [[r for r in shape.reductions if g in r.groups] for g in range(groups)]
    extra = np.array([len(tail) + shape.optimizer for tail in tails], dtype=np.int64)
    shift = np.concatenate([[0], np.cumsum(extra)[:-1]]).astype(np.int64)
    group_indptr = (actions.indptr + np.concatenate([[0], np.cumsum(extra)])).astype(INDEX)
    row_of = np.repeat(np.arange(groups, dtype=INDEX), np.diff(group_indptr))
    task_of = np.arange(actions.stage.size, dtype=INDEX)
    if extra.any():
        task_of += np.repeat(shift, np.diff(actions.indptr))

    at = np.full((stages, 4, count), -1, dtype=INDEX)
    at[actions.stage, actions.kind, actions.micro_batch] = task_of
    forward, backward = at[:, 0], np.where(at[:, 1] >= 0, at[:, 1], at[:, 2])  # B or I gives the input's gradient
    made = forward
    if actions.pairs.size:  # what waits for a forward waits for the backward it overlaps with
        made = forward.copy()
        made[actions.stage[actions.pairs], actions.micro_batch[actions.pairs]] += 1
    twice = shape.schedule.kind == "dualpipe"  # elsewhere a stage is on one row
    rows = [row_of[made[s]] if twice else np.broadcast_to(row_of[made[s, 0]], count) for s in range(stages)]
    hops = []
    for e, edge in enumerate(shape.edges):
        a, b = edge.source, edge.target
        hops.append(_Hop(e, False, made[a].copy(), forward[b], rows[a], rows[b]))
        if edge.backward:
            hops.append(_Hop(e, True, backward[b].copy(), backward[a], rows[b], rows[a]))
    links = _links(hops, groups) if shape.transfers == "tasks" else []
    loads = [sum(part.size for _, part in link.sends) for link in links]
    size = int(group_indptr[-1]) + sum(loads)
    resource, kind, stage, micro_batch, task_class = (np.empty(size, dtype=INDEX) for _ in range(5))
    degree = np.ones(size, dtype=INDEX)
    resource[: group_indptr[-1]] = row_of
    run = task_of if extra.any() else slice(actions.stage.size)
    kind[run], stage[run], micro_batch[run] = actions.kind, actions.stage, actions.micro_batch
    task_class[run] = 4 * actions.stage + actions.kind

    degrees = np.zeros((stages, 4), dtype=INDEX)
    for edge in shape.edges:
        degrees[edge.target, 0] += 1
        degrees[edge.source, 1:3] += edge.backward
    degree[run] = degrees[actions.stage, actions.kind]
    paired = task_of[actions.pairs]
    own = degree[paired]
    degree[paired] += degree[paired + 1]

    joins: list[tuple[int, list[int]]] = []  # tasks of collectives that groups enter together, with what they wait for
    for g, tail in enumerate(tails):
        for k, reduction in enumerate(tail):
            i = int(group_indptr[g + 1]) - int(extra[g]) + k
            kind[i], stage[i], micro_batch[i] = TaskKind.REDUCE, reduction.stage, -1
            task_class[i] = class_of_reduction(shape, shape.reductions.index(reduction))
            others = [
                int(group_indptr[o + 1] - extra[o]) + tails[o].index(reduction) - 1 for o in reduction.groups if o != g
            ]
            joins.append((i, others))
            degree[i] = len(others)
        if shape.optimizer:
            i = int(group_indptr[g + 1]) - 1
            kind[i], stage[i], micro_batch[i] = TaskKind.OPTIMIZER, -1, -1
            task_class[i], degree[i] = class_of_update(shape, g), 0

    indptr = np.zeros(size + 1, dtype=INDEX)
    np.cumsum(degree, out=indptr[1:])
    predecessors, lag = np.empty(indptr[-1], dtype=INDEX), np.full(indptr[-1], -1, dtype=INDEX)
    first = int(group_indptr[-1])
    for r, link in enumerate(links):
        queue = np.argsort(np.concatenate([hop.source[part] for hop, part in link.sends]), kind="stable")
        place = np.empty_like(queue)
        place[queue] = first + np.arange(queue.size)
        for hop, part in link.sends:
            mine, place = place[: part.size], place[part.size :]
            resource[mine], kind[mine], micro_batch[mine] = groups + r, TaskKind.SEND, part
            stage[mine] = shape.edges[hop.edge].target if hop.backward else shape.edges[hop.edge].source
            task_class[mine] = class_of_send(shape, hop.edge, hop.backward)
            predecessors[indptr[mine]] = hop.source[part]
            hop.source[part] = mine  # what is waited for at the other end
        first += queue.size
    filled = np.zeros((stages, 2), dtype=np.int64)  # predecessors given so far to a stage's forwards and backwards
    for hop in hops:
        edge = shape.edges[hop.edge]
        reader = edge.source if hop.backward else edge.target
        edges_in = indptr[hop.target] + filled[reader, int(hop.backward)]
        filled[reader, int(hop.backward)] += 1
        predecessors[edges_in] = hop.source
        if shape.transfers == "lags":
            lag[edges_in] = np.where(hop.source_row != hop.target_row, 2 * hop.edge + hop.backward, -1)
    for i, first in zip(paired.tolist(), own.tolist(), strict=True):  # needs what its partner needs
        start, partner = indptr[i] + first, slice(indptr[i + 1], indptr[i + 2])
        predecessors[start : indptr[i + 1]] = predecessors[partner]
        lag[start : indptr[i + 1]] = lag[partner]
    for i, others in joins:
        predecessors[indptr[i] : indptr[i + 1]] = others

    resource_indptr = np.concatenate([group_indptr, group_indptr[-1] + np.cumsum(loads)])
    resource_indptr, resource_order = resource_indptr.astype(INDEX), np.arange(size, dtype=INDEX)
    try:
        order = static_order(indptr, predecessors, resource, resource_indptr, resource_order)
    except Deadlock as deadlock:
        raise _deadlock_error(actions, task_of, deadlock, indptr, predecessors, stage, kind, micro_batch) from None
    return Topology(
        resource=resource, kind=kind, stage=stage, micro_batch=micro_batch, task_class=task_class, indptr=indptr,
        predecessors=predecessors, lag=lag, order=order, resource_indptr=resource_indptr, resource_order=resource_order,
        resource_names=(*(f"group {g}" for g in range(groups)), *(link.name for link in links)),
        groups=groups, class_names=_class_names(shape, groups),
    )  # fmt: skip


class _Hop(NamedTuple):
    """What crosses an edge in one direction: by micro-batch the tasks that make and that need it, and their rows."""

    edge: int
    backward: bool
    source: Ints
    target: Ints
    source_row: Ints
    target_row: Ints


class _Link(NamedTuple):
    name: str
    sends: list[tuple[_Hop, Ints]]  # and which micro-batches


def _links(hops: list[_Hop], groups: int) -> list[_Link]:
    """Directed links between groups with all that is sent over them."""
    found: dict[tuple[int, int], _Link] = {}
    for hop in hops:
        pair = hop.source_row * groups + hop.target_row
        for code in np.unique(pair):
            source, target = divmod(int(code), groups)
            if source != target:
                link = found.setdefault((source, target), _Link(f"link {source}>{target}", []))
                link.sends.append((hop, np.flatnonzero(pair == code)))
    return list(found.values())


def _class_names(shape: Shape, groups: int) -> tuple[str, ...]:
    actions = [f"{kind} of stage {s}" for s in range(len(shape.group_of_stage)) for kind in KINDS]
    sends = [
        name for e in shape.edges for name in (f"send {e.source}>{e.target}", f"send {e.target}>{e.source} (gradient)")
    ]
    updates = [f"update of group {g}" for g in range(groups)]
    return (*actions, *sends, *(r.name for r in shape.reductions), *updates)


def _deadlock_error(
    actions: Actions, task_of: Ints, deadlock: Deadlock, indptr: Ints, predecessors: Ints,
    stage: Ints, kind: Ints, micro_batch: Ints,
) -> UserError:  # fmt: skip
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
