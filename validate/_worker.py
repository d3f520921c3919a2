"""What torchrun starts: `torchrun … -m simpart.validate._worker JOB`, one process per device of the plan.

JOB is a folder with `job.json` and the plan files it names; every rank writes `result-RANK.json` into it, or
`error-RANK.json`.
"""

from __future__ import annotations

import faulthandler
import signal
import sys

faulthandler.register(
    signal.SIGTERM, all_threads=True, chain=True
)  # before anything can hang: its stack goes to the log

import contextlib  # noqa: E402
import datetime  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from simpart.errors import MismatchError, UnsupportedError, UserError  # noqa: E402
from simpart.files import dump_json, write_atomically  # noqa: E402
from simpart.hardware_profiles._environment import keep_freed_memory, pin  # noqa: E402
from simpart.model_spec import parse_model  # noqa: E402
from simpart.plan_format import PlanFile, load_plan  # noqa: E402
from simpart.validate._boundary import Traffic, check_order  # noqa: E402
from simpart.validate._gradients import Updater, holder_groups  # noqa: E402
from simpart.validate._inputs import Inputs  # noqa: E402
from simpart.validate._launch import refuse_unsupported  # noqa: E402
from simpart.validate._measure import Clock, peak_bytes, peak_rss_bytes, reset_peak_rss  # noqa: E402
from simpart.validate._rank import Share, build_share, rank_table  # noqa: E402
from simpart.validate._reference import TOLERANCE, difference, reference_step  # noqa: E402
from simpart.validate._runtime import Runner, message_shape  # noqa: E402
from simpart.validate._transport import Transport, pair_groups  # noqa: E402

__all__ = ["main"]


def main(folder: str) -> int:
    """Run all plans of a job on this rank; the exit status."""
    job_dir = Path(folder)
    rank = int(os.environ.get("RANK", "0"))
    try:
        job = json.loads((job_dir / "job.json").read_text())
        device = _prepare(job)
        results = [_run(job, job_dir / name, rank, device) for name in job["plans"]]
        write_atomically(job_dir / f"result-{rank}.json", dump_json({"rank": rank, "plans": results}))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "communication" if _lost_peer(error) else "error"
        content = {
            "rank": rank,
            "time": time.time(),
            "kind": kind,
            "message": _one_line(error),
            "traceback": traceback.format_exc(),
        }
        write_atomically(job_dir / f"error-{rank}.json", dump_json(content))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # destructors of process groups can wait for ranks that are gone
    return 0


