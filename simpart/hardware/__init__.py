"""The hardware: devices in a fixed order, of one or several kinds, on a hierarchy of links.

A cluster of 100 000 devices is a few runs of equal devices, so everything here is cheap at any size.
Where the numbers come from (YAML files, detection of this machine) is `simpart.hardware.files`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, get_args

from simpart.errors import FormatError, UnknownNameError, UserError

__all__ = [
    "DTYPES",
    "Cluster",
    "Device",
    "Host",
    "LinkLevel",
    "device_from_dict",
    "device_to_dict",
    "list_clusters",
    "list_devices",
    "load_cluster",
    "load_device",
]

DeviceKind = Literal["gpu", "cpu"]
LinkKind = Literal["switch", "mesh", "shared"]

# Dtypes with a peak rate; where a data sheet states none, the rate of this other dtype holds, times the factor.
DTYPES: Mapping[str, tuple[str, float] | None] = {
    "float32": None,
    "float64": ("float32", 1 / 32),  # the ratio of GPUs without double-precision units
    "tf32": ("float32", 1.0),
    "bfloat16": ("float32", 1.0),  # computed in float32 where there are no units for it
    "float16": ("float32", 1.0),
    "float8": ("float16", 1.0),
    "float4": ("float8", 1.0),
    "int8": ("float16", 1.0),
}
_DEVICE_NUMBERS = ("kernel_launch_s", "price_usd_per_h", "reserved_bytes")
_POSITIVE_IF_STATED = (  # zero would mean unknown, which a data sheet says by leaving it out
    "vector_flops_per_s", "launch_floor_s", "multiprocessors", "clock_hz", "l2_bytes", "power_w"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one core, as its data sheet describes it. Peaks are dense: without structured sparsity.

    `kernel_launch_s` is the host's time from one launch to the next; `launch_floor_s` how long the smallest kernel
    takes on the device; `vector_flops_per_s` the float32 rate outside matrix units; `reserved_bytes` what driver,
    context and libraries keep; `sources` says for each number where it is from.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: tuple[tuple[str, float], ...]
    kernel_launch_s: float
    vector_flops_per_s: float | None = None
    launch_floor_s: float | None = None
    multiprocessors: int | None = None
    clock_hz: float | None = None
    l2_bytes: int | None = None
    power_w: float | None = None
    price_usd_per_h: float | None = None
    reserved_bytes: int = 0
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        rates = tuple(sorted((str(dtype), rate) for dtype, rate in self.peak_flops_per_s))
        object.__setattr__(self, "peak_flops_per_s", rates)
        object.__setattr__(self, "sources", tuple(sorted(self.sources)))
        what = f"device {self.name!r}"
        _named(what, self.name)
        if self.kind not in get_args(DeviceKind):
            raise UserError(f"{what}: kind must be gpu or cpu, got {self.kind!r}")
        for dtype, rate in rates:
            if dtype not in DTYPES:
                raise UnknownNameError("dtype of a peak rate", dtype, DTYPES)
            _positive(what, f"peak {dtype}", rate)
        if "float32" not in dict(rates):
            raise UserError(f"{what}: peak must state float32, which other dtypes fall back to")
        _positive(what, "memory_bytes", self.memory_bytes)
        _positive(what, "memory_bytes_per_s", self.memory_bytes_per_s)
        for name in _DEVICE_NUMBERS:
            _at_least_zero(what, name, getattr(self, name))
        for name in _POSITIVE_IF_STATED:
            if getattr(self, name) is not None:
                _positive(what, name, getattr(self, name))
        if self.reserved_bytes >= self.memory_bytes:
            values = f"got {self.reserved_bytes} of {self.memory_bytes}"
            raise UserError(f"{what}: reserved_bytes must be less than memory_bytes, {values}")

    @property
    def usable_bytes(self) -> int:
        """Memory that a training process may allocate."""
        return self.memory_bytes - self.reserved_bytes

    def peak(self, dtype: str) -> float:
        """Peak rate of matrix products in FLOP/s.

        Where none is stated: float4 → float8 → float16 → float32; int8 → float16; bfloat16 and tf32 → float32;
        float64 → float32 / 32; other integers and bool → float32. Takes torch's names too: `float8_e4m3fn` is float8.
        Raises UnknownNameError for any other name.
        """
        name, factor = self.peak_from(dtype)
        return dict(self.peak_flops_per_s)[name] * factor

    def peak_from(self, dtype: str) -> tuple[str, float]:
        """The dtype whose stated peak stands for this one (itself, where it is stated), and the factor to it."""
        name = dtype.removeprefix("torch.").partition("_")[0]
        if name not in DTYPES and (name == "bool" or name.startswith(("int", "uint"))):
            name = "float32"
        rates, factor = dict(self.peak_flops_per_s), 1.0
        while name not in rates:
            if name not in DTYPES:
                raise UnknownNameError("dtype", dtype, DTYPES)
            fallback = DTYPES[name]
            assert fallback is not None  # float32 is always stated
            name, factor = fallback[0], factor * fallback[1]
        return name, factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """One level of the hierarchy of links: it joins every `size` consecutive devices.

    `bytes_per_s` is what one device sends in one direction when it is alone on its link, `latency_s` the time of an
    empty message. `shared_by` devices share one link (a network card, say). `kind`: on a switch links don't disturb one
    another; a mesh has direct links between members, so that one pair gets `pair_bytes_per_s`; shared is one bus for
    all members. `inside_host` marks levels within one machine. A level with `only` joins devices of that name alone,
    counted from where their run begins: a cluster of two kinds has one NVLink level for each. `floor_s`, where somebody
    measured it, is the time of the smallest all-reduce of two members: software that no data sheet states.
    """

    name: str
    size: int
    bytes_per_s: float
    latency_s: float
    kind: LinkKind = "switch"
    shared_by: int = 1
    pair_bytes_per_s: float | None = None
    inside_host: bool = False
    only: str | None = None
    floor_s: float | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(sorted(self.sources)))
        what = f"link level {self.name!r}"
        _named(what, self.name)
        if self.only is not None:
            _named(f"{what}: only", self.only)
        if self.kind not in get_args(LinkKind):
            raise UserError(f"{what}: kind must be switch, mesh or shared, got {self.kind!r}")
        _count(what, "size", self.size)
        _count(what, "shared_by", self.shared_by)
        if self.shared_by > self.size:
            raise UserError(f"{what}: shared_by must be at most size, got {self.shared_by} of {self.size}")
        _positive(what, "bytes_per_s", self.bytes_per_s)
        _at_least_zero(what, "latency_s", self.latency_s)
        if self.floor_s is not None:
            _positive(what, "floor_s", self.floor_s)
        if self.pair_bytes_per_s is not None:
            _positive(what, "pair_bytes_per_s", self.pair_bytes_per_s)
            if self.pair_bytes_per_s > self.bytes_per_s:
                values = f"got {self.pair_bytes_per_s} over {self.bytes_per_s}"
                raise UserError(f"{what}: pair_bytes_per_s must be at most bytes_per_s, {values}")

    def share_bytes_per_s(self, active: int = 1) -> float:
        """What each device gets when `active` of the devices that share its link send at once."""
        return self.bytes_per_s / max(1, min(active, self.shared_by))

    @property
    def point_to_point_bytes_per_s(self) -> float:
        """What a message from one device to one other gets when nothing else is on the way."""
        return self.bytes_per_s if self.pair_bytes_per_s is None else self.pair_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a cluster's machines and software take of a step, where somebody measured it: from one launch to the next
    in each mode, and once per training step. What is None is not known."""

    eager_launch_s: float | None = None
    compiled_launch_s: float | None = None
    step_overhead_s: float | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(sorted(self.sources)))
        for name in ("eager_launch_s", "compiled_launch_s", "step_overhead_s"):
            _at_least_zero("host", name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in a fixed order, as runs of equal ones, and link levels from the innermost outwards, the last of which
    joins all. A plan refers to devices by their position here. `host` is what is known of the machines beside them.

    >>> cluster = load_cluster("dgx-a100:48")
    >>> cluster.size, cluster.device(17).name
    (384, 'A100-SXM-80GB')
    >>> cluster.level_between(0, 7).name, cluster.level_between(7, 8).name
    ('nvlink', 'infiniband')
    """

    name: str
    devices: tuple[tuple[Device, int], ...]
    levels: tuple[LinkLevel, ...]
    host: Host | None = None
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        runs: list[tuple[Device, int]] = []
        for device, count in self.devices:
            _count(f"cluster {self.name!r}", "count of devices", count)
            if runs and runs[-1][0] == device:
                runs[-1] = (device, runs[-1][1] + count)
            else:
                runs.append((device, count))
        object.__setattr__(self, "devices", tuple(runs))
        object.__setattr__(self, "levels", tuple(self.levels))
        object.__setattr__(self, "_ends", tuple(itertools.accumulate(count for _, count in runs)))
        self._check_levels()

    def _check_levels(self) -> None:
        what, kinds = f"cluster {self.name!r}", [device.name for device in self.kinds]
        if not kinds:
            raise UserError(f"{what}: must have at least one device")
        for level in self.levels:
            if level.only is not None and level.only not in kinds:
                raise UnknownNameError(f"device in level {level.name!r} of {what}", level.only, kinds)
        for kind in kinds:
            chain = [level for level in self.levels if level.only in (None, kind)]
            for inner, outer in itertools.pairwise(chain):
                if outer.size % inner.size and outer.size < self.size:
                    rule = f"must join a multiple of the {inner.size} devices of level {inner.name!r}"
                    raise UserError(f"{what}: level {outer.name!r} {rule}, got {outer.size}")
        last = self.levels[-1] if self.levels else None
        joined = last.size if last and (last.only is None or len(kinds) == 1) else 1
        if joined < self.size:
            raise UserError(f"{what}: the outermost level must join all {self.size} devices, got {joined}")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self._ends[-1] if self._ends else 0

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The distinct devices, in order of first appearance."""
        return tuple(dict.fromkeys(device for device, _ in self.devices))

    def device(self, position: int) -> Device:
        """The device at a position; raises UserError outside the cluster."""
        return self.devices[self._run(position)][0]

    def slice(self, start: int, stop: int) -> tuple[tuple[Device, int], ...]:
        """The devices at start, …, stop-1 as runs.

        >>> [(device.name, count) for device, count in load_cluster("a100-v100").slice(6, 10)]
        [('A100-SXM-80GB', 2), ('V100-SXM2-32GB', 2)]
        """
        if not 0 <= start < stop <= self.size:
            raise UserError(f"devices {start} to {stop} must lie in cluster {self.name!r}, which has {self.size}")
        runs, begin = [], 0
        for (device, _), end in zip(self.devices, self._ends, strict=True):
            count = min(stop, end) - max(start, begin)
            if count > 0:
                runs.append((device, count))
            begin = end
        return tuple(runs)

    def group_of(self, level: LinkLevel, position: int) -> range:
        """Positions that `level` joins with this one; empty when the level is not for this device."""
        run = self._run(position)
        if level.only is None:
            begin, end = 0, self.size
        elif level.only == self.devices[run][0].name:
            begin, end = self._ends[run] - self.devices[run][1], self._ends[run]
        else:
            return range(position, position)
        first = begin + (position - begin) // level.size * level.size
        return range(first, min(first + level.size, end))

    def level_of(self, positions: Iterable[int]) -> LinkLevel:
        """The innermost level that joins all these positions; raises UserError where there is none."""
        if isinstance(positions, range) and positions:
            low, high = sorted((positions[0], positions[-1]))
        else:
            known = list(positions)
            low, high = min(known), max(known)
        for level in self.levels:
            if high in self.group_of(level, low):
                return level
        raise UserError(f"no link of cluster {self.name!r} joins devices {low} and {high} of {self.size}")

    def level_between(self, one: int, other: int) -> LinkLevel:
        """The innermost level that joins two devices."""
        return self.level_of((one, other))

    def host_of(self, position: int) -> range:
        """Positions on the same machine. Without a level inside hosts every device is a host of its own."""
        best = range(position, position + 1)
        for level in self.levels:
            if level.inside_host:
                best = max(best, self.group_of(level, position), key=len)
        return best

    def hosts(self) -> Iterator[range]:
        """The positions of each host, in order."""
        position = 0
        while position < self.size:
            host = self.host_of(position)
            yield host
            position = host.stop

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; each distinct device once."""
        index = {device: number for number, device in enumerate(self.kinds)}
        return {
            "name": self.name,
            "devices": [_to_plain(device) for device in self.kinds],
            "order": [[index[device], count] for device, count in self.devices],
            "levels": [_to_plain(level) for level in self.levels],
            **({} if self.host is None else {"host": _to_plain(self.host)}),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Cluster:
        """Back from `to_dict`; raises FormatError for unknown or missing keys and wrong types, in one line."""
        _check_keys("cluster", data, required=("name", "devices", "order", "levels"), known=("host",))
        try:
            kinds = [device_from_dict(item) for item in data["devices"]]
            runs = tuple((kinds[number], count) for number, count in data["order"])
            levels = tuple(_from_plain(LinkLevel, "link level", item) for item in data["levels"])
            host = _from_plain(Host, "host", data["host"]) if data.get("host") is not None else None
        except (TypeError, IndexError, KeyError) as error:
            raise FormatError(f"cluster: devices, order and levels don't fit together ({error})") from error
        return cls(name=str(data["name"]), devices=runs, levels=levels, host=host)

    def _run(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise UserError(f"device {position} must lie in cluster {self.name!r}, which has {self.size} devices")
        return bisect_right(self._ends, position)


def device_to_dict(device: Device) -> dict[str, Any]:
    """Plain data for JSON."""
    return _to_plain(device)


def device_from_dict(data: Any) -> Device:
    """Back from `device_to_dict`; raises FormatError for unknown or missing keys, in one line."""
    return _from_plain(Device, "device", data)


def load_device(name: str | Path) -> Device:
    """A device by name, in any of its spellings, or from a YAML file; raises UserError in one line.

    >>> load_device("a100").memory_bytes_per_s
    2039000000000.0
    """
    from simpart.hardware.files import load_device as load

    return load(name)


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by name or from a YAML file, with `:N` appended for N times its nodes; `local` is this machine,
    `local:N` this machine as N processes. Raises UserError in one line."""
    from simpart.hardware.files import load_cluster as load

    return load(name)


def list_devices() -> list[str]:
    """Names of the devices that come with simpart."""
    from simpart.hardware.files import list_devices as names

    return names()


def list_clusters() -> list[str]:
    """Names of the clusters that come with simpart, `local` among them."""
    from simpart.hardware.files import list_clusters as names

    return names()


_T = TypeVar("_T", Device, LinkLevel, Host)


def _to_plain(thing: Device | LinkLevel | Host) -> dict[str, Any]:
    plain = {}
    for spec in dataclasses.fields(thing):
        value = getattr(thing, spec.name)
        if value is not None:
            plain[spec.name] = dict(value) if isinstance(value, tuple) else value
    return plain


def _from_plain(cls: type[_T], what: str, data: Any) -> _T:
    specs = dataclasses.fields(cls)
    required = [spec.name for spec in specs if spec.default is dataclasses.MISSING]
    _check_keys(what, data, required=required, known=[spec.name for spec in specs])
    values = dict(data)
    for key in {"peak_flops_per_s", "sources"} & set(values):
        if not isinstance(values[key], dict):
            raise FormatError(f"{what}: {key} must be a mapping, got {values[key]!r}")
        values[key] = tuple(values[key].items())
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise FormatError(f"{what}: {error}") from error


def _check_keys(what: str, data: Any, *, required: Iterable[str], known: Iterable[str]) -> None:
    if not isinstance(data, dict):
        raise FormatError(f"{what} must be a mapping, got {type(data).__name__}")
    names = [*required, *known]
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise FormatError(f"{what}: unknown key {key!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    for key in required:
        if key not in data:
            raise FormatError(f"{what}: key {key!r} is missing")


def _named(what: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise UserError(f"{what}: a name must be text, got {name!r}")


def _positive(what: str, name: str, value: object) -> None:
    if not _is_number(value) or not value > 0:
        raise UserError(f"{what}: {name} must be positive, got {value!r}")


def _at_least_zero(what: str, name: str, value: object) -> None:
    if value is not None and (not _is_number(value) or not value >= 0):
        raise UserError(f"{what}: {name} must be at least 0, got {value!r}")


def _count(what: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{what}: {name} must be a whole number, at least 1, got {value!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
