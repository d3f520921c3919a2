"""A plan's memory as deltas of its tasks: what each group holds throughout, and what each action takes and gives back.

Besides what the kernels show (`simpart.memory`) this counts what `simpart.validate`'s runtime holds: for each
micro-batch in flight the values that came in; copies of those that go out until the receiver answers; one message ahead
in each direction; gradients from the first backward on, or all the time where they lie in flat buffers to be reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpart.engines.compiled import peaks
from simpart.layout import Layout, Layouts, Variant, value_bytes
from simpart.memory import ALLOCATOR_FACTOR, StageActivations, activations_of, update_transient_bytes
from simpart.plan import Plan
from simpart.program import MEMORY_KINDS, MemoryDeltas, TaskKind, Topology
from simpart.sharded import StageShares, is_sharded, local_state
from simpart.topology import class_of_action

__all__ = ["Footprints"]

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, INPUTS, TRANSIENTS, BUFFERS = range(len(MEMORY_KINDS))


@dataclass(slots=True)
class Footprints:
    """Memory of one problem's plans; stages with the same ops are analysed once."""

    layouts: Layouts
    shares: StageShares
    known: dict[tuple[Any, ...], StageActivations] = field(default_factory=dict)

    def of(
        self, plan: Plan, layout: Layout, topology: Topology, variants: list[list[Variant]]
    ) -> tuple[MemoryDeltas, list[Variant]]:
        """Deltas per task class, and the replica of each group they hold for: the one with the least room."""
        chosen = [group[0] for group in variants]
        for number in range(1, max(map(len, variants))):
            other = [group[min(number, len(group) - 1)] for group in variants]
            room = [_room(topology, self._deltas(plan, layout, topology, these), these) for these in (chosen, other)]
            chosen = [a if x <= y else b for a, b, x, y in zip(chosen, other, *room, strict=True)]
        return self._deltas(plan, layout, topology, chosen), chosen

    def _deltas(self, plan: Plan, layout: Layout, topology: Topology, variants: list[Variant]) -> MemoryDeltas:
        classes, kinds = len(topology.class_names), len(MEMORY_KINDS)
        training = self.layouts.problem.training
        static, late = np.zeros((2, len(plan.groups), kinds))
        start, end, within = np.zeros((3, classes, kinds))
        sharded = is_sharded(plan)
        for g, (state, variant) in enumerate(zip(layout.states, variants, strict=True)):
            flat = layout.flat_bytes(plan, g, training)
            if sharded:
                whole = max(1, state.gradients)
                state = local_state(layout.graph, training, plan, plan.groups[g], layout.held[g].tolist())
                flat = int(flat * state.gradients / whole)
            static[g, PARAMETERS], static[g, STATE], static[g, GRADIENTS] = (
                state.parameters,
                state.optimizer_state,
                flat,
            )
            late[g, GRADIENTS] = state.gradients - flat
            update = classes - topology.groups + g  # updates are the last classes
            within[update, TRANSIENTS] = update_transient_bytes(training, variant.device, state)
        leaving: list[set[int]] = [set() for _ in plan.stages]
        for edge, load in zip(layout.edges, layout.loads, strict=True):
            source, target = plan.stages[edge.source].group, plan.stages[edge.target].group
            back = [value for value, gradient in load if gradient]
            arriving = self._bytes(layout, [value for value, _ in load], variants[target])
            start[class_of_action(edge.target, "F"), INPUTS] += arriving
            if source != target:
                # The next value, and a gradient on its way; on the other side the gradient in use and the next.
                static[target, BUFFERS] += arriving + self._bytes(layout, back, variants[target])
                static[source, BUFFERS] += 2 * self._bytes(layout, back, variants[source])
                leaving[edge.source] |= {value for value, _ in load if layout.made_in[value] == edge.source}
        all_forward_first = _all_forward_first(topology, len(plan.stages))
        for s, stage in enumerate(plan.stages):
            variant = variants[stage.group]
            held = self._activations(plan, layout, s, variant)
            forward = class_of_action(s, "F")
            start[forward, INPUTS] += self._bytes(layout, layout.inputs[s].tolist(), variant)
            start[forward, ACTIVATIONS] = held.stash
            within[forward, TRANSIENTS] = held.forward_transient
            for kind in "BI":
                within[class_of_action(s, kind), TRANSIENTS] = held.backward_transient + layout.separate[s]
            for kind in "BW":
                end[class_of_action(s, kind)] = -start[forward]
            # Copies that are sent stay until the receiver answers: one, or all that are sent before any answer.
            copies = self._bytes(layout, sorted(leaving[s]), variant)
            static[stage.group, BUFFERS] += copies
            if all_forward_first[s]:
                within[forward, BUFFERS] += (plan.batch.micro_batches - 1) * copies
        return MemoryDeltas(static=static, late=late, start=start, end=end, within=within)

    def _bytes(self, layout: Layout, values: list[int], variant: Variant) -> int:
        return sum(value_bytes(layout.graph, value, variant.micro_batch) for value in values)

    def _activations(self, plan: Plan, layout: Layout, s: int, variant: Variant) -> StageActivations:
        b = variant.micro_batch
        graph, ops, regions = self.layouts.stage(plan, layout, s, b)
        if is_sharded(plan):
            share = self.shares.of(plan, graph, s, b, variant.device, regions)
            found = activations_of(graph, ops, b, regions, share.value_bytes)
            return StageActivations(
                stash=found.stash + (0 if regions else share.kept_bytes),
                forward_transient=found.forward_transient + share.largest_bytes,
                backward_transient=found.backward_transient + share.largest_bytes,
            )
        key = (layout.graph.fingerprint, plan.stages[s], b)
        if key not in self.known:
            self.known[key] = activations_of(graph, ops, b, regions)
        return self.known[key]


def _all_forward_first(topology: Topology, stages: int) -> list[bool]:
    """Per stage whether all its forwards run before any backward of it (tasks of a row are numbered in its order)."""
    forward = np.flatnonzero(topology.kind == TaskKind.FORWARD)
    backward = np.flatnonzero((topology.kind > TaskKind.FORWARD) & (topology.kind < TaskKind.SEND))
    last, first = np.zeros(stages, dtype=np.int64), np.full(stages, topology.size)
    np.maximum.at(last, topology.stage[forward], forward)
    np.minimum.at(first, topology.stage[backward], backward)
    found: list[bool] = (last < first).tolist()
    return found


def _room(topology: Topology, deltas: MemoryDeltas, variants: list[Variant]) -> list[float]:
    held = peaks(topology, deltas).bytes
    return [v.device.usable_bytes - ALLOCATOR_FACTOR[v.device.kind] * h for v, h in zip(variants, held, strict=True)]
