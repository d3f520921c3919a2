"""The golden-case runner: what passes, fails and is skipped, and files that are not golden cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.errors import FormatError
from simpart.testing.__main__ import main
from simpart.testing.golden import difference, read_cases, run_file
from simpart.testing.schedules import replay_schedule, solve_schedule

STAGES = {
    "f": [3, 1, 2], "g": [6, 2, 4], "w": [0, 0, 0], "a": [0, 0, 0], "out": [0, 0, 0], "c": 0.0, "bw": None, "M": None,
    "S": 2, "D": 2, "R": 1, "MB": 1, "BS": 1, "power_of_two_replicas": True,
}  # fmt: skip
BEST = {"feasible": True, "value": 9.0, "plan": [[0, 1, 1], [1, 3, 1]], "plan_unique": True}


def case(name: str = "one", planner: str = "rannc-stage", **changes: Any) -> dict[str, Any]:
    return {"id": name, "planner": planner, "inputs": STAGES, "expected": BEST, **changes}


def write(folder: Path, *cases: dict[str, Any]) -> Path:
    path = folder / "cases.json"
    path.write_text(json.dumps({"schema": "pipeline-planner-golden/1", "models": {}, "cases": list(cases)}))
    return path


def test_each_case_is_passed_failed_or_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        case("right"),
        case("wrong", expected=BEST | {"value": 10.0}),
        case("other", planner="no-such"),
        case("broken", inputs={"f": [1]}),
    )
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "right passed",
        "wrong FAILED: value is 9.0, expected 10.0",
        "other skipped: no solver for 'no-such' yet",
        "broken FAILED: the inputs have no 'S'",
        "1 passed, 2 failed, 1 skipped",
    ]


def test_exit_status_is_zero_when_none_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, case(), case(planner="no-such"))
    assert main([str(path), str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 0 failed, 2 skipped"


def test_plans_are_compared_only_where_unique(tmp_path: Path) -> None:
    other = BEST | {"plan": [[0, 2, 1], [2, 3, 1]]}
    outcomes = run_file(write(tmp_path, case("a", expected=other), case("b", expected=other | {"plan_unique": False})))
    assert [outcome.line() for outcome in outcomes] == ["a FAILED: plan[0][1] is 1, expected 2", "b passed"]


def test_values_are_compared_relatively_with_the_tolerance_of_the_case(tmp_path: Path) -> None:
    near = BEST | {"value": 9.0 * (1 + 1e-6)}
    outcomes = run_file(write(tmp_path, case("a", expected=near), case("b", expected=near, tolerance=1e-5)))
    assert [outcome.status for outcome in outcomes] == ["FAILED", "passed"]
    assert difference(1e-12, 1.1e-12, 1e-9) == "the answer is 1.1e-12, expected 1e-12"
    assert difference({"feasible": True}, {"feasible": 1}, 1e-9) == "feasible is 1, expected True"
    assert difference({"x": None}, {}, 1e-9) == "x is missing, expected None"


def test_an_infeasible_case_is_an_answer(tmp_path: Path) -> None:
    none = {"feasible": False, "value": None, "plan": None, "plan_unique": None}
    assert (
        run_file(write(tmp_path, case(inputs=STAGES | {"M": 1, "w": [9, 9, 9]}, expected=none)))[0].status == "passed"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[]", "top level must be an object"),
        ('{"schema": "pipeline-planner-golden/2", "cases": []}', "has schema 'pipeline-planner-golden/2'; known"),
        ('{"schema_version": 2, "cases": []}', "has schema 2; known"),
        ('{"schema_version": true, "cases": []}', "has schema True; known"),
        ('{"schema_version": 1}', "'cases' must be a list"),
        ('{"schema_version": 1, "cases": [{"id": "a", "inputs": {}, "expected": {}}]}', "case 0 must have 'kind'"),
        ('{"schema_version": 1, "cases": [3]}', "case 0 must have 'id'"),
    ],
)
def test_files_of_another_kind_are_refused_in_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=message.replace("[", r"\[")):
        read_cases(path)
    assert main([str(path)]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1 and message in streams.err


def test_missing_file_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simpart.testing", str(write(tmp_path, case()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "one passed\n1 passed, 0 failed, 0 skipped\n")


def test_schedules_agree_with_their_closed_forms() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        stages, micro_batches = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        f, b = rng.integers(1, 9, stages).tolist(), rng.integers(1, 19, stages).tolist()
        latency = float(rng.choice([0.0, 0.5, 2.0]))
        answer = solve_schedule({"f": f, "b": b, "M": micro_batches, "latency": latency})
        assert answer["gpipe"] == (
            sum(f) + sum(b) + (micro_batches - 1) * (max(f) + max(b)) + 2 * (stages - 1) * latency
        )
        assert answer["one_f_one_b"] >= answer["lower_bound"]
        assert answer["peak_in_flight_gpipe"] == [micro_batches] * stages
        assert answer["peak_in_flight_1f1b"] == [min(stages - s, micro_batches) for s in range(stages)]


def test_equal_stages_take_the_textbook_time() -> None:
    for kind in ("gpipe", "1f1b"):
        assert replay_schedule(kind, [1.0] * 4, [2.0] * 4, 8, 0.0)[0] == (8 + 4 - 1) * 3.0


def test_with_visible_latency_gpipe_can_beat_one_f_one_b() -> None:
    answer = solve_schedule({"f": [3, 3, 3], "b": [3, 3, 3], "M": 9, "latency": 2})
    assert answer["gpipe"] < answer["one_f_one_b"]
