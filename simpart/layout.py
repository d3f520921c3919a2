"""A plan's stages on its graph: what they hold, what moves between them, which gradients are summed over whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simpart.errors import MismatchError
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.memory import StateBytes, state_of, state_values
from simpart.partition import Partition, check_plan, partition_of
from simpart.plan import Plan, check_shape
from simpart.problem import Problem
from simpart.topology import StageEdge
from simpart.training import TrainingSpec

__all__ = ["Layout", "Layouts", "Variant", "value_bytes", "variants_of"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan's stages on its graph, and what moves between them. `loads[e]` are the values of edge e and whether a
    gradient returns; `inputs[s]` the graph inputs of stage s; `held[g]` the parameters and buffers on group g; `own[s]`
    the trained parameters that stage s reduces within its group; `tied` those that several groups share; `separate[s]`
    the bytes of a micro-batch's own gradients where they are accumulated in another dtype."""

    graph: Graph
    partition: Partition
    edges: tuple[StageEdge, ...]
    loads: tuple[tuple[tuple[int, bool], ...], ...]
    inputs: tuple[Ints, ...]
    held: tuple[Ints, ...]
    own: tuple[Ints, ...]
    separate: tuple[int, ...]
    made_in: dict[int, int]

    def flat_bytes(self, plan: Plan, group: int, training: TrainingSpec) -> int:
        """Bytes of a group's gradients that lie in buffers of their own: those that are reduced or kept in another
        dtype."""
        stages = [s for s, stage in enumerate(plan.stages) if stage.group == group]
        if plan.groups[group].replicas > 1 or any(self.separate[s] for s in stages):
            return self.states[group].gradients
        tied = [v for members, values in self.tied if group in members for v in values.tolist()]
        return state_of(self.graph, training, tied).gradients

    tied: tuple[tuple[tuple[int, ...], Ints], ...]
    states: tuple[StateBytes, ...]


class Variant(NamedTuple):
    """Replicas of a group that are alike: samples of a micro-batch, on a device."""

    micro_batch: int
    device: Device


@dataclass(slots=True)
class Layouts:
    """Layouts of one problem's plans; plans that share their stages share one."""

    problem: Problem
    known: dict[tuple[Any, ...], Layout] = field(default_factory=dict)
    stages: dict[tuple[Any, ...], tuple[Ints, tuple[Ints, ...]]] = field(default_factory=dict)
    sound: set[tuple[Any, ...]] = field(default_factory=set)

    def of(self, plan: Plan) -> Layout:
        """The plan's layout; raises UserError for a plan that contradicts itself or its graph."""
        rest = (plan.groups, plan.batch, plan.schedule, plan.group_of_stage)
        if rest not in self.sound:
            check_shape(plan)
            self.sound.add(rest)
        key = (plan.graph, plan.stages, plan.skips)
        if key not in self.known:
            self.known[key] = _lay_out(self.problem, plan)
        return self.known[key]

    def stage(self, plan: Plan, layout: Layout, s: int, b: int) -> tuple[Graph, Ints, tuple[Ints, ...]]:
        """Ops of stage s and its recomputed regions, in the structure that runs at micro-batch b (1 may have its
        own)."""
        graph = layout.graph if layout.graph is self.problem.graph.at_one else self.problem.graph.at(b)
        key = (graph.fingerprint, plan.stages[s])  # clones go with a stage's own readers
        if key not in self.stages:
            found = layout.partition if graph is layout.graph else partition_of(graph, plan)
            regions = tuple(region.indices(graph) for region in plan.stages[s].recompute)
            self.stages[key] = (found.ops[s], regions)
        return graph, *self.stages[key]


def _lay_out(problem: Problem, plan: Plan) -> Layout:
    graph = problem.graph
    if plan.graph != graph.fingerprint and graph.at_one is not None and plan.graph == graph.at_one.fingerprint:
        graph = graph.at_one
        largest = max(size for sizes in plan.batch.sizes for size in sizes)
        if largest > 1:
            raise MismatchError(
                f"the plan belongs to the graph of micro-batch 1 but has replicas of {largest}; use the general graph"
            )
    partition = check_plan(plan, graph)
    edges, loads = _edges(partition, plan)
    values = [state_values(graph, ops) for ops in partition.ops]
    of_group = [[s for s, stage in enumerate(plan.stages) if stage.group == g] for g in range(len(plan.groups))]
    held = tuple(np.unique(np.concatenate([values[s] for s in stages])) for stages in of_group)
    trained = {v for v, s in graph.parameters.items() if s.trainable and problem.training.trains(s.name)}
    tied: dict[tuple[int, ...], list[int]] = {}
    reduced: set[int] = set()
    for value, stages in partition.shared.items():
        members = tuple(sorted({plan.stages[s].group for s in stages}))
        if len(members) > 1 and value in trained:
            tied.setdefault(members, []).append(value)
            reduced.add(value)
    own = []
    for found in partition.parameters:
        mine = [v for v in found.tolist() if v in trained and v not in reduced]
        reduced.update(mine)
        own.append(np.array(mine, dtype=np.int64))
    inputs = {value for value, source in graph.all_sources() if source.kind == "input"}
    reads = [np.unique(_inputs_of(graph, ops)).tolist() for ops in partition.ops]
    return Layout(
        graph=graph,
        partition=partition,
        edges=edges,
        loads=loads,
        inputs=tuple(np.array([v for v in found if v in inputs], dtype=np.int64) for found in reads),
        held=held,
        own=tuple(own),
        separate=tuple(
            _separate(graph, problem.training, trained.intersection(p.tolist())) for p in partition.parameters
        ),
        made_in={crossing.value: crossing.source for crossing in partition.crossings},
        tied=tuple((members, np.array(found, dtype=np.int64)) for members, found in sorted(tied.items())),
        states=tuple(state_of(graph, problem.training, values.tolist()) for values in held),
    )


def _separate(graph: Graph, training: TrainingSpec, values: set[int]) -> int:
    specs = [graph.parameters[value].spec for value in values]
    return sum(spec.bytes(1) for spec in specs if training.gradient_dtype not in (None, spec.dtype))


def _inputs_of(graph: Graph, ops: Ints) -> Ints:
    flat = graph.flat
    member = np.zeros(len(flat.op_class), dtype=bool)
    member[ops] = True
    found: Ints = flat.op_inputs[np.repeat(member, np.diff(flat.op_indptr))]
    return found


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


def variants_of(problem: Problem, plan: Plan) -> list[list[Variant]]:
    """Per group the distinct kinds of replica."""
    found = []
    for group, sizes in zip(plan.groups, plan.batch.sizes, strict=True):
        kinds = [{problem.cluster.device(d) for d in group.replica_devices(r)} for r in range(len(sizes))]
        alike = [
            Variant(size, d) for size, devices in zip(sizes, kinds, strict=True) for d in sorted(devices, key=_name)
        ]
        found.append(list(dict.fromkeys(alike)))
    return found


def _name(device: Device) -> str:
    return device.name


def value_bytes(graph: Graph, value: int, micro_batch: int) -> int:
    """Bytes of an op-level value on a replica."""
    return graph.flat.value_spec[value].bytes(micro_batch)
