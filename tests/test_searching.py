"""The search loop, and RaNNC on real problems against simulating every plan."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.errors import Interrupted, UnknownNameError, UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.format import plan_to_json
from simpart.plan.partition import clonable_ops
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.schedule import Schedule
from simpart.searchers.random import Random
from simpart.searchers.rannc import Rannc
from simpart.searching import Budget, Candidate, Control, Progress, SearchResult, gap, search
from simpart.searching.workers import Evaluator, process_pool
from simpart.simulation import Evaluation, evaluate
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
    """Distinct plans."""
    found = Rannc().propose(problem, np.random.default_rng(0), Control())
    return list({c.plan: c for c in reversed(list(found)) if c.plan is not None}.values())[::-1]


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


def test_a_search_without_an_answer_says_why(gpt: Graph) -> None:
    problem, none = problem_on(gpt, "local:2"), Candidate(plan=None, family="9 stages", why="too many")
    ticks = itertools.count()
    late = search(problem, Rannc(), Budget(seconds=0.5), clock=lambda: float(next(ticks)))
    assert (late.best, late.stopped) == (None, "budget") and "time budget was too short" in late.why_none
    assert "interrupted before any plan" in search(problem, Scripted(KeyboardInterrupt)).why_none
    assert search(problem, Scripted(none)).why_none == "too many"
    assert search(problem, Scripted()).why_none == "the searcher proposed no plan"
    assert search(problem, Scripted(none, *rannc_plans(problem)[:1])).why_none == ""


def test_duplicates_are_simulated_once_and_reasons_are_counted(gpt: Graph) -> None:
    problem = problem_on(gpt, "local:2")
    one = rannc_plans(problem)[0]
    none = Candidate(plan=None, family="9 stages", why="too many")
    result = search(problem, Scripted(one, one, none, none))
    assert len(result.ranked) == 1 and result.proposed == 4
    assert result.infeasible == {"too many": 2} and result.families["9 stages"] == "too many"


def test_log_holds_every_candidate_and_survives_a_torn_line(gpt: Graph, tmp_path: Path) -> None:
    problem, log = problem_on(gpt, "local:2"), tmp_path / "log.jsonl"
    none = Candidate(plan=None, family="9 stages", why="too many")
    search(problem, Scripted(*rannc_plans(problem)[:2], none), log=log)
    log.write_bytes(log.read_bytes() + b'{"candidate": "torn')
    search(problem, Scripted(*rannc_plans(problem)[2:3]), log=log)
    head, *rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert head["kind"] == "simpart search log"
    assert [row["candidate"] is None for row in rows] == [False, False, True, False]
    assert all(row["step_s"] > 0 for row in rows if row["candidate"]) and rows[2]["why"] == "too many"


def test_what_is_in_the_log_is_not_simulated_again(gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import simpart.searching.workers

    problem, log = problem_on(gpt, "local:2"), tmp_path / "log.jsonl"
    once = search(problem, Random(draws=40), log=log, seed=1)
    logged = log.read_bytes()
    monkeypatch.setattr(simpart.searching.workers, "evaluate", None)  # a simulation would fail
    again = search(problem, Random(draws=40), log=log, seed=1)
    assert bytes_of(again) == bytes_of(once) and again.resumed == len(once.ranked) and log.read_bytes() == logged


def test_a_log_of_another_problem_is_refused_and_stays(gpt: Graph, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    search(problem_on(gpt, "local:2"), Random(draws=2), log=log)
    before = log.read_bytes()
    with pytest.raises(UserError, match="logs another problem"):
        search(problem_on(gpt, "local:2", global_batch=4), Random(draws=2), log=log)
    assert log.read_bytes() == before


def test_an_estimate_that_is_infinite_and_a_plan_that_cannot_run_are_logged(gpt: Graph, tmp_path: Path) -> None:
    problem, log = problem_on(gpt, "local:2"), tmp_path / "log.jsonl"
    plan = rannc_plans(problem)[0].plan
    assert plan is not None
    unknown = dataclasses.replace(plan, skips="relay", mode="eager", schedule=Schedule(kind="dualpipe"))
    first = search(problem, Scripted(Candidate(plan=plan, family="x"), Candidate(plan=unknown, family="x")), log=log)
    again = search(problem, Scripted(Candidate(plan=plan, family="x"), Candidate(plan=unknown, family="x")), log=log)
    rows = [json.loads(line) for line in log.read_text().splitlines()][1:]
    assert rows[0]["objective_s"] is None and rows[0]["feasible"]
    assert rows[1]["step_s"] is None and not rows[1]["feasible"] and rows[1]["why"]
    assert first.least_s is None and first.infeasible == again.infeasible and sum(first.infeasible.values()) == 1


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


@pytest.mark.parametrize(("key", "value"), [("step_s", math.nan), ("step_s", -1.0), ("peak_bytes", -1)])
def test_a_log_with_what_no_simulation_says_is_refused(gpt: Graph, tmp_path: Path, key: str, value: float) -> None:
    log, problem = tmp_path / "log", problem_on(gpt, "local:2")
    search(problem, Random(), Budget(candidates=3), log=log)
    head, first, *others = log.read_text().splitlines()
    written = "\n".join([head, json.dumps({**json.loads(first), key: value}), *others, ""])
    log.write_text(written)
    with pytest.raises(UserError, match="line 2: not a search log"):
        search(problem, Random(), Budget(candidates=3), log=log)
    assert log.read_text() == written


def test_a_log_is_written_by_one_search_at_a_time(gpt: Graph, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "1\n"
        with pytest.raises(UserError, match="another search is writing the log"):
            search(problem_on(gpt, "local:2"), Random(), Budget(candidates=3), log=log)
        other.communicate("\n")
    search(problem_on(gpt, "local:2"), Random(), Budget(candidates=3), log=log)
    assert log.read_text().startswith('{"kind":"simpart search log"')


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


BLACK_BOX = ("annealing", "exhaustive", "grid", "random")


def test_workers_give_the_same_answer_and_do_the_work(gpt: Graph) -> None:
    asked: list[int] = []

    class Counted(Evaluator):
        def __call__(self, plans: Sequence[Plan]) -> list[Evaluation]:
            asked.append(len(plans) if self.executor is not None else 0)
            return super().__call__(plans)

    with process_pool(2) as pool, pytest.MonkeyPatch.context() as patch:
        for name in BLACK_BOX:
            budget = Budget(candidates=50)
            alone = search(problem_on(gpt, "local:3", global_batch=6), load_searcher(name), budget, seed=5)
            patch.setattr("simpart.searching.Evaluator", Counted)
            shared = search(
                problem_on(gpt, "local:3", global_batch=6), load_searcher(name), budget, seed=5, executor=pool
            )
            patch.undo()
            assert [e.evaluation for e in shared.ranked] == [e.evaluation for e in alone.ranked]
            assert bytes_of(shared) == bytes_of(alone) and shared.infeasible == alone.infeasible
            assert max(asked) > 1, name
            asked.clear()


def test_a_pool_that_breaks_is_done_without(gpt: Graph) -> None:
    class Broken(Executor):
        def map(self, *arguments: object, **options: object) -> Iterator[Any]:
            raise BrokenExecutor

    problem = problem_on(gpt, "local:2")
    budget = Budget(candidates=20)
    assert bytes_of(search(problem, Random(), budget, executor=Broken())) == bytes_of(search(problem, Random(), budget))


SLOW_SEARCH = """
import sys, time
import simpart.searching.workers
from simpart.cli import main
inner = simpart.searching.workers.evaluate
def slow(problem, plans):
    time.sleep(0.05)
    return inner(problem, plans)
