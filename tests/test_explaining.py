"""What limits a found plan and what more of something buys; the list of the best; documents that keep their keys."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from simpart.cli import main
from simpart.graph import Graph
from simpart.graph.format import save_graph
from simpart.hardware import list_clusters, load_cluster
from simpart.problem import Problem
from simpart.registry import default_costs, load_searcher
from simpart.searching import Budget, search
from simpart.searching.explaining import more_memory, one_more_device, tightest, what_if
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    return capture(ZooFactory("gpt", GPTDims(layers=4, hidden=64, heads=4, seq=32, vocab=256)), model="gpt")


def problem_on(graph: Graph, memory_bytes: int | None = None) -> Problem:
    cluster = load_cluster("local:3")
    if memory_bytes is not None:
        device = dataclasses.replace(cluster.device(0), memory_bytes=memory_bytes, reserved_bytes=0)
        cluster = dataclasses.replace(cluster, devices=((device, 3),))
    costs = default_costs(cluster, profiles=False)
    return Problem(graph=graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=12)


@pytest.mark.parametrize("name", [*list_clusters(), "dgx-a100:2", "local:7"])
def test_one_more_device_is_at_the_end_and_linked_to_all(name: str) -> None:
    cluster = load_cluster(name)
    more = one_more_device(cluster)
    assert more.size == cluster.size + 1 and more.device(cluster.size) == cluster.device(cluster.size - 1)
    assert [more.device(d) for d in range(cluster.size)] == [cluster.device(d) for d in range(cluster.size)]
    assert more.level_between(0, cluster.size).name in {level.name for level in cluster.levels}
    assert one_more_device(more).size == cluster.size + 2


def test_the_tightest_stage_has_the_least_room(gpt: Graph) -> None:
    problem = problem_on(gpt)
    best = search(problem, load_searcher("rannc"), Budget(candidates=8)).ranked[-1].candidate.plan
    assert best is not None
    result = simulate_plan(problem, best)
    found = tightest(result)
    rooms = [row.capacity_bytes - row.device_bytes for row in result.memory]
    assert found["room_bytes"] == min(rooms)
    assert found["stages"] == list(result.memory[rooms.index(min(rooms))].stages)
    assert sum(found["by_kind"].values()) <= found["device_bytes"]


def test_more_memory_never_makes_the_best_of_all_plans_slower(gpt: Graph) -> None:
    def make() -> Any:
        from simpart.searchers.exhaustive import Exhaustive

        return Exhaustive(most_blocks=4)

    problem = problem_on(gpt, 5 << 20)
    result = search(problem, make())
    assert result.best is not None and result.infeasible
    memory, device = what_if(problem, make, Budget(), 0, result.best.evaluation.step_s)
    assert memory.saved is not None and memory.saved >= 0 and "1 GiB more" in memory.change
    assert device.saved is not None and device.saved >= 0 and "4 instead of 3" in device.change
    again = search(dataclasses.replace(problem, cluster=more_memory(problem.cluster)), make())
    assert again.best is not None and again.best.evaluation.step_s == memory.step_s


def test_nothing_that_fits_even_with_more_is_said_with_its_reason(gpt: Graph) -> None:
    tiny = problem_on(gpt, 1 << 10)
    short = dataclasses.replace(tiny, cluster=more_memory(tiny.cluster, -1000))
    found = what_if(short, lambda: load_searcher("grid"), Budget(candidates=5), 0, None)
    assert found[0].step_s is not None and found[0].saved is None
    assert found[1].step_s is None and "more than" in found[1].why


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), out, error


def test_command_lists_the_best_and_explains(
    gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(gpt, "g.graph")
    given = ("search", "g.graph", "--cluster", "local:3", "--global-batch", "12", "--no-profiles", "--searcher", "grid")
    code, out, _ = run(capsys, *given, "--top", "3", "--what-if", "--json")
    document = json.loads(out)
    assert code == 0
    ranked = document["ranked"]
    assert [row["rank"] for row in ranked] == [1, 2, 3] and ranked[0]["plan"] == document["plan"]
    assert ranked[0]["step_s"] == document["predicted"]["step_s"] <= ranked[1]["step_s"] <= ranked[2]["step_s"]
    assert document["bound_of"] == "micro-batches × the compute of the slowest stage"
    assert document["bound"] <= document["least_objective_s"] and document["gap"] == 0
    assert document["floor"]["step_s"] <= document["predicted"]["step_s"] and 0 <= document["floor"]["gap"] < 1
    assert [row["change"][:5] for row in document["what_if"]] == ["1 GiB", "one m"]
    assert document["tightest"]["room_bytes"] > 0 and document["space"]["tp"] == [1]
    code, out, _ = run(capsys, *given, "--top", "2", "--what-if")
    assert code == 0 and all(
        word in out for word in ("tightest", "bound", "floor", "   1. ", "   2. ", "searched again")
    )
    code, out, _ = run(capsys, *given, "--tp", "1", "--tp", "2", "--idle-devices", "--json", "--top", "999")
    split = [row for row in json.loads(out)["ranked"] if "tp 2" in row["words"]]
    assert code == 0 and split and json.loads(out)["floor"]["step_s"] is None


def test_a_search_that_finds_nothing_keeps_the_keys(
    gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(gpt, "g.graph")
    given = ("search", "g.graph", "--cluster", "local:3", "--global-batch", "12", "--searcher", "grid", "--json")
    _, whole, _ = run(capsys, *given)
    code, out, error = run(capsys, *given, "--min-stages", "9", "-o", "p.json")
    document = json.loads(out)
    assert code == 0 and not document["feasible"] and document["why_infeasible"] and "not written" in error
    assert set(json.loads(whole)) == set(document)
