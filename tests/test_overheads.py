"""Where kernels are short the host decides: actions wait for their launches, in both grains and for all plans alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.cost import Estimate, SignatureTable
from simpart.costmodels.learned import _overheads
from simpart.costmodels.learned._overheads import (
    GRID_S,
    HostRuns,
    at_launch_times,
    compiled_launch,
    fit_host,
    host_words,
    pooled,
    predicted_s,
    shipped_overheads,
    told_by_one,
)
from simpart.engines import compiled
from simpart.errors import FormatError
from simpart.files import write_document
from simpart.hardware import Device, load_cluster
from simpart.lowering import lower, lowering_of
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.simulation import evaluate, simulate, simulate_plan
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitCompute, chain, costs, device

CUTS = [4, 8, 12]


def with_host(launch_s: float, log_sd: float = 0.0, kind: str = "gpu", **more: Any) -> Problem:
    """Kernels of 1 s each, two layers a stage."""
    priced = replace(costs(more.pop("compute", None)), eager_launch_s=launch_s, launch_log_sd=log_sd, **more)
    return problem(chain(8), 8, [replace(device(), kind=kind)] * 8, costs=priced)  # type: ignore[arg-type]


def step_s(given: Problem, cuts: list[int] = CUTS) -> float:
    return simulate_plan(given, plan(given.graph, cuts, 4)).step_s


def launches_of(given: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of each class of task."""
    return np.array([cost.launches for cost in lowering_of(given).cost(plan(given.graph, CUTS, 4)).costs])


def test_a_step_is_as_long_as_its_launches_where_they_take_longer() -> None:
    assert step_s(with_host(1.5), []) == pytest.approx(1.5 * step_s(with_host(0.0), []))


def test_copies_to_the_next_stage_are_launched_too() -> None:
    """Stages of 4 kernels forward; all but the last copy one value."""
    assert launches_of(with_host(0.0))[[0, 4, 8, 12]].tolist() == [5, 5, 5, 4]


def test_launches_shorter_than_kernels_do_not_show() -> None:
    assert step_s(with_host(0.75)) == step_s(with_host(0.0))


def test_a_cpu_runs_what_it_launches() -> None:
    assert step_s(with_host(1.5, kind="cpu")) == step_s(with_host(0.0))


def test_each_mode_has_its_own_launches() -> None:
    priced = replace(costs(), eager_launch_s=2.0, compiled_launch_s=0.5)
    gpu = replace(device(), kind="gpu")
    assert (priced.launch_s("eager", gpu), priced.launch_s("compiled", gpu)) == (2.0, 0.5)


@pytest.mark.parametrize("launch_s", [0.0, 0.75, 1.5, 4.0])
def test_grains_and_ways_to_ask_agree(launch_s: float) -> None:
    given = with_host(launch_s, action_overhead_s=0.25)
    one = plan(given.graph, CUTS, 4)
    (found,) = evaluate(given, [one])
    assert found.step_s == simulate_plan(given, one).step_s
    assert simulate(lower(given, one, "fine")).step_s == pytest.approx(found.step_s)


class LongForward(UnitCompute):
    """Activations take 3 s forward, all other kernels 1 s."""

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        found = super().estimate(table, device)
        long = [signature.target == "toy.act.F" for signature in table.signatures]
        return replace(found, mean_s=np.where(long, 3.0, found.mean_s))


@pytest.mark.parametrize("launch_s", [0.0, 1.5, 2.0, 3.0, 4.0])
def test_what_a_forward_hides_its_backward_does_not_wait_for(launch_s: float) -> None:
    """`max(Fc + Bc, max(Fc, Fg) + Bg)` of host and device times per micro-batch; forward is 16 launches and 32 s."""
    given = with_host(launch_s, compute=LongForward())
    costed = lowering_of(given).cost(plan(given.graph, [], 4))
    forward_c, backward_c = (cost.launches * launch_s for cost in costed.costs[:2])
    free = lowering_of(with_host(0.0, compute=LongForward())).cost(plan(given.graph, [], 4))
    forward_g, backward_g = free.seconds[:2]
    expected = max(forward_c + backward_c, max(forward_c, forward_g) + backward_g)
    assert step_s(given, []) == pytest.approx(4 * expected)
    assert simulate(lower(given, plan(given.graph, [], 4), "fine")).step_s == pytest.approx(4 * expected)


def test_durations_tell_the_step_at_any_launch_time() -> None:
    """What benchmarks/overheads.py relies on."""
    given = with_host(0.0)
    lowering, one = lowering_of(given), plan(given.graph, CUTS, 4)
    costed, times = lowering.cost(one), np.array([0.5, 1.5, 3.0])
    task_s = at_launch_times(costed.seconds, launches_of(given), len(one.stages), times)
    steps = compiled.makespans(lowering.topology(one, costed, "tasks"), task_s)
    assert steps == pytest.approx([step_s(with_host(float(t))) for t in times])


