"""The loop around a searcher: budgets, simulation of what it proposes, ranking, logging, interruption."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from simpart.errors import FormatError, Interrupted, UserError
from simpart.files import dump_json
from simpart.plan import Plan
from simpart.plan_format import plan_to_json
from simpart.problem import Problem
from simpart.simulation import Evaluation, evaluate

__all__ = ["Budget", "Candidate", "Control", "Evaluated", "SearchResult", "Searcher", "search"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a searcher proposes. `objective_s` is its own estimate of the step and `bound_s` a lower bound of that
    objective over all plans of the same `family` (such as "3 stages"). Without a plan, `why` says why the family has
    none."""

    plan: Plan | None
    family: str
    objective_s: float = float("inf")
    bound_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a search; None is no limit. Under `candidates` alone a search is deterministic."""

    seconds: float | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise UserError(f"a time budget must be positive, got {self.seconds:g} s; write for example 60s")
        if self.candidates is not None and self.candidates < 1:
            raise UserError(f"a candidate budget must be at least 1, got {self.candidates}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A candidate with its simulated step."""

    candidate: Candidate
    evaluation: Evaluation
    number: int

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Feasible ones first, then by simulated step, then first come."""
        return not self.evaluation.feasible, self.evaluation.step_s, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`ranked` are the distinct candidates, best first; `families` the best of each family, or why it has none.

    `bound_s` bounds the searcher's own objective from below, where the searcher gave one for all plans it may propose.
    """

    searcher: str
    ranked: tuple[Evaluated, ...]
    families: dict[str, Evaluated | str]
    proposed: int
    infeasible: dict[str, int]
    bound_s: float | None
    stopped: Literal["finished", "budget", "interrupted"]
    wall_s: float

    @property
    def best(self) -> Evaluated | None:
        return next((e for e in self.ranked if e.evaluation.feasible), None)


@dataclass(slots=True)
class Control:
    """What the loop offers a searcher while it works. `latest` is the candidate proposed last, once evaluated."""

    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic
    executor: Executor | None = None
    finished: dict[str, Any] = field(default_factory=dict)
    incumbent: Evaluated | None = None
    latest: Evaluated | None = None
    bound_s: float | None = None
    on_report: Callable[[int | None, int | None, float | None], None] | None = None
    on_done: Callable[[str, Any], None] | None = None

    def check(self) -> None:
        """Raise Interrupted when the time budget is used up. Call it at least every 100 ms or so."""
        if self.deadline is not None and self.clock() >= self.deadline:
            raise Interrupted("the time budget is used up")

    def report(self, *, done: int | None = None, total: int | None = None, bound: float | None = None) -> None:
        """Say how far the search is, and a lower bound of its own objective over everything it may still propose."""
        if bound is not None:
            self.bound_s = bound
        if self.on_report is not None:
            self.on_report(done, total, bound)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Apply `function` to all items in order, on the executor where there is one."""
        return map(function, items) if self.executor is None else self.executor.map(function, items)

    def done(self, key: str, value: Any) -> None:
        """Log a finished piece of outer work (JSON), so that a resumed search finds it in `finished`."""
        self.finished[key] = value
        if self.on_done is not None:
            self.on_done(key, value)


class Searcher(Protocol):
    """An algorithm that proposes plans. Budget, simulation, ranking and logging are the loop's."""

    @property
    def name(self) -> str: ...

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]: ...


def search(
    problem: Problem,
    searcher: Searcher,
    budget: Budget = Budget(),
    *,
    seed: int = 0,
    executor: Executor | None = None,
    log: Path | None = None,
    progress: Callable[[int | None, int | None, float | None, Evaluated | None], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Simulate what `searcher` proposes until it ends, a budget is used up, or Ctrl-C; what was found so far is the
    answer.

    `log` is an append-only file of all candidates, one JSON document per line, and of finished outer work, which a
    search with the same log finds again.
    """
    start = clock()
    journal = Journal(log) if log is not None else None
    control = Control(
        deadline=None if budget.seconds is None else start + budget.seconds,
        clock=clock,
        executor=executor,
        finished=dict(journal.finished) if journal else {},
        on_done=journal.done if journal else None,
    )
    if progress is not None:
        control.on_report = lambda done, total, bound: progress(done, total, bound, control.incumbent)
    found: dict[Plan, Evaluated] = {}
    families: dict[str, Evaluated | str] = {}
    infeasible: dict[str, int] = {}
    proposed, stopped = 0, "finished"
    try:
        for candidate in searcher.propose(problem, np.random.default_rng(seed), control):
            proposed += 1
            if candidate.plan is None:
                families.setdefault(candidate.family, candidate.why)
                infeasible[candidate.why] = infeasible.get(candidate.why, 0) + 1
            elif candidate.plan not in found:
                evaluated = Evaluated(
                    candidate=candidate, evaluation=evaluate(problem, [candidate.plan])[0], number=len(found)
                )
                found[candidate.plan] = evaluated
                if journal:
                    journal.candidate(evaluated)
                known = families.get(candidate.family)
                if known is None or isinstance(known, str) or evaluated.rank < known.rank:
                    families[candidate.family] = evaluated
                if not evaluated.evaluation.feasible:
                    reason = evaluated.evaluation.why_infeasible
                    infeasible[reason] = infeasible.get(reason, 0) + 1
                elif control.incumbent is None or evaluated.rank < control.incumbent.rank:
                    control.incumbent = evaluated
            control.latest = found[candidate.plan] if candidate.plan is not None else None
            if budget.candidates is not None and proposed >= budget.candidates:
                stopped = "budget"
                break
            control.check()
    except Interrupted:
        stopped = "budget"
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        if journal:
            journal.close()
    return SearchResult(
        searcher=searcher.name,
        ranked=tuple(sorted(found.values(), key=lambda e: e.rank)),
        families=families,
        proposed=proposed,
        infeasible=infeasible,
        bound_s=control.bound_s,
        stopped=stopped,  # type: ignore[arg-type]
        wall_s=clock() - start,
    )


class Journal:
    """The append-only log of a search: one JSON document per line, synced as it is written. A torn last line is
    dropped."""

    def __init__(self, path: Path) -> None:
        self.finished: dict[str, Any] = {}
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write the log {path}: it is no plain file; give another place")
        try:
            raw = path.read_bytes() if path.exists() else b""
            end = raw.rfind(b"\n") + 1
            for number, line in enumerate(raw[:end].splitlines(), 1):
                try:
                    row = json.loads(line)
                    if "done" in row:
                        self.finished[row["done"]] = row["value"]
                except (ValueError, TypeError) as error:
                    raise FormatError(f"{path}, line {number}: not a search log; give another file to --log") from error
            self._file = path.open("r+b" if path.exists() else "xb")
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror}; give another place") from error

    def candidate(self, evaluated: Evaluated) -> None:
        plan = evaluated.candidate.plan
        assert plan is not None
        content = plan_to_json(plan)
        self._append(
            {
                "candidate": hashlib.sha256(dump_json(content).encode()).hexdigest()[:16],
                "family": evaluated.candidate.family,
                "objective_s": evaluated.candidate.objective_s,
                "feasible": evaluated.evaluation.feasible,
                "step_s": evaluated.evaluation.step_s,
                "plan": content,
            }
        )

    def done(self, key: str, value: Any) -> None:
        self._append({"done": key, "value": value})

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(dump_json(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
