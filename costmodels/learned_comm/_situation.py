"""What the time of a collective depends on, column by column: who takes part, and how long its bytes need on each link.

Levels inside a host count as one, with the slowest link on the way: libraries lay one ring through them. Levels between
hosts are hierarchical: each carries what its own members exchange, and all of them work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from simpart.cost import Collective
from simpart.costmodels.alpha_beta import Hop, path_of
from simpart.costmodels.learned_comm._interconnects import FABRICS, through_host
from simpart.hardware import Cluster, LinkLevel

__all__ = [
    "KINDS",
    "NETWORK_LATENCY_S",
    "SOFTWARE",
    "SWITCH_DTYPES",
    "SWITCH_REDUCES_BYTES_PER_S",
    "Situation",
    "situation_of",
    "volume",
]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast")
SOFTWARE = ("library", "fused", "fused_eager")
"""NCCL and its kin; all-reduce kernels of inference engines, replayed from a graph; the same, launched one by one."""
SWITCH_REDUCES_BYTES_PER_S = 400e9  # NVLink of the fourth generation, the first whose switches reduce
NETWORK_LATENCY_S = 14e-6  # of a level between hosts, as data sheets leave it: NCCL's tuning table, ring, simple
SWITCH_DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float",
    "half",
    "fp32",
    "fp16",
    "bf16",
    "bfloat16/float32?",
    "?",
    "",
)
_HOST_BUS_BYTES_PER_S = 40e9  # a switched level inside a host slower than this is PCI Express


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One entry per collective. `kind`, `fabric` and `software` index KINDS, FABRICS and SOFTWARE; `local` ranks of a
    group on each of `hosts` hosts; `local_s`, `switch_s` and `network_s` the least time of its bytes on a device's link
    inside the host, there with reduction in the switch (infinite without), and between hosts; `inside_s` and
    `between_s` the measured time of the smallest all-reduce of two inside a host and between hosts, NaN where nobody
    measured; `network_latency_s` of the data sheet."""

    kind: Ints
    fabric: Ints
    software: Ints
    bytes: Floats
    local: Floats
    hosts: Floats
    local_s: Floats
    switch_s: Floats
    network_s: Floats
    inside_s: Floats
    between_s: Floats
    network_latency_s: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def at(self, rows: Any) -> Situation:
        """Some rows, by mask or by position."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def bound_s(self) -> Floats:
        """No collective is faster: its bytes at the full rate of the links."""
        found: Floats = np.maximum(np.minimum(self.local_s, self.switch_s), self.network_s)
        return found


def volume(kind: str, members: float) -> float:
    """Bytes that each device sends (or receives, if more) per byte of the collective, in one group of `members`."""
    if members <= 1:
        return 0.0
    if kind == "all_reduce":
        return 2 * (members - 1) / members
    return 1.0 if kind in ("p2p", "broadcast") else (members - 1) / members


def situation_of(collectives: Sequence[Collective], cluster: Cluster) -> Situation:
    """Collectives of at least two ranks on a cluster."""
    levels = {level.name: level for level in cluster.levels}
    known: dict[Any, int] = {}
    shapes: list[tuple[Any, ...]] = []
    index = np.zeros(len(collectives), dtype=np.int64)
    for i, row in enumerate(collectives):
        key = (row.kind, row.ranks, row.concurrent, row.dtype in SWITCH_DTYPES)
        place = known.get(key)
        if place is None:
            place = known[key] = len(shapes)
            shapes.append((KINDS.index(row.kind), *_shape(row, cluster, levels)))
        index[i] = place
    table = np.array(shapes, dtype=np.float64).reshape(len(shapes), 10)[index]
    size = np.array([row.bytes for row in collectives], dtype=np.float64)
    kind, fabric, local, hosts, local_s, switch_s, network_s, inside_s, between_s, latency_s = table.T
    return Situation(
        kind=kind.astype(np.int64), fabric=fabric.astype(np.int64), software=np.zeros(len(size), dtype=np.int64),
        bytes=size, local=local, hosts=hosts, local_s=local_s * size,
        switch_s=switch_s * np.maximum(size, 1.0), network_s=network_s * size,
        inside_s=inside_s, between_s=between_s, network_latency_s=latency_s,
    )  # fmt: skip


def _shape(row: Collective, cluster: Cluster, levels: dict[str, LinkLevel]) -> tuple[Any, ...]:
    """All columns but kind and bytes, with seconds per byte."""
    inside: list[Hop] = []
    between: list[Hop] = []
    for tier in path_of(row, cluster):
        for hop in tier[:1] if len(tier) == 1 else [min(tier, key=lambda h: h.bytes_per_s)]:
            (inside if levels[hop.level].inside_host else between).append(hop)
    total = len(row.ranks)
    local = hosts = 1
    for hop in inside:
        local *= hop.members
    for hop in between:
        hosts *= hop.members
    local_s, switch_s, fabric, floor = 0.0, np.inf, 0, np.nan
    if inside:
        staged = through_host(cluster.device(min(row.ranks)).name)
        slow = min(inside, key=lambda hop: _rate(hop, levels, row.kind, staged))
        level = levels[slow.level]
        fabric, floor = FABRICS.index(_fabric(level, staged)), _floor(level)
        rate = _rate(slow, levels, row.kind, staged)
        amount = volume(row.kind, local)
        if row.kind == "all_to_all":
            amount = (local - 1) / total
        local_s = amount / rate
        reduces = level.kind == "switch" and level.bytes_per_s >= SWITCH_REDUCES_BYTES_PER_S and len(inside) == 1
        if row.kind == "all_reduce" and reduces and local > 2 and row.dtype in SWITCH_DTYPES:
            switch_s = (1 + 1 / local) / rate
    network_s, latency, network_floor, below = 0.0, NETWORK_LATENCY_S, np.nan, 1
    for hop in between:
        amount = volume(row.kind, hop.members) / (hop.inside if row.kind not in ("p2p", "all_to_all") else 1)
        if row.kind == "all_to_all":
            amount = (hop.members - 1) * hop.inside / total
        rate = hop.pair_bytes_per_s if row.kind == "p2p" else hop.bytes_per_s
        network_s, latency = max(network_s, amount / rate), max(latency * (below > 1), hop.latency_s)
        network_floor, below = _floor(levels[hop.level]), below + 1
    return fabric, local, hosts, local_s, switch_s, network_s, floor, network_floor, latency


def _rate(hop: Hop, levels: dict[str, LinkLevel], kind: str, staged: bool) -> float:
    """Bytes/s of one device. Through host memory a bus counts as a link of each: how they contend is the model's."""
    rate = hop.pair_bytes_per_s if kind == "p2p" else hop.bytes_per_s
    alone = kind == "p2p" or not staged or levels[hop.level].kind != "shared"
    return rate if alone else rate * hop.members * hop.inside


def _fabric(level: LinkLevel, staged: bool) -> str:
    if level.kind == "shared":
        return "staged" if staged else "pcie"
    if "pci" in level.name.lower() or level.bytes_per_s < _HOST_BUS_BYTES_PER_S:
        return "pcie"
    return "mesh" if level.kind == "mesh" else "nvlink"


def _floor(level: LinkLevel) -> float:
    return np.nan if level.floor_s is None else level.floor_s
