"""How many plans per second are evaluated end to end, from Plan to step time and peak memory, lowering included.

    python benchmarks/evaluate.py [--json] [--repeats 3]

GPT-3 175B in stages of equal and unequal numbers of layers, on A100s: variants over pp, dp, micro-batch, schedule and
recomputation. `cold` is the first pass over all plans of a fresh problem (graph captured, code compiled), `warm` a pass
whose stages, layouts and topologies are known, `new` one over plans whose stages are cut at other layers: topologies
are known, layouts are not. CPU time on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace

import numpy as np

from simpart.configure import Configuration, configure, layer_calls
from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.model_spec import load_graph_or_model
from simpart.plan import OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.registry import default_costs
from simpart.simulation import evaluate
from simpart.training import TrainingSpec

MODEL = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"
CLUSTER, GLOBAL_BATCH = "dgx-a100:6", 1536
"""384 A100 in tensor-parallel groups of 8 have the pipelines of 48."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import numba  # noqa: F401

    graph, cluster = load_graph_or_model(MODEL), load_cluster(CLUSTER)

    def fresh() -> Problem:
        return Problem(
            graph=graph, training=TrainingSpec(optimizer="adamw"), cluster=cluster, costs=default_costs(cluster),
            global_batch=GLOBAL_BATCH,
        )  # fmt: skip

    problem = fresh()
    plans = variants(problem)
    evaluate(problem, plans)  # code is compiled, captures and models are loaded
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"cold": [], "warm": [], "new": []}
    for _ in range(options.repeats):
        problem = fresh()
        for name, given in (("cold", plans), ("warm", plans), ("new", [recut(problem, p, rng) for p in plans])):
            start = time.process_time()
            evaluate(problem, given)
            found[name].append(len(given) / (time.process_time() - start))
    document = {"benchmark": "evaluate", "plans": len(plans), **{k: max(v) for k, v in found.items()}}
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print(f"{len(plans)} plans: " + ", ".join(f"{name} {max(rates):.0f}/s" for name, rates in found.items()))


def variants(problem: Problem) -> list[Plan]:
    plans = []
    for pp, micro_batch, schedule, recompute in itertools.product(
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 48),
        (1, 2, 4, 8, 16, 32),
        ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1"),
        ("none", "full"),
    ):
        try:
            configuration = Configuration(pp=pp, micro_batch=micro_batch, schedule=schedule, recompute=recompute)
            plans.append(configure(problem, configuration))
        except UserError:
            continue  # dp × micro-batch does not divide the batch
    return plans


def recut(problem: Problem, plan: Plan, rng: np.random.Generator) -> Plan:
    """The same with its stages cut before other layers."""
    graph = problem.graph.at(max(plan.batch.sizes[0]))
    calls = layer_calls(graph)
    cuts = sorted(rng.choice(np.arange(1, len(calls)), len(plan.stages) - 1, replace=False).tolist())
    firsts = [0, *(int(np.flatnonzero(graph.flat.op_call == calls[c])[0]) for c in cuts), len(graph.op_ids)]
    stages = tuple(
        Stage(ops=OpSet.of(graph, range(a, b)), group=stage.group)
        for stage, a, b in zip(plan.stages, firsts, firsts[1:], strict=False)
    )
    return replace(plan, stages=stages)


if __name__ == "__main__":
    main()
