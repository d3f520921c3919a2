"""What runs where and when, never how fast: device groups, stages, schedule, batch, shardings, state at rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from simpart.errors import FormatError, UserError
from simpart.graph import Graph, Source
from simpart.placement import Sharding, StatePlacement
from simpart.schedule import SCHEDULES, Schedule

__all__ = ["Batch", "DeviceGroup", "Devices", "OpSet", "Plan", "Stage", "check_shape", "kernel_ids"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
REPLICA_AXIS = "dp"
"""The mesh axis along which a group holds replicas: each runs its own program on its own share of the micro-batch. All
other axes split kernels, by strategies."""
MAX_DEVICES = 10_000_000
"""More than any cluster: a slip of the pen in a file must not fill the memory."""


MAX_ACTIONS = 2**24
"""Micro-batches times stages; likewise."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Positions in the cluster's device order as (start, stop, step) runs; written `0:8` or `0:8,16:24:2`.

    >>> list(Devices.of([0, 1, 2, 3, 8, 10])), str(Devices.of([0, 1, 2, 3, 8, 10]))
    ([0, 1, 2, 3, 8, 10], '0:4,8:12:2')
    """

    runs: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(positions: Iterable[int]) -> Devices:
        runs: list[tuple[int, int, int]] = []
        for p in positions:
            if runs:
                start, stop, step = runs[-1]
                if stop - start <= step and p > start:  # a run of one takes any step
                    runs[-1] = (start, p + (p - start), p - start)
                    continue
                if p == stop:
                    runs[-1] = (start, stop + step, step)
                    continue
            runs.append((p, p + 1, 1))
        return Devices(tuple(runs))

    @staticmethod
    def from_text(text: str) -> Devices:
        runs = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d+):(\d+)(?::(\d+))?", part.strip(), re.ASCII)
            start, stop, step = (int(digits or 1) for digits in match.groups()) if match else (0, 0, 1)
            if not start < stop <= MAX_DEVICES or step < 1:
                raise FormatError(f"devices are written 0:8 or 0:8,16:24:2, up to {MAX_DEVICES}, got {text!r}")
            runs.append((start, stop, step))
        return Devices(tuple(runs))

    def __str__(self) -> str:
        return ",".join(f"{a}:{b}" if step == 1 else f"{a}:{b}:{step}" for a, b, step in self.runs)

    def __len__(self) -> int:
        return sum(len(range(*run)) for run in self.runs)

    def __iter__(self) -> Iterator[int]:
        for run in self.runs:
            yield from range(*run)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices as a mesh: `axes` name and size the dims, outermost first; device k of the list has mesh index k in
    row-major order."""

    devices: Devices
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def replicas(self) -> int:
        return dict(self.axes).get(REPLICA_AXIS, 1)

    @property
    def sharding_axes(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, size) for name, size in self.axes if name != REPLICA_AXIS)

    def replica_devices(self, replica: int) -> tuple[int, ...]:
        """Devices that together run one replica."""
        devices = np.array(list(self.devices)).reshape([size for _, size in self.axes] or [1])
        names = [name for name, _ in self.axes]
        if REPLICA_AXIS in names:
            devices = np.take(devices, replica, axis=names.index(REPLICA_AXIS))
        return tuple(int(d) for d in devices.ravel())


@dataclass(frozen=True, slots=True)
class OpSet:
    """Ops as runs (first id, last id) in the Graph's order; deep models compress to a run per stage."""

    runs: tuple[tuple[str, str], ...]

    @staticmethod
    def of(graph: Graph, indices: Iterable[int]) -> OpSet:
        ids = graph.op_ids
        sorted_indices = np.unique(np.fromiter(indices, dtype=np.int64))
        breaks = np.flatnonzero(np.diff(sorted_indices) != 1) + 1
        return OpSet(tuple((ids[run[0]], ids[run[-1]]) for run in np.split(sorted_indices, breaks) if run.size))

    def indices(self, graph: Graph) -> Ints:
        """Sorted op indices; raises UnknownNameError for an id the graph lacks."""
        parts = [np.arange(graph.find(first), graph.find(last) + 1) for first, last in self.runs]
        if any(part.size == 0 for part in parts):
            raise UserError("a run of ops ends before it begins; write (first id, last id) in the graph's order")
        return parts[0] if len(parts) == 1 else np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Ops on a device group. `recompute` lists regions whose inner activations are dropped after forward and made
    again in backward. Several stages on one group are virtual stages. `sharding` names an entry of the plan's
    shardings."""

    ops: OpSet
    group: int
    recompute: tuple[OpSet, ...] = ()
    sharding: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`micro_batches` per step, each of `sum(sizes[g])` samples; `sizes[g][r]` of them go to replica r of group g."""

    micro_batches: int
    sizes: tuple[tuple[int, ...], ...]

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch over all replicas."""
        return sum(self.sizes[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run a training step. Hashable; carries the fingerprint of the Graph its op ids belong to.

    Stages are in topological order. Ops that may be cloned (see `simpart.plan.partition`) may be left out of every
    stage: they run wherever they are needed. `skips` says whether a value used by a later than the next stage is sent
    there directly or relayed by those between. `state` goes by patterns of parameter names (`*` matches any run); the
    first that matches holds.
    """

    graph: str
    groups: tuple[DeviceGroup, ...]
    stages: tuple[Stage, ...]
    batch: Batch
    schedule: Schedule = field(default_factory=Schedule)
    skips: Literal["send", "relay"] = "send"
    shardings: tuple[tuple[str, Sharding], ...] = ()
    state: tuple[tuple[str, StatePlacement], ...] = ()
    mode: Literal["eager", "compiled"] = "eager"

    @property
    def group_of_stage(self) -> tuple[int, ...]:
        return tuple(stage.group for stage in self.stages)

    @property
    def global_batch(self) -> int:
        return self.batch.micro_batches * self.batch.micro_batch

    @property
    def device_count(self) -> int:
        return sum(len(group.devices) for group in self.groups)

    def state_of(self, parameter: Source) -> tuple[str | None, StatePlacement]:
        """The first pattern that a parameter matches, by any of its names, and how its state rests; none:
        replicated."""
        for pattern, rest in self.state:
            if any(fnmatchcase(name, pattern) for name in (parameter.name, *parameter.aliases)):
                return pattern, rest
        return None, StatePlacement()


