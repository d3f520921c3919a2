"""Options of the grain at which a plan is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from simpart.errors import UserError

if TYPE_CHECKING:
    from simpart.lowering.fine import FineSettings

__all__ = ["grain_options", "settings_of"]

F = TypeVar("F", bound=Callable[..., Any])


def grain_options() -> Callable[[F], F]:
    """`--grain` and what may be chosen about the fine one."""
    options = (
        click.option(
            "--grain", type=click.Choice(["coarse", "fine"]), default="coarse", show_default=True,
            help="Tasks are pipeline actions, or kernels and collectives on streams.",
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


def settings_of(grain: str, prefetch: int, overlap: bool) -> FineSettings | None:
    """The settings of these options; raises UserError where the coarse grain has no use for them."""
    context = click.get_current_context()
    for name in ("prefetch", "overlap"):
        if grain == "coarse" and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(f"--{name} is about the fine grain; give --grain fine, or leave it out")
    if grain == "coarse":
        return None
    from simpart.lowering.fine import FineSettings

    return FineSettings(prefetch=prefetch, overlap=overlap)
