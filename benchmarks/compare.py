"""What planners find on the same problems, and what the rules of the originals cost; one JSON document.

    python benchmarks/compare.py [--budget 20] [--cases gpt,bert,…] > compare.json
    python benchmarks/compare.py --searchers everything --cases gpt,t5,moe,unet,two_tower > everything.json
    python benchmarks/compare.py --table compare.json …          # Markdown tables of such documents

Every planner gets the same problem (prices from the default models, asked once before), the same space (1f1b and gpipe,
with and without recomputation, all devices used) and the same time; what it finds is simulated alike. Two planners
stand for rules of the released RaNNC, on the same prices and memory: `first feasible S` ends at the first number of
stages that has a plan (micro-batches and replicas powers of two, recomputation iff there are several micro-batches, a
tenth of the memory free), `one state` keeps a single (forward, backward) pair per cell of the dynamic program.
`one_state` counts how often that misses the least value.
Search times are those of this machine; they contain neither capture nor prices.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simpart.describe import human_bytes, human_seconds
from simpart.hardware import Cluster, load_cluster
from simpart.model_spec import load_graph_or_model
from simpart.problem import Problem
from simpart.registry import default_costs, load_searcher
from simpart.searchers._chain import ChainPlan, solve_chain
from simpart.searchers._chain_plans import (
    Answer,
    Answers,
    ChainCase,
    chain_cases,
    chain_plan,
    graphs_of,
    propose_answers,
    stages_text,
)
from simpart.searchers._pipelines import PipelineShape, plan_lockstep_s, released_search
from simpart.searchers._stage_costs import ChainProblem
from simpart.searchers._stages import ChainStage, StageCosts, later_stages_allowed
from simpart.searching import Budget, Candidate, Control
from simpart.searching.comparing import compare
from simpart.training import TrainingSpec

PLANNERS = (
    "rannc", "pipedream", "piper", "dapple", "alpa", "two_bw", "equal_layers", "equal_parameters", "equal_flops",
    "grid", "annealing", "random",
)  # fmt: skip
EVERYTHING = (
    "rannc", "pipedream", "piper", "dapple", "alpa", "alpa_ilp", "tofu", "tofu_shared", "rhino_o1", "rhino_o2", "rhino",
    "rhino_o4", "grid", "annealing",
)  # fmt: skip
"""Pipelines, partitions and the whole strategy space side by side; the last two kinds leave the space of the first."""
FIRST, ONE_STATE = "first feasible S", "one state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster, of which only the first `devices` are taken."""

    model: str
    cluster: str
    global_batch: int
    devices: int | None = None


CASES = {
    "gpt": Case(model="gpt:layers=24,hidden=2048,heads=16,seq=1024,vocab=51200", cluster="dgx-v100", global_batch=64),
    "wide_resnet": Case(model="wide_resnet:depth=152,factor=8", cluster="dgx-v100:2", global_batch=128),
    "bert": Case(
        model="bert:layers=96,hidden=2048,heads=32,ffn=8192,seq=512,vocab=30522", cluster="dgx-v100:4", global_batch=64
    ),
    "unet": Case(model="unet:image=256,base=64,depth=4", cluster="dgx-a100:3", global_batch=96),
    "t5": Case(model="t5", cluster="dgx-a100", global_batch=64),
    "moe": Case(
        model="moe:layers=8,hidden=1024,heads=16,kv_heads=8,ffn=3584,seq=1024", cluster="dgx-a100", global_batch=64
    ),
    "two_tower": Case(model="two_tower", cluster="dgx-v100", global_batch=56, devices=7),
    "gpt_mixed": Case(
        model="gpt:layers=24,hidden=2048,heads=16,seq=1024,vocab=51200", cluster="a100-v100", global_batch=64
    ),
}


def cluster_of(case: Case) -> Cluster:
    cluster = load_cluster(case.cluster)
    if case.devices is None:
        return cluster
    return dataclasses.replace(
        cluster, name=f"{case.devices} of {cluster.name}", devices=cluster.slice(0, case.devices)
    )


