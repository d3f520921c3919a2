"""Bad input to searches: cost models with holes, memory below the smallest op, batches that do
not divide: a reasoned infeasible or a clear refusal, from every searcher."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from simpart.cost import Costs, Estimate, SignatureTable
from simpart.costmodels import AlphaBeta, Roofline
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.problem import Problem, Space
from simpart.registry import load_searcher
from simpart.searching import Budget, search
from simpart.training import TrainingSpec

NAMES = (
    "alpa", "annealing", "dapple", "equal_flops", "equal_layers", "equal_parameters", "exhaustive", "grid", "pipedream",
    "piper", "random", "rannc", "two_bw",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=1, hidden=16, heads=2, seq=8, vocab=16)), model="tiny")


def problem_on(graph: Graph, devices: int, global_batch: int, costs: Costs | None = None, **space: Any) -> Problem:
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=load_cluster(f"local:{devices}"), global_batch=global_batch,
        costs=costs or Costs(compute=Roofline(), communication=AlphaBeta()), space=Space(**space),
    )  # fmt: skip


class Holed:
    """Roofline and α–β with one answer replaced."""

    def __init__(self, value: float, short: bool = False) -> None:
        self.value, self.short = value, short

    def estimate(self, table: Any, place: Any) -> Estimate:
        inner: Any = Roofline() if isinstance(table, SignatureTable) else AlphaBeta()
        found: Estimate = inner.estimate(table, place)
        mean_s = found.mean_s.copy()
        if mean_s.size:
            mean_s[-1] = self.value
        return dataclasses.replace(found, mean_s=mean_s[:-1] if self.short else mean_s)


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
@pytest.mark.parametrize("name", ["rannc", "grid"])
def test_cost_models_with_holes_are_refused_with_the_kernel(tiny: Graph, name: str, value: float) -> None:
    for costs in (
        Costs(compute=Holed(value), communication=AlphaBeta()),
        Costs(compute=Roofline(), communication=Holed(value)),
    ):
        with pytest.raises(
            UserError, match=r"a cost model answers (nan|-1\.0|inf) s for \S+.* mend the model"
        ) as error:
            search(problem_on(tiny, 2, 4, costs), load_searcher(name))
        assert "\n" not in str(error.value)


def test_a_cost_model_that_answers_too_few_rows_is_refused(tiny: Graph) -> None:
    with pytest.raises(UserError, match="it must give one for each"):
        search(
            problem_on(tiny, 2, 4, Costs(compute=Holed(1.0, True), communication=AlphaBeta())), load_searcher("grid")
        )


@pytest.mark.parametrize("name", NAMES)
def test_memory_below_the_smallest_op_is_infeasible_with_a_reason(tiny: Graph, name: str) -> None:
    problem = problem_on(tiny, 2, 4)
    short = tuple((dataclasses.replace(d, memory_bytes=1, reserved_bytes=0), n) for d, n in problem.cluster.devices)
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, devices=short))
    result = search(problem, load_searcher(name), Budget(candidates=20))
    assert result.best is None and result.infeasible
    assert all("more than" in why or "over the memory limit" in why for why in result.infeasible)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [5, 7])
def test_replicas_that_cannot_divide_the_batch(tiny: Graph, name: str, devices: int) -> None:
    result = search(problem_on(tiny, devices, 3, max_stages=2), load_searcher(name), Budget(candidates=12))
    assert result.best is not None or result.infeasible
    assert all(why and "\n" not in why for why in result.infeasible)
