"""What every schedule must show: complete, free of deadlock, within its stated memory, as short as its closed form.

for case in schedule_cases():
    check_schedule(case)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from simpart.schedule import LOOPED, SCHEDULES, V_SHAPED, Action, Rows, Schedule, check_rows, placement
from simpart.simulation import chain_times

__all__ = ["ScheduleCase", "check_schedule", "held", "placement", "schedule_cases"]


class ScheduleCase(NamedTuple):
    """A named schedule on so many groups, each with `depth` stages, for so many micro-batches."""

    kind: str
    groups: int
    depth: int
    micro_batches: int


def schedule_cases() -> Iterator[ScheduleCase]:
    """Every schedule on a grid of groups, stages per group and micro-batches, fewer than groups included."""
    for kind in SCHEDULES:
        for groups in (2, 4) if kind == "dualpipe" else (1, 2, 3, 4):
            for depth in (1, 2, 3) if kind in LOOPED else (2,) if kind in V_SHAPED else (1,):
                for micro_batches in sorted({1, 2, groups - 1, groups, 2 * groups + 1, 4 * groups} - {0}):
                    yield ScheduleCase(kind, groups, depth, micro_batches)


def check_schedule(case: ScheduleCase) -> None:
    """Raise AssertionError where a schedule breaks a promise."""
    kind, groups, depth, count = case
    home = placement(kind, groups, depth)
    stages = len(home)
    rows = Schedule(kind=kind).rows(home, count)
    if kind == "dualpipe":
        _check_dualpipe(rows, count)
    else:
        check_rows(rows, home, count)
    most = max(held(row) for row in rows)
    assert most <= _stated(case), f"{case} holds {most}, stated {_stated(case)}"
    forward, inputs, weight = 1.0, 1.0, 1.0
    seconds = chain_times(rows, [forward] * stages, [inputs] * stages, [weight] * stages).makespan_s
    backward = inputs + weight
    once = stages * (forward + inputs) + weight
    per_group = stages // groups * (forward + backward)
    assert seconds >= max(count * per_group, once), f"{case} takes {seconds}, less than its work"
    expected = _closed_form(case, forward, backward)
    assert expected is None or abs(seconds - expected) < 1e-9 * expected, f"{case} takes {seconds}, not {expected}"
    if kind in ("zb-h1", "zb-h2") and count >= 2 * groups:
        bubble = (groups - 1) * (forward + inputs - weight)
        assert seconds <= count * per_group + bubble + 1e-9, f"{case} takes {seconds}"
    if kind.startswith("dualpipe") and count >= 2 * stages and count % 2 == 0:
        # The published bubble, with F&B = F + B; it stands for equal F and I.
        for forward, weight in ((1.0, 1.0), (2.0, 1.0), (5.0, 3.0)):
            seconds = chain_times(rows, [forward] * stages, [forward] * stages, [weight] * stages).makespan_s
            backward = forward + weight
            bubble = (stages / 2 - 1) * (forward + 2 * backward - 3 * weight)
            expected = count * (stages // groups) * (forward + backward) + bubble
            assert abs(seconds - expected) < 1e-9 * expected, f"{case} takes {seconds}, not {expected}"


def held(row: tuple[Action, ...]) -> float:
    """The most micro-batches of a stage that a group holds at once; half of one between I and W."""
    now = most = 0.0
    for action in row:
        now += {"F": 1.0, "B": -1.0, "I": -0.5, "W": -0.5}[action.kind]
        most = max(most, now)
    return most


def _stated(case: ScheduleCase) -> float:
    kind, groups, depth, count = case
    whole = count * depth
    first = (depth - 1) * (count // max(1, count // groups) + 1) + 2 * (groups - 1) + 1
    return min(
        whole,
        {
            "gpipe": whole,
            "looped-bfs": whole,
            "1f1b": groups,
            "zb-h1": groups,
            "zb-h2": 2 * groups,
            "interleaved-1f1b": first,
            "interleaved-zb": first,
            "zb-v": 2 * groups,
            "v-half": groups + 2,
            "v-min": (2 * groups + 2) // 3 + 2,
            "dualpipev": 2 * groups + 1,
            "dualpipe": groups + 1,
        }[kind],
    )


def _closed_form(case: ScheduleCase, forward: float, backward: float) -> float | None:
    kind, groups, depth, count = case
    if kind in ("gpipe", "1f1b") or (kind == "interleaved-1f1b" and count % groups == 0 and depth > 1):
        return (count * depth + groups - 1) * (forward + backward)
    if kind == "looped-bfs" and count >= groups:
        return (count * depth + groups - 1) * (forward + backward)
    return None


def _check_dualpipe(rows: Rows, count: int) -> None:
    """Every action once; the first half of the micro-batches on the stage's own group, the rest on the mirrored one."""
    stages = len(rows)
    seen: set[Action] = set()
    for g, row in enumerate(rows):
        for action in row:
            down = action.micro_batch < (count + 1) // 2
            assert action.stage == (g if down else stages - 1 - g) and action not in seen
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            assert before is None or action._replace(kind=before) in seen  # type: ignore[arg-type]
            seen.add(action)
    for s in range(stages):
        for m in range(count):
            assert Action(s, "F", m) in seen and (Action(s, "B", m) in seen) != (Action(s, "W", m) in seen)
