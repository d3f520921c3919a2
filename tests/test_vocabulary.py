"""Eight plans by hand: representable, valid, hashable, printable, and their shardings true."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simpart.describe import describe
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.graph.sizes import size_at, size_from_json
from simpart.hardware import load_cluster
from simpart.kernels.ops import base_name
from simpart.placement import (
    AxisStrategy,
    Halo,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StatePlacement,
    Strategy,
)
from simpart.plan import OpSet, Plan, kernel_ids
from simpart.plan.format import PlanFile, load_plan, plan_from_json, plan_to_json, save_plan
from simpart.plan.partition import check_plan
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec
from tests.sharding_rule import Conversion, conversions, running_order, strategies_of
from tests.vocabulary import (
    EXAMPLES,
    GPT,
    MLP,
    TENSOR_PARALLEL,
    UNET,
    Example,
    document,
    graph_of,
    megatron,
    relayed_or_sent,
    renewed,
    rests,
    tofu,
)  # fmt: skip

R = Replicate()
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name.split(":")[0])


# --- all eight -------------------------------------------------------------------------------------------------------
@each_example
def test_it_fits_its_graph(example: Example) -> None:
    found = check_plan(example.plan, example.graph)
    assert len(found.ops) == len(example.plan.stages)


@each_example
def test_it_hashes_by_content(example: Example) -> None:
    again = example.build(example.graph)
    assert hash(again) == hash(example.plan)
    assert {again} == {example.plan}
    assert len({e.plan for e in EXAMPLES}) == len(EXAMPLES)


@each_example
def test_it_survives_json(example: Example) -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(example.plan)))) == example.plan


@each_example
def test_it_survives_a_file_and_gives_the_same_bytes_twice(example: Example, tmp_path: Path) -> None:
    file = PlanFile(
        plan=example.plan, training=TrainingSpec(), cluster=load_cluster(example.cluster), graph=example.graph
    )
    save_plan(tmp_path / "a.json", file)
    found = load_plan(tmp_path / "a.json")
    save_plan(tmp_path / "b.json", found)
    assert (found.plan, found.training, found.cluster) == (file.plan, file.training, file.cluster)
    assert found.graph.fingerprint == example.graph.fingerprint
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@each_example
def test_its_words_name_every_stage_and_stay_short(example: Example) -> None:
    lines = describe(example.plan, example.graph, load_cluster(example.cluster)).splitlines()
    assert lines[0].startswith(f"{len(example.plan.stages)} stage")
    for s in range(len(example.plan.stages)):
        assert any(line.startswith(f"  stage {s}: ") for line in lines)
    assert len(lines) < 60
    assert max(map(len, lines)) < 170


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_every_plan_is_simulated(example: Example) -> None:
    cluster, plan = load_cluster(example.cluster), example.plan

    def step_s(plan: Plan) -> float:
        problem = Problem(
            graph=example.graph,
            training=TrainingSpec(),
            cluster=cluster,
            costs=default_costs(cluster, profiles=False),
            global_batch=plan.global_batch,
        )
        found = simulate_plan(problem, plan)
        assert found.feasible
        return found.step_s

    twice = replace(plan, batch=replace(plan.batch, micro_batches=2 * plan.batch.micro_batches))
    assert 0 < step_s(plan) < step_s(twice)


def test_the_document_shows_the_plans_as_they_are(root: Path) -> None:
    text = (root / "docs" / "formats.md").read_text()
    assert renewed(text) == text, "run python -m tests.vocabulary --write docs/formats.md"
    assert document() in text


# --- words -----------------------------------------------------------------------------------------------------------
def words_of(name: str) -> str:
    example = next(e for e in EXAMPLES if e.name.startswith(name))
    return describe(example.plan, example.graph, load_cluster(example.cluster))


def test_words_state_unequal_replicas_and_recomputation() -> None:
    words = words_of("RaNNC")
    assert "devices 0:3 (3 × A100-SXM-80GB), 3 replicas of 2 + 1 + 1 samples" in words
    assert "4 samples, 62.0 k parameters, recomputes 15 of 35 ops" in words


def test_words_state_devices_of_two_kinds() -> None:
    assert "devices 7:10 (1 × A100-SXM-80GB, 2 × V100-SXM2-32GB)" in words_of("Two kinds")


def test_words_state_tied_parameters() -> None:
    assert "parameter wte.weight in stages 0, 1: gradients summed" in words_of("Selective")


def test_words_state_how_skips_travel() -> None:
    plan = next(e for e in EXAMPLES if e.name.startswith("U-Net")).plan
    skip = "stage 0 → 2: down.0.5/aten.relu_.default#0"
    assert f"{skip}, relayed by stage 1" in words_of("U-Net")
    assert f"{skip}, sent past stage 1" in describe(relayed_or_sent(plan), graph_of(UNET))
    assert hash(plan) != hash(relayed_or_sent(plan))


def test_words_count_parameters_of_a_stage() -> None:
    hidden, layers, seq, vocab = 48, 5, 20, 112
    count = layers * (12 * hidden**2 + 13 * hidden) + (vocab + seq) * hidden
    assert f"{count / 1000:.0f} k parameters" in words_of("RaNNC").splitlines()[1]


# --- Megatron: conversions between kernels are Megatron's collectives ------------------------------------------------
def collectives(plan: Plan, graph: Graph) -> list[Conversion]:
    found = conversions(graph, plan.shardings[0][1], rests(TENSOR_PARALLEL), "tp")
    return [c for c in found if c.collective]


def in_layer(found: list[Conversion], layer: int, phase: str) -> list[tuple[str, str]]:
    """Collectives whose reader is a kernel of the layer, with the reader's module."""
    rows = [(c.collective or "", c.consumer) for c in found]
    return [
        (what, reader.partition("/")[0].removeprefix(f"h.{layer}").removeprefix("."))
        for what, reader in rows
        if reader.startswith(f"h.{layer}") and f"|{phase}|" in reader
    ]


