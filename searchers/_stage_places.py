"""Where a stage may stand on the pipelines of a cluster, and how its devices share the samples of a micro-batch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from simpart.lowering.transfers import sharing
from simpart.searchers._cut_graph import CutGraph
from simpart.searchers._lines import lines, shares
from simpart.searchers._pipelines import PipelineShape
from simpart.searchers._run_costs import RunCosts
from simpart.searchers._tensor_stages import TensorShares

__all__ = ["Places", "StageChoice", "StagePlaces"]

Lines = Sequence[Sequence[int]]
"""The devices of each pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
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


Places = dict[StageChoice, list[int]]
"""The devices left (the stage's own included) wherever a choice may stand."""


@dataclass(frozen=True, eq=False)
class StagePlaces:
    """The choices of devices that stages of a cut graph have, for any pipeline shape."""

    cut: CutGraph
    runs: RunCosts
    tensors: TensorShares

    def choices(self, shape: PipelineShape, power_of_two: bool, degrees: tuple[int, ...] = (1,)) -> Places:
        """Every way to place a stage, ascending in replicas; none where the global batch cannot be divided like this.

        `degrees` are those of tensor parallelism; `power_of_two` limits the replicas of stages without it.
        """
        found = self._whole(shape, power_of_two) if 1 in degrees else {}
        if degrees == (1,):
            return found
        if not self.cut.mixed:
            found = {choice: list(range(choice.replicas, shape.devices + 1)) for choice in found}
        for degree in degrees:
            if degree > 1:
                found |= self._split(shape, degree)
        return dict(sorted(found.items(), key=lambda item: item[0].replicas))

    def alone(self, shape: PipelineShape, ranks: tuple[int, ...], reduced: tuple[int, ...]) -> StageChoice:
        """A stage on these devices of all pipelines, which must be able to share the samples; without transfers, with
        its gradients summed over `reduced`."""
        taken, here = self.shares(shape, ranks), ((0,), 1)
        assert taken is not None
        return StageChoice(
            replicas=len(ranks) // shape.pipelines,
            parts=self._parts(ranks, taken),
            reduced=reduced,
            entering=here,
            leaving=here,
        )

    def shares(self, shape: PipelineShape, devices: Sequence[int]) -> tuple[int, ...] | None:
        """Samples of a micro-batch that each of these devices, which run one stage of all pipelines, takes."""
        problem = self.cut.problem
        samples, rest = divmod(problem.global_batch, shape.micro_batches)
        kinds = [self.cut.kind_of(d) for d in devices]
        if rest:
            return None
        whole_s = functools.partial(self._whole_s, shape.recompute)
        for uneven in (True, False) if problem.space.uneven_replicas else (False,):
            taken = shares(kinds, samples, self.cut.least_samples, whole_s, uneven)
            if taken is not None and all(problem.graph.at(b) is self.cut.graph for b in set(taken)):
                return taken
        return None

    def equal_shares(self, shape: PipelineShape, replicas: int) -> tuple[int, ...]:
        """Samples of a micro-batch of each of so many replicas, which must divide it."""
        share, rest = divmod(self.cut.problem.global_batch, shape.micro_batches * replicas)
        assert not rest
        return (share,) * replicas

    def _whole_s(self, recompute: bool, kind: int, samples: int) -> float:
        """Forward and backward of all blocks."""
        forward, backward = self.runs.times_s(kind, samples, recompute)
        return float(forward[0, -1] + backward[0, -1])

    def _parts(self, ranks: Sequence[int], taken: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(set(zip(map(self.cut.kind_of, ranks), taken, strict=True))))

    def _near(self, devices: int) -> tuple[tuple[int, ...], int]:
        """On equal devices a stage counts as the first of its pipeline, with neighbours as far away as it is long."""
        return (0, min(devices, self.cut.problem.cluster.size - 1)), 1

    def _whole(self, shape: PipelineShape, power_of_two: bool) -> Places:
        """Stages that split no kernels."""
        on = lines(self.cut.problem.cluster, shape)
        found: Places = {}
        like: dict[Hashable, StageChoice] = {}
        for r in range(1, shape.devices + 1):
            if power_of_two and r & (r - 1):
                continue
            for first in range(shape.devices - r + 1 if self.cut.mixed else 1):
                own = [line[first : first + r] for line in on]
                ranks = tuple(d for devices in own for d in devices)
                taken = self.shares(shape, ranks)
                if taken is None:
                    break
                if not self.cut.mixed:
                    near, parts = self._near(r), ((0, max(taken)),)
                    choice = StageChoice(replicas=r, parts=parts, reduced=ranks, entering=near, leaving=near)
                else:
                    choice = StageChoice(
                        replicas=r,
                        parts=self._parts(ranks, taken),
                        reduced=ranks,
                        entering=self._boundary(on, first, r),
                        leaving=self._boundary(on, first + r, r),
                    )
                    choice = like.setdefault(self._likeness(choice), choice)
                found.setdefault(choice, []).append(shape.devices - first)
        return found

    def _split(self, shape: PipelineShape, degree: int) -> Places:
        """Stages of one kind of device whose replicas are runs of `degree` devices, on the innermost links that so many
        can have; samples are shared equally."""
        if self.tensors.why_not(degree):
            return {}
        problem, cluster, mixed, size = self.cut.problem, self.cut.problem.cluster, self.cut.mixed, shape.devices
        on = lines(cluster, shape)
        nearest = cluster.levels.index(cluster.level_of(range(min(degree, cluster.size))))
        near_enough = [
            all(cluster.levels.index(cluster.level_of(line[d : d + degree])) <= nearest for line in on)
            for d in range(size - degree + 1)
        ]
        samples, rest = divmod(problem.global_batch, shape.micro_batches)
        found: Places = {}
        like: dict[Hashable, StageChoice] = {}
        for r in range(degree, size + 1, degree) if not rest else ():
            share, uneven = divmod(samples, shape.pipelines * (r // degree))
            if uneven or share < self.cut.least_samples or problem.graph.at(share) is not self.cut.graph:
                continue
            for first in range(size - r + 1):
                kinds = {self.cut.kind_of(d) for line in on for d in line[first : first + r]} if mixed else {0}
                if len(kinds) > 1 or not all(near_enough[first : first + r : degree]):
                    continue
                if mixed or r not in like:
                    choice = self._split_choice(on, first if mixed else 0, r, degree, kinds.pop(), share)
                    choice = like.setdefault(self._likeness(choice) if mixed else r, choice)
                found.setdefault(like[r] if not mixed else choice, []).append(size - first)
        return found

    def _split_choice(self, on: Lines, first: int, r: int, degree: int, kind: int, share: int) -> StageChoice:
        cluster = self.cut.problem.cluster
        replicas = [tuple(line[d : d + degree]) for line in on for d in range(first, first + r, degree)]
        reduced = [tuple(replica[x] for replica in replicas) for x in range(degree)]
        return StageChoice(
            replicas=r,
            parts=((kind, share),),
            reduced=reduced[0],
            reducing=max(sharing(cluster, reduced)) if len(replicas) > 1 else 1,
            entering=self._boundary(on, first, r) if self.cut.mixed else self._near(r),
            leaving=self._boundary(on, first + r, r) if self.cut.mixed else self._near(r),
            tensor=degree,
            inside=(replicas[0], max(sharing(cluster, replicas))),
        )

    def _boundary(self, on: Lines, place: int, width: int) -> tuple[tuple[int, ...], int]:
        """Devices on both sides of a cut of the pipelines, on the slowest link of any; and how many share that."""
        cluster = self.cut.problem.cluster
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

    def _likeness(self, choice: StageChoice) -> Hashable:
        """Equal for choices of equal costs."""
        cluster = self.cut.problem.cluster
        ends = [
            (cluster.level_of(ranks).name if len(ranks) > 1 else "", shared)
            for ranks, shared in (choice.entering, choice.leaving)
        ]
        hosts = sorted(Counter(cluster.host_of(d).start for d in choice.reduced).values())
        inside = cluster.level_of(choice.inside[0]).name if choice.tensor > 1 else ""
        return choice.replicas, choice.parts, tuple(hosts), *ends, choice.tensor, inside, choice.inside[1]
