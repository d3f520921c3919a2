"""Pointwise kernels, reductions, and kernels that work along some dims of their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simpart.tdl.expression import (
    ALL,
    Access,
    Expression,
    Max,
    Min,
    Prod,
    Sum,
    Tensor,
    as_expression,
    extent,
    hidden,
    opaque,
)
from simpart.tdl.index import Index
from simpart.tdl.linearity import FLOATS
from simpart.tdl.registry import describe

Coordinates = tuple[Index, ...]


def at(value: Any, i: Coordinates) -> Expression:
    """A tensor's element under broadcasting, or a number."""
    return value.aligned(i) if isinstance(value, Tensor) else as_expression(value) if _number(value) else hidden()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def tensors(*arguments: Any, **named: Any) -> list[Tensor]:
    """All tensors among the arguments of a call, in order."""
    found: list[Tensor] = []
    for argument in (*arguments, *named.values()):
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list):
            found += tensors(*argument)
    return found


def pointwise(*arguments: Any, **named: Any) -> Any:
    """Some function of the elements that broadcasting pairs."""
    return lambda *i: hidden(*(t.aligned(i) for t in tensors(*arguments, **named)))


_POINTWISE = """
    pow square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p abs sign sgn sin cos tan asin acos atan atan2 sinh
    cosh tanh sigmoid erf erfc erfinv reciprocal ceil floor round trunc frac clamp clamp_min clamp_max minimum
    maximum eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
    bitwise_xor isnan isinf isfinite relu gelu silu mish elu celu selu leaky_relu hardtanh hardswish
    hardsigmoid softplus threshold remainder fmod floor_divide ones_like full_like empty_like rand_like
    randn_like fill hypot nan_to_num xlogy bernoulli  logit fmax fmin heaviside
    copysign sinc __and__ __or__ __xor__ bitwise_left_shift
"""
describe(*(f"aten.{name}" for name in _POINTWISE.split()))(pointwise)
describe("aten.bucketize")(lambda x, edges, **_: lambda *i: opaque(x[i], edges[:]))
describe("aten.native_dropout")(lambda x, *_: (lambda *i: hidden(x[i]), lambda *i: hidden(x[i])))

_GRADIENTS = """
    threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward elu_backward leaky_relu_backward
    hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward native_dropout_backward
    logit_backward
"""


@describe(*(f"aten.{name}" for name in _GRADIENTS.split()))
def pointwise_backward(dy: Tensor, *rest: Any, **named: Any) -> Any:
    """The gradient times some function of what the forward saw."""
    return lambda *i: dy.aligned(i) * hidden(*(t.aligned(i) for t in tensors(*rest, **named)))


# --- linear ones -----------------------------------------------------------------------------------------------------
describe("aten.add")(lambda a, b, alpha=1: lambda *i: at(a, i) + alpha * at(b, i))
describe("aten.sub")(lambda a, b, alpha=1: lambda *i: at(a, i) - alpha * at(b, i))
describe("aten.rsub")(lambda a, b, alpha=1: lambda *i: at(b, i) - alpha * at(a, i))
describe("aten.mul")(lambda a, b: lambda *i: at(a, i) * at(b, i))
describe("aten.neg")(lambda a: lambda *i: -a[i])
describe("aten.clone", "aten.detach", "aten.alias", "aten.contiguous", "aten.lift_fresh_copy")(
    lambda a, *_, **__: lambda *i: a[i]
)
describe("aten.zeros_like")(lambda a, *_, **__: lambda *i: 0 * a[i])
describe("aten.where")(lambda c, a, b: lambda *i: hidden(at(c, i)) * at(a, i) + hidden(at(c, i)) * at(b, i))
describe("aten.addcmul")(lambda x, a, b, value=1: lambda *i: at(x, i) + value * at(a, i) * at(b, i))
describe("aten.addcdiv")(lambda x, a, b, value=1: lambda *i: at(x, i) + value * at(a, i) / at(b, i))
describe("aten.lerp")(lambda a, b, w: lambda *i: at(a, i) * hidden(at(w, i)) + at(b, i) * hidden(at(w, i)))


