"""The main job on this machine in one go: profile, capture, search, simulate, run, compare.

    python -m simpart.demo [MODEL] [--folder DIR]

Every step names the command that does the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from simpart.describe import describe, human_bytes, human_seconds
from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.model_spec import load_graph_or_model
from simpart.plan.format import PlanFile, save_plan
from simpart.problem import Problem, Space
from simpart.registry import default_costs, folder, load_searcher, local_profiler
from simpart.report import save_report
from simpart.report.timeline import timeline
from simpart.searching import search
from simpart.simulation import SimResult, simulate_plan
from simpart.training import TrainingSpec

MODEL = "gpt:layers=6,hidden=512,heads=8,seq=128,vocab=16384"
GLOBAL_BATCH = 8
MICRO_BATCHES = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="simpart.demo", description="Profile, search, simulate and run a model here.")
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--folder", type=Path, default=Path("out/demo"), help="where plan, traces and profiles go")
    arguments = parser.parse_args()
    try:
        demo(arguments.model, arguments.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what was measured", file=sys.stderr)
        sys.exit(130)


def demo(model: str, place: Path) -> None:
    """Print what happens; leave plan, traces and profiles in `place`."""
    validate = folder("validate").validate

    place.mkdir(parents=True, exist_ok=True)
    store, plan_path = place / "profiles", place / "plan.json"
    start = time.monotonic()
    cluster = load_cluster("local:2")
    training = TrainingSpec()

    say(start, f"capture    $ simpart capture {model}")
    graph = load_graph_or_model(model)
    print(
        f"  {len(graph.op_ids)} ops, {len(graph.kernel_classes)} distinct kernels, "
        f"{graph.parameter_count / 1e6:.1f} M parameters"
    )

    say(
        start,
        f"profile    $ simpart profile ops {model} --store {store}\n"
        f"           $ simpart profile links --cluster local:2 --busy --store {store}",
    )
    profile_ops, profile_links = local_profiler(store)
    done = profile_ops(graph, MICRO_BATCHES, processes=2, budget_s=75.0, training=training)
    print(f"  {done.measured} kernels measured with 2 busy processes, {done.found} known, {done.left} not measured")
    points = profile_links(2, busy=True)
    print(f"  {points.measured} link sizes measured over gloo, {points.found} known")

    say(
        start,
        f"search     $ simpart search {model} --cluster local:2 --global-batch {GLOBAL_BATCH} --min-stages 2 "
        f"--store {store} -o {plan_path}",
    )
    costs = default_costs(cluster, store=store)
    space = Space(max_micro_batches=GLOBAL_BATCH, min_stages=2)
    problem = Problem(
        graph=graph, training=training, cluster=cluster, costs=costs, global_batch=GLOBAL_BATCH, space=space
    )
    found = search(problem, load_searcher("rannc"))
    if found.best is None or found.best.candidate.plan is None:
        raise UserError(f"no plan fits this machine: {found.why_none}")
    plan = found.best.candidate.plan
    file = PlanFile(plan=plan, training=training, cluster=cluster, graph=graph.at(max(plan.batch.sizes[0])))
    save_plan(plan_path, file)
    print(f"  best of {len(found.ranked)} plans in {human_seconds(found.wall_s)}")
    print(describe(plan, file.graph, cluster))

    say(start, f"simulate   $ simpart simulate {plan_path} --timeline --report {place / 'report.html'}")
    result = simulate_plan(problem, plan)
    print(timeline(result))
    for name in ("report.html", "picture.png"):
        save_report(place / name, result, f"{graph.model} on {cluster.name}", describe(plan, file.graph, cluster))

    say(start, f"run        $ simpart validate {plan_path}")
    report = validate(file, predicted=result, steps=7, warmup=2, folder=place / "run")
    save_traces(place, report)
    compare(result, report)
    print(f"\nplan      {plan_path}")
    print(f"report    {place / 'report.html'}, picture {place / 'picture.png'}")
    print(f"trace     {place / 'trace.json'}: predicted and measured; open it in ui.perfetto.dev")
    print(f"profiles  {store}\nlogs      {place / 'run'}")
    say(start, "done")


def say(start: float, what: str) -> None:
    print(f"\n[{time.monotonic() - start:5.1f} s] {what}", flush=True)


def save_traces(place: Path, report: Any) -> None:
    from simpart.files import dump_json, write_atomically

    write_atomically(place / "trace.json", dump_json(report.trace()))


def compare(result: SimResult, report: Any) -> None:
    """Predicted | measured | error."""
    low, high = result.interval_s
    rows = [("", "predicted", "measured", "error")]
    rows.append(("step time", human_seconds(result.step_s), human_seconds(report.step_s), f"{report.error:+.1%}"))
    rows.append(("  90 % interval", f"{human_seconds(low)} … {human_seconds(high)}", f"spread {report.spread:.0%}", ""))
    predicted, measured = report.predicted_allocated_bytes, report.allocated_bytes
    rows.append(("peak memory (tensors)", human_bytes(predicted), human_bytes(measured), f"{report.memory_error:+.1%}"))
    for name, part in report.components.items():
        ours, real = part.get("predicted_s"), part["measured_s"]
        rows.append((f"  {name}", human_seconds(ours) if ours is not None else "", human_seconds(real), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print()
    for row in rows:
        print("  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
