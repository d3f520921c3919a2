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
        count = len(rows)
        mean, shared, own = np.zeros(count), np.zeros(count), np.zeros(count)
        provenance = np.full(count, PROVENANCES.index("analytic"), dtype=np.int64)
        families: dict[tuple[str, str], int] = {}
        family = np.zeros(count, dtype=np.int64)
        places: dict[tuple[int, ...], tuple[str | None, str]] = {}
        chosen: list[int] = []
        plain: list[int] = []
        for i, row in enumerate(rows):
            place = places.get(row.ranks)
            if place is None:
                place = places[row.ranks] = _place(row, cluster)
            family[i] = families.setdefault((row.kind, place[1]), len(families))
            if len(row.ranks) > 1:
                (plain if place[0] is None else chosen).append(i)
        if plain:
            at = np.array(plain, dtype=np.int64)
            known = self.processors.estimate(CollectiveTable(tuple(rows[i] for i in plain)), cluster)
            mean[at], shared[at], own[at] = known.mean_s, known.shared_log_sd, known.own_log_sd
        if chosen:
            at = np.array(chosen, dtype=np.int64)
            situation = situation_of([rows[i] for i in chosen], cluster)
            found = model.predict(situation, [places[rows[i].ranks][0] or "" for i in chosen])
            mean[at] = np.exp(found.log_seconds)
            index, groups = group_names(situation)
            measured = np.array([name in model.domain for name in groups], dtype=bool)[index]
            analogy = np.where(situation.hosts > 1, situation.kind != _MEASURED_BETWEEN_HOSTS, ~measured)
            shared[at] = np.hypot(found.shared, _UNMEASURED_SHARED * analogy)
            own[at] = np.hypot(found.own, _UNMEASURED_OWN * analogy)
            seen = np.isin(found.status, [STATUSES.index("seen"), STATUSES.index("seen_bus")]) & found.inside
            words = np.where(analogy, "analytic", np.where(seen, "interpolated", "extrapolated"))
            provenance[at] = [PROVENANCES.index(str(name)) for name in words]
        names = tuple(f"{kind} on {level}" for kind, level in families) or ("none",)
        return Estimate(
            mean_s=mean, family=family, families=names, shared_log_sd=shared, own_log_sd=own,
            provenance=provenance,
        )  # fmt: skip


def _place(row: Collective, cluster: Cluster) -> tuple[str | None, str]:
    """Which device's measured systems speak for a group (empty when none does, None among processors), and the level
    that joins it."""
    if len(row.ranks) < 2:
        return None, "none"
    return _device(row, cluster), cluster.level_of(row.ranks).name


def _device(row: Collective, cluster: Cluster) -> str | None:
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
