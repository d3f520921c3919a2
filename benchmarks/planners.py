"""How long planners search: on arrays, on a captured GPT, on BERT with 4.9 B parameters, on 50,000 ops; JSON.

    python benchmarks/planners.py [--part arrays|gpt|bert|ops] [--repeats 3] [--profiles DIR] [--cluster dgx-a100:2]
                                  [--global-batch 64] [--layers 3300]

`arrays`: the planner alone, prices given. Else prices from data sheets, proposals and their simulation, from a captured
graph on; `best_step_s` is simulated. `peer` says what another system published for the same work, and `peer_includes`
what that time is made of: most measure ops or compile stages first, which is no part of a search here. The first
repeat also compiles, unless cached.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpart.capture import capture
from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.problem import Problem
from simpart.registry import load_searcher, searcher_names
from simpart.searchers._chain import solve_chain
from simpart.searchers._dapple_tables import Dapple, DappleCosts
from simpart.searchers._piper_graph import PiperProblem
from simpart.searchers._piper_graph import solve as solve_piper
from simpart.searchers._profiles import find_profile, read_pipedream, read_piper
from simpart.searchers.alpa import InterOp, InterOpCosts
from simpart.searchers.pipedream import Level, graph_cuts
from simpart.searchers.pipedream import solve as solve_pipedream
from simpart.searchers.two_bw import solve as solve_2bw
from simpart.searching import search
from simpart.training import TrainingSpec
from simpart.zoo import BERTDims, GPTDims, ZooFactory

PEERS: dict[str, tuple[str, str]] = {
    "alpa": ("Zheng et al., OSDI 2022", "profiling, compilation and search"),
    "bert": (
        "RaNNC: 4 hours on 32 V100 (rannc-examples, bert/README.md)",
        "profiling of ops and merged blocks, search",
    ),
    "dapple": ("Fan et al., PPoPP 2021", "search on a measured profile"),
    "pipedream": ("Narayanan et al., SOSP 2019", "search on a measured profile"),
    "piper": ("Tarnawski et al., NeurIPS 2021", "search on a measured profile"),
    "rannc": ("Tanaka et al., IPDPS 2021", "profiling of ops and merged blocks, search"),
    "2bw": ("Narayanan et al., arXiv 2006.09503", "sweep on a measured profile"),
}


def random_stages(layers: int, sizes: tuple[int, ...], seed: int) -> np.ndarray:
    """[i, j, o] seconds of a chain of random layers on `sizes[o]` devices, with 10 % noise."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 2, layers))])
    noise = 1 + 0.1 * rng.random((layers, layers + 1, len(sizes)))
    return np.maximum(ends[None, :] - ends[:-1, None], 0.0)[:, :, None] / np.array(sizes) ** 0.9 * noise


def alpa(layers: int, devices: int, micro_batches: int, every_size: bool, tight: bool) -> Callable[[], Any]:
    """Inter-op problem; `tight`: memory bounds how many stages may follow."""
    sizes = tuple(range(1, devices + 1)) if every_size else tuple(1 << e for e in range(devices.bit_length()))
    time_s = random_stages(layers, sizes, 1)
    successors = np.full(time_s.shape, 4096)
    if tight:
        length = np.maximum(1, np.arange(layers + 1)[None, :, None] - np.arange(layers)[:, None, None])
        successors = np.clip(np.floor(layers / 1.2 * np.array(sizes) / length) - 1, -1, 4096).astype(np.int64)
    costs = InterOpCosts(time_s=time_s, successors=successors, sizes=sizes)
    return lambda: InterOp(costs, devices, micro_batches).best()


def rannc(blocks: int, devices: int) -> Callable[[], Any]:
    """Stage problem for every number of stages, any replica count, 5 % noise; memory rules out some stages."""
    from rannc_stage import random_costs

    costs = random_costs(blocks, devices, power_of_two=False, correlated=True, seed=1)
    return lambda: solve_chain(costs, devices, min(blocks, devices))


def dapple(layers: int, machines: tuple[int, ...]) -> Callable[[], Any]:
    """All numbers of stages up to 8, replica counts powers of two, slow links between machines."""
    sizes = tuple(1 << e for e in range(sum(machines).bit_length()))
    time_s, rng = random_stages(layers, sizes, 1), np.random.default_rng(2)
    sent = rng.uniform(0, 0.1, (layers, 1)) / np.array(sizes)
    costs = DappleCosts(
        replicas=sizes,
        time_s=time_s,
        later=np.full(time_s.shape, 99),
        inside_s=sent,
        across_s=10 * sent,
        allreduce_inside_s=time_s / 10,
        allreduce_across_s=time_s,
    )

    def run() -> Any:
        planner = Dapple(costs, machines, 16, most_stages=8)
        return [planner.best(count) for count in range(1, 9)]

    return run


