"""Steps that vary, plans in the same worlds, failures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from simpart.errors import UserError
from simpart.program import Program
from simpart.simulation import simulate_plan
from simpart.simulation.limits import critical_path, gains_of, parts_of
from simpart.simulation.stochastic import Disturbances, Failures, compare_steps, goodput, sample_steps
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitCompute, UnitLinks, chain, costs


def program(cuts: list[int], count: int = 4, sd: tuple[float, float] = (0.2, 0.0), **more: float) -> Program:
    graph = chain(4)
    priced = costs(UnitCompute(sd), UnitLinks({"p2p": 1 / 64, "all_reduce": 1 / 64}), **more)
    return simulate_plan(problem(graph, 2 * count, costs=priced), plan(graph, cuts, count)).program


def test_a_shared_factor_cancels_in_a_comparison() -> None:
    """Transfers aside, both plans run the same kernels: their ratio is far surer than their times."""
    one, two = program([4]), program([2, 4, 6])
    steps = sample_steps(one, 2000)
    spread = np.log(np.quantile(steps, 0.95) / np.quantile(steps, 0.05))
    found = compare_steps(one, two)
    low, high = found.ratio_interval
    assert low <= found.ratio <= high and np.log(high / low) < spread / 5
    assert found.probability == 0.0  # four stages are faster in every world


def test_a_plan_is_as_fast_as_itself() -> None:
    found = compare_steps(program([4]), program([4]))
    assert (found.probability, found.ratio, found.ratio_interval) == (0.5, 1.0, (1.0, 1.0))


def test_median_and_spread_are_those_of_the_factor() -> None:
    """One stage: a step is its kernels times one factor exp(N(0, 0.2²))."""
    one = program([])
    steps = sample_steps(one, 4000)
    middle = np.log(steps / np.median(steps))
    assert middle.std() == pytest.approx(0.2, rel=0.05)
    assert np.array_equal(steps, sample_steps(one, 4000)) and not np.array_equal(steps, sample_steps(one, 4000, seed=1))


def test_stragglers_slow_a_step_as_often_as_one_of_its_devices_is_slow() -> None:
    one = program([4], sd=(0.0, 0.0))
    usual = sample_steps(one, 1)[0]
    steps = sample_steps(one, 4000, disturbances=Disturbances(straggler_share=0.1, straggler_factor=2.0))
    assert (steps > usual).mean() == pytest.approx(1 - 0.9**2, abs=0.03)
    assert steps.max() <= 2 * usual
    slow = sample_steps(one, 100, disturbances=Disturbances(link_share=1.0, link_factor=3.0))
    assert set(slow) == {slow[0]} and slow[0] > usual


@pytest.mark.parametrize("given", [{"straggler_share": 1.5}, {"link_factor": 0.5}, {"straggler_share": math.nan}])
def test_impossible_disturbances_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(UserError, match="share must be from 0 to 1"):
        Disturbances(**given)


# --- failures ---------------------------------------------------------------------------------------------------------
def run_through(work: float, interval: float, given: Failures, devices: int, rng: np.random.Generator) -> float:
    """Seconds until `work` seconds of work are kept, failure by failure."""
    now, done = 0.0, 0.0
    until = rng.exponential(given.device_mtbf_s / devices)
    while done < work:
        need = interval + given.checkpoint_s
        if until >= need:
            now, done, until = now + need, done + interval, until - need
            continue
        now += until
        until = rng.exponential(given.device_mtbf_s / devices)
        while until < given.restart_s:  # fails again while coming back
            now += until
            until = rng.exponential(given.device_mtbf_s / devices)
        now, until = now + given.restart_s, until - given.restart_s
    return now


def test_goodput_is_that_of_a_run_failure_by_failure() -> None:
    given, devices = Failures(device_mtbf_s=4e5, checkpoint_s=20.0, restart_s=60.0), 100
    found = goodput(2.0, devices, given)
    rng = np.random.default_rng(0)
    took = run_through(4e6, found.interval_s, given, devices, rng)
    assert 4e6 / took == pytest.approx(found.fraction, rel=0.01)
    assert found.step_s == pytest.approx(2.0 / found.fraction)


def test_no_other_interval_is_better() -> None:
    given = Failures(device_mtbf_s=1e6, checkpoint_s=30.0, restart_s=100.0)
    found = goodput(1.0, 500, given)
    machine = 1e6 / 500

    def stretch(interval: float) -> float:
        return machine * math.exp(100 / machine) * math.expm1((interval + 30) / machine) / interval

    best = min(stretch(x) for x in np.linspace(found.interval_s / 3, 3 * found.interval_s, 2001).tolist())
    assert 1 / found.fraction == pytest.approx(best, rel=1e-4)
    assert found.interval_s == pytest.approx(math.sqrt(2 * 30 * machine), rel=0.1)  # Young's


def test_rare_failures_cost_little_and_frequent_ones_everything() -> None:
    assert goodput(1.0, 1, Failures(device_mtbf_s=1e12, checkpoint_s=1.0, restart_s=1.0)).fraction > 0.999
    hopeless = goodput(1.0, 10**6, Failures(device_mtbf_s=1e5, checkpoint_s=100.0, restart_s=1.0))
    assert hopeless.fraction == 0.0 and hopeless.step_s == math.inf
    with pytest.raises(UserError, match="must be positive"):
        Failures(device_mtbf_s=0.0, checkpoint_s=1.0, restart_s=1.0)
    with pytest.raises(UserError, match="restart: the seconds must be at least 0 and finite, got inf; try 600"):
        Failures(device_mtbf_s=1e8, checkpoint_s=1.0, restart_s=float("inf"))


# --- limits -----------------------------------------------------------------------------------------------------------
def test_what_one_per_cent_buys_is_what_the_critical_path_holds() -> None:
    one = program([2, 4, 6], action_overhead_s=0.125, step_overhead_s=2.0)
    result = simulate_plan_of(one)
    parts = parts_of(one)
    np.testing.assert_allclose(sum(parts.values()), one.durations.task_s)
    path = one.topology.task_class[critical_path(one, result)]
    step_s = result.makespan_s + 2.0
    gains = gains_of(one)
    for name, found in gains.items():
        on_path = parts[name][path].sum() + (2.0 if name == "overhead" else 0.0)
        assert found["one_percent"] == pytest.approx(on_path / step_s)
        assert found["all"] >= found["one_percent"] - 1e-9 or found["all"] > 0
    assert sum(found["one_percent"] for found in gains.values()) == pytest.approx(1)


def simulate_plan_of(given: Program):  # type: ignore[no-untyped-def]
    from simpart.engines import replay

    return replay(given)[0]


def test_samples_need_spreads() -> None:
    with pytest.raises(UserError, match="how sure its times are"):
        sample_steps(replace(program([4]), spread=None))
