"""Rules that the partition search is compared with, after Wang, Huang and Li (2019), section 7.

AllRow-Greedy cuts every tensor along its samples (a parameter along its first dim) and lets every kernel take its
cheapest request. Spartan decides kernel by kernel, the one with most bytes undecided first. EqualChop takes one step
of all devices, so that a tensor is cut along a single dim. ICML18 searches like Tofu without requests that leave terms
to be summed. Data parallelism and one weird trick (Krizhevsky, arXiv 1404.5997: samples split everywhere but in fully
connected layers, which split their outputs) keep what they replicate whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from simpart.placement import Partial, Replicate, Shard
from simpart.searchers._tofu.choices import Assignment
from simpart.searchers._tofu.counts import Found
from simpart.searchers._tofu.search import recursion
from simpart.searchers._tofu.steps import Step, Steps, Weigh
from simpart.searchers._tofu.work import Request, Rules, Workload

__all__ = ["METHODS", "UNNESTED", "Method", "solve"]

UNNESTED = 0.003
"""Enough that Wide-ResNet-152-10 on 8 devices receives a sixth less when it runs, for 0.03 % more by the paper's count
(benchmarks/tofu.py)."""
Prefer = Callable[[int, Sequence[Assignment], Sequence[object]], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to find a partition. `one_step`: all devices at once; `rows`: only cuts by samples; `greedy`: Spartan."""

    name: str
    reduce: bool = True
    one_step: bool = False
    rows: bool = False
    greedy: bool = False

    def factors(self, factors: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(factors),) if self.one_step and factors else factors


METHODS = {
    method.name: method
    for method in (
        Method(name="tofu"),
        Method(name="allrow", rows=True),
        Method(name="spartan", greedy=True),
        Method(name="equalchop", one_step=True),
        Method(name="icml18", reduce=False),
    )
}


def solve(
    method: Method,
    work: Workload,
    factors: tuple[int, ...],
    *,
    weigh: Weigh | None = None,
    beam: int = 4,
    ties: int = 8,
    slack: float = 0.0,
    share: bool = False,
    unnested: float = UNNESTED,
    check: Callable[[], None] = lambda: None,
) -> tuple[Steps, Found]:
    """The partition that a method finds, and the steps it was found with."""
    rules = Rules(reduce=method.reduce, unnested=unnested, share=share)
    prefer = _rows(work) if method.rows else None
    steps = Steps(work, method.factors(factors), rules, weigh, prefer)
    choose = _spartan(work) if method.greedy else None
    return steps, recursion(steps, beam=beam, ties=ties, slack=slack, choose=choose, check=check)


# --- AllRow-Greedy ---------------------------------------------------------------------------------------------------
def _rows(work: Workload) -> Prefer:
    """Of the assignments of a group those that cut most of its bytes by samples; a kernel alone is free."""

    def prefer(group: int, assignments: Sequence[Assignment], content: Sequence[object]) -> Sequence[int]:
        members = work.groups[group]
        values = [(x, node - len(work.kernels)) for x, node in enumerate(members) if node >= len(work.kernels)]
        if not values:
            return range(len(assignments))
        scores = []
        for assignment in assignments:
            score = 0
            for x, number in values:
                value, place = work.values[number], assignment[x]
                if isinstance(place, Shard) and place.dim == value.row:
                    rank = 2 if place.block == value.row_block else 1 if place.block is None else 0
                    score += rank * prod(value.shape) * value.count
            scores.append(score)
        return [int(np.argmax(scores))]

    return prefer


# --- Spartan ---------------------------------------------------------------------------------------------------------
def _spartan(work: Workload) -> Callable[[Step], Sequence[int]]:
    def choose(step: Step) -> Sequence[int]:
        domains, linked = step.domains, _neighbours(step)
        size = [_bytes(work, d.group) for d in domains]
        decided: dict[int, int] = {}
        kernels = {g for g, members in enumerate(work.groups) if any(n < len(work.kernels) for n in members)}
        waiting = set(kernels)
        while waiting:
            g = max(waiting, key=lambda g: (sum(size[x] for x in {g, *linked[g]} if x not in decided), -g))
            waiting.remove(g)
            costs = np.array(domains[g].unary)
            for other, table in linked[g].items():
                costs = costs + (table[:, decided[other]] if other in decided else table.min(axis=1))
            best = min(range(len(costs)), key=lambda x: (costs[x], _spread(work, step, g, x), x))
            decided[g] = best
            for other, table in linked[g].items():
                if other not in decided and other not in kernels:
                    decided[other] = int(np.argmin(table[best] + domains[other].unary))
        return [decided.get(g, 0) for g in range(len(domains))]

    return choose


def _neighbours(step: Step) -> list[dict[int, np.ndarray]]:
    found: list[dict[int, np.ndarray]] = [{} for _ in step.domains]
    for a, b, table in step.graph.edges:
        found[a][b] = found[a].get(b, 0) + table
        found[b][a] = found[b].get(a, 0) + table.T
    return found


def _bytes(work: Workload, group: int) -> int:
    values = (work.values[n - len(work.kernels)] for n in work.groups[group] if n >= len(work.kernels))
    return sum(prod(v.shape) * v.itemsize for v in values)


def _spread(work: Workload, step: Step, group: int, option: int) -> int:
    """Elements that an assignment's kernels need whole or leave as terms."""
    total = 0
    for node, what in zip(work.groups[group], step.domains[group].assignments[option], strict=True):
        if isinstance(what, Request):
            kernel = work.kernels[node]
            for places, shapes in ((what.inputs, kernel.inputs), (what.outputs, kernel.outputs)):
                pairs = zip(places, shapes, strict=True)
                total += sum(prod(shape) for place, shape in pairs if isinstance(place, Replicate | Partial))
    return total
