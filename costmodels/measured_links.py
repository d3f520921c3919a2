"""Links of a device that were measured: times interpolated over message sizes, α–β for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpart.cost import PROVENANCES, Collective, CollectiveTable, CommModel, Estimate
from simpart.costmodels.table import log_sd
from simpart.hardware import Cluster
from simpart.hardware_profiles._environment import torch_version
from simpart.hardware_profiles._store import LinkRecord, Profiles

__all__ = ["MeasuredLinks"]

_SHARED_LOG_SD = 0.10  # gloo over the loopback interface: what repeated profiles of one machine differ by


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """A CommModel: groups within one host of measured devices from `profiles`, others from `base`.

    Per kind, number of ranks and `busy`, the log of the time is piecewise linear in the log of the bytes. Beyond the
    sizes measured, or for another number of ranks or several groups at once, it is the nearest point times `base`'s
    ratio: extrapolated. Points measured beside other work on the same cores are preferred where there are any: in a
    pipeline the receiver computes while a message comes. Times are lower quartiles: strangers on a machine lengthen a
    message, they never shorten it.
    """

    profiles: Profiles
    base: CommModel
    busy: bool = True

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        plain = self.base.estimate(table, cluster)
        curves = _curves(self.profiles, {device.name for device in cluster.kinds}, self.busy)
        mean, own = plain.mean_s.copy(), plain.own_log_sd.copy()
        shared, provenance = plain.shared_log_sd.copy(), plain.provenance.copy()
        reference: list[Collective] = []
        scaled: list[int] = []
        for i, row in enumerate(table.collectives):
            device = cluster.device(min(row.ranks)).name
            known = [n for name, kind, n in curves if name == device and kind == row.kind]
            if len(row.ranks) < 2 or not known or not set(row.ranks) <= set(cluster.host_of(min(row.ranks))):
                continue
            ranks = min(known, key=lambda n: (abs(n - len(row.ranks)), n))
            curve = curves[device, row.kind, ranks]
            size = min(max(row.bytes, curve.bytes[0]), curve.bytes[-1])
            mean[i], own[i] = curve.at(size)
            shared[i] = _SHARED_LOG_SD
            if (size, ranks, 1) == (row.bytes, len(row.ranks), row.concurrent):
                provenance[i] = PROVENANCES.index("measured" if size in curve.bytes else "interpolated")
                continue
            provenance[i] = PROVENANCES.index("extrapolated")
            own[i] += 0.2
            if (ranks, 1) != (len(row.ranks), row.concurrent) or row.bytes > size:
                reference.append(Collective(row.kind, size, tuple(cluster.host_of(min(row.ranks)))[:ranks]))
                scaled.append(i)
        if scaled:
            mean[scaled] *= plain.mean_s[scaled] / self.base.estimate(CollectiveTable(tuple(reference)), cluster).mean_s
        return Estimate(
            mean_s=mean,
            family=plain.family,
            families=plain.families,
            shared_log_sd=shared,
            own_log_sd=own,
            provenance=provenance,
        )


@dataclass(frozen=True, slots=True)
class _Curve:
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    log_sds: tuple[float, ...]

    def at(self, size: int) -> tuple[float, float]:
        """Seconds and log-sd at a size within the range."""
        x, points = np.log(size), np.log(self.bytes)
        return float(np.exp(np.interp(x, points, np.log(self.seconds)))), float(np.interp(x, points, self.log_sds))


def _curves(profiles: Profiles, devices: set[str], busy: bool) -> dict[tuple[str, str, int], _Curve]:
    """(device, kind, ranks) -> times by size: of each the latest record, by preference with this torch and `busy`."""
    points: dict[tuple[str, str, int], dict[int, LinkRecord]] = {}
    for record in sorted(profiles.links, key=lambda r: (r.environment.torch == torch_version(), r.busy == busy)):
        if record.environment.device in devices:
            points.setdefault((record.environment.device, record.kind, record.ranks), {})[record.bytes] = record
    return {key: _curve([found[size] for size in sorted(found)]) for key, found in points.items()}


def _curve(records: Sequence[LinkRecord]) -> _Curve:
    return _Curve(
        bytes=tuple(r.bytes for r in records),
        seconds=tuple(r.samples.lower_s for r in records),
        log_sds=tuple(log_sd(r.samples) for r in records),
    )
