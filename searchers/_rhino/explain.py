"""A sharding in the words people use: what is split along each axis, by the work that is so."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from simpart.kernels.flops import kernel_class_flops
from simpart.kernels.ops import base_name, family_of
from simpart.placement import AxisStrategy, Halo, Partial, Replicate, Shard
from simpart.searchers._cost_graph import Floats, Ints
from simpart.searchers._rhino.model import MeshModel
from simpart.sharding._regions import wiring_of
from simpart.sharding.mesh import calls_of
from simpart.tdl import undescribed_reason

__all__ = ["resembles", "whole_kernels"]

MOST_NAMED = 3
"""Kernels without strategies that an explanation names."""
SHARE = 0.25
"""Part of the work of products from which a way to split them is named."""


def resembles(model: MeshModel, choice: Ints) -> str:
    """`x: samples; y: features in pairs, norms along the sequence, vocabulary; state divided among replicas`."""
    words = []
    flops = kernel_class_flops(model.source, model.mesh.micro_batch) * model.wires.count
    for number, (axis, _) in enumerate(model.mesh.axes):
        found = _axis(model, choice, number, flops)
        words.append(f"{axis}: {', '.join(found) or 'nothing'}")
    rests = model.rest_layouts(choice).values()
    if any(zero == 3 for _, zero in rests):
        words.append("weights divided among replicas (FSDP)")
    elif any(zero for _, zero in rests):
        words.append("optimizer state divided among replicas (ZeRO)")
    whole = whole_kernels(model) if model.mesh.axes else {}
    if whole:
        named = [f"{kernel} ({why})" for kernel, why in list(whole.items())[:MOST_NAMED]]
        more = f" and {len(whole) - MOST_NAMED} more" if len(whole) > MOST_NAMED else ""
        words.append("whole: " + ", ".join(named) + more)
    return "; ".join(words) or "replicas alone"


def whole_kernels(model: MeshModel) -> dict[str, str]:
    """Kernels of which no strategy divides a tensor, with the reason: one of each class that is not described, or that
    does the work of products. By the kernel's id."""
    calls = calls_of(model.source, model.mesh.micro_batch)
    flops, ids = kernel_class_flops(model.source, model.mesh.micro_batch), wiring_of(model.source).ids
    sizes = " × ".join(f"{name} {size}" for name, size in model.mesh.axes)
    found = {}
    for cls, (kernel, call, choices) in enumerate(zip(model.source.kernel_classes, calls, model.choices, strict=True)):
        if not model.wires.count[cls] or kernel.view or any(_divides(split) for o in choices.splits for split in o):
            continue
        reason = undescribed_reason(call)
        if reason is None and flops[cls] > 0:
            reason = f"nothing in it divides by {sizes}"
        if reason is not None:
            found[ids[int(np.argmax(model.source.flat.kernel_class == cls))]] = reason
    return found


def _divides(split: AxisStrategy) -> bool:
    return any(isinstance(p, Shard | Halo) for p in (*split.inputs, *split.outputs))


def _axis(model: MeshModel, choice: Ints, number: int, flops: Floats) -> list[str]:
    work: dict[str, float] = defaultdict(float)
    norms = losses = tables = False
    for cls, kernel in enumerate(model.source.kernel_classes):
        if kernel.phase != "F" or not model.wires.count[cls]:
            continue
        split = model.choices[cls].splits[int(choice[cls])][number]
        family, name = family_of(kernel.target), base_name(kernel.target)
        if flops[cls] > 0 and family != "attention":
            work["all"] += float(flops[cls])
            work[_product(split, family)] += float(flops[cls])
        elif name in ("native_layer_norm", "rms_norm", "pow"):
            norms |= any(isinstance(p, Shard) and p.dim == 1 for p in split.inputs)
        elif name == "embedding":
            tables |= isinstance(split.inputs[0], Shard)
        elif name == "_log_softmax":
            losses |= isinstance(split.inputs[0], Shard) and split.inputs[0].dim == 1
    if not work["all"]:
        return []
    share = {kind: amount / work["all"] for kind, amount in work.items()}
    features = share.get("column", 0.0) + share.get("row", 0.0)
    found = ["samples"] if share.get("samples", 0.0) >= SHARE else []
    found += ["the sequence"] if share.get("sequence", 0.0) >= SHARE else []
    found += ["experts"] if share.get("experts", 0.0) >= SHARE else []
    if features >= SHARE:
        pairs = share.get("row", 0.0) >= 0.1 and share.get("column", 0.0) >= 0.1
        found.append("features in pairs of products (tensor parallel)" if pairs else "features")
        found += ["norms along the sequence"] if norms else []
    if losses or tables:
        found.append("vocabulary" if losses else "tables of embeddings")
    kept = model.rest_layouts(choice).values()
    if "samples" in found and features < SHARE and sum(isinstance(r[number], Shard) for r, _ in kept) * 2 > len(kept):
        found.append("state at rest (FSDP)")
    return found


def _product(split: AxisStrategy, family: str) -> str:
    """How a product is split."""
    if all(isinstance(p, Replicate) for p in (*split.inputs, *split.outputs)):
        return "whole"
    if family == "bgemm" and all(isinstance(p, Shard) and p.dim == 0 for p in split.inputs[:2]):
        return "experts"
    if any(isinstance(p, Partial) for p in split.outputs):
        return "row"
    first = split.outputs[0]
    if isinstance(first, Shard) and first.dim == 0:
        return "samples" if first.block is None else "sequence"
    return "column"
