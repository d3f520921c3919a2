"""How a tensor lies on a mesh axis, and how a kernel's work is split along one: the vocabulary of shardings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from simpart.errors import FormatError

__all__ = [
    "AxisStrategy",
    "Halo",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "StatePlacement",
    "Strategy",
    "placement_from_text",
]

Reducer = Literal["sum", "avg", "max", "min"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every member of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each member holds a part of `dim`: one consecutive chunk, or with `block` the same chunk of every run of
    `block` elements (strided, as a fused qkv weight split by heads). Uneven parts follow the chunk rule: ceil(n /
    members) each, the last ones less.
    """

    dim: int
    block: int | None = None

    def __str__(self) -> str:
        return f"S({self.dim})" if self.block is None else f"S({self.dim},block={self.block})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each member holds a term; `reducer` over the axis gives the tensor. `mask` names the dim of another tensor by
    which rows were masked (an embedding with its vocabulary split)."""

    reducer: Reducer = "sum"
    mask: int | None = None

    def __str__(self) -> str:
        return f"P({self.reducer})" if self.mask is None else f"P({self.reducer},mask={self.mask})"


Placement = Replicate | Shard | Partial


@dataclass(frozen=True, slots=True)
class Halo:
    """An input shard that also needs `before` and `after` neighbouring elements along the shard's dim."""

    shard: Shard
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.shard}~({self.before},{self.after})"


_TEXT = re.compile(
    r"(?P<r>R)|S\((?P<dim>\d+)(,block=(?P<block>\d+))?\)(~\((?P<before>\d+),(?P<after>\d+)\))?"
    r"|P\((?P<reducer>sum|avg|max|min)(,mask=(?P<mask>\d+))?\)"
)


def placement_from_text(text: str) -> Placement | Halo:
    """Read `R`, `S(0)`, `S(0,block=64)`, `P(sum)`, `P(sum,mask=0)` or `S(2)~(1,1)`.

    >>> placement_from_text("S(0,block=64)")
    Shard(dim=0, block=64)
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise FormatError(f"{text!r} is not a placement; write R, S(0), S(0,block=64), P(sum) or S(2)~(1,1)")
    if match["r"]:
        return Replicate()
    if match["reducer"]:
        return Partial(match["reducer"], None if match["mask"] is None else int(match["mask"]))  # type: ignore[arg-type]
    shard = Shard(int(match["dim"]), None if match["block"] is None else int(match["block"]))
    return shard if match["before"] is None else Halo(shard, int(match["before"]), int(match["after"]))


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """Along one mesh axis: a placement (or halo) per tensor input of a kernel and a placement per output."""

    inputs: tuple[Placement | Halo, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a kernel does on each axis of its group's mesh; axes not named replicate."""

    axes: tuple[tuple[str, AxisStrategy], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Strategies of a stage: per kernel class (named by the id of its first instance), and per single kernel where an
    instance differs.

    A kernel id is `op id|F|target#k`, k counting equal (phase, target) pairs of the op. Kernels not named replicate.
    """

    classes: tuple[tuple[str, Strategy], ...] = ()
    overrides: tuple[tuple[str, Strategy], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlacement:
    """Where a parameter, its accumulated gradient and its optimizer state rest between uses, per axis (not named:
    replicated).

    All three `S(0)` on `dp` is ZeRO-3 or FSDP, the last two ZeRO-2, the last ZeRO-1.
    """

    parameter: tuple[tuple[str, Placement], ...] = ()
    gradient: tuple[tuple[str, Placement], ...] = ()
    optimizer: tuple[tuple[str, Placement], ...] = ()
