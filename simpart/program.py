"""What is simulated: tasks as arrays, apart from how long they take and what memory they hold.

A `Topology` depends only on the plan's shape (stages, schedule, micro-batches) and is shared by many plans;
`Durations` and `MemoryDeltas` are per class of task, so that a plan is a few numbers per stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

__all__ = [
    "MEMORY_KINDS",
    "Durations",
    "Flows",
    "MemoryDeltas",
    "Program",
    "Spread",
    "StepFacts",
    "TaskKind",
    "Topology",
    "streams_of",
]

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class TaskKind(IntEnum):
    """What a task does."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND = 4  # a point-to-point transfer
    REDUCE = 5  # a gradient collective
    OPTIMIZER = 6
    COLLECTIVE = 7  # another collective, of the fine grain


MEMORY_KINDS = (
    "parameters", "gradients", "optimizer state", "activations", "stage inputs", "transients", "communication buffers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Topology:
    """Tasks 0 … n-1 and their order. Task i starts when all `predecessors` have ended (each plus its lag) and the task
    before it on its `resource` has ended; resource -1 is no resource (a pure delay).

    `order` is one topological order of both relations; `resource_order[resource_indptr[r]:resource_indptr[r+1]]` is the
    static order on resource r. `lag` holds, per predecessor edge, a lag class or -1. Resources 0 … groups-1 are the
    device groups (one row per class of ranks that behave alike), in the fine grain their compute streams; streams of
    communication (`stream 2 tp`: of group 2 on axis tp) and links (`link 2>3`) follow. With `parts`, an action may be
    several tasks of its kind, one after the other.
    """

    resource: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints
    task_class: Ints
    indptr: Ints
    predecessors: Ints
    lag: Ints
    order: Ints
    resource_indptr: Ints
    resource_order: Ints
    resource_names: tuple[str, ...]
    groups: int
    class_names: tuple[str, ...]
    parts: bool = False

    @property
    def size(self) -> int:
        return len(self.resource)


def streams_of(topology: Topology, group: int) -> list[int]:
    """Resources of a group: its row, which is its compute stream, and its streams of communication."""
    streams = [r for r, name in enumerate(topology.resource_names) if name.startswith(f"stream {group} ")]
    return [group, *streams]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds per task class and per lag class."""

    task_s: Floats
    lag_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDeltas:
    """Bytes per device (the largest device of a group). `static[g, k]` is held throughout by group g, `late[g, k]` from
    the end of its first backward on; a task adds `start[c, k]` when it starts and `end[c, k]` (usually negative) when
    it ends, and holds `within[c, k]` besides while it runs. Columns are `MEMORY_KINDS`."""

    static: Table
    late: Table
    start: Table
    end: Table
    within: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What the durations of task classes consist of, and how sure each part is.

    `by_factor[c, f]` are the seconds of class c that share latent factor f, a (device, family) named in `factors`:
    their logs err together with spread `shared_log_sd[f]`. Besides, class c errs by `own_log_sd[c]`, together with the
    classes of equal `own_source`, named in `sources`. `by_provenance[c, p]` splits the same seconds by
    `cost.PROVENANCES`; what is fixed (overheads) is in neither.
    """

    factors: tuple[str, ...]
    shared_log_sd: Floats
    by_factor: Table
    own_log_sd: Floats
    own_source: Ints
    sources: tuple[str, ...]
    by_provenance: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step achieves and what it may use. `inside` has the seconds per task class of collectives within
    actions, by axis; in the fine grain `class_axes` has the axis of classes that are collectives ("" of others);
    `class_overhead_s` is what the host takes within each class. `stages_of_group` are stage numbers, `devices` places
    in the cluster; the three rows of bytes and factors are per group: of the
    device with the least room. Device bytes are allocated × `allocator_factor` + `reserved_bytes`."""

    samples: int
    tokens: int
    model_flops: float
    peak_flops_per_s: float
    overhead_s: float
    step_log_sd: float
    reduction_axes: tuple[str, ...]
    inside: tuple[tuple[str, Floats], ...]
    stages_of_group: tuple[tuple[int, ...], ...]
    devices: tuple[tuple[int, ...], ...]
    device_names: tuple[str, ...]
    capacity_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    allocator_factor: tuple[float, ...]
    class_overhead_s: Floats
    class_axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """What one task of each class moves over each physical link, and what a link carries."""

    links: tuple[str, ...]
    bytes_per_s: Floats
    bytes_by_class: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One plan lowered. `multiplicity[g]` ranks behave like group g's row (and its streams)."""

    topology: Topology
    durations: Durations
    memory: MemoryDeltas
    multiplicity: tuple[int, ...]
    spread: Spread | None = None
    facts: StepFacts | None = None
    flows: Flows | None = None
    grain: Literal["coarse", "fine"] = "coarse"
