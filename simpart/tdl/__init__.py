"""The tensor description language: what an operator computes, in one to three lines, and hence how it can be split.

    describe("mylib.matmul")(lambda a, b: lambda i, j: Sum(lambda k: a[i, k] * b[k, j]))

A description takes the operator's own arguments and returns, per output, a lambda over that output's coordinates.
Strategies, halos, pending sums and element-wise-ness are derived from it. Nothing here imports torch.
"""

from __future__ import annotations

from simpart.tdl import _aten_elementwise, _aten_movement, _aten_norms, _aten_products
from simpart.tdl.expression import (
    ALL,
    Max,
    Min,
    Prod,
    Sum,
    Tensor,
    choose,
    equal,
    extent,
    hidden,
    opaque,
    shared,
    whole,
)  # fmt: skip
from simpart.tdl.follow import Exchange
from simpart.tdl.index import DescriptionError, Index
from simpart.tdl.local import local_call
from simpart.tdl.registry import DESCRIPTIONS, describe, description_of, reason_against
from simpart.tdl.splitting import Split
from simpart.tdl.strategies import (
    is_elementwise,
    mesh_strategies,
    splits_following,
    splits_of,
    strategies,
    undescribed_reason,
)  # fmt: skip
from simpart.tdl.tracing import Call, Description, call_like, trace

__all__ = [
    "ALL",
    "DESCRIPTIONS",
    "Call",
    "Description",
    "DescriptionError",
    "Exchange",
    "Index",
    "Max",
    "Min",
    "Prod",
    "Split",
    "Sum",
    "Tensor",
    "call_like",
    "choose",
    "describe",
    "description_of",
    "equal",
    "extent",
    "hidden",
    "is_elementwise",
    "local_call",
    "mesh_strategies",
    "opaque",
    "reason_against",
    "shared",
    "splits_following",
    "splits_of",
    "strategies",
    "trace",
    "undescribed_reason",
    "whole",
]

BUILT_IN = (_aten_elementwise, _aten_movement, _aten_norms, _aten_products)
