"""Example inputs of the zoo's models: zeros, or random from a generator; always valid indices."""

from __future__ import annotations

import torch

from simpart.zoo.dims import GPTDims, LlamaDims, ResNetDims, UNetDims

__all__ = ["images", "tokens"]


def integers(bound: int, shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return torch.zeros(shape, dtype=torch.long)
    return torch.randint(bound, shape, generator=generator)


def tokens(
    dims: GPTDims | LlamaDims, micro_batch: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (b, seq) and the labels to predict at each (b, seq)."""
    text = integers(dims.vocab, (micro_batch, dims.seq + 1), generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def images(
    dims: ResNetDims | UNetDims, micro_batch: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (b, channels, image, image) in the default dtype; labels (b,) or, for a U-Net, (b, image, image)."""
    channels, labels = (dims.channels, (dims.image, dims.image)) if isinstance(dims, UNetDims) else (3, ())
    shape = (micro_batch, channels, dims.image, dims.image)
    pixels = torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)
    return pixels, integers(dims.classes, (micro_batch, *labels), generator)
