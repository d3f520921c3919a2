"""From a schedule to tasks: which run, on what, after what. Depends on a plan's shape alone, and is cached by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from simpart.engines.order import Deadlock, static_order
from simpart.errors import UserError
from simpart.program import TaskKind, Topology
from simpart.schedule import Action, Rows, Schedule

__all__ = [
    "Reduction", "Shape", "StageEdge", "build_topology", "class_of_action", "class_of_reduction", "class_of_send",
    "class_of_update", "topology_of",
]  # fmt: skip

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
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
    transfers: Literal["tasks", "lags"] = "tasks"
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
    """All rows one after the other, as arrays; `kind` indexes KINDS."""

    indptr: Ints
    stage: Ints
    kind: Ints
    micro_batch: Ints


def actions_of(shape: Shape) -> Actions:
    """The schedule's rows; those of GPipe and 1F1B without a Python object per action (equal to `schedule.rows`)."""
    stages, count = len(shape.group_of_stage), shape.micro_batches
    one_each = len(set(shape.group_of_stage)) == stages
    if shape.schedule.kind == "1f1b" and one_each:
        order = np.argsort(np.array(shape.group_of_stage))
        warm_up = np.minimum(stages - order, count)[:, None]
        m = np.arange(count)[None, :]
        forward_at = np.where(m < warm_up, m, 2 * m - warm_up + 1)
        backward_at = warm_up + m + np.minimum(m, count - warm_up)
        kind, micro_batch = np.empty((2, stages, 2 * count), dtype=np.int64)
        for at, number in ((forward_at, 0), (backward_at, 1)):
            np.put_along_axis(kind, at, number, axis=1)
            np.put_along_axis(micro_batch, at, np.broadcast_to(m, at.shape), axis=1)
        return Actions(
            np.arange(stages + 1) * 2 * count, np.repeat(order, 2 * count), kind.ravel(), micro_batch.ravel()
        )
    return actions_of_rows(shape.schedule.rows(shape.group_of_stage, count))


def actions_of_rows(rows: Rows) -> Actions:
    flat = [action for row in rows for action in row]
    indptr = np.cumsum([0] + [len(row) for row in rows])
    stage = np.array([a.stage for a in flat], dtype=np.int64)
    kind = np.array([KINDS.index(a.kind) for a in flat], dtype=np.int64)
    return Actions(indptr, stage, kind, np.array([a.micro_batch for a in flat], dtype=np.int64))


def build_topology(shape: Shape, actions: Actions) -> Topology:
    """Tasks are numbered resource by resource, in queue order: groups (actions, reductions, update), then links."""
    groups, stages, count = len(actions.indptr) - 1, len(shape.group_of_stage), shape.micro_batches
    tails = [[r for r in shape.reductions if g in r.groups] for g in range(groups)]
    extra = np.array([len(tail) + shape.optimizer for tail in tails], dtype=np.int64)
    shift = np.concatenate([[0], np.cumsum(extra)[:-1]]).astype(np.int64)
    row_of = np.repeat(np.arange(groups), np.diff(actions.indptr))
    task_of = np.arange(actions.stage.size) + shift[row_of]
    group_indptr = actions.indptr + np.concatenate([[0], np.cumsum(extra)])

    at = np.full((stages, 4, count), -1, dtype=np.int64)
    at[actions.stage, actions.kind, actions.micro_batch] = task_of
    forward, backward = at[:, 0], np.where(at[:, 1] >= 0, at[:, 1], at[:, 2])  # what gives the input's gradient

    links = _links(shape, forward, backward) if shape.transfers == "tasks" else []
    size = int(group_indptr[-1]) + count * sum(len(link.sends) for link in links)
    resource, kind, stage, micro_batch, task_class, degree = np.full((6, size), -1, dtype=np.int64)
    resource[: group_indptr[-1]] = np.repeat(np.arange(groups), np.diff(group_indptr))
    kind[task_of], stage[task_of], micro_batch[task_of] = actions.kind, actions.stage, actions.micro_batch
    task_class[task_of] = 4 * actions.stage + actions.kind

    reads = [[(e, edge) for e, edge in enumerate(shape.edges) if edge.target == s] for s in range(stages)]
    returns = [
        [(e, edge) for e, edge in enumerate(shape.edges) if edge.source == s and edge.backward] for s in range(stages)
    ]
    degrees = np.zeros((stages, 4), dtype=np.int64)
    degrees[:, 0] = [len(r) for r in reads]
    degrees[:, 1] = degrees[:, 2] = [len(r) for r in returns]
    degree[task_of] = degrees[actions.stage, actions.kind]
    degree[group_indptr[-1] :] = 1

    joins: list[tuple[int, list[int]]] = []  # tasks of collectives that groups enter together, with what they wait for
    for g, tail in enumerate(tails):
        for k, reduction in enumerate(tail):
            i = int(group_indptr[g + 1]) - int(extra[g]) + k
            kind[i], stage[i] = TaskKind.REDUCE, reduction.stage
            task_class[i] = class_of_reduction(shape, shape.reductions.index(reduction))
            others = [
                int(group_indptr[o + 1] - extra[o]) + tails[o].index(reduction) - 1 for o in reduction.groups if o != g
            ]
            joins.append((i, others))
            degree[i] = len(others)
        if shape.optimizer:
            i = int(group_indptr[g + 1]) - 1
            kind[i], task_class[i], degree[i] = TaskKind.OPTIMIZER, class_of_update(shape, g), 0

    indptr = np.concatenate([[0], np.cumsum(degree)]).astype(np.int64)
    predecessors, lag = np.full((2, int(indptr[-1])), -1, dtype=np.int64)
    send_of: dict[tuple[int, bool], Ints] = {}
    first = int(group_indptr[-1])
    for r, link in enumerate(links):
        queue = np.argsort(np.concatenate([producer for _, _, producer in link.sends]), kind="stable")
        place = np.empty_like(queue)
        place[queue] = first + np.arange(queue.size)
        for part, (e, back, producer) in zip(place.reshape(-1, count), link.sends, strict=True):
            resource[part], kind[part], micro_batch[part] = groups + r, TaskKind.SEND, np.arange(count)
            stage[part] = shape.edges[e].target if back else shape.edges[e].source
            task_class[part] = class_of_send(shape, e, back)
            predecessors[indptr[part]] = producer
            send_of[e, back] = part
        first += queue.size
    for s in range(stages):
        for k, (e, edge) in enumerate(reads[s]):
            edges_in = indptr[forward[s]] + k
            predecessors[edges_in] = send_of.get((e, False), forward[edge.source])
            lag[edges_in] = _lag(shape, e, False)
        for k, (e, edge) in enumerate(returns[s]):
            edges_in = indptr[backward[s]] + k
            predecessors[edges_in] = send_of.get((e, True), backward[edge.target])
            lag[edges_in] = _lag(shape, e, True)
    for i, others in joins:
        predecessors[indptr[i] : indptr[i + 1]] = others

    resource_indptr = np.concatenate(
        [group_indptr, group_indptr[-1] + np.cumsum([count * len(k.sends) for k in links])]
    )
    resource_indptr, resource_order = resource_indptr.astype(np.int64), np.arange(size)
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


