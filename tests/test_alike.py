"""Split stages worked out once for all that are alike: equal to each plan alone, and a stage followed alone to all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpart.configure import Configuration, configure
from simpart.hardware import load_cluster
from simpart.lowering import lowering_of
from simpart.plan import OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.sharding import flows
from simpart.simulation import evaluate
from simpart.training import TrainingSpec
from tests.toy_graphs import UnitCompute, UnitLinks, costs
from tests.vocabulary import GPT, graph_of


def problem() -> Problem:
    links = UnitLinks({"p2p": 1 / 256, "all_reduce": 1 / 64, "reduce_scatter": 1 / 128, "all_gather": 1 / 128})
    return Problem(
        graph=graph_of(GPT), training=TrainingSpec(optimizer="adamw"), cluster=load_cluster("dgx-a100"),
        costs=costs(UnitCompute((0.1, 0.1)), links), global_batch=8,
    )  # fmt: skip


def variants(given: Problem) -> list[Plan]:
    plans = [
        configure(given, Configuration(tp=2, pp=pp, micro_batch=1, recompute=recompute, zero=zero, sp=sp))
        for pp, zero, sp in ((2, 0, False), (2, 3, True), (4, 0, True))
        for recompute in ("none", "full")
    ]
    return plans + [moved(given, plan) for plan in plans if len(plan.stages) > 1]


def moved(given: Problem, plan: Plan) -> Plan:
    """The same with its first cut some ops earlier: within a layer, where other values cross."""
    graph = given.graph.at(1)
    held = [stage.ops.indices(graph).tolist() for stage in plan.stages]
    there = held[0][-6:]
    held[0], held[1] = held[0][:-6], [*there, *held[1]]
    stages = tuple(
        Stage(ops=OpSet.of(graph, ops), group=stage.group, sharding=stage.sharding)
        for stage, ops in zip(plan.stages, held, strict=True)
    )
    return replace(plan, stages=stages)


def test_plans_that_share_stages_are_what_each_is_alone() -> None:
    together = problem()
    plans = variants(together)
    found = evaluate(together, plans)
    assert found == [evaluate(problem(), [plan])[0] for plan in plans]
    lowering = lowering_of(together)
    stages = sum(len(plan.stages) for plan in plans)
    assert len(lowering.actions.alike.known) < stages


def test_a_stage_followed_alone_is_the_stage_followed_among_all() -> None:
    given = problem()
    for plan in variants(given):
        graph = given.graph.at(1)
        together = flows(plan, graph)
        for s, whole in enumerate(together):
            (alone,) = flows(plan, graph, only=[s])
            assert (alone.layouts, alone.uses) == (whole.layouts, whole.uses)
            assert alone.exchanges == whole.exchanges
            assert sorted(map(repr, alone.conversions)) == sorted(map(repr, whole.conversions))


@pytest.mark.parametrize("pp", [2, 4])
def test_parts_of_sent_values_are_those_of_the_flow(pp: int) -> None:
    """What a stage sends lies as its maker's strategy leaves it, which the flow says too."""
    given = problem()
    plan = configure(given, Configuration(tp=2, pp=pp, micro_batch=1, sp=True))
    lowering = lowering_of(given)
    costed = lowering.cost(plan)
    sent = [(edge.source, value) for edge, load in zip(costed.layout.edges, costed.layout.loads, strict=True)
            for value, _ in load]  # fmt: skip
    assert sent
    for s, value in sent:
        share = lowering.actions.share(plan, costed.layout, s, costed.arrangement.first[plan.stages[s].group])
        at = lowering.actions.alike.makers[costed.layout.graph.fingerprint, value]
        whole = costed.layout.graph.flat.kernel_value_spec[at].bytes(1)
        assert lowering.actions.alike.part(plan, costed.layout, s, value, 1) == share.value_bytes[at] / whole
