"""The least cost of a cost graph, by the cheapest method that proves it.

Exact reductions first, then per component the ladder: bucket elimination, prices for rows, message passing for what is
too wide, linear relaxation, integer program. Whatever answers, the bound holds and the method is said.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Literal

import numpy as np

from simpart.searchers._cost_graph.buckets import best_choices, eliminate, elimination_order
from simpart.searchers._cost_graph.messages import improve, pass_messages
from simpart.searchers._cost_graph.program import pairs, solve_program
from simpart.searchers._cost_graph.reduce import reduce_graph
from simpart.searchers._cost_graph.rows import price_rows
from simpart.searchers._cost_graph.types import CostGraph, Floats, Ints, Row, Solution, Table, price, rows_hold

__all__ = [
    "CostGraph",
    "Floats",
    "Ints",
    "Level",
    "Row",
    "Solution",
    "Table",
    "linear_bound",
    "minimise",
    "near_optimal",
    "price",
    "rows_hold",
]

Level = Literal["exact", "quick"]
"""`exact` climbs the whole ladder; `quick` stops before integer programs and takes the best choice met."""

_LARGEST_RELAXATION = 300_000  # pairs of options; HiGHS then takes some seconds
_LARGEST_PROGRAM = 150_000


def minimise(
    graph: CostGraph, *, relative_gap: float = 0.0, seconds: float | None = None, level: Level = "exact"
) -> Solution:
    """The cheapest choice that keeps the rows, to within a relative gap and a time limit.

    Without `seconds` the answer depends on the input alone. The order of methods says which was needed: reduction,
    elimination, prices, messages, relaxation, program.

    >>> two = np.array([[0.0, 5.0], [5.0, 0.0]])
    >>> minimise(CostGraph(unary=(np.array([1.0, 2.0]), np.array([3.0, 0.0])), edges=((0, 1, two),))).cost
    2.0
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    core = reduce_graph(graph)
    if core.why:
        return Solution(choice=None, cost=math.inf, bound=math.inf, method="reduction", why=core.why)
    bounds, chosen, methods, missing = [core.constant], dict[int, int](), ["reduction"], ""
    for variables in core.components():
        part = core.graph(variables)
        solution = _component(part, relative_gap, deadline, level)
        methods.append(solution.method)
        bounds.append(solution.bound)
        if solution.choice is None:
            if solution.why:
                return Solution(choice=None, cost=math.inf, bound=math.inf, method=solution.method, why=solution.why)
            missing = solution.method
            continue
        chosen.update(zip(variables, map(int, solution.choice), strict=True))
    method = max(methods, key=_RUNGS.index)
    bound = math.fsum(bounds)
    if missing:
        return Solution(choice=None, cost=math.inf, bound=bound, method=missing)
    choice = core.expand(chosen)
    cost = price(graph, choice)
    return Solution(choice=choice, cost=cost, bound=min(bound, cost), method=method)


_RUNGS = ("reduction", "elimination", "prices", "messages", "relaxation", "program")


