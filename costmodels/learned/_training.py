"""Learning a family from measurements: constants, trees, net, and the blend that does best on held-out devices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from simpart.costmodels.learned._blend import PARTS, Blend, Judged, Score, choose, scores
from simpart.costmodels.learned._boost import Boost, fit_boost
from simpart.costmodels.learned._calibration import HeldOut, calibrated
from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Family, Rows, op_codes, regime_of
from simpart.costmodels.learned._fitting import fit_constants
from simpart.costmodels.learned._measurements import Measurements, row_codes
from simpart.costmodels.learned._model import DESCRIPTORS, SIBLING, FamilyModel, columns_of, one_kind, software_keys
from simpart.costmodels.learned._net import fit_net
from simpart.costmodels.learned._sheet import Sheet, distance, sheet_of, stack_sheets
from simpart.errors import UserError
from simpart.hardware import Device, load_device

__all__ = [
    "errors_on", "fit_family", "rows_of", "sheets_for", "spoken_of", "train", "trainable", "without_slow",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Columns = np.ndarray[tuple[int, int], np.dtype[np.float32]]

_LEAST_ROWS = 30
_PER_DEVICE = 350  # rows that fit the constants
_TREE_ROWS = 5000  # and the trees
_PRIOR_SHARPENING = 3.0  # priors of constants are narrower than what devices scatter by,
_ONE_KIND = 4.0  # and so many times narrower where one kind of device was measured: it says little of another
_Z90 = 1.645
_QUICK = {"trees": 150, "depth": 6}
_FULL = {"trees": 300, "depth": 6}
_MEMORY = {"trees": 150, "depth": 6}  # kernels that move memory need fewer
_ALONE_TREES, _ALONE_ROWS = 250, 500
_LEAST_TREES, _ROWS_PER_TREE = 40, 10
_JUDGED_ROWS = 6000  # rows of a device that its errors are counted on
_SOFTWARE_ROWS = 20
_ONE_DEVICE = 0.5
_FALLBACK = 2.0
_NO_SIZES = frozenset({"cached"})  # dims that the core tells, so that other values are no other sizes
_FASTEST_STEPS = 2  # kernels are not limited by arithmetic alone, so that one step falls short
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
    table: Measurements,
    *,
    seed: int = 0,
    residual: bool = True,
    quick: bool = False,
    net: bool = False,
    prior_sharpening: float | None = None,
) -> FamilyModel:
    """Fit constants, then trees, and a `net` if wanted, on what they leave. `table` has one row per shape and device,
    cleaned. `quick` grows fewer trees, enough to choose and to calibrate by.

    Raises UserError when there are fewer than 30 rows.
    """
    family = FAMILY_MODELS[table.family]
    if len(table) < _LEAST_ROWS:
        raise UserError(f"family {table.family}: at least {_LEAST_ROWS} rows are needed to fit it, got {len(table)}")
    rng = np.random.default_rng(seed)
    sheets = sheets_for(table.devices(), family)
    core = table if family.core_rows is None else table.at(family.core_rows(table.dims))
    few = core.at(_sample(core, _PER_DEVICE, rng))
    rows, target = rows_of(few, sheets), np.log(few.latency_s)
    bound = np.log(family.bound_s(rows))
    values = np.array(list(family.constants.values()))
    sharpening = _PRIOR_SHARPENING * (_ONE_KIND if one_kind(sheets) else 1.0)
    centre, spread = np.log(values[:, 0]), values[:, 1] / (prior_sharpening or sharpening)
    weights = _by_kind(few, sheets) if family.by_kind else None
    constants = tuple(
        fit_constants(
            lambda c, v=variant: np.maximum(np.log(v(c, rows)), bound),  # type: ignore[misc]
            target,
            centre,
            spread,
            weights=weights,
        )
        for variant in family.variants
    )
    model = FamilyModel(
        family=family.name,
        constants=constants,
        boost=None,
        sheets=sheets,
        domain={name: (float(v.min()), float(v.max())) for name, v in table.dims.items() if name not in _NO_SIZES},
        ops=tuple(sorted(set(table.op.tolist()))),
        facts={"rows": len(table), "devices": table.devices(), "fingerprint": fingerprint(table)},
    )
    if family.by_fastest:
        model = replace(model, constants=_as_fastest(model, few, rows))
    if not residual:
        return model
    many = table.at(_sample(table, _TREE_ROWS, rng))
    rows = rows_of(many, sheets)
    analytic = model.analytic(rows)
    counts = {name: int((many.device == name).sum()) for name in many.devices()}
    weights = np.array([1.0 / counts[name] for name in many.device.tolist()])
    columns = columns_of(family, rows, analytic, rows.sheet)
    size = _QUICK if quick else _MEMORY if family.name.startswith("memory") else _FULL
    trees = min(size["trees"], max(_LEAST_TREES, len(many) // _ROWS_PER_TREE))
    left = np.log(many.latency_s) - analytic
    boost = fit_boost(columns, left, weights, trees=trees, depth=size["depth"], rate=0.15, seed=seed)
    return replace(
        model,
        boost=boost,
        net=fit_net(columns[:-DESCRIPTORS], left, weights, seed=seed) if net else None,
        alone={} if quick else _alone(many, columns, left - boost.predict(columns), seed),
    )


def _by_kind(table: Measurements, sheets: Mapping[str, Sheet]) -> Floats:
    """A weight per row: devices that are siblings count together as one, since they say the same about another."""
    alike = {name: sum(distance(sheet, other) < SIBLING for other in sheets.values()) for name, sheet in sheets.items()}
    return np.array([1.0 / alike[name] for name in table.device.tolist()])


def _as_fastest(model: FamilyModel, table: Measurements, rows: Rows) -> tuple[Floats, ...]:
    """Constants with the compute share of the device that is fastest for its data sheet, by the median error of its
    products that arithmetic limits."""
    family, constants = FAMILY_MODELS[model.family], model.constants
    place, busy = list(family.constants).index("compute_share"), regime_of(family, rows) == REGIMES.index("compute")
    for _ in range(_FASTEST_STEPS):
        error = np.log(table.latency_s) - replace(model, constants=constants).analytic(rows)
        parts = [error[busy & (table.device == name)] for name in table.devices()]
        least = min((float(np.median(part)) for part in parts if len(part) >= 30), default=0.0)
        constants = tuple(np.where(np.arange(c.size) == place, c - least, c) for c in constants)
    return constants


def _alone(table: Measurements, columns: Columns, left: Floats, seed: int) -> dict[str, Boost]:
    """Trees of single devices, of those with rows enough, on what the common ones leave."""
    found = {}
    most = _ALONE_TREES if not table.family.startswith("memory") else _MEMORY["trees"] // 2
    for name in table.devices():
        mine = table.device == name
        if mine.sum() >= _ALONE_ROWS:
            trees = min(most, int(mine.sum()) // _ROWS_PER_TREE)
            part, ones = np.ascontiguousarray(columns[:, mine]), np.ones(int(mine.sum()))
            found[name] = fit_boost(part, left[mine], ones, trees=trees, depth=6, rate=0.1, share=0.5, seed=seed)
    return found


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


Progress = Callable[[str], None]


def without_slow(table: Measurements) -> Measurements:
    """Without devices whose smallest kernel takes SLOW_FLOOR_S: their software is of another class."""
    slow = [name for name in table.devices() if (load_device(name).launch_floor_s or 0.0) > SLOW_FLOOR_S]
    return table.at(~np.isin(table.device.astype(str), slow))


def spoken_of(table: Measurements) -> Measurements:
    """Rows that the models of a family speak of: all, but of attention those of Triton kernels. Frameworks fall back on
    them where nothing else runs; some take ten times as long as their neighbours, in ways no shape tells."""
    return table.at(~_of_triton(table)) if table.family.startswith("attention") else table


def _without_fallbacks(table: Measurements) -> Measurements:
    """Of attention without rows that take more than _FALLBACK times the fastest software on that shape and device: a
    framework without a kernel for it (head dim 72 on B200) says nothing about how sure a kernel's time is."""
    if not table.family.startswith("attention"):
        return table
    shape = row_codes([table.device, table.op, table.dtype, *table.dims.values()])
    fastest = np.full(int(shape.max(initial=0)) + 1, np.inf)
    np.minimum.at(fastest, shape, table.latency_s)
    return table.at(table.latency_s <= _FALLBACK * fastest[shape])


