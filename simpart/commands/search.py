"""`simpart search`: the best plan for a model on a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simpart.commands._coverage import (
    coverage_documents,
    coverage_options,
    print_coverage,
    stop_if_extrapolated,
)
from simpart.commands._place import PLACE
from simpart.commands._problem import build_problem, freeze_costs, problem_options
from simpart.commands._search import budget_of, check_jobs, search_options, space_document, space_of
from simpart.describe import human_bytes, human_seconds
from simpart.errors import Interrupted

if TYPE_CHECKING:
    from simpart.searching import SearchResult
    from simpart.searching.explaining import WhatIf
    from simpart.simulation import SimResult

__all__ = ["search"]


@click.command(
    epilog="Example:  simpart search gpt:layers=24 --cluster dgx-a100:2 --global-batch 128 --budget 60s -o plan.json"
)
@click.argument("model")
@problem_options()
@click.option("--searcher", default="rannc", show_default=True, help="Which algorithm proposes plans.")
@search_options()
@click.option(
    "--log",
    type=PLACE,
    default=None,
    help="Append every candidate to this file; a search with the same log does not simulate them again.",
)
@click.option("--top", type=click.IntRange(1), default=None, metavar="K", help="List the K best plans.")
@click.option("--what-if", is_flag=True, help="Search again with 1 GiB more per device and with one more device.")
@click.option(
    "--pin", "pins", multiple=True, metavar="KIND:PATTERN=PLACEMENT@AXIS",
    help="For rhino: how parameters, inputs or kernels lie, such as 'parameter:h.*.mlp.fc.weight=S(0)@tp'.",
)  # fmt: skip
@click.option(
    "--fine-top", type=click.IntRange(0), default=None, metavar="K",
    help="Simulate the K best plans at the fine grain too, and take the best of these.  [default: 3 for rhino and "
    "where the best gathers parameters from shards, else 0]",
)  # fmt: skip
@click.option("-o", "--output", type=PLACE, default=None, help="Plan file to write.")
@coverage_options()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")  # fmt: skip
def search(model: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Search for the plan with the shortest simulated step that fits. MODEL is a zoo name with dims,
    package.module:factory or a .graph file. Ctrl-C ends the search with the best plan so far and exit status 130."""
    from simpart.commands._output import prediction_document, print_document, print_prediction
    from simpart.commands._progress import search_progress
    from simpart.plan.format import PlanFile, save_plan
    from simpart.searching import search as run
    from simpart.searching.explaining import tightest, what_if
    from simpart.searching.workers import process_pool
    from simpart.searching.worth_running import worth_running
    from simpart.simulation import simulate_plan

    budget, space = budget_of(options), space_of(options)
    check_jobs(options)
    make = partial(_searcher, options["searcher"], options["pins"])
    searcher = make()
    problem = build_problem(model, options, space)
    with search_progress() as progress, process_pool(options["jobs"]) as pool:
        found = run(
            problem, searcher, budget, seed=options["seed"], log=options["log"], progress=progress, executor=pool
        )
    document = result_document(found) | {"space": space_document(space), "seed": options["seed"]}
    document["budget"] = {"seconds": budget.seconds, "candidates": budget.candidates}
    if options["top"] is not None:
        document["ranked"] = ranked_rows(found, options["top"])
    count = _looked_at_finely(problem, searcher, found) if options["fine_top"] is None else options["fine_top"]
    few = worth_running(problem, found.ranked, count) if found.stopped != "interrupted" else []
    document["worth_running"] = [row.to_json() for row in few]
    answer = few[0].evaluated if few else found.best
    document["why"] = answer.candidate.why if answer is not None else ""
    best = answer.candidate.plan if answer is not None else None
    result = simulate_plan(problem, best) if best is not None else None
    if best is not None and output is not None:
        graph = problem.graph.at(max(best.batch.sizes[0]))
        save_plan(output, PlanFile(plan=best, training=problem.training, cluster=problem.cluster, graph=graph))
    changes: list[WhatIf] = []
    if options["what_if"] and found.stopped != "interrupted":
        step_s = result.step_s if result is not None else None
        changes = what_if(problem, make, budget, options["seed"], step_s)
        document["what_if"] = [change.to_json() for change in changes]
    freeze_costs(problem, options)
    if as_json:
        if result is not None and best is not None:
            document["tightest"] = tightest(result)
            document |= coverage_documents(problem, best, options["profile_next"])
            print_document(prediction_document(best, result, **document))
        else:
            print_document(prediction_document(None, None, found.why_none, **document, tightest=None))
    elif result is not None and best is not None:
        title = f"best of {len(found.ranked)} plans for {problem.graph.model} on {problem.cluster.name}"
        print_prediction(problem, best, result, title)
        print_coverage(problem, best, options["profile_next"])
        print_room(tightest(result))
        print_gains(result)
        print_why(document["why"])
        print_worth_running(document["worth_running"])
        print_bounds(found)
    else:
        click.echo(f"{_none_words(found)}: {found.why_none}")
    if not as_json:
        print_families(found)
        print_infeasible(found)
        if options["top"] is not None:
            print_ranked(document["ranked"])
        print_changes(changes)
        again = f", {found.resumed} of {len(found.ranked)} plans from the log" if found.resumed else ""
        ended = {"budget": "ended by its budget"}.get(found.stopped, found.stopped)
        click.echo(f"search {ended} after {human_seconds(found.wall_s)}{again}")
        if result is not None and output is not None:
            click.echo(f"written to {output}")
    if result is None and output is not None:
        click.echo(f"{output} is not written", err=True)
    end(found.stopped)
    if result is not None:
        stop_if_extrapolated(result, options["fail_if_extrapolated"])


