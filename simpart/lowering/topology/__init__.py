"""From a schedule to tasks: which run, on what, after what. Depends on a plan's shape alone, and is cached by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from simpart.engines.order import Deadlock, static_order
from simpart.lowering.topology.arrays import INDEX, KINDS, Actions, actions_of, actions_of_rows
from simpart.lowering.topology.deadlock import deadlock_error
from simpart.program import TaskKind, Topology
from simpart.schedule import Schedule

__all__ = [
    "KINDS", "Reduction", "Shape", "StageEdge", "Transfers", "actions_of", "actions_of_rows", "build_topology",
    "class_of_action", "class_of_reduction", "class_of_send", "class_of_update", "topology_of",
]  # fmt: skip

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
Transfers = Literal["tasks", "lags"]


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


def build_topology(shape: Shape, actions: Actions) -> Topology:
    """Tasks are numbered resource by resource, in queue order: groups (actions, reductions, update), then links."""
    groups = len(actions.indptr) - 1
    rows = _rows(shape, actions)
    hops = _hops(shape, actions, rows)
    links = _links(hops, groups) if shape.transfers == "tasks" else []
    loads = [sum(part.size for _, part in link.sends) for link in links]
    columns = _columns(shape, actions, rows, sum(loads))
    paired = rows.task_of[actions.pairs]
    degree = _degrees(shape, actions, rows, columns.resource.size)
    own = degree[paired]
    degree[paired] += degree[paired + 1]  # an overlapped forward needs what its partner needs
    joins = _tails(shape, rows, columns, degree)
    indptr = np.zeros(degree.size + 1, dtype=INDEX)
    np.cumsum(degree, out=indptr[1:])
    predecessors, lag = np.empty(indptr[-1], dtype=INDEX), np.full(indptr[-1], -1, dtype=INDEX)
    _send(shape, links, columns, int(rows.indptr[-1]), groups, indptr, predecessors)
    _wait(shape, hops, indptr, predecessors, lag)
    for i, first in zip(paired.tolist(), own.tolist(), strict=True):
        start, partner = indptr[i] + first, slice(indptr[i + 1], indptr[i + 2])
        predecessors[start : indptr[i + 1]] = predecessors[partner]
        lag[start : indptr[i + 1]] = lag[partner]
    for i, others in joins:
        predecessors[indptr[i] : indptr[i + 1]] = others

    resource_indptr = np.concatenate([rows.indptr, rows.indptr[-1] + np.cumsum(loads)]).astype(INDEX)
    resource_order = np.arange(degree.size, dtype=INDEX)
    try:
        order = static_order(indptr, predecessors, columns.resource, resource_indptr, resource_order)
    except Deadlock as deadlock:
        raise deadlock_error(actions, rows.task_of, deadlock, indptr, predecessors, *columns[1:4]) from None
    return Topology(
        **columns._asdict(), indptr=indptr, predecessors=predecessors, lag=lag, order=order,
        resource_indptr=resource_indptr, resource_order=resource_order,
        resource_names=(*(f"group {g}" for g in range(groups)), *(link.name for link in links)),
        groups=groups, class_names=_class_names(shape, groups),
    )  # fmt: skip


class _Rows(NamedTuple):
    """Tasks of the groups: `indptr` bounds their rows, `row_of` is each task's, `task_of` the task of each action.
    Behind a group's actions stand its `tails`: reductions, then the update."""

    indptr: Ints
    row_of: Ints
    task_of: Ints
    tails: list[list[Reduction]]
    extra: Ints  # tasks behind the actions


def _rows(shape: Shape, actions: Actions) -> _Rows:
    groups = len(actions.indptr) - 1
    tails = [[r for r in shape.reductions if g in r.groups] for g in range(groups)]
    extra = np.array([len(tail) + shape.optimizer for tail in tails], dtype=np.int64)
    indptr = (actions.indptr + np.concatenate([[0], np.cumsum(extra)])).astype(INDEX)
    task_of = np.arange(actions.stage.size, dtype=INDEX)
    if extra.any():
        shift = np.concatenate([[0], np.cumsum(extra)[:-1]]).astype(np.int64)
        task_of += np.repeat(shift, np.diff(actions.indptr))
    row_of = np.repeat(np.arange(groups, dtype=INDEX), np.diff(indptr))
    return _Rows(indptr, row_of, task_of, tails, extra)


def _hops(shape: Shape, actions: Actions, rows: _Rows) -> list[_Hop]:
    """What crosses each edge, there and back."""
    stages, count = len(shape.group_of_stage), shape.micro_batches
    at = np.full((stages, 4, count), -1, dtype=INDEX)
    at[actions.stage, actions.kind, actions.micro_batch] = rows.task_of
    forward = at[:, 0]
    split = (actions.kind == KINDS.index("I")).any()
    backward = np.where(at[:, 1] >= 0, at[:, 1], at[:, 2]) if split else at[:, 1]  # B or I gives the input's gradient
    made = forward
    if actions.pairs.size:  # what waits for a forward waits for the backward it overlaps with
        made = forward.copy()
        made[actions.stage[actions.pairs], actions.micro_batch[actions.pairs]] += 1
    twice = shape.schedule.kind == "dualpipe"  # elsewhere a stage is on one row
    homes = [rows.row_of[made[s]] if twice else np.broadcast_to(rows.row_of[made[s, 0]], count) for s in range(stages)]
    hops = []
    for e, edge in enumerate(shape.edges):
        a, b = edge.source, edge.target
        hops.append(_Hop(e, False, made[a].copy(), forward[b], homes[a], homes[b]))
        if edge.backward:
            hops.append(_Hop(e, True, backward[b].copy(), backward[a], homes[b], homes[a]))
    return hops


