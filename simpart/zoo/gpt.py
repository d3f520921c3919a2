"""GPT with learned positions and pre-LN blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.blocks import Block
from simpart.zoo.dims import GPTDims

__all__ = ["GPT"]


class GPT(nn.Module):
    """`forward(tokens, labels)` is the mean cross-entropy."""

    def __init__(self, dims: GPTDims) -> None:
        super().__init__()
        self.wte = nn.Embedding(dims.vocab, dims.hidden)
        self.wpe = nn.Embedding(dims.seq, dims.hidden)
        self.dropout = nn.Dropout(dims.dropout) if dims.dropout else nn.Identity()
        self.h = nn.ModuleList(
            Block(dims.hidden, dims.heads, causal=True, dropout=dims.dropout, eager=dims.eager)
            for _ in range(dims.layers)
        )
        self.ln_f = nn.LayerNorm(dims.hidden)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        if dims.tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