class _Link(NamedTuple):
    name: str
    sends: list[tuple[int, bool, Ints]]  # edge, backward, producing tasks by micro-batch


def _links(shape: Shape, forward: Ints, backward: Ints) -> list[_Link]:
    """Directed links between groups with all that is sent over them."""
    found: dict[tuple[int, int], _Link] = {}
    for e, edge in enumerate(shape.edges):
        source, target = shape.group_of_stage[edge.source], shape.group_of_stage[edge.target]
        if source == target:
            continue
        there = found.setdefault((source, target), _Link(f"link {source}>{target}", []))
        there.sends.append((e, False, forward[edge.source]))
        if edge.backward:
            back = found.setdefault((target, source), _Link(f"link {target}>{source}", []))
            back.sends.append((e, True, backward[edge.target]))
    return list(found.values())


def _lag(shape: Shape, edge: int, backward: bool) -> int:
    source, target, _ = shape.edges[edge]
    remote = shape.group_of_stage[source] != shape.group_of_stage[target]
    return 2 * edge + backward if remote and shape.transfers == "lags" else -1


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
    lines = []
    for g in range(max(0, row - 8), min(len(actions.indptr) - 1, row + 9)):
        span = range(
            int(actions.indptr[g]) + max(0, column - 8),
            min(int(actions.indptr[g + 1]), int(actions.indptr[g]) + column + 9),
        )
        cells = [f">{action(int(task_of[i]))}<" if i == at else f" {action(int(task_of[i]))} " for i in span]
        lines.append(f"group {g}: " + " ".join(cell.rjust(7) for cell in cells))
    name = str(action(int(task_of[at])))
    return UserError(
        f"the schedule deadlocks: group {row} cannot run {name} (action {column}), which waits for {action(cause)}; "
        f"move {name} behind what {action(cause)} needs. Actions {max(0, column - 8)} to {column + 8} of each group:\n"
        + "\n".join(lines)
    )


def _behind(actions: Actions, task_of: Ints, stuck: tuple[int, ...]) -> Ints:
    """Indices of actions that stand at or behind a stuck one in its row, hence never run."""
    parts = [np.zeros(0, dtype=np.int64)]
    for i in np.searchsorted(task_of, stuck).tolist():
        if i < task_of.size and task_of[i] in stuck:
            row = int(np.searchsorted(actions.indptr, i, side="right")) - 1
            parts.append(np.arange(i, actions.indptr[row + 1]))
    return np.concatenate(parts)
