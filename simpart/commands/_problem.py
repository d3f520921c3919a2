"""Options that several commands share, and the Problem they describe."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from simpart.commands._notice import notice
from simpart.commands._place import PLACE
from simpart.configure import RECOMPUTE, SELECTIVE, Configuration
from simpart.cost import Costs
from simpart.errors import UserError
from simpart.hardware import Cluster, Host, load_cluster
from simpart.hardware.quantity import format_quantity, parse_quantity
from simpart.problem import Problem, Space, check_global_batch
from simpart.schedule import SCHEDULES
from simpart.training import OPTIMIZER_STATES, TrainingSpec

__all__ = [
    "build_problem", "configuration_of", "configuration_options", "costs_of", "freeze_costs", "parse_seconds",
    "problem_options", "seconds_of", "training_of",
]  # fmt: skip

LONGEST_LAUNCH_S = 0.01
"""From here on a launch time is a slip of the unit."""
F = TypeVar("F", bound=Callable[..., Any])


def stack(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Apply several option decorators in the order they are written."""
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(options), function)


def problem_options(*, required: bool = True) -> Callable[[F], F]:
    """What to train, on what."""
    return stack(
        click.option(
            "--cluster", required=required, help="Name, NAME:NODES or a YAML file; see simpart hardware list."
        ),
        click.option("--global-batch", type=int, required=required, help="Samples per optimizer step."),
        click.option(
            "--training",
            type=click.Path(path_type=Path),
            default=None,
            metavar="FILE.yaml",
            help="Training recipe: optimizer, precision, master weights, frozen parameters; what the next three say "
            "goes before it.",
        ),
        click.option("--precision", default=None, help="Of parameters and activations.  [default: float32]"),
        click.option("--optimizer", type=click.Choice(list(OPTIMIZER_STATES)), default=None, help="[default: adamw]"),
        click.option("--clip", type=float, default=None, help="Clip gradients to this global norm."),
        click.option("--store", type=click.Path(path_type=Path), default=None, help="Folder of profiles to use."),
        click.option("--no-profiles", is_flag=True, help="Ignore measured profiles: predict from data sheets alone."),
        click.option("--no-cache", is_flag=True, help="Capture afresh."),
        *costs_options(),
    )


def costs_options() -> tuple[Callable[[F], F], ...]:
    """Prices from a file, and into one; the host's part of them."""
    return (
        click.option(
            "--launch-time", default=None, metavar="TIME",
            help="What the host takes to launch one kernel, as in 12us; instead of what hosts of other people take.",
        ),
        click.option(
            "--costs", type=click.Path(path_type=Path), default=None, metavar="TABLE.npz",
            help="Prices from this table, as --freeze-costs wrote it: no cost model is asked.",
        ),
        click.option(
            "--freeze-costs", type=PLACE, default=None, metavar="TABLE.npz",
            help="Write every price that was asked, so that results reproduce without the models.",
        ),
    )  # fmt: skip


def configuration_options() -> Callable[[F], F]:
    """A configuration by hand."""
    return stack(
        click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages."),
        click.option("--dp", type=int, default=None, help="Replicas of each stage.  [default: what the others leave]"),
        click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel degree."),
        click.option("--sp", is_flag=True, help="Split along the sequence what lies between tensor-parallel products."),
        click.option(
            "--vocab-parallel/--no-vocab-parallel",
            default=None,
            help="Split vocabularies by tp.  [default: where it divides them]",
        ),
        click.option("--ep", type=int, default=1, show_default=True, help="Expert-parallel degree."),
        click.option("--cp", type=int, default=1, show_default=True, help="Context-parallel degree (sequences)."),
        click.option("--zero", type=int, default=0, show_default=True, help="ZeRO stage: 0 to 3 (3 is FSDP)."),
        click.option(
            "--micro-batch", type=int, default=None, help="Samples per replica and micro-batch.  [default: 1]"
        ),
        click.option(
            "--schedule",
            default="1f1b",
            show_default=True,
            metavar="NAME|FILE.csv",
            help=f"One of {', '.join(SCHEDULES)}, zero-bubble (made for the plan's times), or a file with a row of "
            "actions per group.",
        ),
        click.option(
            "--virtual-stages", type=int, default=None, help="Stages per group of interleaved schedules.  [default: 2]"
        ),
        click.option(
            "--recompute",
            default="none",
            show_default=True,
            help=f"One of {', '.join(RECOMPUTE)}, {SELECTIVE} (of each layer its attention).",
        ),
    )


