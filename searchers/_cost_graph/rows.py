"""Rows priced by multipliers: a lower bound, choices that keep the rows, and options that cannot be optimal.

The Lagrangian dual is maximised by cutting planes; every evaluation is an exact elimination, so that the bound is at
least the linear relaxation's. Reference: Fisher, "The Lagrangian relaxation method" (1981).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from simpart.searchers._cost_graph.buckets import eliminate, marginals
from simpart.searchers._cost_graph.messages import Messages, improve
from simpart.searchers._cost_graph.types import CostGraph, Ints, Table, price, rows_hold

__all__ = ["Priced", "price_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The best choice met (None: none kept the rows), the bound, and per option the least bound of choices with it
    (empty where the graph was too wide to say)."""

    choice: Ints | None
    cost: float
    bound: float
    option_bounds: list[Table]


def price_rows(
    graph: CostGraph, order: list[int], *, rounds: int = 60, relative_gap: float = 0.0, deadline: float | None = None
) -> Priced:
    """Maximise the dual; stops at the gap, when the bound stands still, or at the deadline.

    Without an `order` evaluations are message passing: their bound is valid, if not the best.
    """
    sweeps = None if order else Messages(graph)
    best, best_cost, bound = None, math.inf, -math.inf
    prices = np.zeros(len(graph.rows))
    best_prices = prices
    cuts: list[tuple[float, Table]] = []  # (cost, excess of each row in its unit) of choices met
    limits = np.array([row.limit for row in graph.rows])
    units = np.array([max(abs(r.limit), *(float(w.max()) for _, w in r.weights), 1e-300) for r in graph.rows])
    finite = [c[np.isfinite(c)] for c in graph.unary]
    finite += [t[np.isfinite(t)] for _, _, t in graph.edges]
    saving = sum(float(np.ptp(part)) for part in finite if part.size)  # the most that any choice can save
    widest = 1e4 * (saving or 1.0)  # for rows that are missed by a ten-thousandth of their unit
    box = 0.0
    for _ in range(rounds):
        extra = _extra(graph, prices / units)
        if sweeps is None:
            buckets = eliminate(graph, order, extra)
            value, choice = buckets.cost, buckets.choice()
        else:
            choice, value = sweeps.run(extra, gap=relative_gap / 4, deadline=deadline)
        value -= float(prices @ (limits / units))
        if not math.isfinite(value):
            return Priced(choice=None, cost=math.inf, bound=math.inf, option_bounds=[])
        if value > bound:
            bound, best_prices = value, prices
        used = np.array([sum(float(w[choice[v]]) for v, w in row.weights) for row in graph.rows])
        excess = (used - limits) / units
        if math.isfinite(cost := price(graph, choice)):
            cuts.append((cost, excess))
        elif sweeps is not None and not cuts:
            break  # message passing met no choice without forbidden pairs
        if rows_hold(graph, choice):
            choice = improve(graph, choice)
            if (cost := price(graph, choice)) < best_cost:
                best, best_cost = choice, cost
        if sweeps is not None and sweeps.kept is not None and sweeps.kept_cost < best_cost:
            best = improve(graph, sweeps.kept)
            best_cost = price(graph, best)
        if best is not None and best_cost - bound <= max(relative_gap, 1e-12) * abs(best_cost):
            break
        if deadline is not None and time.monotonic() > deadline:
            break
        box = box or min(widest, abs(cuts[0][0]) or widest)
        while True:  # the box grows while the best prices lie on its edge: large ones are far from what is sought
            prices, promised = _master(cuts, box)
            inside = bool((prices < 0.999 * box).all()) or box >= widest
            if promised > bound + 1e-9 * max(abs(bound), abs(promised)) or inside:
                break
            box = min(8 * box, widest)
        if promised <= bound + 1e-9 * max(abs(bound), abs(promised)):
            break
    if sweeps is not None:
        return Priced(choice=best, cost=best_cost, bound=bound, option_bounds=[])
    final = eliminate(graph, order, _extra(graph, best_prices / units))
    return Priced(
        choice=best,
        cost=best_cost,
        bound=bound,
        option_bounds=[m - float(best_prices @ (limits / units)) for m in marginals(final)],
    )


def _extra(graph: CostGraph, prices: Table) -> list[Table]:
    extra = [np.zeros(len(c)) for c in graph.unary]
    for row, unit in zip(graph.rows, prices, strict=True):
        if unit > 0:
            for v, w in row.weights:
                extra[v] = extra[v] + unit * w
    return extra


def _master(cuts: list[tuple[float, Table]], box: float) -> tuple[Table, float]:
    """Prices that maximise the least of the cuts, and the value promised there."""
    from scipy.optimize import linprog

    scale = max(1e-300, max(abs(cost) for cost, _ in cuts))
    slopes = np.array([excess for _, excess in cuts])
    result = linprog(
        np.concatenate((np.zeros(slopes.shape[1]), [-1.0])),
        A_ub=np.hstack((-slopes, np.ones((len(cuts), 1)))),
        b_ub=np.array([cost for cost, _ in cuts]) / scale,
        bounds=[*[(0.0, box / scale)] * slopes.shape[1], (None, None)],
        method="highs",
    )
    if result.x is None:
        return np.zeros(slopes.shape[1]), -math.inf
    return np.maximum(result.x[:-1], 0.0) * scale, float(result.x[-1]) * scale
