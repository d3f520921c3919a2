"""A language model of stacked LSTM layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import LSTMDims

__all__ = ["LSTM"]


class LSTM(nn.Module):
    """`forward(tokens, labels)` is the mean cross-entropy. Each layer is an `nn.LSTM` of its own, so that stages can
    begin between layers."""

    def __init__(self, dims: LSTMDims) -> None:
        super().__init__()
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(nn.LSTM(dims.hidden, dims.hidden, batch_first=True) for _ in range(dims.layers))
        self.proj = nn.Linear(dims.hidden, dims.vocab)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return functional.cross_entropy(self.proj(x).flatten(0, 1), labels.flatten())
