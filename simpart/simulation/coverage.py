"""How far a prediction rests on measurements, and which kernels to profile next to be surer of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simpart.cost import PROVENANCES, ComputeModel, Estimate, Signature, SignatureTable, TensorForm
from simpart.errors import UserError
from simpart.hardware import Device
from simpart.lowering import lower
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.program import Program
from simpart.simulation import SimResult, simulate
from simpart.simulation.limits import bottleneck

__all__ = ["MEASURED_LOG_SD", "Coverage", "NextKernel", "beyond_measurements", "parse_share", "profile_next"]

MEASURED_LOG_SD = (0.03, 0.02)
"""Shared and own log-sd of a kernel once it is measured: what repeated profiles of one machine differ by."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextKernel:
    """A kernel worth profiling on `device`: its seconds per step on the busiest group and their share of what is
    priced there, where its price comes from now, and how much of the variance of the step it takes away when measured
    after those before it."""

    signature: Signature
    device: str
    family: str
    seconds: float
    share: float
    provenance: str
    log_sd: float
    removes: float

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.signature.target, "inputs": [form_words(form) for form in self.signature.inputs],
            "outputs": [form_words(form) for form in self.signature.outputs], "device": self.device,
            "family": self.family, "seconds": self.seconds, "share": self.share, "provenance": self.provenance,
            "log_sd": self.log_sd, "removes": self.removes,
        }  # fmt: skip

    def words(self) -> str:
        shapes = ", ".join(form_words(form) for form in self.signature.inputs)
        return f"{self.signature.target}({shapes}) on {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Kernels to profile next, the most useful first, and the step's 90 % interval now and with all of them measured
    at the predicted times."""

    kernels: tuple[NextKernel, ...]
    interval_s: tuple[float, float]
    interval_after_s: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "interval_s": list(self.interval_s),
            "interval_after_s": list(self.interval_after_s),
        }


def beyond_measurements(provenance: Mapping[str, float]) -> float:
    """Share of the priced time that is extrapolated or analytic."""
    return provenance["extrapolated"] + provenance["analytic"]


def parse_share(text: str) -> float:
    """A share from `20%` or `0.2`; raises UserError for what is none.

    >>> parse_share("20%"), parse_share("0.2")
    (0.2, 0.2)
    """
    number = text.strip()
    try:
        share = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"a share must be from 0 to 1 or from 0% to 100%, got {text!r}; try 20%")
    return share


def profile_next(problem: Problem, plan: Plan, count: int) -> Coverage:
    """The `count` kernels of the busiest group whose measurement would narrow the step's interval most.

    Chosen one after the other: errors shared by a family shrink with the part of its time that is measured, so that
    the first kernel of an uncertain family is worth more than the last.
    """
    if count < 1:
        raise UserError(f"at least one kernel must be asked for, got {count}")
    apart = _Apart(problem.costs.compute)
    program = lower(_priced_by(problem, apart), plan)
    rows = _rows_of(program, apart)
    chosen = _chosen(rows, _others_variance(program, rows), count)
    before = simulate(lower(problem, plan))
    after = _with_measured(problem, plan, {(row.signature, row.device) for row in chosen})
    return Coverage(kernels=tuple(chosen), interval_s=before.interval_s, interval_after_s=after.interval_s)


def _with_measured(problem: Problem, plan: Plan, known: Collection[tuple[Signature, str]]) -> SimResult:
    return simulate(lower(_priced_by(problem, _Measured(problem.costs.compute, frozenset(known))), plan))


def _priced_by(problem: Problem, compute: ComputeModel) -> Problem:
    return replace(problem, costs=replace(problem.costs, compute=compute))


@dataclass(slots=True)
class _Apart:
    """A ComputeModel that gives every kernel a family of its own, so that a program tells what each contributes."""

    base: ComputeModel
    found: dict[str, tuple[Signature, str, float, float, int]] = field(default_factory=dict)
    labels: dict[Signature, str] = field(default_factory=dict)

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        plain = self.base.estimate(table, device)
        names = tuple(self.labels.setdefault(s, f"kernel {len(self.labels)}") for s in table.signatures)
        for i, (signature, name) in enumerate(zip(table.signatures, names, strict=True)):
            self.found[f"{device.name}: {name}"] = (
                signature, plain.families[int(plain.family[i])], float(plain.shared_log_sd[i]),
                float(plain.own_log_sd[i]), int(plain.provenance[i]),
            )  # fmt: skip
        return replace(plain, families=names, family=np.arange(len(names)))


@dataclass(frozen=True, slots=True)
class _Measured:
    """A ComputeModel in which some kernels count as measured at what `base` predicts of them."""

    base: ComputeModel
    known: frozenset[tuple[Signature, str]]

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        plain = self.base.estimate(table, device)
        rows = np.array([(s, device.name) in self.known for s in table.signatures], dtype=bool)
        shared, own = MEASURED_LOG_SD
        return replace(
            plain,
            families=(*plain.families, "measured"),
            family=np.where(rows, len(plain.families), plain.family),
            shared_log_sd=np.where(rows, np.minimum(shared, plain.shared_log_sd), plain.shared_log_sd),
            own_log_sd=np.where(rows, np.minimum(own, plain.own_log_sd), plain.own_log_sd),
            provenance=np.where(rows, PROVENANCES.index("measured"), plain.provenance),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """A kernel with its seconds per step on the busiest group, and its spreads."""

    signature: Signature
    device: str
    family: str
    seconds: float
    shared: float
    own: float
    provenance: int


def _class_counts(program: Program) -> Floats:
    """How often each task class runs on the busiest group."""
    topology = program.topology
    tasks = np.flatnonzero(topology.resource == bottleneck(program))
    return np.bincount(topology.task_class[tasks], minlength=len(program.durations.task_s)).astype(np.float64)


def _rows_of(program: Program, apart: _Apart) -> list[_Row]:
    spread = program.spread
    assert spread is not None  # lower gives it
    seconds = _class_counts(program) @ spread.by_factor
    found = []
    for name, total in zip(spread.factors, seconds.tolist(), strict=True):
        if total > 0 and name in apart.found:
            signature, family, shared, own, provenance = apart.found[name]
            found.append(_Row(signature, name.partition(": ")[0], family, total, shared, own, provenance))
    return found


def _others_variance(program: Program, rows: Sequence[_Row]) -> float:
    """Variance of the busiest group's time from everything that is no kernel: collectives, moving bytes."""
    spread = program.spread
    assert spread is not None
    seconds = _class_counts(program) @ spread.by_factor
    kernels = {f"{row.device}: " for row in rows}
    others = [not any(name.startswith(f"{k}kernel ") for k in kernels) for name in spread.factors]
    return float(((seconds * spread.shared_log_sd)[np.array(others, dtype=bool)] ** 2).sum())


