"""Data sets of collectives judged: with the shipped model, or with models refitted on what a split leaves in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpart.costmodels.learned._adapters import device_named
from simpart.costmodels.learned._fittable import COLLECTIVES_FROM, fittable
from simpart.costmodels.learned._generations import generation_of
from simpart.costmodels.learned._package import COLLECTIVES, NAME, Package, chosen
from simpart.costmodels.learned_comm._artifact import SHIPPED, load
from simpart.costmodels.learned_comm._calibrate import fit, size_fold, with_floors
from simpart.costmodels.learned_comm._interconnects import FABRICS
from simpart.costmodels.learned_comm._model import REGIMES, STATUSES, Fitted, regime_of
from simpart.costmodels.learned_comm._packaged import read_collectives
from simpart.costmodels.learned_comm._records import Records, read_records
from simpart.costmodels.learned_comm._rules import judge
from simpart.costmodels.learned_comm._situation import KINDS, SOFTWARE
from simpart.errors import UnknownNameError, UserError
from simpart.evaluation import Judged, join

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SPLITS", "clean", "evaluate", "evaluate_package", "judge_records"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Names = np.ndarray[tuple[int], np.dtype[np.object_]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Progress = Callable[[str], None]

SPLITS = (
    "shipped", "leave-one-device-out", "leave-one-generation-out", "leave-one-source-out", "leave-one-group-size-out",
    "leave-one-cluster-out", "unseen-sizes", "random",
)  # fmt: skip


def evaluate(
    frame: pd.DataFrame, name: str, split: str, floors: bool, models: str | None, progress: Progress
) -> tuple[Judged, Mapping[str, Any]]:
    """Rows of a table of collectives, judged, and notes for the reader. With `floors`, held-out devices may use the
    measured time of their own smallest all-reduce of two, as the `floor` of a link level would give it."""
    if split not in SPLITS:
        raise UnknownNameError("split of collectives", split, SPLITS)
    return _answered(*clean(read_records(frame, name)), name, split, floors, models, progress)


def evaluate_package(
    package: Package, devices: Sequence[str], split: str, floors: bool, models: str | None, progress: Progress
) -> tuple[Judged, Mapping[str, Any]]:
    """Collectives in aiconfigurator-core, judged. Baselines know only devices that the model may learn from."""
    tables = chosen(package, (COLLECTIVES,), devices)
    allowed = [t for t in chosen(package, (COLLECTIVES,)) if device_named(t.system) in COLLECTIVES_FROM]
    records, refused = clean(read_records(read_collectives(package, tables, progress), NAME))
    reference = None
    if split == "shipped" and allowed:
        reference = clean(read_records(read_collectives(package, allowed, progress), NAME))[0]
    judged, more = _answered(records, refused, NAME, split, floors, models, progress, reference)
    return judged, {**more, "not_read": dict(package.not_read)}


def _answered(
    records: Records, refused: Mapping[str, int], name: str, split: str, floors: bool, models: str | None,
    progress: Progress, reference: Records | None = None,
) -> tuple[Judged, Mapping[str, Any]]:  # fmt: skip
    if split not in SPLITS:
        raise UnknownNameError("split of collectives", split, SPLITS)
    if not len(records):
        raise UserError(f"{name}: no row can be predicted: {', '.join(f'{n} {r}' for r, n in refused.items())}")
    judged = judge_records(
        records, split, refused, floors=floors, models=models, progress=progress, reference=reference
    )
    notes, trained = [], []
    if split == "shipped":
        model = load(Path(models) if models else SHIPPED)
        trained = sorted({s.device for s in model.systems.values()} & set(records.device.tolist()))
    if trained:
        notes.append(
            f"the model was trained on {', '.join(trained)}: errors here say nothing about a new device; "
            f"use --split leave-one-device-out"
        )
    if split in ("random", "unseen-sizes"):
        notes.append("this split shows how well sizes are interpolated, not how a new device is predicted")
    return judged, {"data_kind": "collectives", "trained_devices": trained, "notes": notes}


def clean(records: Records) -> tuple[Records, dict[str, int]]:
    """The rows that no rule leaves out, and how many each rule did."""
    verdict = judge(records)
    counts = Counter(verdict.tolist())
    return records.at(verdict == ""), {rule: n for rule, n in counts.most_common() if rule}


def judge_records(
    records: Records, split: str, refused: Mapping[str, int], *, floors: bool = False, models: str | None = None,
    progress: Progress = lambda text: None, reference: Records | None = None,
) -> Judged:  # fmt: skip
    """Every row predicted by a model that never saw its fold. With `reference` baselines of the shipped model know
    those rows and not the table's own."""
    may_learn = fittable(records.source, records.device, COLLECTIVES_FROM)
    if split == "shipped":
        model = load(Path(models) if models else SHIPPED)
        return _judged(records, model, records if reference is None else reference, refused)
    parts: list[Judged] = []
    for text, held in _folds(records, split):
        left_in, test = records.at(~held & may_learn), records.at(held)
        if not len(left_in) or not len(test):
            continue
        progress(f"{split}: {text}")
        parts.append(
            _judged(with_floors(test) if floors else test, fit(left_in), left_in, refused if not parts else {})
        )
    if not parts:
        raise UserError(f"split {split} leaves nothing to learn from; use more devices or sources, or another split")
    return join(parts)


