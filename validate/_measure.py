"""Clocks and memory of one rank: when each action ran, and the most bytes that were alive at once."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Clock", "peak_bytes", "peak_rss_bytes", "reset_peak_rss"]


class Clock:
    """Records events (kind, stage, micro-batch, start, end, processor time) relative to `start()`, in seconds.

    On CUDA the times are those of the device's stream, not of the calls that fill it.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.origin: Any = None
        self.rows: list[tuple[dict[str, Any], Any, Any]] = []

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def start(self) -> None:
        self.rows = []
        self.origin = self.now()

    @contextlib.contextmanager
    def event(self, kind: str, action: Any = None, messages: Sequence[int] = ()) -> Iterator[None]:
        begin, worked = self.now(), time.thread_time()
        yield
        row: dict[str, Any] = {"kind": kind, "cpu_s": time.thread_time() - worked}
        if action is not None:
            row |= {"stage": action.stage, "micro_batch": action.micro_batch}
        if messages:
            row["messages"] = list(messages)
        self.rows.append((row, begin, self.now()))

    def stop(self) -> float:
        """Seconds since `start()`, all work of the device done."""
        end = self.now()
        if self.cuda:
            torch.cuda.synchronize()
        return self._since(end)

    def events(self) -> list[dict[str, Any]]:
        return [{**row, "start_s": self._since(a), "end_s": self._since(b)} for row, a, b in self.rows]

    def _since(self, mark: Any) -> float:
        return float(self.origin.elapsed_time(mark)) / 1e3 if self.cuda else float(mark - self.origin)


def peak_bytes(run: Callable[[], Any], held: Sequence[torch.Tensor], device: torch.device) -> dict[str, int]:
    """Run once and find the most bytes allocated at once.

    On CPU: bytes of the tensors held before, plus the highest running sum of the allocator's events (temporaries of
    kernels included). On CUDA: the caching allocator's own counts, and what the device reports as used.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "device_bytes": total - free,
        }
    before = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(results.events()) if e.name() == "[memory]")
    now = most = 0
    for _, _, size in changes:
        now += size
        most = max(most, now)
    return {"allocated_bytes": before + most, "held_bytes": before}


def reset_peak_rss() -> bool:
    """Start a new peak of resident memory; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int:
    """Most resident memory of this process since `reset_peak_rss`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
