"""The profile store: measurements as JSON lines, one line each, only ever appended.

A line is on disk (fsync) before the next measurement begins, so a killed process loses at most the line it was writing;
readers skip such a torn line and the next writer cuts it off. Reading never executes code.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from simpart.cost import CollectiveKind, Signature, TensorForm
from simpart.errors import FormatError, UserError
from simpart.files import dump_json
from simpart.hardware_profiles._environment import Environment

__all__ = [
    "KernelRecord", "LinkRecord", "OverheadRecord", "Profiles", "Record", "Samples", "Store", "signature_from_json",
    "signature_to_json",
]  # fmt: skip

KIND, VERSION = "simpart-profiles", 1
_FILE = "profiles.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Summary of repeated timings in seconds."""

    count: int
    minimum_s: float
    lower_s: float
    median_s: float
    upper_s: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Samples:
        """Quartiles of at least one timing."""
        ordered = sorted(seconds)

        def at(share: float) -> float:
            place = share * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (place - low) * (ordered[high] - ordered[low])

        return Samples(count=len(ordered), minimum_s=ordered[0], lower_s=at(0.25), median_s=at(0.5), upper_s=at(0.75))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """Seconds of one kernel, or of one optimizer update or gradient accumulation of one tensor."""

    signature: Signature
    samples: Samples
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    """Seconds of one collective among `ranks` processes; `busy` says that other work ran on their cores."""

    kind: CollectiveKind
    bytes: int
    ranks: int
    busy: bool
    samples: Samples
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadRecord:
    """Seconds that a real step takes beyond its kernels, by name: `kernel` per kernel that is not a view, `action` per
    pipeline action, `step` per training step."""

    name: str
    samples: Samples
    environment: Environment


