"""DAPPLE: synchronous pipelines whose stages also choose which machines their devices are on.

A stage's devices come from unused machines, from partly used ones, or one by one from all machines. For each number of
stages the plan of least filling time + (M - 1) × slowest block is found, where blocks are stages and the transfers
between them. Reference: Fan et al., PPoPP 2021; https://github.com/AlibabaPAI/DAPPLE. Mended here: each stage counts
with its own replicas while the pipeline fills, memory is limited, machines may have any number of devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from simpart.problem import Problem
from simpart.searchers._chain_plans import (
    Answer,
    Answers,
    ChainCase,
    below_cutoffs,
    both_ways_s,
    chain_cases,
    least_totals,
    propose_answers,
)
from simpart.searchers._dapple_tables import Dapple, DappleCosts, DapplePlan
from simpart.searchers._lines import lines
from simpart.searchers._machines import (
    Profile,
    Situations,
    situations,
)
from simpart.searchers._pipelines import PipelineShape
from simpart.searchers._stages import ChainStage, later_stages_allowed
from simpart.searching import Candidate, Control

__all__ = ["DappleSearcher", "dapple_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DappleSearcher:
    """The planner on simpart's prices; the time it estimates a step to take ranks its plans.

    Pipelines that exist several times lie on equal machines, or are left out. On several machines the chain is cut
    into fewer blocks, since each stage has many places.
    """

    name: str = "dapple"
    objective: str = "DAPPLE's estimate: fill, drain, the slowest stage or transfer, gradient all-reduces left over"
    most_blocks: int = 32
    most_blocks_across: int = 16
    most_stages: int = 16

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages; a reason where none fits."""
        across = len(list(problem.cluster.hosts())) > 1
        everywhere: dict[tuple[Any, ...], tuple[dict[Profile, int], Situations]] = {}
        places: dict[tuple[Any, ...], Situations] = {}

        def planner(costs: DappleCosts, machines: Sequence[int], micro_batches: int, most: int) -> Dapple:
            key = tuple(machines), costs.kinds, tuple(costs.choices)
            if key not in places:
                known, _ = everywhere.get(key[:2], ({}, None))
                if not costs.choices.keys() <= known.keys():
                    numbers = {each: k for k, each in enumerate(dict.fromkeys((*known, *costs.choices)))}
                    found = situations(machines, numbers, check=control.check, kinds=costs.kinds)
                    everywhere[key[:2]] = numbers, found
                places[key] = everywhere[key[:2]][1].restricted(everywhere[key[:2]][0], costs.choices)
            return Dapple(costs, machines, micro_batches, most_stages=most, places=places[key], check=control.check)

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            found = _machines(problem, case.shape)
            if found is None:
                return {}
            machines, kinds = found
            costs = dapple_costs(problem, case, kinds)
            most = min(most, self.most_stages)
            if kinds is None:
                least = {c: bound for c, bound in least_totals(problem, case, costs.time_s).items() if c <= most}
            else:
                least = dict.fromkeys(range(1, most + 1), 0.0)
            exact = cache(lambda most: planner(costs, machines, case.costs.micro_batches, most))
            near = cache(lambda most: planner(_near(costs), (sum(machines),), case.costs.micro_batches, most))

            def best(count: int, below_s: float, most: int) -> Answer | None:
                """Where no plan is good enough even if all devices were on one machine, none is on these."""
                together = near(most) if kinds is None and len(machines) > 1 else None
                if together is not None and together.best(count, below=below_s) is None:
                    return None
                return self._answer(exact(most).best(count, below=below_s, relaxed=together), machines)

            return below_cutoffs(least, below, best)

        blocks = self.most_blocks_across if across else self.most_blocks
        groups = chain_cases(problem, control, most_blocks=blocks, fewer_devices=False)
        return propose_answers(problem, control, groups, answers)

    def _answer(self, plan: DapplePlan | None, machines: Sequence[int]) -> Answer | None:
        if plan is None:
            return None
        free = [sum(machines[:m]) for m in range(len(machines))]
        devices = []
        for stage in plan.stages:
            devices.append(tuple(free[m] + x for m, taken in enumerate(stage.placement) for x in range(taken)))
            free = [a + b for a, b in zip(free, stage.placement, strict=True)]
        stages = tuple(ChainStage(start=s.start, end=s.end, replicas=s.replicas) for s in plan.stages)
        return Answer(stages=stages, objective_s=plan.estimate_s, devices=tuple(devices))


def _near(costs: DappleCosts) -> DappleCosts:
    """The same as if all devices were on one machine, with the better of both links."""
    least = np.minimum(costs.inside_s, costs.across_s)
    return replace(costs, inside_s=least, across_s=least)


def _machines(problem: Problem, shape: PipelineShape) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Devices of one pipeline on each machine, and the kinds of these where they differ.

    None where not all pipelines are alike, and for all but one order of the kinds: the planner tries them all.
    """
    cluster, found = problem.cluster, set()
    if shape.kinds != tuple(sorted(shape.kinds)):
        return None
    for line in lines(cluster, shape):
        held = Counter((cluster.host_of(d).start, cluster.kinds.index(cluster.device(d))) for d in line)
        found.add(tuple((count, kind) for (_, kind), count in held.items()))
    if len(found) > 1:
        return None
    machines = found.pop()
    kinds = tuple(kind for _, kind in machines) if len(cluster.kinds) > 1 else None
    return tuple(count for count, _ in machines), kinds


def dapple_costs(problem: Problem, case: ChainCase, kinds: tuple[int, ...] | None) -> DappleCosts:
    """Transfers and all-reduces by place: between neighbours, or as far apart as the pipelines' devices get.

    `kinds`: those of the machines of a pipeline, where they differ.
    """
    chain, shape, on = case.chain, case.shape, lines(problem.cluster, case.shape)
    own = [[d for d, device in enumerate(on[0]) if problem.cluster.device(device) == kind] for kind in chain.cut.kinds]
    profiles: list[Profile] = [(r,) for r in case.costs.replicas]
    if kinds is not None:
        profiles = sorted(itertools.product(*(range(len(part) + 1) for part in own)), key=lambda p: (sum(p), p))[1:]
    else:
        own = [list(range(shape.devices))]
    kept, packed, spread = [], [], []
    for each in profiles:
        together = tuple(line[part[x]] for line in on for part, r in zip(own, each, strict=True) for x in range(r))
        if chain.places.shares(shape, together) is not None:
            kept.append(each)
            packed.append(together)
            spread.append(
                tuple(
                    line[part[x * len(part) // r]]
                    for line in on
                    for part, r in zip(own, each, strict=True)
                    for x in range(r)
                )
            )
    alone = chain.costs_of(shape, case.schedule, packed)
    far = shape.devices - 1
    near_pair, far_pair = (on[0][0], on[0][min(1, far)]), (on[0][0], on[0][far])
    largest = [max(chain.places.shares(shape, together) or ()) for together in packed]
    return DappleCosts(
        replicas=tuple(sum(each) for each in kept),
        time_s=both_ways_s(alone)[0],
        later=later_stages_allowed(alone),
        inside_s=np.stack([2 * chain.runs.entering_s(b, near_pair) for b in largest], axis=-1),
        across_s=np.stack([2 * chain.runs.entering_s(b, far_pair) for b in largest], axis=-1),
        allreduce_inside_s=np.stack([chain.runs.all_reduce_s(ranks) for ranks in packed], axis=-1),
        allreduce_across_s=np.stack([chain.runs.all_reduce_s(ranks) for ranks in spread], axis=-1),
        kinds=kinds,
        profiles=tuple(kept) if kinds is not None else None,
    )
