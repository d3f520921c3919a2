"""Kernel times learned from this machine's own profiles, on models that were held out.

    simpart profile ops MODEL --processes 1 --store stores/one        (one store per model)
    python benchmarks/learned_local.py stores/* -o docs/accuracy-local.md

Each store in turn is left out whole; its kernels of shapes that no other store holds are predicted from the others.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simpart.cost import ComputeModel, SignatureTable
from simpart.costmodels import Calibrated, Roofline, Table
from simpart.costmodels.learned_local import Local, Unseen
from simpart.costmodels.learned_local._fit import fit_device
from simpart.files import write_atomically
from simpart.hardware import Device, load_cluster
from simpart.hardware_profiles._store import Profiles, Store

WORDS = """# Kernels of this machine, learned from its own profiles

Written by `python benchmarks/learned_local.py STORE… -o docs/accuracy-local.md`, on {machine}.
One store per model, made by `simpart profile ops`; each is left out whole, and its kernels whose shapes no other store
holds are predicted from the others. Shapes that were measured are looked up and stay as measured: for them the learned
model is the look-up. MAPE / median / error weighted by time, in percent; "sum" is how far the sum of all those kernels
is off. "Nearest" scales the roofline by measured kernels of the same target, by nearness in size; "learned" is what
`simpart fit STORE` learns; "both", their mean in logs, is what plans are priced with.

| held out | kernels | roofline | nearest | learned | both | both: sum | in 90 % | ± median |
|---|---|---|---|---|---|---|---|---|
{rows}

Kernels no other store knows the family of are left to the roofline: {unknown} in all.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--names", nargs="*", default=[], help="what to call the stores")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    device = load_cluster("local").kinds[0]
    found = [Store(path).read() for path in options.stores]
    names = options.names or [path.name for path in options.stores]
    rows, unknown = [], 0
    for i, name in enumerate(names):
        row, left = judged(name, [p for j, p in enumerate(found) if j != i], found[i], device)
        rows.append(row)
        unknown += left
    machine = f"{platform.machine()} ({device.name}), {os.cpu_count()} cores"
    text = WORDS.format(machine=machine, rows="\n".join(rows), unknown=unknown)
    if options.output:
        write_atomically(options.output, text)
    else:
        print(text)


def judged(name: str, others: Sequence[Profiles], mine: Profiles, device: Device) -> tuple[str, int]:
    """A row of the table, and how many kernels no learned model knows."""
    known = Profiles(
        kernels=tuple(r for p in others for r in p.kernels), overheads=tuple(r for p in others for r in p.overheads)
    )
    seen = {record.signature for record in known.kernels}
    table, calibrated = Table(mine), Calibrated(Table(known), Roofline())
    local = Local({device.name: fit_device(known, device)}, Roofline())
    both = Unseen(local, calibrated)
    fresh = [s for s in table.rows(device) if not s.view and s not in seen]
    covered = both.knows(SignatureTable(tuple(fresh)), device)
    asked = SignatureTable(tuple(s for s, known in zip(fresh, covered.tolist(), strict=True) if known))
    truth = table.estimate(asked, device).mean_s
    models: list[ComputeModel] = [Roofline(), calibrated, local, both]
    cells = []
    for model in models:
        off = np.abs(model.estimate(asked, device).mean_s / truth - 1)
        cells.append(
            f"{percent(off.mean())} / {percent(np.median(off))} / {percent((off * truth).sum() / truth.sum())}"
        )
    last = both.estimate(asked, device)
    half = 1.645 * np.hypot(last.shared_log_sd, last.own_log_sd)
    inside = np.abs(np.log(last.mean_s / truth)) <= half
    cells += [f"{100 * (last.mean_s.sum() / truth.sum() - 1):+.1f}", percent(inside.mean())]
    cells.append(percent(np.median(np.expm1(half))))
    return f"| {name} | {len(truth)} | {' | '.join(cells)} |", int((~covered).sum())


def percent(share: float | np.floating) -> str:
    return f"{100 * float(share):.1f}"


if __name__ == "__main__":
    main()
