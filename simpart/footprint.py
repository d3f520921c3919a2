"""A plan's memory as deltas of its tasks: what each group holds throughout, and what each action takes and gives back.

Besides what the kernels show (`simpart.memory`) this counts what a runtime holds: for each micro-batch in flight the
values that came in, and a copy of those that went out until their gradient is back; one message ahead in each
direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpart.engines.compiled import peaks
from simpart.layout import Layout, Layouts, Variant, value_bytes
from simpart.memory import ALLOCATOR_FACTOR, StageActivations, activations_of, update_transient_bytes
from simpart.plan import Plan
from simpart.program import MEMORY_KINDS, MemoryDeltas, Topology
from simpart.topology import class_of_action

__all__ = ["Footprints"]

ACTIVATIONS, INPUTS, TRANSIENTS, BUFFERS = map(
    MEMORY_KINDS.index, ("activations", "stage inputs", "transients", "communication buffers")
)


@dataclass(slots=True)
class Footprints:
    """Memory of one problem's plans; stages with the same ops are analysed once."""

    layouts: Layouts
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
        static = np.zeros((len(plan.groups), kinds))
        start, end, within = np.zeros((3, classes, kinds))
        for g, (state, variant) in enumerate(zip(layout.states, variants, strict=True)):
            static[g, :3] = state.parameters, state.gradients, state.optimizer_state
            update = classes - topology.groups + g  # updates are the last classes
            within[update, TRANSIENTS] = update_transient_bytes(training, variant.device, state)
        leaving: list[set[int]] = [set() for _ in plan.stages]
        for edge, load in zip(layout.edges, layout.loads, strict=True):
            source, target = plan.stages[edge.source].group, plan.stages[edge.target].group
            sizes = [value_bytes(layout.graph, value, variants[target].micro_batch) for value, _ in load]
            start[class_of_action(edge.target, "F"), INPUTS] += sum(sizes)
            if source != target:
                back = sum(size for size, (_, gradient) in zip(sizes, load, strict=True) if gradient)
                static[target, BUFFERS] += sum(sizes) + back  # a value that comes, a gradient that goes
                static[source, BUFFERS] += sum(
                    value_bytes(layout.graph, value, variants[source].micro_batch)
                    for value, gradient in load
                    if gradient
                )
                leaving[edge.source] |= {value for value, _ in load if layout.made_in[value] == edge.source}
        for s, stage in enumerate(plan.stages):
            variant = variants[stage.group]
            held = self._activations(plan, layout, s, variant.micro_batch)
            forward = class_of_action(s, "F")
            own_inputs = layout.inputs[s].tolist()
            start[forward, INPUTS] += sum(value_bytes(layout.graph, v, variant.micro_batch) for v in own_inputs)
            start[forward, BUFFERS] += sum(value_bytes(layout.graph, v, variant.micro_batch) for v in leaving[s])
            start[forward, ACTIVATIONS] = held.stash
            within[forward, TRANSIENTS] = held.forward_transient
            for kind in "BI":
                within[class_of_action(s, kind), TRANSIENTS] = held.backward_transient + layout.separate[s]
            for kind in "BW":
                end[class_of_action(s, kind)] = -start[forward]
        return MemoryDeltas(static=static, start=start, end=end, within=within)

    def _activations(self, plan: Plan, layout: Layout, s: int, micro_batch: int) -> StageActivations:
        key = (layout.graph.fingerprint, plan.stages[s], micro_batch)
        if key not in self.known:
            graph, ops, regions = self.layouts.stage(plan, layout, s, micro_batch)
            self.known[key] = activations_of(graph, ops, micro_batch, regions)
        return self.known[key]


def _room(topology: Topology, deltas: MemoryDeltas, variants: list[Variant]) -> list[float]:
    held = peaks(topology, deltas).bytes
    return [v.device.usable_bytes - ALLOCATOR_FACTOR[v.device.kind] * h for v, h in zip(variants, held, strict=True)]
