"""Time and memory of a capture in a fresh process: `python benchmarks/capture.py [MODEL] [--repeat N]`.

Prints JSON: machine, seconds and peak memory of each run (imports included), counts, parameters against the closed
form, and for a GPT its model FLOPs against Narayanan et al., arXiv:2104.04473, section 5.1, without recomputation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200,tied=true"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=GPT3)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="trace every layer")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(run(options.model, options.precision, options.full)))
        return
    command = [sys.executable, __file__, options.model, "--precision", options.precision, "--once"]
    runs = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        done = subprocess.run(command + ["--full"] * options.full, stdout=subprocess.PIPE, check=True, text=True)
        runs.append({"wall_s": round(time.perf_counter() - start, 2), **json.loads(done.stdout)})
    print(json.dumps({"machine": machine(), "runs": runs}, indent=1))


def run(model: str, precision: str, full: bool) -> dict[str, Any]:
    """One capture in this process."""
    start = time.perf_counter()
    from simpart.commands.capture import summary
    from simpart.graph.format import load_graph, save_graph
    from simpart.model_spec import parse_model
    from simpart.model_spec.cache import captured
    from simpart.zoo import GPTDims, ZooFactory

    factory = parse_model(model)
    graph = captured(factory, precision, full=full, use_cache=False)
    capture_s, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = {"capture_and_imports_s": capture_s, "cpu_s": time.process_time()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.graph"
        start = time.perf_counter()
        save_graph(graph, path)
        times["save_s"] = time.perf_counter() - start
        start = time.perf_counter()
        load_graph(path)
        times["load_s"] = time.perf_counter() - start
        start = time.perf_counter()
        found = summary(graph, path)
        times["count_s"] = time.perf_counter() - start
    del found["file"]
    found["templates"] = [t for t in found["templates"] if t["instances"] > 1]
    if isinstance(factory, ZooFactory):
        found["parameters_equal_closed_form"] = found["parameters"] == factory.parameter_count
        if isinstance(factory.dims, GPTDims):
            found["model_flops_over_closed_form"] = found["model_flops_per_sample"] / narayanan(factory.dims)
    return {**{name: round(value, 3) for name, value in times.items()}, "peak_bytes": peak, **found}


def narayanan(dims: Any) -> float:
    """Per sequence, `72 s l h² (1 + s/6h + V/12lh)`: the paper's 96 s l h² (…) counts one recomputation."""
    s, layers, h, vocab = dims.seq, dims.layers, dims.hidden, dims.vocab
    return float(72 * s * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h)))


def machine() -> dict[str, Any]:
    import importlib.metadata

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "cores": os.cpu_count(),
        "load": [round(x, 1) for x in os.getloadavg()],
    }


if __name__ == "__main__":
    main()
