"""Predicted against measured: a plan is run, its step time and memory are set beside what the simulation said."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpart.errors import UserError
from simpart.plan.format import PlanFile
from simpart.validate._launch import collect, launch, prepare
from simpart.validate._timeline import (
    COMPONENTS,
    Timeline,
    components,
    measured_timelines,
    predicted_timelines,
    trace_of,
)

if TYPE_CHECKING:
    from simpart.simulation import SimResult

__all__ = ["RankReport", "ValidationReport", "report_of", "validate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank. `allocated_bytes` is the most that tensors held at once; `device_bytes` what the process (CPU:
    resident memory) or the device (CUDA: used memory) showed."""

    rank: int
    group: int
    replica: int
    allocated_bytes: int
    device_bytes: int

    def to_json(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("rank", "group", "replica", "allocated_bytes", "device_bytes")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """Measured steps of a plan and, if it was simulated, their prediction. `step_s` is the median; `spread` (slowest
    - fastest) / median.

    `losses` are of every step, warm-up included; `check` holds the largest relative differences from one process;
    `collectives` how many of each `phase kind axis` rank 0 of a sharded plan issued in a step.
    """

    steps: tuple[float, ...]
    ranks: tuple[RankReport, ...]
    losses: tuple[float, ...]
    measured_components: Mapping[str, float]
    measured: Sequence[Timeline]
    predicted: SimResult | None = None
    check: Mapping[str, Any] | None = None
    cuda: bool = False
    collectives: Mapping[str, int] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        return (max(self.steps) - min(self.steps)) / self.step_s

    @property
    def cpu_share(self) -> float | None:
        """Processor time over wall time of forward and backward in the median step: near 1 on a CPU left alone, less
        where other work disturbed the run. None on CUDA."""
        if self.cuda:
            return None
        events = [e for timeline in self.measured for e in timeline if e["kind"] in "FBIW" and "cpu_s" in e]
        wall_s = sum(e["end_s"] - e["start_s"] for e in events)
        return sum(e["cpu_s"] for e in events) / wall_s if wall_s > 0 else None

    @property
    def allocated_bytes(self) -> int:
        return max(rank.allocated_bytes for rank in self.ranks)

    @property
    def device_bytes(self) -> int:
        return max(rank.device_bytes for rank in self.ranks)

    @property
    def error(self) -> float | None:
        """Of the step time, relative to the measured one; positive where the prediction is too long."""
        return None if self.predicted is None else self.predicted.step_s / self.step_s - 1

    @property
    def predicted_allocated_bytes(self) -> int | None:
        return None if self.predicted is None else max(row.allocated_bytes for row in self.predicted.memory)

    @property
    def memory_error(self) -> float | None:
        """Of the most allocated bytes on one rank."""
        predicted = self.predicted_allocated_bytes
        return None if predicted is None else predicted / self.allocated_bytes - 1

    @property
    def components(self) -> dict[str, dict[str, float]]:
        """Seconds per component of the step, measured and, where there is a prediction, predicted."""
        found = {name: {"measured_s": self.measured_components[name]} for name in COMPONENTS}
        if self.predicted is not None:
            predicted = components(predicted_timelines(self.predicted), self.predicted.step_s)
            for name in COMPONENTS:
                found[name]["predicted_s"] = predicted[name]
        return found

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "measured": {
                "step_s": self.step_s,
                "steps": list(self.steps),
                "spread": self.spread,
                "cpu_share": self.cpu_share,
                "allocated_bytes": self.allocated_bytes,
                "peak_bytes": self.device_bytes,
                "ranks": [rank.to_json() for rank in self.ranks],
                "losses": list(self.losses),
            }
        }
        if self.collectives:
            document["measured"]["collectives"] = dict(self.collectives)
        if self.predicted is not None:
            document["predicted"] = {**self.predicted.to_json(), "allocated_bytes": self.predicted_allocated_bytes}
            document["error"] = self.error
            document["memory_error"] = self.memory_error
        document["components"] = self.components
        if self.check is not None:
            document["check"] = dict(self.check)
        return document

    def trace(self) -> dict[str, Any]:
        """Trace of the median step, beside the predicted one."""
        return trace_of(self.measured, [] if self.predicted is None else predicted_timelines(self.predicted))


def report_of(ranks: Sequence[Mapping[str, Any]], predicted: SimResult | None = None) -> ValidationReport:
    """The report of one plan from every rank's results. A step lasts until its slowest rank is done."""
    count = len(ranks[0]["steps"])
    steps = tuple(max(rank["steps"][i]["step_s"] for rank in ranks) for i in range(count))
    middle = sorted(range(count), key=lambda i: steps[i])[count // 2]
    timelines = measured_timelines(ranks, middle)
    checks = [rank["check"] for rank in ranks if "check" in rank]
    worst = (
        {name: max(c[name] for c in checks) for name in ("loss", "gradients", "parameters", "buffers")}
        if checks
        else None
    )
    return ValidationReport(
        steps=steps,
        ranks=tuple(
            RankReport(
                rank=rank["rank"], group=rank["group"], replica=rank["replica"],
                allocated_bytes=rank["memory"]["allocated_bytes"],
                device_bytes=rank["memory"].get("device_bytes", rank["peak_rss_bytes"]),
            )
            for rank in ranks
        ),
        losses=tuple(sum(rank["losses"][i] for rank in ranks) for i in range(len(ranks[0]["losses"]))),
        measured_components=components(timelines, steps[middle]),
        measured=timelines,
        predicted=predicted,
        check=worst,
        cuda=ranks[0]["device"] != "cpu",
        collectives=ranks[0].get("collectives", {}),
    )  # fmt: skip


def validate(
    file: PlanFile,
    *,
    predicted: SimResult | None = None,
    steps: int = 5,
    warmup: int = 2,
    nproc: int | None = None,
    check: bool = False,
    folder: Path | None = None,
    timeout_s: float = 300.0,
    stall_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> ValidationReport:
    """Run a plan on this machine, one process per device of the plan.

    `check` runs in float64 and compares loss, gradients and buffers of one step with one process running the
    unmodified module. `folder` keeps the job and the logs. Raises UnsupportedError for a plan that cannot be run,
    RunFailed when a process fails.
    """
    ranks = file.plan.device_count
    if nproc is not None and nproc != ranks:
        raise UserError(
            f"the plan uses {ranks} devices, so it runs with {ranks} processes, got nproc={nproc}; leave "
            f"--nproc out or plan again"
        )
    with _folder(folder) as place:
        prepare(place, [file], steps=steps, warmup=warmup, check=check, timeout_s=timeout_s, stall_s=stall_s)
        launch(place, ranks, timeout_s=timeout_s, progress=progress)
        return report_of(collect(place)[0], predicted)


@contextlib.contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="simpart-run-") as place:
        yield Path(place)
