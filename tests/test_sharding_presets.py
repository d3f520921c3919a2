"""Propagation and presets: what people write by hand comes out of rules, in every model that has the structure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from simpart.configure import Configuration, configure
from simpart.describe.explain import explain
from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph, named
from simpart.placement import AxisStrategy, Partial, Placement, Replicate, Shard, Sharding, StatePlacement, Strategy
from simpart.placement.conversions import conversions, received_bytes
from simpart.plan import kernel_ids
from simpart.plan.partition import check_plan
from simpart.sharding import (
    Degrees,
    Flow,
    Pin,
    calls_of,
    context_parallel,
    expert_parallel,
    flow,
    flows,
    matching,
    options,
    propagate,
    shard,
    state_at_rest,
    tensor_parallel,
)
from simpart.sharding._greedy import PER_STEP
from simpart.sharding.patterns import by_pattern
from simpart.tdl import Call, Split, splits_following, splits_of
from simpart.testing.tdl_suite import Case, check_split, seeded, tensors_for
from tests.test_configure import problem
from tests.test_partition import RESNET
from tests.vocabulary import GPT, MLP, TENSOR_PARALLEL, TIED, UNET, graph_of, megatron

LLAMA = "llama:layers=2,hidden=16,heads=4,kv_heads=2,seq=8,vocab=32,ffn=24"
R = Replicate()


# --- models of the tests ---------------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Every expert sees its own slots."""

    def __init__(self, experts: int = 4, width: int = 6, inner: int = 10) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, width, inner))
        self.down = nn.Parameter(torch.zeros(experts, inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slots = x.transpose(0, 1)
        out: torch.Tensor = torch.bmm(torch.relu(torch.bmm(slots, self.up)), self.down)
        return out.square().mean()


def experts(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Experts(), (torch.zeros(micro_batch, 4, 6),)


class Attends(nn.Module):
    """Attention without a mask."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [f(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for f in (self.q, self.k, self.v)]
        out: torch.Tensor = nn.functional.scaled_dot_product_attention(*heads)
        return out.square().mean()


def attends(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Attends(), (torch.zeros(micro_batch, 12, 8),)


def single(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.only(x), -1).square().mean()

    return Single(), (torch.zeros(micro_batch, 8),)


HERE = "tests.test_sharding_presets"


def names(graph: Graph, parameters: dict[int, Placement]) -> dict[str, str]:
    return {graph.parameters[value].name: str(place) for value, place in parameters.items()}


def flow_of(graph: Graph, degrees: Degrees, replicas: int = 1, micro_batch: int = 2) -> Flow:
    made = shard(graph, micro_batch, degrees, replicas)
    return flow(graph, made.sharding, (("dp", replicas), *degrees.axes), micro_batch, made.state)


def alike(a: Flow, b: Flow) -> bool:
    """The same collectives on values, by way, place and size."""

    def rows(f: Flow) -> Counter[object]:
        found: Counter[object] = Counter()
        for c in f.conversions:
            if c.role == "value" and c.moves:
                found[c.phase, c.shape, tuple((s.kind, s.bytes) for s in c.steps)] += c.times
        return found

    return rows(a) == rows(b)


# --- propagation -----------------------------------------------------------------------------------------------------
def test_pins_of_parameters_alone_make_the_megatron_plan() -> None:
    graph = graph_of(GPT)
    plan = megatron(graph, sequence_parallel=False)
    pins = [Pin("parameter", pattern, place) for pattern, place in TENSOR_PARALLEL.items()]
    found = propagate(graph, 2, (("dp", 2), ("tp", 2)), {"tp": pins})
    by_hand = flow(graph, plan.shardings[0][1], plan.groups[0].axes, 2, plan.state)
    mine = flow(graph, found.sharding, plan.groups[0].axes, 2, plan.state)
    assert mine.counts() == by_hand.counts() and alike(mine, by_hand) and not found.reasons


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_preset_makes_the_megatron_plan_without_being_told_names(sequence_parallel: bool) -> None:
    graph = graph_of(GPT)
    plan = megatron(graph, sequence_parallel=sequence_parallel)
    by_hand = flow(graph, plan.shardings[0][1], plan.groups[0].axes, 2, plan.state)
    mine = flow_of(graph, Degrees(tp=2, sp=sequence_parallel), replicas=2)
    assert mine.counts() == by_hand.counts() and alike(mine, by_hand)


def test_small_weights_on_a_large_batch_make_data_parallelism() -> None:
    graph = graph_of(MLP)
    found = propagate(graph, 512, (("x", 4),), {"x": [Pin("input", "*", Shard(0))]})
    mine = flow(graph, found.sharding, (("x", 4),), 512, ())
    reduced = [c for c in mine.conversions if c.moves]
    assert {c.role for c in reduced} == {"gradient"} and len(reduced) == len(graph.parameters)
    assert all(c.before == (Partial(),) for c in reduced)


def test_a_second_axis_divides_what_the_first_left() -> None:
    graph = graph_of(MLP)
    pins = {"x": [Pin("input", "*", Shard(0))], "y": [Pin("parameter", "fc1.*", Shard(0)),
                                                      Pin("parameter", "fc2.weight", Shard(1))]}  # fmt: skip
    found = propagate(graph, 512, (("x", 4), ("y", 2)), pins)
    state = tuple(
        (name, StatePlacement(parameter=p, gradient=p, optimizer=p))
        for name, p in (("fc1.*", (("y", Shard(0)),)), ("fc2.weight", (("y", Shard(1)),)))
    )
    mine = flow(graph, found.sharding, (("x", 4), ("y", 2)), 512, state)
    assert mine.counts("value") == {("all_reduce", "y"): 1}  # of the second product; none backward: x has no gradient
    first = next(k for k, name in enumerate(kernel_ids(graph)) if "fc1" in name and "addmm" in name)
    assert mine.uses[first].local.inputs == ((20,), (128, 24), (24, 20))


def test_an_axis_without_pins_changes_nothing_for_the_next() -> None:
    graph = graph_of(GPT)
    pins = tensor_parallel(graph, 2, 2).pins
    both = propagate(graph, 2, (("other", 2), ("tp", 2)), {"tp": pins, "other": []})
    state = shard(graph, 2, Degrees(tp=2)).state
    mine = flow(graph, both.sharding, (("other", 2), ("tp", 2)), 2, state)
    assert mine.counts() == flow_of(graph, Degrees(tp=2)).counts()


WIDTHS = ((8, 16, 8, 4), (4, 4, 24), (16, 24, 24, 16, 8))


@cache
def perceptron(widths: tuple[int, ...]) -> Graph:
    from simpart.capture import capture

    def factory(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        class Layers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(*(m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.layers(x).square().mean()
                return out

        return Layers(), (torch.zeros(micro_batch, widths[0]),)

    return capture(factory, (2, 3))


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(
    st.sampled_from(WIDTHS), st.sampled_from([2, 4, 8, 64]), st.sampled_from([2, 4]), st.randoms(use_true_random=False)
)
def test_propagation_moves_no_more_than_gathering_after_every_kernel(
    widths: tuple[int, ...], micro_batch: int, members: int, random: Any
) -> None:
    """Up to a twentieth: it is greedy and does not look ahead."""
    graph = perceptron(widths)
    places: dict[str, Placement | None] = {}
    for source in graph.parameters.values():
        if source.name.endswith("weight"):  # a bias lies as what it is added to
            place = random.choice([None, Shard(0), Shard(1)])
            places[source.name] = place
            places[source.name.replace("weight", "bias")] = place if place == Shard(0) else None
    pins = [Pin("parameter", name, place) for name, place in places.items() if place]
    axes = (("x", members),)
    found = propagate(graph, micro_batch, axes, {"x": pins})
    rest = tuple(
        (p.pattern, StatePlacement(parameter=(("x", p.placement),), gradient=(("x", p.placement),),
                                   optimizer=(("x", p.placement),)))
        for p in pins
    )  # fmt: skip
    mine = flow(graph, found.sharding, axes, micro_batch, rest)
    assert found == propagate(graph, micro_batch, axes, {"x": pins})
    assert weighed(mine) <= 1.05 * weighed(gathering(graph, micro_batch, members, pins, rest))


def weighed(found: Flow) -> float:
    """Bytes received, with those of a step's end spread over the micro-batches that propagation assumes."""
    inside = sum(2 * (found.axes[e.axis][1] - 1) * e.bytes / found.axes[e.axis][1] for e in found.exchanges)
    return inside + sum(c.received_bytes * (PER_STEP if c.per_step else 1) for c in found.conversions)


def gathering(
    graph: Graph, micro_batch: int, members: int, pins: list[Pin], rest: tuple[tuple[str, StatePlacement], ...]
) -> Flow:
    """What flows when each product works where its pinned weight lies, all else is whole, and every output is made
    whole at once."""
    flat, calls = graph.flat, calls_of(graph, micro_batch)
    pinned = {p.pattern: p.placement for p in pins}
    lying: dict[int, Placement] = {}
    for first, call in zip(graph.kernel_value_offsets.tolist(), graph.calls, strict=True):
        for i, source in enumerate(graph.templates[call.template].sources):
            name = named(source, call.variables).name
            if name in pinned:
                lying[first + i] = pinned[name]
    rows = []
    for k, name in enumerate(kernel_ids(graph)):
        values = flat.kernel_inputs[flat.kernel_indptr[k] : flat.kernel_indptr[k + 1]].tolist()
        known = {i: lying[v] for i, v in enumerate(values) if v in lying}
        cls = int(flat.kernel_class[k])
        for i, place in known.items():
            splits = splits_following(calls[cls], members, i, place)
            fitting = [s.strategy for s in splits if all(s.strategy.inputs[j] == p for j, p in known.items())]
            if fitting:
                rows.append((name, Strategy((("x", fitting[0]),))))
                made = fitting[0].outputs[0]
                if graph.kernel_classes[cls].view and isinstance(made, Shard):
                    lying[int(flat.kernel_outputs[k])] = made
                break
    return flow(graph, Sharding(overrides=tuple(rows)), (("x", members),), micro_batch, rest)


def test_a_plan_is_the_same_in_every_process() -> None:
    code = (
        "from tests.vocabulary import *; from simpart.sharding import *; g = graph_of(GPT); "
        "print(repr(shard(g, 2, Degrees(tp=2, sp=True, zero=1), 2)))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1


# --- pins that cannot hold -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pin", "size", "message"),
    [
        (Pin("parameter", "fc3.*", Shard(0)), 2, "unknown pinned parameter 'fc3.\\*'"),
        (Pin("parameter", "fc1.weight", Shard(2)), 2, "has 2 dims, got a pin to S\\(2\\)"),
        (Pin("parameter", "fc1.weight", Shard(0)), 3, "x must divide the dim 0 .* of size 40 .* try 2, 4, 5"),
        (Pin("parameter", "fc1.weight", Shard(0)), 64, "size 40 .* got x=64"),
        (Pin("input", "0", Shard(0)), 4, "size 2 .* got x=4"),
        (Pin("kernel", "/aten.mean.default#0|F|*", Shard(0)), 2, "has 0 dims"),
        (
            Pin("kernel", "*addmm*", Partial("max")),
            2,
            "cannot make P\\(max\\) on x=2; its first output can be R, S\\(0\\)",
        ),
    ],
)
def test_pins_that_cannot_hold_are_refused_with_what_would(pin: Pin, size: int, message: str) -> None:
    with pytest.raises(UserError, match=f"(?i){message}") as caught:
        propagate(graph_of(MLP), 2, (("x", size),), {"x": [pin]})
    assert "\n" not in str(caught.value)


def test_pins_on_an_axis_that_splits_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="axis 'dp', which splits no kernel of this mesh; it has tp"):
        propagate(graph_of(MLP), 2, (("dp", 2), ("tp", 2)), {"dp": [Pin("input", "*", Shard(0))]})


def test_outputs_of_kernels_can_be_pinned() -> None:
    graph = graph_of(MLP)
    pin = Pin("kernel", "/aten.relu.default#0|F|aten.relu.default#0", Shard(1))
    found = dict(propagate(graph, 2, (("x", 2),), {"x": [pin]}).sharding.classes)
    assert found[pin.pattern].axes == (("x", AxisStrategy((Shard(1),), (Shard(1),))),)


# --- pairs -----------------------------------------------------------------------------------------------------------
def test_pairs_of_a_gpt_are_megatrons() -> None:
    graph = graph_of(GPT)
    assert by_pattern(graph, tensor_parallel(graph, 2, 2).parameters) == (
        ("wte.weight", Shard(0)), ("h.*.attn.qkv.weight", Shard(0)), ("h.*.attn.qkv.bias", Shard(0)),
        ("h.*.attn.proj.weight", Shard(1)), ("h.*.mlp.fc.weight", Shard(0)), ("h.*.mlp.fc.bias", Shard(0)),
        ("h.*.mlp.proj.weight", Shard(1)), ("head.weight", Shard(0)),
    )  # fmt: skip


def test_pairs_of_a_llama_share_key_value_heads_and_gate() -> None:
    graph = graph_of(LLAMA)
    found = dict(by_pattern(graph, tensor_parallel(graph, 2, 2).parameters))
    assert {n.removeprefix("layers.*.") for n, p in found.items() if p == Shard(1)} == {
        "attn.o_proj.weight", "mlp.down_proj.weight"
    }  # fmt: skip
    assert len(found) == 9 and flow_of(graph, Degrees(tp=2)).counts("value") == {("all_reduce", "tp"): 10}


def test_a_tied_table_is_split_once_for_both_uses() -> None:
    graph = graph_of(TIED)
    preset = tensor_parallel(graph, 2, 2)
    assert [str(p.placement) for p in preset.pins if p.pattern in ("wte.weight", "head.weight")] == ["S(0)"]
    assert flow_of(graph, Degrees(tp=2)).counts("value") == {("all_reduce", "tp"): 10}


def test_convolutions_pair_by_channels() -> None:
    graph = graph_of(UNET)
    found = names(graph, dict(tensor_parallel(graph, 2, 2).parameters))
    inputs = {n for n, p in found.items() if p == "S(1)"}
    outputs = {n for n, p in found.items() if p == "S(0)" and n.endswith("weight")}
    assert inputs and outputs and all("conv" in n or "down" in n or n[-1].isdigit() or "weight" in n for n in inputs)
    kinds = {kind for kind, _ in flow_of(graph, Degrees(tp=2)).counts("value", "F")}
    assert "all_reduce" in kinds


def test_a_model_without_pairs_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="tp=2: no product of this model leaves a split that lasts"):
        tensor_parallel(graph_of(f"{HERE}:single"), 2, 2)


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        (LLAMA, 4, "tp must divide the 4 heads of attention and its 2 key-value heads, got tp=4; try tp 2"),
        (GPT, 3, "tp must divide the 4 heads of attention, got tp=3; try tp 2, 4"),
        (MLP, 3, "tp must divide the features that fc1.weight and fc2.weight share, got tp=3; try tp 2, 4, 5"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_with_those_that_do(model: str, tp: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tensor_parallel(graph_of(model), 2, tp)


def test_a_vocabulary_that_tp_does_not_divide_stays_whole_unless_asked_for() -> None:
    graph = graph_of("gpt:layers=2,hidden=16,heads=2,seq=8,vocab=33")
    assert not any("wte" in n or "head" in n for n in names(graph, dict(tensor_parallel(graph, 2, 2).parameters)))
    with pytest.raises(UserError, match=r"tp must divide the vocabulary of 33 .* try tp 3, 11.*--no-vocab-parallel"):
        tensor_parallel(graph, 2, 2, vocabulary=True)
    assert flow_of(graph, Degrees(tp=2)).counts("value") == {("all_reduce", "tp"): 8}


def test_without_vocabulary_parallelism_tables_rest_whole() -> None:
    graph = graph_of(GPT)
    found = names(graph, dict(tensor_parallel(graph, 2, 2, vocabulary=False).parameters))
    assert "wte.weight" not in found and "head.weight" not in found
    counts = flow_of(graph, Degrees(tp=2, vocabulary=False)).counts("value")
    assert counts == {("all_reduce", "tp"): 28}


def test_sequence_parallelism_needs_a_sequence_that_tp_divides() -> None:
    with pytest.raises(UserError, match="tp must divide the sequence of 15 for sp, got tp=2; try 3, 5, 15"):
        tensor_parallel(graph_of("gpt:layers=2,hidden=16,heads=2,seq=15,vocab=32"), 2, 2, sequence=True)
    with pytest.raises(UnsupportedError, match="no dim for a sequence"):
        tensor_parallel(graph_of(MLP), 2, 2, sequence=True)


# --- experts, contexts, state ----------------------------------------------------------------------------------------
def test_experts_are_split_and_samples_go_to_them_and_back() -> None:
    graph = graph_of(f"{HERE}:experts")
    found = flow_of(graph, Degrees(ep=2), micro_batch=4)
    assert {str(p.placement) for p in expert_parallel(graph, 4, 2).pins} == {"S(0)"}
    assert found.counts("value")["all_to_all", "ep"] >= 1 and not found.counts("parameter")
    with pytest.raises(UserError, match="ep must divide the 4 experts, got ep=3; try 2, 4"):
        expert_parallel(graph, 3, 3)
    with pytest.raises(UnsupportedError, match="ep=2: no parameter of this model holds one matrix per expert"):
        expert_parallel(graph_of(GPT), 2, 2)


def test_contexts_are_split_where_attention_allows() -> None:
    graph = graph_of(f"{HERE}:attends")
    assert flow_of(graph, Degrees(cp=2)).counts("value", "F") == {("all_gather", "cp"): 2}  # keys and values
    with pytest.raises(UnsupportedError, match=r"cp=2: attention over .* cannot be cut along its queries"):
        context_parallel(graph_of(GPT), 2, 2)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_takes_a_dim_that_tensor_parallelism_leaves(zero: int) -> None:
    graph = graph_of(GPT)
    preset = tensor_parallel(graph, 2, 2)
    rows = dict(state_at_rest(graph, {"tp": preset.parameters}, zero, 2))
    fc = rows["h.*.mlp.fc.weight"]
    assert fc.optimizer == (("dp", Shard(1)), ("tp", Shard(0)))
    assert (fc.gradient == fc.optimizer) == (zero > 1) and (fc.parameter == fc.optimizer) == (zero > 2)
    assert rows["*"].optimizer == (("dp", Shard(0)),)


@pytest.mark.parametrize(("replicas", "dim"), [(2, 0), (5, 1), (7, 0)])
def test_replicas_take_the_longest_dim_where_none_divides_evenly(replicas: int, dim: int) -> None:
    graph = graph_of(MLP)  # the first weight is 40 × 24, the second 16 × 40
    name = {2: "fc1.weight", 5: "fc2.weight", 7: "fc1.weight"}[replicas]
    rows = dict(state_at_rest(graph, {}, 3, replicas))
    rest = rows.get(name, rows.get("*.weight", rows.get("*")))
    assert rest is not None and rest.parameter == (("dp", Shard(dim)),)


def test_zero_that_divides_nothing_is_refused() -> None:
    with pytest.raises(
        UserError, match="zero=2 divides nothing: no parameter has a dim that 1000 replicas could share"
    ):
        state_at_rest(graph_of(MLP), {}, 2, 1000)


# --- plans -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "configuration"),
    [
        (GPT, Configuration(tp=2, pp=2, sp=True, zero=1)),
        (GPT, Configuration(tp=4, dp=2, zero=3, vocab_parallel=False)),
        (TIED, Configuration(tp=2, pp=2, zero=2)),
        (LLAMA, Configuration(tp=2, pp=2, sp=True)),
        (LLAMA, Configuration(tp=2, pp=2, micro_batch=3, recompute="full")),
        (RESNET, Configuration(tp=2, pp=2, zero=1)),
        (UNET, Configuration(tp=2, pp=2, zero=3)),
        (MLP, Configuration(dp=8, zero=3)),
    ],
)
def test_configured_plans_fit_their_graphs_and_flow(model: str, configuration: Configuration) -> None:
    asked = problem(model, 24)
    plan = configure(asked, configuration)
    graph = asked.graph.at(max(plan.batch.sizes[0]))
    check_plan(plan, graph)
    parts = flows(plan, graph)
    assert len(parts) == configuration.pp
    if configuration.tp > 1:
        assert any(part.counts("value") for part in parts)
    assert configure(asked, configuration) == plan


def test_stages_of_a_configured_plan_do_what_the_whole_graph_does() -> None:
    asked = problem(GPT, 24)
    plan = configure(asked, Configuration(pp=2, tp=2, sp=True))
    graph = asked.graph.at(1)
    whole = flow(graph, plan.shardings[0][1], plan.groups[0].axes, 1, plan.state)
    total: Counter[tuple[str, str]] = Counter()
    for part in flows(plan, graph):
        total += part.counts()
    assert total == whole.counts()


# --- the kernels behind ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("model", "degrees"), [
    (GPT, Degrees(tp=2, sp=True)), (GPT, Degrees(tp=4)), (LLAMA, Degrees(tp=2, sp=True)), (UNET, Degrees(tp=2)),
])  # fmt: skip
def test_every_chosen_split_reproduces_the_whole_kernel(model: str, degrees: Degrees) -> None:
    graph = graph_of(model)
    names = {name: int(c) for name, c in zip(kernel_ids(graph), graph.flat.kernel_class, strict=True)}
    calls, checked = calls_of(graph, 2), set()
    _, generator = seeded(1)
    for name, strategy in shard(graph, 2, degrees).sharding.classes:
        call, ((_, axis),) = calls[names[name]], strategy.axes
        if (call, axis) not in checked:
            checked.add((call, axis))
            split = matching(call, degrees.tp, axis)
            assert split is not None, f"{name}: {axis}"
            check_split(Case(call, tensors_for(call, 3)), split, degrees.tp, generator)
    assert len(checked) > 20


