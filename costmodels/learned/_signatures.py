"""What a kernel's signature asks of which family: the edge between captured graphs and learned models.

A kernel that was measured itself is asked directly. Others are told through a measured one that does like work, times a
factor with a spread of its own: `through` says so, and their provenance is analytic.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from simpart.cost import Signature, TensorForm
from simpart.costmodels.roofline import signature_family, work_of
from simpart.graph.sizes import DTYPE_BYTES
from simpart.kernels.ops import base_name, family_of

__all__ = ["Question", "question_of"]


class Question(NamedTuple):
    """Ask `family` about `dims` (in the order of its dims) with `op`; multiply by `factor`. `prior_sd` is the log-sd
    that the detour adds, 0 where this very kind of kernel was measured."""

    family: str
    dims: tuple[float, ...]
    op: str = ""
    factor: float = 1.0
    prior_sd: float = 0.0


class _Target(NamedTuple):
    """What the name of a kernel says."""

    name: str
    family: str
    backward: bool
    simple: bool  # moves each of its tensors once


@lru_cache(maxsize=4096)
def _target(target: str) -> _Target:
    name = base_name(target)
    special = name in ("index", "index_select", "gather", "take", "take_along_dim", "_unsafe_index", "embedding")
    return _Target(name, family_of(target), "backward" in name, not special and not name.startswith("nll_loss"))


_HALF = frozenset({"bfloat16", "float16"})
_MEMORY_FAMILIES = frozenset(
    {"pointwise", "norm", "softmax", "embedding", "copy", "fill", "random", "reduction", "loss", "pool"}
)

# The backward of flash attention against its forward: 2.5 times the FLOPs at 0.81 to 0.87 of the rate (published kernel
# rates of FlashAttention-2 on A100 and H100).
_ATTENTION_BACKWARD = (3.0, 0.2)
_WITHOUT_CACHE_SD = 0.05  # causal calls were measured with a cache of keys and values, which training has none of
_OTHER_LAYOUT_SD = 0.05  # data and weight gradients against forward products: 2.01 for two, sd 0.09 (NeuSight's layers)
_GROUPED_SD = 0.2  # groups are of unequal size, and kernels for them differ from those of batches: assumption
_HALF_CONVOLUTION = (1.3, 0.35)  # an implicit product gathers its input: assumption
_CONVOLUTION_BACKWARD_SD = 0.3

_ELEMENTWISE = {"add": "add", "sub": "add", "mul": "mul", "div": "div", "pow": "pow", "relu": "relu", "gelu": "gelu",
                "tanh": "tanh"}  # fmt: skip
_WITH_NUMBER = {"add": "add_scalar", "mul": "mul_scalar", "div": "div_scalar", "pow": "pow_scalar"}


def question_of(signature: Signature) -> Question | None:
    """How to ask about a signature; None where no learned family does like work."""
    if signature.view:
        return None
    target = _target(signature.target)
    family = "fused" if signature.members else target.family
    if family in ("gemm", "bgemm"):
        return _product(signature, target.name)
    if family == "attention":
        return _attention(signature)
    if family == "conv":
        return _convolution(signature)
    if family == "fused" or family in _MEMORY_FAMILIES:
        return _memory(signature, family, target)
    return None


def _product(signature: Signature, name: str) -> Question | None:
    inputs = signature.inputs
    if name == "_grouped_mm":
        return _grouped(signature)
    if name in ("mm", "bmm") and len(inputs) >= 2:
        a, out = inputs[0], signature.outputs[0]
    elif name in ("addmm", "baddbmm", "_addmm_activation") and len(inputs) >= 3:
        a, out = inputs[1], signature.outputs[0]
    elif name in ("linear", "mkldnn_linear") and len(inputs) >= 2:
        a, out = inputs[0], signature.outputs[0]
    else:
        return None
    shape = out.shape
    if len(shape) < 2 or 0 in shape or not a.shape or 0 in a.shape:
        return None
    inner, size = a.shape[-1], DTYPE_BYTES[a.dtype]
    batched = name in ("bmm", "baddbmm")
    batch = prod(shape[:-2]) if batched else 1
    rows = shape[-2] if batched or len(shape) == 2 else prod(shape[:-1])
    dims = (batch, rows, shape[-1], inner, size, DTYPE_BYTES[out.dtype])
    turned = _OTHER_LAYOUT_SD if a.order is not None and a.order[-1] != len(shape) - 1 else 0.0
    if a.dtype in _HALF:
        return Question("gemm16", dims, prior_sd=turned + (0.1 if batched else 0.0))
    if a.dtype.startswith("float8"):
        return Question("gemm8", dims, prior_sd=turned)
    if a.dtype == "float32":
        return Question("bgemm32" if batched else "gemm32", dims, "bmm" if batched else "linear", prior_sd=turned)
    return None


def _grouped(signature: Signature) -> Question | None:
    """One product per group, all of the mean size: rows cut by group, or (towards weights) their inner dim."""
    if len(signature.inputs) < 2:
        return None
    a, b, out = signature.inputs[0], signature.inputs[1], signature.outputs[0]
    if a.dtype not in _HALF or 0 in (*a.shape, *b.shape, *out.shape) or len(a.shape) != 2:
        return None
    size = float(DTYPE_BYTES[a.dtype])
    if len(b.shape) == 3 and len(out.shape) == 2:
        groups, (rows, inner), columns = b.shape[0], a.shape, out.shape[1]
        sizes = (float(groups), max(1.0, rows / groups), float(columns), float(inner))
    elif len(b.shape) == 2 and len(out.shape) == 3:
        groups, rows, columns = out.shape
        sizes = (float(groups), float(rows), float(columns), max(1.0, a.shape[1] / groups))
    else:
        return None
    return Question("gemm16", (*sizes, size, float(DTYPE_BYTES[out.dtype])), prior_sd=_GROUPED_SD)


@lru_cache(maxsize=4096)
def _causal(arguments: str) -> bool:
    """Whether a call of attention asks for the causal mask: its flag stands among the arguments as true."""
    return '"is_causal":true' in arguments or ",true" in arguments.split('"named"')[0]


def _attention(signature: Signature) -> Question | None:
    backward = "backward" in signature.target
    inputs = signature.inputs
    first = 1 if backward else 0
    if len(inputs) < first + 3:
        return None
    q, k = inputs[first], inputs[first + 1]
    if len(q.shape) != 4 or len(k.shape) != 4 or 0 in q.shape or 0 in k.shape or q.dtype not in _HALF:
        return None
    batch, heads, length, width = q.shape
    causal = _causal(signature.arguments) and length == k.shape[2]
    size = DTYPE_BYTES[q.dtype]
    mean_length = length if length == k.shape[2] else float(length * k.shape[2]) ** 0.5
    dims = (batch, mean_length, heads, k.shape[1], width, 0, 1 if causal else 0, 0, size, size)
    factor, sd = _ATTENTION_BACKWARD if backward else (1.0, 0.0 if length == k.shape[2] else 0.1)
    sd += _WITHOUT_CACHE_SD if causal else 0.0
    return Question("attention16" if causal else "attention16full", dims, factor=factor, prior_sd=sd)


def _convolution(signature: Signature) -> Question | None:
    backward = "backward" in signature.target
    inputs = signature.inputs
    if len(inputs) < (3 if backward else 2):
        return None
    x, weight = (inputs[1], inputs[2]) if backward else (inputs[0], inputs[1])
    out = inputs[0] if backward else signature.outputs[0]
    if len(x.shape) < 3 or len(weight.shape) != len(x.shape) or 0 in (*x.shape, *weight.shape, *out.shape):
        return None
    taps, per_dim = prod(weight.shape[2:]), 1 / (len(weight.shape) - 2)
    positions = out.shape[0] * prod(out.shape[2:])
    groups = max(1, x.shape[1] // weight.shape[1])
    stride = max(1.0, round(x.shape[2] / max(1, out.shape[2])))
    dims = (
        groups, positions, out.shape[1] / groups, weight.shape[1] * taps, DTYPE_BYTES[x.dtype], DTYPE_BYTES[x.dtype],
    )  # fmt: skip
    factor = float(sum(form.shape in (x.shape, weight.shape) for form in signature.outputs)) if backward else 1.0
    sd = _CONVOLUTION_BACKWARD_SD if backward else 0.0
    if groups > 1:
        sd += 0.3
    if x.dtype in _HALF:
        return Question("gemm16", dims, factor=factor * _HALF_CONVOLUTION[0], prior_sd=sd + _HALF_CONVOLUTION[1])
    if x.dtype == "float32":
        return Question(
            "conv32",
            (*dims, taps**per_dim, stride, float(weight.shape[1]), prod(out.shape[2:]) ** per_dim),
            "conv2d",
            factor,
            sd,
        )
    return None


def _memory(signature: Signature, family: str, target: _Target) -> Question | None:
    moved, largest, most = 0, None, 0
    for form in signature.inputs + signature.outputs:
        shape = form.shape
        if form.strides is not None:
            count = _elements(form)
        else:
            count = shape[0] * shape[1] if len(shape) == 2 else prod(shape)  # what most are, twice as fast
        moved += count * DTYPE_BYTES[form.dtype]
        if count > most:
            largest, most = form, count
    if family == "fused" or not target.simple:
        moved = int(work_of(signature)[2])
    if moved <= 0 or largest is None:
        return None
    half = largest.dtype in _HALF
    if family == "fused":
        kind = _fused_kind(half, signature_family(signature) == "reduction")
    else:
        with_number = target.name in _WITH_NUMBER and sum(len(form.shape) > 0 for form in signature.inputs) == 1
        kind = _memory_kind(family, target.name, target.backward, half, with_number)
    shape = largest.shape
    rows = shape[0] if len(shape) == 2 else max(1, prod(shape[:-1]))
    dims = (moved, rows, DTYPE_BYTES[largest.dtype], kind.reduces)
    return Question(kind.family, dims, kind.op, 1.0, kind.prior_sd)


class _Kind(NamedTuple):
    """Which measured op stands for a kernel that moves memory."""

    family: str
    op: str
    reduces: float
    prior_sd: float


def _fused_kind(half: bool, reduces: bool) -> _Kind:
    op = ("rms_norm" if half else "softmax") if reduces else ("residual_add" if half else "mul")
    return _Kind("memory16" if half else "memory32", op, float(reduces), 0.2)


@lru_cache(maxsize=4096)
def _memory_kind(family: str, name: str, backward: bool, half: bool, with_number: bool) -> _Kind:
    reduces, sd, op = 0.0, 0.1, "residual_add" if half else "mul"
    if family == "norm":
        op, reduces = ("rms_norm" if half else "layer_norm"), 1.0
        sd = 0.25 if backward or "layer_norm" not in name else 0.0
    elif family == "softmax":
        op, reduces, sd = "softmax", 1.0, 0.2 if backward or half else 0.0
    elif family == "embedding":
        op, sd = "embedding", 0.4 if backward else 0.1
        half = True
    elif family == "pointwise":
        found = (_WITH_NUMBER.get(name) if with_number else None) or _ELEMENTWISE.get(name)
        op, sd = (found, 0.0) if found and not half else (op, 0.1 if found else 0.2)
    elif family in ("reduction", "loss", "pool"):
        sd = 0.35
    elif family == "random":
        sd = 0.3
    return _Kind("memory16" if half else "memory32", op, reduces, sd)


def _elements(form: TensorForm) -> int:
    """Elements in memory: a dim of stride 0 (an expanded one) counts once."""
    assert form.strides is not None
    return prod(1 if stride == 0 and dim else dim for dim, stride in zip(form.shape, form.strides, strict=True))
