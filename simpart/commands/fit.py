"""`simpart fit`: learn compute models from measured kernels, the communication model from measured collectives."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from simpart.commands._console import print_document
from simpart.errors import UserError
from simpart.files import check_place

__all__ = ["fit"]

_COMMUNICATION = "communication"


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Where to write the models; else only their errors are shown.")
@click.option("--ship", is_flag=True, help="Write them in place of those that come with simpart.")
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
def fit(
    sources: tuple[str, ...], output: str | None, ship: bool, only: tuple[str, ...], seed: int, as_json: bool
) -> None:
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

    if ship and (output or only):
        raise UserError("--ship writes all the models that come with simpart; leave out --output and --family")
    if ship and any(map(_is_store, sources)):
        raise UserError("profiles of this machine are not for --ship; what is learned from them is kept beside them")
    if output:
        check_place(output)
    if all(map(_is_store, sources)) and not only:
        _fit_stores(sources, output, seed, as_json, progress, start)
        return
    families: dict[str, Any] = {}
    files: dict[str, Any] = {}
    communication: Any = importlib.import_module("simpart.costmodels.learned_comm._command")
    collectives = communication.collectives_in(sources) if not only or _COMMUNICATION in only else []
    if collectives and output and Path(output).suffix == ".json" and set(only) != {_COMMUNICATION}:
        raise UserError(
            f"--output is for models of kernels, and that of collectives goes beside it as .json, got {output}; "
            f"give {Path(output).with_suffix('.npz')}"
        )
    if collectives:
        beside = communication.SHIPPED if ship else Path(output).with_suffix(".json") if output else None
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
        where = module.SHIPPED if ship else Path(output) if output else None
        models, found = module.fit(kernels, where, wanted, seed, progress)
        files.update(found)
        for name, model in models.items():
            blends = {"blend": asdict(model.blend), "beside": asdict(model.beside)}
            told = {"told_by": model.blend.words(), "beside_told_by": model.beside.words()}
            families[name] = {**blends, **told, **model.facts}
    if as_json:
        print_document(
            {"families": families, "files": files, "output": output, "timing": {"fit_s": time.monotonic() - start}}
        )
        return
    _print_errors(families)
    _print_blends(families)
    _print_withheld(files)
    _print_overheads(files)
    overheads: Any = importlib.import_module("simpart.costmodels.learned._overheads")
    words = overheads.host_words(overheads.shipped_overheads())
    click.echo(f"what hosts take is not fitted here but by benchmarks/overheads.py: {words}")
    rest = "" if output or ship or not families else "; nothing was written: -o FILE keeps the models"
    click.echo(f"fitted in {time.monotonic() - start:.0f} s{rest}")


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


def _print_blends(families: dict[str, Any]) -> None:
    """Of every family that could choose: least mean error on new devices held out, by what the core was given."""
    from rich.console import Console
    from rich.table import Table

    given = ("core", "trees", "net", "both")
    table = Table("family", *given, "told by", box=None)
    for name, facts in families.items():
        for title, which, told in ((name, "blends", "told_by"), (f"{name}, short", "blends_beside", "beside_told_by")):
            least: dict[str, float] = {}
            for row in facts.get(which, ()):
                sort = given[(row["trees"] > 0) + 2 * (row["net"] > 0)]
                least[sort] = min(row["mape"], least.get(sort, row["mape"]))
            if least:
                table.add_row(title, *(f"{least[sort]:.1%}" if sort in least else "" for sort in given), facts[told])
    if table.row_count:
        click.echo("new devices held out, told by the best blend of each sort, and what a new one is told by:")
        Console(highlight=False, soft_wrap=True).print(table)


def _may_hold_kernels(source: Path) -> bool:
    return not source.is_dir() or any(source.glob("**/op_*"))
