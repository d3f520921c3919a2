"""Which rows are a schedule: every action once, on a group that holds its stage, backward after forward."""

from __future__ import annotations

from collections.abc import Sequence

from simpart.errors import ScheduleError, UserError
from simpart.schedule._actions import Action, Rows, grid

__all__ = ["check_rows"]

_BEFORE = {"B": "F", "I": "F", "W": "I"}
_INSTEAD = {"B": "IW", "I": "B", "W": "B"}


def check_rows(rows: Rows, group_of_stage: Sequence[int], micro_batches: int) -> None:
    """Raise ScheduleError, with the grid around the first action at fault, unless every stage runs each micro-batch's
    forward once, and after it its backward (B, or I then W), in its own group's row."""
    groups = max(group_of_stage) + 1
    if len(rows) != groups:
        raise UserError(f"the schedule has {len(rows)} rows for {groups} device groups; give one row per group")
    seen: set[Action] = set()
    for g, row in enumerate(rows):
        for c, action in enumerate(row):
            stage, kind, m = action
            fault = ""
            needed = Action(stage, _BEFORE[kind], m) if kind in _BEFORE else None  # type: ignore[arg-type]
            if not 0 <= stage < len(group_of_stage):
                fault = f"names stage {stage} of {len(group_of_stage)}; stages are counted from 0"
            elif group_of_stage[stage] != g:
                fault = f"stands in row {g}, which does not hold stage {stage}; move it to row {group_of_stage[stage]}"
            elif not 0 <= m < micro_batches:
                fault = f"names micro-batch {m} of {micro_batches}; they are counted from 0"
            elif action in seen:
                fault = f"occurs twice in row {g}; keep one"
            elif any((stage, other, m) in seen for other in _INSTEAD.get(kind, "")):
                fault = f"in row {g} runs a backward again; keep {stage}B{m}, or {stage}I{m} and {stage}W{m}"
            elif needed and needed not in seen:
                fault = f"in row {g} comes before {needed}; move it behind"
            if fault:
                raise ScheduleError(f"action {action} {fault}", grid(rows, (g, c)))
            seen.add(action)
    for stage, g in enumerate(group_of_stage):
        for m in range(micro_batches):
            forward, whole, split = (Action(stage, kind, m) in seen for kind in "FBW")  # type: ignore[arg-type]
            if not forward or whole == split:
                missing = "the backward" if forward else "the forward"
                once = "once, as B or as I and W" if forward else "once"
                last = max((c for c, a in enumerate(rows[g]) if a.stage == stage), default=0)
                raise ScheduleError(
                    f"stage {stage} must run {missing} of micro-batch {m} {once}; add it to row {g}",
                    grid(rows, (g, last)),
                )
