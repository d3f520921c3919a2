"""Durations of task classes while they are added up, with what they consist of."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from simpart.cost import PROVENANCES, Estimate
from simpart.pricing import Amount
from simpart.program import Spread

__all__ = ["Ledger", "Priced", "priced_rows"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
ANALYTIC = PROVENANCES.index("analytic")


class Priced(NamedTuple):
    """One row of an Estimate, with the name of its latent factor."""

    seconds: float
    factor: str
    shared_log_sd: float
    own_log_sd: float
    provenance: int


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

    def add_amount(self, row: int, amount: Amount, place: str) -> None:
        """An Amount of one row, on the device named `place`."""
        self.total[row] += amount.seconds[0]
        self.by_provenance[row] += amount.by_provenance[0]
        self.own_variance[row] += amount.own_variance[0]
        for family, seconds, sd in zip(amount.families, amount.by_family[0], amount.shared_log_sd, strict=True):
            if seconds:
                self._factor(f"{place}: {family}", row, float(seconds), float(sd))

    def add_priced(self, row: int, priced: Priced, times: float = 1.0) -> None:
        """A priced thing that happens `times` times; its own error is the same each time."""
        seconds = priced.seconds * times
        self.total[row] += seconds
        self.by_provenance[row, priced.provenance] += seconds
        self.own_variance[row] += (seconds * priced.own_log_sd) ** 2
        self._factor(priced.factor, row, seconds, priced.shared_log_sd)

    def add_fixed(self, row: int, seconds: float) -> None:
        """Time without spread or provenance: overheads."""
        self.total[row] += seconds

    def errs_with(self, row: int, source: str) -> None:
        """Own errors of all classes with this source are one error: they run the same kernels."""
        self.own_source[row] = self.sources.setdefault(source, len(self.sources))

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
            by_provenance=self.by_provenance,
        )
