"""Stages of many equal layers, carried on from short ones, are what following each of them says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpart.configure import Configuration, configure
from simpart.hardware import load_cluster
from simpart.lowering import lowering_of
from simpart.model_spec import load_graph_or_model
from simpart.plan import OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.simulation import evaluate
from simpart.training import TrainingSpec

MODELS = (
    "gpt:layers=12,hidden=64,heads=4,seq=32,vocab=128",
    pytest.param("llama:layers=10,hidden=64,heads=4,seq=32,vocab=128", marks=pytest.mark.slow),
)


def shifted(graph_plan: tuple[Problem, Plan], by: int) -> Plan:
    """The same with the first cut moved, into the middle of a layer too."""
    problem, plan = graph_plan
    graph = problem.graph.at(max(plan.batch.sizes[0]))
    cut = int(plan.stages[1].ops.indices(graph)[0]) + by
    last = int(plan.stages[1].ops.indices(graph)[-1]) + 1
    first, second = OpSet.of(graph, range(cut)), OpSet.of(graph, range(cut, last))
    stages = (
        Stage(ops=first, group=plan.stages[0].group, sharding=plan.stages[0].sharding),
        Stage(ops=second, group=plan.stages[1].group, sharding=plan.stages[1].sharding),
        *plan.stages[2:],
    )
    return replace(plan, stages=stages)


@pytest.mark.parametrize("model", MODELS)
def test_carried_on_stages_equal_followed_ones(model: str) -> None:
    graph, cluster = load_graph_or_model(model), load_cluster("dgx-a100:2")

    def fresh() -> Problem:
        training = TrainingSpec(optimizer="adamw")
        return Problem(graph=graph, training=training, cluster=cluster, costs=default_costs(cluster), global_batch=16)

    one, other = fresh(), fresh()
    lowering_of(other).actions.alike.repeats.least = 10**9
    plans = []
    for recompute in ("full", "none", "selective"):
        for pp, micro_batch, schedule in ((2, 2, "1f1b"), (1, 1, "1f1b"), (2, 1, "zb-h1"), (1, 2, "gpipe")):
            plans.append(
                configure(
                    one,
                    Configuration(tp=2, pp=pp, micro_batch=micro_batch, recompute=recompute, schedule=schedule),
                )
            )
    plans += [shifted((one, plan), by) for plan in plans if len(plan.stages) == 2 for by in (-15, -4, 7)]
    for found, expected in zip(evaluate(one, plans), evaluate(other, plans), strict=True):
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
        assert (found.peak_bytes, found.feasible) == (expected.peak_bytes, expected.feasible)
    assert model.startswith("llama") or lowering_of(one).actions.alike.repeats.counted
