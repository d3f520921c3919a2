"""What differs between two plans of one graph, and between what is predicted of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simpart.describe import counted, numbers, state_words, strategy_words, summarise_ops
from simpart.graph import Graph
from simpart.placement import Strategy
from simpart.plan import OpSet, Plan, kernel_ids
from simpart.plan.format import PlanFile, training_to_json
from simpart.simulation import SimResult

__all__ = ["Difference", "diff_plans", "diff_predictions", "differing_parts"]

MOST = 12
"""Rows of one kind that are told; the rest is counted."""
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs: `part` is stages, devices, batch, schedule, …; `where` which of them; `a` and `b` what
    each plan has there."""

    part: str
    where: str
    a: str
    b: str

    def to_json(self) -> dict[str, str]:
        return {"part": self.part, "where": self.where, "a": self.a, "b": self.b}


def differing_parts(a: Plan, b: Plan) -> list[str]:
    """The parts in which two plans differ, in words, without looking at the graph."""
    found = []
    if len(a.stages) != len(b.stages):
        found.append(f"{counted(len(a.stages), 'stage')} instead of {len(b.stages)}")
    elif [s.ops for s in a.stages] != [s.ops for s in b.stages]:
        found.append("cuts")
    mine, other = ([len(g.devices) for g in p.groups] for p in (a, b))
    if len(a.stages) == len(b.stages) and mine != other:
        found.append(f"devices {'+'.join(map(str, mine))} instead of {'+'.join(map(str, other))}")
    elif mine == other and [g.devices for g in a.groups] != [g.devices for g in b.groups]:
        found.append("placement")
    if a.batch.micro_batches != b.batch.micro_batches:
        found.append(f"{counted(a.batch.micro_batches, 'micro-batch')} instead of {b.batch.micro_batches}")
    elif mine == other and a.batch.sizes != b.batch.sizes:
        found.append("samples of replicas")
    if a.schedule != b.schedule:
        one, two = a.schedule.kind, b.schedule.kind
        found.append(f"{one} instead of {two}" if one != two else f"order of {one}")
    again = [sum(bool(s.recompute) for s in p.stages) for p in (a, b)]
    if [s.recompute for s in a.stages] != [s.recompute for s in b.stages] and again != [0, 0]:
        found.append(f"recomputation in {again[0]} of {len(a.stages)} stages instead of {again[1]} of {len(b.stages)}")
    axes = [[g.sharding_axes for g in p.groups] for p in (a, b)]
    if a.shardings != b.shardings or (len(axes[0]) == len(axes[1]) and axes[0] != axes[1]):
        found.append("split kernels")
    if a.state != b.state:
        found.append("state at rest")
    if a.skips != b.skips:
        found.append(f"skips {a.skips} instead of {b.skips}")
    if a.mode != b.mode:
        found.append(f"{a.mode} instead of {b.mode}")
    return found


def diff_plans(a: PlanFile, b: PlanFile) -> list[Difference]:
    """Everything that differs; empty for equal plans. Raises MismatchError naming the first op in which the graphs
    differ."""
    if a.graph.fingerprint != b.graph.fingerprint:
        a.graph.check_same(b.graph)
    graph, one, two = a.graph, a.plan, b.plan
    found = [*_settings(a, b), *_stages(graph, one, two), *_devices(one, two), *_batch(one, two)]
    found += [*_schedule(one, two), *_recompute(graph, one, two), *_shardings(graph, one, two)]
    found += _state(graph, one, two)
    return found


def _settings(a: PlanFile, b: PlanFile) -> list[Difference]:
    found = []
    if a.cluster != b.cluster:
        words = [f"{x.cluster.name}, {counted(x.cluster.size, 'device')}" for x in (a, b)]
        if words[0] == words[1]:
            words = [f"{word} (data sheet {place})" for word, place in zip(words, "ab", strict=True)]
        found.append(Difference(part="cluster", where="", a=words[0], b=words[1]))
    one, two = training_to_json(a.training), training_to_json(b.training)
    for key in sorted({*one, *two}):
        if one.get(key) != two.get(key):
            found.append(Difference(part="recipe", where=key, a=_value(one.get(key)), b=_value(two.get(key))))
    for name in ("mode", "skips", "global_batch"):
        mine, other = getattr(a.plan, name), getattr(b.plan, name)
        if mine != other:
            found.append(Difference(part=name.replace("_", " "), where="", a=str(mine), b=str(other)))
    return found


