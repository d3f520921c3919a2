"""How many actions per second the engines replay: one plan, many plans, event by event; and how fast an order is built.

python benchmarks/engines.py [--json] [--repeats 5]

An action is a forward or backward of one micro-batch on one stage; transfers are pure delays ("lags") or tasks on links
("tasks"), which doubles what is replayed per action. Times are medians of CPU time on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from simpart.engines.compiled import makespans, times, times_and_peaks
from simpart.engines.levels import highest, levels_of
from simpart.engines.simpy_engine import simulate_events
from simpart.lowering.topology import Shape, StageEdge, actions_of, build_topology, class_of_action
from simpart.program import MEMORY_KINDS, Durations, MemoryDeltas
from simpart.schedule import Schedule

PLANS = 256


def cpu_seconds(function: Callable[[], Any], repeats: int, at_least_s: float = 0.02) -> float:
    """Median CPU time of one call; short ones are called in a loop."""
    function()
    start = time.process_time()
    function()
    calls = max(1, round(at_least_s / max(1e-6, time.process_time() - start)))
    found = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(calls):
            function()
        found.append((time.process_time() - start) / calls)
    return statistics.median(found)


def measure(stages: int, micro_batches: int, transfers: str, repeats: int) -> dict[str, Any]:
    edges = tuple(StageEdge(s, s + 1) for s in range(stages - 1))
    shape = Shape(tuple(range(stages)), Schedule(kind="1f1b"), micro_batches, edges, transfers)  # type: ignore[arg-type]
    topology = build_topology(shape, actions_of(shape))
    actions, classes = 2 * stages * micro_batches, len(topology.class_names)
    rng = np.random.default_rng(0)
    durations = Durations(task_s=rng.random(classes), lag_s=rng.random(2 * len(edges)))
    many, lags = rng.random((PLANS, classes)), rng.random((PLANS, 2 * len(edges)))
    start, end, within = np.zeros((3, classes, len(MEMORY_KINDS)))
    for s in range(stages):
        start[class_of_action(s, "F"), 3] = 1.0
        end[class_of_action(s, "B"), 3] = -1.0
    static = np.zeros((stages, len(MEMORY_KINDS)))
    memory = MemoryDeltas(static=static, late=static, start=start, end=end, within=within)
    single = cpu_seconds(lambda: times(topology, durations), repeats)
    swept = cpu_seconds(lambda: times_and_peaks(topology, durations, memory), repeats)
    batch = cpu_seconds(lambda: makespans(topology, many, lags), repeats)
    levels = levels_of(topology)
    sums = [np.tile(table.sum(axis=1)[:, None], PLANS) for table in (static, static, start, end, within)]
    both = cpu_seconds(lambda: (makespans(topology, many, lags), highest(levels, *sums)), repeats)
    events = cpu_seconds(lambda: simulate_events(topology, durations), 1 if actions > 10_000 else repeats)
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "transfers": transfers,
        "actions": actions,
        "tasks": topology.size,
        "order_build_s": cpu_seconds(lambda: build_topology(shape, actions_of(shape)), repeats),
        "single_actions_per_s": actions / single,
        "single_with_memory_actions_per_s": actions / swept,
        "batched_actions_per_s": PLANS * actions / batch,
        "batched_candidates_per_s": PLANS / batch,
        "batched_with_memory_candidates_per_s": PLANS / both,
        "simpy_actions_per_s": actions / events,
    }


def large(stages: int, micro_batches: int) -> dict[str, Any]:
    """One 1F1B step of many ranks, in a process of its own: CPU seconds from nothing to all times, and peak memory."""
    script = (
        "import json, numba, numpy as np, resource, time\n"
        "import simpart.machine_code as jit\n"
        "from simpart.engines.compiled import times\n"
        "from simpart.program import Durations\n"
        "from simpart.schedule import Schedule\n"
        "from simpart.lowering.topology import Shape, StageEdge, actions_of, build_topology\n"
        "jit.WORTH_IMPORTING = 0\n"
        "def run(stages, count):\n"
        "    edges = tuple(StageEdge(s, s + 1) for s in range(stages - 1))\n"
        "    shape = Shape(tuple(range(stages)), Schedule(kind='1f1b'), count, edges, 'lags')\n"
        "    topology = build_topology(shape, actions_of(shape))\n"
        "    durations = Durations(task_s=np.ones(len(topology.class_names)), lag_s=np.zeros(2 * len(edges)))\n"
        "    return times(topology, durations).makespan_s\n"
        "run(4, 8)\n"
        "start = time.process_time()\n"
        f"step_s = run({stages}, {micro_batches})\n"
        f"assert step_s == 2 * ({stages} + {micro_batches} - 1)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps({'cpu_s': time.process_time() - start, 'peak_bytes': peak}))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {"stages": stages, "micro_batches": micro_batches, **json.loads(run.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the engines.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    import numba  # noqa: F401  # measured warm: short runs would otherwise stay in Python

    rows = [
        measure(stages, micro_batches, transfers, options.repeats)
        for stages, micro_batches in ((8, 64), (64, 512))
        for transfers in ("lags", "tasks")
    ]
    most = large(1024, 4096)
    if options.json:
        print(json.dumps({"benchmark": "engines", "plans": PLANS, "rows": rows, "large": most}, indent=1))
        return
    print(f"P=1024 M=4096: {most['cpu_s']:.2f} s from schedule to times, {most['peak_bytes'] / 1e9:.2f} GB")
    for row in rows:
        print(
            f"P={row['stages']:<3} M={row['micro_batches']:<4} {row['transfers']:<6}"
            f" order {row['order_build_s'] * 1e3:6.2f} ms"
            f"  single {row['single_actions_per_s'] / 1e6:6.1f} M actions/s"
            f" (with memory {row['single_with_memory_actions_per_s'] / 1e6:6.1f})"
            f"  batched {row['batched_actions_per_s'] / 1e6:6.1f} M/s = {row['batched_candidates_per_s']:9.0f} plans/s"
            f" (with memory {row['batched_with_memory_candidates_per_s']:9.0f})"
            f"  SimPy {row['simpy_actions_per_s'] / 1e3:6.1f} k/s"
        )


if __name__ == "__main__":
    main()
