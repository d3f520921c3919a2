"""Stage assignment of a graph that is no chain: an integer program that knows no topological order.

Every op gets a stage, no edge goes back, the work of a stage is capped, and what crosses costs. Independent branches
may go to one stage each, which no contiguous cut of an interleaved order reaches. The backward pass mirrors the forward
one (a stage holds the backward ops of its forward ops), so no cycle can arise.

Reference: Rhino, arXiv 2302.08141, and the pipeline planner of its open-source system (hlo_graph_sketch.cc); the
bottleneck term and the count of bytes per consumer stage are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from simpart.searchers._cost_graph.types import Floats, Ints

__all__ = ["Count", "StageProblem", "Staging", "assign_stages", "contiguous", "crossing_bytes", "optimal_stagings"]

Grid = np.ndarray[tuple[int, int], np.dtype[np.int64]]

Count = Literal["edges", "consumers", "hops"]
"""What a tensor that leaves its stage costs: once per edge, once per stage that reads it, or once per boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """Ops with work (FLOPs or seconds) and edges (u, v, bytes of u's tensor).

    The objective is `byte_weight` × crossing bytes + `bottleneck_weight` × the largest work of a stage; `cap` limits
    the work of a stage, `same` lists ops that stay together.
    """

    work: Floats
    edges: tuple[tuple[int, int, float], ...]
    stages: int
    cap: float = math.inf
    count: Count = "edges"
    byte_weight: float = 1.0
    bottleneck_weight: float = 0.0
    same: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Stage of each op, or None with the reason; `bound` is below every staging's objective."""

    stage: Ints | None
    objective: float
    bound: float
    why: str = ""


def crossing_bytes(problem: StageProblem, stage: Sequence[int] | Ints) -> float:
    """Bytes that cross between stages, in the problem's way of counting."""
    if problem.count == "edges":
        return math.fsum(size for u, v, size in problem.edges if stage[u] != stage[v])
    size_of = {u: size for u, _, size in problem.edges}
    readers: dict[int, set[int]] = {}
    for u, v, _ in problem.edges:
        if stage[v] != stage[u]:
            readers.setdefault(u, set()).add(int(stage[v]))
    if problem.count == "consumers":
        return math.fsum(size_of[u] * len(found) for u, found in readers.items())
    return math.fsum(size_of[u] * (max(found) - int(stage[u])) for u, found in readers.items())


def objective(problem: StageProblem, stage: Sequence[int] | Ints) -> float:
    """What the program minimises."""
    load = np.bincount(np.asarray(stage), problem.work, problem.stages)
    return problem.byte_weight * crossing_bytes(problem, stage) + problem.bottleneck_weight * float(load.max())


def ranges(problem: StageProblem) -> tuple[Ints, Ints]:
    """First and last stage that each op can take, from the work of its ancestors and descendants under the cap."""
    size = len(problem.work)
    parents: list[list[int]] = [[] for _ in range(size)]
    children: list[list[int]] = [[] for _ in range(size)]
    for u, v, _ in problem.edges:
        parents[v].append(u)
        children[u].append(v)
    order = topological(size, problem.edges)
    before, after = np.zeros(size), np.zeros(size)
    for links, sequence, total in ((parents, order, before), (children, order[::-1], after)):
        masks = [0] * size
        for v in sequence:
            for u in links[v]:
                masks[v] |= masks[u] | (1 << u)
            total[v] = sum(problem.work[u] for u in range(size) if masks[v] >> u & 1)
    if not math.isfinite(problem.cap):
        return np.zeros(size, dtype=np.int64), np.full(size, problem.stages - 1, dtype=np.int64)
    margin = 1e-9 * problem.cap
    first = np.ceil((before + problem.work - margin) / problem.cap).astype(np.int64) - 1
    last = problem.stages - np.ceil((after + problem.work - margin) / problem.cap).astype(np.int64)
    return np.clip(first, 0, None), np.clip(last, None, problem.stages - 1)


