"""Message passing for cost graphs too large for a program: a lower bound and a good choice (TRW-S).

Reference: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (2006).
"""

from __future__ import annotations

import math
import time

import numpy as np

from simpart.searchers._cost_graph.types import CostGraph, Floats, Ints, Table, price, rows_hold

__all__ = ["Messages", "improve", "pass_messages"]


class Messages:
    """Message passing on one graph, whose costs of options may change between runs: each starts from the last."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        size = len(graph.unary)
        self._tables: list[dict[int, Table]] = [{} for _ in range(size)]
        for i, j, table in graph.edges:
            self._tables[i][j] = self._tables[i][j] + table if j in self._tables[i] else table
            self._tables[j][i] = self._tables[i][j].T
        self._messages: dict[tuple[int, int], Floats] = {
            (i, j): np.zeros(len(graph.unary[j])) for i in range(size) for j in self._tables[i]
        }
        self._share = [
            1 / max(1, sum(j > i for j in around), sum(j < i for j in around)) for i, around in enumerate(self._tables)
        ]
        self.kept: Ints | None = None  # the cheapest choice met that keeps the rows
        self.kept_cost = math.inf

    def run(
        self, extra: list[Floats] | None = None, *, passes: int = 100, gap: float = 0.0, deadline: float | None = None
    ) -> tuple[Ints, float]:
        """The best choice met under costs raised by `extra`, and a bound of all choices under them; without rows."""
        graph = self.graph
        unary = list(graph.unary) if extra is None else [c + e for c, e in zip(graph.unary, extra, strict=True)]
        bound, best, best_cost, stood = -math.inf, np.zeros(len(unary), dtype=np.int64), math.inf, 0
        for turn in range(passes):
            total, choice = self._pass(unary, forward=turn % 2 == 0)
            stood = 0 if total > bound + 1e-6 * abs(total) else stood + 1
            bound = max(bound, total)
            cost = price(graph, choice)
            if cost < self.kept_cost and rows_hold(graph, choice):
                self.kept, self.kept_cost = choice, cost
            raised = cost + (0.0 if extra is None else sum(float(e[x]) for e, x in zip(extra, choice, strict=True)))
            if raised < best_cost or turn == 0:
                best, best_cost = choice, raised
            if stood > 2 or (math.isfinite(best_cost) and best_cost - bound <= gap * abs(best_cost)):
                break
            if deadline is not None and time.monotonic() > deadline:
                break
        return best, bound

    def _pass(self, unary: list[Floats], *, forward: bool) -> tuple[float, Ints]:
        """One sweep: the bound it proves, and a choice made along the way."""
        tables, messages = self._tables, self._messages
        total = 0.0
        choice = np.full(len(unary), -1, dtype=np.int64)
        for i in range(len(unary)) if forward else reversed(range(len(unary))):
            belief = unary[i] + sum(messages[j, i] for j in tables[i])
            ahead = [j for j in tables[i] if (j > i) == forward]
            decided = [tables[j][i][choice[j]] for j in tables[i] if (j > i) != forward]
            open_side = sum((messages[j, i] for j in ahead), start=np.zeros(len(unary[i])))
            choice[i] = np.argmin(unary[i] + sum(decided, start=open_side))
            total += (1 - self._share[i] * len(ahead)) * float(belief.min())  # what is not passed on
            for j in ahead:
                sent = self._share[i] * belief - messages[j, i]
                message = (sent[:, None] + tables[i][j]).min(axis=0)
                low = float(message.min())
                messages[i, j] = message - low
                total += low
        return total, choice


def pass_messages(graph: CostGraph, *, passes: int = 100, deadline: float | None = None) -> tuple[Ints | None, float]:
    """A choice that keeps the rows (None if none was met) and a bound that holds with or without them."""
    sweeps = Messages(graph)
    _, bound = sweeps.run(passes=passes, deadline=deadline)
    return sweeps.kept, bound


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