def _looked_at_finely(problem: Any, searcher: Any, found: SearchResult) -> int:
    """How many of the best plans to simulate at the fine grain unless told."""
    from simpart.simulation import telling_grain

    plan = found.best.candidate.plan if found.best is not None else None
    gathers = plan is not None and telling_grain(problem, plan) == "fine"
    return int(getattr(searcher, "worth_running", 3 if gathers else 0))


def _none_words(found: SearchResult) -> str:
    """What a search without an answer comes to."""
    if not found.infeasible:
        return "no plan evaluated"
    return "no plan fits" if found.stopped == "finished" else "no plan fits yet"


def _searcher(name: str, pins: Sequence[str]) -> Any:
    """The searcher, with what the user says of a few tensors."""
    from simpart.errors import UserError
    from simpart.registry import load_searcher
    from simpart.sharding.pins import pins_from_text

    searcher = load_searcher(name)
    if not pins:
        return searcher
    if not hasattr(searcher, "pins"):
        raise UserError(f"searcher {name} takes no pins, got --pin {pins[0]}; use --searcher rhino")
    return dataclasses.replace(searcher, pins=pins_from_text(pins))


def end(stopped: str) -> None:
    """After Ctrl-C the answer is given, but a script must not go on as if the search had been left alone."""
    if stopped == "interrupted":
        raise Interrupted


def result_document(found: SearchResult) -> dict[str, Any]:
    """What a search found, but for its best plan."""
    return {
        "searcher": found.searcher,
        "why": found.best.candidate.why if found.best is not None else "",
        "evaluated": len(found.ranked),
        "proposed": found.proposed,
        "resumed": found.resumed,
        "stopped": found.stopped,
        "bound": found.bound_s,
        "bound_of": found.objective,
        "least_objective_s": found.least_s,
        "gap": found.gap,
        "floor": {"step_s": found.floor_s, "gap": found.floor_gap, "of": floor_words()},
        "families": {name: family_row(entry) for name, entry in found.families.items()},
        "infeasible": found.infeasible,
        "timing": {"search_s": found.wall_s},
    }


def floor_words() -> str:
    from simpart.searching.floor import FLOOR_OF

    return FLOOR_OF


def family_row(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"step_s": None, "objective_s": None, "why": entry}
    fits, objective_s = entry.evaluation.feasible, entry.candidate.objective_s
    return {
        "step_s": entry.evaluation.step_s if fits else None,
        "objective_s": objective_s if math.isfinite(objective_s) else None,
        "why": "" if fits else entry.evaluation.why_infeasible,
    }


