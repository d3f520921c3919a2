"""A fitted communication model: shared constants, what it knows of measured systems, how far both are to be trusted.

A *system* is a device with its links in the host that it was measured in. How a row stands to the systems known decides
what is used for it and how wide its interval is:

    seen       this system was measured: its own constants, and what its measurements leave of them, between sizes
    seen_bus   the same on PCI Express
    device     another system of the same device and links was
    floor      a device never measured, but somebody timed the smallest all-reduce of two
    new        a device never measured: told by one with the same NVLink, whose switches and their software it shares,
               else by the average system
    network    between hosts that were never measured
    mesh, bus  not measured, links from device to device, or PCI Express only: classes of their own, for hosts differ by
               more than devices do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from simpart.costmodels.learned_comm._fit import fit_shared, fit_system
from simpart.costmodels.learned_comm._interconnects import FABRICS, nvlink_of
from simpart.costmodels.learned_comm._protocol import FLOOR_BYTES, Constants, group_names, seconds
from simpart.costmodels.learned_comm._records import Records
from simpart.costmodels.learned_comm._situation import KINDS, Situation

__all__ = ["REGIMES", "STATUSES", "Curve", "Fitted", "Prediction", "System", "regime_of", "train"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

STATUSES = ("seen", "seen_bus", "device", "floor", "new", "network", "mesh", "bus")
REGIMES = ("latency", "middle", "bandwidth")
_REGIME_BYTES = (65536.0, 4.0 * 2**20)
_REGIME_BYTES_BETWEEN_HOSTS = (1e6, 64e6)
_BINS_PER_OCTAVE = 2.0
_MANY_OCTAVES, _SEVERAL = 18.0, 3
_OUTSIDE = 1.7  # by how much the own spread is larger at sizes and ranks never measured
_LEAST_FLOOR, _MOST_FLOOR = 0.05, 50.0

Spreads = Mapping[str, Mapping[str, tuple[float, float]]]
"""Status (with ` fused` for kernels of inference engines) → regime → (shared, own) log-sd."""

PRIOR_SPREADS: Spreads = {
    "seen": dict.fromkeys(REGIMES, (0.04, 0.06)),
    "seen_bus": dict.fromkeys(REGIMES, (0.06, 0.10)),
    "device": {"latency": (0.25, 0.10), "middle": (0.2, 0.12), "bandwidth": (0.06, 0.06)},
    "floor": {"latency": (0.08, 0.08), "middle": (0.10, 0.12), "bandwidth": (0.08, 0.08)},
    "new": {"latency": (0.30, 0.08), "middle": (0.25, 0.12), "bandwidth": (0.09, 0.08)},
    "network": {"latency": (0.45, 0.15), "middle": (0.35, 0.20), "bandwidth": (0.15, 0.12)},
    "mesh": {"latency": (0.30, 0.10), "middle": (0.30, 0.20), "bandwidth": (0.25, 0.20)},
    "bus": {"latency": (0.35, 0.15), "middle": (0.50, 0.25), "bandwidth": (0.60, 0.25)},
}
PRIOR_SPREADS = {
    **PRIOR_SPREADS,
    **{
        f"{status} fused": {r: (1.3 * a, 1.3 * b) for r, (a, b) in spread.items()}
        for status, spread in PRIOR_SPREADS.items()
    },
}


@dataclass(frozen=True, slots=True)
class Curve:
    """What a system's measurements leave of its constants: log errors by log2 of the bytes, for one number of ranks."""

    log2_bytes: tuple[float, ...]
    residual: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A measured system. `curves` by group of constants (and ` xN` on N hosts), then by ranks of a host."""

    name: str
    device: str
    fabric: int
    rows: int
    floor: float = 1.0
    between: float = 1.0
    constants: Constants = field(default_factory=dict)
    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Log seconds of each row, log-sds, how the row stands to the systems known (indexing STATUSES), and whether its
    size and ranks lie within what was trained on."""

    log_seconds: Floats
    shared: Floats
    own: Floats
    status: Ints
    inside: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What `train` learns. `domain` is (least, most) of bytes and ranks by group."""

    constants: Constants
    systems: Mapping[str, System]
    domain: Mapping[str, tuple[float, float, float, float]] = field(default_factory=dict)
    spreads: Spreads = field(default_factory=lambda: PRIOR_SPREADS)
    facts: Mapping[str, object] = field(default_factory=dict)

    def system_of(self, device: str, fabric: int, group: str) -> System | None:
        """The best known system of a device for a group: with curves over many sizes, for several numbers of ranks."""
        alike = [s for s in self.systems.values() if s.device == device and s.fabric == fabric]
        return max(alike, key=lambda s: (round(_breadth(s.curves.get(group, {}))), s.rows), default=None)

    def like(self, device: str, fabric: int, group: str) -> System | None:
        """The best known system whose device has the NVLink of this one, by data sheet; none on other links."""
        rate = nvlink_of(device)
        if rate is None or FABRICS[fabric] != "nvlink":
            return None
        alike = [s.device for s in self.systems.values() if nvlink_of(s.device) == rate and group in s.curves]
        found = [self.system_of(name, fabric, group) for name in dict.fromkeys(alike)]
        return max((s for s in found if s is not None), key=lambda s: s.rows, default=None)

    def predict(self, situation: Situation, devices: Sequence[str], names: Sequence[str] | None = None) -> Prediction:
        """Rows on devices by name; `names` says which system each row is from, where known."""
        n = len(situation)
        index, groups = group_names(situation)
        logs, inside = np.zeros(n), np.ones(n, dtype=bool)
        status = np.zeros(n, dtype=np.int64)
        columns = (devices, situation.fabric.tolist(), index.tolist(), situation.hosts.tolist(), names or [""] * n)
        rows_of: dict[tuple[str, int, int, float, str], list[int]] = {}
        for i, key in enumerate(zip(*columns, strict=True)):
            rows_of.setdefault(key, []).append(i)
        for (device, fabric, number, hosts, name), found in rows_of.items():
            rows = np.array(found, dtype=np.int64)
            at, group = situation.at(rows), groups[number]
            system = self.systems.get(name) or self.system_of(device, fabric, group)
            if system is None and hosts <= 1 and np.isnan(at.inside_s).all():
                system = self.like(device, fabric, group)
            logs[rows] = self._log_seconds(at, system, group, hosts)
            status[rows] = _status(at, system, (device, name), group, hosts)
            low, high, least, most = self.domain.get(group, (np.inf, 0.0, np.inf, 0.0))
            if system is not None:
                known = [float(local) for local in system.curves.get(curve_name(group, hosts), {})]
                inside[rows] &= np.isin(at.local, known) | (not known)
            inside[rows] &= (at.bytes >= low) & (at.bytes <= high) & (at.local >= least) & (at.local <= most)
        table = np.array([[[self.spreads[s + f][r] for r in REGIMES] for s in STATUSES] for f in ("", " fused")])
        spread = table[(situation.software > 0).astype(np.int64), status, regime_of(situation)]
        return Prediction(
            log_seconds=np.maximum(logs, np.log(np.maximum(situation.bound_s(), 1e-12))),
            shared=spread[:, 0], own=spread[:, 1] * np.where(inside, 1.0, _OUTSIDE), status=status, inside=inside,
        )  # fmt: skip

    def _log_seconds(self, at: Situation, system: System | None, group: str, hosts: float) -> Floats:
        floor, between = self.factors(at, system)
        mine = self.constants if system is None else {**self.constants, **system.constants}
        logs: Floats = np.log(seconds(mine, at, floor, between))
        curves = system.curves.get(curve_name(group, hosts)) if system is not None else None
        return logs + _between_curves(curves, at) if curves else logs

    def factors(self, at: Situation, system: System | None) -> tuple[Floats, Floats]:
        """Factors of latency inside hosts and between them: of a known system, or such that the smallest all-reduce of
        two takes the time measured, or that of the average system."""
        floor = np.full(len(at), 1.0 if system is None else system.floor)
        between = np.full(len(at), 1.0 if system is None else system.between)
        given = ~np.isnan(at.inside_s)
        if system is None and given.any():
            floor[given] = _scaled(self.constants, at.at(given), at.inside_s[given], hosts=1.0)
        given = ~np.isnan(at.between_s)
        if given.any():
            start = self.constants["nvlink/all_reduce"]["start"] * floor[given]
            hop = self.constants["network/collective"]["hop"]
            between[given] = np.clip((at.between_s[given] - start) / hop, _LEAST_FLOOR, _MOST_FLOOR)
        return floor, between


def _breadth(curves: Mapping[int, Curve]) -> float:
    spans = [curve.log2_bytes[-1] - curve.log2_bytes[0] for curve in curves.values()]
    return min(max(spans, default=0.0), _MANY_OCTAVES) * min(len(spans), _SEVERAL)


def _scaled(constants: Constants, at: Situation, measured_s: Floats, *, hosts: float) -> Floats:
    """The factor with which the smallest all-reduce of two inside a host takes `measured_s`."""
    one = np.ones(len(at))
    bytes_, shrink = one * FLOOR_BYTES, FLOOR_BYTES / np.maximum(at.bytes, 1.0)
    probe = replace(
        at, kind=np.full(len(at), KINDS.index("all_reduce")), software=np.zeros(len(at), dtype=np.int64), bytes=bytes_,
        local=2 * one, hosts=hosts * one, local_s=at.local_s * shrink, switch_s=np.inf * one, network_s=0 * one,
    )  # fmt: skip
    found: Floats = np.clip(measured_s / seconds(constants, probe, one, one), _LEAST_FLOOR, _MOST_FLOOR)
    return found


def _status(at: Situation, system: System | None, names: tuple[str, str], group: str, hosts: float) -> Ints:
    device, name = names
    given = np.where(
        np.isnan(at.between_s if hosts > 1 else at.inside_s), STATUSES.index("new"), STATUSES.index("floor")
    )
    measured = system is not None and curve_name(group, hosts) in system.curves
    if measured and system is not None and system.device == device and name in ("", system.name):
        return np.full(len(at), STATUSES.index("seen_bus" if group.startswith("bus/") else "seen"))
    if hosts > 1:
        return np.full(len(at), STATUSES.index("network"))
    if system is not None and system.device == device:
        return np.full(len(at), STATUSES.index("device"))
    fabric = group.partition("/")[0]
    if fabric in STATUSES:
        return np.full(len(at), STATUSES.index(fabric))
    return given.astype(np.int64)


def regime_of(situation: Situation) -> Ints:
    """Which of REGIMES a row belongs to, by its bytes."""
    inside = np.searchsorted(np.array(_REGIME_BYTES), situation.bytes, side="right")
    between = np.searchsorted(np.array(_REGIME_BYTES_BETWEEN_HOSTS), situation.bytes, side="right")
    return np.where(situation.hosts > 1, between, inside).astype(np.int64)


def curve_name(group: str, hosts: float) -> str:
    """Under which name a system's curves on so many hosts stand."""
    return group if hosts <= 1 else f"{group} x{int(hosts)}"


