"""The zoo's modules: parameters in closed form, losses of a random model, valid inputs, dims that contradict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpart.capture._torch import fake_mode
from simpart.errors import UserError
from simpart.zoo import (
    MODELS,
    BERTDims,
    Dims,
    GPTDims,
    LlamaDims,
    LSTMDims,
    MoEDims,
    ResNetDims,
    T5Dims,
    TwoTowerDims,
    UNetDims,
    WideResNetDims,
    ZooFactory,
    parameter_count,
)

SMALL: list[tuple[str, Dims]] = [
    ("gpt", GPTDims(layers=2, hidden=32, heads=4, seq=16, vocab=61)),
    ("gpt", GPTDims(layers=3, hidden=24, heads=2, seq=8, vocab=50, tied=True, dropout=0.1)),
    ("llama", LlamaDims(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16, vocab=61)),
    ("llama", LlamaDims(layers=1, hidden=32, heads=4, seq=16, vocab=61)),
    ("resnet50", ResNetDims(image=64, classes=7, width=4)),
    ("resnet50", ResNetDims(image=32, classes=7, width=8, blocks=(1, 2))),
    ("unet", UNetDims(image=16, base=4, depth=2, classes=3)),
    ("unet", UNetDims(image=16, channels=1, base=4, depth=1)),
    ("bert", BERTDims(layers=2, hidden=32, heads=4, seq=20, vocab=61, ffn=72)),
    ("bert", BERTDims(layers=1, hidden=24, heads=3, seq=16, vocab=50, ffn=40, masked=5)),
    ("t5", T5Dims(layers=2, hidden=32, heads=3, size=8, ffn=72, seq=20, target=12, vocab=61)),
    ("moe", MoEDims(layers=2, hidden=32, heads=4, kv_heads=2, ffn=40, experts=4, seq=16, vocab=61)),
    ("moe", MoEDims(layers=1, hidden=16, heads=2, kv_heads=2, ffn=24, experts=3, top=1, balance=0.0, seq=16, vocab=61)),
    ("wide_resnet", WideResNetDims(factor=1, image=64, classes=7)),
    ("lstm", LSTMDims(layers=3, hidden=24, seq=9, vocab=61)),
    (
        "two_tower",
        TwoTowerDims(
            image=16,
            patch=8,
            image_layers=2,
            image_hidden=32,
            image_heads=4,
            seq=10,
            vocab=61,
            text_layers=1,
            text_hidden=24,
            text_heads=3,
            embed=20,
        ),
    ),
]
each = pytest.mark.parametrize(("name", "dims"), SMALL)


def test_every_model_is_tested() -> None:
    assert {name for name, _ in SMALL} == set(MODELS)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@each
def test_parameters_equal_the_stated_closed_form(name: str, dims: Dims) -> None:
    assert count(ZooFactory(name, dims).build()) == parameter_count(dims)


def test_published_parameter_counts() -> None:
    assert parameter_count(ResNetDims()) == 25_557_032
    assert parameter_count(GPTDims(tied=True)) == 124_439_808  # GPT-2 small
    assert parameter_count(LlamaDims()) == 6_738_415_616  # Llama-2 7B
    assert parameter_count(MoEDims()) == 46_702_792_704  # Mixtral 8x7B
    assert parameter_count(BERTDims()) == 110_106_428  # BERT base in pre-training
    assert parameter_count(T5Dims()) == 222_903_552  # T5 base
    assert parameter_count(TwoTowerDims()) == 151_277_313  # CLIP ViT-B/32
    assert parameter_count(WideResNetDims(factor=1)) == 25_557_032
    assert parameter_count(WideResNetDims(factor=1, depth=101)) == 44_549_160
    assert parameter_count(WideResNetDims(factor=1, depth=152)) == 60_192_808
    assert parameter_count(LlamaDims(hidden=8192, heads=64, layers=80, kv_heads=8, ffn=28672)) == 68_976_648_192  # 70B


@each
def test_loss_of_a_random_model_is_near_that_of_a_guess_and_reaches_every_parameter(name: str, dims: Dims) -> None:
    torch.manual_seed(0)
    factory = ZooFactory(name, dims)
    module = factory.build()
    loss = module(*factory.inputs(2, torch.Generator().manual_seed(0)))
    loss.backward()
    choices: int = 2 if isinstance(dims, TwoTowerDims) else getattr(dims, "vocab", 0) or getattr(dims, "classes", 0)
    guess = math.log(choices) + (math.log(2) if isinstance(dims, BERTDims) else 0)
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


def test_eager_attention_is_the_same_function() -> None:
    """Loss and gradients of the two ways to compute attention, in float64."""
    found = []
    for eager in (False, True):
        torch.manual_seed(0)
        dims = GPTDims(layers=2, hidden=16, heads=2, seq=8, vocab=11, eager=eager)
        factory = ZooFactory("gpt", dims)
        model = factory.build().double()
        loss = model(*factory.inputs(2, torch.Generator().manual_seed(1)))
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_t5_buckets_are_those_of_the_published_code() -> None:
    from simpart.zoo.t5 import buckets

    both, past = buckets(200, 200, both_ways=True), buckets(200, 200, both_ways=False)
    behind = [past[199, 199 - d].item() for d in (0, 1, 15, 16, 17, 20, 31, 32, 64, 127, 128, 199)]
    assert behind == [0, 1, 15, 16, 16, 17, 21, 21, 26, 31, 31, 31]
    assert [both[100, 100 - d].item() for d in (0, 1, 7, 8, 11, 16, 64, 100)] == [0, 1, 7, 8, 8, 10, 14, 15]
    assert torch.equal(both.triu(1), (both.T + 16).triu(1))
    assert not past.triu().any()


def moe_by_hand(experts: Any, x: torch.Tensor) -> torch.Tensor:
    """Token by token, as the router's rule says."""
    router = experts.router
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        taken = [0] * router.experts
        chances = (x[b] @ router.gate.weight.T).softmax(-1)
        for choice in range(router.top):
            for t in range(x.shape[1]):
                order = chances[t].argsort(descending=True)[: router.top]
                e = int(order[choice])
                taken[e] += 1
                if taken[e] <= router.slots:
                    inner = torch.nn.functional.silu(x[b, t] @ experts.gate[e]) * (x[b, t] @ experts.up[e])
                    out[b, t] += chances[t, e] / chances[t, order].sum() * (inner @ experts.down[e])
    return out


