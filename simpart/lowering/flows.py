"""Which physical links the transfers and collectives of a plan use, and how much of each: for replays in which those
that overlap share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from simpart.hardware import Cluster, LinkLevel
from simpart.lowering.transfers import Load
from simpart.program import Flows

__all__ = ["LinkUse", "flows_of", "link_of", "ring_use", "transfer_use"]

LinkUse = dict[str, float]
"""Bytes over each link, by its name."""


def link_of(cluster: Cluster, level: LinkLevel, rank: int) -> str:
    """The physical link of a device at a level: a bus serves all members, a card the devices that share it."""
    reach = cluster.group_of(level, rank)
    size = level.size if level.kind == "shared" else level.shared_by
    first = reach.start + (rank - reach.start) // size * size
    return f"{level.name} {first}" if size == 1 else f"{level.name} {first}-{min(first + size, reach.stop) - 1}"


def transfer_use(cluster: Cluster, loads: Iterable[Load]) -> LinkUse:
    """Of messages: out of one device's link and into the other's, or once over a bus."""
    found: LinkUse = defaultdict(float)
    for source, target, collective in loads:
        level = cluster.level_between(source, target)
        if level.kind == "shared":
            found[link_of(cluster, level, source)] += collective.bytes
        else:
            found[f"{link_of(cluster, level, source)} out"] += collective.bytes
            found[f"{link_of(cluster, level, target)} in"] += collective.bytes
    return dict(found)


def ring_use(cluster: Cluster, ranks: tuple[int, ...], size: float) -> LinkUse:
    """Of a ring all-reduce of `size` bytes: 2 (n-1)/n of them from each device to the next."""
    found: LinkUse = defaultdict(float)
    each = 2 * (len(ranks) - 1) / len(ranks) * size
    for source, target in zip(ranks, ranks[1:] + ranks[:1], strict=True):
        level = cluster.level_between(source, target) if source != target else None
        if level is not None:
            found[f"{link_of(cluster, level, source)} out"] += each
            found[f"{link_of(cluster, level, target)} in"] += each
    return dict(found)


def flows_of(cluster: Cluster, uses: Iterable[LinkUse]) -> Flows:
    """The table of links and classes; `uses` go by task class."""
    rows = list(uses)
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    speed = {level.name: level.bytes_per_s for level in cluster.levels}
    number = {name: i for i, name in enumerate(names)}
    table = np.zeros((len(rows), len(names)))
    for c, row in enumerate(rows):
        for name, size in row.items():
            table[c, number[name]] = size
    level_of = (next(level for level in speed if name.startswith(level + " ")) for name in names)
    return Flows(links=names, bytes_per_s=np.array([speed[level] for level in level_of]), bytes_by_class=table)