def configuration_of(options: dict[str, Any]) -> Configuration:
    names = (
        "pp", "dp", "tp", "sp", "vocab_parallel", "ep", "cp", "zero", "micro_batch", "schedule", "recompute",
        "virtual_stages",
    )  # fmt: skip
    return Configuration(**{name: options[name] for name in names})


def build_problem(model: str, options: dict[str, Any], space: Space | None = None) -> Problem:
    """Graph (captured, from the cache or from a file), cluster and cost models of a command's options."""
    from simpart.model_spec import load_graph_or_model

    cluster = load_cluster(options["cluster"])
    check_global_batch(options["global_batch"])
    training = training_of(options)
    with notice(f"{'reading' if model.endswith('.graph') else 'capturing'} {model}"):
        graph = load_graph_or_model(model, precision=training.precision, cache=not options["no_cache"])
    costs = costs_of(cluster, options)
    return Problem(
        graph=graph,
        training=training,
        cluster=cluster,
        costs=costs,
        global_batch=options["global_batch"],
        space=space or Space(),
    )


def training_of(options: dict[str, Any]) -> TrainingSpec:
    """The recipe of a command: its file, and what its flags say otherwise."""
    from simpart.training_files import load_training

    recipe = TrainingSpec() if options["training"] is None else load_training(options["training"])
    flags = {"precision": "precision", "optimizer": "optimizer", "clip": "gradient_clip_norm"}
    return replace(recipe, **{name: options[flag] for flag, name in flags.items() if options[flag] is not None})


def costs_of(cluster: Cluster, options: dict[str, Any]) -> Costs:
    """Prices of a command: its table, or the models; recorded where the command writes a table."""
    from simpart.registry import default_costs, folder

    table, record = options.get("costs"), options.get("freeze_costs") is not None
    if table is not None and (options.get("store") is not None or options.get("no_profiles")):
        raise UserError("--costs gives all prices; leave --store and --no-profiles out")
    if table is not None:
        costs: Costs = folder("costmodels.frozen").load_frozen(table)
    else:
        costs = default_costs(cluster, store=options["store"], profiles=not options["no_profiles"])
    if options.get("launch_time") is not None:
        costs = with_launch_time(costs, cluster, options["launch_time"])
    if record:
        costs, _ = folder("costmodels.frozen").record(costs)
    return costs


def with_launch_time(costs: Costs, cluster: Cluster, text: str) -> Costs:
    """Costs with the launch time that --launch-time states, whatever profiles, cluster file or other hosts say."""
    from simpart.registry import folder

    launch_s = seconds_of("--launch-time", text)
    if not launch_s < LONGEST_LAUNCH_S:
        rule = f"must be below {format_quantity(LONGEST_LAUNCH_S, 's')}, got {text}"
        raise UserError(f"--launch-time {rule}; it is per kernel, as in 12us")
    if not any(device.kind == "gpu" for device in cluster.kinds):
        raise UserError(f"--launch-time is of hosts of GPUs, and {cluster.name} has none; leave it out")
    changed: Costs = folder("costmodels").with_host(costs, Host(eager_launch_s=launch_s, compiled_launch_s=launch_s))
    return changed


def freeze_costs(problem: Problem, options: dict[str, Any]) -> None:
    """Write the table that --freeze-costs asks for."""
    from simpart.registry import folder

    if options.get("freeze_costs") is not None:
        compute: Any = problem.costs.compute
        folder("costmodels.frozen").save_frozen(options["freeze_costs"], compute.recorder)


def seconds_of(option: str, text: str) -> float:
    """The time that an option states with its unit; faults name the option."""
    try:
        return parse_quantity(text, "s")
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def parse_seconds(text: str | None) -> float | None:
    """`60s`, `5m`, `1h` or a plain number of seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*", text)
    if match is None:
        raise UserError(f"a time is written 60s, 5m or 1h, got {text!r}")
    return float(match[1]) * {"s": 1, None: 1, "m": 60, "min": 60, "h": 3600}[match[2]]
