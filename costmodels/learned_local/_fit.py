"""Learning kernels of a profiled device: offsets by target, then trees, judged on kernels held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simpart.cost import ComputeModel, Signature, SignatureTable
from simpart.costmodels.learned._boost import fit_boost
from simpart.costmodels.learned_local._features import columns_of, offsets_of
from simpart.costmodels.learned_local._model import FILE, LocalDevice, save_local
from simpart.costmodels.roofline import Roofline, signature_family
from simpart.costmodels.table import Table, overhead_s, preferred
from simpart.errors import UserError
from simpart.hardware import Device, load_cluster, load_device
from simpart.hardware_profiles._store import Profiles, Store

__all__ = ["LEAST_KERNELS", "base_of", "fit_device", "fit_store"]

LEAST_KERNELS = 40
"""Measured kernels of a device from which something is learned."""
_FOLDS, _SHRINK, _Z90 = 5, 1.0, 1.645
_TREES, _DEPTH = 300, 4
_LEAST_SD = 0.05

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def base_of(device: Device) -> ComputeModel:
    """The model that is corrected: what would be used without profiles."""
    if device.kind != "gpu":
        return Roofline()
    from simpart.costmodels.learned import Learned

    return Learned()


def fit_store(
    folder: Path, output: Path | None, seed: int, progress: Callable[[str], None]
) -> tuple[dict[str, LocalDevice], dict[str, Any]]:
    """Learn every device of a store with kernels enough and write `output`, by default beside the profiles; also what
    was read. Raises UserError when there is none."""
    profiles = Store(folder).read()
    names = dict.fromkeys(record.environment.device for record in profiles.kernels)
    found, counts = {}, {}
    for name in names:
        device = _device_named(name)
        counts[name] = len({r.signature for r in profiles.kernels if r.environment.device == name})
        if device is not None and counts[name] >= LEAST_KERNELS:
            progress(f"kernels of {name}")
            found[name] = fit_device(profiles, device, seed=seed)
    if not found:
        raise UserError(
            f"{folder} holds {', '.join(f'{n} kernels of {name}' for name, n in counts.items()) or 'no kernels'}; at "
            f"least {LEAST_KERNELS} of a known device are needed: run simpart profile ops on more models"
        )
    save_local(output or folder / FILE, found)
    return found, {str(folder): {"rows": len(profiles.kernels), "kernels": counts}}


def fit_device(profiles: Profiles, device: Device, *, seed: int = 0) -> LocalDevice:
    """Offsets, trees and spreads of one device; the spreads are errors on kernels held back, a fifth at a time."""
    table = Table(profiles)
    rows = [s for s in table.rows(device) if not s.view]
    asked = SignatureTable(tuple(rows))
    base = np.log(base_of(device).estimate(asked, device).mean_s)
    left = np.log(table.estimate(asked, device).mean_s) - base
    fold = np.random.default_rng(seed).permutation(len(rows)) % _FOLDS
    error = np.zeros(len(rows))
    told = np.zeros(len(rows), dtype=bool)
    for number in range(_FOLDS):
        keep, test = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        model = _learn([rows[i] for i in keep], left[keep], base[keep], device, seed)
        part = [rows[i] for i in test]
        offsets = offsets_of(part, model.offsets, model.typical)
        error[test] = offsets + model.boost.predict(columns_of(part, device, offsets)) - left[test]
        told[test] = [s.target in model.sizes for s in part]
    spreads = {"target": _spread(error[told]), "family": _spread(error[~told], 2.0)}
    if not (~told).any():
        spreads["family"] = (2 * spreads["target"][0], 2 * spreads["target"][1])
    off = np.abs(np.expm1(error))
    weight = np.exp(base + left)
    facts: dict[str, Any] = {
        "rows": len(rows),
        "held_out": {
            f"{device.name} (kernels held back)": {
                "status": "seen", "rows": len(rows), "mape": round(float(off.mean()), 4),
                "median": round(float(np.median(off)), 4), "bias": round(float(np.expm1(np.median(error))), 4),
                "time_weighted": round(float((off * weight).sum() / weight.sum()), 4),
            }
        },
    }  # fmt: skip
    overheads = {
        name: overhead_s(
            preferred([r for r in profiles.overheads if r.name == name and r.environment.device == device.name], None)
        )
        for name in ("kernel", "action", "step")
    }
    facts["overheads"] = {f"{name}_s": seconds for name, seconds in overheads.items() if seconds > 0}
    whole = _learn(rows, left, base, device, seed)
    return LocalDevice(
        boost=whole.boost, offsets=whole.offsets, typical=whole.typical, sizes=whole.sizes, spreads=spreads, facts=facts
    )


def _learn(rows: Sequence[Signature], left: Floats, base: Floats, device: Device, seed: int) -> LocalDevice:
    typical = float(np.median(left))
    offsets, sizes = {}, {}
    for labels in ([s.target for s in rows], [f"family {signature_family(s)}" for s in rows]):
        names = np.array(labels, dtype=object)
        for name in dict.fromkeys(labels):
            mine = names == name
            offsets[name] = float((left[mine].sum() + _SHRINK * typical) / (mine.sum() + _SHRINK))
            sizes[name] = (float(base[mine].min()), float(base[mine].max()))
    at = offsets_of(rows, offsets, typical)
    boost = fit_boost(
        columns_of(rows, device, at), left - at, np.ones(len(rows)), trees=_TREES, depth=_DEPTH, rate=0.1, seed=seed
    )
    return LocalDevice(boost=boost, offsets=offsets, typical=typical, sizes=sizes, spreads={}, facts={})


def _spread(error: Floats, least: float = 1.0) -> tuple[float, float]:
    """(shared, own) log-sd of errors: their median and what the 90 % quantile leaves beside it."""
    if not len(error):
        return 0.0, 0.0
    total = max(least * _LEAST_SD, float(np.quantile(np.abs(error), 0.9)) / _Z90)
    shared = min(max(abs(float(np.median(error))), 0.3 * total), 0.9 * total)
    return shared, float(np.sqrt(total**2 - shared**2))


def _device_named(name: str) -> Device | None:
    for device in load_cluster("local").kinds:
        if device.name == name:
            return device
    try:
        return load_device(name)
    except UserError:
        return None
