"""A model of kernels on devices that were profiled here, and its file: one npz of plain arrays with a JSON header."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simpart.cost import PROVENANCES, ComputeModel, Estimate, SignatureTable
from simpart.costmodels.fallback import Calibrated
from simpart.costmodels.learned._boost import Boost
from simpart.costmodels.learned_local._features import columns_of, offsets_of
from simpart.costmodels.roofline import physical_bound_s, signature_family
from simpart.errors import FormatError
from simpart.files import dump_json, write_atomically
from simpart.hardware import Device

__all__ = ["FILE", "Local", "LocalDevice", "Unseen", "load_local", "save_local"]

FILE = "learned.npz"
"""Name of the file beside the profiles of a store; `default_costs` looks for it."""
KIND, VERSION = "simpart-local-models", 1
_PARTS = ("features", "thresholds", "leaves")
_OUTSIDE = 2.0  # how much wider spreads are beyond the sizes that were measured

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """What was learned on one device. `offsets`: log seconds over the base model by target and family; `sizes`: least
    and most log seconds of the base model by target; `spreads`: (shared, own) log-sd of kernels whose target was
    measured (`target`) and of others of a measured family (`family`)."""

    boost: Boost
    offsets: Mapping[str, float]
    typical: float
    sizes: Mapping[str, tuple[float, float]]
    spreads: Mapping[str, tuple[float, float]]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Local:
    """A partial ComputeModel: knows kernels of families that were profiled, on devices that were. Over `base`, the
    model that it corrects."""

    devices: Mapping[str, LocalDevice]
    base: ComputeModel

    def knows(self, table: SignatureTable, device: Device) -> Bools:
        mine = self.devices.get(device.name)
        if mine is None:
            return np.zeros(len(table.signatures), dtype=bool)
        known = [not s.view and f"family {signature_family(s)}" in mine.offsets for s in table.signatures]
        return np.array(known, dtype=bool)

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        """Seconds of kernels of a profiled device; interpolated within the measured sizes of a target."""
        plain, mine = self.base.estimate(table, device), self.devices[device.name]
        rows = table.signatures
        size = np.log(np.maximum(plain.mean_s, 1e-12))
        offsets = offsets_of(rows, mine.offsets, mine.typical)
        seconds = np.exp(size + offsets + mine.boost.predict(columns_of(rows, device, offsets)))
        least = _least_s(table, device)
        spans = [mine.sizes.get(s.target) for s in rows]
        inside = np.array(
            [span is not None and span[0] - 0.01 <= at <= span[1] + 0.01 for span, at in zip(spans, size, strict=True)],
            dtype=bool,
        )
        spreads = np.array([mine.spreads["family" if span is None else "target"] for span in spans], dtype=np.float64)
        return Estimate(
            mean_s=np.where([s.view for s in rows], 0.0, np.maximum(seconds, least)),
            family=plain.family,
            families=plain.families,
            shared_log_sd=spreads.reshape(-1, 2)[:, 0],
            own_log_sd=spreads.reshape(-1, 2)[:, 1] * np.where(inside, 1.0, _OUTSIDE),
            provenance=np.where(inside, PROVENANCES.index("interpolated"), PROVENANCES.index("extrapolated")),
        )


@dataclass(frozen=True, slots=True)
class Unseen:
    """Kernels that were not measured on a device that was: the mean, in logs, of what was learned and of what the
    nearest measured ones say. Neither was better on every model that was held out."""

    local: Local
    calibrated: Calibrated

    def knows(self, table: SignatureTable, device: Device) -> Bools:
        return self.local.knows(table, device) & self.calibrated.knows(table, device)

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        one, other = self.local.estimate(table, device), self.calibrated.estimate(table, device)
        return replace(one, mean_s=np.maximum(np.sqrt(one.mean_s * other.mean_s), _least_s(table, device)))


def _least_s(table: SignatureTable, device: Device) -> Floats:
    """What the data sheet allows. A detected processor has none: its rates are estimates, and caches outrun memory."""
    if device.kind == "cpu":
        return np.zeros(len(table.signatures))
    return np.array([physical_bound_s(s, device) for s in table.signatures], dtype=np.float64)


def save_local(path: Path, devices: Mapping[str, LocalDevice]) -> None:
    """Write models by device; the same models, the same bytes."""
    arrays: dict[str, Any] = {}
    described = []
    for number, (name, item) in enumerate(sorted(devices.items())):
        arrays.update({f"{number}.{part}": getattr(item.boost, part) for part in _PARTS})
        described.append(
            {
                "device": name,
                "offsets": item.offsets,
                "typical": item.typical,
                "sizes": item.sizes,
                "spreads": item.spreads,
                "facts": item.facts,
            }
        )
    header = dump_json({"kind": KIND, "version": VERSION, "digest": _digest(arrays), "devices": described})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=np.frombuffer(header.encode(), dtype=np.uint8), **arrays)
    write_atomically(path, buffer.getvalue())


def load_local(path: Path) -> dict[str, LocalDevice]:
    """Models by device, none where there is no file. Raises FormatError in one line for a corrupt or foreign one."""
    again = "run simpart fit on the store again"
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise FormatError(f"{path} is no file of learned kernels, or cut short; {again}")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
        if header["kind"] != KIND or header["version"] > VERSION:
            raise FormatError(
                f"{path} is a {header['kind']} of version {header['version']}, not {KIND} {VERSION}; {again}"
            )
        if header["digest"] != _digest(arrays):
            raise FormatError(f"{path} is corrupt: its arrays are not those it was written with; {again}")
        return {item["device"]: _device(item, arrays, i) for i, item in enumerate(header["devices"])}
    except FileNotFoundError:
        return {}
    except FormatError:
        raise
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise FormatError(f"cannot read {path} as learned kernels ({' '.join(str(error).split())}); {again}") from error
    except Exception as error:  # zlib.error has no public base
        raise FormatError(f"{path} is corrupt ({' '.join(str(error).split())}); {again}") from error


def _device(item: Mapping[str, Any], arrays: Mapping[str, Any], number: int) -> LocalDevice:
    def pairs(content: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return {name: (float(a), float(b)) for name, (a, b) in content.items()}

    return LocalDevice(
        boost=Boost(**{part: arrays[f"{number}.{part}"] for part in _PARTS}),
        offsets={name: float(value) for name, value in item["offsets"].items()},
        typical=float(item["typical"]),
        sizes=pairs(item["sizes"]),
        spreads=pairs(item["spreads"]),
        facts=item["facts"],
    )


def _digest(arrays: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode())
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()[:32]
