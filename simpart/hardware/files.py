"""Devices and clusters from YAML files and by name. Plain data only; every number with its unit and its source.

A fault is one line: file, key, rule. The form of the files: any of those in `hardware_profiles`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.hardware import DTYPES, Cluster, Device, Host, LinkLevel
from simpart.hardware.quantity import format_quantity, parse_quantity

__all__ = ["list_clusters", "list_devices", "load_cluster", "load_device", "read_hardware"]

VERSION = 1
_LARGEST_FILE_BYTES = 1_000_000
_HEAD = ("kind", "version", "name", "aliases")
_QUANTITIES = {  # key of a device file: (field, unit)
    "memory": ("memory_bytes", "B"),
    "memory_bandwidth": ("memory_bytes_per_s", "B/s"),
    "vector": ("vector_flops_per_s", "FLOP/s"),
    "kernel_launch": ("kernel_launch_s", "s"),
    "launch_floor": ("launch_floor_s", "s"),
    "clock": ("clock_hz", "Hz"),
    "l2": ("l2_bytes", "B"),
    "power": ("power_w", "W"),
    "price": ("price_usd_per_h", "USD/h"),
    "reserved": ("reserved_bytes", "B"),
}
_OPTIONAL_POSITIVE = ("vector", "launch_floor", "clock", "l2", "power")
_BELIEVABLE = {  # unit: (least, most) of one device; what lies outside is a mistake in the unit
    "B": (2.0**20, 2.0**50), "B/s": (1e8, 1e16), "FLOP/s": (1e8, 1e19), "s": (0.0, 1.0), "Hz": (1e7, 1e11),
    "W": (0.1, 1e5), "USD/h": (0.0, 1e5),
}  # fmt: skip
_SMALLER = {"l2": 2.0**10, "reserved": 0.0}
_MOST_MULTIPROCESSORS = 1_000_000
_HOST = {
    "eager_launch": "eager_launch_s", "compiled_launch": "compiled_launch_s", "step_overhead": "step_overhead_s"
}  # fmt: skip
_HOST_BELOW_S = {"eager_launch": 0.01, "compiled_launch": 0.01, "step_overhead": 600.0}
_DEVICE_REQUIRED = ("name", "type", "memory", "memory_bandwidth", "peak", "kernel_launch", "source")
_LEVEL_REQUIRED = ("name", "joins", "bandwidth", "latency", "source")
_LEVEL_OTHER = ("type", "shared_by", "pair_bandwidth", "inside_host", "only", "floor")


def load_device(name: str | Path) -> Device:
    """A device by name in any spelling, or from a file."""
    return _device(_open(name, "device"))


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by name or from a file, with `:N` for N times its nodes; `local` is this machine."""
    base, nodes = _split_nodes(str(name))
    if base.casefold() == "local":
        detect: Cluster = importlib.import_module("simpart.hardware_profiles._detect").detect_local(nodes)
        return detect
    return _cluster(_open(base, "cluster"), nodes or 1)


def read_hardware(path: str | Path) -> Device | Cluster:
    """What a file describes, whichever it is; raises UserError in one line."""
    head = _read(Path(path))
    return _device(head) if head.values["kind"] == "device" else _cluster(head, 1)


def list_devices() -> list[str]:
    """Names of the shipped devices."""
    return sorted(str(head.values["name"]) for head in _shipped("device"))


def list_clusters() -> list[str]:
    """Names of the shipped clusters and `local`."""
    return sorted([*(str(head.values["name"]) for head in _shipped("cluster")), "local"])


# --- finding ------------------------------------------------------------------------------------------------------


def _open(name: str | Path, kind: str) -> _Section:
    """The file for a name or path, checked to be of this kind."""
    text = str(name)
    if isinstance(name, Path) or text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text:
        head = _read(Path(text))
        if head.values["kind"] != kind:
            raise FormatError(f"{head.file}: is a {head.values['kind']}, not a {kind}")
        return head
    found = _by_name(text, kind)
    if found is not None:
        return found
    other = "device" if kind == "cluster" else "cluster"
    known = list_devices() if kind == "device" else list_clusters()
    if text.casefold() == "local" or _by_name(text, other) is not None:
        raise UserError(f"{text!r} is a {other}, not a {kind}; known {kind}s: {', '.join(known)}")
    raise UnknownNameError(kind, text, known)


def _by_name(name: str, kind: str) -> _Section | None:
    return next((head for head in _shipped(kind) if _plain(name) in map(_plain, _spellings(head))), None)


def _spellings(head: _Section) -> Iterator[str]:
    yield head.values["name"]
    yield from map(str, head.values.get("aliases") or ())


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-").replace(" ", "-")


def _shipped(kind: str) -> Iterator[_Section]:
    folder = importlib.resources.files("simpart.hardware_profiles") / f"{kind}s"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            yield _read(Path(str(entry)))


