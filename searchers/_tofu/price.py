"""Seconds instead of bytes: what each step of the recursion takes on the links that its groups share.

The first step parts the devices into the groups furthest apart, so its conversions cross the slowest level.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, prod

import numpy as np

from simpart.cost import Collective, CollectiveKind, CollectiveTable, CommModel
from simpart.hardware import Cluster
from simpart.lowering.transfers import sharing
from simpart.placement import Partial, Placement, Replicate
from simpart.plan import DeviceGroup
from simpart.searchers._tofu.steps import Weigh
from simpart.sharding.mesh import axis_members

__all__ = ["axis_names", "seconds_of"]

_SIZES = 2.0 ** np.arange(8, 41)


def axis_names(factors: Sequence[int]) -> tuple[str, ...]:
    """Names of the mesh axes of the steps, outermost first."""
    return tuple(f"k{i + 1}" for i in range(len(factors)))


def kind_of(lies: Placement, needed: Placement) -> CollectiveKind:
    """The collective that does a conversion."""
    if isinstance(lies, Partial):
        return "all_reduce" if isinstance(needed, Replicate) else "reduce_scatter"
    return "all_gather" if isinstance(needed, Replicate) else "all_to_all"


def seconds_of(model: CommModel, cluster: Cluster, group: DeviceGroup, names: Sequence[str]) -> Weigh:
    """Seconds of what a group receives in a step, interpolated between powers of two of the bytes of its collective.

    The groups of a step run at the same time, and share the links that they share.
    """
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    rows, keys = [], []
    sizes = dict(group.axes)
    for level, name in enumerate(names):
        members = axis_members(group, name)
        shared = max(sharing(cluster, members))
        for kind in kinds:
            keys.append((level, kind))
            rows += [Collective(kind, int(n), members[0], shared) for n in _SIZES]
    if not rows:
        return lambda level, lies, needed, received: 0.0
    times = model.estimate(CollectiveTable(tuple(rows)), cluster).mean_s.reshape(len(keys), -1)
    logs = {key: np.log(np.maximum(row, 1e-12)) for key, row in zip(keys, times, strict=True)}
    grid = np.log(_SIZES)
    inner = [prod(sizes[name] for name in names[level + 1 :]) for level in range(len(names))]

    def weigh(level: int, lies: Placement, needed: Placement, received: float) -> float:
        if received <= 0:
            return 0.0
        kind, parts = kind_of(lies, needed), sizes[names[level]]
        # what a part of the step receives is spread over its devices: as many collectives, of k members each, receive
        # k - 1 times their bytes together
        each = received / inner[level] / (parts - 1)
        if kind == "all_reduce":
            each /= 2
        at = log(each)
        row = logs[level, kind]
        if at <= grid[0]:
            return float(np.exp(row[0]))
        if at >= grid[-1]:
            return float(np.exp(row[-1] + at - grid[-1]))
        return float(np.exp(np.interp(at, grid, row)))

    return weigh
