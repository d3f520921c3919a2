"""Options that search and compare share: the space of plans, budgets, seed, worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from simpart.commands._problem import parse_seconds, stack
from simpart.problem import Space
from simpart.schedule import SCHEDULES

if TYPE_CHECKING:
    from simpart.searching import Budget

__all__ = ["budget_of", "check_jobs", "search_options", "space_document", "space_of"]

F = TypeVar("F", bound=Callable[..., Any])


def search_options() -> Callable[[F], F]:
    return stack(
        click.option("--budget", default=None, help="Time budget of a search, such as 60s or 5m."),
        click.option("--max-candidates", type=int, default=None, help="Count budget of a search; deterministic."),
        click.option("--max-stages", type=int, default=None, help="Most pipeline stages to consider."),
        click.option("--min-stages", type=int, default=1, show_default=True, help="Fewest stages to consider."),
        click.option(
            "--schedule", "schedules", multiple=True,
            help=f"Schedules to consider.  [default: {', '.join(Space().schedules)}]",
        ),
        click.option("--recompute", multiple=True, help="Recomputation to consider.  [default: none, full]"),
        click.option("--tp", "tp", multiple=True, type=click.IntRange(1),
                     help="Tensor-parallel degrees for grid and piper; rhino and tofu choose their own.  [default: 1]"),
        click.option("--zero", "zero", multiple=True, type=click.IntRange(0, 3),
                     help="ZeRO stages for grid; rhino and tofu choose their own.  [default: 0]"),
        click.option("--idle-devices", is_flag=True, help="Consider plans that leave devices idle."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
        click.option("--jobs", type=click.IntRange(1), default=1, show_default=True,
                     help="Processes that simulate candidates; the answer stays the same."),
    )  # fmt: skip


def budget_of(options: dict[str, Any]) -> Budget:
    from simpart.searching import Budget

    return Budget(seconds=parse_seconds(options["budget"]), candidates=options["max_candidates"])


def check_jobs(options: dict[str, Any]) -> None:
    """Prices are recorded in this process alone."""
    from simpart.errors import UserError

    if options["jobs"] > 1 and options["freeze_costs"] is not None:
        raise UserError(f"--freeze-costs records one process, got --jobs {options['jobs']}; leave --jobs out")


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
        schedules=tuple(dict.fromkeys(options["schedules"])) or Space().schedules,
        recompute=tuple(dict.fromkeys(options["recompute"])) or RECOMPUTE,
        min_stages=low,
        max_stages=high,
        use_fewer_devices=options["idle_devices"],
        tp=tuple(sorted(set(options["tp"]))) or (1,),
        zero=tuple(sorted(set(options["zero"]))) or (0,),
    )


def space_document(space: Space) -> dict[str, Any]:
    """The space as JSON."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(space).items()}
