"""Errors a user can cause. Each message is one line: the rule, the value, the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ContradictionError", "FormatError", "Interrupted", "MismatchError", "ScheduleError", "UnknownNameError",
    "UnsupportedError", "UserError",
]  # fmt: skip


class UserError(ValueError):
    """Bad input. The command line prints the message alone and exits with status 2."""


class UnknownNameError(UserError):
    """A name that is not in the table it was looked up in; says the nearest spelling and the known names.

    >>> str(UnknownNameError("cluster", "dgx-a10", ["dgx-a100", "local"]))
    "unknown cluster 'dgx-a10'; did you mean 'dgx-a100'? Known: dgx-a100, local"
    """

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        super().__init__(f"unknown {what} {name!r}; {hint}Known: {', '.join(names) or 'none'}")
        self.name = name


class ContradictionError(UserError):
    """Wishes of which only one can hold, whatever the plan."""


class FormatError(UserError):
    """A file that is empty, truncated, of another kind, or of a newer version."""


class MismatchError(UserError):
    """Two things that must belong together do not, such as a plan and a graph."""


class ScheduleError(UserError):
    """A schedule that cannot run. `grid` is a picture of it, the first action at fault marked, to be printed below."""

    def __init__(self, message: str, grid: str) -> None:
        super().__init__(message)
        self.grid = grid


class UnsupportedError(UserError):
    """A valid request that this version does not carry out; says what would work."""


class Interrupted(Exception):
    """Ctrl-C or a deadline, raised where work can stop cleanly. Not an error: what was found so far is kept."""
