"""Planners on odd input: costs that are no numbers, too little memory, too many devices; units and monotonicity."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from simpart.cost import CollectiveTable, Costs, Estimate, SignatureTable
from simpart.costmodels import AlphaBeta, Roofline
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import Cluster, Device, load_cluster
from simpart.problem import Problem, Space
from simpart.registry import load_searcher
from simpart.searchers._chain import Unplannable, solve_chain
from simpart.searchers._stages import StageCosts
from simpart.searchers.pipedream import Level, chain_cuts
from simpart.searchers.pipedream import solve as solve_pipedream
from simpart.searching import search
from simpart.testing.searcher_suite import check_searcher
from simpart.training import TrainingSpec

PLANNERS = ["alpa", "dapple", "pipedream", "piper", "rannc"]


class Scaled:
    """Models whose times are all multiplied."""

    def __init__(self, factor: float) -> None:
        self.factor, self.compute, self.communication = factor, Roofline(), AlphaBeta()

    @property
    def name(self) -> str:
        return f"{self.factor:g} times"


class ScaledCompute(Scaled):
    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        found = self.compute.estimate(table, device)
        return replace(found, mean_s=found.mean_s * self.factor)


class ScaledLinks(Scaled):
    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        found = self.communication.estimate(table, cluster)
        return replace(found, mean_s=found.mean_s * self.factor)


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=2, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")


def problem_of(graph: Graph, devices: int, global_batch: int, space: Space = Space(), factor: float = 1.0) -> Problem:  # noqa: B008
    costs = Costs(compute=ScaledCompute(factor), communication=ScaledLinks(factor))
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=load_cluster(f"local:{devices}"), costs=costs,
        global_batch=global_batch, space=space,
    )  # fmt: skip


def stage_costs(**changes: object) -> StageCosts:
    ones = np.ones((2, 3, 2))
    costs = StageCosts(
        replicas=(1, 2), forward_s=ones, backward_s=ones, transfer_s=ones, allreduce_s=ones, static_bytes=ones,
        stash_bytes=ones, limit_bytes=100.0, micro_batches=2, allowed=np.ones((2, 3, 2), dtype=np.bool_),
    )  # fmt: skip
    return replace(costs, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["forward_s", "backward_s", "transfer_s", "static_bytes", "stash_bytes"])
@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_stage_costs_that_are_no_numbers_or_negative_are_refused_by_name_and_place(name: str, value: float) -> None:
    bad = np.ones((2, 3, 2))
    bad[0, 2, 1] = value
    with pytest.raises(UserError, match=rf"{name}.*\[0, 2, 1\]"):
        solve_chain(stage_costs(**{name: bad}), 2, 2)
    unused = np.ones((2, 3, 2))
    unused[1, 0, 0] = value  # no stage
    assert solve_chain(stage_costs(**{name: unused}), 2, 2)


def test_infinite_costs_are_stages_that_cannot_be() -> None:
    never = np.full((2, 3, 2), np.inf)
    assert all(isinstance(answer, Unplannable) for answer in solve_chain(stage_costs(forward_s=never), 2, 2).values())


@pytest.mark.parametrize("bad", [[1.0, np.nan], [1.0, -2.0], [1.0, None]])
def test_block_costs_with_holes_are_refused(bad: list[float]) -> None:
    with pytest.raises(UserError, match="compute_s"):
        solve_pipedream(chain_cuts(bad, [1.0, 1.0], [1.0, 1.0], [1.0, 0.0]), [Level(units=2, bytes_per_s=1.0)])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "rannc" else name for name in PLANNERS]
)
def test_more_devices_than_ops(gpt: Graph, name: str) -> None:
    space = Space(min_stages=1, max_micro_batches=1, schedules=("1f1b",), recompute=("none",), use_fewer_devices=True)
    problem = problem_of(gpt, 64, 4, space)
    assert problem.cluster.size > len(gpt.op_ids)
    result = check_searcher(lambda: load_searcher(name), problem)
    if name != "dapple":  # which leaves no device idle
        assert result.best is not None


@pytest.mark.parametrize("name", PLANNERS)
def test_times_in_any_unit_give_the_same_plan(gpt: Graph, name: str) -> None:
    space = Space(max_micro_batches=4, schedules=("1f1b",))
    usual, small = (search(problem_of(gpt, 4, 8, space, x), load_searcher(name)) for x in (1.0, 1e-5))
    assert usual.best is not None and small.best is not None and usual.bound_s is not None
    assert small.bound_s == pytest.approx(usual.bound_s * 1e-5, rel=1e-9)
    objectives = [e.candidate.objective_s for e in sorted(usual.ranked, key=lambda e: e.number)]
    scaled = [e.candidate.objective_s for e in sorted(small.ranked, key=lambda e: e.number)]
    assert min(scaled) == pytest.approx(min(objectives) * 1e-5, rel=1e-9)


@pytest.mark.parametrize("name", ["alpa", "pipedream", "piper"])
def test_more_devices_or_memory_never_hurt_the_objective(gpt: Graph, name: str) -> None:
    space = Space(max_micro_batches=4, schedules=("1f1b",), use_fewer_devices=True)
    node, bounds = load_cluster("dgx-a100"), []
    for count in (1, 2, 3, 4):
        few = replace(node, devices=((node.device(0), count),))
        bounds.append(search(replace(problem_of(gpt, 1, 4, space), cluster=few), load_searcher(name)).bound_s)
    assert all(b is not None and a is not None and b <= a * (1 + 1e-9) for a, b in itertools.pairwise(bounds))
    problem = problem_of(gpt, 2, 4, space)
    least = []
    for memory in (900_000, 1_500_000, 3_000_000, 2**33):
        devices = tuple((replace(d, memory_bytes=memory, reserved_bytes=0), n) for d, n in problem.cluster.devices)
        short = replace(problem, cluster=replace(problem.cluster, devices=devices))
        least.append(search(short, load_searcher(name)).bound_s or np.inf)
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(least)) and least[-1] < np.inf
