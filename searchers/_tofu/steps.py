"""One step of the recursion as a cost graph: a variable per group, its assignments as options, conversions as edges.

Reference: Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (2019), section
5. Every consumer fetches for itself, every value rests cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from simpart.placement import Partial, Placement, Replicate, Shard
from simpart.searchers._cost_graph import CostGraph, Floats, Table
from simpart.searchers._tofu.choices import Assignment, Choices
from simpart.searchers._tofu.regions import Region, cut, received
from simpart.searchers._tofu.work import KernelState, Link, Request, Rules, Workload, place_at

__all__ = ["Assignment", "Domain", "State", "Step", "Steps", "Weigh"]

State = tuple[int, ...]
"""Per group the number of its state: the regions that its nodes are left with."""
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
Weigh = Callable[[int, Placement, Placement, float], float]
"""(number of the step, how it lies, how it is needed, bytes received in one group) to cost."""
R = Replicate()


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """The assignments of a group in one state, and the state each leads to. `unary` are costs, `taste` says what runs
    better than costs tell; it decides, and is counted nowhere."""

    group: int
    state: int
    level: int
    assignments: tuple[Assignment, ...]
    following: tuple[int, ...]
    unary: Floats
    taste: Floats


@dataclass(frozen=True, slots=True)
class Step:
    """A step from one state: its graph, and the domains behind its first variables; further ones are gathers that
    several kernels share."""

    graph: CostGraph
    domains: tuple[Domain, ...]

    def following(self, choice: Sequence[int]) -> State:
        return tuple(d.following[x] for d, x in zip(self.domains, choice, strict=False))

    @property
    def tasted(self) -> CostGraph:
        """The graph in which the better of equals is cheaper."""
        more = self.graph.unary[len(self.domains) :]
        return replace(self.graph, unary=(*(d.unary + d.taste for d in self.domains), *more))

    def taste(self, choice: Sequence[int]) -> float:
        return sum(float(d.taste[x]) for d, x in zip(self.domains, choice, strict=False))

    def cost(self, choice: Sequence[int]) -> float:
        """Of a choice."""
        total = sum(float(d.unary[x]) for d, x in zip(self.domains, choice, strict=False))
        return total + sum(float(table[choice[i], choice[j]]) for i, j, table in self.graph.edges)

    def assignments(self, choice: Sequence[int]) -> tuple[Assignment, ...]:
        return tuple(d.assignments[x] for d, x in zip(self.domains, choice, strict=False))


@dataclass(slots=True)
class Steps:
    """Makes the steps of one sequence of factors, keeping what states have in common. `prefer` narrows the assignments
    of a group in a state (baselines).

    Costs are bytes received by all groups together, unless `weigh` says otherwise.
    """

    work: Workload
    factors: tuple[int, ...]
    rules: Rules = field(default_factory=Rules)
    weigh: Weigh | None = None
    prefer: Callable[[int, Sequence[Assignment], Sequence[object]], Sequence[int]] | None = None
    _numbers: list[dict[tuple[object, ...], int]] = field(default_factory=list)
    _states: list[list[tuple[object, ...]]] = field(default_factory=list)
    _domains: dict[tuple[int, int, int], Domain] = field(default_factory=dict)
    _tables: dict[object, Table] = field(default_factory=dict)
    _links: dict[tuple[int, int], list[Link]] = field(default_factory=dict)
    _whole: dict[object, Bools] = field(default_factory=dict)
    choices: Choices = field(init=False)

    def __post_init__(self) -> None:
        work = self.work
        self._numbers = [{} for _ in work.groups]
        self._states = [[] for _ in work.groups]
        for link in work.links:
            a, b = work.group_of[link.kernel], work.group_of[work.node_of_value(link.value)]
            self._links.setdefault((a, b), []).append(link)
        self.choices = Choices(work, self.factors, self.rules)

    @property
    def linked(self) -> tuple[tuple[int, int], ...]:
        """Pairs of groups (kernel's, value's) with conversions between them."""
        return tuple(pair for pair in self._links if pair[0] != pair[1])

    def links_between(self, a: int, b: int) -> Sequence[Link]:
        """Links of kernels of one group with values of another."""
        return self._links[a, b]

    def cost(self, level: int, lies: Placement, needed: Placement, size: float) -> float:
        """Of bytes received in one group at a step."""
        if self.weigh is not None:
            return self.weigh(level, lies, needed, size)
        return prod(self.factors[:level]) * size

    # --- states ------------------------------------------------------------------------------------------------------
    def start(self) -> State:
        """Before the first step."""
        work, found = self.work, []
        for number, members in enumerate(work.groups):
            content: list[object] = []
            for node in members:
                if node < len(work.kernels):
                    content.append(KernelState.of(work.kernels[node]))
                else:
                    content.append(Region(work.values[node - len(work.kernels)].shape))
            found.append(self._number(number, tuple(content)))
        return tuple(found)

    def _number(self, group: int, content: tuple[object, ...]) -> int:
        known = self._numbers[group]
        if content not in known:
            known[content] = len(known)
            self._states[group].append(content)
        return known[content]

    def kernel(self, state: State, kernel: int) -> KernelState:
        found = self._node(state, kernel)
        assert isinstance(found, KernelState)
        return found

    def region(self, state: State, value: int) -> Region:
        found = self._node(state, self.work.node_of_value(value))
        assert isinstance(found, Region)
        return found

    def _node(self, state: State, node: int) -> object:
        group = self.work.group_of[node]
        return self._states[group][state[group]][self.work.groups[group].index(node)]

    # --- steps -------------------------------------------------------------------------------------------------------
    def step(self, state: State, level: int) -> Step:
        """The cost graph of a step from this state."""
        domains = tuple(self.domain(g, number, level) for g, number in enumerate(state))
        unary, edges = [d.unary for d in domains], list[tuple[int, int, Table]]()
        gathers = self._gathers(state, domains, level) if self.rules.share else []
        once = frozenset(link for _, links in gathers for link in links)
        for a, b in self.linked:
            table = self.table(domains[a], domains[b], once)
            if table.any():
                edges.append((a, b, table))
        for paid, links in gathers:  # 0: not gathered, 1: gathered for all of these readers
            unary.append(np.zeros(2))
            edges.append((self.work.group_of[self.work.node_of_value(links[0].value)], len(unary) - 1, paid))
            for link in links:
                group = self.work.group_of[link.kernel]
                needs = self._needs_whole(domains[group], link)
                edges.append((group, len(unary) - 1, np.where(needs[:, None] & [True, False], np.inf, 0.0)))
        return Step(CostGraph(unary=tuple(unary), edges=tuple(edges)), domains)

    def _gathers(self, state: State, domains: Sequence[Domain], level: int) -> list[tuple[Table, tuple[Link, ...]]]:
        """Values that several kernels may need whole, in the same region: what one gather costs, and who reads it."""
        work, found = self.work, []
        for v, value in enumerate(work.values):
            node = work.node_of_value(v)
            group = work.group_of[node]
            readers: dict[Region, list[Link]] = {}
            for link in work.links_of[node]:
                home = work.group_of[link.kernel]
                if not link.makes and home != group and self._needs_whole(domains[home], link).any():
                    readers.setdefault(self.kernel(state, link.kernel).region(link), []).append(link)
            own, where = self.region(state, v), work.groups[group].index(node)
            for region, links in readers.items():
                if len(links) < 2:
                    continue
                times = max(link.tensors or link.count for link in links)
                paid = np.zeros((len(domains[group].assignments), 2))
                for row, assignment in enumerate(domains[group].assignments):
                    place = assignment[where]
                    assert not isinstance(place, Request)
                    size = received(own, place, region, R, self.factors[level]) * value.itemsize
                    paid[row, 1] = times * self.cost(level, place, R, size) if size else 0.0
                found.append((paid, tuple(links)))
        return found

    def _needs_whole(self, domain: Domain, link: Link) -> Bools:
        """Of which assignments a kernel reads a value whole."""
        key = (domain.group, domain.state, domain.level, link)
        if key not in self._whole:
            x = self.work.groups[domain.group].index(link.kernel)
            places = [place_at(a[x], link) for a in domain.assignments]  # type: ignore[arg-type]
            self._whole[key] = np.array([isinstance(p, Replicate) for p in places], dtype=bool)
        return self._whole[key]

    # --- groups ------------------------------------------------------------------------------------------------------
    def domain(self, group: int, number: int, level: int) -> Domain:
        """The assignments of a group in a state."""
        key = (group, number, level)
        if key in self._domains:
            return self._domains[key]
        content = self._states[group][number]
        assignments = self.choices.assignments(group, content, level)
        if self.prefer is not None:
            assignments = [assignments[x] for x in self.prefer(group, assignments, content)]
        following = []
        for assignment in assignments:
            after: list[object] = []
            for before, chosen in zip(content, assignment, strict=True):
                if isinstance(chosen, Request):
                    assert isinstance(before, KernelState)
                    after.append(before.after(chosen, self.factors[level]))
                else:
                    assert isinstance(before, Region)
                    after.append(cut(before, chosen, self.factors[level]))
            following.append(self._number(group, tuple(after)))
        unary = self._unary(group, number, assignments, level)
        taste = self._taste(group, content, assignments)
        made = Domain(group, number, level, tuple(assignments), tuple(following), unary, taste)
        return self._domains.setdefault(key, made)

    # --- costs -------------------------------------------------------------------------------------------------------
    def _unary(self, group: int, number: int, assignments: Sequence[Assignment], level: int) -> Floats:
        """Exchanges inside kernels, and conversions between nodes of the group."""
        work, parts = self.work, self.factors[level]
        state_of, members = self._states[group][number], self.work.groups[group]
        at = {node: x for x, node in enumerate(members)}
        costs = np.zeros(len(assignments))
        for x, node in enumerate(members):
            if node >= len(work.kernels):
                continue
            sizes = [work.values[link.value].itemsize for link in work.links_of[node] if link.makes]
            for row, assignment in enumerate(assignments):
                request = assignment[x]
                assert isinstance(request, Request)
                if request.exchanged:
                    size = 2 * (parts - 1) * request.exchanged * max(sizes, default=4)
                    costs[row] += work.counts[node] * self.cost(level, Partial(), R, size)
            for link in work.links_of[node]:
                other = work.node_of_value(link.value)
                if other not in at:
                    continue
                kernel, region = state_of[x], state_of[at[other]]
                assert isinstance(kernel, KernelState) and isinstance(region, Region)
                for row, assignment in enumerate(assignments):
                    request, place = assignment[x], assignment[at[other]]
                    assert isinstance(request, Request) and not isinstance(place, Request)
                    costs[row] += self.link_cost(link, kernel, request, region, place, level)
        return costs

    def _taste(self, group: int, content: Sequence[object], assignments: Sequence[Assignment]) -> Floats:
        """Part of the bytes of values that are cut once more along a dim."""
        work, costs = self.work, np.zeros(len(assignments))
        for x, node in enumerate(self.work.groups[group] if self.rules.unnested else ()):
            region = content[x]
            if isinstance(region, Region):
                value = work.values[node - len(work.kernels)]
                size = prod(value.shape) * value.itemsize * value.count
                for row, assignment in enumerate(assignments):
                    place = assignment[x]
                    if isinstance(place, Shard) and region.shape[place.dim] < value.shape[place.dim]:
                        costs[row] += self.rules.unnested * self.cost(0, Shard(0), R, size)
        return costs

    def link_cost(
        self, link: Link, kernel: KernelState, request: Request, region: Region, place: Placement, level: int
    ) -> float:
        """Of all instances of a link."""
        there = place_at(request, link)
        mine, parts = kernel.region(link), self.factors[level]
        if link.makes:
            lies, needed = there, place
            elements = received(mine, there, region, place, parts)
        else:
            lies, needed = place, there
            elements = received(region, place, mine, there, parts)
        if elements == 0:
            return 0.0
        times = link.tensors or link.count if self.rules.share else link.count
        return times * self.cost(level, lies, needed, elements * self.work.values[link.value].itemsize)

    def table(self, a: Domain, b: Domain, once: frozenset[Link] = frozenset()) -> Table:
        """Conversions between two groups, by their assignments; gathers of the links `once` are paid elsewhere."""
        elsewhere = once.intersection(self._links[a.group, b.group])
        key = (a.group, a.state, b.group, b.state, a.level, elsewhere)
        if key in self._tables:
            return self._tables[key]
        work, links, level = self.work, self._links[a.group, b.group], a.level
        table = np.zeros((len(a.assignments), len(b.assignments)))
        kernels, values = work.groups[a.group], work.groups[b.group]
        for link in links:
            i, j = kernels.index(link.kernel), values.index(work.node_of_value(link.value))
            kernel, region = self._states[a.group][a.state][i], self._states[b.group][b.state][j]
            assert isinstance(kernel, KernelState) and isinstance(region, Region)
            rows, row_of = _distinct(x[i] for x in a.assignments)
            columns, column_of = _distinct(x[j] for x in b.assignments)
            small = np.array(
                [
                    [
                        0.0
                        if link in elsewhere and isinstance(place_at(r, link), Replicate)  # type: ignore[arg-type]
                        else self.link_cost(link, kernel, r, region, p, level)  # type: ignore[arg-type]
                        for p in columns
                    ]
                    for r in rows
                ]
            )
            table += small[np.ix_(row_of, column_of)]
        return self._tables.setdefault(key, table)


def _distinct(items: Iterator[Placement | Request] | Sequence[Placement | Request]) -> tuple[list[object], list[int]]:
    known: dict[object, int] = {}
    where = [known.setdefault(item, len(known)) for item in items]
    return list(known), where
