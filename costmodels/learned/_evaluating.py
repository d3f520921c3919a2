"""Operator data sets judged: with the shipped models, or with models refitted on what a split leaves in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Rows, op_codes, regime_of
from simpart.costmodels.learned._fittable import KERNELS_FROM, fittable
from simpart.costmodels.learned._generations import generation_of
from simpart.costmodels.learned._measurements import Imported, Measurements, concatenate, row_codes
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._sheet import Sheet, distance, sheet_of
from simpart.costmodels.learned._training import fit_family, without_slow
from simpart.errors import UnknownNameError, UserError
from simpart.evaluation import Judged, join, size_classes
from simpart.hardware import load_device

__all__ = ["SPLITS", "judge_import", "judge_table"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Progress = Callable[[str], None]

SPLITS = (
    "shipped", "leave-one-device-out", "leave-one-generation-out", "leave-one-source-out", "published", "random",
)  # fmt: skip
_LEAST_ROWS = 30


def judge_import(
    found: Imported,
    models: Mapping[str, FamilyModel],
    split: str,
    *,
    floors: bool = False,
    progress: Progress = lambda text: None,
    reference: Sequence[Measurements] = (),
) -> Judged:
    """Every row of a file, predicted as `split` says. `floors` lets devices that are held out use the measured latency
    of their smallest kernel. With `reference` (tables by family) baselines know those rows and not the file's own.
    Raises UserError when nothing in the file has a model."""
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    families = dict.fromkeys(table.family for table in reference)
    known = {family: concatenate([t for t in reference if t.family == family]) for family in families}
    parts = []
    for table in found.tables:
        progress(f"judging {len(table)} rows of {table.family}")
        beside = known.get(table.family, table.at(np.zeros(0, dtype=np.int64)) if reference else None)
        parts.append(judge_table(table, models, split, floors=floors, progress=progress, reference=beside))
    if not parts:
        counts = ", ".join(f"{count} {reason}" for reason, count in found.refused.items())
        raise UserError(f"nothing to evaluate: all {found.rows} rows were left out ({counts})")
    judged = join(parts)
    if split != "shipped" and not np.isfinite(judged.predicted_s).any():
        raise UserError(
            f"split {split} leaves fewer than {_LEAST_ROWS} rows of any family to learn from; use more devices or "
            f"sources, or another split"
        )
    return replace(judged, refused=dict(found.refused))


def judge_table(
    table: Measurements,
    models: Mapping[str, FamilyModel],
    split: str,
    *,
    floors: bool = False,
    progress: Progress = lambda text: None,
    reference: Measurements | None = None,
) -> Judged:
    """Rows of one family."""
    count = len(table)
    predicted, log_sd = np.full(count, np.nan), np.full(count, np.nan)
    status = np.full(count, "", dtype=object)
    one_number = np.full(count, np.nan)
    sheets = _sheets(table)
    roofline = _roofline(table, sheets)
    may_learn = fittable(table.source, table.device, KERNELS_FROM)
    for label, left_out, kept in _parts(table, split):
        if split == "shipped":
            model = models.get(table.family)
        elif len(learn := without_slow(table.at(kept & may_learn))) < _LEAST_ROWS:
            model = None
        else:
            model = fit_family(learn, progress=lambda text, label=label: progress(f"{split} {label}, {text}"))  # type: ignore[misc]
        if reference is None:
            others = kept & may_learn & np.isfinite(roofline) if split != "shipped" else np.ones(count, dtype=bool)
            factors = table.latency_s[others] / roofline[others]
        else:
            factors = reference.latency_s / _roofline(reference, _sheets(reference))
        if len(factors):
            one_number[left_out] = roofline[left_out] * np.median(factors)
        if model is None:
            continue
        for name in table.at(left_out).devices():
            rows = np.flatnonzero(left_out & (table.device == name))
            part = table.at(rows)
            sheet, _, widened = sheet_of(load_device(name), FAMILY_MODELS[table.family].dtype)
            if not floors and split != "shipped":
                sheet = _without_floor(sheet)
            asked = Rows(op=op_codes(part.op), dims=part.dims, sheet=sheet)
            answer, regime = model.predict(asked, name), regime_of(FAMILY_MODELS[table.family], asked)
            predicted[rows] = np.exp(answer.log_seconds + model.software_offset(part.software, regime))
            log_sd[rows] = np.sqrt(answer.shared**2 + answer.own**2 + widened**2)
            status[rows] = answer.status
    regimes = np.full(count, "", dtype=object)
    for name, sheet in sheets.items():
        rows = np.flatnonzero(table.device == name)
        part = table.at(rows)
        regime = regime_of(FAMILY_MODELS[table.family], Rows(op=op_codes(part.op), dims=part.dims, sheet=sheet))
        regimes[rows] = np.array(REGIMES, dtype=object)[regime]
    return Judged(
        measured_s=table.latency_s,
        predicted_s=predicted,
        log_sd=log_sd,
        groups={
            "source": table.source, "device": table.device, "family": np.full(count, table.family, dtype=object),
            "op": table.op, "software": table.software, "status": status, "limit": regimes,
            "size_class": size_classes(table.latency_s), "row": table.row.astype(np.int64).astype(object),
        },
        baselines={"one_number": one_number, "roofline": roofline, "ratio": _ratio(table, sheets, roofline, reference)},
    )  # fmt: skip


def _parts(table: Measurements, split: str) -> list[tuple[str, Any, Any]]:
    """(name, rows left out, rows to learn from) of each part of a split."""
    count = len(table)
    everything = np.ones(count, dtype=bool)
    if split == "shipped":
        return [("", everything, ~everything)]
    if split == "published":
        train = np.array([name.startswith("train") for name in table.split.tolist()], dtype=bool)
        return [("", ~train, train)]
    if split == "random":
        shapes = row_codes([table.op, *table.dims.values()])
        fold = np.random.default_rng(0).permutation(int(shapes.max(initial=0)) + 1)[shapes] % 5
        return [(f"fold {i}", fold == i, fold != i) for i in range(5)]
    if split == "leave-one-device-out":
        labels = table.device
    elif split == "leave-one-generation-out":
        labels = np.array([generation_of(name) for name in table.device.tolist()], dtype=object)
    else:
        labels = table.source
        if len(set(labels.tolist())) < 2:  # one publisher: its frameworks are the sources
            labels = np.array([name.split(" ")[0] for name in table.software.tolist()], dtype=object)
    return [(str(name), labels == name, labels != name) for name in dict.fromkeys(labels.tolist())]


def _roofline(table: Measurements, sheets: Mapping[str, Sheet]) -> Floats:
    found = np.full(len(table), np.nan)
    for name, sheet in sheets.items():
        rows = np.flatnonzero(table.device == name)
        part = table.at(rows)
        found[rows] = FAMILY_MODELS[table.family].bound_s(Rows(op=op_codes(part.op), dims=part.dims, sheet=sheet))
    return found


def _sheets(table: Measurements) -> dict[str, Sheet]:
    return {name: sheet_of(load_device(name), FAMILY_MODELS[table.family].dtype)[0] for name in table.devices()}


def _ratio(
    table: Measurements, sheets: Mapping[str, Sheet], roofline: Floats, reference: Measurements | None = None
) -> Floats:
    """Median of the same shape on the nearest other device (of `reference`, if given), times the ratio of rooflines;
    NaN where it has none."""
    found, known = np.full(len(table), np.nan), np.ones(len(table), dtype=bool)
    both = table
    if reference is not None:
        both, sheets = concatenate([table, reference]), {**sheets, **_sheets(reference)}
        roofline = np.concatenate([roofline, _roofline(reference, sheets)])
        known = np.arange(len(both)) >= len(table)
    shapes = row_codes([both.op, *both.dims.values()])
    names = [name for name in both.at(known).devices() if name in sheets]
    for name in table.devices():
        others: Sequence[str] = sorted((n for n in names if n != name), key=lambda n: distance(sheets[n], sheets[name]))
        mine = np.flatnonzero(table.device == name)
        for other in others[:1]:
            theirs = np.flatnonzero(known & (both.device == other))
            order = theirs[np.lexsort((both.latency_s[theirs], shapes[theirs]))]
            keys, starts, counts = np.unique(shapes[order], return_index=True, return_counts=True)
            middle = order[starts + (counts - 1) // 2]
            place = np.clip(np.searchsorted(keys, shapes[mine]), 0, len(keys) - 1)
            same = keys[place] == shapes[mine]
            rows = middle[place[same]]
            found[mine[same]] = both.latency_s[rows] * roofline[mine[same]] / roofline[rows]
    return found


def _without_floor(sheet: Sheet) -> Sheet:
    return replace(sheet, floor_s=np.array([np.nan]))
