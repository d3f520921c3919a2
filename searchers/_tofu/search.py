"""The recursion: one exact step after another, ties kept in a beam; the joint problem where it is small enough.

Step i divides what step i - 1 left to a group; its cost counts once for each of the k_1 ⋯ k_(i-1) groups. The
recursion can miss the optimum of all steps together, so that one is solved, or bounded, besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simpart.searchers._cost_graph import CostGraph, minimise, near_optimal
from simpart.searchers._tofu.choices import Assignment
from simpart.searchers._tofu.counts import Found
from simpart.searchers._tofu.steps import State, Step, Steps

__all__ = ["recursion", "tie_range"]

ROUNDING = 1e-13
"""Of the sum of all costs that there may be: what sums in another order differ by."""


def recursion(
    steps: Steps,
    *,
    beam: int = 4,
    ties: int = 8,
    slack: float = 0.0,
    choose: Callable[[Step], Sequence[int]] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Found:
    """Keep `beam` states after each step, each followed by its at most `ties` optimal choices, or those within a
    fraction `slack` of the optimum; `choose` takes a step's choice instead (a greedy rule)."""
    beams: dict[State, _Beam] = {steps.start(): _Beam()}
    seen, first, last = 0, 0.0, len(steps.factors) - 1
    for level in range(len(steps.factors)):
        following: dict[State, _Beam] = {}
        for state, before in beams.items():
            check()
            step = steps.step(state, level)
            choices = [tuple(map(int, choose(step)))] if choose else _choices(steps, step, level < last, ties, slack)
            for choice in choices:
                seen += 1
                now = _Beam(
                    (*before.deltas, step.cost(choice)), (*before.taken, step.assignments(choice)),
                    before.taste + step.taste(choice),
                )  # fmt: skip
                after = step.following(choice)
                if after not in following or now.rank < following[after].rank:
                    following[after] = now
            if level == 0:
                first = min(step.cost(choice) for choice in choices)
        ranked = sorted(following.items(), key=lambda item: item[1].rank)  # stable: first come among equals
        beams = dict(ranked[:beam])
    best = min(beams.values(), key=lambda found: found.rank)
    return Found(
        factors=steps.factors, steps=best.taken, deltas=best.deltas, bound=min(first, sum(best.deltas)),
        method="recursion", states=seen, taste=best.taste,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Beam:
    """One way to come to a state."""

    deltas: tuple[float, ...] = ()
    taken: tuple[tuple[Assignment, ...], ...] = ()
    taste: float = 0.0

    @property
    def rank(self) -> float:
        return sum(self.deltas) + self.taste


def _choices(steps: Steps, step: Step, several: bool, most: int, slack: float) -> list[tuple[int, ...]]:
    """Optimal choices of a step, those of better taste among them."""
    tasted = step.tasted if steps.rules.unnested else step.graph
    if not several or most == 1:
        solution = minimise(tasted, level="quick")
        assert solution.choice is not None
        return [tuple(map(int, solution.choice))]
    graphs = [tasted, step.graph] if steps.rules.unnested else [step.graph]
    found = [tuple(map(int, c)) for g in graphs for c in near_optimal(g, _room(g, slack), -(-most // len(graphs)))]
    return list(dict.fromkeys(found))


def _room(graph: CostGraph, slack: float) -> float:
    """What costs may differ by and still count as equal, or near."""
    scale = sum(float(np.abs(costs).max(initial=0)) for costs in graph.unary)
    scale += sum(float(table[np.isfinite(table)].max(initial=0)) for _, _, table in graph.edges)
    room = ROUNDING * scale
    if slack > 0:
        room += slack * max(0.0, minimise(graph, level="quick").cost)
    return room


def tie_range(steps: Steps, most: int = 100_000) -> tuple[float, float]:
    """The least and the largest total that a plain recursion, which keeps one optimum per step, may reach."""
    known: dict[tuple[int, State], tuple[float, float]] = {}

    def visit(level: int, state: State) -> tuple[float, float]:
        if level == len(steps.factors):
            return 0.0, 0.0
        if (level, state) not in known:
            step = steps.step(state, level)
            choices = [c.tolist() for c in near_optimal(step.graph, _room(step.graph, 0.0), most)]
            after = {step.following(c): step.cost(c) for c in choices}
            ends = [(cost, *visit(level + 1, s)) for s, cost in after.items()]
            known[level, state] = min(c + low for c, low, _ in ends), max(c + high for c, _, high in ends)
        return known[level, state]

    return visit(0, steps.start())
