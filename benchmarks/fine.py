"""How long a fine-grain step takes from a Plan to its prediction: kernels and collectives of a 96-layer GPT on streams.

    python benchmarks/fine.py [--json] [--only NAME]

Each configuration runs in a process of its own, the graph taken from the cache. `cold_s` is its first answer, from the
Plan to all that `simulate` says, numba's compiled code loaded from the cache. Then, with another problem of the same
graph, `lower_s` is from the Plan to a Program (shardings followed, kernels priced, tasks built), `replay_s` one replay
of it by the compiled engine with memory, `simulate_s` the whole answer: times, memory, interval from 256 draws, limits,
gains. CPU times on one core; `peak_bytes` is the process's largest resident memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

from simpart.configure import Configuration, configure
from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.engines import replay
from simpart.hardware import load_cluster
from simpart.lowering import lower
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.simulation import simulate
from simpart.training import TrainingSpec

MODEL = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tp 8 × pp 8, 64 micro-batches": {"tp": 8, "pp": 8, "dp": 1, "batch": 64},
    "tp 8 × pp 4 × dp 2, ZeRO 1": {"tp": 8, "pp": 4, "dp": 2, "zero": 1, "batch": 128},
    "tp 8 × sp × pp 8, recomputed": {"tp": 8, "sp": True, "pp": 8, "dp": 1, "recompute": "full", "batch": 64},
    "tp 8 × pp 2 × dp 4, ZeRO 3": {"tp": 8, "pp": 2, "dp": 4, "zero": 3, "batch": 64},
    "pp 8 × dp 8": {"pp": 8, "dp": 8, "batch": 512},
    "1,024 devices: tp 8 × pp 16 × dp 8, 256 micro-batches": {"tp": 8, "pp": 16, "dp": 8, "zero": 1, "batch": 2048},
    "8,192 devices: tp 8 × sp × pp 64 × dp 16, 512 micro-batches": {
        "tp": 8,
        "sp": True,
        "pp": 64,
        "dp": 16,
        "zero": 1,
        "recompute": "full",
        "batch": 8192,
    },
}


def measure(name: str) -> dict[str, Any]:
    """One configuration in this process."""
    given = dict(CONFIGURATIONS[name])
    batch, devices = given.pop("batch"), given.get("tp", 1) * given["pp"] * given["dp"]
    graph, cluster = captured(parse_model(MODEL), "float32"), load_cluster(f"dgx-a100:{max(1, devices // 8)}")
    costs = Costs(compute=Roofline(), communication=AlphaBeta())

    def problem() -> tuple[Problem, Plan]:
        found = Problem(graph=graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=batch)
        return found, configure(found, Configuration(**given))

    start = time.process_time()
    simulate(lower(*problem(), "fine"))
    cold_s = time.process_time() - start
    fresh, plan = problem()
    clock = [time.process_time()]
    program = lower(fresh, plan, "fine")
    clock.append(time.process_time())
    times, _ = replay(program)
    clock.append(time.process_time())
    result = simulate(program)
    clock.append(time.process_time())
    lower_s, replay_s, simulate_s = (b - a for a, b in pairwise(clock))
    return {
        "name": name, "devices": devices, "micro_batches": plan.batch.micro_batches, "tasks": program.topology.size,
        "classes": len(program.topology.class_names), "cold_s": cold_s, "lower_s": lower_s, "replay_s": replay_s,
        "simulate_s": simulate_s, "step_s": result.step_s, "limits": result.limits, "makespan_s": times.makespan_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--only", choices=list(CONFIGURATIONS), help="this configuration, in this process")
    options = parser.parse_args()
    rows = []
    for name in CONFIGURATIONS if options.only is None else ():
        answer = subprocess.run(
            [sys.executable, __file__, "--json", "--only", name], capture_output=True, text=True, check=True
        )
        rows += json.loads(answer.stdout)["rows"]
    if options.only is not None:
        rows = [measure(options.only)]
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if options.json:
        print(json.dumps({"benchmark": "fine", "model": MODEL, "machine": machine, "rows": rows}, indent=1))
        return
    for row in rows:
        print(
            f"{row['name']}: {row['tasks']} tasks of {row['classes']} classes; cold {row['cold_s']:.2f} s; "
            f"lowered in {row['lower_s']:.2f} s, "
            f"replayed in {row['replay_s']:.3f} s, simulated in {row['simulate_s']:.2f} s; "
            f"{row['peak_bytes'] / 2**30:.2f} GiB"
        )


if __name__ == "__main__":
    main()
