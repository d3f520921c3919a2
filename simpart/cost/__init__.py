"""What cost models see and say: tables of local signatures in, estimates with their uncertainty out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from simpart.errors import UserError
from simpart.hardware import Cluster, Device
from simpart.kernels import Mode

__all__ = [
    "PROVENANCES", "Collective", "CollectiveKind", "CollectiveTable", "CommModel", "ComputeModel", "Costs", "Estimate",
    "Signature", "SignatureTable", "TensorForm", "checked", "unique",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"]

PROVENANCES = ("measured", "interpolated", "extrapolated", "analytic")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Local shape, dtype and layout of one tensor of a kernel: dim `order` when dense, else `strides` (elements)."""

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """All that the cost of one kernel depends on, on one device. `arguments` is the call as in `graph.Kernel`, sizes
    filled in.

    A fused kernel lists its `members`; its target is "fused" and its tensors are those read and written outside.
    """

    target: str
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    arguments: str = ""
    mode: Mode = "eager"
    view: bool = False
    members: tuple[Signature, ...] = ()


@dataclass(frozen=True, slots=True)
class SignatureTable:
    """Deduplicated signatures; row i of an Estimate is signature i."""

    signatures: tuple[Signature, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective or transfer. `bytes` as nccl-tests count them: all_reduce the buffer, all_gather the gathered
    output, reduce_scatter the full input, p2p the message. `ranks` are device indices of one group of it;
    `concurrent` groups share the level at once.
    """

    kind: CollectiveKind
    bytes: int
    ranks: tuple[int, ...]
    concurrent: int = 1
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Row i of an Estimate is collective i."""

    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds per row with multiplicative errors: log t ~ N(log mean, shared² + own²).

    The shared part is one latent factor per (device, family), the same for all rows of the family and all plans.
    `family` indexes `families`; `provenance` indexes `PROVENANCES`.
    """

    mean_s: Floats
    family: Ints
    families: tuple[str, ...]
    shared_log_sd: Floats
    own_log_sd: Floats
    provenance: Ints


class ComputeModel(Protocol):
    """Predicts kernel times from a table of signatures and a device; a data sheet must be enough."""

    def estimate(self, table: SignatureTable, device: Device) -> Estimate: ...


class CommModel(Protocol):
    """Predicts collective and transfer times from a table of collectives and a cluster."""

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The two models a Problem prices with, and overheads per device name that profiles of it have shown.

    `step_overhead_s` is fixed time per training step; `action_overhead_s` per pipeline action (launching a stage's
    forward or backward). `eager_launch_s` and `compiled_launch_s` are what the host takes to launch one kernel or
    collective in each mode, sure to `launch_log_sd` and `compiled_launch_log_sd`: an action on a GPU takes at least as
    long as its launches.
    `overlap_slowdown`: by which part kernels run slower while their device sends or receives besides (0.1: 10 %); 0
    leaves it out. `step_log_sd`:
    by how much whole steps differ from what right kernels and collectives would add up to (software, caches, clocks
    under load), one factor for all plans on the same devices.
    """

    compute: ComputeModel
    communication: CommModel
    step_overhead_s: float = 0.0
    action_overhead_s: float = 0.0
    eager_launch_s: float = 0.0
    compiled_launch_s: float = 0.0
    launch_log_sd: float = 0.0
    compiled_launch_log_sd: float = 0.0
    overlap_slowdown: float = 0.0
    step_log_sd: float = 0.0
    description: str = ""

    def launch_s(self, mode: Mode, device: Device) -> float:
        """Host seconds per launch of an action on a device; kernels of a CPU are run by the thread that calls them."""
        if device.kind != "gpu":
            return 0.0
        return self.eager_launch_s if mode == "eager" else self.compiled_launch_s

    def launch_spread(self, mode: Mode) -> float:
        """Log-sd of the seconds per launch in a mode."""
        return self.launch_log_sd if mode == "eager" else self.compiled_launch_log_sd


def checked(estimate: Estimate, asked: Sequence[Signature | Collective]) -> Estimate:
    """The estimate, if it is one time for each thing asked, finite and at least 0; else raises UserError with the
    first that is not. Holes and NaN of a cost model would otherwise turn up as plans."""
    mean_s = estimate.mean_s
    if mean_s.shape != (len(asked),):
        raise UserError(f"a cost model answers {mean_s.shape} times for {len(asked)} rows; it must give one for each")
    good = np.isfinite(mean_s) & (mean_s >= 0)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        thing = asked[row]
        name = thing.target if isinstance(thing, Signature) else f"{thing.kind} of {thing.bytes} bytes"
        raise UserError(
            f"a cost model answers {mean_s[row]} s for {name} ({int((~good).sum())} of {len(asked)} rows are bad); "
            "times are finite and at least 0: mend the model"
        )
    return estimate


def unique(signatures: Sequence[Signature]) -> tuple[SignatureTable, Ints]:
    """The distinct signatures, in order of first occurrence, and for each given one its row."""
    rows: dict[Signature, int] = {}
    index = np.array([rows.setdefault(s, len(rows)) for s in signatures], dtype=np.int64)
    return SignatureTable(tuple(rows)), index
