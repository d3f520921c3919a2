"""Look-up: what was measured on this very kind of device, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import TypeVar

import numpy as np

from simpart.cost import PROVENANCES, Estimate, Signature, SignatureTable
from simpart.costmodels.roofline import signature_family
from simpart.errors import UnsupportedError
from simpart.hardware import Device
from simpart.hardware_profiles._environment import Environment, torch_version
from simpart.hardware_profiles._store import KernelRecord, OverheadRecord, Profiles, Samples
from simpart.kernels.ops import FAMILIES

__all__ = ["Bools", "Table", "preferred"]

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

R = TypeVar("R", KernelRecord, OverheadRecord)

_SHARED_LOG_SD = 0.03  # clocks and neighbours of another day: what a repeated profile of one machine differs by
_QUARTILES_PER_SD = 1.349  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Table:
    """Measured kernels of a profile store as a partial ComputeModel: it `knows` exact signatures on measured devices.

    Of several measurements those with as many busy `processes` count, then the latest. To a replayed kernel comes what
    it takes more in a real step (Python, autograd), where that was measured: the overhead named `kernel`.
    """

    profiles: Profiles
    processes: int | None = None

    def rows(self, device: Device) -> Mapping[Signature, Samples]:
        """Samples of each signature measured on a device."""
        chosen = [r for r in self.profiles.kernels if r.environment.device == device.name]
        return {r.signature: r.samples for r in preferred(chosen, self.processes)}

    def kernel_overhead_s(self, device: Device) -> float:
        """Seconds that a kernel of a real step takes beyond its replay; 0 when never measured."""
        chosen = [r for r in self.profiles.overheads if r.environment.device == device.name and r.name == "kernel"]
        return overhead_s(preferred(chosen, self.processes))

    def knows(self, table: SignatureTable, device: Device) -> Bools:
        """Which rows were measured on this device."""
        rows = self.rows(device)
        return np.array([s in rows for s in table.signatures], dtype=bool)

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        """Medians and spreads; raises UnsupportedError when a row was never measured here."""
        rows, overhead = self.rows(device), self.kernel_overhead_s(device)
        for signature in table.signatures:
            if signature not in rows:
                raise UnsupportedError(
                    f"{signature.target} of these shapes was never measured on {device.name}; "
                    f"run simpart profile ops there, or ask a fallback model"
                )
        samples = [rows[s] for s in table.signatures]
        return Estimate(
            mean_s=np.array([s.median_s + overhead for s in samples], dtype=np.float64),
            family=np.array([FAMILIES.index(signature_family(s)) for s in table.signatures], dtype=np.int64),
            families=FAMILIES,
            shared_log_sd=np.full(len(samples), _SHARED_LOG_SD),
            own_log_sd=np.array([log_sd(s) for s in samples], dtype=np.float64),
            provenance=np.full(len(samples), PROVENANCES.index("measured"), dtype=np.int64),
        )


def log_sd(samples: Samples) -> float:
    """Log-sd of the median that the quartiles of the timings show, at least 1 %."""
    spread = log(samples.upper_s / samples.lower_s) / _QUARTILES_PER_SD if samples.lower_s > 0 else 1.0
    return max(0.01, spread / sqrt(max(1, samples.count)))


def overhead_s(records: Iterable[OverheadRecord]) -> float:
    found = list(records)
    return found[-1].samples.median_s if found else 0.0


def preferred(records: Iterable[R], processes: int | None) -> list[R]:
    """Records in order of how well they fit, the best last: software as installed here, number of processes, time."""
    here = torch_version()

    def rank(environment: Environment) -> tuple[bool, int]:
        distance = 0 if processes is None else abs(environment.processes - processes)
        return environment.torch == here, -distance

    return sorted(records, key=lambda r: rank(r.environment))
