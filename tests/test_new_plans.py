"""Plans of one problem share what they have in common: each is still what it is in a problem of its own, where every
stage is followed by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from simpart.configure import RECOMPUTE, SELECTIVE, Configuration, attention_regions, configure, recompute_regions
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.lowering import lowering_of
from simpart.lowering.ledger import Ledger
from simpart.model_spec import load_graph_or_model
from simpart.plan import OpSet, Plan
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.simulation import evaluate
from simpart.training import TrainingSpec

GPT = "gpt:layers=12,hidden=64,heads=4,seq=32,vocab=128"
LLAMA = "llama:layers=10,hidden=64,heads=4,seq=32,vocab=128"
T5 = "t5:layers=3,hidden=64,heads=4,seq=16,vocab=128"
MOE = "moe:layers=4,hidden=64,heads=4,kv_heads=4,seq=32,vocab=128,experts=4"
MODELS = (
    (GPT, "dgx-a100:4"),
    (LLAMA, "dgx-a100:2"),
    pytest.param(T5, "dgx-a100:2", marks=pytest.mark.slow),
    pytest.param(GPT, "a100-v100", marks=pytest.mark.slow),
    pytest.param(MOE, "dgx-a100:2", marks=pytest.mark.slow),
)
COUNT = 12


@cache
def graph_of(model: str) -> Graph:
    return load_graph_or_model(model)


def problem(model: str, cluster: str) -> Problem:
    machines = load_cluster(cluster)
    training = TrainingSpec(optimizer="adamw", gradient_clip_norm=1.0)
    return Problem(
        graph=graph_of(model), training=training, cluster=machines, costs=default_costs(machines), global_batch=64
    )


def random_plans(given: Problem, rng: np.random.Generator, count: int) -> list[Plan]:
    """Configurations at random, half of them with their cuts moved to any op."""
    found: list[Plan] = []

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    while len(found) < count:
        pp, tp = pick(1, 2, 3, 4, 6), pick(1, 1, 2, 2, 4)
        dp = pick(1, 1, 2, 4)
        configuration = Configuration(
            pp=pp, tp=tp, dp=dp, micro_batch=pick(1, 2, 4), schedule=pick("1f1b", "gpipe", "interleaved-1f1b", "zb-h1"),
            recompute=pick(*RECOMPUTE, SELECTIVE), zero=pick(0, 0, 1, 2, 3) if dp > 1 else 0,
            sp=tp > 1 and pick(True, False), virtual_stages=None,
        )  # fmt: skip
        try:
            plan = configure(given, configuration)
            if rng.random() < 0.6:
                plan = recut(given, plan, rng, configuration.recompute)
            if rng.random() < 0.2:
                plan = replace(plan, skips="relay")
            evaluate(problem_like(given), [plan])
        except UserError:
            continue
        found.append(plan)
    return found


def problem_like(given: Problem) -> Problem:
    """The same, nothing known of it."""
    return replace(given)


def recut(given: Problem, plan: Plan, rng: np.random.Generator, recompute: str) -> Plan:
    """The same with its stages cut at other calls, or in the middle of them."""
    graph = given.graph.at(max(plan.batch.sizes[0]))
    flat = graph.flat
    cuts = np.sort(rng.choice(np.arange(1, len(flat.op_class)), len(plan.stages) - 1, replace=False))
    if rng.random() < 0.7:
        cuts = np.searchsorted(flat.op_call, flat.op_call[cuts])
    if np.unique(cuts).size < cuts.size or (cuts < 1).any():
        raise UserError("a stage would be empty")
    stages = []
    for stage, part in zip(plan.stages, np.split(np.arange(len(flat.op_class)), cuts), strict=True):
        again: tuple[OpSet, ...] = ()
        if recompute == "full":
            again = recompute_regions(graph, part)
        if recompute == SELECTIVE:
            again = attention_regions(graph, part)
        stages.append(replace(stage, ops=OpSet.of(graph, part), recompute=again))
    return replace(plan, stages=tuple(stages))


def told(given: Problem, plan: Plan) -> tuple[npt.NDArray[np.float64], ...]:
    """All that a plan's costs consist of, and its memory."""
    lowering = lowering_of(given)
    costed = lowering.cost(plan)
    ledger = Ledger(len(costed.costs))
    for row, cost in enumerate(costed.costs):
        ledger.add(row, cost)
    spread = ledger.spread()
    order = np.argsort(spread.factors)
    memory, _ = lowering.memory(plan, costed, lowering.topology(plan, costed, "tasks"))
    inside = np.array([sum(seconds for _, seconds in cost.inside) for cost in costed.costs])
    launches = np.array([cost.launches for cost in costed.costs])
    tables = (memory.static, memory.late, memory.start, memory.end, memory.within)
    return (
        ledger.total, spread.by_factor[:, order], spread.shared_log_sd[order], spread.own_log_sd, spread.by_provenance,
        inside, launches, *tables,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "cluster"), MODELS)
def test_plans_evaluated_together_are_what_each_is_alone(model: str, cluster: str) -> None:
    together = problem(model, cluster)
    plans = random_plans(together, np.random.default_rng(len(model)), COUNT)
    for plan, found in zip(plans, evaluate(together, plans), strict=True):
        alone = problem(model, cluster)
        lowering_of(alone).actions.alike.repeats.least = 10**9
        (expected,) = evaluate(alone, [plan])
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
        assert (found.peak_bytes, found.feasible) == (expected.peak_bytes, expected.feasible)
        for mine, theirs in zip(told(together, plan), told(alone, plan), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-15)
    assert evaluate(together, plans) == evaluate(together, plans)
