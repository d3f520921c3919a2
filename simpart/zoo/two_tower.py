"""Two towers, one for images and one for text, trained to tell which image goes with which text (CLIP).

Reference: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.blocks import Block
from simpart.zoo.dims import TwoTowerDims

__all__ = ["TwoTower"]


class ImageTower(nn.Module):
    """Pixels (b, 3, image, image) to vectors (b, embed): those of the class token after all blocks."""

    def __init__(self, dims: TwoTowerDims) -> None:
        super().__init__()
        hidden = dims.image_hidden
        self.patches = nn.Conv2d(3, hidden, dims.patch, stride=dims.patch, bias=False)
        self.summary = nn.Parameter(torch.empty(hidden))
        self.positions = nn.Parameter(torch.empty(dims.patches + 1, hidden))
        self.ln_before = nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(Block(hidden, dims.image_heads, causal=False) for _ in range(dims.image_layers))
        self.ln_after = nn.LayerNorm(hidden)
        self.proj = nn.Linear(hidden, dims.embed, bias=False)
        nn.init.normal_(self.summary, std=hidden**-0.5)
        nn.init.normal_(self.positions, std=hidden**-0.5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.summary.expand(pixels.shape[0], 1, -1), patches), dim=1) + self.positions
        x = self.ln_before(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.proj(self.ln_after(x[:, 0]))
        return out


class TextTower(nn.Module):
    """Tokens (b, seq) to vectors (b, embed): those of the last token after all blocks, which see the past alone."""

    def __init__(self, dims: TwoTowerDims) -> None:
        super().__init__()
        hidden = dims.text_hidden
        self.words = nn.Embedding(dims.vocab, hidden)
        self.positions = nn.Parameter(torch.empty(dims.seq, hidden))
        self.blocks = nn.ModuleList(Block(hidden, dims.text_heads, causal=True) for _ in range(dims.text_layers))
        self.ln = nn.LayerNorm(hidden)
        self.proj = nn.Linear(hidden, dims.embed, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.proj(self.ln(x[:, -1]))
        return out


class TwoTower(nn.Module):
    """`forward(pixels, tokens)` is the contrastive loss over all pairs of the micro-batch: it is not the mean of the
    losses of its parts."""

    def __init__(self, dims: TwoTowerDims) -> None:
        super().__init__()
        self.image = ImageTower(dims)
        self.text = TextTower(dims)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07), dtype=torch.get_default_dtype()))

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image = functional.normalize(self.image(pixels), dim=-1)
        text = functional.normalize(self.text(tokens), dim=-1)
        logits = self.temperature.exp() * image @ text.t()
        own = torch.arange(pixels.shape[0], device=pixels.device)
        return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.t(), own)) / 2
