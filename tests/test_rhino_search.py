"""The searcher from problem to plan: bounds, limits, bad input, and found plans on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.placement import Replicate, Shard
from simpart.plan.format import PlanFile, save_plan
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searchers.rhino import Rhino
from simpart.searching import Budget, SearchResult, search
from simpart.sharding import Pin
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec

GPT = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=256"
LLAMA = "llama:layers=2,hidden=16,heads=4,kv_heads=2,seq=8,vocab=32,ffn=24"
MOE = "moe:layers=1,hidden=16,heads=2,kv_heads=2,ffn=32,seq=8,vocab=64,experts=4"


@cache
def graph_of(model: str, precision: str = "float32") -> Graph:
    return captured(parse_model(model), precision, full=precision == "float64")


def problem_of(
    graph: Graph, devices: int, global_batch: int, space: Space = Space(), *, fast: float = 1.0  # noqa: B008
) -> Problem:  # fmt: skip
    """On cores of this machine, with links made faster: else nothing is worth splitting."""
    cluster = load_cluster(f"local:{devices}")
    levels = tuple(
        replace(lv, bytes_per_s=lv.bytes_per_s * fast, latency_s=lv.latency_s / fast**2) for lv in cluster.levels
    )
    cluster = replace(cluster, levels=levels)
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=cluster, costs=default_costs(cluster, profiles=False),
        global_batch=global_batch, space=space,
    )  # fmt: skip


def found(problem: Problem, budget: Budget = Budget(), name: str = "rhino") -> SearchResult:  # noqa: B008
    return search(problem, load_searcher(name), budget)


ONE_STAGE = Space(tp=(2,), recompute=("none",), max_stages=1)


@pytest.mark.parametrize("model", [GPT, LLAMA, MOE])
def test_its_objective_is_the_simulated_step_of_one_stage(model: str) -> None:
    result = found(problem_of(graph_of(model), 2, 4, ONE_STAGE, fast=3000.0))
    for evaluated in result.ranked:
        candidate = evaluated.candidate
        if candidate.plan is not None and candidate.plan.batch.micro_batches == 1:
            assert candidate.plan.shardings
            assert evaluated.evaluation.step_s == pytest.approx(candidate.objective_s, rel=1e-4)


def test_the_bound_is_near_and_below_the_best() -> None:
    result = found(problem_of(graph_of(GPT), 2, 4, fast=3000.0))
    assert result.best is not None
    assert result.gap is not None
    assert 0 <= result.gap <= 0.01
    least = min(e.candidate.objective_s for e in result.ranked)
    assert result.bound_s is not None
    assert result.bound_s <= least


@pytest.mark.parametrize("budget", [Budget(candidates=1), Budget(seconds=1.0)])
def test_a_small_budget_still_gives_a_plan_that_fits_and_a_bound(budget: Budget) -> None:
    result = found(problem_of(graph_of(GPT), 4, 8, fast=3000.0), budget)
    assert result.best is not None
    assert result.best.candidate.bound_s > 0


def test_too_little_memory_is_said_of_a_stage_in_bytes() -> None:
    problem = problem_of(graph_of(GPT), 2, 4)
    device = replace(problem.cluster.device(0), memory_bytes=problem.cluster.device(0).reserved_bytes + 1_000_000)
    cluster = replace(problem.cluster, devices=((device, 2),))
    result = found(replace_problem(problem, cluster))
    assert result.best is None
    assert any("memory of stage 0 needs at least" in why for why in result.infeasible)


def replace_problem(problem: Problem, cluster: object) -> Problem:
    return Problem(
        graph=problem.graph, training=problem.training, cluster=cluster, costs=problem.costs,  # type: ignore[arg-type]
        global_batch=problem.global_batch, space=problem.space,
    )  # fmt: skip


def test_a_batch_that_no_replicas_divide_leaves_meshes_that_split_kernels() -> None:
    result = found(problem_of(graph_of(GPT), 4, 3, fast=3000.0), Budget(candidates=8))
    assert result.best is not None
    assert result.best.candidate.plan is not None
    assert {group.replicas for group in result.best.candidate.plan.groups} == {1}


def test_levels_cost_no_less_the_less_they_look() -> None:
    problem = problem_of(graph_of(LLAMA), 2, 4, ONE_STAGE, fast=3000.0)
    least = {}
    for name in ("rhino_o1", "rhino_o2", "rhino", "rhino_o4"):
        least[name] = found(problem, name=name).least_s
    values = [least[name] for name in ("rhino_o1", "rhino_o2", "rhino")]
    assert all(value is not None for value in values)
    assert sorted(values, reverse=True) == pytest.approx(values)  # type: ignore[type-var]
    assert least["rhino"] == pytest.approx(least["rhino_o4"], rel=0.01)


def test_pins_are_kept() -> None:
    pins = (
        ("x", (Pin("parameter", "h.*.mlp.fc.weight", Shard(0)), Pin("parameter", "h.*.mlp.proj.weight", Shard(1)))),
    )
    problem = problem_of(graph_of(GPT), 2, 4, ONE_STAGE, fast=3000.0)
    result = search(problem, Rhino(pins=pins), Budget())
    assert result.best is not None
    assert result.best.candidate.plan is not None
    state = dict(result.best.candidate.plan.state)
    assert state["h.*.mlp.fc.weight"].parameter == (("x", Shard(0)),)
    assert state["h.*.mlp.proj.weight"].parameter == (("x", Shard(1)),)


def test_pins_that_do_not_fit_are_named_and_no_others() -> None:
    graph = graph_of("gpt:layers=2,hidden=256,heads=4,seq=32,vocab=256")
    problem = problem_of(graph, 2, 2, ONE_STAGE, fast=3000.0)
    whole = [Pin("parameter", f"h.*.mlp.{name}.weight", Replicate()) for name in ("fc", "proj")]
    pins = (("x", (*whole, Pin("parameter", "wpe.weight", Replicate()))),)
    device = problem.cluster.device(0)
    room = 16.0 * graph.parameter_count * 0.65 + 4e6
    device = replace(device, memory_bytes=device.reserved_bytes + int(room))
    problem = replace_problem(problem, replace(problem.cluster, devices=((device, 2),)))
    result = search(problem, Rhino(pins=pins), Budget())
    named = [why for why in result.infeasible if "without these pins" in why]
    assert named
    assert "h.*.mlp.fc.weight R on x" in named[0]
    assert "wpe" not in named[0]


def test_a_pin_that_no_strategy_keeps_is_refused_with_those_there_are() -> None:
    pins = (("x", (Pin("kernel", "h.0.attn/aten.scaled_dot_product_attention.default#0|F|*", Shard(3)),)),)
    problem = problem_of(graph_of(GPT), 2, 4, ONE_STAGE, fast=3000.0)
    with pytest.raises(UserError, match="cannot leave its output"):
        search(problem, Rhino(pins=pins), Budget())


def test_fused_kernels_are_not_split() -> None:
    problem = replace(problem_of(graph_of(GPT), 4, 8, fast=3000.0), mode="compiled")
    result = found(problem, Budget(candidates=6))
    assert result.best is not None
    assert not any(e.candidate.plan.shardings or e.candidate.plan.state for e in result.ranked if e.candidate.plan)


def test_a_plan_is_told_in_the_words_people_use() -> None:
    result = found(problem_of(graph_of(GPT), 2, 4, ONE_STAGE, fast=3000.0))
    assert result.best is not None
    assert result.best.candidate.why.startswith("x: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "stages"),
    [(GPT, 2, 1), (LLAMA, 2, 1), (MOE, 2, 1), ("unet:image=16,base=4,depth=2", 2, 1), (GPT, 4, 2), (LLAMA, 4, 2)],
)
def test_found_plans_run_and_equal_one_process(tmp_path: Path, model: str, devices: int, stages: int) -> None:
    graph = graph_of(model, "float64")
    space = Space(tp=(2,), recompute=("none",), min_stages=stages, max_stages=stages)
    problem = problem_of(graph, devices, 4, space, fast=3000.0)
    result = found(problem)
    best = next(e for e in result.ranked if e.candidate.plan and e.candidate.plan.shardings and e.evaluation.feasible)
    plan = best.candidate.plan
    assert plan is not None
    at = problem.graph.at(plan.batch.sizes[0][0])
    save_plan(tmp_path / "p.json", PlanFile(plan=plan, training=problem.training, cluster=problem.cluster, graph=at))
    command = [sys.executable, "-m", "simpart", "validate", "p.json", "--nproc", str(devices), "--check", "--json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-800:]
    assert max(json.loads(run.stdout)["check"].values()) < 1e-9


def test_simulating_a_found_plan_again_gives_the_same_step() -> None:
    problem = problem_of(graph_of(GPT), 2, 4, ONE_STAGE, fast=3000.0)
    best = found(problem).best
    assert best is not None
    assert best.candidate.plan is not None
    assert simulate_plan(problem, best.candidate.plan).step_s == best.evaluation.step_s
    assert np.isfinite(best.evaluation.step_s)