def train(records: Records, *, systems: bool = True) -> Fitted:
    """Fit shared constants, then each system's own (unless not wanted). `records` are cleaned; see `_rules`."""
    medians = records.medians()
    constants, floors, between = fit_shared(medians)
    index, groups = group_names(medians.situation)
    domain, found = {}, {}
    for number in np.unique(index):
        rows = index == number
        sizes, local = medians.situation.bytes[rows], medians.situation.local[rows]
        domain[groups[number]] = (0.0, float(sizes.max()), float(local.min()), float(local.max()))
    for name in dict.fromkeys(medians.system.tolist()) if systems else ():
        rows = medians.system == name
        found[name] = _system(medians.at(rows), name, constants, floors.get(name, 1.0), between.get(name, 1.0))
    facts = {
        "rows": len(records),
        "systems": sorted(set(records.system.tolist())),
        "fingerprint": records.fingerprint(),
    }
    return Fitted(constants=constants, systems=found, domain=domain, facts=facts)


def _system(records: Records, name: str, constants: Constants, floor: float, between: float) -> System:
    single = records.situation.hosts <= 1
    index, groups = group_names(records.situation)
    own: dict[str, dict[str, float]] = {}
    for number in np.unique(index[single]) if single.any() else ():
        rows = single & (index == number)
        own[groups[number]] = fit_system(records.at(rows), groups[number], constants, floor, between)
    mine = {**constants, **own}
    message = records.situation.kind == KINDS.index("p2p")
    for group, rows in (("network/p2p", ~single & message), ("network/collective", ~single & ~message)):
        if rows.any():
            own[group] = fit_system(records.at(rows), group, mine, floor, between)
    mine = {**constants, **own}
    one, other = np.full(len(records), floor), np.full(len(records), between)
    base = np.log(seconds(mine, records.situation, one, other))
    curves: dict[str, dict[int, Curve]] = {}
    for number in np.unique(index):
        for hosts in np.unique(records.situation.hosts):
            for local in np.unique(records.situation.local):
                s = records.situation
                rows = (index == number) & (s.hosts == hosts) & (s.local == local)
                if rows.sum() >= 3:
                    curve = _curve(s.bytes[rows], base[rows], np.log(records.latency_s[rows]))
                    curves.setdefault(curve_name(groups[number], float(hosts)), {})[int(local)] = curve
    return System(
        name=name, device=str(records.device[0]), fabric=int(np.bincount(records.situation.fabric).argmax()),
        rows=len(records), floor=floor, between=between, constants=own, curves=curves,
    )  # fmt: skip