@pytest.mark.parametrize("layer", range(7))
def test_tensor_parallel_layers_all_reduce_twice_forward_and_twice_backward(layer: int) -> None:
    graph = graph_of(GPT)
    found = collectives(megatron(graph, sequence_parallel=False), graph)
    assert in_layer(found, layer, "F") == [("all-reduce", ""), ("all-reduce", "")]  # the two residual additions
    assert in_layer(found, layer, "B") == [("all-reduce", "ln_2"), ("all-reduce", "ln_1")]


@pytest.mark.parametrize("layer", range(7))
def test_sequence_parallel_layers_gather_and_scatter_twice_each_way(layer: int) -> None:
    graph = graph_of(GPT)
    found = collectives(megatron(graph), graph)
    forward = [("all-gather", "attn.qkv"), ("reduce-scatter", ""), ("all-gather", "mlp.fc"), ("reduce-scatter", "")]
    backward = [
        ("all-gather", "mlp.proj"),
        ("reduce-scatter", "ln_2"),
        ("all-gather", "attn.proj"),
        ("reduce-scatter", "ln_1"),
    ]
    assert in_layer(found, layer, "F") == forward
    assert in_layer(found, layer, "B") == backward


def test_outside_the_layers_only_embedding_and_head_communicate() -> None:
    graph = graph_of(GPT)
    found = collectives(megatron(graph, sequence_parallel=False), graph)
    assert Counter(c.collective for c in found) == {"all-reduce": 4 * 7 + 2}
    sequence = collectives(megatron(graph), graph)
    norms = [c.consumer for c in sequence if c.consumer.startswith("gradient")]
    assert len(norms) == 2 * (2 * 7 + 1) + 1  # weight and bias of every norm, and the positions: sums over the sequence
    assert {c.collective for c in sequence if c.consumer.startswith("gradient")} == {"all-reduce"}


def test_every_instance_of_a_layer_shares_its_class() -> None:
    sharding = megatron(graph_of(GPT)).shardings[0][1]
    assert not sharding.overrides
    assert not [name for name, _ in sharding.classes if name.startswith(("h.1", "h.2"))]


