"""Starting the processes of a run, watching them, ending all of them, and reading what they found."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from simpart.errors import FormatError, UnsupportedError, UserError
from simpart.files import dump_json, write_atomically
from simpart.placement import Halo
from simpart.plan import Plan
from simpart.plan.format import PlanFile, save_plan

__all__ = ["RunFailed", "collect", "launch", "prepare", "refuse_unsupported"]


class RunFailed(UserError):
    """A process of the run failed, died or hung. `details` is its traceback or the stack it hung at."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def refuse_unsupported(plan: Plan) -> None:
    """Raise UnsupportedError for plans that are not run yet."""
    if plan.schedule.kind == "dualpipe":
        raise UnsupportedError(
            "schedule dualpipe holds every stage on two groups, which is not run yet; use dualpipev or zb-v"
        )
    sharded = bool(plan.state) or any(stage.sharding for stage in plan.stages)
    sharded = sharded or any(size > 1 for group in plan.groups for _, size in group.sharding_axes)
    if sharded and plan.skips == "relay":
        raise UnsupportedError('skips "relay" is not run with sharded kernels or state; use "send"')
    halo = next((k for k, axis in _halos(plan)), None)
    if halo is not None:
        raise UnsupportedError(
            f"kernel {halo} reads neighbours of its part (a halo), which is not run yet; split another dim"
        )
    if plan.mode != "eager":
        raise UnsupportedError(f"mode {plan.mode!r} is not run yet; use eager")


def _halos(plan: Plan) -> Iterator[tuple[str, str]]:
    """Kernels with a halo, and its axis."""
    for _, sharding in plan.shardings:
        for kernel, strategy in (*sharding.classes, *sharding.overrides):
            for axis, split in strategy.axes:
                if any(isinstance(p, Halo) for p in split.inputs):
                    yield kernel, axis


def prepare(
    folder: Path,
    files: Sequence[PlanFile],
    *,
    steps: int = 5,
    warmup: int = 2,
    check: bool = False,
    timeout_s: float = 300.0,
    stall_s: float | None = None,
    seed: int = 0,
    cpu: bool = False,
) -> None:
    """Write the folder that workers run from; all plans need the same number of devices.

    `stall_s` is how long one rank waits for another before the run counts as hung (a quarter of `timeout_s`); `cpu`
    ignores GPUs.
    """
    for file in files:
        refuse_unsupported(file.plan)
    counts = {file.plan.device_count for file in files}
    if len(counts) != 1:
        raise UserError(
            f"plans run together must use the same number of devices, got {sorted(counts)}; run them one by one"
        )
    if steps < 1 or warmup < 0:
        raise UserError(f"a run needs at least 1 step and no negative warm-up, got steps={steps}, warmup={warmup}")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("result-*.json"), *folder.glob("error-*.json")):
        old.unlink()
    shutil.rmtree(folder / "log", ignore_errors=True)
    names = [f"plan-{i}.json" for i in range(len(files))]
    for name, file in zip(names, files, strict=True):
        save_plan(folder / name, file)
    job = {
        "plans": names, "steps": steps, "warmup": warmup, "check": check, "timeout_s": timeout_s,
        "stall_s": timeout_s / 4 if stall_s is None else stall_s, "seed": seed, "cpu": cpu, "ranks": counts.pop(),
    }  # fmt: skip
    write_atomically(folder / "job.json", dump_json(job))


