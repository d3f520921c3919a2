"""The whole loop on this machine, several times: profile, search, simulate, run on two local processes, compare.

    python benchmarks/loop.py [--repeats 5] [--models gpt,resnet50,unet,gpt-head] [--reuse-profiles] > loop.json

Prints one JSON document: for every model and repeat, predicted and measured step time and peak memory with the error.
Two processes of one thread each on two physical cores, profiled with two busy processes; leave the machine alone
meanwhile. Every repeat starts from an empty profile store unless `--reuse-profiles` is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from simpart.hardware import load_cluster
from simpart.hardware_profiles._profile_links import profile_links
from simpart.hardware_profiles._profile_ops import profile_graph_ops
from simpart.hardware_profiles._store import Store
from simpart.model_spec import load_graph_or_model
from simpart.plan import Plan
from simpart.plan.format import PlanFile
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searching import Budget, search
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec
from simpart.validate import validate

MODELS = {
    "gpt": ("gpt:layers=6,hidden=384,heads=6,seq=256,vocab=8192", 16),
    "resnet50": ("resnet50:image=96,classes=100", 16),
    "unet": ("unet:image=128,base=32,depth=3", 16),
    "gpt-head": ("gpt:layers=3,hidden=256,heads=4,seq=256,vocab=32768", 16),
}
"""Model and global batch. The last one's head outweighs its layers, so that its best cut is not in the middle."""

PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of profiling per repeat")
    parser.add_argument("--reuse-profiles", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as shared:
            for repeat in range(arguments.repeats):
                with tempfile.TemporaryDirectory() as own:
                    store = Path(shared if arguments.reuse_profiles else own)
                    row = {
                        "model": name,
                        "repeat": repeat,
                        **once(*MODELS[name], store, arguments.steps, arguments.budget),
                    }
                rows.append(row)
                print(
                    f"{name} {repeat}: step {row['predicted']['step_s']:.3f} s predicted, "
                    f"{row['measured']['step_s']:.3f} s "
                    f"measured, error {row['error']:+.1%}; memory error {row['memory_error']:+.1%}",
                    file=sys.stderr,
                )
    worst = {n: max(abs(r["error"]) for r in rows if r["model"] == n) for n in arguments.models.split(",")}
    json.dump({"rows": rows, "worst_error": worst}, sys.stdout, indent=1)
    print()


def once(model: str, global_batch: int, store: Path, steps: int, budget_s: float) -> dict[str, Any]:
    """One pass of the loop. Two stages are asked for, so that every model is cut."""
    start = time.monotonic()
    graph = load_graph_or_model(model)
    cluster = load_cluster(f"local:{PROCESSES}")
    training = TrainingSpec(optimizer="adamw")
    place = Store.at(store)
    profile_links(PROCESSES, place, busy=True)
    space = Space(min_stages=2, max_stages=2, recompute=("none",))
    sizes = {2}
    while True:  # measure what the best plan runs, until it is what was measured
        profile_graph_ops(graph, sorted(sizes), PROCESSES, place, budget_s, training=training)
        costs = default_costs(cluster, store=store)
        problem = Problem(
            graph=graph, training=training, cluster=cluster, costs=costs, global_batch=global_batch, space=space
        )
        found = search(problem, load_searcher("rannc"), Budget(seconds=60.0), seed=0)
        assert found.best is not None and found.best.candidate.plan is not None, found.infeasible
        plan: Plan = found.best.candidate.plan
        wanted = {size for group in plan.batch.sizes for size in group}
        if wanted <= sizes:
            break
        sizes |= wanted
    profiled_s = time.monotonic() - start
    result = simulate_plan(problem, plan)
    file = PlanFile(plan=plan, training=training, cluster=cluster, graph=graph.at(max(plan.batch.sizes[0])))
    report = validate(file, predicted=result, steps=steps, warmup=2, timeout_s=600)
    document = report.to_json()
    return {
        "stages": [list(stage.ops.runs) for stage in plan.stages],
        "micro_batches": plan.batch.micro_batches,
        "sizes": [list(s) for s in plan.batch.sizes],
        "schedule": plan.schedule.kind,
        "crossing": len(crossings(problem, plan)),
        "predicted": {
            "step_s": result.step_s,
            "interval_s": list(result.interval_s),
            "allocated_bytes": document["predicted"]["allocated_bytes"],
        },
        "measured": {
            key: document["measured"][key]
            for key in ("step_s", "steps", "spread", "cpu_share", "allocated_bytes", "peak_bytes")
        },
        "error": report.error,
        "memory_error": report.memory_error,
        "components": document["components"],
        "provenance": result.provenance,
        "timing": {"profile_and_search_s": profiled_s, "total_s": time.monotonic() - start},
    }


def crossings(problem: Problem, plan: Plan) -> list[int]:
    """Values that cross the cut."""
    from simpart.plan.partition import partition_of

    return [c.value for c in partition_of(problem.graph.at(max(plan.batch.sizes[0])), plan).crossings]


if __name__ == "__main__":
    main()
