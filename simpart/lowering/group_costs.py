"""What passes between stages, what is summed over replicas and groups, and what a group's update takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any, Protocol

import numpy as np

from simpart.cost import Collective
from simpart.cost.pricing import Amount
from simpart.graph import Graph
from simpart.hardware import Cluster, Device
from simpart.lowering.action_costs import ActionCosts
from simpart.lowering.alike import Totals
from simpart.lowering.flows import LinkUse, ring_use, transfer_use
from simpart.lowering.layout import Arrangement, Layout, Replicas
from simpart.lowering.ledger import ClassCost, class_cost, moving
from simpart.lowering.sharded import bucketed, local_parts
from simpart.lowering.topology import Reduction
from simpart.lowering.transfers import Load, Message, busiest, loads, messages, sharing
from simpart.plan import Plan

__all__ = ["BUCKET_BYTES", "GroupCosts"]


class Costed(Protocol):
    """What `lowering.Costed` says of a plan."""

    @property
    def layout(self) -> Layout: ...
    @property
    def arrangement(self) -> Arrangement: ...
    @property
    def sharded(self) -> int: ...
    @property
    def reductions(self) -> tuple[Reduction, ...]: ...
    @property
    def costs(self) -> tuple[ClassCost, ...]: ...


BUCKET_BYTES = 25 << 20
"""Largest all-reduce of gradients: the default bucket of torch's DistributedDataParallel, and what validate sends."""
NORM_BYTES = 8
Form = tuple[tuple[TensorSpec, bool], ...]


