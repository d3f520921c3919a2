"""An action as a chain of items: runs of kernels on the compute stream, collectives on the streams of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simpart.cost import Collective
from simpart.lowering.fine._buckets import Bucket
from simpart.lowering.fine._events import Event
from simpart.lowering.fine._sequence import Run

__all__ = ["COMPUTE", "Chain", "Item", "chain_of"]

Floats = npt.NDArray[np.float64]
COMPUTE = ""
"""The compute stream; others are named by their axis."""
_RANK = {"none": 0, "unit": 1, "kernel": 2}


@dataclass(slots=True)
class Item:
    """Elements [begin, end) of the action's run, or collectives on an axis, one after the other. `waits` are earlier
    items that must be done, besides those before it on its stream; `gathers` is, for the first collective of a gather
    ahead of its use, the item that uses it (else -1). Kernels go on `beside` it, or wait for it."""

    stream: str
    begin: int = 0
    end: int = 0
    axis: str = ""
    what: str = ""
    collectives: tuple[Collective, ...] = ()
    waits: list[int] = field(default_factory=list)
    gathers: int = -1
    reduces: bool = False
    beside: bool = False

    @property
    def computes(self) -> bool:
        return not self.collectives


@dataclass(slots=True)
class Chain:
    """Items in the order in which they are issued; the first is on the compute stream. What follows the action waits
    for item `exit`."""

    items: list[Item]
    exit: int


def chain_of(
    run: Run, seconds: Floats, events: Sequence[Event], buckets: Sequence[Bucket] = (), overlap: bool = True
) -> Chain:
    """Kernels between which nothing is sent are one item. `seconds` are those of the run's elements."""
    builder = _Builder(np.concatenate([[0.0], np.cumsum(seconds)]), overlap)
    cuts = np.searchsorted(run.place, [event.place for event in events]).tolist()
    order = sorted(range(len(events)), key=lambda i: (cuts[i], _RANK[events[i].wait], events[i].place))
    ready = np.searchsorted(run.place, [bucket.place for bucket in buckets]).tolist()
    b = 0
    for i in order:
        while b < len(buckets) and ready[b] <= cuts[i]:
            builder.bucket(ready[b], buckets[b], b)
            b += 1
        builder.event(cuts[i], events[i])
    for late in range(b, len(buckets)):
        builder.bucket(ready[late], buckets[late], late)
    return builder.finished()


class _Builder:
    def __init__(self, total: Floats, overlap: bool) -> None:
        self.total, self.overlap = total, overlap
        self.items: list[Item] = []
        self.begin = 0  # first element that is in no item yet
        self.tail = -1  # the last item that what follows waits for
        self.gathering: list[tuple[int, int]] = []  # first and last item of gathers that the next kernels use
        self.item_of_bucket: dict[int, int] = {}

    def compute(self, end: int) -> None:
        """Elements up to `end`, where they take time or have something to wait for."""
        if self.items and not self.gathering and self.total[end] <= self.total[self.begin]:
            return
        waits = [self.tail] if self.tail >= 0 and self.items[self.tail].stream != COMPUTE else []
        for first, last in self.gathering:
            self.items[first].gathers = len(self.items)
            waits.append(last)
        self.items.append(Item(COMPUTE, self.begin, end, waits=waits))
        self.begin, self.tail, self.gathering = end, len(self.items) - 1, []

    def event(self, cut: int, event: Event) -> None:
        if not self.items or self.total[cut] > self.total[self.begin]:
            self.compute(cut)
        first, before = len(self.items), self.tail
        for axis, collectives in event.steps:
            stream = axis if self.overlap else COMPUTE
            if event.wait == "kernel" and self._continues(axis):
                self.items[-1].collectives += collectives
                continue
            ahead = event.wait == "unit" and len(self.items) == first
            waits = [] if ahead or self.items[before].stream == stream else [before]
            beside = self.overlap and event.wait != "kernel"
            item = Item(stream, axis=axis, what=event.what, collectives=collectives, waits=waits, beside=beside)
            self.items.append(item)
            before = len(self.items) - 1
            if event.wait == "kernel":
                self.tail = before
        if event.wait == "unit" and self.overlap:
            self.gathering.append((first, before))

    def _continues(self, axis: str) -> bool:
        """Whether a collective that the next kernel waits for can be one task with the item before it."""
        return self.items[-1].axis == axis and self.tail == len(self.items) - 1

    def bucket(self, cut: int, bucket: Bucket, number: int) -> None:
        if not self.items or self.total[cut] > self.total[self.begin]:
            self.compute(cut)
        waits = [self.tail, *(self.item_of_bucket[b] for b in bucket.after)]
        last = self.items[-1]
        if last.reduces and last.axis == bucket.axis and set(last.waits) == set(waits):
            last.collectives += (bucket.collective,)
        else:
            item = Item(bucket.axis, axis=bucket.axis, what="gradients", collectives=(bucket.collective,))
            item.waits, item.reduces, item.beside = waits, True, True
            self.items.append(item)
        self.item_of_bucket[number] = len(self.items) - 1

    def finished(self) -> Chain:
        if not self.overlap and self.items and self.items[-1].collectives:  # the action ends with it, not with kernels
            self.items.append(Item(COMPUTE, self.begin, len(self.total) - 1))
        else:
            self.compute(len(self.total) - 1)
        return Chain(items=self.items, exit=self.tail if self.overlap else len(self.items) - 1)
