"""A step in many worlds: how long it takes, what slow devices, slow links and failures add, which of two plans wins.

The worlds of one seed are the same for every plan (`stochastic.sample_steps`), so that two plans are compared pair by
pair. Failures stretch every step by what checkpoints and lost work cost on average (`stochastic.goodput`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from simpart.errors import UserError
from simpart.program import Program
from simpart.simulation.stochastic import SEED, Disturbances, Failures, Goodput, compare, goodput, sample_steps

__all__ = ["MOST_SAMPLES", "Against", "Steps", "Worlds", "steps_of", "worlds_of"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
MOST_SAMPLES = 100_000
"""More changes nothing that is printed; a slip of the pen must not run for hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of a step over all worlds; `interval_s` holds 90 % of them. `quiet_s` is the median without stragglers
    and slow links."""

    mean_s: float
    median_s: float
    sd_s: float
    interval_s: tuple[float, float]
    quiet_s: float
    goodput: Goodput | None

    @property
    def slowdown(self) -> float:
        """How many times as long the median step takes because of stragglers and slow links."""
        return self.median_s / self.quiet_s if self.quiet_s > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        found = {
            "mean_s": self.mean_s, "median_s": self.median_s, "sd_s": self.sd_s, "interval_s": list(self.interval_s),
            "quiet_s": self.quiet_s, "slowdown": self.slowdown,
        }  # fmt: skip
        return found | {"goodput": None if self.goodput is None else _goodput_json(self.goodput)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Another plan B in the same worlds: the part in which this plan, A, takes less time per sample than B, and how
    many times as long B takes (90 % of the worlds). With failures, both with theirs."""

    steps: Steps
    probability: float
    ratio: float
    ratio_interval: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.steps.to_json(),
            "probability": self.probability,
            "ratio": self.ratio,
            "ratio_interval": list(self.ratio_interval),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Worlds:
    """What was sampled, and what came out; `to_json` is the `stochastic` part of a command's document."""

    samples: int
    seed: int
    disturbances: Disturbances
    failures: Failures | None
    steps: Steps
    against: Against | None

    def to_json(self) -> dict[str, Any]:
        given, failures = self.disturbances, self.failures
        return {
            "samples": self.samples,
            "seed": self.seed,
            "straggler": {"share": given.straggler_share, "factor": given.straggler_factor},
            "link_degradation": {"share": given.link_share, "factor": given.link_factor},
            "failures": None if failures is None else {
                "device_mtbf_s": failures.device_mtbf_s,
                "checkpoint_s": failures.checkpoint_s,
                "restart_s": failures.restart_s,
            },
            **self.steps.to_json(),
            "against": None if self.against is None else self.against.to_json(),
        }  # fmt: skip


def worlds_of(
    program: Program, samples: int, seed: int = SEED, disturbances: Disturbances | None = None,
    failures: Failures | None = None, against: Program | None = None,
) -> Worlds:  # fmt: skip
    """A program, and another one beside it, in `samples` worlds."""
    if not 1 <= samples <= MOST_SAMPLES:
        raise UserError(f"samples must be from 1 to {MOST_SAMPLES}, got {samples}; try 1000")
    given = disturbances or Disturbances()
    mine, here = steps_of(program, samples, seed, given, failures)
    beside = None
    if against is not None:
        theirs, there = steps_of(against, samples, seed, given, failures)
        if not np.isfinite(here).all() or not np.isfinite(there).all():
            plan = "this plan" if not np.isfinite(here).all() else "the other plan"
            raise UserError(f"{plan} never finishes a step between failures; raise --mtbf or lower --checkpoint-s")
        found = compare(here, there)
        beside = Against(
            steps=theirs, probability=found.probability, ratio=found.ratio, ratio_interval=found.ratio_interval
        )
    return Worlds(samples=samples, seed=seed, disturbances=given, failures=failures, steps=mine, against=beside)


def steps_of(
    program: Program, samples: int, seed: int, disturbances: Disturbances, failures: Failures | None
) -> tuple[Steps, Floats]:
    """One program in `samples` worlds: what is said of its steps, and seconds per sample in each, failures included."""
    quiet = steps = sample_steps(program, samples, seed)
    if disturbances != Disturbances():
        steps = sample_steps(program, samples, seed, disturbances)
    assert program.facts is not None  # sample_steps checks
    low, middle, high = np.quantile(steps, [0.05, 0.5, 0.95]).tolist()
    mean, found = float(steps.mean()), None
    if failures is not None:
        found = goodput(mean, sum(map(len, program.facts.devices)), failures)
    said = Steps(
        mean_s=mean, median_s=middle, sd_s=float(steps.std()), interval_s=(low, high), quiet_s=float(np.median(quiet)),
        goodput=found,
    )  # fmt: skip
    stretch = 1.0 if found is None else found.step_s / mean
    return said, steps * stretch / program.facts.samples


def _goodput_json(found: Goodput) -> dict[str, Any]:
    return {
        "checkpoint_every_s": found.interval_s,
        "young_s": found.young_s,
        "machine_mtbf_s": found.machine_mtbf_s,
        "fraction": found.fraction,
        "step_s": found.step_s if math.isfinite(found.step_s) else None,
    }
