"""Orders for a split backward from real times and a memory limit: weight gradients go where a group would wait.

First an order of forwards and input gradients: with one stage per group, 1F1B with various warm-ups; for any placement,
the order in which a micro-batch's actions repeat at the rate of the busiest group (modulo scheduling, Rau 1994), with
various slack per hop. Then weight gradients fill the gaps, or make room where memory is full. The best of all is taken.
References: Qi et al., arXiv 2401.10241 (ZB-H1, ZB-H2); arXiv 2405.15362 (V-half, V-min: the slack decides the memory).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from simpart.errors import UserError
from simpart.schedule._actions import Action, Rows

__all__ = ["StageTimes", "group_spans", "zero_bubble"]

Objective = Literal["makespan", "span"]
Order = list[tuple[str, int, int]]
"""Forwards and input gradients of a group: kind, stage, micro-batch."""
PATIENCE = (1.0, 0.5, 0.01)
"""A weight gradient is run while waiting if the wait is at least this share of it."""
TRIED = 3
"""Orders that are tried on all micro-batches, the best on a few first."""
TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch: F, I and W of each stage, and `send_s[s]` between stages s and s + 1, either way,
    where they are on different groups. `held[s]` is the memory a micro-batch takes on stage s from its forward on,
    `kept[s]` what of it is left between I and W, in any unit."""

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if {len(self.input_s), len(self.weight_s), len(self.held), len(self.kept), len(self.send_s) + 1} != {stages}:
            raise UserError(f"give times and memory of all {stages} stages, and one send less")
        for name in ("forward_s", "input_s", "weight_s", "send_s", "held", "kept"):
            for s, value in enumerate(getattr(self, name)):
                if not 0 <= value < float("inf"):
                    raise UserError(f"{name} must be finite and at least 0, got {value} for stage {s}")

    @staticmethod
    def equal(stages: int, forward_s: float, input_s: float, weight_s: float, send_s: float = 0.0) -> StageTimes:
        """Equal stages that hold 1 per micro-batch, half of it until W."""
        parts = ((value,) * stages for value in (forward_s, input_s, weight_s, 1.0, 0.5))
        f, i, w, held, kept = parts
        return StageTimes(forward_s=f, input_s=i, weight_s=w, send_s=(send_s,) * (stages - 1), held=held, kept=kept)


def zero_bubble(
    group_of_stage: Sequence[int], micro_batches: int, times: StageTimes, limit: float | Sequence[float],
    objective: Objective = "makespan",
) -> Rows:  # fmt: skip
    """Rows of F, I and W that hold at most `limit` per group (in the unit of `times.held`) and take little time.

    `objective` "span" is the longest time from a group's first start to its last end, which counts where steps follow
    one another. Raises UserError where no order tried stays within the limit.
    """
    groups = max(group_of_stage) + 1
    limits = [float(limit)] * groups if isinstance(limit, int | float) else [float(x) for x in limit]
    trial = min(micro_batches, 2 * groups + 2)  # orders repeat: a short run tells good ones from others
    settings: list[tuple[float, int, tuple[_Order, float]]] = []
    best: tuple[float, _Placed] | None = None
    for order in _orders(group_of_stage, micro_batches, times, limits):
        for patience in PATIENCE:
            placed = _fill(order.rows(trial), group_of_stage, trial, times, limits, patience)
            if placed is not None:
                settings.append((placed.cost(objective), len(settings), (order, patience)))
    settings.sort()
    tried = 0
    for _, _, (order, patience) in settings:
        placed = _fill(order.rows(micro_batches), group_of_stage, micro_batches, times, limits, patience)
        if placed is None:
            continue
        if best is None or placed.cost(objective) < best[0] - TINY:
            best = placed.cost(objective), placed
        tried += 1
        if tried == TRIED or trial == micro_batches:
            break
    if best is None:
        raise UserError(
            f"no order of {micro_batches} micro-batches holds at most {max(limits):g} per group; raise the limit"
        )
    return best[1].rows


def group_spans(rows: Rows, times: StageTimes) -> list[tuple[float, float]]:
    """First start and last end of each row when every action starts as soon as it can."""
    home = {a.stage: g for g, row in enumerate(rows) for a in row}
    placed = _fill([[(a.kind, a.stage, a.micro_batch) for a in row] for row in rows],
                   [home[s] for s in range(len(home))], 1 + max(a.micro_batch for row in rows for a in row), times,
                   [float("inf")] * len(rows), 1.0)  # fmt: skip
    assert placed is not None  # no limit
    return list(placed.spans)


