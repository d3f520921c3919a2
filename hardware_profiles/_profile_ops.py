"""Measures the kernels of a graph on this machine, into the profile store.

Worker processes replay every kernel at the same time, one on each core, as the processes of a plan will run. What the
store holds already is not measured again, so an interrupted run continues. Only the workers import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from simpart.cost import Signature, SignatureTable
from simpart.cost.pricing import accumulate_signature, update_signature
from simpart.cost.signatures import signatures_of
from simpart.costmodels.roofline import Roofline
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.hardware_profiles._environment import Environment, local_environment
from simpart.hardware_profiles._store import KernelRecord, OverheadRecord, Samples, Store, signature_to_json
from simpart.training import TrainingSpec

__all__ = ["OpsProfile", "Progress", "kernel_counts", "profile_graph_ops", "wanted_signatures"]

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what) after each measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsProfile:
    """What a run did: signatures measured now, found in the store, left for another run, and those that torch could not
    call, with reasons. `seconds` is the time of the machine."""

    measured: int
    found: int
    left: int
    refused: tuple[str, ...]
    processes: int
    seconds: float
    interrupted: bool = False


def profile_graph_ops(
    graph: Graph,
    micro_batches: Sequence[int] = (1,),
    processes: int | None = None,
    store: Store | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
    *,
    training: TrainingSpec | None = None,
    repeats: int = 7,
    least_s: float = 0.05,
) -> OpsProfile:
    """Measure what the store lacks of a graph's kernels, updates and gradient accumulations, the most expensive first.

    `processes` workers are busy at once (default: one per physical core). Each signature is timed at least `repeats`
    times by every worker. When `budget_s` is over or Ctrl-C comes, what was measured is kept; `left` says what is not.
    """
    start = time.monotonic()
    local = load_cluster("local")
    processes = local.size if processes is None else processes
    if processes < 1:
        raise UserError(f"processes must be at least 1, got {processes}")
    store = store or Store.at()
    environment = local_environment(processes)
    counts = wanted_signatures(graph, micro_batches, training or TrainingSpec(precision=graph.precision))
    profiles = store.read()
    known = {r.signature for r in profiles.kernels if r.environment == environment}
    overhead = not any(r.name == "kernel" and r.environment == environment for r in profiles.overheads)
    missing = [s for s in counts if s not in known]
    price = Roofline().estimate(SignatureTable(tuple(missing)), local.kinds[0]).mean_s
    weight = price * np.array([counts[s] for s in missing], dtype=np.float64)
    ordered = [missing[i] for i in np.argsort(-weight, kind="stable")]
    run = _Run(ordered, environment, store, progress)
    if missing or overhead:
        deadline = None if budget_s is None else start + budget_s
        run.measure(processes, repeats, least_s, overhead, deadline)
    return OpsProfile(
        measured=run.measured,
        found=len(counts) - len(missing),
        left=len(missing) - run.measured - len(run.refused),
        refused=tuple(run.refused.values()),
        processes=processes,
        seconds=time.monotonic() - start,
        interrupted=run.interrupted,
    )


def kernel_counts(graph: Graph, micro_batch: int) -> dict[Signature, int]:
    """Signatures of kernels that do something (views do not), with how often each runs in one micro-batch."""
    structure = graph.at(micro_batch)
    signatures = signatures_of(structure, micro_batch, "eager")
    runs = np.bincount(structure.flat.kernel_class, minlength=len(signatures))
    counts: dict[Signature, int] = {}
    for signature, count in zip(signatures, runs.tolist(), strict=True):
        if count and not signature.view:
            counts[signature] = counts.get(signature, 0) + count
    return counts


def wanted_signatures(graph: Graph, micro_batches: Sequence[int], training: TrainingSpec) -> dict[Signature, int]:
    """All signatures that plans with these micro-batches need, with how often each runs with one micro-batch."""
    if not micro_batches or min(micro_batches) < 1:
        raise UserError(f"micro-batches must be whole numbers, at least 1, got {list(micro_batches)}")
    counts: dict[Signature, int] = {}
    for micro_batch in micro_batches:
        for signature, count in kernel_counts(graph, micro_batch).items():
            counts[signature] = max(count, counts.get(signature, 0))
    for source in graph.parameters.values():
        if source.trainable and training.trains(source.name):
            shape, dtype = source.spec.shape(1), source.spec.dtype
            for signature in (update_signature(training, shape, dtype), accumulate_signature(training, shape, dtype)):
                counts[signature] = counts.get(signature, 0) + 1
    return counts


class _Run:
    """Workers at work: collects each signature's timings from all of them and stores them together."""

    def __init__(
        self, signatures: list[Signature], environment: Environment, store: Store, progress: Progress | None
    ) -> None:
        self.signatures, self.environment, self.store, self.progress = signatures, environment, store, progress
        self.timings: dict[int, list[list[float]]] = {}
        self.refused: dict[int, str] = {}
        self.measured = 0
        self.interrupted = False

    def measure(self, processes: int, repeats: int, least_s: float, overhead: bool, deadline: float | None) -> None:
        job = {
            "signatures": [signature_to_json(s) for s in self.signatures],
            "repeats": repeats,
            "least_s": least_s,
            "overhead": overhead,
        }
        answers: queue.Queue[tuple[int, str]] = queue.Queue()
        workers: list[subprocess.Popen[str]] = []
        try:
            for i in range(processes):
                workers.append(start_worker("_replay", {**job, "worker": i}, partial(_put, answers, i)))
            self._collect(answers, workers, deadline)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            stop_workers(workers)

    def _collect(
        self, answers: queue.Queue[tuple[int, str]], workers: Sequence[subprocess.Popen[str]], deadline: float | None
    ) -> None:
        running = processes = len(workers)
        while running and (deadline is None or time.monotonic() < deadline):
            try:
                worker, line = answers.get(timeout=0.1)
            except queue.Empty:
                continue
            if not line:
                raise UserError(
                    f"profiling worker {worker} {how_ended(workers[worker])} before its work was done; what was "
                    "measured is kept and the same command continues"
                )
            content = json.loads(line)
            row = content["row"]
            if row is None:
                running -= 1
            elif "why" in content:
                self.refused[row] = content["why"]
            else:
                self._add(row, content["seconds"], processes)

    def _add(self, row: int, seconds: list[float], processes: int) -> None:
        parts = self.timings.setdefault(row, [])
        parts.append(seconds)
        if len(parts) < processes:
            return
        samples = Samples.of([second for part in self.timings.pop(row) for second in part])
        if row < 0:
            self.store.append([OverheadRecord(name="kernel", samples=samples, environment=self.environment)])
            return
        signature = self.signatures[row]
        self.store.append([KernelRecord(signature=signature, samples=samples, environment=self.environment)])
        self.measured += 1
        if self.progress is not None:
            self.progress(self.measured + len(self.refused), len(self.signatures), signature.target)


def _put(answers: queue.Queue[tuple[int, str]], worker: int, line: str) -> None:
    answers.put((worker, line))


# --- worker processes ------------------------------------------------------------------------------------------------
def start_worker(module: str, job: dict[str, Any], on_line: Callable[[str], None]) -> subprocess.Popen[str]:
    """A Python process that runs a module of this package with one thread, gets `job` as its first line of input, and
    ends at the latest when this process does. `on_line` gets each line it prints, and '' at its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from simpart.hardware_profiles.{module} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the workers
    )
    assert process.stdin is not None and process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            on_line(line)
        on_line("")

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # it is gone already; '' says so
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    return process


def how_ended(worker: subprocess.Popen[str]) -> str:
    """Words for the end of a process that closed its output."""
    try:
        status = worker.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "fell silent"
    if status < 0:
        return f"was killed by signal {-status} ({'memory may have run out' if status == -9 else 'not by simpart'})"
    return f"ended with exit status {status} (its message stands above)"


def stop_workers(workers: Sequence[subprocess.Popen[str]]) -> None:
    """End all of them now; none is left behind."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
