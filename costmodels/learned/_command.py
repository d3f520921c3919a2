"""What `simpart evaluate` and `simpart fit` ask of the learned compute models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpart.costmodels.learned._adapters import device_named, import_frame, read_measurements
from simpart.costmodels.learned._artifact import SHIPPED, load_models, save_models
from simpart.costmodels.learned._evaluating import SPLITS, judge_import
from simpart.costmodels.learned._families import FAMILY_MODELS
from simpart.costmodels.learned._fittable import KERNELS_FROM, fittable, never_fitted
from simpart.costmodels.learned._measurements import Imported, Measurements, concatenate
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._package import (
    KERNELS,
    Package,
    chosen,
    find_package,
    nearest_tables,
    read_kernels,
)
from simpart.costmodels.learned._records import overheads_of_trace, read_profiles, read_trace
from simpart.costmodels.learned._sheet import assumptions
from simpart.costmodels.learned._training import fit_family
from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.evaluation import Judged
from simpart.hardware import load_device

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SHIPPED", "evaluate", "evaluate_package", "fit"]

Progress = Callable[[str], None]
_FIT_FROM = (
    "op_gemm_aic", "op_attention_fwd_aic", "op_attention_encoder_aic", "op_moe_aic",
    "op_neusight", "op_neusight_conv", "op_vidur_mlp",
)  # fmt: skip
_HELD_BACK = {"op_vidur_mlp": ("gemm16",)}  # another source of the same products: kept to judge by


def evaluate(
    frame: pd.DataFrame, name: str, split: str, floors: bool, models: str | None, progress: Progress
) -> tuple[Judged, Mapping[str, Any]]:
    """Rows of an operator data set, judged, and notes for the reader."""
    return _judged(import_frame(frame, name), split, floors, models, progress)


def evaluate_package(
    package: Package, contents: Sequence[str], devices: Sequence[str], split: str, floors: bool, models: str | None,
    progress: Progress,
) -> tuple[Judged, Mapping[str, Any]]:  # fmt: skip
    """Rows of the kernels' tables in aiconfigurator-core, judged. Baselines know only devices that models may learn
    from: the nearest of them that were measured."""
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    tables = chosen(package, contents or KERNELS, devices)
    found = read_kernels(package, tables, progress)
    reference: Sequence[Measurements] = ()
    if split == "shipped":
        beside = nearest_tables(package, tables)
        inside = set(beside) <= set(tables)
        near = [device_named(table.system) or "" for table in beside]
        known = found.tables if inside else read_kernels(package, beside, progress).tables
        reference = [t.at(np.isin(t.device, near)) for t in known]
    judged, more = _judged(found, split, floors, models, progress, reference)
    notes = [
        f"{package.reused} tables of this package stand for another version's and are read there",
        "tables that no model describes are counted in not_read",
    ]
    return judged, {**more, "not_read": dict(package.not_read), "notes": [*more["notes"], *notes]}


def _judged(
    found: Imported, split: str, floors: bool, models: str | None, progress: Progress,
    reference: Sequence[Measurements] = (),
) -> tuple[Judged, Mapping[str, Any]]:  # fmt: skip
    known = load_models(Path(models) if models else SHIPPED) if split == "shipped" else {}
    judged = judge_import(found, known, split, floors=floors, progress=progress, reference=reference)
    trained = sorted({n for m in known.values() for n in m.sheets} & set(judged.groups["device"].tolist()))
    notes = []
    if split == "random":
        notes.append("a random split shows how well shapes are interpolated, not how a new device is predicted")
    if trained:
        notes.append(
            f"the models were trained on {', '.join(trained)}: their errors here say nothing about a new device; "
            f"use --split leave-one-device-out"
        )
    devices = sorted(set(judged.groups["device"].tolist()))
    notes += filter(None, (assumptions(load_device(name)) for name in devices))
    return judged, {"data_kind": found.kind, "trained_devices": trained, "notes": notes}


def fit(
    sources: Sequence[str], output: Path | None, only: Sequence[str], seed: int, progress: Progress
) -> tuple[dict[str, FamilyModel], dict[str, Any]]:
    """Learn every family that the files hold enough of, and write the models to `output`, if any. `sources` are files,
    or folders with the files of `_FIT_FROM`, or the package aiconfigurator-core. Raises UserError when nothing can be
    learned."""
    for name in only:
        if name not in FAMILY_MODELS:
            raise UnknownNameError("family", name, sorted(FAMILY_MODELS))
    tables: dict[str, list[Measurements]] = {}
    files: dict[str, Any] = {}
    for path in _files(sources):
        progress(f"reading {path.name}")
        package = find_package(str(path))
        found, withheld = _read(path) if package is None else _read_package(package, progress)
        files[path.name] = {"rows": found.rows, "left_out": dict(found.refused)}
        if withheld:
            files[path.name]["never_fitted"] = withheld
        if found.kind == "kineto" and (launching := overheads_of_trace(path)):
            files[path.name]["overheads"] = launching
        for table in found.tables:
            if table.family not in _HELD_BACK.get(path.stem, ()):
                tables.setdefault(table.family, []).append(table)
    models = {}
    for family in sorted(tables):
        table = concatenate(tables[family])
        if (only and family not in only) or len(table) < 30:
            continue
        models[family] = fit_family(table, seed=seed, progress=progress)
    if not models and any("overheads" in file for file in files.values()):
        return {}, files
    if not models:
        raise UserError(_nothing_to_fit(tables, files, only))
    if output is not None:
        if output == SHIPPED:
            _check_complete(models)
        save_models(output, models)
    return models, files


def _nothing_to_fit(tables: Mapping[str, Sequence[Measurements]], files: Mapping[str, Any], only: Sequence[str]) -> str:
    found = ", ".join(f"{sum(map(len, tables[name]))} of {name}" for name in sorted(tables)) or "none"
    left_out = sum((Counter(file["left_out"]) for file in files.values()), Counter[str]())
    reasons = "; left out: " + ", ".join(f"{n} {reason}" for reason, n in left_out.most_common()) if left_out else ""
    wanted = f"of {', '.join(only)} " if only else ""
    return f"nothing to fit: 30 usable rows {wanted}are needed, found {found}{reasons}"


def _check_complete(models: Mapping[str, FamilyModel]) -> None:
    """Raise UserError when shipping these would take families away."""
    try:
        missing = sorted(set(load_models(SHIPPED)) - set(models))
    except FormatError:
        return  # missing, or of an older version: nothing to keep
    if missing:
        raise UserError(
            f"these files hold too little of {', '.join(missing)}, which simpart ships; use -o instead of --ship"
        )


def _read(path: Path) -> tuple[Imported, dict[str, int]]:
    """A table, a profile store or a trace, told by the ending of its name; and what no model may learn of it."""
    if path.suffix == ".jsonl":
        return read_profiles(path), {}
    if path.suffix in (".json", ".gz") and not path.name.endswith(".csv.gz"):
        return read_trace(path), {}
    return _learnable(read_measurements(path))


def _read_package(package: Package, progress: Progress) -> tuple[Imported, dict[str, int]]:
    """Kernels of the devices that models may learn from; of the others only how many rows there are."""
    withheld = Counter[str]()
    allowed = []
    for table in chosen(package, KERNELS):
        device = device_named(table.system) or table.system
        if device in KERNELS_FROM:
            allowed.append(table)
        else:
            withheld[device] += table.rows
    found, more = _learnable(read_kernels(package, allowed, progress))
    return found, dict((withheld + Counter(more)).most_common())


def _learnable(found: Imported) -> tuple[Imported, dict[str, int]]:
    """Without the rows that are only there to judge by, and how many of which device those are."""
    withheld = Counter[str]()
    kept = []
    for table in found.tables:
        withheld.update(never_fitted(table.source, table.device, KERNELS_FROM))
        rows = fittable(table.source, table.device, KERNELS_FROM)
        if rows.any():
            kept.append(table if rows.all() else table.at(rows))
    return replace(found, tables=tuple(kept)), dict(withheld)


def _files(sources: Sequence[str]) -> list[Path]:
    found = []
    for source in map(Path, sources):
        if find_package(str(source)) is not None:
            found.append(source)
        elif source.is_dir():
            inside = [p for name in _FIT_FROM for p in sorted(source.glob(f"**/{name}.parquet"))]
            if not inside:
                raise FormatError(f"{source} holds none of {', '.join(_FIT_FROM)} (.parquet); name files")
            found += inside
        elif not source.exists():
            raise FormatError(f"{source} is neither a file nor a folder; name tables, traces or profile stores")
        else:
            found.append(source)
    return found
