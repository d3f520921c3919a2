"""Golden cases of pipeline schedules, answered by simpart's own schedules, tasks and engine."""

from __future__ import annotations

import importlib
from typing import Any

from simpart.schedule import SCHEDULES, StageTimes, group_spans, zero_bubble
from simpart.simulation import makespan
from simpart.testing.golden import AtMost
from simpart.testing.schedule_suite import held

__all__ = ["replay_schedule", "solve_schedule", "solve_zero_bubble"]


def replay_schedule(
    kind: str, forward_s: list[float], backward_s: list[float], micro_batches: int, latency_s: float
) -> tuple[float, list[int]]:
    """Makespan and peak number of micro-batches in flight per stage; neighbours are a pure delay apart."""
    rows = SCHEDULES[kind](range(len(forward_s)), micro_batches)
    makespan_s, flying = makespan(rows, forward_s, backward_s, latency_s)
    return makespan_s, list(flying)


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


def solve_zero_bubble(inputs: dict[str, Any]) -> dict[str, Any]:
    """A zero-bubble order within a memory limit, one stage per group; the cost is the longest span of a stage."""
    stages, micro_batches, limit = (int(inputs[key]) for key in ("stages", "micro_batches", "memory_limit"))
    forward, split, weight, latency = (
        float(inputs[key]) for key in ("F", "B_input_grad", "W_weight_grad", "p2p_latency")
    )
    memory = [float(inputs[key]) for key in ("mem_F", "mem_B", "mem_W")]
    times = StageTimes.equal(stages, forward, split, weight, latency)
    rows = zero_bubble(range(stages), micro_batches, times, limit, "span")
    assert memory == [1.0, -0.5, -0.5] and max(map(held, rows)) <= limit
    cost = max(end - start for start, end in group_spans(rows, times))
    work = micro_batches * (forward + split + weight)
    assert cost >= work
    formula = work + (stages - 1) * (forward + split - weight) + 4 * (stages - 1) * latency
    return {"cost": AtMost(cost), "ideal_work": work, "zb_h1_formula": formula if limit == stages else None}