def _of_triton(table: Measurements) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array(["triton" in name for name in table.software.tolist()], dtype=bool)


def trainable(table: Measurements) -> Measurements:
    """What the models learn: one row per shape and device, of attention and experts the fastest software that is not
    Triton's (some of its rows hold more than one kernel), else the median."""
    if table.family.startswith(("attention", "moe")):
        return table.at(~_of_triton(table)).fastest_per_shape()
    return table.median_per_shape()


def errors_on(model: FamilyModel, test: Measurements, device: str) -> HeldOut:
    """Errors of a model on rows of one device, software taken into account."""
    family = FAMILY_MODELS[model.family]
    rows = Rows(op=op_codes(test.op), dims=test.dims, sheet=sheets_for([device], family)[device])
    status = model.status(device, rows.sheet)
    return HeldOut(
        status=status,
        truth=np.log(test.latency_s) - model.software_offset(test.software, regime_of(family, rows)),
        log_seconds=model.predict(rows, device).log_seconds,
        dims=rows.dims,
        parts=model.parts(rows, model.analytic(rows), PARTS) if status == "new" else None,
    )


def fit_family(table: Measurements, *, seed: int = 0, progress: Progress = lambda text: None) -> FamilyModel:
    """Train on cleaned rows; blend and spreads from leaving out each device, and a fifth of the shapes, in turn.

    Everything that is chosen is chosen within `table`: to judge it, hold a device out of the table first.
    """
    table = spoken_of(without_slow(table))
    learn, few = trainable(table), _thinned(_without_fallbacks(table), _JUDGED_ROWS, seed)
    devices, held_out = learn.devices(), {}
    new: dict[str, list[HeldOut]] = {}
    if len(devices) >= 3:
        for kind in _left_out(sheets_for(devices, FAMILY_MODELS[table.family])):
            rest = learn.at(~_of(learn, kind))
            if len(rest) < _LEAST_ROWS:
                continue
            progress(f"{table.family}: without {', '.join(kind)}")
            model = train(rest, seed=seed, quick=True, net=True)
            model = replace(model, offsets=software_offsets(model, few.at(~_of(few, kind))))
            errors = {name: errors_on(model, few.at(few.device == name), name) for name in kind}
            held_out.update(errors if len(kind) == 1 else {})
            new[", ".join(kind)] = [*errors.values()]
    found, beside = (_scores(FAMILY_MODELS[table.family], new, core=core) for core in (True, False))
    blends = [choose(given, Blend()) if given else Blend() for given in (found, beside)]
    progress(f"{table.family}: {len(learn)} shapes of {len(devices)} devices")
    model = train(learn, seed=seed, net=any(blend.net for blend in blends))
    model = replace(model, blend=blends[0], beside=blends[1], offsets=software_offsets(model, few))
    shapes = row_codes([*learn.dims.values()])
    fold = np.random.default_rng(seed).permutation(int(shapes.max()) + 1)[shapes] % 5 == 0
    known = train(learn.at(~fold), seed=seed)
    for name in devices:
        test = learn.at(fold & (learn.device == name))
        if len(test) >= 30:
            held_out[f"{name} (unseen shapes)"] = errors_on(known, test, name)
    scatter = software_scatter(model, few)
    facts = {**model.facts, "rows": len(table), "fingerprint": fingerprint(table)}
    facts["rows_by_device"] = {name: int((table.device == name).sum()) for name in table.devices()}
    facts["blends"], facts["blends_beside"] = [s.plain() for s in found], [s.plain() for s in beside]
    return calibrated(replace(model, facts=facts), held_out, scatter)


