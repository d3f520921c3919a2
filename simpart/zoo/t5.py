"""T5: an encoder and a decoder with relative positions, without biases."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import T5Dims

__all__ = ["T5"]

BUCKETS = 32
FAR = 128
"""Distances are told apart up to FAR tokens, in BUCKETS steps that grow (Raffel et al., 2020)."""


def buckets(queries: int, keys: int, *, both_ways: bool) -> torch.Tensor:
    """Number of the distance from query to key, (queries, keys): half the buckets one by one, half in growing steps.
    Seen both ways, ahead and behind have half of the buckets each."""
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    count = BUCKETS // 2 if both_ways else BUCKETS
    ahead = (distance > 0).long() * count if both_ways else torch.zeros_like(distance)
    distance = distance.abs() if both_ways else (-distance).clamp(min=0)
    exact = count // 2
    growing = torch.log(distance.clamp(min=1).float() / exact) / math.log(FAR / exact) * (count - exact)
    far = (exact + growing.long()).clamp(max=count - 1)
    return ahead + torch.where(distance < exact, distance, far)


class Attention(nn.Module):
    """Attention of `x` to `memory`; scores are not scaled, `bias` is added to them."""

    def __init__(self, dims: T5Dims) -> None:
        super().__init__()
        inner = dims.heads * dims.size
        self.size = dims.size
        self.q = nn.Linear(dims.hidden, inner, bias=False)
        self.k = nn.Linear(dims.hidden, inner, bias=False)
        self.v = nn.Linear(dims.hidden, inner, bias=False)
        self.o = nn.Linear(inner, dims.hidden, bias=False)
        nn.init.normal_(self.q.weight, std=(dims.hidden * dims.size) ** -0.5)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (
            part.view(part.shape[0], part.shape[1], -1, self.size).transpose(1, 2)
            for part in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = q @ k.transpose(2, 3)
        if bias is not None:
            scores = scores + bias
        y = functional.softmax(scores, dim=-1) @ v
        out: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two linears with a ReLU between."""

    def __init__(self, dims: T5Dims) -> None:
        super().__init__()
        self.wi = nn.Linear(dims.hidden, dims.ffn, bias=False)
        self.wo = nn.Linear(dims.ffn, dims.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wo(functional.relu(self.wi(x)))
        return out


def norm(dims: T5Dims) -> nn.RMSNorm:
    return nn.RMSNorm(dims.hidden, eps=1e-6)


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and MLP."""

    def __init__(self, dims: T5Dims) -> None:
        super().__init__()
        self.norm_1 = norm(dims)
        self.attn = Attention(dims)
        self.norm_2 = norm(dims)
        self.mlp = MLP(dims)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        x = x + self.attn(normed, normed, bias)
        x = x + self.mlp(self.norm_2(x))
        return x


class DecoderBlock(nn.Module):
    """Pre-norm self-attention, attention to the encoder's result, MLP."""

    def __init__(self, dims: T5Dims) -> None:
        super().__init__()
        self.norm_1 = norm(dims)
        self.attn = Attention(dims)
        self.norm_2 = norm(dims)
        self.cross = Attention(dims)
        self.norm_3 = norm(dims)
        self.mlp = MLP(dims)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        x = x + self.attn(normed, normed, bias)
        x = x + self.cross(self.norm_2(x), memory, None)
        x = x + self.mlp(self.norm_3(x))
        return x


class Positions(nn.Module):
    """One number per head and bucket, as a bias (1, heads, length, length); the future is shut off in a decoder."""

    numbers: torch.Tensor

    def __init__(self, dims: T5Dims, length: int, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.table = nn.Embedding(BUCKETS, dims.heads)
        nn.init.normal_(self.table.weight, std=0.02)
        self.register_buffer("numbers", buckets(length, length, both_ways=not decoder), persistent=False)

    def forward(self) -> torch.Tensor:
        bias: torch.Tensor = self.table(self.numbers).permute(2, 0, 1).unsqueeze(0)
        if not self.decoder:
            return bias
        order = torch.arange(self.numbers.shape[0], device=self.numbers.device)
        return bias.masked_fill(order[None, :] > order[:, None], -math.inf)


class T5(nn.Module):
    """`forward(tokens, previous, labels)` is the mean cross-entropy of each label given the tokens and what precedes
    it."""

    def __init__(self, dims: T5Dims) -> None:
        super().__init__()
        self.scale = dims.hidden**-0.5
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.encoder_positions = Positions(dims, dims.seq, decoder=False)
        self.encoder = nn.ModuleList(EncoderBlock(dims) for _ in range(dims.layers))
        self.encoder_norm = norm(dims)
        self.decoder_positions = Positions(dims, dims.target, decoder=True)
        self.decoder = nn.ModuleList(DecoderBlock(dims) for _ in range(dims.layers))
        self.decoder_norm = norm(dims)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=1.0)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, previous: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        memory, bias = self.embed(tokens), self.encoder_positions()
        for block in self.encoder:
            memory = block(memory, bias)
        memory = self.encoder_norm(memory)
        x, bias = self.embed(previous), self.decoder_positions()
        for block in self.decoder:
            x = block(x, memory, bias)
        logits = self.head(self.decoder_norm(x) * self.scale)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
