"""Measured collectives in one form, and the adapter into it from a table in the format of published data sets.

Columns: `op`, `size_bytes` (as nccl-tests count them), `num_gpus`, `latency_us` (or `latency_ms`, `latency_s`; several
must agree), `interconnect` and `gpu` or `device` or `system`; optional `nodes`, `dtype`, `kernel`, `lib`, `source`,
`quality`, `latency_floor_us` (measured time of the smallest all-reduce of two devices).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from simpart.cost import Collective, CollectiveTable
from simpart.costmodels.alpha_beta import AlphaBeta
from simpart.costmodels.learned._adapters import device_named, latencies_s
from simpart.costmodels.learned._measurements import row_codes
from simpart.costmodels.learned_comm._interconnects import FABRICS, Interconnect, interconnect_of
from simpart.costmodels.learned_comm._situation import (
    KINDS,
    Situation,
    situation_of,
)
from simpart.errors import FormatError
from simpart.hardware import Cluster, LinkLevel, load_device

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["REQUIRED", "Records", "cluster_of", "is_collectives", "joined", "read_records"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Names = np.ndarray[tuple[int], np.dtype[np.object_]]

REQUIRED = ("op", "size_bytes", "num_gpus", "latency_us", "interconnect")
_LATENCIES = ("latency_us", "latency_ms", "latency_s")
_DEVICE_COLUMNS = ("gpu", "device", "system")
_OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
        "alltoall": "all_to_all", "sendrecv": "p2p", "send_recv": "p2p", "sendreceive": "p2p"}  # fmt: skip
_CARDS = 8  # devices of a host, each with its share of the network, as in the vendors' systems
_MOST_RANKS = 1e6
_FUSED = ("custom", "trtllm", "eager")
_NVLINK_S, _PCIE_S = 3.4e-6, 5.7e-6  # what cluster files assume: NCCL's tuning table, ring, simple protocol
_ANY_LINK, _ANY_DEVICE = Interconnect(fabric="nvlink", bytes_per_s=300e9), "A100-SXM-80GB"  # of rows left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """One entry per measurement. `system` is device, fabric, host and source; `row` the position in the file;
    `reason` why the row can't be predicted, or empty; `alpha_beta_s` what α–β says from the data sheet."""

    situation: Situation
    latency_s: Floats
    alpha_beta_s: Floats
    device: Names
    system: Names
    source: Names
    library: Names
    quality: Names
    reason: Names
    row: Ints

    def __len__(self) -> int:
        return len(self.latency_s)

    def at(self, rows: Any) -> Records:
        """Some rows, by mask or by position."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "situation"}
        return replace(self, situation=self.situation.at(rows), **columns)

    def medians(self) -> Records:
        """One row per system and situation: the median over versions, dtypes and repeats."""
        s = self.situation
        codes = row_codes([self.system, s.kind, s.software, s.bytes, s.local, s.hosts, np.isfinite(s.switch_s)])
        order = np.lexsort((self.latency_s, codes))
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        counts = np.diff(starts, append=len(order))
        low, high = order[starts + (counts - 1) // 2], order[starts + counts // 2]
        return replace(self.at(low), latency_s=np.sqrt(self.latency_s[low] * self.latency_s[high]))

    def fingerprint(self) -> str:
        """Of the rows: the same rows, the same text."""
        digest = hashlib.sha256("\n".join(map(str, self.system.tolist())).encode())
        for values in (self.situation.kind, self.situation.bytes, self.situation.local, self.situation.hosts):
            digest.update(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        digest.update(np.ascontiguousarray(self.latency_s).tobytes())
        return digest.hexdigest()[:16]


def is_collectives(columns: Any) -> bool:
    """Whether a table with these columns is one of collectives."""
    names = set(columns)
    return {"op", "size_bytes", "num_gpus"} <= names and not names.isdisjoint(_LATENCIES)


def joined(tables: Sequence[Records]) -> Records:
    """Rows of several tables."""
    situation = {n: np.concatenate([getattr(t.situation, n) for t in tables]) for n in Situation.__dataclass_fields__}
    columns = {
        f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(Records) if f.name != "situation"
    }
    return Records(situation=Situation(**situation), **columns)


def read_records(frame: pd.DataFrame, name: str = "table") -> Records:
    """Every row of a table, with the reason where it cannot be used; raises FormatError for missing columns."""
    if not {"latency_ms", "latency_s"}.isdisjoint(frame.columns):
        frame = frame.assign(latency_us=1e6 * latencies_s(frame))
    missing = [column for column in REQUIRED if column not in frame.columns]
    if not any(column in frame.columns for column in _DEVICE_COLUMNS):
        missing.append(" or ".join(_DEVICE_COLUMNS))
    if missing:
        raise FormatError(f"{name}: a table of collectives needs the columns {', '.join(missing)}")
    text = {c: _texts(frame, c) for c in ("op", "interconnect", "dtype", "kernel", "lib", "source", "quality")}
    devices = next(_texts(frame, column) for column in _DEVICE_COLUMNS if column in frame.columns)
    numbers = {c: _numbers(frame, c) for c in ("size_bytes", "num_gpus", "latency_us", "nodes", "latency_floor_us")}
    nodes = np.where(np.isnan(numbers["nodes"]), 1.0, numbers["nodes"])
    reasons, places, collectives = [], [], []
    links: dict[tuple[str, str], Interconnect | None] = {}
    names = [device_named(text) if text.strip() else None for text in devices]
    for i in range(len(frame)):
        op = text["op"][i].strip().casefold().replace("-", "_").replace(" ", "_")
        op = _OPS.get(op, op)
        device, size, ranks, hosts = names[i], numbers["size_bytes"][i], numbers["num_gpus"][i], nodes[i]
        key = (text["interconnect"][i], device or "")
        if device is not None and key not in links:
            links[key] = interconnect_of(*key)
        link, latency = links.get(key), numbers["latency_us"][i]
        if not (0 < latency < np.inf and 0 < size < np.inf and 2 <= ranks < _MOST_RANKS and 1 <= hosts <= ranks):
            reason = "unusable"
        elif op not in KINDS or (op == "p2p" and ranks != 2):
            reason = "unknown_op"
        elif device is None:
            reason = "unknown_device"
        elif ranks % hosts:
            reason = "uneven_hosts"
        elif link is None:
            reason = "unknown_interconnect"
        elif hosts > 1 and link.network_bytes_per_s is None:
            reason = "network_not_stated"
        else:
            reason = ""
        reasons.append(reason)
        if reason or link is None or device is None:
            link, device, op, size, ranks, hosts = _ANY_LINK, _ANY_DEVICE, "p2p", 1.0, 2.0, 1.0
        host = max(int(ranks / hosts), _CARDS)
        places.append((device, link, host, int(hosts)))
        members = tuple(h * host + r for h in range(int(hosts)) for r in range(int(ranks / hosts)))
        kind: Any = op
        collectives.append(Collective(kind, int(size), members, 1, text["dtype"][i].strip().casefold()))
    situation, plain = _priced(places, collectives)
    kernel = [name.casefold() for name in text["kernel"]]
    fused = np.array([any(word in name for word in _FUSED) for name in kernel], dtype=bool)
    eager = np.array(["eager" in name for name in kernel], dtype=bool)
    software = np.where(fused & (situation.kind == KINDS.index("all_reduce")), np.where(eager, 2, 1), 0)
    hosts_of = [name[name.index("(") :] if "(" in name else "" for name in devices]
    fabric = [FABRICS[number] for number in situation.fabric.tolist()]
    known = [name or devices[i] for i, name in enumerate(names)]
    parts = zip(known, fabric, hosts_of, text["source"], strict=True)
    systems = [f"{d} {f} {h}".strip() + f" @ {s}" for d, f, h, s in parts]
    return Records(
        situation=replace(situation, software=software.astype(np.int64), inside_s=numbers["latency_floor_us"] * 1e-6),
        latency_s=numbers["latency_us"] * 1e-6,
        alpha_beta_s=plain,
        device=np.array(known, dtype=object),
        system=np.array(systems, dtype=object),
        source=np.array(text["source"], dtype=object),
        library=np.array([f"{a} {b}".strip() for a, b in zip(text["lib"], text["kernel"], strict=True)], dtype=object),
        quality=np.array(text["quality"], dtype=object),
        reason=np.array(reasons, dtype=object),
        row=np.arange(len(frame), dtype=np.int64),
    )  # fmt: skip


def _priced(places: list[Any], collectives: list[Collective]) -> tuple[Situation, Floats]:
    """Situations, and the times of α–β from the data sheet."""
    rows_of: dict[Any, list[int]] = {}
    for i, place in enumerate(places):
        rows_of.setdefault(place, []).append(i)
    parts, order, plain = [], [], np.zeros(len(places))
    for (device, link, host, hosts), rows in rows_of.items():
        cluster = cluster_of(device, link, host, hosts)
        mine = [collectives[i] for i in rows]
        parts.append(situation_of(mine, cluster))
        plain[rows] = AlphaBeta().estimate(CollectiveTable(tuple(mine)), cluster).mean_s
        order += rows
    back = np.argsort(np.array(order, dtype=np.int64))
    columns = {n: np.concatenate([getattr(part, n) for part in parts])[back] for n in Situation.__dataclass_fields__}
    return Situation(**columns), plain


def cluster_of(device: str, link: Interconnect, host: int, hosts: int) -> Cluster:
    """A cluster with these links, `host` devices in each of `hosts` hosts."""
    levels = []
    if link.pairs and link.bridge_bytes_per_s:
        levels.append(
            LinkLevel(name="nvlink", size=2, bytes_per_s=link.bytes_per_s, latency_s=_NVLINK_S, inside_host=True)
        )
    if link.fabric in ("nvlink", "mesh") and not levels:
        kind: Any = "mesh" if link.fabric == "mesh" else "switch"
        levels.append(LinkLevel(
            name="nvlink", size=host, bytes_per_s=link.bytes_per_s, pair_bytes_per_s=link.pair_bytes_per_s, kind=kind,
            latency_s=_NVLINK_S, inside_host=True,
        ))  # fmt: skip
    else:
        staged = link.fabric == "staged"
        levels.append(LinkLevel(
            name="pcie", size=host, bytes_per_s=link.bridge_bytes_per_s or link.bytes_per_s, latency_s=_PCIE_S,
            kind="shared" if staged else "switch", shared_by=host if staged else 1, inside_host=True,
        ))  # fmt: skip
    if hosts > 1 and link.network_bytes_per_s is not None:
        rate = link.network_bytes_per_s / host
        levels.append(LinkLevel(name="network", size=host * hosts, bytes_per_s=rate, latency_s=link.network_latency_s))
    return Cluster(name="measured", devices=((load_device(device), host * hosts),), levels=tuple(levels))


def _texts(frame: pd.DataFrame, column: str) -> list[str]:
    if column not in frame.columns:
        return [""] * len(frame)
    return ["" if value is None or value != value else str(value) for value in frame[column].tolist()]


def _numbers(frame: pd.DataFrame, column: str) -> Floats:
    import pandas as pd

    if column not in frame.columns:
        return np.full(len(frame), np.nan)
    found: Floats = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    return found
