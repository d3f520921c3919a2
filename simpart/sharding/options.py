"""Every strategy of every kernel on a mesh, with its price: what a search over shardings starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from simpart.cost import Collective, CollectiveTable, Costs, Signature, SignatureTable, TensorForm
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES
from simpart.hardware import Cluster
from simpart.placement import Partial, Replicate, Strategy
from simpart.plan import REPLICA_AXIS, DeviceGroup
from simpart.sharding.mesh import axis_members, calls_of, mesh_of
from simpart.tdl import Call, local_call, mesh_strategies

__all__ = ["Options", "options"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """`strategies[row[c] : row[c] + size[c]]` are those of kernel class c, replicating first; classes of equal calls
    share rows. `compute_s` is one device's work, `exchange_s` the all-reduces inside the kernel, `pending_s` what
    reducing its pending outputs would take (0 without any). `signatures` and `collectives` count what was priced."""

    strategies: tuple[Strategy, ...]
    row: Ints
    size: Ints
    compute_s: Floats
    exchange_s: Floats
    pending_s: Floats
    signatures: int
    collectives: int

    def of(self, kernel_class: int) -> range:
        """Rows of a kernel class."""
        return range(int(self.row[kernel_class]), int(self.row[kernel_class] + self.size[kernel_class]))


def options(graph: Graph, micro_batch: int, group: DeviceGroup, cluster: Cluster, costs: Costs) -> Options:
    """All strategies of all kernel classes along the sharding axes of a group, the cost models asked once each.

    Views cost nothing; a group of several kinds of devices is priced on its first.
    """
    axes = tuple((name, size) for name, size in mesh_of(group.axes) if name != REPLICA_AXIS)
    sizes = tuple(size for _, size in axes)
    members = [axis_members(group, name) for name, _ in axes]
    signatures = signatures_of(graph, micro_batch)
    made: dict[Call, tuple[int, int]] = {}
    strategies: list[Strategy] = []
    local: dict[Signature, int] = {}
    talks: dict[Collective, int] = {}
    compute: list[int] = []
    inside: list[tuple[int, int]] = []
    pending: list[tuple[int, int]] = []

    def all_reduce(axis: int, size: int, dtype: str) -> int:
        rows = members[axis]
        return talks.setdefault(Collective("all_reduce", size, rows[0], len(rows), dtype), len(talks))

    rows = []
    for call, signature in zip(calls_of(graph, micro_batch), signatures, strict=True):
        if call not in made:
            start = len(strategies)
            dtypes = [form.dtype for form in signature.outputs]
            for splits in mesh_strategies(call, sizes):
                number, part = len(strategies), call
                chosen = []
                for axis, (split, size) in enumerate(zip(splits, sizes, strict=True)):
                    part = local_call(part, split, size)
                    for exchange in split.exchanges:
                        inside.append((number, all_reduce(axis, exchange.elements * DTYPE_BYTES[dtypes[0]], dtypes[0])))
                    if any(not isinstance(p, Replicate) for p in (*split.strategy.inputs, *split.strategy.outputs)):
                        chosen.append((axes[axis][0], split.strategy))
                for axis, split in enumerate(splits):
                    for place, shape, dtype in zip(split.strategy.outputs, part.outputs, dtypes, strict=True):
                        if isinstance(place, Partial):
                            pending.append((number, all_reduce(axis, prod(shape) * DTYPE_BYTES[dtype], dtype)))
                strategies.append(Strategy(tuple(chosen)))
                compute.append(local.setdefault(_local(signature, part), len(local)))
            made[call] = (start, len(strategies) - start)
        rows.append(made[call])
    device = cluster.device(next(iter(group.devices)))
    seconds = costs.compute.estimate(SignatureTable(tuple(local)), device).mean_s
    times = costs.communication.estimate(CollectiveTable(tuple(talks)), cluster).mean_s if talks else np.zeros(0)
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return Options(
        strategies=tuple(strategies),
        row=table[:, 0],
        size=table[:, 1],
        compute_s=seconds[np.array(compute, dtype=np.int64)],
        exchange_s=_summed(inside, times, len(strategies)),
        pending_s=_summed(pending, times, len(strategies)),
        signatures=len(local),
        collectives=len(talks),
    )


def _summed(rows: Sequence[tuple[int, int]], times: Floats, count: int) -> Floats:
    if not rows:
        return np.zeros(count)
    owner, talk = np.array(rows, dtype=np.int64).T
    return np.bincount(owner, weights=times[talk], minlength=count).astype(np.float64)


def _local(signature: Signature, call: Call) -> Signature:
    def forms(old: tuple[TensorForm, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[TensorForm, ...]:
        return tuple(TensorForm(s, f.dtype, f.order, f.strides) for f, s in zip(old, shapes, strict=True))

    return Signature(
        call.target, forms(signature.inputs, call.inputs), forms(signature.outputs, call.outputs), call.arguments,
        signature.mode, signature.view,
    )  # fmt: skip
