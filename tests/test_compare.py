"""Searchers side by side: rows, portfolio, failures, interruption, table of candidates, figure, the command."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.cli import main
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.graph.format import save_graph
from simpart.hardware import load_cluster
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searching import Budget, Candidate, Control
from simpart.searching.comparing import beyond, candidates_csv, compare, figure, reason_kinds
from simpart.training import TrainingSpec


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=3, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")


def problem_on(graph: Graph, devices: int = 3, space: Space = Space()) -> Problem:  # noqa: B008
    cluster = load_cluster(f"local:{devices}")
    costs = default_costs(cluster, profiles=False)
    return Problem(graph=graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=6, space=space)


def makers(*names: str) -> dict[str, Any]:
    return {name: lambda name=name: load_searcher(name) for name in names}


class Failing:
    """Raises what it is given, after what the other proposes."""

    name = "failing"

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        yield from self.fail()

    def fail(self) -> Iterator[Candidate]:
        raise self.error("out of luck")


def test_portfolio_is_the_best_of_all_and_rows_are_each_ones_own(gpt: Graph) -> None:
    found = compare(problem_on(gpt), makers("random", "rannc", "grid"), Budget(candidates=30))
    assert [entry.searcher for entry in found.entries] == ["random", "rannc", "grid"]
    portfolio = found.portfolio
    assert portfolio is not None
    best = portfolio[1]
    steps = [e.evaluation.step_s for entry in found.entries if entry.result for e in entry.result.ranked]
    assert best.evaluation.step_s == min(steps)
    rows = [entry.row(best) for entry in found.entries]
    for entry, row in zip(found.entries, rows, strict=True):
        assert entry.best is not None and row["step_s"] == entry.best.evaluation.step_s >= best.evaluation.step_s
        assert bool(row["differs"]) == (entry.best.candidate.plan != best.candidate.plan)
        assert row["proposed"] <= 30 and row["objective"] and row["why"] == ""
        assert ("in one line; stages begin at " in row["cuts"]) == (row["searcher"] == "rannc")


def test_each_searcher_finds_what_it_finds_alone(gpt: Graph) -> None:
    from simpart.searching import search

    together = compare(problem_on(gpt), makers("annealing", "piper", "random"), Budget(candidates=25), seed=4)
    for entry in together.entries:
        alone = search(problem_on(gpt), load_searcher(entry.searcher), Budget(candidates=25), seed=4)
        assert entry.result is not None
        assert [e.evaluation for e in entry.result.ranked] == [e.evaluation for e in alone.ranked]


@pytest.mark.parametrize("error", [UserError, ValueError, ZeroDivisionError])
def test_a_searcher_that_fails_leaves_the_others_their_answers(gpt: Graph, error: type[Exception]) -> None:
    both = {"failing": lambda: Failing(error), **makers("grid")}
    found = compare(problem_on(gpt), both, Budget(candidates=5))
    assert "out of luck" in found.entries[0].why and found.entries[0].result is None
    assert found.entries[1].best is not None and not found.interrupted
    assert found.entries[0].row(None)["stopped"] == "failed"


def test_one_that_can_plan_nothing_says_why(gpt: Graph) -> None:
    found = compare(problem_on(gpt, 3, Space(min_stages=2, max_stages=2)), makers("equal_layers", "rannc"), Budget())
    row = found.entries[0].row(found.entries[1].best)
    assert row["step_s"] is None and row["why"] and row["differs"] == []


def test_interrupt_keeps_what_is_there(gpt: Graph) -> None:
    three = {**makers("grid"), "failing": lambda: Failing(KeyboardInterrupt), **makers("rannc")}
    found = compare(problem_on(gpt), three, Budget(candidates=5))
    assert [entry.searcher for entry in found.entries] == ["grid", "failing"] and found.interrupted
    assert found.portfolio is not None and found.portfolio[0] == "grid"


def test_prices_are_asked_once(gpt: Graph) -> None:
    import dataclasses

    problem = problem_on(gpt)
    asked: list[int] = []

    class Counting:
        def estimate(self, table: Any, device: Any) -> Any:
            asked.append(len(table.signatures))
            return inner.estimate(table, device)

    inner = problem.costs.compute
    counted = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, compute=Counting()))
    compare(counted, makers("grid"), Budget(candidates=2))
    first = len(asked)
    asked.clear()
    compare(dataclasses.replace(counted), makers("grid", "rannc", "random", "alpa"), Budget(candidates=10))
    assert len(asked) == first


def test_table_has_every_candidate_and_no_times_of_the_search(gpt: Graph) -> None:
    texts = []
    for _ in range(2):
        space = Space(min_stages=2, max_stages=2)
        found = compare(problem_on(gpt, 3, space), makers("random", "two_bw"), Budget(candidates=20))
        texts.append(candidates_csv(found))
    assert texts[0] == texts[1]
    rows = list(csv.DictReader(io.StringIO(texts[0])))
    mine = [row for row in rows if row["searcher"] == "random" and row["step_s"]]
    result = found.entries[0].result
    assert result is not None and len(mine) == len(result.ranked)
    assert {float(row["step_s"]) for row in mine} == {e.evaluation.step_s for e in result.ranked}
    assert [int(row["number"]) for row in mine] == list(range(len(mine)))
    assert any(row["searcher"] == "two_bw" and row["why"] for row in rows)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figure_is_drawn(gpt: Graph, tmp_path: Path, kind: str) -> None:
    found = compare(problem_on(gpt), makers("random", "grid"), Budget(candidates=10))
    figure(tmp_path / f"f.{kind}", found, "a title")
    content = (tmp_path / f"f.{kind}").read_bytes()
    assert content.startswith(b"\x89PNG") if kind == "png" else b"random" in content


def test_a_plan_beyond_the_stated_space_is_told(gpt: Graph) -> None:
    from simpart.configure import Configuration, configure

    problem = problem_on(gpt, 2)
    settings: list[dict[str, Any]] = [{"pp": 2}, {"tp": 2, "schedule": "gpipe"}]
    plain, split = (configure(problem, Configuration(**x)) for x in settings)
    assert beyond(plain, Space()) == []
    assert beyond(plain, Space(schedules=("gpipe",), max_stages=1)) == ["schedule 1f1b", "2 stages"]
    assert beyond(split, Space()) == ["kernels split", "state divided"]
    assert beyond(split, Space(tp=(1, 2))) == []


def test_reasons_are_counted_without_their_numbers() -> None:
    reasons = {"stages 0, 1 need 3.10 GiB": 2, "stages 2, 3 need 12.0 GiB": 1, "other": 4}
    assert reason_kinds(reasons) == {"other": 4, "stages … need … GiB": 3}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), out, error


def test_commands_write_document_table_figure_and_plan(
    gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(gpt, "g.graph")
    given = ("compare", "g.graph", "--cluster", "local:3", "--global-batch", "6", "--no-profiles")
    budget = ("--searchers", "grid,random,exhaustive", "--max-candidates", "20")
    code, out, _ = run(capsys, "search", "g.graph", *given[2:], "--searcher", "piper", "--max-candidates", "3")
    assert code == 0 and "\ncuts         " in out and "stages begin at " in out
    code, out, _ = run(
        capsys, "search", "g.graph", *given[2:], "--searcher", "piper", "--max-candidates", "3", "--json"
    )
    assert "stages begin at " in json.loads(out)["why"]
    outputs = ("--csv", "c.csv", "--figure", "f.svg", "-o", "best.json")
    code, out, _ = run(capsys, *given, *budget, *outputs, "--json")
    document = json.loads(out)
    assert code == 0 and [row["searcher"] for row in document["rows"]] == ["grid", "random", "exhaustive"]
    assert document["portfolio"]["step_s"] == document["predicted"]["step_s"]
    assert document["space"]["schedules"] == ["1f1b", "gpipe"] and document["budget"]["candidates"] == 20
    assert document["floor"]["step_s"] <= document["portfolio"]["step_s"]
    assert all(Path(name).stat().st_size for name in ("c.csv", "f.svg", "best.json"))
    code, again, _ = run(capsys, *given, *budget, "--json")
    second = json.loads(again)
    for found in (document, second):
        for row in (found, *found["rows"]):
            row.pop("timing")
    assert second == document
    code, out, _ = run(capsys, *given, *budget)
    assert code == 0 and "portfolio: " in out and "20 candidates for each searcher" in out
    code, simulated, _ = run(capsys, "simulate", "best.json", "--no-profiles", "--json")
    assert json.loads(simulated)["predicted"]["step_s"] == document["portfolio"]["step_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--searchers", "ranc"), "did you mean 'rannc'"),
        (("--searchers", ","), "name searchers with commas"),
        (("--figure", "f.txt"), "a figure ends in .png, .svg, .pdf"),
        (("--max-candidates", "0"), "must be at least 1"),
        (("--csv", "no/such/c.csv"), "there is no folder"),
    ],
)
def test_command_refuses_in_one_line(
    gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_graph(gpt, "g.graph")
    code, out, error = run(capsys, "compare", "g.graph", "--cluster", "local:2", "--global-batch", "4", *options)
    assert code == 2 and not out and message in error and error.count("\n") == 1
