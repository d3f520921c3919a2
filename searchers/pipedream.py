"""PipeDream: cut a graph so that the slowest stage is as fast as possible, stages replicated, machines nested.

Reference: Narayanan et al., SOSP 2019; https://github.com/msr-fiddle/pipedream. Mended here, unless `released`: the
first stage also sends what it makes, and memory counts the micro-batches that are really in flight, so that the last
stage is not free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.problem import Problem
from simpart.searchers._bottleneck import least_bottlenecks
from simpart.searchers._chain_plans import (
    Answer,
    Answers,
    ChainCase,
    both_ways_s,
    chain_cases,
    fitting,
    propose_answers,
)
from simpart.searchers._downsets import closed_sets, members, nested
from simpart.searchers._inputs import costs_array
from simpart.searchers._nested import Machines, least_nested, machines_of, nested_costs
from simpart.searchers._profiles import Edges, PipeDreamNode, find_profile, read_pipedream
from simpart.searchers._stages import ChainStage
from simpart.searching import Candidate, Control

__all__ = [
    "Cuts",
    "Level",
    "PipeDream",
    "PipeDreamPlan",
    "chain_cuts",
    "data_parallel_s",
    "graph_cuts",
    "slowest_answers",
    "solve",
    "solve_golden",
]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """Closed sets 0 (empty) … L (everything) of a graph, with what each holds; a stage is what set j has beyond set i.

    On a chain set j is the first j blocks. `output_bytes` is what leaves a set forward.
    """

    compute_s: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    output_bytes: Floats
    precedes: npt.NDArray[np.bool_]  # [i, j]: set i is inside set j

    @property
    def last(self) -> int:
        """Number of the set of everything."""
        return len(self.compute_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """`units` of the level below (devices at the bottom), joined by links of `bytes_per_s`."""

    units: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPlan:
    """Stages from cut to cut and the seconds per micro-batch of the slowest one."""

    stages: tuple[ChainStage, ...]
    value_s: float


def chain_cuts(
    compute_s: Sequence[float],
    parameter_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    output_bytes: Sequence[float],
) -> Cuts:
    """Cuts of a chain of blocks."""
    n = len(compute_s)
    sums = [
        np.concatenate([[0.0], np.cumsum(costs_array(name, x, finite=True))])
        for name, x in (
            ("compute_s", compute_s),
            ("parameter_bytes", parameter_bytes),
            ("activation_bytes", activation_bytes),
        )
    ]
    return Cuts(
        compute_s=sums[0],
        parameter_bytes=sums[1],
        activation_bytes=sums[2],
        output_bytes=np.concatenate([[0.0], np.asarray(output_bytes, dtype=np.float64)]),
        precedes=np.triu(np.ones((n + 1, n + 1), dtype=np.bool_), 1),
    )


def graph_cuts(nodes: Sequence[PipeDreamNode], edges: Edges, *, most: int = 40_000) -> Cuts:
    """Cuts of a profile. What leaves a set are the outputs of its nodes that are read outside, each once."""
    inside = members(closed_sets(len(nodes), edges, most=most), len(nodes))
    consumers = np.zeros((len(nodes), len(nodes)), dtype=np.float64)
    for source, target in edges:
        consumers[target, source] = 1
    leaving = inside & ((~inside).astype(np.float64) @ consumers > 0)
    leaving[-1] = consumers.sum(axis=0) == 0
    activation = np.array([node.activation_bytes for node in nodes])
    return Cuts(
        compute_s=inside @ np.array([node.compute_s for node in nodes]),
        parameter_bytes=inside @ np.array([node.parameter_bytes for node in nodes]),
        activation_bytes=inside @ activation,
        output_bytes=leaving @ activation,
        precedes=nested(inside),
    )


def data_parallel_s(cuts: Cuts, levels: Sequence[Level]) -> float:
    """Seconds per micro-batch with everything on every device."""
    time_s, below = float(cuts.compute_s[-1]), 1
    for level in levels:
        gradients_s = 4 * (level.units - 1) * float(cuts.parameter_bytes[-1]) / (level.bytes_per_s * level.units)
        time_s = (time_s + gradients_s / below) / level.units
        below = level.units
    return time_s


def solve(
    cuts: Cuts,
    levels: Sequence[Level],
    *,
    transfers: bool = True,
    limit_bytes: float = math.inf,
    straight: bool = False,
    fewer_devices: bool = False,
    released: bool = False,
) -> PipeDreamPlan | None:
    """The plan whose slowest stage takes least, on all devices of all levels (the lowest first); None if none fits.

    `straight`: no stage is replicated. `fewer_devices`: units may stay idle. `limit_bytes` bounds (parameters +
    activations) × micro-batches in flight. `released`: the published rules, for comparison.
    """
    solver = _Solver(cuts, tuple(levels), transfers, limit_bytes, straight, fewer_devices, released)
    table = solver.table(len(levels) - 1, 0)
    value_s = float(table[levels[-1].units][0, cuts.last])
    if value_s == math.inf:
        return None
    return PipeDreamPlan(stages=tuple(solver.trace(len(levels) - 1, 0, 0, cuts.last)), value_s=value_s)


class _Solver:
    """Tables of a level: [m][i, j] is the least maximum over ways to run set j minus set i on m of its units."""

    def __init__(
        self,
        cuts: Cuts,
        levels: tuple[Level, ...],
        transfers: bool,
        limit: float,
        straight: bool,
        fewer: bool,
        released: bool,
    ) -> None:
        for name in ("compute_s", "parameter_bytes", "activation_bytes", "output_bytes"):
            costs_array(name, getattr(cuts, name), finite=True)
        self.cuts, self.levels = cuts, levels
        self.transfers, self.limit, self.straight, self.fewer, self.released = (
            transfers,
            limit,
            straight,
            fewer,
            released,
        )
        self.parameters = cuts.parameter_bytes[None, :] - cuts.parameter_bytes[:, None]
        self.held = self.parameters + cuts.activation_bytes[None, :] - cuts.activation_bytes[:, None]
        self._tables: dict[tuple[int, int], list[Floats]] = {}

    def table(self, level: int, beyond: int) -> list[Floats]:
        """`beyond`: micro-batches in flight behind the segment, which every stage of it holds too."""
        if self.released or self.limit == math.inf:
            beyond = 0
        key = level, beyond
        if key not in self._tables:
            self._tables[key] = self._solve(level, beyond)
        return self._tables[key]

    def _flying(self, level: int, beyond: int, used: int, units: int) -> int:
        """Micro-batches that a stage on `units` holds when it and the stages before it use `used` units."""
        behind = self.levels[level].units - used
        return math.ceil(behind / units) if self.released else math.ceil((behind + units) / units) + beyond

    def _unit_s(self, level: int, flying: int) -> Floats:
        """[i, j] seconds of a segment on one unit, infinite where it does not fit."""
        if level > 0:
            time_s = self.table(level - 1, flying - 1)[self.levels[level - 1].units]
        else:
            time_s = np.where(self.cuts.precedes, self.cuts.compute_s[None, :] - self.cuts.compute_s[:, None], np.inf)
        if self.limit < math.inf and (level == 0 or self.released):
            time_s = np.where(flying * self.held > self.limit, np.inf, time_s)
        return time_s

    def _stage_s(self, level: int, beyond: int, used: int, units: int, first: bool) -> Floats:
        """[i, j] seconds of a stage; `first`: nothing of its segment comes before it at this level."""
        rate = self.levels[level].bytes_per_s * units
        gradients_s = 4 * (units - 1) * self.parameters / rate
        if first and level > 0 and self.released:
            gradients_s = gradients_s / self.levels[level - 1].units
        time_s: Floats = (self._unit_s(level, self._flying(level, beyond, used, units)) + gradients_s) / units
        if self.transfers:
            sent_s = 2 * self.cuts.output_bytes / rate
            if not first:
                time_s = np.maximum(time_s, sent_s[:, None])
            if not (first and self.released):
                time_s[:, :-1] = np.maximum(time_s[:, :-1], sent_s[None, :-1])
        return time_s

    def _solve(self, level: int, beyond: int) -> list[Floats]:
        units = self.levels[level].units
        size = self.cuts.last + 1
        starts = 1 if level == len(self.levels) - 1 else size
        table = [np.full((starts, size), np.inf)]
        for used in range(1, units + 1):
            best = np.full((starts, size), np.inf)
            if used == 1 or not self.straight:
                best = self._stage_s(level, beyond, used, used, True)[:starts].copy()
            for r in range(1, 2 if self.straight else used):
                if used > r:
                    later = self._stage_s(level, beyond, used, r, False)
                    for i in range(starts):
                        reached = np.maximum(table[used - r][i, i:, None], later[i:, i:]).min(axis=0)
                        np.minimum(best[i, i:], reached, out=best[i, i:])
            if self.fewer:
                best = np.minimum(best, table[used - 1])
            table.append(best)
        return table

    def trace(self, level: int, beyond: int, start: int, end: int) -> list[ChainStage]:
        """Stages that reach the table's value, those of inner levels in the place of each unit."""
        table, used = self.table(level, beyond), self.levels[level].units
        stages: list[ChainStage] = []
        while True:
            value = table[used][start, end]
            while self.fewer and table[used - 1][start, end] == value:
                used -= 1
            whole = (
                self._stage_s(level, beyond, used, used, True)[start, end] if used == 1 or not self.straight else np.inf
            )
            if whole == value:
                cut, r = start, used
            else:
                cut, r = self._last_stage(level, beyond, table, used, start, end)
            inner = [ChainStage(start=cut, end=end, replicas=1)]
            if level > 0:
                inner = self.trace(level - 1, max(0, self._flying(level, beyond, used, r) - 1), cut, end)
            stages = [ChainStage(start=s.start, end=s.end, replicas=s.replicas * r) for s in inner] + stages
            if cut == start:
                return stages
            end, used = cut, used - r

    def _last_stage(
        self, level: int, beyond: int, table: list[Floats], used: int, start: int, end: int
    ) -> tuple[int, int]:
        for r in range(1, 2 if self.straight else used):
            reached = np.maximum(table[used - r][start], self._stage_s(level, beyond, used, r, False)[:, end])
            cut = int(np.argmin(reached))
            if reached[cut] == table[used][start, end]:
                return cut, r
        raise AssertionError("some last stage gave the table's value")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDream:
    """PipeDream's objective, M × the slowest stage or transfer, on simpart's prices, for every number of stages.

    On machines of equal devices also pipelines within pipelines: what PipeDream's two levels of links allow. The plans
    run synchronously, so weights are not stashed; memory is simpart's. Objectives of a pipeline that never drains
    prefer many stages; the simulation corrects that.
    """

    name: str = "pipedream"
    objective: str = "micro-batches × the slowest stage or transfer"
    most_blocks: int = 32

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages; a reason where none fits."""
        machines = machines_of(problem.cluster)

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            if machines is not None and case.shape.nodes == machines.number:
                return _nested_answers(case, machines, most)
            compute_s, transfer_s = both_ways_s(case.costs)
            slowest_s, fits = np.maximum(compute_s, transfer_s), fitting(case.costs)
            return slowest_answers(problem, case, lambda later: np.where(fits(later), slowest_s, np.inf), most)

        groups = chain_cases(problem, control, most_blocks=self.most_blocks)
        return propose_answers(problem, control, (_with_nested(group, machines) for group in groups), answers)


def _with_nested(cases: list[ChainCase], machines: Machines | None) -> list[ChainCase]:
    """The cases and, right after each single pipeline on all devices, that of pipelines within pipelines."""
    if machines is None:
        return cases
    found = []
    for case in cases:
        found.append(case)
        if case.shape.pipelines == 1 and case.shape.devices == machines.number * machines.devices:
            found.append(replace(case, shape=replace(case.shape, nodes=machines.number)))
    return found


def _nested_answers(case: ChainCase, machines: Machines, most: int) -> Answers:
    costs = nested_costs(case.chain, case.shape, case.schedule, machines, fitting)
    if costs is None:
        return {}
    count = case.shape.micro_batches
    return {
        stages: None
        if best is None
        else Answer(stages=best.stages, objective_s=best.value * count, devices=best.devices)
        for stages, best in least_nested(costs, machines, most).items()
    }


def slowest_answers(
    problem: Problem, case: ChainCase, cost_of: Callable[[int], Floats], most_stages: int
) -> dict[int, Answer | None]:
    """Plans whose slowest stage costs least, for each number of stages; estimated as M times that."""
    found = least_bottlenecks(
        cost_of,
        case.costs.replicas,
        case.shape.devices,
        most_stages,
        all_devices=not problem.space.use_fewer_devices,
        places=case.costs.places,
    )
    return {
        count: None if best is None else Answer(stages=best.stages, objective_s=best.value * case.costs.micro_batches)
        for count, best in found.items()
    }


def solve_golden(inputs: dict[str, Any]) -> dict[str, Any]:
    """Published or enumerated cases, with the released rules: c, P, act, a on N devices, or a profile on levels."""
    if "profile" in inputs:
        cuts = graph_cuts(*read_pipedream(find_profile(inputs["profile"], inputs["data_folders"])))
        if inputs.get("states", cuts.last) != cuts.last:
            raise ValueError(f"the profile has {cuts.last} states, not {inputs['states']}")
        pairs = zip(inputs["devices_per_level"], inputs["bandwidth_bytes_per_s"], strict=True)
        levels = [Level(units=units, bytes_per_s=rate) for units, rate in pairs]
        limit = None
    else:
        cuts = chain_cuts(inputs["c"], inputs["P"], inputs["act"], inputs["a"])
        levels = [Level(units=int(inputs["N"]), bytes_per_s=float(inputs["bw"]))]
        limit = inputs["memory_limit"]
    plan = solve(
        cuts,
        levels,
        transfers=inputs["include_transfers"],
        straight=inputs["straight"],
        limit_bytes=math.inf if limit is None else float(limit),
        released=True,
    )
    return {
        "feasible": plan is not None,
        "time_per_minibatch": None if plan is None else plan.value_s,
        "plan": None if plan is None else [[s.start, s.end, s.replicas] for s in plan.stages],
        "data_parallel_baseline_time": data_parallel_s(cuts, levels),
    }
