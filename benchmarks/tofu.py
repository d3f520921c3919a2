"""The partition search beside the paper that it is from: search times, figure 10, figures 8 and 9; JSON, or a page.

    python benchmarks/tofu.py [--part searches|figure10|figures8and9] [--write docs/tofu.md]

Published figures: Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (EuroSys
2019), sections 6 and 7; seconds of figure 10 are read from its bars. Simulated ones: p2.8xlarge (8 K80), float32,
momentum, data sheets and models learned on other devices. Search times are CPU seconds from a captured graph on.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpart.configure import Configuration, configure
from simpart.costmodels import AlphaBeta
from simpart.hardware import load_cluster
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.plan import Plan
from simpart.problem import Problem, Space
from simpart.registry import default_costs, load_searcher
from simpart.searchers._tofu.choices import check_factors
from simpart.searchers._tofu.coarse import coarsen
from simpart.searchers._tofu.plan import plan_of
from simpart.searchers.tofu import partition
from simpart.searching import Control
from simpart.sharding import flows
from simpart.simulation import SimResult, simulate_plan
from simpart.training import TrainingSpec

SEARCHES = (  # model, precision, micro-batch, devices, published seconds, goal
    ("wide_resnet:depth=152,factor=10", "float32", 8, 8, "8.3 s (without recursion 8 hours)", 2),
    ("lstm:layers=10,hidden=8192,seq=20,vocab=1000", "float32", 128, 8, "66.6 s (without recursion over 24 hours)", 5),
    ("gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200", "bfloat16", 64, 64, "none", 10),
)
RNN_4_8K, WRN_152_10 = "lstm:layers=4,hidden=8192,seq=20,vocab=1000", "wide_resnet:depth=152,factor=10"
FIGURE_10: dict[str, tuple[str, int, dict[str, str]]] = {
    "RNN-4-8K": (
        RNN_4_8K, 512,
        {"tofu": "6.4 %, 5.5 s", "tofu_equalchop": "13.8 %, 6.0 s", "tofu_icml18": "13.2 %, 5.9 s",
         "tofu_spartan": "21.1 %, 6.5 s", "tofu_allrow": "24.5 %, 6.9 s"},
    ),
    "WResNet-152-10": (
        WRN_152_10, 8,
        {"tofu": "21.9 %, 4.2 s", "tofu_equalchop": "35.2 %, 5.05 s", "tofu_icml18": "out of memory",
         "tofu_spartan": "33.8 %, 4.95 s", "tofu_allrow": "out of memory"},
    ),
}  # fmt: skip
METHODS = (
    "tofu", "tofu_shared", "tofu_seconds", "tofu_equalchop", "tofu_icml18", "tofu_spartan", "tofu_allrow",
    "tofu_data_parallel", "tofu_one_weird_trick",
)  # fmt: skip
FRACTIONS = (  # figure, model, batch of an ideal device, batches that Tofu may take, published samples/s of both
    ("8: WResNet-50-4", "wide_resnet:depth=50,factor=4", 128, (128,), 47, 41),
    ("8: WResNet-50-10", "wide_resnet:depth=50,factor=10", 128, (128, 64, 32, 16, 8), 6.4, 6.0),
    ("8: WResNet-101-6", "wide_resnet:depth=101,factor=6", 128, (128, 64, 32, 16, 8), 9.4, 8.7),
    ("8: WResNet-101-10", "wide_resnet:depth=101,factor=10", 128, (64, 32, 16, 8), 3.3, 3.1),
    ("8: WResNet-152-4", "wide_resnet:depth=152,factor=4", 128, (32,), 19, 11),
    ("8: WResNet-152-10", WRN_152_10, 128, (8,), 2.3, 1.9),
    ("9: RNN-6-4K", "lstm:layers=6,hidden=4096,seq=20,vocab=1000", 512, (512, 256, 128), 233, 210),
    ("9: RNN-10-4K", "lstm:layers=10,hidden=4096,seq=20,vocab=1000", 512, (512, 256, 128), 136, 122),
    ("9: RNN-8-6K", "lstm:layers=8,hidden=6144,seq=20,vocab=1000", 512, (512, 256, 128), 78, 75),
    ("9: RNN-6-8K", "lstm:layers=6,hidden=8192,seq=20,vocab=1000", 512, (512, 256, 128), 58, 57),
    ("9: RNN-10-8K", "lstm:layers=10,hidden=8192,seq=20,vocab=1000", 512, (128,), 33, 23),
)


def problem_of(model: str, batch: int, own_links: bool = False) -> Problem:
    """Links as learned for the machine's one bus; or each device its own, at the data sheet's rate."""
    cluster = load_cluster("p2.8xlarge")
    costs = default_costs(cluster, profiles=False)
    if own_links:
        levels = tuple(replace(x, kind="switch", shared_by=1) if x.kind == "shared" else x for x in cluster.levels)
        cluster, costs = replace(cluster, levels=levels), replace(costs, communication=AlphaBeta())
    return Problem(
        graph=captured(parse_model(model), "float32"), training=TrainingSpec(precision="float32", optimizer="momentum"),
        cluster=cluster, costs=costs, global_batch=batch, space=Space(max_micro_batches=1),
    )  # fmt: skip


def proposed(problem: Problem, name: str) -> tuple[Plan | None, str]:
    """The plan of a searcher, of several the one that simulates best; or why there is none."""
    candidates = list(load_searcher(name).propose(problem, np.random.default_rng(0), Control()))
    plans = [c.plan for c in candidates if c.plan is not None]
    if not plans:
        return None, candidates[0].why
    results = [simulate_plan(problem, plan) for plan in plans] if len(plans) > 1 else []
    ranks = [(not result.feasible, result.step_s) for result in results]
    return plans[ranks.index(min(ranks)) if ranks else 0], ""


# --- search times ----------------------------------------------------------------------------------------------------
def searches() -> list[dict[str, Any]]:
    found = []
    for model, precision, micro_batch, devices, published, goal in SEARCHES:
        graph = captured(parse_model(model), precision).at(micro_batch)
        kernels = len(graph.flat.kernel_class)
        start = time.process_time()
        coarse = coarsen(graph, micro_batch, check_factors(devices, None))
        coarsened = time.process_time()
        made = partition(graph, micro_batch, devices, coarse=coarse)
        done = time.process_time()
        found.append(
            {
                "model": model, "devices": devices, "micro_batch": micro_batch, "kernels": kernels,
                "kernel_classes": len(coarse.work.kernels), "values": len(coarse.work.values),
                "groups": len(coarse.work.groups), "coarsen_s": round(coarsened - start, 2),
                "search_s": round(done - start, 2), "goal_s": goal, "published": published, "bytes": made.bytes,
                "bound": made.bound, "gap": round(made.gap, 4), "bytes_by_device": made.devices_bytes,
                "method": made.found.method, "deltas": list(made.found.deltas),
            }
        )  # fmt: skip
    return found


# --- figure 10 -------------------------------------------------------------------------------------------------------
def figure10() -> list[dict[str, Any]]:
    rows = []
    for workload, (model, batch, published) in FIGURE_10.items():
        for name in METHODS:
            for links in ("shared", "own"):
                problem = problem_of(model, batch, links == "own")
                if links == "shared" or name == "tofu_seconds":
                    plan, why = proposed(problem, name)
                if plan is None:
                    rows.append({"workload": workload, "method": name, "why": why})
                    break
                result = simulate_plan(problem, plan)
                row = next((r for r in rows if r["workload"] == workload and r["method"] == name), None)
                if row is None:
                    graph = problem.graph.at(plan.batch.sizes[0][0])
                    row = {
                        "workload": workload, "method": name, "peak_bytes": result.peak_bytes,
                        "over": result.why_infeasible, "run_bytes": received(plan, graph, problem.cluster.size),
                        "published": published.get(name, ""), "counted_bytes": counted(problem, name, plan),
                    }  # fmt: skip
                    rows.append(row)
                row[links] = step_of(result)
    return rows


def counted(problem: Problem, name: str, plan: Plan) -> float | None:
    """Bytes by the paper's count."""
    searcher: Any = load_searcher(name)
    for unnested in getattr(searcher, "unnested", ()):
        found = partition(
            problem.graph, problem.global_batch, problem.cluster.size, method=searcher.method,
            problem=problem if searcher.seconds else None, share=searcher.share, unnested=unnested,
        )  # fmt: skip
        if plan_of(found.coarse, found.found, 1, plan.schedule.kind).shardings == plan.shardings:
            return found.bytes
    return None


