"""The ComputeModel that learned models make: signatures in, estimates with their uncertainty out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from simpart.cost import PROVENANCES, Estimate, Signature, SignatureTable
from simpart.costmodels.learned._artifact import SHIPPED, load_models
from simpart.costmodels.learned._convolution import convolution_traffic_s
from simpart.costmodels.learned._families import FAMILY_MODELS, Rows
from simpart.costmodels.learned._memory import MEMORY_OPS
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._sheet import sheet_of
from simpart.costmodels.learned._signatures import Question, question_of
from simpart.costmodels.roofline import Roofline, signature_family
from simpart.hardware import Device
from simpart.kernels.ops import FAMILIES, family_of

__all__ = ["Learned", "shipped_models"]

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
_OP_PLACE = {name: i for i, name in enumerate(MEMORY_OPS)}
_MOST_REMEMBERED = 100_000
_TRANSFERRED_SD = 0.1  # from which a detour over another kernel makes an estimate analytic


@lru_cache(maxsize=8)
def shipped_models(path: Path = SHIPPED) -> Mapping[str, FamilyModel]:
    """The models that come with simpart, read once."""
    return load_models(path)


@dataclass(frozen=True, slots=True)
class Learned:
    """A ComputeModel of GPUs: what was learned from published kernels, the roofline for what no family covers.

    Provenance: interpolated on a trained device inside the trained sizes; extrapolated on other devices and sizes;
    analytic where the device resembles none that was trained on, or a kernel is told through another one.
    """

    path: Path = SHIPPED
    fallback: Roofline = field(default_factory=Roofline)
    _asked: dict[int, Question | None] = field(default_factory=dict, compare=False, repr=False)
    _kept: list[Signature] = field(default_factory=list, compare=False, repr=False)

    def _questions(self, signatures: Sequence[Signature]) -> list[Question | None]:
        """What signatures ask; remembered by object, since tables share theirs between devices and plans. Objects are
        kept alive as long, so that no other takes the place of one."""
        asked, places = self._asked, [*map(id, signatures)]
        new = [s for s, place in zip(signatures, places, strict=True) if place not in asked]
        if len(asked) + len(new) > _MOST_REMEMBERED:
            asked.clear()
            self._kept.clear()
            new = list(signatures)
        asked.update(zip(map(id, new), map(question_of, new), strict=True))
        self._kept.extend(new)
        return [*map(asked.__getitem__, places)]

    def knows(self, table: SignatureTable, device: Device) -> Bools:
        """Rows that a learned family answers."""
        if device.kind != "gpu":
            return np.zeros(len(table.signatures), dtype=bool)
        models = shipped_models(self.path)
        asked = self._questions(table.signatures)
        return np.array([q is not None and q.family in models for q in asked], dtype=bool)

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        """Seconds of each signature, never below `physical_bound_s`, except that causal attention need only work
        through half of the square that it counts, and a strided convolution only read what its windows cover."""
        if device.kind != "gpu":
            return self.fallback.estimate(table, device)
        models = shipped_models(self.path)
        places: dict[str, list[int]] = {name: [] for name in models}
        rest: list[int] = []
        emulated = device.peak("bfloat16") < 0.9 * device.peak("float16")  # then 16-bit kernels are float16's
        questions = self._questions(table.signatures)
        for i, question in enumerate(questions):
            mine = None if question is None else places.get(question[0])
            if mine is None or (emulated and _in_bfloat16(table.signatures[i])):
                rest.append(i)
            else:
                mine.append(i)
        count = len(table.signatures)
        mean, shared, own = np.zeros(count), np.zeros(count), np.zeros(count)
        family, provenance = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        if rest:
            rows = np.array(rest, dtype=np.int64)
            plain = self.fallback.estimate(SignatureTable(tuple(table.signatures[i] for i in rest)), device)
            mean[rows], shared[rows], own[rows] = plain.mean_s, plain.shared_log_sd, plain.own_log_sd
            family[rows], provenance[rows] = plain.family, plain.provenance
        floor_s = _floor_s(models, device)
        for name, found in places.items():
            if found:
                rows = np.array(found, dtype=np.int64)
                asked: list[Question] = [questions[i] for i in found]  # type: ignore[misc]  # none is None, see above
                seconds, shared[rows], own[rows], provenance[rows] = _answer(models[name], asked, device, floor_s)
                mean[rows] = np.maximum(seconds, device.kernel_launch_s)
                family[rows] = [*map(_family_place, map(table.signatures.__getitem__, found))]
        return Estimate(
            mean_s=mean, family=family, families=FAMILIES, shared_log_sd=shared, own_log_sd=own, provenance=provenance
        )


def _in_bfloat16(signature: Signature) -> bool:
    return any(form.dtype == "bfloat16" for form in signature.inputs)


def _family_place(signature: Signature) -> int:
    return _place(signature_family(signature)) if signature.members else _target_place(signature.target)


@lru_cache(maxsize=4096)
def _target_place(target: str) -> int:
    return _place(family_of(target))


def _place(family: str) -> int:
    return FAMILIES.index(family)


def _answer(model: FamilyModel, asked: list[Question], device: Device, floor_s: float):  # type: ignore[no-untyped-def]
    family = FAMILY_MODELS[model.family]
    sheet, _, widened = sheet_of(device, family.dtype)
    _, sizes, ops, factors, detours = zip(*asked, strict=True)
    values = np.fromiter(chain.from_iterable(sizes), np.float64, len(sizes) * len(sizes[0])).reshape(len(sizes), -1)
    rows = Rows(
        op=np.array([_OP_PLACE.get(op, 0) for op in ops], dtype=np.int64),
        dims={name: values[:, i] for i, name in enumerate(family.dims)},
        sheet=sheet,
    )
    found = model.predict(rows, device.name, floor_s if family.timed_by_host else None)
    detour = np.array(detours)
    least = family.arithmetic_s(rows)  # of the direct count, although some convolutions do with fewer multiplications
    if model.family == "conv32":  # its fitted floor is arithmetic alone
        least = np.maximum(least, convolution_traffic_s(rows.dims, sheet))
    seconds = np.maximum(np.exp(found.log_seconds), least) * np.array(factors)
    measured = found.inside & (found.status == "seen")
    provenance = np.where(measured, PROVENANCES.index("interpolated"), PROVENANCES.index("extrapolated"))
    provenance = np.where(
        (detour >= _TRANSFERRED_SD) | (found.status == "far"), PROVENANCES.index("analytic"), provenance
    )
    shared = np.sqrt(found.shared**2 + widened**2 + 0.5 * detour**2)
    return seconds, shared, np.sqrt(found.own**2 + 0.5 * detour**2), provenance


def _floor_s(models: Mapping[str, FamilyModel], device: Device) -> float:
    """Latency of the smallest kernel in a real step: the device's own, else as the 16-bit products have it."""
    if device.launch_floor_s is not None:
        return device.launch_floor_s
    model = models.get("gemm16")
    if model is None:
        return 3e-6
    family = FAMILY_MODELS["gemm16"]
    sheet = sheet_of(device, family.dtype)[0]
    dims = {name: np.array([value], dtype=np.float64) for name, value in family.smallest.items()}
    return float(np.exp(model.analytic(Rows(op=np.zeros(1, dtype=np.int64), dims=dims, sheet=sheet)))[0])
