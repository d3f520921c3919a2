"""What collectives take by their bytes: curves read off the communication model of a problem."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpart.cost import Collective, CollectiveKind, CollectiveTable
from simpart.problem import Problem
from simpart.searchers._remembered import remembered

__all__ = ["LinkTimes"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Seconds on the links of a problem's cluster."""

    problem: Problem

    def seconds(self, kind: CollectiveKind, ranks: tuple[int, ...], concurrent: int, size: Floats) -> Floats:
        """Seconds by bytes, exact at powers of two and linear in between; nothing sent takes no time. `concurrent` such
        collectives share the links."""
        if len(set(ranks)) < 2:
            return np.zeros_like(size)
        at, seconds = self._points(kind, ranks, concurrent)
        return np.where(size > 0, np.interp(size, at, seconds), 0.0)

    def there_and_back_s_per_byte(self) -> float:
        """Of what crosses between neighbouring devices; 0 on one device."""
        if self.problem.cluster.size < 2:
            return 0.0
        at, seconds = self._points("p2p", (0, 1), 1)
        return 2 * float(seconds[20] / at[20])

    @remembered
    def _points(self, kind: CollectiveKind, ranks: tuple[int, ...], concurrent: int) -> tuple[Floats, Floats]:
        at = [1 << e for e in range(8, 44)]
        table = CollectiveTable(tuple(Collective(kind, size, ranks, concurrent) for size in at))
        estimate = self.problem.costs.communication.estimate(table, self.problem.cluster)
        return np.array(at, dtype=np.float64), estimate.mean_s
