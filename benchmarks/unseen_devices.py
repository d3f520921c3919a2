"""Accuracy of the shipped models on devices that nobody fitted anything on, written as docs/accuracy-unseen.md.

    python benchmarks/unseen_devices.py aiconfigurator-core -o docs/accuracy-unseen.md
    python benchmarks/unseen_devices.py aiconfigurator-core --counts

The devices are those in the tables of the Python package aiconfigurator-core (installed, or a folder that its wheel was
unpacked into) from which no model may learn, `costmodels/learned/_fittable.py`. They are a test set: run this when the
models are done, and never choose a constant, a feature or a rule by what it says. `--counts` says how many rows there
are and which rules leave out how many, and predicts nothing; `--device` takes any device of the package, to try the
script on one that the models know. Prints JSON: machine, models, seconds, and every figure of the report.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpart.costmodels.learned._adapters import device_named
from simpart.costmodels.learned._artifact import SHIPPED, load_models
from simpart.costmodels.learned._evaluating import judge_table
from simpart.costmodels.learned._families import REGIMES
from simpart.costmodels.learned._fittable import COLLECTIVES_FROM, KERNELS_FROM
from simpart.costmodels.learned._measurements import Measurements, concatenate
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._package import (
    COLLECTIVES,
    KERNELS,
    Package,
    chosen,
    find_package,
    nearest_tables,
    read_kernels,
)
from simpart.costmodels.learned._training import trainable
from simpart.costmodels.learned_comm._artifact import SHIPPED as SHIPPED_COMMUNICATION
from simpart.costmodels.learned_comm._evaluating import clean, evaluate_package
from simpart.costmodels.learned_comm._packaged import read_collectives
from simpart.costmodels.learned_comm._records import read_records
from simpart.errors import UserError
from simpart.evaluation import Judged, summary
from simpart.files import check_place, write_atomically
from simpart.hardware import load_device

START = time.monotonic()
LEAST_TOKENS = 64
INTRODUCTION = """# Accuracy on devices that no model has seen

