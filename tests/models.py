"""Small modules that the zoo lacks, as `tests.models:factory`, with dims all distinct."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["mlp", "two_towers"]


class MLP(nn.Module):
    """Two linears with a ReLU between; the loss is the mean squared error."""

    def __init__(self, inputs: int = 24, inner: int = 40, outputs: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, inner)
        self.fc2 = nn.Linear(inner, outputs)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error: torch.Tensor = self.fc2(torch.relu(self.fc1(x))) - target
        return error.square().mean()


def mlp(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return MLP(), (torch.zeros(micro_batch, 24), torch.zeros(micro_batch, 16))


class TwoTowers(nn.Module):
    """An image and a text tower, each to a vector; the loss pulls the vectors of a pair together."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, width)
        )
        self.tokens = nn.Embedding(30, 20)
        self.text = nn.Sequential(nn.Linear(20, 28), nn.GELU(), nn.Linear(28, width))

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image = self.image(pixels)
        text = self.text(self.tokens(tokens).mean(dim=1))
        return (1 - functional.cosine_similarity(image, text)).mean()


def two_towers(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return TwoTowers(), (torch.zeros(micro_batch, 3, 8, 8), torch.zeros(micro_batch, 6, dtype=torch.long))
