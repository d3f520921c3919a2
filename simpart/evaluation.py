"""Accuracy of predictions against measurements: one set of figures for every kind of data set.

All errors and shares are fractions: 0.12 is 12 %. Rows are judged by `predicted / measured - 1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpart.errors import UserError

__all__ = ["SIZE_CLASSES", "Z90", "Judged", "join", "size_classes", "summary"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Names = np.ndarray[tuple[int], np.dtype[np.object_]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

Z90 = 1.6449
"""Log-sds to either side of a nominal 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Measured rows and what was predicted for each: NaN where a model or baseline has no answer.

    `groups` are the columns to report by (source, device, family, …); `refused` counts rows of the file that are not
    here, by reason; `log_sd` is the predicted log-sd of a row's error, shared part and own together.
    """

    measured_s: Floats
    predicted_s: Floats
    log_sd: Floats
    groups: Mapping[str, Names]
    baselines: Mapping[str, Floats] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = {"predicted_s": self.predicted_s, "log_sd": self.log_sd, **self.groups, **self.baselines}
        for name, values in columns.items():
            if len(values) != len(self.measured_s):
                rule = f"must have a value for each of the {len(self.measured_s)} rows"
                raise UserError(f"{name} {rule}, got {len(values)}")


def join(parts: Sequence[Judged]) -> Judged:
    """Rows of several; a baseline that one of them lacks is NaN there."""
    if not parts:
        raise UserError("nothing to evaluate: no row of the data set has a model")
    names = list(dict.fromkeys(name for part in parts for name in part.baselines))
    groups = list(dict.fromkeys(name for part in parts for name in part.groups))
    refused: Counter[str] = Counter()
    for part in parts:
        refused.update(part.refused)

    def group(part: Judged, name: str) -> Names:
        return part.groups.get(name, np.full(len(part.measured_s), "", dtype=object))

    def baseline(part: Judged, name: str) -> Floats:
        return part.baselines.get(name, np.full(len(part.measured_s), np.nan))

    return Judged(
        measured_s=np.concatenate([p.measured_s for p in parts]),
        predicted_s=np.concatenate([p.predicted_s for p in parts]),
        log_sd=np.concatenate([p.log_sd for p in parts]),
        groups={name: np.concatenate([group(p, name) for p in parts]) for name in groups},
        baselines={name: np.concatenate([baseline(p, name) for p in parts]) for name in names},
        refused=dict(refused),
    )


def summary(judged: Judged, *, charge: str = "roofline", by: Sequence[str] | None = None) -> dict[str, Any]:
    """The figures of a data set: keys as design section 6 has them.

    Rows that the model does not cover, those refused on import among them, are charged in `mape_all` at the error of
    the baseline `charge`: their own where it answers, else its mean.
    """
    covered = np.isfinite(judged.predicted_s)
    refused = sum(judged.refused.values())
    found: dict[str, Any] = {
        "rows": len(covered) + refused,
        "covered": int(covered.sum()),
        "not_covered": {**judged.refused, **({"no_answer": int((~covered).sum())} if (~covered).any() else {})},
        **_figures(judged.measured_s, judged.predicted_s, covered),
        "mape_all": _charged(judged, covered, refused, charge),
        **_interval_figures(judged, covered),
        "by": {
            name: {str(value): _group(judged, covered & (column == value)) for value in _values(column[covered])}
            for name, column in judged.groups.items()
            if by is None or name in by
        },
        "baselines": {
            name: {
                "covered": int((covered & np.isfinite(values)).sum()),
                **_figures(judged.measured_s, values, covered & np.isfinite(values)),
            }
            for name, values in judged.baselines.items()
        },
    }
    return found


SIZE_CLASSES = ("<10us", "<100us", "<1ms", "<10ms", ">=10ms")


def size_classes(seconds: Floats) -> Names:
    """Decades of a duration as words: `<10us`, `<100us`, … to compare short and long rows."""
    found: Names = np.array(SIZE_CLASSES, dtype=object)[
        np.searchsorted([1e-5, 1e-4, 1e-3, 1e-2], seconds, side="right")
    ]
    return found


def _values(column: Names) -> list[Any]:
    return sorted(set(column.tolist()), key=str)


def _group(judged: Judged, mask: Mask) -> dict[str, Any]:
    return {
        "rows": int(mask.sum()),
        **_figures(judged.measured_s, judged.predicted_s, mask),
        **_interval_figures(judged, mask),
        "baselines": {
            name: _figures(judged.measured_s, values, mask & np.isfinite(values)).get("mape")
            for name, values in judged.baselines.items()
        },
    }


def _figures(measured: Floats, predicted: Floats, mask: Mask) -> dict[str, Any]:
    if not mask.any():
        return {"mape": None, "median": None, "bias": None, "spearman": None}
    error = predicted[mask] / measured[mask] - 1.0
    return {
        "mape": float(np.abs(error).mean()),
        "median": float(np.median(np.abs(error))),
        "bias": float(np.median(error)),
        "spearman": _spearman(predicted[mask], measured[mask]),
    }


def _interval_figures(judged: Judged, mask: Mask) -> dict[str, Any]:
    """Coverage, median half-width (of the upper side, relative) and mean Winkler score (of log intervals) at 90 %."""
    mask = mask & np.isfinite(judged.log_sd)
    if not mask.any():
        return {"interval_coverage_90": None, "interval_half_width_median": None, "winkler": None}
    miss = np.abs(np.log(judged.predicted_s[mask] / judged.measured_s[mask]))
    half = Z90 * judged.log_sd[mask]
    return {
        "interval_coverage_90": float((miss <= half).mean()),
        "interval_half_width_median": float(np.median(np.expm1(half))),
        "winkler": float((2 * half + 20.0 * np.maximum(0.0, miss - half)).mean()),
    }


def _charged(judged: Judged, covered: Mask, refused: int, charge: str) -> float | None:
    values = judged.baselines.get(charge)
    if values is None or not covered.any():
        return None
    known = np.isfinite(values)
    errors = np.abs(values / judged.measured_s - 1.0)
    typical = float(errors[known].mean()) if known.any() else 1.0
    own = np.abs(judged.predicted_s[covered] / judged.measured_s[covered] - 1.0).sum()
    rest = np.where(known, errors, typical)[~covered].sum() + typical * refused
    return float((own + rest) / (len(covered) + refused))


def _spearman(one: Floats, other: Floats) -> float | None:
    if len(one) < 2:
        return None
    a, b = (_ranks(values) for values in (one, other))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else None


def _ranks(values: Floats) -> Floats:
    """Ranks, equal values sharing their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    found: Floats = (last - (counts - 1) / 2)[inverse]
    return found
