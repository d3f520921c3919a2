"""`simpart simulate`: predict a plan file, or a configuration given by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

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
    costs_of,
    freeze_costs,
    problem_options,
    seconds_of,
)
from simpart.commands._stochastic import STOCHASTIC, print_worlds, stochastic_options, worlds_asked
from simpart.describe import human_seconds
from simpart.errors import UserError

__all__ = ["simulate"]


@click.command(epilog="Example:  simpart simulate plan.json --trace trace.json --report plan.html")
@click.argument("target", metavar="PLAN|MODEL")
@problem_options(required=False)
@configuration_options()
@click.option(
    "--engine", type=click.Choice(["compiled", "simpy", "contention"]), default="compiled", show_default=True,
    help="simpy is the slow reference; contention lets transfers share links.",
)  # fmt: skip
@grain_options()
@click.option(
    "--measured", default=None, metavar="TIME",
    help="What the step took on the machine, as in 112ms: tells the --launch-time that explains it.",
)  # fmt: skip
@click.option("--trace", type=PLACE, default=None, help="Perfetto trace to write.")
@click.option("--report", type=PLACE, default=None, help="Page (.html) or picture (.png, .svg).")
@click.option("--tiles", type=PLACE, default=None, help="Picture of tensors by device to write (.png, .svg).")
@click.option("--timeline", is_flag=True, help="Print the timeline as text.")
@stochastic_options()
@coverage_options()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def simulate(
    target: str,
    grain: str,
    prefetch: int,
    overlap: bool,
    engine: str,
    measured: str | None,
    trace: Path | None,
    report: Path | None,
    tiles: Path | None,
    timeline: bool,
    profile_next: int | None,
    fail_if_extrapolated: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict step time, memory and what limits them. A PLAN file needs no other option; a MODEL takes those of
    simpart plan."""
    from simpart.commands._output import prediction_document, print_document, print_prediction
    from simpart.describe import describe
    from simpart.simulation import simulate_plan

    problem, plan = problem_of(target, options)
    grain, settings = grain_of(problem, plan, grain, prefetch, overlap)
    measured_s = None if measured is None else seconds_of("--measured", measured)
    if measured_s == 0:
        raise UserError(f"--measured must be above 0, got {measured}")
    result = simulate_plan(problem, plan, engine, grain, settings)  # type: ignore[arg-type]
    freeze_costs(problem, options)
    worlds = worlds_asked(
        result.program,
        options,
        lambda path: simulate_plan(*plan_of(path, options), engine, grain, settings).program,  # type: ignore[arg-type]
    )
    if trace is not None:
        from simpart.trace import save_trace

        save_trace(trace, result)
    title = f"{problem.graph.model or target} on {problem.cluster.name}"
    if report is not None:
        from simpart.report import save_report

        graph = problem.graph.at(max(plan.batch.sizes[0]))
        by_device = None
        if plan.shardings and report.suffix == ".html":
            from simpart.report.tiling import tiling

            by_device = tiling(plan, graph)
        save_report(report, result, title, describe(plan, graph, problem.cluster), by_device)
    if tiles is not None:
        from simpart.report.tiling import save_tiling

        save_tiling(tiles, plan, problem.graph.at(max(plan.batch.sizes[0])), title)
    if as_json:
        more = coverage_documents(problem, plan, profile_next)
        if measured_s is not None:
            more = {"measured": {"step_s": measured_s, "launch_s": launch_time(problem, plan, measured_s)}, **more}
        if worlds is not None:
            more = {"stochastic": worlds.to_json(), **more}
        print_document(prediction_document(plan, result, **more))
        stop_if_extrapolated(result, fail_if_extrapolated)
        return
    print_prediction(problem, plan, result, title)
    if measured_s is not None:
        click.echo(f"measured     {measured_words(problem, plan, result.step_s, measured_s)}")
    if worlds is not None:
        print_worlds(worlds, options["against"])
    print_coverage(problem, plan, profile_next)
    if timeline:
        from simpart.report.timeline import timeline as text_timeline

        click.echo(text_timeline(result))
    if trace is not None:
        click.echo(f"trace written to {trace}; open it in ui.perfetto.dev")
    if report is not None:
        click.echo(f"report written to {report}")
    stop_if_extrapolated(result, fail_if_extrapolated)


def launch_time(problem: Any, plan: Any, measured_s: float) -> float | None:
    """Seconds per launch that explain a measured step; None where none does."""
    from simpart.registry import folder

    found: float | None = folder("costmodels.learned._launch_time").launch_time_of(problem, plan, measured_s)
    return found


def measured_words(problem: Any, plan: Any, step_s: float, measured_s: float) -> str:
    """How far a measured step is from its prediction, and what a launch would take that explains it."""
    launch_s = launch_time(problem, plan, measured_s)
    told = f"{human_seconds(measured_s)}: predicted {100 * (step_s / measured_s - 1):+.0f} %; "
    if launch_s is None:
        return told + "no launch time explains it: other things keep this step, or kernels alone take as long"
    return told + f"launches of {1e6 * launch_s:.3g} us explain it: --launch-time {1e6 * launch_s:.3g}us"


def refuse_options() -> None:
    """A plan file says all that a configuration would: options that would go unheard are refused."""
    context = click.get_current_context()
    mine = (
        "store", "no_profiles", "launch_time", "costs", "freeze_costs", "engine", "grain", "prefetch", "overlap",
        "measured", "trace", "report", "tiles", "timeline", "profile_next", "fail_if_extrapolated", "as_json", "target",
        *STOCHASTIC,
    )  # fmt: skip
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name not in mine:
            raise UserError(f"a plan file holds its own {parameter.opts[0].lstrip('-')}; leave {parameter.opts[0]} out")


def problem_of(target: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """(Problem, Plan) of a plan file, or of a model with options."""
    path = Path(target)
    if path.suffix == ".json" or (path.is_file() and path.suffix != ".graph"):
        refuse_options()
        return plan_of(path, options)
    missing = [name for name in ("cluster", "global_batch") if options[name] is None]
    if missing:
        raise UserError(f"{target!r} is not a plan file, and a model needs --{missing[0].replace('_', '-')}")
    from simpart.configure import configure

    configuration = configuration_of(options)
    problem = build_problem(target, options)
    return problem, configure(problem, configuration)


def plan_of(path: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """(Problem, Plan) of a plan file."""
    from simpart.plan.format import load_plan
    from simpart.problem import Problem

    file = load_plan(path)
    problem = Problem(
        graph=file.graph,
        training=file.training,
        cluster=file.cluster,
        costs=costs_of(file.cluster, options),
        global_batch=file.plan.global_batch,
        mode=file.plan.mode,
    )
    return problem, file.plan