def test_kernels_that_work_and_are_not_named_are_the_replicated_ones() -> None:
    graph = graph_of(GPT)
    strategies = strategies_of(graph, megatron(graph).shardings[0][1])
    whole = [
        name
        for k, name in enumerate(kernel_ids(graph))
        if not strategies[k] and not graph.kernel_classes[graph.flat.kernel_class[k]].view
    ]
    outside = {
        "/aten.arange.default#0|F|aten.arange.default#0",
        "wpe/aten.embedding.default#0|F|aten.embedding.default#0",
    }
    biases = {
        f"h.{i}.{m}.proj/aten.linear.default#0|B|aten.sum.dim_IntList#0" for i in range(7) for m in ("attn", "mlp")
    }
    assert set(whole) == outside | biases


# --- Tofu: forward and backward differ -------------------------------------------------------------------------------
def test_tofu_splits_every_computing_kernel_on_both_axes() -> None:
    graph = graph_of(MLP)
    strategies = strategies_of(graph, tofu(graph).shardings[0][1])
    for k, found in enumerate(strategies):
        if not graph.kernel_classes[graph.flat.kernel_class[k]].view:
            assert set(found) == {"x", "y"}, kernel_ids(graph)[k]


def test_tofu_moves_activations_between_forward_and_backward() -> None:
    graph = graph_of(MLP)
    sharding = tofu(graph).shardings[0][1]
    on_x = [c for c in conversions(graph, sharding, rests({}), "x") if c.collective]
    between = "/aten.relu.default#0|F|aten.relu.default#0"
    moved = [c for c in on_x if c.producer == between]
    assert [(c.before, c.after, c.collective) for c in moved] == [(Shard(0), Shard(1), "all-to-all")]
    assert moved[0].consumer == "fc2/aten.linear.default#0|B|aten.mm.default#1"


# --- the strategies are true: every kernel run in parts gives what the whole kernel gives ----------------------------
BATCH, MEMBERS = 4, 2
LOCALISED = ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward")
"""Over a split vocabulary these need the maximum and the sum of all members, or a mask: their local forms are the stage
compiler's."""


def decoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if isinstance(value, dict):
        [(kind, content)] = value.items()
        return tensors[content] if kind == "tensor" else getattr(torch, content)
    return size_at(size_from_json(value), BATCH) if isinstance(value, str) else value


def run_kernel(target: str, arguments: str, tensors: list[torch.Tensor], shape: tuple[int, ...]) -> list[torch.Tensor]:
    namespace, name, overload = target.split(".")
    call = json.loads(arguments)
    positional = decoded(call["positional"], tensors)
    if name in ("view", "_unsafe_view", "expand"):
        positional[1] = list(shape)
    named = {key: decoded(value, tensors) for key, value in call["named"].items()}
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*positional, **named)
    return list(found) if isinstance(found, tuple | list) else [found]


def parts(whole: torch.Tensor, place: Placement | Halo, generator: torch.Generator) -> list[torch.Tensor]:
    if isinstance(place, Shard):
        assert whole.shape[place.dim] % MEMBERS == 0
        return [part.contiguous() for part in whole.chunk(MEMBERS, place.dim)]  # norms read their statistics as dense
    if isinstance(place, Partial):
        first = torch.randn(whole.shape, dtype=whole.dtype, generator=generator)
        return [first, whole - first]
    return [whole] * MEMBERS


def joined(found: list[torch.Tensor], place: Placement) -> torch.Tensor:
    if isinstance(place, Shard):
        return torch.cat(found, place.dim)
    if isinstance(place, Partial):
        total = torch.stack(found).sum(0)
        return total / MEMBERS if place.reducer == "avg" else total
    torch.testing.assert_close(found[0], found[1])
    return found[0]


def classes(sharding: Sharding) -> list[tuple[str, str, AxisStrategy]]:
    return [(name, axis, split) for name, strategy in sharding.classes for axis, split in strategy.axes]


def strategies_to_run() -> list[tuple[str, str, str, AxisStrategy]]:
    plans = [(GPT, megatron(graph_of(GPT), sequence_parallel=s)) for s in (False, True)]
    plans.append((MLP, tofu(graph_of(MLP))))
    rows = [(model, *row) for model, plan in plans for row in classes(plan.shardings[0][1])]
    return list(dict.fromkeys(rows))