Written by `python benchmarks/unseen_devices.py aiconfigurator-core -o docs/accuracy-unseen.md`, first when the models
were done: a test set. Nothing in simpart (constants, trees, spreads, features, cleaning rules, the fields of these
devices' files) was fitted to these measurements or chosen by their errors; `simpart fit` and every split of
`simpart evaluate` leave their rows out (`costmodels/learned/_fittable.py`). Device files come from data sheets alone.
If models change after this page was read, it is a test set no longer, and the page has to say so: for kernels it still
is one; for collectives see there.

Measurements: the tables inside {source} (Apache-2.0), read by
`costmodels/learned/_package.py`, cleaned by the rules of `_rules.py`. They are of the same shapes, frameworks and
versions as much of what the models were trained on, so these figures are about new devices, not about new software or
other shapes. GB200, B300 and GB300 are close kin of the trained B200.

Models: compute.npz {compute}, communication.json {communication} (first digits of their SHA-256).

Errors are |predicted / measured - 1| in percent, bias is the median of predicted / measured - 1, rank is Spearman's.
**As models learn**: one row per shape, the median over software, of attention and experts the fastest that is not
Triton's; as in [accuracy.md](accuracy.md). **Every measurement**: each software apart, predicted with the offset it
has on trained devices; "in 90 %" is the share inside the nominal 90 % interval, "±" its median half-width. Baselines:
"roofline"; "one number", the roofline times what the nearest trained devices take beyond theirs; "ratio", the same
shape as measured on the nearest trained device, scaled by the rooflines (only where it was measured there).
"""
COLLECTIVES_HEAD = """
## Collectives

Inside one NVLink domain or host, each library apart. α–β is 3.4 us (PCI Express: 5.7 us) a step and the link's full
rate; "ratio" the same collective on the trained device with the nearest links, scaled by their rates. The models of
kernels know H200, that of collectives was never shown any of it.

**One rule was added after this table was first read**: a device whose NVLink has the rate of a measured one's is told
by that one (H200 by H100; B300, GB200 and GB300 by B200), as it had been for kernels. Nothing was fitted, but the table
below is no test of that rule. As first read, with every device told by the average system: B300 13.3 % (95.7 % in the
interval), GB200 17.3 (91.6), GB300 20.0 (88.7), H200 25.5 (95.4). RTX PRO 6000 is untouched by it.

| device | collective | rows | MAPE | median | bias | rank | in 90 % | ± | α–β | ratio |
|---|---|---|---|---|---|---|---|---|---|---|
"""
SHAPES_HEAD = """
| family | as | shapes | MAPE | median | bias | launch / memory / compute | rank | roofline | one number | ratio |
|---|---|---|---|---|---|---|---|---|---|---|
"""
ROWS_HEAD = """
| family | measurements | MAPE | median | bias | in 90 % | ± | roofline | ratio |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Judge, write the report, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="aiconfigurator-core, or the folder of its wheel unpacked")
    parser.add_argument("--device", action="append", help="instead of the devices that models may not learn from")
    parser.add_argument("--counts", action="store_true", help="only how many rows there are, by rule; predict nothing")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    package = find_package(options.package)
    if package is None:
        raise SystemExit(f"{options.package} is neither aiconfigurator-core nor a folder with its tables")
    if options.output:
        check_place(options.output)
    named = [load_device(name).name for name in options.device or ()]
    kernels = named or unseen(package, KERNELS, KERNELS_FROM)
    collectives = named or unseen(package, (COLLECTIVES,), COLLECTIVES_FROM)
    if options.counts:
        print(json.dumps(counts(package, kernels, collectives), indent=1))
        return
    digests = {"compute": digest(SHIPPED), "communication": digest(SHIPPED_COMMUNICATION)}
    models = load_models(SHIPPED)
    found: dict[str, Any] = {"kernels": {}, "collectives": {}}
    text = INTRODUCTION.format(source=package.source, **digests)
    for device in kernels:
        figures = judged_kernels(package, device, models)
        found["kernels"][device] = figures
        text += kernels_text(device, figures)
        say(f"{device} judged")
    text += COLLECTIVES_HEAD
    notes: list[str] = []
    for device in collectives:
        figures = judged_collectives(package, device)
        found["collectives"][device] = figures
        text += "".join(f"| {device} | {name} | {collective_cells(row)} |\n" for name, row in figures["by"].items())
        if figures["left_out"]:
            notes.append(f"{device}: left out by rule: {rules(figures['left_out'])}")
        say(f"collectives of {device} judged")
    text += "".join(f"\n{note}.\n" for note in notes)
    if options.output:
        write_atomically(options.output, text)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
               "python": platform.python_version()}  # fmt: skip
    print(json.dumps({
        "benchmark": "unseen_devices", "machine": machine, "source": package.source, "models": digests,
        "seconds": time.monotonic() - START, **found,
    }, indent=1))  # fmt: skip


def unseen(package: Package, contents: Sequence[str], allowed: frozenset[str]) -> list[str]:
    """Devices with tables of these contents that models may not learn from."""
    names = [device_named(table.system) for table in chosen(package, contents)]
    return [name for name in dict.fromkeys(names) if name is not None and name not in allowed]


def counts(package: Package, kernels: Sequence[str], collectives: Sequence[str]) -> dict[str, Any]:
    """Rows by family and by the rule that left them out; no prediction is made."""
    found: dict[str, Any] = {"source": package.source, "kernels": {}, "collectives": {}, "not_read": package.not_read}
    for device in kernels:
        say(f"counting {device}")
        read = read_kernels(package, chosen(package, KERNELS, [device]))
        covered: dict[str, int] = {}
        for table in read.tables:
            covered[table.family] = covered.get(table.family, 0) + len(table)
        found["kernels"][device] = {"rows": read.rows, "covered": covered, "left_out": dict(read.refused)}
    for device in collectives:
        frame = read_collectives(package, chosen(package, (COLLECTIVES,), [device]))
        records, refused = clean(read_records(frame, package.source))
        found["collectives"][device] = {"rows": len(frame), "covered": len(records), "left_out": refused}
    return found


