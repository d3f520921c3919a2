"""A plan's stages on its graph: what they hold, what moves between them, which gradients are summed over whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simpart.errors import MismatchError
from simpart.graph import Graph
from simpart.hardware import Cluster, Device
from simpart.kernels.split_backward import weight_share
from simpart.lowering.interning import Interner
from simpart.lowering.topology import StageEdge
from simpart.memory import StateBytes, state_of, state_table, state_values, storages_of
from simpart.plan import Plan, check_shape
from simpart.plan.partition import Partition, check_plan, partition_of
from simpart.problem import Problem
from simpart.training import TrainingSpec

__all__ = ["Arrangement", "Layout", "Layouts", "Replicas", "Variant", "value_bytes"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan's stages on its graph, and what moves between them. `loads[e]` are the values of edge e and whether a
    gradient returns; `inputs[s]` the graph inputs of stage s, `sent[s]` what it makes and sends to other groups;
    `held[g]` the parameters and buffers on group g; `own[s]` the trained parameters that stage s reduces within its
    group; `tied` those that several groups share; `separate[s]` the bytes of a micro-batch's own gradients where they
    are accumulated in another dtype. `holders[s]` are the groups that hold stage s. Keys are equal where what a stage,
    edge or group costs is: `forms[e]` where what crosses is alike, `borders[s]` where all is that crosses at a stage's
    ends. `alone[g]`: nothing of what group g holds is held twice, by its stages or by another group."""

    number: int
    graph: Graph
    partition: Partition
    holders: tuple[tuple[int, ...], ...]
    edges: tuple[StageEdge, ...]
    loads: tuple[tuple[tuple[int, bool], ...], ...]
    inputs: tuple[Ints, ...]
    sent: tuple[tuple[int, ...], ...]
    held: tuple[Ints, ...]
    own: tuple[Ints, ...]
    separate: tuple[int, ...]
    tied: tuple[tuple[tuple[int, ...], Ints], ...]
    tied_values: frozenset[int]
    stage_numbers: tuple[int, ...]
    stage_keys: tuple[int, ...]
    load_keys: tuple[int, ...]
    held_keys: tuple[int, ...]
    forms: tuple[int, ...]
    borders: tuple[int, ...]
    alone: tuple[bool, ...]

    def state(self, group: int, training: TrainingSpec) -> StateBytes:
        """Of all that a group holds."""
        return state_of(self.graph, training, self.held[group].tolist())

    def flat_bytes(self, plan: Plan, group: int, training: TrainingSpec) -> int:
        """Bytes of a group's gradients that lie in buffers of their own: those that are reduced or kept in another
        dtype."""
        if plan.groups[group].replicas > 1 or any(
            self.separate[s] for s, held in enumerate(self.holders) if group in held
        ):
            return self.state(group, training).gradients
        tied = [v for members, values in self.tied if group in members for v in values.tolist()]
        return state_of(self.graph, training, tied).gradients


class Variant(NamedTuple):
    """Replicas of a group that are alike: samples of a micro-batch, on a device."""

    micro_batch: int
    device: Device


