"""Roofline: a kernel takes as long as its arithmetic or its memory traffic, over a utilisation by family, and a launch.

Works from a data sheet alone, for any device. Reference: Williams, Waterman & Patterson, "Roofline" (CACM 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simpart.cost import PROVENANCES, Estimate, Signature, SignatureTable, TensorForm
from simpart.cost.signatures import total_bytes
from simpart.hardware import Device
from simpart.kernels.flops import elementwise_ops, kernel_flops
from simpart.kernels.ops import FAMILIES, base_name, family_of

__all__ = ["ASSUMPTIONS", "Assumption", "Roofline", "physical_bound_s", "signature_family", "work_of"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Share of the roofline that a family reaches, and how far off that may be: the log-sd of the error that all
    kernels of the family share on a device, and of the one that each has on its own."""

    utilisation: float
    shared_log_sd: float
    own_log_sd: float


ASSUMPTIONS: Mapping[str, Assumption] = {
    # Assumptions, set near what published kernel timings of A100 and H100 show: large matrix products reach 72 to 85 %
    # of their peak, flash attention 50 to 60 %, additions 90 % of the memory bandwidth, norms 35 to 39 %.
    "gemm": Assumption(0.75, 0.20, 0.20),
    "bgemm": Assumption(0.6, 0.30, 0.30),
    "conv": Assumption(0.5, 0.35, 0.35),
    "attention": Assumption(0.5, 0.30, 0.25),
    "rnn": Assumption(0.3, 0.45, 0.35),
    "pointwise": Assumption(0.85, 0.20, 0.25),
    "copy": Assumption(0.75, 0.25, 0.30),
    "fill": Assumption(0.85, 0.25, 0.30),
    "reduction": Assumption(0.6, 0.30, 0.35),
    "norm": Assumption(0.4, 0.30, 0.30),
    "softmax": Assumption(0.5, 0.30, 0.30),
    "loss": Assumption(0.4, 0.40, 0.40),
    "pool": Assumption(0.5, 0.35, 0.35),
    "embedding": Assumption(0.4, 0.40, 0.40),
    "random": Assumption(0.5, 0.35, 0.35),
    # AdamW as torch's default runs it makes eight passes: 20 elements moved for each 7 that must be.
    "optimizer": Assumption(0.3, 0.40, 0.25),
    "view": Assumption(1.0, 0.0, 0.0),
    "other": Assumption(0.4, 0.50, 0.50),
}

# These read no more of their first tensor than they write: rows of a table, elements of a matrix.
_PICKING = frozenset({"embedding", "index", "index_select", "gather", "take", "take_along_dim", "_unsafe_index"})


@dataclass(frozen=True, slots=True)
class Roofline:
    """A ComputeModel with nothing to learn."""

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        """Seconds of each signature; a view costs nothing, and nothing is faster than `physical_bound_s`."""
        rows = table.signatures
        families = [signature_family(s) for s in rows]
        family = np.array([FAMILIES.index(name) for name in families], dtype=np.int64)
        assumed = [ASSUMPTIONS.get(name, ASSUMPTIONS["other"]) for name in families]
        bound = np.array([physical_bound_s(s, device) for s in rows], dtype=np.float64)
        seconds = bound / np.array([a.utilisation for a in assumed], dtype=np.float64)
        if device.launch_floor_s is None:
            seconds = seconds + device.kernel_launch_s
        else:  # the host runs ahead of the device, until kernels are shorter than launches
            seconds = np.maximum(seconds + device.launch_floor_s, device.kernel_launch_s)
        view = np.array([s.view for s in rows], dtype=bool)
        return Estimate(
            mean_s=np.where(view, 0.0, seconds),
            family=family,
            families=FAMILIES,
            shared_log_sd=np.array([a.shared_log_sd for a in assumed], dtype=np.float64),
            own_log_sd=np.array([a.own_log_sd for a in assumed], dtype=np.float64),
            provenance=np.full(len(rows), PROVENANCES.index("analytic"), dtype=np.int64),
        )


def signature_family(signature: Signature) -> str:
    """Cost family of a signature; a fused one is a reduction when a member reduces, else pointwise."""
    if signature.view:
        return "view"
    families = {family_of(part.target) for part in signature.members} - {"view", "copy", "fill"}
    return "reduction" if families & {"reduction", "norm", "softmax"} else family_of(signature.target)


def work_of(signature: Signature) -> tuple[float, float, float]:
    """(FLOPs of matrix products, operations on elements, bytes that must move) of one run."""
    parts = signature.members or (signature,)
    flops = sum(kernel_flops(p.target, _shapes(p.inputs), _shapes(p.outputs), p.arguments) for p in parts)
    worked = [p for p in parts if not p.view and family_of(p.target) != "loss"]  # a loss picks elements, see _moved
    elements = sum(elementwise_ops(p.target, _shapes(p.inputs), _shapes(p.outputs)) for p in worked)
    return float(flops), float(elements), float(_moved(signature))


def physical_bound_s(signature: Signature, device: Device) -> float:
    """The least time that peak rates and memory bandwidth of a data sheet allow, for the full square of attention also
    where it is causal, and for the whole input of a convolution also where its stride leaves some of it out."""
    if signature.view:
        return 0.0
    flops, elements, moved = work_of(signature)
    vector = device.vector_flops_per_s or device.peak("float32")
    return max(flops / device.peak(_dtype(signature)), elements / vector, moved / device.memory_bytes_per_s)


def _moved(signature: Signature) -> int:
    written = total_bytes(signature.outputs)
    if base_name(signature.target) in _PICKING:
        return 2 * written + total_bytes(signature.inputs[1:])
    read = [total_bytes((form,)) for form in signature.inputs]
    if base_name(signature.target).startswith("nll_loss"):  # reads one logit per label, backward none
        return written + sum(read) - max(read, default=0)
    return written + sum(read)


def _shapes(forms: tuple[TensorForm, ...]) -> list[tuple[int, ...]]:
    return [form.shape for form in forms]


def _dtype(signature: Signature) -> str:
    """The dtype that the arithmetic runs in: that of the first input with a floating one."""
    return next((f.dtype for f in signature.inputs if f.dtype.startswith(("float", "bfloat"))), "float32")