@describe("aten.div")
def div(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    return pointwise(a, b) if rounding_mode else lambda *i: at(a, i) / at(b, i)


@describe("aten._to_copy", "aten.to")
def to_copy(a: Tensor, *_: Any, dtype: Any = None, **__: Any) -> Any:
    """Linear unless it rounds to whole numbers."""
    name = dtype["dtype"] if isinstance(dtype, dict) else a.dtype
    return (lambda *i: a[i]) if name.startswith(FLOATS) else pointwise(a)


@describe("aten.copy")
def copy(a: Tensor, b: Tensor, *_: Any) -> Any:
    return (lambda *i: 0 * a[i] + b.aligned(i)) if a.dtype.startswith(FLOATS) else pointwise(a, b)


@describe("aten.masked_fill")
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Any:
    if _number(value) and value == 0:
        return lambda *i: x.aligned(i) * hidden(mask.aligned(i))
    return lambda *i: hidden(x.aligned(i), mask.aligned(i), at(value, i))


# --- reductions ------------------------------------------------------------------------------------------------------
def dims_of(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """Reduced dims, sorted; none given means all."""
    if isinstance(dims, int):
        dims = [dims]
    return sorted({d % max(x.rank, 1) for d in dims}) if dims and x.rank else list(range(x.rank))


def across(x: Tensor, i: Coordinates, gone: Sequence[int], keepdim: bool, fill: Sequence[Any]) -> Access:
    """`x` at output coordinates of a reduction, `fill` standing in the reduced dims."""
    kept = iter([j for d, j in enumerate(i) if d not in gone] if keepdim else i)
    new = iter(fill)
    return x[tuple(next(new) if d in gone else next(kept) for d in range(x.rank))]


def reduction(make: Callable[..., Expression], scaled: bool = False) -> Callable[..., Any]:
    """A description of a kernel that reduces some dims of one input with Sum, Max, Min or Prod."""

    def describes(x: Tensor, dims: int | Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> Any:
        gone = dims_of(x, dims)

        def reduced(*i: Index) -> Expression:
            if not gone:
                return x[i]

            def term(*r: Index) -> Expression:
                value = across(x, i, gone, keepdim, r)
                return value / extent(*r) if scaled else value

            return make(term, extents=[x.shape[d] for d in gone])

        return reduced

    return describes


describe("aten.sum", "aten.nansum")(reduction(Sum))
describe("aten.mean")(reduction(Sum, scaled=True))
describe("aten.amax", "aten.any")(reduction(Max))
describe("aten.amin", "aten.all")(reduction(Min))
describe("aten.prod")(reduction(Prod))


@describe("aten.max")
def maximum(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Tensor):
        return pointwise(x, dim)
    return reduction(Max)(x) if dim is None else (_along(x, dim, keepdim), _along(x, dim, keepdim))


@describe("aten.min")
def minimum(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Tensor):
        return pointwise(x, dim)
    return reduction(Min)(x) if dim is None else (_along(x, dim, keepdim), _along(x, dim, keepdim))


def _along(x: Tensor, dims: int | Sequence[int] | None, keepdim: bool) -> Callable[..., Expression]:
    """One value per position of the other dims."""
    gone = dims_of(x, dims)
    return lambda *i: opaque(across(x, i, gone, keepdim, [ALL] * len(gone)))


@describe("aten.argmax", "aten.argmin", "aten.logsumexp", "aten.count_nonzero")
def along(x: Tensor, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    return _along(x, dims, keepdim)


@describe("aten.var", "aten.std")
def spread(x: Tensor, dims: Any = None, unbiased: Any = True, keepdim: bool = False, **named: Any) -> Any:
    dims = None if isinstance(dims, bool) else dims
    return _along(x, dims, named.get("keepdim", keepdim))


@describe("aten.var_mean", "aten.std_mean")
def spread_mean(x: Tensor, dims: Any = None, unbiased: Any = True, keepdim: bool = False, **named: Any) -> Any:
    one = spread(x, dims, unbiased, keepdim, **named)
    return one, one


@describe("aten.linalg_vector_norm", "aten.norm")
def norm(x: Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return _along(x, dims, keepdim)


@describe("aten.histc")
def histogram(x: Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> Any:
    """Counts add up, where the bounds of the bins do not come from the data."""
    if low == high:
        return lambda b: opaque(x[(ALL,) * x.rank])[b]
    return lambda b: Sum(lambda *t: opaque(x[t])[b], extents=x.shape)


# --- along one dim, same size ----------------------------------------------------------------------------------------
def scan(linear: bool = False, outputs: int = 1) -> Callable[..., Any]:
    """A kernel whose results along `dim` depend on all of that dim."""

    def describes(x: Tensor, *rest: Any, dim: int | None = None, **_: Any) -> Any:
        numbers = [r for r in rest if isinstance(r, int) and not isinstance(r, bool)]
        d = (dim if dim is not None else numbers[0] if numbers else -1) % max(x.rank, 1)

        def value(*i: Index) -> Expression:
            if not x.rank:
                return hidden(x[()])
            line = x[(*i[:d], ALL, *i[d + 1 :])]
            return (opaque(linear=[line]) if linear else opaque(line))[i[d]]

        return value if outputs == 1 else (value,) * outputs

    return describes


describe("aten.cumsum")(scan(linear=True))
describe("aten.cumprod", "aten.argsort", "aten.logcumsumexp")(scan())
describe("aten.sort", "aten.cummax", "aten.cummin")(scan(outputs=2))


@describe("aten.topk")
def topk(x: Tensor, k: int, dim: int = -1, *_: Any) -> Any:
    return scan(outputs=2)(x, dim)


@describe("aten.scatter")
def scatter(x: Tensor, dim: int, index: Tensor, source: Any, **_: Any) -> Any:
    """Cut along the other dims where index and source are as large as the result there."""
    d = dim % max(x.rank, 1)
    parts = [index, *([source] if isinstance(source, Tensor) else [])]
    same = [all(t.shape[k] == n for t in parts) and k != d for k, n in enumerate(x.shape)]

    def put(*i: Index) -> Expression:
        place = tuple(j if s else ALL for j, s in zip(i, same, strict=True))
        return opaque(*(t[place] for t in (x, *parts)))[tuple(j for j, s in zip(i, same, strict=True) if not s)]

    return put


# --- optimizer -------------------------------------------------------------------------------------------------------
def update(parameter: Tensor, gradient: Tensor, *states: Tensor) -> Any:
    """New parameter and states, element by element."""
    return [lambda *i: hidden(*(t[i] for t in (parameter, gradient, *states)))] * (1 + len(states))


describe(*(f"simpart.optimizer.{name}" for name in ("sgd", "momentum", "adam", "adamw")))(update)
describe("simpart.accumulate")(lambda total, gradient: lambda *i: total[i] + gradient[i])
