"""What every run of blocks takes and holds on one kind of device: seconds, bytes and transfers of all runs at once.

Everything is a sum over ops or over tensors, so all runs [i, j) come from prefix sums and two-dimensional histograms,
without pricing or walking a stage on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simpart.memory import StateBytes, state_of, update_transient_bytes
from simpart.memory.blocks import kept_storages, working_sets
from simpart.searchers._cut_graph import CutGraph
from simpart.searchers._link_times import LinkTimes
from simpart.searchers._remembered import remembered
from simpart.searchers._tensor_stages import TensorShare

__all__ = ["RunCosts", "StateCosts"]

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateCosts:
    """[i, j] of parameters, gradients and optimizer state: each parameter counts once per run that reads it.
    `update_bytes` is what the update needs besides."""

    all_bytes: Floats
    gradient_bytes: Floats
    update_s: Floats
    accumulate_s: Floats
    update_bytes: Floats


@dataclass(frozen=True, eq=False)
class RunCosts:
    """Costs of the runs of a cut graph, in arrays [i, j] for the blocks i … j-1 (of sets: see BlockSets).

    `kind` is the number of a kind of device, `split` how the devices of a replica share kernels.
    """

    cut: CutGraph
    links: LinkTimes

    @remembered
    def times_s(
        self, kind: int, micro_batch: int, recompute: bool, split: TensorShare | None = None
    ) -> tuple[Floats, Floats]:
        """Forward and backward of one micro-batch."""
        if split is None:
            prices = self.cut.problem.prices([micro_batch], self.cut.kinds[kind])[micro_batch]
            op_class = self.cut.graph.flat.op_class
            forward, backward = prices.forward.seconds[op_class], prices.backward.seconds[op_class]
        else:
            forward, backward = split.forward_s, split.backward_s
        again = np.where(self.cut.recomputed, forward, 0.0) if recompute else 0.0
        return self._sums(forward), self._sums(backward + again)

    @remembered
    def crossing_bytes(self, micro_batch: int) -> tuple[Floats, Floats]:
        """What enters and what leaves."""
        specs = self.cut.graph.flat.value_spec
        crossing = self.cut.crossing.items()
        return self.cut.sets.crossing(
            {ends: float(sum(specs[v].bytes(micro_batch) for v in values)) for ends, values in crossing}
        )

    def passing_s(self, micro_batch: int, ranks: tuple[int, int], concurrent: int) -> tuple[Floats, Floats]:
        """Of what enters and of what leaves, from one rank to another, when so many messages share a link."""
        entering, leaving = self.crossing_bytes(micro_batch)
        seconds = self.links.seconds
        return seconds("p2p", ranks, concurrent, entering), seconds("p2p", ranks, concurrent, leaving)

    def entering_s(self, micro_batch: int, ranks: tuple[int, int]) -> Floats:
        """[i] seconds to bring what blocks from i on need of those before it from one rank to another."""
        return self.links.seconds("p2p", ranks, 1, self.crossing_bytes(micro_batch)[0][:, -1])

    def all_reduce_s(self, ranks: tuple[int, ...]) -> Floats:
        """Of the gradients, over these ranks."""
        gradients = self.state(self.cut.slowest).gradient_bytes
        return np.zeros_like(gradients) if len(ranks) == 1 else self.links.seconds("all_reduce", ranks, 1, gradients)

    @remembered
    def whole_at_cuts(self, split: TensorShare) -> Bools:
        """Runs that whole tensors enter and leave: their neighbours may be split otherwise."""
        divided = {ends: float(sum(map(split.divided, values))) for ends, values in self.cut.crossing.items()}
        entering, leaving = self.cut.sets.crossing(divided)
        return np.asarray(entering + leaving == 0)

    @remembered
    def stash_bytes(self, micro_batch: int, recompute: bool, split: TensorShare | None = None) -> Floats:
        """Kept per micro-batch in flight: storages made in a run whose first late reader is in it too."""
        size = self.cut.size
        regions = self._regions if recompute else None
        sizes = None if split is None else split.value_bytes
        maker, first_reader, kept = kept_storages(self.cut.graph, micro_batch, self.cut.block_of, regions, sizes)
        histogram = np.zeros((size, size))
        np.add.at(histogram, (maker, first_reader), kept)
        both = self.cut.sets.both(histogram)
        return both if split is None or recompute else both + self._sums(split.converted_bytes)

    @remembered
    def working_bytes(self, micro_batch: int, recompute: bool, split: TensorShare | None = None) -> Floats:
        """Largest working set of any block of a run."""
        working = working_sets(
            self.cut.graph,
            micro_batch,
            [np.flatnonzero(self.cut.block_of == b) for b in range(self.cut.size)],
            self._regions if recompute else None,
            None if split is None else split.value_bytes,
        )
        return self.cut.sets.largest(working if split is None else working + split.largest_converted)

    @remembered
    def state(self, kind: int, split: TensorShare | None = None) -> StateCosts:
        """Bytes of parameters, gradients and optimizer state, and seconds of what is done with them."""
        graph, training, device = self.cut.graph, self.cut.problem.training, self.cut.kinds[kind]
        row_of, updates, accumulations = self.cut.problem.update_prices(device)
        totals: dict[tuple[int, ...], Floats] = {}
        for value, read in self.cut.readers.items():
            state, row = state_of(graph, training, [value]), row_of.get(value)
            gradient_part = optimizer_part = 1.0
            if split is not None:
                state, gradient_part, optimizer_part = _part_of(state, split, value)
            own = totals.setdefault(tuple(sorted(read)), np.zeros(6))
            besides = update_transient_bytes(training, device, state)
            together = update_transient_bytes(  # what the update holds of all parameters, not of one after the other
                training, device, replace(state, largest_elements=0)
            )
            own[:5] += (
                state.parameters + state.gradients + state.optimizer_state,
                state.gradients,
                0.0 if row is None else updates.seconds[row] * optimizer_part,
                0.0 if row is None else accumulations.seconds[row] * gradient_part,
                together,
            )
            own[5] = max(own[5], besides - together)
        sums, largest = np.zeros((5, *self.cut.sets.nested.shape)), np.zeros(self.cut.sets.nested.shape)
        for blocks_, own in totals.items():
            reads = self.cut.sets.any_of(blocks_)
            sums += own[:5, None, None] * reads
            np.maximum(largest, own[5] * reads, out=largest)
        return StateCosts(
            all_bytes=sums[0],
            gradient_bytes=sums[1],
            update_s=sums[2],
            accumulate_s=sums[3],
            update_bytes=sums[4] + largest,
        )

    def _sums(self, per_op: Floats) -> Floats:
        return self.cut.sets.sums(self.cut.block_weights(per_op))

    @cached_property
    def _regions(self) -> Integers:
        """Region of each op: its layer, -1 outside layers."""
        return np.where(self.cut.recomputed, self.cut.graph.flat.op_call, -1)


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
