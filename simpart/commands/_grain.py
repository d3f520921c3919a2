"""Options of the grain at which a plan is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from simpart.errors import UserError

if TYPE_CHECKING:
    from simpart.lowering import Grain
    from simpart.lowering.fine import FineSettings
    from simpart.plan import Plan
    from simpart.problem import Problem

__all__ = ["grain_of", "grain_options"]

F = TypeVar("F", bound=Callable[..., Any])


def grain_options() -> Callable[[F], F]:
    """`--grain` and what may be chosen about the fine one."""
    options = (
        click.option(
            "--grain", type=click.Choice(["auto", "coarse", "fine"]), default="auto", show_default=True,
            help="Tasks are pipeline actions (coarse), or kernels and collectives on streams (fine). auto: fine where "
            "parameters are gathered from shards on GPUs, which goes on beside kernels.",
        ),
        click.option(
            "--prefetch", type=int, default=1, show_default=True,
            help="Layers ahead that sharded parameters are gathered (fine).",
        ),
        click.option("--overlap/--no-overlap", default=True, help="Collectives beside kernels (fine).  [default: yes]"),
    )  # fmt: skip

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def grain_of(
    problem: Problem, plan: Plan, grain: str, prefetch: int, overlap: bool
) -> tuple[Grain, FineSettings | None]:
    """The grain that these options ask for, with its settings; raises UserError where the coarse one has no use for
    them."""
    from simpart.simulation import telling_grain

    context = click.get_current_context()
    said = [n for n in ("prefetch", "overlap") if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if said and grain == "coarse":
        raise UserError(f"--{said[0]} is about the fine grain; give --grain fine, or leave it out")
    if grain == "coarse" or (grain == "auto" and not said and telling_grain(problem, plan) == "coarse"):
        return "coarse", None
    from simpart.lowering.fine import FineSettings

    return "fine", FineSettings(prefetch=prefetch, overlap=overlap)
