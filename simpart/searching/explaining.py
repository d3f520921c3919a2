"""What limits a found plan, and what more of something would buy: the tightest stage, and searches on a richer
cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simpart.hardware import Cluster
from simpart.problem import Problem
from simpart.searching import Budget, Searcher, search
from simpart.simulation import SimResult

__all__ = ["WhatIf", "more_memory", "one_more_device", "tightest", "what_if"]

GIB = 1 << 30


def tightest(result: SimResult) -> dict[str, Any]:
    """The stages whose devices have least room left, how much that is (negative: missing), and what fills them."""
    row = min(result.memory, key=lambda row: row.capacity_bytes - row.device_bytes)
    return {
        "stages": list(row.stages),
        "group": row.group,
        "room_bytes": row.capacity_bytes - row.device_bytes,
        "device_bytes": row.device_bytes,
        "capacity_bytes": row.capacity_bytes,
        "by_kind": row.by_kind,
        "at": row.at,
    }


def more_memory(cluster: Cluster, more_bytes: int = GIB) -> Cluster:
    """The same cluster with so much more memory on every device."""
    devices = tuple(
        (dataclasses.replace(device, memory_bytes=device.memory_bytes + more_bytes), count)
        for device, count in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


def one_more_device(cluster: Cluster) -> Cluster:
    """The same cluster with one more device of the last kind at its end: in its last node, where that has room for
    one, else in a node of its own."""
    *others, (device, count) = cluster.devices
    levels, inner = list(cluster.levels), 1
    for level in levels[:-1]:
        if level.only in (None, device.name):
            inner = level.size
    if levels and levels[-1].size < cluster.size + 1:
        size = -(-(cluster.size + 1) // inner) * inner
        levels[-1] = dataclasses.replace(levels[-1], size=size)
    return dataclasses.replace(cluster, devices=(*others, (device, count + 1)), levels=tuple(levels))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What a search finds on a changed cluster. `saved` is the share of the step; None with `why` if nothing fits."""

    change: str
    step_s: float | None
    saved: float | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def what_if(
    problem: Problem, make: Callable[[], Searcher], budget: Budget, seed: int, step_s: float | None
) -> list[WhatIf]:
    """Search again, in the same way, with 1 GiB more on every device and with one more device.

    What the found plans differ by counts, searcher and budget being the same: no claim about the best plans of all.
    One more device changes which numbers divide, so that `saved` may be negative unless devices may stay idle; they
    may here.
    """
    wider = dataclasses.replace(problem.space, use_fewer_devices=True)
    changed = {
        "1 GiB more memory per device": dataclasses.replace(problem, cluster=more_memory(problem.cluster)),
        f"one more device ({problem.cluster.size + 1} instead of {problem.cluster.size})": dataclasses.replace(
            problem, cluster=one_more_device(problem.cluster), space=wider
        ),
    }
    found = []
    for change, richer in changed.items():
        result = search(richer, make(), budget, seed=seed)
        if result.best is None:
            found.append(WhatIf(change=change, step_s=None, saved=None, why=result.why_none))
            continue
        seconds = result.best.evaluation.step_s
        found.append(WhatIf(change=change, step_s=seconds, saved=None if step_s is None else 1 - seconds / step_s))
    return found
