"""A plan in words, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

import numpy as np

from simpart.errors import UnsupportedError
from simpart.graph import Graph
from simpart.hardware import Cluster
from simpart.kernels.ops import base_name
from simpart.placement import Placement, Sharding, StatePlacement, Strategy
from simpart.plan import Plan, kernel_ids
from simpart.plan.partition import check_plan

__all__ = ["describe", "digits", "human_bytes", "human_count", "human_seconds"]


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
    parameters = "".join(f", {name} {value}" for name, value in plan.schedule.parameters)
    lines = [
        f"{counted(len(plan.stages), 'stage')} on {counted(plan.device_count, 'device')}, schedule "
        f"{plan.schedule.kind}{parameters}, {counted(plan.batch.micro_batches, 'micro-batch')} of "
        f"{counted(plan.batch.micro_batch, 'sample')} (global batch {plan.global_batch}), {plan.mode}"
    ]
    for s, (stage, ops) in enumerate(zip(plan.stages, found.ops, strict=True)):
        held = sum(graph.parameters[int(v)].spec.elements(1) for v in found.parameters[s])
        parts = [*group_words(plan, stage.group, cluster), f"{human_count(held)} parameters"]
        if stage.recompute:
            again = np.unique(np.concatenate([region.indices(graph) for region in stage.recompute])).size
            parts.append(f"recomputes {again} of {ops.size} ops")
        lines.append(f"  stage {s}: {summarise_ops(graph, ops)}; {', '.join(parts)}")
    for crossing in found.crossings:
        op = graph.op_ids[int(graph.flat.value_op[crossing.value])]
        to, between = crossing.destinations, range(crossing.source + 1, crossing.destinations[-1])
        way = ""
        if between:
            others = f"stage{'s' if len(between) > 1 else ''} {numbers(between)}"
            way = f", relayed by {others}" if plan.skips == "relay" else f", sent past {others}"
        back = "" if crossing.carries_gradient else ", no gradient"
        lines.append(f"  stage {crossing.source} → {numbers(to)}: {op}{way}{back}")
    for value, stages in sorted(found.shared.items()):
        lines.append(f"  parameter {graph.parameters[value].name} in stages {numbers(stages)}: gradients summed")
    lines.extend(f"  at rest: {line}" for line in state_words(plan.state))
    for name, sharding in plan.shardings:
        lines.extend(f"  {line}" for line in sharding_words(plan, graph, name, sharding))
    if plan.shardings or plan.state:
        lines.extend(f"  {line}" for line in movement_words(plan, graph))
    return "\n".join(lines)


def group_words(plan: Plan, number: int, cluster: Cluster | None) -> list[str]:
    """Devices of a group, how they share the micro-batch, and the axes along which they split kernels."""
    group, sizes = plan.groups[number], plan.batch.sizes[number]
    kinds = Counter() if cluster is None else Counter(cluster.device(d).name for d in group.devices)
    words = f"devices {group.devices}" + (
        f" ({', '.join(f'{n} × {kind}' for kind, n in kinds.items())})" if kinds else ""
    )
    if len(sizes) == 1:
        share = counted(sizes[0], "sample")
    elif len(set(sizes)) == 1:
        share = f"{len(sizes)} replicas of {counted(sizes[0], 'sample')}"
    else:
        share = f"{len(sizes)} replicas of {' + '.join(map(str, sizes))} samples"
    split = [f"{name} {size}" for name, size in group.sharding_axes if size > 1]
    return [words, share, *([f"{'each ' if len(sizes) > 1 else ''}split over {' × '.join(split)}"] if split else [])]


def state_words(state: tuple[tuple[str, StatePlacement], ...]) -> list[str]:
    """One line for neighbours that rest alike."""
    lines = []
    for rest, rows in groupby(state, key=lambda row: row[1]):
        kinds: dict[tuple[tuple[str, Placement], ...], list[str]] = {}
        for what, places in (
            ("parameter", rest.parameter),
            ("gradient", rest.gradient),
            ("optimizer state", rest.optimizer),
        ):
            kinds.setdefault(places, []).append(what)
        words = [f"{listed(what)} {on_axes(places) if places else 'whole'}" for places, what in kinds.items()]
        lines.append(f"{', '.join(name for name, _ in rows)}: {'; '.join(words)}")
    return lines


def on_axes(places: tuple[tuple[str, Placement], ...]) -> str:
    return " ".join(f"{placement} on {axis}" for axis, placement in places)


def sharding_words(plan: Plan, graph: Graph, name: str, sharding: Sharding) -> list[str]:
    """Per op the strategies of its kernels, views left out: they follow."""
    stages = [s for s, stage in enumerate(plan.stages) if stage.sharding == name]
    rows = (*sharding.classes, *sharding.overrides)
    class_of = dict(zip(kernel_ids(graph), graph.flat.kernel_class.tolist(), strict=True))
    exceptions = f", {counted(len(sharding.overrides), 'exception')}" if sharding.overrides else ""
    lines = [
        f"sharding {name!r} of stage{'s' if len(stages) > 1 else ''} {numbers(stages)}: "
        f"{counted(len(sharding.classes), 'class')} of kernels{exceptions} "
        "(R whole, S(d) split along dim d, P terms to be reduced; views not shown)"
    ]
    for op, kernels in groupby(rows, key=lambda row: row[0].partition("|")[0]):
        path, _, target = op.partition("/")
        words = []
        for kernel, strategy in kernels:
            _, phase, called = kernel.split("|")
            if not graph.kernel_classes[class_of[kernel]].view:
                called, _, k = called.rpartition("#")
                again = f"#{k}" if k != "0" else ""
                words.append(f"{phase} {base_name(called)}{again}: {strategy_words(strategy)}")
        lines.extend(f"  {path or '(root)'} {base_name(target.partition('#')[0])}, {line}" for line in words)
    return lines


def movement_words(plan: Plan, graph: Graph) -> list[str]:
    """What the shardings and states make move; or why it cannot be said: a layout that no conversion leads to."""
    from simpart.describe.explain import explain

    try:
        return explain(plan, graph, quiet=True)
    except UnsupportedError as error:
        return [f"cannot run: {error}"]


def strategy_words(strategy: Strategy) -> str:
    """Per axis, placements of inputs and outputs."""
    return "; ".join(
        f"{axis} {', '.join(map(str, s.inputs))} → {', '.join(map(str, s.outputs))}" for axis, s in strategy.axes
    )


def counted(n: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "stage"), counted(2, "micro-batch")
    ('1 stage', '2 micro-batches')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def listed(words: list[str]) -> str:
    """Words with commas and a last "and"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def human_count(n: float) -> str:
    """SI letters, three digits.

    >>> human_count(110), human_count(1.75e11)
    ('110', '175 G')
    """
    for unit in ("", " k", " M", " G"):
        if abs(n) < 1000:
            return f"{n:.0f}" if not unit else f"{digits(n)}{unit}"
        n /= 1000
    return f"{digits(n)} T"


def numbers(values: Iterable[int]) -> str:
    """Runs of three and more as `0–3`.

    >>> numbers([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def summarise_ops(graph: Graph, ops: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """`62 ops, h.0 … h.5` : how many, and the module paths at both ends."""
    paths = [graph.op_ids[i].rpartition("/")[0] for i in ops.tolist()]
    named = [p for p in paths if p] or ["(root)"]
    ends = named[0] if named[0] == named[-1] else f"{named[0]} … {named[-1]}"
    return f"{counted(len(ops), 'op')}, {ends}"
