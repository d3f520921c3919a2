"""Message passing for cost graphs too large for a program: a lower bound and a good choice (TRW-S).

Reference: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (2006).
"""

from __future__ import annotations

import math
import time

import numpy as np

from simpart.searchers._cost_graph_types import CostGraph, Floats, Ints, Table, price, rows_hold

__all__ = ["improve", "pass_messages"]


def pass_messages(graph: CostGraph, *, passes: int = 100, deadline: float | None = None) -> tuple[Ints | None, float]:
    """A choice that keeps the rows (None if none was met) and a bound that holds with or without them."""
    size = len(graph.unary)
    tables: list[dict[int, Table]] = [{} for _ in range(size)]
    for i, j, table in graph.edges:
        tables[i][j] = tables[i][j] + table if j in tables[i] else table
        tables[j][i] = tables[i][j].T
    messages: dict[tuple[int, int], Floats] = {
        (i, j): np.zeros(len(graph.unary[j])) for i in range(size) for j in tables[i]
    }
    share = [1 / max(1, sum(j > i for j in tables[i]), sum(j < i for j in tables[i])) for i in range(size)]
    bound, best, best_cost = -math.inf, None, math.inf
    for turn in range(passes):
        forward = turn % 2 == 0
        total = 0.0
        choice = np.full(size, -1, dtype=np.int64)
        for i in range(size) if forward else reversed(range(size)):
            belief = graph.unary[i] + sum(messages[j, i] for j in tables[i])
            ahead = [j for j in tables[i] if (j > i) == forward]
            decided = [tables[j][i][choice[j]] for j in tables[i] if (j > i) != forward]
            open_side = sum((messages[j, i] for j in ahead), start=np.zeros(len(graph.unary[i])))
            choice[i] = np.argmin(graph.unary[i] + sum(decided, start=open_side))
            total += (1 - share[i] * len(ahead)) * float(belief.min())  # what is not passed on
            for j in ahead:
                sent = share[i] * belief - messages[j, i]
                message = (sent[:, None] + tables[i][j]).min(axis=0)
                low = float(message.min())
                messages[i, j] = message - low
                total += low
        improved = not math.isfinite(bound) or total > bound + 1e-6 * abs(bound)
        bound = max(bound, total)
        cost = price(graph, choice)
        if cost < best_cost and rows_hold(graph, choice):
            best, best_cost = choice, cost
        if (not improved and turn > 10) or (deadline is not None and time.monotonic() > deadline):
            break
    return best, bound


def improve(graph: CostGraph, choice: Ints, *, rounds: int = 20) -> Ints:
    """Change one variable at a time while the cost falls and the rows hold."""
    around: list[list[tuple[int, Table]]] = [[] for _ in graph.unary]
    for i, j, table in graph.edges:
        if i != j:
            around[i].append((j, table))
            around[j].append((i, table.T))
    choice = choice.copy()
    rows = [(row.limit, dict(row.weights)) for row in graph.rows]
    for _ in range(rounds):
        changed = False
        for v, costs in enumerate(graph.unary):
            total = np.array(costs)
            for u, table in around[v]:
                total = total + table[:, choice[u]]
            for limit, weights in rows:
                if v in weights:
                    used = sum(float(w[choice[u]]) for u, w in weights.items() if u != v)
                    total[used + weights[v] > limit] = np.inf
            x = int(np.argmin(total))
            if total[x] < total[choice[v]]:
                choice[v], changed = x, True
        if not changed:
            break
    return choice
