"""Rules by which measured collectives are left out, written down before any fit; each row is counted under the first.

* the reasons of the adapter: unusable (no positive latency, size or two ranks; latencies in two units disagree),
  unknown_op, unknown_device, unknown_interconnect, uneven_hosts, network_not_stated
* duplicate: marked as a copy of another version, or equal in everything to an earlier row
* faster_than_link: quicker than its bytes at the full rate of the links, where the switch reduces by that bound
* unit_mistake: a system whose median time is UNIT_FACTOR times off what its bytes and 10 us make plausible
* other_topology: software on a system of several GPUs that is OTHER_TOPOLOGY times faster or slower than the median of
  all software there on messages of a MiB and more: measured on another host than the rest
* unsteady: a curve over sizes (one system, op, number of ranks) of which at least a twentieth of the steps to the next
  larger size fall by more than a quarter: its sizes up to the last such fall; the host, not the links, was timed

Kept, and a class of its own: collectives through host memory, which collapse to a few GB/s. Kept, but never fitted on
(`superseded`): two hosts whose largest all-reduces carry every byte twice over the network, as libraries did before
trees and rings inside hosts were pipelined with those between hosts.
"""

from __future__ import annotations

import numpy as np

from simpart.costmodels.learned._measurements import row_codes
from simpart.costmodels.learned_comm._records import Names, Records
from simpart.costmodels.learned_comm._situation import KINDS

__all__ = ["judge", "superseded"]

_TOLERANCE = 1.02
_UNIT_FACTOR = 300.0
_OTHER_TOPOLOGY = 2.5
_LARGE_BYTES = 2.0**20
_FALL = np.log(0.75)
_FALLS = 0.05
_TWICE = 1.7
_LARGEST_BYTES = 2.0**28

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


def judge(records: Records) -> Names:
    """The rule that each row breaks, or an empty text."""
    verdict = records.reason.copy()
    s = records.situation

    def mark(broken: Mask, rule: str) -> None:
        verdict[broken & (verdict == "")] = rule

    copies = np.array(["copy" in text for text in records.quality.tolist()], dtype=bool)
    codes = row_codes(
        [
            records.system,
            records.library,
            s.kind,
            s.software,
            s.bytes,
            s.local,
            s.hosts,
            np.isfinite(s.switch_s),
            records.latency_s,
        ]
    )
    first = np.zeros(len(records), dtype=bool)
    first[np.unique(codes, return_index=True)[1]] = True
    mark(copies | ~first, "duplicate")
    mark(s.bound_s() > _TOLERANCE * records.latency_s, "faster_than_link")
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.log(records.latency_s / (s.bound_s() + 10e-6))
    for system in set(records.system.tolist()):
        rows = (records.system == system) & (verdict == "")
        if rows.any() and abs(float(np.median(off[rows]))) > np.log(_UNIT_FACTOR):
            mark(rows, "unit_mistake")
    mark(_elsewhere(records, verdict == ""), "other_topology")
    mark(_unsteady(records, verdict == ""), "unsteady")
    return verdict


def superseded(records: Records) -> Mask:
    """Rows of multi-host systems whose software is a generation behind."""
    s = records.situation
    broken = np.zeros(len(records), dtype=bool)
    for system in set(records.system[s.hosts > 1].tolist()):
        rows = (records.system == system) & (s.hosts > 1)
        large = rows & (s.bytes >= _LARGEST_BYTES) & (s.network_s >= s.local_s) & (s.kind == KINDS.index("all_reduce"))
        if large.any() and float(np.median(records.latency_s[large] / s.network_s[large])) > _TWICE:
            broken |= rows
    return broken


def _unsteady(records: Records, good: Mask) -> Mask:
    s = records.situation
    broken = np.zeros(len(records), dtype=bool)
    curve = row_codes([records.system, s.kind, s.software, s.local, s.hosts])
    for code in np.unique(curve[good]):
        rows = good & (curve == code)
        sizes = np.unique(s.bytes[rows])
        if len(sizes) < 10:
            continue
        times = np.array([np.median(records.latency_s[rows & (s.bytes == size)]) for size in sizes])
        falls = np.flatnonzero(np.diff(np.log(times)) < _FALL)
        if len(falls) >= _FALLS * (len(sizes) - 1):
            broken |= rows & (s.bytes <= sizes[falls[-1] + 1])
    return broken


def _elsewhere(records: Records, good: Mask) -> Mask:
    s = records.situation
    broken = np.zeros(len(records), dtype=bool)
    large = good & (s.bytes >= _LARGE_BYTES)
    place = row_codes([records.device, s.fabric, s.local, s.hosts])
    shape = row_codes([place, s.kind, s.bytes])
    median = np.ones(len(records))
    for code in np.unique(shape[large]):
        rows = large & (shape == code)
        median[rows] = np.median(records.latency_s[rows])
    group = row_codes([place, records.library, records.source])
    for code in np.unique(group[large]):
        rows = large & (group == code)
        if abs(float(np.median(np.log(records.latency_s[rows] / median[rows])))) > np.log(_OTHER_TOPOLOGY):
            broken |= good & (group == code)
    return broken
