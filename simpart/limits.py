"""What limits a step: the time of its busiest group, told apart."""

from __future__ import annotations

import numpy as np

from simpart.engines import Times
from simpart.program import Program, TaskKind

__all__ = ["bottleneck", "limits_of"]


def bottleneck(program: Program) -> int:
    """The group with the most to do; of equals the first."""
    topology = program.topology
    work = program.durations.task_s[topology.task_class]
    ours = topology.resource < topology.groups
    busy = np.bincount(topology.resource[ours & (topology.resource >= 0)], work[ours & (topology.resource >= 0)])
    return int(np.argmax(busy))


def limits_of(program: Program, times: Times, step_s: float) -> dict[str, float]:
    """Shares of the step on the bottleneck group's row; they sum to 1.

    `compute` is its own work; `communication pp` waiting while a transfer to it is under way, `communication dp`,
    `tied` and `norm` its gradient collectives (with waiting for other groups to join); `bubble` the rest of its
    waiting; `overhead` fixed times per step and action. Collectives within actions count under their axis.
    """
    topology, facts = program.topology, program.facts
    assert facts is not None  # simulate checks
    group = bottleneck(program)
    row = topology.resource_order[topology.resource_indptr[group] : topology.resource_indptr[group + 1]]
    first_reduction = len(topology.class_names) - topology.groups - len(facts.reduction_axes)
    shares = {"compute": 0.0, "communication pp": 0.0, "bubble": 0.0, "overhead": facts.overhead_s}
    shares |= {f"communication {axis}": 0.0 for axis in facts.reduction_axes}
    before = 0.0
    for task in row.tolist():
        start, end = float(times.start_s[task]), float(times.end_s[task])
        if topology.kind[task] == TaskKind.REDUCE:
            axis = facts.reduction_axes[int(topology.task_class[task]) - first_reduction]
            shares[f"communication {axis}"] += end - before
        else:
            sending = _sending(program, times, task, before, start)
            shares["communication pp"] += sending
            shares["bubble"] += start - before - sending
            fixed = min(end - start, facts.action_overhead_s if topology.kind[task] < TaskKind.SEND else 0.0)
            shares["overhead"] += fixed
            within = {axis: float(seconds[topology.task_class[task]]) for axis, seconds in facts.inside}
            for axis, seconds in within.items():
                shares[f"communication {axis}"] = shares.get(f"communication {axis}", 0.0) + seconds
            shares["compute"] += end - start - fixed - sum(within.values())
        before = end
    shares["bubble"] += step_s - facts.overhead_s - before
    return {name: max(0.0, seconds) / step_s if step_s > 0 else 0.0 for name, seconds in shares.items()}


def _sending(program: Program, times: Times, task: int, begin: float, end: float) -> float:
    """Seconds of [begin, end) in which the transfer that the task waits for longest occupies its link."""
    topology = program.topology
    edges = topology.predecessors[topology.indptr[task] : topology.indptr[task + 1]]
    sends = edges[topology.kind[edges] == TaskKind.SEND]
    if sends.size == 0 or end <= begin:
        return 0.0
    last = int(sends[np.argmax(times.end_s[sends])])
    return max(0.0, min(end, float(times.end_s[last])) - max(begin, float(times.start_s[last])))