def test_waiting_counts_as_overhead_and_is_only_so_sure() -> None:
    sure, unsure = (with_host(1.5, log_sd) for log_sd in (0.0, 0.8))
    results = [simulate_plan(given, plan(given.graph, [], 4)) for given in (sure, unsure)]
    assert results[0].limits["overhead"] == pytest.approx(results[0].limits["compute"] / 2)
    widths = [result.interval_s[1] - result.interval_s[0] for result in results]
    assert widths[0] == 0 < widths[1]


# --- the fit ----------------------------------------------------------------------------------------------------------
def runs_at(launch_s: float, per_step_s: float = 0.0) -> HostRuns:
    """Steps of 10 launches and 1 ms of kernels, and of 1000 and 5 ms, on a host that takes `launch_s`."""
    launches, kernels_s = np.array([10.0, 1000.0, 300.0]), np.array([1e-3, 5e-3, 2e-3])
    steps = np.maximum(kernels_s[:, None], launches[:, None] * GRID_S)
    measured = np.maximum(kernels_s, launches * launch_s) + per_step_s
    return HostRuns(host="here", source="us", measured_s=measured, steps_s=steps)


def test_a_host_is_told_from_its_steps() -> None:
    launch_s, per_step_s = fit_host(runs_at(60e-6))
    assert per_step_s == 0.0 and launch_s == pytest.approx(60e-6, rel=0.05)
    launch_s, per_step_s = fit_host(runs_at(60e-6, 0.02), per_step=True)
    assert launch_s == pytest.approx(60e-6, rel=0.1) and per_step_s == pytest.approx(0.02, abs=0.003)


def test_sources_weigh_alike_whatever_their_hosts() -> None:
    launch_s, log_sd = pooled({"one": [1e-5, 1e-5, 1e-5], "other": [4e-5]})
    assert launch_s == pytest.approx(2e-5)
    assert log_sd == pytest.approx(np.log(4) / np.sqrt(2))


def test_between_grid_points_steps_are_straight() -> None:
    runs = runs_at(0.0)
    middle = float(GRID_S[7] + GRID_S[8]) / 2
    assert predicted_s(runs, middle) == pytest.approx((runs.steps_s[:, 7] + runs.steps_s[:, 8]) / 2)
    with pytest.raises(ValueError, match="within"):
        predicted_s(runs, 1.0)


def test_default_costs_know_hosts_of_gpus_only() -> None:
    shipped = shipped_overheads()
    assert default_costs(load_cluster("dgx-a100"), profiles=False).eager_launch_s == shipped.eager_launch_s > 0
    assert default_costs(load_cluster("local:2"), profiles=False).eager_launch_s == 0
    assert "eager" in host_words(shipped) and "compiled not known" in host_words(shipped)


def test_compiled_launches_lie_between_the_driver_and_eager_ones() -> None:
    shipped, known = shipped_overheads(), replace(shipped_overheads(), compiled_launch_s=7e-6)
    middle_s, log_sd = compiled_launch(shipped, 4e-6)
    ends = middle_s * np.exp(np.array([-1.6449, 1.6449]) * log_sd)
    assert ends == pytest.approx([4e-6, shipped.eager_launch_s])
    assert compiled_launch(known, 4e-6)[0] == 7e-6
    assert compiled_launch(shipped, 1.0)[0] == shipped.eager_launch_s
    costs_there = default_costs(load_cluster("dgx-a100"), profiles=False)
    assert 0 < costs_there.compiled_launch_s < costs_there.eager_launch_s


def test_one_run_tells_its_host() -> None:
    told = told_by_one(runs_at(60e-6))
    assert told.error < 0.05 and told.log_sd < 0.05
    noisy = runs_at(60e-6)
    told = told_by_one(replace(noisy, measured_s=noisy.measured_s * np.array([1.0, 1.5, 1.0])))
    assert told.log_sd > 0.1 and told.low <= told.error <= told.high


def test_a_shipped_file_that_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "overheads.json"
    content = {"eager_launch_s": -1.0, "compiled_launch_s": None, "step_overhead_s": 0.0, "launch_log_sd": 0.5,
               "known_log_sd": 0.2}  # fmt: skip
    write_document(path, _overheads.KIND, _overheads.VERSION, content)
    monkeypatch.setattr(_overheads, "SHIPPED_OVERHEADS", path)
    shipped_overheads.cache_clear()
    with pytest.raises(FormatError, match="eager_launch_s"):
        shipped_overheads()
    shipped_overheads.cache_clear()
