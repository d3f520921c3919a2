"""FLOPs against closed forms, and against what torch counts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from simpart.capture import capture
from simpart.graph import Call, Graph, Kernel, Op, Source, Template
from simpart.graph.sizes import Affine, TensorSpec
from simpart.kernels.flops import (
    elementwise_ops,
    executed_flops,
    kernel_class_flops,
    kernel_flops,
    model_flops,
    op_class_flops,
)
from simpart.zoo import Dims, GPTDims, LlamaDims, ResNetDims, UNetDims, ZooFactory

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def call(*positional: Any) -> str:
    return json.dumps({"positional": list(positional), "named": {}})


def tensor(i: int) -> dict[str, int]:
    return {"tensor": i}


@pytest.mark.parametrize(
    ("target", "inputs", "expected"),
    [
        ("aten.mm.default", [(4, 8), (8, 3)], 2 * 4 * 8 * 3),
        ("aten.addmm.default", [(3,), (4, 8), (8, 3)], 2 * 4 * 8 * 3),
        ("aten.bmm.default", [(5, 4, 8), (5, 8, 3)], 2 * 5 * 4 * 8 * 3),
        ("aten.baddbmm.default", [(5, 4, 3), (5, 4, 8), (5, 8, 3)], 2 * 5 * 4 * 8 * 3),
        ("aten.mv.default", [(4, 8), (8,)], 2 * 4 * 8),
        ("aten._grouped_mm.default", [(9, 8), (5, 8, 3), (5,)], 2 * 9 * 8 * 3),
        ("aten._grouped_mm.default", [(5, 9, 8), (8, 7), (5,)], 2 * 9 * 8 * 7),
        ("aten._grouped_mm.default", [(9, 8), (8, 3), (5,)], 2 * 9 * 8 * 3),
        ("aten._grouped_mm.default", [(5, 4, 8), (5, 8, 3)], 2 * 5 * 4 * 8 * 3),
        ("aten.relu.default", [(4, 8)], 0),
        ("aten.unheard_of.default", [(4, 8)], 0),
    ],
)
def test_products_count_two_per_multiply_add(target: str, inputs: list[tuple[int, ...]], expected: int) -> None:
    assert kernel_flops(target, inputs, [(1,)]) == expected


def test_one_tensor_given_twice_is_found_through_the_arguments() -> None:
    assert kernel_flops("aten.mm.default", [(4, 4)], [(4, 4)], call(tensor(0), tensor(0))) == 2 * 4**3


@pytest.mark.parametrize("grouped", [1, 2])
def test_convolution_against_a_loop_over_its_positions(grouped: int) -> None:
    x, weight, y = (2, 4, 9, 9), (6, 4 // grouped, 3, 3), (2, 6, 5, 5)
    arguments = call(tensor(0), tensor(1), None, [2, 2], [1, 1], [1, 1], False, [0, 0], grouped)
    per_output = 2 * (4 // grouped) * 3 * 3
    assert kernel_flops("aten.convolution.default", [x, weight], [y], arguments) == per_output * 2 * 6 * 5 * 5


@pytest.mark.parametrize(
    ("mask", "share"), [([True, True, False], 2), ([False, True, True], 1), ([True, False, False], 1)]
)
def test_convolution_backward_costs_a_forward_per_gradient_asked_for(mask: list[bool], share: int) -> None:
    x, weight, y = (2, 4, 9, 9), (6, 4, 3, 3), (2, 6, 5, 5)
    rest = ([0], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, mask)
    forward = kernel_flops("aten.convolution.default", [x, weight], [y])
    arguments = call(tensor(0), tensor(1), tensor(2), *rest)
    assert kernel_flops("aten.convolution_backward.default", [y, x, weight], [x], arguments) == share * forward


def test_transposed_convolution_meets_the_kernel_at_each_input_position() -> None:
    x, weight, y = (2, 8, 4, 4), (8, 3, 2, 2), (2, 3, 8, 8)
    arguments = call(tensor(0), tensor(1), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert kernel_flops("aten.convolution.default", [x, weight], [y], arguments) == 2 * 2 * 4 * 4 * 8 * 3 * 2 * 2


def test_attention_has_two_products_forward_four_backward_and_executes_five() -> None:
    q, k = (2, 4, 16, 8), (2, 2, 32, 8)  # grouped-query, longer keys
    product = 2 * 2 * 4 * 16 * 32 * 8
    assert kernel_flops(f"{ATTENTION}.default", [q, k, k], [q]) == 2 * product
    backward = [f"{ATTENTION}_backward.default", [q, q, k, k, q, (2, 4, 16)], [q, k, k]]
    assert kernel_flops(*backward) == 5 * product  # type: ignore[arg-type]
    assert kernel_flops(*backward, recomputing=False) == 4 * product  # type: ignore[arg-type]


def test_fused_lstm_layer_meets_both_weights_at_each_step() -> None:
    x, w0, w1, bias, state = (7, 2, 5), (12, 5), (12, 3), (12,), (1, 2, 3)
    inputs = [x, w0, w1, bias, bias, state, state]
    assert kernel_flops("aten.mkldnn_rnn_layer.default", inputs, [(7, 2, 3)]) == 2 * 7 * 2 * (12 * 5 + 12 * 3)


def test_elementwise_ops_are_elements_of_the_largest_tensor() -> None:
    assert elementwise_ops("aten.gelu.default", [(4, 8)], [(4, 8)]) == 32
    assert elementwise_ops("aten.sum.dim_IntList", [(4, 8)], [(4,)]) == 32
    assert elementwise_ops("aten.mm.default", [(4, 8), (8, 8)], [(4, 8)]) == 0


def stack(layers: int) -> Graph:
    """Linears (b, 8) -> (b, 8), each with its forward and two backward products."""
    x, w = TensorSpec((Affine(0, 1), 8), "float32"), TensorSpec((8, 8), "float32")
    weight = Source(kind="parameter", name="l.{0}.weight", spec=w, trainable=True)
    op = Op(
        path="l.{0}", target="aten.linear.default", kind="linear", inputs=(-1, 0), outputs=(x,), carries_gradient=True
    )
    products = call(tensor(0), tensor(1))
    kernels = (
        Kernel(op=0, phase="F", target="aten.mm.default", inputs=(-1, 0), outputs=(x,), arguments=products),
        Kernel(op=0, phase="B", target="aten.mm.default", inputs=(-2, 0), outputs=(x,), arguments=products),
        Kernel(op=0, phase="B", target="aten.mm.default", inputs=(-3, -2), outputs=(w,), arguments=products),
        Kernel(op=0, phase="B", target="aten.mm.default", inputs=(0, 3), outputs=(w,), arguments=products),
    )
    xt = Source(kind="input", name="1", spec=TensorSpec((8, Affine(0, 1)), "float32"))
    sources = (Source(kind="input", name="0", spec=x), xt, Source(kind="tangent", name="loss", spec=x))
    calls = tuple(
        Call(
            template=0,
            variables=(str(i),),
            externals=(0 if i == 0 else 3 + 2 * i - 1,),
            kernel_externals=(0, 2, 1),
            omits=(3,) if i == 0 else (),
        )
        for i in range(layers)
    )
    return Graph(
        model="made",
        precision="float32",
        sources=sources,
        templates=(Template(sources=(weight,), ops=(op,), kernels=kernels),),
        calls=calls,
        loss=3 + 2 * layers - 1,
        gradients={},
    )


def test_a_graph_costs_its_calls_and_not_the_kernels_they_omit() -> None:
    graph = stack(5)
    per_class = [2 * 3 * 64, 2 * 3 * 64, 2 * 3 * 64, 2 * 8**3]
    assert kernel_class_flops(graph, 3).tolist() == per_class
    assert executed_flops(graph, 3) == 5 * sum(per_class) - per_class[3]
    assert op_class_flops(graph, 3).tolist() == [sum(per_class)]
    assert model_flops(graph, 3) == np.dot(kernel_class_flops(graph, 3), np.bincount(graph.flat.kernel_class))


# --- captured graphs -------------------------------------------------------------------------------------------------
def attention(layers: int, b: int, s: int, h: int) -> int:
    """One of the products of causal attention over all layers, the full square."""
    return 2 * layers * b * s * s * h


def gpt_forward(dims: GPTDims, b: int) -> int:
    """`L (24 b s h² + 4 b s² h) + 2 b s h V`."""
    s, h, layers = dims.seq, dims.hidden, dims.layers
    return layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * dims.vocab


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_equals_its_closed_form_and_executes_one_attention_product_more(tied: bool) -> None:
    dims = GPTDims(layers=2, hidden=32, heads=4, seq=16, vocab=61, tied=tied)
    graph = capture(ZooFactory("gpt", dims))
    assert graph.parameter_count == dims.parameter_count
    for b in (1, 2, 7):
        assert model_flops(graph, b) == 3 * gpt_forward(dims, b)
        assert executed_flops(graph, b) == 3 * gpt_forward(dims, b) + attention(dims.layers, b, dims.seq, dims.hidden)


def test_llama_equals_its_closed_form() -> None:
    dims = LlamaDims(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, vocab=61)
    graph = capture(ZooFactory("llama", dims))
    linears = dims.layers * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 61
    assert graph.parameter_count == dims.parameter_count
    for b in (1, 4):
        forward = 2 * b * 16 * linears + 2 * attention(2, b, 16, 32)
        assert model_flops(graph, b) == 3 * forward
        assert executed_flops(graph, b) == 3 * forward + attention(2, b, 16, 32)


CONVOLUTIONAL = [
    ("resnet50", ResNetDims(image=32, classes=7, width=4, blocks=(1, 2))),
    ("unet", UNetDims(image=16, base=4, depth=2, classes=3)),
]


@pytest.mark.parametrize(("name", "dims"), CONVOLUTIONAL)
def test_convolutional_models_agree_with_torchs_counter(name: str, dims: Dims) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    factory = ZooFactory(name, dims)
    graph = capture(factory)
    for b in (1, 3):
        module, inputs = factory(b)
        with FlopCounterMode(display=False) as counter:
            module(*inputs).backward()
        assert executed_flops(graph, b) == model_flops(graph, b) == counter.get_total_flops()


@pytest.mark.slow
def test_resnet50_has_8_178_gflop_forward_and_twice_that_backward_but_for_the_stem() -> None:
    graph = capture(ZooFactory("resnet50", ResNetDims()))
    per_class = kernel_class_flops(graph, 2)[graph.flat.kernel_class]
    forward, backward = per_class[graph.flat.kernel_forward].sum(), per_class[~graph.flat.kernel_forward].sum()
    stem = 2 * (3 * 64 * 7 * 7) * 112 * 112 * 2
    assert graph.parameter_count == 25_557_032
    assert round(forward / 2 / 1e9, 3) == 8.178
    assert backward == 2 * forward - stem


@pytest.mark.slow
def test_gpt3_agrees_with_the_published_closed_form() -> None:
    """Narayanan et al., arXiv:2104.04473, section 5.1, without the recomputation that its 96 counts."""
    s, layers, h, vocab = 2048, 96, 12288, 51200
    dims = GPTDims(layers=layers, hidden=h, heads=96, seq=s, vocab=vocab, tied=True)
    graph = capture(ZooFactory("gpt", dims), precision="bfloat16")
    published = 72 * s * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert graph.parameter_count == dims.parameter_count
    assert model_flops(graph, 1) == pytest.approx(published, rel=1e-3)
