"""Classic workloads as real nn.Modules, built from dimensions. Each returns the scalar loss from its inputs.

Importing this package does not import torch; building a model does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from simpart.zoo.dims import (
    BERTDims,
    Dims,
    GPTDims,
    LlamaDims,
    LSTMDims,
    MoEDims,
    ResNetDims,
    T5Dims,
    TwoTowerDims,
    UNetDims,
    WideResNetDims,
    spell,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "MODELS",
    "BERTDims",
    "Dims",
    "GPTDims",
    "LSTMDims",
    "LlamaDims",
    "MoEDims",
    "ResNetDims",
    "T5Dims",
    "TwoTowerDims",
    "UNetDims",
    "WideResNetDims",
    "ZooFactory",
    "parameter_count",
]

# name -> (dims, module:function that builds it from the dims, function of simpart.zoo.inputs that draws its inputs)
MODELS: Mapping[str, tuple[type[Dims], str, str]] = {
    "bert": (BERTDims, "simpart.zoo.bert:BERT", "masked_tokens"),
    "gpt": (GPTDims, "simpart.zoo.gpt:GPT", "tokens"),
    "llama": (LlamaDims, "simpart.zoo.llama:Llama", "tokens"),
    "lstm": (LSTMDims, "simpart.zoo.lstm:LSTM", "tokens"),
    "moe": (MoEDims, "simpart.zoo.moe:MoE", "tokens"),
    "resnet50": (ResNetDims, "simpart.zoo.resnet:ResNet", "images"),
    "t5": (T5Dims, "simpart.zoo.t5:T5", "translations"),
    "two_tower": (TwoTowerDims, "simpart.zoo.two_tower:TwoTower", "pairs"),
    "unet": (UNetDims, "simpart.zoo.unet:UNet", "images"),
    "wide_resnet": (WideResNetDims, "simpart.zoo.resnet:wide_resnet", "images"),
}


def parameter_count(dims: Dims) -> int:
    """Parameters of the model in closed form (the formula stands at each dims class), tied ones once."""
    return dims.parameter_count


@dataclass(frozen=True, slots=True)
class ZooFactory:
    """`factory(micro_batch)` gives the module and valid example inputs (zeros); `inputs` alone draws random ones."""

    name: str
    dims: Dims

    def __call__(self, micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return self.build(), self.inputs(micro_batch)

    def build(self) -> nn.Module:
        """The module in torch's default dtype, initialised from torch's global seed."""
        module, _, function = MODELS[self.name][1].partition(":")
        model: nn.Module = getattr(importlib.import_module(module), function)(self.dims)
        return model

    def inputs(self, micro_batch: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, ...]:
        """Inputs for one micro-batch: zeros, or with a generator random tokens, pixels and labels."""
        from simpart.zoo import inputs

        draw: Any = getattr(inputs, MODELS[self.name][2])
        found: tuple[torch.Tensor, ...] = draw(self.dims, micro_batch, generator)
        return found

    @property
    def model(self) -> str:
        """`name:dim=value,…` with all dims, in the order of their class."""
        return f"{self.name}:" + ",".join(
            f"{item.name}={spell(getattr(self.dims, item.name))}" for item in fields(self.dims)
        )

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in one sample of a language model, 1 for an image."""
        return self.dims.tokens_per_sample

    @property
    def parameter_count(self) -> int:
        return self.dims.parameter_count