def _one_line(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def _lost_peer(error: BaseException) -> bool:
    """True when the failure says only that another rank went away or does not answer."""
    text = str(error)
    marks = (
        "Connection closed by peer",
        "Connection reset",
        "Timed out waiting",
        "Broken pipe",
        "monitoredBarrier",
        "timeout",
    )
    return isinstance(error, RuntimeError) and any(mark in text for mark in marks)


def _prepare(job: dict[str, Any]) -> torch.device:
    """One thread on one core where there are enough of them, the process group, the device."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(1)
    keep_freed_memory()  # as profiles are measured
    if here <= (psutil.cpu_count(logical=False) or os.cpu_count() or 1):
        pin(local)
    cuda = torch.cuda.is_available() and not job.get("cpu", False)
    if cuda and here > torch.cuda.device_count():
        raise UserError(
            f"{here} processes need {here} GPUs here, there are {torch.cuda.device_count()}; start fewer on "
            f"this machine"
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=job["stall_s"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    dist.monitored_barrier(dist.new_group(backend="gloo"), timeout=timeout)  # names a rank that is missing
    return device


def _run(job: dict[str, Any], path: Path, rank: int, device: torch.device) -> dict[str, Any]:
    """Build one plan, run and measure it, compare it with one process if the job says so."""
    file, check = load_plan(path), bool(job["check"])
    plan = file.plan
    refuse_unsupported(plan)
    if dist.get_world_size() != plan.device_count:
        raise UserError(
            f"the plan uses {plan.device_count} devices, {dist.get_world_size()} processes run; start one per device"
        )
    factory = parse_model(file.graph.model)
    precision = "float64" if check else file.graph.precision
    share = build_share(file, factory, rank, precision=precision, device=device, seed=job["seed"], whole=check)
    _same_everywhere(share)
    rows = plan.schedule.rows(plan.group_of_stage, plan.batch.micro_batches)
    check_order(rows, sorted({(hop.source, hop.destination) for hop in share.hops}))
    traffic = Traffic(plan, share.values, rows, rank_table(plan), rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    transport = Transport(
        traffic, rank, lambda m: message_shape(share, traffic, m), device, pair_groups(traffic, backend)
    )
    world = dist.get_world_size()
    updater = Updater(share.parameters, share.holders, holder_groups(share.holders, world), file.training, world)
    clock = Clock(device)
    runner = Runner(plan, share, traffic, transport, updater, rows[share.group], clock)
    data = Inputs(file, factory, share, job["seed"], precision)
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=job["timeout_s"]))
    dist.monitored_barrier(control, timeout=datetime.timedelta(seconds=job["timeout_s"]))
    result: dict[str, Any] = {"group": share.group, "replica": share.replica, "micro_batch": share.micro_batch}
    if check:
        result["check"] = _check(file, share, runner, updater, data)
    data.keep_own_only()
    gc.collect()
    reset_peak_rss()
    steps, losses = [], []
    for number in range(job["warmup"] + job["steps"]):
        dist.barrier(control)
        clock.start()
        loss = runner.step(data.mine)
        step_s = clock.stop()
        if number >= job["warmup"]:
            steps.append({"step_s": step_s, "events": clock.events()})
        losses.append(0.0 if loss is None else float(loss))
    result["peak_rss_bytes"] = peak_rss_bytes()
    dist.barrier(control)
    held = [
        *share.parameters.values(),
        *share.buffers.values(),
        *data.tensors(),
        *(b for _, b in updater.flat),
        *updater.sums.values(),
    ]
    state = updater.state_bytes()
    memory = peak_bytes(lambda: runner.step(data.mine), held, device)
    if device.type == "cpu":
        memory = {name: size + state for name, size in memory.items()}
    result |= {
        "steps": steps,
        "losses": losses,
        "memory": {**memory, "optimizer_state_bytes": state},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    return result


def _same_everywhere(share: Share) -> None:
    """Raise MismatchError unless the ranks that hold a parameter have built the same one."""
    names = sorted(share.holders)
    highest = torch.full((len(names),), -torch.inf, dtype=torch.float64)
    for i, name in enumerate(names):
        if name in share.parameters:
            highest[i] = share.parameters[name].detach().double().sum().cpu()
    lowest = torch.where(highest == -torch.inf, torch.inf, highest)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    for name, low, high in zip(names, lowest.tolist(), highest.tolist(), strict=True):
        if low != high:
            raise MismatchError(
                f"parameter {name} is initialised differently on different ranks; let the factory make "
                f"parameters before inputs "
                "and from torch's global seed alone"
            )


def _check(file: PlanFile, share: Share, runner: Runner, updater: Updater, data: Inputs) -> dict[str, Any]:
    """One step here and in one process; the largest relative differences of loss, gradients, parameters and buffers."""
    if share.draws_random:
        raise UnsupportedError(
            "a model that draws random numbers cannot be checked against one process; set its dropout to 0"
        )
    assert share.module is not None
    writes = any(op.mutates_buffer for op in file.graph.op_classes)
    wanted = reference_step(share.module, file.training, file.plan, share.loss_sizes, data.parts, writes)
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> None:
        gradients.update(
            {n: g.detach().cpu().clone() for n in updater.trained if (g := updater.gradient(n)) is not None}
        )

    loss = runner.step(data.mine, before_update=keep)
    total = torch.zeros((), dtype=torch.float64) if loss is None else loss.double().cpu().reshape(())
    dist.all_reduce(total)
    found: dict[str, Any] = {"loss": abs(float(total) - wanted.loss) / max(abs(wanted.loss), 1e-300)}
    found["gradients"], name = difference(gradients, wanted.gradients)
    found["parameters"], _ = difference({n: p.detach() for n, p in share.parameters.items()}, wanted.parameters)
    first = {n: b for n, b in share.buffers.items() if n in wanted.buffers} if share.replica == 0 else {}
    found["buffers"], buffer = difference(first, wanted.buffers)
    found["compared"] = {"gradients": len(gradients), "buffers": len(first)}
    missing = {n for n, p in share.parameters.items() if p.requires_grad and n in wanted.gradients} - set(gradients)
    if missing:
        raise RuntimeError(f"no gradient reached {sorted(missing)[0]} here, one process has one")
    for what, where in (("loss", ""), ("gradients", name), ("buffers", buffer)):
        if not found[what] <= TOLERANCE:
            raise RuntimeError(
                f"{what} differ from one process by {found[what]:.3g} relative (allowed "
                f"{TOLERANCE:g}){' at ' + where if where else ''}"
            )
    return found


if __name__ == "__main__":
    with contextlib.suppress(IndexError):
        sys.exit(main(sys.argv[1]))
    sys.exit("usage: torchrun … -m simpart.validate._worker JOB")
