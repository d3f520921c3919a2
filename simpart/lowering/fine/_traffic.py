"""Bytes that collectives along an axis put on physical links, all sets of devices along it together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from simpart.cost import Collective
from simpart.hardware import Cluster
from simpart.lowering.flows import LinkUse, ring_use

__all__ = ["traffic"]

SHARE_OF_ALL_REDUCE = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 0.5}
"""Bytes over each hop of a ring, in those of an all-reduce of the same size."""


def traffic(cluster: Cluster, rows: tuple[tuple[int, ...], ...], collectives: Sequence[Collective]) -> LinkUse:
    """As rings; an all-to-all as if each device passed all that it sends to the next one."""
    size = 0.0
    for c in collectives:
        n = len(c.ranks)
        size += c.bytes * SHARE_OF_ALL_REDUCE.get(c.kind, n / (2 * (n - 1)) if n > 1 else 0.0)
    return {name: each * size for name, each in _ring(cluster, rows)}


@lru_cache(maxsize=256)
def _ring(cluster: Cluster, rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, float], ...]:
    """Bytes over links of an all-reduce of one byte by every row."""
    found: dict[str, float] = defaultdict(float)
    for ranks in rows:
        for name, each in ring_use(cluster, ranks, 1.0).items():
            found[name] += each
    return tuple(found.items())
