"""Sharded plans on real processes: losses and gradients of one process, and the collectives that the plan has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simpart.capture import capture
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.model_spec import canonical, parse_model
from simpart.placement import AxisStrategy, Partial, Placement, Replicate, Shard, Sharding, StatePlacement
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan_format import PlanFile
from simpart.schedule import Schedule
from simpart.sharding import flows
from simpart.training import TrainingSpec
from simpart.validate import collect, launch, prepare
from tests.sharding_rule import follow, sharding_of
from tests.vocabulary import PRODUCTS, TENSOR_PARALLEL, at_rest, rests

GPT = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64"
TIED = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64,tied=true"
RESNET = "resnet50:image=16,classes=6,width=8,blocks=1-1"
MLP = "tests.models:mlp"
TIMEOUT_S = 240.0  # of a loaded machine
R = Replicate()
State = tuple[tuple[str, StatePlacement], ...]


@cache
def graph_of(model: str) -> Graph:
    return capture(
        parse_model(model), (2, 3), precision="float64", model=model if ":" in model and "." in model.partition(":")[0]
        else canonical(model), shallow=False,
    )  # fmt: skip


def plan_file(
    model: str,
    axes: Mapping[str, int],
    sizes: Sequence[int],
    *,
    sharding: Sharding | None = None,
    state: State = (),
    cut: float | None = None,
    micro_batches: int = 2,
    schedule: str | Schedule = "1f1b",
    recompute: tuple[float, float] | None = None,
    **recipe: Any,
) -> PlanFile:
    """One stage, or two cut at a fraction of the ops, each on a mesh of its own."""
    graph = graph_of(model)
    count, group = len(graph.op_ids), graph.flat.op_group.tolist()
    bounds = [0, count]
    if cut is not None:
        bounds = [0, next(i for i in range(int(cut * count), count) if min(group[i:]) >= i), count]
    members = 1
    for size in axes.values():
        members *= size
    stages, groups = [], []
    for s, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        region = range(int(recompute[0] * count), int(recompute[1] * count)) if recompute else range(0)
        inside = (OpSet.of(graph, region),) if len(region) and begin <= region[0] and region[-1] < end else ()
        ops = OpSet.of(graph, range(begin, end))
        stages.append(Stage(ops=ops, group=s, sharding=None if sharding is None else "split", recompute=inside))
        groups.append(
            DeviceGroup(devices=Devices.of(range(s * members, (s + 1) * members)), axes=tuple(axes.items()))
        )
    plan = Plan(
        graph=graph.fingerprint, groups=tuple(groups), stages=tuple(stages),
        batch=Batch(micro_batches=micro_batches, sizes=(tuple(sizes),) * len(stages)),
        schedule=schedule if isinstance(schedule, Schedule) else Schedule(kind=schedule),
        shardings=() if sharding is None else (("split", sharding),), state=state,
    )  # fmt: skip
    recipe = {"precision": "float64", **recipe}
    return PlanFile(plan=plan, training=TrainingSpec(**recipe), cluster=load_cluster("local:4"), graph=graph)


def tensor_parallel(model: str, *, sequence: bool = False, vocabulary: bool = True) -> tuple[Sharding, State]:
    """Megatron's rule on axis tp, written by hand."""
    graph = graph_of(model)
    names = [source.name for source in graph.parameters.values()]
    places = {
        pattern: place for pattern, place in TENSOR_PARALLEL.items()
        if any(fnmatchcase(n, pattern) for n in names) and (vocabulary or not pattern.startswith(("wte", "head")))
    }  # fmt: skip
    wishes: dict[str, AxisStrategy | str] = {}
    if vocabulary:
        wishes["wte/aten.embedding.default#0|F|aten.embedding.default#0"] = AxisStrategy(
            (Shard(0), R), (Partial(mask=0),)
        )
        wishes["wte/aten.embedding.default#0|B|aten.embedding_dense_backward.default#0"] = AxisStrategy(
            (R, R), (Shard(0),)
        )
    if sequence:
        wishes["/aten.add.Tensor#0|F|aten.add.Tensor#0"] = AxisStrategy((Shard(1), Shard(0)), (Shard(1),))
    found = follow(graph, rests(places), wishes.get)
    return sharding_of(graph, {"tp": found}), at_rest("tp", places)


def run(folder: Path, files: Sequence[PlanFile], ranks: int, **options: Any) -> list[list[dict[str, Any]]]:
    prepare(folder, files, check=True, timeout_s=TIMEOUT_S, steps=options.pop("steps", 1), warmup=0, **options)
    launch(folder, ranks, timeout_s=TIMEOUT_S)
    return collect(folder)


def assert_exact(results: Sequence[Sequence[dict[str, Any]]], files: Sequence[PlanFile]) -> None:
    """The worker itself fails above 1e-9; here: that something was compared, how close it is, and that as many
    collectives were issued in forward and backward as the plan's flow has."""
    assert len(results) == len(files)
    for ranks, file in zip(results, files, strict=True):
        for rank in ranks:
            found = rank["check"]
            assert found["compared"]["gradients"] > 0
            assert max(found["loss"], found["gradients"], found["buffers"]) < 1e-9
            assert found["parameters"] < 1e-6  # Adam divides by small second moments
            assert found["collectives"] == expected(file, rank["group"])


def expected(file: PlanFile, group: int) -> dict[str, int]:
    """Collectives of a step of a group's stages, those of the step's end apart."""
    plan, counts = file.plan, Counter[str]()
    for stage, found in zip(plan.stages, flows(plan, file.graph), strict=True):
        if stage.group != group:
            continue
        for conversion in found.conversions:
            for step in conversion.steps:
                if step.kind != "local" and not conversion.per_step:
                    name = f"{conversion.phase} {step.kind} {found.axes[step.axis][0]}"
                    counts[name] += conversion.times * plan.batch.micro_batches
        for exchange in found.exchanges:
            name = f"{exchange.phase} exchange {found.axes[exchange.axis][0]}"
            counts[name] += len(exchange.kernels) * plan.batch.micro_batches
    return dict(counts)
