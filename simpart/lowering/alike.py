"""Stages whose devices do the same: what one of them computes, sends and holds is worked out once for all.

Stages are alike where their kernels are equal and read one another alike (`layout.Layouts.structure`), what comes in is
made by equal kernels, the same of what they make is read elsewhere, and shardings, placements of state and meshes are
equal. Then only the devices differ that take part in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simpart.cost.pricing import Amount
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES
from simpart.lowering.layout import Arrangement, Layout, Layouts, Variant
from simpart.lowering.repeated import Grown, Repeats
from simpart.lowering.sharded import Sent, StageShare, StageShares, kernel_value, local_elements, split_axes
from simpart.lowering.transfers import sharing, shift_of
from simpart.memory import StageActivations, activations_of, state_table
from simpart.placement import Sharding, Strategy
from simpart.plan import DeviceGroup, Devices, Plan
from simpart.sharding._regions import wiring_of
from simpart.sharding.mesh import axis_members, calls_of, mesh_of, use_of

__all__ = ["Alike", "Totals"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NONE = Strategy(())


class Totals(NamedTuple):
    """One device's share of a stage, see `sharded.StageShare`, and what it holds for one micro-batch. `alike` is equal
    for stages that are alike, `number` for those that are and whose devices meet the same links."""

    alike: int
    number: int
    forward: Amount
    backward: Amount
    inputs: Amount
    weights: Amount
    again: Amount | None
    sent: tuple[Sent, ...]
    sent_again: tuple[Sent, ...]
    activations: StageActivations


@dataclass(slots=True)
class Alike:
    """Totals of the stages of one problem's plans, and how what they make lies."""

    layouts: Layouts
    shares: StageShares
    known: dict[tuple[Any, ...], Totals] = field(default_factory=dict)
    placed: dict[tuple[Any, ...], Totals] = field(default_factory=dict)
    borders: dict[tuple[Any, ...], int] = field(default_factory=dict)
    uniform: dict[tuple[int, int], bool] = field(default_factory=dict)
    places: dict[int, tuple[int, dict[str, tuple[tuple[int, ...], int]]]] = field(default_factory=dict)
    moved: dict[tuple[int, int], Totals] = field(default_factory=dict)
    count: int = 0
    patterns: dict[tuple[str, int], Ints] = field(default_factory=dict)
    strategies: dict[tuple[str, int], tuple[dict[int, Strategy], dict[int, Strategy]]] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], float] = field(default_factory=dict)
    makers: dict[tuple[str, int], int] = field(default_factory=dict)
    repeats: Repeats = field(init=False)

    def __post_init__(self) -> None:
        self.repeats = Repeats(self.shares)

    def of(self, plan: Plan, layout: Layout, s: int, variant: Variant) -> Totals:
        """Of stage s on a replica of this micro-batch and kind of device."""
        number = self.layouts.numbers.of
        stage, group = plan.stages[s], plan.groups[plan.stages[s].group]
        split = (number(plan.shardings), number(plan.state))
        key: tuple[Any, ...] = (layout.stage_numbers[s], *split, stage.sharding, variant.micro_batch)
        key = (*key, variant.device.name, number(group), self._whole(plan))
        if not key[-1]:  # how values come in depends on the other stages
            key = (*key, number(plan.stages), number(plan.groups), s)
        if key not in self.placed:
            totals = self._worked_out(plan, layout, s, variant, split)
            place, axes = self._place(group)
            if (totals.alike, place) not in self.moved:
                moved = (_on(axes, totals.sent), _on(axes, totals.sent_again))
                self.moved[totals.alike, place] = totals._replace(
                    number=len(self.moved), sent=moved[0], sent_again=moved[1]
                )
            self.placed[key] = self.moved[totals.alike, place]
        return self.placed[key]

    def of_group(
        self, plan: Plan, layout: Layout, arrangement: Arrangement, g: int, shares: Sequence[Totals | None]
    ) -> tuple[int, ...]:
        """Equal for groups whose stages are alike and meet the same links, and whose devices are of the same kinds;
        empty where that does not say all about the state that the group holds."""
        if not layout.alone[g] or len(arrangement.variants[g]) > 1:
            return ()
        return tuple(
            share.number for stage, share in zip(plan.stages, shares, strict=True) if share and stage.group == g
        )

    def part(self, plan: Plan, layout: Layout, s: int, value: int, micro_batch: int) -> float:
        """What one device of stage s holds of an op-level value, as its maker there leaves it; 1: all."""
        number, graph = self.layouts.numbers.of, layout.graph
        axes = plan.groups[plan.stages[s].group].axes
        key = (graph.fingerprint, number(plan.shardings), plan.stages[s].sharding, number(axes), micro_batch, value)
        if key not in self.parts:
            self.parts[key] = self._part(plan, graph, s, value, micro_batch)
        return self.parts[key]

    def _part(self, plan: Plan, graph: Graph, s: int, value: int, micro_batch: int) -> float:
        known = (graph.fingerprint, value)
        if known not in self.makers:
            self.makers[known] = kernel_value(graph, value)
        flat, at = graph.flat, self.makers[known]
        kernel = int(flat.kernel_value_kernel[at])
        spec = flat.kernel_value_spec[at]
        if kernel < 0:
            return 1.0
        overrides, classes = self._strategies(plan, graph, s)
        cls, axes = int(flat.kernel_class[kernel]), mesh_of(plan.groups[plan.stages[s].group].axes)
        strategy = overrides.get(kernel) or classes.get(cls, NONE)
        lies = use_of(calls_of(graph, micro_batch)[cls], strategy, axes).outputs[at - int(flat.kernel_outputs[kernel])]
        held = local_elements(spec.shape(micro_batch), lies, axes) * DTYPE_BYTES[spec.dtype]
        return held / max(1, spec.bytes(micro_batch))

    def _strategies(self, plan: Plan, graph: Graph, s: int) -> tuple[dict[int, Strategy], dict[int, Strategy]]:
        """Of single kernels, and of kernel classes."""
        sharding = dict(plan.shardings).get(plan.stages[s].sharding or "", Sharding())
        key = (graph.fingerprint, self.layouts.numbers.of(sharding))
        if key not in self.strategies:
            wiring = wiring_of(graph)
            self.strategies[key] = (
                {wiring.kernel_number[name]: strategy for name, strategy in sharding.overrides},
                {wiring.class_names[name]: strategy for name, strategy in sharding.classes},
            )
        return self.strategies[key]

    # --- one of those alike -------------------------------------------------------------------------------------------
    def _worked_out(self, plan: Plan, layout: Layout, s: int, variant: Variant, split: tuple[int, int]) -> Totals:
        """With collectives of any one group."""
        b, device = variant
        graph, ops, regions = self.layouts.stage(plan, layout, s, b)
        key: tuple[Any, ...] = ()
        if self._whole(plan):
            axes = self.layouts.numbers.of(split_axes(plan, plan.groups[plan.stages[s].group]))
            sharding = dict(plan.shardings).get(plan.stages[s].sharding or "", Sharding())
            run = None if sharding.overrides else self.repeats.run(plan, graph, ops, regions)
            if run is not None:
                key = (*run.key, run.length, b, device.name, axes, *split)
                if key not in self.known:
                    group = plan.groups[plan.stages[s].group]
                    grown = self.repeats.of(plan, graph, run, sharding, b, device, group, axes, regions)
                    self.count += 1
                    self.known[key] = _totals(self.count, graph, ops, b, regions, grown)
                return self.known[key]
            structure = self.layouts.structure(plan, layout, s, b)
            key = (structure, self._border(plan, layout, s, b), b, device.name, axes, *split)
            if key in self.known:
                return self.known[key]
        share = self.shares.of(plan, graph, s, b, device, regions)
        self.count += 1
        totals = _totals(self.count, graph, ops, b, regions, share)
        if key:
            self.known[key] = totals
        return totals

    def _whole(self, plan: Plan) -> bool:
        """Whether all stages are split alike on equal meshes: then a value comes in as its maker's strategy leaves
        it."""
        number = self.layouts.numbers.of
        key = (number(plan.stages), number(plan.groups))
        if key not in self.uniform:
            same = len({stage.sharding for stage in plan.stages}) == 1
            self.uniform[key] = same and len({group.axes for group in plan.groups}) == 1
        return self.uniform[key]

    def _border(self, plan: Plan, layout: Layout, s: int, b: int) -> int:
        """Equal where stages of equal structure read values of equal makers, make the same for others, and hold
        parameters that rest alike, under the same strategies of single kernels."""
        number = self.layouts.numbers.of
        graph, ops, _ = self.layouts.stage(plan, layout, s, b)
        sharding = dict(plan.shardings).get(plan.stages[s].sharding or "", Sharding())
        key = (graph.fingerprint, layout.stage_numbers[s], number(sharding), number(plan.state))
        if key not in self.borders:
            flat = graph.flat
            member = np.zeros(len(flat.op_class), dtype=bool)
            member[ops] = True
            inside = member[flat.kernel_op]
            place = np.full(len(inside), -1, dtype=np.int64)
            place[inside] = np.arange(int(inside.sum()))
            read = flat.kernel_inputs
            maker = flat.kernel_value_kernel[read]
            home = np.repeat(inside, np.diff(flat.kernel_indptr))
            made_here = (maker >= 0) & inside[np.maximum(maker, 0)]
            came, which = np.unique(read[home & ~made_here], return_inverse=True)
            makers = flat.kernel_value_kernel[came]
            known = makers >= 0
            cls = np.where(known, flat.kernel_class[np.maximum(makers, 0)], -1)
            output = np.where(known, came - flat.kernel_outputs[np.maximum(makers, 0)], -1)
            gone = np.unique(read[made_here & ~home])
            left = flat.kernel_value_kernel[gone]
            parameters = layout.partition.parameters[s] if graph is layout.graph else None
            rest = self._rest(plan, layout, parameters)
            overrides, _ = self._strategies(plan, graph, s)
            own = sorted((int(place[k]), strategy) for k, strategy in overrides.items() if inside[k])
            parts = (which, cls, output, place[left], gone - flat.kernel_outputs[left], rest)
            words = b"|".join(np.asarray(part, dtype=np.int64).tobytes() for part in parts)
            alone = layout.stage_numbers[s] if parameters is None else -1
            self.borders[key] = number(("border", words, tuple(own), alone))
        return self.borders[key]

    def _rest(self, plan: Plan, layout: Layout, parameters: Ints | None) -> Ints:
        """By parameter: the pattern of state that it matches, and whether it is trained."""
        if parameters is None:
            return np.zeros(0, dtype=np.int64)
        graph = layout.graph
        key = (graph.fingerprint, self.layouts.numbers.of(plan.state))
        if key not in self.patterns:
            order = {pattern: i for i, (pattern, _) in enumerate(plan.state)}
            table = np.full(len(graph.flat.value_op), -1, dtype=np.int64)
            for value, source in graph.parameters.items():
                pattern = plan.state_of(source)[0] if plan.state else None
                table[value] = 2 * (-1 if pattern is None else order[pattern])
            trained = state_table(graph, self.layouts.problem.training)[3] > 0
            self.patterns[key] = table + trained
        return self.patterns[key][parameters]

    # --- collectives of a group ---------------------------------------------------------------------------------------
    def _place(self, group: DeviceGroup) -> tuple[int, dict[str, tuple[tuple[int, ...], int]]]:
        """A number for what links a group's axes meet; of each axis, moved down (`transfers.shift_of`), the devices of
        one of the sets along it and how many sets share a link."""
        number = self.layouts.numbers.of(group)
        if number not in self.places:
            cluster, devices, found = self.layouts.problem.cluster, list(group.devices), {}
            shift = shift_of(cluster, devices)
            down = replace(group, devices=Devices.of(d - shift for d in devices))
            for name, size in group.axes:
                members = axis_members(down, name)
                found[name] = (members[0], max(sharing(cluster, members)) if size > 1 else 1)
            self.places[number] = self.layouts.numbers.of(("place", *found.items())), found
        return self.places[number]


def _on(axes: dict[str, tuple[tuple[int, ...], int]], sent: tuple[Sent, ...]) -> tuple[Sent, ...]:
    """The same collectives on the devices of a group."""
    moved = []
    for x in sent:
        ranks, concurrent = axes[x.axis]
        ranks = ranks[:2] if x.collective.kind == "p2p" else ranks
        moved.append(x._replace(collective=replace(x.collective, ranks=ranks, concurrent=concurrent)))
    return tuple(moved)


def _totals(number: int, graph: Graph, ops: Ints, b: int, regions: Sequence[Ints], share: StageShare | Grown) -> Totals:
    held = activations_of(graph, ops, b, regions, share.value_bytes)
    kept, largest = 0 if regions else share.kept_bytes, share.largest_bytes
    held = StageActivations(
        stash=held.stash + kept, kept=held.kept + kept,
        forward_transient=held.forward_transient + largest, backward_transient=held.backward_transient + largest,
        input_transient=held.input_transient + largest, weight_transient=held.weight_transient + largest,
    )  # fmt: skip
    return Totals(
        number,
        -1,
        share.forward,
        share.backward,
        share.inputs,
        share.weights,
        share.again,
        share.sent,
        share.sent_again,
        held,
    )
