"""Rhino: stages, meshes and micro-batches outside, one exact cost graph over all strategies of all kernels inside.

For every setting of the outer choices the sharding of all kernels, conversions between them and the placement of all
state are chosen together, under the memory of a device: data, tensor, sequence, expert and vocabulary parallelism and
ZeRO are points of one space. What comes out is simulated; a plan that holds too much comes back with a tighter limit.

Reference: Rhino, arXiv 2302.08141. The cost graph follows Alpa (arXiv 2201.12023), the sharing of conversions
AutoParallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simpart.configure import equal_layers, layer_calls, recompute_regions
from simpart.errors import UserError
from simpart.memory import ALLOCATOR_FACTOR, state_table
from simpart.partition import check_plan
from simpart.plan import Batch, OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.schedule import Schedule
from simpart.searchers._cost_graph import Ints, Solution, linear_bound
from simpart.searchers._rhino_explain import resembles
from simpart.searchers._rhino_levels import RhinoLevel, solve_level
from simpart.searchers._rhino_model import Mesh, MeshModel, StageLoad
from simpart.searchers._rhino_pins import minimal_conflict, pins_on
from simpart.searchers._rhino_settings import Setting, guess_s, physical_floor_s, settings, split_axes
from simpart.searchers._rhino_stages import balanced_layers, program_stages, stage_ops
from simpart.searching import Candidate, Control, Proposal
from simpart.sharding.pins import Pin
from simpart.transfers import CommPrices

__all__ = ["Rhino", "rhino_o1", "rhino_o2", "rhino_o4"]

RELATIVE_GAP = 0.01
SECONDS_PER_SOLVE = 20.0
ROUNDS = 4
"""Times that a setting is solved again with less memory after a plan that did not fit."""
BEST_SPLIT = 4
"""Settings whose sharding axis is then tried as two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhino:
    """`level`: O1 to O4, see `_rhino_levels`. `pins` by axis name (`x`, `y`) hold on every mesh that has the axis."""

    name: str = "rhino"
    level: RhinoLevel = "O3"
    pins: tuple[tuple[str, tuple[Pin, ...]], ...] = ()
    objective: str = "(micro-batches + stages - 1) × an equal share of kernels and collectives, and once per step state"

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        """Settings in the order of a guess; those whose kernels alone take longer than the best found are left out."""
        yield from _Search(problem, self.level, control, dict(self.pins)).run()


def rhino_o1() -> Rhino:
    """Along critical nodes, one prefix kept."""
    return Rhino(name="rhino_o1", level="O1")


def rhino_o2() -> Rhino:
    """Along critical nodes, exact where nothing bypasses them."""
    return Rhino(name="rhino_o2", level="O2")


def rhino_o4() -> Rhino:
    """Every kernel a variable of the solver."""
    return Rhino(name="rhino_o4", level="O4")


