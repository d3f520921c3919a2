"""Learning a family from measurements, and what its errors on held-out devices say about its spreads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simpart.costmodels.learned._boost import fit_boost
from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Family, Rows, op_codes, regime_of
from simpart.costmodels.learned._fitting import fit_constants
from simpart.costmodels.learned._measurements import Measurements
from simpart.costmodels.learned._model import SIBLING, FamilyModel, Spreads, columns_of
from simpart.costmodels.learned._sheet import Sheet, distance, sheet_of, stack_sheets
from simpart.errors import UserError
from simpart.hardware import Device, load_device

__all__ = ["calibrated", "rows_of", "sheets_for", "train"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_PER_DEVICE = 350  # rows that fit the constants
_TREE_ROWS = 6000  # and the trees
_PRIOR_SHARPENING = 3.0  # priors of constants are narrower than what single devices scatter by
_Z90 = 1.645


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


def train(table: Measurements, *, seed: int = 0, residual: bool = True, prior_sharpening: float | None = None) -> FamilyModel:
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


def calibrated(model: FamilyModel, held_out: Mapping[str, tuple[str, Floats, Rows]]) -> FamilyModel:
    """The model with spreads from errors on held-out devices: device → (status, log errors, rows).

    Rows of a device share its bias, so a device is one observation: the spread of a (status, regime) is that of the
    worst device, and of all regimes together where a device has few rows. A status that no held-out device had takes
    that of the next further one, narrower if nearer.
    """
    family = FAMILY_MODELS[model.family]
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for status, errors, rows in held_out.values():
        regime = regime_of(family, rows)
        for number, name in enumerate(REGIMES):
            chosen = errors[regime == number] if (regime == number).sum() >= 30 else errors
            bias = float(np.median(chosen))
            total = float(np.quantile(np.abs(chosen), 0.9)) / _Z90
            shared = min(abs(bias), 0.95 * total)
            old = found.setdefault(status, {}).get(name, (0.0, 0.0))
            if total > np.hypot(*old):
                found[status][name] = (shared, float(np.sqrt(total**2 - shared**2)))
    return replace(model, spreads=_completed(found, model.spreads))


def _completed(found: Mapping[str, Mapping[str, tuple[float, float]]], prior: Spreads) -> Spreads:
    """Every status: measured ones floored at a share of the prior, since few devices were seen."""
    complete: dict[str, dict[str, tuple[float, float]]] = {}
    for status, least in (("seen", 0.5), ("sibling", 0.6), ("new", 0.5), ("far", 1.0)):
        source = found.get(status)
        if source is None and status == "far" and "new" in found:
            source = {name: (1.5 * shared, 1.2 * own) for name, (shared, own) in found["new"].items()}
        if source is None:
            complete[status] = dict(prior[status])
            continue
        complete[status] = {
            name: (max(source[name][0], least * prior[status][name][0]), max(source[name][1], least * prior[status][name][1]))
            for name in REGIMES
        }
    return complete


def has_sibling(name: str, sheets: Mapping[str, Sheet]) -> bool:
    """Whether another device of these lies near."""
    return any(distance(sheets[name], sheet) < SIBLING for other, sheet in sheets.items() if other != name)