def _chosen(rows: Sequence[_Row], rest: float, count: int) -> list[NextKernel]:
    """Greedy: each time the row that takes away most of the variance that is left."""
    shared, own = MEASURED_LOG_SD
    total = sum(row.seconds for row in rows)
    open_s: dict[tuple[str, str], float] = defaultdict(float)
    sd: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        open_s[row.device, row.family] += row.seconds
        sd[row.device, row.family] = max(sd[row.device, row.family], row.shared)
    variance = rest + sum((open_s[k] * sd[k]) ** 2 for k in open_s) + sum((r.seconds * r.own) ** 2 for r in rows)
    measured = PROVENANCES.index("measured")
    left = [row for row in rows if row.provenance != measured]
    found: list[NextKernel] = []

    def gain(row: _Row) -> float:
        key = (row.device, row.family)
        kept = (open_s[key] - row.seconds) * sd[key]
        return float((open_s[key] * sd[key]) ** 2 - kept**2 + row.seconds**2 * (row.own**2 - own**2 - shared**2))

    while left and len(found) < count:
        best = max(left, key=lambda row: (gain(row), row.seconds, row.signature.target))
        found.append(
            NextKernel(
                signature=best.signature,
                device=best.device,
                family=best.family,
                seconds=best.seconds,
                share=best.seconds / total if total else 0.0,
                provenance=PROVENANCES[best.provenance],
                log_sd=float(np.hypot(best.shared, best.own)),
                removes=max(0.0, gain(best)) / variance if variance else 0.0,
            )
        )
        open_s[best.device, best.family] -= best.seconds
        left = [row for row in left if row is not best]
    return found


def form_words(form: TensorForm) -> str:
    """`bfloat16[8, 1024]`."""
    return f"{form.dtype}[{', '.join(map(str, form.shape))}]"
