"""DAPPLE's plans of least latency: for each number of stages and each placement on machines, from dense costs.

The latency is filling time + (M - 1) × slowest block, where blocks are stages and the transfers between them.
Reference: Fan et al., PPoPP 2021; https://github.com/AlibabaPAI/DAPPLE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.machine_code import compiled
from simpart.searchers._caps import least_sum_and_maximum
from simpart.searchers._inputs import costs_array
from simpart.searchers._machines import (
    Placement,
    Profile,
    Situations,
    one_machine,
    placements,
    profile,
    same_machine,
    situations,
    state_of,
)

__all__ = ["Dapple", "DappleCosts", "DapplePlan", "DappleStage", "plan_estimate_s", "plan_latency_s"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
TABLES = 16
"""Tables that one search fills, roughly: what compiling their loop has to pay for."""
KEPT_BYTES = 64e6
"""Of tables that may be walked again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DappleCosts:
    """Costs of blocks [i, j) on `replicas[k]` devices, (n, n + 1, K), for one micro-batch; infinite where it cannot be.

    `inside_s` and `across_s` [i, k]: what enters block i, forward and back, to a stage on that many devices, if both
    stages are on one machine and if not. `later` is how many stages may follow, from memory. On devices of several
    kinds, `kinds` are those of the machines and `profiles[k]` says how many devices of each kind choice k has.
    """

    replicas: tuple[int, ...]
    time_s: Floats
    later: Integers
    inside_s: Floats
    across_s: Floats
    allreduce_inside_s: Floats
    allreduce_across_s: Floats
    kinds: tuple[int, ...] | None = None
    profiles: tuple[Profile, ...] | None = None

    @property
    def blocks(self) -> int:
        """Length n of the chain."""
        return int(self.time_s.shape[0])

    @property
    def choices(self) -> dict[Profile, int]:
        """The number of each choice."""
        return {each: k for k, each in enumerate(self.profiles or [(r,) for r in self.replicas])}

    def choice(self, placement: Sequence[int]) -> int:
        """Number of the choice that a placement is."""
        return self.choices[profile(placement, self.kinds)]


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


def _blocks_s(costs: DappleCosts, stages: Sequence[DappleStage]) -> Iterator[tuple[float, float]]:
    """(stage, transfer into it) seconds, stage by stage."""
    before: DappleStage | None = None
    for stage in stages:
        k = costs.choice(stage.placement)
        sent = 0.0
        if before is not None:
            table = costs.inside_s if same_machine(before.placement, stage.placement) else costs.across_s
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
        table = costs.allreduce_inside_s if one_machine(stage.placement) else costs.allreduce_across_s
        visible = max(visible, float(table[stage.start, stage.end, costs.choice(stage.placement)]) - x * slowest)
    return plan_latency_s(costs, stages, micro_batches) + visible


