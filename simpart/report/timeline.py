"""A replayed step as text: a row per device group and link, a column per slice of time."""

from __future__ import annotations

import numpy as np

from simpart.describe import human_bytes, human_seconds
from simpart.program import TaskKind
from simpart.simulation import SimResult

__all__ = ["timeline"]

_MARKS = {
    TaskKind.FORWARD: "F",
    TaskKind.BACKWARD: "B",
    TaskKind.BACKWARD_INPUT: "I",
    TaskKind.BACKWARD_WEIGHT: "W",
    TaskKind.SEND: "-",
    TaskKind.REDUCE: "R",
    TaskKind.OPTIMIZER: "O",
    TaskKind.COLLECTIVE: "c",
}
MAX_ROWS = 40


def timeline(result: SimResult, width: int = 100) -> str:
    """At most `width` columns. A cell shows what a group does for most of that time, a link at all; `.` is idle.

    Where a task is wide enough, its micro-batch follows its letter.
    """
    topology, times = result.program.topology, result.times
    names = list(topology.resource_names)
    label = max(map(len, names), default=0)
    columns = max(10, width - label - 3)
    total = times.makespan_s
    lines = []
    for r, name in enumerate(names[:MAX_ROWS]):
        row = topology.resource_order[topology.resource_indptr[r] : topology.resource_indptr[r + 1]]
        cells = _cells(result, row.tolist(), columns, total, least=0.5 if r < topology.groups else 1e-9)
        lines.append(f"{name.ljust(label)} |{cells}|")
    if len(names) > MAX_ROWS:
        lines.append(f"… and {len(names) - MAX_ROWS} more rows")
    scale = f"0 … {human_seconds(total)}, a column is {human_seconds(total / columns)}"
    legend = "F forward, B backward, I and W its parts, - transfer, R reduction, O optimizer, . idle"
    legend += ", c other collective" if result.program.grain == "fine" else ""
    used = ", ".join(f"group {row.group} {human_bytes(row.device_bytes)}" for row in result.memory[:8])
    return "\n".join([*lines, scale, legend, f"peak memory: {used}{' …' if len(result.memory) > 8 else ''}"])


def _cells(result: SimResult, tasks: list[int], columns: int, total: float, least: float) -> str:
    topology, times = result.program.topology, result.times
    if total <= 0:
        return "." * columns
    share = {mark: np.zeros(columns) for mark in dict.fromkeys(_MARKS.values())}
    spans: list[tuple[int, int, str]] = []
    for task in tasks:
        start, end = float(times.start_s[task]) / total * columns, float(times.end_s[task]) / total * columns
        mark = _MARKS[TaskKind(int(topology.kind[task]))]
        first, last = int(start), min(int(end), columns - 1)
        for column in range(first, last + 1):
            share[mark][column] += max(0.0, min(end, column + 1) - max(start, column))
        number = f"{mark}{int(topology.micro_batch[task])}" if topology.micro_batch[task] >= 0 else mark
        low, high = int(np.ceil(start - 1e-9)), int(np.floor(end + 1e-9))
        if high - low > len(number) and mark != "-":
            spans.append((low, high, number))
    table = np.stack(list(share.values()))
    marks = list(share)
    best = table.argmax(axis=0)
    busy = table.sum(axis=0)
    cells = [marks[b] if busy[c] >= least else "." for c, b in enumerate(best.tolist())]
    for low, _, number in spans:
        cells[low : low + len(number)] = number
    return "".join(cells)
