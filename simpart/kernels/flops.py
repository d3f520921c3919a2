"""Floating-point operations of kernels and graphs: 2 per multiply-add of matrix products, convolutions and attention.

`model_flops` is what the model needs (no recomputation, the full attention square, backward twice forward): the
numerator of MFU. `executed_flops` is what the kernels do: flash attention's backward computes the scores again. Both
leave out everything pointwise, as is the custom; `elementwise_ops` counts that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from simpart.graph import Graph, Kernel
from simpart.graph.sizes import TensorSpec
from simpart.kernels.ops import base_name, family_of

__all__ = ["elementwise_ops", "executed_flops", "kernel_class_flops", "kernel_flops", "model_flops", "op_class_flops"]

Shape = Sequence[int]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


# --- a graph ---------------------------------------------------------------------------------------------------------
def model_flops(graph: Graph, micro_batch: int) -> int:
    """FLOPs that one forward and backward of the model need for one micro-batch, without any recomputation."""
    return _total(graph.at(micro_batch), micro_batch, recomputing=False)


def executed_flops(graph: Graph, micro_batch: int) -> int:
    """FLOPs that the captured kernels carry out for one micro-batch."""
    return _total(graph.at(micro_batch), micro_batch, recomputing=True)


def kernel_class_flops(graph: Graph, micro_batch: int) -> Floats:
    """Executed FLOPs of one run of each kernel class of `graph.at(micro_batch)`."""
    return np.array(_per_class(graph.at(micro_batch), micro_batch, recomputing=True), dtype=np.float64)


def op_class_flops(graph: Graph, micro_batch: int) -> Floats:
    """Executed FLOPs, forward and backward, of one run of each op class of `graph.at(micro_batch)`."""
    graph = graph.at(micro_batch)
    sizes = [len(t.ops) for t in graph.templates]
    base = np.repeat(np.cumsum(sizes) - sizes, [len(t.kernels) for t in graph.templates])
    owner = base + np.array([kernel.op for kernel in graph.kernel_classes], dtype=np.int64)
    found: Floats = np.bincount(owner, kernel_class_flops(graph, micro_batch), minlength=sum(sizes)).astype(np.float64)
    return found


def _total(graph: Graph, micro_batch: int, recomputing: bool) -> int:
    each = _per_class(graph, micro_batch, recomputing)
    sizes = [len(t.kernels) for t in graph.templates]
    base: list[int] = np.cumsum([0, *sizes]).tolist()
    runs: list[int] = np.bincount([call.template for call in graph.calls], minlength=len(sizes)).tolist()
    total: int = sum(n * sum(each[first : first + size]) for n, first, size in zip(runs, base[:-1], sizes, strict=True))
    return total - sum(each[base[call.template] + k] for call in graph.calls for k in call.omits)


def _per_class(graph: Graph, micro_batch: int, recomputing: bool) -> list[int]:
    pairs = zip(graph.kernel_classes, graph.kernel_class_inputs, strict=True)
    return [_of_kernel(kernel, inputs, micro_batch, recomputing) for kernel, inputs in pairs]


# --- a kernel --------------------------------------------------------------------------------------------------------
def kernel_flops(
    target: str, inputs: Sequence[Shape], outputs: Sequence[Shape], arguments: str = "", *, recomputing: bool = True
) -> int:
    """FLOPs of one ATen kernel; 0 for a kernel without matrix products.

    `inputs` and `outputs` are shapes, `arguments` the call as in `graph.Kernel` (without it the tensors are the inputs
    in order). With `recomputing` False a backward counts only what it must compute.

    >>> kernel_flops("aten.mm.default", [(4, 8), (8, 3)], [(4, 3)])
    192
    """
    formula = _FORMULAS.get(base_name(target))
    if formula is None:
        return 0
    call = json.loads(arguments) if arguments else {}
    positional = _with_shapes(call.get("positional", []), inputs) or list(inputs)
    return int(formula(positional, outputs, recomputing))


def elementwise_ops(target: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Elements a kernel works through if it is pointwise, a reduction or the like: of its largest tensor; else 0."""
    if family_of(target) not in _ELEMENTWISE:
        return 0
    return max((prod(shape) for shape in (*inputs, *outputs)), default=0)


_ELEMENTWISE = frozenset({"pointwise", "reduction", "norm", "softmax", "loss", "pool", "random", "optimizer"})


