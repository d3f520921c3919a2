"""A sharding in words: per stage, how every op lies, what it makes move, and what could only be replicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from simpart.graph import Graph
from simpart.kernels.ops import base_name
from simpart.placement import Replicate
from simpart.plan import Plan
from simpart.sharding.flow import Flow, flows
from simpart.sharding.propagate import undescribed

__all__ = ["Row", "explain", "rows_of", "totals"]

WIDTH = 140
"""Longer sums are written on two lines."""


@dataclass(slots=True)
class Row:
    """Ops of one class in one stage. `placements` of what they read and make, in words; `collectives` are (kind, axis,
    times over all instances and both ways, bytes received by each device); `reason`: why it can only replicate."""

    ops: str
    instances: int
    placements: str
    collectives: list[tuple[str, str, int, int]] = field(default_factory=list)
    reason: str | None = None


def rows_of(graph: Graph, flow: Flow) -> list[Row]:
    """One row per class of ops that is split, talks, or can only replicate; views that follow are left out."""
    flat = graph.flat
    reasons = undescribed(graph, flow.micro_batch)
    names = _class_names(graph)
    why = {cls: reasons[name] for cls, name in names.items() if name in reasons}
    kernels: dict[int, dict[int, int]] = {}  # op class -> its kernel classes, by first instance
    count: dict[int, set[int]] = {}
    for k in flow.uses:
        op = int(flat.kernel_op[k])
        kernels.setdefault(int(flat.op_class[op]), {}).setdefault(int(flat.kernel_class[k]), k)
        count.setdefault(int(flat.op_class[op]), set()).add(op)
    moved = _moved(graph, flow)
    rows = []
    for cls in sorted(kernels, key=lambda c: min(kernels[c].values())):
        members = kernels[cls]
        talk = moved.get(cls, [])
        reason = next((why[k] for k in members if k in why), None)
        words = _placements(graph, flow, [k for c, k in members.items() if not graph.kernel_classes[c].view])
        if not words and not talk and reason is None:
            continue
        first = graph.op_ids[min(count[cls])]
        rows.append(Row(first, len(count[cls]), words or "whole", talk, reason))
    return rows


def _class_names(graph: Graph) -> dict[int, str]:
    from simpart.sharding._regions import wiring_of

    return wiring_of(graph).name_of_class


def _placements(graph: Graph, flow: Flow, kernels: Sequence[int]) -> str:
    """`tp addmm S(0) R S(1) → S(1)` of the forward kernels that split something."""
    words = []
    forward = [k for k in kernels if graph.flat.kernel_forward[k]] or list(kernels)
    for k in forward:
        use = flow.uses[k]
        name = base_name(graph.kernel_classes[int(graph.flat.kernel_class[k])].target)
        for number, (axis, _) in enumerate(flow.axes):
            places = [layout[number] for layout in (*use.inputs, *use.outputs)]
            if any(p != Replicate() for p in places):
                inputs = " ".join(str(layout[number]) for layout in use.inputs)
                outputs = " ".join(str(layout[number]) for layout in use.outputs)
                words.append(f"{axis} {name} {inputs} → {outputs}")
    return "; ".join(words)


def _moved(graph: Graph, flow: Flow) -> dict[int, list[tuple[str, str, int, int]]]:
    """Collectives by the op class that asks for them; what leaves a stage by the class that made it."""
    flat = graph.flat
    found: dict[int, dict[tuple[str, str], list[int]]] = {}

    def add(kernel: int, kind: str, axis: int, times: int, size: int) -> None:
        cls = int(flat.op_class[flat.kernel_op[kernel]])
        row = found.setdefault(cls, {}).setdefault((kind.replace("_", "-"), flow.axes[axis][0]), [0, 0])
        row[0] += times
        row[1] += times * size

    for conversion in flow.conversions:
        kernel = conversion.kernels[0]
        if conversion.role in ("gradient", "update"):
            continue
        if kernel < 0:
            kernel = int(flat.kernel_value_kernel[conversion.values[0]])
        for step in conversion.steps:
            if step.kind != "local" and kernel >= 0:
                add(kernel, step.kind, step.axis, conversion.times, step.received_bytes)
    for exchange in flow.exchanges:
        size = flow.axes[exchange.axis][1]
        received = -(-2 * (size - 1) * exchange.bytes // size)
        add(exchange.kernels[0], "all-reduce inside", exchange.axis, len(exchange.kernels), received)
    return {
        cls: [(kind, axis, times, size) for (kind, axis), (times, size) in rows.items()] for cls, rows in found.items()
    }


def totals(flow: Flow) -> list[tuple[str, str, str, int, int]]:
    """(when, kind, axis, times, bytes received by each device), per micro-batch and per step."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for conversion in flow.conversions:
        when = "step" if conversion.per_step else "micro-batch"
        for step in conversion.steps:
            if step.kind != "local":
                row = found.setdefault((when, step.kind.replace("_", "-"), flow.axes[step.axis][0]), [0, 0])
                row[0] += conversion.times
                row[1] += conversion.times * step.received_bytes
    for exchange in flow.exchanges:
        name, size = flow.axes[exchange.axis]
        row = found.setdefault(("micro-batch", "inside kernels", name), [0, 0])
        row[0] += len(exchange.kernels)
        row[1] += len(exchange.kernels) * (-(-2 * (size - 1) * exchange.bytes // size))
    return [(*key, times, size) for key, (times, size) in sorted(found.items())]


def explain(plan: Plan, graph: Graph, *, quiet: bool = False) -> list[str]:
    """Lines: per stage what moves in all, then a row per class of ops; stages that lie alike once. `quiet` leaves out
    rows of ops that have a description."""
    from simpart.describe import numbers

    lines: list[str] = []
    found = [(s, _sums(flow), _words(graph, flow, quiet)) for s, flow in enumerate(flows(plan, graph))]
    for (sums, rows), same in groupby(found, key=lambda item: (item[1], item[2])):
        stages = [s for s, *_ in same]
        if sums or rows:
            who = f"stages {numbers(stages)} each move" if len(stages) > 1 else f"stage {stages[0]} moves"
            lines += [f"{who} {line}" for line in sums] or [f"{who} nothing"]
            lines += [f"  {row}" for row in rows]
    return lines


def _sums(flow: Flow) -> tuple[str, ...]:
    """`per micro-batch: tp 15 all-gather (60 KiB); per step: …`: bytes that each device receives."""
    from simpart.describe import human_bytes

    parts = []
    order = sorted(totals(flow), key=lambda row: (row[0], row[2]))
    for when, rows in groupby(order, key=lambda row: row[0]):
        words = []
        for axis, same in groupby(rows, key=lambda row: row[2]):
            items = list(same)
            kinds = ", ".join(f"{times} {kind}" for _, kind, _, times, _ in items)
            words.append(f"{axis} {kinds} ({human_bytes(sum(item[4] for item in items))})")
        parts.append(f"per {when}: {', '.join(words)}")
    line = "; ".join(parts)
    return (line,) if parts and len(line) < WIDTH else tuple(parts)


def _words(graph: Graph, flow: Flow, quiet: bool) -> tuple[str, ...]:
    from simpart.describe import human_bytes

    found = []
    for row in rows_of(graph, flow):
        if quiet and row.reason is None:
            continue
        talk = [f"{times} {kind} on {axis} ({human_bytes(size)})" for kind, axis, times, size in row.collectives]
        words = [row.placements, ", ".join(talk), f"only replicated: {row.reason}" if row.reason else ""]
        times = f" × {row.instances}" if row.instances > 1 else ""
        found.append(f"{row.ops}{times}: {'; '.join(w for w in words if w)}")
    return tuple(found)
