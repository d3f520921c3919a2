"""Random calls of every described ATen kernel, for the numerical check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from simpart.testing.tdl_suite import Case, call_of, seeded

__all__ = ["CASES", "NOT_RUN", "case_for"]

NOT_RUN: Mapping[str, str] = {
    "aten._batch_norm_with_update_functional": "as _native_batch_norm_legit_functional, with a reserve of unknown size",
    "aten._native_batch_norm_legit": "changes its running statistics in place",
    "aten.native_batch_norm": "changes its running statistics in place",
    "aten.broadcast_to": "the joint graph holds expand",
    "aten.concat": "the joint graph holds cat",
    "aten.contiguous": "the joint graph holds clone",
    "aten.expand_as": "the joint graph holds expand",
    "aten.flatten": "the joint graph holds view",
    "aten.reshape": "the joint graph holds view",
    "aten.unflatten": "the joint graph holds view",
    "aten.narrow": "the joint graph holds slice",
    "aten.swapaxes": "the joint graph holds transpose",
    "aten.mT": "the joint graph holds transpose",
    "aten.numpy_T": "the joint graph holds permute",
    "aten.to": "the joint graph holds _to_copy",
    "aten.bernoulli_": "in place; the functional form is run",
    "aten._convolution": "the joint graph holds convolution",
    "aten._reshape_alias": "the joint graph holds view",
    "aten.split_with_sizes_copy": "the joint graph holds split_with_sizes",
    "aten.unsafe_split": "the joint graph holds split",
    "aten._unsafe_index": "the joint graph holds index",
    "aten._unsafe_index_put": "the joint graph holds index_put",
    "aten.nansum": "as sum",
    "aten.vdot": "as dot",
    "aten.empty_strided": "its values are not defined",
    "aten.new_empty_strided": "its values are not defined",
    "aten.max_pool3d_with_indices": "as max_pool2d_with_indices",
    "aten.max_pool3d_with_indices_backward": "as max_pool2d_with_indices_backward",
    "aten.avg_pool3d": "as avg_pool2d",
    "aten.avg_pool3d_backward": "as avg_pool2d_backward",
    "aten._adaptive_avg_pool3d": "as _adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d_backward": "as _adaptive_avg_pool2d_backward",
    "aten.upsample_nearest3d": "as upsample_nearest2d",
    "aten._fused_rms_norm_backward": "has no CPU kernel: the joint graph holds its pieces",
}
"""Described operators without a random case, and why."""


class Draw:
    """Random sizes and tensors of one case."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = seeded(seed)

    def size(self, *choices: int) -> int:
        return self.random.choice(choices or (2, 3, 4, 6, 8))

    def sizes(self, count: int) -> Any:
        return [self.size() for _ in range(count)]

    def rank(self, least: int = 1, most: int = 4) -> Any:
        return self.sizes(self.random.randint(least, most))

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.8 + 0.1

    def whole(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def truth(self, *shape: int) -> torch.Tensor:
        return self.whole(2, *shape).bool()

    def broadcast(self, shape: Sequence[int]) -> Any:
        """A shape that broadcasts with `shape`."""
        kept = shape[self.random.randint(0, len(shape)) :]
        return [self.random.choice((1, n, n)) for n in kept]


Made = tuple[Any, ...] | tuple[list[Any], dict[str, Any]]
Make = Callable[[Draw], Any]
CASES: dict[str, Make] = {}
"""Operator with overload to a function that draws its arguments: a tuple, or (list, dict) with named ones."""


def case_for(target: str, seed: int) -> Case:
    """One random call of an operator."""
    made = CASES[target](Draw(crc32(target.encode()) + seed))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list) and isinstance(made[1], dict):
        return call_of(target, made[0], made[1])
    return call_of(target, made)


def add(**made: Make) -> None:
    """`name__overload=` for aten; the default overload needs no suffix."""
    for key, make in made.items():
        name, _, overload = key.partition("__")
        CASES[f"aten.{name}.{overload or 'default'}"] = make


def _words(text: str) -> list[str]:
    """The names of kernels that are drawn alike."""
    return text.split()


def _gradient(*more: float) -> Make:
    return lambda d: (*_twins(d, 2), *more)


