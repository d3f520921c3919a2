"""What passes between stages, what is summed over replicas and groups, and what a group's update takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from simpart.cost import Collective
from simpart.cost.pricing import Amount
from simpart.hardware import Device
from simpart.lowering.action_costs import ActionCosts
from simpart.lowering.alike import Totals
from simpart.lowering.flows import LinkUse, ring_use, transfer_use
from simpart.lowering.layout import Arrangement, Layout, Replicas
from simpart.lowering.ledger import ClassCost, class_cost, moving
from simpart.lowering.sharded import bucketed, local_parts
from simpart.lowering.topology import Reduction
from simpart.lowering.transfers import Load, Message, busiest, loads, messages, sharing, shift_of
from simpart.memory import state_of
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


@dataclass(slots=True)
class GroupCosts:
    """Costs of transfers, reductions and updates of one problem's plans; equal ones are priced once."""

    actions: ActionCosts
    known: dict[tuple[Any, ...], ClassCost] = field(default_factory=dict)
    sent: dict[tuple[Any, ...], ClassCost] = field(default_factory=dict)
    places: dict[tuple[int, int, int], int] = field(default_factory=dict)
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
            parts = None if shares is None else self._parts(plan, layout, arrangement, e)
            place = self._place(arrangement, source, target)
            for back in (False, True):
                if back and not edge.backward:
                    keys.append(None)
                    continue
                key = (layout.forms[e], place, back, parts)
                keys.append(key)
                if key not in self.sent and key not in missing:
                    ends = (arrangement.ends[source], arrangement.ends[target])
                    sizes = partial(_sizes, layout, e, parts, back)
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
                sizes = partial(_sizes, layout, e, parts, back)
                found.append({} if local else transfer_use(cluster, loads(cluster, _counterparts(*pair), sizes)))
        for reduction, cost in zip(costed.reductions, costed.costs[len(found) :], strict=False):
            ranks = _ranks(plan, reduction.groups)
            size = self._reduced(layout, reduction)
            found.append(ring_use(cluster, ranks, size) if cost.seconds > 0 else {})
        return found + [{}] * (len(costed.costs) - len(found))

    def _parts(self, plan: Plan, layout: Layout, arrangement: Arrangement, e: int) -> tuple[float, ...]:
        """Part of each value of an edge that one device of the sending stage holds."""
        number, s = self.actions.layouts.numbers.of, layout.edges[e].source
        group = plan.stages[s].group
        size = arrangement.largest[group].micro_batch
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
            shift = shift_of(cluster, devices)
            moved = tuple(
                (sizes, tuple(tuple(d - shift for d in replica) for replica in replicas)) for sizes, replicas in ends
            )
            self.places[key] = self.actions.layouts.numbers.of(moved)
        return self.places[key]

    # --- once per step ------------------------------------------------------------------------------------------------
    def reductions(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, reductions: Sequence[Reduction],
        shares: Sequence[Totals] | None,
    ) -> list[ClassCost]:  # fmt: skip
        """All at the same time, so that those on one link share it."""
        training, cluster = self.actions.layouts.problem.training, self.actions.layouts.problem.cluster
        members = tuple(r.groups for r in reductions)
        at_once = (arrangement.groups_number, members)
        if at_once not in self.concurrent:
            self.concurrent[at_once] = sharing(cluster, [_ranks(plan, groups) for groups in members])
        dtype = training.gradient_dtype or training.precision
        keys: list[tuple[Any, ...]] = []
        missing: dict[tuple[Any, ...], list[tuple[Collective, int]]] = {}
        for reduction, concurrent in zip(reductions, self.concurrent[at_once], strict=True):
            share = shares[reduction.stage] if shares is not None and reduction.stage >= 0 else None
            if share is not None:
                keys.append(("reduction", share.number))
            else:
                size = self._reduced(layout, reduction)
                keys.append(("reduction", arrangement.groups_number, reduction.groups, size, concurrent))
            if keys[-1] not in self.known:
                missing[keys[-1]] = (
                    bucketed(share.sent, "gradient", BUCKET_BYTES)
                    if share is not None
                    else _in_buckets(size, _ranks(plan, reduction.groups), concurrent, dtype)
                )
        prices = self.actions.communication
        prices.of(collective for calls in missing.values() for collective, _ in calls)  # all at once
        for key, calls in missing.items():
            rows = prices.of(collective for collective, _ in calls)
            times = [(row, float(times)) for row, (_, times) in zip(rows, calls, strict=True)]
            self.known[key] = class_cost("reductions", (), times)
        return [self.known[key] for key in keys]

    def _reduced(self, layout: Layout, reduction: Reduction) -> int:
        """Bytes of whole gradients that a reduction sums."""
        if reduction.axis == "norm":
            return NORM_BYTES
        of_groups = dict(layout.tied)
        values = layout.own[reduction.stage] if reduction.stage >= 0 else of_groups.get(reduction.groups, ())
        return state_of(layout.graph, self.actions.layouts.problem.training, values).gradients

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
                mine = self.actions.alike.of_group(plan, layout, arrangement, g, shares)
                key = ("update", mine) if mine else (*key, layout.number, arrangement.number, g)
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
        state = layout.state(g, problem.training)
        passes += 3 * (problem.training.gradient_clip_norm is not None)
        priced.append((moving(passes * state.gradients / device.memory_bytes_per_s, device), 1.0))
        return class_cost(f"{device.name} update", [(amount, device.name)], priced)


NOTHING = class_cost("")


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


def _sizes(
    layout: Layout, e: int, parts: Sequence[float] | None, back: bool, micro_batch: int
) -> list[tuple[int, bool, str]]:
    """What an edge carries, see `transfers.loads`."""
    specs, load = layout.graph.flat.value_spec, layout.loads[e]
    return [
        (int(specs[value].bytes(micro_batch) * part), specs[value].batched, specs[value].dtype)
        for (value, gradient), part in zip(load, parts or (1.0,) * len(load), strict=True)
        if gradient or not back
    ]
