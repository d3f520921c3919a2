"""What one device of a sharded stage computes, sends and holds."""

from __future__ import annotations

import pytest

from simpart.cost.pricing import price_ops
from simpart.hardware import load_cluster
from simpart.kernels.flops import kernel_class_flops, kernel_flops
from simpart.lowering.sharded import converted_bytes, local_bytes, local_elements, price_kernels, sent_by
from simpart.placement import Replicate, Shard
from simpart.registry import default_costs
from simpart.sharding.flow import Flow, flow, flows
from tests.vocabulary import EXAMPLES, GPT, graph_of, megatron

FSDP = EXAMPLES[2]


@pytest.fixture(scope="module")
def tensor() -> Flow:
    """A GPT in one stage, tensor-parallel over two devices."""
    graph = graph_of(GPT)
    plan = megatron(graph, sequence_parallel=False)
    return flow(graph, dict(plan.shardings)["tensor"], (("tp", 2),), 2, plan.state)


def test_matrix_products_halve_and_nothing_else_is_lost(tensor: Flow) -> None:
    graph = tensor.graph
    whole = kernel_class_flops(graph, 2)
    total = sum(whole[graph.flat.kernel_class[k]] for k in tensor.uses)
    local = sum(
        kernel_flops(u.local.target, u.local.inputs, u.local.outputs, u.local.arguments) for u in tensor.uses.values()
    )
    assert local == pytest.approx(total / 2)


def test_prices_of_an_unsplit_flow_are_those_of_the_ops() -> None:
    from simpart.placement import Sharding

    graph, cluster = graph_of(GPT), load_cluster("dgx-a100")
    compute, device = default_costs(cluster, profiles=False).compute, cluster.device(0)
    forward, backward = price_kernels(graph, flow(graph, Sharding(), (("tp", 2),), 2), compute, device, "eager")
    prices = price_ops(graph, [2], compute, device, "eager")[2]
    counts = [graph.flat.op_class.tolist().count(c) for c in range(len(graph.op_classes))]
    assert forward.seconds[0] == pytest.approx(prices.forward.seconds @ counts)
    assert backward.seconds[0] <= prices.backward.seconds @ counts + 1e-12  # omitted kernels are not in a flow


def test_two_all_reduces_a_layer_each_way_of_the_residual_stream(tensor: Flow) -> None:
    plan = megatron(tensor.graph)
    found = sent_by(tensor, plan.groups[0], load_cluster("dgx-a100"))
    stream = 2 * 20 * 48 * 4  # micro-batch × sequence × hidden × float32
    for phase in ("F", "B"):
        rows = [s for s in found if s.phase == phase and s.role == "value" and s.collective.bytes == stream]
        assert {s.collective.kind for s in rows} == {"all_reduce"}
        assert sum(s.times for s in rows) >= 14
    assert all(len(s.collective.ranks) == 2 and s.axis == "tp" for s in found)


def test_groups_on_one_level_share_it(tensor: Flow) -> None:
    plan = megatron(tensor.graph)
    rows = sent_by(tensor, plan.groups[0], load_cluster("p2.8xlarge"))
    assert {s.collective.concurrent for s in rows} == {2}  # two tensor-parallel pairs on one bus


def test_fully_sharded_parameters_are_gathered_twice_and_reduced_once_a_micro_batch() -> None:
    graph, plan = FSDP.graph, FSDP.plan
    (found,) = flows(plan, graph)
    rows = [s for s in sent_by(found, plan.groups[0], load_cluster("dgx-a100")) if not s.per_step]
    parameters = len(graph.parameters)
    gathers = {p: sum(s.times for s in rows if s.collective.kind == "all_gather" and s.phase == p) for p in "FB"}
    assert gathers["F"] == parameters
    assert 0 < gathers["B"] <= parameters
    assert sum(s.times for s in rows if s.collective.kind == "reduce_scatter") == parameters


def test_local_bytes_by_hand(tensor: Flow) -> None:
    assert local_elements((8, 6), (Shard(0), Replicate()), (("x", 4), ("y", 2))) == 12
    graph = tensor.graph
    sizes = local_bytes(graph, tensor)
    weight = next(v for v, s in graph.all_sources() if s.name == "h.0.mlp.fc.weight")
    kernel_level = int(graph.kernel_value_offsets[graph.flat.op_call[graph.find("h.0.mlp.fc/aten.linear.default#0")]])
    del weight
    names = [
        s.name
        for s in graph.templates[
            graph.calls[graph.flat.op_call[graph.find("h.0.mlp.fc/aten.linear.default#0")]].template
        ].sources
    ]
    at = next(i for i, name in enumerate(names) if name.endswith("mlp.fc.weight"))
    assert sizes[kernel_level + at] == 4 * 48 * 48 * 4 // 2


def test_converted_values_are_kept_where_backward_reads_them(tensor: Flow) -> None:
    kept, largest = converted_bytes(tensor)
    assert kept >= 0 and largest >= 2 * 20 * 48 * 4
