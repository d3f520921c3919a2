"""`simpart profile`: measure this machine's kernels and links into the profile store."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from simpart.commands._console import print_document
from simpart.errors import Interrupted, UserError

__all__ = ["profile"]

_STORE = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the store [default: SIMPART_STORE, or the user's data folder].",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@click.group(epilog="Example:  simpart profile ops gpt:layers=4,hidden=768,heads=12 --micro-batch 1,2,4")
def profile() -> None:
    """Measure ops and links of this machine. Other commands then use the measurements unasked."""


@profile.command(epilog="Example:  simpart profile ops resnet50 --micro-batch 4 --processes 2 --budget 60s")
@click.argument("model", metavar="MODEL|GRAPH")
@click.option("--micro-batch", default="1,2,4", show_default=True, help="Micro-batch sizes, comma-separated.")
@click.option("--processes", type=int, default=None, help="Busy processes at once [default: physical cores].")
@click.option("--budget", default=None, help="Stop after this time, such as 60s; the costliest come first.")
@click.option("--optimizer", default="adamw", show_default=True, help="Whose update to measure.")
@click.option("--precision", default="float32", show_default=True, help="Precision of the captured step.")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Least timings per process.")
@click.option("--no-cache", is_flag=True, help="Capture again, without the cache of graphs.")
@_STORE
@_JSON
def ops(
    model: str,
    micro_batch: str,
    processes: int | None,
    budget: str | None,
    optimizer: Any,
    precision: str,
    repeats: int,
    no_cache: bool,
    store: Path | None,
    as_json: bool,
) -> None:
    """Replay the unique kernels of a model's training step, and its optimizer's update, on all cores at once.

    What the store holds already is skipped, so that an interrupted run continues.
    """
    from simpart.commands._problem import parse_seconds
    from simpart.model_spec import load_graph_or_model
    from simpart.registry import local_profiler
    from simpart.training import TrainingSpec

    sizes = _whole_numbers(micro_batch)
    budget_s = parse_seconds(budget)
    training = TrainingSpec(optimizer=optimizer, precision=precision)
    profile_graph_ops, _ = local_profiler(store)
    graph = load_graph_or_model(model, precision=precision, cache=not no_cache)
    with _progress("measuring kernels") as show:
        found = profile_graph_ops(
            graph, sizes, processes, budget_s=budget_s, progress=show, training=training, repeats=repeats
        )
    for reason in found.refused:
        print(f"not measured: {reason}", file=sys.stderr)
    _finish(
        asdict(found),
        f"kernels with {found.processes} busy processes",
        profile_graph_ops.keywords["store"].path,
        as_json,
    )


@profile.command(epilog="Example:  simpart profile links --cluster local:2")
@click.option("--cluster", default="local", show_default=True, help="local, or local:N for N processes.")
@click.option("--busy", is_flag=True, help="Measure also while other work runs on the same cores.")
@click.option("--repeats", type=click.IntRange(5), default=30, show_default=True, help="Most timings per point.")
@_STORE
@_JSON
def links(cluster: str, busy: bool, repeats: int, store: Path | None, as_json: bool) -> None:
    """Measure point-to-point messages, all-reduce and broadcast over gloo, 1 KiB to 64 MiB."""
    from simpart.hardware import load_cluster
    from simpart.registry import local_profiler

    if cluster.partition(":")[0].casefold() != "local":
        raise UserError(f"links can be measured on this machine only, got cluster {cluster!r}; say local or local:N")
    processes = load_cluster(cluster).size
    if processes < 2:
        raise UserError("links need at least 2 processes, this machine has 1 core; say --cluster local:2")
    _, profile_links = local_profiler(store)
    with _progress("measuring links") as show:
        found = profile_links(processes, busy=busy, repeats=repeats, progress=show)
    _finish(asdict(found), f"link points between {processes} processes", profile_links.keywords["store"].path, as_json)


def _whole_numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,7}", part) and int(part) > 0 for part in parts):
        raise UserError(f"micro-batches are whole numbers, at least 1, as in 1,2,4; got {text!r}")
    return [int(part) for part in parts]


def _finish(found: dict[str, Any], what: str, path: Path, as_json: bool) -> None:
    """Print the result; an interrupted run says how to go on and ends as such."""
    interrupted = found.pop("interrupted")
    seconds = found.pop("seconds")
    if as_json:
        print_document({**found, "store": str(path), "timing": {"wall_s": seconds}})
    else:
        print(f"measured {found['measured']} {what} in {seconds:.1f} s ({found['found']} were known); store: {path}")
    if found["left"]:
        print(f"{found['left']} not measured yet; the same command continues", file=sys.stderr)
    if interrupted:
        raise Interrupted


@contextmanager
def _progress(what: str, delay_s: float = 2.0) -> Iterator[Callable[[int, int, str], None]]:
    """A rich progress bar on stderr, from two seconds on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    shown = False

    def show(done: int, total: int, name: str) -> None:
        nonlocal shown
        if not shown and time.monotonic() - start > delay_s:
            bar.start()
            shown = True
        bar.update(task, completed=done, total=total, description=f"{what} ({name})")

    try:
        yield show
    finally:
        if shown:
            bar.stop()
