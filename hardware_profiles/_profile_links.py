"""Measures p2p, all-reduce and broadcast between processes of this machine over gloo, into the profile store."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.hardware_profiles._environment import local_environment
from simpart.hardware_profiles._profile_ops import Progress, how_ended, start_worker, stop_workers
from simpart.hardware_profiles._store import LinkRecord, Samples, Store

__all__ = ["SIZES", "LinksProfile", "profile_links"]

SIZES = tuple(2**power for power in range(10, 27, 2))
"""Bytes of the messages measured: 1 KiB to 64 MiB."""

KINDS = ("p2p", "all_reduce", "broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksProfile:
    """Points measured now, found in the store, and left for another run. `seconds` is the time of the machine."""

    measured: int
    found: int
    left: int
    processes: int
    seconds: float
    interrupted: bool = False


def profile_links(
    processes: int | None = None,
    store: Store | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    busy: bool = False,
    repeats: int = 30,
    most_s: float = 0.5,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> LinksProfile:
    """Measure what the store lacks, between `processes` processes (default: one per physical core), each on its core.

    Collectives run among all of them, and among 2. With `busy` each point is also measured while other work runs on the
    same cores. Each point is timed at least 5 times, up to `repeats` within `most_s`. No operation may take longer than
    `timeout_s`; no process is left. What was measured before Ctrl-C is kept.
    """
    start = time.monotonic()
    world = load_cluster("local").size if processes is None else processes
    if world < 1:
        raise UserError(f"processes must be at least 1, got {world}")
    store = store or Store.at()
    environment = local_environment(world)
    groups = sorted({n for n in (2, world) if 2 <= n <= world})
    points = [(kind, n, size) for size in sizes for kind in KINDS for n in (groups if kind != "p2p" else groups[:1])]
    modes = [False, True] if busy else [False]
    known = {(r.kind, r.ranks, r.bytes, r.busy) for r in store.read().links if r.environment == environment}
    wanted = [(*point, mode) for mode in modes for point in points]
    missing = [point for point in wanted if point not in known]
    measured, interrupted = 0, False
    if missing:
        answers: queue.Queue[tuple[int, str]] = queue.Queue()
        workers: list[subprocess.Popen[str]] = []
        with tempfile.TemporaryDirectory(prefix="simpart-links-") as folder:
            job: dict[str, Any] = {
                "world": world,
                "rendezvous": f"file://{Path(folder).resolve()}/rendezvous",
                "timeout_s": timeout_s,
                "ranks": groups,
                "points": [point for point in points if any((*point, mode) in missing for mode in modes)],
                "busy": modes,
                "repeats": repeats,
                "most_s": most_s,
            }
            try:
                for rank in range(world):
                    workers.append(start_worker("_links_worker", {**job, "rank": rank}, partial(_put, answers, rank)))
                for line in _lines(answers, workers, timeout_s + 60):
                    content = json.loads(line)
                    if not content:
                        break
                    record = LinkRecord(
                        kind=content["kind"],
                        bytes=content["bytes"],
                        ranks=content["ranks"],
                        busy=content["busy"],
                        samples=Samples.of(content["seconds"]),
                        environment=environment,
                    )
                    store.append([record])
                    measured += 1
                    if progress is not None:
                        progress(measured, len(missing), f"{record.kind} of {record.bytes} bytes")
            except KeyboardInterrupt:
                interrupted = True
            finally:
                stop_workers(workers)
    return LinksProfile(
        measured=measured,
        found=len(wanted) - len(missing),
        left=max(0, len(missing) - measured),
        processes=world,
        seconds=time.monotonic() - start,
        interrupted=interrupted,
    )


def _put(answers: queue.Queue[tuple[int, str]], rank: int, line: str) -> None:
    answers.put((rank, line))


def _lines(answers: queue.Queue[tuple[int, str]], workers: Sequence[subprocess.Popen[str]], patience_s: float) -> Any:
    """Lines of rank 0, until the caller has enough; raises UserError when a process ends or all are silent too long."""
    while True:
        try:
            rank, line = answers.get(timeout=patience_s)
        except queue.Empty:
            raise UserError(f"processes that measure links said nothing for {patience_s:.0f} s; try again") from None
        if not line:
            raise UserError(f"process {rank} that measures links {how_ended(workers[rank])}; try again")
        yield line
