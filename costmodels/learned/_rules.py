"""Cleaning rules: which measured rows are not believed, and why. Written down before any fit; applied on import.

    unusable        latency missing, zero, negative or not finite, or stated in two units that disagree; a dim missing
                    or not positive
    unknown_device  no device file has this spelling
    beyond_peak     faster than the device's peak rate for the dtype
    warm_cache      faster than its inputs and outputs move at the full memory bandwidth: they were in L2
    duplicate       the same measurement twice (device, software, op, dims and latency equal)
    unit_mistake    a whole (device, software) group lies 300 times or more off its neighbours' median, or a row's
                    share of its bound and 5 us lies 500 times off that of the median row of its file: another unit
    resolution      shorter than eight steps of the timer of its source (operators timed to 1 µs)

and of the tables inside aiconfigurator-core (`_package.py`), before these:

    continued_prompt                attention of prompts that continue others, or are searched in beams
    other_device_than_its_folder    the row states a device that is not the one whose folder it lies in

The first rule that applies counts. Rows that break `beyond_peak` or `warm_cache` by less than 2 % stay: clocks differ
a little from data sheets.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._convolution import WINOGRAD_SAVES
from simpart.costmodels.learned._families import FAMILY_MODELS, Rows
from simpart.costmodels.learned._measurements import Measurements, row_codes
from simpart.costmodels.learned._sheet import Sheet

__all__ = ["RULES", "TIMER_STEP_S", "judge"]

Verdicts = np.ndarray[tuple[int], np.dtype[np.object_]]

RULES = ("unusable", "unknown_device", "beyond_peak", "warm_cache", "duplicate", "unit_mistake", "resolution")
TIMER_STEP_S: Mapping[str, float] = {"vidur": 1e-6}
_TOLERANCE = 1.02
_STEPS = 8
_UNIT_FACTOR = 300.0
_ROW_UNIT_FACTOR = 500.0  # believed rows reach 230: grouped products of few tokens
_SHORTEST_S = 5e-6


def judge(table: Measurements, sheets: Mapping[str, Sheet], rows: Rows | None) -> Verdicts:
    """The rule that each row breaks, or an empty text. `rows` may be None when no row has a known device."""
    verdict = np.full(len(table), "", dtype=object)

    def mark(broken: np.ndarray[tuple[int], np.dtype[np.bool_]], rule: str) -> None:
        verdict[broken & (verdict == "")] = rule

    usable = np.isfinite(table.latency_s) & (table.latency_s > 0)
    for name, values in table.dims.items():
        usable &= np.isfinite(values) & (values >= 0 if name in _MAY_BE_ZERO else values > 0)
    mark(~usable, "unusable")
    mark(np.array([name not in sheets for name in table.device.tolist()], dtype=bool), "unknown_device")
    if rows is not None:
        family = FAMILY_MODELS[table.family]
        with np.errstate(all="ignore"):
            mark(family.arithmetic_s(rows) > _TOLERANCE * table.latency_s * _slack(table.family), "beyond_peak")
            bound = family.bound_s(rows)
            mark(bound > _TOLERANCE * table.latency_s, "warm_cache")
    mark(_repeated(table), "duplicate")
    mark(_other_unit(table, verdict == ""), "unit_mistake")
    if rows is not None:
        mark(_row_in_other_unit(table.latency_s / (bound + _SHORTEST_S), verdict == ""), "unit_mistake")
    steps = np.array([TIMER_STEP_S.get(source, 0.0) for source in table.source.tolist()])
    mark(table.latency_s < _STEPS * steps, "resolution")
    return verdict


_MAY_BE_ZERO = frozenset({"window", "causal", "cached", "reduces", "padding", "skew"})


def _slack(family: str) -> float:
    """Convolutions may do with fewer multiplications than they count (Winograd)."""
    return WINOGRAD_SAVES if family == "conv32" else 1.0


def _repeated(table: Measurements) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows that were there before. Few latencies occur twice, so only those are compared in full."""
    _, code, counts = np.unique(table.latency_s, return_inverse=True, return_counts=True)
    again = np.flatnonzero(counts[code] > 1)
    broken = np.zeros(len(table), dtype=bool)
    if len(again):
        part = table.at(again)
        keys = [code[again], part.device, part.software, part.op, part.split, *part.dims.values()]
        broken[again] = True
        broken[again[np.unique(row_codes(keys), return_index=True)[1]]] = False
    return broken


def _other_unit(
    table: Measurements, good: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Groups of (device, software) whose median latency is far off the median of all groups."""
    broken = np.zeros(len(table), dtype=bool)
    groups = row_codes([table.device, table.software])
    medians = {code: float(np.median(table.latency_s[good & (groups == code)])) for code in np.unique(groups[good])}
    if len(medians) < 2:
        return broken
    middle = float(np.median(list(medians.values())))
    for code, value in medians.items():
        if not 1 / _UNIT_FACTOR < value / middle < _UNIT_FACTOR:
            broken |= groups == code
    return broken


def _row_in_other_unit(
    excess: np.ndarray[tuple[int], np.dtype[np.float64]], good: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows whose excess over the least time lies far off that of the median row."""
    broken = np.zeros(len(excess), dtype=bool)
    if good.any():
        off = excess[good] / np.median(excess[good])
        broken[good] = (off < 1 / _ROW_UNIT_FACTOR) | (off > _ROW_UNIT_FACTOR)
    return broken
