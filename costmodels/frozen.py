"""Prices as a file: every answer that cost models gave, for results that anybody reproduces without the models.

`record` puts a recorder in front of the models of a `Costs`; `save_frozen` writes what was asked; `load_frozen` gives
`Costs` that answer the same, bit for bit, and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import numpy as np

from simpart.cost import (
    PROVENANCES,
    Collective,
    CollectiveKind,
    CollectiveTable,
    CommModel,
    ComputeModel,
    Costs,
    Estimate,
    Signature,
    SignatureTable,
)
from simpart.errors import FormatError, MismatchError, UserError
from simpart.files import dump_json, write_atomically
from simpart.hardware import Cluster, Device, device_to_dict
from simpart.hardware_profiles._store import signature_from_json, signature_to_json
from simpart.kernels.ops import base_name

__all__ = ["FrozenComm", "FrozenCompute", "Recorder", "load_frozen", "record", "save_frozen"]

KIND, VERSION = "simpart frozen costs", 1
K = TypeVar("K", bound=Hashable)
Place = tuple[str, str]
"""A device or cluster by name and digest of its data sheet: prices of another one are no prices of this."""
NUMBERS = tuple(spec.name for spec in dataclasses.fields(Costs) if isinstance(spec.default, float))
"""What Costs says besides its models: overheads and the like."""


class Price(NamedTuple):
    """One row of an Estimate. `families` are those of the answer that it was part of."""

    mean_s: float
    shared_log_sd: float
    own_log_sd: float
    family: int
    provenance: int
    families: tuple[str, ...]


@dataclass(slots=True)
class Answers(Generic[K]):
    """Prices by what was asked, on each device or cluster."""

    known: dict[Place, dict[K, Price]] = field(default_factory=dict)
    families: dict[Place, tuple[str, ...]] = field(default_factory=dict)

    def keep(self, place: Place, asked: Sequence[K], estimate: Estimate) -> None:
        """Remember an answer row by row."""
        prices, families = self.known.setdefault(place, {}), estimate.families
        self.families.setdefault(place, families)
        columns = (estimate.mean_s, estimate.shared_log_sd, estimate.own_log_sd, estimate.family, estimate.provenance)
        for key, mean_s, shared, own, family, provenance in zip(asked, *(c.tolist() for c in columns), strict=True):
            prices[key] = Price(mean_s, shared, own, family, provenance, families)

    def estimate(self, place: Place, asked: Sequence[K], what: Callable[[Sequence[K]], str]) -> Estimate:
        """The answer to the same question; raises MismatchError for what was never asked."""
        prices = self.known.get(place)
        if prices is None:
            known = ", ".join(sorted(name for name, _ in self.known)) or "nothing"
            same = any(name == place[0] for name, _ in self.known)
            reason = f"{place[0]} has another data sheet now" if same else f"they are of {known}, not of {place[0]}"
            raise MismatchError(f"the frozen costs do not apply: {reason}; freeze them again, or leave --costs out")
        missing = [key for key in dict.fromkeys(asked) if key not in prices]
        if missing:
            raise MismatchError(
                f"the frozen costs lack {what(missing)} on {place[0]}; freeze them over this command, or leave --costs "
                "out"
            )
        rows = [prices[key] for key in asked]
        families = self.families.get(place, ())
        if any(row.families != families for row in rows):
            families = tuple(dict.fromkeys(name for row in rows for name in row.families))
        index = {name: i for i, name in enumerate(families)}
        return Estimate(
            mean_s=np.array([row.mean_s for row in rows], dtype=np.float64),
            family=np.array([index[row.families[row.family]] for row in rows], dtype=np.int64),
            families=families,
            shared_log_sd=np.array([row.shared_log_sd for row in rows], dtype=np.float64),
            own_log_sd=np.array([row.own_log_sd for row in rows], dtype=np.float64),
            provenance=np.array([row.provenance for row in rows], dtype=np.int64),
        )


def _device(device: Device) -> Place:
    return device.name, _digest(device_to_dict(device))


def _cluster(cluster: Cluster) -> Place:
    return cluster.name, _digest(cluster.to_dict())


def _digest(content: dict[str, Any]) -> str:
    content = {key: value for key, value in content.items() if key not in ("sources", "host")}
    return hashlib.sha256(dump_json(content).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Recorder:
    """Models that pass questions on and keep the answers."""

    costs: Costs
    kernels: Answers[Signature] = field(default_factory=Answers)
    collectives: Answers[Collective] = field(default_factory=Answers)


@dataclass(frozen=True, slots=True)
class RecordingCompute:
    """A ComputeModel that another one answers for."""

    recorder: Recorder
    model: ComputeModel

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        found = self.model.estimate(table, device)
        self.recorder.kernels.keep(_device(device), table.signatures, found)
        return found


@dataclass(frozen=True, slots=True)
class RecordingComm:
    """A CommModel that another one answers for."""

    recorder: Recorder
    model: CommModel

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        found = self.model.estimate(table, cluster)
        self.recorder.collectives.keep(_cluster(cluster), table.collectives, found)
        return found


@dataclass(frozen=True, slots=True)
class FrozenCompute:
    """A ComputeModel that knows what was asked before."""

    answers: Answers[Signature]

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        """Raises MismatchError, with count and the first, for kernels that were never asked."""
        return self.answers.estimate(_device(device), table.signatures, _kernels)


@dataclass(frozen=True, slots=True)
class FrozenComm:
    """A CommModel that knows what was asked before."""

    answers: Answers[Collective]

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        """Raises MismatchError, with count and the first, for collectives that were never asked."""
        return self.answers.estimate(_cluster(cluster), table.collectives, _collectives)


def _kernels(missing: Sequence[Signature]) -> str:
    first = missing[0]
    shapes = ", ".join("×".join(map(str, form.shape)) or "scalar" for form in first.inputs)
    return f"{len(missing)} kernel{'s' if len(missing) > 1 else ''}, first {base_name(first.target)} of {shapes}"


def _collectives(missing: Sequence[Collective]) -> str:
    first = missing[0]
    words = f"{first.kind} of {first.bytes} bytes among {len(first.ranks)} devices"
    return f"{len(missing)} collective{'s' if len(missing) > 1 else ''}, first {words}"


def record(costs: Costs) -> tuple[Costs, Recorder]:
    """The same costs, and a recorder of all that they are asked from now on."""
    recorder = Recorder(costs)
    recording = dataclasses.replace(
        costs,
        compute=RecordingCompute(recorder, costs.compute),
        communication=RecordingComm(recorder, costs.communication),
    )
    return recording, recorder


def save_frozen(path: Path | str, recorder: Recorder) -> None:
    """Write all answers: the same bytes for the same answers, in whatever order they were asked."""
    costs = recorder.costs
    header: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "description": costs.description.removeprefix("frozen: "),
        "numbers": {name: getattr(costs, name) for name in NUMBERS},
    }
    arrays: dict[str, Any] = {}
    _pack("kernels", recorder.kernels, signature_to_json, header, arrays)
    _pack("collectives", recorder.collectives, _collective_to_json, header, arrays)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=_bytes(dump_json(header)), **arrays)
    write_atomically(path, buffer.getvalue())


def _pack(
    what: str, answers: Answers[K], to_json: Callable[[K], Any], header: dict[str, Any], arrays: dict[str, Any]
) -> None:
    """Rows sorted by place and text; texts one per line."""
    places = sorted(answers.known)
    rows = sorted(
        (p, dump_json(to_json(key)), price)
        for p, place in enumerate(places)
        for key, price in answers.known[place].items()
    )
    sets = sorted({*(price.families for _, _, price in rows), *answers.families.values()})
    header[what] = {"on": places, "families": sets, "usual": [sets.index(answers.families[p]) for p in places]}
    arrays[f"{what}.text"] = _bytes("\n".join(text for _, text, _ in rows))
    columns = {
        "on": ([p for p, _, _ in rows], np.int32),
        "set": ([sets.index(price.families) for _, _, price in rows], np.int32),
        "family": ([price.family for _, _, price in rows], np.int32),
        "provenance": ([price.provenance for _, _, price in rows], np.int8),
        "mean_s": ([price.mean_s for _, _, price in rows], np.float64),
        "shared_log_sd": ([price.shared_log_sd for _, _, price in rows], np.float64),
        "own_log_sd": ([price.own_log_sd for _, _, price in rows], np.float64),
    }
    arrays |= {f"{what}.{name}": np.array(values, dtype=dtype) for name, (values, dtype) in columns.items()}


def _bytes(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def load_frozen(path: Path | str) -> Costs:
    """Costs from a file. Raises FormatError in one line when it is missing, corrupt, of another kind or newer."""
    again = "write it again with --freeze-costs"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays["header"].tobytes())
        kind, version = header["kind"], header["version"]
    except FileNotFoundError as error:
        raise FormatError(f"cannot read frozen costs {path}: no such file; {again}") from error
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        why = "no arrays in it" if "pickle" in str(error) else " ".join(str(error).split())  # numpy advises to load it
        raise FormatError(f"{path} is no table of frozen costs ({why}); {again}") from error
    if kind != KIND or type(version) is not int:
        raise FormatError(f"{path} is a {kind}, not a table of frozen costs; {again}")
    if version > VERSION:
        raise FormatError(f"{path} has {KIND} version {version}; this simpart reads up to {VERSION}: update simpart")
    try:
        return Costs(
            compute=FrozenCompute(_unpack("kernels", signature_from_json, header, arrays)),
            communication=FrozenComm(_unpack("collectives", _collective_from_json, header, arrays)),
            description=f"frozen: {header['description']}",
            **_numbers(header["numbers"]),
        )
    except UserError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path} is malformed ({' '.join(str(error).split())}); {again}") from error


def _unpack(what: str, from_json: Callable[[Any], K], header: Any, arrays: Any) -> Answers[K]:
    about = header[what]
    places = [(str(name), str(digest)) for name, digest in about["on"]]
    sets = [tuple(map(str, names)) for names in about["families"]]
    answers: Answers[K] = Answers(
        known={place: {} for place in places},
        families={place: sets[s] for place, s in zip(places, about["usual"], strict=True)},
    )
    text = arrays[f"{what}.text"].tobytes().decode()
    names = ("on", "set", "family", "provenance", "mean_s", "shared_log_sd", "own_log_sd")
    numbers = [arrays[f"{what}.{name}"] for name in names]
    for name, column in zip(names[4:], numbers[4:], strict=True):
        if column.dtype != np.float64 or not np.isfinite(column).all() or (column < 0).any():
            raise ValueError(f"{what}: {name} must be numbers, at least 0")
    lines = text.split("\n") if text else []
    for line, on, s, family, provenance, mean_s, shared, own in zip(lines, *(c.tolist() for c in numbers), strict=True):
        if not (0 <= on < len(places) and 0 <= family < len(sets[s]) and 0 <= provenance < len(PROVENANCES)):
            raise ValueError(f"{what}: a row refers to what is not there")
        key = from_json(json.loads(line))
        answers.known[places[on]][key] = Price(mean_s, shared, own, family, provenance, sets[s])
    return answers


def _numbers(content: Any) -> dict[str, Any]:
    for name, value in content.items():
        if name not in NUMBERS or type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be one of {', '.join(NUMBERS)} and at least 0, got {value!r}")
    return {name: float(value) for name, value in content.items()}


def _collective_to_json(collective: Collective) -> list[Any]:
    ranks = list(collective.ranks)
    return [collective.kind, collective.bytes, ranks, collective.concurrent, collective.dtype]


def _collective_from_json(content: Any) -> Collective:
    kind, size, ranks, concurrent, dtype = content
    if kind not in get_args(CollectiveKind) or not all(type(n) is int for n in (size, concurrent, *ranks)):
        raise ValueError(f"no collective: {content!r}")
    return Collective(kind, size, tuple(ranks), concurrent, str(dtype))
