"""Options of stochastic runs, and how their outcome is printed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from simpart.commands._place import PLACE
from simpart.errors import UserError

if TYPE_CHECKING:
    from simpart.program import Program
    from simpart.simulation.worlds import Worlds

__all__ = ["STOCHASTIC", "print_worlds", "stochastic_options", "worlds_asked"]

F = TypeVar("F", bound=Callable[..., Any])
STOCHASTIC = ("samples", "sample_seed", "straggler", "link_degradation", "mtbf", "checkpoint_s", "restart_s", "against")
"""Names of the options."""
USUAL_SAMPLES = 1000
HOPELESS = 1e-6
"""Fraction of useful time below which its size says nothing."""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}


def stochastic_options() -> Callable[[F], F]:
    """`--samples` and what may befall a step."""
    options = (
        click.option("--samples", type=int, default=None, metavar="N",
                     help=f"Sample the step in N worlds.  [default: {USUAL_SAMPLES}, with any option below]"),
        click.option("--seed", "sample_seed", type=click.IntRange(0), default=0, show_default=True,
                     help="Of the worlds."),
        click.option("--straggler", metavar="SHARE:FACTOR", default=None,
                     help="Slow devices: 0.01:1.5 makes each, with probability 1 %, take 1.5 times as long."),
        click.option("--link-degradation", metavar="SHARE:FACTOR", default=None, help="Slow links, likewise."),
        click.option("--mtbf", metavar="TIME", default=None,
                     help="Time between failures of one device (43800h, 5y); goodput with checkpoints."),
        click.option("--checkpoint-s", type=float, default=None, help="Seconds that a checkpoint stops training."),
        click.option("--restart-s", type=float, default=None, help="Seconds from a failure to running again.  "
                     "[default: those of a checkpoint]"),
        click.option("--against", type=PLACE, default=None, metavar="PLAN",
                     help="Another plan file in the same worlds: which is faster, by how much."),
    )  # fmt: skip

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def worlds_asked(program: Program, options: dict[str, Any], other: Callable[[Path], Program]) -> Worlds | None:
    """What the options ask for; None if they ask for nothing. `other` lowers the plan file of --against."""
    from simpart.simulation.stochastic import Disturbances, Failures
    from simpart.simulation.worlds import worlds_of

    asked = [name for name in STOCHASTIC if name != "sample_seed" and options.get(name) is not None]
    if not asked:
        return None
    straggler, link = (_share_and_factor(name, options[name]) for name in ("straggler", "link_degradation"))
    disturbances = Disturbances(
        straggler_share=straggler[0], straggler_factor=straggler[1], link_share=link[0], link_factor=link[1]
    )
    failures = None
    if options["mtbf"] is not None:
        checkpoint_s = options["checkpoint_s"]
        if checkpoint_s is None:
            raise UserError("--mtbf needs --checkpoint-s, the seconds that a checkpoint stops training; try 60")
        restart_s = checkpoint_s if options["restart_s"] is None else options["restart_s"]
        failures = Failures(device_mtbf_s=_time(options["mtbf"]), checkpoint_s=checkpoint_s, restart_s=restart_s)
    elif options["checkpoint_s"] is not None or options["restart_s"] is not None:
        raise UserError("--checkpoint-s and --restart-s are about failures; give --mtbf too, such as --mtbf 5y")
    samples = USUAL_SAMPLES if options["samples"] is None else options["samples"]
    beside = None if options["against"] is None else other(options["against"])
    return worlds_of(program, samples, options["sample_seed"], disturbances, failures, beside)


def _share_and_factor(name: str, text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    share, _, factor = text.partition(":")
    try:
        return float(share), float(factor)
    except ValueError:
        flag = name.replace("_", "-")
        raise UserError(f"--{flag} is a share and a factor, got {text!r}; write --{flag} 0.01:1.5") from None


def _time(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(s|min|h|d|y)?\s*", text)
    if match is None or not math.isfinite(float(match[1])):
        raise UserError(f"--mtbf is a time in s, min, h, d or y, got {text!r}; write --mtbf 43800h or --mtbf 5y")
    return float(match[1]) * _UNITS[match[2] or "s"]


def print_worlds(found: Worlds, against: Path | None) -> None:
    """The outcome, for people."""
    from simpart.describe import human_seconds

    steps = found.steps
    low, high = steps.interval_s
    worlds = f"{found.samples} world{'s' * (found.samples > 1)}"
    click.echo(
        f"in {worlds} (seed {found.seed}): median {human_seconds(steps.median_s)}, mean "
        f"{human_seconds(steps.mean_s)}, 90 % {human_seconds(low)} … {human_seconds(high)}"
    )
    if steps.slowdown != 1:
        click.echo(f"  slow devices and links: {steps.slowdown:.3f} times the quiet {human_seconds(steps.quiet_s)}")
    if steps.goodput is not None:
        good = steps.goodput
        click.echo(
            f"  failures: one in {_long(good.machine_mtbf_s)} on the whole machine; a checkpoint every "
            f"{_long(good.interval_s)} leaves {good.fraction:.1%} of the time, {human_seconds(good.step_s)} a step"
            if good.fraction >= HOPELESS
            else f"  failures: one in {_long(good.machine_mtbf_s)} on the whole machine; hardly a step is ever finished"
        )
    if found.against is not None:
        beside = found.against
        low, high = beside.ratio_interval
        click.echo(
            f"  faster than {against} in {beside.probability:.1%} of the worlds; that takes {beside.ratio:.4g} times "
            f"as long per sample (90 %: {low:.4g} … {high:.4g})"
        )


def _long(seconds: float) -> str:
    """A time that may be days.

    >>> _long(7200.0), _long(30.0)
    ('2 h', '30 s')
    """
    for unit in ("y", "d", "h", "min"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.3g} {unit}"
    return f"{seconds:.3g} s"
