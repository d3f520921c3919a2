"""RaNNC: pipelines of unequal stages with data parallelism inside each stage.

Reference: Tanaka et al., IPDPS 2021, arXiv 2103.16063.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searchers._bounds import lockstep_s
from simpart.searchers._chain import ChainPlan, solve_chain
from simpart.searchers._chain_plans import (
    Answer,
    Answers,
    ChainCase,
    chain_cases,
    chain_plan,
    propose_answers,
    stages_text,
)
from simpart.searchers._linear import linear_costs
from simpart.searchers._pipelines import (
    PipelineChoice,
    PipelineShape,
    lockstep_answers,
    plan_lockstep_s,
    released_search,
)
from simpart.searchers._refine import climb
from simpart.searchers._stages import StageCosts
from simpart.searching import Candidate, Control

__all__ = ["Rannc", "solve_lockstep", "solve_outer", "solve_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rannc:
    """Blocks, then the exact stage problem, for every number of stages, pipelines, micro-batches, with and without
    recomputation; then hill climbing by simulation from the plans that simulate best.

    Differs from the release: all numbers of stages are searched, micro-batches need not be a power of two,
    recomputation is a free choice, prices and memory are simpart's, and the leaders of every number of stages are
    proposed, so that the simulation ranks them. The bound is one of the lock-step estimate.
    """

    name: str = "rannc"
    objective: str = "lock-step estimate with transfers, plus the longest gradient all-reduce"
    most_blocks: int = 32
    uncoarsening: bool = False
    keep: int = 3
    near: float = 1.15  # lock-step was at most 14 % above the makespan of GPipe in random cases without transfers
    refined_leaders: int = 3

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages by lock-step estimate; better neighbours of the leaders; a reason
        where none fits."""
        made: dict[Plan, tuple[ChainCase, Answer]] = {}
        ranked: list[tuple[float, int, ChainCase, Answer]] = []

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            every = not problem.space.use_fewer_devices
            found = lockstep_answers(case.costs, case.shape.devices, most, below, all_devices=every)
            return {
                count: None if best is None else Answer(stages=best[0].stages, objective_s=best[1], bound_s=best[2])
                for count, best in found.items()
            }

        groups = chain_cases(problem, control, most_blocks=self.most_blocks, uncoarsening=self.uncoarsening)
        candidates = propose_answers(
            problem, control, groups, answers, keep=self.keep, near=self.near,
            proposed=lambda plan, case, answer: made.update({plan: (case, answer)}),
        )  # fmt: skip
        for candidate in candidates:
            yield candidate
            if candidate.plan is not None:
                latest = control.latest
                simulated = latest is not None and latest.candidate.plan == candidate.plan
                step_s = latest.evaluation.step_s if latest is not None and simulated else candidate.objective_s
                if not simulated or (latest is not None and latest.evaluation.feasible):
                    ranked.append((step_s, len(ranked), *made[candidate.plan]))
        ranked.sort(key=lambda leader: leader[:2])
        for _, _, case, answer in ranked[: self.refined_leaders]:
            for stages in climb(problem, control, case, answer.stages):
                better = replace(answer, stages=stages, bound_s=None)
                plan = chain_plan(problem, case.chain, case.shape, better, case.schedule)
                objective_s = plan_lockstep_s(case.costs, stages)
                why = case.chain.cut.order_text(stages)
                yield Candidate(plan=plan, family=stages_text(len(stages)), objective_s=objective_s, why=why)


def _linear(inputs: dict[str, Any], devices: int, pipelines: int, micro_batches: int) -> StageCosts:
    return linear_costs(
        forward=inputs["f"],
        backward=inputs["g"],
        weight_bytes=inputs["w"],
        activation_bytes=inputs["a"],
        output_bytes=inputs["out"],
        constant_s=inputs["c"],
        bandwidth=inputs["bw"],
        limit_bytes=inputs["M"],
        devices=devices,
        pipelines=pipelines,
        micro_batches=micro_batches,
        global_batch=inputs["BS"],
        power_of_two=inputs["power_of_two_replicas"],
    )


