"""What a plan's stages really hold: their ops with clones, the values that cross, the parameters they share."""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import TopologicalSorter
from weakref import WeakKeyDictionary

import numpy as np

from simpart.errors import MismatchError, UserError
from simpart.graph import Graph
from simpart.plan import Plan, check_shape
from simpart.plan.check import check_shardings, check_state

__all__ = [
    "Crossing", "Partition", "check_plan", "clonable_ops", "clone_groups", "members", "partition", "partition_of",
]  # fmt: skip

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
Table = np.ndarray[tuple[int, int], np.dtype[np.bool_]]  # stage × op


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value made in stage `source` and read in later stages. With a gradient, the readers' gradients are summed on
    the way back."""

    value: int
    source: int
    destinations: tuple[int, ...]
    carries_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """`ops[s]` are all op indices that run in stage s, clones included, sorted; `parameters[s]` the value numbers it
    reads; `shared` maps a parameter to the stages that hold it, where there are several; `edges` are stage pairs with
    a crossing."""

    ops: tuple[Ints, ...]
    crossings: tuple[Crossing, ...]
    edges: tuple[tuple[int, int], ...]
    parameters: tuple[Ints, ...]
    shared: dict[int, tuple[int, ...]]
    loss_stage: int


_clonable: WeakKeyDictionary[Graph, Bools] = WeakKeyDictionary()


def clonable_ops(graph: Graph) -> Bools:
    """Ops that every stage may run for itself instead of receiving their result: they need only graph inputs,
    parameters and other such ops, and either depend on no graph input (constants, position embeddings) or carry no
    gradient (masks, labels). Ops that write buffers or draw random numbers are none. Indivisible groups are so as a
    whole."""
    if graph in _clonable:
        return _clonable[graph]
    flat = graph.flat
    is_input = np.zeros(len(flat.value_op), dtype=bool)
    for value, source in graph.all_sources():
        is_input[value] = source.kind == "input"
    ops = [graph.op_classes[c] for c in flat.op_class.tolist()]
    barred = np.array([op.mutates_buffer or op.kind == "random" for op in ops], dtype=bool)
    inputs = np.split(flat.op_inputs, flat.op_indptr[1:-1])
    depends = np.zeros(len(ops), dtype=bool)
    for i, values in enumerate(inputs):
        producers = flat.value_op[values]
        depends[i] = bool(is_input[values].any() or depends[producers[producers >= 0]].any())
    while True:
        clonable = np.zeros(len(ops), dtype=bool)
        for i, values in enumerate(inputs):
            producers = flat.value_op[values]
            ready = bool(clonable[producers[producers >= 0]].all())
            clonable[i] = ready and not barred[i] and not (depends[i] and ops[i].carries_gradient)
        whole = np.ones(len(ops), dtype=bool)
        np.logical_and.at(whole, flat.op_group, clonable)
        grown = barred | ~whole[flat.op_group]
        if (grown == barred).all() or (clonable == whole[flat.op_group]).all():
            break
        barred = grown
    _clonable[graph] = clonable
    return clonable


def partition_of(graph: Graph, plan: Plan) -> Partition:
    """The partition that a plan describes; raises UserError when its stages do not form one of this graph."""
    stage_of = np.full(len(graph.op_ids), -1, dtype=np.int64)
    for s, stage in enumerate(plan.stages):
        indices = stage.ops.indices(graph)
        taken = indices[(stage_of[indices] >= 0) & ~clonable_ops(graph)[indices]]
        if taken.size:
            op = graph.op_ids[taken[0]]
            raise UserError(f"op {op} is in stages {stage_of[taken[0]]} and {s}; every op belongs to one stage")
        stage_of[indices] = s
    return partition(graph, stage_of, len(plan.stages))


def partition(graph: Graph, stage_of: Ints, stages: int) -> Partition:
    """Partition by the stage of each op (what stands at clonable ops is ignored: they go where they are read)."""
    flat, clonable = graph.flat, clonable_ops(graph)
    missing = np.flatnonzero((stage_of < 0) & ~clonable)
    if missing.size:
        raise UserError(f"op {graph.op_ids[missing[0]]} is in no stage; every op belongs to one stage")
    split = np.flatnonzero((stage_of != stage_of[flat.op_group]) & ~clonable)
    if split.size:
        a, b = graph.op_ids[flat.op_group[split[0]]], graph.op_ids[split[0]]
        raise UserError(f"ops {a} and {b} share storage that is changed in place and must be in one stage")
    consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
    fixed = np.flatnonzero(~clonable)
    member = members(graph, stage_of, stages)
    loss_op = int(flat.value_op[graph.loss])
    loss_stage = int(stage_of[loss_op])
    producer = flat.value_op[flat.op_inputs]
    reads = np.flatnonzero(producer >= 0)
    reads = reads[~clonable[producer[reads]] & ~clonable[consumer[reads]]]
    source, target = stage_of[producer[reads]], stage_of[consumer[reads]]
    backward = reads[source > target]
    if backward.size:
        a, b = graph.op_ids[producer[backward[0]]], graph.op_ids[consumer[backward[0]]]
        raise UserError(f"op {b} of stage {stage_of[consumer[backward[0]]]} needs {a} of the later stage "
                        f"{stage_of[producer[backward[0]]]}; order stages so that values flow forward")  # fmt: skip
    cut = reads[source < target]
    crossings = _crossings(graph, cut, stage_of, consumer)
    edges = sorted({(c.source, d) for c in crossings for d in c.destinations})
    parameters, shared = _parameters(graph, member)
    empty = np.flatnonzero(np.bincount(stage_of[fixed], minlength=stages) == 0)
    if empty.size:
        raise UserError(f"stage {empty[0]} has no op of its own; use at most {stages - empty.size} stages here")
    return Partition(
        ops=tuple(np.flatnonzero(row) for row in member), crossings=crossings, edges=tuple(edges),
        parameters=parameters, shared=shared, loss_stage=loss_stage,
    )  # fmt: skip


def members(graph: Graph, stage_of: Ints, stages: int) -> Table:
    """Which ops run in which stage, clones included: they run wherever a reader of one of them runs."""
    member: Table = np.zeros((stages, stage_of.size), dtype=np.bool_)
    fixed = np.flatnonzero(~clonable_ops(graph))
    member[stage_of[fixed], fixed] = True
    for clones, readers in _clones(graph):
        member[:, clones] = member[:, readers].any(axis=1, keepdims=True)
    return member


_clone_readers: WeakKeyDictionary[Graph, list[tuple[Ints, Ints]]] = WeakKeyDictionary()


def _clones(graph: Graph) -> list[tuple[Ints, Ints]]:
    if graph not in _clone_readers:
        flat = graph.flat
        consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
        producer = flat.value_op[flat.op_inputs]
        made = producer >= 0
        _clone_readers[graph] = clone_groups(clonable_ops(graph), flat.op_group, producer[made], consumer[made])
    return _clone_readers[graph]


def clone_groups(cloned: Bools, group: Ints, source: Ints, target: Ints) -> list[tuple[Ints, Ints]]:
    """The cloned ops by indivisible group, each with the ops outside that read one of them; readers come first. A
    write in place has no reader of its own: it goes with the tensor that it changes.

    `group[op]` is the smallest op of its group; op `target[e]` reads what op `source[e]` makes.

    >>> cloned, group = np.array([True, True, False]), np.array([0, 0, 2])  # op 1 writes into what op 0 makes
    >>> source, target = np.array([0, 0]), np.array([1, 2])
    >>> [(ops.tolist(), readers.tolist()) for ops, readers in clone_groups(cloned, group, source, target)]
    [([0, 1], [2])]
    """
    outside = cloned[source] & (group[source] != group[target])
    readers: dict[int, set[int]] = {int(op): set() for op in np.unique(group[cloned])}
    for first, reader in zip(group[source[outside]].tolist(), target[outside].tolist(), strict=True):
        readers[first].add(reader)
    order = TopologicalSorter({first: {int(group[op]) for op in found} for first, found in readers.items()})
    return [
        (np.flatnonzero(group == first), np.array(sorted(readers[first]), dtype=np.int64))
        for first in order.static_order()
        if first in readers
    ]


def _crossings(graph: Graph, cut: Ints, stage_of: Ints, consumer: Ints) -> tuple[Crossing, ...]:
    flat = graph.flat
    targets: dict[int, set[int]] = {}
    for read in cut.tolist():
        targets.setdefault(int(flat.op_inputs[read]), set()).add(int(stage_of[consumer[read]]))
    found = []
    for value in sorted(targets):
        op = int(flat.value_op[value])
        floating = flat.value_spec[value].dtype.startswith(("float", "bfloat"))
        gradient = floating and graph.op_classes[flat.op_class[op]].carries_gradient
        destinations = tuple(sorted(targets[value]))
        found.append(
            Crossing(value=value, source=int(stage_of[op]), destinations=destinations, carries_gradient=gradient)
        )
    return tuple(found)


def _parameters(graph: Graph, member: Table) -> tuple[tuple[Ints, ...], dict[int, tuple[int, ...]]]:
    reader, value = graph.reads["parameter"]
    stage, read = np.nonzero(member[:, reader])
    per_stage = tuple(
        np.unique(part) for part in np.split(value[read], np.searchsorted(stage, np.arange(1, len(member))))
    )
    every = np.concatenate(per_stage)
    holder = np.repeat(np.arange(len(per_stage)), [found.size for found in per_stage])
    values, count = np.unique(every, return_counts=True)
    return per_stage, {v: tuple(holder[every == v].tolist()) for v in values[count > 1].tolist()}


def check_plan(plan: Plan, graph: Graph) -> Partition:
    """Refuse a plan that contradicts itself or its graph; returns its partition."""
    check_shape(plan)
    if plan.graph != graph.fingerprint:
        raise MismatchError(
            f"the plan was made for graph {plan.graph}, this one is {graph.fingerprint}: "
            f"{_first_difference(plan, graph)}; capture the same model and precision"
        )
    result = partition_of(graph, plan)
    for s, stage in enumerate(plan.stages):
        allowed = clonable_ops(graph).copy()
        allowed[result.ops[s]] = True
        for region in stage.recompute:
            indices = region.indices(graph)
            outside = indices[~allowed[indices]]
            if outside.size:
                raise UserError(f"stage {s} recomputes op {graph.op_ids[outside[0]]}, which it does not hold")
    if plan.shardings:
        check_shardings(plan, graph)
    if plan.state:
        check_state(plan, graph, result)
    return result


def _first_difference(plan: Plan, graph: Graph) -> str:
    """What a plan alone can tell of another graph: an op it names that is not here, or one here that it leaves out."""
    held = np.zeros(len(graph.op_ids), dtype=bool)
    for stage in plan.stages:
        for first, last in stage.ops.runs:
            for name in (first, last):
                if name not in graph.op_index:
                    return f"it has no op {name}"
            held[graph.op_index[first] : graph.op_index[last] + 1] = True
    left_out = np.flatnonzero(~held & ~clonable_ops(graph))
    if left_out.size:
        return f"the plan has no op {graph.op_ids[left_out[0]]}"
    return "the ops named in the plan are the same, their sizes, number or precision differ"
