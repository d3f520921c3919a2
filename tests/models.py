"""Small modules that the zoo lacks, as `tests.models:factory`, with dims all distinct."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["mlp", "shifted", "two_towers"]


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


class Shifted(nn.Module):
    """Predicts tokens from those before, shifted by writing into a fresh tensor as T5 of transformers does."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, width)
        self.layers = nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, 30))

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        before = labels.new_zeros(labels.shape)
        before[:, 1:] = labels[:, :-1].clone()
        before[:, 0] = 7
        scores: torch.Tensor = self.layers(self.tokens(before))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def shifted(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Shifted(), (torch.arange(micro_batch * 6).reshape(micro_batch, 6) % 30,)