def test_kernels_in_parts_give_what_whole_kernels_give() -> None:
    checked = 0
    for model, name, _, split in strategies_to_run():
        graph = graph_of(model)
        k = kernel_ids(graph).index(name)
        cls = int(graph.flat.kernel_class[k])
        kernel, specs = graph.kernel_classes[cls], graph.kernel_class_inputs[cls]
        base = base_name(kernel.target)
        if base in LOCALISED or (base.startswith("embedding") and name.startswith("wte")):
            continue
        generator = torch.Generator().manual_seed(k)
        inputs = [
            torch.randint(20, spec.shape(BATCH), generator=generator)
            if spec.dtype == "int64"
            else torch.randn(spec.shape(BATCH), generator=generator, dtype=torch.float64)
            for spec in specs
        ]
        shapes = [spec.shape(BATCH) for spec in kernel.outputs]
        whole = run_kernel(kernel.target, kernel.arguments, inputs, shapes[0])
        local = [parts(tensor, place, generator) for tensor, place in zip(inputs, split.inputs, strict=True)]
        shape = list(shapes[0])
        if isinstance(split.outputs[0], Shard):
            shape[split.outputs[0].dim] //= MEMBERS
        each = [
            run_kernel(kernel.target, kernel.arguments, [tensor[m] for tensor in local], tuple(shape))
            for m in range(MEMBERS)
        ]
        for i, place in enumerate(split.outputs):
            torch.testing.assert_close(joined([found[i] for found in each], place), whole[i], msg=name)
        checked += 1
    assert checked > 130


def test_producers_and_readers_agree_within_an_op_forward() -> None:
    """Conversions sit on the edges between ops, where the stage compiler puts them."""
    graph = graph_of(GPT)
    for plan in (megatron(graph), megatron(graph, sequence_parallel=False)):
        for c in collectives(plan, graph):
            if "|F|" in c.consumer:
                assert c.producer.partition("|")[0] != c.consumer.partition("|")[0]


def test_kernels_run_after_what_they_read() -> None:
    graph = graph_of(GPT)
    flat, place = graph.flat, {k: i for i, k in enumerate(running_order(graph))}
    readers = [
        k for k in range(len(kernel_ids(graph))) for _ in range(flat.kernel_indptr[k], flat.kernel_indptr[k + 1])
    ]
    for reader, value in zip(readers, flat.kernel_inputs.tolist(), strict=True):
        if flat.kernel_value_kernel[value] >= 0:
            assert place[int(flat.kernel_value_kernel[value])] < place[reader]


# --- what the vocabulary refuses in shardings and states -------------------------------------------------------------
def sharded(**changes: Any) -> Plan:
    """Tofu's plan with another sharding."""
    plan = tofu(graph_of(MLP))
    return replace(plan, shardings=(("tofu", replace(plan.shardings[0][1], **changes)),))


def on(axis: str, inputs: tuple[Placement | Halo, ...], outputs: tuple[Placement, ...]) -> Strategy:
    return Strategy(((axis, AxisStrategy(inputs, outputs)),))


