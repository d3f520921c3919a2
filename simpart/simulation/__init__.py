"""Replaying a lowered plan: how long a step takes, how sure that is, what it holds, what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from simpart.cost import PROVENANCES
from simpart.describe import human_bytes
from simpart.engines import Peaks, Times, compiled, replay, task_name
from simpart.engines.levels import peak_bytes
from simpart.errors import UserError
from simpart.lowering import Costed, Grain, lower, lowering_of
from simpart.lowering.layout import Variant
from simpart.lowering.topology import Shape, StageEdge, actions_of_rows, build_topology, class_of_action
from simpart.plan import REPLICA_AXIS, Plan
from simpart.problem import Problem
from simpart.program import MEMORY_KINDS, Durations, MemoryDeltas, Program, Spread, StepFacts, Topology, streams_of
from simpart.schedule import Rows, Schedule, check_rows
from simpart.simulation.limits import bottleneck, gains_of, limits_of
from simpart.simulation.stochastic import sample_steps, usual_draws

if TYPE_CHECKING:
    from simpart.lowering.fine import FineSettings

__all__ = [
    "Evaluation", "MemoryRow", "SimResult", "chain_times", "evaluate", "makespan", "peak_in_flight", "simulate",
    "simulate_plan", "telling_grain",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Engine = Literal["compiled", "simpy", "contention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The most that one device of a group holds, when its room is least. `stage` is the group's first stage, `at` the
    task that runs then."""

    stage: int
    group: int
    stages: tuple[int, ...]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    capacity_bytes: int
    by_kind: dict[str, int]
    at: str
    at_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage, "group": self.group, "stages": list(self.stages),
            "allocated_bytes": self.allocated_bytes, "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "capacity_bytes": self.capacity_bytes, "by_kind": self.by_kind, "at": self.at, "at_s": self.at_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a search needs to know of a plan."""

    step_s: float
    peak_bytes: int
    feasible: bool
    why_infeasible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """A predicted training step. `interval_s` holds 90 % of the steps that the estimates' spreads allow; `limits` and
    `provenance` are shares that sum to 1; `gains` says what less of each would buy (`limits.gains_of`). `contention_s`
    is what sharing links adds, where the engine lets them be shared. `program` and `times` are what was replayed."""

    step_s: float
    interval_s: tuple[float, float]
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    peak_bytes: int
    memory: tuple[MemoryRow, ...]
    limits: dict[str, float]
    gains: dict[str, dict[str, float]]
    provenance: dict[str, float]
    contention_s: float
    feasible: bool
    why_infeasible: str
    program: Program
    times: Times

    def to_json(self) -> dict[str, Any]:
        """The `predicted` part of a command's document."""
        return {
            "step_s": self.step_s,
            "interval_s": list(self.interval_s),
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "peak_bytes": self.peak_bytes,
            "memory": [row.to_json() for row in self.memory],
            "limits": self.limits,
            "gains": self.gains,
            "contention_s": self.contention_s,
            "provenance": self.provenance,
        }


def telling_grain(problem: Problem, plan: Plan) -> Grain:
    """The cheapest grain that tells a plan's step: fine where parameters rest in shards among replicas of GPUs, since
    gathering them goes on beside kernels, which the coarse grain counts in full."""
    gathered = any(name == REPLICA_AXIS for _, rest in plan.state for name, _ in rest.parameter)
    streams = any(device.kind == "gpu" for device in problem.cluster.kinds)
    return "fine" if gathered and streams and any(group.replicas > 1 for group in plan.groups) else "coarse"


def simulate_plan(
    problem: Problem, plan: Plan, engine: Engine = "compiled", grain: Grain = "coarse",
    settings: FineSettings | None = None,
) -> SimResult:  # fmt: skip
    """Lower and simulate one plan."""
    return simulate(lower(problem, plan, grain, settings), engine)