def received(plan: Plan, graph: Any, devices: int) -> float:
    """Bytes that the busiest device receives in the collectives that run, times the devices."""
    return devices * float(sum(flows(plan, graph)[0].received_bytes().values()))


def step_of(result: SimResult) -> dict[str, float]:
    talk = sum(share for name, share in result.limits.items() if name.startswith("communication"))
    return {"step_s": result.step_s, "communication": talk, "communication_s": talk * result.step_s}


# --- figures 8 and 9 -------------------------------------------------------------------------------------------------
def figures8and9() -> list[dict[str, Any]]:
    rows = []
    for name, model, batch, batches, ideal, tofu in FRACTIONS:
        problem = problem_of(model, batch, own_links=True)
        alone = simulate_plan(problem, configure(problem, Configuration(dp=1, micro_batch=batch)))
        ideal_rate = problem.cluster.size * batch / alone.step_s
        row: dict[str, Any] = {
            "figure": name, "published_ideal": ideal, "published_tofu": tofu, "published": tofu / ideal,
            "ideal": ideal_rate,
        }  # fmt: skip
        for size in batches:
            smaller = problem_of(model, size, own_links=True)
            plan, _ = proposed(smaller, "tofu")
            if plan is None:
                continue
            result = simulate_plan(smaller, plan)
            if result.feasible or size == batches[-1]:
                shared = simulate_plan(problem_of(model, size), plan)
                row |= {
                    "batch": size, "tofu": result.samples_per_s, "fraction": result.samples_per_s / ideal_rate,
                    "fraction_shared": shared.samples_per_s / ideal_rate, "peak_bytes": result.peak_bytes,
                    "over": result.why_infeasible,
                }  # fmt: skip
                break
        rows.append(row)
    return rows


