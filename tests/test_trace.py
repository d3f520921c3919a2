"""Traces load back and say what was simulated."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simpart.errors import FormatError
from simpart.simulation import SimResult, simulate_plan
from simpart.trace import load_trace, save_trace
from simpart.validate._timeline import Event, predicted_timelines, trace_of
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitLinks, chain, costs


@pytest.fixture(scope="module")
def result() -> SimResult:
    graph = chain(3, tied=True)
    given_costs = costs(links=UnitLinks({"p2p": 0.03, "all_reduce": 0.01}))
    return simulate_plan(problem(graph, 8, costs=given_costs), plan(graph, [2, 4], 4))


@pytest.fixture(scope="module")
def events(result: SimResult, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("trace") / "t.json"
    save_trace(path, result)
    return load_trace(path)


def test_every_task_is_an_event_on_a_named_row(result: SimResult, events: list[dict[str, Any]]) -> None:
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == result.program.topology.size
    assert all((e["pid"], e["tid"]) in rows for e in slices)
    assert rows[1, 2].startswith("group 2: stage 2 on 1 × fast") and "link 0>1" in rows.values()
    last = max(e["ts"] + e["dur"] for e in slices)
    assert last == pytest.approx(result.times.makespan_s * 1e6)


def test_slices_of_a_row_do_not_overlap(events: list[dict[str, Any]]) -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_transfers_have_arrows_from_maker_to_reader(events: list[dict[str, Any]]) -> None:
    arrows: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append(e)
    sends = [e for e in events if e["ph"] == "X" and e["cat"] == "send"]
    assert len(arrows) == len(sends)
    for steps in arrows.values():
        assert [e["ph"] for e in steps] == ["s", "t", "f"]
        assert steps[0]["ts"] <= steps[1]["ts"] <= steps[2]["ts"]
        for e in steps:  # each lies within a slice of its row
            assert any(
                x["ph"] == "X" and (x["pid"], x["tid"]) == (e["pid"], e["tid"])
                and x["ts"] - 1e-6 <= e["ts"] <= x["ts"] + x["dur"] + 1e-6 for x in events
            )  # fmt: skip


def test_memory_counters_peak_where_the_result_does(result: SimResult, events: list[dict[str, Any]]) -> None:
    for row in result.memory:
        levels = [
            sum(e["args"].values()) for e in events if e["ph"] == "C" and e["name"].endswith(f"group {row.group}")
        ]
        assert max(levels) == row.allocated_bytes


def test_the_same_result_gives_the_same_bytes(result: SimResult, tmp_path: Path) -> None:
    save_trace(tmp_path / "a.json", result)
    save_trace(tmp_path / "b.json", result)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_links_carry_in_all_what_was_sent(result: SimResult, events: list[dict[str, Any]]) -> None:
    flows, topology = result.program.flows, result.program.topology
    assert flows is not None
    sent = flows.bytes_by_class[topology.task_class].sum(axis=0)
    for name, expected in zip(flows.links, sent.tolist(), strict=True):
        rows = [e for e in events if e["ph"] == "C" and e["name"] == f"link {name}"]
        carried = sum((b["ts"] - a["ts"]) * 1e-6 * a["args"]["bytes_per_s"] for a, b in pairwise(rows))
        assert carried == pytest.approx(expected) and rows[-1]["args"]["bytes_per_s"] == pytest.approx(0, abs=1e-6)


def test_critical_tasks_follow_one_another_from_begin_to_end(result: SimResult, events: list[dict[str, Any]]) -> None:
    path = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["args"].get("critical"))
    assert path[0][0] == 0 and path[-1][1] == pytest.approx(result.times.makespan_s * 1e6)
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(path))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [1]}', '{"traceEvents": [{"ph": "X"}]}'])
def test_other_files_are_no_traces(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(FormatError, match="trace"):
        load_trace(tmp_path / "t.json")


def test_measured_and_predicted_steps_stand_in_one_trace_lane_by_lane(result: SimResult, tmp_path: Path) -> None:
    """A rank's two lanes name the same actions, in one process, and the file loads back."""
    predicted = predicted_timelines(result)
    slower: list[list[Event]] = [
        [{**e, "start_s": 2 * e["start_s"], "end_s": 2 * e["end_s"]} for e in lane] for lane in predicted
    ]
    path = tmp_path / "both.json"
    path.write_text(json.dumps(trace_of(slower, predicted)), encoding="utf-8")
    events = load_trace(path)
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(ranks.values()) == [f"rank {r}" for r in range(len(predicted))]
    for pid in ranks:
        assert (lanes[pid, 0], lanes[pid, 1]) == ("measured", "predicted")
        found = [[e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, lane)] for lane in (0, 1)]
        assert [e["name"] for e in found[0]] == [e["name"] for e in found[1]] != []
        assert [e["ts"] for e in found[0]] == pytest.approx([2 * e["ts"] for e in found[1]])