def solve_stages(inputs: dict[str, Any]) -> dict[str, Any]:
    """The stage problem under the linear model: f, g, w, a, out per block, c, bw, M, and S, D, R, MB, BS."""
    stages, devices = int(inputs["S"]), int(inputs["D"])
    costs = _linear(inputs, devices, int(inputs["R"]), int(inputs["MB"]))
    answer = solve_chain(costs, devices, stages, stage_counts=(stages,))[stages]
    if not isinstance(answer, ChainPlan):
        return {"feasible": False, "value": None, "plan": None, "why_infeasible": answer.reason()}
    plan = [[stage.start, stage.end, stage.replicas] for stage in answer.stages]
    return {"feasible": True, "value": answer.value_s, "plan": plan}


def solve_outer(inputs: dict[str, Any]) -> dict[str, Any]:
    """The released outer search under the linear model, with and without its early end."""

    def costs_of(shape: PipelineShape) -> StageCosts:
        return _linear(inputs, shape.devices, shape.pipelines, shape.micro_batches)

    def run(stop_at_first: bool) -> dict[str, Any] | None:
        best: PipelineChoice | None = released_search(
            int(inputs["nodes"]),
            int(inputs["devices_per_node"]),
            len(inputs["f"]),
            int(inputs["BS"]),
            costs_of,
            max_micro_batches=int(inputs["max_MB"]),
            stop_at_first=stop_at_first,
            include_allreduce=bool(inputs["include_allreduce"]),
        ).best
        if best is None:
            return None
        plan = [[stage.start, stage.end, stage.replicas] for stage in best.plan.stages]
        shape = best.shape
        found = {"S": len(plan), "R": shape.pipelines, "MB": shape.micro_batches, "plan": plan}
        return {"time": best.lockstep_s, "plan": found}

    first, every = run(True), run(False)
    return {"feasible": every is not None, "first_feasible_S": first, "search_all_S": every}


def solve_lockstep(inputs: dict[str, Any]) -> dict[str, Any]:
    """Estimates from a published stage table of a BERT model: lock-step times, memory, parameter counts.

    All-reduce times imply parameter bytes at 10 GiB/s, two bytes per parameter: the constants of the released profiler.
    """
    stages, micro_batches = inputs["stages"], int(inputs["MB"])
    forward = [stage["forward_us"] for stage in stages]
    backward = [stage["backward_us"] for stage in stages]
    share, bandwidth = (
        micro_batches * int(inputs["replicas_per_stage"]) * int(inputs["R"]),
        inputs["p2p_bandwidth_bytes_per_s"],
    )
    transfer = [
        sum((stage[key] // share) * 1_000_000 // bandwidth for key in ("in_bytes", "out_bytes")) for stage in stages
    ]
    with_transfer = [[f + c, b + c] for f, b, c in zip(forward, backward, transfer, strict=True)]
    estimate = lockstep_s([f for f, _ in with_transfer], [b for _, b in with_transfer], micro_batches)
    allreduce = [stage["allreduce_us"] for stage in stages]
    parameter_bytes = [time * 10 * 2**30 / 1e6 for time in allreduce]
    memory = [stage["fwd_bwd_memory_bytes"] + stage["optimizer_memory_bytes"] for stage in stages]
    optimizer = [stage["optimizer_memory_bytes"] for stage in stages]
    model = inputs["model"]
    count = _bert_parameters(**model)
    return {
        "stage_fwd_bwd_with_comm_us": with_transfer,
        "lockstep_us_without_comm": lockstep_s(forward, backward, micro_batches),
        "lockstep_us": estimate,
        "lockstep_plus_max_allreduce_us": estimate + max(allreduce),
        "parameter_count_formula": count,
        "parameter_count_with_tied_decoder_counted_twice": count + model["vocab"] * model["hidden"],
        "parameters_implied_by_allreduce_times": round(sum(parameter_bytes) / 2),
        "optimizer_bytes_per_parameter_byte": [
            round(o / p, 4) for o, p in zip(optimizer, parameter_bytes, strict=True)
        ],
        "stage_total_memory_bytes": memory,
        "all_stages_fit": all(each < inputs["available_memory_bytes"] for each in memory),
    }


def _bert_parameters(*, hidden: int, layers: int, vocab: int, max_positions: int, token_types: int) -> int:
    """Parameters of BERT with both pre-training heads, decoder tied to the embedding (Devlin et al., 2019)."""
    embedding = (vocab + max_positions + token_types) * hidden + 2 * hidden
    layer = 12 * hidden * hidden + 13 * hidden
    pooler = hidden * hidden + hidden
    masked_head = hidden * hidden + 3 * hidden + vocab
    next_sentence_head = 2 * hidden + 2
    return embedding + layers * layer + pooler + masked_head + next_sentence_head
