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
from simpart.errors import ContradictionError, UnknownNameError, UserError
from simpart.lowering.transfers import CommPrices
from simpart.memory import ALLOCATOR_FACTOR
from simpart.plan import Batch, OpSet, Plan, Stage
from simpart.plan.partition import check_plan
from simpart.problem import Problem
from simpart.schedule import Schedule
from simpart.searchers._cost_graph import Ints, Solution, linear_bound
from simpart.searchers._rhino.explain import resembles
from simpart.searchers._rhino.guess import Guess, Guesses, region_numbers
from simpart.searchers._rhino.levels import RhinoLevel, solve_level
from simpart.searchers._rhino.model import Mesh, MeshModel, StageLoad
from simpart.searchers._rhino.pins import INNERMOST, minimal_conflict, pins_on
from simpart.searchers._rhino.settings import AXIS_NAMES, Setting, physical_floor_s, settings, split_axes
from simpart.searchers._rhino.stages import balanced_layers, program_stages, stage_ops
from simpart.searching import Candidate, Control, Proposal
from simpart.sharding.pins import Pin

__all__ = ["Rhino", "rhino_o1", "rhino_o2", "rhino_o4"]

RELATIVE_GAP = 0.01
SECONDS_PER_SOLVE = 20.0
SECONDS_TO_FIRST = 3.0
ROUNDS = 4
"""Times that a setting is solved again with less memory after a plan that did not fit."""
MANY = 300
"""Settings up to which none is left out without proof."""
ALWAYS_SOLVED = 24
"""Of many settings, those that are solved whatever their guess says."""
OPTIMISM = 0.92
"""A later guess may be too high by this factor more than any before."""
NEAR = 1.03
BEST_SPLIT = 4
"""Settings whose sharding axis is then tried as two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhino:
    """`level`: O1 to O4, see `_rhino.levels`. `pins` by axis name (`x`, `y`; `tp` is the innermost) hold on every mesh
    that has the axis. `worth_running`: plans that commands simulate at the fine grain too."""

    name: str = "rhino"
    level: RhinoLevel = "O3"
    pins: tuple[tuple[str, tuple[Pin, ...]], ...] = ()
    worth_running: int = 3
    objective: str = "(micro-batches + stages - 1) × an equal share of kernels and collectives, and once per step state"

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        """Settings in the order of a guess; those whose kernels alone take longer than the best found are left out."""
        for axis, _ in self.pins:
            if axis not in (*AXIS_NAMES, INNERMOST):
                raise UnknownNameError("sharding axis", axis, (*AXIS_NAMES, INNERMOST))
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
    least_ratio: float = 1.0  # of a simulated step to its guess
    step_of: dict[Setting, float] = field(default_factory=dict)  # simulated, of the best plan
    bounds: list[float] = field(default_factory=list)
    objective_of: dict[Setting, float] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)  # prices by mesh
    refused: UserError | None = None
    modelled: bool = False  # some setting can keep each pin
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
        guesses = Guesses(problem, self.prices, device, self._zero)
        order: list[tuple[Guess, Setting]] = []
        for setting in (found[place] for place in _spread(len(found))):
            if self._late() and any(guess.over <= 0 for guess, _ in order):
                break
            self._check()
            order.append((guesses.of(setting), setting))
        order.sort(key=lambda item: item[0].order)
        physical_s = physical_floor_s(problem)
        control.report(done=0, total=len(order), bound=physical_s)
        for number, (guess, setting) in enumerate(order):
            if len(order) > MANY and number >= ALWAYS_SOLVED and self._hopeless(guess):
                self.bounds.append(physical_s * _stretch(setting))
                continue
            yield from self._setting(setting, physical_s)
            if setting in self.step_of:
                self.least_ratio = min(self.least_ratio, self.step_of[setting] / guess.step_s)
            control.report(done=number + 1, total=len(order))
        ranked = sorted(self.step_of, key=self.step_of.__getitem__)
        tried: set[Setting] = set()
        for setting in ranked[:BEST_SPLIT]:
            for other in split_axes(problem, setting):
                if other not in tried:
                    tried.add(other)
                    yield from self._setting(other, physical_s)
        if self.refused is not None and not self.modelled:
            raise self.refused
        if self.bounds:
            control.report(done=len(order), total=len(order), bound=min(self.bounds))

    def _late(self) -> bool:
        return self.control.deadline is not None and self.control.clock() >= self.control.deadline

    def _check(self) -> None:
        """Until there is a plan a time budget may be overrun, by as much as a first plan takes."""
        if self.control.incumbent is not None or self.control.stop:
            self.control.check()

    def _hopeless(self, guess: Guess) -> bool:
        """Whether a guess is behind the best found even if it is too high by more than any was that was checked."""
        if self.control.incumbent is None:
            return False
        best_s = self.control.incumbent.evaluation.step_s
        return guess.over > 0 or guess.step_s * self.least_ratio * OPTIMISM >= best_s

    # --- one setting --------------------------------------------------------------------------------------------------
    def _setting(self, setting: Setting, physical_s: float) -> Iterator[Proposal]:
        """Plans of one setting; again with less memory while they do not fit."""
        self._check()
        problem = self.problem
        if physical_s * _stretch(setting) >= self.best_s:
            self.bounds.append(physical_s * _stretch(setting))
            return
        graph = problem.graph.at(setting.micro_batch)
        try:
            stage_of = equal_layers(graph, setting.stages)
        except UserError as error:
            yield Candidate(plan=None, family=setting.family, why=str(error))
            return
        spare = 0.0
        for _ in range(ROUNDS):
            try:
                model = self._model(setting, stage_of, spare)
            except (ContradictionError, UnknownNameError):
                raise
            except UserError as error:  # pins that this mesh or this micro-batch cannot keep
                self.refused = self.refused or error
                self.bounds.append(math.inf)
                yield Candidate(plan=None, family=setting.family, why=str(error))
                return
            self.modelled = True
            if model.without_strategy:
                self.bounds.append(math.inf)
                why = f"no strategy of {model.without_strategy} is as pinned"
                yield Candidate(plan=None, family=setting.family, why=self._conflict(setting, stage_of, spare, why))
                return
            floor_s = model.floor_s + problem.costs.step_overhead_s
            if floor_s >= self.best_s:
                self.bounds.append(floor_s)
                return
            self._check()
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
                    step_s = evaluated.evaluation.step_s
                    self.step_of[setting] = min(step_s, self.step_of.get(setting, math.inf))
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
        least = 0.1 if self.control.incumbent is not None else SECONDS_TO_FIRST
        return max(least, min(SECONDS_PER_SOLVE, self.control.deadline - self.control.clock()))

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
        regions = region_numbers(graph, ops if setting.recompute == "full" else [])
        mesh = Mesh(
            group=setting.slowest_group(problem.cluster), replicas=setting.replicas, axes=setting.axes,
            micro_batch=setting.micro_batch, micro_batches=setting.micro_batches, stages=setting.stages,
            zero=self._zero(setting),
        )  # fmt: skip
        chosen = self.pins if pins is None else pins
        pinned = pins_on(graph, setting.micro_batch, setting.axes, chosen)
        key = (setting.micro_batch, mesh.group, tuple(chosen.items()))
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
            return (
                not model.without_strategy
                and solve_level(model.graph, "O3", seconds=self._seconds()).choice is not None
            )

        names = [axis for axis, _ in setting.axes] + ([INNERMOST] if setting.axes else [])
        pins = [(axis, pin) for axis in names for pin in self.pins.get(axis, ())]
        if not pins or not possible([]):
            return why
        return f"{why}; without these pins there is one: {', '.join(minimal_conflict(pins, possible))}"

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
            for kind in sorted(self.problem.space.schedules, key=lambda kind: kind != "1f1b"):
                plan = self._plan(setting, model, solution.choice, cut, kind)
                if plan is not None:
                    yield plan
                if setting.stages == 1 or not self._near_best():
                    break  # one stage runs alike under all of them; others wait for a plan that is nearly the best

    def _near_best(self) -> bool:
        """Whether the plan proposed last is within a few per cent of the best."""
        latest, best = self.control.latest, self.control.incumbent
        if latest is None or best is None:
            return True
        return latest.evaluation.feasible and latest.evaluation.step_s <= NEAR * best.evaluation.step_s

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


def _spread(count: int) -> list[int]:
    """Places of a list in an order that visits all its parts early."""
    return sorted(range(count), key=lambda place: (place * (math.sqrt(5) - 1) / 2) % 1.0)


def _stretch(setting: Setting) -> float:
    """By how much filling and emptying the pipeline lengthens a step."""
    return (setting.micro_batches + setting.stages - 1) / setting.micro_batches
