"""Schedules in which every group works on two stages at once: ZB-V, DualPipeV, and DualPipe with two copies of the
model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from simpart.errors import UnsupportedError
from simpart.schedule._actions import Action, Overlapped, Rows
from simpart.schedule._placement import one_each, v_shape

__all__ = ["dualpipe", "dualpipev", "zb_v"]

Turn = tuple[int, str]
"""An action of a group's first (0) or second (1) stage; micro-batches are counted off. `&` is a forward that overlaps
with the backward behind it."""


def zb_v(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """Stages go down the groups and back up; no bubble where forward, input and weight gradients take equally long.

    Reference: Qi et al., arXiv 2401.10241, section 6; the order of torch's ScheduleZBVZeroBubble.
    """
    order = v_shape("zb-v", group_of_stage)
    return _v_rows(order, micro_batches, [_zb_v(r, len(order), micro_batches) for r in range(len(order))])


def _zb_v(r: int, groups: int, micro_batches: int) -> Iterator[Turn]:
    count = max(2 * groups - 1, micro_batches)  # fewer don't fill the pipeline: those too many are left out
    yield from [(0, "F")] * (2 * (groups - r) - 1)
    yield from [(1, "F"), (0, "F")] * r
    yield from [(1, "F"), (1, "I"), (1, "W")] * (groups - r)
    first, second = 2 * groups - 1 - r, groups  # forwards so far
    while second < first or first < count:
        if first < count:
            yield 0, "F"
            first += 1
        yield from [(0, "I"), (0, "W"), (1, "F"), (1, "I"), (1, "W")]
        second += 1
    yield from [(0, "I"), (1, "I")] * r
    yield from [(0, "I"), (0, "W")] * (groups - r)
    yield from [(1, "W")] * r
    yield from [(0, "W")] * r


def dualpipev(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """Stages go down the groups and back up; in the middle every forward is paired with a backward of the other stage.

    Reference: github.com/deepseek-ai/DualPipe; the order of torch's ScheduleDualPipeV, with pairs written out.
    """
    order = v_shape("dualpipev", group_of_stage)
    groups = len(order)
    count = max(2 * groups, micro_batches)
    return _v_rows(order, micro_batches, [_dual(r, groups, count) for r in range(groups)])


def dualpipe(group_of_stage: Sequence[int], micro_batches: int) -> Rows:
    """Groups hold the model twice: group r stage r and, for the second half of the micro-batches, which run the other
    way, stage P - 1 - r. Bubble (P/2 - 1)(F&B + B - 3W).

    Reference: DeepSeek-V3 technical report (2024), arXiv 2412.19437; github.com/deepseek-ai/DualPipe.
    """
    one_each("dualpipe", group_of_stage)
    groups = len(group_of_stage)
    if groups % 2:
        raise UnsupportedError(f"schedule dualpipe needs an even number of stages, got {groups}; use dualpipev")
    first = (micro_batches + 1) // 2  # of the micro-batches run down, the others up
    shares = [range(first), range(first, micro_batches)]
    half, count = groups // 2, max(groups, first)
    rows: list[tuple[Action, ...]] = [()] * groups
    for r, group in enumerate(group_of_stage):
        turns = _dual(min(r, groups - 1 - r), half, count)
        here, other = (r, shares[0]), (groups - 1 - r, shares[1])
        rows[group] = _count_off(turns, (here, other) if r < half else (other, here))
    return tuple(rows)


def _dual(r: int, groups: int, count: int) -> Iterator[Turn]:
    """Turns of the r-th group; a W is that of the oldest I whose weight gradient is missing."""
    after = groups - 1 - r
    weights: deque[int] = deque()

    def backward(which: int, split: bool) -> Turn:
        if split:
            weights.append(which)
        return which, "I" if split else "B"

    def weight() -> Iterator[Turn]:
        if weights:
            yield weights.popleft(), "W"

    yield from [(0, "F")] * (2 * after)
    yield from [(0, "F"), (1, "F")] * (r + 1)
    for _ in range(after):
        yield backward(1, True)
        yield from weight()
        yield 1, "F"
    for i in range(count - 2 * groups + r + 1):
        yield 0, "F" if i == 0 and after == 0 else "&"
        yield from [(1, "B"), (1, "&"), (0, "B")]
    yield from [(1, "B"), (1, "&"), (0, "B")] * after
    split = False
    for i in range(r + 1):
        split = split or (i == (r + 1) // 2 and r % 2 == 1)
        yield backward(1, split)
        split = split or i == (r + 1) // 2
        yield backward(0, split)
    for _ in range(after):
        yield from weight()
        yield backward(0, split)
    for _ in range(r + 1):
        yield from weight()


def _v_rows(order: Sequence[int], micro_batches: int, turns: Sequence[Iterator[Turn]]) -> Rows:
    stages, every = 2 * len(order), range(micro_batches)
    rows: list[tuple[Action, ...]] = [()] * len(order)
    for r, (group, found) in enumerate(zip(order, turns, strict=True)):
        rows[group] = _count_off(found, ((r, every), (stages - 1 - r, every)))
    return tuple(rows)


def _count_off(turns: Iterator[Turn], stages: tuple[tuple[int, range], tuple[int, range]]) -> tuple[Action, ...]:
    """Give every turn its stage and the next micro-batch of that stage and kind; drop those beyond the last."""
    done: Counter[tuple[int, str]] = Counter()
    row: list[Action] = []
    for which, kind in turns:
        stage, share = stages[which]
        counted = {"B": "I", "&": "F"}.get(kind, kind)
        m = done[which, counted]
        done[which, counted] += 1
        if kind == "B":
            done[which, "W"] += 1
        if m >= len(share):
            if kind == "B" and row and isinstance(row[-1], Overlapped):  # its partner is left out
                row[-1] = Action(*row[-1])
        elif kind == "&":
            row.append(Overlapped(stage, "F", share[m]))
        else:
            row.append(Action(stage, kind, share[m]))  # type: ignore[arg-type]
    return tuple(row)
