"""Learning a family from measurements, and what its errors on held-out devices say about its spreads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from simpart.costmodels.learned._boost import fit_boost
from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Family, Rows, op_codes, regime_of
from simpart.costmodels.learned._fitting import fit_constants
from simpart.costmodels.learned._measurements import Measurements
from simpart.costmodels.learned._model import FamilyModel, Spreads, columns_of
from simpart.costmodels.learned._sheet import Sheet, sheet_of, stack_sheets
from simpart.errors import UserError
from simpart.hardware import Device, load_device

__all__ = ["HeldOut", "calibrated", "fit_family", "hold_out", "rows_of", "sheets_for", "train", "trainable"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_PER_DEVICE = 350  # rows that fit the constants
_TREE_ROWS = 6000  # and the trees
_PRIOR_SHARPENING = 3.0  # priors of constants are narrower than what single devices scatter by
_Z90 = 1.645
WEIGHTS = (0.0, 0.5, 1.0)
SLOW_FLOOR_S = 10e-6


def sheets_for(devices: list[str], family: Family, known: Mapping[str, Device] | None = None) -> dict[str, Sheet]:
    """Data sheets of devices by name, without measured floors: those are not on a data sheet."""
    found = {}
    for name in devices:
        device = known[name] if known and name in known else load_device(name)
        found[name] = sheet_of(replace(device, launch_floor_s=None), family.dtype)[0]
    return found


def rows_of(table: Measurements, sheets: Mapping[str, Sheet]) -> Rows:
    """Measurements as rows of their family."""
    names = list(sheets)
    index = np.array([names.index(name) for name in table.device.tolist()], dtype=np.int64)
    return Rows(op=op_codes(table.op), dims=table.dims, sheet=stack_sheets(list(sheets.values()), index))


def train(
    table: Measurements, *, seed: int = 0, residual: bool = True, prior_sharpening: float | None = None
) -> FamilyModel:
    """Fit constants, then trees on what they leave. `table` has one row per shape and device, cleaned.

    Raises UserError when there are fewer than 30 rows.
    """
    family = FAMILY_MODELS[table.family]
    if len(table) < 30:
        raise UserError(f"family {table.family}: at least 30 rows are needed to fit it, got {len(table)}")
    rng = np.random.default_rng(seed)
    sheets = sheets_for(table.devices(), family)
    few = table.at(_sample(table, _PER_DEVICE, rng))
    rows, target = rows_of(few, sheets), np.log(few.latency_s)
    bound = np.log(family.bound_s(rows))
    values = np.array(list(family.constants.values()))
    centre, spread = np.log(values[:, 0]), values[:, 1] / (prior_sharpening or _PRIOR_SHARPENING)
    constants = tuple(
        fit_constants(lambda c, v=variant: np.maximum(np.log(v(c, rows)), bound), target, centre, spread)  # type: ignore[misc]
        for variant in family.variants
    )
    model = FamilyModel(
        family=family.name,
        constants=constants,
        boost=None,
        sheets=sheets,
        domain={name: (float(v.min()), float(v.max())) for name, v in table.dims.items()},
        ops=tuple(sorted(set(table.op.tolist()))),
        facts={"rows": len(table), "devices": table.devices(), "fingerprint": fingerprint(table)},
    )
    if not residual:
        return model
    many = table.at(_sample(table, _TREE_ROWS, rng))
    rows = rows_of(many, sheets)
    analytic = model.analytic(rows)
    counts = {name: int((many.device == name).sum()) for name in many.devices()}
    weights = np.array([1.0 / counts[name] for name in many.device.tolist()])
    columns = columns_of(family, rows, analytic, rows.sheet)
    boost = fit_boost(columns, np.log(many.latency_s) - analytic, weights, depth=6, trees=150, seed=seed)
    return replace(model, boost=boost)


def fingerprint(table: Measurements) -> str:
    """Of the rows trained on: the same rows, the same text."""
    digest = hashlib.sha256(table.family.encode())
    digest.update("\n".join(map(str, table.device.tolist())).encode())
    for values in (*table.dims.values(), table.latency_s):
        digest.update(np.ascontiguousarray(values, dtype=np.float64).tobytes())
    return digest.hexdigest()[:16]


def _sample(table: Measurements, most: int, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """At most `most` rows of each device, spread over its ops."""
    chosen = []
    for name in table.devices():
        rows = np.flatnonzero(table.device == name)
        chosen.append(np.sort(rng.choice(rows, min(most, len(rows)), replace=False)))
    return np.concatenate(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rows of a device that a model never saw: its status, log errors of the core, and what the trees would add."""

    status: str
    rows: Rows
    error: Floats
    analytic_error: Floats
    residual: Floats


Progress = Callable[[str], None]


