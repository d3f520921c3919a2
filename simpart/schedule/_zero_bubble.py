"""Orders for a split backward from real times and a memory limit: weight gradients go where a group would wait.

First an order of forwards and input gradients: with one stage per group, 1F1B with various warm-ups; for any placement,
the order in which a micro-batch's actions repeat at the rate of the busiest group (modulo scheduling, Rau 1994), with
various slack per hop. Then weight gradients fill the gaps, or make room where memory is full. The best of all is taken.
References: Qi et al., arXiv 2401.10241 (ZB-H1, ZB-H2); arXiv 2405.15362 (V-half, V-min: the slack decides the memory).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from simpart.errors import UserError
from simpart.schedule._actions import Action, Rows
from simpart.schedule._zero_bubble_loops import fill, merge

__all__ = ["StageTimes", "group_spans", "zero_bubble", "zero_bubble_order"]

Objective = Literal["makespan", "span"]
LETTERS = "FBIW"


class Order(NamedTuple):
    """Actions of all groups, one after the other, as arrays; `kind` indexes LETTERS."""

    indptr: Any
    kind: Any
    stage: Any
    micro_batch: Any

    def rows(self) -> Rows:
        columns = self.stage.tolist(), self.kind.tolist(), self.micro_batch.tolist()
        flat = [Action(s, LETTERS[k], m) for s, k, m in zip(*columns, strict=True)]  # type: ignore[arg-type]
        return tuple(tuple(flat[a:b]) for a, b in itertools.pairwise(self.indptr.tolist()))


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
    return zero_bubble_order(group_of_stage, micro_batches, times, limit, objective).rows()


def zero_bubble_order(
    group_of_stage: Sequence[int], micro_batches: int, times: StageTimes, limit: float | Sequence[float],
    objective: Objective = "makespan",
) -> Order:  # fmt: skip
    """The same as arrays."""
    groups = max(group_of_stage) + 1
    limits = [float(limit)] * groups if isinstance(limit, int | float) else [float(x) for x in limit]
    trial = min(micro_batches, 2 * groups + 2)  # orders repeat: a short run tells good ones from others
    filling = _Filling(group_of_stage, times, limits, max(trial * 100, 5 * micro_batches) * len(group_of_stage))
    settings: list[tuple[float, int, tuple[_Order, float]]] = []
    best: tuple[float, _Placed] | None = None
    for order in _orders(group_of_stage, micro_batches, times, limits):
        short = order.actions(trial, filling)
        for patience in PATIENCE:
            placed = filling.fill(short, trial, patience)
            if placed is not None:
                settings.append((placed.cost(objective), len(settings), (order, patience)))
    settings.sort()
    tried = 0
    for _, _, (order, patience) in settings:
        placed = filling.fill(order.actions(micro_batches, filling), micro_batches, patience)
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
    return best[1].order


def group_spans(rows: Rows, times: StageTimes) -> list[tuple[float, float]]:
    """First start and last end of each row when every action starts as soon as it can."""
    home = {a.stage: g for g, row in enumerate(rows) for a in row}
    flat = [a for row in rows for a in row]
    order = Order(
        np.cumsum([0] + [len(row) for row in rows]),
        np.array([LETTERS.index(a.kind) for a in flat], dtype=np.int64),
        np.array([a.stage for a in flat], dtype=np.int64),
        np.array([a.micro_batch for a in flat], dtype=np.int64),
    )
    homes, count = [home[s] for s in range(len(home))], 1 + max(a.micro_batch for a in flat)
    placed = _Filling(homes, times, [float("inf")] * len(rows), len(flat)).fill(order, count, 1.0)
    assert placed is not None  # no limit
    return list(placed.spans)


# --- orders of forwards and input gradients ---------------------------------------------------------------------------
class _Warm(NamedTuple):
    """One stage per group: so many forwards, then input gradients and forwards in turn."""

    stages: Sequence[int]  # of each group
    warm_up: Sequence[int]

    def actions(self, micro_batches: int, filling: _Filling) -> Order:
        count, groups = micro_batches, len(self.stages)
        warm_up = np.minimum(np.array(self.warm_up), count)[:, None]
        m = np.arange(count)[None, :]
        kind, micro_batch = np.empty((2, groups, 2 * count), dtype=np.int64)
        forward_at = np.where(m < warm_up, m, 2 * m - warm_up + 1)
        backward_at = warm_up + m + np.minimum(m, count - warm_up)
        for at, number in ((forward_at, 0), (backward_at, 2)):
            np.put_along_axis(kind, at, number, axis=1)
            np.put_along_axis(micro_batch, at, np.broadcast_to(m, at.shape), axis=1)
        indptr = np.arange(groups + 1) * 2 * count
        return Order(indptr, kind.ravel(), np.repeat(np.array(self.stages), 2 * count), micro_batch.ravel())


class _Periodic(NamedTuple):
    """Each group's actions of a micro-batch by when they run; later micro-batches come `interval_s` after one
    another."""

    turns: Sequence[Sequence[tuple[float, int, int]]]
    interval_s: float

    def actions(self, micro_batches: int, filling: _Filling) -> Order:
        flat = [turn for turns in self.turns for turn in turns]
        first = np.cumsum([0] + [len(turns) for turns in self.turns])
        given = filling.give(
            first,
            np.array([start_s for start_s, _, _ in flat]),
            np.array([kind for _, kind, _ in flat], dtype=np.int64),
            np.array([s for *_, s in flat], dtype=np.int64),
        )
        made = [filling.space(len(flat) * micro_batches, 0) for _ in range(3)]
        filling.merge(*given, self.interval_s, micro_batches, filling.space(len(flat), 0), *made)
        return Order(first * micro_batches, *map(np.asarray, made))


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
) -> list[list[tuple[float, int, int]]]:
    """Starts of one micro-batch's forwards and input gradients, each at the first time its group is free, by the
    interval, of what was placed before. Slack is added per hop: on forwards of the first half of the stages, on those
    of the second half, on input gradients."""
    stages = len(home)
    turns: list[list[tuple[float, int, int]]] = [[] for _ in range(max(home) + 1)]
    taken: list[list[tuple[float, float]]] = [[] for _ in turns]
    at = 0.0

    def place(kind: int, s: int, seconds: float) -> None:
        nonlocal at
        at = _free(taken[home[s]], at, seconds, interval_s)
        taken[home[s]].append((at, seconds))
        turns[home[s]].append((at, kind, s))
        at += seconds

    for s in range(stages):
        if s and home[s] != home[s - 1]:
            at += times.send_s[s - 1] + slack_s[2 * s >= stages]
        place(0, s, times.forward_s[s])
    for s in reversed(range(stages)):
        if s + 1 < stages and home[s] != home[s + 1]:
            at += times.send_s[s] + slack_s[2]
        place(2, s, times.input_s[s])
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
    order: Order
    spans: tuple[tuple[float, float], ...]

    def cost(self, objective: Objective) -> float:
        if objective == "makespan":
            return max(end for _, end in self.spans)
        return max(end - start for start, end in self.spans)


class _Filling:
    """Runs orders of stages that lie like this; as machine code where that is worth it for so many actions."""

    def __init__(self, home: Sequence[int], times: StageTimes, limits: Sequence[float], work: int) -> None:
        from simpart.machine_code import compiled

        fast_fill, fast_merge = compiled(fill, work), compiled(merge, work)
        self.fast = fast_fill is not None and fast_merge is not None
        self._fill: Callable[..., Any] = fast_fill or fill
        self.merge: Callable[..., Any] = fast_merge or merge
        hop = [t if a != b else 0.0 for t, a, b in zip(times.send_s, home, home[1:], strict=False)]
        columns = (times.forward_s, times.input_s, times.weight_s, hop, times.held, times.kept)
        limit = [level + TINY for level in limits]
        self.stages, self.groups = len(home), len(limits)
        self.costs = self.give(*(np.array(column, dtype=np.float64) for column in (*columns, limit)))

    def give(self, *arrays: Any) -> list[Any]:
        """As the loops take them."""
        return list(arrays) if self.fast else [array.tolist() for array in arrays]

    def space(self, size: int, value: float) -> Any:
        return np.full(size, value) if self.fast else [value] * size

    def fill(self, order: Order, micro_batches: int, patience: float) -> _Placed | None:
        """Run the orders, each action as soon as it can; where they hold no W, put these in. None: over the limit, or
        the orders wait for one another."""
        space, groups, size = self.space, self.groups, self.stages * micro_batches
        indptr = np.asarray(order.indptr)
        split = not bool((order.kind == 3).any())
        more = np.concatenate([[0], np.cumsum(order.kind == 2)])[indptr] if split else np.zeros_like(indptr)
        out_ptr = indptr + more
        begin, clock, made = space(groups, -1.0), space(groups, 0.0), [space(int(out_ptr[-1]), 0) for _ in range(3)]
        actions = self.give(indptr, order.kind, order.stage, order.micro_batch)
        head, tail, position, work, out_at = self.give(
            *(indptr[:-1].copy() for _ in range(3)), np.arange(groups), out_ptr[:-1].copy()
        )
        fits = self._fill(
            *actions, micro_batches, split, *self.costs, patience, space(size, -1.0), space(size, -1.0),
            space(2 * (size + micro_batches), -1), space(len(order.kind), 0), head, tail, position,
            space(groups, 0.0), work, begin, clock, self.give(out_ptr)[0], out_at, *made,
        )  # fmt: skip
        if not fits:
            return None
        spans = tuple((float(a), float(b)) for a, b in zip(begin, clock, strict=True))
        return _Placed(Order(out_ptr, *map(np.asarray, made)), spans)
