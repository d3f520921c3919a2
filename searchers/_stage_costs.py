"""The StageCosts of a Problem's graph on any pipeline shape: costs of all runs of blocks, at every place of a stage."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from simpart.graph import Graph
from simpart.problem import Problem
from simpart.searchers._cut_graph import cut_graph
from simpart.searchers._link_times import LinkTimes
from simpart.searchers._pipelines import PipelineShape
from simpart.searchers._run_costs import RunCosts
from simpart.searchers._stage_places import Places, StageChoice, StagePlaces
from simpart.searchers._stages import Bools, StageCosts
from simpart.searchers._tensor_stages import TensorShare, TensorShares

__all__ = ["ChainProblem", "in_flight"]

Floats = npt.NDArray[np.float64]


def in_flight(schedule: str) -> Literal["gpipe", "1f1b"]:
    """How many micro-batches the memory of a schedule counts."""
    return "gpipe" if schedule == "gpipe" else "1f1b"


class ChainProblem:
    """One graph of a Problem cut into blocks (see `cut_graph`), and the StageCosts of any pipeline shape on it: stages
    cost what their own devices take, and what the links there take where devices are unequal."""

    def __init__(
        self,
        problem: Problem,
        graph: Graph,
        micro_batch: int,
        most_blocks: int,
        most_sets: int = 0,
        uncoarsening: bool = False,
    ) -> None:
        self.cut = cut_graph(problem, graph, micro_batch, most_blocks, most_sets, uncoarsening)
        self.links = LinkTimes(problem)
        self.runs = RunCosts(self.cut, self.links)
        self.tensors = TensorShares(self.cut)
        self.places = StagePlaces(self.cut, self.runs, self.tensors)
        self.limit_bytes = float(max(device.usable_bytes for device in self.cut.kinds))

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.cut.size

    def costs(
        self, shape: PipelineShape, schedule: str, power_of_two: bool, degrees: tuple[int, ...] = (1,)
    ) -> StageCosts | None:
        """None where the global batch cannot be divided like this. `degrees` are those of tensor parallelism that a
        stage may have; others than 1 stand where the devices of a replica are as near each other as can be.

        What a stage does once per step (gradient all-reduce, update) is spread over its micro-batches as backward time,
        so that the cuts balance it too; `allreduce_s` is therefore zero. Memory is that of the device with the least
        left, and counts from the largest memory: what a smaller device lacks is held by `static_bytes`.
        """
        choices = self.places.choices(shape, power_of_two, degrees)
        return self._costs(shape, schedule, choices) if choices else None

    def costs_of(
        self, shape: PipelineShape, schedule: str, stages: Sequence[tuple[int, ...]], *, reduced: bool = False
    ) -> StageCosts:
        """Those of stages on these devices of all pipelines, which must be able to share the samples; without
        transfers, with gradient all-reduces only if `reduced`. Choice k is `stages[k]`."""
        choices = {
            self.places.alone(shape, ranks, ranks if reduced else (number,)): list[int]()
            for number, ranks in enumerate(stages)
        }
        return self._costs(shape, schedule, choices)

    def _costs(self, shape: PipelineShape, schedule: str, choices: Places) -> StageCosts:
        sizes: dict[int, set[int]] = {}
        for choice in choices:
            for kind, samples in choice.parts:
                sizes.setdefault(kind, set()).add(samples)
        for kind, wanted in sizes.items():  # all at once, not one by one
            self.cut.problem.prices(sorted(wanted), self.cut.kinds[kind])
        forward, backward, transfer, static, stash, update = (
            np.stack(arrays, axis=-1) for arrays in zip(*(self._row(c, shape) for c in choices), strict=True)
        )
        full, nested = forward.shape, self.cut.sets.nested
        degrees = tuple(choice.tensor for choice in choices)
        allowed = np.broadcast_to(nested[:, :, None], full)
        if max(degrees) > 1:
            allowed = np.stack([nested & self._whole_at_cuts(c) for c in choices], axis=-1)
        placed = self.cut.mixed or any(left != [shape.devices] for left in choices.values())
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
            places=_places(choices, shape.devices) if placed else None,
            tensor=degrees if max(degrees) > 1 else None,
        )

    def _row(self, choice: StageChoice, shape: PipelineShape) -> tuple[Floats, ...]:
        """[i, j] forward, backward, transfer, static bytes, bytes per micro-batch in flight, bytes during the update,
        each of the worst part."""
        share, rows, runs = 1 / shape.micro_batches, [], self.runs
        for kind, samples in choice.parts:
            split = self._split(choice, kind, samples)
            state = runs.state(kind, split)
            forward, backward = runs.times_s(kind, samples, shape.recompute, split)
            reduce_s = self.links.seconds("all_reduce", choice.reduced, choice.reducing, state.gradient_bytes)
            once_s = reduce_s + state.update_s
            held = state.all_bytes + (self.limit_bytes - self.cut.kinds[kind].usable_bytes)
            rows.append(
                (
                    forward,
                    backward + (once_s * share + state.accumulate_s * (1 - share)),
                    held + runs.working_bytes(samples, shape.recompute, split),
                    runs.stash_bytes(samples, shape.recompute, split) + runs.crossing_bytes(samples)[0],
                    held + state.update_bytes,
                )
            )
        forward, backward, static, stash, update = (
            functools.reduce(np.maximum, arrays) for arrays in zip(*rows, strict=True)
        )
        entering, leaving = runs.crossing_bytes(max(samples for _, samples in choice.parts))
        transfer = self.links.seconds("p2p", *choice.entering, entering)
        transfer = transfer + self.links.seconds("p2p", *choice.leaving, leaving)
        return forward, backward, transfer, static, stash, update

    def _split(self, choice: StageChoice, kind: int, samples: int) -> TensorShare | None:
        return None if choice.tensor == 1 else self.tensors.of(samples, choice.tensor, kind, *choice.inside)

    def _whole_at_cuts(self, choice: StageChoice) -> Bools:
        split = self._split(choice, *choice.parts[0])
        return self.cut.sets.nested if split is None else self.runs.whole_at_cuts(split)


def _places(choices: Places, devices: int) -> Bools:
    """[choice, devices left]: whether it may stand there."""
    places = np.zeros((len(choices), devices + 1), dtype=np.bool_)
    for k, left in enumerate(choices.values()):
        places[k, left] = True
    return places
