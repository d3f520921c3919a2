"""A schedule for a plan from what its stages take and hold: forwards, input and weight gradients in an order that
leaves little bubble within the devices' memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simpart.errors import UserError
from simpart.lowering import lowering_of
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.schedule import Schedule, StageTimes, zero_bubble

__all__ = ["fit_schedule", "stage_times"]


def stage_times(problem: Problem, plan: Plan) -> tuple[StageTimes, list[float]]:
    """Seconds and bytes of one micro-batch on every stage, and the bytes that each group has for micro-batches."""
    lowering, stages = lowering_of(problem), len(plan.stages)
    costed = lowering.cost(plan)
    topology = lowering.topology(plan, costed, "tasks")
    memory, variants = lowering.memory(plan, costed, topology)
    seconds, homes = costed.seconds, plan.group_of_stage
    send = [0.0] * (stages - 1)
    for e, edge in enumerate(costed.layout.edges):
        if edge.target == edge.source + 1:
            there, back = seconds[4 * stages + 2 * e : 4 * stages + 2 * e + 2].tolist()
            send[edge.source] = max(there, back)
    start, end, within = (table.sum(axis=1) for table in (memory.start, memory.end, memory.within))
    room = lowering.footprints.room(variants)
    besides = np.zeros(len(plan.groups))
    np.maximum.at(besides, np.repeat(homes, 4), within[: 4 * stages])
    fixed = memory.static.sum(axis=1) + memory.late.sum(axis=1) + besides
    limits = (room.capacity_bytes - room.reserved_bytes) / room.allocator_factor - fixed
    action = seconds[: 4 * stages].reshape(stages, 4)
    times = StageTimes(
        forward_s=tuple(action[:, 0].tolist()),
        input_s=tuple(action[:, 2].tolist()),
        weight_s=tuple(action[:, 3].tolist()),
        send_s=tuple(send),
        held=tuple(start[0 : 4 * stages : 4].tolist()),
        kept=tuple((-end[3 : 4 * stages : 4]).tolist()),
    )
    return times, limits.tolist()


def fit_schedule(problem: Problem, plan: Plan, limits: list[float] | None = None) -> Plan:
    """The plan with explicit rows of F, I and W; `limits` are bytes per group for micro-batches in flight, by default
    what its devices have. Raises UserError where one micro-batch does not fit."""
    times, room = stage_times(problem, plan)
    limits = room if limits is None else limits
    needed = [sum(h for h, g in zip(times.held, plan.group_of_stage, strict=True) if g == group)
              for group in range(len(plan.groups))]  # fmt: skip
    short = [g for g, (n, r) in enumerate(zip(needed, limits, strict=True)) if n > r]
    if short:
        g = short[0]
        raise UserError(
            f"group {g} has room for {max(0.0, limits[g]):.3g} bytes of micro-batches and one takes {needed[g]:.3g}; "
            "use more stages, a smaller micro-batch or recomputation"
        )
    rows = zero_bubble(plan.group_of_stage, plan.batch.micro_batches, times, limits)
    return replace(plan, schedule=Schedule(kind="explicit", explicit=rows))