def _split_nodes(text: str) -> tuple[str, int | None]:
    """`dgx-a100:48` is ('dgx-a100', 48); without a number of nodes None."""
    base, colon, nodes = text.rpartition(":")
    if not colon or "/" in nodes or "\\" in nodes:
        return text, None
    if not re.fullmatch("[0-9]{1,5}", nodes) or int(nodes) < 1:
        raise UserError(
            f"cluster {text!r}: the number of nodes after ':' must be a whole number from 1 to 99999, got {nodes!r}"
        )
    return base, int(nodes)


# --- reading ------------------------------------------------------------------------------------------------------


def _read(path: Path) -> _Section:
    """The mapping in a file, with kind, version, name and aliases checked."""
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise FormatError(f"{path}: is larger than {_LARGEST_FILE_BYTES} bytes; not a device or cluster file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 text; expected the YAML of a device or a cluster") from error
    content = _parse(path, text)
    if content is None:
        raise FormatError(f"{path}: is empty; expected the YAML of a device or a cluster")
    if not isinstance(content, dict) or content.get("kind") not in ("device", "cluster"):
        kind = f"kind {content['kind']!r}" if isinstance(content, dict) and "kind" in content else "no kind"
        raise FormatError(f"{path}: has {kind}; expected a mapping with 'kind: device' or 'kind: cluster'")
    head = _Section(file=str(path), path="", values=content)
    if head.whole("version") > VERSION:
        raise FormatError(f"{path}: version {content['version']} is newer than {VERSION}; update simpart")
    head.text("name")
    aliases = content.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        head.fault("aliases", f"must be a list of names, got {aliases!r}")
    return head


