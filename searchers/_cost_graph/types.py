"""Cost graphs: choose one option per variable; the cost is a sum over variables and over pairs of variables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CostGraph", "Floats", "Ints", "Row", "Solution", "Table", "price", "rows_hold"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Table = np.ndarray[Any, np.dtype[np.float64]]

ROW_TOLERANCE = 1e-9
"""Relative; sums of bytes are exact below 2**53, sums of fractions are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A resource that may run out: the sum of `weights` of the chosen options is at most `limit`."""

    limit: float
    weights: tuple[tuple[int, Floats], ...]  # (variable, weight of each option), each variable at most once
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostGraph:
    """Variables with a cost per option, pairwise cost tables and resource rows; infinity forbids."""

    unary: tuple[Floats, ...]  # [variable][option]
    edges: tuple[tuple[int, int, Table], ...]  # (i, j, cost[option of i, option of j]); parallel edges add up
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One option per variable, or None where there is none; `bound` is below the cost of every choice.

    `method` names the rung of the ladder that answered; `why` says why there is no choice.
    """

    choice: Ints | None
    cost: float
    bound: float
    method: str
    why: str = ""

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, as a fraction of the cost."""
        if not math.isfinite(self.cost):
            return math.inf if self.choice is None and not self.why else 0.0
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-300)


def price(graph: CostGraph, choice: Ints) -> float:
    """The cost of one choice; rows are not looked at."""
    parts = [float(costs[x]) for costs, x in zip(graph.unary, choice, strict=True)]
    parts += [float(table[choice[i], choice[j]]) for i, j, table in graph.edges]
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.inf


def rows_hold(graph: CostGraph, choice: Ints) -> bool:
    """Whether a choice keeps every row."""
    return all(
        math.fsum(float(w[choice[v]]) for v, w in row.weights) <= row.limit + ROW_TOLERANCE * max(1.0, abs(row.limit))
        for row in graph.rows
    )
