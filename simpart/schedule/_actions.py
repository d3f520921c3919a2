"""Actions, rows of actions, and their text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from simpart.errors import UserError

__all__ = ["Action", "ActionKind", "Rows", "format_rows", "grid", "parse_rows"]

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """What a stage does with a micro-batch; written `{stage}{kind}{micro-batch}`."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Rows = tuple[tuple[Action, ...], ...]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
"""What torch's dumps hold besides actions; here it follows from the stages."""


def parse_rows(text: str) -> Rows:
    """Read rows of actions, one line per device group, as torch's runtime reads and dumps them.

    Empty cells (waiting), transfers and gradient reductions are skipped; an overlapped pair `(0F1;3B0)OVERLAP_F_B` is
    its two actions in order, which is how torch runs it.

    >>> parse_rows("0F0,0B0")[0][1]
    Action(stage=0, kind='B', micro_batch=0)
    """
    rows = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        row = []
        for cell in filter(None, (part.strip() for part in _PAIR.sub(r"\1", line).replace(";", ",").split(","))):
            match = _ACTION.fullmatch(cell)
            if match is not None:
                row.append(Action(int(match[1]), match[2], int(match[3])))  # type: ignore[arg-type]
            elif not _IMPLIED.fullmatch(cell):
                raise UserError(
                    f"row {number}: {cell!r} is not an action; write stage, F, B, I or W, micro-batch, as in 0F3"
                )
        rows.append(tuple(row))
    return tuple(rows)


def format_rows(rows: Rows) -> str:
    """The text that `parse_rows` reads, and torch's `_load_csv`."""
    return "\n".join(",".join(map(str, row)) for row in rows)


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