def topological(size: int, edges: Sequence[tuple[int, int, float]]) -> list[int]:
    """Ops in an order along the edges, the lowest number first; raises ValueError for a cycle."""
    import heapq

    waiting = [0] * size
    children: list[list[int]] = [[] for _ in range(size)]
    for u, v, _ in edges:
        waiting[v] += 1
        children[u].append(v)
    ready = [v for v in range(size) if not waiting[v]]
    order = []
    while ready:
        v = heapq.heappop(ready)
        order.append(v)
        for w in children[v]:
            waiting[w] -= 1
            if not waiting[w]:
                heapq.heappush(ready, w)
    if len(order) != size:
        raise ValueError("the edges of a stage problem form a cycle; contract it first")
    return order


def assign_stages(
    problem: StageProblem,
    *,
    relative_gap: float = 0.0,
    seconds: float | None = None,
    without: Sequence[Ints] = (),
) -> Staging:
    """The best staging (HiGHS); stagings in `without` are not allowed.

    Variables: y[v, s] = 1 where op v stands at stage s or later, s = 1 … S-1; non-increasing in s, non-decreasing along
    edges. A tensor crosses boundary s where a reader's y exceeds the writer's.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    size, cuts = len(problem.work), problem.stages - 1
    first, last = ranges(problem)
    if (first > last).any():
        v = int(np.argmax(first > last))
        return Staging(
            stage=None,
            objective=math.inf,
            bound=math.inf,
            why=f"op {v} fits no stage: with the ops before and after it {problem.stages} stages of {problem.cap:.6g} "
            "are too few",
        )
    if not cuts:
        stage = np.zeros(size, dtype=np.int64)
        value = objective(problem, stage)
        return Staging(stage=stage, objective=value, bound=value)
    y: Grid = np.arange(size * cuts).reshape(size, cuts)
    rows, cost = _Rows(), [0.0] * y.size
    _keep_order(problem, y, rows)
    _pay_crossings(problem, y, rows, cost)
    _balance(problem, y, rows, cost)
    for banned in without:
        ones = [(int(y[v, s]), -1.0 if s < banned[v] else 1.0) for v in range(size) for s in range(cuts)]
        rows.at_most([(c, -w) for c, w in ones], float(sum(w < 0 for _, w in ones)) - 1.0)
    lower, upper = np.zeros(len(cost)), np.full(len(cost), np.inf)
    upper[: y.size] = 1.0
    for v in range(size):
        lower[y[v, : first[v]]] = 1.0
        upper[y[v, last[v] :]] = 0.0
    prices = np.array(cost)
    scale = float(prices.max(initial=0.0)) / 1e3 or 1.0
    found = milp(
        prices / scale,
        integrality=(np.arange(len(cost)) < y.size).astype(np.int64),
        bounds=Bounds(lower, upper),
        constraints=[
            LinearConstraint(coo_array(rows.matrix(), shape=(rows.count, len(cost))).tocsr(), rows.low, rows.high)
        ],
        options={"mip_rel_gap": relative_gap, "time_limit": math.inf if seconds is None else max(seconds, 0.05)},
    )
    if found.x is None:
        proved = found.status == 2
        why = "no staging keeps the cap on the work of a stage" if proved else "no staging was found in time"
        return Staging(stage=None, objective=math.inf, bound=math.inf if proved else -math.inf, why=why)
    stage = np.rint(found.x[: y.size]).astype(np.int64).reshape(size, cuts).sum(axis=1)
    value = objective(problem, stage)
    proof = found.mip_dual_bound
    return Staging(stage=stage, objective=value, bound=value if proof is None else min(value, scale * float(proof)))


def _keep_order(problem: StageProblem, y: Grid, rows: _Rows) -> None:
    """Stages are taken one after the other, along edges and by groups together."""
    size, cuts = y.shape
    for v in range(size):
        for s in range(1, cuts):
            rows.at_most([(y[v, s], 1.0), (y[v, s - 1], -1.0)], 0.0)
    for group in problem.same:
        for other in group[1:]:
            for s in range(cuts):
                rows.equal([(y[group[0], s], 1.0), (y[other, s], -1.0)], 0.0)
    for u, v, _ in problem.edges:
        for s in range(cuts):
            rows.at_most([(y[u, s], 1.0), (y[v, s], -1.0)], 0.0)


def _pay_crossings(problem: StageProblem, y: Grid, rows: _Rows, cost: list[float]) -> None:
    """A column for whatever is counted once: an edge, or a tensor at a boundary (`hops`) or in a reading stage."""
    cuts, flags = y.shape[1], dict[tuple[int, int], int]()
    for e, (u, v, weight) in enumerate(problem.edges):
        for s in range(cuts):
            once = (e, -1) if problem.count == "edges" else (u, s)
            if once not in flags:
                flags[once] = len(cost)
                cost.append(weight * problem.byte_weight)
            crosses = [(y[v, s], 1.0), (y[u, s], -1.0), (flags[once], -1.0)]
            if problem.count not in ("edges", "hops") and s + 1 < cuts:  # v stands at stage s + 1 itself
                crosses.append((y[v, s + 1], -1.0))
            rows.at_most(crosses, 0.0)


def _balance(problem: StageProblem, y: Grid, rows: _Rows, cost: list[float]) -> None:
    """The cap on the work of every stage, and a column for the largest of them where it is paid for."""
    (size, cuts), total = y.shape, float(problem.work.sum())
    largest = len(cost)
    if problem.bottleneck_weight > 0:
        cost.append(problem.bottleneck_weight)
    for s in range(problem.stages):
        load = [(y[v, s - 1], float(problem.work[v])) for v in range(size)] if s else []
        load += [(y[v, s], -float(problem.work[v])) for v in range(size)] if s < cuts else []
        constant = 0.0 if s else total
        if math.isfinite(problem.cap):
            rows.at_most([(c, w / problem.cap) for c, w in load], (1 + 1e-9) - constant / problem.cap)
        if problem.bottleneck_weight > 0:
            rows.at_most([*load, (largest, -1.0)], -constant)


class _Rows:
    """Sparse constraints being written."""

    def __init__(self) -> None:
        self.count = 0
        self.low: list[float] = []
        self.high: list[float] = []
        self._entries: list[tuple[int, int, float]] = []

    def _add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self._entries += [(self.count, int(column), weight) for column, weight in terms]
        self.low.append(low)
        self.high.append(high)
        self.count += 1

    def at_most(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        self._add(terms, -math.inf, limit)

    def equal(self, terms: Sequence[tuple[int, float]], value: float) -> None:
        self._add(terms, value, value)

    def matrix(self) -> Any:
        rows, columns, values = zip(*self._entries, strict=True)
        return np.array(values), (np.array(rows), np.array(columns))


def optimal_stagings(problem: StageProblem, most: int = 100) -> Iterator[Ints]:
    """All stagings with the least objective, at most `most`."""
    found: list[Ints] = []
    best = math.inf
    while len(found) < most:
        staging = assign_stages(problem, without=found)
        if staging.stage is None or staging.objective > best + 1e-9 * abs(best):
            return
        best = min(best, staging.objective)
        found.append(staging.stage)
        yield staging.stage


def contiguous(problem: StageProblem, order: Sequence[int] | None = None) -> Staging:
    """The best staging that cuts one topological order (by default the lowest number first) into runs.

    Exact for the count of edges and of hops per edge; the other counts are re-counted for the staging found.
    """
    order = topological(len(problem.work), problem.edges) if order is None else order
    size = len(order)
    place = {v: n for n, v in enumerate(order)}
    work = np.concatenate(([0.0], np.cumsum(problem.work[list(order)])))
    into = np.zeros((size + 1, size + 1))  # [a, b]: bytes of edges from before a into the run [a, b)
    for u, v, weight in problem.edges:
        into[place[u] + 1 : place[v] + 1, place[v] + 1 :] += weight
    best = np.full((problem.stages + 1, size + 1), np.inf)
    best[0, 0] = 0.0
    back = np.zeros(best.shape, dtype=np.int64)
    for s in range(1, problem.stages + 1):
        for b in range(1, size + 1):
            fits = work[b] - work[:b] <= problem.cap * (1 + 1e-9)
            costs = np.where(fits, best[s - 1, :b] + into[:b, b], np.inf)
            back[s, b] = np.argmin(costs)
            best[s, b] = costs[back[s, b]]
    if not np.isfinite(best[problem.stages, size]):
        return Staging(stage=None, objective=math.inf, bound=math.inf, why="no cut of this order keeps the cap")
    stage, b = np.zeros(size, dtype=np.int64), size
    for s in range(problem.stages, 0, -1):
        a = int(back[s, b])
        stage[[order[n] for n in range(a, b)]] = s - 1
        b = a
    value = objective(problem, stage)
    return Staging(stage=stage, objective=value, bound=-math.inf)
