"""The learned model as simpart asks it: any table of collectives on any cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simpart.cost import PROVENANCES, Collective, CollectiveTable, Estimate
from simpart.costmodels.alpha_beta import AlphaBeta
from simpart.costmodels.learned_comm._artifact import shipped
from simpart.costmodels.learned_comm._interconnects import nvlink_of
from simpart.costmodels.learned_comm._model import STATUSES, Fitted
from simpart.costmodels.learned_comm._protocol import group_names
from simpart.costmodels.learned_comm._situation import KINDS, situation_of
from simpart.hardware import Cluster

__all__ = ["LearnedComm"]

_MEASURED_BETWEEN_HOSTS = KINDS.index("all_reduce")
_UNMEASURED_SHARED, _UNMEASURED_OWN = 0.15, 0.10  # added to spreads of kinds that are priced by analogy


@dataclass(frozen=True, slots=True)
class LearnedComm:
    """A CommModel: the fitted protocol model on a cluster's link levels; α–β among processors (CPUs).

    Measured systems are recognised by device and link rate. A level's `floor_s` replaces the latency of systems that
    were not measured. Errors are shared by all rows of one kind on one level.
    """

    model: Fitted | None = None
    processors: AlphaBeta = field(default_factory=AlphaBeta)

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        """Seconds of each collective; a group of one rank takes none."""
        rows = table.collectives
        model = shipped() if self.model is None else self.model
        plain = self.processors.estimate(table, cluster)
        count = len(rows)
        mean, shared, own = np.zeros(count), plain.shared_log_sd.copy(), plain.own_log_sd.copy()
        provenance = plain.provenance.copy()
        families: dict[str, int] = {}
        family = np.zeros(count, dtype=np.int64)
        devices: dict[tuple[int, ...], str | None] = {}
        chosen = []
        for i, row in enumerate(rows):
            if row.ranks not in devices:
                devices[row.ranks] = _device(row, cluster) if len(row.ranks) > 1 else None
            level = plain.families[plain.family[i]]
            family[i] = families.setdefault(f"{row.kind} on {level}", len(families))
            if devices[row.ranks] is not None:
                chosen.append(i)
            else:
                mean[i] = plain.mean_s[i]
        if chosen:
            at = np.array(chosen, dtype=np.int64)
            situation = situation_of([rows[i] for i in chosen], cluster)
            found = model.predict(situation, [devices[rows[i].ranks] or "" for i in chosen])
            mean[at] = np.exp(found.log_seconds)
            index, groups = group_names(situation)
            measured = np.array([name in model.domain for name in groups], dtype=bool)[index]
            analogy = np.where(situation.hosts > 1, situation.kind != _MEASURED_BETWEEN_HOSTS, ~measured)
            shared[at] = np.hypot(found.shared, _UNMEASURED_SHARED * analogy)
            own[at] = np.hypot(found.own, _UNMEASURED_OWN * analogy)
            seen = (found.status == STATUSES.index("seen")) & found.inside
            names = np.where(analogy, "analytic", np.where(seen, "interpolated", "extrapolated"))
            provenance[at] = [PROVENANCES.index(str(name)) for name in names]
        return Estimate(
            mean_s=mean, family=family, families=tuple(families) or ("none",), shared_log_sd=shared, own_log_sd=own,
            provenance=provenance,
        )  # fmt: skip


def _device(row: Collective, cluster: Cluster) -> str | None:
    """Which device's measured systems speak for a group: empty when none does, None among processors."""
    first = min(row.ranks)
    kinds = {cluster.device(rank) for rank in row.ranks} if len(cluster.kinds) > 1 else {cluster.kinds[0]}
    if any(device.kind == "cpu" for device in kinds):
        return None
    if len(kinds) > 1:
        return ""
    name = next(iter(kinds)).name
    for level in cluster.levels:
        if level.inside_host and first in cluster.group_of(level, first):
            known = nvlink_of(name)
            return name if known is None or abs(level.bytes_per_s / known - 1) < 0.02 else ""
    return name
