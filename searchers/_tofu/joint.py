"""All steps together: the optimum over all sequences of assignments, where a group has few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simpart.searchers._cost_graph import CostGraph, Level, Table, minimise
from simpart.searchers._tofu.counts import Found
from simpart.searchers._tofu.regions import device_received
from simpart.searchers._tofu.steps import Steps
from simpart.searchers._tofu.work import Request, place_at

__all__ = ["joint"]


@dataclass(frozen=True, slots=True)
class _Path:
    """Assignments of one group through all steps, and its states before and after each."""

    assignments: tuple[int, ...]
    states: tuple[int, ...]


def joint(
    steps: Steps,
    *,
    by_device: bool = False,
    most: int = 1024,
    seconds: float | None = None,
    relative_gap: float = 0.0,
) -> Found | None:
    """The optimum over all sequences of assignments, or None if a group has more than `most` of them.

    `by_device` counts what every device receives instead of what the recursion counts in its first groups.
    """
    options: list[list[_Path]] = []
    for group, number in enumerate(steps.start()):
        found = _paths(steps, group, number, most)
        if found is None:
            return None
        options.append(found)
    levels = range(len(steps.factors))

    def unary(group: int, path: _Path) -> float:
        return sum(float(steps.domain(group, path.states[i], i).unary[path.assignments[i]]) for i in levels)

    def taste(group: int, path: _Path) -> float:
        return sum(float(steps.domain(group, path.states[i], i).taste[path.assignments[i]]) for i in levels)

    edges: list[tuple[int, int, Table]] = []
    for a, b in steps.linked:
        table = _by_device(steps, a, b, options) if by_device else sum(_spread(steps, i, a, b, options) for i in levels)
        if np.any(table):
            edges.append((a, b, np.asarray(table)))
    costs = tuple(np.array([unary(g, path) for path in paths]) for g, paths in enumerate(options))
    better = [np.array([taste(g, path) for path in paths]) for g, paths in enumerate(options)]
    plain = CostGraph(unary=costs, edges=tuple(edges))
    level: Level = "exact" if seconds is None else "quick"
    solution = minimise(plain, seconds=seconds, relative_gap=relative_gap, level=level)
    if solution.choice is None:
        return None
    bound = solution.bound
    if any(t.any() for t in better):
        tasted = CostGraph(unary=tuple(c + t for c, t in zip(costs, better, strict=True)), edges=tuple(edges))
        other = minimise(tasted, seconds=seconds, relative_gap=relative_gap, level=level)
        solution = solution if other.choice is None else other
    assert solution.choice is not None
    chosen = [options[g][int(x)] for g, x in enumerate(solution.choice)]
    domains = [[steps.domain(g, path.states[i], i) for g, path in enumerate(chosen)] for i in levels]
    picked = [[path.assignments[i] for path in chosen] for i in levels]
    deltas = tuple(
        sum(float(d.unary[x]) for d, x in zip(row, at, strict=True))
        + sum(float(steps.table(row[a], row[b])[at[a], at[b]]) for a, b in steps.linked)
        for row, at in zip(domains, picked, strict=True)
    )
    return Found(
        factors=steps.factors,
        steps=tuple(
            tuple(d.assignments[x] for d, x in zip(row, at, strict=True))
            for row, at in zip(domains, picked, strict=True)
        ),
        deltas=(solution.cost,) if by_device else deltas,
        bound=bound,
        taste=sum(taste(g, path) for g, path in enumerate(chosen)),
        method=f"joint ({solution.method})",
    )


def _paths(steps: Steps, group: int, number: int, most: int) -> list[_Path] | None:
    found = [_Path((), (number,))]
    for level in range(len(steps.factors)):
        longer = []
        for path in found:
            following = steps.domain(group, path.states[-1], level).following
            longer += [_Path((*path.assignments, x), (*path.states, after)) for x, after in enumerate(following)]
            if len(longer) > most:
                return None
        found = longer
    return found


def _spread(steps: Steps, level: int, a: int, b: int, options: Sequence[Sequence[_Path]]) -> Table:
    """Costs of one step between two groups, by their paths."""
    rows, columns = (_by_state(options[g], level) for g in (a, b))
    table = np.zeros((len(options[a]), len(options[b])))
    for s, (here, x) in rows.items():
        for t, (there, y) in columns.items():
            small = steps.table(steps.domain(a, s, level), steps.domain(b, t, level))
            table[np.ix_(here, there)] = small[np.ix_(x, y)]
    return table


def _by_state(paths: Sequence[_Path], level: int) -> dict[int, tuple[list[int], list[int]]]:
    found: dict[int, tuple[list[int], list[int]]] = {}
    for number, path in enumerate(paths):
        rows, chosen = found.setdefault(path.states[level], ([], []))
        rows.append(number)
        chosen.append(path.assignments[level])
    return found


def _by_device(steps: Steps, a: int, b: int, options: Sequence[Sequence[_Path]]) -> Table:
    work, levels = steps.work, range(len(steps.factors))
    table = np.zeros((len(options[a]), len(options[b])))
    for link in steps.links_between(a, b):
        i, j = work.groups[a].index(link.kernel), work.groups[b].index(work.node_of_value(link.value))
        shape, itemsize = work.values[link.value].shape, work.values[link.value].itemsize
        for x, path in enumerate(options[a]):
            asked = [steps.domain(a, path.states[n], n).assignments[path.assignments[n]][i] for n in levels]
            needs = tuple(place_at(request, link) for request in asked if isinstance(request, Request))
            for y, other in enumerate(options[b]):
                lies = [steps.domain(b, other.states[n], n).assignments[other.assignments[n]][j] for n in levels]
                places = tuple(p for p in lies if not isinstance(p, Request))
                ways = (needs, places) if link.makes else (places, needs)
                table[x, y] += link.count * itemsize * device_received(shape, *ways, steps.factors)
    return table
