"""A finished sequence of steps, and what is known of it: bytes by step and by device, other prices, a lower bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import gcd, inf, prod

import numpy as np

from simpart.placement import Partial, Placement, Replicate
from simpart.searchers._tofu.choices import Assignment
from simpart.searchers._tofu.regions import Region, cut, device_received, received
from simpart.searchers._tofu.steps import Steps, Weigh
from simpart.searchers._tofu.work import KernelState, Link, Request, Workload, place_at

__all__ = ["Found", "chosen_of", "counted_bytes", "link_bytes", "lone_bound", "recount", "weighed"]


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
    so does an output left as terms in the steps U. Conversions between cuts only add to that. Values that may run out
    of dims to cut are left out: whole ones cost nothing to read.
    """
    work, factors, total = steps.work, steps.factors, 0.0
    sizes = sorted(set(factors))
    for k, kernel in enumerate(work.kernels):
        outside = [x for x in work.links_of[k] if work.group_of[work.node_of_value(x.value)] != work.group_of[k]]
        outside = [x for x in outside if _is_always_cut(work.values[x.value].shape, factors)]
        if not outside:
            continue
        rows = {tuple(not x.makes for x in outside)}  # run whole
        for parts in sizes:
            for request in steps.choices.requests(k, KernelState.of(kernel), factors.index(parts)):
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


def _is_always_cut(shape: tuple[int, ...], factors: Sequence[int]) -> bool:
    """Whether some dim divides in every step, however the steps before have cut."""
    for parts in set(factors):
        left = 0
        for n in shape:
            while n and n % parts == 0:
                n, left = n // parts, left + 1
        if left < sum(gcd(parts, other) > 1 for other in factors):
            return False
    return True


def _stays(request: Request, link: Link) -> bool:
    """Whether a tensor is needed whole, or left as terms, by a request."""
    place = place_at(request, link)
    return isinstance(place, Partial) if link.makes else isinstance(place, Replicate)


def _spreads(choices: int, factors: Sequence[int]) -> Iterable[tuple[tuple[int, int], ...]]:
    """Ways to give each step a request, the order among equal factors aside."""
    runs = [combinations_with_replacement(range(choices), factors.count(p)) for p in sorted(set(factors))]
    for pick in product(*map(list, runs)):
        yield tuple((p, row) for p, rows in zip(sorted(set(factors)), pick, strict=True) for row in rows)