def trainable(table: Measurements) -> Measurements:
    """One row per shape and device; of attention the fastest software, since some of its rows hold more than one
    kernel. Devices whose smallest kernel takes SLOW_FLOOR_S are left out: their software is of another class."""
    slow = [name for name in table.devices() if (load_device(name).launch_floor_s or 0.0) > SLOW_FLOOR_S]
    table = table.at(~np.isin(table.device.astype(str), slow))
    if table.family == "attention16":
        triton = np.array(["triton" in name for name in table.software.tolist()], dtype=bool)
        return table.at(~triton & (table.dims["seq"] >= 64)).fastest_per_shape()
    return table.median_per_shape()


def hold_out(table: Measurements, device: str, *, seed: int = 0) -> HeldOut:
    """Train on all devices but one and predict that one from its data sheet."""
    model = train(table.at(table.device != device), seed=seed)
    return errors_on(model, table.at(table.device == device), device)


def errors_on(model: FamilyModel, test: Measurements, device: str) -> HeldOut:
    """Errors of a model on rows of one device."""
    family = FAMILY_MODELS[model.family]
    rows = Rows(op=op_codes(test.op), dims=test.dims, sheet=sheets_for([device], family)[device])
    truth = np.log(test.latency_s)
    found, analytic = model.predict(rows, device), model.analytic(rows)
    return HeldOut(
        status=found.status,
        rows=rows,
        error=found.log_seconds - truth,
        analytic_error=analytic - truth,
        residual=model.residual(rows, analytic),
    )


def fit_family(table: Measurements, *, seed: int = 0, progress: Progress = lambda text: None) -> FamilyModel:
    """Train on all of a table; weight and spreads from leaving out each device, and a fifth of the shapes, in turn.

    Everything that is chosen is chosen within `table`: to judge it, hold a device out of the table first.
    """
    devices, held_out = table.devices(), {}
    if len(devices) >= 3:
        for name in devices:
            progress(f"{table.family}: without {name}")
            held_out[name] = hold_out(table, name, seed=seed)
    progress(f"{table.family}: {len(table)} rows of {len(devices)} devices")
    model = train(table, seed=seed)
    fold = np.random.default_rng(seed).permutation(len(table)) % 5 == 0
    known = train(table.at(~fold), seed=seed)
    for name in devices:
        test = table.at(fold & (table.device == name))
        if len(test) >= 30:
            held_out[f"{name} (unseen shapes)"] = errors_on(known, test, name)
    return calibrated(model, held_out)


def calibrated(model: FamilyModel, held_out: Mapping[str, HeldOut]) -> FamilyModel:
    """The model with the weight of its residual and its spreads from errors on held-out devices.

    Rows of a device share its bias, so a device is one observation: the spread of a (status, regime) is that of the
    worst device, and of all regimes together where a device has few rows.
    """
    family = FAMILY_MODELS[model.family]
    new = [h for h in held_out.values() if h.status == "new"]
    weight = model.weight
    if new:
        scores = {
            w: np.mean([np.abs(np.expm1(h.analytic_error + w * h.residual)).mean() for h in new]) for w in WEIGHTS
        }
        weight = min(WEIGHTS, key=lambda w: (scores[w], w))
    found: dict[str, dict[str, tuple[float, float]]] = {}
    errors_by_device = {}
    for device, held in held_out.items():
        errors = held.analytic_error + weight * held.residual if held.status == "new" else held.error
        errors_by_device[device] = {
            "status": held.status, "rows": len(errors), "mape": round(float(np.abs(np.expm1(errors)).mean()), 4),
            "bias": round(float(np.expm1(np.median(errors))), 4),
        }  # fmt: skip
        regime = regime_of(family, held.rows)
        for number, name in enumerate(REGIMES):
            chosen = errors[regime == number] if (regime == number).sum() >= 30 else errors
            total = float(np.quantile(np.abs(chosen), 0.9)) / _Z90
            shared = min(abs(float(np.median(chosen))), 0.95 * total)
            old = found.setdefault(held.status, {}).get(name, (0.0, 0.0))
            if total > np.hypot(*old):
                found[held.status][name] = (shared, float(np.sqrt(total**2 - shared**2)))
    facts = {**model.facts, "held_out": errors_by_device}
    return replace(model, weight=weight, spreads=_completed(found, model.spreads), facts=facts)


def _completed(found: Mapping[str, Mapping[str, tuple[float, float]]], prior: Spreads) -> Spreads:
    """Every status: measured ones at least a share of the prior, since few devices were seen; a status that no held-out
    device had takes that of the next nearer one, wider."""
    complete: dict[str, dict[str, tuple[float, float]]] = {}
    for status, least in (("seen", 0.5), ("sibling", 0.6), ("new", 0.5), ("far", 0.7)):
        source = found.get(status)
        if source is None and status == "far" and "new" in found:
            source = {name: (1.3 * shared, 1.1 * own) for name, (shared, own) in found["new"].items()}
        if source is None:
            complete[status] = dict(prior[status])
            continue
        complete[status] = {
            name: (
                max(source[name][0], least * prior[status][name][0]),
                max(source[name][1], least * prior[status][name][1]),
            )
            for name in REGIMES
        }
    return complete
