"""Plans on real processes: losses and gradients of one process, whatever the plan; and a run that fails ends soon,
leaving nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from simpart.capture import capture
from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph
from simpart.hardware import Cluster, load_cluster
from simpart.model_spec import canonical, parse_model
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.format import PlanFile
from simpart.schedule import Schedule, parse_rows
from simpart.training import TrainingSpec
from simpart.validate import RunFailed, collect, components, launch, prepare, report_of, validate

GPT = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,tied=true"
RESNET = "resnet50:image=16,classes=5,width=8,blocks=1-1"
LLAMA = "llama:layers=2,hidden=32,heads=4,seq=8,vocab=61,ffn=64"
UNET = "unet:image=16,base=4,depth=2"
FOLDER = str(Path(__file__).parent)
TIMEOUT_S = 240.0  # of a loaded machine


@cache
def graph_of(model: str) -> Graph:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return capture(
            parse_model(model),
            (2, 3),
            precision="float64",
            model=model if "faulty" in model else canonical(model),
            shallow=False,
        )


@cache
def local() -> Cluster:
    return load_cluster("local:4")  # more devices than some machines have cores: times do not matter here


def plan_file(
    model: str,
    cuts: Sequence[float],
    sizes: Sequence[Sequence[int]],
    micro_batches: int,
    schedule: str | Schedule = "1f1b",
    *,
    recompute: Sequence[tuple[float, float]] = (),
    skips: Any = "send",
    at: int = 2,
    **recipe: Any,
) -> PlanFile:
    """Stages cut at fractions of the ops (moved to where no indivisible group is cut), a device group each."""
    graph = graph_of(model)
    structure = graph.at(at)
    count = len(structure.op_ids)
    group = structure.flat.op_group.tolist()
    bounds = [0, *(next(i for i in range(int(f * count), count) if min(group[i:]) >= i) for f in cuts), count]
    stages, groups, first = [], [], 0
    for s, (begin, end) in enumerate(pairwise(bounds)):
        regions = [range(int(a * count), int(b * count)) for a, b in recompute]
        inside = tuple(OpSet.of(structure, r) for r in regions if begin <= r[0] and r[-1] < end)
        stages.append(Stage(ops=OpSet.of(structure, range(begin, end)), group=s, recompute=inside))
        devices = Devices.of(range(first, first + len(sizes[s])))
        groups.append(DeviceGroup(devices=devices, axes=(("dp", len(sizes[s])),)))
        first += len(sizes[s])
    plan = Plan(
        graph=graph.fingerprint, groups=tuple(groups), stages=tuple(stages), skips=skips,
        batch=Batch(micro_batches=micro_batches, sizes=tuple(map(tuple, sizes))),
        schedule=schedule if isinstance(schedule, Schedule) else Schedule(kind=schedule),
    )  # fmt: skip
    return PlanFile(plan=plan, training=TrainingSpec(precision="float64", **recipe), cluster=local(), graph=graph)


def explicit(text: str) -> Schedule:
    return Schedule(kind="explicit", explicit=parse_rows(text))


ZERO_BUBBLE = explicit("0F0,0F1,0B0,0F2,0I1,0W1,0B2\n1F0,1I0,1F1,1I1,1F2,1W0,1I2,1W1,1W2")
VIRTUAL = explicit("0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1")


def run(folder: Path, files: Sequence[PlanFile], ranks: int, **options: Any) -> list[list[dict[str, Any]]]:
    prepare(folder, files, check=True, timeout_s=TIMEOUT_S, steps=options.pop("steps", 1), warmup=0, **options)
    launch(folder, ranks, timeout_s=TIMEOUT_S)
    return collect(folder)


def assert_exact(results: Sequence[Sequence[dict[str, Any]]], files: Sequence[PlanFile]) -> None:
    """The worker itself fails above 1e-9; here: that something was compared, and how close it is."""
    assert len(results) == len(files)
    for ranks in results:
        for rank in ranks:
            found = rank["check"]
            assert found["compared"]["gradients"] > 0
            assert max(found["loss"], found["gradients"], found["buffers"]) < 1e-9
            assert found["parameters"] < 1e-6  # Adam divides by small second moments


def virtual_stages() -> PlanFile:
    """Stages 0 and 2 on the first device, 1 on the second; the tied embedding is in 0 and 2."""
    file = plan_file(GPT, [0.35, 0.7], [[2], [2], [2]], 2)
    plan = file.plan
    stages = tuple(
        Stage(ops=stage.ops, group=g, recompute=stage.recompute)
        for stage, g in zip(plan.stages, (0, 1, 0), strict=True)
    )
    small = Plan(
        graph=plan.graph, groups=plan.groups[:2], stages=stages, schedule=VIRTUAL,
        batch=Batch(micro_batches=2, sizes=((2,), (2,))), skips=plan.skips,
    )  # fmt: skip
    return PlanFile(plan=small, training=file.training, cluster=file.cluster, graph=file.graph)


def test_plans_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    files = [
        plan_file(GPT, [0.5], [[2], [2]], 4, "gpipe"),
        plan_file(GPT, [0.5], [[2], [2]], 3, ZERO_BUBBLE, recompute=[(0.1, 0.3), (0.6, 0.8)]),
        plan_file(GPT, [0.3], [[3], [3]], 1, gradient_clip_norm=0.05, optimizer="momentum"),  # M < S
        plan_file(GPT, [], [[3, 2]], 2, "gpipe", gradient_clip_norm=0.05),
        plan_file(RESNET, [0.4], [[2], [2]], 2),
        plan_file(UNET, [0.5], [[2], [2]], 3, ZERO_BUBBLE),
    ]
    results = run(tmp_path, files, 2)
    assert_exact(results, files)
    report = report_of(results[0])
    assert report.losses[0] > 0 and report.step_s > 0 and report.allocated_bytes > 0
    kinds = {event["kind"] for timeline in report.measured for event in timeline}
    assert {"F", "B", "send", "receive", "reduce", "optimizer"} <= kinds
    assert sum(report.measured_components.values()) == pytest.approx(report.step_s)


@pytest.mark.slow
def test_more_plans_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    files = [
        plan_file(GPT, [0.3], [[2], [2]], 3, "1f1b", gradient_clip_norm=0.05, optimizer="momentum"),
        plan_file(GPT, [0.45], [[1], [1]], 2, at=1, optimizer="sgd"),
        plan_file(GPT, [], [[2, 2]], 2, "gpipe"),
        virtual_stages(),
        plan_file(RESNET, [], [[2, 2]], 2, "gpipe", recompute=[(0.2, 0.6)]),
        plan_file(LLAMA, [0.5], [[2], [2]], 2),
        plan_file(LLAMA, [], [[1, 1]], 2, "gpipe", at=1),
    ]
    assert_exact(run(tmp_path, files, 2), files)


@pytest.mark.slow
def test_plans_on_three_processes_equal_one_process(tmp_path: Path) -> None:
    files = [
        plan_file(UNET, [0.3, 0.65], [[2], [2], [2]], 3, skips="relay"),
        plan_file(UNET, [0.3, 0.65], [[2], [2], [2]], 3, skips="send"),
        plan_file(GPT, [0.5], [[4], [3, 1]], 2, at=2),
        plan_file(GPT, [0.5], [[2, 3], [5]], 2, explicit("0F0,0F1,0I1,0W1,0B0\n1F0,1F1,1I1,1I0,1W0,1W1")),
        plan_file(GPT, [0.3, 0.6], [[2], [2], [2]], 2, "gpipe", gradient_clip_norm=0.1),
        plan_file(RESNET, [0.3, 0.6], [[2], [2], [2]], 2),
    ]
    assert_exact(run(tmp_path, files, 3), files)


def test_dualpipe_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = plan_file(GPT, [0.5], [[1], [1]], 2, "dualpipe")
    with pytest.raises(UnsupportedError, match="every stage on two groups, which is not run yet; use dualpipev"):
        prepare(tmp_path / "run", [file])
    assert not (tmp_path / "run").exists()


def test_a_raising_rank_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    error = failure(tmp_path, "raising")
    assert str(error).startswith(
        "rank 1 failed: StageError: stage 1, 1F0: op /simpart_tests.misbehave.default#0 failed"
    )
    assert "the second rank has had enough" in error.details


@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_exit_status(tmp_path: Path) -> None:
    assert str(failure(tmp_path, "exiting")) == "rank 1 ended with exit status 7 without a message"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_place(tmp_path: Path) -> None:
    error = failure(tmp_path, "hanging", stall_s=4.0)
    assert str(error).startswith("rank 1 hangs at ")
    assert "faulty_factories.py" in str(error)
    assert "misbehave" in error.details


@pytest.mark.slow
def test_ranks_that_build_other_parameters_are_refused(tmp_path: Path) -> None:
    file = plan_file("faulty_factories:other_on_each_rank", [], [[2, 2]], 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDER)
        with pytest.raises(UserError, match="is initialised differently on different ranks"):
            validate(file, steps=1, warmup=0, folder=tmp_path, timeout_s=60)


def failure(folder: Path, factory: str, **options: Any) -> RunFailed:
    """How a run ends whose second stage misbehaves; no process may be left."""
    file = plan_file(f"faulty_factories:{factory}", [0.5], [[2], [2]], 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDER)
        began = time.monotonic()
        with pytest.raises(RunFailed) as caught:
            validate(file, steps=1, warmup=0, folder=folder, timeout_s=60, **options)
        assert time.monotonic() - began < 50
    me = psutil.Process(os.getpid())
    assert not [p for p in me.children(recursive=True) if "simpart.validate._worker" in " ".join(p.cmdline())]
    return caught.value


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    file = plan_file(GPT, [0.5], [[2], [2]], 2)
    with pytest.raises(RunFailed, match=r"rank 0 hangs.*not done after 1 s"):
        validate(file, folder=tmp_path, timeout_s=1)


def test_what_is_not_run_yet_is_refused(tmp_path: Path) -> None:
    file = plan_file(GPT, [0.5], [[2], [2]], 2)
    compiled = replace(file, plan=replace(file.plan, mode="compiled"))
    with pytest.raises(UnsupportedError, match="mode 'compiled' is not run yet"):
        validate(compiled, folder=tmp_path)
    with pytest.raises(UserError, match="runs with 2 processes, got nproc=3"):
        validate(file, nproc=3)


def test_components_tell_waiting_for_a_transfer_from_waiting_for_work() -> None:
    sender = [
        {"kind": "F", "start_s": 0.0, "end_s": 2.0},
        {"kind": "send", "messages": [4], "start_s": 2.0, "end_s": 2.0},
    ]
    reader = [
        {"kind": "receive", "messages": [4], "start_s": 0.0, "end_s": 3.0},
        {"kind": "B", "start_s": 3.0, "end_s": 4.0},
    ]
    found = components([sender, reader], 4.0)  # type: ignore[list-item]  # plain dicts, as read from JSON
    assert found == {"forward": 1.0, "backward": 0.5, "communication": 0.5, "optimizer": 0.0, "bubble and other": 2.0}


def test_the_peak_is_what_was_held_plus_the_most_allocated_at_once() -> None:
    import torch

    from simpart.validate._measure import peak_bytes

    held = torch.zeros(1000)

    def run() -> None:
        first = torch.zeros(1 << 20)
        second = first * 2
        del first
        third = second + 1
        del second, third

    found = peak_bytes(run, [held, held[:10]], torch.device("cpu"))
    assert found["held_bytes"] == 4000
    assert found["allocated_bytes"] == pytest.approx(4000 + 2 * (4 << 20), abs=100)  # a few scalars


def test_the_updater_equals_torch_with_clipping_and_float32_sums_of_bfloat16_gradients() -> None:
    import torch

    from simpart.validate._gradients import Updater

    recipe = TrainingSpec(
        optimizer="adamw", learning_rate=0.1, gradient_clip_norm=0.5, gradient_dtype="float32", master_weights=True,
        precision="bfloat16", weight_decay=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    start = torch.randn(6).bfloat16()
    ours = torch.nn.Parameter(start.clone())
    theirs = torch.nn.Parameter(start.float())
    updater = Updater({"w": ours}, {"w": (0,)}, {}, recipe, world_size=1)
    optimizer = torch.optim.AdamW([theirs], 0.1, weight_decay=0.1)
    for step in range(3):
        total = torch.zeros(6)
        for _ in range(4):
            gradient = torch.randn(6).bfloat16()
            ours.grad = gradient.clone()
            updater.accumulate()
            total += gradient.float()
        updater.reduce()
        updater.clip()
        updater.step()
        theirs.grad = total
        torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        optimizer.step()
        torch.testing.assert_close(ours.detach(), theirs.detach().bfloat16(), rtol=0, atol=0, msg=f"step {step}")
    assert updater.state_bytes() >= 3 * 6 * 4
