"""`simpart evaluate`: accuracy against published measurements."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import click

from simpart.commands._console import print_document
from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.files import check_place, write_atomically

__all__ = ["DATA_SETS", "evaluate"]

DATA_SETS: tuple[tuple[str, frozenset[str], str], ...] = (
    ("collectives", frozenset({"num_gpus", "size_bytes"}), "simpart.costmodels.learned_comm:evaluate"),
    ("ops", frozenset(), "simpart.costmodels.learned._command:evaluate"),
)
"""(kind, columns that tell it, `module:function`); the function takes (frame, name, split, floors, models, progress)
and returns a Judged and more keys for the document. The last one says what is missing in an unknown file."""

_PACKAGE = "simpart.costmodels.learned._package"
_KERNELS, _COLLECTIVES = "simpart.costmodels.learned._command", "simpart.costmodels.learned_comm"
_DEVICE_COLUMNS = ("system", "device", "gpu")


@click.command()
@click.argument("dataset", type=click.Path())
@click.option(
    "--device", "devices", multiple=True, help="Judge only rows of this device, by any of its names; may be repeated."
)
@click.option(
    "--table",
    "contents",
    multiple=True,
    help="Of aiconfigurator-core only this: gemm, attention, encoder_attention, moe (all four without it; may be "
    "repeated), or collectives, which are judged alone.",
)
@click.option(
    "--split",
    default="shipped",
    show_default=True,
    help="shipped: the models that come with simpart. Else every constant is refitted on what the split leaves in: "
    "leave-one-device-out, leave-one-generation-out, leave-one-source-out, published, random; of collectives "
    "also leave-one-group-size-out, leave-one-cluster-out, unseen-sizes.",
)
@click.option("--models", type=click.Path(), help="Fitted models instead of the shipped ones.")
@click.option("--floors", is_flag=True, help="Held-out devices may use the measured floor in their device file.")
@click.option("--csv", "csv_path", type=click.Path(), help="Write every row with its prediction and baselines here.")
@click.option("--figures", type=click.Path(), help="Write figures (PNG) into this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def evaluate(
    dataset: str,
    devices: tuple[str, ...],
    contents: tuple[str, ...],
    split: str,
    models: str | None,
    floors: bool,
    csv_path: str | None,
    figures: str | None,
    as_json: bool,
) -> None:
    """How near predictions come to measurements of DATASET: error, bias, rank, intervals, baselines.

    DATASET is a table of kernels or of collectives (CSV, Parquet), a log of nccl-tests, or `aiconfigurator-core`: the
    tables inside that Python package where it is installed (simpart[aic]), or in the folder that its wheel was
    unpacked into, which may be named instead. Its code is not run. Models never learn from devices of it that the
    shipped ones were not made from, in no split.

    \b
    Examples: simpart evaluate op_gemm_aic.parquet --split leave-one-device-out
              simpart evaluate aiconfigurator-core --device h100_sxm --table gemm
              simpart evaluate aiconfigurator-core --table collectives
    """
    from simpart.evaluation import summary

    if csv_path:
        check_place(csv_path)
    progress = _Progress()
    tables: Any = importlib.import_module(_PACKAGE)
    package = tables.find_package(dataset)
    if package is not None:
        kind, judged, more = _judge_package(package, contents, devices, split, floors, models, progress)
    elif contents:
        raise UserError(f"--table is for {tables.NAME}, got {dataset}; leave it out")
    else:
        frame = _read(Path(dataset))
        if devices:
            frame = _only(frame, devices, dataset)
        columns = set(map(str, frame.columns))
        kind, function = next((name, where) for name, needed, where in DATA_SETS if needed <= columns)
        module, _, attribute = function.partition(":")
        judged, more = getattr(importlib.import_module(module), attribute)(
            frame, dataset, split, floors, models, progress
        )
    charge = "alpha_beta" if kind == "collectives" else "roofline"
    found = summary(judged, charge=charge, by=("source", "device", "family", "size_class", "limit", "status", "op"))
    document = {"dataset": dataset, "kind": kind, "split": split, "charge": charge, **found, **more}
    if csv_path:
        _write_rows(judged, Path(csv_path))
    if figures:
        _draw(judged, Path(figures))
    if as_json:
        print_document(document)
    else:
        _print(document)


def _judge_package(
    package: Any,
    contents: tuple[str, ...],
    devices: tuple[str, ...],
    split: str,
    floors: bool,
    models: str | None,
    progress: _Progress,
) -> tuple[str, Any, Any]:
    """Kind of data set, rows judged, and more keys for the document."""
    if "collectives" in contents and len(set(contents)) > 1:
        raise UserError(f"--table collectives is judged alone, got {', '.join(contents)}; run twice")
    if "collectives" in contents:
        module: Any = importlib.import_module(_COLLECTIVES)
        return "collectives", *module.evaluate_package(package, devices, split, floors, models, progress)
    module = importlib.import_module(_KERNELS)
    return "ops", *module.evaluate_package(package, contents, devices, split, floors, models, progress)


def _only(frame: Any, devices: tuple[str, ...], dataset: str) -> Any:
    """Rows of some devices, by any of their names."""
    named: Any = importlib.import_module("simpart.costmodels.learned._adapters").device_named
    column = next((name for name in _DEVICE_COLUMNS if name in frame.columns), None)
    if column is None:
        raise FormatError(f"{dataset} names no device; --device needs one of the columns {', '.join(_DEVICE_COLUMNS)}")
    spelled = frame[column].astype(str)
    there = {text: named(text) or text for text in spelled.unique()}
    wanted = {named(text) or text for text in devices}
    for name in sorted(wanted - set(there.values())):
        raise UnknownNameError(f"device of {dataset}", name, sorted(set(there.values())))
    return frame[spelled.map(there).isin(wanted)].reset_index(drop=True)


class _Progress:
    """Lines on stderr, at most two a second, once work takes longer than two."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self.start > 2 and now - self.last > 0.5:
            self.last = now
            print(f"{text}, {now - self.start:.0f} s", file=sys.stderr, flush=True)