Replicas = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Samples of each replica of a group, and its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Groups of devices with their shares of a micro-batch: the distinct kinds of replica of each, its replicas.
    `keys[g]` are equal where devices and samples are, `group_numbers[g]` where the devices are, `largest[g]` has
    the largest micro-batch."""

    number: int
    groups_number: int
    group_numbers: tuple[int, ...]
    keys: tuple[int, ...]
    variants: tuple[tuple[Variant, ...], ...]
    first: tuple[Variant, ...]
    largest: tuple[Variant, ...]
    ends: tuple[Replicas, ...]
    peak_flops_per_s: float


@dataclass(slots=True)
class Layouts:
    """Layouts and arrangements of one problem's plans; plans that share them share what follows from them."""

    problem: Problem
    numbers: Interner = field(default_factory=Interner)
    known: dict[tuple[Any, ...], Layout] = field(default_factory=dict)
    arranged: dict[tuple[int, int], Arrangement] = field(default_factory=dict)
    stages: dict[tuple[Any, ...], tuple[Ints, tuple[Ints, ...]]] = field(default_factory=dict)
    structures: dict[tuple[Any, ...], int] = field(default_factory=dict)
    sound: set[tuple[Any, ...]] = field(default_factory=set)
    forms: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def form(self, graph: Graph, load: tuple[tuple[int, bool], ...]) -> int:
        """Equal for values of equal specs, of which as many have a gradient."""
        key = (graph.fingerprint, load)
        if key not in self.forms:
            specs = graph.flat.value_spec
            self.forms[key] = self.numbers.of(("form", *((specs[value], gradient) for value, gradient in load)))
        return self.forms[key]

    def of(self, plan: Plan) -> Layout:
        """The plan's layout; raises UserError for a plan that contradicts itself or its graph."""
        number = self.numbers.of
        stages = number(plan.stages)
        rest = (stages, number(plan.groups), number(plan.batch), number(plan.schedule))
        if rest not in self.sound:
            check_shape(plan)
            self.sound.add(rest)
        twice = plan.schedule.kind == "dualpipe"
        key = (plan.graph, stages, plan.skips, twice, number(plan.shardings), number(plan.state))
        if key not in self.known:
            self.known[key] = _lay_out(self, plan)
        return self.known[key]

    def arrangement(self, plan: Plan) -> Arrangement:
        """The plan's groups with their samples."""
        number = self.numbers.of
        key = (number(plan.groups), number(plan.batch.sizes))
        if key not in self.arranged:
            cluster, numbers = self.problem.cluster, tuple(number(("group", group)) for group in plan.groups)
            ends = tuple(
                (sizes, tuple(group.replica_devices(r) for r in range(len(sizes))))
                for group, sizes in zip(plan.groups, plan.batch.sizes, strict=True)
            )
            precision = self.problem.training.precision
            used = [device for group in plan.groups for device in _devices(cluster, tuple(group.devices))]
            peaks = {id(device): device.peak(precision) for device in {id(device): device for device in used}.values()}
            variants = tuple(_variants(self.problem, *end) for end in ends)
            self.arranged[key] = Arrangement(
                number=len(self.arranged),
                groups_number=key[0],
                group_numbers=numbers,
                keys=tuple(number((n, *end)) for n, end in zip(numbers, ends, strict=True)),
                variants=variants,
                first=tuple(found[0] for found in variants),
                largest=tuple(max(found, key=lambda v: v.micro_batch) for found in variants),
                ends=ends,
                peak_flops_per_s=sum(peaks[id(device)] for device in used),
            )
        return self.arranged[key]

    def structure(self, plan: Plan, layout: Layout, s: int, b: int) -> int:
        """Equal for stages whose kernels are equal and read one another alike, such as equally many middle layers."""
        graph, ops, regions = self.stage(plan, layout, s, b)
        key = (graph.fingerprint, layout.stage_numbers[s])
        if key not in self.structures:
            self.structures[key] = self.numbers.of((graph.fingerprint, _structure(graph, ops, regions)))
        return self.structures[key]

    def stage(self, plan: Plan, layout: Layout, s: int, b: int) -> tuple[Graph, Ints, tuple[Ints, ...]]:
        """Ops of stage s and its recomputed regions, in the structure that runs at micro-batch b (1 may have its
        own)."""
        graph = layout.graph if layout.graph is self.problem.graph.at_one else self.problem.graph.at(b)
        key = (graph.fingerprint, layout.stage_numbers[s])  # clones go with a stage's own readers
        if key not in self.stages:
            found = layout.partition if graph is layout.graph else partition_of(graph, plan)
            regions = tuple(region.indices(graph) for region in plan.stages[s].recompute)
            self.stages[key] = (found.ops[s], regions)
        return graph, *self.stages[key]