# --- orders of forwards and input gradients ---------------------------------------------------------------------------
class _Warm(NamedTuple):
    """One stage per group: so many forwards, then input gradients and forwards in turn."""

    stages: Sequence[int]  # of each group
    warm_up: Sequence[int]

    def rows(self, micro_batches: int) -> list[Order]:
        rows = []
        for s, warm_up in zip(self.stages, self.warm_up, strict=True):
            row: Order = [("F", s, m) for m in range(min(warm_up, micro_batches))]
            for m in range(micro_batches):
                row.append(("I", s, m))
                if m + warm_up < micro_batches:
                    row.append(("F", s, m + warm_up))
            rows.append(row)
        return rows


class _Periodic(NamedTuple):
    """Each group's actions of a micro-batch by when they run; later micro-batches come `interval_s` after one
    another."""

    turns: Sequence[Sequence[tuple[float, str, int]]]
    interval_s: float

    def rows(self, micro_batches: int) -> list[Order]:
        found = []
        for turns in self.turns:
            row = [(start + m * self.interval_s, m, kind, s) for start, kind, s in turns for m in range(micro_batches)]
            found.append([(kind, s, m) for _, m, kind, s in sorted(row)])
        return found


_Order = _Warm | _Periodic


def _orders(home: Sequence[int], micro_batches: int, times: StageTimes, limits: Sequence[float]) -> Iterator[_Order]:
    stages, groups = len(home), len(limits)
    if len(set(home)) == stages:
        yield from _warm_ups(home, micro_batches, times, limits)
    work = [0.0] * groups
    for s, g in enumerate(home):
        work[g] += times.forward_s[s] + times.input_s[s] + times.weight_s[s]
    interval_s = max(work)
    unit_s = interval_s / (3 * max(1, stages // groups))
    slacks = (0.0, 0.5, 1.0, 2.0)
    seen = set()
    for down, up, back in itertools.product(slacks, slacks if stages > groups else (0.0,), slacks):
        turns = _modulo(home, times, interval_s, (down * unit_s, up * unit_s, back * unit_s))
        key = tuple(tuple(turn) for turn in turns)
        if key not in seen:
            seen.add(key)
            yield _Periodic(turns, interval_s)


def _warm_ups(home: Sequence[int], micro_batches: int, times: StageTimes, limits: Sequence[float]) -> Iterator[_Warm]:
    stages = len(home)
    arrive, first = 0.0, []
    for s in range(stages):
        first.append(arrive)
        arrive += times.forward_s[s] + (times.send_s[s] if s + 1 < stages else 0.0)
    wait = [0.0] * stages  # from the first forward's start to the first input gradient
    for s in reversed(range(stages)):
        wait[s] = arrive - first[s]
        arrive += times.input_s[s] + (times.send_s[s - 1] if s else 0.0)
    by_time = [w / max(f, TINY) for w, f in zip(wait, times.forward_s, strict=True)]
    families = [[k * (stages - s) + c for s in range(stages)] for k in (1, 2) for c in (-1, 0, 1)]
    families += [[round(x + c) for x in by_time] for c in (0, 0.5, 1)]
    stage_of = [home.index(g) for g in range(stages)]
    seen = set()
    for family in families:
        room = [int(limits[home[s]] / times.held[s] + TINY) if times.held[s] else micro_batches for s in range(stages)]
        warm = [max(1, min(w, r, micro_batches)) for w, r in zip(family, room, strict=True)]
        for s in range(1, stages):  # a stage can't run more before its first answer than were sent to it
            warm[s] = min(warm[s], warm[s - 1])
        if tuple(warm) not in seen:
            seen.add(tuple(warm))
            yield _Warm(stage_of, [warm[s] for s in stage_of])


def _modulo(
    home: Sequence[int], times: StageTimes, interval_s: float, slack_s: tuple[float, float, float]
) -> list[list[tuple[float, str, int]]]:
    """Starts of one micro-batch's forwards and input gradients, each at the first time its group is free, by the
    interval, of what was placed before. Slack is added per hop: on forwards of the first half of the stages, on those
    of the second half, on input gradients."""
    stages = len(home)
    turns: list[list[tuple[float, str, int]]] = [[] for _ in range(max(home) + 1)]
    taken: list[list[tuple[float, float]]] = [[] for _ in turns]
    at = 0.0

    def place(kind: str, s: int, seconds: float) -> None:
        nonlocal at
        at = _free(taken[home[s]], at, seconds, interval_s)
        taken[home[s]].append((at, seconds))
        turns[home[s]].append((at, kind, s))
        at += seconds

    for s in range(stages):
        if s and home[s] != home[s - 1]:
            at += times.send_s[s - 1] + slack_s[2 * s >= stages]
        place("F", s, times.forward_s[s])
    for s in reversed(range(stages)):
        if s + 1 < stages and home[s] != home[s + 1]:
            at += times.send_s[s] + slack_s[2]
        place("I", s, times.input_s[s])
    return turns


def _free(taken: Sequence[tuple[float, float]], ready: float, seconds: float, interval_s: float) -> float:
    """The first time from `ready` on at which `seconds` are free in every interval; `ready` where there is none."""
    at, clear = ready, False
    while not clear:
        clear = True
        for start, length in taken:
            since = (at - start) % interval_s
            if interval_s - since < TINY * interval_s:
                since = 0.0
            if since < length - TINY:
                at += length - since
                clear = False
            elif interval_s - since < seconds - TINY:
                at += interval_s - since + length
                clear = False
        if at > ready + 2 * interval_s:
            return ready
    return at


# --- weight gradients ------------------------------------------------------------------------------------------------
class _Placed(NamedTuple):
    rows: Rows
    spans: tuple[tuple[float, float], ...]

    def cost(self, objective: Objective) -> float:
        if objective == "makespan":
            return max(end for _, end in self.spans)
        return max(end - start for start, end in self.spans)


def _fill(
    orders: Sequence[Sequence[tuple[str, int, int]]], home: Sequence[int], micro_batches: int, times: StageTimes,
    limits: Sequence[float], patience: float,
) -> _Placed | None:  # fmt: skip
    """Run the orders, each action as soon as it can; where they hold no W, put these in. None: over the limit, or the
    orders wait for one another."""
    last, groups = len(home) - 1, len(orders)
    forward: list[list[float]] = [[-1.0] * micro_batches for _ in home]
    backward: list[list[float]] = [[-1.0] * micro_batches for _ in home]
    hop = [t if a != b else 0.0 for t, a, b in zip(times.send_s, home, home[1:], strict=False)]
    rows: list[list[Action]] = [[] for _ in orders]
    clock, held, position = [0.0] * groups, [0.0] * groups, [0] * groups
    begin = [-1.0] * groups
    pending: list[deque[tuple[int, int]]] = [deque() for _ in orders]
    waiting: dict[tuple[str, int, int], int] = {}
    split = not any(kind == "W" for order in orders for kind, _, _ in order)
    work = list(range(groups))
    while work:
        g = work.pop()
        row, queue, now, level, limit = rows[g], pending[g], clock[g], held[g], limits[g] + TINY
        order = orders[g]
        while position[g] < len(order):
            kind, s, m = order[position[g]]
            if kind == "F":
                source = forward[s - 1][m] if s else 0.0
                ready, needs = source + (hop[s - 1] if s else 0.0), ("F", s - 1, m)
            elif kind == "W":
                source = ready = 0.0
            else:
                source = backward[s + 1][m] if s < last else forward[s][m]
                ready, needs = source + (hop[s] if s < last else 0.0), ("I", s + 1, m)
            if source < 0:
                waiting[needs] = g
                break
            full = kind == "F" and level + times.held[s] > limit
            if queue and (full or ready - now >= patience * times.weight_s[queue[0][0]]):
                stage, k = queue.popleft()
                row.append(Action(stage, "W", k))
                begin[g] = now if begin[g] < 0 else begin[g]
                now += times.weight_s[stage]
                level -= times.kept[stage]
                continue
            if full:
                return None
            now = max(now, ready)
            begin[g] = now if begin[g] < 0 else begin[g]
            row.append(Action(s, kind, m))  # type: ignore[arg-type]
            if kind == "F":
                now += times.forward_s[s]
                level += times.held[s]
                forward[s][m] = now
            elif kind == "W":
                now += times.weight_s[s]
                level -= times.kept[s]
            else:
                now += times.input_s[s] + (times.weight_s[s] if kind == "B" else 0.0)
                level -= times.held[s] - (times.kept[s] if kind == "I" else 0.0)
                backward[s][m] = now
                if split and kind == "I":
                    queue.append((s, m))
            position[g] += 1
            if kind != "W" and (kind[0] if kind != "B" else "I", s, m) in waiting:
                work.append(waiting.pop((kind if kind != "B" else "I", s, m)))
        else:
            for stage, k in queue:
                row.append(Action(stage, "W", k))
                now += times.weight_s[stage]
            queue.clear()
        clock[g], held[g] = now, level
    if any(position[g] < len(orders[g]) for g in range(groups)):
        return None
    return _Placed(tuple(map(tuple, rows)), tuple(zip(begin, clock, strict=True)))
