"""Levels of search on cost graphs and stage assignment, against enumeration."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpart.searchers._cost_graph import CostGraph, minimise, price
from simpart.searchers._rhino.levels import critical_nodes, segments, solve_level
from simpart.searchers._stage_ilp import (
    Count,
    StageProblem,
    assign_stages,
    contiguous,
    objective,
    optimal_stagings,
    topological,
)
from simpart.testing.rhino_golden import list_schedule, solve_strategy_graph


def dag(random: np.random.Generator, size: int, share: float = 0.35) -> list[tuple[int, int]]:
    return [(u, v) for u in range(size) for v in range(u + 1, size) if v == u + 1 or random.random() < share / 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_levels_on_random_graphs(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, 9)
    graph = CostGraph(
        unary=tuple(random.random(k) for k in sizes),
        edges=tuple((i, j, random.random((sizes[i], sizes[j]))) for i, j in dag(random, 9)),
    )
    cost = {level: solve_level(graph, level).cost for level in ("O1", "O2", "O3", "O4")}
    assert cost["O3"] == pytest.approx(cost["O4"])
    assert cost["O1"] >= cost["O2"] - 1e-12
    assert cost["O2"] >= cost["O3"] - 1e-12
    choice = solve_level(graph, "O2").choice
    assert choice is not None
    assert price(graph, choice) == pytest.approx(cost["O2"])


def test_segments_are_exact_where_nothing_bypasses_a_critical_node() -> None:
    random = np.random.default_rng(3)
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)]
    for _ in range(20):
        graph = CostGraph(
            unary=tuple(random.random(3) for _ in range(7)),
            edges=tuple((i, j, random.random((3, 3))) for i, j in edges),
        )
        assert critical_nodes(graph, [1.0] * 7) == [0, 3, 6]
        assert segments(graph, [0, 3, 6]) == [[0], [1, 2, 3], [4, 5, 6]]
        assert solve_level(graph, "O2").cost == pytest.approx(minimise(graph).cost)


def test_nodes_without_work_do_not_hide_a_critical_node() -> None:
    graph = CostGraph(unary=(np.zeros(1),) * 3, edges=((0, 2, np.zeros((1, 1))), (1, 2, np.zeros((1, 1)))))
    assert critical_nodes(graph, [1.0, 1.0, 1.0]) == [2]
    assert critical_nodes(graph, [1.0, 0.0, 1.0]) == [0, 2]


def stagings(problem: StageProblem) -> Iterator[tuple[float, tuple[int, ...]]]:
    for stage in itertools.product(range(problem.stages), repeat=len(problem.work)):
        load = np.bincount(stage, problem.work, problem.stages)
        together = all(len({stage[v] for v in group}) == 1 for group in problem.same)
        if together and all(stage[u] <= stage[v] for u, v, _ in problem.edges) and load.max() <= problem.cap + 1e-9:
            yield objective(problem, stage), stage


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["edges", "consumers", "hops"]), st.sampled_from([0.0, 3.0]))
def test_staging_is_the_best_of_all(seed: int, count: Count, bottleneck: float) -> None:
    random = np.random.default_rng(seed)
    work = random.integers(1, 6, 6).astype(float)
    tensor = random.integers(1, 9, 6)
    stages = int(random.integers(1, 4))
    problem = StageProblem(
        work=work,
        edges=tuple((u, v, float(tensor[u])) for u, v in dag(random, 6, 0.6)[random.integers(0, 3) :]),
        stages=stages,
        cap=float(work.sum() / stages * random.choice([1.1, 1.5])) if random.random() < 0.7 else math.inf,
        count=count,
        bottleneck_weight=bottleneck,
        same=((0, 1),) if random.random() < 0.3 else (),
    )
    best = min((value for value, _ in stagings(problem)), default=math.inf)
    found = assign_stages(problem)
    assert found.objective == pytest.approx(best)
    assert found.bound <= best + 1e-6
    assert (found.stage is None) == (best == math.inf) == bool(found.why)


def test_all_optimal_stagings_are_listed() -> None:
    problem = StageProblem(work=np.ones(4), edges=((0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)), stages=2)
    alone = [stage.tolist() for stage in optimal_stagings(problem)]
    assert sorted(alone) == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_two_towers_go_to_a_stage_each_where_no_cut_of_the_order_can() -> None:
    left, right = [0, 2, 4], [1, 3, 5]
    edges = [(a, b, 5.0) for tower in (left, right) for a, b in itertools.pairwise(tower)]
    edges += [(4, 6, 1.0), (5, 6, 1.0)]
    problem = StageProblem(work=np.array([1.0] * 6 + [0.1]), edges=tuple(edges), stages=2, cap=3.2)
    apart = assign_stages(problem)
    assert apart.stage is not None
    assert apart.objective == 1.0
    assert len({apart.stage[v] for v in left}) == len({apart.stage[v] for v in right}) == 1
    assert contiguous(problem, topological(7, problem.edges)).objective > 1.0


def test_a_cap_that_cannot_be_kept_is_said() -> None:
    problem = StageProblem(work=np.array([1.0, 5.0]), edges=((0, 1, 1.0),), stages=2, cap=3.0)
    assert "fits no stage" in assign_stages(problem).why


def test_a_strategy_graph_of_json_is_answered_with_ties_and_greedy() -> None:
    nodes = [{"name": n, "options": ["R", "S"], "cost": c} for n, c in (("a", [4, 1]), ("b", [2, 3]), ("c", [1, 6]))]
    step = [[0, 0], [5, None]]
    ends = [{"source": "a", "target": "b", "matrix": step}, {"source": "b", "target": "c", "matrix": step}]
    answer = solve_strategy_graph({"graph": {"nodes": nodes, "edges": ends}})
    assert (answer["optimum"], answer["feasible"], answer["per_node_greedy"]["cost"]) == (7.0, True, 9.0)
    assert answer["options_attaining_optimum"] == {"a": ["R"], "b": ["R"], "c": ["R"]}
    assert answer["one_optimal_assignment"].fault({"a": "R", "b": "R", "c": "R"}) == ""
    assert "costs 9" in answer["one_optimal_assignment"].fault({"a": "S", "b": "R", "c": "R"})


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (3, 5), (5, 4)])
def test_list_scheduling_with_a_limit_in_flight_is_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    limits = [min(micro_batches, stages - s) for s in range(stages)]
    makespan, peaks, order = list_schedule(stages, micro_batches, 1.0, 2.0, 0.0, limits)
    assert makespan == 3.0 * (micro_batches + stages - 1)
    assert peaks == limits
    assert all(len(row) == 2 * micro_batches for row in order)