def _value(value: Any) -> str:
    return "default" if value is None else str(value)


def _stage_of(graph: Graph, plan: Plan) -> Ints:
    """Stage of each op by name; -1 where it is left to wherever it is needed."""
    stage_of = np.full(len(graph.op_ids), -1, dtype=np.int64)
    for s, stage in enumerate(plan.stages):
        stage_of[stage.ops.indices(graph)] = s
    return stage_of


def _stages(graph: Graph, a: Plan, b: Plan) -> list[Difference]:
    """Ops that stand in another stage, in groups that moved together; the whole list where the numbers of stages
    differ."""
    one, two = _stage_of(graph, a), _stage_of(graph, b)
    if len(a.stages) != len(b.stages):
        found = [
            Difference(part="stages", where="", a=counted(len(a.stages), "stage"), b=counted(len(b.stages), "stage"))
        ]
        for s in range(max(len(a.stages), len(b.stages))):
            words = [
                summarise_ops(graph, p.stages[s].ops.indices(graph)) if s < len(p.stages) else "none" for p in (a, b)
            ]
            if words[0] != words[1]:
                found.append(Difference(part="ops", where=f"stage {s}", a=words[0], b=words[1]))
        return found
    moved = np.flatnonzero(one != two)
    pairs: dict[tuple[int, int], list[int]] = {}
    for op in moved.tolist():
        pairs.setdefault((int(one[op]), int(two[op])), []).append(op)
    return [
        Difference(
            part="ops",
            where=summarise_ops(graph, np.array(ops, dtype=np.int64)),
            a=_stage_name(source),
            b=_stage_name(target),
        )
        for (source, target), ops in sorted(pairs.items())
    ]


def _stage_name(s: int) -> str:
    return f"stage {s}" if s >= 0 else "where needed"


def _devices(a: Plan, b: Plan) -> list[Difference]:
    found = []
    for s in range(min(len(a.stages), len(b.stages))):
        groups = [p.groups[p.stages[s].group] for p in (a, b)]
        words = [
            f"devices {g.devices}" + "".join(f", {name} {size}" for name, size in g.axes if size > 1) for g in groups
        ]
        if words[0] != words[1]:
            found.append(Difference(part="devices", where=f"stage {s}", a=words[0], b=words[1]))
    if a.device_count != b.device_count:
        found.append(Difference(part="devices", where="all", a=str(a.device_count), b=str(b.device_count)))
    return found


def _batch(a: Plan, b: Plan) -> list[Difference]:
    found = []
    words = [f"{p.batch.micro_batches} of {counted(p.batch.micro_batch, 'sample')}" for p in (a, b)]
    if words[0] != words[1]:
        found.append(Difference(part="micro-batches", where="", a=words[0], b=words[1]))
    for s in range(min(len(a.stages), len(b.stages))):
        sizes = [p.batch.sizes[p.stages[s].group] for p in (a, b)]
        if sizes[0] != sizes[1]:
            shown = [f"{len(x)} × {x[0]}" if len(set(x)) == 1 else " + ".join(map(str, x)) for x in sizes]
            found.append(Difference(part="samples of replicas", where=f"stage {s}", a=shown[0], b=shown[1]))
    return found


def _schedule(a: Plan, b: Plan) -> list[Difference]:
    if a.schedule == b.schedule:
        return []
    words = []
    for plan in (a, b):
        parameters = "".join(f", {name} {value}" for name, value in plan.schedule.parameters)
        rows = (
            f", an order of its own ({counted(len(plan.schedule.explicit), 'row')})" if plan.schedule.explicit else ""
        )
        words.append(f"{plan.schedule.kind}{parameters}{rows}")
    return [Difference(part="schedule", where="", a=words[0], b=words[1])]


