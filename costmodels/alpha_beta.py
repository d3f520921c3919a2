"""α–β: a collective takes a latency per step and its bytes over the bandwidth of each link level that it crosses.

All-reduce is the better of ring, `2 (n-1)/n · bytes / bytes_per_s + 2 (n-1) · latency_s` (Patarasuk & Yuan, "Bandwidth
optimal all-reduce algorithms", 2009), and double binary tree, `2 bytes / bytes_per_s + 2 log2(n) · latency_s`
(Sanders, Speck & Träff, 2009). Over several levels it is hierarchical: reduce-scatter inside, all-reduce across,
all-gather inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpart.cost import PROVENANCES, Collective, CollectiveKind, CollectiveTable, Estimate, Floats
from simpart.hardware import Cluster, LinkLevel

__all__ = ["AlphaBeta", "Hop", "path_of"]

# How far off data-sheet links are, as log-sds: the latency of a system not measured is uncertain by 40 to 50 %.
_SHARED_LOG_SD, _OWN_LOG_SD = 0.35, 0.20


@dataclass(frozen=True, slots=True)
class Hop:
    """What one level means for a group: `members` sub-groups meet there, each sender gets `bytes_per_s`, a message to
    one other member `pair_bytes_per_s`. `inside` is how many ranks each sub-group holds."""

    level: str
    members: int
    inside: int
    latency_s: float
    bytes_per_s: float
    pair_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A CommModel from link levels alone. With `in_switch` all-reduces on switched levels are reduced by the switch (as
    NVLink SHARP does): each byte is sent once and received once."""

    in_switch: bool = False

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        """Seconds of each collective; a group of one rank takes none."""
        rows = table.collectives
        seconds = np.zeros(len(rows))
        levels = ["none", *dict.fromkeys(level.name for level in cluster.levels)]
        family = np.zeros(len(rows), dtype=np.int64)
        shapes: dict[tuple[CollectiveKind, tuple[int, ...], int], list[int]] = {}
        for i, row in enumerate(rows):
            shapes.setdefault((row.kind, row.ranks, row.concurrent), []).append(i)
        for (kind, _, _), members in shapes.items():
            path = path_of(rows[members[0]], cluster)
            if not path:
                continue
            size = np.array([rows[i].bytes for i in members], dtype=np.float64)
            seconds[members] = _SECONDS[kind](size, path, self.in_switch)
            family[members] = levels.index(path[-1][0].level)
        return Estimate(
            mean_s=seconds,
            family=family,
            families=tuple(levels),
            shared_log_sd=np.full(len(rows), _SHARED_LOG_SD),
            own_log_sd=np.full(len(rows), _OWN_LOG_SD),
            provenance=np.full(len(rows), PROVENANCES.index("analytic"), dtype=np.int64),
        )


# Tiers from the innermost outwards. A tier has several hops when levels for different devices work side by side.
Path = list[tuple[Hop, ...]]


def path_of(collective: Collective, cluster: Cluster) -> Path:
    """The levels that a group's members meet at, from the innermost outwards."""
    ranks = collective.ranks
    parts = {rank: rank for rank in ranks}  # rank -> first rank of the sub-group it belongs to so far
    path: Path = []
    previous: LinkLevel | None = None
    for level in cluster.levels:
        hop, joined = _meet(level, collective, parts, cluster)
        if hop is not None:
            beside = previous is not None and previous.only is not None and level.only not in (None, previous.only)
            if beside and path and previous is not None and path[-1][-1].level == previous.name:
                path[-1] = (*path[-1], hop)
            else:
                path.append((hop,))
        previous, parts = level, joined
        if len(set(parts.values())) == 1:
            break
    return path


