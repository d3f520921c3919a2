"""Steps that vary: what the estimates' spreads, slow devices and slow links make of a program; comparing two plans in
the same worlds; what failures leave of a machine's time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from simpart.engines import compiled
from simpart.errors import UserError
from simpart.program import Program, TaskKind

__all__ = [
    "DRAWS", "SEED", "Comparison", "Disturbances", "Failures", "Goodput", "compare", "compare_steps", "goodput",
    "sample_steps", "usual_draws",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]
DRAWS, SEED = 256, 0
QUIET = 1.0
FEWEST, TASK_DRAWS = 32, 2**29
"""Programs of millions of tasks are sampled less often than `DRAWS`: so many tasks in all take about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """What may befall a step besides: each device is a straggler with probability `straggler_share` and then takes
    `straggler_factor` times as long for its kernels and updates; the link of each device, likewise, for what it sends.
    """

    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    link_share: float = 0.0
    link_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("straggler", "link"):
            share, factor = getattr(self, f"{name}_share"), getattr(self, f"{name}_factor")
            if not 0 <= share <= 1 or not 1 <= factor < math.inf:
                raise UserError(
                    f"{name}: the share must be from 0 to 1 and the factor at least 1 and finite, got "
                    f"{share:g}:{factor:g}; try 0.01:1.5"
                )


def sample_steps(
    program: Program, draws: int = DRAWS, seed: int = SEED, disturbances: Disturbances | None = None
) -> Floats:
    """Steps, in seconds, of `draws` worlds: in each, one factor per latent factor and own source multiplies all times
    that share it, and the same devices are slow whatever the plan.

    The same seed gives the same worlds for every program, so that plans can be compared world by world.
    """
    spread, facts, durations = program.spread, program.facts, program.durations
    if spread is None or facts is None:
        raise UserError("this program does not say how sure its times are; make it with lower()")
    shared = np.stack([_normal(seed, f"shared {name}", draws) for name in spread.factors] or [np.zeros(draws)], axis=1)
    own = np.stack([_normal(seed, f"own {name}", draws) for name in spread.sources], axis=1)
    by_factor = spread.by_factor if spread.factors else np.zeros((durations.task_s.size, 1))
    sd = spread.shared_log_sd if spread.factors else np.zeros(1)
    varied = np.exp(shared * sd) @ by_factor.T
    varied *= np.exp(own[:, spread.own_source] * spread.own_log_sd)
    task_s = varied + np.maximum(durations.task_s - by_factor.sum(axis=1), 0.0)
    if disturbances is not None:
        task_s *= _slowed(program, draws, seed, disturbances)
    whole = np.exp(_normal(seed, f"step {', '.join(sorted(set(facts.device_names)))}", draws) * facts.step_log_sd)
    steps: Floats = (compiled.makespans(program.topology, task_s) + facts.overhead_s) * whole
    return steps


