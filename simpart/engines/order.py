"""One order of all tasks that respects every dependency and every resource's queue, or where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np

from simpart.engines._loops import order_tasks
from simpart.machine_code import compiled

__all__ = ["Deadlock", "static_order"]

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]


class Deadlock(Exception):
    """No order exists. `stuck` are the first tasks of the queues that cannot go on."""

    def __init__(self, stuck: tuple[int, ...]) -> None:
        super().__init__(f"tasks {', '.join(map(str, stuck[:8]))} wait for one another")
        self.stuck = stuck


def static_order(indptr: Ints, predecessors: Ints, resource: Ints, resource_indptr: Ints, resource_order: Ints) -> Ints:
    """A topological order of tasks 0 … n-1 in `program.Topology`'s terms; raises Deadlock when there is none."""
    delays = np.flatnonzero(resource < 0)  # on no resource: each is a queue of its own
    queue = np.concatenate([resource_order, delays]) if delays.size else resource_order
    queue_indptr = resource_indptr
    if delays.size:
        queue_indptr = np.concatenate([resource_indptr, resource_indptr[-1] + 1 + np.arange(delays.size)])
    size = indptr.size - 1
    order, head = np.empty(size, dtype=indptr.dtype), np.zeros(queue_indptr.size - 1, dtype=np.int64)
    jitted = compiled(order_tasks, size)
    if jitted is not None:
        count = jitted(indptr, predecessors, queue_indptr, queue, order, head)
    else:  # lists are several times faster than arrays to index from Python
        lists = [a.tolist() for a in (indptr, predecessors, queue_indptr, queue, order, head)]
        count = order_tasks(*lists)
        order, head = np.array(lists[4], dtype=np.int64), np.array(lists[5], dtype=np.int64)
    if count < size:
        raise Deadlock(tuple(int(queue[h]) for h, stop in zip(head, queue_indptr[1:], strict=True) if h < stop))
    return order
