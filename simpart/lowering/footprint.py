"""A plan's memory as deltas of its tasks: what each group holds throughout, and what each action takes and gives back.

Besides what the kernels show (`simpart.memory`) this counts what `simpart.validate`'s runtime holds: for each
micro-batch in flight the values that came in (and, between I and W, the gradients that came back); copies of those that
go out until the receiver answers; one message ahead in each direction; gradients from the first backward on, or all the
time where they lie in flat buffers to be reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from simpart.engines.compiled import peaks
from simpart.lowering.alike import Alike, Totals
from simpart.lowering.layout import Arrangement, Layout, Layouts, Variant, value_bytes
from simpart.lowering.sharded import local_state
from simpart.memory import ALLOCATOR_FACTOR, StageActivations, activations_of, update_transient_bytes
from simpart.plan import Plan
from simpart.program import MEMORY_KINDS, MemoryDeltas, TaskKind, Topology

__all__ = ["Footprints"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, INPUTS, TRANSIENTS, BUFFERS = range(len(MEMORY_KINDS))
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)


class Room(NamedTuple):
    """Per group: reserved bytes per allocated one, bytes that are never free, and all bytes of a device."""

    allocator_factor: Floats
    reserved_bytes: Floats
    capacity_bytes: Floats


@dataclass(slots=True)
class Footprints:
    """Memory of one problem's plans; stages with the same ops are analysed once."""

    layouts: Layouts
    alike: Alike
    known: dict[tuple[Any, ...], StageActivations] = field(default_factory=dict)
    rows: dict[tuple[Any, ...], Floats] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], Floats] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], tuple[MemoryDeltas, Floats]] = field(default_factory=dict)
    rooms: dict[int, Room] = field(default_factory=dict)

    def room(self, variants: tuple[Variant, ...]) -> Room:
        """The memory of the devices that each group's is given for."""
        number = self.layouts.numbers.of(variants)
        if number not in self.rooms:
            devices = [variant.device for variant in variants]
            factor = np.array([ALLOCATOR_FACTOR[device.kind] for device in devices])
            reserved, capacity = np.array([(d.reserved_bytes, d.memory_bytes) for d in devices], dtype=np.float64).T
            self.rooms[number] = Room(factor, reserved, capacity)
        return self.rooms[number]

    def of(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, sharded: int, topology: Topology
    ) -> tuple[MemoryDeltas, tuple[Variant, ...]]:
        """Deltas per task class, and the replica of each group they hold for: the one with the least room."""
        variants = arrangement.variants
        chosen = arrangement.first
        for number in range(1, max(map(len, variants))):
            other = tuple(group[min(number, len(group) - 1)] for group in variants)
            room = [
                _room(topology, self._deltas(plan, layout, arrangement, sharded, topology, these), these)
                for these in (chosen, other)
            ]
            chosen = tuple(a if x <= y else b for a, b, x, y in zip(chosen, other, *room, strict=True))
        return self._deltas(plan, layout, arrangement, sharded, topology, chosen), chosen

    def _deltas(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, sharded: int, topology: Topology,
        variants: tuple[Variant, ...],
    ) -> MemoryDeltas:  # fmt: skip
        """Copies that are sent stay until the receiver answers: one, or all that are sent before any answer."""
        key: tuple[Any, ...] = (layout.number, arrangement.number, sharded, len(topology.class_names))
        if max(map(len, arrangement.variants)) > 1:
            key = (*key, *((v.micro_batch, v.device.name) for v in variants))
        if key not in self.tables:
            if len(self.tables) > 1024:
                self.tables.clear()
            self.tables[key] = self._tables(plan, layout, arrangement, sharded, key[3], variants)
        deltas, copies = self.tables[key]
        late = all_forward_first(topology, len(plan.stages))
        if not (late & (copies > 0)).any():
            return deltas
        within = deltas.within.copy()
        within[: 4 * len(copies) : 4, BUFFERS] += np.where(late, (plan.batch.micro_batches - 1) * copies, 0.0)
        return replace(deltas, within=within)

    def _tables(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, sharded: int, classes: int,
        variants: tuple[Variant, ...],
    ) -> tuple[MemoryDeltas, Floats]:  # fmt: skip
        kinds, stages = len(MEMORY_KINDS), len(plan.stages)
        shares: list[Totals | None] = [None] * stages
        if sharded >= 0:
            shares = [self.alike.of(plan, layout, s, variants[x.group]) for s, x in enumerate(plan.stages)]
        static, late = np.zeros((2, len(plan.groups), kinds))
        start, end, within = np.zeros((3, classes, kinds))
        for g, variant in enumerate(variants):
            row = self._group(plan, layout, arrangement, g, variant, sharded, shares)
            static[g, PARAMETERS], static[g, STATE], static[g, GRADIENTS], late[g, GRADIENTS] = row[:4]
            within[classes - len(plan.groups) + g, TRANSIENTS] = row[4]  # updates are the last classes
        rows = [self._stage(plan, layout, s, variants[stage.group], shares[s]) for s, stage in enumerate(plan.stages)]
        stash, kept, forward, backward, split, weight, inputs, back, buffers, copies = np.stack(rows, axis=1)
        start, end, within = (table.reshape(classes, kinds) for table in (start, end, within))
        f, b, i, w = (slice(kind, 4 * stages, 4) for kind in range(4))
        start[f, ACTIVATIONS], start[f, INPUTS] = stash, inputs
        end[b] = -start[f]
        end[i, ACTIVATIONS], end[i, INPUTS] = kept - stash, back
        end[w, ACTIVATIONS], end[w, INPUTS] = -kept, -inputs - back
        within[f, TRANSIENTS], within[b, TRANSIENTS] = forward, backward
        within[i, TRANSIENTS], within[w, TRANSIENTS] = split, weight
        for s, held in enumerate(layout.holders):
            for g in held:
                static[g, BUFFERS] += buffers[s]
        return MemoryDeltas(static=static, late=late, start=start, end=end, within=within), copies

    def _group(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, g: int, variant: Variant, sharded: int,
        shares: Sequence[Totals | None],
    ) -> Floats:  # fmt: skip
        """Parameters, optimizer state, gradients throughout, gradients from the first backward on, and what the update
        holds besides."""
        key: tuple[Any, ...] = (layout.number, g, plan.groups[g].replicas > 1, variant.device.name, sharded)
        if sharded >= 0:
            mine = self.alike.of_group(plan, layout, arrangement, g, shares)
            key = (variant.device.name, mine) if mine else (*key, arrangement.group_numbers[g])
        if key not in self.groups:
            training, state = self.layouts.problem.training, layout.state(g, self.layouts.problem.training)
            flat = layout.flat_bytes(plan, g, training)
            if sharded >= 0:
                whole = max(1, state.gradients)
                state = local_state(layout.graph, training, plan, plan.groups[g], layout.held[g])
                flat = int(flat * state.gradients / whole)
            besides = update_transient_bytes(training, variant.device, state)
            numbers = (state.parameters, state.optimizer_state, flat, state.gradients - flat, besides)
            self.groups[key] = np.array(numbers, dtype=np.float64)
        return self.groups[key]

    def _stage(self, plan: Plan, layout: Layout, s: int, variant: Variant, share: Totals | None) -> Floats:
        """Stash, what W keeps of it, transients of F, B, I and W, inputs, gradients that came back, buffers and the
        copies among them. Of the next value and a gradient on its way there is one; on the other side the gradient in
        use and the next."""
        b = variant.micro_batch
        kind = share.alike if share else self.layouts.structure(plan, layout, s, b)
        key = (share is None, kind, b, layout.borders[s])
        if key not in self.rows:
            held = share.activations if share else self._activations(plan, layout, s, b)
            home, graph = plan.group_of_stage, layout.graph
            inputs, buffers, returned = _bytes(graph, layout.inputs[s].tolist(), b), 0, 0
            for edge, load in zip(layout.edges, layout.loads, strict=True):
                if s not in (edge.source, edge.target):
                    continue
                remote = home[edge.source] != home[edge.target]
                back = _bytes(graph, [value for value, gradient in load if gradient], b)
                if edge.target == s:
                    arriving = _bytes(graph, [value for value, _ in load], b)
                    inputs += arriving
                    buffers += (arriving + back) * remote
                else:
                    returned += back
                    buffers += 2 * back * remote
            copies, own = _bytes(graph, layout.sent[s], b), layout.separate[s]
            numbers = (
                held.stash, held.kept, held.forward_transient, held.backward_transient + own,
                held.input_transient + own, held.weight_transient + own, inputs, returned, buffers + copies, copies,
            )  # fmt: skip
            self.rows[key] = np.array(numbers, dtype=np.float64)
        return self.rows[key]

    def _activations(self, plan: Plan, layout: Layout, s: int, b: int) -> StageActivations:
        graph, ops, regions = self.layouts.stage(plan, layout, s, b)
        key = (self.layouts.structure(plan, layout, s, b), b)
        if key not in self.known:
            self.known[key] = activations_of(graph, ops, b, regions)
        return self.known[key]


def _bytes(graph: Any, values: Iterable[int], micro_batch: int) -> int:
    return sum(value_bytes(graph, value, micro_batch) for value in values)


_first: WeakKeyDictionary[Topology, Bools] = WeakKeyDictionary()


def all_forward_first(topology: Topology, stages: int) -> Bools:
    """Per stage whether all its forwards run before any backward of it (tasks of a row are numbered in its order)."""
    if topology not in _first:
        forward = np.flatnonzero(topology.kind == TaskKind.FORWARD)
        backward = np.flatnonzero((topology.kind > TaskKind.FORWARD) & (topology.kind < TaskKind.SEND))
        last, first = np.zeros(stages, dtype=np.int64), np.full(stages, topology.size)
        np.maximum.at(last, topology.stage[forward], forward)
        np.minimum.at(first, topology.stage[backward], backward)
        _first[topology] = last < first
    return _first[topology]


def _room(topology: Topology, deltas: MemoryDeltas, variants: Sequence[Variant]) -> list[float]:
    held = peaks(topology, deltas).bytes
    return [v.device.usable_bytes - ALLOCATOR_FACTOR[v.device.kind] * h for v, h in zip(variants, held, strict=True)]
