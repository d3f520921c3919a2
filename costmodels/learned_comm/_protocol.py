"""The analytic form: what a collective does on its links, with a few constants per kind.

Inside a host, with W the time of its bytes at the full rate of the links and L = floor · (start + step · (local - 1)):

    low latency   L + W / low                            (fused kernels: every rank reads all others' buffers)
    bulk          L + floor · pipe + W / bulk · (1 + ramp / (1 + W / RAMP_S))         (pipelines fill with bytes)
    in-switch     L + floor · pipe_switch + W_switch / switch         (all-reduce, NVLink from the fourth generation)

and the time is their soft minimum (power 4). Through host memory the share of a device falls with the members as
(2 / members)^crowd. Between hosts latency is added and the bytes take the slower of both ways, which work at once.
`floor` is a factor of the system's software: no data sheet states it; one measured number does.

Centres of the priors are NCCL's own tuning table (src/graph/tuning.cc: 6.6 us and 0.6 us per step on NVLink, 1.0 us on
PCI Express, in the low-latency ring; a quarter of the bandwidth there) and round numbers, not fits to the data here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned_comm._interconnects import FABRICS
from simpart.costmodels.learned_comm._situation import KINDS, NETWORK_LATENCY_S, SOFTWARE, Situation

__all__ = ["FLOOR_BYTES", "GROUPS", "PRIORS", "Constants", "group_names", "seconds"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Constants = Mapping[str, Mapping[str, float]]
"""Group → name of a constant → value; seconds, or shares, unless the name says otherwise."""
Priors = Mapping[str, tuple[float, float]]
"""Name → (centre, log-sd)."""

FLOOR_BYTES = 1024.0  # the "smallest" all-reduce: below this, size makes no difference
RAMP_S = 200e-6
_POWER, _SWITCH_POWER, _WAYS_POWER = 4.0, 8.0, 8.0

_NVLINK: Priors = {
    "start": (6.6e-6, 0.15), "step": (0.6e-6, 0.6), "low": (0.25, 0.4), "pipe": (15e-6, 0.5), "bulk": (0.80, 0.15),
    "ramp": (0.3, 0.7),
}  # fmt: skip
_BUS: Priors = {
    **_NVLINK, "step": (1.0e-6, 0.6), "low": (0.5, 0.4), "pipe": (15e-6, 0.3), "bulk": (0.80, 0.05), "ramp": (0.3, 0.2),
    "crowd": (1.0, 0.5),
}  # fmt: skip
_SWITCH: Priors = {"pipe_switch": (20e-6, 0.5), "switch": (0.65, 0.2)}
_FUSED: Priors = {"start": (4e-6, 0.5), "step": (0.1e-6, 0.8), "low": (0.7, 0.4)}
# Between hosts: NCCL's table for sixteen ranks on two hosts, tree, low latency: 2 (7 · 0.6 · 1.8 + 5) us.
_NETWORK: Priors = {
    "hop": (25e-6, 0.7), "grow": (2.0, 0.6), "grown_bytes": (8e6, 0.6), "net": (0.85, 0.04), "more": (0.1, 0.3),
}  # fmt: skip
_MESSAGE: Priors = {**_NETWORK, "hop": (14e-6, 0.5), "grow": (0.5, 0.6)}


def _twice(priors: Priors) -> Priors:
    """An all-reduce takes two steps per member."""
    return {**priors, "step": (2 * priors["step"][0], priors["step"][1])}


PRIORS: Mapping[str, Priors] = {
    **{f"nvlink/{kind}": _NVLINK for kind in KINDS},
    "nvlink/all_reduce": {**_twice(_NVLINK), **_SWITCH},
    "nvlink/fused": {**_NVLINK, **_SWITCH, **_FUSED},
    "nvlink/fused_eager": {**_NVLINK, **_SWITCH, **_FUSED, "host": (25e-6, 0.5)},
    **{f"mesh/{kind}": {**_NVLINK, "bulk": (0.6, 0.3)} for kind in KINDS},
    "mesh/all_reduce": {**_twice(_NVLINK), "bulk": (0.6, 0.3)},
    **{f"bus/{kind}": _BUS for kind in KINDS},
    "mesh/fused": {**_NVLINK, **_FUSED},
    "mesh/fused_eager": {**_NVLINK, **_FUSED, "host": (25e-6, 0.5)},
    "bus/all_reduce": _twice(_BUS),
    "bus/fused": {**_BUS, "start": (5e-6, 0.5)},
    "bus/fused_eager": {**_BUS, "start": (5e-6, 0.5), "host": (40e-6, 0.5)},
    "network/collective": _NETWORK,
    "network/p2p": _MESSAGE,
}
GROUPS = tuple(PRIORS)


def group_names(situation: Situation) -> tuple[Ints, tuple[str, ...]]:
    """Which group of constants holds inside the host for each row: index, and the names it indexes."""
    member = np.where(situation.software > 0, len(KINDS) - 1 + situation.software, situation.kind)
    members = (*KINDS, *SOFTWARE[1:])
    fabrics = ("nvlink", "mesh", "bus", "bus")
    assert len(fabrics) == len(FABRICS)
    names = tuple(f"{fabric}/{m}" for fabric in fabrics for m in members)
    return (member + len(members) * situation.fabric).astype(np.int64), names


def seconds(constants: Constants, situation: Situation, floor: Floats, between: Floats) -> Floats:
    """Time of each row, with the factors of its system's latency inside hosts and between them."""
    found = np.zeros(len(situation))
    index, names = group_names(situation)
    inside = situation.local > 1
    for number in np.unique(index[inside]):
        rows = inside & (index == number)
        found[rows] = _inside(constants[names[number]], situation.at(rows), floor[rows])
    message = situation.kind == KINDS.index("p2p")
    for name, rows in (("p2p", message & (situation.hosts > 1)), ("collective", ~message & (situation.hosts > 1))):
        if rows.any():
            start = constants[f"nvlink/{'p2p' if name == 'p2p' else 'all_reduce'}"]["start"] * floor[rows]
            found[rows] = _between(constants[f"network/{name}"], situation.at(rows), between[rows], found[rows], start)
    held: Floats = np.maximum(found, situation.bound_s())
    return held