def _of_kernel(kernel: Kernel, inputs: Sequence[TensorSpec], micro_batch: int, recomputing: bool) -> int:
    if base_name(kernel.target) not in _FORMULAS:
        return 0
    return kernel_flops(
        kernel.target,
        [spec.shape(micro_batch) for spec in inputs],
        [spec.shape(micro_batch) for spec in kernel.outputs],
        kernel.arguments,
        recomputing=recomputing,
    )


def _with_shapes(item: Any, shapes: Sequence[Shape]) -> Any:
    """The arguments with a shape in place of each `{"tensor": i}`."""
    if isinstance(item, dict):
        return tuple(shapes[item["tensor"]]) if set(item) == {"tensor"} else item
    if isinstance(item, list):
        return [_with_shapes(value, shapes) for value in item]
    return item


# --- formulas --------------------------------------------------------------------------------------------------------
# (positional arguments with shapes for tensors, output shapes, recomputing) -> FLOPs
Formula = Callable[[Any, Sequence[Shape], bool], int]


def _product(first: int) -> Formula:
    """A (batched) matrix product of the arguments at `first` and `first + 1`: `2 · rows · inner · columns`."""

    def formula(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
        a: Shape = arguments[first]
        b: Shape = arguments[first + 1]
        return 2 * prod(a) * (b[-1] if len(b) > 1 else 1)

    return formula


def _grouped(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
    """Products of experts that share the rows, the columns or the terms: together as one product over all."""
    a: Shape = arguments[0]
    b: Shape = arguments[1]
    return 2 * (prod(a[1:]) if len(a) > len(b) else prod(a)) * b[-1]


def _outer(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
    return 2 * prod(outputs[0])


def _convolved(x: Shape, weight: Shape, y: Shape, transposed: bool) -> int:
    """Each position of the smaller side meets the whole kernel: `2 · N · positions · prod(weight)`."""
    return 2 * x[0] * prod((x if transposed else y)[2:]) * prod(weight)


def _convolution(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
    return _convolved(arguments[0], arguments[1], outputs[0], len(arguments) > 6 and arguments[6] is True)


def _convolution_backward(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
    """As much as the forward for each gradient that is asked for, of the input and of the weight."""
    y, x, weight = arguments[:3]
    transposed = len(arguments) > 7 and arguments[7] is True
    wanted = arguments[10] if len(arguments) > 10 else [True, True, True]
    return _convolved(x, weight, y, transposed) * (bool(wanted[0]) + bool(wanted[1]))


def _attention(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
    """Scores and their product with the values: `2 · b · heads · s · t · (d + dv)`, the full square if causal too."""
    return 2 * _pairs(*arguments[:2]) * _widths(arguments[0], arguments[2])


def _attention_backward(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
    """Gradients of probabilities, values, queries and keys; the kernels compute the scores once more."""
    q, k, v = arguments[1:4]
    scores = _widths(q) if recomputing else 0
    return 2 * _pairs(q, k) * (2 * _widths(q, v) + scores)


def _pairs(q: Shape, k: Shape) -> int:
    """Pairs of a query and a key, over batch and heads."""
    return prod(q[:-1]) * k[-2]


def _widths(*tensors: Shape) -> int:
    return sum(tensor[-1] for tensor in tensors)


def _recurrent(weights: Callable[[Any], Sequence[Shape]], passes: int) -> Formula:
    """Every step of every sequence meets every weight matrix."""

    def formula(arguments: Any, outputs: Sequence[Shape], recomputing: bool) -> int:
        matrices: list[int] = [prod(w) for w in weights(arguments) if len(w) == 2]
        steps: int = prod(arguments[0][:-1])
        return 2 * passes * steps * sum(matrices)

    return formula


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(
        ("mm", "bmm", "_int_mm", "_scaled_mm", "mv", "dot", "vdot", "linear", "mkldnn_linear"), _product(0)
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), _product(1)),
    "_grouped_mm": _grouped,
    "outer": _outer,
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), _convolution),
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent(lambda arguments: arguments[1:3], 1),
    "mkldnn_rnn_layer_backward": _recurrent(lambda arguments: arguments[1:3], 2),
    "_cudnn_rnn": _recurrent(lambda arguments: arguments[1], 1),
    "_cudnn_rnn_backward": _recurrent(lambda arguments: arguments[1], 2),
}
for _name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
    _FORMULAS[f"_scaled_dot_product_{_name}"] = _attention
    _FORMULAS[f"_scaled_dot_product_{_name}_backward"] = _attention_backward
