"""Evaluating many plans at once says what simulating each says, whatever they share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpart.lowering import lowering_of
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.schedule import SCHEDULES, Schedule
from simpart.simulation import evaluate, simulate_plan
from simpart.testing.schedule_suite import placement
from simpart.training import TrainingSpec
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitCompute, UnitLinks, chain, costs, device

SLOW_LINKS = UnitLinks({"p2p": 1 / 8, "all_reduce": 1 / 64})
FAST_LINKS = UnitLinks({"p2p": 1 / 256, "all_reduce": 1 / 64})


def given_problem(links: UnitLinks, batch: int, memory_bytes: int = 10**9) -> Problem:
    training = TrainingSpec(optimizer="adamw", gradient_clip_norm=1.0)
    machines = [device(memory_bytes=memory_bytes)] * 8 + [device("slow", memory_bytes)]
    priced = costs(UnitCompute((0.1, 0.1)), links, action_overhead_s=0.25, step_overhead_s=1.0)
    return problem(chain(8), batch, machines, costs=priced, training=training)


def check(given: Problem, plans: list[Plan]) -> None:
    for one, found in zip(plans, evaluate(given, plans), strict=True):
        result = simulate_plan(given, one)
        assert found.step_s == result.step_s
        assert (found.peak_bytes, found.feasible) == (result.peak_bytes, result.feasible)
        assert found.why_infeasible == result.why_infeasible


@pytest.mark.parametrize("links", [SLOW_LINKS, FAST_LINKS])
@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_one_at_a_time_or_together(kind: str, links: UnitLinks) -> None:
    given, plans = given_problem(links, 16), []
    home = placement(kind, 4)
    for cuts in ([4, 8, 12], [2, 6, 14]) if len(home) == 4 else ([2, 4, 6, 8, 10, 12, 14], [1, 4, 6, 8, 10, 13, 15]):
        for sizes, count in (((1, 1), 8), ((3, 1), 4)):
            for recompute in (False, True):
                plans.append(
                    plan(
                        given.graph,
                        cuts,
                        count,
                        [sizes] * 4,
                        homes=home,
                        recompute=recompute,
                        schedule=Schedule(kind=kind),
                    )
                )
    check(given, plans)


@given(st.lists(st.integers(1, 15), min_size=0, max_size=3, unique=True), st.sampled_from([1, 2, 4, 8]), st.booleans())
@settings(max_examples=30)
def test_any_stages_in_any_memory(cuts: list[int], count: int, small: bool) -> None:
    given = given_problem(SLOW_LINKS, 8, 1500 if small else 10**9)
    sizes: list[tuple[int, ...]] = [(8 // count,)] * (len(cuts) + 1)
    check(given, [plan(given.graph, sorted(cuts), count, sizes, schedule=Schedule(kind=k)) for k in ("1f1b", "gpipe")])


def test_transfers_become_delays_only_where_none_can_wait() -> None:
    """A layer takes 2 s forward; 32 bytes take 4 s over slow links, 1/8 s over fast ones."""
    for links, exact in ((SLOW_LINKS, False), (FAST_LINKS, True)):
        given = given_problem(links, 8)
        one = plan(given.graph, [2], 4)
        lowering = lowering_of(given)
        costed = lowering.cost(one)
        assert costed.exact == exact
        sizes = [lowering.topology(one, costed, how).size for how in ("tasks", "lags")]
        assert sizes[0] - sizes[1] == 2 * 4


def test_plans_that_differ_in_nothing_but_the_schedule_share_their_costs() -> None:
    given = given_problem(FAST_LINKS, 8)
    one, two = (plan(given.graph, [8], 4, schedule=Schedule(kind=kind)) for kind in ("1f1b", "gpipe"))
    lowering = lowering_of(given)
    assert lowering.cost(one) is lowering.cost(two)


def test_dualpipe_holds_the_model_twice_and_sums_over_both_copies() -> None:
    given = given_problem(FAST_LINKS, 16)
    cuts = [4, 8, 12]
    sizes: list[tuple[int, ...]] = [(1,)] * 4
    once, twice = (
        simulate_plan(given, plan(given.graph, cuts, 16, sizes, schedule=Schedule(kind=kind)))
        for kind in ("1f1b", "dualpipe")
    )
    held = [[row.by_kind["parameters"] for row in result.memory] for result in (once, twice)]
    assert held[1] == [a + b for a, b in zip(held[0], reversed(held[0]), strict=True)]
    assert twice.memory[1].stages == (1, 2)
    names = twice.program.topology.class_names
    assert [name for name in names if "among groups" in name] == [
        "gradient all-reduce among groups 0, 3", "gradient all-reduce among groups 1, 2"
    ]  # fmt: skip
    assert twice.step_s < once.step_s


def test_a_split_backward_keeps_what_weight_gradients_need() -> None:
    """Two layers: weights 16 floats, values 2 × 4. I leaves W the inputs of both products, and their gradients."""
    given = given_problem(FAST_LINKS, 4)
    split, whole = (
        simulate_plan(given, plan(given.graph, [8], 2, [(2,)] * 2, schedule=Schedule(kind=kind)))
        for kind in ("zb-h1", "1f1b")
    )
    task_s = split.program.durations.task_s
    b, i, w = task_s[5:8].tolist()
    assert b == pytest.approx(i + w - 0.25) and w == pytest.approx(4 + 0.25)  # four products, and an action's overhead
    assert split.step_s < whole.step_s
    memory = split.program.memory
    for s in range(2):
        given_back = memory.end[4 * s + 2] + memory.end[4 * s + 3]
        np.testing.assert_array_equal(memory.start[4 * s], -given_back)
        np.testing.assert_array_equal(memory.start[4 * s], -memory.end[4 * s + 1])
        assert memory.end[4 * s + 3].sum() < 0
