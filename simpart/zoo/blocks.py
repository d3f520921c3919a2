"""What several transformers of the zoo are made of: attention, an MLP, the pre-LN block."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MLP", "Attention", "Block"]


class Attention(nn.Module):
    """Self-attention. The rows of `qkv` go head by head, q, k and v of one head together, so that a contiguous share
    of its rows is a share of the heads (as in Megatron-LM). `eager` keeps the scores: two products with mask and
    softmax between, as software did before there was one kernel for all of it."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, eager: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.size = hidden // heads
        self.causal = causal
        self.eager = eager
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, self.heads, 3 * self.size).transpose(1, 2)
        q, k, v = qkv.split(self.size, dim=-1)
        if self.eager:
            y = self.scores(q, k).softmax(dim=-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: torch.Tensor = self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))
        return out

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """(batch, heads, queries, keys) before the softmax; what a causal query must not see is -inf."""
        found: torch.Tensor = (q * self.size**-0.5) @ k.transpose(-2, -1)
        if self.causal:
            ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            found = found.masked_fill(ahead, float("-inf"))
        return found


class MLP(nn.Module):
    """Two linears with a GELU between."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.fc = nn.Linear(hidden, ffn)
        self.proj = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(functional.gelu(self.fc(x)))
        return out


class Block(nn.Module):
    """A pre-LN transformer block, its MLP four times as wide; dropout only on the two residual branches, and only if
    asked for."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, dropout: float = 0.0, eager: bool = False) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, causal=causal, eager=eager)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, 4 * hidden)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        x = x + self.dropout(self.mlp(self.ln_2(x)))
        return x
