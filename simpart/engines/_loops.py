"""The inner loops of the compiled engine, in the Python that numba compiles; no caller but `order` and `compiled`."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy arrays when compiled, lists where Python runs them


def order_tasks(
    indptr: Array, predecessors: Array, queue_indptr: Array, queue: Array, order: Array, head: Array
) -> int:
    """Fill `order` so that every task stands behind its predecessors and behind the task before it in its queue.

    Each queue is run as far as it goes; one that meets an unfinished predecessor waits in that task's list (a queue
    waits for one task at a time, so lists are linked through the queues). Linear in tasks and edges. Returns how many
    were ordered; on fewer than all, `head[q]` is where queue q is stuck.
    """
    queues = len(queue_indptr) - 1
    done = np.zeros(len(indptr) - 1, np.bool_)
    first_waiting = np.full(len(indptr) - 1, -1, np.int32)
    next_waiting = np.full(queues, -1, np.int32)
    stack = np.arange(queues - 1, -1, -1)
    top, count = queues, 0
    for q in range(queues):
        head[q] = queue_indptr[q]
    while top > 0:
        top -= 1
        q = stack[top]
        while head[q] < queue_indptr[q + 1]:
            task = queue[head[q]]
            blocker = -1
            for k in range(indptr[task], indptr[task + 1]):
                if not done[predecessors[k]]:
                    blocker = predecessors[k]
                    break
            if blocker >= 0:
                next_waiting[q] = first_waiting[blocker]
                first_waiting[blocker] = q
                break
            order[count] = task
            count += 1
            head[q] += 1
            done[task] = True
            waiting = first_waiting[task]
            while waiting >= 0:
                stack[top] = waiting
                top += 1
                waiting = next_waiting[waiting]
    return count


def longest_path(
    order: Array, resource: Array, indptr: Array, predecessors: Array, lag: Array, task_class: Array,
    task_s: Array, lag_s: Array, free: Array, start: Array, end: Array,
) -> bool:  # fmt: skip
    """Start and end of every task; `free` (one zero per resource) is used up. False where a time is negative, NaN or
    infinite."""
    sound = True
    for seconds in task_s:
        sound = sound and 0.0 <= seconds < np.inf
    for seconds in lag_s:
        sound = sound and 0.0 <= seconds < np.inf
    for i in order:
        r = resource[i]
        ready = 0.0
        if r >= 0:
            ready = free[r]
        for k in range(indptr[i], indptr[i + 1]):
            arrival = end[predecessors[k]]
            if lag[k] >= 0:
                arrival += lag_s[lag[k]]
            if arrival > ready:
                ready = arrival
        start[i] = ready
        finish = ready + task_s[task_class[i]]
        end[i] = finish
        if r >= 0:
            free[r] = finish
    return sound


def longest_path_held(
    order: Array, resource: Array, indptr: Array, predecessors: Array, lag: Array, task_class: Array,
    task_s: Array, lag_s: Array, free: Array, start: Array, end: Array,
    queue_indptr: Array, queue: Array, groups: int, completes: Array, late: Array, taken: Array, given: Array,
    besides: Array, by_kind: Array, where: Array, total: Array,
) -> bool:  # fmt: skip
    """`longest_path`, and in the same pass what `highest_levels` finds: a group's tasks come in its row's order."""
    sound = True
    for seconds in task_s:
        sound = sound and 0.0 <= seconds < np.inf
    for seconds in lag_s:
        sound = sound and 0.0 <= seconds < np.inf
    kinds, classes = by_kind.shape[1], len(taken)
    change = np.zeros((classes, 3))  # a task's bytes when it starts and ends, and besides while it runs
    for c in range(classes):
        for k in range(kinds):
            change[c, 0] += taken[c, k]
            change[c, 1] += given[c, k]
            change[c, 2] += besides[c, k]
    level, best, later = np.zeros(groups), np.zeros(groups), np.zeros(groups)
    for g in range(groups):
        where[g] = -1
        for k in range(kinds):
            level[g] += by_kind[g, k]
            later[g] += late[g, k]
        best[g] = level[g]
    waiting = np.ones(groups, np.bool_)  # for the first backward to end
    for i in order:
        r, c = resource[i], task_class[i]
        ready = 0.0
        if r >= 0:
            ready = free[r]
        for k in range(indptr[i], indptr[i + 1]):
            arrival = end[predecessors[k]]
            if lag[k] >= 0:
                arrival += lag_s[lag[k]]
            if arrival > ready:
                ready = arrival
        start[i] = ready
        finish = ready + task_s[c]
        end[i] = finish
        if r >= 0:
            free[r] = finish
            if r < groups:
                now = level[r] + change[c, 0]
                if now + change[c, 2] > best[r]:
                    best[r] = now + change[c, 2]
                    where[r] = i
                now += change[c, 1]
                if waiting[r] and completes[i]:
                    waiting[r] = False
                    now += later[r]
                level[r] = now
    count = np.zeros(classes, np.int64)
    for g in range(groups):
        if where[g] < 0:
            total[g] = by_kind[g].sum()
            continue
        first = True
        for place in range(queue_indptr[g], queue_indptr[g + 1]):
            task = queue[place]
            if task == where[g]:
                break
            count[task_class[task]] += 1
            if first and completes[task]:
                first = False
                for k in range(kinds):
                    by_kind[g, k] += late[g, k]
        for c in range(classes):
            if count[c] > 0:
                for k in range(kinds):
                    by_kind[g, k] += count[c] * (taken[c, k] + given[c, k])
                count[c] = 0
        c = task_class[where[g]]
        for k in range(kinds):
            by_kind[g, k] += taken[c, k] + besides[c, k]
        total[g] = by_kind[g].sum()
    return sound


def assign_registers(
    order: Array, indptr: Array, predecessors: Array, lag: Array, before: Array, readers: Array,
    read_indptr: Array, read: Array, read_lag: Array, write: Array,
) -> int:  # fmt: skip
    """Fill `read`, `read_lag` and `write` (see `tape.Tape`); returns how many registers are used. `before[i]` is the
    task before i on its resource, `readers[i]` how many wait for i; it is used up."""
    size = len(order)
    register = [0] * size
    free = [0] * size
    top, used = 0, 0
    for i in range(size):
        task = order[i]
        place = read_indptr[i]
        if before[task] >= 0:
            read[place] = before[task]
            read_lag[place] = -1
            place += 1
        for k in range(indptr[task], indptr[task + 1]):
            read[place] = predecessors[k]
            read_lag[place] = lag[k]
            place += 1
        for k in range(read_indptr[i], place):
            source = read[k]
            read[k] = register[source]
            readers[source] -= 1
            if readers[source] == 0:
                free[top] = register[source]
                top += 1
        if top > 0:
            top -= 1
            register[task] = free[top]
        else:
            register[task] = used
            used += 1
        if readers[task] == 0:
            free[top] = register[task]
            top += 1
        write[i] = register[task]
    return used


def replay_block(
    task_class: Array, write: Array, indptr: Array, read: Array, lag: Array, last: Array,
    task_s: Array, lag_s: Array, end: Array, latest: Array,
) -> None:  # fmt: skip
    """Makespans of a block of plans, which are the last axis of every float array; `end` has a row per register."""
    width = task_s.shape[1]
    ready = np.empty(width)
    for i in range(len(write)):
        first, stop = indptr[i], indptr[i + 1]
        if first == stop:
            for b in range(width):
                ready[b] = 0.0
        else:
            p, c = read[first], lag[first]
            if c >= 0:
                for b in range(width):
                    ready[b] = end[p, b] + lag_s[c, b]
            else:
                for b in range(width):
                    ready[b] = end[p, b]
            for k in range(first + 1, stop):
                p, c = read[k], lag[k]
                if c >= 0:
                    for b in range(width):
                        arrival = end[p, b] + lag_s[c, b]
                        ready[b] = arrival if arrival > ready[b] else ready[b]
                else:
                    for b in range(width):
                        ready[b] = end[p, b] if end[p, b] > ready[b] else ready[b]
        r, c = write[i], task_class[i]
        for b in range(width):
            end[r, b] = ready[b] + task_s[c, b]
        if last[i]:
            for b in range(width):
                latest[b] = end[r, b] if end[r, b] > latest[b] else latest[b]


def highest_levels(
    queue_indptr: Array, queue: Array, groups: int, task_class: Array, completes: Array, static: Array, late: Array,
    start: Array, end: Array, within: Array, by_kind: Array, where: Array,
) -> None:  # fmt: skip
    """What each group holds when it holds most, by kind, and the task that runs then (-1: the static part alone).

    A group runs one task at a time, so its level is a sum along its row, whatever the durations. `completes` marks
    tasks that end a backward; `by_kind` comes in as a copy of `static`.
    """
    kinds = len(static[0])
    classes = len(start)
    taken, given, besides = np.zeros(classes), np.zeros(classes), np.zeros(classes)
    count = np.zeros(classes, np.int64)
    for c in range(classes):
        for k in range(kinds):
            taken[c] += start[c][k]
            given[c] += end[c][k]
            besides[c] += within[c][k]
    for g in range(groups):
        level = 0.0
        for k in range(kinds):
            level += static[g][k]
        best, at = level, -1
        waiting = True  # for the first backward to end
        for i in range(queue_indptr[g], queue_indptr[g + 1]):
            c = task_class[queue[i]]
            level += taken[c]
            if level + besides[c] > best:
                best = level + besides[c]
                at = i
            level += given[c]
            if waiting and completes[queue[i]]:
                waiting = False
                for k in range(kinds):
                    level += late[g][k]
        where[g] = -1
        if at < 0:
            continue
        where[g] = queue[at]
        waiting = True
        for i in range(queue_indptr[g], at):
            count[task_class[queue[i]]] += 1
            if waiting and completes[queue[i]]:
                waiting = False
                for k in range(kinds):
                    by_kind[g][k] += late[g][k]
        for c in range(classes):
            if count[c] > 0:
                for k in range(kinds):
                    by_kind[g][k] += count[c] * (start[c][k] + end[c][k])
                count[c] = 0
        c = task_class[queue[at]]
        for k in range(kinds):
            by_kind[g][k] += start[c][k] + within[c][k]
