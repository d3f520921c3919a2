"""The page and the picture of a simulated plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpart.report import picture, save_report
from simpart.simulation import SimResult, simulate_plan
from tests.test_lowering import plan, problem
from tests.toy_graphs import chain


@pytest.fixture(scope="module")
def result() -> SimResult:
    graph = chain(2)
    return simulate_plan(problem(graph, 8), plan(graph, [2], 4))


def test_page_says_what_was_predicted_and_needs_nothing_else(result: SimResult, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    save_report(path, result, "a <toy> on two", "two stages")
    text = path.read_text()
    assert "a &lt;toy&gt; on two" in text and "two stages" in text and "<svg" in text
    assert "<script" not in text and "href" not in text.replace("xlink:href", "")


def test_same_result_same_bytes(result: SimResult, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        save_report(tmp_path / name, result, "t", "w")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_picture_alone_as_png(result: SimResult, tmp_path: Path) -> None:
    save_report(tmp_path / "p.png", result, "t", "w")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_every_group_has_its_row(result: SimResult) -> None:
    time, memory = picture(result).axes
    assert [t.get_text() for t in time.get_yticklabels()] == ["group 0", "group 1"]
    assert len(memory.get_yticklabels()) == 2
