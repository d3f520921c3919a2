"""The outer choices of Rhino's hierarchy: stages, mesh, micro-batches, recomputation; and a quick look at each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simpart.configure import layer_calls
from simpart.hardware import Cluster
from simpart.kernels.flops import kernel_class_flops
from simpart.kernels.ops import family_of
from simpart.plan import REPLICA_AXIS, DeviceGroup, Devices
from simpart.problem import Problem
from simpart.sharding.mesh import axis_members

__all__ = ["AXIS_NAMES", "Setting", "physical_floor_s", "settings", "slowest_row", "split_axes"]

AXIS_NAMES = ("x", "y")
"""Sharding axes, outermost first; with the replicas' axis a mesh has up to three."""
LARGEST_AXIS = 64
MOST_ALIGNMENTS = 16
"""Stages looked at for how their meshes lie in nodes."""
MOST_SIZES = 5
"""Micro-batch sizes looked at per mesh: powers of two times the smallest, so that doubling them all is one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Stages on equal meshes of consecutive devices: replicas outermost, the last sharding axis innermost."""

    stages: int
    replicas: int
    axes: tuple[tuple[str, int], ...]
    micro_batch: int
    micro_batches: int
    recompute: str

    @property
    def width(self) -> int:
        """Devices of a stage."""
        return self.replicas * self.parts

    @property
    def parts(self) -> int:
        """Devices of a replica."""
        return math.prod(size for _, size in self.axes)

    def group(self, stage: int) -> DeviceGroup:
        """The devices of a stage."""
        devices = Devices.of(range(stage * self.width, (stage + 1) * self.width))
        return DeviceGroup(devices=devices, axes=((REPLICA_AXIS, self.replicas), *self.axes))

    def slowest_group(self, cluster: Cluster) -> DeviceGroup:
        """Of the stages' devices those whose rows lie on the slowest links: meshes may straddle nodes."""
        period = math.lcm(self.width, *(lv.size for lv in cluster.levels if lv.size < cluster.size)) // self.width

        def widths(group: DeviceGroup) -> list[int]:
            axes = [name for name, size in reversed(group.axes) if size > 1]
            return [_width(cluster, slowest_row(cluster, axis_members(group, name))) for name in axes]

        groups = [self.group(s) for s in range(min(self.stages, period, MOST_ALIGNMENTS))]
        return max(groups, key=widths)

    @property
    def family(self) -> str:
        """Stages and mesh in words."""
        mesh = " × ".join([str(self.replicas), *(str(size) for _, size in self.axes)])
        return f"{self.stages} stage{'s' if self.stages > 1 else ''} on meshes of {mesh}"


def slowest_row(cluster: Cluster, rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of the rows of an axis the first that lies on the slowest link."""
    return max(rows, key=lambda row: _width(cluster, row))


def _width(cluster: Cluster, row: Sequence[int]) -> int:
    return cluster.levels.index(cluster.level_of((row[0], row[-1])))


def settings(problem: Problem) -> list[Setting]:
    """Settings with at most one sharding axis; `split_axes` makes those with two."""
    space, size = problem.space, problem.cluster.size
    layers = len(layer_calls(problem.graph)) or sum(op.carries_gradient for op in problem.graph.op_classes)
    found = []
    for stages in _divisors(size):
        if not space.min_stages <= stages <= min(space.max_stages or stages, max(1, layers)):
            continue
        width = size // stages
        for parts in _divisors(width):
            if parts > LARGEST_AXIS or not _allowed(space.tp, parts):
                continue
            if parts > 1 and problem.mode != "eager":  # split kernels are not fused yet
                continue
            found += list(_batches(problem, stages, width // parts, parts))
    return found


def split_axes(problem: Problem, setting: Setting) -> list[Setting]:
    """The same setting with its sharding axis as two."""
    (_, parts), *rest = setting.axes or (("", 1),)
    if rest:
        return []
    node = max((level.size for level in problem.cluster.levels if level.size < parts), default=1)
    across = math.gcd(node, parts)  # an axis over several nodes is split where they meet: fast links inside
    inner = [across] if across > 1 else [n for n in _divisors(parts) if 1 < n < parts]
    names = AXIS_NAMES
    return [
        Setting(
            stages=setting.stages, replicas=setting.replicas, axes=((names[0], parts // n), (names[1], n)),
            micro_batch=setting.micro_batch, micro_batches=setting.micro_batches, recompute=setting.recompute,
        )
        for n in inner
    ]  # fmt: skip


def _allowed(degrees: Sequence[int], parts: int) -> bool:
    """A space that does not name degrees allows all."""
    return tuple(degrees) == (1,) or parts in degrees


def _batches(problem: Problem, stages: int, replicas: int, parts: int) -> Iterator[Setting]:
    if problem.global_batch % replicas:
        return
    share = problem.global_batch // replicas
    sizes = [b for b in _divisors(share) if share // b <= (problem.space.max_micro_batches or share)]
    preferred = [b for b in sizes if b & (b - 1) == 0] or sizes
    if len(preferred) > MOST_SIZES:  # small ones fill pipelines, large ones kernels
        step = (len(preferred) - 1) / (MOST_SIZES - 1)
        preferred = [preferred[round(n * step)] for n in range(MOST_SIZES)]
    axes = ((AXIS_NAMES[0], parts),) if parts > 1 else ()
    for micro_batch in preferred:
        for recompute in problem.space.recompute:
            yield Setting(
                stages=stages, replicas=replicas, axes=axes, micro_batch=micro_batch,
                micro_batches=share // micro_batch, recompute=recompute,
            )  # fmt: skip


def physical_floor_s(problem: Problem) -> float:
    """Below every objective: the products of a step at the peak of all devices. Cost models predict no less.

    Attention is left out: of a causal one only half need be computed.
    """
    graph, micro_batch = problem.graph, 2
    flops = kernel_class_flops(graph, micro_batch)
    whole = np.array([family_of(kernel.target) != "attention" for kernel in graph.kernel_classes])
    per_sample = float((flops * whole)[graph.flat.kernel_class].sum()) / micro_batch
    rate = sum(count * device.peak(graph.precision) for device, count in problem.cluster.devices)
    return problem.global_batch * per_sample / rate


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [*low, *(n // d for d in reversed(low) if d * d != n)]
