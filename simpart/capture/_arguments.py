"""Calls and tensors of a graph as plain data: arguments as JSON, tensors as specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from simpart.capture import _torch
from simpart.capture._trace import Ref
from simpart.errors import UnsupportedError
from simpart.graph.sizes import DTYPE_BYTES, TensorSpec

__all__ = ["call_of", "spec_of"]


def call_of(node: fx.Node, refs: Callable[[fx.Node], list[Ref] | None]) -> tuple[tuple[Ref, ...], dict[str, Any]]:
    """The values a call reads, in order of appearance, and its arguments with `{"tensor": i}` in their places.

    `refs` gives the values of an input node (several if it is a tuple passed whole, None if it holds no tensor).
    """
    inputs: list[Ref] = []

    def encode(item: Any) -> Any:
        if isinstance(item, fx.Node):
            found = refs(item)
            if found is None:
                return {"object": item.target if isinstance(item.target, str) else _torch.target_name(item)}
            marks = [{"tensor": len(inputs) + i} for i in range(len(found))]
            inputs.extend(found)
            return marks[0] if len(marks) == 1 else marks
        if item is None or isinstance(item, bool | int | str):
            return item
        if isinstance(item, float):
            return item if math.isfinite(item) else {"float": str(item)}
        if isinstance(item, list | tuple):
            return [encode(part) for part in item]
        if isinstance(item, dict):
            return {str(key): encode(value) for key, value in item.items()}
        if isinstance(item, slice):
            return {"slice": [encode(part) for part in (item.start, item.stop, item.step)]}
        for kind, name in _NAMED_KINDS:
            if isinstance(item, kind):
                return {name: str(item).removeprefix("torch.")}
        if isinstance(item, complex):
            return {"complex": [item.real, item.imag]}
        if item is Ellipsis:
            return {"object": "..."}
        return {"object": _torch.function_name(item)}

    positional = [encode(item) for item in node.args]
    named = {key: encode(value) for key, value in sorted(node.kwargs.items())}
    return tuple(inputs), {"positional": positional, "named": named}


_NAMED_KINDS: tuple[tuple[Any, str], ...] = (
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
)


def specs_of(tensors: Iterable[torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(spec_of(tensor) for tensor in tensors)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dims, dtype and layout; raises UnsupportedError for sparse tensors and sizes that only real data can give."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"tensors have one of the dtypes {', '.join(DTYPE_BYTES)}, the module makes {dtype}")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"tensors are dense, the module makes one of layout {tensor.layout}; use a dense one")
    dims = tuple(tensor.shape)
    if not all(isinstance(dim, int) for dim in dims):
        raise UnsupportedError(f"sizes must not depend on data, the module makes a tensor of shape {list(dims)}")
    strides = tensor.stride()
    order = dense_order(dims, strides)
    return TensorSpec(dims, dtype, order) if order is not None else TensorSpec(dims, dtype, None, tuple(strides))


def dense_order(dims: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Dims from outermost to innermost in memory if the tensor fills its memory without gaps, else None.

    >>> dense_order((2, 3, 4), (12, 1, 3)), dense_order((2, 3), (4, 1))
    ((0, 2, 1), None)
    """
    if 0 in dims or _is_dense(dims, strides, tuple(range(len(dims)))):
        return tuple(range(len(dims)))
    order = tuple(sorted(range(len(dims)), key=lambda i: (-strides[i], i)))
    return order if _is_dense(dims, strides, order) else None


def _is_dense(dims: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    expected = 1
    for i in reversed(order):
        if dims[i] != 1 and strides[i] != expected:
            return False
        expected *= dims[i]
    return True
