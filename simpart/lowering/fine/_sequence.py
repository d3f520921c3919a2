"""What an action runs, kernel by kernel: in which order, at what price, how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpart.cost import ComputeModel, unique
from simpart.cost.pricing import Amount, sum_rows
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.kernels import Mode
from simpart.kernels.split_backward import weight_share
from simpart.lowering.local_prices import LocalPrices
from simpart.memory import backward_places
from simpart.sharding.flow import Flow

__all__ = ["KernelPrices", "Places", "Run", "gradient_place", "price_each", "price_parts", "runs_of"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPrices:
    """`row[k]` of `amount` is the price of kernel k of `graph.flat` (-1: not priced here)."""

    row: Ints
    amount: Amount


def price_each(graph: Graph, micro_batch: int, compute: ComputeModel, device: Device, mode: Mode) -> KernelPrices:
    """Every kernel, whole, on one device; equal signatures share a row."""
    table, index = unique(signatures_of(graph, micro_batch, mode))
    estimate = compute.estimate(table, device)
    each = np.arange(len(table.signatures))
    return KernelPrices(row=index[graph.flat.kernel_class], amount=sum_rows(estimate, each, each, each.size))


def price_parts(graph: Graph, flow: Flow, prices: LocalPrices, device: Device) -> KernelPrices:
    """Every kernel of a flow: what one device runs of it."""
    found = prices.of(graph, flow, device)
    row = np.full(graph.flat.kernel_class.size, -1, dtype=np.int64)
    row[found.kernels] = found.row
    return KernelPrices(row=row, amount=found.amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a stage's kernels stand in forward and in backward (with what is run again there); -1: not at all."""

    kernels: Ints
    forward: Ints
    backward: Ints
    graph: Graph

    @staticmethod
    def of(graph: Graph, ops: Ints, regions: Sequence[Ints]) -> Places:
        flat = graph.flat
        member = np.zeros(flat.op_class.size, dtype=bool)
        member[ops] = True
        region = np.full(flat.op_class.size, -1, dtype=np.int64)
        for r, found in enumerate(regions):
            region[found] = r
        kernels = np.flatnonzero(member[flat.kernel_op])
        forward = np.full(flat.kernel_op.size, -1, dtype=np.int64)
        first = kernels[flat.kernel_forward[kernels]]
        forward[first] = np.arange(first.size)
        backward, _ = backward_places(graph, kernels, region[flat.kernel_op])
        return Places(kernels=kernels, forward=forward, backward=backward, graph=graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements of an action in order: element e is row `row[e]` of the prices, `weight[e]` times, at place `place[e]`
    of its phase; `kernel` is what it is of `graph.flat` (-1: no kernel, but adding up gradients)."""

    place: Floats
    row: Ints
    weight: Floats
    kernel: Ints


def runs_of(places: Places, prices: KernelPrices, accumulations: Sequence[tuple[float, int, float]]) -> dict[str, Run]:
    """Of F, B, I and W. `accumulations` (place, row, weight) stand in B and W."""
    flat = places.graph.flat
    share = weight_share(places.graph)
    kernels = places.kernels
    forward = kernels[flat.kernel_forward[kernels]]
    late = kernels[places.backward[kernels] >= 0]
    late = late[np.argsort(places.backward[late])]
    again = flat.kernel_forward[late]
    ones = np.ones(late.size)
    parts = {
        "F": (forward, places.forward, np.ones(forward.size)),
        "B": (late, places.backward, ones),
        "I": (late, places.backward, np.where(again, 1.0, 1.0 - share[late])),
        "W": (late, places.backward, np.where(again, 0.0, share[late])),
    }
    found = {}
    for kind, (members, at, weight) in parts.items():
        used = (weight > 0) & (prices.row[members] >= 0)
        kernel = members[used]
        place, row, times = at[kernel].astype(np.float64), prices.row[kernel], weight[used]
        if kind in "BW" and accumulations:
            more = np.array(accumulations)
            place = np.concatenate([place, more[:, 0]])
            row, times = np.concatenate([row, more[:, 1].astype(np.int64)]), np.concatenate([times, more[:, 2]])
            kernel = np.concatenate([kernel, np.full(len(more), -1)])
            order = np.argsort(place, kind="stable")
            place, row, times, kernel = place[order], row[order], times[order], kernel[order]
        found[kind] = Run(place=place, row=row, weight=times, kernel=kernel)
    return found


def gradient_place(places: Places, gradient: int) -> float:
    """Where in backward a gradient is complete: behind its kernel or, of a parameter that several stages hold, behind
    this stage's terms; at the end where nothing here makes it."""
    flat = places.graph.flat
    maker = int(flat.kernel_value_kernel[gradient])
    if maker < 0:
        return float("inf")
    if places.backward[maker] >= 0:
        return float(places.backward[maker]) + 0.25
    terms = flat.kernel_inputs[flat.kernel_indptr[maker] : flat.kernel_indptr[maker + 1]]
    makers = flat.kernel_value_kernel[terms]
    last = int(places.backward[makers[makers >= 0]].max(initial=-1))
    return last + 0.25 if last >= 0 else float("inf")