def _curve(bytes_: Floats, base: Floats, measured: Floats) -> Curve:
    """Mean errors in bins of sizes, changed where needed so that more bytes never take less time."""
    bins = np.round(_BINS_PER_OCTAVE * np.log2(bytes_)).astype(np.int64)
    places = [bins == number for number in np.unique(bins)]
    at = np.array([np.log2(bytes_[rows]).mean() for rows in places])
    level = np.array([base[rows].mean() for rows in places])
    total = np.maximum.accumulate(level + np.array([(measured - base)[rows].mean() for rows in places]))
    return Curve(tuple(np.round(at, 3).tolist()), tuple(np.round(total - level, 4).tolist()))


def _between_curves(curves: Mapping[int, Curve], at: Situation) -> Floats:
    """Residuals at sizes and ranks between those measured; half of the nearest beyond the ranks measured."""
    known = sorted(curves)
    size = np.log2(np.maximum(at.bytes, 1.0))
    table = np.array([np.interp(size, curves[local].log2_bytes, curves[local].residual) for local in known])
    found: Floats = np.zeros(len(at))
    for local in np.unique(at.local):
        rows = at.local == local
        if local <= known[0] or local >= known[-1]:
            edge = table[0 if local <= known[0] else -1, rows]
            found[rows] = edge if local in curves else 0.5 * edge
            continue
        upper = next(i for i, value in enumerate(known) if value >= local)
        share = np.log(local / known[upper - 1]) / np.log(known[upper] / known[upper - 1])
        found[rows] = (1 - share) * table[upper - 1, rows] + share * table[upper, rows]
    return found
