"""A device's data sheet as the numbers that learned models read, with what is assumed where it states none.

Sustained peak: matrix units run below their data-sheet rate when the board cannot feed the chip. Under a power cap the
clock falls with the cube root of the power per multiprocessor and hertz (dynamic power grows with f·V², V with f); and
the best rate anyone reached falls with the peak per watt, by `_PEAK_PER_WATT` on devices of one vendor (the table of
best matrix products published in stas00/ml-engineering: A100 0.87 and B200 0.78 of their peaks). Outside matrix units
what counts is the power per peak: V100 (18 pJ a FLOP) holds its peak, A100 (13) 0.86 of it, H100 (10) 0.78.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from simpart.hardware import Device
from simpart.hardware.quantity import format_quantity

__all__ = ["NUMBERS", "Sheet", "assumptions", "distance", "sheet_of", "stack_sheets"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_WATT_PER_SM_HZ = 2.6e-9  # what A100 and H100 (SXM) provide: enough to hold the boost clock in matrix units
_POWER_SHARE = 1 / 3
_VECTOR_WATT_PER_FLOPS = 16e-12  # V100: enough to hold the boost clock in float32 outside matrix units
_VECTOR_POWER_SHARE = 1 / 2
_PEAK_PER_WATT = 0.12
_TYPICAL_FLOPS_PER_WATT = 1.4e12

# What a field is taken for when a data sheet leaves it out, and how much that widens intervals: (value, log-sd).
_ASSUMED = {
    "multiprocessors": (108.0, 0.15),
    "clock_hz": (1.7e9, 0.10),
    "l2_bytes": (40 * 2.0**20, 0.08),
    "power_w": (400.0, 0.06),
}
_IN_FILES = {"multiprocessors": ("multiprocessors", ""), "clock_hz": ("clock", "Hz"), "l2_bytes": ("l2", "B"),
             "power_w": ("power", "W")}  # fmt: skip
"""Field: key in a device file and unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Numbers of one device, or one entry per row: rates in SI units, `floor_s` NaN where nobody measured it."""

    peak: Floats
    sustained: Floats
    vector: Floats
    bandwidth: Floats
    multiprocessors: Floats
    clock_hz: Floats
    l2_bytes: Floats
    power_w: Floats
    floor_s: Floats

    def at(self, rows: slice | Floats) -> Sheet:
        """Some of the rows."""
        return Sheet(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


NUMBERS = tuple(f.name for f in fields(Sheet))


def sheet_of(device: Device, dtype: str) -> tuple[Sheet, dict[str, str], float]:
    """The numbers of a device for arithmetic in `dtype`, each an array of one entry; which fields were assumed, with
    what in words; and the log-sd that this adds."""
    values = {name: getattr(device, name) for name in _ASSUMED}
    assumed = {name: f"{_ASSUMED[name][0]:g}" for name, value in values.items() if value is None}
    found = {name: float(_ASSUMED[name][0] if value is None else value) for name, value in values.items()}
    widened = float(np.sqrt(sum(_ASSUMED[name][1] ** 2 for name in assumed)))
    peak, tensor = device.peak(dtype), dtype not in ("float32", "float64")
    per_sm = found["power_w"] / (found["multiprocessors"] * found["clock_hz"])
    if tensor:
        share = min(1.0, per_sm / _WATT_PER_SM_HZ) ** _POWER_SHARE
        share *= (device.peak("float16") / found["power_w"] / _TYPICAL_FLOPS_PER_WATT) ** -_PEAK_PER_WATT
    else:
        share = min(1.0, found["power_w"] / peak / _VECTOR_WATT_PER_FLOPS) ** _VECTOR_POWER_SHARE
    numbers = {
        "peak": peak,
        "sustained": peak * share,
        "vector": device.vector_flops_per_s or device.peak("float32"),
        "bandwidth": device.memory_bytes_per_s,
        "floor_s": device.launch_floor_s or np.nan,
        **found,
    }
    return Sheet(**{name: np.array([value], dtype=np.float64) for name, value in numbers.items()}), assumed, widened


def assumptions(device: Device, dtype: str = "float32") -> str:
    """What learned models assume of a device whose file leaves a number out that arithmetic in `dtype` needs, in words;
    empty when it states all."""
    _, assumed, widened = sheet_of(device, "float32")
    words = []
    if assumed:
        missing = [_IN_FILES[name] for name in assumed]
        taken = ", ".join(
            f"{key} {format_quantity(_ASSUMED[name][0], unit, digits=3) if unit else assumed[name]}"
            for name, (key, unit) in zip(assumed, missing, strict=True)
        )
        keys = " and no ".join(key for key, _ in missing)
        words.append(f"states no {keys}: assumed {taken}; intervals are wider by {widened:.0%}")
    stated, factor = device.peak_from(dtype)
    if stated != dtype and not {stated, dtype} <= {"float16", "bfloat16"}:
        words.append(
            f"states no peak of {dtype}: {f'{factor:g} times ' if factor != 1 else ''}that of {stated} is taken"
        )
    if device.vector_flops_per_s is None:
        words.append("states no vector: the float32 peak is taken for it")
    return f"{device.name} {'; '.join(words)}" if words else ""


def stack_sheets(sheets: Sequence[Sheet], index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Sheet:
    """One entry per row: that of `sheets[index[row]]`."""
    return Sheet(**{n: np.concatenate([getattr(s, n) for s in sheets])[index] for n in NUMBERS})


def distance(one: Sheet, other: Sheet) -> float:
    """Euclidean distance of two devices in the logs of peak, bandwidth, multiprocessors, clock and L2."""
    names = ("peak", "bandwidth", "multiprocessors", "clock_hz", "l2_bytes")
    return float(np.sqrt(sum(np.log(getattr(one, n)[0] / getattr(other, n)[0]) ** 2 for n in names)))