# --- the page --------------------------------------------------------------------------------------------------------
BEGIN, END = "<!-- figures: begin (python benchmarks/tofu.py --write docs/tofu.md) -->", "<!-- figures: end -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def page(document: dict[str, Any]) -> str:
    parts = []
    if "searches" in document:
        rows = [
            [r["model"].partition(":")[0] + " " + r["model"].partition(":")[2].replace(",", ", "), str(r["devices"]),
             f"{r['kernels']}", f"{r['kernel_classes']} + {r['values']}", str(r["groups"]), f"{r['search_s']:.1f} s",
             f"{r['goal_s']} s", r["published"], f"{r['bytes'] / 1e9:.4g}", f"{r['bound'] / 1e9:.4g}",
             f"{100 * r['gap']:.1f} %"]
            for r in document["searches"]
        ]  # fmt: skip
        head = (
            "model", "devices", "kernels", "classes + values", "groups", "search", "goal", "published", "GB received",
            "GB at least", "gap",
        )  # fmt: skip
        parts.append(
            f"### Search\n\nCPU seconds on {document['machine']['processor']}, one thread; from the "
            f"captured graph on, coarsening included.\n\n{table(head, rows)}\n"
        )
    if "figure10" in document:
        for workload in FIGURE_10:
            rows = []
            for r in (r for r in document["figure10"] if r["workload"] == workload):
                if "own" not in r:
                    rows.append([r["method"].removeprefix("tofu_"), *["–"] * 6, r["why"], ""])
                    continue
                gigabytes = "–" if r["counted_bytes"] is None else f"{r['counted_bytes'] / 1e9:.1f}"
                cells = [
                    f"{r[k]['step_s']:.2f} s, {100 * r[k]['communication']:.0f} % ({r[k]['communication_s']:.2f} s)"
                    for k in ("own", "shared")
                ]
                fits = f"{r['peak_bytes'] / 2**30:.1f} GiB" + (", **does not fit**" if r["over"] else "")
                rows.append([r["method"].removeprefix("tofu_"), gigabytes, f"{r['run_bytes'] / 1e9:.1f}", *cells, fits,
                             r["published"]])  # fmt: skip
            head = (
                "plan", "GB counted", "GB run", "links of their own: step, communication", "shared bus: the same",
                "a device", "published",
            )  # fmt: skip
            parts.append(f"### Figure 10: {workload}, batch {FIGURE_10[workload][1]}\n\n{table(head, rows)}\n")
    if "figures8and9" in document:
        rows = [
            [r["figure"], f"{r['published_tofu']:g} / {r['published_ideal']:g}", f"{100 * r['published']:.0f} %",
             f"{r['tofu']:.3g} / {r['ideal']:.3g}", f"{100 * r['fraction']:.0f} %",
             f"{100 * r['fraction_shared']:.0f} %", str(r["batch"]),
             f"{r['peak_bytes'] / 2**30:.1f} GiB" + (", does not fit" if r["over"] else "")]
            for r in document["figures8and9"]
        ]  # fmt: skip
        head = (
            "figure", "published samples/s, Tofu / ideal", "published", "simulated samples/s", "simulated",
            "on a shared bus", "batch", "a device",
        )  # fmt: skip
        parts.append(f"### Figures 8 and 9: part of eight ideal devices\n\n{table(head, rows)}\n")
    return "\n".join(parts)


def renewed(text: str, document: dict[str, Any]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{page(document)}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"searches": searches, "figure10": figure10, "figures8and9": figures8and9}
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--write", type=Path, metavar="FILE", help="renew the tables of a page; needs all parts")
    chosen = parser.parse_args()
    if chosen.write is not None and chosen.part:
        parser.error("--write needs all parts; leave --part out")
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    document: dict[str, Any] = {"machine": machine}
    for name, part in parts.items():
        if not chosen.part or name in chosen.part:
            document[name] = part()
    if chosen.write is not None:
        chosen.write.write_text(renewed(chosen.write.read_text(), document))
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
