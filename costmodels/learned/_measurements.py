"""The one profile schema: what was measured, on which device, with which software, from which source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

__all__ = ["Imported", "Measurements", "concatenate", "row_codes"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Names = np.ndarray[tuple[int], np.dtype[np.object_]]
Mask = np.ndarray[Any, Any]

_COLUMNS = ("op", "device", "dtype", "software", "source", "split", "latency_s", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Latencies of one family of kernels, column by column.

    `family` says what `dims` mean (see `_families`); `device` holds names of device files; `software` is framework,
    version and kernel; `row` the position in the file that the row is from; `split` a published split, or empty.
    """

    family: str
    op: Names
    device: Names
    dtype: Names
    software: Names
    source: Names
    split: Names
    dims: Mapping[str, Floats]
    latency_s: Floats
    row: Floats

    def __len__(self) -> int:
        return len(self.latency_s)

    def at(self, rows: Mask) -> Measurements:
        """Some rows, by mask or by position."""
        return replace(
            self,
            dims={name: values[rows] for name, values in self.dims.items()},
            **{name: getattr(self, name)[rows] for name in _COLUMNS},
        )

    def devices(self) -> list[str]:
        """Names of the devices, in order of first appearance."""
        return list(dict.fromkeys(self.device.tolist()))

    def median_per_shape(self) -> Measurements:
        """One row per (device, op, dtype, dims): the median over software and repeats."""
        order, starts, counts = self._shapes()
        low, high = order[starts + (counts - 1) // 2], order[starts + counts // 2]
        return replace(self.at(low), latency_s=np.sqrt(self.latency_s[low] * self.latency_s[high]))

    def fastest_per_shape(self) -> Measurements:
        """One row per (device, op, dtype, dims): the fastest."""
        order, starts, _ = self._shapes()
        return self.at(order[starts])

    def _shapes(self) -> tuple[Any, Any, Any]:
        """Rows in order of shape then latency; where each shape starts in that order; how many rows it has."""
        combined = row_codes([self.device, self.op, self.dtype, *self.dims.values()])
        order = np.lexsort((self.latency_s, combined))
        starts = np.flatnonzero(np.diff(combined[order], prepend=-1))
        return order, starts, np.diff(starts, append=len(order))


def row_codes(keys: Sequence[Any]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The same number for rows that are equal in every key."""
    combined = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        code = _codes(np.asarray(key))
        if not code.any():
            continue
        combined = np.unique(combined * (int(code.max(initial=0)) + 1) + code, return_inverse=True)[1].astype(np.int64)
    return combined


def _codes(key: Any) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Places of values in the sorted list of distinct ones. Sorting all texts of a column would take most of an
    import, so texts are looked up."""
    if key.dtype != object:
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.unique(key, return_inverse=True)[1].astype(np.int64)
        return found
    values = key.tolist()
    place = {value: number for number, value in enumerate(sorted(set(values)))}
    return np.fromiter(map(place.__getitem__, values), dtype=np.int64, count=len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an adapter found in a file: measurements by family, and how many rows it left out by reason."""

    kind: str
    tables: tuple[Measurements, ...]
    rows: int
    refused: Mapping[str, int]


def concatenate(tables: Sequence[Measurements]) -> Measurements:
    """Rows of several tables of one family."""
    first = tables[0]
    return Measurements(
        family=first.family,
        dims={name: np.concatenate([t.dims[name] for t in tables]) for name in first.dims},
        **{n: np.concatenate([getattr(t, n) for t in tables]) for n in _COLUMNS},
    )


assert set(_COLUMNS) | {"family", "dims"} == {f.name for f in fields(Measurements)}