def _read(path: Path) -> Any:
    if path.suffix in (".log", ".txt"):
        return importlib.import_module("simpart.costmodels.learned_comm._nccl_tests").read_log(path)
    return importlib.import_module("simpart.costmodels.learned._adapters").read_frame(path)


def _write_rows(judged: Any, path: Path) -> None:
    """Every row: groups, measured, predicted, log-sd, baselines."""
    import pandas as pd

    columns = {
        **judged.groups, "measured_s": judged.measured_s, "predicted_s": judged.predicted_s, "log_sd": judged.log_sd,
        **{f"baseline_{name}_s": values for name, values in judged.baselines.items()},
    }  # fmt: skip
    write_atomically(path, pd.DataFrame(columns).to_csv(index=False, float_format="%.6g"))


def _draw(judged: Any, folder: Path) -> None:
    """Predicted against measured, and error by device."""
    import matplotlib

    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; give another --figures") from error
    devices = sorted(set(judged.groups["device"].tolist()))
    off = judged.predicted_s / judged.measured_s - 1.0
    plot, axes = pyplot.subplots(figsize=(6, 6))
    for name in devices:
        mask = judged.groups["device"] == name
        axes.loglog(judged.measured_s[mask], judged.predicted_s[mask], ".", markersize=2, label=name)
    axes.set(xlabel="measured (s)", ylabel="predicted (s)")
    axes.axline((1e-5, 1e-5), (1e-4, 1e-4), color="black", linewidth=0.5)
    axes.legend(markerscale=4)
    plot.savefig(folder / "predicted_measured.png", dpi=120)
    pyplot.close(plot)
    plot, axes = pyplot.subplots(figsize=(7, 4))
    axes.boxplot([np.clip(off[(judged.groups["device"] == n) & np.isfinite(off)], -1, 2) for n in devices], sym="")
    axes.set_xticks(range(1, len(devices) + 1), devices, rotation=30, ha="right", fontsize=7)
    axes.set(ylabel="predicted / measured - 1")
    axes.axhline(0, color="black", linewidth=0.5)
    plot.tight_layout()
    plot.savefig(folder / "error_by_device.png", dpi=120)
    pyplot.close(plot)


_LEAST_WIDTH = 100  # columns of figures are worth more than a narrow terminal's lines


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from simpart.evaluation import SIZE_CLASSES

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{document['dataset']} ({document['kind']}), split {document['split']}", markup=False)
    console.print(f"{document['covered']} of {document['rows']} rows covered", markup=False)
    for reason, count in document["not_covered"].items():
        console.print(f"  {count} rows: {reason}", markup=False)
    if document.get("not_read"):
        rest = document["not_read"]
        kinds = ", ".join(f"{count} {name}" for name, count in list(rest.items())[:4])
        console.print(f"not read: {sum(rest.values())} rows that no model describes ({kinds}, ...)", markup=False)
    for note in document.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    table = Table(box=None, title="errors and half-widths in %", title_justify="left", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("rows", "MAPE", "median", "bias", "in 90 %", "±", *map(_baseline, document["baselines"])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("all", str(document["covered"]), *_cells(document), *_mapes(document["baselines"]))
    for group in ("family", "device", "size_class"):
        rows = document["by"].get(group, {})
        table.add_row()
        for name in sorted(rows, key=lambda name: SIZE_CLASSES.index(name) if name in SIZE_CLASSES else -1):
            row = rows[name]
            found = [*_cells(row), *map(_number, row["baselines"].values())]
            table.add_row(name, str(row["rows"]), *found)
    Console(highlight=False, width=max(console.width, _LEAST_WIDTH)).print(table)
    charge = _baseline(document["charge"])
    console.print(f"MAPE with uncovered rows charged at the error of {charge}: {_percent(document['mape_all'])}")


def _baseline(name: str) -> str:
    return {"one_number": "one no.", "alpha_beta": "α–β"}.get(name, name)


def _cells(row: dict[str, Any]) -> list[str]:
    keys = ("mape", "median", "bias", "interval_coverage_90", "interval_half_width_median")
    return [_number(row[key]) for key in keys]


def _mapes(baselines: dict[str, Any]) -> list[str]:
    return [_number(found["mape"]) for found in baselines.values()]


def _number(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
