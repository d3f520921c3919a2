"""What a learned model is told of a kernel on a device that it was profiled on: work, sizes, layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, prod

import numpy as np

from simpart.cost import Signature
from simpart.costmodels.roofline import physical_bound_s, signature_family, work_of
from simpart.hardware import Device

__all__ = ["columns_of", "offsets_of"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Columns = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def offsets_of(signatures: Sequence[Signature], known: Mapping[str, float], rest: float) -> Floats:
    """What kernels like each take over the base model, in logs: of its target, else of its family, else of all."""
    found = [known.get(s.target, known.get(f"family {signature_family(s)}", rest)) for s in signatures]
    return np.array(found, dtype=np.float64)


def columns_of(signatures: Sequence[Signature], device: Device, offsets: Floats) -> Columns:
    """Features, one row each; `offsets` tell kinds of kernels apart by how long they take."""
    rows = [(*_features(s, device), offset) for s, offset in zip(signatures, offsets.tolist(), strict=True)]
    return np.ascontiguousarray(np.array(rows, dtype=np.float32).T)


def _features(signature: Signature, device: Device) -> tuple[float, ...]:
    flops, elements, moved = work_of(signature)
    inputs, outputs = signature.inputs, signature.outputs
    forms = (*inputs, *outputs)
    out = outputs[0].shape if outputs else ()
    inner = inputs[0].shape[-1] if inputs and inputs[0].shape else 1
    second = inputs[1].shape[-1] if len(inputs) > 1 and inputs[1].shape else 1
    turned = sum(form.order is not None and form.order != tuple(range(len(form.shape))) for form in inputs)
    return (
        log(flops + 1), log(elements + 1), log(moved + 1), log(physical_bound_s(signature, device) + 1e-9),
        log(prod(out) + 1), log((out[-1] if out else 1) + 1), log((out[0] if out else 1) + 1), log(inner + 1),
        log(second + 1), log(max((prod(form.shape) for form in forms), default=1) + 1), len(out), turned, len(inputs),
        log((flops + 1) / (moved + 1)), sum(form.strides is not None for form in inputs),
    )  # fmt: skip