class Dapple:
    """One problem: costs, the machines of one pipeline, number of micro-batches M.

    `places` are the situations of these machines and replica counts, where they are known already.
    """

    def __init__(
        self,
        costs: DappleCosts,
        machines: Sequence[int],
        micro_batches: int,
        *,
        most_stages: int | None = None,
        places: Situations | None = None,
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
        self.choices = costs.choices
        self.places = places or situations(machines, self.choices, check=check, kinds=costs.kinds)
        self._constant = bool(((costs.later < 0) | (costs.later >= self.most_stages - 1)).all())
        self._latest: tuple[tuple[float, int], Floats] | None = None
        self._totals: dict[float, list[float]] = {}
        self._tables: dict[float, list[Floats]] = {}
        self._plans: dict[tuple[float, int], tuple[DappleStage, ...]] = {}

    def best(self, stage_count: int, *, below: float = math.inf, relaxed: Dapple | None = None) -> DapplePlan | None:
        """A plan of least latency with this number of stages on all devices; None if there is none, or none `below`.

        `relaxed` is a problem with fewer situations that bounds this one from below.
        """
        if not 1 <= stage_count <= self.most_stages:
            return None
        cap, value_s, _ = least_sum_and_maximum(
            self.caps,
            self.micro_batches - 1,
            lambda cap: self._least(cap, stage_count),
            below=below,
            relaxed=None if relaxed is None else lambda cap: relaxed._total(cap, stage_count),
        )
        if value_s == math.inf:
            return None
        stages = self._stages(cap, stage_count)
        return DapplePlan(
            stages=stages,
            latency_s=plan_latency_s(self.costs, stages, self.micro_batches),
            estimate_s=plan_estimate_s(self.costs, stages, self.micro_batches),
        )

    def _least(self, cap: float, count: int) -> tuple[float, float]:
        """(least sum, its slowest block) of plans with no block above `cap`."""
        total = self._total(cap, count)
        if total == math.inf:
            return math.inf, math.inf
        return total, max(max(pair) for pair in _blocks_s(self.costs, self._stages(cap, count)))

    def _total(self, cap: float, count: int) -> float:
        if cap not in self._totals:
            self._totals[cap] = [float(row[0, 0]) for row in self._table(cap)]
        return self._totals[cap][count]

    def _stages(self, cap: float, count: int) -> tuple[DappleStage, ...]:
        if (cap, count) not in self._plans:
            self._plans[cap, count] = self._trace(self._table(cap), cap, count)
        return self._plans[cap, count]

    def _steps_s(self, cap: float, left: int) -> Floats:
        """[k, across, i, j] seconds that a stage and the transfer into it add, infinite above the cap or the memory."""
        key = cap, 0 if self._constant else left
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._steps_within(cap, left)
        return self._latest[1]

    def _steps_within(self, cap: float, left: int) -> Floats:
        fits = (self.time_s <= cap) & (self.costs.later >= left - 1)
        time_s = np.where(fits, self.time_s, np.inf).transpose(2, 0, 1)
        sent = np.stack([self.costs.inside_s.T, self.costs.across_s.T], axis=1)
        sent[:, :, 0] = 0.0
        sent[sent > cap] = np.inf
        return time_s[:, None] + sent[:, :, :, None]

    def _table(self, cap: float) -> list[Floats]:
        """[stages left][situation, first block] least sum. The last tables are kept."""
        if cap not in self._tables:
            size = 8 * (self.most_stages + 1) * len(self.places.numbers) * (self.costs.blocks + 1)
            if len(self._tables) * size >= KEPT_BYTES:
                del self._tables[next(iter(self._tables))]
            self._tables[cap] = self._fill_table(cap)
        return self._tables[cap]

    def _fill_table(self, cap: float) -> list[Floats]:
        n, steps, ends = self.costs.blocks, self.places.steps, self.places.ends
        first = np.full((len(self.places.numbers), n + 1), np.inf)
        first[self.places.full, n] = 0.0
        table = [first]
        work = self.most_stages * (ends.shape[1] * n + steps.shape[1]) * n // 4
        loop = compiled(_relax, TABLES * work) or _relax_by_row
        reached = np.empty((ends.shape[1], n))
        for left in range(1, self.most_stages + 1):
            self.check()
            now = np.full_like(first, np.inf)
            loop(steps, ends, self._steps_s(cap, left), table[-1], now, reached, left)
            table.append(now)
        return table

    def _trace(self, table: list[Floats], cap: float, count: int) -> tuple[DappleStage, ...]:
        """Walk the table on real machines; the first choice that gives the table's value."""
        used, last, block = [0] * len(self.machines), None, 0
        stages: list[DappleStage] = []
        for left in range(count, 0, -1):
            value = table[left][self.places.numbers[state_of(used, self.machines, last, self.costs.kinds)], block]
            stage = self._stage_of_value(
                table[left - 1], self._steps_s(cap, left)[:, :, block], used, last, block, value
            )
            stages.append(stage)
            used = [a + b for a, b in zip(used, stage.placement, strict=True)]
            last, block = stage.placement, stage.end
        return tuple(stages)

    def _followers(self, used: tuple[int, ...], last: Placement | None) -> list[tuple[int, Placement, int, int]]:
        """Choice, placement, whether across machines and situation after it of every stage that can come next."""
        found, kinds = self.places.followers.get((used, last)), self.costs.kinds
        if found is None:
            found = self.places.followers[used, last] = []
            for r in sorted(set(self.costs.replicas)):
                for taken in placements(used, self.machines, r, last, self.places.ways, kinds):
                    if (k := self.choices.get(profile(taken, kinds))) is not None:
                        now = [a + b for a, b in zip(used, taken, strict=True)]
                        state = self.places.numbers[state_of(now, self.machines, taken, kinds)]
                        found.append((k, taken, int(last is None or not same_machine(last, taken)), state))
        return found

    def _stage_of_value(
        self, after: Floats, steps_s: Floats, used: list[int], last: Placement | None, block: int, value: float
    ) -> DappleStage:
        for k, taken, across, state in self._followers(tuple(used), last):
            ends = np.flatnonzero(steps_s[k, across] + after[state] == value)
            if ends.size:
                return DappleStage(start=block, end=int(ends[0]), placement=taken)
        raise AssertionError("some stage gave the table's value")


def _relax(steps: Any, ends: Any, steps_s: Any, after: Any, now: Any, reached: Any, left: int) -> None:
    """One more stage, `left` with it, before what `after` describes; compiled. Each stage takes a block at least."""
    n = now.shape[1] - 1
    last = n - left + 1
    for x in range(ends.shape[1]):
        target, k, across = ends[0, x], ends[1, x], ends[2, x]
        for i in range(last):
            least = np.inf
            for j in range(i + 1, last + 1):
                total = steps_s[k, across, i, j] + after[target, j]
                if total < least:
                    least = total
            reached[x, i] = least
    for x in range(steps.shape[1]):
        source, end = steps[0, x], steps[1, x]
        for i in range(last):
            if reached[end, i] < now[source, i]:
                now[source, i] = reached[end, i]


def _relax_by_row(
    steps: Integers, ends: Integers, steps_s: Floats, after: Floats, now: Floats, reached: Floats, left: int
) -> None:
    """The same with numpy."""
    for x, (target, k, across) in enumerate(ends.T.tolist()):
        reached[x] = (steps_s[k, across] + after[target]).min(axis=1)
    np.minimum.at(now[:, :-1], steps[0], reached[steps[1]])
