"""How far predictions are to be trusted: errors on systems, devices, sources and sizes left out of the fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from simpart.costmodels.learned_comm._model import PRIOR_SPREADS, REGIMES, STATUSES, Fitted, regime_of, train
from simpart.costmodels.learned_comm._protocol import FLOOR_BYTES
from simpart.costmodels.learned_comm._records import Records
from simpart.costmodels.learned_comm._rules import superseded
from simpart.costmodels.learned_comm._situation import KINDS

__all__ = ["calibrated", "fit", "size_fold", "with_floors"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Progress = Callable[[str], None]

_Z90 = 1.6449
_LEAST_SHARE = 0.8  # of the prior's spread: few devices were seen
_FEWEST = 5
_WORST_SHARE = {
    "seen": 0.0,
    "seen_bus": 0.0,
    "device": 0.5,
    "floor": 0.5,
    "new": 0.5,
}  # how near the worst device a spread is, else 1
_FOLDS = 5


def fit(records: Records, progress: Progress = lambda text: None) -> Fitted:
    """Train on all records, with spreads from what leaving parts of them out shows. Everything that is chosen is chosen
    within `records`: to judge it, hold a device out of them first."""
    progress("communication: all systems")
    return calibrated(train(records), records, progress)


def calibrated(model: Fitted, records: Records, progress: Progress = lambda text: None) -> Fitted:
    """The model with spreads from held-out errors. Rows of a device share its bias, so a device is one observation: a
    spread is that of the worst held-out device where devices are few and unlike, half way to it from the average one
    where they are more alike, the average on systems seen; its shared part is the mean square of the biases of
    (device, kind)."""
    errors: dict[str, list[tuple[str, Records, Floats]]] = {}
    held_out = {}

    def judge(text: str, left_in: Records, test: Records, *, systems: bool) -> None:
        if not len(left_in) or not len(test):
            return
        progress(f"communication: {text}")
        trained = train(left_in, systems=systems)
        for floors in (False, True) if not systems else (False,):
            rows = with_floors(test) if floors else test
            if floors:
                rows = rows.at(~np.isnan(rows.situation.inside_s))
            if not len(rows):
                continue
            found = trained.predict(rows.situation, rows.device.tolist(), rows.system.tolist())
            error = found.log_seconds - np.log(rows.latency_s)
            for code in np.unique(found.status):
                for fused in (False, True):
                    mask = (found.status == code) & ((rows.situation.software > 0) == fused)
                    if mask.any():
                        status = STATUSES[code] + (" fused" if fused else "")
                        errors.setdefault(status, []).append((text, rows.at(mask), error[mask]))
                        held_out[f"{text}: {status}"] = {
                            "rows": int(mask.sum()), "mape": round(float(np.abs(np.expm1(error[mask])).mean()), 4),
                            "bias": round(float(np.expm1(np.median(error[mask]))), 4),
                        }  # fmt: skip

    multi = records.situation.hosts > 1
    for device in dict.fromkeys(records.device.tolist()):
        mine = records.device == device
        judge(f"without {device}", records.at(~mine), records.at(mine & ~multi), systems=False)
    current = multi & ~superseded(records)
    for system in dict.fromkeys(records.system[current].tolist()):
        mine = records.system == system
        judge(f"without {system}", records.at(~mine), records.at(mine & current), systems=True)
    sources = records.source
    for source in dict.fromkeys(sources.tolist()):
        known = np.isin(records.device.astype(str), sorted(set(records.device[sources != source].tolist())))
        judge(
            f"without source {source}",
            records.at(sources != source),
            records.at((sources == source) & known & ~multi),
            systems=True,
        )
    fold = size_fold(records)
    judge("unseen sizes", records.at(~fold), records.at(fold), systems=True)
    spreads = {name: {r: _spread(name, r, errors.get(name, [])) for r in REGIMES} for name in PRIOR_SPREADS}
    return replace(model, spreads=spreads, facts={**model.facts, "held_out": held_out})


def size_fold(records: Records, number: int = 0) -> Mask:
    """A fifth of the sizes of each curve, none beside another: all versions and dtypes of a size are on one side."""
    s = records.situation
    octave = np.round(np.log2(np.maximum(s.bytes, 1.0))).astype(np.int64)
    found: Mask = (octave + 2 * s.kind + np.round(s.local).astype(np.int64)) % _FOLDS == number
    return found


def with_floors(records: Records) -> Records:
    """Each row with the measured floor of its device: the median time of the smallest all-reduce of two, of the source
    with the most rows. Devices without such a row have none."""
    s = records.situation
    floors = np.full(len(records), np.nan)
    smallest = (
        (s.kind == KINDS.index("all_reduce"))
        & (s.software == 0)
        & (s.local == 2)
        & (s.hosts == 1)
        & (s.bytes <= FLOOR_BYTES)
    )
    for system in set(records.system[smallest].tolist()):
        rows = records.system == system
        floors[rows] = float(np.median(records.latency_s[rows & smallest]))
    return replace(records, situation=replace(s, inside_s=floors))


def _spread(status: str, regime: str, found: list[tuple[str, Records, Floats]]) -> tuple[float, float]:
    prior_shared, prior_own = PRIOR_SPREADS[status][regime]
    totals, biases = [], []
    for _, records, error in found:
        rows = regime_of(records.situation) == REGIMES.index(regime)
        for device in dict.fromkeys(records.device[rows].tolist()):
            mine = rows & (records.device == device)
            if mine.sum() >= _FEWEST:
                totals.append(float(np.quantile(np.abs(error[mine]), 0.9)) / _Z90)
                kinds = records.situation.kind
                biases += [float(np.median(error[mine & (kinds == k)])) for k in np.unique(kinds[mine])]
    least = _LEAST_SHARE * float(np.hypot(prior_shared, prior_own))
    average, worst = (float(np.mean(totals)), max(totals)) if totals else (0.0, 0.0)
    share = _WORST_SHARE.get(status.partition(" ")[0], 1.0)
    total = max(least, (1 - share) * average + share * worst)
    shared = (
        float(np.sqrt(np.mean(np.square(biases))))
        if biases
        else prior_shared / np.hypot(prior_shared, prior_own) * total
    )
    shared = float(min(max(shared, _LEAST_SHARE * prior_shared), 0.95 * total))
    return round(shared, 4), round(float(np.sqrt(total**2 - shared**2)), 4)
