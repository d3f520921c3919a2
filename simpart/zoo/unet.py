"""U-Net with skips by concatenation and batch norms."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import UNetDims

__all__ = ["UNet"]


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Twice a 3×3 convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """`forward(images, labels)` is the mean cross-entropy over pixels."""

    def __init__(self, dims: UNetDims) -> None:
        super().__init__()
        widths = dims.widths
        self.down = nn.ModuleList(double_conv(i, o) for i, o in pairwise((dims.channels, *widths[:-1])))
        self.bottom = double_conv(widths[-2], widths[-1])
        levels = list(reversed(list(pairwise(widths))))
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for o, i in levels)
        self.merge = nn.ModuleList(double_conv(2 * o, o) for o, _ in levels)
        self.head = nn.Conv2d(dims.base, dims.classes, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, skips = images, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((skips.pop(), up(x)), dim=1))
        return functional.cross_entropy(self.head(x), labels)
