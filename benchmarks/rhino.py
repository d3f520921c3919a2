"""How long Rhino takes: one sharding problem of Llama-3-8B on 64 devices, whole searches of GPTs, a thousand layers.

    python benchmarks/rhino.py [--part sharding|search|deep|large] [--seconds 120]

From a captured graph; prices from data sheets. `build_s` makes the cost graph (strategies, prices, conversions),
`solve_s` solves it, `gap` is proved. `peer` says what another system published for the same work and `peer_includes`
what that time is made of. Every row is a fresh process; `peak_bytes` is its largest resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from itertools import product
from typing import Any

import numpy as np

from simpart.configure import Configuration, configure
from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.plan import DeviceGroup, Devices
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searchers._cost_graph import minimise
from simpart.searchers._rhino.model import Mesh, MeshModel, StageLoad
from simpart.searching import Budget, search
from simpart.simulation import simulate_plan
from simpart.training import TrainingSpec

LLAMA = "llama:layers=32,hidden=4096,heads=32,kv_heads=8,seq=8192,vocab=128256,ffn=14336"
GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"
ALPA = "operators profiled and stages compiled on the cluster, all optimisation"
GPT = "gpt:layers={},hidden={},heads={},seq=1024,vocab=51200"
SEARCHES = {
    "gpt-1.3b": (GPT.format(24, 2048, 32), 4, 1024, {"Alpa": 4179.0, "Aceso": 200.0}),
    "gpt-2.6b": (GPT.format(32, 2560, 32), 8, 1024, {"Alpa": 8966.0, "Aceso": 200.0}),
    "gpt-6.7b": (GPT.format(32, 4096, 32), 16, 1024, {"Alpa": 5664.0, "Aceso": 200.0}),
    "gpt-13b": (GPT.format(40, 5120, 40), 32, 1024, {"Alpa": 12821.0, "Aceso": 200.0}),
}
"""Model, devices, global batch, and published seconds (SuperScaler, Aceso: search_cost_large_gpt.csv)."""
ROWS = {
    "sharding": ["llama-8b"],
    "search": list(SEARCHES),
    "deep": ["gpt-1024-layers"],
    "large": ["gpt-175b", "gpt-175b-1024"],
}


def sharding() -> dict[str, Any]:
    """One stage on an 8 × 8 mesh: every strategy of every kernel, state at rest, memory."""
    start = time.perf_counter()
    graph = captured(parse_model(LLAMA), "bfloat16")
    captured_s = time.perf_counter() - start
    cluster = load_cluster("dgx-h100:8")
    problem = Problem(
        graph=graph, training=TrainingSpec(precision="bfloat16"), cluster=cluster,
        costs=default_costs(cluster, profiles=False), global_batch=32,
    )  # fmt: skip
    axes = (("x", 8), ("y", 8))
    group = DeviceGroup(devices=Devices.of(range(64)), axes=(("dp", 1), *axes))
    mesh = Mesh(group=group, replicas=1, axes=axes, micro_batch=32, micro_batches=1, stages=1)
    load = StageLoad(
        name="stage 0", ops=np.arange(len(graph.flat.op_class)), in_flight=1,
        limit_bytes=0.9 * cluster.device(0).memory_bytes,
    )  # fmt: skip
    start = time.perf_counter()
    model = MeshModel(problem, mesh, [load])
    cost_graph = model.graph
    built = time.perf_counter()
    solution = minimise(cost_graph, relative_gap=0.01, seconds=60)
    solved = time.perf_counter()
    return {
        "capture_s": captured_s,
        "kernels": int(graph.flat.kernel_class.size),
        "variables": len(cost_graph.unary),
        "pairs_of_options": int(sum(table.size for _, _, table in cost_graph.edges)),
        "build_s": built - start,
        "solve_s": solved - built,
        "cost_s": solution.cost,
        "gap": solution.gap,
        "method": solution.method,
        "peer": {"AutoParallel": {"build_s": 15.1, "solve_s": 36.5}},
        "peer_includes": "strategies from DTensor rules, costs, CBC, after clustering of layers (its pull request 438)",
    }


def problem_of(model: str, devices: int, global_batch: int, space: Space) -> Problem:
    cluster = load_cluster(f"dgx-a100:{-(-devices // 8)}") if devices >= 8 else _few(devices)
    return Problem(
        graph=captured(parse_model(model), "bfloat16"), training=TrainingSpec(precision="bfloat16"), cluster=cluster,
        costs=default_costs(cluster, profiles=False), global_batch=global_batch, space=space,
    )  # fmt: skip


def whole(model: str, devices: int, global_batch: int, seconds: float, space: Space) -> dict[str, Any]:
    """A search over stages, meshes, micro-batches, recomputation and state."""
    start = time.perf_counter()
    problem = problem_of(model, devices, global_batch, space)
    captured_s = time.perf_counter() - start
    busy = time.process_time()
    result = search(problem, load_searcher("rhino"), Budget(seconds=seconds))
    busy_s = time.process_time() - busy
    best = result.best
    return {
        "model": model,
        "devices": devices,
        "global_batch": global_batch,
        "capture_s": captured_s,
        "search_s": result.wall_s,
        "search_cpu_s": busy_s,
        "stopped": result.stopped,
        "proposed": result.proposed,
        "best_step_s": None if best is None else best.evaluation.step_s,
        "best_family": None if best is None else best.candidate.family,
        "best_at_s": None if best is None else best.at_s,
        "bound_s": result.bound_s,
        "gap": result.gap,
    }


def by_hand(model: str, devices: int, global_batch: int) -> dict[str, Any]:
    """The best of the configurations that people state: tp × pp × dp, sequence parallel, recomputation, ZeRO 1."""
    problem = problem_of(model, devices, global_batch, Space())
    fitting: list[tuple[float, str]] = []
    for tp, pp, micro_batch, sp, recompute, zero in product(
        (2, 4, 8), (4, 6, 8, 12, 16, 24, 32), (1, 2, 4), (False, True), ("none", "full"), (0, 1)
    ):
        wanted = Configuration(tp=tp, pp=pp, micro_batch=micro_batch, sp=sp, recompute=recompute, zero=zero)
        try:
            result = simulate_plan(problem, configure(problem, wanted))
        except UserError:  # does not divide the devices or the batch
            continue
        if result.feasible:
            degrees = f"tp {tp} × pp {pp} × dp {devices // tp // pp}"
            words = f"{degrees}, {micro_batch} samples, sp {sp}, recompute {recompute}, ZeRO {zero}"
            fitting.append((result.step_s, words))
    best = min(fitting) if fitting else (None, None)
    return {"by_hand_fitting": len(fitting), "by_hand_step_s": best[0], "by_hand": best[1]}


def _few(devices: int) -> Any:
    from dataclasses import replace

    cluster = load_cluster("dgx-a100")
    return replace(cluster, devices=((cluster.device(0), devices),))


def row(name: str, seconds: float) -> dict[str, Any]:
    if name == "llama-8b":
        return sharding()
    if name in SEARCHES:
        model, devices, batch, peers = SEARCHES[name]
        found = whole(model, devices, batch, seconds, Space())
        return found | {"peer": peers, "peer_includes": f"Alpa: {ALPA}; Aceso: a fixed budget"}
    if name == "gpt-1024-layers":
        found = whole(GPT.format(1024, 1024, 16), 8, 64, seconds, Space())
        return found | {
            "peer": {"Aceso": 246.0},
            "peer_includes": "Aceso: search at 1,024 layers; Alpa gave none from 128",
        }
    devices = 1024 if name.endswith("1024") else 384
    found = whole(GPT3, devices, 1536, seconds, Space())
    return (
        found
        | by_hand(GPT3, devices, 1536)
        | {"peer": {}, "peer_includes": "a public exhaustive tool gave no result in 300 s"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(ROWS), action="append")
    parser.add_argument("--seconds", type=float, default=120.0, help="budget of a whole search")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        found = row(options.row, options.seconds)
        found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found))
        return
    rows = {}
    for part in options.part or list(ROWS):
        for name in ROWS[part]:
            command = [sys.executable, __file__, "--row", name, "--seconds", str(options.seconds)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[name] = json.loads(run.stdout)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    print(json.dumps({"benchmark": "rhino", "machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
