"""This machine as a cluster: one CPU device per physical core, one thread each.

Rates are estimates from what the system says about its processor, until profiles measured here replace them. They come
from nominal figures, not momentary ones, so that the same machine gives the same cluster. Nothing here imports torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from simpart.hardware import Cluster, Device, LinkLevel
from simpart.hardware.quantity import format_quantity

__all__ = ["Machine", "describe", "detect_local", "read_machine"]

_CPUS = Path("/sys/devices/system/cpu")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NOMINAL_HZ = 3e9  # where the system tells no clock
_CORE_BYTES_PER_S = 20e9  # what one core can read on a server of today: 10 to 25 GB/s
_DISPATCH_S = 5e-6  # torch's dispatch of one small operation on a CPU
_PROCESS_BYTES = 400 * 2**20  # a Python process that has imported torch
_GLOO_BYTES_PER_S, _GLOO_LATENCY_S = 1.5e9, 100e-6  # gloo over the loopback interface, one thread each


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the system says. `flags` are /proc/cpuinfo's, empty where there is none."""

    model: str
    vendor: str
    family: int
    flags: frozenset[str]
    clock_hz: float
    clock_source: str
    cores: int
    memory_bytes: int
    l2_bytes: int | None = None


def detect_local(processes: int | None = None) -> Cluster:
    """This machine as `processes` devices; by default one per physical core that this process may use."""
    return describe(read_machine(), processes)


def describe(machine: Machine, processes: int | None = None) -> Cluster:
    """A cluster of equal devices that share the memory, and the time when they outnumber the cores."""
    count = processes or machine.cores
    share = min(1.0, machine.cores / count)
    flop_per_cycle, units = _float32_per_cycle(machine)
    float32 = machine.clock_hz * flop_per_cycle * share
    shared = "" if share == 1 else f", {count} processes on {machine.cores} cores"
    peak = {"float32": float32, "float64": float32 / 2}
    if "amx_bf16" in machine.flags:
        peak["bfloat16"] = machine.clock_hz * 2048 * share  # 16 x 16 x 32 multiply-adds in 16 cycles, times 2
    elif "avx512_bf16" in machine.flags:
        peak["bfloat16"] = float32 * 2
    estimate = f"estimate: {format_quantity(machine.clock_hz, 'Hz', digits=3)} x {units}{shared}"
    device = Device(
        name=f"{machine.model} core" + (f" x {share:.3g}" if shared else ""),
        kind="cpu",
        memory_bytes=max(machine.memory_bytes // count // 2**20, 1024) * 2**20,
        memory_bytes_per_s=_CORE_BYTES_PER_S * share,
        peak_flops_per_s=tuple(peak.items()),
        kernel_launch_s=_DISPATCH_S / share,
        vector_flops_per_s=float32,
        multiprocessors=1,
        clock_hz=machine.clock_hz,
        l2_bytes=machine.l2_bytes or None,
        reserved_bytes=_PROCESS_BYTES,
        sources=tuple({
            "memory": f"detected: memory of this machine, divided by {count}",
            "memory_bandwidth": f"assumption: what one core can read{shared}",
            "peak": estimate,
            "vector": estimate,
            "kernel_launch": "assumption: torch's dispatch of one small operation",
            "multiprocessors": "one core",
            "clock": machine.clock_source,
            **({"l2": "detected"} if machine.l2_bytes else {}),
            "reserved": "assumption: a Python process that has imported torch",
        }.items()),
    )  # fmt: skip
    link = LinkLevel(
        name="gloo",
        size=count,
        bytes_per_s=_GLOO_BYTES_PER_S * share,
        latency_s=_GLOO_LATENCY_S / share,
        inside_host=True,
        sources=tuple(dict.fromkeys(("bandwidth", "latency"), "assumption: gloo over the loopback interface").items()),
    )
    name = "local" if processes is None else f"local:{processes}"
    return Cluster(name=name, devices=((device, count),), levels=(link,))


def read_machine() -> Machine:
    """Asks the system: /proc and /sys on Linux, psutil and platform elsewhere."""
    info = _cpuinfo()
    clock_hz, source = _clock(info)
    family = info.get("cpu family", "0")
    return Machine(
        model=" ".join(info.get("model name", platform.processor() or platform.machine() or "CPU").split()),
        vendor=info.get("vendor_id", ""),
        family=int(family) if family.isdigit() else 0,
        flags=frozenset((info.get("flags") or info.get("Features") or "").split()),
        clock_hz=clock_hz,
        clock_source=source,
        cores=_physical_cores(),
        memory_bytes=_memory_bytes(),
        l2_bytes=_l2_bytes(),
    )


def _float32_per_cycle(machine: Machine) -> tuple[int, str]:
    """FLOP per cycle and core, and in words how they come about. A multiply-add is two."""
    flags = machine.flags
    if "avx512f" in flags and not (machine.vendor == "AuthenticAMD" and machine.family < 26):  # Zen 4 halves its units
        return 64, "two 512-bit multiply-add units"
    if "fma" in flags and "avx2" in flags:
        return 32, "two 256-bit multiply-add units"
    if "avx" in flags:
        return 16, "256-bit units for addition and for multiplication"
    if {"asimd", "sve"} & flags or machine.model.startswith(("arm", "aarch64", "Apple")):
        return 16, "two 128-bit multiply-add units"
    return 8, "128-bit units for addition and for multiplication"


def _cpuinfo() -> Mapping[str, str]:
    """The first processor's entry of /proc/cpuinfo."""
    first, _, _ = _text("/proc/cpuinfo").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _clock(info: Mapping[str, str]) -> tuple[float, str]:
    """Nominal clock, rounded to 0.1 GHz, and where it is from."""
    highest = _text(_CPUS / "cpu0/cpufreq/cpuinfo_max_freq").strip()
    named = re.search(r"@ *([0-9.]+) *GHz", info.get("model name", ""))
    if highest.isdigit():
        hertz, source = float(highest) * 1e3, "detected: highest clock of the frequency driver"
    elif named:
        hertz, source = float(named[1]) * 1e9, "detected: the processor's name"
    elif re.fullmatch(r"[0-9.]+", info.get("bogomips", "")) and "flags" in info:
        hertz, source = float(info["bogomips"]) / 2 * 1e6, "detected: time-stamp counter"  # on x86 alone
    else:
        hertz, source = _psutil_hz(), "detected: psutil"
    rounded = round(hertz / 1e8) * 1e8
    return (rounded, source) if rounded > 0 else (_NOMINAL_HZ, "assumption: the system tells no clock")


def _psutil_hz() -> float:
    try:
        found = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):  # each raised on some system without a clock to tell
        return 0.0
    return float(found.max or found.current) * 1e6 if found else 0.0


def _physical_cores() -> int:
    """Distinct cores behind the processors that this process may run on, at most a container's share of time."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS or Windows
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = {
        (_text(topology / "physical_package_id"), _text(topology / "core_id") or str(number))
        for number in allowed
        for topology in [_CPUS / f"cpu{number}/topology"]
    }
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    limit = max(1, int(quota) // int(period)) if quota.isdigit() and period.isdigit() else len(cores)
    return min(len(cores), limit)


def _memory_bytes() -> int:
    limits = [int(text) for text in (_text(path).strip() for path in _MEMORY_LIMITS) if text.isdigit()]
    return min([int(psutil.virtual_memory().total), *limits])


def _l2_bytes() -> int | None:
    found = re.fullmatch(r"([0-9]+)K", _text(_CPUS / "cpu0/cache/index2/size").strip())
    return int(found[1]) * 1024 if found else None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
