"""A Problem on a chain of blocks: time, memory and transfers of every run of blocks, at any replica count.

Everything is a sum over ops or over tensors, so all runs [i, j) of all replica counts come from prefix sums and
two-dimensional histograms, without pricing or walking a stage on its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from simpart.configure import layer_calls
from simpart.cost import Collective, CollectiveKind, CollectiveTable
from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.lowering.transfers import sharing
from simpart.memory import StateBytes, state_of, update_transient_bytes
from simpart.memory.blocks import kept_storages, working_sets
from simpart.plan.partition import clonable_ops
from simpart.problem import Problem
from simpart.searchers._block_sets import BlockSets
from simpart.searchers._blocks import OpDag, block_numbers, blocks, crossing_values
from simpart.searchers._chain import Bools, ChainStage, StageCosts
from simpart.searchers._lines import lines, shares
from simpart.searchers._pipelines import PipelineShape
from simpart.searchers._tensor_stages import TensorShare, splits_vocabularies, tensor_share
from simpart.sharding.combine import Degrees

__all__ = ["ChainProblem", "dag_of", "in_flight"]

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


def in_flight(schedule: str) -> Literal["gpipe", "1f1b"]:
    """How many micro-batches the memory of a schedule counts."""
    return "gpipe" if schedule == "gpipe" else "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A number of devices with all that its costs depend on: distinct (kind, samples) of them, where its gradients and
    what enters and leaves it travel (ranks, links used at once), and what devices that split kernels exchange."""

    replicas: int
    parts: tuple[tuple[int, int], ...]
    reduced: tuple[int, ...]
    entering: tuple[tuple[int, ...], int]
    leaving: tuple[tuple[int, ...], int]
    reducing: int = 1
    tensor: int = 1
    inside: tuple[tuple[int, ...], int] = ((0,), 1)


