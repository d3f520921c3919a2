"""Kernels that exchange statistics in the middle, on one device: what it computes itself, with sums over the axis where
the description shares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from simpart.kernels.ops import base_name
from simpart.tdl import Call

__all__ = ["EXCHANGED"]

Tensors = list[torch.Tensor]


class Total(Protocol):
    """Reduces over the axes that exchange; a collective."""

    def __call__(self, term: torch.Tensor, reducer: str = "sum") -> torch.Tensor: ...


Run = Callable[[Tensors], Tensors]


def _tensor(item: Any, tensors: Tensors) -> torch.Tensor | None:
    return None if item is None else tensors[item["tensor"]]


def _softmax(call: Call, positional: Sequence[Any], tensors: Tensors, total: Total, run: Run) -> Tensors:
    """Two numbers a row: the largest value, then the sum of exponentials."""
    x, dim = tensors[0], positional[1]
    top = total(x.amax(dim, keepdim=True), "max")
    shifted = x - top
    if base_name(call.target) == "_log_softmax":
        return [shifted - total(shifted.exp().sum(dim, keepdim=True)).log()]
    powers = shifted.exp()
    return [powers / total(powers.sum(dim, keepdim=True))]


def _softmax_backward(call: Call, positional: Sequence[Any], tensors: Tensors, total: Total, run: Run) -> Tensors:
    """One number a row."""
    dy, y, dim = tensors[0], tensors[1], positional[2]
    if base_name(call.target) == "_log_softmax_backward_data":
        return [dy - y.exp() * total(dy.sum(dim, keepdim=True))]
    return [y * (dy - total((dy * y).sum(dim, keepdim=True)))]


def _loss(call: Call, positional: Sequence[Any], tensors: Tensors, total: Total, run: Run) -> Tensors:
    """The number of counted targets. A mean over none here would be no number, so the sum is taken and divided."""
    loss, counted = run(tensors)
    everywhere = total(counted)
    if positional[3] != 1:
        return [loss, everywhere]
    mine = torch.where(counted > 0, loss * counted, torch.zeros_like(loss))
    return [mine / everywhere, everywhere]


def _batch_norm(call: Call, positional: Sequence[Any], tensors: Tensors, total: Total, run: Run) -> Tensors:
    """Sum and sum of squares per channel."""
    x, weight, bias, mean_before, variance_before = (_tensor(p, tensors) for p in positional[:5])
    momentum, eps = positional[6:8]
    assert x is not None
    dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    count = prod(call.inputs[0]) // call.inputs[0][1]
    mean = total(x.sum(dims)) / count
    variance = total((x**2).sum(dims)) / count - mean**2
    rstd = (variance + eps).rsqrt()
    y = (x - mean.view(shape)) * rstd.view(shape)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    found = [y, mean, rstd]
    if mean_before is not None and variance_before is not None:
        found.append(mean_before * (1 - momentum) + momentum * mean)
        found.append(variance_before * (1 - momentum) + momentum * variance * count / (count - 1))
    return found


def _batch_norm_backward(call: Call, positional: Sequence[Any], tensors: Tensors, total: Total, run: Run) -> Tensors:
    """Gradients of bias and weight, whose sums the gradient of x needs."""
    dy, x, scale, _, _, mean, rstd = (_tensor(p, tensors) for p in positional[:7])
    assert dy is not None and x is not None and mean is not None and rstd is not None
    dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    count = prod(call.inputs[1]) // call.inputs[1][1]
    normal = (x - mean.view(shape)) * rstd.view(shape)
    bias, weight = total(dy.sum(dims)), total((dy * normal).sum(dims))
    factor = rstd if scale is None else rstd * scale
    dx = factor.view(shape) * (dy - bias.view(shape) / count - normal * weight.view(shape) / count)
    return [t for t, wanted in zip((dx, weight, bias), positional[9], strict=True) if wanted]


EXCHANGED: Mapping[str, Callable[..., Tensors]] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _loss),
    "_native_batch_norm_legit_functional": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
}
"""By kernel: `(call of the whole, local positional arguments, parts of the inputs, total, the plain local kernel)` to
parts of the outputs."""
