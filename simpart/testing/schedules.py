"""Golden cases of pipeline schedules, answered by simpart's own schedules, tasks and engine."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from simpart.engines.compiled import peaks, times
from simpart.program import MEMORY_KINDS, Durations, MemoryDeltas
from simpart.schedule import Schedule
from simpart.topology import Shape, StageEdge, class_of_action, topology_of

__all__ = ["replay_schedule", "solve_schedule"]


def replay_schedule(
    kind: str, forward_s: list[float], backward_s: list[float], micro_batches: int, latency_s: float
) -> tuple[float, list[int]]:
    """Makespan and peak number of micro-batches in flight per stage; neighbours are a pure delay apart."""
    stages = len(forward_s)
    edges = tuple(StageEdge(s, s + 1) for s in range(stages - 1))
    shape = Shape(tuple(range(stages)), Schedule(kind=kind), micro_batches, edges, transfers="lags")
    topology = topology_of(shape)
    classes = len(topology.class_names)
    task_s = np.zeros(classes)
    start, end, none = (np.zeros((classes, len(MEMORY_KINDS))) for _ in range(3))
    for stage in range(stages):
        forward, backward = class_of_action(stage, "F"), class_of_action(stage, "B")
        task_s[forward], task_s[backward] = forward_s[stage], backward_s[stage]
        # One unit of memory per micro-batch between the start of its forward and the end of its backward.
        start[forward, 0], end[backward, 0] = 1.0, -1.0
    found = times(topology, Durations(task_s=task_s, lag_s=np.full(2 * len(edges), float(latency_s))))
    static = np.zeros((topology.groups, len(MEMORY_KINDS)))
    held = peaks(topology, MemoryDeltas(static=static, start=start, end=end, within=none))
    return found.makespan_s, [int(level) for level in held.bytes]


def solve_schedule(inputs: dict[str, Any]) -> dict[str, Any]:
    """GPipe and 1F1B for stage times f and b, M micro-batches and a latency, with the closed forms around them."""
    bounds = importlib.import_module("simpart.searchers._bounds")
    forward, backward = [float(x) for x in inputs["f"]], [float(x) for x in inputs["b"]]
    micro_batches, latency = int(inputs["M"]), float(inputs["latency"])
    gpipe, gpipe_flying = replay_schedule("gpipe", forward, backward, micro_batches, latency)
    alternating, alternating_flying = replay_schedule("1f1b", forward, backward, micro_batches, latency)
    pivot, pivot_time = bounds.dapple_pivot(forward, backward, micro_batches)
    return {
        "gpipe": gpipe,
        "one_f_one_b": alternating,
        "peak_in_flight_gpipe": gpipe_flying,
        "peak_in_flight_1f1b": alternating_flying,
        "lockstep": bounds.lockstep_s(forward, backward, micro_batches),
        "dapple_pivot": {"Q": pivot, "T": pivot_time},
        "lower_bound": bounds.schedule_lower_bound_s(forward, backward, micro_batches, latency),
    }
