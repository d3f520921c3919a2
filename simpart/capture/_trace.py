"""The flat form of one captured step: plain rows without torch objects, before templates are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simpart.graph import Phase, Source
from simpart.graph.sizes import TensorSpec

__all__ = ["KernelRow", "OpRow", "Ref", "Trace"]

Ref = tuple[int, int]
"""A value: (row, number of the output), or (-1, number of the source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op of the exported forward graph. `group` is the smallest row of its indivisible group; `arguments` as in
    KernelRow.
    """

    path: str
    target: str
    arguments: Any
    inputs: tuple[Ref, ...]
    outputs: tuple[TensorSpec, ...]
    group: int
    carries_gradient: bool
    mutates_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One node of the joint graph. `arguments` is JSON-like Python data until `fit` turns it into text.

    `accumulates` marks the adds that autograd inserts where the gradients of several users of a value meet.
    """

    op: int
    phase: Phase
    target: str
    arguments: Any
    inputs: tuple[Ref, ...]
    outputs: tuple[TensorSpec, ...]
    view: bool
    accumulates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A step at one micro-batch (sizes are integers), or after `fit` at any (sizes are affine, arguments are text).

    `gradients` pairs the number of a parameter's source with the kernel value that is its gradient.
    """

    sources: tuple[Source, ...]
    ops: tuple[OpRow, ...]
    kernels: tuple[KernelRow, ...]
    loss: Ref
    gradients: tuple[tuple[int, Ref], ...]
    tokens_per_sample: Any
