"""What one device does and holds of every op where replicas of a stage split kernels: tensor parallelism by Megatron's
rule, with the collectives inside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simpart.cost import Collective
from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.lowering.local_prices import LocalPrices
from simpart.lowering.sharded import LocalParts, converted_by_kernel, kernel_value, local_bytes, local_parts
from simpart.lowering.transfers import CommPrices
from simpart.placement import Shard, Sharding, StatePlacement
from simpart.placement.conversions import collective_of
from simpart.plan import Batch, DeviceGroup, Devices, Plan
from simpart.problem import Problem
from simpart.searchers._cut_graph import CutGraph
from simpart.searchers._remembered import remembered
from simpart.sharding.combine import Degrees, shard
from simpart.sharding.flow import Flow, flow

__all__ = ["TensorShare", "TensorShares"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShare:
    """One device's share of a graph at one micro-batch size. Seconds and bytes are by op, `value_bytes` by kernel-level
    value. `converted_bytes` are values that backward reads in another layout than they rest in: kept besides."""

    sharding: Sharding
    state: tuple[tuple[str, StatePlacement], ...]
    forward_s: Floats
    backward_s: Floats
    value_bytes: Integers
    converted_bytes: Floats
    largest_converted: float
    parts: LocalParts
    flow: Flow

    def divided(self, value: int) -> bool:
        """Whether the devices of a replica hold different parts of an op-level value."""
        layout = self.flow.layouts.get(kernel_value(self.flow.graph, value), ())
        return any(isinstance(place, Shard) for place in layout)


@dataclass(frozen=True, eq=False)
class TensorShares:
    """The shares of a cut graph at all tensor degrees that its problem's space has."""

    cut: CutGraph

    @remembered
    def of(self, micro_batch: int, degree: int, kind: int, ranks: tuple[int, ...], concurrent: int) -> TensorShare:
        """How kernels lie on replicas of these ranks, when so many such sets use a link at once; `kind` is the number
        of a kind of device. Raises as `_tensor_share` does."""
        cut, degrees = self.cut, Degrees(tp=degree, vocabulary=self._vocabulary)
        return _tensor_share(cut.problem, cut.graph, micro_batch, degrees, cut.kinds[kind], ranks, concurrent)

    def anywhere(self, micro_batch: int, degree: int, kind: int) -> TensorShare:
        """How kernels lie on replicas of this degree: wherever they are, but for the times."""
        return self.of(micro_batch, degree, kind, tuple(range(degree)), 1)

    def why_not(self, degree: int) -> str:
        """Why no stage can have this tensor degree; empty where it can."""
        try:
            self.anywhere(self.cut.least_samples, degree, self.cut.slowest)
        except UserError as error:
            return str(error)
        return ""

    @cached_property
    def _vocabulary(self) -> bool | None:
        """Whether tables that tokens look up are split, at all degrees alike, since a plan has one table of where state
        rests: None (where they divide) or False. Stages of different degrees may hold one parameter: then not."""
        graph, micro_batch = self.cut.graph, self.cut.least_samples
        if any(len(blocks) > 1 for value, blocks in self.cut.readers.items() if value in graph.parameters):
            return False
        states = []
        for degree in (t for t in self.cut.problem.space.tp if t > 1):
            try:
                states.append(shard(graph, micro_batch, Degrees(tp=degree)).state)
            except UserError:
                continue
        return None if len(set(states)) < 2 else False


def _tensor_share(
    problem: Problem,
    graph: Graph,
    micro_batch: int,
    degrees: Degrees,
    device: Device,
    ranks: tuple[int, ...],
    concurrent: int,
) -> TensorShare:
    """The share of one of `ranks`, when so many such sets use a link at once.

    Raises UserError with degrees that work, UnsupportedError where the model has nothing to split.
    """
    if problem.mode != "eager":
        raise UnsupportedError(f"split kernels run eager, got mode {problem.mode}; use tp=1")
    found, size = shard(graph, micro_batch, degrees), degrees.tp
    group = DeviceGroup(devices=Devices.of(range(size)), axes=(("tp", size),))
    whole = flow(graph, found.sharding, group.axes, micro_batch, found.state)
    flat = graph.flat
    ops = len(flat.op_class)
    prices = LocalPrices(problem.costs.compute, problem.mode).of(graph, whole, device)
    seconds, there = prices.amounts.seconds[prices.row], flat.kernel_forward[prices.kernels]
    owner = flat.kernel_op[prices.kernels]
    sent, converted, largest = _sent(problem, whole, ranks, concurrent)
    held = Plan(
        graph=graph.fingerprint, groups=(group,), stages=(),
        batch=Batch(micro_batches=1, sizes=((micro_batch,),)), state=found.state,
    )  # fmt: skip
    return TensorShare(
        sharding=found.sharding,
        state=found.state,
        forward_s=sent[0] + np.bincount(owner[there], weights=seconds[there], minlength=ops),
        backward_s=sent[1] + np.bincount(owner[~there], weights=seconds[~there], minlength=ops),
        value_bytes=local_bytes(graph, whole),
        converted_bytes=converted,
        largest_converted=largest,
        parts=local_parts(graph, held, group),
        flow=whole,
    )


def _sent(problem: Problem, whole: Flow, ranks: tuple[int, ...], concurrent: int) -> tuple[Floats, Floats, float]:
    """Seconds of collectives by phase and op that waits for them; bytes converted and kept by op; the largest."""
    flat = whole.graph.flat
    sent = np.zeros((2, len(flat.op_class)))
    converted, largest = converted_by_kernel(whole)
    kept = np.zeros(len(flat.op_class))
    np.add.at(kept, flat.kernel_op[list(converted)], list(converted.values()))
    rows: list[tuple[int, tuple[int, ...], Collective]] = []
    for conversion in whole.conversions:
        ops = tuple(
            int(flat.kernel_op[kernel if kernel >= 0 else flat.kernel_value_kernel[value]])
            for value, kernel in zip(conversion.values, conversion.kernels, strict=True)
            if kernel >= 0 or flat.kernel_value_kernel[value] >= 0
        )
        for step in conversion.steps:
            collective = collective_of(step, ranks, concurrent, conversion.dtype)
            if collective is not None:
                rows.append((int(conversion.phase == "B"), ops, collective))
    for exchange in whole.exchanges:
        ops = tuple(int(flat.kernel_op[kernel]) for kernel in exchange.kernels)
        rows.append((int(exchange.phase == "B"), ops, Collective("all_reduce", exchange.bytes, ranks, concurrent)))
    prices = CommPrices(problem.costs.communication, problem.cluster).of(collective for *_, collective in rows)
    for (phase, ops, _), priced in zip(rows, prices, strict=True):
        np.add.at(sent[phase], list(ops), priced.seconds)
    return sent, kept, float(largest)