def on_profiles(folder: Path) -> dict[str, Callable[[], Any]]:
    """The published profiles, where they are."""
    cases: dict[str, Callable[[], Any]] = {}
    try:
        for name in ("vgg16", "resnet50"):
            cuts = graph_cuts(*read_pipedream(find_profile(name, [folder])))
            flat, nested = (
                [Level(units=16, bytes_per_s=1.25e9)],
                [Level(units=8, bytes_per_s=25e9), Level(units=2, bytes_per_s=3e9)],
            )
            cases[f"pipedream {name}, 16 devices"] = lambda cuts=cuts, levels=flat: solve_pipedream(cuts, levels)  # type: ignore[misc]
            cases[f"pipedream {name}, 2 machines of 8"] = lambda cuts=cuts, levels=nested: solve_pipedream(cuts, levels)  # type: ignore[misc]
        nodes, edges = read_piper(find_profile("bert32a100.json", [folder]))
        for gibibytes in (8, 80):
            problem = PiperProblem(
                nodes=nodes,
                edges=edges,
                devices=32,
                micro_batches=1920,
                bytes_per_s=25 * 2.0**30,
                limit_bytes=gibibytes * 2.0**30,
            )
            cases[f"piper bert32, {gibibytes} GiB, K=32, N=1920"] = lambda p=problem: solve_piper(p, variants="swaps")  # type: ignore[misc]
            cases[f"2bw bert32, {gibibytes} GiB, K=32, N=1920"] = lambda p=problem: solve_2bw(p)  # type: ignore[misc]
    except FileNotFoundError:
        pass
    return cases


def seconds_of(run: Callable[[], Any], repeats: int) -> list[float]:
    """Of each repeat."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(round(time.perf_counter() - start, 4))
    return taken


def searched(problem: Problem, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each searcher on a problem priced afresh."""
    rows = []
    for name in names:
        costs = Costs(compute=Roofline(), communication=AlphaBeta())
        fresh = replace(problem, costs=costs)
        start = time.perf_counter()
        result = search(fresh, load_searcher(name))
        seconds = time.perf_counter() - start
        best = result.best
        rows.append(
            {
                "searcher": name,
                "cluster": problem.cluster.name,
                "devices": problem.cluster.size,
                "global_batch": problem.global_batch,
                "seconds": round(seconds, 3),
                "includes": "prices, blocks, search, simulation of what is proposed",
                "plans": len(result.ranked),
                "best_step_s": best and best.evaluation.step_s,
                "best_family": best and best.candidate.family,
                "own_objective_s": best and best.candidate.objective_s,
                "own_bound_s": result.bound_s,
            }
        )
    return rows


def problem_of(graph: Graph, cluster: str, global_batch: int) -> Problem:
    costs = Costs(compute=Roofline(), communication=AlphaBeta())
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=load_cluster(cluster), costs=costs, global_batch=global_batch
    )


def gpt(cluster: str, global_batch: int) -> list[dict[str, Any]]:
    """Every registered searcher on one GPT."""
    graph = capture(ZooFactory("gpt", GPTDims(layers=24, hidden=1024, heads=16, seq=1024, vocab=51200)), model="gpt")
    return searched(problem_of(graph, cluster, global_batch), searcher_names())


def bert() -> list[dict[str, Any]]:
    """BERT with 4.9 B parameters on 32 V100, whose partitioning took RaNNC 4 hours with profiling."""
    dims = BERTDims(layers=96, hidden=2048, heads=16, ffn=8192, seq=512, vocab=30522)
    graph = capture(ZooFactory("bert", dims), model="bert")
    rows = [row for batch in (64, 256) for row in searched(problem_of(graph, "dgx-v100:4", batch), ["rannc", "alpa"])]
    return [row | peer("bert") for row in rows]


def many_ops(layers: int) -> list[dict[str, Any]]:
    """A GPT so deep that it has 50,000 ops, through atoms, blocks and stages; with the peak memory of this process."""
    graph = capture(ZooFactory("gpt", GPTDims(layers=layers, hidden=128, heads=2, seq=128, vocab=1000)), model="gpt")
    captured_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = searched(problem_of(graph, "dgx-v100:4", 64), ["rannc"])
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    more = {
        "ops": len(graph.flat.op_class),
        "peak_bytes": peak_kb * 1024,
        "peak_bytes_after_capture": captured_kb * 1024,
    }
    return [row | more for row in rows]


def peer(key: str) -> dict[str, str]:
    """Who published a time for this, and what that time includes."""
    who, includes = PEERS.get(key, ("", ""))
    return {"peer": who, "peer_includes": includes}


def main() -> None:
    """Print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--profiles", type=Path, default=Path(__file__).parents[2] / "shared" / "data" / "planner_profiles"
    )
    parser.add_argument("--cluster", default="dgx-a100:2")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3300)
    parser.add_argument("--part", choices=["arrays", "gpt", "bert", "ops"], action="append")
    options = parser.parse_args()
    parts = options.part or ["arrays", "gpt", "bert", "ops"]
    document: dict[str, Any] = {"machine": platform.platform(), "processor": platform.processor() or platform.machine()}
    if "arrays" in parts:
        cases = {
            "rannc stages n=32 D=64, all S": rannc(32, 64),
            "alpa inter-op L=32 D=64 B=64": alpa(32, 64, 64, False, False),
            "alpa inter-op L=32 D=64 B=64, memory": alpa(32, 64, 64, False, True),
            "alpa inter-op L=32 D=64 B=64, submeshes of every size": alpa(32, 64, 64, True, False),
            "dapple 32 blocks, 8 devices": dapple(32, (8,)),
            "dapple 16 blocks, 4 machines of 8": dapple(16, (8, 8, 8, 8)),
            **on_profiles(options.profiles),
        }
        document["arrays"] = [
            {"case": name, "seconds": seconds_of(run, options.repeats), "includes": "search", **peer(name.split()[0])}
            for name, run in cases.items()
        ]
    if "gpt" in parts:
        document["gpt"] = gpt(options.cluster, options.global_batch)
    if "bert" in parts:
        document["bert"] = bert()
    if "ops" in parts:
        document["ops"] = many_ops(options.layers)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
