"""Alpa's combination: stages and submeshes by its dynamic program, over block times that Rhino's cost graph finds.

Every submesh and way to share it out (replicas × an axis that splits kernels) is solved once over the whole model,
once more where memory is short; repeated layers share their variables, so any run of blocks costs the sum of its
blocks. Each stage then has a sharding of its own.
Reference: Zheng et al., "Alpa", OSDI 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpart.configure import equal_layers, layer_calls, recompute_regions
from simpart.errors import UserError
from simpart.lowering.transfers import CommPrices
from simpart.memory import ALLOCATOR_FACTOR
from simpart.placement import Sharding, StatePlacement
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.partition import check_plan
from simpart.problem import Problem
from simpart.schedule import Schedule
from simpart.searchers._cost_graph import Floats, Ints, minimise
from simpart.searchers._rhino.guess import region_numbers
from simpart.searchers._rhino.model import Mesh, MeshModel, StageLoad
from simpart.searchers.alpa import AlpaPlan, InterOp, InterOpCosts, successors_allowed
from simpart.searching import Candidate, Control
from simpart.sharding.patterns import by_pattern

__all__ = ["AlpaIlp"]

AXIS = "x"
MOST_SAMPLES = 5
"""Sizes of a micro-batch, over all replicas of a stage, that are looked at: powers of two, spread over all."""
SECONDS_PER_SOLVE = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Option:
    """A submesh with a sharding of all blocks: seconds per micro-batch and bytes of a device, by block."""

    replicas: int
    parts: int
    model: MeshModel
    choice: Ints
    time_s: Floats
    state_bytes: Floats
    kept_bytes: Floats

    @property
    def size(self) -> int:
        return self.replicas * self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaIlp:
    """Stages of unequal submeshes on at most `most_blocks` runs of layers; equal kinds of devices."""

    name: str = "alpa_ilp"
    objective: str = "sum of stages + (micro-batches - 1) × the slowest, each with its conversions and state"
    most_blocks: int = 16
    worth_running: int = 3

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plan of every size of a micro-batch and recomputation, and of every smaller limit that it needs."""
        if len(problem.cluster.kinds) > 1 or problem.mode != "eager":
            yield Candidate(plan=None, family="all", why="alpa_ilp takes devices of one kind in eager mode; try alpa")
            return
        least, devices = problem.space.min_stages, problem.cluster.size
        if least > devices:
            why = f"at least {least} stages were asked for, with {devices} devices; lower it"
            yield Candidate(plan=None, family="all", why=why)
            return
        batch = problem.global_batch
        sizes = [b for b in range(1, batch + 1) if batch % b == 0]
        counts = [b for b in sizes if batch // b <= (problem.space.max_micro_batches or batch)]
        chosen = [b for b in counts if b & (b - 1) == 0] or counts
        work = _Work(problem, control, self.most_blocks)
        places = np.linspace(0, len(chosen) - 1, min(MOST_SAMPLES, len(chosen))).round().astype(int)
        for samples in (chosen[place] for place in reversed(np.unique(places))):
            for recompute in problem.space.recompute:
                control.check()
                yield from work.candidates(samples, recompute == "full")
        control.report(bound=work.bound_s)


@dataclass(slots=True)
class _Work:
    problem: Problem
    control: Control
    most_blocks: int
    bound_s: float = math.inf
    known: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # prices by mesh
    prices: CommPrices = field(init=False)

    def __post_init__(self) -> None:
        self.prices = CommPrices(self.problem.costs.communication, self.problem.cluster)

    def candidates(self, samples: int, recompute: bool) -> Iterator[Candidate]:
        """Plans of one micro-batch size; with less memory while what comes out holds too much."""
        problem = self.problem
        micro_batches = problem.global_batch // samples
        family = f"{micro_batches} micro-batches of {samples}" + (", recomputed" if recompute else "")
        device = problem.cluster.device(0)
        limit = (device.memory_bytes - device.reserved_bytes) / ALLOCATOR_FACTOR[device.kind]
        blocks = min(self.most_blocks, max(2, len(layer_calls(problem.graph))), problem.cluster.size * 2)
        options = self._options(samples, micro_batches, recompute, blocks, limit)
        for shrink in (1.0, 0.9, 0.8, 0.65):
            found = self._interop(options, blocks, micro_batches, limit * shrink)
            if found is None:
                yield Candidate(plan=None, family=family, why="no stages fit on their submeshes; try recomputation")
                return
            objective_s = found.total_s + problem.costs.step_overhead_s
            if shrink == 1.0:
                self.bound_s = min(self.bound_s, found.bound_s + problem.costs.step_overhead_s)
            plan = self._plan(options, found, samples, micro_batches, recompute, blocks)
            if plan is None:
                yield Candidate(
                    plan=None, family=family, why="these stages make no plan: a shared parameter lies unlike"
                )
                return
            yield Candidate(plan=plan, family=family, objective_s=objective_s, why=_words(options, found))
            if self.control.latest is None or self.control.latest.evaluation.feasible:
                return

    def _options(self, samples: int, micro_batches: int, recompute: bool, blocks: int, limit: float) -> list[_Option]:
        """All submeshes of a size that divides the devices, fast and lean."""
        found: list[_Option] = []
        devices, space = self.problem.cluster.size, self.problem.space
        for size in (d for d in range(1, devices + 1) if devices % d == 0):
            for parts in (n for n in range(1, size + 1) if size % n == 0):
                replicas = size // parts
                if samples % replicas or (tuple(space.tp) != (1,) and parts not in (1, *space.tp)):
                    continue
                self.control.check()
                fast = self._solve(replicas, parts, samples, micro_batches, recompute, blocks, math.inf)
                if fast is None:
                    continue
                found.append(fast)
                stages = devices // size
                held = float(fast.state_bytes.sum()) / stages + float(fast.kept_bytes.sum())
                if held > limit:  # what an even share of the model holds as first of equal stages
                    lean = self._solve(replicas, parts, samples, micro_batches, recompute, blocks, limit * stages)
                    found += [] if lean is None else [lean]
        return found

    def _solve(
        self, replicas: int, parts: int, samples: int, micro_batches: int, recompute: bool, blocks: int, limit: float
    ) -> _Option | None:
        problem, micro_batch = self.problem, samples // replicas
        graph = problem.graph.at(micro_batch)
        block_of = equal_layers(graph, blocks)
        ops = [np.flatnonzero(block_of == b) for b in range(blocks)]
        axes = ((AXIS, parts),) if parts > 1 else ()
        size = replicas * parts
        group = DeviceGroup(devices=Devices.of(range(size)), axes=(("dp", replicas), *axes))
        zero = tuple(problem.space.zero) if tuple(problem.space.zero) != (0,) else (0, 1, 3)
        mesh = Mesh(
            group=group, replicas=replicas, axes=axes, micro_batch=micro_batch, micro_batches=micro_batches, stages=1,
            zero=zero if replicas > 1 else (0,),
        )  # fmt: skip
        flying = min(micro_batches, problem.cluster.size // size)
        load = StageLoad(name="all stages", ops=np.flatnonzero(block_of >= 0), in_flight=flying, limit_bytes=limit)
        regions = region_numbers(graph, ops if recompute else [])
        key = (micro_batch, replicas, parts)
        model = MeshModel(
            problem, mesh, [load], regions, communication=self.prices, known=self.known.get(key)
        )  # fmt: skip
        self.known[key] = model.known
        solution = minimise(model.graph, relative_gap=0.01, seconds=SECONDS_PER_SOLVE)
        if solution.choice is None:
            return None
        step_s, state, kept = model.block_shares(solution.choice, block_of, blocks)
        return _Option(
            replicas=replicas, parts=parts, model=model, choice=solution.choice, time_s=step_s / micro_batches,
            state_bytes=state, kept_bytes=kept,
        )  # fmt: skip

    def _interop(self, options: list[_Option], blocks: int, micro_batches: int, limit: float) -> AlpaPlan | None:
        """The dynamic program over runs of blocks."""
        if not options:
            return None
        shape = (blocks, blocks + 1, len(options))
        time_s, successors = np.full(shape, np.inf), np.full(shape, -1, dtype=np.int64)
        for o, option in enumerate(options):
            sums = [
                np.concatenate(([0.0], np.cumsum(v))) for v in (option.time_s, option.state_bytes, option.kept_bytes)
            ]
            runs = [total[None, :] - total[:-1, None] for total in sums]
            time_s[:, :, o] = np.where(np.arange(blocks + 1)[None, :] > np.arange(blocks)[:, None], runs[0], np.inf)
            successors[:, :, o] = successors_allowed(np.full(runs[0].shape, limit), runs[2] * 0.0, runs[1], runs[2])
        costs = InterOpCosts(time_s=time_s, successors=successors, sizes=tuple(o.size for o in options))
        problem = InterOp(costs, self.problem.cluster.size, micro_batches, most_stages=self.problem.space.max_stages)
        fewest = self.problem.space.min_stages
        if fewest == 1:
            return problem.best()
        plans = [problem.best(n) for n in range(fewest, problem.most_stages + 1)]
        return min((p for p in plans if p is not None), key=lambda p: p.total_s, default=None)

    def _plan(
        self, options: list[_Option], found: AlpaPlan, samples: int, micro_batches: int, recompute: bool, blocks: int
    ) -> Plan | None:
        problem = self.problem
        groups, stages, sizes, shardings = [], [], [], dict[str, Sharding]()
        table: dict[int, StatePlacement] = {}
        first = 0
        graph = options[found.stages[0].option].model.source
        block_of = equal_layers(graph, blocks)
        reader, values = graph.reads["parameter"]
        for s, stage in enumerate(found.stages):
            option = options[stage.option]
            ops = np.flatnonzero((block_of >= stage.start) & (block_of < stage.end))
            axes = (("dp", option.replicas), (AXIS, option.parts))
            groups.append(DeviceGroup(devices=Devices.of(range(first, first + option.size)), axes=axes))
            first += option.size
            sizes.append((samples // option.replicas,) * option.replicas)
            sharding = option.model.sharding(option.choice)
            name = f"mesh {option.replicas} × {option.parts}, {stage.option}" if sharding.classes else None
            if name:
                shardings[name] = sharding
            regions = recompute_regions(graph, ops) if recompute else ()
            stages.append(Stage(ops=OpSet.of(graph, ops), group=s, recompute=regions, sharding=name))
            own = option.model.state_table(option.choice)
            for value in np.unique(values[np.isin(reader, ops)]).tolist():
                if value in own:
                    table[value] = own[value]
        plan = Plan(
            graph=graph.fingerprint, groups=tuple(groups), stages=tuple(stages),
            batch=Batch(micro_batches=micro_batches, sizes=tuple(sizes)),
            schedule=Schedule(kind="1f1b" if "1f1b" in problem.space.schedules else problem.space.schedules[0]),
            shardings=tuple(sorted(shardings.items())), state=by_pattern(graph, table), mode=problem.mode,
        )  # fmt: skip
        try:
            check_plan(plan, graph)
        except UserError:
            return None
        return plan


def _words(options: list[_Option], found: AlpaPlan) -> str:
    """Blocks and submesh of every stage: `0–7 on 2 × 4; 8–15 on 1 × 8`."""
    return "blocks " + "; ".join(
        f"{s.start}–{s.end - 1} on {options[s.option].replicas} × {options[s.option].parts}" for s in found.stages
    )
