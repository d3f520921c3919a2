"""The loop around a searcher: budgets, simulation of what it proposes, ranking, bounds, logging, interruption."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from simpart.errors import Interrupted, UserError
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searching.floor import step_floor_s
from simpart.searching.log import SearchLog, plan_digest
from simpart.searching.workers import Evaluator
from simpart.simulation import Evaluation

__all__ = [
    "Budget", "Candidate", "Control", "Evaluated", "Progress", "Proposal", "SearchResult", "Searcher", "floor_gap",
    "gap", "search",
]  # fmt: skip

T = TypeVar("T")
R = TypeVar("R")
Stopped = Literal["finished", "budget", "interrupted"]


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


Proposal = Candidate | Sequence[Candidate]
"""One candidate, or several that are simulated together: on the executor, where there is one."""


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
    """A candidate with its simulated step. `at_s`: seconds of the search until then."""

    candidate: Candidate
    evaluation: Evaluation
    number: int
    at_s: float = 0.0

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Feasible ones first, then by simulated step, then first come."""
        return not self.evaluation.feasible, self.evaluation.step_s, self.number


def gap(value_s: float | None, bound_s: float | None) -> float | None:
    """By which share of itself a value may at most be too high; None where there is no value or no bound.

    >>> gap(2.0, 1.5)
    0.25
    """
    if value_s is None or bound_s is None or not math.isfinite(value_s) or value_s <= 0:
        return None
    return max(0.0, 1 - bound_s / value_s)