def _folds(records: Records, split: str) -> Iterator[tuple[str, Mask]]:
    """(name, rows held out); together all rows that the split is about."""
    multi = records.situation.hosts > 1
    if split in ("random", "unseen-sizes"):
        order = np.random.default_rng(0).permutation(len(records)) % 5
        for number in range(5):
            yield f"fold {number + 1}", size_fold(records, number) if split == "unseen-sizes" else order == number
        return
    if split == "leave-one-group-size-out":
        for local in np.unique(records.situation.local[~multi]).tolist():
            yield f"{local:.0f} ranks", ~multi & (records.situation.local == local)
        return
    if split == "leave-one-device-out":
        keys = records.device
    elif split == "leave-one-generation-out":
        keys = np.array([generation_of(device) for device in records.device.tolist()], dtype=object)
    elif split == "leave-one-source-out":
        keys = records.source
    else:
        keys = np.where(multi, records.system, "")
    for key in filter(None, dict.fromkeys(keys.tolist())):
        yield str(key), keys == key


def _judged(records: Records, model: Fitted, left_in: Records, refused: Mapping[str, int]) -> Judged:
    found = model.predict(records.situation, records.device.tolist(), records.system.tolist())
    s = records.situation
    kinds = [
        KINDS[k] + (f" {SOFTWARE[w]}" if w else "") for k, w in zip(s.kind.tolist(), s.software.tolist(), strict=True)
    ]
    return Judged(
        measured_s=records.latency_s,
        predicted_s=np.exp(found.log_seconds),
        log_sd=np.hypot(found.shared, found.own),
        groups={
            "source": records.source,
            "device": records.device,
            "family": np.array(kinds, dtype=object),
            "size_class": np.array(REGIMES, dtype=object)[regime_of(s)],
            "status": np.array(STATUSES, dtype=object)[found.status],
            "fabric": np.array(FABRICS, dtype=object)[s.fabric],
            "system": records.system,
            "ranks": np.array([f"{n:.0f}" for n in (s.local * s.hosts).tolist()], dtype=object),
            "hosts": np.array([f"{n:.0f}" for n in s.hosts.tolist()], dtype=object),
            "size_bytes": np.array([f"{n:.0f}" for n in s.bytes.tolist()], dtype=object),
            "row": records.row.astype(object),
        },
        baselines={"alpha_beta": records.alpha_beta_s, "roofline": s.bound_s(), "ratio": _ratio(records, left_in)},
        refused=refused,
    )


def _ratio(records: Records, known: Records) -> Floats:
    """The same collective on the device whose links are nearest, among those left in, scaled by the rate of the links;
    NaN where no other device has it."""
    medians = known.medians()
    table: dict[tuple[Any, ...], list[tuple[str, float, float]]] = {}
    for key, device, rate, seconds in zip(
        _keys(medians), medians.device.tolist(), _rates(medians).tolist(), medians.latency_s.tolist(), strict=True
    ):
        table.setdefault(key, []).append((device, rate, seconds))
    found = np.full(len(records), np.nan)
    for i, (key, device, rate) in enumerate(
        zip(_keys(records), records.device.tolist(), _rates(records).tolist(), strict=True)
    ):
        others = [(abs(np.log(r / rate)), s * r / rate) for d, r, s in table.get(key, []) if d != device]
        if others:
            found[i] = min(others)[1]
    return found


def _keys(records: Records) -> list[tuple[Any, ...]]:
    s = records.situation
    octave = np.round(np.log2(s.bytes)).astype(np.int64)
    return list(
        zip(
            s.fabric.tolist(),
            s.kind.tolist(),
            s.software.tolist(),
            octave.tolist(),
            s.local.tolist(),
            s.hosts.tolist(),
            strict=True,
        )
    )


def _rates(records: Records) -> Floats:
    """What is in proportion to the rate of the slower links on the way: bytes over their time."""
    s = records.situation
    found: Floats = s.bytes / np.maximum(np.maximum(s.local_s, s.network_s), 1e-30)
    return found