def _scores(family: Family, held_out: Mapping[str, list[HeldOut]], *, core: bool) -> list[Score]:
    """Of every blend, on new devices held out by kind: of rows as the constants are fitted on, or of the others. Empty
    where there are none."""
    judged: dict[str, list[Judged]] = {}
    for kind, held in held_out.items():
        for one in held:
            mask = np.ones(len(one.truth), dtype=bool) if family.core_rows is None else family.core_rows(one.dims)
            mask = mask if core else ~mask
            if one.parts is not None and mask.any():
                judged.setdefault(kind, []).append((one.parts.at(mask), one.truth[mask]))
    return scores(judged, Blend()) if judged else []


def _left_out(sheets: Mapping[str, Sheet]) -> list[list[str]]:
    """What is held out in turn: every device; and siblings together, where devices of more than one kind remain: with
    one of them trained on the other is no new device."""
    kinds: list[list[str]] = []
    for name, sheet in sheets.items():
        near = [kind for kind in kinds if any(distance(sheets[other], sheet) < SIBLING for other in kind)]
        kinds = [kind for kind in kinds if kind not in near] + [[*(n for kind in near for n in kind), name]]
    found = [[name] for name in sheets]
    for kind in kinds:
        rest = {name: sheet for name, sheet in sheets.items() if name not in kind}
        if len(kind) > 1 and rest and not one_kind(rest):
            found.append(kind)
    return found


