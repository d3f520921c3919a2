"""Every description against its real kernel: run on parts, put together, compare with the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpart.capture import capture
from simpart.cost.signatures import signatures_of
from simpart.kernels.ops import base_name
from simpart.model_spec import parse_model
from simpart.tdl import DESCRIPTIONS, Sum, call_like, hidden, local_call, opaque, splits_of, undescribed_reason
from simpart.testing.tdl_cases import CASES, NOT_RUN, case_for
from simpart.testing.tdl_suite import (
    Case,
    Failure,
    call_of,
    check_blocks,
    check_call,
    check_split,
    grouped_product,
    seeded,
    tensors_for,
)

SMALL = {
    "gpt": "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64",
    "llama": "llama:layers=2,hidden=32,heads=4,kv_heads=2,ffn=48,seq=16,vocab=64",
    "resnet50": "resnet50:width=8,image=32,classes=8,blocks=1-1-1-1",
    "unet": "unet:base=8,image=16,depth=2",
}


def check(target: str, seed: int, members: int) -> int:
    """Strategies checked for one random call, along an axis and along a second one after it."""
    _, generator = seeded(seed)
    case = case_for(target, seed)
    count = check_call(case, members, generator) + check_blocks(case, members, generator)
    return count + check_call(case, members, generator, uneven=True)


def test_every_described_operator_has_a_random_case_or_a_reason() -> None:
    run = {target if target.startswith("simpart") else f"aten.{base_name(target)}" for target in CASES}
    assert set(DESCRIPTIONS) == run | set(NOT_RUN)
    assert not run & set(NOT_RUN)


@pytest.mark.parametrize("members", [2, 3])
def test_parts_give_the_whole_on_five_random_calls_of_every_kernel(members: int) -> None:
    checked = sum(check(target, seed, members) for target in CASES for seed in range(5))
    assert checked > 8000


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(CASES))
def test_parts_give_the_whole_on_many_random_calls(target: str) -> None:
    for seed in range(12):
        for members in (2, 3, 4):
            check(target, seed, members)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "resnet50", "unet"])
def test_parts_give_the_whole_for_every_kernel_of_a_captured_model(model: str) -> None:
    graph = capture(parse_model(SMALL[model]), model=model)
    _, generator = seeded(0)
    calls = dict.fromkeys(map(call_like, signatures_of(graph.at(4), 4)))
    described = [call for call in calls if undescribed_reason(call) is None and "dropout" not in call.target]
    assert len(described) > 40
    for call in described:
        check_call(Case(call, tensors_for(call, 0)), 2, generator)


@pytest.mark.parametrize("target", ["aten.convolution.default", "aten.view.default", "aten.native_group_norm.default"])
def test_a_local_call_can_be_split_again(target: str) -> None:
    _, generator = seeded(0)
    for seed in range(8):
        case = case_for(target, seed)
        for split in splits_of(case.call, 2):
            local = local_call(case.call, split, 2)
            tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in local.inputs]
            if not split.masked:
                check_call(type(case)(local, tensors), 2, generator)


def test_the_grouped_product_written_out_is_that_of_torch() -> None:
    a, b, c, d = (torch.randn(shape) for shape in ((16, 8), (4, 8, 12), (16, 12), (4, 4, 16)))
    ends = torch.tensor([3, 3, 9, 16], dtype=torch.int32)
    for left, right, offsets in ((a, b, ends), (a.t(), c, ends), (d, a, torch.tensor([2, 2, 5, 8], dtype=torch.int32))):
        found = torch.ops.aten._grouped_mm(left, right, offsets)
        torch.testing.assert_close(found, grouped_product(left, right, offsets), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.ops.aten._grouped_mm(d, d.transpose(1, 2)), grouped_product(d, d.transpose(1, 2)))


# --- the check must be able to fail ----------------------------------------------------------------------------------
A, B = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
LIES: list[tuple[str, tuple[Any, ...], Callable[..., Any]]] = [
    ("aten.mm.default", (A, B), lambda a, b: lambda i, j: Sum(lambda k: a[i, k] * b[j, k])),
    ("aten.mm.default", (A, B), lambda a, b: lambda i, j: Sum(lambda k: a[k, i] * b[k, j])),
    ("aten.mm.default", (A, B), lambda a, b: lambda i, j: opaque(a[:, j], b[:, j])[i]),
    ("aten.softmax.int", (A, 1), lambda x, d: lambda i, j: hidden(x[i, j])),
    ("aten.relu.default", (A,), lambda x: lambda i, j: 2 * x[i, j]),
    ("aten.cumsum.default", (A, 0), lambda x, d: lambda i, j: x[i, j]),
    ("aten.t.default", (A,), lambda x: lambda i, j: x[i, j]),
    ("aten.sum.dim_IntList", (A, [1]), lambda x, d: lambda i: Sum(lambda k: x[k, i])),
    ("aten.mean.dim", (A, [1]), lambda x, d: lambda i: Sum(lambda k: x[i, k])),
    ("aten.add.Scalar", (A, 1.5), lambda x, c: lambda i, j: x[i, j] * 1),
    ("aten.var.correction", (A, [0]), lambda x, d: lambda j: Sum(lambda i: hidden(x[i, j]))),
]


@pytest.mark.parametrize(("target", "arguments", "lie"), LIES)
def test_a_wrong_description_fails_the_check(
    target: str, arguments: tuple[Any, ...], lie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, generator = seeded(0)
    monkeypatch.setitem(DESCRIPTIONS, f"aten.{base_name(target)}", lie)
    with pytest.raises(Failure, match=target):
        check_call(call_of(target, arguments), 2, generator)


@pytest.mark.parametrize("broken", ["inputs", "outputs", "scale"])
def test_a_wrong_placement_fails_the_check(broken: str) -> None:
    from dataclasses import replace
    from fractions import Fraction

    from simpart.placement import AxisStrategy, Replicate, Shard

    _, generator = seeded(0)
    case = call_of("aten.mm.default", (A, B))
    split = next(s for s in splits_of(case.call, 2) if str(s.strategy.outputs[0]) == "P(sum)")
    strategy = split.strategy
    changed = {
        "inputs": replace(split, strategy=AxisStrategy((Shard(1), Replicate()), strategy.outputs)),
        "outputs": replace(split, strategy=AxisStrategy(strategy.inputs, (Replicate(),))),
        "scale": replace(split, scales=(Fraction(1, 2),)),
    }
    with pytest.raises(Failure):
        check_split(case, changed[broken], 2, generator)
