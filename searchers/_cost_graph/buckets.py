"""Bucket elimination: the exact optimum of a cost graph of small width, min-marginals and all near-optimal choices.

Reference: Dechter, "Bucket elimination: a unifying framework for reasoning" (1999).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simpart.searchers._cost_graph.types import CostGraph, Ints, Table

__all__ = ["Buckets", "best_choices", "eliminate", "elimination_order", "marginals"]

LARGEST_TABLE = 1 << 22
LARGEST_TOTAL = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Tables of an elimination: `tables[v]` has the axes (v, *scopes[v]) and holds the cost of all that is below."""

    order: tuple[int, ...]
    scopes: dict[int, tuple[int, ...]]
    tables: dict[int, Table]
    messages: dict[int, Table]
    parent: dict[int, int]
    cost: float

    def choice(self, given: Mapping[int, int] | None = None) -> Ints:
        """An optimal choice, of equals the first option; `given` fixes variables eliminated last."""
        found = np.zeros(len(self.order), dtype=np.int64)
        for v in reversed(self.order):
            if given is not None and v in given:
                found[v] = given[v]
                continue
            found[v] = np.argmin(self.tables[v][(slice(None), *(found[u] for u in self.scopes[v]))])
        return found


def elimination_order(graph: CostGraph, *, largest: int = LARGEST_TABLE, total: int = LARGEST_TOTAL) -> list[int]:
    """An order that takes the smallest table first; empty where tables would exceed the limits (in entries)."""
    sizes = [len(c) for c in graph.unary]
    neighbours: list[set[int]] = [set() for _ in sizes]
    for i, j, _ in graph.edges:
        if i != j:
            neighbours[i].add(j)
            neighbours[j].add(i)

    def entries(v: int) -> int:
        product = sizes[v]
        for u in neighbours[v]:
            product *= sizes[u]
        return product

    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    order: list[int] = []
    done = [False] * len(sizes)
    spent = 0
    while heap:
        size, v = heapq.heappop(heap)
        if done[v] or size != entries(v):
            continue
        spent += size
        if size > largest or spent > total or len(neighbours[v]) > 30:
            return []
        done[v] = True
        order.append(v)
        around = neighbours[v]
        for u in around:
            neighbours[u] |= around
            neighbours[u] -= {u, v}
        for u in around:
            heapq.heappush(heap, (entries(u), u))
    return order


def eliminate(graph: CostGraph, order: list[int], extra: list[Table] | None = None) -> Buckets:
    """Eliminate in an order; `extra` adds to the costs of options (prices of rows)."""
    place = {v: n for n, v in enumerate(order)}
    factors: dict[int, list[tuple[tuple[int, ...], Table]]] = {v: [] for v in order}
    for v, costs in enumerate(graph.unary):
        factors[v].append(((v,), costs if extra is None else costs + extra[v]))
    for i, j, table in graph.edges:
        if i == j:
            factors[i].append(((i,), np.diagonal(table)))
        else:
            factors[i if place[i] < place[j] else j].append(((i, j), table))
    scopes: dict[int, tuple[int, ...]] = {}
    tables: dict[int, Table] = {}
    messages: dict[int, Table] = {}
    parent: dict[int, int] = {}
    cost = 0.0
    for v in order:
        around = {u for scope, _ in factors[v] for u in scope} - {v}
        scopes[v] = scope = tuple(sorted(around, key=place.__getitem__))
        axes = (v, *scope)
        table = np.zeros([len(graph.unary[u]) for u in axes])
        for part_scope, part in factors.pop(v):
            table += _spread(part_scope, part, axes)
        tables[v] = table
        messages[v] = message = table.min(axis=0)
        if scope:
            parent[v] = scope[0]
            factors[scope[0]].append((scope, message))
        else:
            cost += float(message)
    return Buckets(order=tuple(order), scopes=scopes, tables=tables, messages=messages, parent=parent, cost=cost)


def _spread(scope: tuple[int, ...], part: Table, axes: tuple[int, ...]) -> Table:
    """A table over `scope` as one that broadcasts over `axes`."""
    at = {u: n for n, u in enumerate(axes)}
    sorted_axes = sorted(range(len(scope)), key=lambda n: at[scope[n]])
    shape = [1] * len(axes)
    for n in sorted_axes:
        shape[at[scope[n]]] = part.shape[n]
    return part.transpose(sorted_axes).reshape(shape)


def marginals(buckets: Buckets) -> list[Table]:
    """The least cost of any choice that takes an option, for every option of every variable."""
    full: dict[int, Table] = {}
    for v in reversed(buckets.order):
        table, scope = buckets.tables[v], buckets.scopes[v]
        if scope:
            up = buckets.parent[v]
            axes = (up, *buckets.scopes[up])
            gone = tuple(n for n, u in enumerate(axes) if u not in scope)
            outside = full[up].min(axis=gone)
            rest = tuple(u for u in axes if u in scope)
            outside = outside.transpose([rest.index(u) for u in scope])
            with np.errstate(invalid="ignore"):
                above = outside - buckets.messages[v]
            table = table + np.where(np.isnan(above), np.inf, above)[None]
        full[v] = table
    own = [full[v].min(axis=tuple(range(1, full[v].ndim))) for v in range(len(buckets.order))]
    return [costs + (buckets.cost - float(costs.min())) for costs in own]  # with the other components'


def best_choices(buckets: Buckets, slack: float, most: int) -> list[tuple[float, Ints]]:
    """At most `most` choices whose cost is within `slack` of the optimum, cheapest first, each with its excess."""
    order = list(reversed(buckets.order))
    found: list[tuple[float, Ints]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    if not np.isfinite(buckets.cost):
        return found
    while heap and len(found) < most:
        excess, negative_depth, options = heapq.heappop(heap)
        depth = -negative_depth
        chosen = dict(zip(order, options, strict=False))
        if depth == len(order):
            choice = np.zeros(len(order), dtype=np.int64)
            choice[order] = options
            found.append((excess, choice))
            continue
        v = order[depth]
        at: tuple[slice | int, ...] = (slice(None), *(chosen[u] for u in buckets.scopes[v]))
        costs = buckets.tables[v][at]
        more = costs - costs.min()
        for x in map(int, np.flatnonzero(excess + more <= slack)):
            heapq.heappush(heap, (excess + float(more[x]), -depth - 1, (*options, x)))
    return found
