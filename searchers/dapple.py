"""DAPPLE: synchronous pipelines whose stages also choose which machines their devices are on.

A stage's devices come from unused machines, from partly used ones, or one by one from all machines. For each number of
stages the plan of least filling time + (M - 1) × slowest block is found, where blocks are stages and the transfers
between them. Reference: Fan et al., PPoPP 2021; https://github.com/AlibabaPAI/DAPPLE. Mended here: each stage counts
with its own replicas while the pipeline fills, memory is limited, machines may have any number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.engines._jit import compiled
from simpart.searchers._caps import least_sum_and_maximum
from simpart.searchers._inputs import costs_array

__all__ = [
    "Dapple",
    "DappleCosts",
    "DapplePlan",
    "DappleStage",
    "Placement",
    "placements",
    "plan_estimate_s",
    "plan_latency_s",
]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Placement = tuple[int, ...]
"""Devices that a stage takes on each machine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DappleCosts:
    """Costs of blocks [i, j) on `replicas[k]` devices, (n, n + 1, K), for one micro-batch; infinite where it cannot be.

    `inside_s` and `across_s` [i, k]: what enters block i, forward and back, to a stage on that many devices, if both
    stages are on one machine and if not. `later` is how many stages may follow, from memory.
    """

    replicas: tuple[int, ...]
    time_s: Floats
    later: Integers
    inside_s: Floats
    across_s: Floats
    allreduce_inside_s: Floats
    allreduce_across_s: Floats

    @property
    def blocks(self) -> int:
        """Length n of the chain."""
        return int(self.time_s.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class DappleStage:
    """Blocks [start, end) with devices on each machine."""

    start: int
    end: int
    placement: Placement

    @property
    def replicas(self) -> int:
        return sum(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class DapplePlan:
    """`latency_s` is minimised: sum of all blocks + (M - 1) × the slowest. `estimate_s` adds all-reduces not hidden."""

    stages: tuple[DappleStage, ...]
    latency_s: float
    estimate_s: float


def placements(
    used: Sequence[int], sizes: Sequence[int], count: int, last: Placement | None = None, kinds: int = 3
) -> list[Placement]:
    """The first `kinds` of three ways to take `count` free devices, where `last` are those of the stage before.

    Unused machines whole; partly used machines first; one by one from every machine with free devices.

    >>> placements([1, 0], [4, 4], 2)
    [(0, 2), (2, 0), (1, 1)]
    """
    machines = range(len(sizes))
    free = [sizes[m] - used[m] for m in machines]
    if sum(free) < count:
        return []
    # The fullest first, then by the stage before, so that equal situations are met in equal order on any machines.
    order = sorted(machines, key=lambda m: (-used[m], -(last[m] if last else 0), sizes[m], m))
    fresh, partly = [m for m in order if used[m] == 0], [m for m in order if used[m] > 0]
    found = [_fill(fresh + partly, free, count), _fill(partly + fresh, free, count), _scatter(order, free, count)]
    return list(dict.fromkeys(found[:kinds]))


def _fill(order: Sequence[int], free: Sequence[int], count: int) -> Placement:
    taken = [0] * len(free)
    for m in order:
        taken[m] = min(free[m], count)
        count -= taken[m]
    return tuple(taken)


def _scatter(order: Sequence[int], free: Sequence[int], count: int) -> Placement:
    taken = [0] * len(free)
    while count:
        for m in order:
            if count and taken[m] < free[m]:
                taken[m] += 1
                count -= 1
    return tuple(taken)


def _one_machine(placement: Sequence[int]) -> bool:
    return sum(x > 0 for x in placement) == 1


def _same_machine(a: Sequence[int], b: Sequence[int]) -> bool:
    return _one_machine([x + y for x, y in zip(a, b, strict=True)])


def _blocks_s(costs: DappleCosts, stages: Sequence[DappleStage]) -> Iterator[tuple[float, float]]:
    """(stage, transfer into it) seconds, stage by stage."""
    before: DappleStage | None = None
    for stage in stages:
        k = costs.replicas.index(stage.replicas)
        sent = 0.0
        if before is not None:
            table = costs.inside_s if _same_machine(before.placement, stage.placement) else costs.across_s
            sent = float(table[stage.start, k])
        yield float(costs.time_s[stage.start, stage.end, k]), sent
        before = stage


def plan_latency_s(costs: DappleCosts, stages: Sequence[DappleStage], micro_batches: int) -> float:
    """What is minimised, computed from the plan alone."""
    blocks = list(_blocks_s(costs, stages))
    return sum(a + b for a, b in blocks) + (micro_batches - 1) * max(max(pair) for pair in blocks)


def plan_estimate_s(costs: DappleCosts, stages: Sequence[DappleStage], micro_batches: int) -> float:
    """The planner's time of a step: latency and the longest all-reduce that stages before do not hide."""
    slowest = max(max(pair) for pair in _blocks_s(costs, stages))
    visible = 0.0
    for x, stage in enumerate(stages):
        table = costs.allreduce_inside_s if _one_machine(stage.placement) else costs.allreduce_across_s
        visible = max(visible, float(table[stage.start, stage.end, costs.replicas.index(stage.replicas)]) - x * slowest)
    return plan_latency_s(costs, stages, micro_batches) + visible


# Free devices, used devices, and those of the stage before where it and the next could share the machine; sorted.
_State = tuple[tuple[int, int, int], ...]


def _state(used: Sequence[int], sizes: Sequence[int], last: Placement | None) -> _State:
    shared = last is not None and _one_machine(last)
    marks = [
        last[m] if shared and last is not None and last[m] and used[m] < sizes[m] else 0 for m in range(len(sizes))
    ]
    return tuple(sorted((sizes[m], used[m], marks[m]) for m in range(len(sizes))))


class Dapple:
    """One problem: costs, the machines of one pipeline, number of micro-batches M.

    Where the ways to place stages lead to more than `most_states` situations, stages are not spread over all machines,
    and if need be do not prefer partly used ones.
    """

    def __init__(
        self,
        costs: DappleCosts,
        machines: Sequence[int],
        micro_batches: int,
        *,
        most_stages: int | None = None,
        most_states: int = 3_000,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.costs, self.machines, self.micro_batches, self.check = costs, tuple(machines), micro_batches, check
        for name in ("time_s", "inside_s", "across_s", "allreduce_inside_s", "allreduce_across_s"):
            costs_array(name, getattr(costs, name))
        n = costs.blocks
        self.most_stages = min(n, sum(machines), most_stages or n)
        real = np.arange(n + 1)[None, :, None] > np.arange(n)[:, None, None]
        self.time_s = np.where(real & (costs.later >= 0), costs.time_s, np.inf)
        values = np.concatenate([x.ravel() for x in (self.time_s, costs.inside_s[1:], costs.across_s[1:])])
        self.caps: list[float] = np.unique(values[np.isfinite(values)]).tolist()
        for self.kinds in (3, 2, 1):
            if self._find_states(most_states):
                break
        self._solved: dict[float, list[tuple[float, float, tuple[DappleStage, ...]]]] = {}

    def _find_states(self, most: int) -> bool:
        """All situations stages can leave the machines in, and the steps between them: (from, to, k, across).

        False if there are more than `most`.
        """
        start = _state([0] * len(self.machines), self.machines, None)
        self.states: dict[_State, int] = {start: 0}
        steps: set[tuple[int, int, int, int]] = set()
        waiting = [start]
        while waiting:
            self.check()
            if len(self.states) > most and self.kinds > 1:
                return False
            state = waiting.pop()
            sizes, used, marks = ([row[x] for row in state] for x in range(3))
            source = self.states[state]
            for k, r in enumerate(self.costs.replicas):
                for taken in placements(used, sizes, r, tuple(marks), self.kinds):
                    after = _state([a + b for a, b in zip(used, taken, strict=True)], sizes, taken)
                    if after not in self.states:
                        self.states[after] = len(self.states)
                        waiting.append(after)
                    across = not any(marks) or not _same_machine(marks, taken)
                    steps.add((source, self.states[after], k, int(across)))
        self.steps = np.array(sorted(steps), dtype=np.int64).reshape(-1, 4).T
        self.end = [x for state, x in self.states.items() if all(size == used for size, used, _ in state)]
        return True

    def best(self, stage_count: int) -> DapplePlan | None:
        """A plan of least latency with this number of stages on all devices; None if there is none."""
        if not 1 <= stage_count <= self.most_stages:
            return None
        cap, value_s, _ = least_sum_and_maximum(
            self.caps, self.micro_batches - 1, lambda cap: self._least(cap)[stage_count][:2]
        )
        if value_s == math.inf:
            return None
        stages = self._least(cap)[stage_count][2]
        return DapplePlan(
            stages=stages,
            latency_s=plan_latency_s(self.costs, stages, self.micro_batches),
            estimate_s=plan_estimate_s(self.costs, stages, self.micro_batches),
        )

    def _least(self, cap: float) -> list[tuple[float, float, tuple[DappleStage, ...]]]:
        """(least sum, slowest block, stages) of plans below `cap`, for each number of stages."""
        if cap not in self._solved:
            table = self._table(cap)
            answers: list[tuple[float, float, tuple[DappleStage, ...]]] = []
            for count in range(self.most_stages + 1):
                total = float(table[count][0, 0])
                stages = self._trace(table, cap, count) if 0 < total < math.inf else ()
                answers.append((total, max((max(x) for x in _blocks_s(self.costs, stages)), default=math.inf), stages))
            self._solved[cap] = answers
        return self._solved[cap]

    def _steps_s(self, cap: float, left: int) -> Floats:
        """[k, across, i, j] seconds that a stage and the transfer into it add, infinite above the cap or the memory."""
        fits = (self.time_s <= cap) & (self.costs.later >= left - 1)
        time_s = np.where(fits, self.time_s, np.inf).transpose(2, 0, 1)
        sent = np.stack([self.costs.inside_s.T, self.costs.across_s.T], axis=1)
        sent[:, :, 0] = 0.0
        sent[sent > cap] = np.inf
        return time_s[:, None] + sent[:, :, :, None]

    def _table(self, cap: float) -> list[Floats]:
        """[stages left][state, first block] least sum."""
        n = self.costs.blocks
        first = np.full((len(self.states), n + 1), np.inf)
        first[self.end, n] = 0.0
        table = [first]
        loop = compiled(_relax, self.most_stages * self.steps.shape[1] * n * n // 2) or _relax_by_row
        for left in range(1, self.most_stages + 1):
            self.check()
            now = np.full_like(first, np.inf)
            loop(self.steps, self._steps_s(cap, left), table[-1], now)
            table.append(now)
        return table

    def _trace(self, table: list[Floats], cap: float, count: int) -> tuple[DappleStage, ...]:
        """Walk the table on real machines; the first choice that gives the table's value."""
        used, last, block = [0] * len(self.machines), None, 0
        stages: list[DappleStage] = []
        for left in range(count, 0, -1):
            steps = self._steps_s(cap, left)
            value = table[left][self.states[_state(used, self.machines, last)], block]
            stage = next(self._stages_of_value(table, steps, left, used, last, block, value))
            stages.append(stage)
            used = [a + b for a, b in zip(used, stage.placement, strict=True)]
            last, block = stage.placement, stage.end
        return tuple(stages)

    def _stages_of_value(
        self,
        table: list[Floats],
        steps: Floats,
        left: int,
        used: list[int],
        last: Placement | None,
        block: int,
        value: float,
    ) -> Iterator[DappleStage]:
        for k, r in enumerate(self.costs.replicas):
            for taken in placements(used, self.machines, r, last, self.kinds):
                across = last is None or not _same_machine(last, taken)
                after = _state([a + b for a, b in zip(used, taken, strict=True)], self.machines, taken)
                reached = steps[k, int(across), block] + table[left - 1][self.states[after]]
                for end in np.flatnonzero(reached == value).tolist():
                    yield DappleStage(start=block, end=end, placement=taken)


def _relax(steps: Any, steps_s: Any, after: Any, now: Any) -> None:
    """One more stage before what `after` describes; compiled."""
    n = now.shape[1] - 1
    for x in range(steps.shape[1]):
        source, target, k, across = steps[0, x], steps[1, x], steps[2, x], steps[3, x]
        for i in range(n):
            least = now[source, i]
            for j in range(i + 1, n + 1):
                total = steps_s[k, across, i, j] + after[target, j]
                if total < least:
                    least = total
            now[source, i] = least


def _relax_by_row(steps: Integers, steps_s: Floats, after: Floats, now: Floats) -> None:
    """The same with numpy."""
    for source, target, k, across in steps.T.tolist():
        np.minimum(now[source, :-1], (steps_s[k, across] + after[target]).min(axis=1), out=now[source, :-1])
