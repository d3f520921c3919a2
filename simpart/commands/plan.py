"""`simpart plan`: a configuration given by hand, as a plan file."""

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
from simpart.commands._grain import grain_of, grain_options
from simpart.commands._place import PLACE
from simpart.commands._problem import (
    build_problem,
    configuration_of,
    configuration_options,
    freeze_costs,
    problem_options,
)

__all__ = ["plan"]


@click.command(
    epilog="Example:  simpart plan gpt:layers=12 --cluster dgx-a100 --global-batch 64 --pp 4 --dp 2 -o plan.json"
)
@click.argument("model")
@problem_options()
@configuration_options()
@grain_options()
@click.option("-o", "--output", type=PLACE, default=None, help="Plan file to write.")
@coverage_options()
@click.option("--explain", is_flag=True, help="Print how every op is split and what that makes move.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def plan(
    model: str,
    grain: str,
    prefetch: int,
    overlap: bool,
    output: Path | None,
    profile_next: int | None,
    fail_if_extrapolated: float | None,
    explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make the plan of a configuration: pp stages of equal layers on dp replicas each. MODEL is a zoo name with dims,
    package.module:factory or a .graph file."""
    from simpart.commands._output import prediction_document, print_document, print_prediction
    from simpart.configure import configure
    from simpart.plan.format import PlanFile, save_plan
    from simpart.simulation import simulate_plan

    configuration = configuration_of(options)
    problem = build_problem(model, options)
    made = configure(problem, configuration)
    grain, settings = grain_of(problem, made, grain, prefetch, overlap)
    result = simulate_plan(problem, made, grain=grain, settings=settings)
    freeze_costs(problem, options)
    if output is not None:
        graph = problem.graph.at(max(made.batch.sizes[0]))
        save_plan(output, PlanFile(plan=made, training=problem.training, cluster=problem.cluster, graph=graph))
    if as_json:
        print_document(prediction_document(made, result, **coverage_documents(problem, made, profile_next)))
    else:
        if explain:
            from simpart.describe.explain import explain as explained

            click.echo("\n".join(explained(made, problem.graph.at(max(made.batch.sizes[0])))))
        print_prediction(problem, made, result, f"plan for {problem.graph.model} on {problem.cluster.name}")
        print_coverage(problem, made, profile_next)
        if output is not None:
            click.echo(f"written to {output}")
    stop_if_extrapolated(result, fail_if_extrapolated)