def judged_kernels(package: Package, device: str, models: Mapping[str, FamilyModel]) -> dict[str, Any]:
    """Figures of a device by family: as models learn, and on every measurement."""
    tables = chosen(package, KERNELS, [device])
    read = read_kernels(package, tables, say)
    near = read_kernels(package, nearest_tables(package, tables), say).tables
    found: dict[str, Any] = {"rows": read.rows, "left_out": dict(read.refused), "families": {}}
    for family in dict.fromkeys(table.family for table in read.tables):
        mine = concatenate([table for table in read.tables if table.family == family])
        known = [table for table in near if table.family == family]
        beside = concatenate(known) if known else mine.at(np.zeros(0, dtype=np.int64))
        for name, part in parts(family, mine):
            say(f"judging {len(part)} rows of {name} on {device}")
            shapes = trainable(part)
            unnamed = replace(shapes, software=np.full(len(shapes), "", dtype=object))
            as_learned = judge_table(unnamed, models, "shipped", reference=trainable(beside))
            every = judge_table(part, models, "shipped", reference=beside)
            statuses = sorted(set(as_learned.groups["status"].tolist()) - {""})
            found["families"][name] = {
                "as": ", ".join(statuses),
                "shapes": summary(as_learned, by=("limit",)),
                "rows": summary(every, by=("software",)),
            }
    return found


def parts(family: str, table: Measurements) -> Iterator[tuple[str, Measurements]]:
    """A family whole; of attention also without the shortest sequences, as accuracy.md has it."""
    yield family, table
    if family.startswith("attention"):
        yield f"{family}, from {LEAST_TOKENS} tokens", table.at(table.dims["seq"] >= LEAST_TOKENS)


def judged_collectives(package: Package, device: str) -> dict[str, Any]:
    """Figures of a device by kind of collective."""
    try:
        judged, _ = evaluate_package(package, [device], "shipped", False, None, say)
    except UserError as error:
        return {"by": {}, "left_out": {str(error): 0}}
    whole = summary(judged, charge="alpha_beta", by=())
    by = {"all": whole}
    kinds: Any = judged.groups["family"]
    for kind in sorted(set(kinds.tolist())):
        by[kind] = summary(rows_of(judged, kinds == kind), charge="alpha_beta", by=("size_class",))
    return {"by": by, "left_out": dict(judged.refused)}


def rows_of(judged: Judged, mask: Any) -> Judged:
    return Judged(
        measured_s=judged.measured_s[mask],
        predicted_s=judged.predicted_s[mask],
        log_sd=judged.log_sd[mask],
        groups={name: values[mask] for name, values in judged.groups.items()},
        baselines={name: values[mask] for name, values in judged.baselines.items()},
    )


def kernels_text(device: str, figures: Mapping[str, Any]) -> str:
    left_out = rules(figures["left_out"]) or "none"
    text = f"\n## {device}\n\n{figures['rows']} rows; left out by rule: {left_out}.\n\nAs models learn:\n" + SHAPES_HEAD
    for name, row in figures["families"].items():
        found = row["shapes"]
        by = " / ".join(percent(found["by"]["limit"].get(limit, {}).get("mape")) for limit in REGIMES)
        base = [percent(found["baselines"][b]["mape"]) for b in ("roofline", "one_number", "ratio")]
        cells = [name, row["as"], str(found["covered"]), *errors(found), by, number(found["spearman"]), *base]
        text += "| " + " | ".join(cells) + " |\n"
    text += "\nEvery measurement:\n" + ROWS_HEAD
    for name, row in figures["families"].items():
        found = row["rows"]
        base = [percent(found["baselines"][b]["mape"]) for b in ("roofline", "ratio")]
        text += "| " + " | ".join([name, str(found["covered"]), *errors(found), *interval(found), *base]) + " |\n"
    return text


def collective_cells(found: Mapping[str, Any]) -> str:
    base = [percent(found["baselines"][b]["mape"]) for b in ("alpha_beta", "ratio")]
    cells = [str(found["covered"]), *errors(found), number(found["spearman"]), *interval(found), *base]
    return " | ".join(cells)


def rules(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {rule}" for rule, count in left_out.items())


def errors(found: Mapping[str, Any]) -> list[str]:
    return [percent(found[key]) for key in ("mape", "median", "bias")]


def interval(found: Mapping[str, Any]) -> list[str]:
    return [percent(found[key]) for key in ("interval_coverage_90", "interval_half_width_median")]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def say(text: str) -> None:
    print(f"{text}, {time.monotonic() - START:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
