"""A planning problem: what to train, on what, priced how, and which plans may be considered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simpart.cost import Costs
from simpart.cost.pricing import Amount, OpPrices, price_ops, price_update
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import Cluster, Device
from simpart.kernels import Mode
from simpart.training import TrainingSpec

__all__ = ["Problem", "Space", "check_global_batch"]


MOST_SAMPLES = 2**20
"""More than any optimizer step takes: a slip of the pen must not fill the memory."""


def check_global_batch(global_batch: int) -> None:
    """Raise UserError for what is no number of samples of a step."""
    if not 1 <= global_batch <= MOST_SAMPLES:
        raise UserError(f"global batch must be from 1 to {MOST_SAMPLES} samples, got {global_batch}; try 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The plans a search may propose, so that searchers can be compared on equal terms."""

    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    recompute: tuple[str, ...] = ("none", "full")
    max_stages: int | None = None
    min_stages: int = 1
    max_micro_batches: int | None = None
    uneven_replicas: bool = False
    use_fewer_devices: bool = False
    tp: tuple[int, ...] = (1,)
    """Tensor-parallel degrees; of the searchers here, grid and piper propose others than 1."""
    zero: tuple[int, ...] = (0,)
    """ZeRO stages; of the searchers here, grid divides state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Graph, recipe, cluster, costs and global batch (samples per optimizer step). Prices are asked once and kept."""

    graph: Graph
    training: TrainingSpec
    cluster: Cluster
    costs: Costs
    global_batch: int
    space: Space = Space()
    mode: Mode = "eager"
    _prices: dict[tuple[str, int], OpPrices] = field(default_factory=dict, init=False, repr=False)
    _updates: dict[str, tuple[dict[int, int], Amount, Amount]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch)

    def prices(self, micro_batches: Sequence[int], device: Device) -> dict[int, OpPrices]:
        """Op prices at each micro-batch size on one kind of device; sizes not yet known are asked for together."""
        missing = [b for b in micro_batches if (device.name, b) not in self._prices]
        if missing:
            fresh = price_ops(self.graph, missing, self.costs.compute, device, self.mode)
            self._prices.update({(device.name, b): price for b, price in fresh.items()})
        return {b: self._prices[device.name, b] for b in micro_batches}

    def update_prices(self, device: Device) -> tuple[dict[int, int], Amount, Amount]:
        """See `pricing.price_update`."""
        if device.name not in self._updates:
            self._updates[device.name] = price_update(self.graph, self.training, self.costs.compute, device)
        return self._updates[device.name]