class ChainProblem:
    """One graph of a Problem cut into at most `most_blocks` blocks, and the StageCosts of any pipeline shape on it.

    Blocks are balanced by the slowest kind of device; stages cost what their own devices take, and what the links
    there take where devices are unequal. Cuts are the places between the blocks of one linearisation; or, if there are
    at most `most_sets` for some number of blocks, all sets of blocks closed under predecessors (see BlockSets).
    """

    def __init__(
        self,
        problem: Problem,
        graph: Graph,
        micro_batch: int,
        most_blocks: int,
        most_sets: int = 0,
        uncoarsening: bool = False,
    ) -> None:
        self.problem = problem
        self.graph = graph
        self.kinds = problem.cluster.kinds
        self.slowest = min(range(len(self.kinds)), key=lambda k: self.kinds[k].peak(graph.precision))
        self.limit_bytes = float(max(d.usable_bytes for d in self.kinds))
        self.least_samples = 1 if problem.graph.at(1) is graph else 2
        self.dag = dag_of(problem, graph, micro_batch, self.kinds[self.slowest])
        self.chain, self.sets = self._cut(most_blocks, most_sets, uncoarsening)
        self.block_of = self._block_of_every_op()
        self.recomputed = np.isin(graph.flat.op_call, layer_calls(graph))

    @property
    def size(self) -> int:
        """Number of blocks."""
        return len(self.chain)

    def _cut(self, most_blocks: int, most_sets: int, uncoarsening: bool) -> tuple[list[Integers], BlockSets]:
        """Blocks and their sets: fewer blocks where that makes few enough."""
        price = self._seconds_per_byte()
        for most in (most_blocks, most_blocks // 2, most_blocks // 3, most_blocks // 4) if most_sets else ():
            chain = blocks(self.dag, max(most, 1), seconds_per_byte=price, connected=True)
            block = block_numbers(self.dag, chain)
            made, read = block[self.dag.edge_source], block[self.dag.edge_target]
            edges = {(a, b) for a, b in zip(made.tolist(), read.tolist(), strict=True) if 0 <= a < b}
            try:
                return chain, BlockSets.of_graph(len(chain), edges, most_sets)
            except UnsupportedError:
                continue
        chain = blocks(self.dag, most_blocks, seconds_per_byte=price, uncoarsening=uncoarsening)
        return chain, BlockSets.of_chain(len(chain))

    def ops(self, start: int, end: int) -> Integers:
        """Sorted ops of a stage, without clones."""
        return np.sort(np.concatenate([self.chain[b] for b in self.sets.blocks(start, end)]))

    def order_text(self, stages: Sequence[ChainStage]) -> str:
        """Where a plan cuts the order in which it takes the blocks."""
        names = [self.graph.op_ids[int(self.ops(stage.start, stage.end)[0])] for stage in stages]
        how = "sets closed under predecessors" if len(self.sets.inside) > self.size + 1 else "one line"
        return f"{self.size} blocks in {how}; stages begin at {', '.join(names)}"

    @property
    def mixed(self) -> bool:
        """Whether devices are unequal, so that costs depend on a stage's place."""
        return len(self.kinds) > 1

    def _block_of_every_op(self) -> Integers:
        """Clones count in the first block that reads them."""
        block = block_numbers(self.dag, self.chain)
        block[block < 0] = self.size
        for e in np.argsort(-self.dag.edge_target, kind="stable").tolist():
            source = int(self.dag.edge_source[e])
            if self.dag.cloned[source]:
                block[source] = min(block[source], block[self.dag.edge_target[e]])
        return np.minimum(block, self.size - 1)

    def costs(
        self, shape: PipelineShape, schedule: str, power_of_two: bool, degrees: tuple[int, ...] = (1,)
    ) -> StageCosts | None:
        """None where the global batch cannot be divided like this. `degrees` are those of tensor parallelism that a
        stage may have; others than 1 stand where the devices of a replica are as near each other as can be.

        What a stage does once per step (gradient all-reduce, update) is spread over its micro-batches as backward time,
        so that the cuts balance it too; `allreduce_s` is therefore zero. Memory is that of the device with the least
        left, and counts from the largest memory: what a smaller device lacks is held by `static_bytes`.
        """
        choices = self._choices(shape, power_of_two) if 1 in degrees else {}
        if degrees != (1,):
            if not self.mixed:
                choices = {c: list(range(c.replicas, shape.devices + 1)) for c in choices}
            for degree in degrees:
                if degree > 1:
                    choices |= self._tensor_choices(shape, degree)
            choices = dict(sorted(choices.items(), key=lambda item: item[0].replicas))
        return self._costs(shape, schedule, choices) if choices else None

    def costs_of(
        self, shape: PipelineShape, schedule: str, stages: Sequence[tuple[int, ...]], *, reduced: bool = False
    ) -> StageCosts:
        """Those of stages on these devices of all pipelines, which must be able to share the samples; without
        transfers, with gradient all-reduces only if `reduced`. Choice k is `stages[k]`."""
        here: tuple[tuple[int, ...], int] = (0,), 1
        choices: dict[_Choice, list[int]] = {}
        for number, ranks in enumerate(stages):
            taken = self.shares(shape, ranks)
            assert taken is not None
            choice = _Choice(
                replicas=len(ranks) // shape.pipelines,
                parts=tuple(sorted(set(zip(map(self.kind_of, ranks), taken, strict=True)))),
                reduced=ranks if reduced else (number,),
                entering=here,
                leaving=here,
            )
            choices[choice] = []
        return self._costs(shape, schedule, choices)

    def _costs(self, shape: PipelineShape, schedule: str, choices: dict[_Choice, list[int]]) -> StageCosts:
        sizes: dict[int, set[int]] = {}
        for choice in choices:
            for kind, samples in choice.parts:
                sizes.setdefault(kind, set()).add(samples)
        for kind, wanted in sizes.items():
            self.problem.prices(sorted(wanted), self.kinds[kind])
        forward, backward, transfer, static, stash, update = (
            np.stack(arrays, axis=-1) for arrays in zip(*(self._row(c, shape) for c in choices), strict=True)
        )
        full = forward.shape
        degrees = tuple(choice.tensor for choice in choices)
        allowed = np.broadcast_to(self.sets.nested[:, :, None], full)
        if max(degrees) > 1:
            allowed = np.stack([self.sets.nested & self._whole_at_cuts(c) for c in choices], axis=-1)
        placed = self.mixed or any(left != [shape.devices] for left in choices.values())
        return StageCosts(
            replicas=tuple(choice.replicas for choice in choices),
            forward_s=forward,
            backward_s=backward,
            transfer_s=transfer,
            allreduce_s=np.zeros(full),
            static_bytes=static,
            stash_bytes=stash,
            update_bytes=update,
            limit_bytes=self.limit_bytes,
            micro_batches=shape.micro_batches,
            allowed=allowed,
            in_flight=in_flight(schedule),
            places=self._places(choices, shape.devices) if placed else None,
            tensor=degrees if max(degrees) > 1 else None,
        )

    def _row(self, choice: _Choice, shape: PipelineShape) -> tuple[Floats, ...]:
        """[i, j] forward, backward, transfer, static bytes, bytes per micro-batch in flight, bytes during the update,
        each of the worst part."""
        share, rows = 1 / shape.micro_batches, []
        for kind, samples in choice.parts:
            split = self._split(choice, kind, samples)
            state = self._state(kind, split)
            forward, backward = self._times(kind, samples, shape.recompute, split)
            once_s = self._curve("all_reduce", choice.reduced, choice.reducing, state["gradients"]) + state["update_s"]
            held = state["all"] + (self.limit_bytes - self.kinds[kind].usable_bytes)
            rows.append(
                (
                    forward,
                    backward + (once_s * share + state["accumulate_s"] * (1 - share)),
                    held + self._working(samples, shape.recompute, split),
                    self._stash(samples, shape.recompute, split) + self._transfers(samples)[0],
                    held + state["update"],
                )
            )
        forward, backward, static, stash, update = (
            functools.reduce(np.maximum, arrays) for arrays in zip(*rows, strict=True)
        )
        entering, leaving = self._transfers(max(samples for _, samples in choice.parts))
        transfer = self._curve("p2p", *choice.entering, entering) + self._curve("p2p", *choice.leaving, leaving)
        return forward, backward, transfer, static, stash, update

    def shares(self, shape: PipelineShape, devices: Sequence[int]) -> tuple[int, ...] | None:
        """Samples of a micro-batch that each of these devices, which run one stage of all pipelines, takes."""
        problem = self.problem
        samples, rest = divmod(problem.global_batch, shape.micro_batches)
        kinds = [self.kind_of(d) for d in devices]
        if rest:
            return None
        whole_s = functools.partial(self._whole_s, shape.recompute)
        for uneven in (True, False) if problem.space.uneven_replicas else (False,):
            taken = shares(kinds, samples, self.least_samples, whole_s, uneven)
            if taken is not None and all(problem.graph.at(b) is self.graph for b in set(taken)):
                return taken
        return None

    def equal_shares(self, shape: PipelineShape, replicas: int) -> tuple[int, ...]:
        """Samples of a micro-batch of each of so many replicas, which must divide it."""
        share, rest = divmod(self.problem.global_batch, shape.micro_batches * replicas)
        assert not rest
        return (share,) * replicas

    def _whole_s(self, recompute: bool, kind: int, samples: int) -> float:
        """Forward and backward of all blocks."""
        forward, backward = self._times(kind, samples, recompute)
        return float(forward[0, -1] + backward[0, -1])

    def kind_of(self, device: int) -> int:
        """Number of a device's kind."""
        return self.kinds.index(self.problem.cluster.device(device)) if self.mixed else 0

    def _choices(self, shape: PipelineShape, power_of_two: bool) -> dict[_Choice, list[int]]:
        """Every way to place a stage, ascending in replicas, with the devices left (its own included) where it is so.

        On equal devices a stage counts as the first of its pipeline, with neighbours as far away as it is long.
        """
        cluster, on = self.problem.cluster, lines(self.problem.cluster, shape)
        found: dict[_Choice, list[int]] = {}
        like: dict[Any, _Choice] = {}
        for r in range(1, shape.devices + 1):
            if power_of_two and r & (r - 1):
                continue
            for first in range(shape.devices - r + 1 if self.mixed else 1):
                own = [line[first : first + r] for line in on]
                ranks = tuple(d for devices in own for d in devices)
                taken = self.shares(shape, ranks)
                if taken is None:
                    break
                if not self.mixed:
                    near = (0, min(r, cluster.size - 1)), 1
                    choice = _Choice(replicas=r, parts=((0, max(taken)),), reduced=ranks, entering=near, leaving=near)
                else:
                    kinds = map(self.kind_of, ranks)
                    choice = _Choice(
                        replicas=r,
                        parts=tuple(sorted(set(zip(kinds, taken, strict=True)))),
                        reduced=ranks,
                        entering=self._boundary(on, first, r),
                        leaving=self._boundary(on, first + r, r),
                    )
                    choice = like.setdefault(self._likeness(choice), choice)
                found.setdefault(choice, []).append(shape.devices - first)
        return found

    # --- stages that split kernels ------------------------------------------------------------------------------------
    def split_of(self, micro_batch: int, degree: int, kind: int) -> TensorShare:
        """How kernels lie on replicas of this degree."""
        return self._share_of(micro_batch, degree, kind, tuple(range(degree)), 1)

    def _split(self, choice: _Choice, kind: int, samples: int) -> TensorShare | None:
        return None if choice.tensor == 1 else self._share_of(samples, choice.tensor, kind, *choice.inside)

    @lru_cache(maxsize=256)  # noqa: B019
    def _share_of(
        self, micro_batch: int, degree: int, kind: int, ranks: tuple[int, ...], concurrent: int
    ) -> TensorShare:
        degrees = Degrees(tp=degree, vocabulary=self._vocabulary)
        return tensor_share(self.problem, self.graph, micro_batch, degrees, self.kinds[kind], ranks, concurrent)

    @cached_property
    def _vocabulary(self) -> bool | None:
        degrees = tuple(t for t in self.problem.space.tp if t > 1)
        shared = any(len(blocks_) > 1 for value, blocks_ in self._readers.items() if value in self.graph.parameters)
        return splits_vocabularies(self.graph, self.least_samples, degrees, shared)

    def why_not(self, degree: int) -> str:
        """Why no stage can have this tensor degree; empty where it can."""
        try:
            self.split_of(self.least_samples, degree, self.slowest)
        except UserError as error:
            return str(error)
        return ""

    @lru_cache(maxsize=256)  # noqa: B019
    def _whole_at_cuts(self, choice: _Choice) -> Bools:
        """Stages that whole tensors enter and leave: their neighbours may be split otherwise."""
        split = self._split(choice, *choice.parts[0])
        if split is None:
            return self.sets.nested
        divided = {ends: float(sum(map(split.divided, values))) for ends, values in self._crossing.items()}
        entering, leaving = self.sets.crossing(divided)
        return np.asarray(entering + leaving == 0)

    def _tensor_choices(self, shape: PipelineShape, degree: int) -> dict[_Choice, list[int]]:
        """Stages of one kind of device whose replicas are runs of `degree` devices, on the innermost links that so many
        can have; samples are shared equally."""
        if self.why_not(degree):
            return {}
        cluster, on, size = self.problem.cluster, lines(self.problem.cluster, shape), shape.devices
        nearest = cluster.levels.index(cluster.level_of(range(min(degree, cluster.size))))
        near_enough = [
            all(cluster.levels.index(cluster.level_of(line[d : d + degree])) <= nearest for line in on)
            for d in range(size - degree + 1)
        ]
        samples, rest = divmod(self.problem.global_batch, shape.micro_batches)
        found: dict[_Choice, list[int]] = {}
        like: dict[Any, _Choice] = {}
        for r in range(degree, size + 1, degree) if not rest else ():
            share, uneven = divmod(samples, shape.pipelines * (r // degree))
            if uneven or share < self.least_samples or self.problem.graph.at(share) is not self.graph:
                continue
            for first in range(size - r + 1):
                kinds = {self.kind_of(d) for line in on for d in line[first : first + r]} if self.mixed else {0}
                if len(kinds) > 1 or not all(near_enough[first : first + r : degree]):
                    continue
                if self.mixed or r not in like:
                    choice = self._tensor_choice(on, first if self.mixed else 0, r, degree, kinds.pop(), share)
                    choice = like.setdefault(self._likeness(choice) if self.mixed else r, choice)
                found.setdefault(like[r] if not self.mixed else choice, []).append(size - first)
        return found

    def _tensor_choice(
        self, on: Sequence[Sequence[int]], first: int, r: int, degree: int, kind: int, share: int
    ) -> _Choice:
        cluster = self.problem.cluster
        replicas = [line[d : d + degree] for line in on for d in range(first, first + r, degree)]
        reduced = [tuple(replica[x] for replica in replicas) for x in range(degree)]
        near = (0, min(r, cluster.size - 1)), 1
        return _Choice(
            replicas=r,
            parts=((kind, share),),
            reduced=reduced[0],
            reducing=max(sharing(cluster, reduced)) if len(replicas) > 1 else 1,
            entering=self._boundary(on, first, r) if self.mixed else near,
            leaving=self._boundary(on, first + r, r) if self.mixed else near,
            tensor=degree,
            inside=(tuple(replicas[0]), max(sharing(cluster, [tuple(replica) for replica in replicas]))),
        )

    # --- places -------------------------------------------------------------------------------------------------------
    def _boundary(self, on: Sequence[Sequence[int]], place: int, width: int) -> tuple[tuple[int, ...], int]:
        """Devices on both sides of a cut of the pipelines, on the slowest link of any; and how many share that."""
        cluster = self.problem.cluster
        if not 0 < place < len(on[0]):
            return (0,), 1
        pairs = [
            (line[max(place - width, 0) + x % min(width, place)], line[min(place + x, len(line) - 1)])
            for line in on
            for x in range(width)
        ]
        used = sharing(cluster, pairs)
        slowest = max(range(len(pairs)), key=lambda x: (cluster.levels.index(cluster.level_of(pairs[x])), used[x]))
        return pairs[slowest], used[slowest]

    def _likeness(self, choice: _Choice) -> tuple[Any, ...]:
        """Equal for choices of equal costs."""
        cluster = self.problem.cluster
        ends = [
            (cluster.level_of(ranks).name if len(ranks) > 1 else "", shared)
            for ranks, shared in (choice.entering, choice.leaving)
        ]
        hosts = sorted(Counter(cluster.host_of(d).start for d in choice.reduced).values())
        inside = cluster.level_of(choice.inside[0]).name if choice.tensor > 1 else ""
        return choice.replicas, choice.parts, tuple(hosts), *ends, choice.tensor, inside, choice.inside[1]

    def _places(self, choices: dict[_Choice, list[int]], devices: int) -> Bools:
        places = np.zeros((len(choices), devices + 1), dtype=np.bool_)
        for k, left in enumerate(choices.values()):
            places[k, left] = True
        return places

    def passing_s(self, micro_batch: int, ranks: tuple[int, int], concurrent: int) -> tuple[Floats, Floats]:
        """[i, j] seconds of what enters and of what leaves every run, from one rank to another, when so many messages
        share a link."""
        entering, leaving = self._transfers(micro_batch)
        return self._curve("p2p", ranks, concurrent, entering), self._curve("p2p", ranks, concurrent, leaving)

    def entering_s(self, micro_batch: int, ranks: tuple[int, int]) -> Floats:
        """[i] seconds to bring what blocks from i on need of those before it from one rank to another."""
        return self._curve("p2p", ranks, 1, self._transfers(micro_batch)[0][:, -1])

    def all_reduce_s(self, ranks: tuple[int, ...]) -> Floats:
        """[i, j] seconds of the gradient all-reduce of every run over these ranks."""
        gradients = self._state(self.slowest)["gradients"]
        return np.zeros_like(gradients) if len(ranks) == 1 else self._curve("all_reduce", ranks, 1, gradients)

    def block_weights(self, per_op: Floats) -> Floats:
        """Sum over the ops of each block."""
        return np.bincount(self.block_of, weights=per_op, minlength=self.size).astype(np.float64)

    def _seconds_per_byte(self) -> float:
        """Of what crosses a cut, there and back, between neighbouring devices."""
        if self.problem.cluster.size < 2:
            return 0.0
        at, seconds = self._curve_points("p2p", (0, 1), 1)
        return 2 * float(seconds[20] / at[20])

    def _runs(self, per_op: Floats) -> Floats:
        """[i, j] = sum over the blocks i … j-1."""
        return self.sets.sums(self.block_weights(per_op))

    @lru_cache(maxsize=256)  # noqa: B019  (a ChainProblem lives as long as one search)
    def _times(
        self, kind: int, micro_batch: int, recompute: bool, split: TensorShare | None = None
    ) -> tuple[Floats, Floats]:
        if split is None:
            prices = self.problem.prices([micro_batch], self.kinds[kind])[micro_batch]
            op_class = self.graph.flat.op_class
            forward, backward = prices.forward.seconds[op_class], prices.backward.seconds[op_class]
        else:
            forward, backward = split.forward_s, split.backward_s
        again = np.where(self.recomputed, forward, 0.0) if recompute else 0.0
        return self._runs(forward), self._runs(backward + again)

    @lru_cache(maxsize=256)  # noqa: B019
    def _transfers(self, micro_batch: int) -> tuple[Floats, Floats]:
        specs = self.graph.flat.value_spec
        return self.sets.crossing(
            {ends: float(sum(specs[v].bytes(micro_batch) for v in values)) for ends, values in self._crossing.items()}
        )

    @cached_property
    def _crossing(self) -> dict[tuple[int, tuple[int, ...]], list[int]]:
        return crossing_values(self.dag, self.chain)

    @lru_cache(maxsize=256)  # noqa: B019
    def _stash(self, micro_batch: int, recompute: bool, split: TensorShare | None = None) -> Floats:
        """Bytes that a run keeps per micro-batch in flight: storages made in it whose first late reader is in it
        too."""
        regions = self._regions if recompute else None
        sizes = None if split is None else split.value_bytes
        maker, first_reader, size = kept_storages(self.graph, micro_batch, self.block_of, regions, sizes)
        histogram = np.zeros((self.size, self.size))
        np.add.at(histogram, (maker, first_reader), size)
        kept = self.sets.both(histogram)
        return kept if split is None or recompute else kept + self._runs(split.converted_bytes)

    @lru_cache(maxsize=256)  # noqa: B019
    def _working(self, micro_batch: int, recompute: bool, split: TensorShare | None = None) -> Floats:
        """Largest working set of any block of a run."""
        regions = self._regions if recompute else None
        working = working_sets(
            self.graph,
            micro_batch,
            [np.flatnonzero(self.block_of == b) for b in range(self.size)],
            regions,
            None if split is None else split.value_bytes,
        )
        return self.sets.largest(working if split is None else working + split.largest_converted)

    @cached_property
    def _regions(self) -> Integers:
        """Region of each op: its layer, -1 outside layers."""
        return np.where(self.recomputed, self.graph.flat.op_call, -1)

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Blocks that read each parameter, buffer and constant."""
        flat = self.graph.flat
        consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
        readers: dict[int, set[int]] = {}
        held = {v for v, s in self.graph.all_sources() if s.kind in ("parameter", "buffer", "constant")}
        for value, op in zip(flat.op_inputs.tolist(), consumer.tolist(), strict=True):
            if value in held:
                readers.setdefault(value, set()).add(int(self.block_of[op]))
        return readers

    @lru_cache(maxsize=64)  # noqa: B019
    def _state(self, kind: int, split: TensorShare | None = None) -> dict[str, Floats]:
        """Bytes of parameters, gradients and optimizer state of every run: each parameter counts once per run that
        reads it."""
        row_of, updates, accumulations = self.problem.update_prices(self.kinds[kind])
        totals: dict[tuple[int, ...], Floats] = {}
        for value, read in self._readers.items():
            state, row = state_of(self.graph, self.problem.training, [value]), row_of.get(value)
            gradient_part = optimizer_part = 1.0
            if split is not None:
                state, gradient_part, optimizer_part = _part_of(state, split, value)
            own = totals.setdefault(tuple(sorted(read)), np.zeros(6))
            besides = update_transient_bytes(self.problem.training, self.kinds[kind], state)
            together = update_transient_bytes(  # what the update holds of all parameters, not of one after the other
                self.problem.training, self.kinds[kind], replace(state, largest_elements=0)
            )
            own[:5] += (
                state.parameters + state.gradients + state.optimizer_state,
                state.gradients,
                0.0 if row is None else updates.seconds[row] * optimizer_part,
                0.0 if row is None else accumulations.seconds[row] * gradient_part,
                together,
            )
            own[5] = max(own[5], besides - together)
        sums, largest = np.zeros((5, *self.sets.nested.shape)), np.zeros(self.sets.nested.shape)
        for blocks_, own in totals.items():
            reads = self.sets.any_of(blocks_)
            sums += own[:5, None, None] * reads
            np.maximum(largest, own[5] * reads, out=largest)
        names = ("all", "gradients", "update_s", "accumulate_s")
        return dict(zip(names, sums, strict=False)) | {"update": sums[4] + largest}

    def _curve(self, kind: CollectiveKind, ranks: tuple[int, ...], concurrent: int, size: Floats) -> Floats:
        """Seconds by bytes, read off the communication model at powers of two and linear in between; nothing sent
        takes no time."""
        if len(set(ranks)) < 2:
            return np.zeros_like(size)
        at, seconds = self._curve_points(kind, ranks, concurrent)
        return np.where(size > 0, np.interp(size, at, seconds), 0.0)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _curve_points(self, kind: CollectiveKind, ranks: tuple[int, ...], concurrent: int) -> tuple[Floats, Floats]:
        at = [1 << e for e in range(8, 44)]
        table = CollectiveTable(tuple(Collective(kind, size, ranks, concurrent) for size in at))
        estimate = self.problem.costs.communication.estimate(table, self.problem.cluster)
        return np.array(at, dtype=np.float64), estimate.mean_s


def _part_of(state: StateBytes, split: TensorShare, value: int) -> tuple[StateBytes, float, float]:
    """What one device keeps of a parameter's state; the parts of its gradient and of its optimizer state."""
    parameter, gradient, optimizer = (float(part[value]) for part in split.parts)
    held = replace(
        state,
        parameters=int(state.parameters * parameter),
        gradients=int(state.gradients * gradient),
        optimizer_state=int(state.optimizer_state * optimizer),
        largest_elements=int(state.largest_elements * optimizer),
        elements=int(state.elements * optimizer),
    )
    return held, gradient, optimizer
