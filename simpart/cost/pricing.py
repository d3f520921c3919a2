"""Prices of a graph's ops: the cost model asked once per device, its answer as dense arrays over op classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpart.cost import PROVENANCES, ComputeModel, Estimate, Signature, TensorForm, checked, unique
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.kernels import Mode
from simpart.kernels.split_backward import weight_share_of_classes
from simpart.training import OPTIMIZER_STATES, TrainingSpec

__all__ = ["Amount", "OpPrices", "price_ops", "price_update", "sum_rows"]

Table = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Seconds of several things, row by row, told apart: `by_family[i, f]` sums to `seconds[i]`, and so does
    `by_provenance[i, p]`.

    `own_variance[i]` is the variance of row i from errors of its own kernels, in s²; errors shared within a family
    are in `shared_log_sd[i, f]`, the largest of row i's kernels. `launches[i]` counts the kernels of row i; views take
    no time and are none.
    """

    seconds: Floats
    by_family: Table
    by_provenance: Table
    own_variance: Floats
    families: tuple[str, ...]
    shared_log_sd: Table
    launches: Floats

    def total(self, weights: Floats) -> Amount:
        """One row: the sum of all rows, each taken `weights` times."""
        w = weights[None, :]
        return Amount(
            seconds=w @ self.seconds,
            by_family=w @ self.by_family,
            by_provenance=w @ self.by_provenance,
            own_variance=w**2 @ self.own_variance,
            families=self.families,
            shared_log_sd=self.shared_log_sd[weights != 0].max(axis=0, initial=0.0)[None, :],
            launches=w @ self.launches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrices:
    """Forward and backward of each op class of `graph.at(micro_batch)` for one micro-batch on one device; `inputs` and
    `weights` are the two parts of a split backward."""

    micro_batch: int
    forward: Amount
    backward: Amount
    inputs: Amount
    weights: Amount


def price_ops(
    graph: Graph, micro_batches: Iterable[int], compute: ComputeModel, device: Device, mode: Mode
) -> dict[int, OpPrices]:
    """Price every op class at several micro-batch sizes with one question to the model."""
    sizes = list(dict.fromkeys(micro_batches))
    per_size = [signatures_of(graph.at(b), b, mode) for b in sizes]
    table, rows = unique([signature for signatures in per_size for signature in signatures])
    estimate = checked(compute.estimate(table, device), table.signatures)
    prices, start = {}, 0
    for b, signatures in zip(sizes, per_size, strict=True):
        prices[b] = _collect(graph.at(b), b, estimate, rows[start : start + len(signatures)])
        start += len(signatures)
    return prices


def _collect(graph: Graph, micro_batch: int, estimate: Estimate, rows: npt.NDArray[np.int64]) -> OpPrices:
    base = np.repeat(
        np.cumsum([0] + [len(t.ops) for t in graph.templates])[:-1], [len(t.kernels) for t in graph.templates]
    )
    owner = base + np.array([k.op for k in graph.kernel_classes], dtype=np.int64)
    forward = np.array([k.phase == "F" for k in graph.kernel_classes], dtype=bool)
    n = len(graph.op_classes)
    share, kept = weight_share_of_classes(graph), _kept(graph)
    backward = rows[~forward], owner[~forward], n
    return OpPrices(
        micro_batch=micro_batch,
        forward=sum_rows(estimate, rows[forward], owner[forward], n, kept[forward]),
        backward=sum_rows(estimate, *backward, kept[~forward]),
        inputs=sum_rows(estimate, *backward, (1.0 - share[~forward]) * kept[~forward]),
        weights=sum_rows(estimate, *backward, share[~forward] * kept[~forward]),
    )


def _kept(graph: Graph) -> Floats:
    """Which part of its template's calls run each kernel class: some omit one, and all together take what they run."""
    base = np.cumsum([0] + [len(t.kernels) for t in graph.templates])
    calls, found = np.zeros(len(graph.templates)), np.zeros(base[-1])
    for call in graph.calls:
        calls[call.template] += 1
        found[[base[call.template] + k for k in call.omits]] += 1
    each = np.maximum(np.repeat(calls, np.diff(base)), 1)
    kept: Floats = 1.0 - found / each
    return kept


def sum_rows(estimate: Estimate, rows: Ints, owner: Ints, n: int, part: Floats | None = None) -> Amount:
    """Estimates `rows` (with repetitions) added up by owner 0 … n-1; of each only a `part`, if given."""
    mean = estimate.mean_s[rows] if part is None else estimate.mean_s[rows] * part
    own = (mean * estimate.own_log_sd[rows]) ** 2
    by_family = np.zeros((n, len(estimate.families)))
    np.add.at(by_family, (owner, estimate.family[rows]), mean)
    by_provenance = np.zeros((n, len(PROVENANCES)))
    np.add.at(by_provenance, (owner, estimate.provenance[rows]), mean)
    shared = np.zeros_like(by_family)
    np.maximum.at(shared, (owner, estimate.family[rows]), estimate.shared_log_sd[rows] * (mean > 0))
    launched = (estimate.mean_s[rows] > 0) * (1.0 if part is None else part)
    return Amount(
        seconds=np.bincount(owner, weights=mean, minlength=n).astype(np.float64),
        by_family=by_family,
        by_provenance=by_provenance,
        own_variance=np.bincount(owner, weights=own, minlength=n).astype(np.float64),
        families=estimate.families,
        shared_log_sd=shared,
        launches=np.bincount(owner, weights=launched, minlength=n).astype(np.float64),
    )


def update_signature(training: TrainingSpec, shape: tuple[int, ...], dtype: str) -> Signature:
    """The optimizer's update of one parameter tensor, as cost models see it: parameter, gradient, states in;
    parameter, states out."""
    parameter = TensorForm(shape, dtype, tuple(range(len(shape))))
    gradient = TensorForm(shape, training.gradient_dtype or dtype, parameter.order)
    state = TensorForm(shape, training.state_dtype, parameter.order)
    states = (state,) * OPTIMIZER_STATES[training.optimizer]
    return Signature(f"simpart.optimizer.{training.optimizer}", (parameter, gradient, *states), (parameter, *states))


def accumulate_signature(training: TrainingSpec, shape: tuple[int, ...], dtype: str) -> Signature:
    """Adding one micro-batch's gradient of a parameter to the accumulated one, in place."""
    gradient = TensorForm(shape, training.gradient_dtype or dtype, tuple(range(len(shape))))
    return Signature("simpart.accumulate", (gradient, TensorForm(shape, dtype, gradient.order)), (gradient,))


def price_update(
    graph: Graph, training: TrainingSpec, compute: ComputeModel, device: Device
) -> tuple[dict[int, int], Amount, Amount]:
    """(row of each parameter's value number, update per row, accumulation per row); equal shapes share a row."""
    parameters = [(v, s) for v, s in graph.parameters.items() if s.trainable and training.trains(s.name)]
    shapes = [(source.spec.shape(1), source.spec.dtype) for _, source in parameters]
    distinct = list(dict.fromkeys(shapes))
    row = {shape: i for i, shape in enumerate(distinct)}
    signatures = [update_signature(training, *shape) for shape in distinct]
    signatures += [accumulate_signature(training, *shape) for shape in distinct]
    table, rows = unique(signatures)
    estimate = checked(compute.estimate(table, device), table.signatures)
    order = np.arange(len(distinct))
    update = sum_rows(estimate, rows[: len(distinct)], order, len(distinct))
    accumulate = sum_rows(estimate, rows[len(distinct) :], order, len(distinct))
    return {value: row[shape] for (value, _), shape in zip(parameters, shapes, strict=True)}, update, accumulate
