"""Progress on stderr, shown only when work takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from simpart.describe import human_seconds

if TYPE_CHECKING:
    from simpart.searching import Progress

__all__ = ["search_progress"]

DELAY_S = 2.0


@contextmanager
def search_progress() -> Iterator[Callable[..., None]]:
    """A callback for `searching.search`: how far it is, the best plan so far, and by how much it may be beaten."""
    start = last = time.monotonic()
    shown = False

    def show(progress: Progress, what: str = "searching") -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - start < DELAY_S or now - last < 0.5:
            return
        last, shown = now, True
        done, total, best = progress.done, progress.total, progress.best
        parts = [f"{done}/{total}" if total else f"{done}" if done is not None else "", human_seconds(now - start)]
        if best is not None:
            parts.append(f"best {human_seconds(best.evaluation.step_s)}")
        if progress.floor_gap is not None:
            parts.append(f"at most {progress.floor_gap:.0%} less is possible")
        if progress.gap is not None:
            parts.append(f"own bound {human_seconds(progress.bound_s or 0.0)}, gap {progress.gap:.1%}")
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{what} " + ", ".join(filter(None, parts)), end=end, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown and sys.stderr.isatty():
            print(file=sys.stderr)
