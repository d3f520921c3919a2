"""What limits a step: the time of its busiest group, told apart, and what less of each part would buy."""

from __future__ import annotations

import numpy as np

from simpart.engines import Times, compiled
from simpart.program import Program, TaskKind, streams_of

__all__ = ["bottleneck", "critical_path", "gains_of", "limits_of"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
LITTLE = 0.01


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
    waiting; `overhead` fixed times per step and action, and waiting for the host to launch. Collectives within
    actions count under their axis; in the fine grain, that is what the compute stream waits for them.
    """
    topology, facts = program.topology, program.facts
    assert facts is not None  # simulate checks
    if program.grain == "fine":
        return _limits_of_streams(program, times, step_s)
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
            fixed = min(end - start, float(facts.class_overhead_s[topology.task_class[task]]))
            shares["overhead"] += fixed
            within = {axis: float(seconds[topology.task_class[task]]) for axis, seconds in facts.inside}
            for axis, seconds in within.items():
                shares[f"communication {axis}"] = shares.get(f"communication {axis}", 0.0) + seconds
            shares["compute"] += end - start - fixed - sum(within.values())
        before = end
    shares["bubble"] += step_s - facts.overhead_s - before
    return {name: max(0.0, seconds) / step_s if step_s > 0 else 0.0 for name, seconds in shares.items()}


def _limits_of_streams(program: Program, times: Times, step_s: float) -> dict[str, float]:
    """The same from a group's compute stream: each gap is followed back through what the next task waited for."""
    topology, facts = program.topology, program.facts
    assert facts is not None  # lower gives them
    group = bottleneck(program)
    names = ["compute", "communication pp", "bubble", "overhead"]
    names += [f"communication {axis}" for axis in (*facts.reduction_axes, *facts.class_axes) if axis]
    shares = dict.fromkeys(names, 0.0)
    shares["overhead"] = facts.overhead_s
    waits = _Waits(program, times, group)
    before = 0.0
    row = topology.resource_order[topology.resource_indptr[group] : topology.resource_indptr[group + 1]]
    for task in row.tolist():
        start, end, c = waits.start[task], waits.end[task], int(topology.task_class[task])
        waits.attribute(task, before, start, shares)
        if facts.class_axes[c]:
            shares[f"communication {facts.class_axes[c]}"] += end - start
        else:
            fixed = min(end - start, float(facts.class_overhead_s[c]))
            shares["overhead"] += fixed
            shares["compute"] += end - start - fixed
        before = end
    streams = np.flatnonzero(np.isin(topology.resource, streams_of(topology, group)))
    last = int(streams[np.argmax(times.end_s[streams])])
    if waits.end[last] > before:  # updated parameters are gathered when all is computed
        shares[f"communication {facts.class_axes[topology.task_class[last]]}"] += waits.end[last] - before
        before = waits.end[last]
    shares["bubble"] += step_s - facts.overhead_s - before
    return {name: max(0.0, seconds) / step_s if step_s > 0 else 0.0 for name, seconds in shares.items()}


class _Waits:
    """What tasks of a group waited for."""

    def __init__(self, program: Program, times: Times, group: int) -> None:
        topology, facts = program.topology, program.facts
        assert facts is not None  # simulate checks
        self.start, self.end = times.start_s.tolist(), times.end_s.tolist()
        self.indptr, self.predecessors = topology.indptr.tolist(), topology.predecessors.tolist()
        before = np.full(topology.size, -1)
        before[topology.resource_order[1:]] = topology.resource_order[:-1]
        first = topology.resource_indptr[:-1][np.diff(topology.resource_indptr) > 0]
        before[topology.resource_order[first]] = -1
        self.before = before.tolist()
        ours = np.isin(topology.resource, streams_of(topology, group))
        axes = np.array([f"communication {axis}" if axis else "" for axis in facts.class_axes], dtype=object)
        names = np.where(ours, axes[topology.task_class], "")
        self.name = np.where(topology.kind == TaskKind.SEND, "communication pp", names).tolist()

    def attribute(self, task: int, begin: float, end: float, shares: dict[str, float]) -> None:
        """Seconds of [begin, end), the end being when the task could start: communication as long as a chain of it
        leads back from the task, bubble from there on."""
        while end > begin:
            causes = self.predecessors[self.indptr[task] : self.indptr[task + 1]]
            if self.before[task] >= 0:
                causes = [*causes, self.before[task]]
            cause = max(causes, key=self.end.__getitem__, default=-1)
            if cause < 0 or not self.name[cause]:
                shares["bubble"] += end - begin
                return
            since = max(begin, self.start[cause])
            shares[self.name[cause]] += end - since
            task, end = cause, since


def _sending(program: Program, times: Times, task: int, begin: float, end: float) -> float:
    """Seconds of [begin, end) in which the transfer that the task waits for longest occupies its link."""
    topology = program.topology
    edges = topology.predecessors[topology.indptr[task] : topology.indptr[task + 1]]
    sends = edges[topology.kind[edges] == TaskKind.SEND]
    if sends.size == 0 or end <= begin:
        return 0.0
    last = int(sends[np.argmax(times.end_s[sends])])
    return max(0.0, min(end, float(times.end_s[last])) - max(begin, float(times.start_s[last])))


# --- what would help -------------------------------------------------------------------------------------------------
def parts_of(program: Program) -> dict[str, Floats]:
    """Seconds of every task class by what they are: compute, communication by axis, overhead. They sum to the
    durations."""
    topology, facts, task_s = program.topology, program.facts, program.durations.task_s
    assert facts is not None  # simulate checks
    kind = np.full(task_s.size, -1)
    kind[topology.task_class] = topology.kind
    if program.grain == "fine":
        return _parts_of_streams(program, kind)
    first_reduction = task_s.size - topology.groups - len(facts.reduction_axes)
    parts = {"overhead": np.minimum(task_s, facts.class_overhead_s)}
    for axis, seconds in facts.inside:
        parts[f"communication {axis}"] = seconds.copy()
    parts.setdefault("communication pp", np.zeros(task_s.size))
    parts["communication pp"][kind == TaskKind.SEND] += task_s[kind == TaskKind.SEND]
    for r, axis in enumerate(facts.reduction_axes):
        part = parts.setdefault(f"communication {axis}", np.zeros(task_s.size))
        part[first_reduction + r] += task_s[first_reduction + r]
    parts["compute"] = np.maximum(task_s - sum(parts.values()), 0.0)
    return parts


def _parts_of_streams(program: Program, kind: Ints) -> dict[str, Floats]:
    facts, task_s = program.facts, program.durations.task_s
    assert facts is not None  # lower gives them
    parts = {"overhead": np.minimum(task_s, facts.class_overhead_s)}
    parts["communication pp"] = np.where(kind == TaskKind.SEND, task_s, 0.0)
    names = np.array(facts.class_axes)
    for axis in dict.fromkeys(axis for axis in facts.class_axes if axis):
        parts[f"communication {axis}"] = np.where(names == axis, task_s, 0.0)
    parts["compute"] = np.maximum(task_s - sum(parts.values()), 0.0)
    return parts


def gains_of(program: Program) -> dict[str, dict[str, float]]:
    """By which part the step would be shorter: with 1 % less of a component everywhere (`one_percent`, in per cent of
    the step), and with none of it (`all`, a share of the step)."""
    facts, task_s = program.facts, program.durations.task_s
    assert facts is not None  # simulate checks
    parts = parts_of(program)
    less = [task_s - scale * part for part in parts.values() for scale in (LITTLE, 1.0)]
    steps = compiled.makespans(program.topology, np.maximum(np.stack([task_s, *less]), 0.0)) + facts.overhead_s
    found = {}
    for i, name in enumerate(parts):
        fixed = facts.overhead_s if name == "overhead" else 0.0
        little, whole = steps[0] - steps[1 + 2 * i] + LITTLE * fixed, steps[0] - steps[2 + 2 * i] + fixed
        if steps[0] > 0 and (parts[name].any() or fixed):
            found[name] = {"one_percent": float(little / steps[0] / LITTLE), "all": float(whole / steps[0])}
    return found


def critical_path(program: Program, times: Times) -> list[int]:
    """Tasks that follow one another without a gap from the step's begin to its end, any of which, if longer, makes the
    step longer. Of several such paths the one over the latest-numbered tasks."""
    topology = program.topology
    before = np.full(topology.size, -1)
    queue, starts = topology.resource_order, topology.resource_indptr
    before[queue[1:]] = queue[:-1]
    before[queue[starts[:-1][np.diff(starts) > 0]]] = -1
    path = [int(np.flatnonzero(times.end_s == times.end_s.max())[-1])]
    while times.start_s[path[-1]] > 0:
        task = path[-1]
        causes = [*topology.predecessors[topology.indptr[task] : topology.indptr[task + 1]].tolist(), int(before[task])]
        lags = [*topology.lag[topology.indptr[task] : topology.indptr[task + 1]].tolist(), -1]
        lag_s = program.durations.lag_s
        ready = [
            (times.end_s[c] + (lag_s[k] if k >= 0 else 0.0), c) for c, k in zip(causes, lags, strict=True) if c >= 0
        ]
        path.append(max(ready)[1])
    return path[::-1]