def simulate(program: Program, engine: Engine = "compiled") -> SimResult:
    """Replay a program that `lower` made; the interval is sampled with the compiled engine in either case."""
    facts, spread = program.facts, program.spread
    if facts is None or spread is None:
        raise UserError(
            "this program says neither what a step achieves nor how sure its times are; make it with lower()"
        )
    times, held = replay(program, engine)
    contention_s = 0.0
    if engine == "contention":
        contention_s = times.makespan_s - compiled.times(program.topology, program.durations).makespan_s
    step_s = times.makespan_s + facts.overhead_s
    rows = tuple(_memory_row(program.topology, facts, times, held, g) for g in range(program.topology.groups))
    over = [row.device_bytes - row.capacity_bytes for row in rows]
    worst = rows[int(np.argmax(over))]
    why = ""
    if max(over) > 0:
        device, misfits = facts.device_names[worst.group], sum(o > 0 for o in over)
        kinds = held.by_kind[worst.group]
        why = _why_infeasible(worst.stages, device, worst.device_bytes, max(over), kinds, misfits - 1)
    low, high = np.quantile(sample_steps(program, usual_draws(program)), [0.05, 0.95])
    return SimResult(
        step_s=step_s,
        interval_s=(min(float(low), step_s), max(float(high), step_s)),
        samples_per_s=_rate(facts.samples, step_s),
        tokens_per_s=_rate(facts.tokens, step_s),
        mfu=_rate(facts.model_flops / facts.peak_flops_per_s, step_s),
        peak_bytes=max(row.device_bytes for row in rows),
        memory=rows,
        limits=limits_of(program, times, step_s),
        gains=gains_of(program),
        contention_s=contention_s,
        provenance=_provenance(program, spread),
        feasible=not why,
        why_infeasible=why,
        program=program,
        times=times,
    )


def evaluate(problem: Problem, plans: Sequence[Plan]) -> list[Evaluation]:
    """Step time and feasibility of each plan, equal to those of `simulate_plan`; those with a common topology are
    replayed as one batch. Transfers that can never wait for their link are replayed as delays."""
    lowering = lowering_of(problem)
    batches: dict[Topology, list[tuple[int, Costed, MemoryDeltas, tuple[Variant, ...]]]] = {}
    for i, plan in enumerate(plans):
        costed = lowering.cost(plan)
        exact = costed.exact and not plan.schedule.overlaps
        topology = lowering.topology(plan, costed, "lags" if exact else "tasks")
        batches.setdefault(topology, []).append((i, costed, *lowering.memory(plan, costed, topology)))
    found: dict[int, Evaluation] = {}
    for topology, members in batches.items():
        seconds = np.stack([costed.seconds for _, costed, _, _ in members])
        first = 4 * len(plans[members[0][0]].stages)
        edges = len(members[0][1].layout.edges)
        lags = seconds[:, first : first + 2 * edges] if edges else None
        steps = compiled.makespans(topology, seconds, lags) + problem.costs.step_overhead_s
        rooms = [lowering.footprints.room(variants) for *_, variants in members]
        factor, reserved, capacity = (np.stack(column) for column in zip(*rooms, strict=True))
        allocated = np.rint(peak_bytes(topology, [memory for _, _, memory, _ in members]))
        device = np.rint(allocated * factor) + reserved
        over = device - capacity
        worst, misfits = over.argmax(axis=1).tolist(), (over > 0).sum(axis=1).tolist()
        peak = device.max(axis=1).tolist()
        for row, (i, costed, memory, variants) in enumerate(members):
            why = ""
            if misfits[row]:
                g = worst[row]
                kinds = compiled.peaks(topology, memory, g).by_kind[0]
                stages = tuple(s for s, held in enumerate(costed.layout.holders) if g in held)
                why = _why_infeasible(
                    stages, variants[g].device.name, int(device[row, g]), int(over[row, g]), kinds, misfits[row] - 1
                )
            found[i] = Evaluation(
                step_s=float(steps[row]), peak_bytes=int(peak[row]), feasible=not why, why_infeasible=why
            )
    return [found[i] for i in range(len(plans))]


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _memory_row(topology: Topology, facts: StepFacts, times: Times | None, held: Peaks, g: int) -> MemoryRow:
    allocated, task = round(float(held.bytes[g])), int(held.task[g])
    reserved = round(allocated * facts.allocator_factor[g])
    kinds = {kind: round(float(size)) for kind, size in zip(MEMORY_KINDS, held.by_kind[g], strict=True)}
    return MemoryRow(
        stage=facts.stages_of_group[g][0],
        group=g,
        stages=facts.stages_of_group[g],
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + facts.reserved_bytes[g],
        capacity_bytes=facts.capacity_bytes[g],
        by_kind=kinds,
        at="" if task < 0 else task_name(topology, task),
        at_s=0.0 if task < 0 or times is None else float(times.start_s[task]),
    )


