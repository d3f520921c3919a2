"""The recursion: one exact step after another, ties kept in a beam; the joint problem where it is small enough.

Step i divides what step i - 1 left to a group; its cost counts once for each of the k_1 ⋯ k_(i-1) groups. The
recursion can miss the optimum of all steps together, so that one is solved, or bounded, besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import inf, prod

import numpy as np

from simpart.placement import Partial, Placement, Replicate
from simpart.searchers._cost_graph import CostGraph, Level, Table, minimise, near_optimal
from simpart.searchers._tofu_regions import Region, cut, device_received, received
from simpart.searchers._tofu_steps import Assignment, State, Step, Steps, Weigh
from simpart.searchers._tofu_work import KernelState, Link, Request, Workload, place_at

__all__ = [
    "Found", "chosen_of", "counted_bytes", "joint", "link_bytes", "lone_bound", "recount", "recursion", "tie_range",
    "weighed",
]  # fmt: skip

ROUNDING = 1e-13
"""Of the sum of all costs that there may be: what sums in another order differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A sequence of steps: per step the assignment of every group; `deltas` are their weighted costs. `bound` is a
    lower bound of the total over all sequences, `method` says what gave the total; `taste` see `Rules.unnested`."""

    factors: tuple[int, ...]
    steps: tuple[tuple[Assignment, ...], ...]
    deltas: tuple[float, ...]
    bound: float
    method: str
    states: int = 1
    taste: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.deltas)

    @property
    def gap(self) -> float:
        """How far the total may be above the optimum, as a fraction of it."""
        return 0.0 if self.total <= 0 else max(0.0, (self.total - self.bound) / self.total)


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


# --- all steps together ----------------------------------------------------------------------------------------------
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


# --- what is known of a total ----------------------------------------------------------------------------------------
def chosen_of(work: Workload, found: Found) -> list[list[Request | Placement]]:
    """Per node of the workload what it does in each step."""
    chosen: list[list[Request | Placement]] = [[] for _ in range(len(work.kernels) + len(work.values))]
    for assignments in found.steps:
        for members, assignment in zip(work.groups, assignments, strict=True):
            for node, what in zip(members, assignment, strict=True):
                chosen[node].append(what)
    return chosen


def link_bytes(work: Workload, found: Found) -> list[float]:
    """Bytes that all devices together receive for each link, counted device by device."""
    chosen, total = chosen_of(work, found), []
    for link in work.links:
        needs = tuple(place_at(r, link) for r in chosen[link.kernel] if isinstance(r, Request))
        lies = tuple(p for p in chosen[work.node_of_value(link.value)] if not isinstance(p, Request))
        value = work.values[link.value]
        ways = (needs, lies) if link.makes else (lies, needs)
        total.append(link.count * value.itemsize * device_received(value.shape, *ways, found.factors))
    return total


def recount(work: Workload, found: Found) -> float:
    """Bytes that all devices together receive, counted device by device, exchanges inside kernels included."""
    return sum(link_bytes(work, found)) + exchanged_bytes(work, found)


def counted_bytes(work: Workload, found: Found) -> float:
    """Bytes that the recursion counts in its first groups, whatever the costs were that it went by."""
    return weighed(work, found, lambda level, lies, needed, size: prod(found.factors[:level]) * size)


def weighed(work: Workload, found: Found, weigh: Weigh) -> float:
    """The cost of a sequence of steps by other prices than it was found with."""
    chosen, total = chosen_of(work, found), 0.0
    kernels = [KernelState.of(kernel) for kernel in work.kernels]
    regions = [Region(value.shape) for value in work.values]
    for level, parts in enumerate(found.factors):
        for link in work.links:
            request, place = chosen[link.kernel][level], chosen[work.node_of_value(link.value)][level]
            assert isinstance(request, Request) and not isinstance(place, Request)
            mine, there = kernels[link.kernel].region(link), place_at(request, link)
            if link.makes:
                lies, needed, elements = there, place, received(mine, there, regions[link.value], place, parts)
            else:
                lies, needed, elements = place, there, received(regions[link.value], place, mine, there, parts)
            if elements:
                total += link.count * weigh(level, lies, needed, elements * work.values[link.value].itemsize)
        for k, state in enumerate(kernels):
            request = chosen[k][level]
            assert isinstance(request, Request)
            if request.exchanged:
                itemsize = max((work.values[x.value].itemsize for x in work.links_of[k] if x.makes), default=4)
                size = 2 * (parts - 1) * request.exchanged * itemsize
                total += work.counts[k] * weigh(level, Partial(), Replicate(), size)
            kernels[k] = state.after(request, parts)
        for v, region in enumerate(regions):
            place = chosen[work.node_of_value(v)][level]
            assert not isinstance(place, Request)
            regions[v] = cut(region, place, parts)
    return total


def exchanged_bytes(work: Workload, found: Found) -> float:
    """Bytes of the all-reduces inside kernels."""
    total = 0.0
    for node, row in enumerate(chosen_of(work, found)[: len(work.kernels)]):
        itemsize = max((work.values[x.value].itemsize for x in work.links_of[node] if x.makes), default=4)
        for level, what in enumerate(row):
            if isinstance(what, Request):
                size = 2 * (found.factors[level] - 1) * what.exchanged * itemsize
                total += prod(found.factors[:level]) * work.counts[node] * size
    return total


def lone_bound(steps: Steps) -> float:
    """A lower bound of the bytes of any plan: every kernel for itself, its values cut as it likes best.

    An operand that is not cut in the steps U costs (product of k over U, less 1) times its bytes, whatever the order;
    so does an output left as terms in the steps U. Conversions between cuts only add to that.
    """
    work, factors, total = steps.work, steps.factors, 0.0
    sizes = sorted(set(factors))
    for k, kernel in enumerate(work.kernels):
        outside = [x for x in work.links_of[k] if work.group_of[work.node_of_value(x.value)] != work.group_of[k]]
        outside = [x for x in outside if _can_be_cut(work.values[x.value].shape, sizes)]
        if not outside:
            continue
        rows = set()
        for parts in sizes:
            for request in steps.requests(k, KernelState.of(kernel), factors.index(parts)):
                rows.add(tuple(_stays(request, x) for x in outside))
        weights = np.array([
            x.count / max(1, work.counts[k]) * work.values[x.value].itemsize * prod(work.values[x.value].shape)
            for x in outside
        ])  # fmt: skip
        choices = sorted(rows)
        best = inf
        for picks in _spreads(len(choices), factors):
            stays = np.ones(len(outside))
            for parts, row in picks:
                stays *= np.where(np.array(choices[row]), parts, 1)
            best = min(best, float(weights @ (stays - 1)))
        total += work.counts[k] * (0.0 if best == inf else best)
    return total


def _can_be_cut(shape: tuple[int, ...], sizes: Sequence[int]) -> bool:
    return any(n % parts == 0 for parts in sizes for n in shape)


def _stays(request: Request, link: Link) -> bool:
    """Whether a tensor is needed whole, or left as terms, by a request."""
    place = place_at(request, link)
    return isinstance(place, Partial) if link.makes else isinstance(place, Replicate)


def _spreads(choices: int, factors: Sequence[int]) -> Iterable[tuple[tuple[int, int], ...]]:
    """Ways to give each step a request, the order among equal factors aside."""
    runs = [combinations_with_replacement(range(choices), factors.count(p)) for p in sorted(set(factors))]
    for pick in product(*map(list, runs)):
        yield tuple((p, row) for p, rows in zip(sorted(set(factors)), pick, strict=True) for row in rows)
