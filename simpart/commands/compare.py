"""`simpart compare`: several searchers side by side on one problem."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simpart.commands._place import PLACE
from simpart.commands._problem import build_problem, freeze_costs, problem_options
from simpart.commands._search import budget_of, check_jobs, search_options, space_document, space_of
from simpart.describe import human_bytes, human_seconds
from simpart.errors import Interrupted, UserError

if TYPE_CHECKING:
    from simpart.problem import Space
    from simpart.searching import Budget
    from simpart.searching.comparing import Comparison

__all__ = ["compare"]

PICTURES = (".png", ".svg", ".pdf")


@click.command(
    epilog="Example:  simpart compare gpt:layers=12 --cluster dgx-a100 --global-batch 64 --searchers rannc,alpa,grid"
)
@click.argument("model")
@problem_options()
@click.option("--searchers", default="all", show_default=True, metavar="A,B,…|all", help="Which to compare, in order.")
@search_options()
@click.option(
    "--log",
    type=PLACE,
    default=None,
    help="Append every candidate to this file; what stands there is not simulated again.",
)
@click.option("--csv", "table", type=PLACE, default=None, help="Write all candidates of all searchers.")
@click.option("--figure", type=PLACE, default=None, help="Picture (.png, .svg, .pdf) of step against search time.")
@click.option("-o", "--output", type=PLACE, default=None, help="Plan file of the best of all to write.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")  # fmt: skip
def compare(
    model: str, searchers: str, table: Path | None, figure: Path | None, output: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Compare what searchers find on the same problem: prices asked once, the same space, and the same budget for each.
    The portfolio is the best of all. MODEL is a zoo name with dims, package.module:factory or a .graph file. Ctrl-C
    ends with what is there and exit status 130."""
    from simpart.commands._output import prediction_document, print_document
    from simpart.commands._progress import search_progress
    from simpart.files import write_atomically
    from simpart.plan.format import PlanFile, save_plan
    from simpart.registry import load_searcher
    from simpart.searching import Progress
    from simpart.searching.comparing import candidates_csv
    from simpart.searching.comparing import compare as run
    from simpart.searching.comparing import figure as draw
    from simpart.searching.workers import process_pool
    from simpart.simulation import simulate_plan

    names = names_of(searchers)
    if figure is not None and figure.suffix.lower() not in PICTURES:
        raise UserError(f"a figure ends in {', '.join(PICTURES)}, got {figure}; rename it")
    budget, space = budget_of(options), space_of(options)
    check_jobs(options)
    problem = build_problem(model, options, space)
    with process_pool(options["jobs"]) as pool, search_progress() as show:

        def progress(name: str, now: Progress) -> None:
            show(now, name)

        comparison = run(
            problem, {name: partial(load_searcher, name) for name in names}, budget,
            seed=options["seed"], executor=pool, log=options["log"], progress=progress,
        )  # fmt: skip
    portfolio = comparison.portfolio
    best = portfolio[1].candidate.plan if portfolio is not None else None
    result = simulate_plan(problem, best) if best is not None else None
    title = f"{problem.graph.model} on {problem.cluster.name}, global batch {problem.global_batch}"
    if table is not None:
        write_atomically(table, candidates_csv(comparison))
    if figure is not None:
        draw(figure, comparison, title)
    if output is not None and best is not None:
        graph = problem.graph.at(max(best.batch.sizes[0]))
        save_plan(output, PlanFile(plan=best, training=problem.training, cluster=problem.cluster, graph=graph))
    freeze_costs(problem, options)
    if as_json:
        document = comparison_document(comparison, space, budget, options["seed"])
        reason = "no searcher found a plan that fits; see rows for their reasons"
        print_document(prediction_document(best, result, "" if result is not None else reason, **document))
    else:
        print_comparison(comparison, title, space, budget, options["seed"])
        for what, place in (("candidates", table), ("figure", figure), ("best plan", output)):
            if place is not None and (what != "best plan" or best is not None):
                click.echo(f"{what} written to {place}")
    if output is not None and best is None:
        click.echo(f"{output} is not written", err=True)
    if comparison.interrupted:
        raise Interrupted


def names_of(text: str) -> list[str]:
    """The searchers asked for, each once; raises UnknownNameError."""
    from simpart.errors import UnknownNameError
    from simpart.registry import searcher_names

    known = searcher_names()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return known
    for name in names:
        if name not in known:
            raise UnknownNameError("searcher", name, [*known, "all"])
    if not names:
        raise UserError(f"name searchers with commas between them, or all; got {text!r}")
    return names


