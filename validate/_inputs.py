"""Inputs of every micro-batch of a step, the same on all ranks, and the part of them that a replica reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from simpart.errors import UnsupportedError
from simpart.model_spec import UserFactory
from simpart.plan.format import PlanFile
from simpart.validate._boundary import batch_dim
from simpart.validate._mesh_share import MeshShare
from simpart.validate._rank import Share

__all__ = ["Inputs"]


class Inputs:
    """Draws what the model reads, from `seed`, and divides it by samples.

    The factory's `inputs(micro_batch, generator)` draws if it has one; else its example inputs serve every micro-batch.
    Raises UnsupportedError for an input that has no one dim of samples where replicas must divide it.
    """

    def __init__(
        self, file: PlanFile, factory: Callable[[int], Any], share: Share | MeshShare, seed: int, precision: str
    ) -> None:
        batch = file.plan.batch
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, precision))
        try:
            if isinstance(factory, UserFactory) and not factory.draws_inputs:
                self.whole = [drawn(factory, batch.micro_batch, seed, 0)] * batch.micro_batches
            else:
                self.whole = [drawn(factory, batch.micro_batch, seed, m) for m in range(batch.micro_batches)]
        finally:
            torch.set_default_dtype(before)
        specs = {int(s.name): s.spec for _, s in file.graph.all_sources() if s.kind == "input"}
        known = any(spec.batched for spec in specs.values())
        self.dims: list[tuple[int, int] | None] = []
        for i, value in enumerate(self.whole[0]):
            if not isinstance(value, torch.Tensor):
                self.dims.append(None)
            elif known:
                spec = specs.get(i)
                self.dims.append(batch_dim(spec) if spec is not None and spec.batched else None)
                divided = any(len(sizes) > 1 for sizes in batch.sizes)
                if self.dims[-1] is None and spec is not None and spec.batched and divided:
                    raise UnsupportedError(f"input {i} cannot be divided among replicas; give it one dim of samples")
            else:  # a graph of micro-batch 1 alone does not say which dims grow
                self.dims.append(grown_dim(tuple(value.shape), share.input_shapes[i], batch.micro_batch))
        sizes = batch.sizes[share.group]
        self.kept = [
            [_on(value, share.device) for value in self.part(m, sizes, share.replica)]
            for m in range(batch.micro_batches)
        ]

    def mine(self, micro_batch: int) -> Sequence[Any]:
        """What this rank reads, on its device."""
        return self.kept[micro_batch]

    def part(self, micro_batch: int, sizes: Sequence[int], index: int) -> list[Any]:
        """The inputs of replica `index` when the samples of a micro-batch are divided as `sizes`."""
        start, count = sum(sizes[:index]), sizes[index]
        return [
            value if dim is None else value.narrow(dim[0], dim[1] * start, dim[1] * count)
            for value, dim in zip(self.whole[micro_batch], self.dims, strict=True)
        ]

    def parts(self, micro_batch: int, sizes: Sequence[int]) -> list[list[Any]]:
        return [self.part(micro_batch, sizes, i) for i in range(len(sizes))]

    def keep_own_only(self) -> None:
        """Let go of what other replicas read."""
        self.whole = []

    def tensors(self) -> list[torch.Tensor]:
        return [value for row in self.kept for value in row if isinstance(value, torch.Tensor)]


def drawn(factory: Any, micro_batch: int, seed: int, number: int) -> list[Any]:
    """All inputs of the micro-batch `number`, flat."""
    torch.manual_seed(seed * 1_000_003 + number)
    if hasattr(factory, "inputs"):
        made = factory.inputs(micro_batch, torch.Generator().manual_seed(seed * 1_000_003 + number))
    else:
        made = factory(micro_batch)[1]
    return list(_pytree.tree_leaves(made))


def grown_dim(whole: Sequence[int], part: Sequence[int], micro_batch: int) -> tuple[int, int] | None:
    """(dim, elements per sample) in which the inputs of a whole micro-batch are larger than those of one sample."""
    differing = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if not differing:
        return None
    if len(differing) > 1 or whole[differing[0]] % micro_batch:
        raise UnsupportedError(f"an input of shape {list(whole)} cannot be divided into samples of shape {list(part)}")
    return differing[0], whole[differing[0]] // micro_batch


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True).contiguous() if isinstance(value, torch.Tensor) else value
