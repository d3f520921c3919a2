"""`simpart fit`: learn compute models from measured kernels, the communication model from measured collectives."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from simpart.commands._console import print_document
from simpart.errors import UserError

__all__ = ["fit"]

_COMMUNICATION = "communication"


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o", "--output", type=click.Path(), help="Where to write the models; default: in place of the shipped ones."
)
@click.option(
    "--family", "only", multiple=True, help="Learn only this family (`communication` for links); may be repeated."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Same seed, same data, same versions: same bytes.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def fit(sources: tuple[str, ...], output: str | None, only: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Learn kernel times, and those of collectives, from measurements in SOURCES (files, folders, or the Python package
    `aiconfigurator-core`, of which only devices that the shipped models know are learned from); prints errors on
    held-out devices. With -o the communication model is written beside it as JSON. A profile store (see simpart
    profile) gets models of the devices it was measured on, for shapes that were not.

    \b
    Example: simpart fit data/ops -o models.npz
    """
    start = time.monotonic()
    last = start

    def progress(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.5:
            last = now
            print(f"{text}, {now - start:.0f} s", file=sys.stderr, flush=True)

    if all(map(_is_store, sources)) and not only:
        _fit_stores(sources, output, seed, as_json, progress, start)
        return
    families: dict[str, Any] = {}
    files: dict[str, Any] = {}
    communication: Any = importlib.import_module("simpart.costmodels.learned_comm._command")
    collectives = communication.collectives_in(sources) if not only or _COMMUNICATION in only else []
    if collectives:
        beside = str(Path(output).with_suffix(".json")) if output else None
        fitted, found = communication.fit(collectives, beside, progress)
        files.update(found)
        families[_COMMUNICATION] = dict(fitted.facts)
    elif _COMMUNICATION in only:
        raise UserError(f"--family {_COMMUNICATION} needs a table of collectives, got none in {', '.join(sources)}")
    wanted = [name for name in only if name != _COMMUNICATION]
    tables: Any = importlib.import_module("simpart.costmodels.learned._package")
    kernels = [
        source
        for source in sources
        if tables.find_package(source) is not None
        or (Path(source) not in collectives and (not collectives or _may_hold_kernels(Path(source))))
    ]
    if (kernels and (wanted or not only)) or not collectives:
        module: Any = importlib.import_module("simpart.costmodels.learned._command")
        models, found = module.fit(kernels, output, wanted, seed, progress)
        files.update(found)
        families.update({name: {"weight": model.weight, **model.facts} for name, model in models.items()})
    if as_json:
        print_document(
            {"families": families, "files": files, "output": output, "timing": {"fit_s": time.monotonic() - start}}
        )
        return
    _print_errors(families)
    _print_withheld(files)
    _print_overheads(files)
    overheads: Any = importlib.import_module("simpart.costmodels.learned._overheads")
    words = overheads.host_words(overheads.shipped_overheads())
    click.echo(f"what hosts take is not fitted here but by benchmarks/overheads.py: {words}")
    click.echo(f"fitted in {time.monotonic() - start:.0f} s")


def _print_withheld(files: dict[str, Any]) -> None:
    """Rows of devices that are only there to judge by."""
    for name, file in files.items():
        withheld = file.get("never_fitted")
        if withheld:
            words = ", ".join(f"{count} of {device}" for device, count in withheld.items())
            click.echo(f"{name}: left out, because these devices are only there to judge by: {words}")


def _print_overheads(files: dict[str, Any]) -> None:
    """What traces show of launching, and where to say it."""
    from simpart.describe import human_seconds

    for name, file in files.items():
        found = file.get("overheads")
        if found:
            words = ", ".join(f"{key.removesuffix('_s')}: {human_seconds(value)}" for key, value in found.items())
            host = "for steps on this host give the first as --launch-time, or as host.eager_launch of its cluster"
            click.echo(f"{name} shows {words}; {host if 'kernel_launch_s' in found else 'for the device file'}")


def _fit_stores(
    sources: tuple[str, ...],
    output: str | None,
    seed: int,
    as_json: bool,
    progress: Callable[[str], None],
    start: float,
) -> None:
    """Kernels that were profiled here: each store gets a file of its own beside its profiles."""
    from simpart.describe import human_seconds

    if output and len(sources) > 1:
        raise UserError(f"one --output cannot hold what is learned from {len(sources)} stores; fit them one by one")
    module: Any = importlib.import_module("simpart.costmodels.learned_local._fit")
    families, files = {}, {}
    for source in map(Path, sources):
        folder = source if source.is_dir() else source.parent
        found, read = module.fit_store(folder, Path(output) if output else None, seed, progress)
        families.update({f"kernels of {name}": dict(item.facts) for name, item in found.items()})
        files.update(read)
    if as_json:
        print_document(
            {"families": families, "files": files, "output": output, "timing": {"fit_s": time.monotonic() - start}}
        )
        return
    _print_errors(families)
    for name, facts in families.items():
        words = ", ".join(f"{key.removesuffix('_s')} {human_seconds(s)}" for key, s in facts["overheads"].items())
        if words:
            click.echo(f"{name}: beyond its kernels a real step takes, per {words}")
    click.echo(
        f"fitted in {time.monotonic() - start:.0f} s; plan, simulate and search use it for kernels never measured"
    )


def _is_store(source: str) -> bool:
    path = Path(source)
    return (path / "profiles.jsonl").is_file() or (path.suffix == ".jsonl" and path.is_file())


def _print_errors(families: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("family", "held out", "as", "rows", "MAPE", "bias", box=None)
    for name, facts in families.items():
        for device, row in facts.get("held_out", {}).items():
            table.add_row(
                name, device, row.get("status", ""), str(row["rows"]), f"{row['mape']:.1%}", f"{row['bias']:+.1%}"
            )
    Console(highlight=False, soft_wrap=True).print(table)


def _may_hold_kernels(source: Path) -> bool:
    return not source.is_dir() or any(source.glob("**/op_*"))