def _recompute(graph: Graph, a: Plan, b: Plan) -> list[Difference]:
    def again(plan: Plan) -> set[int]:
        regions: list[OpSet] = [region for stage in plan.stages for region in stage.recompute]
        return {op for region in regions for op in region.indices(graph).tolist()}

    one, two = again(a), again(b)
    found = []
    for ops, words in ((one - two, ("recomputed", "kept")), (two - one, ("kept", "recomputed"))):
        if ops:
            where = summarise_ops(graph, np.array(sorted(ops), dtype=np.int64))
            found.append(Difference(part="recomputation", where=where, a=words[0], b=words[1]))
    return found


def _strategies(plan: Plan) -> dict[str, dict[str, Strategy]]:
    """By sharding's stages, each kernel's strategy."""
    return {name: dict((*sharding.classes, *sharding.overrides)) for name, sharding in plan.shardings}


def _shardings(graph: Graph, a: Plan, b: Plan) -> list[Difference]:
    """Kernel classes that are split in another way, views left out: they follow. Stages alike are told together."""
    known = [_strategies(plan) for plan in (a, b)]
    rows: dict[tuple[str, str, str], list[int]] = {}
    class_of = dict(zip(kernel_ids(graph), graph.flat.kernel_class.tolist(), strict=True))
    views = {kernel for kernel, c in class_of.items() if graph.kernel_classes[c].view}
    for s in range(min(len(a.stages), len(b.stages))):
        mine, other = (
            strategies.get(plan.stages[s].sharding or "", {}) for plan, strategies in zip((a, b), known, strict=True)
        )
        for kernel in dict.fromkeys((*mine, *other)):
            if kernel not in views and mine.get(kernel) != other.get(kernel):
                words = [strategy_words(x[kernel]) if kernel in x else "whole" for x in (mine, other)]
                rows.setdefault((kernel, words[0], words[1]), []).append(s)
    found = [
        Difference(part="split", where=f"{kernel} in stage{'s' if len(stages) > 1 else ''} {numbers(stages)}", a=x, b=y)
        for (kernel, x, y), stages in rows.items()
    ]
    if len(found) > MOST:
        rest = counted(len(found) - MOST, "more kernel")
        found = [*found[:MOST], Difference(part="split", where=rest, a="one way", b="another way")]
    return found


def _state(graph: Graph, a: Plan, b: Plan) -> list[Difference]:
    """Parameters whose state rests in another way, in groups alike."""
    rows: dict[tuple[str, str], list[str]] = {}
    for source in graph.parameters.values():
        mine, other = a.state_of(source)[1], b.state_of(source)[1]
        if mine != other:
            words = tuple("".join(state_words((("", rest),))).removeprefix(": ") for rest in (mine, other))
            rows.setdefault((words[0], words[1]), []).append(source.name)
    return [
        Difference(
            part="state at rest",
            where=names[0] if len(names) == 1 else f"{counted(len(names), 'parameter')}, {names[0]} … {names[-1]}",
            a=x,
            b=y,
        )
        for (x, y), names in rows.items()
    ]


def diff_predictions(a: SimResult, b: SimResult) -> dict[str, Any]:
    """By how much the prediction of b is above that of a. `seconds` of the busiest group by component sum to the
    step's difference; `memory` is that of the fullest device of each, by kind."""
    names = dict.fromkeys((*a.limits, *b.limits))
    seconds = {name: b.limits.get(name, 0.0) * b.step_s - a.limits.get(name, 0.0) * a.step_s for name in names}
    fullest = [max(result.memory, key=lambda row: row.device_bytes) for result in (a, b)]
    kinds = dict.fromkeys((*fullest[0].by_kind, *fullest[1].by_kind))
    memory = {kind: fullest[1].by_kind.get(kind, 0) - fullest[0].by_kind.get(kind, 0) for kind in kinds}
    held = [sum(row.by_kind.values()) for row in fullest]
    memory["allocator, driver"] = (fullest[1].device_bytes - held[1]) - (fullest[0].device_bytes - held[0])
    return {
        "step_s": b.step_s - a.step_s,
        "share": b.step_s / a.step_s - 1 if a.step_s > 0 else None,
        "seconds": seconds,
        "peak_bytes": b.peak_bytes - a.peak_bytes,
        "memory": memory,
        "samples_per_s": b.samples_per_s - a.samples_per_s,
    }