def _meet(
    level: LinkLevel, collective: Collective, parts: dict[int, int], cluster: Cluster
) -> tuple[Hop | None, dict[int, int]]:
    """The hop at this level, None when no two sub-groups meet there, and the sub-groups after it."""
    joined: dict[int, int] = {}
    meeting: dict[int, set[int]] = {}
    senders: dict[tuple[int, int], int] = {}
    reach: range | None = None
    for rank in sorted(parts):
        if reach is None or rank not in reach:
            reach = cluster.group_of(level, rank)
        key = reach.start if reach else -1 - rank
        meeting.setdefault(key, set()).add(parts[rank])
        block = (key, (rank - reach.start) // level.shared_by if reach else 0)
        senders[block] = senders.get(block, 0) + 1
    for rank in parts:
        reach = cluster.group_of(level, rank)
        joined[rank] = min(meeting[reach.start if reach else -1 - rank])
    members = max(map(len, meeting.values()))
    if members == 1:
        return None, joined
    sizes = Counter(parts.values())
    inside = max(sizes[part] for found in meeting.values() if len(found) > 1 for part in found)
    alone = collective.kind == "p2p" or (collective.kind == "broadcast" and inside > 1)  # one of a sub-group sends
    active = collective.concurrent * (1 if alone else max(senders.values()))
    if level.kind == "shared":  # one bus: everybody who sends is on it
        sending = collective.concurrent * (1 if collective.kind == "p2p" else members * (1 if alone else inside))
        rate = level.bytes_per_s / sending
        pair = rate
    else:
        rate = level.share_bytes_per_s(active)
        pair = min(rate, level.point_to_point_bytes_per_s)
        if level.kind == "mesh":
            rate = min(rate, (members - 1) * level.point_to_point_bytes_per_s)
    hop = Hop(level.name, members, inside, level.latency_s, rate, pair)
    return hop, joined


# --- seconds of each kind: (bytes, path, in_switch) ------------------------------------------------------------------
def _worst(tier: tuple[Hop, ...], cost: Callable[[Hop], Any]) -> Floats:
    found: Floats = np.max([cost(hop) for hop in tier], axis=0)
    return found


def _sum(parts: Sequence[Floats]) -> Floats:
    found: Floats = np.sum(parts, axis=0)
    return found


def _all_reduce(size: Floats, path: Path, in_switch: bool) -> Floats:
    def across(hop: Hop) -> Any:
        n, share = hop.members, size / hop.inside
        ring = 2 * (n - 1) / n * share / hop.bytes_per_s + 2 * (n - 1) * hop.latency_s
        tree = 2 * share / hop.bytes_per_s + 2 * np.log2(n) * hop.latency_s
        best = np.minimum(ring, tree)
        return np.minimum(best, share / hop.bytes_per_s + 2 * hop.latency_s) if in_switch else best

    return _sum([*(2 * _scatter(size, tier) for tier in path[:-1]), _worst(path[-1], across)])


def _scatter(size: Floats, tier: tuple[Hop, ...]) -> Floats:
    """Ring reduce-scatter (or all-gather) of the share that reaches this tier: `(n-1) (latency + share / n / rate)`."""
    return _worst(
        tier, lambda hop: (hop.members - 1) * (hop.latency_s + size / (hop.inside * hop.members) / hop.bytes_per_s)
    )


def _gather(size: Floats, path: Path, in_switch: bool) -> Floats:
    return _sum([_scatter(size, tier) for tier in path])


def _all_to_all(size: Floats, path: Path, in_switch: bool) -> Floats:
    """Each rank sends its n-th part to every other rank, over the level at which the two meet."""
    total = 1
    for tier in path:
        total *= max(hop.members for hop in tier)

    def cost(hop: Hop) -> Any:
        return (hop.members - 1) * hop.inside * (hop.latency_s + size / total / hop.bytes_per_s)

    return _sum([_worst(tier, cost) for tier in path])


def _point_to_point(size: Floats, path: Path, in_switch: bool) -> Floats:
    return _worst(path[-1], lambda hop: hop.latency_s + size / hop.pair_bytes_per_s)


def _broadcast(size: Floats, path: Path, in_switch: bool) -> Floats:
    """The better of a binomial tree and scatter with all-gather (van de Geijn) at each level, from the outermost in."""

    def cost(hop: Hop) -> Any:
        n, steps = hop.members, np.ceil(np.log2(hop.members))
        tree = steps * (hop.latency_s + size / hop.bytes_per_s)
        pieces = (steps + n - 1) * hop.latency_s + 2 * (n - 1) / n * size / hop.bytes_per_s
        return np.minimum(tree, pieces)

    return _sum([_worst(tier, cost) for tier in path])


_SECONDS: dict[CollectiveKind, Callable[[Floats, Path, bool], Floats]] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "p2p": _point_to_point,
    "broadcast": _broadcast,
}
