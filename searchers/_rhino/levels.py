"""Levels of effort on one cost graph: O1 and O2 go along critical nodes, O3 takes the whole graph after exact
reductions, O4 every variable as it stands.

A node with work is critical where every other one is its ancestor or its descendant. Between two critical nodes lies a
segment. O2 keeps the best prefix for every option of the last critical node, O1 one prefix; O2 takes the better of
both. A tensor that bypasses a critical node is priced against the prefix kept, so O1 and O2 may miss the optimum; O3
and O4 do not.
Reference: Rhino, arXiv 2302.08141 (`cost_spmd_strategy.cc`), with cones by min-plus products, which lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from simpart.searchers._cost_graph import CostGraph, Floats, Ints, Solution, minimise, price, rows_hold
from simpart.searchers._cost_graph.buckets import eliminate, elimination_order
from simpart.searchers._cost_graph.program import pairs, solve_program
from simpart.searchers._stage_ilp import topological

__all__ = ["LEVELS", "RhinoLevel", "critical_nodes", "segments", "solve_level"]

RhinoLevel = Literal["O1", "O2", "O3", "O4"]
LEVELS: tuple[RhinoLevel, ...] = ("O1", "O2", "O3", "O4")

_LARGEST_WHOLE_PROGRAM = 60_000  # pairs of options that O4 hands to the integer program as they are


def critical_nodes(graph: CostGraph, work: Sequence[float] | Floats) -> list[int]:
    """Nodes with work, in order along the edges (source → target), to which all others with work are comparable.

    Where instances share variables, a template feeds itself: edges that close a circle are left out.
    """
    size = len(graph.unary)
    edges = _without_circles(graph)
    order = topological(size, [(i, j, 0.0) for i, j in edges])
    parents: list[list[int]] = [[] for _ in range(size)]
    children: list[list[int]] = [[] for _ in range(size)]
    for i, j in edges:
        parents[j].append(i)
        children[i].append(j)
    heavy = [v for v in range(size) if work[v] > 0]
    mask = sum(1 << v for v in heavy)
    before, after = [0] * size, [0] * size
    for v in order:
        for u in parents[v]:
            before[v] |= before[u] | 1 << u
    for v in reversed(order):
        for u in children[v]:
            after[v] |= after[u] | 1 << u
    place = {v: n for n, v in enumerate(order)}
    counted = [v for v in heavy if ((before[v] | after[v] | 1 << v) & mask) == mask]
    return sorted(counted, key=place.__getitem__)


def _without_circles(graph: CostGraph) -> list[tuple[int, int]]:
    """Distinct edges but for those that lead back to where a depth-first walk comes from."""
    children: list[list[int]] = [[] for _ in graph.unary]
    for i, j in dict.fromkeys((i, j) for i, j, _ in graph.edges if i != j):
        children[i].append(j)
    state = [0] * len(children)  # 1: on the way, 2: done
    kept: list[tuple[int, int]] = []
    for root in range(len(children)):
        if state[root]:
            continue
        state[root] = 1
        stack = [(root, iter(children[root]))]
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                state[node] = 2
                stack.pop()
            elif state[following] != 1:
                kept.append((node, following))
                if not state[following]:
                    state[following] = 1
                    stack.append((following, iter(children[following])))
    return kept


def segments(graph: CostGraph, critical: Sequence[int]) -> list[list[int]]:
    """The ancestors of each critical node that no earlier one has, the node itself last; leftovers join the last."""
    parents: list[list[int]] = [[] for _ in graph.unary]
    for i, j in _without_circles(graph):
        parents[j].append(i)
    taken: set[int] = set()
    found = []
    for tail in critical:
        cone, stack = {tail}, [tail]
        while stack:
            for u in parents[stack.pop()]:
                if u not in cone and u not in taken:
                    cone.add(u)
                    stack.append(u)
        taken |= cone
        found.append([*sorted(cone - {tail}), tail])
    rest = [v for v in range(len(graph.unary)) if v not in taken]
    return [*found, rest] if rest else found


def solve_level(
    graph: CostGraph,
    level: RhinoLevel = "O3",
    work: Sequence[float] | Floats | None = None,
    *,
    relative_gap: float = 0.0,
    seconds: float | None = None,
) -> Solution:
    """Solve at a level; `work` per variable says which nodes count (all, where it is not given).

    O1 and O2 do not know rows: where their choice breaks one, the whole graph is solved.
    """
    if level == "O4" and pairs(graph) <= _LARGEST_WHOLE_PROGRAM:
        whole = _as_it_stands(graph, relative_gap, seconds)
        if whole is not None:
            return whole
    if level in ("O1", "O2"):
        counted = [1.0] * len(graph.unary) if work is None else work
        met = [_along_segments(graph, counted, keep_all=False)]
        met += [_along_segments(graph, counted, keep_all=True)] if level == "O2" else []
        kept = [choice for choice in met if choice is not None and rows_hold(graph, choice)]
        if kept:
            quick = min(kept, key=lambda choice: price(graph, choice))
            bound = minimise(graph, level="quick", seconds=seconds).bound if graph.rows else -math.inf
            cost = price(graph, quick)
            return Solution(choice=quick, cost=cost, bound=min(bound, cost), method="segments")
    return minimise(graph, relative_gap=relative_gap, seconds=seconds)


def _as_it_stands(graph: CostGraph, relative_gap: float, seconds: float | None) -> Solution | None:
    """Elimination without reductions, or the integer program over all variables."""
    order = elimination_order(graph)
    if order and not graph.rows:
        buckets = eliminate(graph, order)
        if not math.isfinite(buckets.cost):
            return None  # the reductions say why
        return Solution(choice=buckets.choice(), cost=buckets.cost, bound=buckets.cost, method="elimination")
    if not all(np.isfinite(c).all() for c in graph.unary):
        return None
    solved = solve_program(graph, integral=True, relative_gap=relative_gap, seconds=seconds)
    if solved.choice is None:
        return None
    cost = price(graph, solved.choice)
    return Solution(choice=solved.choice, cost=cost, bound=min(solved.bound, cost), method="program")


def _along_segments(graph: CostGraph, work: Sequence[float] | Floats, *, keep_all: bool) -> Ints | None:
    """The dynamic program over critical nodes; None where a segment is too wide or every prefix is forbidden."""
    parts = segments(graph, critical_nodes(graph, work))
    home = {v: n for n, part in enumerate(parts) for v in part}
    inside: list[list[tuple[int, int, np.ndarray[tuple[int, int], np.dtype[np.float64]]]]] = [[] for _ in parts]
    across: list[list[tuple[int, int, np.ndarray[tuple[int, int], np.dtype[np.float64]]]]] = [[] for _ in parts]
    for i, j, table in graph.edges:
        if home[i] == home[j]:
            inside[home[i]].append((i, j, table))
        else:
            early, late, oriented = (i, j, table) if home[i] < home[j] else (j, i, table.T)
            across[home[late]].append((early, late, oriented))
    prefixes: list[tuple[float, Ints]] = [(0.0, np.zeros(len(graph.unary), dtype=np.int64))]
    for n, part in enumerate(parts):
        number = {v: m for m, v in enumerate(part)}
        edges = tuple((number[i], number[j], table) for i, j, table in inside[n])
        local = CostGraph(unary=tuple(graph.unary[v] for v in part), edges=edges)
        order = elimination_order(local)
        if not order:
            return None
        tail = len(part) - 1
        order = [*(v for v in order if v != tail), tail]
        best: dict[int, tuple[float, Ints]] = {}
        for cost, prefix in prefixes:
            extra = [np.zeros(len(graph.unary[v])) for v in part]
            for early, late, table in across[n]:
                extra[number[late]] = extra[number[late]] + table[prefix[early]]
            buckets = eliminate(local, order, extra)
            ends = buckets.tables[tail]
            others = buckets.cost - float(ends.min()) if np.isfinite(ends).any() else math.inf
            for x, end in enumerate(ends):
                total = cost + others + float(end)
                if total < best.get(x, (math.inf,))[0]:
                    choice = prefix.copy()
                    choice[part] = buckets.choice({tail: x})
                    best[x] = (total, choice)
        if not best:
            return None
        prefixes = [best[x] for x in sorted(best)] if keep_all else [min(best.values(), key=lambda found: found[0])]
    return min(prefixes, key=lambda found: found[0])[1]
