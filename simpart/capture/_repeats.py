"""Repeated regions of a sequence of ops: tandem repeats by token, phase by live values, equality by canonical form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Window", "find_windows"]

SHORTEST_PERIOD = 4
LONGEST_PERIOD = 4096


@dataclass(frozen=True, slots=True)
class Window:
    """Ops `start … stop` of one instance; windows of equal `form` are calls of one template."""

    start: int
    stop: int
    form: int


def find_windows(
    tokens: Sequence[int],
    live: Sequence[int],
    equal: Callable[[int, int, int], bool],
) -> list[Window]:
    """Repeated windows, in order, disjoint.

    `tokens` says what each op is, `live[i]` how many values are needed on both sides of the cut before op i, and
    `equal(a, b, length)` whether the windows that start at a and b have the same canonical form.
    """
    items = np.asarray(tokens, dtype=np.int64)
    found: list[tuple[int, int, int]] = []  # start, period, count
    regions = [(0, len(items))]
    while regions:
        low, high = regions.pop()
        best = _best_run(items, np.asarray(live), low, high, equal)
        if best is not None:
            start, period, count = best
            found.append(best)
            regions += [(low, start), (start + period * count, high)]
    return _adopt(items, sorted(found), equal)


def _best_run(
    items: np.ndarray[tuple[int], np.dtype[np.int64]],
    live: np.ndarray[tuple[int], np.dtype[np.int64]],
    low: int,
    high: int,
    equal: Callable[[int, int, int], bool],
) -> tuple[int, int, int] | None:
    """(start, period, count) of the run of equal windows in low … high that saves the most ops."""
    part = items[low:high]
    best, best_saving = None, 0
    candidates: list[tuple[int, int, int, int]] = []  # -saving bound, period, first, length of the run
    for period in range(SHORTEST_PERIOD, min(len(part) // 2, LONGEST_PERIOD) + 1):
        same = np.concatenate([[False], part[:-period] == part[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = last - first + period
            if (saving := (length // period - 1) * period) > 0:
                candidates.append((-saving, period, first, length))
    for bound, period, first, length in sorted(candidates):
        if -bound <= best_saving:
            break
        count = length // period
        slack = length - count * period
        cuts = [(int(live[low + first + p + period :: period][: count - 1].sum()), p) for p in range(slack + 1)]
        start = low + first + min(cuts)[1]
        for run_start, run_count in _equal_stretches(start, period, count, equal):
            if (run_count - 1) * period > best_saving:
                best, best_saving = (run_start, period, run_count), (run_count - 1) * period
    return best


def _equal_stretches(
    start: int, period: int, count: int, equal: Callable[[int, int, int], bool]
) -> list[tuple[int, int]]:
    """Stretches (start, count) of consecutive windows with one canonical form."""
    stretches: list[tuple[int, int]] = []
    first = 0
    for i in range(1, count + 1):
        if i == count or not equal(start + first * period, start + i * period, period):
            stretches.append((start + first * period, i - first))
            first = i
    return stretches


def _adopt(
    items: np.ndarray[tuple[int], np.dtype[np.int64]],
    runs: list[tuple[int, int, int]],
    equal: Callable[[int, int, int], bool],
) -> list[Window]:
    """The runs as windows, with free stretches that equal a known form added to it."""
    models: list[tuple[int, int]] = []  # start, length of the first window of each form
    windows: list[Window] = []
    for start, period, count in runs:
        form = next((i for i, m in enumerate(models) if m[1] == period and equal(m[0], start, period)), len(models))
        if form == len(models):
            models.append((start, period))
        windows += [Window(start + i * period, start + (i + 1) * period, form) for i in range(count)]
    edges = [0, *(edge for w in windows for edge in (w.start, w.stop)), len(items)]
    free = [(a, b) for a, b in list(pairwise(edges))[::2] if a < b]
    for form, (model, length) in enumerate(models):
        pattern = items[model : model + length]
        rest: list[tuple[int, int]] = []
        for low, high in free:
            at = low
            while at + length <= high:
                if (
                    items[at] == pattern[0]
                    and np.array_equal(items[at : at + length], pattern)
                    and equal(model, at, length)
                ):
                    windows.append(Window(at, at + length, form))
                    rest.append((low, at))
                    low = at = at + length
                else:
                    at += 1
            rest.append((low, high))
        free = [(a, b) for a, b in rest if a < b]
    return sorted(windows, key=lambda w: w.start)
