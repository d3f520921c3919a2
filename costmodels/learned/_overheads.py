"""What the host takes of a training step: seconds per launch, from runs and from single ops, and how far hosts differ.

An action takes at least as long as launching its kernels and collectives. How long one launch takes is a property of
host and software; each host whose steps or ops are known gives one figure, each source (a publisher, his software) the
mean of its hosts' logs, and all sources the mean of theirs, with the scatter of sources as log-sd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simpart.errors import FormatError
from simpart.files import read_document

__all__ = [
    "GRID_S", "KIND", "SHIPPED_OVERHEADS", "VERSION", "HostRuns", "OneRun", "Overheads", "at_launch_times",
    "compiled_launch", "fit_host", "host_words", "pooled", "predicted_s", "shipped_overheads", "told_by_one",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

KIND, VERSION = "simpart-overheads", 2
SHIPPED_OVERHEADS = Path(__file__).parent.parent / "artifacts" / "overheads.json"
GRID_S: Floats = np.array([0.0, *np.geomspace(2e-6, 500e-6, 48)])
"""Seconds per launch at which steps are simulated; in between they are nearly straight."""
_Z90 = 1.6449
"""Standard deviations from the middle to either end of a 90 % interval."""
_CANDIDATES_S = np.geomspace(5e-6, 400e-6, 100)
_STEP_CANDIDATES_S = np.linspace(0.0, 0.2, 81)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRuns:
    """Runs on one host: measured seconds per step, and simulated ones at each launch time of GRID_S (a row each)."""

    host: str
    source: str
    measured_s: Floats
    steps_s: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Host seconds per launch in each mode and per step, `launch_log_sd` the scatter of sources; `known_log_sd` by how
    much steps of a host scatter where another run of it has told its seconds per launch. None: no run of that mode is
    known in which the host limits."""

    eager_launch_s: float
    compiled_launch_s: float | None
    step_overhead_s: float
    launch_log_sd: float
    known_log_sd: float
    sources: tuple[str, ...]


def predicted_s(runs: HostRuns, launch_s: float, step_s: float = 0.0) -> Floats:
    """Steps at a launch time within the grid, and with a fixed time per step."""
    if not 0.0 <= launch_s <= GRID_S[-1]:
        raise ValueError(f"launch_s must lie within 0 and {GRID_S[-1]:g} s, got {launch_s}")
    right = int(np.clip(np.searchsorted(GRID_S, launch_s), 1, GRID_S.size - 1))
    part = (launch_s - GRID_S[right - 1]) / (GRID_S[right] - GRID_S[right - 1])
    found: Floats = (1 - part) * runs.steps_s[:, right - 1] + part * runs.steps_s[:, right] + step_s
    return found


def at_launch_times(seconds: Floats, launches: Floats, stages: int, times_s: Floats) -> Table:
    """Durations of a coarse program's classes of tasks (each stage's F, B, I and W come first) at several launch times,
    a row each, from those without a host and the launches of each: what `ActionCosts` makes of a launch time."""
    waiting = times_s[:, None] * launches - seconds
    forward = 4 * np.arange(stages)
    ahead = np.maximum(0.0, -waiting[:, forward])
    waiting[:, forward + 1] -= ahead
    waiting[:, forward + 2] -= ahead
    found: Table = seconds + np.maximum(0.0, waiting)
    return found


def fit_host(runs: HostRuns, *, per_step: bool = False) -> tuple[float, float]:
    """(seconds per launch, fixed seconds per step) with the least mean absolute log error on a host's runs; the latter
    is 0 unless asked for."""
    log_measured = np.log(runs.measured_s)
    best = (np.inf, 0.0, 0.0)
    for launch_s in _CANDIDATES_S:
        steps = predicted_s(runs, float(launch_s))
        for step_s in _STEP_CANDIDATES_S if per_step else (0.0,):
            error = float(np.abs(np.log(steps + step_s) - log_measured).mean())
            best = min(best, (error, float(launch_s), float(step_s)))
    return best[1], best[2]


class OneRun(NamedTuple):
    """How a host's other runs are predicted with the launch time that one run tells: mean absolute relative error, in
    the middle and at the tenth and ninetieth of a hundred choices of the one, and the log-sd in the middle."""

    error: float
    low: float
    high: float
    log_sd: float


def told_by_one(runs: HostRuns) -> OneRun:
    """Each run in turn tells the launch time that the others of its host are predicted with."""
    errors, spreads = [], []
    for i in range(runs.measured_s.size):
        one = replace(runs, measured_s=runs.measured_s[[i]], steps_s=runs.steps_s[[i]])
        others = np.delete(predicted_s(runs, fit_host(one)[0]) / runs.measured_s, i)
        errors.append(float(np.abs(others - 1).mean()))
        spreads.append(float(np.sqrt((np.log(others) ** 2).mean())))
    low, middle, high = np.quantile(errors, (0.1, 0.5, 0.9))
    return OneRun(float(middle), float(low), float(high), float(np.median(spreads)))


def pooled(sources: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """(seconds per launch, log-sd over sources) from what each source's hosts take; sources weigh alike."""
    logs = [float(np.mean(np.log(hosts))) for hosts in sources.values()]
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    return float(np.exp(np.mean(logs))), spread


@lru_cache(maxsize=1)
def shipped_overheads() -> Overheads:
    """Those that come with the package. Raises FormatError for a file that is not right."""
    return _overheads(read_document(SHIPPED_OVERHEADS, KIND, VERSION))


def _overheads(found: Mapping[str, Any]) -> Overheads:
    names = ("eager_launch_s", "compiled_launch_s", "step_overhead_s", "launch_log_sd", "known_log_sd")
    for name in names:
        value = found.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
        if not good and not (name == "compiled_launch_s" and value is None and name in found):
            raise FormatError(f"{SHIPPED_OVERHEADS.name}: {name} must be from 0 to below 1, got {value!r}")
    sources = found.get("sources", {})
    if not isinstance(sources, Mapping):
        raise FormatError(f"{SHIPPED_OVERHEADS.name}: sources must be a mapping, got {sources!r}")
    return Overheads(**{name: found[name] for name in names}, sources=tuple(sources))


def compiled_launch(overheads: Overheads, driver_s: float) -> tuple[float, float]:
    """(seconds per launch, log-sd) in compiled mode. Where no run tells, it lies between what the driver takes and what
    eager mode does: the middle in logs, with the two as the ends of a 90 % interval."""
    if overheads.compiled_launch_s is not None:
        return overheads.compiled_launch_s, overheads.launch_log_sd
    eager_s = overheads.eager_launch_s
    if not 0 < driver_s < eager_s:
        return eager_s, overheads.launch_log_sd
    return float(np.sqrt(driver_s * eager_s)), float(np.log(eager_s / driver_s) / (2 * _Z90))


def host_words(overheads: Overheads) -> str:
    """What the shipped overheads say, in one line."""
    factor = float(np.exp(overheads.launch_log_sd))
    known = overheads.compiled_launch_s
    compiled = "not known, taken between the driver's and that" if known is None else f"{1e6 * known:.0f} us"
    return (
        f"eager {1e6 * overheads.eager_launch_s:.0f} us per launch, within a factor of {factor:.1f} (one sd); compiled "
        f"{compiled}; per step {1e3 * overheads.step_overhead_s:.0f} ms; from {_listed(overheads.sources)}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
