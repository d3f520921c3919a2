"""Would a small net do better than boosted trees, or beside them? On devices left out whole.

    python benchmarks/learned_net.py ../shared/data/ops/op_gemm_aic.parquet --family gemm16

Both learn what the analytic core leaves; the net (two hidden layers of 64, trained with torch on the smoothed absolute
error) sees no device descriptors, which wreck it. Prints MAPE of the core, and with trees, net or their mean added as
the shipped models add the trees. Needs torch; half a minute a family.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpart.costmodels.learned._adapters import read_measurements
from simpart.costmodels.learned._families import FAMILY_MODELS, Rows, op_codes
from simpart.costmodels.learned._measurements import Measurements
from simpart.costmodels.learned._model import RATIO_SHARE, columns_of
from simpart.costmodels.learned._training import rows_of, sheets_for, train, trainable, without_slow

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
DESCRIPTORS = 5  # last columns of the features
MOST_ROWS = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--family", required=True)
    options = parser.parse_args()
    table = next(t for t in read_measurements(options.file).tables if t.family == options.family)
    learn = thinned(trainable(without_slow(table)))
    found = {name: judged(learn, name) for name in learn.devices()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"machine": machine, "family": options.family, "rows": len(learn), "mape": found}, indent=1))


def thinned(table: Measurements) -> Measurements:
    rng = np.random.default_rng(0)
    places = [np.flatnonzero(table.device == name) for name in table.devices()]
    return table.at(np.concatenate([np.sort(rng.choice(p, min(MOST_ROWS, len(p)), replace=False)) for p in places]))


def judged(table: Measurements, device: str) -> dict[str, Any]:
    """MAPE on one device of what was learned from the others."""
    family = FAMILY_MODELS[table.family]
    learn, test = table.at(table.device != device), table.at(table.device == device)
    model = train(learn, quick=True)
    rows = rows_of(learn, model.sheets)
    core = model.analytic(rows)
    counts = {name: int((learn.device == name).sum()) for name in learn.devices()}
    weights = np.array([1.0 / counts[name] for name in learn.device.tolist()])
    net = net_of(columns_of(family, rows, core, rows.sheet)[:-DESCRIPTORS], np.log(learn.latency_s) - core, weights)
    sheet = sheets_for([device], family)[device]
    asked = Rows(op=op_codes(test.op), dims=test.dims, sheet=sheet)
    status, bound = model.status(device, sheet), np.log(family.bound_s(asked))
    like = model.sheets[model.nearest(sheet)] if status == "sibling" else sheet
    plain = model.analytic(asked)
    trees = model.residual(asked, plain, like)
    other = net(columns_of(family, asked, plain, like)[:-DESCRIPTORS])

    def mape(added: Floats) -> float:
        logs = plain + (1.0 if status == "sibling" else 0.0 if status == "far" else model.weight) * added
        near = model.nearest_stacked(sheet)
        if status == "new" and near is not None:
            there = replace(asked, sheet=model.sheets[near])
            known = model.analytic(there)
            ratio = known + model.residual(there, known) + bound - np.log(family.bound_s(there))
            logs = (1 - RATIO_SHARE) * logs + RATIO_SHARE * ratio
        return round(100 * float(np.abs(np.exp(np.maximum(logs, bound)) / test.latency_s - 1).mean()), 1)

    return {
        "as": status, "core": mape(np.zeros(len(test))), "trees": mape(trees), "net": mape(other),
        "mean": mape((trees + other) / 2),
    }  # fmt: skip


def net_of(columns: Any, target: Floats, weights: Floats, *, epochs: int = 40) -> Callable[[Any], Floats]:
    """A trained net as a function of columns."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    middle, scale = columns.mean(axis=1, keepdims=True), columns.std(axis=1, keepdims=True) + 1e-6

    def inputs(given: Any) -> torch.Tensor:
        return torch.tensor(np.clip((given - middle) / scale, -3, 3).T.copy())

    x, y = inputs(columns), torch.tensor(target, dtype=torch.float32)[:, None]
    w = torch.tensor(weights / weights.mean(), dtype=torch.float32)[:, None]
    layers = [torch.nn.Linear(len(columns), 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    batches = range(0, len(target), 256)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * len(batches))
    for _ in range(epochs):
        order = torch.randperm(len(target))
        for start in batches:
            rows = order[start : start + 256]
            loss = (torch.sqrt((net(x[rows]) - y[rows]) ** 2 + 0.05**2) * w[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.step()
    return lambda given: net(inputs(given)).detach().numpy()[:, 0].astype(np.float64)


if __name__ == "__main__":
    main()
