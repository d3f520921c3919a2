"""Progress on stderr, shown only when work takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simpart.describe import human_seconds

__all__ = ["search_progress"]

DELAY_S = 2.0


@contextmanager
def search_progress() -> Iterator[Callable[[int | None, int | None, float | None, Any], None]]:
    """A callback for `searching.search`: how far it is and the best plan so far."""
    start = last = time.monotonic()
    shown = False

    def show(done: int | None, total: int | None, bound: float | None, incumbent: Any) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - start < DELAY_S or now - last < 0.5:
            return
        last, shown = now, True
        parts = [f"{done}/{total}" if total else f"{done}" if done is not None else "", human_seconds(now - start)]
        if incumbent is not None:
            parts.append(f"best {human_seconds(incumbent.evaluation.step_s)}")
        end = "\r" if sys.stderr.isatty() else "\n"
        print("searching " + ", ".join(filter(None, parts)), end=end, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown and sys.stderr.isatty():
            print(file=sys.stderr)
