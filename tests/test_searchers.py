"""Every searcher on the same problems: odd device counts, one layer, batches that do not divide, narrow spaces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.problem import Problem, Space
from simpart.registry import SEARCHERS, default_costs, load_searcher, searcher_names
from simpart.searchers._bottleneck import least_bottlenecks
from simpart.searchers._points import Points
from simpart.searchers.annealing import Annealing
from simpart.searchers.exhaustive import Exhaustive
from simpart.searchers.random import Random
from simpart.searching import Budget, Control, search
from simpart.testing.searcher_suite import check_searcher
from simpart.training import TrainingSpec


def _capture(layers: int) -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=layers, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")


@pytest.fixture(scope="module")
def four_layers() -> Graph:
    return _capture(4)


@pytest.fixture(scope="module")
def one_layer() -> Graph:
    return _capture(1)


def problem_of(graph: Graph, devices: int, global_batch: int, space: Space = Space()) -> Problem:  # noqa: B008
    cluster = load_cluster(f"local:{devices}")
    costs = default_costs(cluster, profiles=False)
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=global_batch, space=space
    )


NAMES = sorted(SEARCHERS)
SLOW = ("alpa_ilp", "rhino_", "tofu_")
VARIED = [pytest.param(name, marks=pytest.mark.slow) if name.startswith(SLOW) else name for name in NAMES]
# Levels and baselines of one searcher: the fast tests have them on one problem
ONE_STAGE = {name for name in SEARCHERS if name.startswith("tofu")}  # make no pipelines
SPACES: dict[str, Space] = {
    "two stages": Space(min_stages=2, max_stages=2),
    "gpipe without recomputation": Space(schedules=("gpipe",), recompute=("none",)),
    "few micro-batches": Space(max_micro_batches=2, schedules=("1f1b",)),
    "idle devices": Space(use_fewer_devices=True, max_micro_batches=4),
}


def test_the_table_of_searchers_is_complete() -> None:
    assert set(NAMES) <= set(searcher_names())
    assert [load_searcher(name).name for name in NAMES] == NAMES


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize(
    "space", ["two stages", *(pytest.param(s, marks=pytest.mark.slow) for s in SPACES if s != "two stages")]
)
def test_searchers_keep_to_the_space(four_layers: Graph, name: str, space: str) -> None:
    result = check_searcher(lambda: load_searcher(name), problem_of(four_layers, 4, 8, SPACES[space]))
    assert result.best is not None or (name in ONE_STAGE and SPACES[space].min_stages > 1)


@pytest.mark.parametrize("name", VARIED)
def test_searchers_take_any_number_of_devices_and_samples(four_layers: Graph, name: str) -> None:
    result = check_searcher(lambda: load_searcher(name), problem_of(four_layers, 7, 6))
    equal = name.startswith("equal") or name in ("grid", "two_bw")
    # Seven equal stages of four layers and six samples: only what may share devices unevenly finds plans for sure. And
    # nothing in this model divides by seven.
    assert result.best is not None or equal or name in ONE_STAGE


@pytest.mark.parametrize("name", NAMES)
def test_searchers_plan_one_layer_on_more_devices_than_it_needs(one_layer: Graph, name: str) -> None:
    assert check_searcher(lambda: load_searcher(name), problem_of(one_layer, 3, 6)).best is not None


@pytest.mark.parametrize("name", VARIED)
def test_searchers_say_why_nothing_can_be_planned(four_layers: Graph, name: str) -> None:
    result = check_searcher(lambda: load_searcher(name), problem_of(four_layers, 4, 8, Space(min_stages=9)))
    assert result.best is None and all(isinstance(reason, str) for reason in result.families.values())


@pytest.mark.parametrize("name", ["alpa", "dapple", "pipedream", "piper", "rannc", "two_bw"])
def test_planners_say_which_stage_does_not_fit_and_by_how_much(four_layers: Graph, name: str) -> None:
    problem = problem_of(four_layers, 2, 4)
    tiny = [(replace(d, memory_bytes=200_000, reserved_bytes=0), count) for d, count in problem.cluster.devices]
    short = replace(problem, cluster=replace(problem.cluster, devices=tuple(tiny)))
    found = list(load_searcher(name).propose(short, np.random.default_rng(0), Control()))
    assert {c.family for c in found} == {"1 stage", "2 stages"}
    assert all(c.plan is None and "over the memory limit" in c.why for c in found)


def test_points_are_counted_drawn_and_moved_within_the_list(four_layers: Graph) -> None:
    points = Points(problem_of(four_layers, 4, 4, Space(max_stages=3)), Control(), 5)
    listed = list(points)
    assert len(listed) == len(points) == len(set(listed))
    rng = np.random.default_rng(0)
    here, seen = points.draw(rng), set()
    for _ in range(300):
        here = points.move(rng, here)
        seen |= {here, points.draw(rng)}
    assert seen <= set(listed) and len(seen) > 60


def test_planners_that_are_exact_agree_with_listing_their_own_objective(four_layers: Graph) -> None:
    problem = problem_of(four_layers, 4, 8)
    points = Points(problem, Control(), 6)
    costs = [case.costs for case in points.cases]

    def total(number: int, times: list[float]) -> float:
        return sum(times) + (costs[number].micro_batches - 1) * max(times)

    least_slowest, least_total = math.inf, math.inf
    for point in points:
        least_slowest = min(least_slowest, points.estimate_s(point))
        case = costs[point.case]
        at = [(s.start, s.end, case.replicas.index(s.replicas)) for s in point.stages]
        times = [float(case.forward_s[a] + case.backward_s[a] + 2 * case.transfer_s[a]) for a in at]
        least_total = min(least_total, total(point.case, times))

    from simpart.searchers.alpa import Alpa
    from simpart.searchers.piper import Piper

    found = {maker: search(problem, maker) for maker in (Alpa(most_blocks=6), Piper(most_blocks=6))}
    bounds = [result.bound_s for result in found.values()]
    assert bounds[0] == pytest.approx(least_total, rel=1e-9)
    # Piper may mix recomputation, which costs time and is not needed here.
    assert bounds[1] == pytest.approx(least_slowest, rel=1e-9)


def test_walks_come_close_to_the_best_of_all_plans(four_layers: Graph) -> None:
    problem = problem_of(four_layers, 3, 6, Space(schedules=("1f1b",), recompute=("none",)))
    best = search(problem, Exhaustive(most_blocks=6)).best
    walked, drawn = (
        search(problem, Annealing(most_blocks=6, moves=150)).best,
        search(problem, Random(most_blocks=6)).best,
    )
    assert best is not None and walked is not None and drawn is not None
    assert best.evaluation.step_s <= walked.evaluation.step_s <= best.evaluation.step_s * 1.05
    assert best.evaluation.step_s <= drawn.evaluation.step_s <= best.evaluation.step_s * 1.25


def test_exhaustive_says_when_there_are_too_many_plans(four_layers: Graph) -> None:
    result = search(problem_of(four_layers, 4, 8), Exhaustive(most_plans=2), Budget(candidates=5))
    assert result.best is None and "plans are more than 2" in next(iter(result.infeasible))


def test_a_budget_that_runs_out_leaves_what_was_solved(four_layers: Graph) -> None:
    ticks = itertools.count()
    result = search(
        problem_of(four_layers, 4, 8), load_searcher("pipedream"), Budget(seconds=60), clock=lambda: float(next(ticks))
    )
    assert result.stopped == "budget" and result.best is not None and result.bound_s is None


@pytest.mark.parametrize(
    ("name", "global_batch", "space", "reason"),
    [
        ("grid", 3, Space(max_stages=1), "no split of the global batch 3 over 4 devices; try a multiple of 4"),
        ("grid", 3, Space(max_stages=1, tp=(2,)), "over 4 devices at tp 2; try a multiple of 2"),
        ("piper", 8, Space(tp=(3,)), "no stages at tp 3 use all of 4 devices; try tp 1, 2, 4, or idle devices"),
        ("piper", 8, Space(tp=(5,), use_fewer_devices=True), "a replica at tp 5 needs more than 4 devices"),
        ("rannc", 8, Space(min_stages=5), "at least 5 stages were asked for, with 4 devices; lower it"),
    ],
)
def test_a_space_without_plans_says_what_to_change(
    four_layers: Graph, name: str, global_batch: int, space: Space, reason: str
) -> None:
    result = search(problem_of(four_layers, 4, global_batch, space), load_searcher(name))
    assert result.best is None and result.why_none == next(iter(result.infeasible))
    assert reason in result.why_none


def test_piper_names_the_degree_that_the_model_refuses_where_nothing_else_is_left(four_layers: Graph) -> None:
    result = search(problem_of(four_layers, 3, 6, Space(tp=(3,))), load_searcher("piper"))
    assert result.why_none == "no stage at tp 3 can be had of the global batch 6 on 3 devices; try tp 1 too"
    assert "got tp=3" in str(result.families["tensor degree 3"])


def test_more_stages_than_blocks_are_too_many(one_layer: Graph) -> None:
    space = Space(min_stages=40, schedules=("1f1b",), recompute=("none",), max_micro_batches=1)
    result = search(problem_of(one_layer, 40, 40, space), load_searcher("rannc"))
    assert result.why_none.startswith("at least 40 stages were asked for, the model is cut into ")


@pytest.mark.parametrize("part", range(2))
def test_least_bottlenecks_are_those_of_enumeration(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        rng = np.random.default_rng(seed)
        n, devices = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        replicas = tuple(sorted(set(rng.integers(1, devices + 1, 3).tolist())))
        cost = rng.integers(1, 20, (n, n + 1, len(replicas))).astype(float)
        cost[np.arange(n)[:, None] >= np.arange(n + 1)[None, :]] = np.inf
        fits = rng.integers(-1, 4, cost.shape)

        def cost_of(later: int, cost: np.ndarray = cost, fits: np.ndarray = fits) -> np.ndarray:
            return np.where(fits >= later, cost, np.inf)

        for at_most in (False, True):
            found = least_bottlenecks(cost_of, replicas, devices, min(n, devices), all_devices=not at_most)
            for count, answer in found.items():
                expected = _enumerated(cost_of, n, replicas, devices, count, at_most)
                assert (math.inf if answer is None else answer.value) == expected
                if answer is not None:
                    at = [(s.start, s.end, replicas.index(s.replicas)) for s in answer.stages]
                    assert max(cost_of(count - 1 - x)[a] for x, a in enumerate(at)) == expected


def _enumerated(
    cost_of: Callable[[int], np.ndarray], n: int, replicas: tuple[int, ...], devices: int, count: int, at_most: bool
) -> float:
    best = math.inf
    for cuts in itertools.combinations(range(1, n), count - 1):
        ends = (0, *cuts, n)
        for picked in itertools.product(range(len(replicas)), repeat=count):
            used = sum(replicas[k] for k in picked)
            if used == devices or (at_most and used < devices):
                best = min(best, max(cost_of(count - 1 - x)[ends[x], ends[x + 1], k] for x, k in enumerate(picked)))
    return best
