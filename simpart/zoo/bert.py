"""BERT in pre-training: post-LN blocks, masked tokens and next sentence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.blocks import MLP, Attention
from simpart.zoo.dims import BERTDims

__all__ = ["BERT"]

EPSILON = 1e-12


class Block(nn.Module):
    """A post-LN transformer block; every token sees every other."""

    def __init__(self, dims: BERTDims) -> None:
        super().__init__()
        self.attn = Attention(dims.hidden, dims.heads, causal=False)
        self.ln_1 = nn.LayerNorm(dims.hidden, eps=EPSILON)
        self.mlp = MLP(dims.hidden, dims.ffn)
        self.ln_2 = nn.LayerNorm(dims.hidden, eps=EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(x + self.attn(x))
        x = self.ln_2(x + self.mlp(x))
        return x


class BERT(nn.Module):
    """`forward(tokens, segments, positions, labels, follows)` adds up the mean cross-entropies of the tokens at
    `positions` and of whether the second sentence follows the first."""

    def __init__(self, dims: BERTDims) -> None:
        super().__init__()
        self.words = nn.Embedding(dims.vocab, dims.hidden)
        self.positions = nn.Embedding(dims.seq, dims.hidden)
        self.segments = nn.Embedding(2, dims.hidden)
        self.ln = nn.LayerNorm(dims.hidden, eps=EPSILON)
        self.layers = nn.ModuleList(Block(dims) for _ in range(dims.layers))
        self.pooler = nn.Linear(dims.hidden, dims.hidden)
        self.follows = nn.Linear(dims.hidden, 2)
        self.transform = nn.Linear(dims.hidden, dims.hidden)
        self.transform_ln = nn.LayerNorm(dims.hidden, eps=EPSILON)
        self.head = nn.Linear(dims.hidden, dims.vocab)
        for table in (self.words, self.positions, self.segments):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(
        self,
        tokens: torch.Tensor,
        segments: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        follows: torch.Tensor,
    ) -> torch.Tensor:
        order = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.ln(self.words(tokens) + self.positions(order) + self.segments(segments))
        for block in self.layers:
            x = block(x)
        masked = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        logits = self.head(self.transform_ln(functional.gelu(self.transform(masked))))
        next_sentence = self.follows(torch.tanh(self.pooler(x[:, 0])))
        words = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return words + functional.cross_entropy(next_sentence, follows)
