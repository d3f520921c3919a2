"""Golden cases: published or enumerated answers in a JSON file, and the planner that must reproduce each.

A case names its solver by `planner` or `kind`; the table below says which function answers it. A function takes the
case's inputs and returns the same keys as the case's `expected`. It is found by import name when a case asks for it,
since simpart does not import searchers.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simpart.errors import FormatError

__all__ = [
    "SOLVERS",
    "Accepts",
    "AtMost",
    "GoldenCase",
    "Outcome",
    "difference",
    "read_cases",
    "run_case",
    "run_file",
    "summary",
]

SOLVERS: dict[str, str] = {
    "rannc-stage": "simpart.searchers.rannc:solve_stages",
    "rannc-outer": "simpart.searchers.rannc:solve_outer",
    "rannc-lockstep": "simpart.searchers.rannc:solve_lockstep",
    "pipedream": "simpart.searchers.pipedream:solve_golden",
    "alpa-inter-op": "simpart.searchers.alpa:solve_golden",
    "piper": "simpart.searchers.piper:solve_golden",
    "schedule": "simpart.testing.schedules:solve_schedule",
    "zero-bubble-heuristic": "simpart.testing.schedules:solve_zero_bubble",
    "interval": "simpart.testing.tdl_golden:solve_interval",
    "interval_symbolic": "simpart.testing.tdl_golden:solve_interval_symbolic",
    "tdl_strategies": "simpart.testing.tdl_golden:solve_strategies",
    "op_strategy_table": "simpart.testing.tdl_golden:solve_table",
    "conversion_one_step": "simpart.testing.conversion_golden:solve_one_step",
    "conversion_two_step": "simpart.testing.conversion_golden:solve_two_steps",
    "mlp_partition": "simpart.testing.tofu_golden:solve_mlp",
    "strategy_graph": "simpart.testing.rhino_golden:solve_strategy_graph",
    "strategy_graph_memory": "simpart.testing.rhino_golden:solve_strategy_graph",
    "rediscovery": "simpart.testing.rhino_golden:solve_strategy_graph",
    "rediscovery_memory": "simpart.testing.rhino_golden:solve_strategy_graph",
    "pipeline_stage_ilp": "simpart.testing.rhino_golden:solve_staging",
    "pipeline_schedule": "simpart.testing.rhino_golden:solve_list_schedule",
    "pipeline_evaluator": "simpart.testing.rhino_golden:solve_evaluator",
    "inter_op_dp": "simpart.testing.rhino_golden:solve_inter_op",
}

RELATIVE_TOLERANCE = 1e-9
# Plans may tie, so they are compared only where the case says that the optimum is unique; the others describe ties.
_PLAN_KEYS = {"plan", "config", "optimal_plan", "reference_recursion"}
_DESCRIPTIONS = {"plan_unique", "equally_good", "rule", "members", "regions", "note", "hand_check"}
_DESCRIPTIONS |= {"checked_by", "closed_form", "note", "plan_in_words", "tolerance"}


class AtMost(float):
    """An answer that may be less than what is expected: a heuristic's published cost met or beaten."""


@dataclass(frozen=True, slots=True)
class Accepts:
    """An answer of several: `fault` says in words what is wrong with the expected one, nothing if it is as good."""

    fault: Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCase:
    """One case of a file: `solver` is its planner or kind.

    Solvers find `data_folders`, where published profiles may lie, among the inputs.
    """

    id: str
    solver: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    tolerance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one case went; `detail` says why it failed or was skipped."""

    id: str
    status: Literal["passed", "FAILED", "skipped"]
    detail: str = ""

    def line(self) -> str:
        """`ID passed`, `ID FAILED: …` or `ID skipped: …`."""
        return f"{self.id} {self.status}" + (f": {self.detail}" if self.detail else "")


def read_cases(path: Path) -> list[GoldenCase]:
    """Read a file of golden cases; raises FormatError in one line for anything that is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; give a golden-case file"
        ) from error
    if not text.strip():
        raise FormatError(f"{path} is empty; give a golden-case file (JSON)")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}; give a golden-case file") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path} holds no golden cases: its top level must be an object with schema and cases")
    name = document.get("schema", document.get("schema_version"))
    if name == "pipeline-planner-golden/1":
        key = "planner"
    elif type(name) is int and name == 1:
        key = "kind"
    else:
        raise FormatError(f"{path} has schema {name!r}; known: 'pipeline-planner-golden/1', schema_version 1")
    cases = document.get("cases")
    if not isinstance(cases, list):
        raise FormatError(f"{path} holds no golden cases: 'cases' must be a list")
    return [_read_case(path, number, case, key) for number, case in enumerate(cases)]


