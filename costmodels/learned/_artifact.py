"""Fitted models as one npz file of plain arrays and a JSON header; reading never executes code."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from simpart.costmodels.learned._blend import Blend
from simpart.costmodels.learned._boost import Boost
from simpart.costmodels.learned._families import FAMILY_MODELS, REGIMES, Rows
from simpart.costmodels.learned._model import SIZES, STATUSES, FamilyModel, columns_of
from simpart.costmodels.learned._net import NET_PARTS, Net
from simpart.costmodels.learned._sheet import NUMBERS, Sheet
from simpart.errors import FormatError
from simpart.files import dump_json, write_atomically, write_document

__all__ = ["SHIPPED", "load_models", "save_models"]

KIND, VERSION = "simpart-compute-models", 3
SHIPPED = Path(__file__).parent.parent / "artifacts" / "compute.npz"
_LARGEST_LOG = 20.0  # a factor of half a billion
_BOOST = ("features", "thresholds", "leaves")


def save_models(path: Path | str, models: Mapping[str, FamilyModel]) -> None:
    """Write models by family; the same models, the same bytes. In place of the shipped ones also, in JSON, how many
    rows of which device they learned from."""
    arrays: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for name, model in models.items():
        for i, constants in enumerate(model.constants):
            arrays[f"{name}.constants{i}"] = constants
        if model.boost is not None:
            arrays.update({f"{name}.{part}": getattr(model.boost, part) for part in _BOOST})
        if model.net is not None:
            arrays.update({f"{name}.net.{part}": getattr(model.net, part) for part in NET_PARTS})
        for i, boost in enumerate(model.alone.values()):
            arrays.update({f"{name}.alone{i}.{part}": getattr(boost, part) for part in _BOOST})
        described[name] = {
            "variants": len(model.constants),
            "trees": model.boost is not None,
            "sheets": {d: {n: _plain(getattr(s, n)[0]) for n in NUMBERS} for d, s in model.sheets.items()},
            "domain": model.domain,
            "ops": model.ops,
            "alone": list(model.alone),
            "net": model.net is not None,
            "blend": asdict(model.blend),
            "beside": asdict(model.beside),
            "offsets": model.offsets,
            "spreads": model.spreads,
            "facts": model.facts,
        }
    seen: dict[str, dict[str, int]] = {}
    for name, model in models.items():
        for device, count in dict(model.facts.get("rows_by_device", {})).items():  # type: ignore[call-overload]
            seen.setdefault(device, {})[name] = count
    digest = _digest(arrays)
    header = dump_json({"kind": KIND, "version": VERSION, "digest": digest, "families": described})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=np.frombuffer(header.encode(), dtype=np.uint8), **arrays)
    write_atomically(path, buffer.getvalue())
    if Path(path) == SHIPPED:
        write_document(SHIPPED.with_name("trained_on.json"), "simpart-trained-on", 1, {"rows": seen})


def load_models(path: Path | str = SHIPPED) -> dict[str, FamilyModel]:
    """Models by family. Raises FormatError in one line when the file is missing, corrupt, of another kind or newer."""
    try:
        if not zipfile.is_zipfile(path) and Path(path).is_file():
            raise FormatError(f"{path} is not a file of fitted models, or cut short; run simpart fit")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FormatError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise FormatError(
            f"cannot read {path} as fitted models ({' '.join(str(error).split())}); run simpart fit"
        ) from error
    except Exception as error:  # zlib.error has no public base
        raise FormatError(f"{path} is corrupt ({' '.join(str(error).split())}); run simpart fit") from error
    try:
        header = json.loads(arrays.pop("header").tobytes())
        if header["kind"] != KIND:
            raise FormatError(f"{path} is a {header['kind']}, not {KIND}")
        if header["version"] > VERSION:
            raise FormatError(
                f"{path} has version {header['version']}; this simpart reads up to {VERSION}: update simpart"
            )
        if header["version"] < VERSION:
            raise FormatError(
                f"{path} has version {header['version']}, which this simpart reads no more; run simpart fit"
            )
        if header["digest"] != _digest(arrays):
            raise FormatError(f"{path} is corrupt: its arrays are not those it was written with; run simpart fit")
        known = {name: item for name, item in header["families"].items() if name in FAMILY_MODELS}
        if not known:
            raise ValueError("no family that this simpart knows")
        return {name: _model(name, item, arrays) for name, item in known.items()}
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(f"{path} is not a file of fitted models ({error!r}); run simpart fit") from error


def _model(name: str, item: Mapping[str, Any], arrays: Mapping[str, Any]) -> FamilyModel:
    family = FAMILY_MODELS[name]
    constants = tuple(arrays[f"{name}.constants{i}"] for i in range(item["variants"]))
    if len(constants) != len(family.variants) or any(len(c) != len(family.constants) for c in constants):
        raise ValueError(f"family {name} has another number of constants")
    boost = Boost(**{part: arrays[f"{name}.{part}"] for part in _BOOST}) if item["trees"] else None
    net = Net(**{part: arrays[f"{name}.net.{part}"] for part in NET_PARTS}) if item["net"] else None
    blend, beside = (
        Blend(**{share: float(value) for share, value in item[which].items()}) for which in ("blend", "beside")
    )
    if (blend.net or beside.net) and net is None:
        raise ValueError(f"family {name} takes a net that is not there")
    alone = {
        device: Boost(**{part: arrays[f"{name}.alone{i}.{part}"] for part in _BOOST})
        for i, device in enumerate(item["alone"])
    }
    sheets = {
        device: Sheet(**{n: np.array([np.nan if v is None else v], dtype=np.float64) for n, v in numbers.items()})
        for device, numbers in item["sheets"].items()
    }
    spreads = {
        status: {r: (float(a), float(b)) for r, (a, b) in item["spreads"][status].items()} for status in STATUSES
    }
    model = FamilyModel(
        family=name,
        constants=constants,
        boost=boost,
        alone=alone,
        sheets=sheets,
        domain={k: (float(a), float(b)) for k, (a, b) in item["domain"].items()},
        ops=tuple(item["ops"]),
        net=net,
        blend=blend,
        beside=beside,
        offsets=dict(item["offsets"]),
        spreads=spreads,
        facts=item["facts"],
    )
    _check(model)
    return model


def _check(model: FamilyModel) -> None:
    """Raise ValueError or KeyError for what would fail, or tell no number, only when it is asked."""
    family = FAMILY_MODELS[model.family]
    numbers = np.array([getattr(s, n)[0] for s in model.sheets.values() for n in NUMBERS if n != "floor_s"])
    spreads = np.array([model.spreads[status][size] for status in STATUSES for size in SIZES])
    limits = np.array([model.domain[name] for name in family.dims if name in model.domain])
    offsets = np.array([[known[regime] for regime in REGIMES] for known in model.offsets.values()], dtype=np.float64)
    if not (numbers.size and np.isfinite(numbers).all() and (numbers > 0).all()):
        raise ValueError(f"family {model.family} has no data sheets, or one with numbers that are not positive")
    if not (((spreads >= 0) & (spreads < _LARGEST_LOG)).all() and np.isfinite(offsets).all()):
        raise ValueError(f"family {model.family} has spreads or offsets that are no numbers")
    if not set(model.domain) <= set(family.dims) or not np.isfinite(limits).all():
        raise ValueError(f"family {model.family} has a domain of other dims")
    if any(c.dtype != np.float64 or not np.isfinite(c).all() for c in model.constants):
        raise ValueError(f"family {model.family} has constants that are no numbers")
    smallest = Rows(
        op=np.zeros(1, dtype=np.int64),
        dims={name: np.array([value], dtype=np.float64) for name, value in family.smallest.items()},
        sheet=next(iter(model.sheets.values())),
    )
    columns = len(columns_of(family, smallest, np.zeros(1), smallest.sheet))
    for boost in filter(None, (model.boost, *model.alone.values())):
        if (boost.features >= columns).any() or (np.abs(boost.leaves) > _LARGEST_LOG).any():
            raise ValueError(f"family {model.family} has trees that ask or answer what is not there")


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _digest(arrays: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode())
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()[:32]