@dataclass(slots=True)
class _Search:
    problem: Problem
    level: RhinoLevel
    control: Control
    pins: dict[str, tuple[Pin, ...]] = field(default_factory=dict)
    best_s: float = math.inf
    bounds: list[float] = field(default_factory=list)
    objective_of: dict[Setting, float] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)  # prices by mesh
    prices: CommPrices = field(init=False)

    def __post_init__(self) -> None:
        self.prices = CommPrices(self.problem.costs.communication, self.problem.cluster)

    def run(self) -> Iterator[Proposal]:
        problem, control = self.problem, self.control
        found = settings(problem)
        if not found:
            space, size = problem.space, problem.cluster.size
            why = (
                f"no number of stages from {space.min_stages} to {space.max_stages or size} and of replicas divides "
                f"the {size} devices and the global batch of {problem.global_batch}; change the stages or the batch"
            )
            yield Candidate(plan=None, family="all", why=why)
            return
        device = min(problem.cluster.kinds, key=lambda d: d.peak(problem.graph.precision))
        state_bytes = float(state_table(problem.graph, problem.training)[0].sum())
        order: list[tuple[float, int, Setting]] = []
        for setting in found:
            control.check()
            order.append((guess_s(problem, setting, device, state_bytes), len(order), setting))
        order.sort(key=lambda item: item[:2])
        physical_s = physical_floor_s(problem)
        control.report(done=0, total=len(order), bound=physical_s)
        done = 0
        for number, batch in enumerate(_first_of_each(order)):
            if number:  # first one setting of each family, then the others, those of good families first
                best_of = self._best_of_families()
                batch = sorted(batch, key=lambda item: (best_of.get(item[2].family, math.inf), item[:2]))
            for _, _, setting in batch:
                yield from self._setting(setting, physical_s)
                done += 1
                control.report(done=done, total=len(order))
        ranked = sorted(self.objective_of, key=self.objective_of.__getitem__)
        tried: set[Setting] = set()
        for setting in ranked[:BEST_SPLIT]:
            for other in split_axes(problem, setting):
                if other not in tried:
                    tried.add(other)
                    yield from self._setting(other, physical_s)
        if self.bounds:
            control.report(done=len(order), total=len(order), bound=min(self.bounds))

    def _best_of_families(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for setting, value in self.objective_of.items():
            found[setting.family] = min(value, found.get(setting.family, math.inf))
        return found

    # --- one setting --------------------------------------------------------------------------------------------------
    def _setting(self, setting: Setting, physical_s: float) -> Iterator[Proposal]:
        """Plans of one setting; again with less memory while they do not fit."""
        self.control.check()
        problem = self.problem
        turns = (setting.micro_batches + setting.stages - 1) / setting.micro_batches
        if physical_s * turns >= self.best_s:
            self.bounds.append(physical_s * turns)
            return
        graph = problem.graph.at(setting.micro_batch)
        try:
            stage_of = equal_layers(graph, setting.stages)
        except UserError as error:
            yield Candidate(plan=None, family=setting.family, why=str(error))
            return
        spare = 0.0
        for _ in range(ROUNDS):
            model = self._model(setting, stage_of, spare)
            floor_s = model.floor_s + problem.costs.step_overhead_s
            if floor_s >= self.best_s:
                self.bounds.append(floor_s)
                return
            self.control.check()
            solution = solve_level(
                model.graph, self.level, model.work, relative_gap=RELATIVE_GAP, seconds=self._seconds()
            )
            if solution.choice is None:
                self.bounds.append(math.inf if solution.why else solution.bound)
                why = solution.why or "no plan was found in time"
                if self.pins and solution.why:
                    why = self._conflict(setting, stage_of, spare, why)
                yield Candidate(plan=None, family=setting.family, why=why)
                return
            bound = solution.bound if math.isfinite(solution.bound) else linear_bound(model.graph)
            self.bounds.append(bound + problem.costs.step_overhead_s)
            fits = False
            least_over = math.inf
            for plan in self._plans(setting, model, solution, stage_of):
                objective_s = solution.cost + problem.costs.step_overhead_s
                yield Candidate(
                    plan=plan, family=setting.family, objective_s=objective_s,
                    bound_s=min(objective_s, bound + problem.costs.step_overhead_s),
                    why=resembles(model, solution.choice),
                )  # fmt: skip
                evaluated = self.control.latest
                if evaluated is None:
                    continue
                if evaluated.evaluation.feasible:
                    fits = True
                    self.best_s = min(self.best_s, objective_s)
                    known = self.objective_of.get(setting, math.inf)
                    self.objective_of[setting] = min(known, objective_s)
                else:
                    capacity = min(d.memory_bytes for d in problem.cluster.kinds)
                    least_over = min(least_over, evaluated.evaluation.peak_bytes - capacity)
            if fits or not 0 < least_over < math.inf:
                return
            spare += 1.02 * least_over + 0.005 * min(d.memory_bytes for d in problem.cluster.kinds)

    def _seconds(self) -> float:
        """What a solve may take: the rest of the budget at most."""
        if self.control.deadline is None:
            return SECONDS_PER_SOLVE
        return max(0.1, min(SECONDS_PER_SOLVE, self.control.deadline - self.control.clock()))

    def _model(
        self, setting: Setting, stage_of: Ints, spare: float, pins: dict[str, tuple[Pin, ...]] | None = None
    ) -> MeshModel:
        problem = self.problem
        graph = problem.graph.at(setting.micro_batch)
        device = min(problem.cluster.kinds, key=lambda d: d.memory_bytes)
        limit = (device.memory_bytes - device.reserved_bytes - spare) / ALLOCATOR_FACTOR[device.kind]
        all_forward_first = "1f1b" not in problem.space.schedules
        ops = stage_ops(graph, stage_of, setting.stages)
        loads = []
        for s in sorted({0, setting.stages // 2, setting.stages - 1}):
            flying = setting.micro_batches if all_forward_first else min(setting.micro_batches, setting.stages - s)
            loads.append(StageLoad(name=f"stage {s}", ops=ops[s], in_flight=flying, limit_bytes=limit))
        regions = np.full(len(graph.flat.op_class), -1, dtype=np.int64)
        if setting.recompute == "full":
            number = 0
            for held in ops:
                for region in recompute_regions(graph, held):
                    regions[region.indices(graph)] = number
                    number += 1
        mesh = Mesh(
            group=setting.group(0), replicas=setting.replicas, axes=setting.axes, micro_batch=setting.micro_batch,
            micro_batches=setting.micro_batches, stages=setting.stages, zero=self._zero(setting),
        )  # fmt: skip
        chosen = self.pins if pins is None else pins
        pinned = pins_on(graph, setting.micro_batch, setting.axes, chosen)
        key = (setting.micro_batch, setting.replicas, setting.axes, tuple(chosen.items()))
        model = MeshModel(
            problem, mesh, loads, regions, pinned.allowed, pinned.rests, self.prices, known=self.known.get(key)
        )
        self.known[key] = model.known
        return model

    def _conflict(self, setting: Setting, stage_of: Ints, spare: float, why: str) -> str:
        """The reason, with the fewest pins that bring it about; as it is where it holds without any."""

        def possible(pins: Sequence[tuple[str, Pin]]) -> bool:
            by_axis: dict[str, tuple[Pin, ...]] = {}
            for axis, pin in pins:
                by_axis[axis] = (*by_axis.get(axis, ()), pin)
            model = self._model(setting, stage_of, spare, by_axis)
            return solve_level(model.graph, "O3", seconds=self._seconds()).choice is not None

        pins = [(axis, pin) for axis, _ in setting.axes for pin in self.pins.get(axis, ())]
        if not pins or not possible([]):
            return why
        return f"{why}; without these pins it would fit: {', '.join(minimal_conflict(pins, possible))}"

    def _zero(self, setting: Setting) -> tuple[int, ...]:
        """ZeRO levels of parameters: what the space names, else all that differ in what they trade."""
        zero = self.problem.space.zero
        if setting.replicas == 1 or self.problem.mode != "eager":
            return (0,)
        return (0, 1, 3) if tuple(zero) == (0,) else tuple(zero)

    def _plans(self, setting: Setting, model: MeshModel, solution: Solution, stage_of: Ints) -> Iterator[Plan]:
        """Plans of one solution: equal layers, balanced ones, the stage program; by every schedule of the space."""
        assert solution.choice is not None
        graph = model.source
        cuts = [stage_of]
        if setting.stages > 1:
            seconds = model.op_seconds(solution.choice)
            cuts.append(balanced_layers(graph, seconds, setting.stages))
            if not layer_calls(graph):
                ends = self.problem.cluster.level_of(tuple(d for s in (0, 1) for d in setting.group(s).devices))
                turns = setting.micro_batches + setting.stages - 1
                found = program_stages(
                    graph, seconds, setting.stages, setting.micro_batch, turns, 1.0 / ends.bytes_per_s
                )
                cuts += [] if found is None else [found]
        made: set[bytes] = set()
        for cut in cuts:
            if cut.tobytes() in made:
                continue
            made.add(cut.tobytes())
            for kind in self.problem.space.schedules:
                plan = self._plan(setting, model, solution.choice, cut, kind)
                if plan is not None:
                    yield plan
                if setting.stages == 1:
                    break  # one stage runs alike under all of them

    def _plan(self, setting: Setting, model: MeshModel, choice: Ints, stage_of: Ints, kind: str) -> Plan | None:
        graph = model.source
        sharding = model.sharding(choice)
        name = "rhino" if sharding.classes else None
        stages = []
        for s, ops in enumerate(stage_ops(graph, stage_of, setting.stages)):
            regions = recompute_regions(graph, ops) if setting.recompute == "full" else ()
            stages.append(Stage(ops=OpSet.of(graph, ops), group=s, recompute=regions, sharding=name))
        plan = Plan(
            graph=graph.fingerprint,
            groups=tuple(setting.group(s) for s in range(setting.stages)),
            stages=tuple(stages),
            batch=Batch(
                micro_batches=setting.micro_batches,
                sizes=((setting.micro_batch,) * setting.replicas,) * setting.stages,
            ),
            schedule=Schedule(kind=kind),
            shardings=((name, sharding),) if name else (),
            state=model.state(choice),
            mode=self.problem.mode,
        )
        try:
            check_plan(plan, graph)
        except UserError:
            return None
        return plan


Guess = tuple[float, int, Setting]


def _first_of_each(order: list[Guess]) -> tuple[list[Guess], list[Guess]]:
    """The first setting of each family, and the others."""
    first: dict[str, Guess] = {}
    for item in order:
        first.setdefault(item[2].family, item)
    chosen = {item[1] for item in first.values()}
    return list(first.values()), [item for item in order if item[1] not in chosen]