def _lay_out(layouts: Layouts, plan: Plan) -> Layout:
    problem, graph = layouts.problem, layouts.problem.graph
    if plan.graph != graph.fingerprint and graph.at_one is not None and plan.graph == graph.at_one.fingerprint:
        graph = graph.at_one
        largest = max(size for sizes in plan.batch.sizes for size in sizes)
        if largest > 1:
            raise MismatchError(
                f"the plan belongs to the graph of micro-batch 1 but has replicas of {largest}; use the general graph"
            )
    partition = check_plan(plan, graph)
    edges, loads = _edges(partition, plan)
    holders = plan.schedule.holders(plan.group_of_stage)
    values = [state_values(graph, ops) for ops in partition.ops]
    of_group = [[s for s, held in enumerate(holders) if g in held] for g in range(len(plan.groups))]
    held = tuple(np.unique(np.concatenate([values[s] for s in stages])) for stages in of_group)
    trained = state_table(graph, problem.training)[3] > 0
    free = trained.copy()  # not yet reduced by any stage
    tied: dict[tuple[int, ...], list[int]] = {}
    several = {v: (s,) for s, found in enumerate(partition.parameters) if len(holders[s]) > 1 for v in found.tolist()}
    for value, stages in (several | partition.shared).items():
        members = tuple(sorted({g for s in stages for g in holders[s]}))
        if len(members) > 1 and trained[value]:
            tied.setdefault(members, []).append(value)
            free[value] = False
    own = []
    for found in partition.parameters:
        mine = found[free[found]]
        free[mine] = False
        own.append(mine)
    readers, read = graph.reads["input"]
    stage_inputs = tuple(np.unique(read[np.isin(readers, ops)]) for ops in partition.ops)
    made_in = {crossing.value: crossing.source for crossing in partition.crossings}
    home = plan.group_of_stage
    sent: list[set[int]] = [set() for _ in plan.stages]
    for edge, load in zip(edges, loads, strict=True):
        if home[edge.source] != home[edge.target]:
            sent[edge.source] |= {value for value, _ in load if made_in[value] == edge.source}
    tied_rows = tuple((members, np.array(found, dtype=np.int64)) for members, found in sorted(tied.items()))
    training, of = problem.training, layouts.numbers.of
    stage_numbers = tuple(of((graph.fingerprint, stage.ops, stage.recompute)) for stage in plan.stages)
    shared = frozenset(v for _, found in tied_rows for v in found.tolist())
    parts = [
        (tuple(sorted(mine)), tuple(sorted(shared.intersection(parameters.tolist())) if shared else ()))
        for mine, parameters in zip(sent, partition.parameters, strict=True)
    ]
    separate = [_separate(graph, training, p[trained[p]]) for p in partition.parameters]
    forms = tuple(layouts.form(graph, load) for load in loads)
    arriving: list[list[tuple[int, bool]]] = [[] for _ in plan.stages]
    leaving: list[list[tuple[int, bool, bool]]] = [[] for _ in plan.stages]
    for edge, form in zip(edges, forms, strict=True):
        remote = home[edge.source] != home[edge.target]
        leaving[edge.source].append((form, remote, edge.backward))
        arriving[edge.target].append((form, remote))
    borders = []
    for s, (mine, also) in enumerate(parts):
        form = layouts.form(graph, tuple((value, True) for value in mine))
        mask = tuple(v in shared for v in partition.parameters[s].tolist()) if also else ()
        ends = (tuple(arriving[s]), tuple(leaving[s]))
        borders.append(of(("border", *ends, form, tuple(stage_inputs[s].tolist()), separate[s], mask)))
    joint = {g for members in tied for g in members} | {g for mine in holders if len(mine) > 1 for g in mine}
    alone = tuple(
        g not in joint and held[g].size == sum(values[s].size for s in stages) for g, stages in enumerate(of_group)
    )
    return Layout(
        number=len(layouts.known),
        graph=graph,
        partition=partition,
        holders=holders,
        edges=edges,
        loads=loads,
        inputs=stage_inputs,
        sent=tuple(mine for mine, _ in parts),
        held=held,
        own=tuple(own),
        separate=tuple(separate),
        tied=tied_rows,
        tied_values=shared,
        stage_numbers=stage_numbers,
        stage_keys=tuple(of((n, *part)) for n, part in zip(stage_numbers, parts, strict=True)),
        load_keys=tuple(of((graph.fingerprint, load)) for load in loads),
        held_keys=tuple(of((graph.fingerprint, found.tobytes())) for found in held),
        forms=forms,
        borders=tuple(borders),
        alone=alone,
    )


