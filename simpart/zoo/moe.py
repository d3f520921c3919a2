"""A Llama with experts for MLPs: GShard's routing with static capacity, Mixtral's experts.

References: Lepikhin et al., "GShard" (2020); Jiang et al., "Mixtral of Experts" (2024).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import MoEDims
from simpart.zoo.llama import Attention, rotary_tables

__all__ = ["MoE"]


class Router(nn.Module):
    """Which expert takes which token, in which of its slots. Samples are independent: splitting a batch changes
    nothing.

    Returns the weights (b, seq, experts, slots) of the experts' results, zero where a token does not go, the same as
    ones without gradient, and the auxiliary loss of each sample.
    """

    def __init__(self, dims: MoEDims) -> None:
        super().__init__()
        self.top, self.experts, self.slots = dims.top, dims.experts, dims.slots
        self.gate = nn.Linear(dims.hidden, dims.experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, seq, _ = x.shape
        probabilities = functional.softmax(self.gate(x), dim=-1)
        best, chosen = probabilities.topk(self.top, dim=-1)
        weights = best / best.sum(dim=-1, keepdim=True)
        # (b, top · seq, experts): all first choices come before all second ones
        choices = chosen.transpose(1, 2).reshape(batch, -1, 1) == torch.arange(self.experts, device=x.device)
        place = choices.long().cumsum(dim=1) - 1
        seats = (place.unsqueeze(-1) == torch.arange(self.slots, device=x.device)) & choices.unsqueeze(-1)
        seated = seats.to(x.dtype).view(batch, self.top, seq, self.experts, self.slots)
        combine = (seated * weights.transpose(1, 2)[..., None, None]).sum(dim=1)
        load = choices[:, :seq].to(x.dtype).mean(dim=1)
        balance = self.experts * (load * probabilities.mean(dim=1)).sum(dim=-1)
        return combine, seated.sum(dim=1), balance


class Experts(nn.Module):
    """SwiGLU experts, stacked: `Shard(0)` of each weight is expert parallelism."""

    def __init__(self, dims: MoEDims) -> None:
        super().__init__()
        self.router = Router(dims)
        self.gate = nn.Parameter(torch.empty(dims.experts, dims.hidden, dims.ffn))
        self.up = nn.Parameter(torch.empty(dims.experts, dims.hidden, dims.ffn))
        self.down = nn.Parameter(torch.empty(dims.experts, dims.ffn, dims.hidden))
        for weight in (self.gate, self.up, self.down):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, _, hidden = x.shape
        experts, slots = self.router.experts, self.router.slots
        combine, dispatch, balance = self.router(x)
        sent = dispatch.flatten(2).transpose(1, 2) @ x  # (b, experts · slots, hidden)
        work = sent.view(batch, experts, slots, hidden).transpose(0, 1).reshape(experts, batch * slots, hidden)
        done = (functional.silu(work @ self.gate) * (work @ self.up)) @ self.down
        back = done.view(experts, batch, slots, hidden).transpose(0, 1).reshape(batch, experts * slots, hidden)
        return combine.flatten(2) @ back, balance


class Block(nn.Module):
    """A pre-norm transformer block; what its router adds to the auxiliary loss comes along."""

    def __init__(self, dims: MoEDims) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(dims.hidden, eps=1e-5)
        self.attn = Attention(dims)
        self.post_norm = nn.RMSNorm(dims.hidden, eps=1e-5)
        self.experts = Experts(dims)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attn(self.input_norm(x), cos, sin)
        y, balance = self.experts(self.post_norm(x))
        return x + y, balance


class MoE(nn.Module):
    """`forward(tokens, labels)` is the mean cross-entropy plus the weighed auxiliary loss; the head is not tied."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, dims: MoEDims) -> None:
        super().__init__()
        self.balance = dims.balance
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
        uneven = torch.zeros(tokens.shape[0], dtype=x.dtype, device=x.device)
        for block in self.layers:
            x, balance = block(x, self.cos, self.sin)
            uneven = uneven + balance
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + self.balance * uneven.mean() if self.balance else loss
