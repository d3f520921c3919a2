"""Every task of a coarse topology replaced by the chain it stands for: one topology of streams, for any engine.

Each group issues its tasks in one order, along which all of them wait only for earlier ones; what a stream runs is that
order's share of it. So no stream can block another for ever, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpart.engines.order import static_order
from simpart.program import TaskKind, Topology

__all__ = ["Pattern", "expand"]

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
INDEX = np.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What one coarse task becomes: tasks by stream (0: compute, else 1 + number of the axis), class and kind, what
    waits for what among them (`waiting` for `awaited`), which ones gather ahead for which (`gathers` for `users`)."""

    stream: Ints
    task_class: Ints
    kind: Ints
    waiting: Ints
    awaited: Ints
    exit: int
    gathers: Ints
    users: Ints

    @property
    def size(self) -> int:
        return len(self.stream)


def expand(
    base: Topology, pattern_of: Ints, patterns: Sequence[Pattern], axes: Sequence[str], prefetch: int,
    send_class: int, class_names: tuple[str, ...],
) -> Topology:  # fmt: skip
    """`pattern_of` numbers the patterns of the tasks on the groups of `base`; its transfers stay as they are, their
    classes moved up by `send_class`."""
    rows = int(base.resource_indptr[base.groups])
    sizes = np.array([p.size for p in patterns], dtype=np.int64)[pattern_of]
    first = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    size = total + base.size - rows
    members = [np.flatnonzero(pattern_of == number) for number in range(len(patterns))]
    stream, kind, task_class, stage, micro_batch, group = (np.empty(size, dtype=INDEX) for _ in range(6))
    leaves = np.empty(rows, dtype=np.int64)
    targets: list[Ints] = []
    sources: list[Ints] = []
    gathers: list[Ints] = []
    users: list[Ints] = []
    for found, pattern in zip(members, patterns, strict=True):
        at = first[found][:, None]
        tasks = at + np.arange(pattern.size)
        stream[tasks], kind[tasks], task_class[tasks] = pattern.stream, pattern.kind, pattern.task_class
        for column, of_base in ((stage, base.stage), (micro_batch, base.micro_batch), (group, base.resource)):
            column[tasks] = of_base[found][:, None]
        leaves[found] = first[found] + pattern.exit
        targets.append((at + pattern.waiting).ravel())
        sources.append((at + pattern.awaited).ravel())
        gathers.append((at + pattern.gathers).ravel())
        users.append((at + pattern.users).ravel())
    links = slice(total, size)
    stream[links], kind[links], stage[links] = 0, base.kind[rows:], base.stage[rows:]
    micro_batch[links], task_class[links] = base.micro_batch[rows:], base.task_class[rows:] + send_class

    gather, user = np.concatenate(gathers), np.concatenate(users)
    order = np.argsort(gather)
    rank, ahead = _issue(group[:total], stream[:total], gather[order], user[order], prefetch)
    targets.append(ahead[0])
    sources.append(ahead[1])
    tail = _tails(base, rows, first, rank, group[:total], stream[:total], len(axes))
    targets.append(tail[0])
    sources.append(tail[1])
    # what the coarse tasks wait for
    into = np.concatenate([first, np.arange(total, size)])
    out = np.concatenate([leaves, np.arange(total, size)])
    reader = np.repeat(np.arange(base.size), np.diff(base.indptr))
    targets.insert(0, into[reader])
    sources.insert(0, out[base.predecessors])

    target, source = np.concatenate(targets), np.concatenate(sources)
    by_target = np.argsort(target, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=size))]).astype(INDEX)
    predecessors = source[by_target].astype(INDEX)

    streams = np.unique(group[:total][stream[:total] > 0] * (len(axes) + 1) + stream[:total][stream[:total] > 0])
    resource = np.empty(size, dtype=INDEX)
    code = group[:total] * (len(axes) + 1) + stream[:total]
    resource[:total] = np.where(stream[:total] > 0, base.groups + np.searchsorted(streams, code), group[:total])
    resource[links] = base.resource[rows:] + len(streams)
    names = [f"stream {c // (len(axes) + 1)} {axes[c % (len(axes) + 1) - 1]}" for c in streams.tolist()]
    resource_names = (*base.resource_names[: base.groups], *names, *base.resource_names[base.groups :])
    queue = np.lexsort((np.concatenate([rank, np.arange(total, size)]), resource)).astype(INDEX)
    loads = np.bincount(resource, minlength=len(resource_names))
    resource_indptr = np.concatenate([[0], np.cumsum(loads)]).astype(INDEX)
    static = static_order(indptr, predecessors, resource, resource_indptr, queue)
    return Topology(
        resource=resource, kind=kind, stage=stage, micro_batch=micro_batch, task_class=task_class, indptr=indptr,
        predecessors=predecessors, lag=np.full(len(predecessors), -1, dtype=INDEX), order=static,
        resource_indptr=resource_indptr, resource_order=queue, resource_names=resource_names, groups=base.groups,
        class_names=class_names, parts=True,
    )  # fmt: skip


def _issue(group: Ints, stream: Ints, gather: Ints, user: Ints, prefetch: int) -> tuple[Ints, tuple[Ints, Ints]]:
    """The place of every task in the order of issue, and for what gathers ahead wait: that the compute stream gets to
    the user `prefetch` gathers before their own, that is, has ended what it runs before."""
    key = 2 * np.arange(len(group), dtype=np.int64)
    compute = np.flatnonzero(stream == 0)
    before = np.full(len(group), -1, dtype=np.int64)
    same = group[compute[1:]] == group[compute[:-1]]
    before[compute[1:][same]] = compute[:-1][same]
    if gather.size == 0:
        return np.arange(len(group)), (gather, gather)
    of = group[gather]
    number = np.arange(gather.size)
    begin = np.searchsorted(of, of)  # gathers are in the order of groups
    earlier = number - prefetch
    start_of_group = np.searchsorted(group, of)
    inside = earlier >= begin
    opening = np.where(inside, user[np.maximum(earlier, 0)], start_of_group)
    awaited = np.where(inside, before[opening], -1)
    key[gather] = 2 * opening - 1
    rank = np.empty(len(group), dtype=np.int64)
    rank[np.argsort(key, kind="stable")] = np.arange(len(group))
    waits = awaited >= 0
    return rank, (gather[waits], awaited[waits])


def _tails(
    base: Topology, rows: int, first: Ints, rank: Ints, group: Ints, stream: Ints, axes: int
) -> tuple[Ints, Ints]:
    """The first task of each group behind its actions waits for all that its streams have begun before."""
    targets: list[int] = []
    sources: list[int] = []
    ends = np.flatnonzero(base.kind[:rows] >= TaskKind.REDUCE)
    _, at = np.unique(base.resource[ends], return_index=True)
    for i in ends[at].tolist():
        target = int(first[i])
        start, stop = np.searchsorted(group, [base.resource[i], base.resource[i] + 1])
        before = start + np.flatnonzero(rank[start:stop] < rank[target])
        for number in range(1, axes + 1):
            sent = before[stream[before] == number]
            if sent.size:
                targets.append(target)
                sources.append(int(sent[np.argmax(rank[sent])]))
    return np.array(targets, dtype=np.int64), np.array(sources, dtype=np.int64)
