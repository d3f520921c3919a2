"""The zoo's modules: parameters in closed form, losses of a random model, valid inputs, dims that contradict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpart.capture._torch import fake_mode
from simpart.errors import UserError
from simpart.zoo import Dims, GPTDims, LlamaDims, ResNetDims, UNetDims, ZooFactory, parameter_count

SMALL: list[tuple[str, Dims]] = [
    ("gpt", GPTDims(layers=2, hidden=32, heads=4, seq=16, vocab=61)),
    ("gpt", GPTDims(layers=3, hidden=24, heads=2, seq=8, vocab=50, tied=True, dropout=0.1)),
    ("llama", LlamaDims(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, vocab=61)),
    ("llama", LlamaDims(layers=1, hidden=32, heads=4, seq=16, vocab=61)),
    ("resnet50", ResNetDims(image=64, classes=7, width=4)),
    ("resnet50", ResNetDims(image=32, classes=7, width=8, blocks=(1, 2))),
    ("unet", UNetDims(image=16, base=4, depth=2, classes=3)),
    ("unet", UNetDims(image=16, channels=1, base=4, depth=1)),
]
each = pytest.mark.parametrize(("name", "dims"), SMALL)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@each
def test_parameters_equal_the_stated_closed_form(name: str, dims: Dims) -> None:
    assert count(ZooFactory(name, dims).build()) == parameter_count(dims)


def test_published_parameter_counts() -> None:
    assert parameter_count(ResNetDims()) == 25_557_032
    assert parameter_count(GPTDims(tied=True)) == 124_439_808  # GPT-2 small
    assert parameter_count(LlamaDims()) == 6_738_415_616  # Llama-2 7B
    assert parameter_count(LlamaDims(hidden=8192, heads=64, layers=80, kv_heads=8, ffn=28672)) == 68_976_648_192  # 70B


@each
def test_loss_of_a_random_model_is_near_that_of_a_guess_and_reaches_every_parameter(name: str, dims: Dims) -> None:
    torch.manual_seed(0)
    factory = ZooFactory(name, dims)
    module = factory.build()
    loss = module(*factory.inputs(2, torch.Generator().manual_seed(0)))
    loss.backward()
    guess = math.log(dims.vocab if isinstance(dims, GPTDims | LlamaDims) else dims.classes)
    assert loss.shape == ()
    assert abs(loss.item() - guess) < 2.5
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@each
def test_the_factory_works_in_fake_mode_at_any_micro_batch(name: str, dims: Dims) -> None:
    for micro_batch in (1, 2, 3):
        with fake_mode():
            module, inputs = ZooFactory(name, dims)(micro_batch)
            assert module(*inputs).shape == ()
            assert {tensor.shape[0] for tensor in inputs} == {micro_batch}


@each
def test_random_inputs_follow_their_seed_and_zeros_need_none(name: str, dims: Dims) -> None:
    factory = ZooFactory(name, dims)
    draws = [factory.inputs(3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(draws[0], draws[2], strict=True))
    assert all(not tensor.any() for tensor in factory.inputs(3))


def test_gpt_attends_to_the_past_alone() -> None:
    torch.manual_seed(0)
    model = ZooFactory("gpt", GPTDims(layers=1, hidden=16, heads=2, seq=8, vocab=11)).build()
    seen: list[torch.Tensor] = []
    model.get_submodule("ln_f").register_forward_hook(lambda module, args, out: seen.append(out))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 3
    for text in (tokens, changed):
        model(text, tokens)
    same = (seen[0] == seen[1]).all(dim=-1)[0].tolist()
    assert same == [True] * 5 + [False] * 3


def test_rotation_depends_on_distance_alone() -> None:
    from simpart.zoo.llama import Llama, rotate

    model = Llama(LlamaDims(layers=1, hidden=8, heads=1, seq=16, vocab=5))
    q, k = torch.randn(8), torch.randn(8)
    turned_q = rotate(q.expand(1, 1, 16, 8), model.cos, model.sin)[0, 0]
    turned_k = rotate(k.expand(1, 1, 16, 8), model.cos, model.sin)[0, 0]
    scores = turned_q @ turned_k.T
    for offset in (-3, 0, 4):
        assert torch.allclose(scores.diagonal(offset), scores.diagonal(offset)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTDims(heads=5), "heads must divide hidden, got heads=5, hidden=768; try heads=4 or heads=6"),
        (lambda: GPTDims(layers=0), "layers must be at least 1, got layers=0; try layers=12"),
        (lambda: GPTDims(dropout=1.0), "dropout must be at least 0 and below 1, got dropout=1; try 0.1"),
        (
            lambda: LlamaDims(heads=32, kv_heads=5),
            "kv_heads must divide heads, got kv_heads=5, heads=32; try kv_heads=4 or kv_heads=8",
        ),
        (lambda: LlamaDims(hidden=6, heads=2), "rotary positions need an even hidden / heads"),
        (
            lambda: UNetDims(image=100, depth=3),
            "image must be a multiple of 2^depth, got image=100, depth=3; try image=96",
        ),
        (
            lambda: ResNetDims(image=8),
            r"image must be at least 2^\(stages \+ 1\), got image=8 for 4 stages; try image=32",
        ),
        (lambda: ResNetDims(blocks=(1, 0)), "blocks must be at least 1, got blocks=1-0; try blocks=3-4-6-3"),
    ],
)
def test_contradicting_dims_are_refused_with_the_rule_and_a_way_out(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("^", r"\^")):
        make()