Record = KernelRecord | LinkRecord | OverheadRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """All records of a store, in the order they were written."""

    kernels: tuple[KernelRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    overheads: tuple[OverheadRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Store:
    """A folder with one file of measurements. Safe for several writers at once."""

    folder: Path
    _known: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @staticmethod
    def at(folder: Path | str | None = None) -> Store:
        """The store in `folder`, else in SIMPART_STORE, else in the user's data folder."""
        chosen = folder or os.environ.get("SIMPART_STORE") or platformdirs.user_data_dir("simpart", appauthor=False)
        return Store(Path(chosen))

    @property
    def path(self) -> Path:
        return self.folder / _FILE

    def read(self) -> Profiles:
        """All of the store; an absent one is empty. Raises FormatError for another kind of file or a newer one."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return Profiles()
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror or error}; give another --store") from error
        return _parse(raw, self.path)

    def append(self, records: Iterable[Record]) -> None:
        """Write records and wait until they are on disk. Raises UserError when the place cannot be written."""
        records = list(records)
        if not records:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file, _locked(file):
                size = _repair(file, self.path)
                lines = [] if size else [dump_json({"kind": KIND, "version": VERSION})]
                for record in records:
                    environment = record.environment
                    if environment.fingerprint not in self._known:
                        lines.append(dump_json({"environment": asdict(environment), "id": environment.fingerprint}))
                    lines.append(dump_json(_to_json(record)))
                    self._known.add(environment.fingerprint)
                file.write("".join(f"{line}\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._known.clear()
            raise UserError(f"cannot write {self.path}: {error.strerror or error}; give another --store") from error


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not on Windows: there one writer at a time is the user's care
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _repair(file: BinaryIO, path: Path) -> int:
    """Cut off a line that a killed writer left unfinished; the size of what stands."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(0)
    _check_header(file.readline(), path)
    position = size
    while position:
        step = min(position, 65536)
        file.seek(position - step)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            position = position - step + found + 1
            break
        position -= step
    if position < size:
        file.truncate(position)
    file.seek(0, os.SEEK_END)
    return position


def _check_header(line: bytes, path: Path) -> None:
    """Raises FormatError unless this is the first line of a store that this version reads, or the start of it."""
    if not line.endswith(b"\n"):
        if dump_json({"kind": KIND, "version": VERSION}).encode().startswith(line):
            return
        raise FormatError(f"{path} is something else, not {KIND}; give another --store")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise FormatError(f"{path} is something else, not {KIND}; give another --store")
    found = header.get("version")
    if not isinstance(found, int) or found > VERSION:
        raise FormatError(f"{path} has version {found}; this simpart reads up to {VERSION}: update simpart")


def _parse(raw: bytes, path: Path) -> Profiles:
    if not raw:
        return Profiles()
    lines = raw.split(b"\n")
    complete = lines[:-1]  # what stands behind the last line end is torn, or empty
    _check_header(lines[0] + (b"\n" if complete else b""), path)
    environments: dict[str, Environment] = {}
    found: dict[type, list[Any]] = {KernelRecord: [], LinkRecord: [], OverheadRecord: []}
    signatures: dict[Signature, Signature] = {}
    for number, line in enumerate(complete[1:], start=2):
        try:
            content = json.loads(line)
            if "id" in content:
                environments[content["id"]] = Environment(**content["environment"])
                continue
            record = _from_json(content, environments, lambda s: signatures.setdefault(s, s))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FormatError(f"{path}, line {number}: not a profile record ({error}); remove the line") from error
        found[type(record)].append(record)
    return Profiles(
        kernels=tuple(found[KernelRecord]), links=tuple(found[LinkRecord]), overheads=tuple(found[OverheadRecord])
    )


# --- records as JSON -------------------------------------------------------------------------------------------------
def _to_json(record: Record) -> dict[str, Any]:
    s = record.samples
    tail = {"in": record.environment.fingerprint, "s": [s.count, s.minimum_s, s.lower_s, s.median_s, s.upper_s]}
    if isinstance(record, KernelRecord):
        return {"kernel": signature_to_json(record.signature), **tail}
    if isinstance(record, LinkRecord):
        return {"link": [record.kind, record.bytes, record.ranks, record.busy], **tail}
    return {"overhead": record.name, **tail}


def _from_json(
    content: Mapping[str, Any], environments: Mapping[str, Environment], same: Callable[[Signature], Signature]
) -> Record:
    count, *seconds = content["s"]
    minimum, lower, median, upper = map(float, seconds)
    samples = Samples(count=int(count), minimum_s=minimum, lower_s=lower, median_s=median, upper_s=upper)
    environment = environments[content["in"]]
    if "kernel" in content:
        signature = same(signature_from_json(content["kernel"]))
        return KernelRecord(signature=signature, samples=samples, environment=environment)
    if "link" in content:
        kind, size, ranks, busy = content["link"]
        return LinkRecord(
            kind=kind, bytes=int(size), ranks=int(ranks), busy=bool(busy), samples=samples, environment=environment
        )
    return OverheadRecord(name=str(content["overhead"]), samples=samples, environment=environment)


def signature_to_json(signature: Signature) -> list[Any]:
    """`[target, inputs, outputs, arguments, mode, view, members]`; a tensor is `[shape, dtype(, order, strides)]`."""
    return [
        signature.target,
        [_form_to_json(form) for form in signature.inputs],
        [_form_to_json(form) for form in signature.outputs],
        signature.arguments,
        signature.mode,
        signature.view,
        [signature_to_json(member) for member in signature.members],
    ]


def signature_from_json(content: Any) -> Signature:
    target, inputs, outputs, arguments, mode, view, members = content
    return Signature(
        target=target,
        inputs=tuple(map(_form_from_json, inputs)),
        outputs=tuple(map(_form_from_json, outputs)),
        arguments=arguments,
        mode=mode,
        view=bool(view),
        members=tuple(map(signature_from_json, members)),
    )


def _form_to_json(form: TensorForm) -> list[Any]:
    if form.strides is None and form.order == tuple(range(len(form.shape))):
        return [form.shape, form.dtype]
    return [form.shape, form.dtype, form.order, form.strides]


def _form_from_json(content: Any) -> TensorForm:
    shape = tuple(content[0])
    if len(content) == 2:
        return TensorForm(shape, content[1], tuple(range(len(shape))))
    order, strides = (None if item is None else tuple(item) for item in content[2:])
    return TensorForm(shape, content[1], order, strides)