@dataclass(slots=True)
class GroupCosts:
    """Costs of transfers, reductions and updates of one problem's plans; equal ones are priced once."""

    actions: ActionCosts
    known: dict[tuple[Any, ...], ClassCost] = field(default_factory=dict)
    sent: dict[tuple[Any, ...], ClassCost] = field(default_factory=dict)
    places: dict[tuple[int, int, int], int] = field(default_factory=dict)
    forms: dict[int, tuple[int, Form]] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], tuple[float, ...]] = field(default_factory=dict)
    concurrent: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    # --- between stages -----------------------------------------------------------------------------------------------
    def transfers(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, shares: Sequence[Totals] | None
    ) -> list[ClassCost]:
        """There and back of every edge. Where groups split kernels, every device of a replica sends its part to its
        counterpart (of a smaller group: in turn)."""
        keys: list[tuple[Any, ...] | None] = []
        missing: dict[tuple[Any, ...], list[Load]] = {}
        for e, edge in enumerate(layout.edges):
            source, target = plan.stages[edge.source].group, plan.stages[edge.target].group
            if source == target:
                keys += [None, None]
                continue
            form, specs = self._form(layout, e)
            parts = None if shares is None else self._parts(plan, layout, arrangement, e)
            place = self._place(arrangement, source, target)
            for back in (False, True):
                if back and not edge.backward:
                    keys.append(None)
                    continue
                key = (form, place, back, parts)
                keys.append(key)
                if key not in self.sent and key not in missing:
                    ends = (arrangement.ends[source], arrangement.ends[target])
                    sizes = partial(_sizes, specs, parts, back)
                    missing[key] = loads(
                        self.actions.communication.cluster, _counterparts(*(ends[::-1] if back else ends)), sizes
                    )
        prices = self.actions.communication
        prices.of(load.collective for found in missing.values() for load in found)  # all at once
        for key, found in missing.items():
            self.sent[key] = class_cost("transfers", (), [(row, 1.0) for row in busiest(prices, found)])
        return [NOTHING if key is None else self.sent[key] for key in keys]

    def uses(self, plan: Plan, costed: Costed) -> list[LinkUse]:
        """Bytes over links of each task class: transfers, and reductions as rings."""
        cluster, layout, arrangement = self.actions.communication.cluster, costed.layout, costed.arrangement
        found: list[LinkUse] = [{} for _ in range(4 * len(plan.stages))]
        for e, edge in enumerate(layout.edges):
            parts = self._parts(plan, layout, arrangement, e) if costed.sharded >= 0 else None
            ends = [arrangement.ends[plan.stages[s].group] for s in (edge.source, edge.target)]
            for back in (False, True):
                pair = ends[::-1] if back else ends
                local = ends[0] == ends[1] or (back and not edge.backward)
                sizes = partial(_sizes, self._form(layout, e)[1], parts, back)
                found.append({} if local else transfer_use(cluster, loads(cluster, _counterparts(*pair), sizes)))
        for reduction, cost in zip(costed.reductions, costed.costs[len(found) :], strict=False):
            ranks = _ranks(plan, reduction.groups)
            size = layout.own_bytes[reduction.stage] if reduction.stage >= 0 else NORM_BYTES
            tied = [total for (groups, _), total in zip(layout.tied, layout.tied_bytes, strict=True)
                    if groups == reduction.groups and reduction.axis == "tied"]  # fmt: skip
            found.append(ring_use(cluster, ranks, sum(tied) if tied else size) if cost.seconds > 0 else {})
        return found + [{}] * (len(costed.costs) - len(found))

    def _form(self, layout: Layout, e: int) -> tuple[int, Form]:
        """What an edge carries, whatever values these are: of each its spec and whether a gradient returns."""
        key = layout.load_keys[e]
        if key not in self.forms:
            form = tuple((layout.graph.flat.value_spec[value], gradient) for value, gradient in layout.loads[e])
            self.forms[key] = self.actions.layouts.numbers.of(form), form
        return self.forms[key]

    def _parts(self, plan: Plan, layout: Layout, arrangement: Arrangement, e: int) -> tuple[float, ...]:
        """Part of each value of an edge that one device of the sending stage holds."""
        number, s = self.actions.layouts.numbers.of, layout.edges[e].source
        group = plan.stages[s].group
        size = arrangement.largest[group]
        split = (number(plan.shardings), plan.stages[s].sharding, number(plan.groups[group].axes))
        key = (layout.load_keys[e], *split, size)
        if key not in self.parts:
            part = self.actions.alike.part
            self.parts[key] = tuple(part(plan, layout, s, value, size) for value, _ in layout.loads[e])
        return self.parts[key]

    def _place(self, arrangement: Arrangement, source: int, target: int) -> int:
        """Equal for pairs of groups that lie alike in the cluster: moved by whole blocks of an inner level of links,
        devices meet the same links."""
        key = (arrangement.number, source, target)
        if key not in self.places:
            cluster, ends = self.actions.communication.cluster, (arrangement.ends[source], arrangement.ends[target])
            devices = [d for _, replicas in ends for replica in replicas for d in replica]
            shift = _shift(cluster, devices)
            moved = tuple(
                (sizes, tuple(tuple(d - shift for d in replica) for replica in replicas)) for sizes, replicas in ends
            )
            self.places[key] = self.actions.layouts.numbers.of(moved)
        return self.places[key]

    # --- once per step ------------------------------------------------------------------------------------------------
    def reductions(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, reductions: Sequence[Reduction],
        shares: Sequence[Totals] | None, sharded: int,
    ) -> list[ClassCost]:  # fmt: skip
        """All at the same time, so that those on one link share it."""
        training, cluster = self.actions.layouts.problem.training, self.actions.layouts.problem.cluster
        members = tuple(r.groups for r in reductions)
        at_once = (arrangement.groups_number, members)
        if at_once not in self.concurrent:
            self.concurrent[at_once] = sharing(cluster, [_ranks(plan, groups) for groups in members])
        dtype = training.gradient_dtype or training.precision
        tied = dict(zip((groups for groups, _ in layout.tied), layout.tied_bytes, strict=True))
        found = []
        for reduction, concurrent in zip(reductions, self.concurrent[at_once], strict=True):
            size = NORM_BYTES if reduction.axis == "norm" else tied.get(reduction.groups, 0)
            key: tuple[Any, ...]
            if shares is not None and reduction.stage >= 0:
                key = ("reduction", layout.number, arrangement.number, sharded, reduction.stage)
            else:
                size = layout.own_bytes[reduction.stage] if reduction.stage >= 0 else size
                key = ("reduction", arrangement.groups_number, reduction.groups, size, concurrent)
            if key not in self.known:
                if shares is not None and reduction.stage >= 0:
                    calls = bucketed(shares[reduction.stage].sent, "gradient", BUCKET_BYTES)
                else:
                    calls = _in_buckets(size, _ranks(plan, reduction.groups), concurrent, dtype)
                self.known[key] = self._calls("reductions", calls)
            found.append(self.known[key])
        return found

    def _calls(self, source: str, calls: Sequence[tuple[Collective, int]]) -> ClassCost:
        rows = self.actions.communication.of([collective for collective, _ in calls])
        return class_cost(source, (), [(row, float(times)) for row, (_, times) in zip(rows, calls, strict=True)])

    def updates(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, shares: Sequence[Totals] | None, sharded: int
    ) -> list[ClassCost]:
        """Optimizer updates of each group; zeroing gradient buffers that are reduced (one pass), clipping (three: read,
        read and write); bringing updated parameters back to where they rest."""
        found = []
        tied = {g for members, _ in layout.tied for g in members}
        for g, group in enumerate(plan.groups):
            key: tuple[Any, ...] = ("update", layout.held_keys[g], arrangement.group_numbers[g], g in tied, sharded)
            if shares is not None:
                key = (*key, layout.number, arrangement.number, g)
            if key not in self.known:
                passes = int(group.replicas > 1 or g in tied)
                self.known[key] = self._update(plan, layout, arrangement, g, passes, shares)
            found.append(self.known[key])
        return found

    def _update(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, g: int, passes: int,
        shares: Sequence[Totals] | None,
    ) -> ClassCost:  # fmt: skip
        problem, group = self.actions.layouts.problem, plan.groups[g]
        slowest: tuple[float, Amount, Device] | None = None
        for device in dict.fromkeys(v.device for v in arrangement.variants[g]):
            rows, update, _ = problem.update_prices(device)
            values = [v for v in layout.held[g].tolist() if v in rows]
            chosen = np.array([rows[v] for v in values], dtype=np.int64)
            parts = None if shares is None else local_parts(layout.graph, plan, group).optimizer[values]
            weights = np.bincount(chosen, weights=parts, minlength=update.seconds.size).astype(np.float64)
            amount = update.total(weights)
            if slowest is None or amount.seconds[0] > slowest[0]:
                slowest = (float(amount.seconds[0]), amount, device)
        assert slowest is not None  # a group has devices
        _, amount, device = slowest
        sent = [x for s, stage in enumerate(plan.stages) if shares and stage.group == g for x in shares[s].sent]
        calls = bucketed(sent, "update", BUCKET_BYTES)
        prices = self.actions.communication.of([collective for collective, _ in calls])
        priced = [(row, float(times)) for row, (_, times) in zip(prices, calls, strict=True)]
        passes += 3 * (problem.training.gradient_clip_norm is not None)
        priced.append((moving(passes * layout.states[g].gradients / device.memory_bytes_per_s, device), 1.0))
        return class_cost(f"{device.name} update", [(amount, device.name)], priced)


