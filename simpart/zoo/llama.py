"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import LlamaDims, MoEDims

__all__ = ["Attention", "Llama", "rotary_tables"]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, dims: LlamaDims | MoEDims) -> None:
        super().__init__()
        self.size = dims.hidden // dims.heads
        self.grouped = dims.kv_heads != dims.heads
        kv = dims.kv_heads * self.size
        self.q_proj = nn.Linear(dims.hidden, dims.hidden, bias=False)
        self.k_proj = nn.Linear(dims.hidden, kv, bias=False)
        self.v_proj = nn.Linear(dims.hidden, kv, bias=False)
        self.o_proj = nn.Linear(dims.hidden, dims.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q = self.q_proj(x).view(batch, seq, -1, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, -1, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, -1, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, seq, hidden))
        return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (b, heads, seq, size); the pairs are (i, i + size/2)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_tables(seq: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (seq, size) in the default dtype, from angles in float32."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(seq, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    dtype = torch.get_default_dtype()
    return angle.cos().to(dtype), angle.sin().to(dtype)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) · up(x))`."""

    def __init__(self, dims: LlamaDims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.ffn, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.ffn, bias=False)
        self.down_proj = nn.Linear(dims.ffn, dims.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dims: LlamaDims) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(dims.hidden, eps=1e-5)
        self.attn = Attention(dims)
        self.post_norm = nn.RMSNorm(dims.hidden, eps=1e-5)
        self.mlp = MLP(dims)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.input_norm(x), cos, sin)
        x = x + self.mlp(self.post_norm(x))
        return x


class Llama(nn.Module):
    """`forward(tokens, labels)` is the mean cross-entropy; the head is not tied."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, dims: LlamaDims) -> None:
        super().__init__()
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(Block(dims) for _ in range(dims.layers))
        self.norm = nn.RMSNorm(dims.hidden, eps=1e-5)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        cos, sin = rotary_tables(dims.seq, dims.hidden // dims.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
