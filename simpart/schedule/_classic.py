"""Schedules whose order is written down: GPipe, 1F1B, and those that go round the groups several times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from simpart.schedule._actions import Action, ActionKind, Rows
from simpart.schedule._placement import loops, one_each

__all__ = ["gpipe", "interleaved_1f1b", "interleaved_arrays", "interleaved_zb", "looped_bfs", "one_f_one_b"]


def gpipe(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """All forwards of the step, then all backwards; a group with several stages takes them one after the other.

    Reference: Huang et al., "GPipe" (2019).
    """
    return _all_forward_first(group_of_stage, range(micro_batches), range(micro_batches))


def looped_bfs(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """GPipe over stages that go round the groups, last micro-batch back first.

    Reference: Lamy-Poirier, "Breadth-first pipeline parallelism" (2022); the order of torch's ScheduleLoopedBFS.
    """
    return _all_forward_first(group_of_stage, range(micro_batches), range(micro_batches - 1, -1, -1))


def _all_forward_first(group_of_stage: Sequence[int], there: Sequence[int], back: Sequence[int]) -> Rows:
    rows = []
    for group in range(max(group_of_stage) + 1):
        stages = [s for s, g in enumerate(group_of_stage) if g == group]
        forward = [Action(s, "F", m) for s in stages for m in there]
        rows.append((*forward, *(Action(s, "B", m) for s in reversed(stages) for m in back)))
    return tuple(rows)


def one_f_one_b(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """Stage s runs min(S - s, M) forwards, then one backward and one forward in turn, then the remaining backwards.

    Reference: Narayanan et al., "PipeDream" (2019), synchronous form (DAPPLE, PipeDream-flush).
    """
    one_each("1f1b", group_of_stage)
    stages = len(group_of_stage)
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


def interleaved_1f1b(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """Each group holds every P-th stage; micro-batches pass all its stages in rounds of about P, one forward and one
    backward in turn after a warm-up.

    Reference: Narayanan et al., "Efficient large-scale language model training" (2021); the order of torch's
    ScheduleInterleaved1F1B, whose number of micro-batches must be a multiple of the rounds. Here rounds may differ by
    one.
    """
    return _interleaved("interleaved-1f1b", group_of_stage, micro_batches, hop=2, split=False)


def interleaved_arrays(group_of_stage: Sequence[int], micro_batches: int) -> tuple[Any, Any, Any, Any]:
    """The same as arrays: where each group's row begins, then stage, kind (0 F, 1 B) and micro-batch of every action,
    row after row."""
    order = loops("interleaved-1f1b", group_of_stage)
    groups, depth = len(order), len(group_of_stage) // len(order)
    rounds = _rounds(micro_batches, max(1, micro_batches // groups))
    parts = [np.arange(found.start, found.stop) for found in rounds]
    turns = [np.repeat(np.arange(depth) * groups, part.size) for part in parts]
    passed = np.concatenate([np.tile(part, depth) for part in parts])
    there, back = np.concatenate(turns), np.concatenate([turn[::-1] for turn in turns])
    count = there.size
    stage, kind, micro_batch = np.empty((3, groups, 2 * count), dtype=np.int64)
    i = np.arange(count)
    for r, group in enumerate(order):
        warm_up = min((depth - 1) * len(rounds[0]) + 2 * (groups - 1 - r), count)
        forward_at = np.where(i < warm_up, i, 2 * i - warm_up)
        backward_at = warm_up + i + np.minimum(i + 1, count - warm_up)
        for at, number, stages in ((forward_at, 0, there), (backward_at, 1, back)):
            stage[group, at], kind[group, at], micro_batch[group, at] = stages + r, number, passed
    return np.arange(groups + 1) * 2 * count, stage.ravel(), kind.ravel(), micro_batch.ravel()


def interleaved_zb(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """The same with a split backward: weight gradients follow the input gradients of the r-th micro-batch after theirs
    on the r-th group. The order of torch's ScheduleInterleavedZeroBubble (ZB1P)."""
    return _interleaved("interleaved-zb", group_of_stage, micro_batches, hop=1, split=True)


def _interleaved(kind: str, group_of_stage: Sequence[int], micro_batches: int, hop: int, split: bool) -> Rows:
    order = loops(kind, group_of_stage)
    groups, depth = len(order), len(group_of_stage) // len(order)
    rounds = _rounds(micro_batches, max(1, micro_batches // groups))
    there = [(k * groups, m) for found in rounds for k in range(depth) for m in found]
    back = [(k * groups, m) for found in rounds for k in reversed(range(depth)) for m in found]
    letter: ActionKind = "I" if split else "B"
    rows: list[tuple[Action, ...]] = [()] * groups
    for r, group in enumerate(order):
        warm_up = min((depth - 1) * len(rounds[0]) + hop * (groups - 1 - r), len(there))
        row = [Action(k + r, "F", m) for k, m in there[:warm_up]]
        late = r if split else len(back)  # how many backwards a weight gradient stays behind
        for i, (k, m) in enumerate(back):
            if warm_up + i < len(there):
                ahead, n = there[warm_up + i]
                row.append(Action(ahead + r, "F", n))
            row.append(Action(k + r, letter, m))
            if i >= late:
                row.append(Action(back[i - late][0] + r, "W", back[i - late][1]))
        if split:
            row += [Action(k + r, "W", m) for k, m in back[max(0, len(back) - late) :]]
        rows[group] = tuple(row)
    return tuple(rows)


def _rounds(micro_batches: int, count: int) -> list[range]:
    """Micro-batches in `count` runs whose lengths differ by at most one, the longer ones first."""
    least, more = divmod(micro_batches, count)
    ends = [least * i + min(i, more) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]
