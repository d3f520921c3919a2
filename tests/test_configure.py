"""Plans by configuration: whatever degrees fit give a valid plan; others are refused with ones that would fit."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.configure import (
    Configuration,
    attention_regions,
    configure,
    equal_layers,
    layer_calls,
    recompute_regions,
    split_batch,
)
from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.plan.partition import check_plan, clonable_ops
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.training import TrainingSpec
from tests.test_partition import RESNET, compare
from tests.vocabulary import GPT, TIED, UNET, graph_of


@cache
def problem(model: str, global_batch: int = 24, cluster: str = "dgx-a100") -> Problem:
    found = load_cluster(cluster)
    return Problem(
        graph=graph_of(model),
        training=TrainingSpec(),
        cluster=found,
        costs=default_costs(found, profiles=False),
        global_batch=global_batch,
    )


def refused(model: str, configuration: Configuration, global_batch: int = 24) -> str:
    with pytest.raises(UserError) as caught:
        configure(problem(model, global_batch), configuration)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- stages ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [GPT, TIED, UNET, RESNET])
@pytest.mark.parametrize("stages", range(1, 7))
def test_any_number_of_stages_is_a_partition(model: str, stages: int) -> None:
    stage_of = equal_layers(graph_of(model), stages)
    found = compare(graph_of(model), stage_of, stages)  # refuses empty stages, parted groups, values that flow back
    own = np.concatenate([ops[~clonable_ops(graph_of(model))[ops]] for ops in found.ops])
    assert sorted(own.tolist()) == np.flatnonzero(~clonable_ops(graph_of(model))).tolist()


def test_layers_are_dealt_out_evenly_the_first_stages_get_the_rest() -> None:
    graph = graph_of(GPT)
    stage_of = equal_layers(graph, 3)
    layers = layer_calls(graph)
    assert [int(stage_of[graph.flat.op_call == call][0]) for call in layers] == [0, 0, 0, 1, 1, 2, 2]
    assert set(stage_of[: int(np.flatnonzero(graph.flat.op_call == layers[0])[0])].tolist()) == {0}
    assert stage_of[-1] == 2


def test_a_model_without_layers_is_cut_by_work() -> None:
    graph = graph_of(UNET)
    assert layer_calls(graph) == []
    from simpart.kernels.flops import op_class_flops

    flops = op_class_flops(graph, 2)[graph.flat.op_class]
    stage_of = equal_layers(graph, 2)
    shares = [float(flops[stage_of == s].sum() / flops.sum()) for s in range(2)]
    largest = max(
        float(flops[graph.flat.op_group == head].sum() / flops.sum()) for head in np.unique(graph.flat.op_group)
    )
    assert abs(shares[0] - 0.5) <= largest


def test_as_many_stages_as_ops_but_no_more() -> None:
    graph = graph_of(UNET)
    most = len(set(graph.flat.op_group[~clonable_ops(graph)].tolist()))
    compare(graph, equal_layers(graph, most), most)
    with pytest.raises(UserError, match=rf"pp must be at most {most}, .* got pp={most + 1}; lower pp"):
        equal_layers(graph, most + 1)


# --- configurations --------------------------------------------------------------------------------------------------
@given(
    st.sampled_from([GPT, TIED, UNET, RESNET]), st.integers(1, 4), st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 4), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from(["none", "full"]),
)  # fmt: skip
def test_what_is_not_refused_fits_the_graph(
    model: str, pp: int, dp: int | None, micro_batch: int | None, schedule: str, recompute: str
) -> None:
    configuration = Configuration(pp=pp, dp=dp, micro_batch=micro_batch, schedule=schedule, recompute=recompute)
    try:
        plan = configure(problem(model), configuration)
    except UserError as error:
        assert re.search(r"; (try|lower)", str(error))
        return
    check_plan(plan, graph_of(model).at(plan.batch.sizes[0][0]))
    assert plan.global_batch == 24
    assert plan.device_count == pp * (dp or 8 // pp)
    assert micro_batch is None or set(plan.batch.sizes[0]) == {micro_batch}


@given(st.integers(1, 200), st.integers(1, 16), st.none() | st.integers(1, 16))
def test_batches_divide_or_the_message_says_what_would(global_batch: int, dp: int, micro_batch: int | None) -> None:
    try:
        size, count = split_batch(global_batch, dp, micro_batch)
    except UserError as error:
        offered = [int(n) for n in re.findall(r"\d+", str(error).rpartition("try")[2])]
        assert offered
        for n in offered:
            split_batch(global_batch, *((n, None) if str(error).startswith("dp must") else (dp, n)))
        return
    assert size * count * dp == global_batch


def test_degrees_must_fit_the_devices() -> None:
    assert "pp must divide the 8 devices when dp is not given, got pp=3; try 1, 2, 4, 8" in refused(
        GPT, Configuration(pp=3)
    )
    assert "pp=3 and dp=3 need 9 devices, dgx-a100 has 8; lower one of them" in refused(GPT, Configuration(pp=3, dp=3))


def test_degrees_must_fit_the_batch() -> None:
    assert "dp must divide the global batch, got dp=5, global batch 24; try 1, 2, 3" in refused(
        GPT, Configuration(dp=5)
    )
    message = refused(GPT, Configuration(dp=4, micro_batch=4))
    assert "micro-batch × dp must divide the global batch, got 4 × 4 and 24; try micro-batch 1, 2, 3, 6" in message


def test_more_stages_than_ops_are_refused() -> None:
    small = problem("tests.models:mlp", 8, "dgx-a100")
    with pytest.raises(UserError, match=r"pp must be at most 6, .* got pp=8; lower pp"):
        configure(small, Configuration(pp=8))


def test_degrees_inside_a_stage_are_axes_of_its_group() -> None:
    plan = configure(problem(GPT, 24, "dgx-a100"), Configuration(pp=2, tp=2, zero=1, sp=True))
    assert [group.axes for group in plan.groups] == [(("dp", 2), ("tp", 2))] * 2
    assert [stage.sharding for stage in plan.stages] == ["tp", "tp"] and plan.state


def test_degrees_that_need_others_are_refused() -> None:
    with pytest.raises(UserError, match="sp splits over the devices of tensor parallelism, got tp=1; give --tp too"):
        Configuration(sp=True)
    with pytest.raises(UserError, match="zero is 0, 1, 2 or 3, got 4"):
        Configuration(zero=4)
    assert "zero=1 divides state among replicas and dp is 1" in refused(GPT, Configuration(dp=1, zero=1))


# --- recomputation ---------------------------------------------------------------------------------------------------
def test_layers_are_recomputed_one_by_one() -> None:
    graph = graph_of(GPT)
    stage_of = equal_layers(graph, 3)
    regions = recompute_regions(graph, np.flatnonzero(stage_of == 0))
    assert [len(region.indices(graph)) for region in regions] == [15, 15, 15]


def test_what_writes_buffers_or_is_the_loss_is_not_recomputed() -> None:
    graph = graph_of(UNET)
    regions = recompute_regions(graph, np.arange(len(graph.op_ids)))
    again = np.concatenate([region.indices(graph) for region in regions])
    classes = [graph.op_classes[c] for c in graph.flat.op_class[again].tolist()]
    assert not any(op.mutates_buffer or "cross_entropy" in op.target for op in classes)


@pytest.mark.parametrize("eager", ["false", "true"])
def test_selective_recomputation_is_of_the_modules_that_hold_an_attention(eager: str) -> None:
    """One kernel, or a softmax between two products."""
    graph = graph_of(f"gpt:layers=6,hidden=16,heads=2,seq=8,vocab=32,eager={eager}")
    regions = attention_regions(graph, np.arange(len(graph.op_ids)))
    names = [{graph.op_ids[i].partition("/")[0] for i in region.indices(graph)} for region in regions]
    assert names == [{f"h.{i}.attn", f"h.{i}.attn.qkv", f"h.{i}.attn.proj"} for i in range(6)]
