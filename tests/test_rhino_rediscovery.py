"""What people do by hand comes out of one search under one configuration of costs: dgx-a100, data sheets, float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from simpart.capture import capture
from simpart.graph import Graph
from simpart.hardware import Cluster, load_cluster
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.placement import AxisStrategy, Placement, Replicate, Shard
from simpart.plan import DeviceGroup, Devices
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.searchers._cost_graph import Solution, minimise
from simpart.searchers._rhino.model import Mesh, MeshModel, StageLoad
from simpart.searchers._rhino.stages import program_stages
from simpart.training import TrainingSpec

R = Replicate()


@cache
def graph_of(model: str) -> Graph:
    return captured(parse_model(model), "float32")


def problem_of(graph: Graph, devices: int, cluster: Cluster | None = None) -> Problem:
    cluster = cluster or load_cluster(f"dgx-a100:{-(-devices // 8)}")
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=cluster, costs=default_costs(cluster, profiles=False),
        global_batch=64,
    )  # fmt: skip


@dataclass(frozen=True)
class Found:
    model: MeshModel
    solution: Solution

    def __post_init__(self) -> None:
        assert self.solution.choice is not None, self.solution.why
        assert self.solution.gap <= 0.01

    def kernel(self, op: str, target: str, axis: str = "x") -> AxisStrategy:
        """The strategy on an axis of the first kernel of an op with this id or path; replicating where it has none."""
        assert self.solution.choice is not None
        for name, strategy in self.model.sharding(self.solution.choice).classes:
            where, phase, kernel = name.split("|")
            if op in (where, where.split("/")[0]) and phase == "F" and kernel.startswith(target):
                return dict(strategy.axes)[axis]
        return AxisStrategy((R,) * 8, (R,) * 8)

    def used_bytes(self) -> float:
        """What the one row counts."""
        assert self.solution.choice is not None
        return sum(float(w[self.solution.choice[v]]) for v, w in self.model.graph.rows[0].weights)

    def rests(self) -> dict[str, tuple[Placement, int]]:
        """Where parameters rest on axis x, and how far their state is divided among replicas, by name."""
        assert self.solution.choice is not None
        found = {}
        for maker, (layout, zero) in self.model.rest_layouts(self.solution.choice).items():
            place = layout[0] if layout else R
            assert not isinstance(place, str)
            found[self.model.wires.sources[maker][0].name] = place, zero
        return found  # type: ignore[return-value]


def sharded(
    graph: Graph, devices: int, micro_batch: int, *, micro_batches: int = 8, replicas: int = 1, inner: int = 1,
    stages: int = 1, limit: float = 70e9, zero: tuple[int, ...] = (0,), problem: Problem | None = None,
) -> Found:  # fmt: skip
    """The best sharding on one axis of `devices`, or on two, the second of `inner` of them; replicas outside."""
    problem = problem or problem_of(graph, devices * replicas * stages)
    axes = tuple((name, n) for name, n in (("x", devices // inner), ("y", inner)) if n > 1)
    group = DeviceGroup(devices=Devices.of(range(devices * replicas)), axes=(("dp", replicas), *axes))
    at = graph.at(micro_batch)
    load = StageLoad(name="stage 0", ops=np.arange(len(at.flat.op_class)), in_flight=1, limit_bytes=limit)
    mesh = Mesh(
        group=group, replicas=replicas, axes=axes, micro_batch=micro_batch, micro_batches=micro_batches, stages=stages,
        zero=zero,
    )  # fmt: skip
    model = MeshModel(problem, mesh, [load])
    return Found(model, minimise(model.graph, relative_gap=0.001))


# --- data parallel ---------------------------------------------------------------------------------------------------
def test_small_convolution_nets_split_their_samples() -> None:
    found = sharded(graph_of("resnet50:image=224,classes=1000,width=64,blocks=1-1"), 4, 64)
    for path in ("conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv3"):
        assert found.kernel(path, "aten.convolution").inputs[:2] == (Shard(0), R), path


def test_many_tokens_and_little_width_are_split_by_samples() -> None:
    found = sharded(graph_of("gpt:layers=2,hidden=256,heads=4,seq=1024,vocab=1024"), 4, 16)
    for path in ("h.0.attn.qkv", "h.0.attn.proj", "h.0.mlp.fc", "h.0.mlp.proj"):
        assert found.kernel(path, "aten.addmm").inputs[1:] == (Shard(0), R), path


# --- tensor parallel -------------------------------------------------------------------------------------------------
WIDE = "gpt:layers=2,hidden=4096,heads=32,seq=256,vocab=51200"


def test_few_tokens_and_much_width_are_split_in_pairs_of_products() -> None:
    found = sharded(graph_of(WIDE), 8, 1)
    for column, row in (("h.0.attn.qkv", "h.0.attn.proj"), ("h.0.mlp.fc", "h.0.mlp.proj")):
        assert found.kernel(column, "aten.addmm").outputs == (Shard(1),), column
        assert found.kernel(row, "aten.addmm").inputs[1:] == (Shard(1), Shard(0)), row
    heads = found.kernel("h.0.attn", "aten._scaled_dot_product")
    assert set(heads.inputs) == {Shard(1)}
    rests = found.rests()
    assert rests["h.{0}.mlp.fc.weight"][0] == Shard(0)
    assert rests["h.{0}.mlp.proj.weight"][0] == Shard(1)


def test_norms_between_pairs_are_split_along_the_sequence() -> None:
    found = sharded(graph_of(WIDE.replace("seq=256", "seq=1024")), 8, 4)
    for path in ("h.0.ln_1", "h.0.ln_2"):
        assert found.kernel(path, "aten.native_layer_norm").inputs[0] == Shard(1), path


def test_vocabularies_are_split_and_their_tables_never_gathered() -> None:
    found = sharded(graph_of(WIDE), 8, 1)
    assert found.kernel("head", "aten.mm").inputs == (R, Shard(1))
    assert isinstance(found.kernel("wte", "aten.embedding").inputs[0], Shard)
    loss = found.kernel("", "aten._log_softmax")
    assert loss.inputs[0] == Shard(1)


def test_over_slow_links_nothing_is_split() -> None:
    graph = graph_of("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=256")
    problem = problem_of(graph, 2, load_cluster("local:2"))
    found = sharded(graph, 2, 2, problem=problem)
    assert found.solution.choice is not None
    split = [name for name, _ in found.model.sharding(found.solution.choice).classes if "|F|" in name]
    assert split == []  # gradients may still be made in parts: that moves nothing before the update


@pytest.mark.parametrize("stages", [1, 2])
def test_on_two_levels_of_links_features_are_split_inside_a_node_and_samples_across(stages: int) -> None:
    found = sharded(graph_of(WIDE), 16, 8, inner=8, stages=stages)
    for column, row in (("h.0.attn.qkv", "h.0.attn.proj"), ("h.0.mlp.fc", "h.0.mlp.proj")):
        assert found.kernel(column, "aten.addmm", "y").outputs == (Shard(1),), column
        assert found.kernel(row, "aten.addmm", "y").inputs[1:] == (Shard(1), Shard(0)), row
        assert found.kernel(column, "aten.addmm", "x").inputs[1:] == (Shard(0), R), column


# --- state -----------------------------------------------------------------------------------------------------------
def test_weights_that_do_not_fit_are_divided_among_replicas() -> None:
    graph = graph_of("gpt:layers=8,hidden=1024,heads=16,seq=256,vocab=8192")
    plain = sharded(graph, 1, 8, replicas=8, zero=(0, 3))
    assert {zero for name, (_, zero) in plain.rests().items() if name.endswith((".fc.weight", ".qkv.weight"))} == {0}
    state = 16.0 * graph.parameter_count  # float32 weights, gradients and two moments
    tight = sharded(graph, 1, 8, replicas=8, zero=(0, 3), limit=plain.used_bytes() - 0.8 * state)
    divided = {name: zero for name, (_, zero) in tight.rests().items()}
    assert divided["h.{0}.mlp.fc.weight"] == divided["h.{0}.mlp.proj.weight"] == 3
    assert tight.solution.cost > plain.solution.cost


def test_optimizer_state_is_divided_first() -> None:
    graph = graph_of("gpt:layers=8,hidden=1024,heads=16,seq=256,vocab=8192")
    found = sharded(graph, 1, 8, replicas=8, zero=(0, 1, 3))
    assert {zero for _, zero in found.rests().values()} <= {0, 1}


# --- experts ---------------------------------------------------------------------------------------------------------
MOE = "moe:layers=1,hidden=1024,heads=16,kv_heads=16,ffn=4096,seq={},vocab=1024,experts=8"


def test_experts_are_split_while_their_tokens_are_few() -> None:
    found = sharded(graph_of(MOE.format(128)), 4, 4)
    for number in (1, 2, 3):
        expert = found.kernel(f"layers.0.experts/aten.matmul.default#{number}", "aten.bmm")
        assert expert.inputs == (Shard(0), Shard(0))
    experts = [place for name, (place, _) in found.rests().items() if "experts" in name and "router" not in name]
    assert set(experts) == {Shard(0)}


def test_experts_stay_whole_where_their_tokens_are_many() -> None:
    found = sharded(graph_of(MOE.format(8192)), 4, 16, micro_batches=1)
    for number in (1, 2, 3):
        slots, weights = found.kernel(f"layers.0.experts/aten.matmul.default#{number}", "aten.bmm").inputs
        assert isinstance(slots, Shard)
        assert slots.dim == 1
        assert weights == R


class Adapted(nn.Module):
    """Wide layers, whose weights are frozen if `lora`, each with a small one beside it."""

    def __init__(self, lora: bool, width: int = 2048, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(4))
        for layer in self.base:
            layer.weight.requires_grad_(not lora)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.relu(base(x) + up(down(x)))
        return x.square().mean()


@pytest.mark.parametrize("lora", [False, True])
def test_frozen_weights_change_the_choice(lora: bool) -> None:
    """Without gradients to sum, splitting samples costs nothing; with them, few samples are split by features."""
    graph = capture(lambda b: (Adapted(lora), (torch.zeros(b, 2048),)), (2, 3, 5), model="tests:adapted")
    found = sharded(graph, 4, 1024, micro_batches=1)
    inputs = found.kernel("base.1", "aten.mm").inputs
    assert (inputs == (Shard(0), R)) is lora


# --- stages ----------------------------------------------------------------------------------------------------------
def test_two_towers_stand_in_a_stage_each() -> None:
    graph = graph_of("two_tower:image=32,patch=8,image_layers=3,image_hidden=64,image_heads=4,"
                     "text_layers=3,text_hidden=64,text_heads=4,seq=16,vocab=128,embed=32")  # fmt: skip
    problem = problem_of(graph, 2)
    prices = problem.prices([4], problem.cluster.device(0))[4]
    seconds = (prices.forward.seconds + prices.backward.seconds)[graph.flat.op_class]
    stage_of = program_stages(graph, seconds, 2, 4, 9, 1e-9)
    assert stage_of is not None
    homes: dict[str, set[int]] = {}
    for name, stage in zip(graph.op_ids, stage_of.tolist(), strict=True):
        if ".blocks." in name and stage >= 0:
            homes.setdefault(name.split(".")[0], set()).add(stage)
    assert sorted(map(sorted, homes.values())) == [[0], [1]]
