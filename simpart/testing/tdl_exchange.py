"""Kernels that exchange statistics in the middle, on all members in lockstep: what each would do, with the exchange
in Python.

They show that the statistics a description calls shared are enough: what a member adds is local.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from simpart.kernels.ops import base_name
from simpart.tdl import Call

__all__ = ["EXCHANGED"]

Tensors = list[torch.Tensor]


def _positional(call: Call, tensors: Tensors) -> list[Any]:
    def decode(item: Any) -> Any:
        return tensors[item["tensor"]] if isinstance(item, dict) and "tensor" in item else item

    return [decode(item) for item in json.loads(call.arguments)["positional"]]


def _total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(terms)).sum(0)


def _softmax(calls: Sequence[Call], local: Sequence[Tensors]) -> list[Tensors]:
    """Two numbers a row: the largest value, then the sum of exponentials."""
    arguments = [_positional(c, t) for c, t in zip(calls, local, strict=True)]
    dim = arguments[0][1]
    top = torch.stack([x[0].amax(dim, keepdim=True) for x in arguments]).amax(0)
    total = _total([(x[0] - top).exp().sum(dim, keepdim=True) for x in arguments])
    if base_name(calls[0].target) == "_log_softmax":
        return [[x[0] - top - total.log()] for x in arguments]
    return [[(x[0] - top).exp() / total] for x in arguments]


def _softmax_backward(calls: Sequence[Call], local: Sequence[Tensors]) -> list[Tensors]:
    """One number a row."""
    arguments = [_positional(c, t) for c, t in zip(calls, local, strict=True)]
    dim = arguments[0][2]
    if base_name(calls[0].target) == "_log_softmax_backward_data":
        total = _total([dy.sum(dim, keepdim=True) for dy, _, *_ in arguments])
        return [[dy - y.exp() * total] for dy, y, *_ in arguments]
    total = _total([(dy * y).sum(dim, keepdim=True) for dy, y, *_ in arguments])
    return [[y * (dy - total)] for dy, y, *_ in arguments]


def _loss(calls: Sequence[Call], local: Sequence[Tensors]) -> list[Tensors]:
    """The number of counted targets."""
    from simpart.testing.tdl_suite import run_kernel

    found = []
    for call, tensors in zip(calls, local, strict=True):
        content = json.loads(call.arguments)
        content["positional"][3] = min(2, 2 * content["positional"][3])  # the mean's sum: its own count may be zero
        found.append(run_kernel(replace(call, arguments=json.dumps(content)), tensors))
    total = _total([counted for _, counted in found])
    mean = json.loads(calls[0].arguments)["positional"][3] == 1
    return [[loss / total if mean else loss, total] for loss, _ in found]


def _batch_norm(calls: Sequence[Call], local: Sequence[Tensors]) -> list[Tensors]:
    """Sum and sum of squares per channel."""
    arguments = [_positional(c, t) for c, t in zip(calls, local, strict=True)]
    dims = [d for d in range(arguments[0][0].dim()) if d != 1]
    count = sum(a[0].numel() // a[0].shape[1] for a in arguments)
    mean = _total([a[0].sum(dims) for a in arguments]) / count
    variance = _total([(a[0] ** 2).sum(dims) for a in arguments]) / count - mean**2
    outputs = []
    for x, weight, bias, running_mean, running_var, _, momentum, eps in arguments:
        shape = [1, -1, *[1] * (x.dim() - 2)]
        y = (x - mean.view(shape)) * (variance.view(shape) + eps).rsqrt()
        y = y if weight is None else y * weight.view(shape)
        y = y if bias is None else y + bias.view(shape)
        moved = [] if running_mean is None else [
            running_mean * (1 - momentum) + momentum * mean,
            running_var * (1 - momentum) + momentum * variance * count / (count - 1),
        ]  # fmt: skip
        outputs.append([y, mean, (variance + eps).rsqrt(), *moved])
    return outputs


def _batch_norm_backward(calls: Sequence[Call], local: Sequence[Tensors]) -> list[Tensors]:
    """Gradients of bias and weight, whose sums the gradient of x needs."""
    arguments = [_positional(c, t) for c, t in zip(calls, local, strict=True)]
    dims = [d for d in range(arguments[0][0].dim()) if d != 1]
    count = sum(a[0].numel() // a[0].shape[1] for a in arguments)
    shape = [1, -1, *[1] * (len(dims) - 1)]
    normal = [(a[1] - a[5].view(shape)) * a[6].view(shape) for a in arguments]
    bias = _total([a[0].sum(dims) for a in arguments])
    weight = _total([(a[0] * n).sum(dims) for a, n in zip(arguments, normal, strict=True)])
    outputs = []
    for (dy, _, scale, _, _, _, rstd, _, _, mask), n in zip(arguments, normal, strict=True):
        factor = rstd if scale is None else rstd * scale
        dx = factor.view(shape) * (dy - bias.view(shape) / count - n * weight.view(shape) / count)
        outputs.append([t for t, wanted in zip((dx, weight, bias), mask, strict=True) if wanted])
    return outputs


Exchange = Callable[[Sequence[Call], Sequence[Tensors]], list[Tensors]]
EXCHANGED: Mapping[str, Exchange] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _loss),
    **dict.fromkeys(("_native_batch_norm_legit_functional",), _batch_norm),
    "native_batch_norm_backward": _batch_norm_backward,
}
