"""What depends on torch's private or changing names: splitting a stage's backward in two, how a recomputation ends,
flat collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import _StopRecomputationError

__all__ = ["RecomputationDone", "all_gather", "backward_of_inputs", "backward_of_weights", "reduce_scatter"]

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


def all_gather(output: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
    """Flat tensors of all members of a group, one after the other."""
    _GATHER(output, mine, group=group)


def reduce_scatter(output: torch.Tensor, terms: torch.Tensor, group: Any) -> None:
    """This member's part of the sum over a group of flat tensors."""
    _SCATTER(output, terms, group=group)


_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
