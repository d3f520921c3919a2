"""A fitted family: analytic core, residual trees and net, and how far each is to be trusted on a device.

    seconds = analytic(constants, shape, data sheet) · exp(residual)

Status of a device: `seen` was trained on; a `sibling` lies near one that was, and borrows its residual; a `new` one
gets the family's blend of core, trees, net and what the nearest trained device scaled by the roofline says (the last
between devices with stacked memory only); a `far` one (peak or bandwidth FAR times beyond the trained range) gets the
analytic core alone. What was trained on one kind of device never uses a residual elsewhere, unless its family says that
it carries over. A device that was trained on, or a sibling of it, also takes the trees that were grown for that one
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np

from simpart.costmodels.learned._blend import Blend, Parts
from simpart.costmodels.learned._boost import Boost
from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Dims, Family, Rows
from simpart.costmodels.learned._net import Net
from simpart.costmodels.learned._sheet import Sheet, distance

__all__ = [
    "DESCRIPTORS", "SIBLING", "SIZES", "STATUSES", "FamilyModel", "Prediction", "Spreads", "columns_of", "one_kind",
    "size_of", "software_keys", "stacked",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Names = np.ndarray[tuple[int], np.dtype[np.object_]]

STATUSES = ("seen", "sibling", "new", "far")
SIBLING = 0.5
DESCRIPTORS = 5  # last columns of the features: numbers of the device
_SAME = 0.01
FAR = 2.5
_STACKED = 10e9  # bytes/s per multiprocessor from which memory is stacked on the chip (HBM)
_LEAST_FLOOR = 0.3  # of a measured floor that is not the work of the smallest kernel itself

SIZES = ("<5us", "<20us", "<200us", ">=200us")
_SIZE_EDGES = np.log([5e-6, 20e-6, 200e-6])
_UNLIKE = 1.2  # how much wider intervals are where no trained device has memory of this kind

Spreads = Mapping[str, Mapping[str, tuple[float, float]]]
"""Status → size of the predicted time → (shared, own) log-sd."""

_PRIOR_SPREADS: Spreads = {
    "seen": dict.fromkeys(SIZES, (0.04, 0.08)),
    "sibling": dict.fromkeys(SIZES, (0.10, 0.10)),
    "new": dict.fromkeys(SIZES, (0.20, 0.15)),
    "far": dict.fromkeys(SIZES, (0.30, 0.20)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Log seconds of each row, log-sds, the status of the device, and which rows lie inside the trained sizes."""

    log_seconds: Floats
    shared: Floats
    own: Floats
    status: str
    inside: np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """What `train` learns about a family. `domain` is (least, most) of each dim; `sheets` those of trained devices.
    `offsets`: software → regime → how much longer (in logs) it takes than the median software, on any device. `alone`
    are trees grown on what `boost` leaves of one device. `net` is there where a blend takes it:
    `blend` for rows as the constants were fitted on, `beside` for others (the family's `core_rows`).
    """

    family: str
    constants: tuple[Floats, ...]
    boost: Boost | None
    sheets: Mapping[str, Sheet]
    domain: Mapping[str, tuple[float, float]]
    ops: tuple[str, ...] = ()
    alone: Mapping[str, Boost] = field(default_factory=dict)
    net: Net | None = None
    blend: Blend = field(default_factory=Blend)
    beside: Blend = field(default_factory=Blend)
    offsets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    spreads: Spreads = field(default_factory=lambda: _PRIOR_SPREADS)
    facts: Mapping[str, object] = field(default_factory=dict)

    def status(self, device: str, sheet: Sheet) -> str:
        """How the device stands to the trained ones. One of a trained name with other numbers is another device."""
        if device in self.sheets and distance(self.sheets[device], sheet) < _SAME:
            return "seen"
        near = self.nearest(sheet)
        if distance(self.sheets[near], sheet) < SIBLING:
            return "sibling"
        for name in ("bandwidth",) if self.family.startswith("memory") else ("peak", "bandwidth"):
            known = [getattr(s, name)[0] for s in self.sheets.values()]
            if not min(known) / FAR <= getattr(sheet, name)[0] <= max(known) * FAR:
                return "far"
        return "new"

    def nearest(self, sheet: Sheet) -> str:
        """The trained device whose data sheet is most alike."""
        return min(self.sheets, key=lambda name: distance(self.sheets[name], sheet))

    def analytic(self, rows: Rows, floor_s: float | None = None) -> Floats:
        """Log seconds by the analytic core, never below the roofline; `floor_s` is the device's measured floor."""
        family = FAMILY_MODELS[self.family]
        logs = []
        for variant, constants in zip(family.variants, self.constants, strict=True):
            at = constants if floor_s is None else _with_floor(family, variant, constants, rows.sheet, floor_s)
            logs.append(np.log(variant(at, rows)))
        found: Floats = np.maximum(np.mean(logs, axis=0), np.log(family.bound_s(rows)))
        return found

    def residual(self, rows: Rows, analytic: Floats, like: Sheet | None = None) -> Floats:
        """What the trees add to the analytic log seconds, as on a device with the descriptors of `like`."""
        return self._residual(rows, analytic, like or rows.sheet, None)

    def _residual(self, rows: Rows, analytic: Floats, like: Sheet, device: str | None) -> Floats:
        """`residual`, with what a trained device has besides."""
        if self.boost is None:
            return np.zeros(len(rows))
        columns = columns_of(FAMILY_MODELS[self.family], rows, analytic, like)
        found = self.boost.predict(columns)
        alone = None if device is None else self.alone.get(device)
        if alone is not None:
            found += alone.predict(columns)
        return found

    def predict(self, rows: Rows, device: str, floor_s: float | None = None) -> Prediction:
        """Rows of one device, whose sheet has one entry. A measured floor of a device not trained on replaces the
        fitted one; so does `floor_s`, on every device."""
        family, sheet = FAMILY_MODELS[self.family], rows.sheet
        status = self.status(device, sheet)
        floor = float(sheet.floor_s[0])
        if floor_s is None and status != "seen" and np.isfinite(floor):
            floor_s = None if family.timed_by_host or family.own_floor else floor
        analytic = self.analytic(rows, floor_s)
        if status == "seen":
            logs = analytic + self._residual(rows, analytic, sheet, device)
        elif status == "sibling":
            near = self.nearest(sheet)
            logs = analytic + self._residual(rows, analytic, self.sheets[near], near)
        elif status == "far":
            logs = analytic
        elif family.carries_over and one_kind(self.sheets):
            logs = analytic + self.residual(rows, analytic, self.sheets[self.nearest(sheet)])
        else:
            logs = self.blended(self.parts(rows, analytic, self.blend.takes() | self.beside.takes()), rows.dims)
        logs = np.maximum(logs, np.log(family.bound_s(rows)))
        inside = np.ones(len(rows), dtype=bool)
        for name, (low, high) in self.domain.items():
            inside &= (rows.dims[name] >= 0.99 * low) & (rows.dims[name] <= 1.01 * high)
        shared, own = self._spread(status, sheet, size_of(logs))
        widened = np.where(inside, 1.0, 1.5)
        return Prediction(log_seconds=logs, shared=shared, own=own * widened, status=status, inside=inside)

    def software_offset(self, software: Names, regime: Ints) -> Floats:
        """Log seconds that the software of each row adds; 0 for one that was never seen."""
        found = np.zeros(len(software))
        for name in set(software.tolist()):
            known = next((self.offsets[key] for key in software_keys(name) if key in self.offsets), None)
            if known is not None:
                rows = software == name
                found[rows] = np.array([known[r] for r in REGIMES])[regime[rows]]
        return found

    def nearest_stacked(self, sheet: Sheet) -> str | None:
        """The nearest trained device with stacked memory, for one that has it too; none where latencies hold what the
        host takes, which no roofline scales."""
        if FAMILY_MODELS[self.family].timed_by_host:
            return None
        alike = [name for name, known in self.sheets.items() if stacked(known)]
        if not (stacked(sheet) and alike):
            return None
        return min(alike, key=lambda name: distance(self.sheets[name], sheet))

    def blended(self, parts: Parts, dims: Dims) -> Floats:
        """Log seconds of rows with these sizes on a new device, by what the parts say of them."""
        found, core_rows = self.blend.log_seconds(parts), FAMILY_MODELS[self.family].core_rows
        if core_rows is None or self.beside == self.blend:
            return found
        return np.where(core_rows(dims), found, self.beside.log_seconds(parts))

    def parts(self, rows: Rows, analytic: Floats, wanted: Set[str]) -> Parts:
        """What the `wanted` parts say about rows of a device not trained on, as far as it may use them."""
        family, trees, net, ratio = FAMILY_MODELS[self.family], None, None, None
        if wanted & {"trees", "net"} and not one_kind(self.sheets):
            columns = columns_of(family, rows, analytic, rows.sheet)
            trees = self.boost.predict(columns) if "trees" in wanted and self.boost is not None else None
            net = self.net.predict(columns) if "net" in wanted and self.net is not None else None
        like = self.nearest_stacked(rows.sheet) if "ratio" in wanted else None
        if like is not None:
            ratio = self._scaled_from(rows, self.sheets[like])
        return Parts(core=analytic, trees=trees, net=net, ratio=ratio, bound=np.log(family.bound_s(rows)))

    def _scaled_from(self, rows: Rows, near: Sheet) -> Floats:
        """Log seconds as on a trained device, scaled by the roofline. It scales floors too, so that it errs low on a
        faster device, where the core errs high; not for other memory, which a roofline alone does not tell."""
        family = FAMILY_MODELS[self.family]
        there = replace(rows, sheet=near)
        known = self.analytic(there)
        scale = family.scaling_s or family.bound_s
        found: Floats = known + self.residual(there, known) + np.log(scale(rows) / scale(there))
        return found

    def _spread(self, status: str, sheet: Sheet, size: Ints) -> tuple[Floats, Floats]:
        table = np.array([self.spreads[status][name] for name in SIZES], dtype=np.float64)
        if status in ("new", "far") and all(stacked(known) != stacked(sheet) for known in self.sheets.values()):
            table *= _UNLIKE
        return table[size, 0], table[size, 1]