NOTHING = class_cost("")


def _shift(cluster: Cluster, devices: Sequence[int]) -> int:
    """By how much these may all be moved down without meeting other links; 0 on clusters of several kinds."""
    if len(cluster.kinds) > 1 or any(level.only is not None for level in cluster.levels):
        return 0
    joining = cluster.levels.index(cluster.level_of(devices))
    block = cluster.levels[joining - 1].size if joining else 1
    block = lcm(block, *(level.shared_by for level in cluster.levels[: joining + 1]))
    return min(devices) // block * block


def _ranks(plan: Plan, groups: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for g in groups for d in plan.groups[g].devices)


def _in_buckets(size: int, ranks: tuple[int, ...], concurrent: int, dtype: str) -> list[tuple[Collective, int]]:
    """All-reduces of so many bytes, and how often."""
    full, rest = divmod(size, BUCKET_BYTES)
    sizes = [(BUCKET_BYTES, full), (rest, 1)]
    return [(Collective("all_reduce", b, ranks, concurrent, dtype), times) for b, times in sizes if b and times]


def _counterparts(here: Replicas, there: Replicas) -> list[Message]:
    """Messages between replicas, one for each device of the larger replica."""
    width = max(len(devices) for _, replicas in (here, there) for devices in replicas)
    found: list[Message] = []
    for k in range(width):
        (ours, mine), (theirs, yours) = here, there
        found += messages(ours, tuple(d[k % len(d)] for d in mine), theirs, tuple(d[k % len(d)] for d in yours))
    return found


def _sizes(form: Form, parts: Sequence[float] | None, back: bool, micro_batch: int) -> list[tuple[int, bool, str]]:
    """See `transfers.loads`."""
    chosen = zip(form, parts or (1.0,) * len(form), strict=True)
    return [
        (int(spec.bytes(micro_batch) * part), spec.batched, spec.dtype)
        for (spec, gradient), part in chosen
        if gradient or not back
    ]
