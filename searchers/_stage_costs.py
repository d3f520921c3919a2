"""A Problem on a chain of blocks: time, memory and transfers of every run of blocks, at any replica count.

Everything is a sum over ops or over tensors, so all runs [i, j) of all replica counts come from prefix sums and
two-dimensional histograms, without pricing or walking a stage on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from simpart.block_memory import kept_storages, working_sets
from simpart.configure import layer_calls
from simpart.cost import Collective, CollectiveKind, CollectiveTable
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.memory import state_of, update_transient_bytes
from simpart.partition import clonable_ops
from simpart.problem import Problem
from simpart.searchers._blocks import OpDag, block_transfers, blocks
from simpart.searchers._chain import StageCosts
from simpart.searchers._pipelines import PipelineShape

__all__ = ["ChainProblem", "dag_of"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def dag_of(problem: Problem, graph: Graph, micro_batch: int, device: Device) -> OpDag:
    """The ops of a graph with their times and what crosses between them, at one micro-batch size."""
    flat = graph.flat
    prices = problem.prices([micro_batch], device)[micro_batch]
    time_s = (prices.forward.seconds + prices.backward.seconds)[flat.op_class]
    producer = flat.value_op[flat.op_inputs]
    consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
    edge = producer >= 0
    value_bytes = np.array([spec.bytes(micro_batch) for spec in flat.value_spec], dtype=np.float64)
    return OpDag(
        time_s=time_s,
        memory_bytes=np.zeros(len(time_s)),
        edge_source=producer[edge],
        edge_target=consumer[edge],
        edge_value=flat.op_inputs[edge],
        value_bytes=value_bytes,
        group=flat.op_group,
        cloned=clonable_ops(graph),
    )


class ChainProblem:
    """One graph of a Problem cut into at most `most_blocks` blocks, and the StageCosts of any pipeline shape on it.

    Devices of several kinds are priced as the slowest and limited as the smallest of them.
    """

    def __init__(self, problem: Problem, graph: Graph, micro_batch: int, most_blocks: int) -> None:
        self.problem = problem
        self.graph = graph
        kinds = problem.cluster.kinds
        self.device = min(kinds, key=lambda d: d.peak(graph.precision))
        self.limit_bytes = float(min(d.usable_bytes for d in kinds))
        self.dag = dag_of(problem, graph, micro_batch, self.device)
        self.chain = blocks(self.dag, most_blocks, seconds_per_byte=self._seconds_per_byte())
        self.block_of = self._block_of_every_op()
        self.recomputed = np.isin(graph.flat.op_call, layer_calls(graph))

    @property
    def size(self) -> int:
        return len(self.chain)

    def _block_of_every_op(self) -> Integers:
        """Clones count in the first block that reads them."""
        block = np.full(self.dag.size, self.size, dtype=np.int64)
        for b, ops in enumerate(self.chain):
            block[ops] = b
        for e in np.argsort(-self.dag.edge_target, kind="stable").tolist():
            source = int(self.dag.edge_source[e])
            if self.dag.cloned[source]:
                block[source] = min(block[source], block[self.dag.edge_target[e]])
        return np.minimum(block, self.size - 1)

    def costs(self, shape: PipelineShape, schedule: str, power_of_two: bool) -> StageCosts | None:
        """None where the global batch cannot be divided like this.

        What a stage does once per step (gradient all-reduce, update) is spread over its micro-batches as backward time,
        so that the cuts balance it too; `allreduce_s` is therefore zero.
        """
        problem = self.problem
        samples, rest = divmod(problem.global_batch, shape.pipelines * shape.micro_batches)
        if rest:
            return None
        replicas = tuple(
            r
            for r in range(1, min(shape.devices, samples) + 1)
            if samples % r == 0 and (not power_of_two or r & (r - 1) == 0) and self._is_mine(samples // r)
        )
        if not replicas:
            return None
        sizes = [samples // r for r in replicas]
        problem.prices(sizes, self.device)
        tables = [self._times(b, shape.recompute) for b in sizes]
        stash = [self._stash(b, shape.recompute) for b in sizes]
        entering, leaving = zip(*(self._transfers(b) for b in sizes), strict=True)
        ranks = [(0, min(r, problem.cluster.size - 1)) for r in replicas]
        transfer = [
            self._curve("p2p", pair, inside) + self._curve("p2p", pair, out)
            for pair, inside, out in zip(ranks, entering, leaving, strict=True)
        ]
        tail = [self._all_reduce(r, shape) + self._state["update_s"] for r in replicas]
        share = 1 / shape.micro_batches
        per_micro_batch = [t * share + self._state["accumulate_s"] * (1 - share) for t in tail]
        state = self._state["all"]
        static = [state + self._transients(b, shape.recompute) for b in sizes]
        forward, backward = zip(*tables, strict=True)
        return StageCosts(
            replicas=replicas,
            forward_s=_stack(forward),
            backward_s=_stack([b + more for b, more in zip(backward, per_micro_batch, strict=True)]),
            transfer_s=_stack(transfer),
            allreduce_s=np.zeros((self.size, self.size + 1, len(replicas))),
            static_bytes=_stack(static),
            stash_bytes=_stack([s + i for s, i in zip(stash, entering, strict=True)]),
            limit_bytes=self.limit_bytes,
            micro_batches=shape.micro_batches,
            allowed=np.ones((self.size, self.size + 1, len(replicas)), dtype=np.bool_),
            in_flight="gpipe" if schedule == "gpipe" else "1f1b",
        )

    def entering_s(self, micro_batch: int, ranks: tuple[int, int]) -> Floats:
        """[i] seconds to bring what blocks from i on need of those before it from one rank to another."""
        return self._curve("p2p", ranks, self._transfers(micro_batch)[0][:, self.size])

    def all_reduce_s(self, ranks: tuple[int, ...]) -> Floats:
        """[i, j] seconds of the gradient all-reduce of every run over these ranks."""
        gradients = self._state["gradients"]
        return np.zeros_like(gradients) if len(ranks) == 1 else self._curve("all_reduce", ranks, gradients)

    def block_weights(self, per_op: Floats) -> Floats:
        """Sum over the ops of each block."""
        return np.bincount(self.block_of, weights=per_op, minlength=self.size).astype(np.float64)

    def _seconds_per_byte(self) -> float:
        """Of what crosses a cut, there and back, between neighbouring devices."""
        if self.problem.cluster.size < 2:
            return 0.0
        at, seconds = self._curve_points("p2p", (0, 1))
        return 2 * float(seconds[20] / at[20])

    def _is_mine(self, micro_batch: int) -> bool:
        return self.problem.graph.at(micro_batch) is self.graph

    def _runs(self, per_op: Floats) -> Floats:
        """[i, j] = sum over the blocks i … j-1."""
        prefix = np.concatenate([[0.0], np.cumsum(np.bincount(self.block_of, weights=per_op, minlength=self.size))])
        runs: Floats = np.maximum(prefix[None, :] - prefix[: self.size, None], 0.0)
        return runs

    @lru_cache(maxsize=256)  # noqa: B019  (a ChainProblem lives as long as one search)
    def _times(self, micro_batch: int, recompute: bool) -> tuple[Floats, Floats]:
        prices = self.problem.prices([micro_batch], self.device)[micro_batch]
        op_class = self.graph.flat.op_class
        forward, backward = prices.forward.seconds[op_class], prices.backward.seconds[op_class]
        again = np.where(self.recomputed, forward, 0.0) if recompute else 0.0
        return self._runs(forward), self._runs(backward + again)

    @lru_cache(maxsize=256)  # noqa: B019
    def _transfers(self, micro_batch: int) -> tuple[Floats, Floats]:
        value_bytes = np.array([spec.bytes(micro_batch) for spec in self.graph.flat.value_spec], dtype=np.float64)
        dag = self.dag
        scaled = OpDag(
            time_s=dag.time_s,
            memory_bytes=dag.memory_bytes,
            edge_source=dag.edge_source,
            edge_target=dag.edge_target,
            edge_value=dag.edge_value,
            value_bytes=value_bytes,
            group=dag.group,
            cloned=dag.cloned,
        )
        return block_transfers(scaled, self.chain)

    @lru_cache(maxsize=256)  # noqa: B019
    def _stash(self, micro_batch: int, recompute: bool) -> Floats:
        """Bytes that a run keeps per micro-batch in flight: storages made in it whose first late reader is in it
        too."""
        regions = self._regions if recompute else None
        maker, first_reader, size = kept_storages(self.graph, micro_batch, self.block_of, regions)
        histogram = np.zeros((self.size, self.size))
        np.add.at(histogram, (maker, first_reader), size)
        inside = np.cumsum(np.cumsum(histogram[::-1], axis=0)[::-1], axis=1)
        return np.concatenate([np.zeros((self.size, 1)), inside], axis=1)

    @lru_cache(maxsize=256)  # noqa: B019
    def _transients(self, micro_batch: int, recompute: bool) -> Floats:
        """Largest working set of any block of a run, and what the optimizer holds while it updates (not at the same
        time)."""
        regions = self._regions if recompute else None
        working = working_sets(
            self.graph, micro_batch, [np.flatnonzero(self.block_of == b) for b in range(self.size)], regions
        )
        running = np.zeros((self.size, self.size + 1))
        for i in range(self.size):
            running[i, i + 1 :] = np.maximum.accumulate(working[i:])
        return np.maximum(running, self._state["update"])

    @cached_property
    def _regions(self) -> Integers:
        """Region of each op: its layer, -1 outside layers."""
        return np.where(self.recomputed, self.graph.flat.op_call, -1)

    @cached_property
    def _state(self) -> dict[str, Floats]:
        """Bytes of parameters, gradients and optimizer state of every run: each parameter counts once per run that
        reads it."""
        flat, n = self.graph.flat, self.size
        consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
        readers: dict[int, set[int]] = {}
        held = {v for v, s in self.graph.all_sources() if s.kind in ("parameter", "buffer", "constant")}
        for value, op in zip(flat.op_inputs.tolist(), consumer.tolist(), strict=True):
            if value in held:
                readers.setdefault(value, set()).add(int(self.block_of[op]))
        everything, gradients, update, update_s, accumulate_s = (np.zeros((n, n + 1)) for _ in range(5))
        row_of, updates, accumulations = self.problem.update_prices(self.device)
        for value, read in readers.items():
            state = state_of(self.graph, self.problem.training, [value])
            total = state.parameters + state.gradients + state.optimizer_state
            transient = update_transient_bytes(self.problem.training, self.device, state)
            start = 0
            for block in sorted(read):
                rows = slice(start, block + 1)
                everything[rows, block + 1 :] += total
                gradients[rows, block + 1 :] += state.gradients
                if value in row_of:
                    update_s[rows, block + 1 :] += updates.seconds[row_of[value]]
                    accumulate_s[rows, block + 1 :] += accumulations.seconds[row_of[value]]
                np.maximum(update[rows, block + 1 :], transient, out=update[rows, block + 1 :])
                start = block + 1
        return {
            "all": everything, "gradients": gradients, "update": update,
            "update_s": update_s, "accumulate_s": accumulate_s,
        }  # fmt: skip

    def _all_reduce(self, replicas: int, shape: PipelineShape) -> Floats:
        """Gradients over all replicas of a stage: those of one pipeline side by side, pipelines `devices` apart."""
        ranks = tuple(p * shape.devices + r for p in range(shape.pipelines) for r in range(replicas))
        return self.all_reduce_s(ranks)

    def _curve(self, kind: CollectiveKind, ranks: tuple[int, ...], size: Floats) -> Floats:
        """Seconds by bytes, read off the communication model at powers of two and linear in between; nothing sent
        takes no time."""
        if len(set(ranks)) < 2:
            return np.zeros_like(size)
        at, seconds = self._curve_points(kind, ranks)
        return np.where(size > 0, np.interp(size, at, seconds), 0.0)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _curve_points(self, kind: CollectiveKind, ranks: tuple[int, ...]) -> tuple[Floats, Floats]:
        at = [1 << e for e in range(8, 44)]
        table = CollectiveTable(tuple(Collective(kind, size, ranks) for size in at))
        estimate = self.problem.costs.communication.estimate(table, self.problem.cluster)
        return np.array(at, dtype=np.float64), estimate.mean_s


def _stack(per_replica_count: Sequence[Floats]) -> Floats:
    """[i, j] arrays of every replica count as one [i, j, k] array."""
    return np.stack(per_replica_count, axis=-1)