def _why_infeasible(
    stages: Sequence[int], device: str, device_bytes: int, over: int, by_kind: Floats, others: int
) -> str:
    """The stages that are furthest over their device's memory and what fills it; `others` are groups over theirs."""
    largest = int(np.argmax(np.rint(by_kind)))
    names = ", ".join(map(str, stages))
    subject = f"stage {names} needs" if len(stages) == 1 else f"stages {names} need"
    more = f"; nor do {others} other groups fit" if others > 1 else "; nor does another group fit" if others else ""
    return (
        f"{subject} {human_bytes(device_bytes)}, {human_bytes(over)} more than {device} has; most of it "
        f"{MEMORY_KINDS[largest]} ({human_bytes(round(float(by_kind[largest])))}){more}"
    )


def _provenance(program: Program, spread: Spread) -> dict[str, float]:
    """Shares of the bottleneck group's priced time by where the prices come from."""
    topology = program.topology
    tasks = np.flatnonzero(np.isin(topology.resource, streams_of(topology, bottleneck(program))))
    seconds = spread.by_provenance[topology.task_class[tasks]].sum(axis=0)
    total = float(seconds.sum())
    return {name: float(s) / total if total else 0.0 for name, s in zip(PROVENANCES, seconds, strict=True)}


# --- a chain of stages by hand ---------------------------------------------------------------------------------------
def makespan(
    rows: Rows, forward_s: Sequence[float], backward_s: Sequence[float], latency_s: float = 0.0
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a chain of stages under a schedule, and the most micro-batches in flight per stage.

    Micro-batches take `forward_s[s]` and `backward_s[s]` on stage s (a split backward half each in I and W);
    `latency_s` is a pure delay between neighbours, both ways, that occupies nothing.

    >>> from simpart.schedule import one_f_one_b
    >>> makespan(one_f_one_b([0, 1], 2), [1, 1], [2, 2])
    (9.0, (2, 1))
    """
    halves = [b / 2 for b in backward_s]
    times = chain_times(rows, forward_s, halves, halves, latency_s)
    return times.makespan_s, peak_in_flight(rows, len(forward_s))


def chain_times(
    rows: Rows, forward_s: Sequence[float], input_s: Sequence[float], weight_s: Sequence[float], latency_s: float = 0.0
) -> Times:
    """`makespan` for a backward of two parts: all starts and ends."""
    stages = len(forward_s)
    homes = [next((g for g, row in enumerate(rows) if any(a.stage == s for a in row)), -1) for s in range(stages)]
    if -1 in homes:
        raise UserError(f"stage {homes.index(-1)} has no action in the schedule; give it a row or drop it")
    micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    if all(homes[a.stage] == g for g, row in enumerate(rows) for a in row if a.stage < stages):
        check_rows(rows, homes, micro_batches)
    chain = tuple(StageEdge(s, s + 1) for s in range(stages - 1))
    shape = Shape(tuple(homes), Schedule(kind="explicit"), micro_batches, chain, transfers="lags")
    topology = build_topology(shape, actions_of_rows(rows))
    task_s = np.zeros(len(topology.class_names))
    for s in range(stages):
        whole = input_s[s] + weight_s[s]
        for kind, seconds in (("F", forward_s[s]), ("B", whole), ("I", input_s[s]), ("W", weight_s[s])):
            task_s[class_of_action(s, kind)] = seconds
    durations = Durations(task_s=task_s, lag_s=np.full(max(1, 2 * len(chain)), float(latency_s)))
    return compiled.times(topology, durations)


def peak_in_flight(rows: Rows, stages: int) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose forward has run and whose backward (or weight gradient) has not."""
    now, most = [0] * stages, [0] * stages
    for row in rows:
        for action in row:
            now[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)
