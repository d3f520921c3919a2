"""How many plans per second are evaluated end to end, from Plan to step time and peak memory, lowering included.

    python benchmarks/evaluate.py [--json] [--repeats 3]

GPT-3 175B on 384 A100 with tensor parallelism 8: `reference` is the plan tp 8 x pp 12 x dp 4 with 384 micro-batches,
`variants` are those over pp, dp, micro-batches, schedule and recomputation. `cold` is the first pass over all of them
of a fresh problem (graph captured, code compiled): stages are priced and orders built. `second` is the next pass, whose
stages and orders are known; `warm` one after so many passes that the orders are recorded for replaying many plans at
once, as in a search; `new` one over plans whose stages are cut before other layers: orders are known, stages only as
far as they are like those before. CPU time on one core.
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
PASSES = 8
CLUSTER, GLOBAL_BATCH, TP = "dgx-a100:48", 1536, 8


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
    reference = configure(problem, Configuration(tp=TP, pp=12, dp=4, micro_batch=1, recompute="full"))
    evaluate(problem, [reference])  # code is compiled, captures and models are loaded
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"cold": [], "second": [], "warm": [], "new": []}
    first_s, again = [], []
    for _ in range(options.repeats):
        problem = fresh()
        first_s.append(cpu_seconds(problem, [reference]))
        again.append(100 / sum(cpu_seconds(problem, [reference]) for _ in range(100)))
        problem = fresh()
        for name, given in (("cold", plans), ("second", plans)):
            found[name].append(len(given) / cpu_seconds(problem, given))
        for _ in range(PASSES):
            cpu_seconds(problem, plans)
        found["warm"] += [len(plans) / cpu_seconds(problem, plans) for _ in range(PASSES)]
        other = [recut(problem, plan, rng) for plan in plans]
        found["new"].append(len(other) / cpu_seconds(problem, other))
    (said,) = evaluate(problem, [reference])
    document = {
        "benchmark": "evaluate",
        "reference": {
            "micro_batches": reference.batch.micro_batches, "step_s": said.step_s, "peak_bytes": said.peak_bytes,
            "first_s": min(first_s), "again_per_s": max(again),
        },
        "plans": len(plans),
        "per_s": {name: max(rates) for name, rates in found.items()},
    }  # fmt: skip
    if options.json:
        print(json.dumps(document, indent=1))
        return
    print(f"tp 8 x pp 12 x dp 4, M = 384: {min(first_s) * 1e3:.0f} ms at first, then {max(again):.0f}/s")
    print(f"{len(plans)} plans: " + ", ".join(f"{name} {max(rates):.0f}/s" for name, rates in found.items()))


def cpu_seconds(problem: Problem, plans: list[Plan]) -> float:
    start = time.process_time()
    evaluate(problem, plans)
    return time.process_time() - start


def variants(problem: Problem) -> list[Plan]:
    plans = []
    for pp, micro_batch, schedule, recompute in itertools.product(
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 48),
        (1, 2, 4, 8, 16),
        ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1"),
        ("none", "full"),
    ):
        try:
            configuration = Configuration(tp=TP, pp=pp, micro_batch=micro_batch, schedule=schedule, recompute=recompute)
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
        Stage(ops=OpSet.of(graph, range(a, b)), group=stage.group, sharding=stage.sharding)
        for stage, a, b in zip(plan.stages, firsts, firsts[1:], strict=False)
    )
    return replace(plan, stages=stages)


if __name__ == "__main__":
    main()
