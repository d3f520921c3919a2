"""The stage problem on a chain of blocks: cut it into stages and give each stage devices, exactly.

Stage [i, j) on r devices costs f = F + C forward and g = B + C backward (C = transfers). Over all ways to cut n blocks
into S stages whose replica counts add up to D devices, minimise max f + max g. A single (f, g) record per table cell is
not exact for a sum of two maxima; here a best-first search over Pareto sets of (f, g) is, steered by two exact tables
that bound what remains. One pair of tables serves every S. Reference: Tanaka et al., IPDPS 2021 (arXiv 2103.16063),
whose dynamic program this corrects.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpart.describe import human_bytes
from simpart.searchers._bottleneck import bottleneck_layer
from simpart.searchers._stages import ChainStage, StageCosts, check_costs, choices_at, later_stages_allowed

__all__ = ["ChainPlan", "Shortfall", "Tables", "Unplannable", "plan_value_s", "solve_chain"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """A best plan for its number of stages; `value_s` = max (F + C) + max (B + C)."""

    stages: tuple[ChainStage, ...]
    value_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The tightest stage of the plan that comes closest to fitting; 0 bytes over is at the limit, which is too much."""

    stage: ChainStage
    bytes_over: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplannable:
    """Why no plan has this number of stages: a shortfall of memory, or (None) replica and batch rules alone."""

    stage_count: int
    shortfall: Shortfall | None

    def reason(self) -> str:
        """One sentence for people."""
        if self.shortfall is None:
            return "no replica counts within the rules use the devices"
        stage = self.shortfall.stage
        where = f"blocks {stage.start}..{stage.end - 1} on {stage.replicas} device{'s' if stage.replicas > 1 else ''}"
        return f"at best, the stage with {where} is {human_bytes(self.shortfall.bytes_over)} over the memory limit"


def plan_value_s(costs: StageCosts, stages: tuple[ChainStage, ...]) -> float:
    """Value of a plan, computed from the plan alone."""
    picked = costs.entries(stages)
    return max(float(costs.forward_s[at] + costs.transfer_s[at]) for at in picked) + max(
        float(costs.backward_s[at] + costs.transfer_s[at]) for at in picked
    )


def solve_chain(
    costs: StageCosts,
    devices: int,
    max_stages: int,
    *,
    all_devices: bool = True,
    stage_counts: tuple[int, ...] | None = None,
) -> dict[int, ChainPlan | Unplannable]:
    """Best plan, or why there is none, for each number of stages 1..max_stages (or those in `stage_counts`).

    `all_devices`: every one of the devices is used; otherwise at most that many.
    """
    tables = Tables(costs, devices, min(max_stages, costs.blocks, devices))
    wanted = range(1, max_stages + 1) if stage_counts is None else stage_counts
    return {count: tables.best(count, all_devices=all_devices) for count in wanted}


class _Label(NamedTuple):
    """A plan for the first blocks: made from label `parent` by a stage on `replicas[k]` devices; f and g are lifted."""

    parent: int
    left: int
    block: int
    devices: int
    f: float
    g: float
    k: int


