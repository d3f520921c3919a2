"""What a measurement depends on besides the kernel: device, software, threads, busy neighbours."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simpart.files import dump_json

__all__ = ["Environment", "keep_freed_memory", "local_device_name", "local_environment", "torch_version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """`device` is the name of the Device that was measured, `processes` how many ran at once, each with `threads`."""

    device: str
    processor: str
    system: str
    python: str
    torch: str
    processes: int
    threads: int = 1

    @property
    def fingerprint(self) -> str:
        """Short hash by which records refer to an environment."""
        return hashlib.sha256(dump_json(asdict(self)).encode()).hexdigest()[:12]


@cache
def local_device_name() -> str:
    """Name that the `local` cluster gives a core of this machine."""
    from simpart.hardware import load_cluster

    return load_cluster("local").kinds[0].name


def local_environment(processes: int) -> Environment:
    """This machine with `processes` processes of one thread each."""
    return Environment(
        device=local_device_name(),
        processor=_processor(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch_version() or "none",
        processes=processes,
    )


@cache
def torch_version() -> str | None:
    """Version of the installed torch, without importing it; None when there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next allocation instead of giving it back, as GPU allocators do.

    Without it a step's time depends on how often the system hands out zeroed pages anew: replayed kernels and a real
    step then differ by chance. Where there is no glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_max = -1, -4  # malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "cpu family", "model", "stepping", "cpu MHz")
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    pairs = {key.strip(): value.strip() for key, value in found.items()}
    return " / ".join(pairs[key] for key in wanted[:4] if key in pairs) or platform.machine()
