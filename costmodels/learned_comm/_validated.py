"""How many measured collectives the shipped model learned from on links like those of a cluster."""

from __future__ import annotations

from functools import lru_cache

from simpart.costmodels.learned_comm._artifact import SHIPPED
from simpart.costmodels.learned_comm._interconnects import through_host
from simpart.costmodels.learned_comm._situation import _fabric
from simpart.files import read_document
from simpart.hardware import Cluster, LinkLevel

__all__ = ["validated_rows"]


@lru_cache(maxsize=1)
def _systems() -> tuple[tuple[str, str, bool, int], ...]:
    """(device, links inside a host, whether hosts were joined, rows) of each measured system."""
    found = read_document(SHIPPED, "simpart-communication-model", 1)["systems"]
    return tuple((s["device"], s["fabric"], s["between"] != 1.0, int(s["rows"])) for s in found)


def validated_rows(cluster: Cluster, level: LinkLevel) -> int:
    """Rows of systems with a device of this cluster and links of this kind; between hosts, of systems of several.

    >>> from simpart.hardware import load_cluster
    >>> cluster = load_cluster("dgx-h100")
    >>> validated_rows(cluster, cluster.levels[0]) > 500
    True
    """
    rows = 0
    for device in cluster.kinds:
        for name, fabric, joined, count in _systems():
            if name == device.name:
                alike = fabric == _fabric(level, through_host(name)) if level.inside_host else joined
                rows += count if alike else 0
    return rows
