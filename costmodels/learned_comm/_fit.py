"""Learning the constants from measurements: robust least squares on log times, with a free floor for each system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simpart.costmodels.learned._fitting import fit_constants
from simpart.costmodels.learned_comm._protocol import GROUPS, PRIORS, Constants, group_names, seconds
from simpart.costmodels.learned_comm._records import Records
from simpart.costmodels.learned_comm._rules import superseded
from simpart.costmodels.learned_comm._situation import KINDS, Situation

__all__ = ["DEPARTURES", "centres", "fit_shared", "fit_system"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Names = np.ndarray[tuple[int], np.dtype[np.object_]]

_FLOOR_SD = 0.35  # of systems' latency factors: systems never measured differ by 40 to 50 %
_ITERATIONS = 20
# How far a single system's constants depart from the shared ones, as log-sds.
DEPARTURES: Mapping[str, float] = {
    "start": 0.15, "step": 0.2, "low": 0.3, "pipe": 0.3, "bulk": 0.06, "ramp": 0.3, "crowd": 0.2, "pipe_switch": 0.3,
    "switch": 0.1, "host": 0.2, "hop": 0.2, "grow": 0.3, "grown_bytes": 0.4, "net": 0.08, "more": 0.01,
}  # fmt: skip


def centres() -> dict[str, dict[str, float]]:
    """Constants before any measurement: the priors' centres."""
    return {group: {name: centre for name, (centre, _) in PRIORS[group].items()} for group in GROUPS}


def fit_shared(records: Records) -> tuple[Constants, dict[str, float], dict[str, float]]:
    """Constants of all groups, and factors of latency inside and between hosts of each system. Groups without rows stay
    at their priors. `records` has one row per system and situation, cleaned."""
    records = records.at(~superseded(records))
    constants: dict[str, dict[str, float]] = centres()
    floors = dict.fromkeys(_unique(records.system), 1.0)
    between = dict(floors)
    index, names = group_names(records.situation)
    group = np.array(names, dtype=object)[index]
    single = records.situation.hosts <= 1
    fused = records.situation.software > 0
    fabric = np.array([name.partition("/")[0] for name in group.tolist()], dtype=object)
    for name in ("nvlink", "mesh", "bus"):
        for rows, free in ((single & ~fused & (fabric == name), "floors"), (single & fused & (fabric == name), "none")):
            _fit(records.at(rows), _unique(group[rows]), constants, floors, between, free=free)
    message = records.situation.kind == KINDS.index("p2p")
    _fit_network(records.at(~single & ~message), constants, floors, between)
    _once_measured(constants, group[single], records.system[single])
    _by_analogy(constants, set(group[single].tolist()))
    return constants, floors, between


def _once_measured(constants: dict[str, dict[str, float]], group: Names, system: Names) -> None:
    """Outside NVLink switches hosts are unlike: what one system alone says counts half, the prior's centre the rest."""
    for name in _unique(group):
        if not name.startswith("nvlink/") and len(set(system[group == name].tolist())) == 1:
            for constant, (centre, _) in PRIORS[name].items():
                constants[name][constant] = float(np.sqrt(constants[name][constant] * centre))


def _by_analogy(constants: dict[str, dict[str, float]], measured: set[str]) -> None:
    """Kinds that nobody measured: on meshes as through switches, a broadcast as a gather."""
    for name in PRIORS:
        fabric, _, kind = name.partition("/")
        for other in (
            f"nvlink/{kind}" if fabric == "mesh" else "",
            f"{fabric}/all_gather" if kind == "broadcast" else "",
        ):
            if name not in measured and other in PRIORS:
                constants[name] = {
                    **constants[name],
                    **{n: v for n, v in constants[other].items() if n in PRIORS[name]},
                }


