"""Rhino's outer choices: their order, where meshes lie in nodes, pins by command, the few plans worth running."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner

from simpart.commands.search import search as search_command
from simpart.errors import ContradictionError, UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.lowering.transfers import CommPrices
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.placement import Replicate, Shard
from simpart.plan import kernel_ids
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searchers._rhino.explain import whole_kernels
from simpart.searchers._rhino.guess import Guesses
from simpart.searchers._rhino.model import Mesh, MeshModel, StageLoad
from simpart.searchers._rhino.settings import Setting, settings
from simpart.searchers.rhino import Rhino
from simpart.searching import Budget, SearchResult, search
from simpart.searching.worth_running import worth_running
from simpart.sharding import Pin
from simpart.sharding.mesh import axis_members
from simpart.sharding.pins import pins_from_text
from simpart.training import TrainingSpec

WIDE = "gpt:layers=8,hidden=4096,heads=32,seq=512,vocab=8192"
SMALL = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=256"


@cache
def graph_of(model: str) -> Graph:
    return captured(parse_model(model), "float16")


def problem_of(model: str, cluster_name: str, global_batch: int, space: Space, memory_bytes: float = 80e9) -> Problem:
    cluster = load_cluster(cluster_name)
    device = replace(cluster.device(0), memory_bytes=int(memory_bytes))
    cluster = replace(cluster, devices=((device, cluster.size),))
    return Problem(
        graph=graph_of(model), training=TrainingSpec(precision="float16"), cluster=cluster,
        costs=default_costs(cluster, profiles=False), global_batch=global_batch, space=space,
    )  # fmt: skip


@cache
def two_levels() -> Problem:
    """Four nodes of 4; an eighth of weights and gradients fits, a quarter does not, and only optimizer state may be
    divided among replicas. So kernels are split over a node and two stages hold the layers, or over two nodes."""
    space = Space(max_stages=4, zero=(0, 1), recompute=("none",), schedules=("1f1b",))
    problem = problem_of(WIDE, "dgx-a100:2", 64, space, 4.0 * graph_of(WIDE).parameter_count / 8 * 1.7 + 5e9)
    links, *others = problem.cluster.levels
    return replace(problem, cluster=replace(problem.cluster, levels=(replace(links, size=4), *others)))


@cache
def on_two_levels() -> SearchResult:
    return search(two_levels(), load_searcher("rhino"), Budget(candidates=8))


def test_on_two_levels_of_links_stages_hold_replicas_of_kernels_split_inside_a_node() -> None:
    result = on_two_levels()
    assert result.best is not None and result.best.candidate.plan is not None
    plan = result.best.candidate.plan
    assert len(plan.stages) > 1
    for group in plan.groups:
        sizes = dict(group.axes)
        assert sizes["dp"] > 1 and sizes["x"] > 1
        assert all(len({rank // 4 for rank in row}) == 1 for row in axis_members(group, "x"))
    assert "features in pairs of products" in result.best.candidate.why


def test_the_first_guesses_are_near_the_best_that_is_found() -> None:
    problem, result = two_levels(), on_two_levels()
    prices = CommPrices(problem.costs.communication, problem.cluster)
    guesses = Guesses(problem, prices, problem.cluster.device(0), lambda _: (0, 1))
    order = sorted(settings(problem), key=lambda setting: guesses.of(setting).order)
    assert result.best is not None
    near = [e.candidate.family for e in result.ranked if e.evaluation.step_s <= 1.05 * result.best.evaluation.step_s]
    assert {setting.family for setting in order[:4]} & set(near)


def test_meshes_that_straddle_nodes_are_priced_on_their_slowest_row() -> None:
    cluster = load_cluster("dgx-a100:2")
    setting = Setting(
        stages=2, replicas=1, axes=(("x", 6),), micro_batch=1, micro_batches=4, recompute="none"
    )  # devices 0–5, and 6–11 over both nodes
    assert list(setting.slowest_group(cluster).devices)[:6] == [6, 7, 8, 9, 10, 11]


def test_pins_are_read_as_they_are_written() -> None:
    texts = ["parameter:h.*.fc.weight=S(0)@tp", "kernel:h.0/a=b#0|F|c=S(1,block=8)@x", "input:0=R@tp"]
    assert pins_from_text(texts) == (
        ("tp", (Pin("parameter", "h.*.fc.weight", Shard(0)), Pin("input", "0", Replicate()))),
        ("x", (Pin("kernel", "h.0/a=b#0|F|c", Shard(1, 8)),)),
    )
    for wrong in ("weight=S(0)@tp", "parameter:w=S(0)", "parameter:w=T(0)@tp", "parameter:w=S(0)~(1,1)@tp"):
        with pytest.raises(UserError):
            pins_from_text([wrong])


def command(*arguments: str) -> str:
    where = [SMALL, "--cluster", "dgx-a100:1", "--global-batch", "8", "--precision", "float16"]
    return CliRunner().invoke(search_command, [*where, *arguments], catch_exceptions=False).stdout


def test_the_command_keeps_pins_and_names_three_plans() -> None:
    document = json.loads(command(
        "--searcher", "rhino", "--max-stages", "1", "--tp", "2", "--max-candidates", "6",
        "--pin", "parameter:h.*.mlp.fc.weight=S(0)@tp", "--json",
    ))  # fmt: skip
    assert ["x", "S(0)"] in dict(document["plan"]["state"])["h.*.mlp.fc.weight"]["parameter"]
    rows = document["worth_running"]
    assert rows[0]["switching"] == {"step_s": 0.0, "share": 0.0, "peak_bytes": 0.0}
    assert [r["fine_step_s"] for r in rows] == sorted(r["fine_step_s"] for r in rows)


def test_the_command_refuses_pins_of_other_searchers_and_axes() -> None:
    with pytest.raises(UserError, match="takes no pins"):
        command("--searcher", "grid", "--pin", "parameter:h.*.mlp.fc.weight=S(0)@tp")
    with pytest.raises(UserError, match="sharding axis"):
        command("--searcher", "rhino", "--pin", "parameter:h.*.mlp.fc.weight=S(0)@z")


ONE_STAGE = Space(tp=(2,), recompute=("none",), max_stages=1, schedules=("1f1b",))


def test_pinned_inputs_are_read_in_that_layout() -> None:
    problem = problem_of(SMALL, "dgx-a100:1", 8, ONE_STAGE)
    name = next(s.name for s in problem.graph.sources if s.kind == "input")
    result = search(problem, Rhino(pins=(("tp", (Pin("input", name, Shard(0)),)),)), Budget(candidates=4))
    plans = [e.candidate.plan for e in result.ranked if e.candidate.plan is not None and e.candidate.plan.shardings]
    assert plans
    for plan in plans:
        rows = [dict(s.axes)["x"] for key, s in plan.shardings[0][1].classes if "embedding" in key and "|F|" in key]
        assert any(Shard(0) in row.inputs for row in rows)


def test_pins_that_contradict_one_another_are_named() -> None:
    problem = problem_of(SMALL, "dgx-a100:1", 8, ONE_STAGE)
    ids = kernel_ids(problem.graph.at(8))
    gelu = next(i for i in ids if "gelu" in i and "|F|" in i)
    add = next(i for i in ids if i.startswith("wte") and "embedding" in i and "|F|" in i)
    name = next(s.name for s in problem.graph.sources if s.kind == "input")
    pins = (
        Pin("input", name, Shard(0)), Pin("kernel", add, Shard(2)), Pin("kernel", gelu, Shard(0)),
    )  # fmt: skip
    result = search(problem, Rhino(pins=(("tp", pins),)), Budget(candidates=12))
    named = [why for why in result.infeasible if "without these pins" in why]
    assert named and add in named[0] and name in named[0] and gelu not in named[0]


@pytest.mark.parametrize("first", ["h.0.mlp.fc.weight", "h.*.mlp.fc.weight"])
def test_two_pins_of_one_tensor_that_differ_are_refused_by_name(first: str) -> None:
    pins = (Pin("parameter", first, Shard(0)), Pin("parameter", "h.0.mlp.fc.weight", Shard(1)))
    problem = problem_of(SMALL, "dgx-a100:1", 8, ONE_STAGE)
    with pytest.raises(ContradictionError, match=r"h\.0\.mlp\.fc\.weight as S\(0\) and as S\(1\) on .*; keep one"):
        search(problem, Rhino(pins=(("tp", pins),)), Budget(candidates=12))


def test_the_few_plans_worth_running_differ_and_are_in_the_order_of_the_fine_grain() -> None:
    problem = problem_of(SMALL, "dgx-a100:1", 8, replace(ONE_STAGE, tp=(1, 2, 4), max_stages=2))
    result = search(problem, load_searcher("rhino"), Budget(candidates=8))
    rows = worth_running(problem, result.ranked, 3)
    assert len({row.words for row in rows}) == len(rows) == 3
    assert [row.fine.step_s for row in rows] == sorted(row.fine.step_s for row in rows)
    assert sorted(row.coarse_rank for row in rows) == [1, 2, 3]
    assert rows[1].slower_s == rows[1].fine.step_s - rows[0].fine.step_s


def test_kernels_without_strategies_are_named_with_the_reason() -> None:
    problem = problem_of(SMALL, "dgx-a100:1", 8, ONE_STAGE)
    setting = Setting(stages=1, replicas=1, axes=(("x", 7),), micro_batch=1, micro_batches=8, recompute="none")
    graph = problem.graph.at(1)
    load = StageLoad(name="stage 0", ops=np.arange(len(graph.flat.op_class)), in_flight=1, limit_bytes=1e12)
    mesh = Mesh(group=setting.group(0), replicas=1, axes=setting.axes, micro_batch=1, micro_batches=8, stages=1)
    whole = whole_kernels(MeshModel(problem, mesh, [load]))
    assert any("h.0.attn.qkv" in kernel for kernel in whole)  # 64 features, 32 tokens: nothing divides by 7
    assert all("divides by x 7" in why for kernel, why in whole.items() if "linear" in kernel)


def test_stages_of_unequal_submeshes_have_shardings_of_their_own() -> None:
    problem = problem_of(WIDE, "dgx-a100:1", 32, Space(recompute=("none",), schedules=("1f1b",), max_micro_batches=8))
    result = search(problem, load_searcher("alpa_ilp"), Budget(candidates=2))
    assert result.best is not None and result.best.candidate.plan is not None
    assert sum(len(group.devices) for group in result.best.candidate.plan.groups) == 8