def comparison_document(comparison: Comparison, space: Space, budget: Budget, seed: int) -> dict[str, Any]:
    from simpart.searching import floor_gap
    from simpart.searching.floor import FLOOR_OF

    portfolio = comparison.portfolio
    best = portfolio[1] if portfolio is not None else None
    rows = [entry.row(best, space) for entry in comparison.entries]
    step_s = best.evaluation.step_s if best is not None else None
    return {
        "bound": None,
        "evaluated": sum(row["evaluated"] for row in rows),
        "space": space_document(space),
        "budget": {"seconds": budget.seconds, "candidates": budget.candidates, "per": "searcher"},
        "seed": seed,
        "rows": rows,
        "portfolio": {
            "searcher": portfolio[0] if portfolio is not None else None,
            "step_s": step_s,
            "peak_bytes": best.evaluation.peak_bytes if best is not None else None,
            "why": best.candidate.why if best is not None else "",
        },
        "floor": {"step_s": comparison.floor_s, "gap": floor_gap(best, comparison.floor_s), "of": FLOOR_OF},
        "stopped": "interrupted" if comparison.interrupted else "finished",
        "timing": {
            "pricing_s": comparison.pricing_s,
            "search_s": sum(row["timing"]["search_s"] or 0.0 for row in rows),
        },
    }


def print_comparison(comparison: Comparison, title: str, space: Space, budget: Budget, seed: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    from simpart.commands._console import console
    from simpart.describe.words import plan_words
    from simpart.searching import floor_gap

    portfolio = comparison.portfolio
    best = portfolio[1] if portfolio is not None else None
    out, rows = console(), [entry.row(best, space) for entry in comparison.entries]
    out.print(f"[bold]{escape(title)}[/bold]")
    out.print("space   " + space_words(space), markup=False)
    out.print("budget  " + budget_words(budget, seed), markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("searcher")
    for name in (
        "simulated",
        "above best",
        "own objective",
        "bound",
        "gap",
        "peak",
        "search",
        "proposed",
        "infeasible",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["searcher"],
            seconds(row["step_s"]),
            percent(row["step_s"] / best.evaluation.step_s - 1 if row["step_s"] and best is not None else None),
            seconds(row["objective_s"]),
            seconds(row["bound"]),
            percent(row["gap"]),
            human_bytes(row["peak_bytes"]) if row["peak_bytes"] is not None else "–",
            seconds(row["timing"]["search_s"]),
            str(row["proposed"]),
            str(sum(row["infeasible"].values())),
        )
    out.print(table)
    for row in rows:
        if row["why"]:
            out.print(f"{row['searcher']}: {row['why']}", markup=False)
        elif row["differs"]:
            out.print(f"{row['searcher']}: {'; '.join(row['differs'])}", markup=False)
        if row["beyond_space"]:
            out.print(f"    beyond the stated space: {', '.join(row['beyond_space'])}", markup=False)
        for why, count in list(row["infeasible"].items())[:3]:
            if not row["why"]:
                out.print(f"    {count} infeasible: {why}", markup=False)
    objectives: dict[str, list[str]] = {}
    for row in rows:
        if row["objective"]:
            objectives.setdefault(row["objective"], []).append(row["searcher"])
    out.print("gap: between the least own objective proposed and its bound; nothing about the simulated step")
    for objective, names in objectives.items():
        out.print(f"own objective of {', '.join(names)}: {objective}", markup=False)
    if portfolio is None or best is None or best.candidate.plan is None:
        out.print("portfolio: no searcher found a plan that fits")
        return
    words = f"portfolio: {human_seconds(best.evaluation.step_s)} by {portfolio[0]}: {plan_words(best.candidate.plan)}"
    out.print(words, markup=False)
    if best.candidate.why:
        out.print(f"cuts of the portfolio: {best.candidate.why}", markup=False)
    if comparison.floor_s is not None:
        above = percent(floor_gap(best, comparison.floor_s))
        out.print(f"floor of the simulated step: {human_seconds(comparison.floor_s)}, gap {above}", markup=False)
    total_s = sum(row["timing"]["search_s"] or 0.0 for row in rows)
    out.print(f"prices {human_seconds(comparison.pricing_s)}, once; searches {human_seconds(total_s)}", markup=False)


def seconds(value: float | None) -> str:
    return "–" if value is None else human_seconds(value)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def space_words(space: Space) -> str:
    most = space.max_stages or "any number of"
    parts = [
        f"{space.min_stages} to {most} stages",
        f"schedules {', '.join(space.schedules)}",
        f"recomputation {', '.join(space.recompute)}",
        f"tp {', '.join(map(str, space.tp))}",
        f"zero {', '.join(map(str, space.zero))}",
        "devices may stay idle" if space.use_fewer_devices else "all devices used",
    ]
    return "; ".join(parts)


def budget_words(budget: Budget, seed: int) -> str:
    limits = []
    if budget.seconds is not None:
        limits.append(human_seconds(budget.seconds))
    if budget.candidates is not None:
        limits.append(f"{budget.candidates} candidates")
    return f"{' and '.join(limits) or 'none'} for each searcher, seed {seed}"
