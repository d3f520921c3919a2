"""A stage whose kernels are split: what one of its devices computes, sends and holds.

Everything follows from the stage's `sharding.Flow`: local signatures are priced like whole ones, conversions and the
exchanges inside kernels become collectives on the axis of the group they run on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from simpart.conversions import collective_of
from simpart.cost import Collective, ComputeModel, Signature, unique
from simpart.graph import Graph, Phase
from simpart.hardware import Cluster, Device
from simpart.kernels import Mode
from simpart.plan import DeviceGroup
from simpart.pricing import Amount, sum_rows
from simpart.sharding.flow import Conversion, Flow
from simpart.sharding.mesh import Axes, Layout, Use, axis_members, local_signature
from simpart.signatures import signatures_of
from simpart.sizes import DTYPE_BYTES
from simpart.tdl.local import local_shape
from simpart.transfers import sharing

__all__ = ["Sent", "converted_bytes", "local_bytes", "local_elements", "price_kernels", "sent_by"]

Ints = npt.NDArray[np.int64]
Role = Literal["value", "boundary", "parameter", "gradient", "update", "exchange"]


class Sent(NamedTuple):
    """A collective that every device of a stage takes part in, `times` per micro-batch, or per step."""

    phase: Phase
    per_step: bool
    role: Role
    axis: str
    collective: Collective
    times: int


def price_kernels(
    graph: Graph, flow: Flow, compute: ComputeModel, device: Device, mode: Mode, kernels: Iterable[int] | None = None
) -> tuple[Amount, Amount]:
    """Forward and backward of one micro-batch on one device, one row each; of these kernels of `graph.flat` only, if
    given."""
    flat = graph.flat
    whole = signatures_of(graph, flow.micro_batch, mode)
    counts: Counter[tuple[int, int]] = Counter()
    uses: dict[int, Use] = {}
    chosen = flow.uses if kernels is None else {k: flow.uses[k] for k in kernels if k in flow.uses}
    for kernel, use in chosen.items():
        uses[id(use)] = use
        counts[int(flat.kernel_class[kernel]), id(use)] += 1
    rows: list[Signature] = [local_signature(whole[cls], uses[use]) for cls, use in counts]
    table, index = unique(rows)
    estimate = compute.estimate(table, device)
    times = np.array(list(counts.values()), dtype=np.float64)
    forward = np.array([graph.kernel_classes[cls].phase == "F" for cls, _ in counts], dtype=bool)
    amounts = sum_rows(estimate, index, np.arange(len(rows)), len(rows))
    return amounts.total(np.where(forward, times, 0.0)), amounts.total(np.where(forward, 0.0, times))


def sent_by(flow: Flow, group: DeviceGroup, cluster: Cluster) -> list[Sent]:
    """All collectives of a stage on its group, equal ones together."""
    members = {name: axis_members(group, name) for name, _ in flow.axes}
    shared = {name: max(sharing(cluster, rows)) for name, rows in members.items()}
    found: Counter[tuple[Phase, bool, Role, str, Collective]] = Counter()
    for conversion in flow.conversions:
        for step in conversion.steps:
            name = flow.axes[step.axis][0]
            collective = collective_of(step, members[name][0], shared[name], conversion.dtype)
            if collective is not None:
                found[conversion.phase, conversion.per_step, conversion.role, name, collective] += conversion.times
    for exchange in flow.exchanges:
        name = flow.axes[exchange.axis][0]
        collective = Collective("all_reduce", exchange.bytes, members[name][0], shared[name])
        found[exchange.phase, False, "exchange", name, collective] += len(exchange.kernels)
    return [Sent(*key, times) for key, times in found.items()]


def local_elements(shape: tuple[int, ...], layout: Layout, axes: Axes) -> int:
    """Elements that the first device holds."""
    for place, (_, size) in zip(layout, axes, strict=True):
        shape = local_shape(shape, place, size)
    return prod(shape)


def local_bytes(graph: Graph, flow: Flow) -> Ints:
    """Bytes that one device holds of each kernel-level value; whole where the flow does not know it."""
    known: dict[tuple[int, Layout], int] = {}
    whole: dict[int, int] = {}
    sizes = np.empty(len(graph.flat.kernel_value_spec), dtype=np.int64)
    for value, spec in enumerate(graph.flat.kernel_value_spec):
        layout = flow.layouts.get(value)
        if layout is None:
            if id(spec) not in whole:
                whole[id(spec)] = spec.bytes(flow.micro_batch)
            sizes[value] = whole[id(spec)]
            continue
        key = (id(spec), layout)
        if key not in known:
            shape = spec.shape(flow.micro_batch)
            known[key] = local_elements(shape, layout, flow.axes) * DTYPE_BYTES[spec.dtype]
        sizes[value] = known[key]
    return sizes


def converted_bytes(flow: Flow) -> tuple[int, int]:
    """(bytes of converted values that backward reads again, largest converted value) of one micro-batch on one device.

    A value that forward and backward read in the same other layout is converted once and kept; the rest lives while
    its kernel runs.
    """
    kept = largest = 0
    late = _read_late(flow)
    for conversion in flow.conversions:
        if conversion.role not in ("value", "parameter") or conversion.per_step:
            continue
        size = _converted(flow, conversion)
        largest = max(largest, size)
        if conversion.phase == "F" and conversion.role == "value":
            kept += size * sum(value in late for value in conversion.values)
    return kept, largest


def _converted(flow: Flow, conversion: Conversion) -> int:
    return local_elements(conversion.shape, conversion.after, flow.axes) * DTYPE_BYTES[conversion.dtype]


def _read_late(flow: Flow) -> set[int]:
    """Kernel-level values that backward kernels of the flow read."""
    flat = flow.graph.flat
    found: set[int] = set()
    for kernel in flow.uses:
        if not flat.kernel_forward[kernel]:
            found.update(flat.kernel_inputs[flat.kernel_indptr[kernel] : flat.kernel_indptr[kernel + 1]].tolist())
    return found
