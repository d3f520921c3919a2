"""What a stage's forward and backward take for one micro-batch: of the replica that takes longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simpart.cost.pricing import Amount
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.lowering.alike import Alike
from simpart.lowering.layout import Arrangement, Layout, Layouts, Variant, value_bytes
from simpart.lowering.ledger import ClassCost, Priced, class_cost, moving, waiting_for_host
from simpart.lowering.sharded import StageShare, StageShares, local_parts
from simpart.lowering.transfers import CommPrices
from simpart.plan import Plan

__all__ = ["ActionCosts"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


class _Parts(NamedTuple):
    """Forward, the two parts of backward, what is run again in it, and backward as a whole; each is a sum."""

    forward: list[Amount]
    inputs: list[Amount]
    weights: list[Amount]
    again: list[Amount]
    backward: list[Amount]


@dataclass(slots=True)
class ActionCosts:
    """Costs of the four kinds of actions of stages of one problem's plans; equal stages are priced once."""

    layouts: Layouts
    shares: StageShares
    communication: CommPrices
    alike: Alike = field(init=False)
    known: dict[tuple[Any, ...], tuple[ClassCost, ...]] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], _Parts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alike = Alike(self.layouts, self.shares)

    def of(self, plan: Plan, layout: Layout, arrangement: Arrangement, s: int, sharded: int) -> tuple[ClassCost, ...]:
        """Of F, B, I and W. `sharded` numbers how the plan splits kernels and state; -1 where it does not."""
        group = plan.stages[s].group
        count = plan.batch.micro_batches
        key: tuple[Any, ...] = (layout.stage_keys[s], arrangement.keys[group], count)
        if sharded >= 0:
            numbers = [self.alike.of(plan, layout, s, variant).number for variant in arrangement.variants[group]]
            key = (layout.borders[s], count, *numbers, -1)
        if key not in self.known:
            self.known[key] = self._price(plan, layout, arrangement, s, sharded)
        return self.known[key]

    def _price(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, s: int, sharded: int
    ) -> tuple[ClassCost, ...]:
        """Gradients are accumulated with the weight gradients; collectives of a split backward go with the part whose
        values they move. The host launches ahead of the device, so that an action waits for it only where all its
        launches take longer than all its kernels, and a backward only for what a longer forward has not hidden:
        `max(Fc + Bc, max(Fc, Fg) + Bg)` of host and device times."""
        problem = self.layouts.problem
        slowest: dict[str, tuple[float, list[Amount], Device]] = {}
        copies = 0.0
        variants = arrangement.variants[plan.stages[s].group]
        for variant in variants:
            b, device = variant
            parts = self._parts(plan, layout, s, variant, sharded)
            accumulation = self._accumulation(plan, layout, s, device, sharded)
            found = {
                "F": parts.forward,
                "B": [*parts.backward, *parts.again, accumulation],
                "I": [*parts.inputs, *parts.again],
                "W": [*parts.weights, accumulation],
            }
            for kind, amounts in found.items():
                seconds = sum(float(a.seconds[0]) for a in amounts)
                if kind not in slowest or seconds > slowest[kind][0]:
                    slowest[kind] = (seconds, amounts, device)
            moved = 2 * sum(value_bytes(layout.graph, value, b) for value in layout.sent[s])
            copies = max(copies, moved / device.memory_bytes_per_s + len(layout.sent[s]) * device.kernel_launch_s)
        sending = self._sending(plan, layout, s, variants, sharded)
        costs, ahead_s = [], 0.0
        spread = problem.costs.launch_spread(problem.mode)
        for kind in "FBIW":
            seconds, amounts, device = slowest[kind]
            priced = [(row, float(times)) for _, row, times in sending.get(kind, ())]
            launches = sum(float(a.launches[0]) for a in amounts) + sum(times for _, times in priced)
            if kind == "F":
                priced.append((moving(copies, device), 1.0))
                launches += len(layout.sent[s])
            host_s = launches * problem.costs.launch_s(problem.mode, device)
            waiting_s = host_s - seconds - sum(row.seconds * times for row, times in priced)
            if kind == "F":
                ahead_s = max(0.0, -waiting_s)
            elif kind != "W":
                waiting_s -= ahead_s
            waiting = waiting_for_host(waiting_s, device, spread) if waiting_s > 0 else None
            costs.append(
                class_cost(
                    f"{device.name} {'F' if kind == 'F' else 'B'}",
                    [(amount, device.name) for amount in amounts],
                    priced,
                    problem.costs.action_overhead_s,
                    [(axis, row.seconds * times) for axis, row, times in sending.get(kind, ())],
                    launches,
                    waiting,
                )
            )
        return tuple(costs)

    def _sending(
        self, plan: Plan, layout: Layout, s: int, variants: Sequence[Variant], sharded: int
    ) -> dict[str, list[tuple[str, Priced, int]]]:
        """Collectives of one micro-batch inside the actions: (axis, price of one, how many)."""
        found: dict[str, list[tuple[str, Priced, int]]] = {}
        if sharded < 0:
            return found
        share = self.alike.of(plan, layout, s, max(variants, key=lambda v: v.micro_batch))
        rows = [sent for sent in share.sent if not sent.per_step]
        again = [sent._replace(phase="B") for sent in share.sent_again]
        prices = self.communication.of([x.collective for x in rows + again])
        for sent, priced in zip(rows + again, prices, strict=True):
            part = "W" if sent.role == "gradient" else "I"
            for kind in ("F",) if sent.phase == "F" else ("B", part):
                found.setdefault(kind, []).append((sent.axis, priced, sent.times))
        return found

    def share(self, plan: Plan, layout: Layout, s: int, variant: Variant) -> StageShare:
        """What one device of a stage does where kernels or state are split."""
        graph, _, regions = self.layouts.stage(plan, layout, s, variant.micro_batch)
        return self.shares.of(plan, graph, s, variant.micro_batch, variant.device, regions)

    def _parts(self, plan: Plan, layout: Layout, s: int, variant: Variant, sharded: int) -> _Parts:
        graph, ops, regions = self.layouts.stage(plan, layout, s, variant.micro_batch)
        if sharded >= 0:
            share = self.alike.of(plan, layout, s, variant)
            again = [share.again] if share.again is not None else []
            return _Parts([share.forward], [share.inputs], [share.weights], again, [share.backward])
        key = (self.layouts.structure(plan, layout, s, variant.micro_batch), variant.micro_batch, variant.device.name)
        if key not in self.parts:
            price = self.layouts.problem.prices([variant.micro_batch], variant.device)[variant.micro_batch]
            counts = _counts(graph, ops)
            again = [price.forward.total(_counts(graph, np.concatenate(regions)))] if regions else []
            amounts = (price.forward, price.inputs, price.weights, price.backward)
            forward, inputs, weights, backward = ([amount.total(counts)] for amount in amounts)
            self.parts[key] = _Parts(forward, inputs, weights, again, backward)
        return self.parts[key]

    def _accumulation(self, plan: Plan, layout: Layout, s: int, device: Device, sharded: int) -> Amount:
        """Adding a micro-batch's gradients: each time into a buffer that is reduced, else all but the first time."""
        count, group = plan.batch.micro_batches, plan.groups[plan.stages[s].group]
        rows, _, accumulate = self.layouts.problem.update_prices(device)
        values = [v for v in layout.partition.parameters[s].tolist() if v in rows]
        once = 1.0 if group.replicas > 1 else (count - 1) / count
        times = np.full(len(values), once)
        if layout.tied_values:
            times[[v in layout.tied_values for v in values]] = 1.0
        if sharded >= 0:
            times *= local_parts(layout.graph, plan, group).gradient[values]
        chosen = np.array([rows[v] for v in values], dtype=np.int64)
        total = np.bincount(chosen, weights=times, minlength=accumulate.seconds.size)
        return accumulate.total(total.astype(np.float64))


def _counts(graph: Graph, ops: Ints) -> Floats:
    return np.bincount(graph.flat.op_class[ops], minlength=len(graph.op_classes)).astype(np.float64)
