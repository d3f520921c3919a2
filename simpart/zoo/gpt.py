"""GPT with learned positions and pre-LN blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import GPTDims

__all__ = ["GPT"]


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` go head by head, q, k and v of one head together, so that a contiguous
    share of its rows is a share of the heads (as in Megatron-LM)."""

    def __init__(self, dims: GPTDims) -> None:
        super().__init__()
        self.heads = dims.heads
        self.size = dims.hidden // dims.heads
        self.qkv = nn.Linear(dims.hidden, 3 * dims.hidden)
        self.proj = nn.Linear(dims.hidden, dims.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, self.heads, 3 * self.size).transpose(1, 2)
        q, k, v = qkv.split(self.size, dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))
        return out


class MLP(nn.Module):
    """Two linears with a GELU between, four times as wide as the model."""

    def __init__(self, dims: GPTDims) -> None:
        super().__init__()
        self.fc = nn.Linear(dims.hidden, 4 * dims.hidden)
        self.proj = nn.Linear(4 * dims.hidden, dims.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(functional.gelu(self.fc(x)))
        return out


class Block(nn.Module):
    """A pre-LN transformer block; dropout only on the two residual branches, and only if asked for."""

    def __init__(self, dims: GPTDims) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dims.hidden)
        self.attn = Attention(dims)
        self.ln_2 = nn.LayerNorm(dims.hidden)
        self.mlp = MLP(dims)
        self.dropout = nn.Dropout(dims.dropout) if dims.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        x = x + self.dropout(self.mlp(self.ln_2(x)))
        return x


class GPT(nn.Module):
    """`forward(tokens, labels)` is the mean cross-entropy."""

    def __init__(self, dims: GPTDims) -> None:
        super().__init__()
        self.wte = nn.Embedding(dims.vocab, dims.hidden)
        self.wpe = nn.Embedding(dims.seq, dims.hidden)
        self.dropout = nn.Dropout(dims.dropout) if dims.dropout else nn.Identity()
        self.h = nn.ModuleList(Block(dims) for _ in range(dims.layers))
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