def launch(
    folder: Path,
    ranks: int,
    *,
    timeout_s: float = 300.0,
    progress: Callable[[float], None] | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Run a prepared folder on this machine with torchrun; returns when all ranks are done, and leaves no process
    behind.

    Raises RunFailed when a rank fails, dies or hangs, at the latest some seconds after `timeout_s`.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "0",
        "--redirects",
        "3",
        "--log-dir",
        str(folder / "log"),
        "-m",
        "simpart.validate._worker",
        str(folder),
    ]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})}
    begin = time.monotonic()
    seen: dict[int, psutil.Process] = {}
    with open(folder / "torchrun.log", "wb") as log:
        process = subprocess.Popen(
            command, env=own, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
        )
        late = False
        try:
            failed_at: float | None = None
            while process.poll() is None:
                _remember(process.pid, seen)
                now = time.monotonic()
                if failed_at is None and any(folder.glob("error-*.json")):
                    failed_at = now
                late = now - begin > timeout_s
                if late or (failed_at is not None and now - failed_at > 10):
                    break
                if progress is not None:
                    progress(now - begin)
                time.sleep(0.05)
        finally:
            _end(process, seen)
    if process.returncode == 0 and len(list(folder.glob("result-*.json"))) == ranks:
        return
    raise _diagnosis(folder, ranks, timeout_s if late else None)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone, however it went (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it went before this was said
            os._exit(1)


def _remember(pid: int, seen: dict[int, psutil.Process]) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            seen.setdefault(child.pid, child)


def _end(process: subprocess.Popen[bytes], seen: dict[int, psutil.Process]) -> None:
    """End everything that was started: workers politely first, so that hung ranks write where they are; torchrun is
    stopped meanwhile, or it would start more of them."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
    _remember(process.pid, seen)
    workers = [p for p in seen.values() if p.is_running()]
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            worker.terminate()
    _, alive = psutil.wait_procs(workers, timeout=3)
    for worker in alive:
        with contextlib.suppress(psutil.Error):
            worker.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(alive, timeout=3)


def _diagnosis(folder: Path, ranks: int, late_s: float | None) -> RunFailed:
    """Which rank is to blame: the first that failed by itself; else one that died or hung while the others waited for
    it."""
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    errors.sort(key=lambda e: (e["kind"] == "communication", e["time"]))
    if errors and errors[0]["kind"] == "user":
        return RunFailed(errors[0]["message"])
    if errors and errors[0]["kind"] == "error":
        first = errors[0]
        return RunFailed(f"rank {first['rank']} failed: {first['message']}", first["traceback"])
    silent = sorted(
        set(range(ranks)) - {e["rank"] for e in errors} - {int(p.stem[7:]) for p in folder.glob("result-*.json")}
    )
    torchrun = (folder / "torchrun.log").read_text(errors="replace")
    codes = {int(r): int(c) for r, c in re.findall(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*(-?\d+)", torchrun)}
    for rank in silent:
        code = codes.get(rank)
        if code is not None and code != -signal.SIGTERM:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            return RunFailed(f"rank {rank} {how} without a message", _log(folder, rank))
    if silent:
        stack = _log(folder, silent[0])
        own = stack.rpartition("Current thread")[2]  # other threads stand before it
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', own)
        place = f" at {frames[0][0]}:{frames[0][1]} in {frames[0][2]}" if frames else ""
        why = (
            f"not done after {late_s:g} s"
            if late_s is not None
            else f"rank {errors[0]['rank']} waited for it in vain"
            if errors
            else "no result"
        )
        return RunFailed(f"rank {silent[0]} hangs{place} ({why})", stack)
    if errors:
        return RunFailed(f"rank {errors[0]['rank']} lost its peers: {errors[0]['message']}", errors[0]["traceback"])
    tail = torchrun.strip().splitlines()[-1:] or ["no output"]
    return RunFailed(f"the run did not start: {tail[0]}", torchrun)


def _log(folder: Path, rank: int) -> str:
    found = sorted(folder.glob(f"log/*/attempt_0/{rank}/stderr.log"))
    return found[-1].read_text(errors="replace") if found else ""


def collect(folder: Path) -> list[list[dict[str, Any]]]:
    """Results of a finished run: per plan, one per rank. Raises FormatError when some rank's is missing."""
    try:
        job = json.loads((folder / "job.json").read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder} holds no run: {error}; prepare one first") from error
    found = []
    for rank in range(job["ranks"]):
        path = folder / f"result-{rank}.json"
        if not path.exists():
            raise FormatError(f"{folder} has no result of rank {rank} of {job['ranks']}; run all ranks to the end")
        found.append(json.loads(path.read_text())["plans"])
    return [[{"rank": r, **found[r][i]} for r in range(job["ranks"])] for i in range(len(job["plans"]))]