class _Columns(NamedTuple):
    """What each task is."""

    resource: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints
    task_class: Ints


def _columns(shape: Shape, actions: Actions, rows: _Rows, sends: int) -> _Columns:
    """The groups' actions filled in; tails and sends are left to `_tails` and `_send`."""
    size, action_class = rows.row_of.size + sends, 4 * actions.stage + actions.kind
    given = (actions.kind, actions.stage, actions.micro_batch, action_class)
    if size == actions.stage.size and all(column.dtype == INDEX for column in given):
        return _Columns(rows.row_of, *given)
    resource, kind, stage, micro_batch, task_class = (np.empty(size, dtype=INDEX) for _ in range(5))
    resource[: rows.row_of.size] = rows.row_of
    run = rows.task_of if rows.extra.any() else slice(actions.stage.size)
    for column, values in zip((kind, stage, micro_batch, task_class), given, strict=True):
        column[run] = values
    return _Columns(resource, kind, stage, micro_batch, task_class)


def _degrees(shape: Shape, actions: Actions, rows: _Rows, size: int) -> Ints:
    """How many tasks each waits for, besides that before it: of actions by their stage's edges, of sends one."""
    degrees = np.zeros((len(shape.group_of_stage), 4), dtype=INDEX)
    for edge in shape.edges:
        degrees[edge.target, 0] += 1
        degrees[edge.source, 1:3] += edge.backward
    degree = np.ones(size, dtype=INDEX)
    run = rows.task_of if rows.extra.any() else slice(actions.stage.size)
    degree[run] = degrees[actions.stage, actions.kind]
    return degree


def _tails(shape: Shape, rows: _Rows, columns: _Columns, degree: Ints) -> list[tuple[int, list[int]]]:
    """Fill in reductions and updates; returns the tasks of collectives that groups enter together, each with what it
    waits for: the last action of the other groups."""
    joins: list[tuple[int, list[int]]] = []
    number = {reduction: r for r, reduction in enumerate(shape.reductions)}
    _, kind, stage, micro_batch, task_class = columns
    for g, tail in enumerate(rows.tails):
        first = int(rows.indptr[g + 1]) - int(rows.extra[g])
        for i, reduction in enumerate(tail, first):
            kind[i], stage[i], micro_batch[i] = TaskKind.REDUCE, reduction.stage, -1
            task_class[i] = class_of_reduction(shape, number[reduction])
            others = [
                int(rows.indptr[o + 1] - rows.extra[o]) + rows.tails[o].index(reduction) - 1
                for o in reduction.groups
                if o != g
            ]
            joins.append((i, others))
            degree[i] = len(others)
        if shape.optimizer:
            i = int(rows.indptr[g + 1]) - 1
            kind[i], stage[i], micro_batch[i] = TaskKind.OPTIMIZER, -1, -1
            task_class[i], degree[i] = class_of_update(shape, g), 0
    return joins


def _send(
    shape: Shape, links: list[_Link], columns: _Columns, first: int, groups: int, indptr: Ints, predecessors: Ints
) -> None:
    """Fill in the tasks of links, from `first` on, each queued in the order of production; readers then wait for
    them."""
    resource, kind, stage, micro_batch, task_class = columns
    for r, link in enumerate(links):
        queue = np.argsort(np.concatenate([hop.source[part] for hop, part in link.sends]), kind="stable")
        place = np.empty_like(queue)
        place[queue] = first + np.arange(queue.size)
        for hop, part in link.sends:
            mine, place = place[: part.size], place[part.size :]
            edge = shape.edges[hop.edge]
            resource[mine], kind[mine], micro_batch[mine] = groups + r, TaskKind.SEND, part
            stage[mine] = edge.target if hop.backward else edge.source
            task_class[mine] = class_of_send(shape, hop.edge, hop.backward)
            predecessors[indptr[mine]] = hop.source[part]
            hop.source[part] = mine  # what is waited for at the other end
        first += queue.size


def _wait(shape: Shape, hops: list[_Hop], indptr: Ints, predecessors: Ints, lag: Ints) -> None:
    """Fill in what each action waits for from other stages."""
    filled = np.zeros((len(shape.group_of_stage), 2), dtype=np.int64)  # given so far to a stage's forwards, backwards
    for hop in hops:
        edge = shape.edges[hop.edge]
        reader = edge.source if hop.backward else edge.target
        edges_in = indptr[hop.target] + filled[reader, int(hop.backward)]
        filled[reader, int(hop.backward)] += 1
        predecessors[edges_in] = hop.source
        if shape.transfers == "lags":
            lag[edges_in] = np.where(hop.source_row != hop.target_row, 2 * hop.edge + hop.backward, -1)


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