def _of(table: Measurements, devices: list[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.isin(table.device.astype(str), devices)


def software_offsets(model: FamilyModel, table: Measurements) -> dict[str, dict[str, float]]:
    """Per software and regime the median log error of trained devices, each device counting once. Where devices count
    by kind, what one alone showed counts half."""
    seen: dict[str, dict[str, list[float]]] = {}
    for software, regime, error in _errors_by_software(model, table):
        for key in software_keys(software)[: 1 if "triton" in software else 2]:
            for number, name in enumerate(REGIMES):
                chosen = error[regime == number]
                if len(chosen) >= _SOFTWARE_ROWS:
                    seen.setdefault(key, {}).setdefault(name, []).append(float(np.median(chosen)))
    found, by_kind = {}, FAMILY_MODELS[model.family].by_kind
    for key, regimes in seen.items():
        share = _ONE_DEVICE if by_kind and max(map(len, regimes.values())) == 1 else 1.0
        typical = float(np.median([v for values in regimes.values() for v in values]))
        found[key] = {n: share * (float(np.median(regimes[n])) if n in regimes else typical) for n in REGIMES}
    return found


def software_scatter(model: FamilyModel, table: Measurements) -> float:
    """Log-sd of rows about their software's offset on trained devices, by the 90 % quantile."""
    left = []
    for software, regime, error in _errors_by_software(model, table):
        left.append(error - model.software_offset(np.full(len(error), software, dtype=object), regime))
    return float(np.quantile(np.abs(np.concatenate(left)), 0.9)) / _Z90


def _errors_by_software(model: FamilyModel, table: Measurements) -> Iterator[tuple[str, Ints, Floats]]:
    """(software, regimes, log of measured over predicted) of each device and software."""
    family = FAMILY_MODELS[model.family]
    for device in table.devices():
        rows = table.at(table.device == device)
        asked = Rows(op=op_codes(rows.op), dims=rows.dims, sheet=model.sheets[device])
        error, regime = np.log(rows.latency_s) - model.predict(asked, device).log_seconds, regime_of(family, asked)
        for software in dict.fromkeys(rows.software.tolist()):
            mask = rows.software == software
            yield software, regime[mask], error[mask]


def _thinned(table: Measurements, most: int, seed: int) -> Measurements:
    return table.at(_sample(table, most, np.random.default_rng(seed + 1)))
