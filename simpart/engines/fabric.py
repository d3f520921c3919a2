"""Links whose rate is shared by whatever is on them: max-min fair, found by progressive filling, as time goes on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from simpart.program import Durations, Flows

__all__ = ["Fabric", "fair_rates"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

NOTHING_LEFT = 1e-12
"""Part of a transfer that rounding may leave over."""


def fair_rates(demand: Table, capacity: Floats) -> Floats:
    """Part of its own speed that each flow gets. `demand[i, l]` is what flow i alone puts on link l per second.

    All flows speed up together until a link is full or a flow runs at its own speed (1); those stop, the others go on.
    Reference: Bertsekas & Gallager, "Data Networks" (1992), 6.5.2.

    >>> fair_rates(np.array([[10.0, 0.0], [10.0, 10.0], [0.0, 10.0]]), np.array([10.0, 100.0])).tolist()
    [0.5, 0.5, 1.0]
    """
    rates, left = np.zeros(len(demand)), capacity.astype(np.float64)
    going = np.ones(len(demand), dtype=bool)
    while going.any():
        load = demand[going].sum(axis=0)
        step = min([1.0 - rates[going].max(), *(left[load > 0] / load[load > 0])])
        rates[going] += step
        left = left - step * load
        full = (left <= NOTHING_LEFT * capacity) & (load > 0)
        going &= (rates < 1.0 - NOTHING_LEFT) & ~(demand[:, full] > 0).any(axis=1)
    return rates


class Fabric:
    """All transfers under way. A task of a class runs at its own speed, `durations` saying how long that takes, unless
    a link it uses is full."""

    def __init__(self, environment: simpy.Environment, flows: Flows, durations: Durations) -> None:
        self.environment, self.flows = environment, flows
        own = durations.task_s[:, None]
        self.demand = np.divide(flows.bytes_by_class, own, out=np.zeros_like(flows.bytes_by_class), where=own > 0)
        # A class that alone asks for more than a link has was priced with another model of it: it fills the link.
        self.demand = np.minimum(self.demand, flows.bytes_per_s)
        self.left: dict[int, float] = {}  # seconds at its own speed, by transfer
        self.of_class: dict[int, int] = {}
        self.done: dict[int, simpy.Event] = {}
        self.rates: dict[int, float] = {}
        self.since, self.count = 0.0, 0
        self.change = environment.event()
        environment.process(self._run())

    def carries(self, task_class: int) -> bool:
        """Whether tasks of this class use links."""
        return bool(self.demand[task_class].any())

    def transfer(self, task_class: int, seconds: float) -> simpy.Event:
        """Start a transfer; the event happens when it is over."""
        self._advance()
        number, self.count = self.count, self.count + 1
        self.left[number], self.of_class[number] = seconds, task_class
        self.done[number] = self.environment.event()
        self._share()
        return self.done[number]

    def _advance(self) -> None:
        elapsed = self.environment.now - self.since
        for number, rate in self.rates.items():
            self.left[number] -= rate * elapsed
        self.since = self.environment.now

    def _share(self) -> None:
        numbers = list(self.left)
        demand = self.demand[[self.of_class[n] for n in numbers]]
        self.rates = dict(zip(numbers, fair_rates(demand, self.flows.bytes_per_s).tolist(), strict=True))
        change, self.change = self.change, self.environment.event()
        change.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.left:
                yield self.change
                continue
            next_end = min(max(0.0, self.left[n]) / rate for n, rate in self.rates.items())
            yield self.change | self.environment.timeout(next_end)
            self._advance()
            # The remaining time may round to nothing while time stands still: then it is over.
            over = [n for n, left in self.left.items() if self.since + max(0.0, left) / self.rates[n] <= self.since]
            for number in over:
                del self.left[number], self.of_class[number], self.rates[number]
                self.done.pop(number).succeed()
            if over:
                self._share()