class Tables:
    """Exact least maxima of f and of g for finishing the chain: [stages left][first block][devices left]."""

    def __init__(self, costs: StageCosts, devices: int, max_stages: int) -> None:
        check_costs(costs)
        n = costs.blocks
        self.costs = costs
        self.devices = devices
        self.max_stages = max_stages
        self.replicas = np.asarray(costs.replicas, dtype=np.int64)
        later = later_stages_allowed(costs)
        forward, backward = costs.forward_s + costs.transfer_s, costs.backward_s + costs.transfer_s
        done = np.full((n + 1, devices + 1), np.inf)
        done[n, 0] = -np.inf
        self.least_f, self.least_g = [done], [done]
        self.f: list[Floats] = [forward]
        self.g: list[Floats] = [backward]
        constant = bool(np.isin(later, (-1, n)).all())
        for left in range(1, max_stages + 1):
            if left == 1 or not constant:
                fits = later >= left - 1
                forward, backward = np.where(fits, forward, np.inf), np.where(fits, backward, np.inf)
            self.f.append(forward)
            self.g.append(backward)
            self.least_f.append(bottleneck_layer(forward, costs.replicas, self.least_f[-1], costs.places))
            self.least_g.append(bottleneck_layer(backward, costs.replicas, self.least_g[-1], costs.places))
        self._excess: list[Floats] | None = None

    def bound_s(self, stage_count: int, *, all_devices: bool = True) -> float:
        """Lower bound of the value with this number of stages; infinite exactly when no plan exists."""
        if not 1 <= stage_count <= self.max_stages:
            return float("inf")
        totals = self.least_f[stage_count][0] + self.least_g[stage_count][0]
        return float(totals[self.devices] if all_devices else totals.min())

    def best(self, stage_count: int, *, all_devices: bool = True) -> ChainPlan | Unplannable:
        """A plan of least value with exactly `stage_count` stages."""
        if self.bound_s(stage_count, all_devices=all_devices) == float("inf"):
            return Unplannable(stage_count=stage_count, shortfall=self._shortfall(stage_count, all_devices))
        starts = [self.devices] if all_devices else list(range(self.devices, 0, -1))
        stages = self._search(stage_count, starts)
        return ChainPlan(stages=stages, value_s=plan_value_s(self.costs, stages))

    def ties(self, stage_count: int, value_s: float, limit: int, devices: int) -> list[tuple[ChainStage, ...]]:
        """Plans of exactly this (least) value on `devices` devices, in lexicographic order of cuts.

        All of them, unless that takes more than `limit` steps.
        """
        found: list[tuple[ChainStage, ...]] = []
        stack: list[tuple[int, int, float, float, tuple[ChainStage, ...]]] = [(0, devices, -np.inf, -np.inf, ())]
        for _ in range(limit):
            if not stack:
                break
            block, free, f, g, stages = stack.pop()
            left = stage_count - len(stages)
            if left == 0:
                found.append(stages)
                continue
            lifted_f, lifted_g = self.extend(left, block, free, f, g)
            for offset, k in reversed(np.argwhere(lifted_f + lifted_g <= value_s).tolist()):
                stage = ChainStage(start=block, end=block + 1 + offset, replicas=int(self.replicas[k]))
                pair = float(lifted_f[offset, k]), float(lifted_g[offset, k])
                stack.append((stage.end, free - stage.replicas, *pair, (*stages, stage)))
        return found

    def extend(self, left: int, block: int, devices: int, f: float, g: float) -> tuple[Floats, Floats]:
        """(f, g) after each stage that may come next, lifted to what the rest needs at least: [end - block - 1, k]."""
        usable = int(np.searchsorted(self.replicas, devices, side="right"))
        rest = devices - self.replicas[:usable]
        after_f, after_g = self.least_f[left - 1][block + 1 :, rest], self.least_g[left - 1][block + 1 :, rest]
        lifted_f = np.maximum(np.maximum(self.f[left][block, block + 1 :, :usable], after_f), f)
        lifted_g = np.maximum(np.maximum(self.g[left][block, block + 1 :, :usable], after_g), g)
        if self.costs.places is not None:
            elsewhere = ~self.costs.places[:usable, devices]
            lifted_f[:, elsewhere], lifted_g[:, elsewhere] = np.inf, np.inf
        return lifted_f, lifted_g

    def _search(self, stage_count: int, starts: list[int]) -> tuple[ChainStage, ...]:
        """Best-first over labels (stages left, block, devices left, f, g); the first complete plan popped is optimal.

        Labels carry f and g lifted to the tables' bound for the rest, which makes most of them equal and so dominated.
        Ties go to the deeper label, then to the one made first: deterministic.
        """
        roots = []
        for devices in starts:
            f, g = float(self.least_f[stage_count][0, devices]), float(self.least_g[stage_count][0, devices])
            if f + g < np.inf:
                roots.append((f + g, f, g, devices))
        _, f, g, devices = min(roots, key=lambda root: root[0])
        best, best_value = self._dive(stage_count, devices, f, g)
        labels = [_Label(-1, stage_count, 0, devices, f, g, -1) for _, f, g, devices in roots]
        children: list[tuple[Floats, Floats, Floats, list[tuple[int, int]]]] = []
        # An entry stands for the next child of a label: (bound, stages left after it, serial, label, child).
        heap: list[tuple[float, int, int, int, int]] = []
        fronts: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        serial = itertools.count()

        def open_label(label: _Label) -> None:
            lifted_f, lifted_g = self.extend(label.left, label.block, label.devices, label.f, label.g)
            totals = lifted_f + lifted_g
            at = np.nonzero(totals < best_value)
            order = np.argsort(totals[at], kind="stable")
            ends, ks = at[0][order], at[1][order]
            places = list(zip((ends + label.block + 1).tolist(), ks.tolist(), strict=True))
            children.append((totals[ends, ks], lifted_f[ends, ks], lifted_g[ends, ks], places))
            if places:
                number = len(children) - 1
                heapq.heappush(heap, (float(children[-1][0][0]), label.left - 1, next(serial), number, 0))

        for label in labels:
            open_label(label)
        while heap:
            _, left, _, parent, child = heapq.heappop(heap)
            totals, all_f, all_g, places = children[parent]
            if child + 1 < len(places):
                heapq.heappush(heap, (float(totals[child + 1]), left, next(serial), parent, child + 1))
            end, k = places[child]
            f, g = float(all_f[child]), float(all_g[child])
            devices = labels[parent].devices - int(self.replicas[k])
            front = fronts.setdefault((left, end, devices), [])
            # Labels come in the order of f + g, so a later one never dominates an earlier one.
            if any(a <= f and b <= g for a, b in front):
                continue
            front.append((f, g))
            labels.append(_Label(parent, left, end, devices, f, g, k))
            if left == 0:
                return self._trace(labels)
            open_label(labels[-1])
        return best

    def _dive(self, left: int, devices: int, f: float, g: float) -> tuple[tuple[ChainStage, ...], float]:
        """A good plan fast: always the next stage of least bound."""
        stages: list[ChainStage] = []
        block = 0
        for remaining in range(left, 0, -1):
            lifted_f, lifted_g = self.extend(remaining, block, devices, f, g)
            offset, k = (int(x) for x in np.unravel_index(int(np.argmin(lifted_f + lifted_g)), lifted_f.shape))
            f, g = float(lifted_f[offset, k]), float(lifted_g[offset, k])
            end, r = block + 1 + offset, int(self.replicas[k])
            stages.append(ChainStage(start=block, end=end, replicas=r))
            block, devices = end, devices - r
        return tuple(stages), f + g

    def _trace(self, labels: list[_Label]) -> tuple[ChainStage, ...]:
        """Stages on the way to the last label."""
        stages: list[ChainStage] = []
        label = labels[-1]
        while label.parent >= 0:
            before = labels[label.parent]
            stages.append(ChainStage(start=before.block, end=label.block, replicas=int(self.replicas[label.k])))
            label = before
        return tuple(reversed(stages))

    def _shortfall(self, stage_count: int, all_devices: bool) -> Shortfall | None:
        """The stage that overflows least, over all plans that obey the replica and batch rules."""
        if not 1 <= stage_count <= self.max_stages:
            return None
        if self._excess is None:
            self._excess = [self.least_f[0]]
            for left in range(1, self.max_stages + 1):
                over = self._over(left)
                self._excess.append(bottleneck_layer(over, self.costs.replicas, self._excess[-1], self.costs.places))
        root = self._excess[stage_count][0]
        devices = self.devices if all_devices else int(np.argmin(root))
        least = float(root[devices])
        if least == np.inf:
            return None
        block = 0
        for left in range(stage_count, 0, -1):
            over = self._over(left)
            after = self._excess[left - 1]
            options = [
                (max(float(over[block, end, k]), float(after[end, devices - r])), -float(over[block, end, k]), end, k)
                for k in choices_at(self.costs.replicas, self.costs.places, devices)
                for r in [self.costs.replicas[k]]
                for end in range(block + 1, self.costs.blocks + 1)
            ]
            _, negative_over, end, k = min(options)
            if -negative_over >= least:
                return Shortfall(
                    stage=ChainStage(start=block, end=end, replicas=self.costs.replicas[k]), bytes_over=-negative_over
                )
            block, devices = end, devices - self.costs.replicas[k]
        raise AssertionError("the walk along a table always meets the stage that gave its value")

    def _over(self, left: int) -> Floats:
        n = self.costs.blocks
        usable = self.costs.allowed & (np.arange(n + 1)[None, :, None] > np.arange(n)[:, None, None])
        return np.where(usable, self.costs.bytes_needed(left - 1) - self.costs.limit_bytes, np.inf)
