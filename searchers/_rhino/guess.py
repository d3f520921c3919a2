"""What a setting of Rhino's outer choices may take, without its strategies: for the order in which settings are solved.

Kernels share their work evenly; what is split by features reduces one tensor per product, what is split by samples
brings gradients together; state rests as it fits best. Of all that fit in memory the cheapest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from simpart.configure import recompute_regions
from simpart.cost import Collective, CollectiveKind
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.kernels.flops import kernel_class_flops
from simpart.kernels.ops import family_of
from simpart.lowering.transfers import CommPrices, sharing
from simpart.memory import ALLOCATOR_FACTOR, state_table, storages_of
from simpart.plan import REPLICA_AXIS
from simpart.problem import Problem
from simpart.searchers._cost_graph import Floats, Ints
from simpart.searchers._rhino.settings import Setting, slowest_row
from simpart.sharding.mesh import axis_members

__all__ = ["Guess", "Guesses", "region_numbers", "stashed_values"]

MESSAGE_BYTES = 25 << 20
OVER = 1e3
"""Factor of the guess where nothing fits: such settings come last, the least over first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Seconds of a step, and by how much of a device the memory counted is over (at most 0 where it fits)."""

    step_s: float
    over: float

    @property
    def order(self) -> tuple[bool, float]:
        return self.over > 0, self.step_s * (1.0 if self.over <= 0 else OVER * (1 + self.over))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Of one micro-batch: seconds of each call on one device; of all together bytes that products by features reduce,
    how many reduce them, and bytes kept for backward."""

    calls_s: Floats
    reduced_bytes: float
    products: int
    kept_bytes: float


class Guesses:
    """Asked setting by setting; what settings share is worked out once."""

    def __init__(self, problem: Problem, prices: CommPrices, device: Device, zero: Any) -> None:
        """`zero` gives the ZeRO levels of a setting."""
        self.problem, self.prices, self.device, self._zero = problem, prices, device, zero
        smallest = min(problem.cluster.kinds, key=lambda d: d.memory_bytes)
        self.limit = (smallest.memory_bytes - smallest.reserved_bytes) / ALLOCATOR_FACTOR[smallest.kind]
        self.state = state_table(problem.graph, problem.training)[:3].sum(axis=1).astype(np.float64)
        self._work: dict[tuple[int, str], _Work] = {}
        self._longest: dict[tuple[int, str, int], float] = {}
        self._members: dict[Any, tuple[tuple[int, ...], int]] = {}

    def of(self, setting: Setting) -> Guess:
        """The cheapest way that fits, else the one that is least over."""
        n, replicas, stages = setting.parts, setting.replicas, setting.stages
        work = self._work_of(setting)
        turns = setting.micro_batches + stages - 1
        key = (setting.micro_batch, setting.recompute, stages)
        if key not in self._longest:
            self._longest[key] = _longest_run(work.calls_s, stages)
        compute_s = turns * self._longest[key] / n
        flying = min(setting.micro_batches, stages) if "1f1b" in self.problem.space.schedules else setting.micro_batches
        kept = work.kept_bytes * flying / (stages * n)
        shares = self.state / stages
        found: list[tuple[float, float]] = []
        ways = ("features", "samples", "samples at rest") if n > 1 else ("features",)
        for way, zero in product(ways, self._zero(setting)):
            if way != "features" and setting.micro_batch % n:
                continue
            parameter, gradient, optimizer = shares if way == "samples" else shares / n
            exchange_s = 0.0
            if way == "features" and n > 1:
                each = work.reduced_bytes / max(1, work.products)
                exchange_s = turns * work.products * self._seconds(setting, "x", "all_reduce", each) / stages
            elif way == "samples":
                exchange_s = self._seconds(setting, "x", "all_reduce", shares[1])
            elif way == "samples at rest":
                exchange_s = turns * (
                    2 * self._seconds(setting, "x", "all_gather", shares[0])
                    + self._seconds(setting, "x", "reduce_scatter", shares[1])
                )
            exchange_s += self._replicas_s(setting, zero, parameter, gradient)
            held = (
                parameter / (replicas if zero > 2 else 1)
                + gradient / (replicas if zero > 1 else 1)
                + optimizer / (replicas if zero > 0 else 1)
            )
            found.append(((held + kept) / self.limit - 1, compute_s + exchange_s))
        fitting = [step_s for over, step_s in found if over <= 0]
        if fitting:
            return Guess(step_s=min(fitting), over=0.0)
        over, step_s = min(found)
        return Guess(step_s=step_s, over=over)

    def _replicas_s(self, setting: Setting, zero: int, parameter: float, gradient: float) -> float:
        if setting.replicas == 1:
            return 0.0
        if zero == 0:
            return self._seconds(setting, REPLICA_AXIS, "all_reduce", gradient)
        times = setting.micro_batches
        scatter_s = self._seconds(setting, REPLICA_AXIS, "reduce_scatter", gradient) * (times if zero > 1 else 1)
        gather_s = self._seconds(setting, REPLICA_AXIS, "all_gather", parameter) * (2 * times if zero > 2 else 1)
        return scatter_s + gather_s

    def _seconds(self, setting: Setting, axis: str, kind: CollectiveKind, size: float) -> float:
        """Messages as they are up to a bucket, larger ones in buckets."""
        key = (axis, setting.stages, setting.replicas, setting.axes)
        if key not in self._members:
            rows = axis_members(setting.slowest_group(self.problem.cluster), axis)
            self._members[key] = slowest_row(self.problem.cluster, rows), max(sharing(self.problem.cluster, rows))
        ranks, shared = self._members[key]
        message = max(1, min(int(size), MESSAGE_BYTES))
        talk = Collective(kind, message, ranks, shared)
        return self.prices.of([talk])[0].seconds * size / message

    def _work_of(self, setting: Setting) -> _Work:
        key = (setting.micro_batch, setting.recompute)
        if key not in self._work:
            graph = self.problem.graph.at(setting.micro_batch)
            prices = self.problem.prices([setting.micro_batch], self.device)[setting.micro_batch]
            op_class = graph.flat.op_class
            again = 2.0 if setting.recompute == "full" else 1.0
            op_s = (prices.forward.seconds * again + prices.backward.seconds)[op_class]
            regions = region_numbers(graph, [np.arange(len(op_class))] if again > 1 else [])
            reduced, products = _reduced(graph, setting.micro_batch)
            kept = storages_of(graph, setting.micro_batch).bytes[stashed_values(graph, setting.micro_batch, regions)]
            self._work[key] = _Work(
                calls_s=np.bincount(graph.flat.op_call, op_s, len(graph.calls)).astype(np.float64),
                reduced_bytes=reduced * (again + 1) / 2,
                products=round(products * (again + 1) / 2),
                kept_bytes=float(kept.sum()),
            )
        return self._work[key]


