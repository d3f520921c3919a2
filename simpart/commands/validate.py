"""`simpart validate`: run a plan here, or prepare and read a run under torchrun on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simpart.commands._console import console
from simpart.commands._place import FOLDER, PLACE
from simpart.errors import UserError

if TYPE_CHECKING:
    from simpart.plan.format import PlanFile
    from simpart.simulation import SimResult

__all__ = ["print_report", "validate"]


@click.command(
    epilog="Example:  simpart validate plan.json --check --trace run.json\n\n"
    "On a cluster:  simpart validate plan.json --prepare JOB;  torchrun … -m simpart.validate._worker JOB;  "
    "simpart validate plan.json --collect JOB"
)
@click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--nproc", type=int, default=None, help="Processes to start; must be the plan's devices, which is the default."
)
@click.option("--steps", type=int, default=5, show_default=True, help="Timed steps.")
@click.option("--warmup", type=int, default=2, show_default=True, help="Steps before them.")
@click.option("--check", is_flag=True, help="Run in float64 and compare loss and gradients with one process.")
@click.option("--trace", type=PLACE, default=None, help="Trace of measured and predicted step to write.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds after which the run is ended.")
@click.option("--store", type=click.Path(path_type=Path), default=None, help="Folder of profiles to predict from.")
@click.option("--no-profiles", is_flag=True, help="Ignore measured profiles: predict from data sheets alone.")
@click.option("--log-dir", type=FOLDER, default=None, help="Keep the job and its logs here.")
@click.option("--prepare", type=FOLDER, default=None, help="Only write the job that torchrun runs elsewhere.")
@click.option("--collect", type=click.Path(path_type=Path), default=None, help="Only read the results of such a job.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def validate(
    plan: Path,
    nproc: int | None,
    steps: int,
    warmup: int,
    check: bool,
    trace: Path | None,
    timeout: float,
    store: Path | None,
    no_profiles: bool,
    log_dir: Path | None,
    prepare: Path | None,
    collect: Path | None,
    as_json: bool,
) -> None:
    """Run a plan on real processes and set what they took beside what was predicted."""

    from simpart.commands._console import print_document
    from simpart.plan.format import load_plan
    from simpart.registry import folder

    running = folder("validate")

    if not timeout > 0:
        raise UserError(f"the timeout must be positive, got {timeout:g} s; try 300")
    file = load_plan(plan)
    if prepare is not None:
        running.prepare(prepare, [file], steps=steps, warmup=warmup, check=check, timeout_s=timeout)
        command = f"torchrun --nproc-per-node {file.plan.device_count} -m simpart.validate._worker {prepare}"
        if as_json:
            print_document({"job": str(prepare), "ranks": file.plan.device_count, "command": command})
        else:
            click.echo(f"job written to {prepare} for {file.plan.device_count} processes; on one machine:  {command}")
        return
    if collect is None:
        refuse_elsewhere(file)
    predicted = predict(file, store, profiles=not no_profiles)
    if collect is not None:
        report = running.report_of(running.collect(collect)[0], predicted)
    else:
        try:
            report = running.validate(
                file,
                predicted=predicted,
                steps=steps,
                warmup=warmup,
                nproc=nproc,
                check=check,
                folder=log_dir,
                timeout_s=timeout,
                progress=_progress(),
            )
        except running.RunFailed as error:
            if error.details:
                click.echo(error.details.rstrip(), err=True)
            raise
    if trace is not None:
        from simpart.files import dump_json, write_atomically

        write_atomically(trace, dump_json(report.trace()))
    if as_json:
        print_document(report.to_json())
        return
    print_report(report)
    if trace is not None:
        click.echo(f"trace written to {trace}; open it in ui.perfetto.dev")


def refuse_elsewhere(file: PlanFile) -> None:
    """A plan for GPUs says nothing of a run on this machine's CPU."""
    used = {file.cluster.device(d) for group in file.plan.groups for d in group.devices}
    needed = sorted(device.name for device in used if device.kind == "gpu")
    if needed:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"the plan is for {file.cluster.name} ({', '.join(needed)}), this machine has no GPU; write a job with "
                "--prepare JOB and run it there with torchrun, or plan for --cluster local"
            )


def predict(file: PlanFile, store: Path | None, *, profiles: bool) -> SimResult:
    """The prediction that a run of this plan file is compared with."""
    from simpart.problem import Problem
    from simpart.registry import default_costs
    from simpart.simulation import simulate_plan

    problem = Problem(
        graph=file.graph,
        training=file.training,
        cluster=file.cluster,
        costs=default_costs(file.cluster, store=store, profiles=profiles),
        global_batch=file.plan.global_batch,
        mode=file.plan.mode,
    )
    return simulate_plan(problem, file.plan)


def print_report(report: Any) -> None:
    """Predicted | measured | error, for people."""
    from rich.table import Table

    from simpart.describe import human_bytes, human_seconds

    table = Table(box=None, pad_edge=False)
    for title in ("", "predicted", "measured", "error"):
        table.add_column(title, justify="left" if not title else "right")

    def row(name: str, predicted: float | None, measured: float, show: Callable[[float], str]) -> None:
        error = "" if predicted is None or not measured else f"{predicted / measured - 1:+.1%}"
        table.add_row(name, "" if predicted is None else show(predicted), show(measured), error)

    result = report.predicted
    row("step time (median)", None if result is None else result.step_s, report.step_s, human_seconds)
    row(
        "peak memory (tensors)", report.predicted_allocated_bytes, report.allocated_bytes, lambda x: human_bytes(int(x))
    )
    row(
        "peak memory (process)",
        None if result is None else result.peak_bytes,
        report.device_bytes,
        lambda x: human_bytes(int(x)),
    )
    for name, seconds in report.components.items():
        row(f"  {name}", seconds.get("predicted_s"), seconds["measured_s"], human_seconds)
    out = console()
    out.print(table)
    out.print(
        f"{len(report.steps)} steps, spread {report.spread:.1%} of the median; loss {report.losses[0]:.4g} → "
        f"{report.losses[-1]:.4g}"
    )
    if report.cpu_share is not None and report.cpu_share < 0.9:
        out.print(
            f"the processes got {report.cpu_share:.0%} of a core while computing: other work disturbed the run, "
            "so its times say little; repeat it on a quiet machine"
        )
    if report.check is not None:
        worst = max(report.check[name] for name in ("loss", "gradients", "buffers"))
        out.print(f"equal to one process in float64: loss, gradients and buffers differ by at most {worst:.1e}")


def _progress() -> Callable[[float], None]:
    """Says on stderr how long the run has taken, beyond two seconds and then ever more rarely."""
    following = 2.0

    def show(elapsed_s: float) -> None:
        nonlocal following
        if elapsed_s >= following:
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"running on real processes, {elapsed_s:.0f} s", end=end, file=sys.stderr, flush=True)
            following = elapsed_s + (1.0 if sys.stderr.isatty() else max(5.0, elapsed_s / 2))

    return show
