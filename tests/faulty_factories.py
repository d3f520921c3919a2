"""Models that go wrong on one rank, for tests of how a run ends. Captured in fake mode they are well-behaved.

`rank()` is read when an op runs, through a custom autograd-free op, so that capture sees one op for all.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn


@torch.library.custom_op("simpart_tests::misbehave", mutates_args=())
def misbehave(x: torch.Tensor, how: str) -> torch.Tensor:
    if os.environ.get("RANK") == "1":
        if how == "raise":
            raise ArithmeticError("the second rank has had enough")
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(600)
    return x.clone()


@misbehave.register_fake
def _(x: torch.Tensor, how: str) -> torch.Tensor:
    return torch.empty_like(x)


misbehave.register_autograd(lambda context, gradient: (gradient, None))


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        loss: torch.Tensor = misbehave(x, self.how).square().mean()
        return loss


def raising(micro_batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return Net("raise"), (torch.zeros(micro_batch, 4),)


def exiting(micro_batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return Net("exit"), (torch.zeros(micro_batch, 4),)


def hanging(micro_batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return Net("hang"), (torch.zeros(micro_batch, 4),)


def other_on_each_rank(micro_batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return Net("behave"), (torch.zeros(micro_batch, 4),)
