"""One process of `profile links`: measures collectives over gloo with its peers. See `_profile_links`."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from simpart.hardware_profiles._environment import keep_freed_memory, pin

__all__ = ["main"]


def main() -> None:
    """Reads its job as one line of JSON; rank 0 answers `{"kind", "bytes", "ranks", "busy", "seconds"}` per point."""
    keep_freed_memory()
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.readline())
    rank, world = job["rank"], job["world"]
    pin(rank)
    dist.init_process_group(
        "gloo",
        init_method=job["rendezvous"],
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=job["timeout_s"]),
    )
    groups = {n: dist.group.WORLD if n == world else dist.new_group(list(range(n))) for n in job["ranks"]}
    for busy in job["busy"]:
        with working(busy):
            for kind, ranks, size in job["points"]:
                if rank < ranks:
                    seconds = measure(kind, size, rank, groups[ranks], job["repeats"], job["most_s"])
                    if rank == 0:
                        answer({"kind": kind, "bytes": size, "ranks": ranks, "busy": busy, "seconds": seconds})
        dist.barrier()
    if rank == 0:
        answer({})
    sys.stdin.readline()  # until the parent has all answers: a peer that leaves early would disturb the others


def answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


@contextmanager
def working(busy: bool) -> Any:
    """With `busy` a thread of this process multiplies matrices on the same core."""
    stop = threading.Event()
    a = torch.ones(256, 256)

    def work() -> None:
        while not stop.is_set():
            torch.mm(a, a)

    thread = threading.Thread(target=work, daemon=True)
    if busy:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if busy:
            thread.join()


def measure(kind: str, size: int, rank: int, group: Any, repeats: int, most_s: float) -> list[float]:
    """Seconds of one collective: at least 5 timings, up to `repeats` while they take less than `most_s` together."""
    run = collective(kind, torch.ones(max(1, size // 4)), rank, group)
    for _ in range(2):
        run()
    found: list[float] = []
    begin, more = time.perf_counter(), torch.ones(1)
    while more.item() > 0:
        dist.barrier(group)
        found.append(run())
        more.fill_(float(len(found) < 5 or (len(found) < repeats and time.perf_counter() - begin < most_s)))
        dist.broadcast(more, 0, group)
    return found


def collective(kind: str, buffer: torch.Tensor, rank: int, group: Any) -> Callable[[], float]:
    """A function that runs it once and returns its seconds. Point to point is half of a message there and back."""

    def message() -> float:
        start = time.perf_counter()
        for sender in (0, 1):
            act = dist.isend if rank == sender else dist.irecv
            work = act(buffer, 1 - rank, tag=sender)
            if work is not None:
                work.wait()
        return (time.perf_counter() - start) / 2

    def together() -> float:
        start = time.perf_counter()
        if kind == "all_reduce":
            dist.all_reduce(buffer, group=group)
        else:
            dist.broadcast(buffer, 0, group=group)
        if kind == "broadcast":  # the root has sent before the others have received
            dist.barrier(group)
        return time.perf_counter() - start

    return message if kind == "p2p" else together
