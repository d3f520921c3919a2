"""The same step in one process by the unmodified module: what a run on several must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from simpart.errors import UnsupportedError
from simpart.plan import Plan
from simpart.training import TrainingSpec
from simpart.validate._gradients import make_optimizer

__all__ = ["TOLERANCE", "Reference", "difference", "reference_step"]

TOLERANCE = 1e-9
"""Largest relative difference allowed in float64."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Loss, gradients before clipping, and parameters and buffers after one step."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def reference_step(
    module: nn.Module,
    training: TrainingSpec,
    plan: Plan,
    sizes: Sequence[int],
    inputs: Callable[[int, Sequence[int]], list[list[Any]]],
    mutates_buffer: bool,
) -> Reference:
    """One step over all micro-batches, each divided into `sizes` as the replicas of the loss's stage divide it.

    `inputs(micro_batch, sizes)` gives each share's inputs. Where statistics of the batch go into buffers, every group
    must divide it equally (raises UnsupportedError otherwise), and the buffers are those of the first replica.
    """
    module = copy.deepcopy(module)
    divisions = {tuple(sizes) for sizes in plan.batch.sizes}
    if mutates_buffer and len(divisions) > 1:
        raise UnsupportedError(
            "a model with batch statistics has no single-process form when stages divide the micro-batch differently; "
            "give all groups the same replica sizes, or leave out --check"
        )
    total = plan.batch.micro_batches * plan.batch.micro_batch
    loss = 0.0
    first: dict[str, torch.Tensor] = {}
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for r in range(len(sizes)):
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(start[name])
        for m in range(plan.batch.micro_batches):
            part = module(*inputs(m, sizes)[r]) * (sizes[r] / total)
            part.backward()
            loss += float(part.detach())
        if r == 0:
            first = {name: buffer.clone() for name, buffer in module.named_buffers()}
    trained = [p for p in module.parameters() if p.requires_grad]
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    if training.gradient_clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained, training.gradient_clip_norm)
    make_optimizer(training, trained).step()
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    return Reference(loss=loss, gradients=gradients, parameters=parameters, buffers=first)


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference relative to each tensor's largest element, and whose it is.

    An element below 1e-6 of the largest anywhere counts as that: gradients that are zero but for rounding have no
    relative error.
    """
    top = max((float(w.abs().max()) for w in wanted.values() if w.numel()), default=0.0)
    worst, where = 0.0, ""
    for name, tensor in found.items():
        other = wanted.get(name)
        if other is None or not tensor.numel():
            continue
        if not tensor.is_floating_point():
            error = float((tensor.cpu() != other).any())
        else:
            scale = max(float(other.abs().max()), 1e-6 * top, 1e-300)
            error = float((tensor.cpu() - other).abs().max()) / scale
        if not error <= worst:  # NaN too
            worst, where = error, name
    return worst, where
