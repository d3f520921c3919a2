"""The command line's door: it imports next to nothing, so that Ctrl-C is answered in one line from the first moment."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 the user's mistake, 130 interrupted, 141 nobody reads the output."""
    try:
        from simpart.commands._interrupt import interrupt_ends

        with interrupt_ends():
            from simpart.commands._main import run
        run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
