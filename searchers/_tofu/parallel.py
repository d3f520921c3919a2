"""Data parallelism and one weird trick as plans, to compare partitions with. What they replicate rests whole."""

from __future__ import annotations

from simpart.configure import Configuration, configure
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.kernels.ops import base_name
from simpart.placement import Placement, Shard
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.schedule import Schedule
from simpart.sharding.patterns import by_pattern
from simpart.sharding.pins import Pin
from simpart.sharding.presets import state_at_rest
from simpart.sharding.propagate import propagate

__all__ = ["replicas", "weird_trick"]

AXIS = "k1"


def replicas(problem: Problem) -> Plan:
    """A replica on every device and one micro-batch."""
    devices = problem.cluster.size
    if problem.global_batch % devices:
        raise UserError(
            f"data parallelism gives each of {devices} devices as many samples, got a global batch of "
            f"{problem.global_batch}; use a multiple of {devices}"
        )
    share = problem.global_batch // devices
    return configure(problem, Configuration(dp=devices, micro_batch=share, schedule=problem.space.schedules[0]))


def weird_trick(problem: Problem) -> Plan:
    """Samples are split everywhere but in fully connected layers, whose outputs are."""
    devices, micro_batch = problem.cluster.size, problem.global_batch
    if micro_batch % devices:
        raise UserError(
            f"one weird trick gives each of {devices} devices as many samples, got a global batch of {micro_batch}; "
            f"use a multiple of {devices}"
        )
    graph = problem.graph.at(micro_batch)
    places: dict[int, Placement] = {}
    for value in _connected(graph):
        if graph.parameters[value].spec.shape(1)[0] % devices == 0:
            places[value] = Shard(0)
    pins = [Pin("input", "*", Shard(0))]
    pins += [Pin("parameter", pattern, place) for pattern, place in by_pattern(graph, places)]
    found = propagate(graph, micro_batch, ((AXIS, devices),), {AXIS: tuple(pins)})
    return Plan(
        graph=graph.fingerprint,
        groups=(DeviceGroup(devices=Devices.of(range(devices)), axes=((AXIS, devices),)),),
        stages=(Stage(ops=OpSet.of(graph, range(len(graph.op_ids))), group=0, sharding="trick"),),
        batch=Batch(micro_batches=1, sizes=((micro_batch,),)),
        schedule=Schedule(kind=problem.space.schedules[0]),
        shardings=(("trick", found.sharding),),
        state=state_at_rest(graph, {AXIS: places}, 0, 1),
        mode=problem.mode,
    )


def _connected(graph: Graph) -> list[int]:
    """Parameters of layers that multiply by a matrix, by op-level value number."""
    flat, found = graph.flat, []
    for op, first, last in zip(flat.op_class.tolist(), flat.op_indptr[:-1], flat.op_indptr[1:], strict=True):
        if base_name(graph.op_classes[op].target) == "linear":
            found += [v for v in flat.op_inputs[first:last].tolist() if v in graph.parameters]
    return list(dict.fromkeys(found))
