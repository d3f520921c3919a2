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

from simpart.validate._launch import die_with_parent, refuse_unsupported  # noqa: E402

die_with_parent()

import contextlib  # noqa: E402
import datetime  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from simpart.errors import UserError  # noqa: E402
from simpart.files import dump_json, write_atomically  # noqa: E402
from simpart.hardware_profiles._environment import keep_freed_memory, pin  # noqa: E402
from simpart.model_spec import parse_model  # noqa: E402
from simpart.plan.format import PlanFile, load_plan  # noqa: E402
from simpart.validate._inputs import Inputs  # noqa: E402
from simpart.validate._mesh import Mesh  # noqa: E402
from simpart.validate._mesh_share import MeshShare, build_mesh_share, runs_kernels  # noqa: E402
from simpart.validate._rank import Share, build_share  # noqa: E402
from simpart.validate._session import Session  # noqa: E402

__all__ = ["main"]


def main(folder: str) -> int:
    """Run all plans of a job on this rank; the exit status."""
    job_dir = Path(folder)
    rank = int(os.environ.get("RANK", "0"))
    try:
        job = json.loads((job_dir / "job.json").read_text())
        device, control = _prepare(job)
        results = [_run(job, job_dir / name, rank, device, control) for name in job["plans"]]
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


def _prepare(job: dict[str, Any]) -> tuple[torch.device, Any]:
    """One thread on one core where there are enough of them, the process groups (the second, of gloo, for barriers),
    the device."""
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
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=job["timeout_s"]))
    dist.monitored_barrier(control, timeout=timeout)  # names a rank that is missing
    return device, control


def _run(job: dict[str, Any], path: Path, rank: int, device: torch.device, control: Any) -> dict[str, Any]:
    """Check one plan in float64 against one process if the job says so, then measure it in its own precision."""
    file = load_plan(path)
    refuse_unsupported(file.plan)
    if dist.get_world_size() != file.plan.device_count:
        raise UserError(
            f"the plan uses {file.plan.device_count} devices, {dist.get_world_size()} processes run; start one "
            f"per device"
        )
    factory, patience = parse_model(file.graph.model), datetime.timedelta(seconds=job["timeout_s"])

    def ready(file: PlanFile, precision: str, *, whole: bool) -> Session:
        common: Any = {"precision": precision, "device": device, "seed": job["seed"], "whole": whole}
        share: Share | MeshShare
        if runs_kernels(file.plan):
            rows = file.plan.schedule.rows(file.plan.group_of_stage, file.plan.batch.micro_batches)
            share = build_mesh_share(file, factory, Mesh.of(file.plan, rank), rank, rows=rows, **common)
        else:
            share = build_share(file, factory, rank, **common)
        dist.monitored_barrier(control, timeout=patience)  # ranks may need different times to build
        return Session(file, share, Inputs(file, factory, share, job["seed"], precision), control)

    found: dict[str, Any] = {}
    session = None
    if job["check"]:
        exact = replace(file.training, gradient_dtype=None, master_weights=False, state_dtype="float64")
        session = ready(replace(file, training=exact), "float64", whole=True)
        found["check"] = session.check()
    if session is None or file.graph.precision != "float64":
        session = None  # before the next is built
        session = ready(file, file.graph.precision, whole=False)
    return {**found, **session.measure(warmup=job["warmup"], steps=job["steps"])}


if __name__ == "__main__":
    with contextlib.suppress(IndexError):
        sys.exit(main(sys.argv[1]))
    sys.exit("usage: torchrun … -m simpart.validate._worker JOB")
