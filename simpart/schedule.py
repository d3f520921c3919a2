"""Pipeline schedules: for every device group, the order of its actions.

The text form is torch's action grammar: `{stage}{F|B|I|W}{micro-batch}`, F forward, B whole backward, I gradient of
inputs, W gradient of weights; rows are comma-separated, one per device group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from simpart.errors import UnknownNameError, UnsupportedError, UserError

__all__ = ["SCHEDULES", "Action", "Rows", "Schedule", "format_rows", "gpipe", "grid", "one_f_one_b", "parse_rows"]

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """What a stage does with a micro-batch; written `{stage}{kind}{micro-batch}`."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Rows = tuple[tuple[Action, ...], ...]


def gpipe(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """All forwards of the step, then all backwards; a group with several stages takes them one after the other.

    Reference: Huang et al., "GPipe" (2019).
    """
    rows = []
    for group in range(max(group_of_stage) + 1):
        stages = [s for s, g in enumerate(group_of_stage) if g == group]
        forward = [Action(s, "F", m) for s in stages for m in range(micro_batches)]
        backward = [Action(s, "B", m) for s in reversed(stages) for m in range(micro_batches)]
        rows.append((*forward, *backward))
    return tuple(rows)


def one_f_one_b(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """Stage s runs min(S - s, M) forwards, then one backward and one forward in turn, then the remaining backwards.

    Reference: Narayanan et al., "PipeDream" (2019), synchronous form (DAPPLE, PipeDream-flush).
    """
    stages = len(group_of_stage)
    if len(set(group_of_stage)) != stages:
        raise UnsupportedError(
            "schedule 1f1b needs one stage per device group; use gpipe, or give the actions explicitly"
        )
    rows: list[tuple[Action, ...]] = [()] * stages
    for s, group in enumerate(group_of_stage):
        warm_up = min(stages - s, micro_batches)
        row = [Action(s, "F", m) for m in range(warm_up)]
        for m in range(micro_batches):
            row.append(Action(s, "B", m))
            if m + warm_up < micro_batches:
                row.append(Action(s, "F", m + warm_up))
        rows[group] = tuple(row)
    return tuple(rows)


SCHEDULES: dict[str, Callable[[Sequence[int], int], Rows]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A named schedule with its parameters, or explicit rows of actions (kind "explicit")."""

    kind: str = "1f1b"
    parameters: tuple[tuple[str, int], ...] = ()
    explicit: Rows = ()

    def rows(self, group_of_stage: Sequence[int], micro_batches: int) -> Rows:
        """The actions of each device group, checked to be complete; raises UserError where they are not."""
        if self.kind == "explicit":
            check_rows(self.explicit, group_of_stage, micro_batches)
            return self.explicit
        build = SCHEDULES.get(self.kind)
        if build is None:
            raise UnknownNameError("schedule", self.kind, [*SCHEDULES, "explicit"])
        return build(group_of_stage, micro_batches)


def check_rows(rows: Rows, group_of_stage: Sequence[int], micro_batches: int) -> None:
    """Every stage runs each micro-batch's forward once, and after it its backward (B, or I then W), in its own
    group's row."""
    seen: set[Action] = set()
    groups = max(group_of_stage) + 1
    if len(rows) != groups:
        raise UserError(f"the schedule has {len(rows)} rows for {groups} device groups; give one row per group")
    for g, row in enumerate(rows):
        for action in row:
            if not 0 <= action.stage < len(group_of_stage) or group_of_stage[action.stage] != g:
                raise UserError(f"action {action} stands in row {g}, which does not hold stage {action.stage}")
            if not 0 <= action.micro_batch < micro_batches:
                raise UserError(f"action {action} names micro-batch {action.micro_batch} of {micro_batches}")
            if action in seen:
                raise UserError(f"action {action} occurs twice in row {g}")
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if before and Action(action.stage, before, action.micro_batch) not in seen:  # type: ignore[arg-type]
                needed = Action(action.stage, before, action.micro_batch)  # type: ignore[arg-type]
                raise UserError(f"action {action} in row {g} comes before {needed}; move it behind")
            seen.add(action)
    for stage in range(len(group_of_stage)):
        for m in range(micro_batches):
            whole, split = Action(stage, "B", m) in seen, Action(stage, "W", m) in seen
            if whole == split:
                raise UserError(f"stage {stage} must run the backward of micro-batch {m} once, as B or as I and W")


_ACTION = re.compile(r"\s*(\d+)([FBIW])(\d+)\s*")


def parse_rows(text: str) -> Rows:
    """Read rows of actions, one line per device group.

    >>> parse_rows("0F0,0B0")[0][1]
    Action(stage=0, kind='B', micro_batch=0)
    """
    rows = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        row = []
        for cell in filter(None, map(str.strip, line.split(","))):
            match = _ACTION.fullmatch(cell)
            if match is None:
                raise UserError(
                    f"row {number}: {cell!r} is not an action; write stage, F, B, I or W, micro-batch, as in 0F3"
                )
            row.append(Action(int(match[1]), match[2], int(match[3])))  # type: ignore[arg-type]
        rows.append(tuple(row))
    return tuple(rows)


def format_rows(rows: Rows) -> str:
    """The text that `parse_rows` reads."""
    return "\n".join(",".join(map(str, row)) for row in rows)


def grid(rows: Rows) -> str:
    """Rows as an aligned rank × action table for people."""
    width = max((len(str(a)) for row in rows for a in row), default=1)
    return "\n".join(f"group {g}: " + " ".join(str(a).rjust(width) for a in row) for g, row in enumerate(rows))