def _component(graph: CostGraph, relative_gap: float, deadline: float | None, level: Level) -> Solution:
    order = elimination_order(graph)
    if order and not graph.rows:
        buckets = eliminate(graph, order)
        if not math.isfinite(buckets.cost):
            return _none("elimination", "the forbidden pairs leave no choice")
        return Solution(choice=buckets.choice(), cost=buckets.cost, bound=buckets.cost, method="elimination")
    best, bound = _none(""), -math.inf
    kept: list[Ints] | None = None
    if graph.rows and (order or pairs(graph) > _LARGEST_PROGRAM):
        gap, rounds = (relative_gap, 60) if order else (max(relative_gap, 1e-3), 16)
        priced = price_rows(graph, order, rounds=rounds, relative_gap=gap, deadline=deadline)
        best, bound = _better(graph, best, priced.choice, "prices"), priced.bound
        if bound == math.inf:
            return _none("prices", "the forbidden pairs leave no choice")
        if _close(best, bound, relative_gap):
            return replace(best, bound=min(bound, best.cost))
        if priced.option_bounds:
            ceiling = best.cost + 1e-9 * abs(best.cost)
            kept = [np.flatnonzero(np.isfinite(b) & (b <= ceiling)) for b in priced.option_bounds]
            if not all(map(len, kept)):  # rounding: nothing can be better than what is known
                return replace(best, bound=best.cost)
    else:
        choice, bound = pass_messages(graph, deadline=deadline)
        best = _better(graph, best, None if choice is None else improve(graph, choice), "messages")
        if _close(best, bound, relative_gap):
            return replace(best, bound=min(bound, best.cost))
    graph_left = graph if kept is None else _restrict(graph, kept)
    rest = None if deadline is None else deadline - time.monotonic()
    if level == "exact" and pairs(graph_left) <= _LARGEST_RELAXATION:
        if not order:
            relaxed = solve_program(graph_left, integral=False, seconds=rest)
            if relaxed.infeasible:
                return _none("relaxation", "no choice keeps the rows and avoids the forbidden pairs")
            bound = max(bound, relaxed.bound)
            best = _better(graph, best, relaxed.choice, "relaxation")
            if _close(best, bound, relative_gap):
                return replace(best, bound=min(bound, best.cost))
        rest = None if deadline is None else deadline - time.monotonic()
        if pairs(graph_left) <= _LARGEST_PROGRAM and (rest is None or rest > 0):
            solved = solve_program(graph_left, integral=True, relative_gap=relative_gap, seconds=rest)
            if solved.infeasible and best.choice is None:
                return _none("program", "no choice keeps the rows and avoids the forbidden pairs")
            # options left out cost at least what is known already
            bound = max(bound, best.cost if solved.infeasible else min(solved.bound, best.cost))
            choice = solved.choice
            if choice is not None and kept is not None:
                choice = np.array([k[x] for k, x in zip(kept, choice, strict=True)], dtype=np.int64)
            best = _better(graph, best, choice, "program")
            if _close(best, bound, relative_gap):
                return replace(best, bound=min(bound, best.cost))
    return replace(best, bound=min(bound, best.cost), method=best.method or "messages")


def _none(method: str, why: str = "") -> Solution:
    return Solution(choice=None, cost=math.inf, bound=math.inf if why else -math.inf, method=method, why=why)


def _better(graph: CostGraph, best: Solution, choice: Ints | None, method: str) -> Solution:
    if choice is None or not rows_hold(graph, choice):
        return best
    cost = price(graph, choice)
    return Solution(choice=choice, cost=cost, bound=-math.inf, method=method) if cost < best.cost else best


def _close(best: Solution, bound: float, relative_gap: float) -> bool:
    return best.choice is not None and best.cost - bound <= max(relative_gap, 1e-9) * max(abs(best.cost), 1e-300)


def _restrict(graph: CostGraph, kept: list[Ints]) -> CostGraph:
    """The graph on some options of each variable."""
    return CostGraph(
        unary=tuple(c[k] for c, k in zip(graph.unary, kept, strict=True)),
        edges=tuple((i, j, table[np.ix_(kept[i], kept[j])]) for i, j, table in graph.edges),
        rows=tuple(replace(row, weights=tuple((v, w[kept[v]]) for v, w in row.weights)) for row in graph.rows),
    )


def linear_bound(graph: CostGraph) -> float:
    """The value of the linear relaxation of the graph as it stands, parallel edges apart; infinity if infeasible."""
    possible = [np.flatnonzero(np.isfinite(c)) for c in graph.unary]
    if not all(map(len, possible)):
        return math.inf
    return solve_program(_restrict(graph, possible), integral=False).value


def near_optimal(graph: CostGraph, slack: float, most: int) -> list[Ints]:
    """Choices whose cost is within `slack` of the optimum, cheapest first, at most `most`.

    For graphs whose width allows elimination; of others only the optimum is given. Choices that break a row are left
    out (a thousand times `most` are looked at).
    """
    order = elimination_order(graph)
    if not order or graph.rows:
        solution = minimise(graph)
        if solution.choice is None:
            return []
        if not order:
            return [solution.choice]
        buckets = eliminate(graph, order)
        room = solution.cost + slack - buckets.cost
        found = (choice for _, choice in best_choices(buckets, room, 1000 * most) if rows_hold(graph, choice))
        return [choice for choice, _ in zip(found, range(most), strict=False)] or [solution.choice]
    return [choice for _, choice in best_choices(eliminate(graph, order), slack, most)]