_kernel_ids: WeakKeyDictionary[Graph, tuple[str, ...]] = WeakKeyDictionary()


def kernel_ids(graph: Graph) -> tuple[str, ...]:
    """`op id|phase|target#k` of every kernel of `graph.flat`, in its order."""
    if graph in _kernel_ids:
        return _kernel_ids[graph]
    flat, names = graph.flat, []
    seen: dict[str, int] = {}
    for op, cls in zip(flat.kernel_op.tolist(), flat.kernel_class.tolist(), strict=True):
        kernel = graph.kernel_classes[cls]
        key = f"{graph.op_ids[op]}|{kernel.phase}|{kernel.target}"
        k = seen[key] = seen.get(key, -1) + 1
        names.append(f"{key}#{k}")
    return _kernel_ids.setdefault(graph, tuple(names))


def check_shape(plan: Plan) -> None:
    """Refuse a plan that contradicts itself, whatever its graph; one line with the rule, the value and the way out."""
    if not plan.stages or not plan.groups:
        raise UserError("a plan needs at least one stage and one device group")
    for g, group in enumerate(plan.groups):
        names = [name for name, _ in group.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in group.axes):
            raise UserError(f"group {g}: axes have different names and sizes of at least 1, got {list(group.axes)}")
        if prod(size for _, size in group.axes) != len(group.devices):
            raise UserError(
                f"group {g}: axes {dict(group.axes)} do not multiply to its {len(group.devices)} devices; "
                "change the sizes or the devices"
            )
    used = [d for group in plan.groups for d in group.devices]
    if len(set(used)) != len(used):
        raise UserError("device groups must not share devices; give every device to one group")
    for g in range(len(plan.groups)):
        if g not in plan.group_of_stage:
            raise UserError(f"group {g} holds no stage; leave it out or give it one")
    if plan.batch.micro_batches < 1 or len(plan.batch.sizes) != len(plan.groups):
        raise UserError("the batch needs at least one micro-batch and replica sizes for every group")
    if plan.batch.micro_batches * len(plan.stages) > MAX_ACTIONS or plan.batch.micro_batch > MAX_DEVICES:
        raise UserError(
            f"a plan has at most {MAX_ACTIONS} micro-batches times stages and {MAX_DEVICES} samples in one, "
            f"got {plan.batch.micro_batches} micro-batches of {plan.batch.micro_batch} and {len(plan.stages)} stages; "
            "make larger or fewer micro-batches"
        )
    for g, sizes in enumerate(plan.batch.sizes):
        if len(sizes) != plan.groups[g].replicas:
            raise UserError(f"group {g} has {plan.groups[g].replicas} replicas but {len(sizes)} micro-batch sizes")
        if min(sizes) < 1 or sum(sizes) != plan.batch.micro_batch:
            raise UserError(
                f"group {g}: replica micro-batches {list(sizes)} must be at least 1 and sum to {plan.batch.micro_batch}"
            )
    shardings = {name for name, _ in plan.shardings}
    for s, stage in enumerate(plan.stages):
        if not 0 <= stage.group < len(plan.groups):
            raise UserError(f"stage {s} names group {stage.group} of {len(plan.groups)}; groups are counted from 0")
        if stage.sharding is not None and stage.sharding not in shardings:
            known = ", ".join(sorted(shardings)) or "none"
            raise UserError(f"stage {s} names sharding {stage.sharding!r}; the plan has {known}")
    if plan.schedule.kind == "explicit":
        plan.schedule.rows(plan.group_of_stage, plan.batch.micro_batches)
    elif plan.schedule.kind in SCHEDULES:
        _place(plan.schedule, plan.group_of_stage)


@lru_cache(maxsize=256)
def _place(schedule: Schedule, group_of_stage: tuple[int, ...]) -> None:
    """Raise UserError where a named schedule does not allow these stages per group."""
    schedule.rows(group_of_stage, 1)  # one micro-batch costs little
