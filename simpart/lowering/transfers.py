"""Messages between stages and gradient collectives of a plan, as a communication model is asked for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from simpart.cost import Collective, CollectiveTable, CommModel, checked
from simpart.hardware import Cluster, LinkLevel
from simpart.lowering.ledger import Priced, priced_rows

__all__ = ["CommPrices", "Load", "Message", "busiest", "loads", "messages", "sharing", "shift_of"]


class Message(NamedTuple):
    """Samples [start, start + samples) of a micro-batch, from the replica that has them to one that needs them."""

    source: int
    target: int
    samples: int
    held: int
    """Samples that the source's tensor has in all."""


@lru_cache(maxsize=4096)
def messages(
    sizes: tuple[int, ...], devices: tuple[int, ...], target_sizes: tuple[int, ...], target_devices: tuple[int, ...]
) -> tuple[Message, ...]:
    """Who sends what when replicas of one group feed those of another; sizes may differ.

    >>> [m[:3] for m in messages((3, 1), (0, 1), (2, 2), (8, 9))]
    [(0, 8, 2), (0, 9, 1), (1, 9, 1)]
    """
    found, starts, begin = [], [], 0
    for size in target_sizes:
        starts.append(begin)
        begin += size
    low = 0
    for size, device in zip(sizes, devices, strict=True):
        for first, wanted, target in zip(starts, target_sizes, target_devices, strict=True):
            overlap = min(low + size, first + wanted) - max(low, first)
            if overlap > 0:
                found.append(Message(device, target, overlap, size))
        low += size
    return tuple(found)


class CommPrices:
    """Answers of a communication model on one cluster, each collective asked for once."""

    def __init__(self, model: CommModel, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.known: dict[Collective, Priced] = {}

    def of(self, collectives: Iterable[Collective]) -> list[Priced]:
        """Prices in the order given; unknown ones are asked for together."""
        wanted = list(collectives)
        missing = [c for c in dict.fromkeys(wanted) if c not in self.known]
        if missing:
            estimate = checked(self.model.estimate(CollectiveTable(tuple(missing)), self.cluster), missing)
            self.known.update(zip(missing, priced_rows(estimate, self.cluster.name), strict=True))
        return [self.known[c] for c in wanted]


class Load(NamedTuple):
    """A collective that carries one value of one message."""

    source: int
    target: int
    collective: Collective


def loads(
    cluster: Cluster, found: Sequence[Message], sizes: Callable[[int], Sequence[tuple[int, bool, str]]]
) -> list[Load]:
    """What crosses for one micro-batch. `sizes(samples)` are bytes, whether they scale with samples, and dtype of each
    value on a replica with so many samples."""
    result = []
    shared = sharing(cluster, [(m.source, m.target) for m in found])
    alike: dict[tuple[object, ...], Collective] = {}
    for message, concurrent in zip(found, shared, strict=True):
        level = cluster.level_between(message.source, message.target)
        for whole, scales, dtype in sizes(message.held):
            size = whole * message.samples // message.held if scales else whole
            key = (level.name, level.only, size, concurrent, dtype)
            collective = alike.setdefault(
                key, Collective("p2p", size, (message.source, message.target), concurrent, dtype)
            )
            result.append(Load(message.source, message.target, collective))
    return result


def busiest(prices: CommPrices, found: Sequence[Load]) -> list[Priced]:
    """What the busiest device sends or receives for one micro-batch, one message after the other."""
    load: dict[tuple[str, int], list[Priced]] = defaultdict(list)
    for (source, target, _), priced in zip(found, prices.of(x.collective for x in found), strict=True):
        load["sends", source].append(priced)
        load["receives", target].append(priced)
    totals = {key: sum(p.seconds for p in items) for key, items in load.items()}
    slowest = max(totals, key=lambda key: totals[key], default=None)
    return [] if slowest is None else load[slowest]


def sharing(cluster: Cluster, groups: Sequence[tuple[int, ...]]) -> list[int]:
    """For each group of devices, how many of all groups use one of its physical links at the same time."""
    users: dict[tuple[str, str | None, int, int], int] = defaultdict(int)
    places = []
    for ranks in groups:
        level = cluster.level_of(ranks)
        blocks = {_block(cluster, level, rank) for rank in ranks}
        places.append(blocks)
        for block in blocks:
            users[block] += 1
    return [max((users[block] for block in blocks), default=1) for blocks in places]


def shift_of(cluster: Cluster, devices: Sequence[int]) -> int:
    """By how much these may all be moved down without meeting other links; 0 on clusters of several kinds."""
    if len(cluster.kinds) > 1 or any(level.only is not None for level in cluster.levels):
        return 0
    joining = cluster.levels.index(cluster.level_of(devices))
    block = cluster.levels[joining - 1].size if joining else 1
    block = lcm(block, *(level.shared_by for level in cluster.levels[: joining + 1]))
    return min(devices) // block * block


def _block(cluster: Cluster, level: LinkLevel, rank: int) -> tuple[str, str | None, int, int]:
    """The physical link of a device at a level: a bus serves all members, a card the devices that share it."""
    reach = cluster.group_of(level, rank)
    size = level.size if level.kind == "shared" else level.shared_by
    return level.name, level.only, reach.start, (rank - reach.start) // size
