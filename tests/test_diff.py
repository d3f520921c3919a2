"""What differs between plans: every part by itself, predictions that add up, graphs that do not belong together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.cli import main
from simpart.configure import Configuration, configure
from simpart.describe.words import plan_words
from simpart.errors import MismatchError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.plan import Batch, Plan, Stage
from simpart.plan.format import PlanFile, save_plan
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.report.diff import diff_plans, diff_predictions, differing_parts
from simpart.schedule import Schedule
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec


def captured(layers: int = 4, hidden: int = 64) -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=layers, hidden=hidden, heads=4, seq=32, vocab=256)), model="gpt")


@pytest.fixture(scope="module")
def problem() -> Problem:
    cluster = load_cluster("local:4")
    costs = default_costs(cluster, profiles=False)
    return Problem(graph=captured(), training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=16)


def planned(problem: Problem, **settings: Any) -> PlanFile:
    plan = configure(problem, Configuration(**{"pp": 2, "micro_batch": 2, **settings}))
    graph = problem.graph.at(plan.batch.sizes[0][0])
    return PlanFile(plan=plan, training=problem.training, cluster=problem.cluster, graph=graph)


def changed(file: PlanFile, **fields: Any) -> PlanFile:
    return dataclasses.replace(file, plan=dataclasses.replace(file.plan, **fields))


def parts(a: PlanFile, b: PlanFile) -> set[str]:
    return {row.part for row in diff_plans(a, b)}


def test_equal_plans_have_no_differences(problem: Problem) -> None:
    assert diff_plans(planned(problem), planned(problem)) == []
    assert differing_parts(planned(problem).plan, planned(problem).plan) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "gpipe"}, {"schedule"}),
        ({"recompute": "full"}, {"recomputation"}),
        ({"micro_batch": 4}, {"micro-batches", "samples of replicas"}),
        ({"zero": 1}, {"state at rest"}),
        ({"tp": 2}, {"split", "state at rest", "devices", "samples of replicas", "micro-batches"}),
        ({"pp": 4}, {"stages", "ops", "devices", "micro-batches", "samples of replicas"}),
    ],
)
def test_each_setting_shows_in_its_part(problem: Problem, settings: dict[str, Any], expected: set[str]) -> None:
    a, b = planned(problem), planned(problem, **settings)
    assert parts(a, b) == expected
    assert differing_parts(a.plan, b.plan)
    assert plan_words(a.plan) != plan_words(b.plan)


def test_moved_layers_are_named_with_their_stages(problem: Problem) -> None:
    a = planned(problem)
    ops = [stage.ops.indices(a.graph) for stage in a.plan.stages]
    layer = np.array([i for i in ops[1] if a.graph.op_ids[i].startswith("h.2")])
    kept = np.setdiff1d(ops[1], layer)
    from simpart.plan import OpSet

    stages = tuple(
        Stage(ops=OpSet.of(a.graph, part), group=s) for s, part in enumerate((np.union1d(ops[0], layer), kept))
    )
    rows = diff_plans(a, changed(a, stages=stages))
    assert [(row.part, row.a, row.b) for row in rows] == [("ops", "stage 1", "stage 0")]
    assert rows[0].where.startswith(f"{layer.size} ops, h.2")


def test_settings_beside_the_plan_are_told(problem: Problem) -> None:
    a = planned(problem)
    other = dataclasses.replace(a, training=TrainingSpec(optimizer="sgd"), cluster=load_cluster("local:5"))
    assert parts(a, other) == {"recipe", "cluster"}
    uneven = changed(a, batch=Batch(micro_batches=4, sizes=((3, 1), (2, 2))))
    assert {row.where for row in diff_plans(a, uneven)} == {"stage 0"}


def test_other_graphs_are_refused_with_the_first_op_that_differs(problem: Problem) -> None:
    a = planned(problem)
    other = dataclasses.replace(a, graph=captured(layers=5).at(2))
    with pytest.raises(MismatchError, match=r"the graphs differ at op .* \(the other has h\.4"):
        diff_plans(a, other)
    wide = dataclasses.replace(a, graph=captured(hidden=128).at(2))
    with pytest.raises(MismatchError, match=r"differ in the shapes of op"):
        diff_plans(a, wide)


def result_of(problem: Problem, plan: Plan) -> Any:
    return simulate_plan(problem, plan)


@pytest.mark.parametrize("settings", [{"pp": 4}, {"tp": 2}, {"recompute": "full"}, {"schedule": "gpipe"}, {"pp": 1}])
def test_parts_of_the_predicted_difference_add_up(problem: Problem, settings: dict[str, Any]) -> None:
    one, two = (result_of(problem, file.plan) for file in (planned(problem), planned(problem, **settings)))
    found = diff_predictions(one, two)
    assert found["step_s"] == pytest.approx(two.step_s - one.step_s, rel=1e-9)
    assert sum(found["seconds"].values()) == pytest.approx(found["step_s"], abs=1e-9 * one.step_s)
    assert sum(found["memory"].values()) == found["peak_bytes"] == two.peak_bytes - one.peak_bytes
    back = diff_predictions(two, one)
    assert {name: -value for name, value in back["seconds"].items()} == pytest.approx(found["seconds"])


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), out, error


def test_command(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan("a.json", planned(problem))
    save_plan("b.json", planned(problem, schedule="gpipe"))
    a, b = planned(problem), captured(layers=5).at(2)
    save_plan("c.json", PlanFile(
        plan=configure(dataclasses.replace(problem, graph=b), Configuration(pp=2, micro_batch=2)),
        training=a.training, cluster=a.cluster, graph=b,
    ))  # fmt: skip
    code, out, _ = run(capsys, "diff", "a.json", "b.json", "--no-profiles", "--json")
    document = json.loads(out)
    assert code == 0 and not document["equal"]
    assert document["differences"] == [{"part": "schedule", "where": "", "a": "1f1b", "b": "gpipe"}]
    steps = [document[side]["predicted"]["step_s"] for side in "ab"]
    assert document["predicted"]["step_s"] == pytest.approx(steps[1] - steps[0])
    code, out, _ = run(capsys, "diff", "a.json", "b.json", "--no-profiles")
    assert code == 0 and "schedule: 1f1b → gpipe" in out and "step: " in out
    code, out, _ = run(capsys, "diff", "a.json", "a.json")
    assert code == 0 and out == "the plans are equal\n"
    code, out, error = run(capsys, "diff", "a.json", "c.json")
    assert code == 2 and "the graphs differ at op" in error and error.count("\n") == 1
    code, out, error = run(capsys, "diff", "a.json", "missing.json")
    assert code == 2 and "missing.json" in error


def test_words_of_a_plan_are_short_and_say_what_is_uneven(problem: Problem) -> None:
    plan = planned(problem).plan
    assert plan_words(plan) == "2 stages on 2 devices each, 4 × 4 samples, 1f1b"
    explicit = dataclasses.replace(plan, schedule=Schedule(kind="gpipe"))
    assert differing_parts(explicit, plan) == ["gpipe instead of 1f1b"]
