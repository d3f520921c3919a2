"""Options about how far a prediction rests on measurements, shared by plan, simulate and search."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from simpart.commands._problem import stack

if TYPE_CHECKING:
    from simpart.plan import Plan
    from simpart.problem import Problem
    from simpart.simulation import SimResult
    from simpart.simulation.coverage import Coverage

__all__ = ["TOO_FAR", "coverage_documents", "coverage_options", "print_coverage", "stop_if_extrapolated"]

F = TypeVar("F", bound=Callable[..., Any])
TOO_FAR = 1
"""Exit status when more of the time than allowed is extrapolated: the answer is given, but not to be built on."""


def _share(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    from simpart.simulation.coverage import parse_share

    return parse_share(value)


def coverage_options() -> Callable[[F], F]:
    return stack(
        click.option(
            "--profile-next", type=click.IntRange(min=1), default=None, metavar="K",
            help="Name the K kernels whose profile would narrow the interval most.",
        ),
        click.option(
            "--fail-if-extrapolated", callback=_share, default=None, metavar="SHARE",
            help="Exit status 1 when more of the priced time than this (20%) is extrapolated or analytic.",
        ),
    )  # fmt: skip


def coverage_documents(problem: Problem, plan: Plan, count: int | None) -> dict[str, Any]:
    """What the document of a command holds besides: what models assume of thin data sheets, and kernels to profile
    next; nothing when there is nothing."""
    found, assumed = _found(problem, plan, count), _assumed(problem)
    more: dict[str, Any] = {"assumed": assumed} if assumed else {}
    return more if found is None else {**more, "profile_next": found.to_json()}


def print_coverage(problem: Problem, plan: Plan, count: int | None) -> None:
    """What models assume of thin data sheets and kernels to profile next, for people."""
    for words in _assumed(problem):
        click.echo(words)
    found = _found(problem, plan, count)
    if found is None:
        return
    from simpart.commands._console import console
    from simpart.describe import human_seconds

    out = console()
    (low, high), (after_low, after_high) = found.interval_s, found.interval_after_s
    out.print(f"profile next, on {', '.join(dict.fromkeys(k.device for k in found.kernels)) or 'nothing'}:")
    for kernel in found.kernels:
        shapes = kernel.words().rpartition(" on ")[0]
        out.print(
            f"  {kernel.share:5.1%} of priced time, {kernel.provenance}, ±{kernel.log_sd:.0%}: {shapes}", markup=False
        )
    now, then = (f"{human_seconds(a)} … {human_seconds(b)}" for a, b in ((low, high), (after_low, after_high)))
    out.print(f"  90 % interval now {now}, with these measured {then}", markup=False)


def stop_if_extrapolated(result: SimResult, limit: float | None) -> None:
    """End with TOO_FAR and one line when more than `limit` of the priced time rests on no measurement."""
    if limit is None:
        return
    from simpart.simulation.coverage import beyond_measurements

    share = beyond_measurements(result.provenance)
    if share > limit:
        parts = ", ".join(f"{name} {result.provenance[name]:.0%}" for name in ("extrapolated", "analytic"))
        click.echo(
            f"{share:.0%} of the priced time is beyond measurements ({parts}), more than the {limit:.0%} allowed; "
            f"profile what --profile-next names",
            err=True,
        )
        raise click.exceptions.Exit(TOO_FAR)


def _assumed(problem: Problem) -> list[str]:
    """A line for each kind of device whose file leaves out what learned models read."""
    sheet: Any = importlib.import_module("simpart.costmodels.learned._sheet")
    return [
        words
        for d in problem.cluster.kinds
        if d.kind == "gpu" and (words := sheet.assumptions(d, problem.graph.precision))
    ]


def _found(problem: Problem, plan: Plan, count: int | None) -> Coverage | None:
    if count is None:
        return None
    from simpart.simulation.coverage import profile_next

    return profile_next(problem, plan, count)