def floor_gap(best: Evaluated | None, floor_s: float | None) -> float | None:
    """The gap of a plan's simulated step; None for one that splits kernels, of which the floor says nothing."""
    if best is None or best.candidate.plan is None or best.candidate.plan.shardings:
        return None
    return gap(best.evaluation.step_s, floor_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is. `bound_s` and `gap` are of the searcher's own objective, `floor_s` of the simulated step."""

    done: int | None
    total: int | None
    proposed: int
    best: Evaluated | None
    bound_s: float | None
    gap: float | None
    floor_s: float | None

    @property
    def floor_gap(self) -> float | None:
        return floor_gap(self.best, self.floor_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`ranked` are the distinct candidates, best first; `families` the best of each family, or why it has none.

    `objective` names what the searcher minimises; `least_s` is its least value among the candidates, and `bound_s` the
    searcher's bound of it over all plans it may propose, if it gave one. `floor_s` bounds the simulated step.
    """

    searcher: str
    objective: str
    ranked: tuple[Evaluated, ...]
    families: dict[str, Evaluated | str]
    proposed: int
    resumed: int
    infeasible: dict[str, int]
    least_s: float | None
    bound_s: float | None
    floor_s: float | None
    stopped: Stopped
    wall_s: float

    @property
    def best(self) -> Evaluated | None:
        return next((e for e in self.ranked if e.evaluation.feasible), None)

    @property
    def why_none(self) -> str:
        """Why no plan is the best; empty where one is."""
        if self.best is not None:
            return ""
        if self.infeasible:
            return next(iter(self.infeasible))
        return {
            "budget": "the time budget was too short: it ended before any plan was evaluated; allow more time",
            "interrupted": "the search was interrupted before any plan was evaluated",
            "finished": "the searcher proposed no plan",
        }[self.stopped]

    @property
    def gap(self) -> float | None:
        """Of the searcher's own objective: how far the least candidate may be from the least of all."""
        return gap(self.least_s, self.bound_s)

    @property
    def floor_gap(self) -> float | None:
        """Of the simulated step: by which share plans that keep kernels whole can at most beat the best candidate."""
        return floor_gap(self.best, self.floor_s)


@dataclass(slots=True)
class Control:
    """What the loop offers a searcher while it works. `latest` is the candidate proposed last, `results` all of the
    last proposal, once evaluated (None for one without a plan); `incumbent` is the best so far."""

    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic
    executor: Executor | None = None
    finished: dict[str, Any] = field(default_factory=dict)
    incumbent: Evaluated | None = None
    latest: Evaluated | None = None
    results: tuple[Evaluated | None, ...] = ()
    bound_s: float | None = None
    stop: bool = False
    on_report: Callable[[int | None, int | None], None] | None = None
    on_done: Callable[[str, Any], None] | None = None

    def check(self) -> None:
        """Raise Interrupted when the time budget is used up or Ctrl-C was pressed. Call it at least every 100 ms or
        so."""
        if self.stop:
            raise Interrupted("stopped by the user")
        if self.deadline is not None and self.clock() >= self.deadline:
            raise Interrupted("the time budget is used up")

    def report(self, *, done: int | None = None, total: int | None = None, bound: float | None = None) -> None:
        """Say how far the search is, and a lower bound of its own objective over everything it may propose."""
        if bound is not None:
            self.bound_s = bound
        if self.on_report is not None:
            self.on_report(done, total)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Apply `function` to all items in order, on the executor where there is one."""
        return map(function, items) if self.executor is None else self.executor.map(function, items)

    def done(self, key: str, value: Any) -> None:
        """Log a finished piece of outer work (JSON), so that a resumed search finds it in `finished`."""
        self.finished[key] = value
        if self.on_done is not None:
            self.on_done(key, value)


class Searcher(Protocol):
    """An algorithm that proposes plans. Budget, simulation, ranking and logging are the loop's.

    It may have an attribute `objective`: what `Candidate.objective_s` and its bound are, in words.
    """

    @property
    def name(self) -> str: ...

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]: ...


@dataclass(slots=True)
class _Search:
    """What a running search has found."""

    evaluator: Evaluator
    control: Control
    log: SearchLog | None
    start: float
    found: dict[Plan, Evaluated] = field(default_factory=dict)
    families: dict[str, Evaluated | str] = field(default_factory=dict)
    infeasible: dict[str, int] = field(default_factory=dict)
    proposed: int = 0
    resumed: int = 0
    least_s: float | None = None

    def take(self, batch: Sequence[Candidate]) -> None:
        """Simulate the plans of a proposal that are new, and count all."""
        fresh = list(dict.fromkeys(c.plan for c in batch if c.plan is not None and c.plan not in self.found))
        digests = {plan: plan_digest(plan) for plan in fresh} if self.log is not None else {}
        known = {p: self.log.known[d] for p, d in digests.items() if d in self.log.known} if self.log else {}
        self.resumed += len(known)
        unknown = [plan for plan in fresh if plan not in known]
        known.update(zip(unknown, self.evaluator(unknown), strict=True))
        self.control.results = tuple(self._record(candidate, known, digests) for candidate in batch)
        self.control.latest = self.control.results[-1] if batch else None

    def _record(
        self, candidate: Candidate, known: dict[Plan, Evaluation], digests: dict[Plan, str]
    ) -> Evaluated | None:
        self.proposed += 1
        plan = candidate.plan
        if plan is None:
            self.families.setdefault(candidate.family, candidate.why)
            self._refuse(candidate.why)
            if self.log is not None:
                self.log.candidate(candidate, None, "", self.proposed)
            return None
        if math.isfinite(candidate.objective_s):
            least_s = candidate.objective_s if self.least_s is None else min(self.least_s, candidate.objective_s)
            self.least_s = least_s
        if plan in self.found:
            return self.found[plan]
        number, at_s = len(self.found), self.control.clock() - self.start
        evaluated = Evaluated(candidate=candidate, evaluation=known[plan], number=number, at_s=at_s)
        self.found[plan] = evaluated
        if self.log is not None:
            self.log.candidate(candidate, evaluated.evaluation, digests[plan], number)
        family = self.families.get(candidate.family)
        if family is None or isinstance(family, str) or evaluated.rank < family.rank:
            self.families[candidate.family] = evaluated
        if not evaluated.evaluation.feasible:
            self._refuse(evaluated.evaluation.why_infeasible)
        elif self.control.incumbent is None or evaluated.rank < self.control.incumbent.rank:
            self.control.incumbent = evaluated
        return evaluated

    def _refuse(self, why: str) -> None:
        self.infeasible[why] = self.infeasible.get(why, 0) + 1


def search(
    problem: Problem,
    searcher: Searcher,
    budget: Budget = Budget(),
    *,
    seed: int = 0,
    executor: Executor | None = None,
    log: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Simulate what `searcher` proposes until it ends, a budget is used up, or Ctrl-C; what was found so far is the
    answer.

    `log` is an append-only file of all candidates, one JSON document per line, and of finished outer work. A search
    with the same log does not simulate again what stands in it: under a count budget a search that was killed and is
    run again gives the same answer. `executor` simulates proposals of several candidates, with the same answer.
    A first Ctrl-C ends the search at its next `control.check()`, a second one at once.
    """
    start = clock()
    journal = SearchLog(log, problem, searcher.name, seed) if log is not None else None
    control = Control(
        deadline=None if budget.seconds is None else start + budget.seconds,
        clock=clock,
        executor=executor,
        finished=dict(journal.finished) if journal else {},
        on_done=journal.done if journal else None,
    )
    floor_s = step_floor_s(problem)
    state = _Search(Evaluator(problem, executor), control, journal, start)
    if progress is not None:
        control.on_report = lambda done, total: progress(
            Progress(
                done=done,
                total=total,
                proposed=state.proposed,
                best=control.incumbent,
                bound_s=control.bound_s,
                gap=gap(state.least_s, control.bound_s),
                floor_s=floor_s,
            )
        )
    stopped: Stopped = "finished"
    try:
        with _gentle_interrupt(control):
            for proposal in searcher.propose(problem, np.random.default_rng(seed), control):
                batch = [proposal] if isinstance(proposal, Candidate) else list(proposal)
                if budget.candidates is not None:
                    batch = batch[: budget.candidates - state.proposed]
                state.take(batch)
                if budget.candidates is not None and state.proposed >= budget.candidates:
                    stopped = "budget"
                    break
                control.check()
    except Interrupted:
        stopped = "interrupted" if control.stop else "budget"
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        if journal:
            journal.close()
    return SearchResult(
        searcher=searcher.name,
        objective=getattr(searcher, "objective", "its own estimate of the step"),
        ranked=tuple(sorted(state.found.values(), key=lambda e: e.rank)),
        families=state.families,
        proposed=state.proposed,
        resumed=state.resumed,
        infeasible=state.infeasible,
        least_s=state.least_s,
        bound_s=control.bound_s,
        floor_s=floor_s,
        stopped=stopped,
        wall_s=clock() - start,
    )


@contextmanager
def _gentle_interrupt(control: Control) -> Iterator[None]:
    """A first Ctrl-C asks the search to stop where it can keep what it has; further ones interrupt as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        control.stop = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
