"""Steps in many worlds by one call and by command: distributions, slowdowns, failures, two plans side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from simpart.errors import UserError
from simpart.plan.format import PlanFile, save_plan
from simpart.simulation.stochastic import Disturbances, Failures, goodput, sample_steps
from simpart.simulation.worlds import worlds_of
from simpart.training import TrainingSpec
from tests.test_cli import simpart
from tests.test_lowering import plan, problem
from tests.test_stochastic import program
from tests.toy_graphs import chain


def test_worlds_are_the_samples_and_say_how_they_spread() -> None:
    one = program([2])
    steps = sample_steps(one, 500, 7)
    found = worlds_of(one, 500, 7)
    assert found.steps.mean_s == steps.mean() and found.steps.interval_s == tuple(np.quantile(steps, [0.05, 0.95]))
    assert found.steps.slowdown == 1 and found.against is None and found.steps.goodput is None
    assert worlds_of(one, 500, 7) == found and worlds_of(one, 500, 8) != found


def test_slow_devices_and_links_slow_the_median_by_their_factor() -> None:
    one = program([2, 4, 6], sd=(0.0, 0.0))
    every = Disturbances(straggler_share=1.0, straggler_factor=2.0, link_share=1.0, link_factor=2.0)
    assert worlds_of(one, 10, disturbances=every).steps.slowdown == pytest.approx(2.0)


def test_a_slow_device_slows_its_group_in_every_plan() -> None:
    """One group of all devices meets the worlds that four groups meet: the same devices are slow."""
    one, four = program([], sd=(0.0, 0.0)), program([2, 4, 6], sd=(0.0, 0.0))
    given = Disturbances(straggler_share=0.2, straggler_factor=3.0)
    slow = [sample_steps(p, 400, 3, given) > sample_steps(p, 400, 3)[0] * 1.0001 for p in (one, four)]
    assert slow[0].any() and not (slow[0] & ~slow[1]).any()  # the first device is in both


def test_failures_stretch_both_plans_by_their_own_machine() -> None:
    a, b = program([2, 4, 6], sd=(0.0, 0.0)), program([], sd=(0.0, 0.0))
    given = Failures(device_mtbf_s=1e5, checkpoint_s=20.0, restart_s=60.0)
    found = worlds_of(a, 10, failures=given, against=b)
    assert found.against is not None and a.facts is not None and b.facts is not None
    plain = worlds_of(a, 10, against=b).against
    assert plain is not None
    devices = [sum(map(len, p.facts.devices)) for p in (a, b) if p.facts is not None]
    fractions = [goodput(1.0, n, given).fraction for n in devices]
    assert found.against.ratio == pytest.approx(plain.ratio * fractions[0] / fractions[1])
    assert found.against.probability == plain.probability == 1.0


@pytest.mark.parametrize("samples", [0, -1, 10**9])
def test_samples_are_a_sensible_number(samples: int) -> None:
    with pytest.raises(UserError, match="samples must be from 1"):
        worlds_of(program([2]), samples)


def test_plans_that_never_finish_cannot_be_compared() -> None:
    given = Failures(device_mtbf_s=1.0, checkpoint_s=1e4, restart_s=1.0)
    with pytest.raises(UserError, match="never finishes a step"):
        worlds_of(program([2]), 10, failures=given, against=program([]))
    alone = worlds_of(program([2]), 10, failures=given).to_json()
    assert alone["goodput"]["step_s"] is None and alone["goodput"]["fraction"] == 0.0
    json.dumps(alone, allow_nan=False)


# --- by command -------------------------------------------------------------------------------------------------------
@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    graph, names = chain(4), ("a.json", "b.json")
    given = problem(graph, 8)
    for name, cuts in zip(names, ([2, 4, 6], [4]), strict=True):
        file = PlanFile(plan=plan(graph, cuts, 4), training=TrainingSpec(), cluster=given.cluster, graph=graph)
        save_plan(tmp_path / name, file)
    return str(tmp_path / names[0]), str(tmp_path / names[1])


def test_the_command_says_what_worlds_say(files: tuple[str, str]) -> None:
    run = simpart(
        "simulate", files[0], "--samples", "200", "--straggler", "0.1:2", "--link-degradation", "0.1:3",
        "--mtbf", "5y", "--checkpoint-s", "60", "--against", files[1], "--json",
    )  # fmt: skip
    assert run.status == 0, run.err
    found = json.loads(run.out)["stochastic"]
    assert found["samples"] == 200 and found["straggler"] == {"share": 0.1, "factor": 2.0}
    assert found["interval_s"][0] <= found["median_s"] <= found["interval_s"][1]
    assert found["failures"] == {"device_mtbf_s": 5 * 365.25 * 86400, "checkpoint_s": 60.0, "restart_s": 60.0}
    assert 0 < found["goodput"]["fraction"] < 1 and found["goodput"]["step_s"] > found["mean_s"]
    assert 0 <= found["against"]["probability"] <= 1 and math.isfinite(found["against"]["ratio"])
    again = simpart("simulate", files[0], "--samples", "200", "--straggler", "0.1:2")
    assert again.status == 0 and "in 200 worlds" in again.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--straggler", "often"], "share and a factor"),
        (["--straggler", "2:2"], "share must be from 0 to 1"),
        (["--mtbf", "soon", "--checkpoint-s", "5"], "--mtbf is a time"),
        (["--mtbf", "5y"], "needs --checkpoint-s"),
        (["--mtbf", "5y", "--checkpoint-s", "nan"], "must be positive"),
        (["--checkpoint-s", "5"], "give --mtbf too"),
        (["--against", "nowhere.json"], "cannot read"),
    ],
)
def test_bad_options_are_answered_in_one_line(files: tuple[str, str], options: list[str], words: str) -> None:
    run = simpart("simulate", files[0], *options)
    assert run.status == 2 and words in run.err and run.err.count("\n") == 1