def _read_case(path: Path, number: int, case: Any, key: str) -> GoldenCase:
    fields = {"id": str, key: str, "inputs": dict, "expected": dict}
    for field, kind in fields.items():
        if not isinstance(case, dict) or not isinstance(case.get(field), kind):
            raise FormatError(
                f"{path}: case {number} must have {field!r} of JSON type {'string' if kind is str else 'object'}"
            )
    tolerance = case.get("tolerance")
    if tolerance is None:
        tolerance = RELATIVE_TOLERANCE
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < math.inf:
        raise FormatError(f"{path}: case {number} has tolerance {tolerance!r}; it must be a number >= 0")
    inputs = {"data_folders": _data_folders(path), **case["inputs"]}
    return GoldenCase(
        id=case["id"], solver=case[key], inputs=inputs, expected=case["expected"], tolerance=float(tolerance)
    )


def _data_folders(path: Path) -> list[str]:
    """Where published profiles are looked for: beside the folder of golden cases, then beside the repository."""
    repository = Path(__file__).resolve().parents[2]
    places = path.resolve().parent / "../../data", repository / "../shared/data"
    return [str(place / "planner_profiles") for place in places]


def run_case(case: GoldenCase) -> Outcome:
    """Solve one case and compare; an exception inside a solver fails the case, not the run; absent data skips it."""
    target = SOLVERS.get(case.solver)
    if target is None:
        return Outcome(id=case.id, status="skipped", detail=f"no solver for {case.solver!r} yet")
    module, _, function = target.partition(":")
    try:
        solve: Callable[[dict[str, Any]], dict[str, Any]] = getattr(importlib.import_module(module), function)
        answer = solve(case.inputs)
    except FileNotFoundError as error:
        return Outcome(id=case.id, status="skipped", detail=" ".join(str(error).split()))
    except KeyError as error:
        return Outcome(id=case.id, status="FAILED", detail=f"the inputs have no {error}")
    except Exception as error:
        return Outcome(id=case.id, status="FAILED", detail=f"{type(error).__name__}: {' '.join(str(error).split())}")
    found = difference(case.expected, answer, case.tolerance)
    return Outcome(id=case.id, status="FAILED", detail=found) if found else Outcome(id=case.id, status="passed")


def run_file(path: Path | str) -> list[Outcome]:
    """Run every case of one file."""
    return [run_case(case) for case in read_cases(Path(path))]


def summary(outcomes: Sequence[Outcome]) -> str:
    """The last line of a run.

    >>> summary([Outcome(id="a", status="passed")])
    '1 passed, 0 failed, 0 skipped'
    """
    counts = [sum(outcome.status == status for outcome in outcomes) for status in ("passed", "FAILED", "skipped")]
    return f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped"


def difference(expected: Any, answer: Any, tolerance: float, where: str = "") -> str:
    """The first place where an answer departs from what is expected, in words; empty if nowhere.

    Numbers agree within a relative tolerance; plans count only where `plan_unique` is true beside them.

    >>> difference({"value": 2.0, "plan": [1], "plan_unique": False}, {"value": 2.0}, 1e-9)
    ''
    >>> difference({"value": 2.0}, {"value": 2.1}, 1e-9)
    'value is 2.1, expected 2.0'
    """
    name = where or "the answer"
    if isinstance(answer, Accepts):
        found = answer.fault(expected)
        return f"{name}: {found}" if found else ""
    if isinstance(expected, dict):
        if not isinstance(answer, dict):
            return f"{name} is {answer!r}, expected an object"
        ignored = _DESCRIPTIONS if expected.get("plan_unique") is True else _DESCRIPTIONS | _PLAN_KEYS
        for key, value in expected.items():
            if key in ignored:
                continue
            inner = f"{where}.{key}" if where else key
            if key not in answer:
                return f"{inner} is missing, expected {value!r}"
            if found := difference(value, answer[key], tolerance, inner):
                return found
        return ""
    if isinstance(expected, list):
        if not isinstance(answer, list | tuple) or len(answer) != len(expected):
            return f"{name} is {answer!r}, expected {expected!r}"
        parts = (
            difference(e, a, tolerance, f"{where}[{x}]") for x, (e, a) in enumerate(zip(expected, answer, strict=True))
        )
        return next(filter(None, parts), "")
    if _is_number(expected) and _is_number(answer):
        same = math.isclose(expected, answer, rel_tol=tolerance, abs_tol=0.0)
        same = same or (isinstance(answer, AtMost) and answer < expected)
    else:
        same = type(expected) is type(answer) and expected == answer
    return "" if same else f"{name} is {answer!r}, expected {expected!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
