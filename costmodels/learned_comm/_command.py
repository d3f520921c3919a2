"""What `simpart fit` asks of the learned communication model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simpart.costmodels.learned._adapters import read_frame
from simpart.costmodels.learned._fittable import COLLECTIVES_FROM, fittable, never_fitted
from simpart.costmodels.learned._package import COLLECTIVES, chosen, find_package
from simpart.costmodels.learned_comm._artifact import SHIPPED, load, save
from simpart.costmodels.learned_comm._calibrate import fit as fit_records
from simpart.costmodels.learned_comm._evaluating import clean
from simpart.costmodels.learned_comm._model import Fitted
from simpart.costmodels.learned_comm._nccl_tests import SUFFIXES, read_log
from simpart.costmodels.learned_comm._packaged import read_collectives
from simpart.costmodels.learned_comm._records import is_collectives, joined, read_records
from simpart.errors import FormatError, UserError

__all__ = ["SHIPPED", "collectives_in", "fit"]

_HEAD_BYTES = 4096


def collectives_in(sources: Sequence[str]) -> list[Path]:
    """Those of these files, or files named collectives.csv in these folders, that are tables of collectives, logs
    of nccl-tests among the files, and aiconfigurator-core where it is named."""
    found = []
    for source in map(Path, sources):
        if (package := find_package(str(source))) is not None:
            found += [source] * any(table.content == COLLECTIVES for table in package.tables)
            continue
        inside = sorted(source.glob("**/collectives*.csv")) if source.is_dir() else [source]
        found += [path for path in inside if path.suffix in SUFFIXES and path.is_file()]
        found += [
            path for path in inside if path.suffix == ".csv" and path.is_file() and is_collectives(_columns(path))
        ]
    return found


def _columns(path: Path) -> list[str]:
    with path.open("rb") as file:
        first = file.read(_HEAD_BYTES).decode("utf-8", errors="replace").splitlines()
    return [name.strip() for name in first[0].split(",")] if first else []


def fit(paths: Sequence[Path], output: Path | None, progress: Callable[[str], None]) -> tuple[Fitted, dict[str, Any]]:
    """Learn from all these files and write the model to `output`, if any. Raises UserError when no row is usable."""
    tables, files = [], {}
    for path in paths:
        progress(f"reading {path.name}")
        package = find_package(str(path))
        if package is not None:
            frame = read_collectives(package, chosen(package, (COLLECTIVES,)), progress)
        else:
            frame = read_log(path) if path.suffix in SUFFIXES else read_frame(path)
        records = read_records(frame, str(path))
        cleaned, refused = clean(records)
        name = path.name if package is None else f"{path.name}, {COLLECTIVES}"
        files[name] = {"rows": len(records), "left_out": refused}
        if withheld := never_fitted(cleaned.source, cleaned.device, COLLECTIVES_FROM):
            files[name]["never_fitted"] = withheld
            cleaned = cleaned.at(fittable(cleaned.source, cleaned.device, COLLECTIVES_FROM))
        if len(cleaned):
            tables.append(cleaned)
    if not tables:
        raise UserError(f"nothing to fit: no usable collective in {', '.join(map(str, paths))}")
    model = fit_records(joined(tables), progress)
    if output is not None:
        if output == SHIPPED:
            _check_complete(model)
        save(output, model)
    return model, files


def _check_complete(model: Fitted) -> None:
    """Raise UserError when shipping this one would take systems away."""
    try:
        missing = sorted(set(load(SHIPPED).systems) - set(model.systems))
    except FormatError:
        return  # missing, or of an older version: nothing to keep
    if missing:
        rest = f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
        raise UserError(
            f"these files lack {len(missing)} systems that simpart ships ({rest}); use -o instead of --ship"
        )