def ranked_rows(found: SearchResult, count: int) -> list[dict[str, Any]]:
    """The best plans, the best first; those that do not fit at the end."""
    from simpart.describe.words import plan_words
    from simpart.plan.format import plan_to_json

    rows = []
    for place, entry in enumerate(found.ranked[:count], 1):
        plan = entry.candidate.plan
        assert plan is not None
        row = {"rank": place, "family": entry.candidate.family, **family_row(entry)}
        rows.append(
            row | {"peak_bytes": entry.evaluation.peak_bytes, "words": plan_words(plan), "plan": plan_to_json(plan)}
        )
    return rows


def print_room(room: dict[str, Any]) -> None:
    stages = f"stage{'s' if len(room['stages']) > 1 else ''} {', '.join(map(str, room['stages']))}"
    kinds = sorted(room["by_kind"].items(), key=lambda item: -item[1])[:3]
    filled = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds if size)
    click.echo(f"tightest     {stages}: {human_bytes(room['room_bytes'])} free; {filled}")


def print_gains(result: SimResult) -> None:
    rows = sorted(result.gains.items(), key=lambda item: -item[1]["one_percent"])[:3]
    words = [f"{name} {row['one_percent']:.2f} %" for name, row in rows if row["one_percent"] >= 0.005]
    if words:
        click.echo(f"1 % less of  {', '.join(words)} of the step")


def print_why(why: str) -> None:
    """What a planner chose before it searched, such as the order that it cuts."""
    if why:
        click.echo(f"cuts         {why}")


def print_worth_running(rows: list[dict[str, Any]]) -> None:
    """The few best at the fine grain, and what taking another one than the first costs."""
    for place, row in enumerate(rows, 1):
        other = row["switching"]
        more = f"{human_bytes(abs(other['peak_bytes']))} {'more' if other['peak_bytes'] >= 0 else 'less'}"
        price = f", {other['share']:+.1%} a step, {more} memory" if place > 1 else ""
        steps = f"{human_seconds(row['fine_step_s'])} fine, {human_seconds(row['step_s'])} coarse"
        click.echo(f"worth a run  {place}. {row['words']}: {steps} (rank {row['coarse_rank']}){price}")


def print_bounds(found: SearchResult) -> None:
    """Both bounds, each with what it bounds."""
    if found.bound_s is not None and found.least_s is not None:
        gap = "" if found.gap is None else f", gap {found.gap:.1%}"
        least = f"least found {human_seconds(found.least_s)}"
        click.echo(f"bound        {human_seconds(found.bound_s)} of {found.objective} ({least}{gap})")
    else:
        click.echo(f"bound        none given of {found.objective}")
    if found.floor_s is not None and found.floor_gap is not None:
        click.echo(f"floor        {human_seconds(found.floor_s)} of the {floor_words()} (gap {found.floor_gap:.1%})")


def print_families(found: SearchResult) -> None:
    for name, entry in found.families.items():
        row = family_row(entry)
        click.echo(f"  {name}: {row['why'] or human_seconds(row['step_s'])}")


def print_infeasible(found: SearchResult) -> None:
    """How many candidates fail for which reason, numbers left out of the reasons."""
    from simpart.searching.comparing import reason_kinds

    kinds = reason_kinds(found.infeasible)
    if kinds:
        click.echo(f"infeasible   {sum(kinds.values())}: " + ", ".join(f"{n} {why}" for why, n in kinds.items()))


def print_ranked(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        time = human_seconds(row["step_s"]) if row["step_s"] is not None else f"does not fit ({row['why']})"
        click.echo(f"{row['rank']:4d}. {time}, {human_bytes(row['peak_bytes'])}: {row['words']}")


def print_changes(changes: list[WhatIf]) -> None:
    for change in changes:
        if change.step_s is None:
            click.echo(f"with {change.change}: no plan fits: {change.why}")
        else:
            saved = (
                "" if change.saved is None else f", {abs(change.saved):.1%} {'less' if change.saved >= 0 else 'more'}"
            )
            click.echo(f"with {change.change}: {human_seconds(change.step_s)}{saved} (searched again)")
