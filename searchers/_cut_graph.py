"""A graph of a Problem cut into blocks: the chain or the sets of blocks that planners make stages of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simpart.configure import layer_calls
from simpart.errors import UnsupportedError
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.plan.partition import clonable_ops
from simpart.problem import Problem
from simpart.searchers._block_sets import BlockSets
from simpart.searchers._blocks import blocks
from simpart.searchers._link_times import LinkTimes
from simpart.searchers._op_dag import OpDag, block_numbers, crossing_values
from simpart.searchers._stages import ChainStage

__all__ = ["CutGraph", "cut_graph"]

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutGraph:
    """`chain[b]` are the sorted ops of block b, without clones; `sets` the sets of blocks between which stages lie;
    `block_of[op]` the block in which an op counts, clones too; `least_samples` the smallest micro-batch of a replica
    that this graph serves."""

    problem: Problem
    graph: Graph
    dag: OpDag
    chain: tuple[Integers, ...]
    sets: BlockSets
    block_of: Integers
    least_samples: int

    @property
    def size(self) -> int:
        """Number of blocks."""
        return len(self.chain)

    @property
    def kinds(self) -> tuple[Device, ...]:
        """Kinds of the problem's devices."""
        return self.problem.cluster.kinds

    @property
    def mixed(self) -> bool:
        """Whether devices are unequal, so that costs depend on a stage's place."""
        return len(self.kinds) > 1

    @property
    def slowest(self) -> int:
        """Number of the kind with the least peak."""
        return _slowest(self.problem, self.graph)

    def kind_of(self, device: int) -> int:
        """Number of a device's kind."""
        return self.kinds.index(self.problem.cluster.device(device)) if self.mixed else 0

    def ops(self, start: int, end: int) -> Integers:
        """Sorted ops of a stage, without clones."""
        return np.sort(np.concatenate([self.chain[b] for b in self.sets.blocks(start, end)]))

    def block_weights(self, per_op: Floats) -> Floats:
        """Sum over the ops of each block."""
        return np.bincount(self.block_of, weights=per_op, minlength=self.size).astype(np.float64)

    def order_text(self, stages: Sequence[ChainStage]) -> str:
        """Where a plan cuts the order in which it takes the blocks."""
        names = [self.graph.op_ids[int(self.ops(stage.start, stage.end)[0])] for stage in stages]
        how = "sets closed under predecessors" if len(self.sets.inside) > self.size + 1 else "one line"
        return f"{self.size} blocks in {how}; stages begin at {', '.join(names)}"

    @cached_property
    def recomputed(self) -> Bools:
        """Ops that run again where a stage recomputes: those inside layers."""
        return np.isin(self.graph.flat.op_call, layer_calls(self.graph))

    @cached_property
    def crossing(self) -> dict[tuple[int, tuple[int, ...]], list[int]]:
        """Values by the block that makes them and all other blocks that read them."""
        return crossing_values(self.dag, self.chain)

    @cached_property
    def readers(self) -> dict[int, set[int]]:
        """Blocks that read each parameter, buffer and constant."""
        flat = self.graph.flat
        consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
        readers: dict[int, set[int]] = {}
        held = {v for v, s in self.graph.all_sources() if s.kind in ("parameter", "buffer", "constant")}
        for value, op in zip(flat.op_inputs.tolist(), consumer.tolist(), strict=True):
            if value in held:
                readers.setdefault(value, set()).add(int(self.block_of[op]))
        return readers


def cut_graph(
    problem: Problem, graph: Graph, micro_batch: int, most_blocks: int, most_sets: int = 0, uncoarsening: bool = False
) -> CutGraph:
    """At most `most_blocks` blocks, balanced by what the slowest kind of device takes for a micro-batch.

    Cuts are the places between the blocks of one linearisation; or, if there are at most `most_sets` for some number of
    blocks, all sets of blocks closed under predecessors (see BlockSets).
    """
    dag = _dag_of(problem, graph, micro_batch, problem.cluster.kinds[_slowest(problem, graph)])
    price = LinkTimes(problem).there_and_back_s_per_byte()
    chain, sets = _cut(dag, price, most_blocks, most_sets, uncoarsening)
    return CutGraph(
        problem=problem,
        graph=graph,
        dag=dag,
        chain=tuple(chain),
        sets=sets,
        block_of=_block_of_every_op(dag, chain),
        least_samples=1 if problem.graph.at(1) is graph else 2,
    )


def _slowest(problem: Problem, graph: Graph) -> int:
    kinds = problem.cluster.kinds
    return min(range(len(kinds)), key=lambda k: kinds[k].peak(graph.precision))


def _dag_of(problem: Problem, graph: Graph, micro_batch: int, device: Device) -> OpDag:
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


def _cut(
    dag: OpDag, price: float, most_blocks: int, most_sets: int, uncoarsening: bool
) -> tuple[list[Integers], BlockSets]:
    """Blocks and their sets: fewer blocks where that makes few enough."""
    for most in (most_blocks, most_blocks // 2, most_blocks // 3, most_blocks // 4) if most_sets else ():
        chain = blocks(dag, max(most, 1), seconds_per_byte=price, connected=True)
        block = block_numbers(dag, chain)
        made, read = block[dag.edge_source], block[dag.edge_target]
        edges = {(a, b) for a, b in zip(made.tolist(), read.tolist(), strict=True) if 0 <= a < b}
        try:
            return chain, BlockSets.of_graph(len(chain), edges, most_sets)
        except UnsupportedError:
            continue
    chain = blocks(dag, most_blocks, seconds_per_byte=price, uncoarsening=uncoarsening)
    return chain, BlockSets.of_chain(len(chain))


def _block_of_every_op(dag: OpDag, chain: Sequence[Integers]) -> Integers:
    """Clones count in the first block that reads one of those that go together."""
    block = block_numbers(dag, chain)
    for clones, readers in dag.clones():
        block[clones] = block[readers].min(initial=len(chain) - 1)
    return block