def size_of(log_seconds: Floats) -> Ints:
    """Index into SIZES of each predicted time: errors of short kernels are larger, and have other reasons."""
    found: Ints = np.searchsorted(_SIZE_EDGES, log_seconds, side="right").astype(np.int64)
    return found


def software_keys(software: str) -> tuple[str, ...]:
    """What stands for a software, the more exact first: framework with kernel, framework."""
    words = software.split(" ")
    return (f"{words[0]} {words[-1]}", words[0]) if len(words) > 1 else (software,)


def columns_of(
    family: Family, rows: Rows, analytic: Floats, like: Sheet
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Features of the residual, one row each: of the work, then of the device."""
    seconds = np.exp(analytic)
    device = (
        np.log(like.multiprocessors), np.log(like.clock_hz), np.log(like.peak / like.bandwidth),
        np.log(like.l2_bytes / like.multiprocessors), np.log(like.peak / like.power_w),
    )  # fmt: skip
    work = family.features(rows, seconds)
    assert len(device) == DESCRIPTORS
    found = np.empty((len(work) + len(device), len(rows)), dtype=np.float32)
    for place, values in enumerate((*work, *device)):
        found[place] = values
    return found


def _with_floor(family: Family, variant: object, constants: Floats, sheet: Sheet, floor_s: float) -> Floats:
    """Constants whose smallest kernel takes `floor_s` on this device."""
    smallest = Rows(
        op=np.zeros(1, dtype=np.int64),
        dims={name: np.array([value], dtype=np.float64) for name, value in family.smallest.items()},
        sheet=sheet,
    )
    assert callable(variant)
    without = constants.copy()
    without[0] = -np.inf
    rest = float(variant(without, smallest)[0])
    scale = (float(variant(constants, smallest)[0]) - rest) / float(np.exp(constants[0]))
    changed = constants.copy()
    changed[0] = np.log(max(floor_s - rest, _LEAST_FLOOR * floor_s) / scale)
    return changed


def stacked(sheet: Sheet) -> bool:
    """Whether a device has its memory stacked on the chip, by the bandwidth of a multiprocessor."""
    return bool(sheet.bandwidth[0] / sheet.multiprocessors[0] >= _STACKED)


def one_kind(sheets: Mapping[str, Sheet]) -> bool:
    """Whether all devices are siblings of the first."""
    first, *others = sheets.values()
    return all(distance(first, other) < SIBLING for other in others)
