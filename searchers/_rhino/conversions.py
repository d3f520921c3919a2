"""Seconds of every conversion between the layouts of a tensor: all pairs at once, along the paths that a flow takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import inf

import numpy as np

from simpart.graph.sizes import DTYPE_BYTES
from simpart.hardware import Cluster
from simpart.lowering.transfers import CommPrices, sharing
from simpart.placement import Halo, Placement, Replicate, Shard
from simpart.placement.conversions import Step, collective_of, single_steps
from simpart.plan import DeviceGroup
from simpart.searchers._cost_graph import Table
from simpart.searchers._rhino.settings import slowest_row
from simpart.sharding.mesh import Axes, Layout, axis_members

__all__ = ["ConversionTimes"]

Key = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""


class ConversionTimes:
    """Asked twice: first which conversions are of interest, then, once all are priced together, what they take."""

    def __init__(self, group: DeviceGroup, axes: Axes, cluster: Cluster, prices: CommPrices) -> None:
        self.axes, self.prices = axes, prices
        members = {name: axis_members(group, name) for name, _ in axes}
        self._slowest = {name: slowest_row(cluster, rows) for name, rows in members.items()}
        self._shared = {name: max(sharing(cluster, rows)) for name, rows in members.items()}
        self._layouts: dict[Key, dict[Layout, int]] = {}
        self._seconds: dict[Key, Table] = {}

    def want(self, key: Key, layouts: Iterable[Layout]) -> None:
        """Layouts of a tensor that may be left or needed."""
        known = self._layouts.setdefault(key, {})
        for layout in layouts:
            if layout not in known:
                known[layout] = len(known)
                self._seconds.pop(key, None)

    def table(self, key: Key, sources: Sequence[Layout], targets: Sequence[Layout]) -> Table:
        """Seconds from each source to each target; infinite where no path leads."""
        if key not in self._seconds:
            self._price([k for k in self._layouts if k not in self._seconds])
        number = self._layouts[key]
        rows, columns = [number[s] for s in sources], [number[t] for t in targets]
        return self._seconds[key][np.ix_(rows, columns)]

    def _price(self, keys: Sequence[Key]) -> None:
        found = {key: self._paths(key) for key in keys}
        steps: dict[tuple[Step, str], None] = {}
        for key, (_, moves) in found.items():
            steps.update(dict.fromkeys((step, key[1]) for _, _, step in moves))
        talks = {}
        for step, dtype in steps:
            name = self.axes[step.axis][0]
            collective = collective_of(step, self._slowest[name], self._shared[name], dtype)
            if collective is not None:
                talks[step, dtype] = collective
        priced = dict(zip(talks, (p.seconds for p in self.prices.of(talks.values())), strict=True))
        for key, (states, moves) in found.items():
            self._seconds[key] = self._all_pairs(key, states, moves, priced)

    def _paths(self, key: Key) -> tuple[dict[Layout, int], list[tuple[int, int, Step]]]:
        """States and single steps between them."""
        shape, dtype = key
        sizes = tuple(size for _, size in self.axes)
        wanted = self._layouts[key]
        per_axis: list[list[Placement | Halo]] = []
        for axis in range(len(self.axes)):
            places: dict[Placement | Halo, None] = {Replicate(): None}
            for layout in wanted:
                place = layout[axis]
                places[place.shard if isinstance(place, Halo) else place] = None
            per_axis.append(list(places))
        states: dict[Layout, int] = {}
        for layout in (*wanted, *product(*per_axis)):
            states.setdefault(layout, len(states))
        moves = []
        itemsize = DTYPE_BYTES[dtype]
        for state, number in list(states.items()):
            for axis in range(len(self.axes)):
                targets = dict.fromkeys([*per_axis[axis], *(layout[axis] for layout in wanted)])
                for following, step in single_steps(shape, itemsize, state, axis, targets, sizes):
                    if following in states:
                        moves.append((number, states[following], step))
        return states, moves

    def _all_pairs(
        self,
        key: Key,
        states: dict[Layout, int],
        moves: Sequence[tuple[int, int, Step]],
        priced: dict[tuple[Step, str], float],
    ) -> Table:
        size = len(states)
        weight, seconds = np.full((size, size), inf), np.full((size, size), inf)
        np.fill_diagonal(weight, 0.0)
        np.fill_diagonal(seconds, 0.0)
        for a, b, step in moves:
            cost = step.received_bytes + 1e-3  # fewer steps win ties
            if cost < weight[a, b]:
                weight[a, b], seconds[a, b] = cost, priced.get((step, key[1]), 0.0)
        inner = [n for layout, n in states.items() if not any(isinstance(p, Halo) for p in layout)]
        for k in inner:
            through = weight[:, k, None] + weight[None, k, :]
            better = through < weight
            weight = np.where(better, through, weight)
            seconds = np.where(better, seconds[:, k, None] + seconds[None, k, :], seconds)
        wanted = list(self._layouts[key].values())
        return seconds[np.ix_(wanted, wanted)]


def shard_fraction(shape: tuple[int, ...], layout: Layout, axes: Axes) -> float:
    """Part of a tensor that a device holds, on axes that divide it evenly."""
    part = 1.0
    for place, (_, size) in zip(layout, axes, strict=True):
        if isinstance(place, Shard | Halo):
            part /= size
    return part
