"""Which ops stand in which stage, given what they take under a sharding: runs of layers, or the stage program."""

from __future__ import annotations

import numpy as np

from simpart.configure import equal_layers, layer_calls
from simpart.graph import Graph
from simpart.plan.partition import clonable_ops
from simpart.searchers._cost_graph import Floats, Ints
from simpart.searchers._stage_ilp import StageProblem, assign_stages

__all__ = ["balanced_layers", "program_stages", "stage_ops"]

MOST_UNITS = 240
"""Indivisible units that the stage program takes; chains of small ones are merged until so few are left."""


def stage_ops(graph: Graph, stage_of: Ints, stages: int) -> list[Ints]:
    """Ops of each stage, from a stage per op (-1: wherever it is needed)."""
    return [np.flatnonzero(stage_of == s) for s in range(stages)]


def balanced_layers(graph: Graph, op_seconds: Floats, stages: int) -> Ints:
    """Runs of calls with the least largest time; equal layers where fewer layers than stages repeat."""
    if len(layer_calls(graph)) < stages or graph.joined:
        return equal_layers(graph, stages)
    work = np.concatenate(([0.0], np.cumsum(np.bincount(graph.flat.op_call, op_seconds, len(graph.calls)))))
    size = len(work) - 1
    best = np.full((stages + 1, size + 1), np.inf)
    best[0, 0] = 0.0
    back = np.zeros(best.shape, dtype=np.int64)
    for s in range(1, stages + 1):
        for end in range(s, size + 1):
            costs = np.maximum(best[s - 1, :end], work[end] - work[:end])
            back[s, end] = int(np.argmin(costs))
            best[s, end] = costs[back[s, end]]
    stage_of_call = np.zeros(size, dtype=np.int64)
    end = size
    for s in range(stages, 0, -1):
        start = int(back[s, end])
        stage_of_call[start:end] = s - 1
        end = start
    found = stage_of_call[graph.flat.op_call]
    return found if np.unique(found).size == stages else equal_layers(graph, stages)


def program_stages(
    graph: Graph, op_seconds: Floats, stages: int, micro_batch: int, turns: int, seconds_per_byte: float
) -> Ints | None:
    """The stage program over indivisible units: largest stage time × `turns`, and bytes per tensor and reading stage.

    None where it has no answer in time. Ops that may be cloned get -1.
    """
    flat, clonable = graph.flat, clonable_ops(graph)
    unit = flat.op_group.copy()
    reader = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
    maker = flat.value_op[flat.op_inputs]
    real = (maker >= 0) & ~clonable[np.maximum(maker, 0)] & ~clonable[reader]
    value, maker, reader = flat.op_inputs[real], maker[real], reader[real]
    size = np.array([flat.value_spec[v].bytes(micro_batch) for v in value], dtype=np.float64)
    unit = _merge_chains(unit, op_seconds, maker, reader, np.flatnonzero(~clonable), stages)
    heads = np.unique(unit[~clonable])
    if len(heads) > MOST_UNITS:
        return None
    number = np.searchsorted(heads, unit)
    crossing: dict[tuple[int, int], float] = {}
    for a, b, weight in zip(number[maker].tolist(), number[reader].tolist(), size.tolist(), strict=True):
        if a != b:
            crossing[a, b] = max(crossing.get((a, b), 0.0), 2 * weight)  # there, and its gradient back
    problem = StageProblem(
        work=np.bincount(number[~clonable], op_seconds[~clonable], len(heads)).astype(np.float64),
        edges=tuple((a, b, weight) for (a, b), weight in sorted(crossing.items())),
        stages=stages,
        count="edges",
        byte_weight=seconds_per_byte * turns,
        bottleneck_weight=float(turns),
    )
    try:
        found = assign_stages(problem, relative_gap=0.01, seconds=10.0)
    except ValueError:  # units that read one another in a circle
        return None
    if found.stage is None or len(np.unique(found.stage)) < stages:
        return None
    stage_of = np.full(len(flat.op_class), -1, dtype=np.int64)
    stage_of[~clonable] = found.stage[number[~clonable]]
    return stage_of


def _merge_chains(unit: Ints, seconds: Floats, maker: Ints, reader: Ints, ops: Ints, stages: int) -> Ints:
    """A unit that is the only reader of another, and reads no other, joins it unless both together are long."""
    unit = unit.copy()
    longest = float(seconds[ops].sum()) / (8 * stages)
    for _ in range(20):
        pairs = np.unique(np.stack([unit[maker], unit[reader]], axis=1), axis=0)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        if len(np.unique(unit[ops])) <= MOST_UNITS // 4 or not len(pairs):
            break
        out, into = np.bincount(pairs[:, 0], minlength=len(unit)), np.bincount(pairs[:, 1], minlength=len(unit))
        time = np.bincount(unit[ops], seconds[ops], len(unit))
        merged, touched = False, set[int]()
        for a, b in pairs.tolist():
            if out[a] == 1 and into[b] == 1 and not touched & {a, b} and time[a] + time[b] <= longest:
                unit[unit == b] = a
                touched |= {a, b}
                merged = True
        if not merged:
            break
    return unit