simpart.searching.workers.evaluate = slow
main(sys.argv[1:])
"""


@pytest.mark.parametrize("name", ["random", "annealing"])
def test_killed_search_run_again_writes_the_same_plan(gpt: Graph, tmp_path: Path, name: str) -> None:
    from simpart.graph.format import save_graph

    save_graph(gpt, tmp_path / "g.graph")

    def arguments(output: str, log: str) -> list[str]:
        given = [
            "search",
            "g.graph",
            "--cluster",
            "local:3",
            "--global-batch",
            "6",
            "--searcher",
            name,
            "--no-profiles",
        ]
        return [*given, "--max-candidates", "80", "--seed", "7", "--log", log, "-o", output, "--json"]

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SLOW_SEARCH, *words]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    assert start(*arguments("whole.json", "whole.log")).wait(120) == 0
    process, log = start(*arguments("again.json", "again.log")), tmp_path / "again.log"
    for _ in range(1200):
        if log.exists() and log.read_bytes().count(b"\n") >= 20:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    half = log.read_bytes()
    assert 20 <= half.count(b"\n") < (tmp_path / "whole.log").read_bytes().count(b"\n")
    assert not (tmp_path / "again.json").exists()
    second = start(*arguments("again.json", "again.log"))
    printed, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and json.loads(printed)["resumed"] >= half.count(b"\n") - 2
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    rows = log.read_bytes().splitlines()
    assert len(rows) == len(set(rows)) and log.read_bytes().startswith(half[: half.rfind(b"\n") + 1])


def test_first_interrupt_keeps_what_a_planner_has_solved(gpt: Graph) -> None:
    class Planner:
        name = "planner"

        def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
            solved = rannc_plans(problem)[:1]
            os.kill(os.getpid(), signal.SIGINT)
            try:
                for _ in range(100):
                    time.sleep(0.01)
                    control.check()
            except Interrupted:
                yield from solved
                raise

    before = signal.getsignal(signal.SIGINT)
    result = search(problem_on(gpt, "local:2"), Planner())
    assert result.stopped == "interrupted" and result.best is not None
    assert signal.getsignal(signal.SIGINT) is before


def test_bound_and_gap_are_live_and_name_their_objective(gpt: Graph) -> None:
    seen: list[Progress] = []
    result = search(problem_on(gpt, "local:2"), load_searcher("exhaustive"), progress=seen.append)
    assert "slowest stage" in result.objective
    assert seen[-1].bound_s == result.bound_s == result.least_s and result.gap == 0.0
    assert all(progress.floor_s == result.floor_s for progress in seen) and seen[-1].floor_gap == result.floor_gap
    assert gap(None, 1.0) is None and gap(1.0, None) is None and gap(math.inf, 1.0) is None


@pytest.mark.parametrize("cluster", ["local:1", "local:3", "a100-v100", "dgx-v100"])
def test_no_plan_beats_the_floor(gpt: Graph, cluster: str) -> None:
    sheets = Costs(compute=Roofline(), communication=AlphaBeta())
    problem = dataclasses.replace(
        problem_on(gpt, "local:2", global_batch=12), cluster=load_cluster(cluster), costs=sheets
    )
    result = search(problem, Random(draws=80))
    assert result.floor_s is not None and result.best is not None
    assert 0 < result.floor_s <= min(e.evaluation.step_s for e in result.ranked)
    # One device and no recomputation: nothing but work, so the floor is nearly reached.
    assert cluster != "local:1" or (result.floor_gap is not None and result.floor_gap < 0.4)


def test_the_searcher_in_the_documentation_runs(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "searching.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    (tmp_path / "halves.py").write_text("\n".join(blocks))
    answer = subprocess.run([sys.executable, "halves.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("micro-batch ") and "micro-batch × dp must divide" in answer.stdout
