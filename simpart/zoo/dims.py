"""The dimensions that name each model, their rules, and how many parameters they give. No torch here."""

from __future__ import annotations

from simpart.zoo._rules import spell
from simpart.zoo.dims_text import BERTDims, GPTDims, LlamaDims, LSTMDims, MoEDims, T5Dims
from simpart.zoo.dims_vision import ResNetDims, TwoTowerDims, UNetDims, WideResNetDims

__all__ = [
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
    "spell",
]

Dims = (
    GPTDims | LlamaDims | MoEDims | BERTDims | T5Dims | LSTMDims | ResNetDims | WideResNetDims | UNetDims | TwoTowerDims
)
