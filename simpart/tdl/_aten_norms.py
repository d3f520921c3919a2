"""Norms, softmaxes, losses and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simpart.tdl.expression import (
    ALL,
    Access,
    Expression,
    Max,
    Opaque,
    Sum,
    Tensor,
    equal,
    extent,
    hidden,
    opaque,
    shared,
)
from simpart.tdl.index import Index
from simpart.tdl.registry import describe

Coordinates = tuple[Index, ...]


def given(*accesses: Access | None) -> list[Access]:
    return [access for access in accesses if access is not None]


# --- layer, RMS and group norm ---------------------------------------------------------------------------------------
def _rows(x: Tensor, i: Coordinates, normalised: int) -> Access:
    """The normalised slice that holds this coordinate."""
    return x[(*i[: x.rank - normalised], *[ALL] * normalised)]


def _statistic(x: Tensor, i: Coordinates, normalised: int) -> Access:
    """A mean or deviation of that slice: same leading dims, ones behind (or cut off)."""
    return x[tuple(j if d < len(i) - normalised else 0 for d, j in zip(range(x.rank), i, strict=False))]


@describe("aten.native_layer_norm", "aten._fused_rms_norm")
def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any) -> Any:
    k = len(shape)
    bias = rest[0] if rest and isinstance(rest[0], Tensor) else None
    scale = [t[(ALL,) * k] for t in (weight, bias) if t is not None]

    def y(*i: Index) -> Expression:
        return opaque(_rows(x, i, k), *scale)[i[-k:]]

    def statistic(*i: Index) -> Expression:
        return opaque(_rows(x, i, k))

    return (y, statistic, statistic) if len(rest) == 2 else (y, statistic)


@describe("aten.native_layer_norm_backward")
def layer_norm_backward(
    dy: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    k = len(shape)
    lead = x.shape[: x.rank - k]
    scale = [t[(ALL,) * k] for t in (weight, bias) if t is not None]

    def dx(*i: Index) -> Expression:
        known = [_rows(x, i, k), _statistic(mean, i, k), _statistic(rstd, i, k), *scale]
        return opaque(*known, linear=[_rows(dy, i, k)])[i[-k:]]

    def dw(*j: Index) -> Expression:
        def term(*r: Index) -> Expression:
            place = (*r, *j)
            return dy[place] * hidden(x[place], _statistic(mean, place, k), _statistic(rstd, place, k))

        return Sum(term, extents=lead)

    def db(*j: Index) -> Expression:
        return Sum(lambda *r: dy[(*r, *j)], extents=lead)

    return [output for output, wanted in zip((dx, dw, db), mask, strict=True) if wanted]


@describe("aten._fused_rms_norm_backward")
def rms_norm_backward(
    dy: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> Any:
    found = layer_norm_backward(dy, x, shape, rstd, rstd, weight, None, (True, True, False))
    return [output for output, wanted in zip(found, mask, strict=True) if wanted]


@describe("aten.native_group_norm")
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, groups: int, eps: float
) -> Any:
    """Samples and groups are independent."""
    size, space = c // groups, x.shape[2:]

    def of_group(b: Index, g: Index) -> Expression:
        return hidden(Sum(lambda k, *r: x[(b, g * size + k, *r)], extents=(size, *space)))

    def y(b: Index, c: Index, *s: Index) -> Expression:
        return hidden(x[(b, c, *s)], of_group(b, c // size), *(t[c] for t in (weight, bias) if t is not None))

    return y, of_group, of_group


@describe("aten.native_group_norm_backward")
def group_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, c: int, hxw: int, groups: int,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    size, space = c // groups, x.shape[2:]

    def dx(b: Index, c: Index, *s: Index) -> Expression:
        g = c // size

        def term(k: Index, *r: Index) -> Expression:
            place = (b, g * size + k, *r)
            return dy[place] * hidden(x[place], *([] if weight is None else [weight[g * size + k]]))

        known = [x[(b, c, *s)], mean[b, g], rstd[b, g], *([] if weight is None else [weight[c]])]
        return opaque(*known, linear=[dy[(b, c, *s)], Sum(term, extents=(size, *space))])

    def dw(c: Index) -> Expression:
        def term(b: Index, *r: Index) -> Expression:
            return dy[(b, c, *r)] * hidden(x[(b, c, *r)], mean[b, c // size], rstd[b, c // size])

        return Sum(term, extents=(x.shape[0], *space))

    def db(c: Index) -> Expression:
        return Sum(lambda b, *r: dy[(b, c, *r)], extents=(x.shape[0], *space))

    return [output for output, wanted in zip((dx, dw, db), mask, strict=True) if wanted]


# --- batch norm ------------------------------------------------------------------------------------------------------
@describe(
    "aten._native_batch_norm_legit_functional", "aten.native_batch_norm", "aten._native_batch_norm_legit",
    "aten._batch_norm_with_update_functional",
)  # fmt: skip
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool,
    momentum: float, eps: float, *_: Any,
) -> Any:  # fmt: skip
    """Training: statistics of the whole batch, agreed on when samples are cut. New running statistics are further
    outputs."""
    others = (x.shape[0], *x.shape[2:])

    def moment(c: Index, name: str) -> Expression:
        return shared(Sum(lambda n, *s: hidden(x[(n, c, *s)]), extents=others), name)

    def statistics(c: Index) -> list[Expression]:
        if training or mean is None or variance is None:
            return [moment(c, "sum"), moment(c, "sum of squares")]
        return [mean[c], variance[c]]

    def y(n: Index, c: Index, *s: Index) -> Expression:
        return hidden(x[(n, c, *s)], *statistics(c), *(t[c] for t in (weight, bias) if t is not None))

    def saved(c: Index) -> Expression:
        return hidden(*statistics(c))

    def running(old: Tensor) -> Any:
        return lambda c: hidden(old[c], *statistics(c))

    return [y, saved, saved, *(running(t) for t in (mean, variance) if t is not None)]


@describe("aten.native_batch_norm_backward")
def batch_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor,
    rstd: Tensor, training: bool, eps: float, mask: Sequence[bool],
) -> Any:  # fmt: skip
    others = (x.shape[0], *x.shape[2:])

    def dw(c: Index) -> Expression:
        def term(n: Index, *s: Index) -> Expression:
            return dy[(n, c, *s)] * hidden(x[(n, c, *s)], mean[c], rstd[c])

        return shared(Sum(term, extents=others), "weight")

    def db(c: Index) -> Expression:
        return shared(Sum(lambda n, *s: dy[(n, c, *s)], extents=others), "bias")

    def dx(n: Index, c: Index, *s: Index) -> Expression:
        scale = [t[c] for t in (weight, running_mean, running_var) if t is not None]
        return opaque(x[(n, c, *s)], mean[c], rstd[c], *scale, linear=[dy[(n, c, *s)], dw(c), db(c)])

    return [output for output, wanted in zip((dx, dw, db), mask, strict=True) if wanted]


# --- softmax ---------------------------------------------------------------------------------------------------------
@describe("aten._softmax", "aten._log_softmax", "aten._safe_softmax")
def softmax(x: Tensor, dim: int, *_: Any, **__: Any) -> Any:
    """Cut along its own dim it agrees on two numbers a row: the largest value and the sum of exponentials."""
    d = dim % max(x.rank, 1)

    def top(i: Coordinates) -> Expression:
        return shared(Max(lambda r: x[(*i[:d], r, *i[d + 1 :])]), "largest")

    def total(i: Coordinates) -> Expression:
        return shared(Sum(lambda r: hidden(x[(*i[:d], r, *i[d + 1 :])], top(i))), "total")

    return lambda *i: hidden(x[i], top(i), total(i))


@describe("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(dy: Tensor, y: Tensor, dim: int, *_: Any, **__: Any) -> Any:
    d = dim % max(y.rank, 1)

    def total(i: Coordinates) -> Expression:
        def term(r: Index) -> Expression:
            return dy[(*i[:d], r, *i[d + 1 :])] * hidden(y[(*i[:d], r, *i[d + 1 :])])

        return shared(Sum(term), "total")

    return lambda *i: opaque(y[i], linear=[dy[i], total(i)])


# --- losses ----------------------------------------------------------------------------------------------------------
@describe("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Any:
    """Minus the log-probability of each target; the mean divides by the number of counted targets, on which members
    agree."""
    classes = 1 if logp.rank > 1 else 0

    def at(t: Coordinates, c: Index) -> Access:
        return logp[(*t[:classes], c, *t[classes:])]

    def picked(*t: Index) -> Expression:
        def term(c: Index) -> Expression:
            found = equal(target[t], c) * at(t, c)
            return found if weight is None else found * weight[c]

        return -Sum(term)

    def counted() -> Expression:
        known = [] if weight is None else [weight[:]]
        return shared(Sum(lambda *t: opaque(target[t], *known), extents=target.shape), "count")

    def loss() -> Expression:
        total = Sum(picked, extents=target.shape)
        return total / counted() if reduction == 1 else total

    return (picked if reduction == 0 else loss), counted


@describe("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(
    dy: Tensor, logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, counted: Tensor
) -> Any:
    classes = 1 if logp.rank > 1 else 0

    def gradient(*i: Index) -> Expression:
        t, c = (*i[:classes], *i[classes + 1 :]), i[classes]
        known = [logp[i], counted[()], *([] if weight is None else [weight[c]])]
        return equal(target[t], c) * (dy[t] if dy.rank else dy[()]) * hidden(*known)

    return gradient


@describe(
    "aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy_with_logits",
    "aten.binary_cross_entropy", "aten.soft_margin_loss", "aten.kl_div",
)  # fmt: skip
def elementwise_loss(x: Tensor, y: Tensor, *rest: Any, **named: Any) -> Any:
    """`reduction` is the first whole number after the tensors: 0 none, 1 mean, 2 sum."""
    more = [t for t in (*rest, *named.values()) if isinstance(t, Tensor)]
    reduction = next(
        (r for r in (*rest, named.get("reduction", 1)) if isinstance(r, int) and not isinstance(r, bool)), 1
    )

    def each(*i: Index) -> Expression:
        value = hidden(x.aligned(i), y.aligned(i), *(t.aligned(i) for t in more))
        return value / extent(*i) if reduction == 1 else value

    return each if reduction == 0 else lambda: Sum(each, extents=x.shape)


@describe("aten.mse_loss_backward", "aten.smooth_l1_loss_backward", "aten.huber_loss_backward")
def elementwise_loss_backward(dy: Tensor, x: Tensor, y: Tensor, reduction: int, *_: Any) -> Any:
    def gradient(*i: Index) -> Expression:
        value = dy.aligned(i) * hidden(x[i], y[i])
        return value / extent(*i) if reduction == 1 else value

    return gradient


# --- pooling and resizing --------------------------------------------------------------------------------------------
def _planes(x: Tensor, i: Coordinates, dims: int) -> Access:
    return x[(*i[: x.rank - dims], *[ALL] * dims)]


@describe("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def max_pool(x: Tensor, kernel: Sequence[int], *_: Any) -> Any:
    """Its indices count within a whole plane, so planes are not cut."""
    k = len(kernel)
    plane = lambda *i: opaque(_planes(x, i, k))[i[-k:]]  # noqa: E731
    return plane, plane


@describe("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward")
def max_pool_backward(dy: Tensor, x: Tensor, kernel: Sequence[int], *rest: Any) -> Any:
    k = len(kernel)
    return lambda *i: opaque(_planes(x, i, k), _planes(rest[-1], i, k), linear=[_planes(dy, i, k)])[i[-k:]]


@describe("aten.avg_pool2d", "aten.avg_pool3d")
def avg_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Any = 0, ceil_mode: bool = False, *_: Any
) -> Any:
    """Windows side by side can be parted; others stay whole planes."""
    k = len(kernel)
    pads = [padding] if isinstance(padding, int) else list(padding)

    def plane(*i: Index) -> Opaque:
        return opaque(linear=[_planes(x, i, k)])[i[-k:]]

    def window(*i: Index) -> Opaque:
        lead, s = i[:-k], i[-k:]
        corners = [[j * n + o for j, n in zip(s, kernel, strict=True)] for o in (0,)]
        last = [j * n + n - 1 for j, n in zip(s, kernel, strict=True)]
        return opaque(linear=[x[(*lead, *place)] for place in (*corners, last)])

    beside = not any(pads) and not ceil_mode and list(stride or kernel) == list(kernel)
    return window if beside and all(n % m == 0 for n, m in zip(x.shape[-k:], kernel, strict=True)) else plane


@describe("aten.avg_pool2d_backward", "aten.avg_pool3d_backward")
def avg_pool_backward(dy: Tensor, x: Tensor, kernel: Sequence[int], *_: Any) -> Any:
    k = len(kernel)
    return lambda *i: opaque(_planes(x, i, k), linear=[_planes(dy, i, k)])[i[-k:]]


@describe(
    "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.upsample_nearest2d", "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d", "aten.upsample_nearest3d",
)  # fmt: skip
def resize(x: Tensor, size: Any, *_: Any) -> Any:
    k = x.rank - 2
    return lambda *i: opaque(linear=[_planes(x, i, k)])[i[-k:]]


@describe("aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(dy: Tensor, x: Tensor) -> Any:
    k = x.rank - 2
    return lambda *i: opaque(_planes(x, i, k), linear=[_planes(dy, i, k)])[i[-k:]]


@describe("aten.upsample_nearest2d_backward", "aten.upsample_bilinear2d_backward", "aten.upsample_bicubic2d_backward")
def resize_backward(dy: Tensor, *_: Any) -> Any:
    k = dy.rank - 2
    return lambda *i: opaque(linear=[_planes(dy, i, k)])[i[-k:]]
