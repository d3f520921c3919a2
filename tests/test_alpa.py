"""Alpa's inter-op problem against plain enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from simpart.errors import UserError
from simpart.searchers._caps import least_sum_and_maximum
from simpart.searchers.alpa import InterOp, InterOpCosts, interop_total_s, successors_allowed


def costs_of(seed: int) -> tuple[InterOpCosts, int, int]:
    """Unstructured costs, devices and micro-batches."""
    rng = np.random.default_rng(seed)
    n, devices = int(rng.integers(1, 6)), int(rng.integers(1, 8))
    options = int(rng.integers(1, 5))
    sizes = tuple(int(x) for x in rng.integers(1, devices + 1, options))
    shape = (n, n + 1, options)
    time_s = rng.integers(1, 30, shape).astype(float) if rng.random() < 0.5 else rng.random(shape)
    time_s[rng.random(shape) < 0.1] = np.inf
    successors = rng.integers(-1, 4, shape) if rng.random() < 0.6 else np.full(shape, 4096)
    return InterOpCosts(time_s=time_s, successors=successors, sizes=sizes), devices, int(rng.integers(1, 40))


def enumerated(costs: InterOpCosts, devices: int, micro_batches: int, at_most: bool = False) -> dict[int, float]:
    """Least total for each number of stages."""
    n, best = costs.layers, {}
    for count in range(1, n + 1):
        best[count] = math.inf
        for cuts in itertools.combinations(range(1, n), count - 1):
            ends = (0, *cuts, n)
            for options in itertools.product(range(len(costs.sizes)), repeat=count):
                used = sum(costs.sizes[o] for o in options)
                if used != devices and not (at_most and used < devices):
                    continue
                at = [(ends[x], ends[x + 1], o) for x, o in enumerate(options)]
                if all(costs.successors[a] >= count - 1 - x for x, a in enumerate(at)):
                    times = [costs.time_s[a] for a in at]
                    if max(times) < math.inf:
                        best[count] = min(best[count], sum(times) + (micro_batches - 1) * max(times))
    return best


def agrees(seed: int) -> None:
    costs, devices, micro_batches = costs_of(seed)
    for at_most in (False, True):
        expected = enumerated(costs, devices, micro_batches, at_most)
        problem = InterOp(costs, devices, micro_batches, all_devices=not at_most)
        for count, value in [(None, min(expected.values())), *expected.items()]:
            plan = problem.best(count)
            if plan is None:
                assert value == math.inf
                continue
            assert plan.total_s == pytest.approx(value, rel=1e-12)
            assert plan.total_s == interop_total_s(costs, plan.stages, micro_batches)
            assert plan.bound_s == pytest.approx(plan.total_s, rel=1e-12)


@pytest.mark.parametrize("part", range(4))
def test_least_total_is_that_of_enumeration(part: int) -> None:
    for seed in range(part * 75, part * 75 + 75):
        agrees(seed)


@pytest.mark.slow
def test_least_total_is_that_of_enumeration_on_a_thousand_instances() -> None:
    for seed in range(1_000, 2_000):
        agrees(seed)


def test_compiled_and_plain_tables_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    shape = (24, 25, 4)
    costs = InterOpCosts(time_s=rng.random(shape), successors=rng.integers(0, 9, shape), sizes=(1, 2, 4, 8))
    compiled = InterOp(costs, 24, 16).best()
    monkeypatch.setenv("SIMPART_NO_JIT", "1")
    assert InterOp(costs, 24, 16).best() == compiled


def test_the_unit_of_time_changes_nothing() -> None:
    for seed in range(40):
        costs, devices, micro_batches = costs_of(seed)
        tiny = replace(costs, time_s=costs.time_s * 1e-7)
        a, b = InterOp(costs, devices, micro_batches).best(), InterOp(tiny, devices, micro_batches).best()
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert b.total_s == pytest.approx(a.total_s * 1e-7, rel=1e-9)


def test_more_memory_or_devices_never_hurt() -> None:
    for seed in range(60):
        costs, devices, micro_batches = costs_of(seed)
        roomier = replace(costs, successors=costs.successors + 1)

        def value(costs: InterOpCosts, devices: int, micro_batches: int = micro_batches) -> float:
            plan = InterOp(costs, devices, micro_batches, all_devices=False).best()
            return math.inf if plan is None else plan.total_s

        base = value(costs, devices)
        assert value(roomier, devices) <= base * (1 + 1e-12)
        assert value(costs, devices + 1) <= base * (1 + 1e-12)


def test_a_gap_gives_a_plan_and_a_bound_that_far_apart_at_most() -> None:
    rng = np.random.default_rng(3)
    shape = (10, 11, 3)
    costs = InterOpCosts(time_s=rng.random(shape) + 0.1, successors=np.full(shape, 99), sizes=(1, 2, 4))
    exact, loose = InterOp(costs, 8, 32).best(), InterOp(costs, 8, 32).best(relative_gap=0.2)
    assert exact is not None and loose is not None
    assert loose.bound_s <= exact.total_s <= loose.total_s <= loose.bound_s * 1.2 * (1 + 1e-12)


def test_few_caps_are_solved() -> None:
    rng = np.random.default_rng(4)
    shape = (16, 17, 5)
    costs = InterOpCosts(time_s=rng.random(shape) + 0.5, successors=np.full(shape, 99), sizes=(1, 2, 4, 8, 16))
    asked: list[float] = []
    problem = InterOp(costs, 16, 64)

    def least(cap: float) -> tuple[float, float]:
        asked.append(cap)
        return problem._least(cap, None)

    _, value, _ = least_sum_and_maximum(problem.caps, 63, least)
    plan = problem.best()
    assert plan is not None and value == pytest.approx(plan.total_s)
    assert len(asked) < len(problem.caps) / 10


def test_successors_from_memory_follow_the_published_rule() -> None:
    room = successors_allowed(
        np.array([100.0, 10.0, 5.0]), np.array([10.0] * 3), np.array([20.0, 0.0, 0.0]), np.array([10.0, 0.0, 0.0])
    )
    assert room.tolist() == [6, 4096, -1]


def test_more_devices_than_options_can_use_is_infeasible_not_an_error() -> None:
    costs = InterOpCosts(time_s=np.ones((2, 3, 1)), successors=np.full((2, 3, 1), 9), sizes=(1,))
    assert InterOp(costs, 5, 4).best() is None
    used = InterOp(costs, 5, 4, all_devices=False).best()
    assert used is not None and len(used.stages) == 1


def test_costs_with_negative_times_are_refused() -> None:
    costs = InterOpCosts(time_s=np.full((1, 2, 1), -1.0), successors=np.full((1, 2, 1), 9), sizes=(1,))
    with pytest.raises(UserError, match="stage times must be numbers >= 0"):
        InterOp(costs, 1, 1)
