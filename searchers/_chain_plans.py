"""What planners on a chain of blocks share: the shapes they try, plans made of stages, the order of proposals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from simpart.configure import recompute_regions
from simpart.errors import Interrupted
from simpart.graph import Graph
from simpart.placement import Sharding, StatePlacement
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.schedule import Schedule
from simpart.searchers._bottleneck import least_bottlenecks
from simpart.searchers._chain import Unplannable, solve_chain
from simpart.searchers._lines import kind_orders, lines
from simpart.searchers._pipelines import PipelineShape, least_sums
from simpart.searchers._stage_costs import ChainProblem, in_flight
from simpart.searchers._stages import ChainStage, Floats, StageCosts, later_stages_allowed
from simpart.searching import Candidate, Control

__all__ = [
    "Answer",
    "Answers",
    "ChainCase",
    "below_cutoffs",
    "both_ways_s",
    "chain_cases",
    "chain_plan",
    "fitting",
    "graphs_of",
    "least_totals",
    "micro_batch_counts",
    "pipeline_shapes",
    "propose_answers",
    "stages_text",
    "why_no_plans",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainCase:
    """A chain, a pipeline shape and a schedule, with their costs. Of one graph and schedule they share `chain`."""

    chain: ChainProblem
    shape: PipelineShape
    schedule: str
    costs: StageCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Stages a planner found, with its own estimate of the step.

    `recompute` per stage, where not that of the shape; `devices` of each stage within a pipeline, where not the next
    ones in order; `tensor` is how many devices split the kernels of a replica of each stage; `bound_s` a
    lower bound of the estimate, where other stages might have a smaller one.
    """

    stages: tuple[ChainStage, ...]
    objective_s: float
    bound_s: float | None = None
    recompute: tuple[bool, ...] | None = None
    devices: tuple[tuple[int, ...], ...] | None = None
    tensor: tuple[int, ...] | None = None


Answers = Mapping[int, Answer | None]


def stages_text(count: int) -> str:
    """The family of plans with this number of stages."""
    return f"{count} stage{'s' if count > 1 else ''}"


def micro_batch_counts(problem: Problem, most: int = 128) -> list[int]:
    """Numbers of micro-batches that divide the global batch, within the space."""
    most = min(problem.space.max_micro_batches or most, problem.global_batch)
    return [m for m in range(1, most + 1) if problem.global_batch % m == 0]


def graphs_of(problem: Problem) -> list[tuple[Graph, int]]:
    """The graph of each structure with the least replica micro-batch it serves: 1 may be a graph of its own."""
    served: dict[Graph, int] = {}
    for b in range(1, problem.global_batch + 1):
        if problem.global_batch % b == 0:
            served.setdefault(problem.graph.at(b), b)
    return list(served.items())


