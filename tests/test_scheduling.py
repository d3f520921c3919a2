"""Schedules made for a plan, and configurations with schedules of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simpart.configure import Configuration, configure
from simpart.configure.scheduling import fit_schedule, stage_times
from simpart.errors import ScheduleError, UserError
from simpart.schedule import SCHEDULES, format_rows
from simpart.simulation import evaluate, simulate_plan
from simpart.testing.schedule_suite import held
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitLinks, chain, costs, device


def test_a_fitted_schedule_beats_1f1b_and_stays_within_memory() -> None:
    graph = chain(8)
    given = problem(graph, 32, costs=costs(links=UnitLinks({"p2p": 1 / 64})))
    one = plan(graph, [4, 8, 12], 16)
    fitted = fit_schedule(given, one)
    assert evaluate(given, [fitted])[0].step_s < evaluate(given, [one])[0].step_s
    times, room = stage_times(given, one)
    assert times.send_s == (0.5,) * 3 and min(room) > 0
    tight = [2.5 * h for h in times.held]
    rows = fit_schedule(given, one, tight).schedule.explicit
    assert max(map(held, rows)) <= 2.5


def test_a_fitted_schedule_fits_where_the_room_is_small() -> None:
    graph = chain(8)
    one = plan(graph, [4, 8, 12], 16)
    full = simulate_plan(problem(graph, 32), fit_schedule(problem(graph, 32), one)).peak_bytes
    small = problem(graph, 32, [device(memory_bytes=int(0.8 * full))] * 8)
    assert simulate_plan(small, fit_schedule(small, one)).feasible
    with pytest.raises(UserError, match="one takes"):
        none = problem(graph, 32, [device(memory_bytes=100)] * 8)
        fit_schedule(none, one)


@pytest.mark.parametrize("kind", [*SCHEDULES, "zero-bubble"])
def test_configurations_place_stages_as_the_schedule_wants_them(kind: str) -> None:
    given = problem(chain(8), 32)
    made = configure(given, Configuration(pp=4, dp=2, schedule=kind))
    assert len(made.groups) == 4 and len(made.stages) in (4, 8)
    assert evaluate(given, [made])[0].step_s == simulate_plan(given, made).step_s


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    given = problem(chain(8), 16)
    like = configure(given, Configuration(pp=2, dp=2, schedule="interleaved-1f1b", virtual_stages=3))
    rows = like.schedule.rows(like.group_of_stage, 8)
    (tmp_path / "s.csv").write_text(format_rows(rows))
    made = configure(given, Configuration(pp=2, dp=2, schedule=str(tmp_path / "s.csv")))
    assert made.stages == like.stages
    assert evaluate(given, [made])[0] == evaluate(given, [like])[0]
    with pytest.raises(UserError, match="2 rows for 4 groups; give --pp 2"):
        configure(given, Configuration(pp=4, dp=2, schedule=str(tmp_path / "s.csv")))
    with pytest.raises(UserError, match="cannot read schedule"):
        configure(given, Configuration(schedule=str(tmp_path / "none.csv")))
    (tmp_path / "gap.csv").write_text("0F0,0B0,2F0,2B0")
    with pytest.raises(UserError, match="no action of stage 1"):
        configure(given, Configuration(dp=1, schedule=str(tmp_path / "gap.csv")))
    (tmp_path / "far.csv").write_text("0F0,0B0,99999999999F0,99999999999B0")
    with pytest.raises(UserError, match="names stage 99999999999, but has no action of stage 1"):
        configure(given, Configuration(dp=1, schedule=str(tmp_path / "far.csv")))
    (tmp_path / "marked.csv").write_text("\ufeff" + format_rows(rows))  # as spreadsheets write it
    assert configure(given, Configuration(pp=2, dp=2, schedule=str(tmp_path / "marked.csv"))) == made


def test_virtual_stages_go_with_schedules_that_go_round() -> None:
    with pytest.raises(UserError, match="virtual stages go with interleaved-1f1b"):
        Configuration(virtual_stages=2)
    given = problem(chain(8), 16)
    made = configure(given, Configuration(pp=2, schedule="looped-bfs", virtual_stages=4))
    assert made.group_of_stage == (0, 1) * 4
    assert replace(made, batch=made.batch) == made


def test_a_gap_in_the_stages_of_a_file_is_shown_in_its_grid(tmp_path: Path) -> None:
    (tmp_path / "gap.csv").write_text("0F0,0B0\n1F0,7F1,1B0")
    with pytest.raises(ScheduleError, match="names stage 7, but has no action of stage 2") as refused:
        configure(problem(chain(8), 16), Configuration(pp=2, dp=2, schedule=str(tmp_path / "gap.csv")))
    assert ">7F1<" in refused.value.grid