# --- the originals' rules --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFeasible:
    """The released outer search: it ends at the first number of stages with a plan."""

    name: str = FIRST
    objective: str = "lock-step estimate with transfers, plus the longest gradient all-reduce"

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        hosts = [len(host) for host in problem.cluster.hosts()]
        nodes, each = (len(hosts), hosts[0]) if len(set(hosts)) == 1 else (1, problem.cluster.size)
        graph, micro_batch = graphs_of(problem)[-1]
        chain = ChainProblem(problem, graph, micro_batch, 32)

        def costs_of(shape: PipelineShape) -> StageCosts | None:
            control.check()
            costs = chain.costs(shape, "1f1b", True)
            margin = None if costs is None else dataclasses.replace(costs, limit_bytes=0.9 * costs.limit_bytes)
            return margin  # the release leaves a tenth of the memory free

        found = released_search(nodes, each, chain.size, problem.global_batch, costs_of)
        if found.best is None:
            yield Candidate(plan=None, family="any stages", why="no plan by the released rules")
            return
        choice = found.best
        answer = Answer(stages=choice.plan.stages, objective_s=choice.lockstep_s)
        plan = chain_plan(problem, chain, choice.shape, answer, "1f1b")
        yield Candidate(plan=plan, family=stages_text(len(answer.stages)), objective_s=choice.lockstep_s)


@dataclass(slots=True)
class OneState:
    """RaNNC with a dynamic program that keeps the pair of least sum alone; `ratios`: its value over the least value."""

    most_stages: int = 8
    name: str = ONE_STATE
    objective: str = "lock-step estimate with transfers, plus the longest gradient all-reduce"
    ratios: list[float] = dataclasses.field(default_factory=list)

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            most = min(most, self.most_stages)
            exact = solve_chain(case.costs, case.shape.devices, most)
            found: dict[int, Answer | None] = {}
            for count, stages in one_state(case.costs, case.shape.devices, most).items():
                best = exact[count]
                if stages is None or not isinstance(best, ChainPlan):
                    found[count] = None
                    continue
                self.ratios.append(value_of(case.costs, stages) / best.value_s)
                found[count] = Answer(stages=stages, objective_s=plan_lockstep_s(case.costs, stages))
                control.check()
            return found

        yield from propose_answers(problem, control, chain_cases(problem, control), answers)


def value_of(costs: StageCosts, stages: tuple[ChainStage, ...]) -> float:
    at = costs.entries(stages)
    forward, backward = costs.forward_s + costs.transfer_s, costs.backward_s + costs.transfer_s
    return max(float(forward[a]) for a in at) + max(float(backward[a]) for a in at)


def one_state(costs: StageCosts, devices: int, most: int) -> dict[int, tuple[ChainStage, ...] | None]:
    """Suffixes of the chain, one (f, g) of least sum for each (stages, first block, devices left)."""
    n, later = costs.blocks, later_stages_allowed(costs)
    f = np.full((n + 1, devices + 1), np.inf)
    g = f.copy()
    f[n, 0] = g[n, 0] = 0.0
    origins: list[np.ndarray[Any, Any]] = []
    found: dict[int, tuple[ChainStage, ...] | None] = {}
    for count in range(1, most + 1):
        fits = later >= count - 1
        forward = np.where(fits, costs.forward_s + costs.transfer_s, np.inf)
        backward = np.where(fits, costs.backward_s + costs.transfer_s, np.inf)
        new_f, new_g = np.full_like(f, np.inf), np.full_like(g, np.inf)
        origin = np.full((n + 1, devices + 1, 2), -1)
        for k, r in enumerate(costs.replicas):
            if r > devices:
                continue
            for j in range(1, n + 1):  # the stage [i, j) and what is known of the blocks from j on
                wide_f = np.maximum(forward[:, j, k][:, None], f[j, : devices + 1 - r][None, :])
                wide_g = np.maximum(backward[:, j, k][:, None], g[j, : devices + 1 - r][None, :])
                wide_f[j:] = np.inf
                better = wide_f + wide_g < new_f[:n, r:] + new_g[:n, r:]
                new_f[:n, r:][better], new_g[:n, r:][better] = wide_f[better], wide_g[better]
                origin[:n, r:][better] = (j, k)
        f, g = new_f, new_g
        origins.append(origin)
        found[count] = _trace(costs, origins, devices) if np.isfinite(f[0, devices]) else None
    return found


def _trace(costs: StageCosts, origins: list[np.ndarray[Any, Any]], devices: int) -> tuple[ChainStage, ...]:
    stages, start, left = [], 0, devices
    for origin in reversed(origins):
        j, k = origin[start, left].tolist()
        stages.append(ChainStage(start=start, end=j, replicas=costs.replicas[k]))
        start, left = j, left - costs.replicas[k]
    return tuple(stages)


