"""`simpart search`: the best plan for a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from simpart.commands._coverage import (
    coverage_documents,
    coverage_options,
    print_coverage,
    stop_if_extrapolated,
)
from simpart.commands._place import PLACE
from simpart.commands._problem import build_problem, parse_seconds, problem_options
from simpart.describe import human_seconds
from simpart.errors import Interrupted
from simpart.problem import Space
from simpart.schedule import SCHEDULES

__all__ = ["search"]


@click.command(
    epilog="Example:  simpart search gpt:layers=24 --cluster dgx-a100:2 --global-batch 128 --budget 60s -o plan.json"
)
@click.argument("model")
@problem_options()
@click.option("--searcher", default="rannc", show_default=True, help="Which algorithm proposes plans.")
@click.option("--budget", default=None, help="Time budget, such as 60s or 5m.")
@click.option("--max-candidates", type=int, default=None, help="Count budget; deterministic.")
@click.option("--max-stages", type=int, default=None, help="Most pipeline stages to consider.")
@click.option("--min-stages", type=int, default=1, show_default=True, help="Fewest pipeline stages to consider.")
@click.option(
    "--schedule", "schedules", multiple=True, help=f"Schedules to consider.  [default: {', '.join(Space().schedules)}]"
)
@click.option("--recompute", "recompute", multiple=True, help="Recomputation to consider.  [default: none, full]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--log", type=PLACE, default=None, help="Append every candidate to this file.")
@click.option("-o", "--output", type=PLACE, default=None, help="Plan file to write.")
@coverage_options()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def search(model: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Search for the plan with the shortest simulated step that fits. MODEL is a zoo name with dims,
    package.module:factory or a .graph file. Ctrl-C ends the search with the best plan so far and exit status 130."""
    from simpart.commands._output import prediction_document, print_document, print_prediction
    from simpart.commands._progress import search_progress
    from simpart.plan_format import PlanFile, save_plan
    from simpart.registry import load_searcher
    from simpart.searching import Budget
    from simpart.searching import search as run
    from simpart.simulation import simulate_plan

    budget = Budget(seconds=parse_seconds(options["budget"]), candidates=options["max_candidates"])
    searcher = load_searcher(options["searcher"])
    problem = build_problem(model, options, space_of(options))
    with search_progress() as progress:
        found = run(problem, searcher, budget, seed=options["seed"], log=options["log"], progress=progress)
    families = {name: family_row(entry) for name, entry in found.families.items()}
    counts: dict[str, Any] = {
        "searcher": found.searcher,
        "evaluated": len(found.ranked),
        "proposed": found.proposed,
        "stopped": found.stopped,
        "bound": found.bound_s,
        "families": families,
        "infeasible": found.infeasible,
        "timing": {"search_s": found.wall_s},
    }
    if found.best is None:
        reason = next(iter(found.infeasible), "the search was stopped before it found a plan")
        if as_json:
            print_document(prediction_document(None, None, reason, **counts))
        else:
            click.echo(f"no plan fits: {reason}")
            for name, row in families.items():
                click.echo(f"  {name}: {row['why'] or 'does not fit'}")
        if output is not None:
            click.echo(f"{output} is not written", err=True)
        end(found.stopped)
        return
    best = found.best.candidate.plan
    assert best is not None
    result = simulate_plan(problem, best)
    if output is not None:
        graph = problem.graph.at(max(best.batch.sizes[0]))
        save_plan(output, PlanFile(plan=best, training=problem.training, cluster=problem.cluster, graph=graph))
    if as_json:
        counts |= coverage_documents(problem, best, options["profile_next"])
        print_document(prediction_document(best, result, **counts))
        end(found.stopped)
        stop_if_extrapolated(result, options["fail_if_extrapolated"])
        return
    print_prediction(
        problem, best, result, f"best of {len(found.ranked)} plans for {problem.graph.model} on {problem.cluster.name}"
    )
    print_coverage(problem, best, options["profile_next"])
    for name, row in families.items():
        click.echo(f"  {name}: {row['why'] or human_seconds(row['step_s'])}")
    click.echo(f"search {found.stopped} after {human_seconds(found.wall_s)}")
    if output is not None:
        click.echo(f"written to {output}")
    end(found.stopped)
    stop_if_extrapolated(result, options["fail_if_extrapolated"])


def end(stopped: str) -> None:
    """After Ctrl-C the answer is given, but a script must not go on as if the search had been left alone."""
    if stopped == "interrupted":
        raise Interrupted


def space_of(options: dict[str, Any]) -> Space:
    from simpart.configure import RECOMPUTE
    from simpart.errors import UnknownNameError, UserError

    for what, names, known in (
        ("schedule", options["schedules"], SCHEDULES),
        ("recomputation", options["recompute"], RECOMPUTE),
    ):
        for name in names:
            if name not in known:
                raise UnknownNameError(what, name, known)
    low, high = options["min_stages"], options["max_stages"]
    if low < 1 or (high is not None and high < low):
        raise UserError(f"stages must satisfy 1 <= min <= max, got min {low}, max {high}")
    return Space(
        schedules=options["schedules"] or Space().schedules,
        recompute=options["recompute"] or RECOMPUTE,
        min_stages=low,
        max_stages=high,
    )


def family_row(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"step_s": None, "objective_s": None, "why": entry}
    fits = entry.evaluation.feasible
    return {
        "step_s": entry.evaluation.step_s if fits else None,
        "objective_s": entry.candidate.objective_s,
        "why": "" if fits else entry.evaluation.why_infeasible,
    }
