"""Piper: stages of any acyclic graph, each with its own degrees and a variant (such as recomputation) per node.

Minimises the time per sample of the slowest stage under 1F1B memory. Reference: Tarnawski et al., NeurIPS 2021;
https://github.com/msr-fiddle/piper. The choice of variants is a knapsack: the release swaps variants in order of time
lost per byte saved; here it is solved exactly unless that rule is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simpart.problem import Problem
from simpart.searchers._chain_plans import (
    Answers,
    ChainCase,
    both_ways_s,
    chain_cases,
    fitting,
    graphs_of,
    propose_answers,
)
from simpart.searchers._cut_graph import cut_graph
from simpart.searchers._downsets import closed_sets, members, nested
from simpart.searchers._piper_graph import PiperPlan, PiperProblem, solve
from simpart.searchers._profiles import PiperNode, PiperVariant, find_profile, read_piper
from simpart.searchers._tensor_stages import TensorShares
from simpart.searchers.pipedream import slowest_answers
from simpart.searching import Candidate, Control

__all__ = ["Piper", "solve_golden"]

Floats = npt.NDArray[np.float64]


def _toy(inputs: dict[str, Any]) -> PiperProblem:
    nodes = tuple(
        PiperNode(
            name=f"layer {v}",
            variants={
                1: tuple(
                    PiperVariant(
                        name=name,
                        time_s=each["p"],
                        parameter_bytes=each["w"],
                        bytes_in_flight=each["A"],
                        bytes_static=each["B"],
                        sync_bytes=(),
                    )
                    for name, each in layer.items()
                )
            },
        )
        for v, layer in enumerate(inputs["layers"])
    )
    return PiperProblem(
        nodes=nodes,
        edges={(v, v + 1): float(size) for v, size in enumerate(inputs["edge_bytes"])},
        devices=int(inputs["K"]),
        micro_batches=int(inputs["N"]),
        bytes_per_s=float(inputs["bw"]),
        limit_bytes=float(inputs["M"]),
    )


def solve_golden(inputs: dict[str, Any]) -> dict[str, Any]:
    """Toy chains, exactly; and the published profile with the released rules, beside the 2BW-like planner."""
    if "profile" not in inputs:
        plan = solve(_toy(inputs))
        cuts = [] if plan is None else [[stage.nodes[0], stage.nodes[-1] + 1, stage.data] for stage in plan.stages]
        value = None if plan is None else plan.value_s
        return {"feasible": plan is not None, "time_per_sample": value, "plan": cuts if plan else None}
    from simpart.searchers.two_bw import solve as solve_2bw

    nodes, edges = read_piper(find_profile(inputs["profile"], inputs["data_folders"]))
    problem = PiperProblem(
        nodes=nodes,
        edges=edges,
        devices=int(inputs["K"]),
        micro_batches=int(inputs["N"]),
        bytes_per_s=float(inputs["bw_bytes_per_s"]),
        limit_bytes=float(inputs["memory_GiB"]) * 2**30,
    )
    plan, equal = solve(problem, variants="swaps"), solve_2bw(problem)
    sets = members(closed_sets(len(nodes), edges), len(nodes))
    return {
        "feasible": plan is not None,
        "piper": None
        if plan is None
        else {"time_per_sample": plan.value_s, "stages_nodes_dp_recomputed": _shape(plan)},
        "pipedream_2bw_like": None
        if equal is None
        else {
            "time_per_sample": equal.value_s,
            "S": len(equal.stages),
            "dp_degree": equal.stages[0].data,
            "tensor_parallel": equal.stages[0].tensor,
            "recompute": "all layers" if equal.stages[0].variants[0] else "none",
        },
        "downsets": len(sets),
        "downset_pairs": int(nested(sets).sum()),
    }


def _shape(plan: PiperPlan) -> list[list[int]]:
    return [[len(stage.nodes), stage.data, sum(map(bool, stage.variants))] for stage in plan.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piper:
    """Piper's objective, M × the slowest stage with its transfers, where every stage recomputes or not as it likes, and
    has a tensor degree of its own, of those that the space allows.

    On simpart's prices, for every number of stages, on sets of blocks closed under predecessors where there are few
    enough, else on a chain of blocks.
    """

    name: str = "piper"
    objective: str = "micro-batches × the slowest stage with its transfers"
    most_blocks: int = 32
    most_sets: int = 64

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages; a reason where none fits, and for degrees that do not work."""
        choices = [r == "full" for r in problem.space.recompute]
        split = [degree for degree in problem.space.tp if degree > 1]
        refused: dict[int, str] = {}
        groups = chain_cases(
            problem,
            control,
            most_blocks=self.most_blocks,
            most_sets=self.most_sets,
            recompute=choices[:1],
            degrees=problem.space.tp,
        )

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            for degree in split:
                if degree not in refused:
                    refused[degree] = case.chain.tensors.why_not(degree)
            return self._answers(problem, case, most, choices)

        yield from propose_answers(problem, control, groups, answers, degrees=problem.space.tp)
        if split and not refused:  # they left no case to ask
            graph, micro_batch = graphs_of(problem)[-1]
            tensors = TensorShares(cut_graph(problem, graph, micro_batch, self.most_blocks))
            refused = {degree: tensors.why_not(degree) for degree in split}
        for degree, why in refused.items():
            if why:
                yield Candidate(plan=None, family=f"tensor degree {degree}", why=why)

    def _answers(self, problem: Problem, case: ChainCase, most: int, choices: Sequence[bool]) -> Answers:
        shape, degrees = case.shape, problem.space.tp
        variants = [
            case.chain.costs(replace(shape, recompute=choice), case.schedule, False, degrees) for choice in choices
        ]
        priced = [(np.add(*both_ways_s(costs)), fitting(costs)) for costs in variants if costs is not None]

        def cost_of(later: int) -> Floats:
            least: Floats = np.stack([np.where(fits(later), time_s, np.inf) for time_s, fits in priced]).min(axis=0)
            return least

        answers = slowest_answers(problem, case, cost_of, most)
        for count, answer in answers.items():
            if answer is not None:
                left, recompute, tensor = sum(stage.replicas for stage in answer.stages), [], []
                for x, stage in enumerate(answer.stages):
                    usable = case.costs.usable(stage.replicas, left)
                    seconds = {
                        (v, k): float(time_s[at]) if fits(count - 1 - x)[at] else math.inf
                        for v, (time_s, fits) in enumerate(priced)
                        for k in usable
                        if (at := (stage.start, stage.end, k))
                    }
                    v, k = min(seconds, key=lambda pair: (seconds[pair], pair))
                    recompute.append(choices[v])
                    tensor.append(1 if case.costs.tensor is None else case.costs.tensor[k])
                    left -= stage.replicas
                picked = None if degrees == (1,) else tuple(tensor)
                answers[count] = replace(answer, recompute=tuple(recompute), tensor=picked)
        return answers
