"""Durations of task classes while they are added up, with what they consist of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from simpart.cost import PROVENANCES, Estimate
from simpart.cost.pricing import Amount
from simpart.hardware import Device
from simpart.program import Spread

__all__ = ["ClassCost", "Ledger", "Priced", "class_cost", "moving", "priced_rows", "waiting_for_host"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
ANALYTIC = PROVENANCES.index("analytic")
EXTRAPOLATED = PROVENANCES.index("extrapolated")


class Priced(NamedTuple):
    """One row of an Estimate, with the name of its latent factor."""

    seconds: float
    factor: str
    shared_log_sd: float
    own_log_sd: float
    provenance: int


MOVING_LOG_SD = 0.3
"""Spread of times estimated as bytes over memory bandwidth. Assumption."""


def moving(seconds: float, device: Device) -> Priced:
    """Time estimated as bytes over memory bandwidth."""
    return Priced(seconds, f"{device.name}: moving bytes", MOVING_LOG_SD, 0.0, ANALYTIC)


def waiting_for_host(seconds: float, device: Device, log_sd: float) -> Priced:
    """Time in which a device waits for launches: told from other hosts, all waits alike."""
    return Priced(seconds, f"{device.name}: host launches", log_sd, 0.0, EXTRAPOLATED)


class ClassCost(NamedTuple):
    """What one task of a class takes and of what that consists: amounts with their place, priced things with how often
    they happen, and fixed time. Own errors of classes with equal `source` are one error; `inside` are seconds of
    collectives by axis; `launches` counts kernels and collectives where the host can be what limits, `waiting` (one of
    `priced`) is what it then adds. `overhead_s` is all that the host takes beyond the kernels."""

    seconds: float
    amounts: tuple[tuple[Amount, str], ...]
    priced: tuple[tuple[Priced, float], ...]
    fixed_s: float
    source: str
    inside: tuple[tuple[str, float], ...]
    overhead_s: float = 0.0
    launches: float = 0.0
    waiting: Priced | None = None


def class_cost(
    source: str,
    amounts: Iterable[tuple[Amount, str]] = (),
    priced: Iterable[tuple[Priced, float]] = (),
    overhead_s: float = 0.0,
    inside: Iterable[tuple[str, float]] = (),
    launches: float = 0.0,
    waiting: Priced | None = None,
) -> ClassCost:
    """A ClassCost with its sum. `overhead_s` is fixed time; `waiting` comes on top of what is priced."""
    kept, rows = tuple(amounts), (*priced, *([(waiting, 1.0)] if waiting else []))
    seconds = sum(float(amount.seconds[0]) for amount, _ in kept) + sum(row.seconds * times for row, times in rows)
    by_axis: dict[str, float] = {}
    for axis, part in inside:
        by_axis[axis] = by_axis.get(axis, 0.0) + part
    total, axes = seconds + overhead_s, tuple(by_axis.items())
    overhead = overhead_s + (waiting.seconds if waiting else 0.0)
    return ClassCost(total, kept, rows, overhead_s, source, axes, overhead, launches, waiting)


def priced_rows(estimate: Estimate, place: str) -> list[Priced]:
    """The rows of an estimate; factors are named `place: family`."""
    names = [f"{place}: {family}" for family in estimate.families]
    return [
        Priced(float(s), names[f], float(shared), float(own), int(p))
        for s, f, shared, own, p in zip(
            estimate.mean_s,
            estimate.family,
            estimate.shared_log_sd,
            estimate.own_log_sd,
            estimate.provenance,
            strict=True,
        )
    ]


class Ledger:
    """Seconds per task class, by latent factor and by provenance; `spread` tells them apart, `seconds` adds them up."""

    def __init__(self, classes: int) -> None:
        self.total = np.zeros(classes)
        self.by_provenance = np.zeros((classes, len(PROVENANCES)))
        self.own_variance = np.zeros(classes)
        self.by_factor: dict[str, Floats] = defaultdict(lambda: np.zeros(classes))
        self.shared: dict[str, float] = {}
        self.sources: dict[str, int] = {"": 0}
        self.own_source = np.zeros(classes, dtype=np.int64)

    def add(self, row: int, cost: ClassCost) -> None:
        """The cost of one class. A priced thing's own error is the same each time it happens; fixed time has neither
        spread nor provenance."""
        self.total[row] += cost.seconds
        for amount, place in cost.amounts:
            self.by_provenance[row] += amount.by_provenance[0]
            self.own_variance[row] += amount.own_variance[0]
            for family, seconds, sd in zip(amount.families, amount.by_family[0], amount.shared_log_sd[0], strict=True):
                if seconds:
                    self._factor(f"{place}: {family}", row, float(seconds), float(sd))
        for priced, times in cost.priced:
            seconds = priced.seconds * times
            self.by_provenance[row, priced.provenance] += seconds
            self.own_variance[row] += (seconds * priced.own_log_sd) ** 2
            self._factor(priced.factor, row, seconds, priced.shared_log_sd)
        self.own_source[row] = self.sources.setdefault(cost.source, len(self.sources))

    def _factor(self, name: str, row: int, seconds: float, sd: float) -> None:
        self.by_factor[name][row] += seconds
        self.shared[name] = max(sd, self.shared.get(name, 0.0))

    def spread(self) -> Spread:
        names = tuple(self.by_factor)
        table = np.stack([self.by_factor[n] for n in names], axis=1) if names else np.zeros((self.total.size, 0))
        summed = table.sum(axis=1)
        own = np.sqrt(np.divide(self.own_variance, summed**2, out=np.zeros_like(summed), where=summed > 0))
        return Spread(
            factors=names,
            shared_log_sd=np.array([self.shared[n] for n in names], dtype=np.float64),
            by_factor=table,
            own_log_sd=own,
            own_source=self.own_source,
            sources=tuple(self.sources),
            by_provenance=self.by_provenance,
        )