def _longest_run(seconds: Floats, runs: int) -> float:
    """The least longest time of so many runs of calls; an equal share where calls are fewer."""
    if len(seconds) < runs:
        return float(seconds.sum()) / runs
    ends = np.cumsum(seconds)
    low, high = max(float(seconds.max()), float(ends[-1]) / runs), float(ends[-1])
    for _ in range(12):
        middle, start = (low + high) / 2, 0.0
        for _ in range(runs):
            place = int(np.searchsorted(ends, start + middle * (1 + 1e-9), side="right"))
            if place >= len(ends):
                break
            start = float(ends[place - 1])
        else:
            low = middle
            continue
        high = middle
    return high


def region_numbers(graph: Graph, stages: list[Ints]) -> Ints:
    """Per op the number of the region, within its stage, that backward runs again; -1 where none does."""
    regions = np.full(len(graph.flat.op_class), -1, dtype=np.int64)
    number = 0
    for ops in stages:
        for region in recompute_regions(graph, ops):
            regions[region.indices(graph)] = number
            number += 1
    return regions


def stashed_values(graph: Graph, micro_batch: int, regions: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Kernel-level values whose storage forward leaves for backward."""
    flat, storages = graph.flat, storages_of(graph, micro_batch)
    read = storages.base[flat.kernel_inputs]
    maker = flat.kernel_value_kernel[read]
    region = regions[flat.kernel_op]
    late = ~flat.kernel_forward[storages.reader] | (region[storages.reader] >= 0)
    made = maker >= 0
    made_forward = np.zeros(len(read), dtype=bool)
    made_forward[made] = flat.kernel_forward[maker[made]]
    made_region = np.full(len(read), -1)
    made_region[made] = region[maker[made]]
    kept = late & made_forward & ((made_region < 0) | (made_region != region[storages.reader]))
    found = np.zeros(len(flat.kernel_value_kernel), dtype=bool)
    found[read[kept]] = True
    return found


def _reduced(graph: Graph, micro_batch: int) -> tuple[float, int]:
    """Bytes that forward and backward together reduce where products with weights are split in pairs by features, one
    tensor per product: the smaller of what it reads and what it makes."""
    flat, storages = graph.flat, storages_of(graph, micro_batch)
    flops = kernel_class_flops(graph, micro_batch)
    weighed = np.array([k.phase == "F" and family_of(k.target) != "attention" for k in graph.kernel_classes])
    counts = (weighed & (flops > 0))[flat.kernel_class]
    base = storages.base[flat.kernel_inputs]
    made = flat.kernel_value_kernel[base] >= 0
    size = len(flat.kernel_op)
    reads_source = np.bincount(storages.reader[~made], minlength=size) > 0
    read = np.zeros(size)
    np.maximum.at(read, storages.reader[made], storages.bytes[base[made]].astype(np.float64))
    written = storages.bytes[np.minimum(flat.kernel_outputs[:size], len(storages.bytes) - 1)].astype(np.float64)
    chosen = counts & reads_source
    smaller = np.where(read > 0, np.minimum(read, written), written)
    return float(smaller[chosen].sum()), int(chosen.sum())
