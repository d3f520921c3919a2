"""Gradients of the last micro-batch in buckets: filled in the order in which backward completes them, cut at exact
sizes, so that a step has the same collectives as `sharded.bucketed` counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from simpart.cost import Collective
from simpart.lowering.fine._events import Steps

__all__ = ["Bucket", "buckets_of"]


class Bucket(NamedTuple):
    """A collective that can begin at `place` of the backward, when the buckets numbered `after` are done."""

    place: float
    axis: str
    collective: Collective
    after: tuple[int, ...]


class _Kind(NamedTuple):
    """What shares buckets: which step of a gradient's way, on which axis, and the collective but for its bytes."""

    level: int
    axis: str
    collective: Collective


_Key = tuple[_Kind, int]
"""A bucket: its kind, and its number among those."""


def buckets_of(rows: Iterable[tuple[float, tuple[Steps, ...]]], bucket_bytes: int) -> list[Bucket]:
    """Buckets in an order in which they may be sent. Each row is a gradient: where it is complete and the collectives
    that it goes through, each in a bucket of its kind; a gradient may lie in several.

    >>> one = Steps("dp", (Collective("all_reduce", 60, (0, 1)),))
    >>> [(b.place, b.collective.bytes) for b in buckets_of([(0.0, (one,)), (5.0, (one,))], 100)]
    [(5.0, 100), (5.0, 20)]
    """
    sizes: dict[_Kind, int] = {}
    places: dict[_Key, float] = {}
    after: dict[_Key, set[_Key]] = {}
    for place, steps in sorted(rows, key=lambda row: row[0]):
        before: _Key | None = None
        for level, (axis, collectives) in enumerate(steps):
            for collective in collectives:
                if collective.bytes == 0:
                    continue
                kind = _Kind(level, axis, replace(collective, bytes=0))
                filled = sizes.get(kind, 0)
                sizes[kind] = filled + collective.bytes
                last = (sizes[kind] - 1) // bucket_bytes
                for number in range(filled // bucket_bytes, last + 1):
                    places[kind, number] = place
                    if before is not None:
                        after.setdefault((kind, number), set()).add(before)
                before = (kind, last)
    # A bucket of a later level may wait for one that is complete later than itself: it comes behind that one.
    ready: dict[_Key, float] = {}
    for key in sorted(places, key=lambda key: key[0].level):
        ready[key] = max([places[key], *(ready[other] for other in after.get(key, ()))])
    order = sorted(places, key=lambda key: (ready[key], key[0].level, key[0].axis, key[1]))
    number_of = {key: i for i, key in enumerate(order)}
    found = []
    for kind, number in order:
        size = min(bucket_bytes, sizes[kind] - number * bucket_bytes)
        waits = tuple(sorted(number_of[other] for other in after.get((kind, number), ())))
        found.append(Bucket(ready[kind, number], kind.axis, replace(kind.collective, bytes=size), waits))
    return found
