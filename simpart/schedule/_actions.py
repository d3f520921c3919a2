"""Actions, rows of actions, and their text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from simpart.errors import UserError

__all__ = ["Action", "ActionKind", "Overlapped", "Rows", "format_rows", "grid", "parse_rows"]

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """What a stage does with a micro-batch; written `{stage}{kind}{micro-batch}`."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Overlapped(Action):
    """A forward that runs together with the backward behind it in its row: both start when both can, and what it makes
    is there when both are done. Equal to the plain Action."""

    __slots__ = ()


Rows = tuple[tuple[Action, ...], ...]

_CELL = re.compile(r"\([^()]*\)[^,]*|[^,]+")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_PAIR = re.compile(r"\((\d+)F(\d+);(\d+)B(\d+)\)OVERLAP_F_B", re.ASCII)
_IMPLIED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
"""What torch's dumps hold besides actions; here it follows from the stages."""


def parse_rows(text: str) -> Rows:
    """Read rows of actions, one line per device group, as torch's runtime reads and dumps them. Empty cells (waiting),
    transfers and gradient reductions are skipped.

    >>> parse_rows("0F0,0B0")[0][1]
    Action(stage=0, kind='B', micro_batch=0)
    >>> format_rows(parse_rows("0F0,,(0F1;3B0)OVERLAP_F_B,3SEND_B0"))
    '0F0,(0F1;3B0)OVERLAP_F_B'
    """
    rows = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        row: list[Action] = []
        for cell in filter(None, (found.strip() for found in _CELL.findall(line))):
            if match := _ACTION.fullmatch(cell):
                row.append(Action(int(match[1]), match[2], int(match[3])))  # type: ignore[arg-type]
            elif match := _PAIR.fullmatch(cell):
                ahead, m, back, n = map(int, match.groups())
                row += [Overlapped(ahead, "F", m), Action(back, "B", n)]
            elif not _IMPLIED.fullmatch(cell):
                raise UserError(
                    f"row {number}: {cell!r} is not an action; write stage, F, B, I or W, micro-batch, as in 0F3"
                )
        rows.append(tuple(row))
    return tuple(rows)


def format_rows(rows: Rows) -> str:
    """The text that `parse_rows` reads, and torch's `_load_csv`."""
    lines = []
    for row in rows:
        cells, actions = [], iter(row)
        for action in actions:
            pair = isinstance(action, Overlapped)
            cells.append(f"({action};{next(actions)})OVERLAP_F_B" if pair else str(action))
        lines.append(",".join(cells))
    return "\n".join(lines)


def grid(rows: Sequence[Sequence[Action]], mark: tuple[int, int] | None = None, reach: int = 8) -> str:
    """Rows as an aligned group × action table; with `mark` (row, column) that action stands in `> <`, and only what is
    at most `reach` rows and columns away is shown."""
    row, column = mark or (0, 0)
    first, start = (max(0, row - reach), max(0, column - reach)) if mark else (0, 0)
    shown = rows[first : row + reach + 1] if mark else rows
    cells = [
        [
            f">{a}<" if mark == (g, c) else f" {a} " if mark else str(a)
            for c, a in enumerate(line[start : column + reach + 1] if mark else line, start)
        ]
        for g, line in enumerate(shown, first)
    ]
    width = max((len(cell) for line in cells for cell in line), default=1)
    return "\n".join(
        f"group {g}: " + " ".join(cell.rjust(width) for cell in line) for g, line in enumerate(cells, first)
    )
