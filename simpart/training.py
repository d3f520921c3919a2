"""The user's training recipe: optimizer, precision, clipping, frozen parameters. Not traced, not chosen by planners."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from simpart.errors import UserError
from simpart.graph.sizes import DTYPE_BYTES

__all__ = ["OPTIMIZER_STATES", "Optimizer", "TrainingSpec"]

Optimizer = Literal["sgd", "momentum", "adam", "adamw"]
OPTIMIZER_STATES: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""State tensors per parameter, each with the parameter's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """How parameters are updated and in which number formats.

    `precision` is that of parameters and activations; `master_weights` keeps a float32 copy of parameters in the
    optimizer. `gradient_dtype` is that in which gradients of micro-batches are accumulated; None means the
    parameter's own. `frozen` holds parameter name patterns (`*` matches any run) that are not trained.
    """

    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    weight_decay: float = 0.0
    epsilon: float = 1e-8
    state_dtype: str = "float32"
    fused: bool = False
    precision: str = "float32"
    master_weights: bool = False
    gradient_dtype: str | None = None
    gradient_clip_norm: float | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATES:
            raise UserError(f"optimizer must be one of {', '.join(OPTIMIZER_STATES)}, got {self.optimizer!r}")
        for name in (self.state_dtype, self.precision, self.gradient_dtype):
            if name is not None and name not in DTYPE_BYTES:
                raise UserError(f"unknown dtype {name!r} in the training recipe; known: {', '.join(DTYPE_BYTES)}")
        if self.gradient_clip_norm is not None and not self.gradient_clip_norm > 0:
            raise UserError(f"gradient_clip_norm must be positive or absent, got {self.gradient_clip_norm}")

    def trains(self, name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def gradient_bytes(self, elements: int, dtype: str) -> int:
        """Bytes of one parameter's accumulated gradient."""
        return elements * DTYPE_BYTES[self.gradient_dtype or dtype]

    def state_bytes(self, elements: int) -> int:
        """Bytes of one parameter's optimizer state, master copy included."""
        state = OPTIMIZER_STATES[self.optimizer] * DTYPE_BYTES[self.state_dtype]
        return elements * (state + (4 if self.master_weights else 0))

    def update_bytes(self, elements: int, dtype: str) -> int:
        """Bytes an update moves at least: gradient read, parameter and each state read and written."""
        states = 2 * self.state_bytes(elements)
        return self.gradient_bytes(elements, dtype) + 2 * elements * DTYPE_BYTES[dtype] + states