@pytest.mark.parametrize(("top", "capacity"), [(1, 1.0), (2, 0.5), (2, 1.25), (2, 4.0)])
def test_experts_take_what_their_capacity_allows_in_order(top: int, capacity: float) -> None:
    from simpart.zoo.moe import Experts

    torch.manual_seed(0)
    dims = MoEDims(hidden=8, heads=1, kv_heads=1, ffn=6, experts=4, top=top, capacity=capacity, seq=12)
    experts, x = Experts(dims).double(), torch.randn(3, 12, 8, dtype=torch.float64)
    found, balance = experts(x)
    torch.testing.assert_close(found, moe_by_hand(experts, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1:2], experts(x[1:2])[0], rtol=1e-12, atol=1e-12)
    assert balance.shape == (3,)


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
        (lambda: MoEDims(top=9), "top must be at most experts, got top=9, experts=8; try top=8"),
        (lambda: MoEDims(capacity=0.0), "capacity must be above 0, got capacity=0; try capacity=1.25"),
        (lambda: BERTDims(masked=600), "masked must be at most seq, got masked=600, seq=512; try masked=76"),
        (lambda: WideResNetDims(depth=100), "depth must be 50, 101 or 152, got depth=100; try depth=101"),
        (lambda: TwoTowerDims(patch=15), "patch must divide image, got patch=15, image=224; try patch=14 or patch=16"),
        (lambda: ResNetDims(blocks=(1, 0)), "blocks must be at least 1, got blocks=1-0; try blocks=3-4-6-3"),
    ],
)
def test_contradicting_dims_are_refused_with_the_rule_and_a_way_out(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("^", r"\^")):
        make()
