"""A plan in words, for people."""

from __future__ import annotations

import numpy as np

from simpart.graph import Graph
from simpart.hardware import Cluster
from simpart.partition import check_plan
from simpart.placement import Placement, Strategy
from simpart.plan import Plan

__all__ = ["describe", "digits", "human_bytes", "human_seconds"]


def human_bytes(n: float) -> str:
    """Binary prefixes, three digits.

    >>> human_bytes(3 << 30), human_bytes(1536)
    ('3.00 GiB', '1.50 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{digits(n)} {unit}"
        n /= 1024
    return f"{digits(n)} TiB"


def human_seconds(t: float) -> str:
    """SI prefixes, three digits.

    >>> human_seconds(0.01234), human_seconds(75.0)
    ('12.3 ms', '75.0 s')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(t) >= scale or unit == "µs":
            return f"{digits(t / scale)} {unit}"
    raise AssertionError("unreachable")


def digits(x: float) -> str:
    """Three significant digits without exponent."""
    return f"{x:.2f}" if abs(x) < 10 else f"{x:.1f}" if abs(x) < 100 else f"{x:.0f}"


def describe(plan: Plan, graph: Graph, cluster: Cluster | None = None) -> str:
    """Several lines: what runs where, on which share of the batch, in which order, and what crosses between stages."""
    found = check_plan(plan, graph)
    lines = [
        f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''} on {plan.device_count} devices, schedule "
        f"{plan.schedule.kind}, {plan.batch.micro_batches} micro-batches of {plan.batch.micro_batch} samples "
        f"(global batch {plan.global_batch}), {plan.mode}"
    ]
    for s, (stage, ops) in enumerate(zip(plan.stages, found.ops, strict=True)):
        group = plan.groups[stage.group]
        where = f"devices {group.devices}"
        if cluster is not None:
            where += f" ({', '.join(sorted({cluster.device(d).name for d in group.devices}))})"
        axes = " × ".join(f"{name} {size}" for name, size in group.axes if size > 1)
        sizes = plan.batch.sizes[stage.group]
        share = f"{len(sizes)} × {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        parameters = sum(graph.parameters[int(v)].spec.elements(1) for v in found.parameters[s])
        parts = [where, *([axes] if axes else []), f"{share} samples", f"{parameters / 1e6:.1f} M parameters"]
        if stage.recompute:
            parts.append(f"recomputes {sum(len(r.indices(graph)) for r in stage.recompute)} of {ops.size} ops")
        lines.append(f"  stage {s}: {summarise_ops(graph, ops)}; {', '.join(parts)}")
        if stage.sharding is not None:
            sharding = dict(plan.shardings)[stage.sharding]
            for name, strategy in (*sharding.classes, *sharding.overrides):
                lines.append(f"    {name}: {strategy_words(strategy)}")
    for crossing in found.crossings:
        op = graph.op_ids[int(graph.flat.value_op[crossing.value])]
        way = (
            ""
            if len(crossing.destinations) == 1 and crossing.destinations[0] == crossing.source + 1
            else f" ({plan.skips})"
        )
        to = ", ".join(map(str, crossing.destinations))
        back = "" if crossing.carries_gradient else ", no gradient"
        lines.append(f"  stage {crossing.source} → {to}{way}: {op}{back}")
    for value, stages in sorted(found.shared.items()):
        lines.append(
            f"  parameter {graph.parameters[value].name} in stages {', '.join(map(str, stages))}: gradients summed"
        )
    for name, rest in plan.state:
        words = [
            f"{what} {on_axes(places)}"
            for what, places in (
                ("parameter", rest.parameter),
                ("gradient", rest.gradient),
                ("optimizer state", rest.optimizer),
            )
            if places
        ]
        lines.append(f"  {name} rests as {', '.join(words) or 'replicas'}")
    return "\n".join(lines)


def on_axes(places: tuple[tuple[str, Placement], ...]) -> str:
    return " ".join(f"{placement} on {axis}" for axis, placement in places)


def strategy_words(strategy: Strategy) -> str:
    return "; ".join(
        f"{axis}: {', '.join(map(str, s.inputs))} → {', '.join(map(str, s.outputs))}" for axis, s in strategy.axes
    )


def summarise_ops(graph: Graph, ops: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """`62 ops, h.0 … h.5` : how many, and the module paths at both ends."""
    paths = [graph.op_ids[i].rpartition("/")[0] for i in ops.tolist()]
    named = [p for p in paths if p] or ["(root)"]
    ends = named[0] if named[0] == named[-1] else f"{named[0]} … {named[-1]}"
    return f"{len(ops)} ops, {ends}"
