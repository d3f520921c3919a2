"""Example inputs of the zoo's models: zeros, or random from a generator; always valid indices."""

from __future__ import annotations

import torch

from simpart.zoo.dims import (
    BERTDims,
    GPTDims,
    LlamaDims,
    LSTMDims,
    MoEDims,
    ResNetDims,
    T5Dims,
    TwoTowerDims,
    UNetDims,
    WideResNetDims,
)

__all__ = ["images", "masked_tokens", "pairs", "tokens", "translations"]


def integers(bound: int, shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return torch.zeros(shape, dtype=torch.long)
    return torch.randint(bound, shape, generator=generator)


def reals(shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    return torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)


def tokens(
    dims: GPTDims | LlamaDims | MoEDims | LSTMDims, micro_batch: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (b, seq) and the labels to predict at each (b, seq)."""
    text = integers(dims.vocab, (micro_batch, dims.seq + 1), generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def masked_tokens(dims: BERTDims, micro_batch: int, generator: torch.Generator | None) -> tuple[torch.Tensor, ...]:
    """Tokens and segments (b, seq); positions to predict, all distinct, and their labels (b, masked); whether the
    second sentence follows (b,)."""
    text = integers(dims.vocab, (micro_batch, dims.seq), generator)
    segments = integers(2, (micro_batch, dims.seq), generator).sort(dim=1).values
    order = reals((micro_batch, dims.seq), generator).argsort(dim=1)
    positions = integers(1, (micro_batch, dims.masked), None) if generator is None else order[:, : dims.masked]
    labels = integers(dims.vocab, (micro_batch, dims.masked), generator)
    return text, segments, positions.contiguous(), labels, integers(2, (micro_batch,), generator)


def translations(dims: T5Dims, micro_batch: int, generator: torch.Generator | None) -> tuple[torch.Tensor, ...]:
    """Tokens (b, seq) to read; per position of the answer the token before it and the one to predict (b, target)."""
    answer = integers(dims.vocab, (micro_batch, dims.target + 1), generator)
    read = integers(dims.vocab, (micro_batch, dims.seq), generator)
    return read, answer[:, :-1].contiguous(), answer[:, 1:].contiguous()


def images(
    dims: ResNetDims | WideResNetDims | UNetDims, micro_batch: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (b, channels, image, image) in the default dtype; labels (b,) or, for a U-Net, (b, image, image)."""
    channels, labels = (dims.channels, (dims.image, dims.image)) if isinstance(dims, UNetDims) else (3, ())
    pixels = reals((micro_batch, channels, dims.image, dims.image), generator)
    return pixels, integers(dims.classes, (micro_batch, *labels), generator)


def pairs(dims: TwoTowerDims, micro_batch: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (b, 3, image, image) and the text of each image (b, seq)."""
    pixels = reals((micro_batch, 3, dims.image, dims.image), generator)
    return pixels, integers(dims.vocab, (micro_batch, dims.seq), generator)
