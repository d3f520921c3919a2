"""What errors on held-out devices say about the spreads of a fitted family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simpart.costmodels.learned._blend import Parts
from simpart.costmodels.learned._families import Dims
from simpart.costmodels.learned._model import SIZES, STATUSES, FamilyModel, Spreads, size_of

__all__ = ["HeldOut", "calibrated"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

_Z90 = 1.645
_SIBLINGS_SHARE = 2 / 3
_FAR_WIDER = 1.2
_LEAST_OF_PRIOR = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rows of a device that a model never saw: its status, their sizes, logs of measured and predicted seconds, and
    what each part says of a new device."""

    status: str
    dims: Dims
    truth: Floats
    log_seconds: Floats
    parts: Parts | None

    @property
    def error(self) -> Floats:
        """Log of predicted over measured seconds, by the model as it is."""
        return self.log_seconds - self.truth

    def told(self, model: FamilyModel) -> Floats:
        """Log seconds with the blends of another model of the family."""
        return self.log_seconds if self.parts is None else model.blended(self.parts, self.dims)


def calibrated(model: FamilyModel, held_out: Mapping[str, HeldOut], scatter: float = 0.0) -> FamilyModel:
    """The model with its spreads from errors on held-out devices, told by its own blends.

    Rows of a device share its bias, so a device is one observation, and a spread the root mean square over devices.
    `scatter` is the least log-sd.
    """
    errors_by_device = {}
    for device, held in held_out.items():
        error = held.told(model) - held.truth
        errors_by_device[device] = {
            "status": held.status, "rows": len(error), "mape": round(float(np.abs(np.expm1(error)).mean()), 4),
            "median": round(float(np.median(np.abs(np.expm1(error)))), 4),
            "bias": round(float(np.expm1(np.median(error))), 4),
        }  # fmt: skip
    found = {}
    for status in STATUSES:
        counting = _counting(status, held_out.values())
        if counting:
            told = [(held, held.told(model), share) for held, share in counting]
            found[status] = _pooled([(logs - held.truth, size_of(logs), share) for held, logs, share in told])
    facts = {**model.facts, "held_out": errors_by_device}
    return replace(model, spreads=_completed(found, model.spreads, scatter), facts=facts)


def _counting(status: str, held_out: Iterable[HeldOut]) -> list[tuple[HeldOut, float]]:
    """Held-out devices that speak for a status, and how much: new and far ones for both, siblings of others in part,
    since few devices were ever held out."""
    if status not in ("new", "far"):
        return [(h, 1.0) for h in held_out if h.status == status]
    shares = {"new": 1.0, "far": 1.0, "sibling": _SIBLINGS_SHARE}
    found = [(h, shares[h.status]) for h in held_out if h.status in shares]
    return found if any(share == 1.0 for _, share in found) else []


def _pooled(held_out: Sequence[tuple[Floats, Ints, float]]) -> dict[str, tuple[float, float]]:
    """Per size (shared, own) log-sd from (errors, sizes, share) of each device: mean squares over devices of median and
    of 90 % quantile, that of the size and that of all rows counting equally."""
    whole = sum(share for *_, share in held_out)
    found = {}
    for number, name in enumerate(SIZES):
        total = shared = 0.0
        for error, size, share in held_out:
            every = float(np.quantile(np.abs(error), 0.9)) / _Z90
            mine = error[size == number] if (size == number).sum() >= 30 else error
            total += share / whole * 0.5 * (every**2 + (float(np.quantile(np.abs(mine), 0.9)) / _Z90) ** 2)
            shared += share / whole * float(np.median(mine)) ** 2
        shared = min(shared, 0.9 * total)
        found[name] = (float(np.sqrt(shared)), float(np.sqrt(total - shared)))
    return found


def _completed(found: Mapping[str, Mapping[str, tuple[float, float]]], prior: Spreads, scatter: float) -> Spreads:
    """Every status: measured ones at least half the prior, since few devices were seen; a status that no held-out
    device had takes the prior, a far one that of a new one, wider."""
    complete: dict[str, dict[str, tuple[float, float]]] = {}
    for status in STATUSES:
        source = found.get(status, prior[status])
        wider = _FAR_WIDER if status == "far" and status in found else 1.0
        complete[status] = {}
        for name in SIZES:
            shared, own = wider * source[name][0], wider * source[name][1]
            least = max(scatter, _LEAST_OF_PRIOR * float(np.hypot(*prior[status][name])))
            if np.hypot(shared, own) < least:
                own = float(np.sqrt(least**2 - shared**2))
            complete[status][name] = (shared, own)
    return complete
