"""What flows under shardings: against the hand-written Megatron, FSDP and Tofu plans and a slow account of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.placement import Partial, Replicate, Shard, Sharding, StatePlacement
from simpart.plan import Plan
from simpart.sharding import Flow, axis_members, flow, flows, local_signature
from simpart.sharding.flow import _follow, _Stage
from simpart.sharding.mesh import mesh_of
from tests import vocabulary
from tests.sharding_rule import conversions as account
from tests.vocabulary import GPT, LLAMA, MLP, TENSOR_PARALLEL, graph_of, megatron, rests

LAYERS, TP = 7, 2
WORDS = {"all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter", "all-gather": "all_gather",
         "all-to-all": "all_to_all"}  # fmt: skip


def whole(graph: Graph, plan: Plan, micro_batch: int = 2) -> Flow:
    """The flow of a plan's only sharding as if all stages were one."""
    ((_, sharding),) = plan.shardings
    return flow(graph, sharding, plan.groups[0].axes, micro_batch, plan.state)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_does_two_collectives_a_layer_and_way(sequence_parallel: bool) -> None:
    graph = graph_of(GPT)
    found = whole(graph, megatron(graph, sequence_parallel=sequence_parallel))
    kinds = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce",)
    for phase in ("F", "B"):  # and one for the embedding or the head
        assert found.counts("value", phase) == {(kind, "tp"): 2 * LAYERS + 1 for kind in kinds}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_conversions_are_those_of_the_slow_account(sequence_parallel: bool) -> None:
    graph = graph_of(GPT)
    plan = megatron(graph, sequence_parallel=sequence_parallel)
    ((_, sharding),) = plan.shardings
    slow = account(graph, sharding, rests(TENSOR_PARALLEL), "tp")
    expected = Counter(WORDS[c.collective] for c in slow if c.collective)
    found = whole(graph, plan).counts()
    assert {kind: n for (kind, axis), n in found.items() if axis == "tp" and kind != "exchange"} == expected


def test_each_value_reaches_a_layout_once() -> None:
    graph = graph_of(GPT)
    found = whole(graph, megatron(graph))
    rows = [(v, c.after) for c in found.conversions if c.role == "value" for v in c.values]
    assert len(rows) == len(set(rows))


def test_every_reader_gets_what_it_asks_for() -> None:
    graph = graph_of(GPT)
    found, flat = whole(graph, megatron(graph)), graph.flat
    reached = {(v, c.after) for c in found.conversions for v in c.values}
    for k in range(len(flat.kernel_class)):
        values = flat.kernel_inputs[flat.kernel_indptr[k] : flat.kernel_indptr[k + 1]].tolist()
        for value, wanted in zip(values, found.uses[k].inputs, strict=True):
            assert found.layouts[value] == wanted or (value, wanted) in reached


def test_stages_together_do_what_the_whole_graph_does() -> None:
    graph = graph_of(GPT)
    plan = megatron(graph)
    total: Counter[tuple[str, str]] = Counter()
    for part in flows(plan, graph):
        total += part.counts()
    assert total == whole(graph, plan).counts()


def test_fsdp_gathers_each_way_and_scatters_gradients() -> None:
    graph = graph_of(LLAMA)
    (found,) = flows(vocabulary.fsdp(graph), graph)
    parameters = len(graph.parameters)
    assert found.counts("gradient") == {("reduce_scatter", "dp"): parameters}
    assert found.counts("parameter", "F") == {("all_gather", "dp"): parameters}
    assert found.counts("parameter", "B") == {("all_gather", "dp"): parameters - 1}  # the embedding is not read again


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_zero_moves_what_its_level_says(level: int) -> None:
    graph = graph_of(MLP)
    split, parameters = (("dp", Shard(0)),), len(graph.parameters)
    rest = StatePlacement(
        parameter=split if level > 2 else (), gradient=split if level > 1 else (), optimizer=split if level else ()
    )
    found = flow(graph, Sharding(), (("dp", 4),), 2, (("*", rest),))
    reduced = [c for c in found.conversions if c.role == "gradient" and c.moves]
    kind = "reduce_scatter" if level else "all_reduce"
    assert found.counts("gradient") == {(kind, "dp"): parameters}
    assert {c.per_step for c in reduced} == {level < 2}
    assert found.counts("update") == ({("all_gather", "dp"): parameters} if level in (1, 2) else {})
    assert bool(found.counts("parameter")) == (level == 3)


def test_tofu_plan_is_followed_on_both_axes() -> None:
    graph = graph_of(MLP)
    found = whole(graph, vocabulary.tofu(graph), 8)
    after = {c.producer: c for c in found.conversions}
    product = after["fc2/aten.linear.default#0|F|aten.addmm.default#0"]
    assert [(s.kind, found.axes[s.axis][0]) for s in product.steps] == [("reduce_scatter", "y")]
    assert product.before == (Shard(0), Partial())


def test_local_signatures_hold_one_devices_share() -> None:
    graph = graph_of(GPT)
    found = whole(graph, megatron(graph))
    signatures = signatures_of(graph, 2)
    for k, use in found.uses.items():
        signature = signatures[int(graph.flat.kernel_class[k])]
        local = local_signature(signature, use)
        for form, before, layout in zip(local.inputs, signature.inputs, use.inputs, strict=True):
            divided = any(isinstance(p, Shard) for p in layout)
            assert divided == (form.shape != before.shape)


def test_norm_statistics_and_split_vocabulary_are_exchanged_inside() -> None:
    graph = graph_of(GPT)
    found = whole(graph, megatron(graph))
    rows, kinds = 2 * 20, Counter(e.reducer for e in found.exchanges)
    assert all(found.axes[e.axis][0] == "tp" and e.bytes == rows * 4 for e in found.exchanges)
    assert kinds == {"max": 1, "sum": 2}


def test_an_axis_of_one_member_moves_nothing() -> None:
    graph = graph_of(GPT)
    ((_, sharding),) = megatron(graph).shardings
    assert flow(graph, sharding, (("dp", 1), ("tp", 1)), 2).conversions == ()


def test_values_cross_to_a_stage_without_the_axis_whole() -> None:
    graph = graph_of(GPT)
    plan = megatron(graph)
    stages = tuple(replace(s, sharding=s.sharding if s.group == 0 else None) for s in plan.stages)
    groups = (plan.groups[0], replace(plan.groups[1], axes=(("dp", 2), ("other", 2))))
    found = flows(replace(plan, stages=stages, groups=groups, state=()), graph)
    assert not found[1].counts("value") and found[0].counts("value")
    assert all(p == Replicate() for layout in found[1].layouts.values() for p in layout)


def test_axis_members_are_named_in_the_groups_order() -> None:
    group = vocabulary.group("4:8", dp=2, tp=2)
    assert axis_members(group, "tp") == ((4, 5), (6, 7)) and axis_members(group, "dp") == ((4, 6), (5, 7))


def test_a_deep_model_costs_template_work() -> None:
    """A layer is followed once for each way its inputs come: the first layer's, all others', and backward."""
    graph = graph_of(GPT)
    plan = megatron(graph)
    ((_, sharding),) = plan.shardings
    stage = _Stage(graph, sharding, mesh_of(plan.groups[0].axes), 2, plan.state)
    _follow(graph, [stage], None)
    assert len(stage._known) <= 2 * len(graph.templates) + 2
