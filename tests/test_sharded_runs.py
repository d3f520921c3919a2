"""Sharded plans on real processes: losses and gradients of one process, and the collectives that the plan has."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from simpart.capture import capture
from simpart.errors import UnsupportedError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.model_spec import canonical, parse_model
from simpart.placement import (
    AxisStrategy,
    Halo,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StatePlacement,
    Strategy,
)
from simpart.placement.conversions import convertible
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.format import PlanFile
from simpart.schedule import Schedule, parse_rows
from simpart.sharding import Layout, flows
from simpart.sharding.combine import Degrees, shard
from simpart.sharding.pins import Pin
from simpart.sharding.propagate import propagate
from simpart.tdl import Call
from simpart.training import TrainingSpec
from simpart.validate import collect, launch, prepare, report_of
from simpart.validate._crossings import needs_of
from simpart.validate._local_kernels import Draw, bind
from simpart.validate._mesh import Mesh, mesh_ranks, part_of
from simpart.validate._mesh_traffic import pieces_of, sent_layout
from simpart.validate._runtime import slices
from tests.sharding_rule import follow, sharding_of
from tests.vocabulary import PRODUCTS, TENSOR_PARALLEL, at_rest, rests
from tests.vocabulary import tofu as plan_of_tofu

GPT = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64"
TIED = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64,tied=true"
UNET = "unet:image=16,base=4,depth=2"
MOE = "moe:layers=1,hidden=16,heads=2,kv_heads=2,ffn=32,seq=8,vocab=64,experts=4"
LSTM = "lstm:layers=2,hidden=16,seq=8,vocab=64"
RESNET = "resnet50:image=16,classes=6,width=8,blocks=1-1"
MLP = "tests.models:mlp"
TIMEOUT_S = 400.0  # of a loaded machine
R = Replicate()
REPLICAS = (("dp", Shard(0)),)
ZERO_1 = (("*", StatePlacement(optimizer=REPLICAS)),)
ZERO_2 = (("*", StatePlacement(optimizer=REPLICAS, gradient=REPLICAS)),)
FSDP = at_rest("dp", {"*": Shard(0)})
ZERO_BUBBLE = Schedule(
    kind="explicit", explicit=parse_rows("0F0,0F1,0B0,0F2,0I1,0W1,0B2\n1F0,1I0,1F1,1I1,1F2,1W0,1I2,1W1,1W2")
)
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
    members = prod(axes.values())
    stages, groups = [], []
    for s, (begin, end) in enumerate(pairwise(bounds)):
        region = range(int(recompute[0] * count), int(recompute[1] * count)) if recompute else range(0)
        inside = (OpSet.of(graph, region),) if len(region) and begin <= region[0] and region[-1] < end else ()
        ops = OpSet.of(graph, range(begin, end))
        stages.append(Stage(ops=ops, group=s, sharding=None if sharding is None else "split", recompute=inside))
        groups.append(DeviceGroup(devices=Devices.of(range(s * members, (s + 1) * members)), axes=tuple(axes.items())))
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


def preset(model: str, micro_batch: int, replicas: int = 1, **degrees: Any) -> dict[str, Any]:
    """Sharding and state as `simpart plan` makes them from degrees."""
    found = shard(graph_of(model), micro_batch, Degrees(**degrees), replicas)
    return {"sharding": found.sharding, "state": found.state}


def batch_split(model: str, micro_batch: int) -> Sharding:
    """Samples divided on an axis `d` that is not one of replicas: statistics of batch norms are of the whole batch."""
    pins = {"d": (Pin("input", "*", Shard(0)),)}
    return propagate(graph_of(model), micro_batch, (("d", 2),), pins).sharding


def tofu(axis: str) -> tuple[Sharding, State]:
    """One axis of the hand-written plan whose products are split otherwise in backward than in forward."""
    i, graph = "xy".index(axis), graph_of(MLP)
    places: dict[str, Placement] = {"fc1.*": Shard(0), "fc2.weight": Shard(1)} if axis == "y" else {}
    wishes: dict[str, AxisStrategy | str] = {name: split[i] for name, split in PRODUCTS.items()}
    wishes["/aten.sub.Tensor#0|F|aten.sub.Tensor#0"] = AxisStrategy((Shard(i), Shard(i)), (Shard(i),))
    wishes["/aten.mean.default#0|B|aten.expand.default#0"] = AxisStrategy((R,), (Shard(i),))
    strategies = follow(graph, rests(places), wishes.get)
    return sharding_of(graph, {axis: strategies}), at_rest(axis, places)


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
            if not any(stage.recompute for stage in file.plan.stages):  # what is made again is sent again
                issued = {name: n for name, n in found["collectives"].items() if not name.startswith("step")}
                assert issued == expected(file, rank["group"])


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


def with_meshes(file: PlanFile, axes: Sequence[Mapping[str, int]], sizes: Sequence[Sequence[int]]) -> PlanFile:
    """The same stages, each on a mesh of its own; those without `tp` run whole kernels. All state rests whole."""
    groups, first = [], 0
    for each in axes:
        members = prod(each.values())
        groups.append(DeviceGroup(devices=Devices.of(range(first, first + members)), axes=tuple(each.items())))
        first += members
    stages = tuple(
        replace(stage, sharding=stage.sharding if "tp" in each else None)
        for stage, each in zip(file.plan.stages, axes, strict=True)
    )
    batch = Batch(micro_batches=file.plan.batch.micro_batches, sizes=tuple(map(tuple, sizes)))
    return replace(file, plan=replace(file.plan, groups=tuple(groups), stages=stages, batch=batch, state=()))


# --- on real processes ------------------------------------------------------------------------------------------------
def test_sharded_plans_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    whole_vocabulary, rest = tensor_parallel(GPT, vocabulary=False)
    backward_unlike_forward, columns = tofu("y")
    files = [
        plan_file(GPT, {"tp": 2}, [2], sharding=whole_vocabulary, state=rest),
        plan_file(GPT, {"tp": 2}, [2], **preset(GPT, 2, tp=2, sp=True), gradient_clip_norm=0.05, optimizer="momentum"),
        plan_file(GPT, {"dp": 2}, [3, 2], state=FSDP, gradient_clip_norm=0.05),
        plan_file(MLP, {"y": 2}, [4], sharding=backward_unlike_forward, state=columns),
    ]
    results = run(tmp_path, files, 2)
    assert_exact(results, files)
    issued = report_of(results[0]).to_json()["measured"]["collectives"]
    layers = micro_batches = 2
    assert issued == {"F all_reduce tp": 2 * layers * micro_batches, "B all_reduce tp": 2 * layers * micro_batches}


@pytest.mark.slow
def test_transformers_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    split, rest = tensor_parallel(GPT, sequence=True)
    files = [
        plan_file(GPT, {"tp": 2}, [2], sharding=split, state=rest),
        plan_file(GPT, {"tp": 2}, [2], sharding=split, state=rest, recompute=(0.2, 0.6)),
        plan_file(TIED, {"dp": 2}, [2, 2], state=ZERO_1, gradient_clip_norm=0.05),
        plan_file(GPT, {"dp": 2}, [3, 2], state=ZERO_2, gradient_clip_norm=0.05),
        plan_file(GPT, {"dp": 2}, [2, 2], state=FSDP, recompute=(0.2, 0.6)),
        plan_file(MOE, {"ep": 2}, [2], **preset(MOE, 2, ep=2)),
    ]
    results = run(tmp_path, files, 2)
    assert_exact(results, files)
    assert "F all_to_all ep" in results[5][0]["check"]["collectives"]


@pytest.mark.slow
def test_other_sharded_models_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    backward_unlike_forward, _ = tofu("x")
    files = [
        plan_file(RESNET, {"dp": 2}, [2, 2], state=FSDP),
        plan_file(RESNET, {"tp": 2}, [2], **preset(RESNET, 2, tp=2)),
        plan_file(RESNET, {"d": 2}, [4], sharding=batch_split(RESNET, 4)),
        plan_file(UNET, {"d": 2}, [4], sharding=batch_split(UNET, 4)),
        plan_file(LSTM, {"d": 2}, [4], sharding=batch_split(LSTM, 4)),
        plan_file(MLP, {"x": 2}, [4], sharding=backward_unlike_forward),
    ]
    assert_exact(run(tmp_path, files, 2), files)


@pytest.mark.slow
def test_sharded_plans_on_four_processes_equal_one_process(tmp_path: Path) -> None:
    split, rest = tensor_parallel(GPT, sequence=True)
    tied, tied_rest = tensor_parallel(TIED)
    both = dict(plan_of_tofu(graph_of(MLP)).shardings)["tofu"]
    pipeline = plan_file(GPT, {"tp": 2}, [2], sharding=split, cut=0.5)
    files = [
        plan_file(GPT, {"tp": 2}, [2], sharding=split, state=rest, cut=0.5),
        plan_file(
            TIED, {"tp": 2}, [2], sharding=tied, state=tied_rest, cut=0.5, schedule=ZERO_BUBBLE, micro_batches=3,
            gradient_clip_norm=0.05,
        ),
        plan_file(GPT, {"dp": 2, "tp": 2}, [2, 2], **preset(GPT, 2, 2, tp=2, sp=True, zero=3)),
        plan_file(GPT, {"dp": 2}, [2, 2], state=FSDP, cut=0.5),
        plan_file(
            MLP, {"x": 2, "y": 2}, [8], sharding=both, state=plan_of_tofu(graph_of(MLP)).state, micro_batches=1
        ),
        with_meshes(pipeline, [{"tp": 2}, {"dp": 2}], [[4], [2, 2]]),
        with_meshes(pipeline, [{"dp": 2}, {"tp": 2}], [[3, 1], [4]]),
    ]  # fmt: skip
    assert_exact(run(tmp_path, files, 4), files)


@pytest.mark.slow
def test_stages_of_unequal_meshes_on_three_processes_equal_one_process(tmp_path: Path) -> None:
    pipeline = plan_file(GPT, {"tp": 2}, [2], sharding=tensor_parallel(GPT, sequence=True)[0], cut=0.5)
    files = [
        with_meshes(pipeline, [{"tp": 2}, {"dp": 1}], [[4], [4]]),
        with_meshes(pipeline, [{"dp": 1}, {"tp": 2}], [[4], [4]]),
        plan_file(GPT, {"dp": 3}, [2, 2, 2], **preset(GPT, 2, 3, zero=3)),  # uneven shards
    ]
    assert_exact(run(tmp_path, files, 3), files)


def converted(rank: int, store: str) -> None:
    """On a mesh of 2 × 2 processes, random conversions of random tensors give every rank its part."""
    dist.init_process_group("gloo", store=FileStore(store, 4), rank=rank, world_size=4)
    plan = Plan(
        graph="", groups=(DeviceGroup(devices=Devices.of(range(4)), axes=(("x", 2), ("y", 2))),), stages=(),
        batch=Batch(micro_batches=1, sizes=((1,),)),
    )  # fmt: skip
    mesh, generator, chance = Mesh.of(plan, rank), torch.Generator().manual_seed(0), random.Random(0)
    places: list[Placement] = [R, Shard(0), Shard(1), Shard(1, block=4), Shard(2), Partial()]
    done = 0
    while done < 60:
        shape = (chance.choice([4, 5, 7]), 8, chance.choice([2, 6]))
        before, after = tuple(chance.choices(places, k=2)), tuple(chance.choices(places, k=2))
        if not convertible(shape, before, after, (2, 2)):
            continue
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        terms = torch.randn((2, 2, *shape), generator=generator, dtype=torch.float64)
        for axis, place in enumerate(before):  # terms equal along axes that hold whole values or parts
            if not isinstance(place, Partial):
                terms = terms.narrow(axis, 0, 1).expand_as(terms).clone()
        kinds = [d for d, place in enumerate(before) if isinstance(place, Partial)]
        terms += (whole - terms.sum(kinds, keepdim=True)[0, 0]) / 2 ** len(kinds) if kinds else whole - terms
        start = mesh.part(terms[mesh.coordinates], before).contiguous()
        convert = mesh.converter(shape, 8, before, after, "a tensor")
        found = start if convert is None else convert(start)
        everywhere: Layout = tuple(R if isinstance(p, Partial) else p for p in after)
        reduce = mesh.converter(shape, 8, after, everywhere, "a tensor")
        found = found if reduce is None else reduce(found)
        torch.testing.assert_close(found, mesh.part(whole, everywhere), msg=f"{shape} {before} {after}")
        done += 1
    assert mesh.counts["F", "all_to_all", "x"] and mesh.counts["F", "all_to_all", "y"]
    dist.destroy_process_group()


@pytest.mark.slow
def test_conversions_give_every_device_its_part(tmp_path: Path) -> None:
    spawn(converted, (str(tmp_path / "store"),), nprocs=4)


# --- without processes ------------------------------------------------------------------------------------------------
def parts_of_kernel(call: Call, tensors: Sequence[torch.Tensor], split: AxisStrategy) -> list[list[torch.Tensor]]:
    """What both members of an axis make of a kernel."""
    found = []
    for part in range(2):
        mesh = Mesh((("tp", 2),), (part,), {})
        run = bind(
            "op|F|kernel#0", call, Strategy((("tp", split),)), mesh, floating=None, device=torch.device("cpu"),
            draw=Draw(micro_batch=3),
        )  # fmt: skip
        given = [mesh.part(t, (p,)) for t, p in zip(tensors, split.inputs, strict=True)]
        found.append(run(given))
    return found


def test_members_draw_parts_of_one_dropout_mask() -> None:
    arguments = '{"positional":[{"tensor":0},0.5,true],"named":{}}'
    call = Call("aten.native_dropout.default", ((8, 64),), ((8, 64), (8, 64)), arguments, ("float64",))
    x = torch.rand(8, 64, dtype=torch.float64) + 1
    whole = AxisStrategy((R,), (R, R))
    columns = AxisStrategy((Shard(1),), (Shard(1), Shard(1)))
    (y, mask), again = parts_of_kernel(call, [x], whole)
    assert 0.3 < float(mask.double().mean()) < 0.7
    torch.testing.assert_close(y, 2 * x * mask)
    torch.testing.assert_close(again[0], y)
    halves = parts_of_kernel(call, [x], columns)
    torch.testing.assert_close(torch.cat([half[0] for half in halves], 1), y)


def test_rows_of_a_split_table_are_found_by_whoever_has_them() -> None:
    call = Call("aten.embedding.default", ((10, 4), (3, 5)), ((3, 5, 4),), "", ("float64", "int64"))
    table, rows = torch.rand(10, 4, dtype=torch.float64), torch.arange(15).view(3, 5) % 10
    halves = parts_of_kernel(call, [table, rows], AxisStrategy((Shard(0), R), (Partial(mask=0),)))
    torch.testing.assert_close(halves[0][0] + halves[1][0], table[rows])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_other_devices_equals_the_kernels_of_the_cpu(causal: bool) -> None:
    from simpart.validate._attention import ANYWHERE

    q, k, v, gradient = (torch.rand(2, 3, 5, 4, dtype=torch.float64) for _ in range(4))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    out, rows = getattr(torch.ops.aten, name)(q, k, v, 0.0, causal)
    torch.testing.assert_close(ANYWHERE[name](q, k, v, 0.0, causal)[0], out)
    wanted = getattr(torch.ops.aten, f"{name}_backward")(gradient, q, k, v, out, rows, 0.0, causal)
    found = ANYWHERE[f"{name}_backward"](gradient, q, k, v, out, rows, 0.0, causal)
    torch.testing.assert_close(tuple(found), wanted)


def test_a_strategy_that_the_kernel_does_not_have_is_refused_with_those_it_has() -> None:
    call = Call("aten.mm.default", ((4, 8), (8, 6)), ((4, 6),), "", ("float64", "float64"))
    tensors = [torch.rand(4, 8), torch.rand(8, 6)]
    with pytest.raises(
        UnsupportedError, match=r"is not run as tp S\(0\), S\(0\) → S\(0\); it can be S\(0\), R → S\(0\)"
    ):
        parts_of_kernel(call, tensors, AxisStrategy((Shard(0), Shard(0)), (Shard(0),)))


def test_halos_and_relayed_skips_of_sharded_plans_are_refused(tmp_path: Path) -> None:
    file = plan_file(GPT, {"tp": 2}, [2], sharding=tensor_parallel(GPT)[0])
    with pytest.raises(UnsupportedError, match=r'use "send"'):
        prepare(tmp_path, [replace(file, plan=replace(file.plan, skips="relay"))])
    halo = Strategy((("tp", AxisStrategy((Halo(Shard(2), 1, 1), R), (Shard(2),))),))
    split = Sharding(classes=(("conv1/aten.conv2d.default#0|F|aten.convolution.default#0", halo),))
    with pytest.raises(UnsupportedError, match=r"kernel conv1/.* reads neighbours of its part \(a halo\)"):
        prepare(tmp_path, [replace(file, plan=replace(file.plan, shardings=(("split", split),)))])


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        (({"tp": 2}, {"dp": 2}), ((4,), (2, 2))),
        (({"dp": 2}, {"tp": 2}), ((3, 1), (4,))),
        (({"dp": 2, "tp": 2}, {"dp": 2}), ((2, 2), (2, 2))),
        (({"tp": 2}, {"tp": 4}), ((4,), (4,))),
    ],
)
def test_what_crosses_reaches_every_device_once(axes: Any, sizes: Any) -> None:
    pipeline = plan_file(GPT, {"tp": 2}, [2], sharding=tensor_parallel(GPT, sequence=True)[0], cut=0.5)
    plan, graph = with_meshes(pipeline, axes, sizes).plan, graph_of(GPT)
    found = flows(plan, graph)
    ways = needs_of(graph, found, (), 1, {s.name for s in graph.parameters.values()}).ways
    assert {way.gradient for way in ways} == {False, True}
    for way in ways:
        whole = torch.rand(graph.flat.kernel_value_spec[way.value].shape(4))

        def held(stage: int, whole: torch.Tensor = whole, value: int = way.value) -> dict[int, torch.Tensor]:
            ranks, mine = mesh_ranks(plan, stage), {}
            for coordinates in np.ndindex(*ranks.shape):
                names = [name for name, _ in found[stage].axes]
                replica = coordinates[names.index("dp")] if "dp" in names else 0
                share = whole.split(list(sizes[stage]))[replica]
                layout = sent_layout(found[stage].layouts[value])
                mine[int(ranks[coordinates])] = part_of(share, layout, found[stage].axes, coordinates)
            return mine

        have, want = held(way.source), held(way.destination)
        received = {rank: torch.zeros_like(tensor) for rank, tensor in want.items()}
        for piece in pieces_of(plan, graph, found, way):
            part = have[piece.source] if piece.source_box is None else have[piece.source][slices(piece.source_box)]
            at = (...,) if piece.destination_box is None else slices(piece.destination_box)
            received[piece.destination][at] += part
        for rank, tensor in want.items():
            torch.testing.assert_close(received[rank], tensor)