# --- pointwise -------------------------------------------------------------------------------------------------------
for _name in _words("""
    square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p abs sign sgn sin cos tan asin acos atan sinh cosh
    tanh sigmoid erf erfc erfinv reciprocal ceil floor round trunc frac logical_not isnan isinf isfinite relu
    gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus neg clone detach alias
    lift_fresh_copy nan_to_num sinc ones_like zeros_like empty_like rand_like randn_like logit bernoulli
"""):
    CASES[f"aten.{_name}.default"] = lambda d: (d.positive(*d.rank()),)
for _name in _words("""
    maximum minimum atan2 hypot fmax fmin heaviside
"""):
    CASES[f"aten.{_name}.default"] = lambda d: _pair(d)
CASES["aten.xlogy.Tensor"] = CASES["aten.copysign.Tensor"] = CASES["aten.remainder.Tensor"] = CASES[
    "aten.fmod.Tensor"
] = lambda d: _pair(d)
CASES["aten.floor_divide.default"] = lambda d: _pair(d)
for _name in _words("""
    eq ne lt le gt ge
"""):
    CASES[f"aten.{_name}.Tensor"] = lambda d: _pair(d)
    CASES[f"aten.{_name}.Scalar"] = lambda d: (d.real(*d.rank()), 0.2)
for _name in _words("""
    add sub mul div
"""):
    CASES[f"aten.{_name}.Tensor"] = lambda d: _pair(d)
    CASES[f"aten.{_name}.Scalar"] = lambda d: (d.real(*d.rank()), 1.7)
for _name in _words("""
    logical_and logical_or logical_xor
"""):
    CASES[f"aten.{_name}.default"] = lambda d: _pair(d, d.truth)
for _name in _words("""
    bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ bitwise_left_shift
"""):
    CASES[f"aten.{_name}.Tensor"] = lambda d: _pair(d, lambda *s: d.whole(9, *s))
for _name in _words("""
    threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward hardswish_backward
    hardsigmoid_backward mish_backward logit_backward
"""):
    CASES[f"aten.{_name}.default"] = _gradient(*((0.3,) if _name == "threshold_backward" else ()))


