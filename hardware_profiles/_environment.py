"""What a measurement depends on besides the kernel: device, software, threads, busy neighbours."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simpart.files import dump_json

__all__ = [
    "Environment", "keep_freed_memory", "last_level_cache_bytes", "local_device_name", "local_environment", "pin",
    "torch_version",
]  # fmt: skip

_CPUS = Path("/sys/devices/system/cpu")


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


def last_level_cache_bytes() -> int:
    """Size of the largest cache that a core sees, at most 64 MiB; 32 MiB where the system does not say."""
    found = [_text(path) for path in (_CPUS / "cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    sizes = [int(text[:-1]) * units[text[-1]] for text in found if text[:-1].isdigit() and text[-1] in units]
    return min(max(sizes, default=2**25), 2**26)


def pin(worker: int) -> None:
    """Keep this process on the `worker`-th physical core that it may use, counting round; where systems can."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores: dict[tuple[str, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = _CPUS / f"cpu{cpu}/topology"
        cores.setdefault((_text(topology / "physical_package_id"), _text(topology / "core_id") or str(cpu)), cpu)
    chosen = list(cores.values())
    os.sched_setaffinity(0, {chosen[worker % len(chosen)]})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _processor() -> str:
    found = dict(line.split(":", 1) for line in _text(Path("/proc/cpuinfo")).splitlines() if ":" in line)
    pairs = {key.strip(): value.strip() for key, value in found.items()}
    wanted = ("model name", "cpu family", "model", "stepping")
    return " / ".join(pairs[key] for key in wanted if key in pairs) or platform.processor() or platform.machine()