def pipeline_shapes(
    problem: Problem, counts: Iterable[int], recompute: Iterable[bool], fewer_devices: bool = True
) -> list[PipelineShape]:
    """Every way to share the devices among equal pipelines; with idle devices only where the space allows it.

    On unequal devices, pipelines of the next devices and pipelines of an equal part of each kind, in every order.
    """
    size, counts, recompute = problem.cluster.size, list(counts), list(recompute)
    fewer = fewer_devices and problem.space.use_fewer_devices
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for p in range(1, size + 1):
        if size % p == 0 or fewer:
            found.append((p, size // p, ()))
        found += [(p, devices, kinds) for kinds, devices in kind_orders(problem.cluster, p, fewer).items()]
    return [
        PipelineShape(nodes=1, pipelines=p, devices=devices, micro_batches=m, recompute=r, kinds=kinds)
        for p, devices, kinds in found
        for m in counts
        for r in recompute
    ]


def chain_cases(
    problem: Problem,
    control: Control,
    *,
    most_blocks: int = 32,
    most_sets: int = 0,
    uncoarsening: bool = False,
    recompute: Iterable[bool] | None = None,
    fewer_devices: bool = True,
    degrees: tuple[int, ...] = (1,),
) -> Iterator[list[ChainCase]]:
    """The cases of one graph and schedule at a time; `fewer_devices` False leaves none idle, whatever the space;
    `degrees` are the tensor degrees that a planner takes."""
    space = problem.space
    choices = [r == "full" for r in space.recompute] if recompute is None else list(recompute)
    counts = micro_batch_counts(problem)
    for graph, micro_batch in graphs_of(problem):
        chain = ChainProblem(problem, graph, micro_batch, most_blocks, most_sets, uncoarsening)
        cases: dict[str, list[ChainCase]] = {schedule: [] for schedule in space.schedules}
        for shape in pipeline_shapes(problem, counts, choices, fewer_devices):
            control.check()
            costs = chain.costs(shape, space.schedules[0], False, degrees)
            if costs is None:
                continue
            for schedule, found in cases.items():
                if schedule == "gpipe" and "1f1b" in space.schedules and shape.micro_batches == 1:
                    continue  # with one micro-batch both are the same
                held = replace(costs, in_flight=in_flight(schedule))
                found.append(ChainCase(chain=chain, shape=shape, schedule=schedule, costs=held))
        for found in cases.values():
            yield sorted(found, key=_work_s)


def _work_s(case: ChainCase) -> float:
    """Seconds of a step if all devices of a pipeline shared the whole model evenly: good cases first."""
    whole = (case.costs.forward_s + case.costs.backward_s)[0, -1] * np.asarray(case.costs.replicas)
    return float(whole.min()) * case.costs.micro_batches / case.shape.devices


def most_stages(problem: Problem, case: ChainCase) -> int:
    """The largest number of stages that the space, the devices and the chain allow."""
    return min(problem.space.max_stages or case.shape.devices, case.shape.devices, case.chain.size)


@dataclass(slots=True)
class _Found:
    """The best answers of each family of one group of cases."""

    best: dict[int, list[tuple[float, int, ChainCase, Answer]]] = field(default_factory=dict)
    number: int = 0
    least_s: float = math.inf
    """Lower bound of all estimates."""

    def add(self, count: int, case: ChainCase, answer: Answer, keep: int) -> None:
        self.least_s = min(self.least_s, answer.objective_s if answer.bound_s is None else answer.bound_s)
        known = self.best.setdefault(count, [])
        known.append((answer.objective_s, self.number, case, answer))
        known.sort(key=lambda entry: entry[:2])
        del known[keep:]
        self.number += 1

    def ranked(self, near: float) -> list[tuple[float, int, ChainCase, Answer]]:
        """All that is kept, best first; beyond the best of a number only what is within `near` times the best."""
        most_s = near * min((known[0][0] for known in self.best.values()), default=0.0)
        entries = (e for known in self.best.values() for x, e in enumerate(known) if x == 0 or e[0] <= most_s)
        return sorted(entries, key=lambda entry: entry[:2])

    def cutoffs(self, keep: int) -> dict[int, float]:
        """What an answer must stay below to be kept."""
        return {count: known[-1][0] for count, known in self.best.items() if len(known) == keep}


def propose_answers(
    problem: Problem,
    control: Control,
    groups: Iterable[list[ChainCase]],
    solve: Callable[[ChainCase, int, Mapping[int, float]], Answers],
    *,
    keep: int = 3,
    near: float = math.inf,
    degrees: Sequence[int] = (1,),
    proposed: Callable[[Plan, ChainCase, Answer], None] = lambda plan, case, answer: None,
) -> Iterator[Candidate]:
    """Solve every case for every number of stages; propose the `keep` best plans of each, best first, then reasons.

    `solve(case, most, below)` answers for 1 … `most` stages: None where no plan exists; it may leave out numbers whose
    plans cannot be `below` the estimates that are kept already. Of a number of stages, only the best is proposed if it
    is estimated at more than `near` times the least. `proposed` is told what each plan is made of; `degrees` are the
    tensor degrees of the cases.
    The bound is the least objective, valid once everything is solved. When time runs out, what was solved is proposed.
    """
    least, planned, reasons = math.inf, set[int](), dict[int, str]()
    stopped: Interrupted | None = None
    sources = iter(groups)
    while stopped is None:
        found = _Found()
        try:
            cases = next(sources, None)
            if cases is None:
                break
            for done, case in enumerate(cases, 1):
                control.check()
                most = most_stages(problem, case)
                if most < problem.space.min_stages:
                    reasons.update(_too_few_blocks(problem, case))
                    continue
                answers = {
                    c: a for c, a in solve(case, most, found.cutoffs(keep)).items() if c >= problem.space.min_stages
                }
                for count, answer in answers.items():
                    if answer is not None:
                        found.add(count, case, answer, keep)
                unknown = [c for c, a in answers.items() if a is None and c not in reasons and c not in planned]
                reasons.update(_why_none(problem, case, unknown))
                control.report(done=done, total=len(cases))
        except Interrupted as interrupted:
            stopped = interrupted
        least = min(least, found.least_s)
        for objective_s, _, case, answer in found.ranked(near):
            count = len(answer.stages)
            planned.add(count)
            plan = chain_plan(problem, case.chain, case.shape, answer, case.schedule)
            proposed(plan, case, answer)
            why = case.chain.cut.order_text(answer.stages)
            yield Candidate(plan=plan, family=stages_text(count), objective_s=objective_s, why=why)
    if stopped is not None:
        raise stopped
    if least < math.inf:
        control.report(bound=least)
    yield from why_no_plans(problem, reasons, planned, degrees)


def least_totals(problem: Problem, case: ChainCase, cost_s: Floats) -> dict[int, float]:
    """Lower bounds of sum + (M - 1) × maximum of the stages' costs, by number of stages, where devices may be anywhere.

    Infinite exactly where no plan exists.
    """
    most, fits = most_stages(problem, case), fitting(case.costs)
    every = not problem.space.use_fewer_devices
    slowest = least_bottlenecks(
        lambda later: np.where(fits(later), cost_s, np.inf),
        case.costs.replicas,
        case.shape.devices,
        most,
        all_devices=every,
        places=case.costs.places,
    )
    sums = least_sums(np.where(fits(0), cost_s, np.inf), most)
    return {
        count: math.inf
        if best is None
        else max(sums[count - 1], best.value) + (case.costs.micro_batches - 1) * best.value
        for count, best in slowest.items()
    }


def below_cutoffs(
    least_s: Mapping[int, float], below: Mapping[int, float], best: Callable[[int, float, int], Answer | None]
) -> dict[int, Answer | None]:
    """`best(count, cutoff, most)` for the numbers of stages with a lower bound below the cutoff; `most` is the last.

    None where the bound says that no plan exists, or where none was found whatever its estimate; others are left out.
    """
    hopeful = [count for count, least in least_s.items() if least < below.get(count, math.inf)]
    answers: dict[int, Answer | None] = {count: None for count, least in least_s.items() if least == math.inf}
    for count in hopeful:
        answer = best(count, below.get(count, math.inf), max(hopeful))
        if answer is not None or count not in below:
            answers[count] = answer
    return answers


def _too_few_blocks(problem: Problem, case: ChainCase) -> dict[int, str]:
    least, blocks = problem.space.min_stages, case.chain.size
    if blocks >= least:
        return {}
    return {least: f"at least {least} stages were asked for, the model is cut into {blocks} blocks; lower it"}


def _why_none(problem: Problem, case: ChainCase, counts: Sequence[int]) -> dict[int, str]:
    """What keeps the closest plan of each number of stages from fitting."""
    if not counts:
        return {}
    every = not problem.space.use_fewer_devices
    answers = solve_chain(case.costs, case.shape.devices, max(counts), all_devices=every, stage_counts=tuple(counts))
    return {c: answer.reason() for c, answer in answers.items() if isinstance(answer, Unplannable)}


def why_no_plans(
    problem: Problem, reasons: Mapping[int, str], planned: set[int], degrees: Sequence[int] = (1,)
) -> Iterator[Candidate]:
    """Why numbers of stages have no plan; a reason of its own if nothing could be tried at all, at these degrees of
    tensor parallelism."""
    for count, why in sorted(reasons.items()):
        if count not in planned:
            yield Candidate(plan=None, family=stages_text(count), why=why)
    if not planned and not reasons:
        yield Candidate(plan=None, family="any stages", why=_why_nothing(problem, degrees))


def _why_nothing(problem: Problem, degrees: Sequence[int]) -> str:
    size, samples, least = problem.cluster.size, problem.global_batch, problem.space.min_stages
    if least > size:
        return f"at least {least} stages were asked for, with {size} devices; lower it"
    at = "" if set(degrees) == {1} else f" at tp {', '.join(map(str, degrees))}"
    dividing = [degree for degree in degrees if size % degree == 0]
    if not dividing and not problem.space.use_fewer_devices:
        known = ", ".join(str(degree) for degree in range(1, size + 1) if size % degree == 0)
        return f"no stages{at} use all of {size} devices; try tp {known}, or idle devices"
    replicas = size // min(dividing or degrees)
    if replicas < 1:
        return f"a replica{at} needs more than {size} devices; try a smaller tp"
    if samples % replicas:
        return f"no split of the global batch {samples} over {size} devices{at}; try a multiple of {replicas}"
    return f"no stage{at} can be had of the global batch {samples} on {size} devices; " + (
        "try tp 1 too" if at else "try more micro-batches or stages"
    )


def chain_plan(problem: Problem, chain: ChainProblem, shape: PipelineShape, answer: Answer, schedule: str) -> Plan:
    """Stage x of every pipeline is one group; without `answer.devices`, on the next devices of each pipeline.

    Where devices stay idle, they are the last of equal ones, the first where places matter: see `StageCosts.places`.
    """
    on = lines(problem.cluster, shape)
    groups, stages, sizes = [], [], []
    shardings: dict[Sharding, str] = {}
    state: tuple[tuple[str, StatePlacement], ...] = ()
    placed = chain.cut.mixed or answer.tensor is not None
    first = shape.devices - sum(stage.replicas for stage in answer.stages) if placed else 0
    for x, stage in enumerate(answer.stages):
        own: Sequence[int] = range(first, first + stage.replicas) if answer.devices is None else answer.devices[x]
        devices = [line[d] for line in on for d in own]
        tensor = 1 if answer.tensor is None else answer.tensor[x]
        taken: tuple[int, ...] | None
        axes: tuple[tuple[str, int], ...] = (("dp", len(devices) // tensor),)
        name = None
        if answer.tensor is not None and max(answer.tensor) > 1:
            axes = (*axes, ("tp", tensor))  # of size 1 too: state is placed by the names of axes
        if tensor == 1:
            taken = chain.places.shares(shape, devices)
            assert taken is not None  # the stage had costs
        else:
            taken = chain.places.equal_shares(shape, len(devices) // tensor)
            split = chain.tensors.anywhere(taken[0], tensor, chain.cut.kind_of(devices[0]))
            name = shardings.setdefault(split.sharding, _sharding_name(tensor, taken[0], shardings.values()))
            state = split.state
        groups.append(DeviceGroup(devices=Devices.of(devices), axes=axes))
        sizes.append(taken)
        ops = chain.cut.ops(stage.start, stage.end)
        again = shape.recompute if answer.recompute is None else answer.recompute[x]
        regions = recompute_regions(chain.cut.graph, ops) if again else ()
        stages.append(Stage(ops=OpSet.of(chain.cut.graph, ops), group=x, recompute=regions, sharding=name))
        first += stage.replicas
    return Plan(
        graph=chain.cut.graph.fingerprint,
        groups=tuple(groups),
        stages=tuple(stages),
        batch=Batch(micro_batches=shape.micro_batches, sizes=tuple(sizes)),
        schedule=Schedule(kind=schedule),
        shardings=tuple((name, sharding) for sharding, name in shardings.items()),
        state=state,
        mode=problem.mode,
    )


def _sharding_name(tensor: int, micro_batch: int, taken: Iterable[str]) -> str:
    name = f"tp{tensor}"
    return name if name not in taken else f"{name} of {micro_batch}"


def both_ways_s(costs: StageCosts) -> tuple[Floats, Floats]:
    """(compute, transfers) seconds of every stage for one micro-batch, forward and backward."""
    return costs.forward_s + costs.backward_s, 2 * costs.transfer_s


def fitting(costs: StageCosts) -> Callable[[int], npt.NDArray[np.bool_]]:
    """Which stages fit when a number of stages follow."""
    allowed = later_stages_allowed(costs)
    return lambda later: allowed >= later