def _pair(d: Draw, make: Callable[..., torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = d.rank()
    make = make or d.positive
    tensors = [make(*shape), make(*d.broadcast(shape))]
    d.random.shuffle(tensors)
    return tensors[0], tensors[1]


def _twins(d: Draw, count: int) -> tuple[torch.Tensor, ...]:
    shape = d.rank()
    return tuple(d.positive(*shape) for _ in range(count))


def _dim(d: Draw, x: torch.Tensor) -> int:
    dim: int = d.pick(*range(-x.dim(), x.dim()))
    return dim


add(
    _to_copy=lambda d: ([d.real(*d.rank())], {"dtype": d.pick(torch.float64, torch.int64, torch.bool)}),
    pow__Tensor_Scalar=lambda d: (d.positive(*d.rank()), d.pick(2, 3, 0.5)),
    pow__Tensor_Tensor=lambda d: _pair(d),
    clamp=lambda d: (d.real(*d.rank()), -0.3, 0.6),
    clamp_min=lambda d: (d.real(*d.rank()), -0.3),
    clamp_max=lambda d: (d.real(*d.rank()), 0.3),
    bitwise_not=lambda d: (d.whole(9, *d.rank()),),
    threshold=lambda d: (d.real(*d.rank()), 0.1, 0.2),
    full_like=lambda d: (d.real(*d.rank()), 3.0),
    fill__Scalar=lambda d: (d.real(*d.rank()), 3.0),
    bucketize__Tensor=lambda d: (d.real(*d.rank()), d.real(d.size()).sort().values),
    native_dropout=lambda d: (d.real(*d.rank()), 0.0, True),
    native_dropout_backward=lambda d: (lambda s: (d.real(*s), d.truth(*s), 1.25))(d.rank()),
    elu_backward=lambda d: (*(lambda t: (t[0], 1.0, 1.0, 1.0, False, t[1]))(_twins(d, 2)),),
    leaky_relu_backward=lambda d: (*_twins(d, 2), 0.1, False),
    hardtanh_backward=lambda d: (*_twins(d, 2), -0.5, 0.5),
    softplus_backward=lambda d: (*_twins(d, 2), 1.0, 20.0),
    rsub__Scalar=lambda d: (d.real(*d.rank()), 2.0),
    rsub__Tensor=lambda d: _pair(d),
    div__Tensor_mode=lambda d: ([*_pair(d)], {"rounding_mode": "floor"}),
    copy=lambda d: (lambda s: (d.real(*s), d.real(*d.broadcast(s))))(d.rank()),
    where__self=lambda d: (lambda s: (d.truth(*s), d.real(*d.broadcast(s)), d.real(*d.broadcast(s))))(d.rank()),
    addcmul=lambda d: (*_twins(d, 3),),
    addcdiv=lambda d: (*_twins(d, 3),),
    lerp__Scalar=lambda d: (*_twins(d, 2), 0.3),
    lerp__Tensor=lambda d: (*_twins(d, 3),),
    masked_fill__Scalar=lambda d: (lambda s: (d.real(*s), d.truth(*d.broadcast(s)), d.pick(0, 0.0, -1.5)))(d.rank()),
)


# --- products --------------------------------------------------------------------------------------------------------
def _addmm(d: Draw) -> Any:
    m, k, n = d.sizes(3)
    return d.real(*d.pick((n,), (1, n), (m, n), (m, 1))), d.real(m, k), d.real(k, n)


def _linear(d: Draw) -> Any:
    *lead, k, n = d.rank(2)
    return d.real(*lead, k), d.real(n, k), d.pick(None, d.real(n))


add(
    mm=lambda d: (lambda m, k, n: (d.real(m, k), d.real(k, n)))(*d.sizes(3)),
    bmm=lambda d: (lambda b, m, k, n: (d.real(b, m, k), d.real(b, k, n)))(*d.sizes(4)),
    mv=lambda d: (lambda m, k: (d.real(m, k), d.real(k)))(*d.sizes(2)),
    dot=lambda d: (lambda k: (d.real(k), d.real(k)))(d.size()),
    addmm=_addmm,
    addmv=lambda d: (lambda m, k: (d.real(m), d.real(m, k), d.real(k)))(*d.sizes(2)),
    baddbmm=lambda d: (lambda b, m, k, n: (d.real(b, m, n), d.real(b, m, k), d.real(b, k, n)))(*d.sizes(4)),
    linear=_linear,
)


def _convolution(d: Draw) -> list[Any]:
    """x, weight, then the arguments of a convolution."""
    dims, groups = d.pick(1, 2, 2), d.pick(1, 1, 2, 4)
    transposed = d.pick(False, False, True)
    ins, outs = groups * d.size(1, 2, 4), groups * d.size(1, 2, 4)
    kernel = [d.size(1, 2, 3) for _ in range(dims)]
    stride = [k if transposed and d.pick(True, True, False) else d.size(1, 2) for k in kernel]
    padding = [0 if transposed and s == k else d.size(0, k // 2) for s, k in zip(stride, kernel, strict=True)]
    dilation = [1 if transposed else d.size(1, 1, 2)] * dims
    space = [d.size(6, 8, 12) for _ in range(dims)]
    x = d.real(d.size(2, 4), ins, *space)
    weight = d.real(ins if transposed else outs, (outs if transposed else ins) // groups, *kernel)
    return [x, weight, stride, padding, dilation, transposed, [0] * dims, groups, outs]


def _forward(d: Draw) -> Any:
    x, weight, stride, padding, dilation, transposed, output_padding, groups, outs = _convolution(d)
    return x, weight, d.pick(None, d.real(outs)), stride, padding, dilation, transposed, output_padding, groups


def _backward(d: Draw) -> Any:
    x, weight, *rest, outs = _convolution(d)
    y = torch.ops.aten.convolution(x, weight, None, *rest)
    bias = d.pick(True, False)
    return d.real(*y.shape), x, weight, [outs] if bias else [0], *rest, [d.pick(True, True, False), True, bias]


add(convolution=_forward, convolution_backward=_backward)


def _grouped(d: Draw) -> tuple[Any, ...]:
    """Runs of rows, of columns, of terms, or none: as many as experts, some of them empty."""
    experts, m, k, n = d.sizes(4)
    form = d.pick("rows", "columns", "terms", "batch")
    ends = torch.sort(d.whole({"rows": m, "columns": n, "terms": k}.get(form, 1) + 1, experts)).values.int()
    if form == "rows":
        ends[-1] = m
        return d.real(m, k), d.real(experts, k, n), ends
    if form == "columns":
        ends[-1] = n
        return d.real(experts, m, k), d.real(k, n), ends
    ends[-1] = k
    return (d.real(experts, m, k), d.real(experts, k, n)) if form == "batch" else (d.real(m, k), d.real(k, n), ends)


add(_grouped_mm=_grouped)


def _attention(d: Draw) -> tuple[list[Any], dict[str, Any]]:
    batch, keys, share, seq, size = d.size(2, 4), d.size(2, 4), d.size(1, 1, 2), d.size(4, 8), d.size(4, 8)
    shape, kv = (batch, keys * share, seq, size), (batch, keys, seq, size)
    causal = d.pick(True, False)
    masked = not causal and d.pick(True, False)
    mask = {"attn_mask": d.real(d.pick(1, batch), d.pick(1, keys * share), seq, seq)} if masked else {}
    return [d.real(*shape), d.real(*kv), d.real(*kv), 0.0, causal], mask


def _attention_backward(d: Draw) -> Any:
    (q, k, v, dropout, causal), mask = _attention(d)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, **mask)
    return [d.real(*out.shape), q, k, v, out, lse, dropout, causal], mask


add(
    _scaled_dot_product_flash_attention_for_cpu=_attention,
    _scaled_dot_product_flash_attention_for_cpu_backward=_attention_backward,
)


# --- look-ups --------------------------------------------------------------------------------------------------------
def _gather(d: Draw, source: bool) -> Any:
    x = d.real(*d.rank())
    dim = _dim(d, x)
    shape = [d.size() if k == dim % x.dim() else n for k, n in enumerate(x.shape)]
    index = d.whole(x.shape[dim], *shape)
    return (x, dim, index, d.real(*shape)) if source else (x, dim, index)


def _index(d: Draw) -> Any:
    x = d.real(*d.rank(1, 3))
    start = d.random.randrange(x.dim())
    count = d.random.randint(1, x.dim() - start)
    rows = d.rank(1, 2)
    picks = [d.whole(x.shape[start + k], *rows) for k in range(count)]
    return x, [*[None] * start, *picks]


def _index_put(d: Draw) -> Any:
    x = d.real(*d.rank(2, 3))
    rows = d.rank(1, 2)
    ids, accumulate = d.whole(x.shape[0], *rows), d.pick(True, False)
    if not accumulate:  # which of equal rows wins is not defined
        rows = [min(rows[0], x.shape[0])]
        ids = torch.randperm(x.shape[0], generator=d.generator)[: rows[0]]
    return x, [ids], d.real(*rows, *x.shape[1:]), accumulate


def _scatter(d: Draw) -> tuple[Any, ...]:
    x = d.real(*d.rank())
    dim = _dim(d, x)
    order = torch.argsort(d.real(*x.shape), dim)
    return x, dim, order, d.real(*x.shape)


add(
    embedding=lambda d: (lambda v, h: (d.real(v, h), d.whole(v, *d.rank(1, 2))))(*d.sizes(2)),
    embedding_dense_backward=lambda d: (
        lambda s, v, h: (d.real(*s, h), d.whole(v, *s), v, -1, d.pick(True, False, False))
    )(d.rank(1, 2), *d.sizes(2)),
    gather=lambda d: _gather(d, False),
    scatter_add=lambda d: _gather(d, True),
    scatter__src=_scatter,
    scatter__value=lambda d: (*_scatter(d)[:3], 1.5),
    index_select=lambda d: (lambda x: (lambda k: (x, k, d.whole(x.shape[k], d.size())))(_dim(d, x)))(d.real(*d.rank())),
    index__Tensor=_index,
    index_put=_index_put,
)


# --- movement --------------------------------------------------------------------------------------------------------
def _view(d: Draw) -> Any:
    x = d.real(*d.rank(1, 4))
    left = x.numel()
    size: list[int] = []
    while left > 1 and len(size) < 3:
        size.append(d.pick(*(k for k in range(1, left + 1) if left % k == 0)))
        left //= size[-1]
    size.append(left)
    if d.pick(True, False):
        size = [*x.shape[:-2], x.shape[-2] * x.shape[-1]] if x.dim() > 1 else [2 if len(x) % 2 == 0 else 1, -1]
    return x, size


def _permute(d: Draw) -> Any:
    x = d.real(*d.rank())
    order = list(range(x.dim()))
    d.random.shuffle(order)
    return x, order


def _squeeze(d: Draw) -> tuple[torch.Tensor, int]:
    shape = d.rank()
    at = d.random.randrange(len(shape) + 1)
    return d.real(*shape[:at], 1, *shape[at:]), at


def _slice(d: Draw) -> Any:
    x = d.real(*d.rank())
    dim = _dim(d, x)
    size, step = x.shape[dim], d.pick(1, 1, 2)
    half = d.pick(True, False) and size % 2 == 0
    start = d.pick(0, size // 2) if half else d.random.randrange(size)
    end = start + size // 2 if half else d.pick(size, 2**63 - 1, d.random.randint(start + 1, size))
    return x, dim, start, end, step


def _slice_backward(d: Draw) -> Any:
    x, dim, start, end, step = _slice(d)
    y = torch.ops.aten.slice(x, dim, start, end, step)
    return d.real(*y.shape), list(x.shape), dim, start, end, step


def _expand(d: Draw) -> Any:
    shape = d.rank()
    return d.real(*d.broadcast(shape)), shape


def _split(d: Draw) -> Any:
    x = d.real(*d.rank())
    dim = _dim(d, x)
    return x, d.pick(*(k for k in range(1, x.shape[dim] + 1))), dim


def _split_sizes(d: Draw) -> Any:
    x, first, dim = _split(d)
    rest = x.shape[dim] - first
    return x, [first, rest] if rest else [first], dim


def _cat(d: Draw) -> Any:
    x = d.real(*d.rank())
    dim, equal = d.random.randrange(x.dim()), d.pick(True, False)
    shapes = [[x.shape[k] if k != dim or equal else d.size() for k in range(x.dim())] for _ in range(d.size(2, 3))]
    return [d.real(*shape) for shape in shapes], d.pick(dim, dim - x.dim())


def _stack(d: Draw) -> Any:
    shape = d.rank(1, 3)
    return [d.real(*shape) for _ in range(d.size(2, 3))], d.pick(*range(-len(shape) - 1, len(shape) + 1))


def _unfold(d: Draw) -> tuple[torch.Tensor, int, int, int]:
    x = d.real(*[d.size(4, 6, 8) for _ in range(d.size(1, 2, 3))])
    return x, _dim(d, x), d.size(1, 2, 3), d.size(1, 2)


def _unfold_backward(d: Draw) -> Any:
    x, dim, size, step = _unfold(d)
    y = x.unfold(dim, size, step)
    return d.real(*y.shape), list(x.shape), dim, size, step


def _select(d: Draw) -> tuple[torch.Tensor, int, int]:
    x = d.real(*d.rank())
    dim = _dim(d, x)
    return x, dim, d.random.randrange(x.shape[dim])


def _select_other(d: Draw, scatter: bool) -> Any:
    x, dim, at = _select(d)
    y = d.real(*x.select(dim, at).shape)
    return (x, y, dim, at) if scatter else (y, list(x.shape), dim, at)


def _slice_scatter(d: Draw) -> Any:
    x, dim, start, end, step = _slice(d)
    return x, d.real(*torch.ops.aten.slice(x, dim, start, end, step).shape), dim, start, end, step


add(
    view=_view,
    _unsafe_view=_view,
    expand=_expand,
    permute=_permute,
    transpose__int=lambda d: (lambda x: (x, _dim(d, x), _dim(d, x)))(d.real(*d.rank())),
    t=lambda d: (d.real(*d.rank(1, 2)),),
    squeeze__dim=_squeeze,
    squeeze__dims=lambda d: (lambda t: (t[0], [t[1]]))(_squeeze(d)),
    squeeze=lambda d: _squeeze(d)[:1],
    unsqueeze=lambda d: (lambda x: (x, d.pick(*range(-x.dim() - 1, x.dim() + 1))))(d.real(*d.rank())),
    repeat=lambda d: (lambda x: (x, [d.size(1, 2, 4) for _ in range(x.dim() + d.size(0, 1))]))(d.real(*d.rank(1, 3))),
    slice__Tensor=_slice,
    slice_backward=_slice_backward,
    select__int=_select,
    select_backward=lambda d: _select_other(d, False),
    select_scatter=lambda d: _select_other(d, True),
    slice_scatter=_slice_scatter,
    split__Tensor=_split,
    split_with_sizes=_split_sizes,
    unbind__int=lambda d: (lambda x: (x, _dim(d, x)))(d.real(*d.rank())),
    unfold=_unfold,
    unfold_backward=_unfold_backward,
    flip=lambda d: (lambda x: (x, [_dim(d, x)]))(d.real(*d.rank())),
    roll=lambda d: (lambda x: (x, [1], [_dim(d, x)]))(d.real(*d.rank())),
    constant_pad_nd=lambda d: (lambda x: (x, [d.size(0, 1), d.size(0, 2)], d.pick(0.0, 1.5)))(d.real(*d.rank())),
    cat=_cat,
    stack=_stack,
    zeros=lambda d: (d.rank(),),
    ones=lambda d: (d.rank(),),
    full=lambda d: (d.rank(), 2.5),
    empty__memory_format=lambda d: (d.rank(),),
    rand=lambda d: (d.rank(),),
    randn=lambda d: (d.rank(),),
    randint=lambda d: (5, d.rank()),
    scalar_tensor=lambda d: (2.0,),
    new_zeros=lambda d: (d.real(*d.rank()), d.rank()),
    new_ones=lambda d: (d.real(*d.rank()), d.rank()),
    new_full=lambda d: (d.real(*d.rank()), d.rank(), 2.0),
    new_empty=lambda d: (d.real(*d.rank()), d.rank()),
    arange=lambda d: (d.size(),),
    arange__start_step=lambda d: (0, d.size(), 1),
    linspace=lambda d: (0.0, 1.0, d.size()),
    eye=lambda d: (d.size(),),
    tril=lambda d: (d.real(*d.rank(2)), d.size(0, 1)),
    triu=lambda d: (d.real(*d.rank(2)), d.size(0, 1)),
    tril_indices=lambda d: (3, 4),
    triu_indices=lambda d: (3, 4),
)


# --- reductions ------------------------------------------------------------------------------------------------------
def _reduced(d: Draw, make: Callable[..., torch.Tensor] | None = None) -> Any:
    x = (make or d.real)(*d.rank())
    dims = d.random.sample(range(-x.dim(), 0), d.random.randint(1, x.dim()))
    return x, dims, d.pick(True, False)


def _spread(d: Draw) -> Any:
    x, dims, keep = _reduced(d)
    return [x, dims], {"correction": 0, "keepdim": keep}


def _one(d: Draw) -> Any:
    x = d.real(*d.rank())
    return x, _dim(d, x), d.pick(True, False)


add(
    sum__dim_IntList=_reduced,
    sum=lambda d: (d.real(*d.rank()),),
    mean__dim=_reduced,
    mean=lambda d: (d.real(*d.rank()),),
    amax=_reduced,
    amin=_reduced,
    any__dim=lambda d: (d.truth(3, 4, 2), d.size(0, 1, 2), d.pick(True, False)),
    all__dim=lambda d: (d.truth(3, 4, 2), d.size(0, 1, 2), d.pick(True, False)),
    prod__dim_int=_one,
    max__dim=_one,
    min__dim=_one,
    max=lambda d: (d.real(*d.rank()),),
    min=lambda d: (d.real(*d.rank()),),
    argmax=_one,
    argmin=_one,
    logsumexp=_reduced,
    count_nonzero__dim_IntList=lambda d: _reduced(d)[:2],
    var__correction=_spread,
    std__correction=_spread,
    var_mean__correction=_spread,
    std_mean__correction=_spread,
    linalg_vector_norm=lambda d: (lambda x, dims, keep: (x, 2, dims, keep))(*_reduced(d)),
    norm__ScalarOpt_dim=lambda d: (lambda x, dims, keep: (x, 2, dims, keep))(*_reduced(d)),
    histc=lambda d: (d.real(d.size()), d.size(), *d.pick((0, 0), (-1, 1), (-0.5, 2))),
    cumsum=lambda d: _one(d)[:2],
    cumprod=lambda d: _one(d)[:2],
    logcumsumexp=lambda d: _one(d)[:2],
    sort=lambda d: (*_one(d)[:2], False),
    argsort=lambda d: _one(d)[:2],
    cummax=lambda d: _one(d)[:2],
    cummin=lambda d: _one(d)[:2],
    topk=lambda d: (lambda x, dim, _: (x, d.size(1, 2), dim))(*_one(d)),
)


# --- norms, softmax, losses, pooling ---------------------------------------------------------------------------------
def _layer_norm(d: Draw) -> list[Any]:
    x = d.real(*d.rank(2))
    shape = list(x.shape[-d.random.randint(1, x.dim() - 1) :])
    return [x, shape, *d.pick((d.real(*shape), d.real(*shape)), (None, None)), 1e-5]


def _layer_norm_backward(d: Draw) -> Any:
    x, shape, weight, bias, eps = _layer_norm(d)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
    given = weight is not None
    return d.real(*x.shape), x, shape, mean, rstd, weight, bias, [True, given, given]


def _rms_norm(d: Draw) -> list[Any]:
    x, shape, weight, _, eps = _layer_norm(d)
    return [x, shape, weight, eps]


def _group_norm(d: Draw) -> list[Any]:
    groups = d.size(2, 4)
    channels = groups * d.size(1, 2)
    x = d.real(d.size(), channels, *d.rank(1, 2))
    given = d.pick((d.real(channels), d.real(channels)), (None, None))
    return [x, *given, x.shape[0], channels, x[0, 0].numel(), groups, 1e-5]


def _group_norm_backward(d: Draw) -> Any:
    x, weight, bias, n, c, hxw, groups, eps = _group_norm(d)
    _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, n, c, hxw, groups, eps)
    return d.real(*x.shape), x, mean, rstd, weight, n, c, hxw, groups, [True, weight is not None, weight is not None]


def _batch_norm(d: Draw) -> Any:
    c = d.size()
    x = d.real(d.size(), c, *d.rank(1, 2))
    return x, d.real(c), d.real(c), d.real(c), d.positive(c), True, 0.1, 1e-5


def _batch_norm_backward(d: Draw) -> Any:
    x, weight, bias, mean, var, *rest = _batch_norm(d)
    _, m, r, *_ = torch.ops.aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, *rest)
    return d.real(*x.shape), x, weight, mean, var, m, r, True, 1e-5, [True, True, True]


def _softmax(d: Draw) -> Any:
    x = d.real(*d.rank())
    return x, _dim(d, x), False


def _softmax_backward(d: Draw, log: bool) -> Any:
    x, dim, _ = _softmax(d)
    y = x.log_softmax(dim) if log else x.softmax(dim)
    return d.real(*x.shape), y, dim, torch.float64


def _loss(d: Draw, flat: bool) -> list[Any]:
    n, c = d.size(), d.size()
    space = [] if flat else d.sizes(2)
    target = d.whole(c, n, *space)
    if d.pick(True, False) and target.numel() > 1:
        target.view(-1)[0] = -100
    return [d.real(n, c, *space), target, d.pick(None, d.positive(c)), d.pick(0, 1, 2), -100]


def _loss_backward(d: Draw, flat: bool) -> Any:
    logp, target, weight, reduction, ignored = _loss(d, flat)
    forward = torch.ops.aten.nll_loss_forward if flat else torch.ops.aten.nll_loss2d_forward
    loss, total = forward(logp, target, weight, reduction, ignored)
    return d.real(*loss.shape), logp, target, weight, reduction, ignored, total


def _elementwise_loss_backward(d: Draw, *more: Any) -> Any:
    x, y = _twins(d, 2)
    reduction = d.pick(0, 1, 2)
    return d.real(*(x.shape if reduction == 0 else ())), x, y, reduction, *more


def _plane(d: Draw) -> torch.Tensor:
    return d.real(d.size(), d.size(), d.size(4, 8), d.size(4, 8))


def _max_pool_backward(d: Draw) -> Any:
    x = _plane(d)
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return d.real(*y.shape), x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices


def _avg_pool(d: Draw) -> list[Any]:
    kernel, stride, padding = d.pick(([2, 2], [2, 2], [0, 0]), ([3, 3], [2, 2], [1, 1]), ([2, 4], [2, 4], [0, 0]))
    return [_plane(d), kernel, stride, padding, False, True]


def _avg_pool_backward(d: Draw) -> Any:
    x, *rest = _avg_pool(d)
    return d.real(*torch.ops.aten.avg_pool2d(x, *rest).shape), x, *rest, None


add(
    native_layer_norm=_layer_norm,
    native_layer_norm_backward=_layer_norm_backward,
    _fused_rms_norm=_rms_norm,
    native_group_norm=_group_norm,
    native_group_norm_backward=_group_norm_backward,
    _native_batch_norm_legit_functional=_batch_norm,
    native_batch_norm_backward=_batch_norm_backward,
    _softmax=_softmax,
    _log_softmax=_softmax,
    _safe_softmax=lambda d: _softmax(d)[:2],
    _softmax_backward_data=lambda d: _softmax_backward(d, False),
    _log_softmax_backward_data=lambda d: _softmax_backward(d, True),
    nll_loss_forward=lambda d: _loss(d, True),
    nll_loss2d_forward=lambda d: _loss(d, False),
    nll_loss_backward=lambda d: _loss_backward(d, True),
    nll_loss2d_backward=lambda d: _loss_backward(d, False),
    mse_loss=lambda d: (*_twins(d, 2), d.pick(0, 1, 2)),
    l1_loss=lambda d: (*_twins(d, 2), d.pick(0, 1, 2)),
    smooth_l1_loss=lambda d: (*_twins(d, 2), d.pick(0, 1, 2)),
    huber_loss=lambda d: (*_twins(d, 2), d.pick(0, 1, 2)),
    soft_margin_loss=lambda d: (*_twins(d, 2), d.pick(0, 1, 2)),
    kl_div=lambda d: (*_twins(d, 2), d.pick(0, 1, 2)),
    binary_cross_entropy=lambda d: (*_twins(d, 2), None, d.pick(0, 1, 2)),
    binary_cross_entropy_with_logits=lambda d: (*_twins(d, 2), None, None, d.pick(0, 1, 2)),
    mse_loss_backward=lambda d: _elementwise_loss_backward(d),
    smooth_l1_loss_backward=lambda d: _elementwise_loss_backward(d, 1.0),
    huber_loss_backward=lambda d: _elementwise_loss_backward(d, 1.0),
    max_pool2d_with_indices=lambda d: (_plane(d), [3, 3], [2, 2], [1, 1]),
    max_pool2d_with_indices_backward=_max_pool_backward,
    avg_pool2d=_avg_pool,
    avg_pool2d_backward=_avg_pool_backward,
    _adaptive_avg_pool2d=lambda d: (_plane(d), [2, 2]),
    _adaptive_avg_pool2d_backward=lambda d: (lambda x: (d.real(*x.shape[:2], 2, 2), x))(_plane(d)),
    upsample_nearest2d=lambda d: (_plane(d), [16, 16]),
    upsample_bilinear2d=lambda d: (_plane(d), [16, 16], False),
    upsample_bicubic2d=lambda d: (_plane(d), [16, 16], False),
    upsample_nearest2d_backward=lambda d: (d.real(4, 4, 16, 16), [16, 16], [4, 4, 8, 8]),
    upsample_bilinear2d_backward=lambda d: (d.real(4, 4, 16, 16), [16, 16], [4, 4, 8, 8], False),
    upsample_bicubic2d_backward=lambda d: (d.real(4, 4, 16, 16), [16, 16], [4, 4, 8, 8], False),
)


def _updates(count: int) -> Make:
    return lambda d: _twins(d, 2 + count)


CASES.update({
    "simpart.accumulate": _updates(0), "simpart.optimizer.sgd": _updates(0), "simpart.optimizer.momentum": _updates(1),
    "simpart.optimizer.adam": _updates(2), "simpart.optimizer.adamw": _updates(2),
})  # fmt: skip