def _structure(graph: Graph, ops: Ints, regions: Sequence[Ints]) -> bytes:
    """Classes of a stage's ops and kernels, which of them read which, in which order they go back, what is made
    again."""
    flat = graph.flat
    member = np.zeros(len(flat.op_class), dtype=bool)
    member[ops] = True
    inside = member[flat.kernel_op]
    kernels = np.flatnonzero(inside)
    number = np.full(len(inside), -1, dtype=np.int64)
    number[kernels] = np.arange(kernels.size)
    storages = storages_of(graph, 2 if graph.at_one is not None else 1)
    read = storages.base[flat.kernel_inputs[np.repeat(inside, np.diff(flat.kernel_indptr))]]
    maker = flat.kernel_value_kernel[read]
    made = np.where(maker >= 0, number[np.maximum(maker, 0)], -1)
    output = np.where(made >= 0, read - flat.kernel_outputs[np.maximum(maker, 0)], -1)
    region = np.full(len(member), -1, dtype=np.int64)
    for r, found in enumerate(regions):
        region[found] = r
    home = flat.kernel_op[kernels]
    call = np.unique(flat.op_call[home], return_inverse=True)[1]
    share = (2 * weight_share(graph)[kernels]).astype(np.int64)
    parts = (flat.op_class[ops], flat.kernel_class[kernels], home - home[0], call, region[home], share, made, output)
    return b"|".join(part.astype(np.int64).tobytes() for part in parts if kernels.size)


def _separate(graph: Graph, training: TrainingSpec, values: Ints) -> int:
    if training.gradient_dtype is None:
        return 0
    specs = [graph.parameters[value].spec for value in values.tolist()]
    return sum(spec.bytes(1) for spec in specs if spec.dtype != training.gradient_dtype)


def _edges(partition: Partition, plan: Plan) -> tuple[tuple[StageEdge, ...], tuple[tuple[tuple[int, bool], ...], ...]]:
    """Stage pairs that exchange values and what each carries, sent directly or relayed from stage to stage."""
    loads: dict[tuple[int, int], dict[int, bool]] = {}
    for crossing in partition.crossings:
        if plan.skips == "relay":
            hops = [(s, s + 1) for s in range(crossing.source, crossing.destinations[-1])]
        else:
            hops = [(crossing.source, d) for d in crossing.destinations]
        for hop in hops:
            loads.setdefault(hop, {})[crossing.value] = crossing.carries_gradient
    pairs = sorted(loads)
    edges = tuple(StageEdge(a, b, any(loads[a, b].values())) for a, b in pairs)
    return edges, tuple(tuple(sorted(loads[pair].items())) for pair in pairs)


def _variants(problem: Problem, sizes: Sequence[int], devices: Sequence[tuple[int, ...]]) -> tuple[Variant, ...]:
    """The distinct kinds of a group's replicas."""
    found: dict[Variant, None] = {}
    for size, replica in zip(sizes, devices, strict=True):
        kinds = {id(device): device for device in _devices(problem.cluster, replica)}.values()
        found.update(dict.fromkeys(Variant(size, device) for device in sorted(kinds, key=_name)))
    return tuple(found)


def _devices(cluster: Cluster, positions: tuple[int, ...]) -> list[Device]:
    """The device at each of these positions."""
    if len(cluster.devices) == 1 and max(positions) < cluster.size:
        return [cluster.devices[0][0]] * len(positions)
    return [cluster.device(d) for d in positions]


def _name(device: Device) -> str:
    return device.name


def value_bytes(graph: Graph, value: int, micro_batch: int) -> int:
    """Bytes of an op-level value on a replica."""
    return graph.flat.value_spec[value].bytes(micro_batch)