def _fit_network(
    records: Records, constants: dict[str, dict[str, float]], floors: dict[str, float], between: dict[str, float]
) -> None:
    """Clusters are few and unlike: each is fitted alone, and the shared constants are the mean, in logs, of all of them
    and of the priors' centres, which count as one more cluster."""
    group, found = "network/collective", {}
    wide = {name: spread for name, (_, spread) in PRIORS[group].items()}
    for system in _unique(records.system):
        rows = records.at(records.system == system)
        found[system] = fit_system(rows, group, constants, floors[system], 1.0, departures=wide)
    for name, (centre, _) in PRIORS[group].items():
        constants[group][name] = float(np.exp(np.mean([np.log(centre), *(np.log(c[name]) for c in found.values())])))
    between.update({system: c["hop"] / constants[group]["hop"] for system, c in found.items()})


def fit_system(
    records: Records,
    group: str,
    constants: Constants,
    floor: float,
    between: float,
    departures: Mapping[str, float] = DEPARTURES,
) -> dict[str, float]:
    """Constants of one group on one system: near the shared ones, as far as its rows say."""
    names = list(constants[group])
    centre = np.log([constants[group][name] for name in names])
    spread = np.array([departures[name] for name in names])
    target = np.log(records.latency_s)
    one, other = np.full(len(records), floor), np.full(len(records), between)

    def predict(at: Floats) -> Floats:
        mine = {**constants, group: dict(zip(names, np.exp(at).tolist(), strict=True))}
        found: Floats = np.log(seconds(mine, records.situation, one, other))
        return found

    # The fitter's priors weigh as stated at 1500 rows; here a system's few rows face them at full weight.
    weigh = np.sqrt(max(len(target), 1) / 1500.0)
    found = fit_constants(predict, target, centre, spread * max(weigh, 0.05) * 3.0, iterations=_ITERATIONS)
    return dict(zip(names, np.exp(found).tolist(), strict=True))


def _fit(
    records: Records, groups: Sequence[str], constants: dict[str, dict[str, float]], floors: dict[str, float],
    between: dict[str, float], *, free: str,
) -> None:  # fmt: skip
    """Fit some groups in place; `free` says which factors of systems are fitted with them."""
    if not len(records):
        return
    systems = _unique(records.system)
    place = np.array([systems.index(name) for name in records.system.tolist()], dtype=np.int64)
    slots = [(group, name) for group in groups for name in PRIORS[group]]
    factors = len(systems) if free != "none" else 0
    centre = np.concatenate([[np.log(PRIORS[g][n][0]) for g, n in slots], np.zeros(factors)])
    spread = np.concatenate([[PRIORS[g][n][1] for g, n in slots], np.full(factors, _FLOOR_SD)])
    known_floor = np.array([floors[name] for name in systems])[place]
    known_between = np.array([between[name] for name in systems])[place]
    target = np.log(records.latency_s)

    def predict(at: Floats) -> Floats:
        trial = _with(constants, slots, at)
        factor = np.exp(at[len(slots) :])[place] if factors else known_floor
        one = factor if free == "floors" else known_floor
        other = factor if free == "between" else known_between
        found: Floats = np.log(seconds(trial, records.situation, one, other))
        return found

    found = fit_constants(predict, target, centre, spread, weights=_weights(records), iterations=_ITERATIONS)
    constants.update(_with(constants, slots, found))
    if factors:
        (floors if free == "floors" else between).update(
            zip(systems, np.exp(found[len(slots) :]).tolist(), strict=True)
        )


def _with(
    constants: Mapping[str, dict[str, float]], slots: Sequence[tuple[str, str]], at: Floats
) -> dict[str, dict[str, float]]:
    changed = {group: dict(values) for group, values in constants.items()}
    for (group, name), value in zip(slots, np.exp(at[: len(slots)]).tolist(), strict=True):
        changed[group][name] = value
    return changed


def _weights(records: Records) -> Floats:
    """Systems measured at many sizes count more, but not in proportion: sizes of a system share its ways."""
    s: Situation = records.situation
    keys = np.array([f"{a}\n{b}" for a, b in zip(records.system.tolist(), s.kind.tolist(), strict=True)], dtype=object)
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return 1.0 / np.sqrt(counts[inverse])


def _unique(values: Names) -> list[str]:
    return list(dict.fromkeys(values.tolist()))