@pytest.mark.parametrize(("model", "members"), list(product([GPT, LLAMA, UNET], [2, 4])))
def test_a_strategy_says_all_about_its_split(model: str, members: int) -> None:
    """Masks, scales, exchanges and windows are the same however the strategy was asked for."""

    def rest(split: Split) -> object:
        return split.scales, split.masked, set(split.exchanges), split.windows

    for call in dict.fromkeys(calls_of(graph_of(model), 4)):
        known: dict[AxisStrategy, object] = {}
        for split in asked_for(call, members):
            assert known.setdefault(split.strategy, rest(split)) == rest(split), f"{call.target}: {split.label}"


def asked_for(call: Call, members: int) -> list[Split]:
    found = list(splits_of(call, members))
    for split in tuple(found):
        for output, places in ((False, split.strategy.inputs), (True, split.strategy.outputs)):
            for k, place in enumerate(places):
                if isinstance(place, Shard | Partial):
                    found += splits_following(call, members, k, place, output=output)
    return found


# --- words and prices ------------------------------------------------------------------------------------------------
def test_the_explanation_names_layouts_and_collectives() -> None:
    asked = problem(GPT, 24)
    lines = explain(configure(asked, Configuration(tp=2, dp=4)), asked.graph.at(1))
    assert lines[0].startswith("stage 0 moves per micro-batch: tp 30 all-reduce, 3 inside kernels")
    assert any("h.0.mlp.fc/aten.linear.default#0 × 7: tp addmm S(0) R S(1) → S(1)" in line for line in lines)
    assert any("h.0/aten.add.Tensor#0 × 7: whole; 7 all-reduce on tp" in line for line in lines)