def _parse(path: Path, text: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        _refuse_duplicates(path, node)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise FormatError(
            f"{path}: {line}not valid YAML, or truncated: {' '.join(str(error.problem).split())}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise FormatError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise FormatError(f"{path}: nested too deeply for a device or cluster file") from error
    finally:
        loader.dispose()


def _refuse_duplicates(path: Path, root: yaml.Node | None) -> None:
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                if key.value in keys and isinstance(key, yaml.ScalarNode):
                    raise UserError(f"{path}: line {key.start_mark.line + 1}: key {key.value!r} is given twice")
                keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
                todo.append(value)
        elif isinstance(node, yaml.SequenceNode):
            todo.extend(node.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """A mapping of a file and where it stands, to read values out of with the errors a user can act on."""

    file: str
    path: str
    values: dict[Any, Any]

    def fault(self, key: str, rule: str) -> NoReturn:
        raise UserError(f"{self.file}: {self.path}{key}: {rule}")

    def keys(self, required: Iterable[str], other: Iterable[str] = ()) -> None:
        required = list(required)
        known = list(dict.fromkeys([*required, *other]))
        for key in self.values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                self.fault(str(key), f"unknown key; {hint}")
        for key in required:
            if self.values.get(key) is None:
                self.fault(key, "missing")

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            self.fault(key, f"must be text, got {value!r}" if key in self.values else "missing")
        return " ".join(value.split())

    def choice(self, key: str, among: Iterable[str], default: str | None = None) -> str:
        if default is not None and key not in self.values:
            return default
        value = self.text(key)
        if value not in among:
            self.fault(key, f"must be one of {', '.join(among)}, got {value!r}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fault(key, f"must be a whole number, at least 1, got {value!r}" if key in self.values else "missing")
        return value

    def quantity(self, key: str, unit: str, *, positive: bool = False) -> float:
        try:
            value = parse_quantity(self.values[key], unit)
        except UserError as error:
            self.fault(key, str(error))
        if positive and value == 0:
            self.fault(key, f"must be positive, got {self.values[key]!r}")
        return value

    def section(self, key: str) -> _Section:
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.fault(key, f"must be a mapping, got {value!r}" if key in self.values else "missing")
        return _Section(file=self.file, path=f"{self.path}{key}.", values=value)

    def sections(self, key: str) -> list[_Section]:
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            self.fault(key, f"must be a list of mappings, got {value!r}")
        return [_Section(file=self.file, path=f"{self.path}{key}[{i}].", values=item) for i, item in enumerate(value)]

    def sources(self, numbers: Iterable[str]) -> dict[str, str]:
        """The source of each of these keys that the section has."""
        present = [key for key in numbers if key in self.values]
        if not isinstance(self.values.get("source"), dict):
            self.fault("source", "must be a mapping that says where each number is from")
        source = self.section("source")
        for key in source.values:
            if key not in present:
                source.fault(str(key), "is the source of a number that is not there")
        for key in present:
            if key not in source.values:
                self.fault(key, f"has no source; add source.{key}: the data sheet's name, or 'assumption: …'")
        return {key: source.text(key) for key in present}


# --- meaning ------------------------------------------------------------------------------------------------------


def _device(head: _Section) -> Device:
    head.keys(("kind", "version", *_DEVICE_REQUIRED), ("aliases", "multiprocessors", *_QUANTITIES))
    values: dict[str, Any] = {}
    for key, (name, unit) in _QUANTITIES.items():
        if key in head.values:
            values[name] = _believable(head, key, unit)
    if "multiprocessors" in head.values:
        values["multiprocessors"] = head.whole("multiprocessors")
        if values["multiprocessors"] > _MOST_MULTIPROCESSORS:
            head.fault("multiprocessors", f"must be at most {_MOST_MULTIPROCESSORS}, got {values['multiprocessors']}")
    peak = head.section("peak")
    peak.keys(("float32",), DTYPES)
    values["peak_flops_per_s"] = tuple((dtype, _believable(peak, dtype, "FLOP/s")) for dtype in peak.values)
    kind: Any = head.choice("type", ("gpu", "cpu"))
    sources = head.sources(("peak", "multiprocessors", *_QUANTITIES))
    try:
        return Device(name=head.text("name"), kind=kind, sources=tuple(sources.items()), **values)
    except UserError as error:
        raise UserError(f"{head.file}: {error}") from error


def _believable(section: _Section, key: str, unit: str) -> float:
    """A number of one device, refused where no device can have it."""
    optional = key in _OPTIONAL_POSITIVE
    required = key in ("memory", "memory_bandwidth") or unit == "FLOP/s"
    value = section.quantity(key, unit, positive=required and not optional)
    if value == 0 and optional:
        section.fault(key, f"must be positive, got {section.values[key]!r}; leave out what is not known")
    least, most = _BELIEVABLE[unit]
    least = _SMALLER.get(key, least)
    if not least <= value <= most:
        between = f"{format_quantity(least, unit, digits=3)} and {format_quantity(most, unit, digits=3)}"
        section.fault(key, f"must lie between {between}, got {section.values[key]!r}; look at the unit")
    return int(value) if unit == "B" else value


def _cluster(head: _Section, nodes: int) -> Cluster:
    head.keys((*_HEAD[:3], "nodes", "levels"), ("aliases", "host"))
    runs = []
    for node in head.sections("nodes"):
        node.keys(("device", "count"))
        runs.append((_device_of(node), node.whole("count")))
    total = nodes * sum(count for _, count in runs)
    levels = []
    for section in head.sections("levels"):
        level = _level(section, total)
        for device, count in runs:
            if level.inside_host and level.only in (None, device.name):
                whole = nodes * len(runs) == 1 and level.size == count
                if not whole and (count % level.size or section.values["joins"] == "all"):
                    section.fault(
                        "joins", f"{level.size} devices inside a host contradict a node of {count} {device.name}"
                    )
        levels.append(level)
    name = head.text("name") if nodes == 1 else f"{head.text('name')}:{nodes}"
    host = _host(head)
    try:
        return Cluster(name=name, devices=tuple(runs * nodes), levels=tuple(levels), host=host)
    except UserError as error:
        raise UserError(f"{head.file}: {error}") from error


def _host(head: _Section) -> Host | None:
    """What a cluster file says of its machines, if it does."""
    if "host" not in head.values:
        return None
    section = head.section("host")
    section.keys((), (*_HOST, "source"))
    numbers = {name: section.quantity(key, "s") for key, name in _HOST.items() if key in section.values}
    for key, name in _HOST.items():
        if not numbers.get(name, 0.0) < (most := _HOST_BELOW_S[key]):
            below = format_quantity(most, "s")
            section.fault(key, f"must be below {below}, got {section.values[key]!r}; launches are per kernel")
    if not numbers:
        head.fault("host", f"must state at least one of {', '.join(_HOST)}")
    return Host(**numbers, sources=tuple(section.sources(_HOST).items()))


def _device_of(node: _Section) -> Device:
    """By name, or from a file beside the cluster's."""
    name = node.text("device")
    try:
        return load_device(Path(node.file).parent / name if name.endswith((".yaml", ".yml")) else name)
    except UnknownNameError as error:
        node.fault("device", str(error))


def _level(section: _Section, total: int) -> LinkLevel:
    section.keys(_LEVEL_REQUIRED, _LEVEL_OTHER)
    if not isinstance(section.values.get("inside_host", False), bool):
        section.fault("inside_host", f"must be true or false, got {section.values['inside_host']!r}")
    kind: Any = section.choice("type", ("switch", "mesh", "shared"), "switch")
    size = total if section.values["joins"] == "all" else section.whole("joins")
    pair = section.quantity("pair_bandwidth", "B/s", positive=True) if "pair_bandwidth" in section.values else None
    try:
        return LinkLevel(
            name=section.text("name"),
            size=size,
            bytes_per_s=section.quantity("bandwidth", "B/s", positive=True),
            latency_s=section.quantity("latency", "s"),
            kind=kind,
            shared_by=section.whole("shared_by", size if kind == "shared" else 1),
            pair_bytes_per_s=pair,
            inside_host=section.values.get("inside_host", False),
            only=section.text("only") if "only" in section.values else None,
            floor_s=section.quantity("floor", "s", positive=True) if "floor" in section.values else None,
            sources=tuple(section.sources(("bandwidth", "pair_bandwidth", "latency", "floor")).items()),
        )
    except UserError as error:
        raise error if str(error).startswith(section.file) else UserError(f"{section.file}: {error}") from error