def _inside(c: Mapping[str, float], at: Situation, floor: Floats) -> Floats:
    crowd = np.where(at.fabric == FABRICS.index("staged"), np.maximum(at.local / 2, 1.0) ** c.get("crowd", 0.0), 1.0)
    wire = at.local_s * crowd
    latency = floor * (c["start"] + c["step"] * (at.local - 1))
    once = wire * np.where(at.software > 0, at.local / 2, 1.0)
    low = latency + once / c["low"]
    bulk = latency + floor * c["pipe"] + wire / c["bulk"] * (1 + c["ramp"] / (1 + wire / RAMP_S))
    found = _least(low, bulk, _POWER)
    if "switch" in c:
        reduced = latency + floor * c["pipe_switch"] + at.switch_s / c["switch"]
        found = np.where(
            np.isfinite(reduced), _least(found, np.where(np.isfinite(reduced), reduced, 1.0), _SWITCH_POWER), found
        )
    if "host" in c:
        found = (found**_POWER + c["host"] ** _POWER) ** (1 / _POWER)
    result: Floats = found
    return result


def _between(c: Mapping[str, float], at: Situation, factor: Floats, inside: Floats, start: Floats) -> Floats:
    many = np.where(at.kind == KINDS.index("all_reduce"), np.log2(at.hosts), 1 + c["more"] * (at.hosts - 2))
    hop = factor * c["hop"] * (at.network_latency_s / NETWORK_LATENCY_S) * many
    latency = start * (at.local <= 1) + hop * (1 + c["grow"] * -np.expm1(-at.bytes / c["grown_bytes"]))
    wire = at.network_s / c["net"]
    found: Floats = latency + (inside**_WAYS_POWER + wire**_WAYS_POWER) ** (1 / _WAYS_POWER)
    return found


def _least(one: Floats, other: Floats, power: float) -> Floats:
    """Soft minimum, without overflow for any pair of times."""
    small = np.minimum(one, other)
    found: Floats = small * (1 + (small / np.maximum(one, other)) ** power) ** (-1 / power)
    return found
