"""RaNNC: pipelines of unequal stages with data parallelism inside each stage.

Reference: Tanaka et al., IPDPS 2021, arXiv 2103.16063.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searchers._bounds import lockstep_s
from simpart.searchers._chain import ChainPlan, ChainStage, StageCosts, Unplannable, solve_chain
from simpart.searchers._chain_plans import (
    Answer,
    chain_plan,
    graphs_of,
    micro_batch_counts,
    stages_text,
    why_no_plans,
)
from simpart.searchers._linear import linear_costs
from simpart.searchers._pipelines import PipelineChoice, PipelineShape, all_shapes, released_search, search_pipelines
from simpart.searchers._refine import climb
from simpart.searchers._stage_costs import ChainProblem
from simpart.searching import Candidate, Control

__all__ = ["Rannc", "solve_lockstep", "solve_outer", "solve_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rannc:
    """Blocks, then the exact stage problem, for every number of stages, pipelines, micro-batches, with and without
    recomputation.

    Differs from the release: all numbers of stages are searched, micro-batches need not be a power of two,
    recomputation is a free choice, prices and memory are simpart's, and every plan solved for is proposed, so that
    the simulation ranks them.
    """

    name: str = "rannc"
    most_blocks: int = 32
    power_of_two: bool = False
    most_micro_batches: int = 128
    refined_leaders: int = 2
    refined_within: float = 1.1

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """Plans of every number of stages that fits, best estimate first within a shape; then, from the leaders of each
        number, what hill climbing by simulation finds; a reason where none fits."""
        reasons: dict[int, str] = {}
        leaders: dict[int, list[_Leader]] = {}
        for schedule in problem.space.schedules:
            for graph, micro_batch in graphs_of(problem):
                chain = ChainProblem(problem, graph, micro_batch, self.most_blocks)
                for leader in self._solve(problem, chain, schedule, control, reasons):
                    count = len(leader.choice.plan.stages)
                    leaders.setdefault(count, []).append(leader)
                    plan = leader.plan(problem, leader.choice.plan.stages)
                    yield Candidate(plan=plan, family=stages_text(count), objective_s=leader.choice.lockstep_s)
        near = self.refined_within * min((x.choice.lockstep_s for f in leaders.values() for x in f), default=0.0)
        for _, found in sorted(leaders.items()):
            for leader in sorted(found, key=lambda x: x.choice.lockstep_s)[: self.refined_leaders]:
                if leader.choice.lockstep_s <= near or len(leaders) == 1:
                    yield from leader.refine(problem, control)
        reasons = {count: why for count, why in reasons.items() if count >= problem.space.min_stages}
        yield from why_no_plans(problem, reasons, set(leaders))

    def _solve(
        self, problem: Problem, chain: ChainProblem, schedule: str, control: Control, reasons: dict[int, str]
    ) -> Iterator[_Leader]:
        """All solved plans of one graph and schedule; `reasons` collects why numbers of stages have none."""
        nodes, per_node = _nodes(problem)
        counts = micro_batch_counts(problem, self.most_micro_batches)
        if schedule == "gpipe" and "1f1b" in problem.space.schedules:
            counts = [m for m in counts if m > 1]  # with one micro-batch both are the same
        shapes = all_shapes(nodes, per_node, counts, [r == "full" for r in problem.space.recompute])

        def costs_of(shape: PipelineShape) -> StageCosts | None:
            return chain.costs(shape, schedule, self.power_of_two)

        most = min(problem.space.max_stages or problem.cluster.size, problem.cluster.size, chain.size)
        seen = 0
        for done, result in enumerate(search_pipelines(shapes, costs_of, max_stages=most), 1):
            control.check()
            fresh = sorted(result.choices[seen:], key=lambda c: c.lockstep_s)
            seen = len(result.choices)
            for choice in fresh:
                if len(choice.plan.stages) >= problem.space.min_stages:
                    yield _Leader(chain=chain, choice=choice, schedule=schedule)
            control.report(done=done, total=len(shapes))
            for count, answer in result.by_stage_count.items():
                if isinstance(answer, Unplannable):
                    reasons.setdefault(count, answer.reason())


def _nodes(problem: Problem) -> tuple[int, int]:
    """(nodes, devices of each); a cluster of unequal nodes counts as one."""
    hosts = [len(host) for host in problem.cluster.hosts()]
    return (len(hosts), hosts[0]) if len(set(hosts)) == 1 else (1, problem.cluster.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leader:
    """A solved plan with what it was solved on."""

    chain: ChainProblem
    choice: PipelineChoice
    schedule: str

    def plan(self, problem: Problem, stages: tuple[ChainStage, ...]) -> Plan:
        answer = Answer(stages=stages, objective_s=self.choice.lockstep_s)
        return chain_plan(problem, self.chain, self.choice.shape, answer, self.schedule)

    def refine(self, problem: Problem, control: Control) -> Iterator[Candidate]:
        """Better neighbours by simulated step; their estimate is that of the leader they come from."""
        costs = self.chain.costs(self.choice.shape, self.schedule, False)
        allowed = costs.counts if costs is not None else ()
        better = climb(problem, self.choice.plan.stages, allowed, lambda s: self.plan(problem, s))
        for stages in better:
            control.check()
            plan = self.plan(problem, stages)
            yield Candidate(plan=plan, family=stages_text(len(stages)), objective_s=self.choice.lockstep_s)


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