def test_undescribed_kernels_replicate_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from simpart.tdl import DESCRIPTIONS

    monkeypatch.delitem(DESCRIPTIONS, "aten.tanh")
    graph = perceptron(WIDTHS[0])
    found = propagate(graph, 2, (("x", 2),), {"x": [Pin("parameter", "layers.0.weight", Shard(0))]})
    assert all("tanh" in name and "no description" in reason for name, reason in found.reasons.items())
    assert found.reasons and not any("F|aten.tanh" in name for name, _ in found.sharding.classes)
    assert flow(graph, found.sharding, (("x", 2),), 2, ()).counts("value")["all_gather", "x"] >= 1


def test_options_price_every_strategy_of_every_kernel() -> None:
    asked = problem(GPT, 24)
    plan = configure(asked, Configuration(tp=4, dp=2))
    found = options(asked.graph, 2, plan.groups[0], asked.cluster, asked.costs)
    calls = calls_of(asked.graph, 2)
    assert [len(found.of(c)) for c in range(len(calls))] == [len(splits_of(call, 4)) for call in calls]
    assert all(not found.strategies[found.of(c)[0]].axes for c in range(len(calls)))
    for c, call in enumerate(calls):
        for row in found.of(c):
            split = matching(call, 4, dict(found.strategies[row].axes)["tp"]) if found.strategies[row].axes else None
            pending = split is not None and any(isinstance(p, Partial) for p in split.strategy.outputs)
            assert (found.pending_s[row] > 0) == pending
            assert (found.exchange_s[row] > 0) == bool(split and split.exchanges)


def test_bytes_of_a_flow_are_those_of_its_steps() -> None:
    graph = graph_of(MLP)
    found = flow_of(graph, Degrees(tp=2), replicas=2, micro_batch=8)
    conversion = next(c for c in found.conversions if c.role == "value" and c.moves)
    assert conversion.received_bytes == conversion.times * received_bytes(
        conversions((8, 16), 4, (R, Partial()), (R, R), (2, 2))
    )
