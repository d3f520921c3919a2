"""The search loop, and RaNNC on real problems against simulating every plan."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simpart.errors import Interrupted, UnknownNameError, UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.partition import clonable_ops
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan_format import plan_to_json
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.schedule import Schedule
from simpart.searchers.rannc import Rannc
from simpart.searching import Budget, Candidate, Control, SearchResult, search
from simpart.simulation import evaluate
from simpart.training import TrainingSpec


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=3, hidden=64, heads=4, seq=32, vocab=512)), model="gpt")


def problem_on(graph: Graph, cluster: str, global_batch: int = 8, **space: object) -> Problem:
    found = load_cluster(cluster)
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=found, costs=default_costs(found, profiles=False),
        global_batch=global_batch, space=Space(**space),  # type: ignore[arg-type]
    )  # fmt: skip


class Scripted:
    """Proposes what it is told."""

    name = "scripted"

    def __init__(self, *candidates: Candidate | type[BaseException]) -> None:
        self.candidates = candidates

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        for candidate in self.candidates:
            if not isinstance(candidate, Candidate):
                raise candidate
            yield candidate


def rannc_plans(problem: Problem) -> list[Candidate]:
    return list(Rannc().propose(problem, np.random.default_rng(0), Control()))


def bytes_of(result: SearchResult) -> list[str]:
    return [json.dumps(plan_to_json(e.candidate.plan)) for e in result.ranked if e.candidate.plan is not None]


def test_candidate_budget_is_kept_and_deterministic(gpt: Graph) -> None:
    first = search(problem_on(gpt, "local:2"), Rannc(), Budget(candidates=3))
    again = search(problem_on(gpt, "local:2"), Rannc(), Budget(candidates=3))
    assert first.proposed == 3 and first.stopped == "budget"
    assert bytes_of(first) == bytes_of(again)


def test_interrupt_and_deadline_keep_the_best_so_far(gpt: Graph) -> None:
    problem = problem_on(gpt, "local:2")
    found = rannc_plans(problem)[:2]
    assert search(problem, Scripted(*found, KeyboardInterrupt)).stopped == "interrupted"
    assert search(problem, Scripted(*found, Interrupted)).best is not None
    ticks = itertools.count()
    late = search(problem, Scripted(*found), Budget(seconds=0.5), clock=lambda: float(next(ticks)))
    assert late.stopped == "budget" and late.best is not None


def test_duplicates_are_simulated_once_and_reasons_are_counted(gpt: Graph) -> None:
    problem = problem_on(gpt, "local:2")
    one = rannc_plans(problem)[0]
    none = Candidate(plan=None, family="9 stages", why="too many")
    result = search(problem, Scripted(one, one, none, none))
    assert len(result.ranked) == 1 and result.proposed == 4
    assert result.infeasible == {"too many": 2} and result.families["9 stages"] == "too many"


def test_log_holds_every_candidate_and_survives_a_torn_line(gpt: Graph, tmp_path: Path) -> None:
    problem, log = problem_on(gpt, "local:2"), tmp_path / "log.jsonl"
    search(problem, Scripted(*rannc_plans(problem)[:2]), log=log)
    log.write_bytes(log.read_bytes() + b'{"candidate": "torn')
    search(problem, Scripted(*rannc_plans(problem)[2:3]), log=log)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == 3 and all(row["step_s"] > 0 for row in rows)


def test_finished_outer_work_is_found_again(gpt: Graph, tmp_path: Path) -> None:
    seen: list[object] = []

    class Outer:
        name = "outer"

        def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
            seen.append(control.finished.get("part"))
            control.done("part", {"answer": 7})
            yield Candidate(plan=None, family="x", why="nothing")

    for _ in range(2):
        search(problem_on(gpt, "local:2"), Outer(), log=tmp_path / "log")
    assert seen == [None, {"answer": 7}]


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"seconds": -1.0}, {"candidates": 0}])
def test_budgets_must_be_positive(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="budget must be"):
        Budget(**bad)  # type: ignore[arg-type]


def test_unknown_searcher_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rannc'"):
        load_searcher("ranc")


def test_a_log_that_is_something_else_is_refused(gpt: Graph, tmp_path: Path) -> None:
    log = tmp_path / "notes.txt"
    log.write_text("dear diary\n")
    with pytest.raises(UserError, match="not a search log"):
        search(problem_on(gpt, "local:2"), Scripted(), log=log)
    assert log.read_text() == "dear diary\n"


def every_cut(problem: Problem, stages: int) -> Iterator[Plan]:
    """All prefix cuts of the op order and all splits of the devices; one schedule, all micro-batch counts."""
    graph = problem.graph
    own = np.flatnonzero(~clonable_ops(graph))
    samples = problem.global_batch
    for count in (m for m in range(1, samples + 1) if samples % m == 0):
        for cuts in itertools.combinations(range(1, own.size), stages - 1):
            parts = np.split(own, cuts)
            for replicas in itertools.product(range(1, problem.cluster.size + 1), repeat=stages):
                if sum(replicas) != problem.cluster.size or any((samples // count) % r for r in replicas):
                    continue
                first = np.cumsum([0, *replicas])
                yield Plan(
                    graph=graph.fingerprint,
                    groups=tuple(
                        DeviceGroup(devices=Devices.of(range(first[s], first[s + 1])), axes=(("dp", r),))
                        for s, r in enumerate(replicas)
                    ),
                    stages=tuple(Stage(ops=OpSet.of(graph, ops), group=s) for s, ops in enumerate(parts)),
                    batch=Batch(micro_batches=count, sizes=tuple((samples // count // r,) * r for r in replicas)),
                    schedule=Schedule(kind="1f1b"),
                )


@pytest.mark.parametrize("stages", [1, 2])
def test_rannc_is_close_to_the_best_of_all_cuts(gpt: Graph, stages: int) -> None:
    space = {"schedules": ("1f1b",), "recompute": ("none",), "min_stages": stages, "max_stages": stages}
    problem = problem_on(gpt, "local:3", global_batch=6, **space)
    found = search(problem, Rannc(most_blocks=64))
    best = min(e.step_s for e in evaluate(problem, list(every_cut(problem, stages))) if e.feasible)
    assert found.best is not None
    assert best * (1 - 1e-9) <= found.best.evaluation.step_s <= best * 1.05


def test_every_number_of_stages_has_a_plan_or_a_reason(gpt: Graph) -> None:
    result = search(problem_on(gpt, "local:7"), Rannc())
    assert set(result.families) == {f"{n} stage{'s' if n > 1 else ''}" for n in range(1, 8)}
    assert "no replica counts within the rules" in str(result.families["1 stage"])
    assert result.best is not None


def test_more_memory_never_makes_it_slower_and_little_gives_a_reason(gpt: Graph) -> None:
    import dataclasses

    def best(memory_bytes: int) -> SearchResult:
        problem = problem_on(gpt, "local:2")
        device = dataclasses.replace(problem.cluster.device(0), memory_bytes=memory_bytes, reserved_bytes=0)
        cluster = dataclasses.replace(problem.cluster, devices=((device, 2),))
        return search(dataclasses.replace(problem, cluster=cluster), Rannc())

    steps = [result.best.evaluation.step_s for m in (6, 8, 16, 64) if (result := best(m << 20)).best is not None]
    assert len(steps) >= 2 and steps == sorted(steps, reverse=True)
    nothing = best(1 << 20)
    assert nothing.best is None and any("over the memory limit" in why for why in nothing.infeasible)
