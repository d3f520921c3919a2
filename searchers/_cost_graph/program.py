"""A cost graph as a linear program over the local polytope, or as a mixed-integer one (HiGHS).

One binary per option, a continuous variable per pair of options that a table allows; forbidden ones do not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simpart.searchers._cost_graph.types import CostGraph, Ints, rows_hold

__all__ = ["ProgramResult", "pairs", "solve_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """`bound` is below every choice by a margin for rounding, `value` without; `choice` is set where the answer is
    integral and keeps the rows."""

    choice: Ints | None
    bound: float
    value: float
    infeasible: bool


def pairs(graph: CostGraph) -> int:
    """Pairs of options, the size that decides whether a program is worth writing."""
    return sum(table.size for _, _, table in graph.edges)


def solve_program(
    graph: CostGraph, *, integral: bool, relative_gap: float = 0.0, seconds: float | None = None
) -> ProgramResult:
    """Solve the relaxation or the integer program; costs must be finite in `unary`."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    starts = np.concatenate(([0], np.cumsum([len(c) for c in graph.unary])))
    options = int(starts[-1])
    least = [float(np.min(c)) for c in graph.unary]
    cost = [np.asarray(c) - low for c, low in zip(graph.unary, least, strict=True)]
    constant = math.fsum(least)
    where, columns, values = (
        [np.repeat(np.arange(len(cost)), np.diff(starts))],
        [np.arange(options)],
        [np.ones(options)],
    )
    row, column = len(cost), options
    for i, j, table in graph.edges:
        left, right = np.nonzero(np.isfinite(table))
        if not len(left):
            return ProgramResult(choice=None, bound=math.inf, value=math.inf, infeasible=True)
        entries = table[left, right]
        low = float(entries.min())
        constant += low
        cost.append(entries - low)
        numbers = column + np.arange(len(left))
        for first, which, size in ((starts[i], left, table.shape[0]), (starts[j], right, table.shape[1])):
            where += [row + which, row + np.arange(size)]
            columns += [numbers, first + np.arange(size)]
            values += [np.ones(len(left)), -np.ones(size)]
            row += size
        column += len(left)
    objective = np.concatenate(cost)
    # HiGHS works with absolute tolerances of 1e-7: scale costs so that the largest are about 1e4
    scale = float(objective.max()) / 1e4 or 1.0
    matrix = coo_array((np.concatenate(values), (np.concatenate(where), np.concatenate(columns))), shape=(row, column))
    right_side = np.concatenate((np.ones(len(graph.unary)), np.zeros(row - len(graph.unary))))
    constraints = [LinearConstraint(matrix.tocsr(), right_side, right_side)]
    if graph.rows:
        weights = np.zeros((len(graph.rows), column))
        for n, limit in enumerate(graph.rows):
            for v, w in limit.weights:
                weights[n, starts[v] : starts[v + 1]] += np.asarray(w)
        limits = np.array([row.limit for row in graph.rows])
        units = np.maximum(np.abs(limits), np.abs(weights).max(axis=1, initial=1e-300))
        constraints.append(LinearConstraint(coo_array(weights / units[:, None]).tocsr(), -np.inf, limits / units))
    integrality = np.zeros(column, dtype=np.int64)
    if integral:
        integrality[:options] = 1
    time_limit_s = math.inf if seconds is None else max(seconds, 0.05)
    found = milp(
        objective / scale,
        integrality=integrality,
        bounds=Bounds(0.0, 1.0),
        constraints=constraints,
        options={"mip_rel_gap": relative_gap, "time_limit": time_limit_s},
    )
    if found.status == 2:
        return ProgramResult(choice=None, bound=math.inf, value=math.inf, infeasible=True)
    proved = found.mip_dual_bound if integral else (found.fun if found.status == 0 else None)
    value = -math.inf if proved is None else constant + scale * float(proved)
    bound = value - 1e-9 * scale * abs(float(proved or 0.0)) if math.isfinite(value) else -math.inf
    choice = None
    if found.x is not None:
        x = found.x[:options]
        if integral or np.all(np.minimum(x, 1 - x) < 1e-6):
            choice = np.array([np.argmax(x[a:b]) for a, b in pairwise(starts)], dtype=np.int64)
            if not rows_hold(graph, choice):
                choice = None
    return ProgramResult(choice=choice, bound=bound, value=value, infeasible=False)
