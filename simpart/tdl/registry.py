"""Which description belongs to which operator. Users add theirs with the same decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["DESCRIPTIONS", "REASONS", "describe", "description_of", "reason_against"]

Describe = Callable[..., Any]
_F = TypeVar("_F", bound=Describe)

DESCRIPTIONS: dict[str, Describe] = {}
"""Operator name without overload (`aten.mm`) to the function that describes it."""

REASONS: dict[str, str] = {
    "aten.as_strided": "its argument is a memory layout, which says nothing about dims",
    "aten.as_strided_scatter": "its argument is a memory layout, which says nothing about dims",
    "aten._embedding_bag": "where a bag begins depends on data",
    "aten._embedding_bag_backward": "where a bag begins depends on data",
    "aten.nonzero": "the size of its result depends on data",
    "aten.masked_select": "the size of its result depends on data",
    "aten.unique": "the size of its result depends on data",
    "aten.randperm": "every element depends on all others",
    "aten.linalg_cholesky": "one matrix is no concatenation or sum of parts of its result",
}
"""Operators that are replicated, and why."""


def describe(*targets: str) -> Callable[[_F], _F]:
    """Register a description for operators, by name without overload.

    >>> from simpart.tdl import Sum, describe
    >>> @describe("mylib.outer_sum")
    ... def outer_sum(a, b):
    ...     return lambda i, j: a[i] + b[j]
    """

    def add(function: _F) -> _F:
        for target in targets:
            DESCRIPTIONS[_name(target)] = function
        return function

    return add


def description_of(target: str) -> Describe | None:
    """The description registered for an operator, in any overload."""
    return DESCRIPTIONS.get(target) or DESCRIPTIONS.get(_name(target))


def reason_against(target: str) -> str:
    """Why an operator without description is replicated."""
    return REASONS.get(_name(target), "it has no description yet; register one with simpart.tdl.describe")


def _name(target: str) -> str:
    """`aten.mm.default` and `aten::mm` are `aten.mm`."""
    parts = target.replace("::", ".").split(".")
    return ".".join(parts[:2]) if parts[0] == "aten" else target
