"""A partition as a plan: one stage on a mesh with an axis per step, a strategy per kernel, all state in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simpart.graph import Graph
from simpart.kernels import Mode
from simpart.placement import AxisStrategy, Placement, Shard, Sharding, StatePlacement, Strategy
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.schedule import Schedule
from simpart.searchers._tofu.coarse import Coarse
from simpart.searchers._tofu.counts import Found, chosen_of
from simpart.searchers._tofu.price import axis_names
from simpart.searchers._tofu.work import Request
from simpart.sharding._regions import wiring_of
from simpart.sharding.patterns import by_pattern

__all__ = ["mesh_group", "plan_of", "requests_of", "schemes_of"]

NAME = "tofu"


def mesh_group(factors: Sequence[int]) -> DeviceGroup:
    """The devices in their order, the first step outermost."""
    count = 1
    for k in factors:
        count *= k
    return DeviceGroup(devices=Devices.of(range(count)), axes=tuple(zip(axis_names(factors), factors, strict=True)))


def requests_of(coarse: Coarse, found: Found) -> list[tuple[Request, ...]]:
    """Per kernel of the workload its request in each step."""
    rows = chosen_of(coarse.work, found)[: len(coarse.work.kernels)]
    return [tuple(r for r in row if isinstance(r, Request)) for row in rows]


def schemes_of(coarse: Coarse, found: Found) -> list[tuple[Placement, ...]]:
    """Per value of the workload how it rests, step by step."""
    rows = chosen_of(coarse.work, found)[len(coarse.work.kernels) :]
    return [tuple(p for p in row if not isinstance(p, Request)) for row in rows]


def plan_of(coarse: Coarse, found: Found, micro_batches: int, schedule: str, mode: Mode = "eager") -> Plan:
    """The plan that runs a partition. Between kernels a tensor stays as its maker left it, not as the search lets it
    rest: what the search converts twice, the plan converts at once, and consumers share it."""
    graph, names = coarse.graph, axis_names(found.factors)
    requests, wiring = requests_of(coarse, found), wiring_of(coarse.graph)
    classes = []
    for cls, kernel in enumerate(coarse.kernel_of):
        if kernel < 0:
            continue
        axes = tuple(
            (name, AxisStrategy(request.inputs, request.outputs))
            for name, request in zip(names, requests[kernel], strict=True)
            if request.cuts
        )
        if axes:
            classes.append((wiring.name_of_class[cls], Strategy(axes)))
    count = len(graph.op_ids)
    return Plan(
        graph=graph.fingerprint,
        groups=(mesh_group(found.factors),),
        stages=(Stage(ops=OpSet.of(graph, range(count)), group=0, sharding=NAME if classes else None),),
        batch=Batch(micro_batches=micro_batches, sizes=((coarse.micro_batch,),)),
        schedule=Schedule(kind=schedule),
        shardings=((NAME, Sharding(classes=tuple(classes))),) if classes else (),
        state=_state(coarse, found, names),
        mode=mode,
    )


def _state(coarse: Coarse, found: Found, names: Sequence[str]) -> tuple[tuple[str, StatePlacement], ...]:
    graph, schemes = coarse.graph, schemes_of(coarse, found)
    table = {}
    for op_value, value in _parameters(graph):
        places = tuple(
            (name, place)
            for name, place in zip(names, schemes[coarse.value_of[value]], strict=True)
            if isinstance(place, Shard)
        )
        if places:
            table[op_value] = StatePlacement(parameter=places, gradient=places, optimizer=places)
    return by_pattern(graph, table)


def _parameters(graph: Graph) -> Iterator[tuple[int, int]]:
    """(op-level, kernel-level) value numbers of all parameters."""
    for i, source in enumerate(graph.sources):
        if source.kind == "parameter":
            yield i, i
    starts = zip(graph.calls, graph.value_offsets.tolist(), graph.kernel_value_offsets.tolist(), strict=True)
    for call, first, kernel_first in starts:
        for i, source in enumerate(graph.templates[call.template].sources):
            if source.kind == "parameter":
                yield first + i, kernel_first + i
