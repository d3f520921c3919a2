"""PipeDream's two levels on a Problem: pipelines within pipelines, against enumeration on two and three machines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simpart.graph import Graph
from simpart.hardware import Cluster, load_cluster
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searchers._chain_plans import Answer, chain_cases, chain_plan, fitting
from simpart.searchers._nested import Machines, NestedCosts, least_nested, machines_of, nested_costs
from simpart.searching import Budget, Control, search
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=4, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")


def of_machines(machines: int, devices: int) -> Cluster:
    cluster = load_cluster("dgx-a100:2")
    inner, outer = cluster.levels[0], cluster.levels[-1]
    levels = (replace(inner, size=devices), replace(outer, size=machines * devices))
    return replace(cluster, devices=((cluster.device(0), machines * devices),), levels=levels)


def problem_of(graph: Graph, cluster: Cluster) -> Problem:
    return Problem(
        graph=graph,
        training=TrainingSpec(),
        cluster=cluster,
        costs=default_costs(load_cluster("local:4"), profiles=False),
        global_batch=12,
        space=Space(recompute=("none",), schedules=("1f1b",)),
    )


def enumerated(costs: NestedCosts, machines: Machines, count: int) -> float:
    """Least cost of the slowest stage: every way to give segments machines and, inside, stages devices."""
    n = costs.compute_s.shape[0]

    def least(block: int, left: int, m: int, q: int, stages: int) -> float:
        if stages == 0:
            return -math.inf if (block, left, q) == (n, 0, 0) else math.inf
        best = math.inf
        fresh = q == 0
        for width in range(1, left + 1) if fresh else (m,):
            room = machines.devices if fresh else q
            for r in range(1, room + 1):
                if (r, width) not in costs.choices:
                    continue
                k = costs.choices.index((r, width))
                seconds = costs.stage_s(stages - 1, fresh, r == room)[:, :, k]
                for end in range(block + 1, n + 1):
                    if math.isfinite(seconds[block, end]):
                        rest = least(end, left - width if fresh else left, width, room - r, stages - 1)
                        best = min(best, max(float(seconds[block, end]), rest))
        return best

    return least(0, machines.number, 0, 0, count)


@pytest.mark.parametrize(("machines", "devices"), [(2, 2), (3, 2), (2, 3)])
def test_the_slowest_stage_is_that_of_enumeration(gpt: Graph, machines: int, devices: int) -> None:
    problem = problem_of(gpt, of_machines(machines, devices))
    found = machines_of(problem.cluster)
    assert found == (machines, devices)
    checked, placed = 0, set()
    for group in chain_cases(problem, Control(), most_blocks=5):
        for case in group:
            if case.shape.pipelines > 1:
                continue
            costs = nested_costs(case.chain, case.shape, case.schedule, found, fitting)
            if costs is None:
                continue
            for count, plan in least_nested(costs, found, 5).items():
                expected = enumerated(costs, found, count)
                assert (math.inf if plan is None else plan.value) == pytest.approx(expected, rel=1e-12)
                if plan is not None:
                    used = sorted(d for devices_ in plan.devices for d in devices_)
                    assert used == list(range(machines * devices))
                    answer = Answer(stages=plan.stages, objective_s=plan.value, devices=plan.devices)
                    made = chain_plan(problem, case.chain, case.shape, answer, case.schedule)
                    assert simulate_plan(problem, made).step_s > 0
                    placed |= {len(d) > 1 and d[-1] - d[0] >= devices for d in plan.devices}
                checked += 1
    assert checked >= 10 and placed == {True, False}


def test_nothing_is_nested_on_one_machine_or_on_unequal_ones() -> None:
    assert machines_of(load_cluster("local:4")) is None
    assert machines_of(load_cluster("dgx-a100:1")) is None
    assert machines_of(load_cluster("a100-v100")) is None
    assert machines_of(load_cluster("dgx-a100:4")) == (4, 8)


def test_two_levels_are_never_worse_than_the_flat_pipelines_alone(gpt: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(gpt, of_machines(2, 2))
    both = search(problem, load_searcher("pipedream"), Budget())
    monkeypatch.setattr("simpart.searchers.pipedream.machines_of", lambda cluster: None)
    flat = search(problem, load_searcher("pipedream"), Budget())
    assert both.least_s is not None and flat.least_s is not None and both.least_s <= flat.least_s
    assert both.bound_s == pytest.approx(both.least_s)
