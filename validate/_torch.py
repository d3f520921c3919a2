"""What depends on torch's private names: splitting a stage's backward in two, and how a recomputation ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import _StopRecomputationError

__all__ = ["RecomputationDone", "backward_of_inputs", "backward_of_weights"]

RecomputationDone = _StopRecomputationError
"""Raised through a recomputed region when all that backward needs has been made again; not a failure."""


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Iterable[torch.Tensor],
) -> list[dict[str, Any]]:
    """Put the gradients of `inputs` into their `grad` and return what `backward_of_weights` needs later.

    The outputs must own their storage (be clones): they are detached in place.
    """
    _, groups = stage_backward_input(list(outputs), list(gradients), list(inputs), iter(weights))  # type: ignore[arg-type]
    return groups


def backward_of_weights(weights: Iterable[torch.Tensor], groups: list[dict[str, Any]]) -> None:
    """Add the gradients of `weights` to their `grad`."""
    stage_backward_weight(iter(weights), groups)  # type: ignore[arg-type]