# --- running and telling ---------------------------------------------------------------------------------------------
def run(name: str, names: Sequence[str], budget_s: float) -> dict[str, Any]:
    """One case, all planners of these names; with the pipeline planners also what stands for rules of the originals."""
    case = CASES[name]
    start = time.perf_counter()
    graph = load_graph_or_model(case.model, precision="float32")
    captured_s = time.perf_counter() - start
    cluster = cluster_of(case)
    problem = Problem(
        graph=graph, training=TrainingSpec(), cluster=cluster, costs=default_costs(cluster, profiles=False),
        global_batch=case.global_batch,
    )  # fmt: skip
    state = OneState()
    searchers = {name: partial(load_searcher, name) for name in names}
    extra: dict[str, Callable[[], Any]] = {}
    if names == PLANNERS:
        extra = {FIRST: FirstFeasible, **({ONE_STATE: lambda: state} if len(cluster.kinds) == 1 else {})}
    found = compare(problem, {**searchers, **extra}, Budget(seconds=budget_s))
    best = found.portfolio[1] if found.portfolio is not None else None
    worse = [ratio for ratio in state.ratios if ratio > 1 + 1e-9]
    return {
        "case": name,
        **dataclasses.asdict(case),
        "devices": cluster.size,
        "parameters": sum(s.spec.elements(1) for s in graph.parameters.values()),
        "ops": len(graph.op_ids),
        "budget_s": budget_s,
        "captured_or_read_s": round(captured_s, 3),
        "pricing_s": round(found.pricing_s, 3),
        "floor_s": found.floor_s,
        "portfolio": found.portfolio[0] if found.portfolio is not None else None,
        "rows": [entry.row(best) for entry in found.entries],
        "one_state": {"solved": len(state.ratios), "worse": len(worse), "worst_ratio": max(state.ratios, default=None)},
    }


def table(document: dict[str, Any]) -> str:
    """Markdown: a table per case."""
    lines = []
    for case in document["cases"]:
        steps = [row["step_s"] for row in case["rows"] if row["step_s"] is not None]
        best = min(steps, default=None)
        floor = "" if case["floor_s"] is None else f", floor of the step {human_seconds(case['floor_s'])}"
        lines += [
            f"### {case['case']}: {case['parameters'] / 1e9:.2f} G parameters, {case['devices']} devices of "
            f"{case['cluster']}, global batch {case['global_batch']}",
            f"`{case['model']}`; at most {case['budget_s']:g} s per planner; prices {case['pricing_s']:.2f} s{floor}.",
            "",
            "| planner | simulated step | above best | own objective | bound | gap | peak memory | search | plan |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---|",
        ]
        for row in case["rows"]:
            above = None if row["step_s"] is None or best is None else row["step_s"] / best - 1
            peak = "–" if row["peak_bytes"] is None else human_bytes(row["peak_bytes"])
            cells = [
                row["searcher"], _seconds(row["step_s"]), _percent(above), _seconds(row["objective_s"]),
                _seconds(row["bound"]), _percent(row["gap"]), peak, _seconds(row["timing"]["search_s"]),
                row["plan"] or row["why"][:160],
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        one = case["one_state"]
        if one["solved"]:
            lines += [
                "",
                f"One state per cell misses the least max F + max B in {one['worse']} of {one['solved']} stage "
                f"problems (worst ratio {one['worst_ratio']:.4f}).",
            ]
        lines.append("")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "–" if value is None else human_seconds(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def main() -> None:
    """Print the document, or tables of documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of a planner")
    parser.add_argument("--cases", default="gpt,wide_resnet,bert,unet,two_tower,gpt_mixed")
    parser.add_argument("--searchers", choices=("pipelines", "everything"), default="pipelines")
    parser.add_argument("--table", type=Path, nargs="+", help="documents to print as Markdown")
    options = parser.parse_args()
    if options.table:
        for path in options.table:
            print(table(json.loads(path.read_text())))
        return
    document: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "cases": [],
    }
    for name in options.cases.split(","):
        if name not in CASES:
            sys.exit(f"unknown case {name!r}; known: {', '.join(CASES)}")
        names = EVERYTHING if options.searchers == "everything" else PLANNERS
        document["cases"].append(run(name, names, options.budget))
        print(f"{name} done", file=sys.stderr, flush=True)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
