"""Do replayed kernels add up to a real step?  python benchmarks/replay.py [MODEL;BATCH …] [--processes N] [--repeat N]

For each model N processes at once run forward and backward of the real module, and N at once replay its kernels.
Prints JSON: every repeat of both (medians over the processes, CPU seconds of one thread) and the ratio of the sum of
replayed kernels, each times its count, plus the measured overhead per kernel, to the real time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

CASES = (
    "gpt:layers=4,hidden=768,heads=12,seq=256,vocab=8192;2",
    "resnet50:image=112;4",
    "unet:image=128,base=32,depth=4;4",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="MODEL;BATCH")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker()
    found = [compare(case, options.processes, options.repeat) for case in options.cases]
    print(json.dumps({"machine": machine(), "processes": options.processes, "cases": found}, indent=1))
    return None


def machine() -> dict[str, Any]:
    from simpart.hardware_profiles._environment import local_environment

    here = local_environment(1)
    return {"python": platform.python_version(), "processor": here.processor, "torch": here.torch}


def compare(case: str, processes: int, repeat: int) -> dict[str, Any]:
    from simpart.model_spec import load_graph_or_model

    model, _, batch = case.rpartition(";")
    graph = load_graph_or_model(model)
    runs = []
    for _ in range(repeat):
        real = measure(model, int(batch), processes)
        summed = replay(graph, int(batch), processes)
        again = measure(model, int(batch), processes)
        forward, backward = ((real[k] + again[k]) / 2 for k in ("forward_s", "backward_s"))
        runs.append({
            "real_before": real,
            "replayed": summed,
            "real_after": again,
            "ratio_forward": round(summed["forward_s"] / forward, 3),
            "ratio_backward": round(summed["backward_s"] / backward, 3),
            "ratio": round((summed["forward_s"] + summed["backward_s"]) / (forward + backward), 3),
        })  # fmt: skip
        print(model, {k: v for k, v in runs[-1].items() if k.startswith("ratio")}, file=sys.stderr)
    median = statistics.median(r["ratio"] for r in runs)
    return {"model": model, "micro_batch": int(batch), "median_ratio": median, "runs": runs}


def replay(graph: Any, batch: int, processes: int) -> dict[str, float]:
    """A fresh profile, summed: seconds of forward and backward, and the share that is overhead."""
    import numpy as np

    from simpart.cost import SignatureTable
    from simpart.cost.signatures import signatures_of
    from simpart.costmodels.table import Table
    from simpart.hardware import load_cluster
    from simpart.hardware_profiles._profile_ops import profile_graph_ops
    from simpart.hardware_profiles._store import Store

    device = load_cluster("local").kinds[0]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        profile_graph_ops(graph, [batch], processes, Store.at(folder))
        took = time.perf_counter() - start
        table = Table(Store.at(folder).read(), processes)
    structure = graph.at(batch)
    signatures = signatures_of(structure, batch)
    counts = np.bincount(structure.flat.kernel_class, minlength=len(signatures))
    seconds = {"F": 0.0, "B": 0.0}
    kernels = 0
    for signature, kernel, count in zip(signatures, structure.kernel_classes, counts.tolist(), strict=True):
        if count and not signature.view:
            mean = table.estimate(SignatureTable((signature,)), device).mean_s[0]
            seconds[kernel.phase] += count * float(mean)
            kernels += count
    overhead = table.kernel_overhead_s(device)
    return {
        "forward_s": seconds["F"],
        "backward_s": seconds["B"],
        "kernels": kernels,
        "overhead_per_kernel_s": overhead,
        "profiling_s": round(took, 1),
    }


def measure(model: str, batch: int, processes: int) -> dict[str, Any]:
    """Medians of forward and backward over the repeats of all processes, which begin together."""
    command = [sys.executable, __file__, "--worker"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        for i, process in enumerate(workers):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"model": model, "batch": batch, "worker": i}) + "\n")
            process.stdin.flush()
        for process in workers:
            assert process.stdout is not None
            process.stdout.readline()  # built and warm
        for process in workers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [json.loads(process.stdout.readline()) for process in workers if process.stdout is not None]
    finally:
        for process in workers:
            process.kill()
            process.wait()
    forward = [s for found in results for s in found["forward_s"]]
    backward = [s for found in results for s in found["backward_s"]]
    wall = [s for found in results for s in found["wall_s"]]
    return {
        "forward_s": statistics.median(forward),
        "backward_s": statistics.median(backward),
        "wall_s": statistics.median(wall),
        "all_forward_s": [round(s, 5) for s in forward],
        "all_backward_s": [round(s, 5) for s in backward],
    }


def worker() -> None:
    import torch

    from simpart.hardware_profiles._environment import keep_freed_memory, pin
    from simpart.model_spec import parse_model

    keep_freed_memory()
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.readline())
    pin(job["worker"])
    factory = parse_model(job["model"])
    module, inputs = factory.build(), factory.inputs(job["batch"], torch.Generator().manual_seed(0))

    def step() -> tuple[float, float]:
        module.zero_grad(set_to_none=True)
        start = time.thread_time()
        loss = module(*inputs)
        middle = time.thread_time()
        loss.backward()
        return middle - start, time.thread_time() - middle

    for _ in range(3):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    begin, steps, wall = time.perf_counter(), [], []
    while len(steps) < 5 or (len(steps) < 50 and time.perf_counter() - begin < 6):
        start = time.perf_counter()
        steps.append(step())
        wall.append(time.perf_counter() - start)
    found = {"forward_s": [f for f, _ in steps], "backward_s": [b for _, b in steps], "wall_s": wall}
    print(json.dumps(found), flush=True)
    while True:  # stay a busy neighbour until the others are done too
        step()


if __name__ == "__main__":
    main()
