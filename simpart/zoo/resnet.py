"""ResNet of bottleneck blocks, as torchvision's (stride in the 3×3 convolution, in-place ReLU)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from simpart.zoo.dims import ResNetDims, WideResNetDims

__all__ = ["ResNet", "wide_resnet"]


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions around a shortcut; four times as many channels out as inside."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += shortcut
        out: torch.Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """`forward(images, labels)` is the mean cross-entropy."""

    def __init__(self, dims: ResNetDims) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, dims.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(dims.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = dims.width
        self.stages: list[str] = []
        for stage, count in enumerate(dims.blocks):
            width, stride = dims.width * 2**stage, 1 if stage == 0 else 2
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                if block == 0:
                    projection = nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False)
                    blocks[-1].downsample = nn.Sequential(projection, nn.BatchNorm2d(4 * width))
                inputs = 4 * width
            self.stages.append(f"layer{stage + 1}")
            self.add_module(self.stages[-1], nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, dims.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits = self.fc(torch.flatten(self.avgpool(x), 1))
        return functional.cross_entropy(logits, labels)


def wide_resnet(dims: WideResNetDims) -> ResNet:
    """The ResNet that a depth and a widening factor name."""
    return ResNet(dims.resnet)
