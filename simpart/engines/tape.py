"""A topology as instructions: tasks in running order, each with the registers it waits for and the one it writes.

A register holds the end of a task until its last reader has run, so that a block of plans stays in a core's cache
however many tasks there are.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from simpart.engines._loops import assign_registers
from simpart.machine_code import compiled
from simpart.program import Topology

__all__ = ["Tape", "tape_of", "worth_a_tape"]

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


class Tape(NamedTuple):
    """Instruction i starts when registers `read[indptr[i]:indptr[i+1]]` (each plus its lag class, -1: none) are
    reached, takes what class `task_class[i]` takes, and writes `write[i]`. `last` marks those nothing waits for."""

    task_class: Ints
    write: Ints
    indptr: Ints
    read: Ints
    lag: Ints
    last: np.ndarray[tuple[int], np.dtype[np.bool_]]
    registers: int


_tapes: WeakKeyDictionary[Topology, Tape] = WeakKeyDictionary()


_asked: WeakKeyDictionary[Topology, int] = WeakKeyDictionary()
WORTH_RECORDING = 8
"""Plans from which recording a tape is sooner done than replaying each of them without."""


def worth_a_tape(topology: Topology, plans: int) -> bool:
    """Whether a tape is there, or as many plans have been asked for by now as make one worth recording."""
    if topology in _tapes:
        return True
    _asked[topology] = _asked.get(topology, 0) + plans
    return _asked[topology] >= WORTH_RECORDING


def tape_of(topology: Topology) -> Tape:
    """The tape of a topology; made once."""
    found = _tapes.get(topology)
    if found is None:
        found = _tapes[topology] = _record(topology)
    return found


def _record(topology: Topology) -> Tape:
    size, order = topology.size, topology.order
    before = np.full(size, -1, dtype=np.int32)  # on the same resource
    queue, starts = topology.resource_order, topology.resource_indptr
    if queue.size:
        before[queue[1:]] = queue[:-1]
        before[queue[starts[:-1][np.diff(starts) > 0]]] = -1
    degree = np.diff(topology.indptr)[order]
    indptr = np.concatenate([[0], np.cumsum(degree + (before[order] >= 0))]).astype(np.int32)
    read, lag = np.empty((2, int(indptr[-1])), dtype=np.int32)
    write = np.empty(size, dtype=np.int32)
    last = np.empty(size, dtype=np.bool_)
    readers = np.bincount(topology.predecessors, minlength=size) + np.bincount(before[before >= 0], minlength=size)
    arguments = (order, topology.indptr, topology.predecessors, topology.lag, before, readers, indptr, read, lag, write)
    jitted = compiled(assign_registers, size)
    if jitted is not None:
        registers = jitted(*arguments)
    else:
        lists = [a.tolist() for a in arguments]
        registers = assign_registers(*lists)
        read, lag, write = (np.array(values, dtype=np.int32) for values in lists[7:])
    last[:] = (np.bincount(topology.predecessors, minlength=size) == 0)[order]
    following = np.zeros(size, dtype=np.bool_)
    following[before[before >= 0]] = True
    last &= ~following[order]
    return Tape(topology.task_class[order].astype(np.int32), write, indptr, read, lag, last, int(registers))
