"""Stages of a chain of blocks, and the costs of all of them: what planners choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from simpart.searchers._inputs import costs_array

__all__ = ["ChainStage", "StageCosts", "check_costs", "choices_at", "later_stages_allowed"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """Blocks [start, end) on `replicas` devices."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Costs of every possible stage, in arrays (n, n + 1, K): [i, j, k] is blocks [i, j) on `replicas[k]` devices.

    `replicas` ascend. Entries with j <= i are ignored. A stage fits when `static_bytes + in_flight * stash_bytes <
    limit_bytes` (strictly), where in_flight is the number of micro-batches (gpipe) or at most 1 + the number of later
    stages (1f1b). On unequal devices, which stages take in their order, costs depend on the place: `places[k, d]` says
    whether choice k is for a stage that has d devices left, its own included. The last stage ends at the last device.
    """

    replicas: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    transfer_s: Floats  # added to forward and to backward
    allreduce_s: Floats
    static_bytes: Floats
    stash_bytes: Floats  # per micro-batch in flight, per device
    limit_bytes: float
    micro_batches: int
    allowed: npt.NDArray[np.bool_]  # False where batch or replica rules forbid the stage
    in_flight: Literal["gpipe", "1f1b"] = "gpipe"
    places: Bools | None = None
    tensor: tuple[int, ...] | None = None  # devices that split the kernels of a replica, by choice; None: 1
    update_bytes: Floats | None = None  # needed at least: while parameters are updated, nothing is in flight

    @property
    def blocks(self) -> int:
        """Length n of the chain."""
        return int(self.forward_s.shape[0])

    @property
    def counts(self) -> tuple[int, ...]:
        """The different replica counts, ascending."""
        return tuple(dict.fromkeys(self.replicas))

    def usable(self, devices: int, left: int) -> list[int]:
        """Choices of a stage on so many devices where `left` are left, its own included."""
        return [k for k in choices_at(self.replicas, self.places, left) if self.replicas[k] == devices]

    def entries(self, stages: Sequence[ChainStage]) -> list[tuple[int, int, int]]:
        """Where each stage of a plan stands in the arrays; raises ValueError for one that is not in them."""
        left, found = sum(stage.replicas for stage in stages), []
        for stage in stages:
            k = self.replicas.index(stage.replicas)
            if self.places is not None:
                k = next(
                    (k for k in choices_at(self.replicas, self.places, left) if self.replicas[k] == stage.replicas), -1
                )
                if k < 0:
                    raise ValueError(f"no stage of {stage.replicas} devices where {left} are left")
            found.append((stage.start, stage.end, k))
            left -= stage.replicas
        return found

    def bytes_needed(self, later_stages: int) -> Floats:
        """Device bytes of every stage when `later_stages` stages follow it."""
        count = self.micro_batches if self.in_flight == "gpipe" else min(self.micro_batches, later_stages + 1)
        needed = self.static_bytes + count * self.stash_bytes
        return needed if self.update_bytes is None else np.maximum(needed, self.update_bytes)


def choices_at(replicas: Sequence[int], places: Bools | None, left: int) -> list[int]:
    """Replica choices of a stage that has `left` devices left, its own included."""
    return [k for k, r in enumerate(replicas) if r <= left and (places is None or places[k, left])]


def later_stages_allowed(costs: StageCosts) -> Integers:
    """How many stages may follow each stage before its memory overflows; -1: it never fits, n: any number may."""
    n = costs.blocks
    result = np.full(costs.forward_s.shape, -1, dtype=np.int64)
    fits = costs.allowed & (np.arange(n + 1)[None, :, None] > np.arange(n)[:, None, None])
    for later in range(n if costs.in_flight == "1f1b" else 1):
        fits = fits & (costs.bytes_needed(later) < costs.limit_bytes)
        result[fits] = later
        if later + 1 >= costs.micro_batches:
            break
    # Stash stops growing at `micro_batches` in flight, so what fits with the last count fits with any.
    result[fits] = n
    return result


def check_costs(costs: StageCosts) -> None:
    """Raise UserError for costs of stages that are no numbers or negative; infinite ones cannot be and are no fault."""
    for name in ("forward_s", "backward_s", "transfer_s", "static_bytes", "stash_bytes"):
        values = getattr(costs, name)
        if values.size and not values.min() >= 0:  # entries that are no stages may be anything
            n = costs.blocks
            stages = np.arange(n + 1)[None, :] > np.arange(n)[:, None]
            costs_array(name, np.where(stages[:, :, None], values, 0.0))