def usual_draws(program: Program) -> int:
    """How many worlds tell a program's interval: `DRAWS`, fewer where it has millions of tasks."""
    return max(FEWEST, min(DRAWS, TASK_DRAWS // max(1, program.topology.size)))


def _normal(seed: int, name: str, draws: int) -> Floats:
    """By name, so that two programs that share a factor meet the same values."""
    return np.random.default_rng([seed, crc32(name.encode())]).standard_normal(draws)


def _slowed(program: Program, draws: int, seed: int, given: Disturbances) -> Table:
    """Factor of each task class in each world: a group is as slow as its slowest device."""
    topology, facts = program.topology, program.facts
    assert facts is not None  # sample_steps checks
    found = np.ones((draws, len(topology.class_names)))
    uniform = {
        name: np.random.default_rng([seed, crc32(name.encode())]).random((1 + max(map(max, facts.devices)), draws)).T
        for name in ("stragglers", "links")
    }
    for g, devices in enumerate(facts.devices):
        computes = (topology.kind < TaskKind.SEND) | (topology.kind == TaskKind.OPTIMIZER)
        mine = (topology.resource == g) & computes
        slow = (uniform["stragglers"][:, list(devices)] < given.straggler_share).any(axis=1)
        classes = np.unique(topology.task_class[mine])
        factor = np.where(slow, given.straggler_factor, QUIET)[:, None]
        found[:, classes] = np.maximum(found[:, classes], factor)
    sending = (topology.kind == TaskKind.SEND) | (topology.kind == TaskKind.REDUCE)
    sending |= topology.kind == TaskKind.COLLECTIVE
    for r, name in enumerate(topology.resource_names):  # `group 1`, `stream 1 tp`, `link 1>2`
        source = int(name.split()[1].partition(">")[0])
        slow = (uniform["links"][:, list(facts.devices[source])] < given.link_share).any(axis=1)
        classes = np.unique(topology.task_class[(topology.resource == r) & sending])
        factor = np.where(slow, given.link_factor, QUIET)[:, None]
        found[:, classes] = np.maximum(found[:, classes], factor)
    return found


# --- two plans -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of two plans A and B: in which part of the worlds A is faster, and how many times as long B takes per sample,
    with 90 % of the worlds."""

    probability: float
    ratio: float
    ratio_interval: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return {"probability": self.probability, "ratio": self.ratio, "ratio_interval": list(self.ratio_interval)}


def compare_steps(
    a: Program, b: Program, draws: int = 1024, seed: int = SEED, disturbances: Disturbances | None = None
) -> Comparison:
    """Both plans in the same worlds: what they share cancels, so that ratios are surer than times. Ties count half."""
    steps = []
    for program in (a, b):
        assert program.facts is not None or program.spread is None  # sample_steps says what is missing
        found = sample_steps(program, draws, seed, disturbances)
        steps.append(found / (program.facts.samples if program.facts else 1))
    return compare(*steps)


def compare(a: Floats, b: Floats) -> Comparison:
    """Seconds per sample of two plans, world by world."""
    ratio = b / a
    low, middle, high = np.quantile(ratio, [0.05, 0.5, 0.95])
    return Comparison(
        probability=float((ratio > 1).mean() + 0.5 * (ratio == 1).mean()),
        ratio=float(middle),
        ratio_interval=(float(low), float(high)),
    )


# --- failures --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Devices fail independently, each every `device_mtbf_s` seconds on average; a checkpoint takes `checkpoint_s`,
    coming back after a failure `restart_s`."""

    device_mtbf_s: float
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        for name, value, least, usual in (
            ("time between failures of a device", self.device_mtbf_s, "positive", "1.6e8, five years"),
            ("checkpoint", self.checkpoint_s, "positive", "60"),
            ("restart", self.restart_s, "at least 0", "600"),
        ):
            if not 0 <= value < math.inf or (value == 0 and least == "positive"):
                raise UserError(f"{name}: the seconds must be {least} and finite, got {value:g}; try {usual}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The best seconds of work between checkpoints, the part of the machine's time that ends in finished steps, and
    the seconds that a step then takes on average. `young_s` is Young's interval, `machine_mtbf_s` the time between
    failures of any device."""

    interval_s: float
    fraction: float
    step_s: float
    young_s: float
    machine_mtbf_s: float


def goodput(step_s: float, devices: int, failures: Failures) -> Goodput:
    """Work, checkpoints, and work lost and repeated, at the best interval.

    With M seconds between failures of the whole machine, checkpoints of d seconds and restarts of R seconds, T seconds
    of work in pieces of t take `M exp(R/M) (exp((t + d)/M) - 1) T/t`. Reference: Daly, "A higher order estimate of the
    optimum checkpoint interval" (2006), equations 13 and 37; its first term is Young's (1974).
    """
    machine, d = failures.device_mtbf_s / devices, failures.checkpoint_s
    young = math.sqrt(2 * d * machine)
    if d < 2 * machine:
        x = d / (2 * machine)
        interval = young * (1 + math.sqrt(x) / 3 + x / 9) - d
    else:
        interval = machine
    exponent = failures.restart_s / machine + (interval + d) / machine
    if exponent > 700:  # no piece of work is ever finished
        return Goodput(interval_s=interval, fraction=0.0, step_s=math.inf, young_s=young, machine_mtbf_s=machine)
    stretch = machine * math.exp(failures.restart_s / machine) * math.expm1((interval + d) / machine) / interval
    return Goodput(
        interval_s=interval, fraction=1 / stretch, step_s=step_s * stretch, young_s=young, machine_mtbf_s=machine
    )
