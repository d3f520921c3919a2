"""`simpart diff`: what differs between two plans, and between what is predicted of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simpart.commands._problem import costs_of, costs_options, stack
from simpart.describe import human_bytes, human_seconds

if TYPE_CHECKING:
    from simpart.plan.format import PlanFile
    from simpart.simulation import SimResult

__all__ = ["diff"]


@click.command(epilog="Example:  simpart diff mine.json searched.json")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--store", type=click.Path(path_type=Path), default=None, help="Folder of profiles to use.")
@click.option("--no-profiles", is_flag=True, help="Ignore measured profiles: predict from data sheets alone.")
@stack(costs_options()[0])
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def diff(a: Path, b: Path, as_json: bool, **options: Any) -> None:
    """What plan B has different from plan A, and by how much its predicted step is longer or shorter: compute,
    communication by axis, bubble; memory by kind. Both must be plans of the same graph."""
    from simpart.commands._output import print_document
    from simpart.plan.format import load_plan, plan_to_json
    from simpart.report.diff import diff_plans, diff_predictions

    files = load_plan(a), load_plan(b)
    found = diff_plans(*files)
    results = tuple(simulated(file, options) for file in files)
    predicted = diff_predictions(*results)
    if as_json:
        sides = {
            name: {"plan": plan_to_json(file.plan), "feasible": result.feasible, "predicted": result.to_json()}
            for name, file, result in zip("ab", files, results, strict=True)
        }
        print_document(
            {"equal": not found, "differences": [row.to_json() for row in found], "predicted": predicted, **sides}
        )
        return
    if not found:
        click.echo("the plans are equal")
        return
    for row in found:
        click.echo(f"{row.part}{f' ({row.where})' if row.where else ''}: {row.a} → {row.b}")
    one, two = results
    share = "" if predicted["share"] is None else f" ({predicted['share']:+.1%})"
    click.echo(f"step: {human_seconds(one.step_s)} → {human_seconds(two.step_s)}{share}")
    for name, seconds in sorted(predicted["seconds"].items(), key=lambda item: -abs(item[1])):
        if abs(seconds) >= 0.0005 * one.step_s:
            click.echo(f"  {name}: {signed(seconds, human_seconds)}")
    click.echo(f"peak memory: {human_bytes(one.peak_bytes)} → {human_bytes(two.peak_bytes)}")
    for kind, size in sorted(predicted["memory"].items(), key=lambda item: -abs(item[1])):
        if abs(size) >= 0.0005 * one.peak_bytes:
            click.echo(f"  {kind}: {signed(size, human_bytes)}")
    for name, result in zip((a, b), results, strict=True):
        if not result.feasible:
            click.echo(f"{name} does not fit: {result.why_infeasible}")


def signed(value: float, words: Any) -> str:
    return ("−" if value < 0 else "+") + str(words(abs(value)))


def simulated(file: PlanFile, options: dict[str, Any]) -> SimResult:
    from simpart.problem import Problem
    from simpart.simulation import simulate_plan

    problem = Problem(
        graph=file.graph, training=file.training, cluster=file.cluster, costs=costs_of(file.cluster, options),
        global_batch=file.plan.global_batch, mode=file.plan.mode,
    )  # fmt: skip
    return simulate_plan(problem, file.plan)