ADDMM = "fc1/aten.linear.default#0|F|aten.addmm.default#0"


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("fc3/aten.linear.default#0|F|aten.mm.default#0", on("x", (R,), (R,)), "unknown kernel 'fc3/"),
        (
            "fc1/aten.linear.default#0|F|aten.mm.default#0",
            on("x", (R,), (R,)),
            "did you mean 'fc1/aten.linear.default#0|",
        ),
        (ADDMM, on("z", (R, R, R), (R,)), "the group of stage 0 has no axis 'z'; it has x, y"),
        (ADDMM, on("dp", (R, R, R), (R,)), "axis dp holds replicas"),
        (ADDMM, on("x", (R, R), (R,)), "has 3 inputs, its strategy on x names 2"),
        (ADDMM, on("x", (R, R, R), (R, R)), "has 1 outputs, its strategy on x names 2"),
        (ADDMM, on("x", (Shard(1), R, R), (R,)), "input 0 has 1 dims, its placement S(1) names dim 1; count from 0"),
        (ADDMM, on("x", (R, Halo(Shard(2), 1, 1), R), (R,)), "names dim 2"),
        (ADDMM, on("x", (R, R, Shard(1, block=7)), (R,)), "block must divide dim 1 of size 40, got 7"),
        (ADDMM, Strategy(on("x", (R, R, R), (R,)).axes * 2), "axis x is given twice"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(name: str, strategy: Strategy, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_plan(sharded(overrides=((name, strategy),)), graph_of(MLP))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_goes_by_its_first_instance() -> None:
    graph = graph_of(GPT)
    plan = megatron(graph)
    second = "h.1.mlp/aten.gelu.default#0|F|aten.gelu.default#0"
    sharding = Sharding(classes=((second, on("tp", (Shard(2),), (Shard(2),))),))
    with pytest.raises(UserError, match=r"first instance h\.0\.mlp/aten\.gelu.*put this one under overrides"):
        check_plan(replace(plan, shardings=(("tensor", sharding),)), graph)
    check_plan(replace(plan, shardings=(("tensor", Sharding(overrides=sharding.classes)),)), graph)


def test_shardings_have_one_name_and_a_use() -> None:
    plan = tofu(graph_of(MLP))
    with pytest.raises(UserError, match="sharding tofu is given twice"):
        check_plan(replace(plan, shardings=plan.shardings * 2), graph_of(MLP))
    with pytest.raises(UserError, match="'other' is used by no stage"):
        check_plan(replace(plan, shardings=(*plan.shardings, ("other", Sharding()))), graph_of(MLP))
    with pytest.raises(UserError, match="stage 0 names sharding 'tofu'; the plan has none"):
        check_plan(replace(plan, shardings=()), graph_of(MLP))


@pytest.mark.parametrize(
    ("pattern", "rest", "message"),
    [
        ("fc3.*", StatePlacement(), r"state of 'fc3\.\*' matches no parameter .* fc1\.weight"),
        ("fc1.*", StatePlacement(parameter=(("dp", Shard(0)),)), "fc1.weight: group 0 has no axis 'dp'; it has x, y"),
        ("*.bias", StatePlacement(gradient=(("x", Shard(1)),)), "gradient of fc1.bias has 1 dims, .* S.1. names dim 1"),
        ("*.bias", StatePlacement(optimizer=(("x", Partial()),)), "state of fc1.bias rests whole or in shards, got P"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(pattern: str, rest: StatePlacement, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_plan(replace(tofu(graph_of(MLP)), state=((pattern, rest),)), graph_of(MLP))


def test_gradients_may_rest_as_terms() -> None:
    deferred = StatePlacement(gradient=(("x", Partial()),))
    check_plan(replace(tofu(graph_of(MLP)), state=(("*", deferred),)), graph_of(MLP))


def test_the_first_pattern_that_matches_holds() -> None:
    plan = replace(
        tofu(graph_of(MLP)), state=(("*.bias", StatePlacement()), ("*", StatePlacement(parameter=(("x", Shard(1)),))))
    )
    check_plan(plan, graph_of(MLP))
    names = {s.name: plan.state_of(s)[0] for s in graph_of(MLP).parameters.values()}
    assert names == {"fc1.weight": "*", "fc1.bias": "*.bias", "fc2.weight": "*", "fc2.bias": "*.bias"}
    hidden = replace(plan, state=(("*", StatePlacement()), ("fc1.bias", StatePlacement())))
    with pytest.raises(UserError, match=r"state of 'fc1\.bias' matches no parameter that an earlier pattern leaves"):
        check_plan(hidden, graph_of(MLP))


def test_recomputation_stays_in_its_stage() -> None:
    example = EXAMPLES[0]
    plan = example.plan
    elsewhere = OpSet((("h.6/aten.add.Tensor#0", "h.6/aten.add.Tensor#0"),))
    stages = (replace(plan.stages[0], recompute=(elsewhere,)), *plan.stages[1:])
    with pytest.raises(UserError, match=r"stage 0 recomputes op h\.6/aten\.add\.Tensor#0, which it does not hold"):
        check_plan(replace(plan, stages=stages), example.graph)
