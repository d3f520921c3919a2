"""What each group of a workload may choose in a step, given the regions that earlier steps left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from simpart.errors import UserError
from simpart.placement import Partial, Placement, Replicate, Shard
from simpart.searchers._tofu.regions import Region, divides
from simpart.searchers._tofu.work import KernelState, Request, Rules, Workload, place_at, whole_request

__all__ = ["Assignment", "Choices", "check_factors"]

Assignment = tuple[Placement | Request, ...]
"""Per node of a group: how a value is cut, or what a kernel is asked."""
Wish = tuple[bool, int, Shard]
R = Replicate()
MOST_STRIDED = 3
"""Strided cuts that are tried for one value."""


@dataclass(slots=True)
class Choices:
    """The assignments of groups, for one sequence of factors. A state of a group is a `KernelState` or `Region` per
    node."""

    work: Workload
    factors: tuple[int, ...]
    rules: Rules
    _strided: dict[int, dict[tuple[int, int], None]] = field(default_factory=dict)
    _dims: dict[int, set[int]] = field(default_factory=dict)
    _requests: dict[tuple[object, int, int], tuple[Request, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for parts in sorted(set(self.factors)):
            self._survey(parts)

    def assignments(self, group: int, content: Sequence[object], level: int) -> list[Assignment]:
        """All that a group may do in a state."""
        members, first = self.work.groups[group], content[0]
        if len(members) > 1:
            return self._together(group, content, level)
        if isinstance(first, KernelState):
            return [(x,) for x in self.requests(members[0], first, level)]
        assert isinstance(first, Region)
        return [(x,) for x in self.places(members[0] - len(self.work.kernels), first, level)]

    def _survey(self, parts: int) -> None:
        """Which dims of values some kernel can use, and strided cuts: what one kernel offers is asked of those that
        share the value."""
        work = self.work
        wishes: dict[int, set[Wish]] = {}
        found = {k: kernel.requests(parts, frozenset()) for k, kernel in enumerate(work.kernels)}
        queue = list(found)
        while queue:
            k = queue.pop(0)
            for link in work.links_of[k]:
                shape = work.values[link.value].shape
                known = self._strided.setdefault(link.value, {})
                for request in found[k]:
                    place = place_at(request, link)
                    if not isinstance(place, Shard) or not divides(Region(shape), place, parts):
                        continue
                    if place.block is None or place.block == shape[place.dim]:
                        self._dims.setdefault(link.value, set()).add(place.dim)
                        continue
                    if (place.dim, place.block) in known or len(known) >= MOST_STRIDED:
                        continue
                    known[place.dim, place.block] = None
                    for other in work.links_of[work.node_of_value(link.value)]:
                        wish = (other.makes, other.position, place)
                        if not any(place_at(r, other) == place for r in found[other.kernel]):
                            mine = wishes.setdefault(other.kernel, set())
                            mine.add(wish)
                            found[other.kernel] = work.kernels[other.kernel].requests(parts, frozenset(mine))
                            queue.append(other.kernel)

    def requests(self, kernel: int, state: KernelState, level: int) -> tuple[Request, ...]:
        """Ways to run a kernel in a state; the whole of it where nothing divides."""
        parts = self.factors[level]
        key = (state, kernel, parts)
        if key not in self._requests:
            wishes = set()
            for link in self.work.links_of[kernel]:
                for place in self._local_strided(link.value, state.region(link)):
                    if divides(state.region(link), place, parts):
                        wishes.add((link.makes, link.position, place))
            kept = tuple(
                r
                for r in state.kernel.requests(parts, frozenset(wishes))
                if self.rules.allows(r) and self._fits(state, r, parts)
            )
            self._requests[key] = kept or (whole_request(state.kernel),)
        return self._requests[key]

    def _local_strided(self, value: int, region: Region) -> list[Shard]:
        left = {(dim, block): extent for dim, block, extent in region.runs}
        return [Shard(dim, left.get((dim, block), block)) for dim, block in self._strided.get(value, ())]

    def _fits(self, state: KernelState, request: Request, parts: int) -> bool:
        pairs = (*zip(state.inputs, request.inputs, strict=True), *zip(state.outputs, request.outputs, strict=True))
        return all(divides(region, place, parts) for region, place in pairs)

    def places(self, value: int, region: Region, level: int) -> list[Placement]:
        """Cuts of a value that some kernel could use; any cut where none of those divides, or whole."""
        parts = self.factors[level]
        found: list[Placement] = [
            Shard(d) for d in sorted(self._dims.get(value, ())) if divides(region, Shard(d), parts)
        ]
        found += [p for p in self._local_strided(value, region) if divides(region, p, parts) and p not in found]
        if not found:
            found = [Shard(d) for d in range(len(region.extents)) if divides(region, Shard(d), parts)]
        return [*found, R] if self.rules.whole or not found else found

    def _together(self, group: int, content: Sequence[object], level: int) -> list[Assignment]:
        """What fits together in a group, found by following each cut of its largest values; whole if nothing does."""
        work, members = self.work, self.work.groups[group]
        at = dict(zip(members, content, strict=True))
        values = [node - len(work.kernels) for node in members if node >= len(work.kernels)]

        def weight(value: int) -> tuple[bool, int]:
            v = work.values[value]
            return v.is_parameter, prod(v.shape) * v.count

        found: dict[Assignment, None] = {}
        for seed in sorted(values, key=weight, reverse=True)[:4]:
            region = at[work.node_of_value(seed)]
            assert isinstance(region, Region)
            for place in self.places(seed, region, level):
                if isinstance(place, Shard):
                    assignment = self._follow(group, at, level, seed, place)
                    if assignment is not None:
                        found.setdefault(assignment)
        if not found or self.rules.whole:
            whole: list[Placement | Request] = []
            for node in members:
                state = at[node]
                whole.append(whole_request(state.kernel) if isinstance(state, KernelState) else R)
            found.setdefault(tuple(whole))
        return list(found)

    def _follow(self, group: int, at: dict[int, object], level: int, seed: int, place: Placement) -> Assignment | None:
        work, parts = self.work, self.factors[level]
        places: dict[int, Placement] = {seed: place}
        asked: dict[int, Request] = {}
        queue = [seed]
        while queue:
            value = queue.pop(0)
            for link in work.links_of[work.node_of_value(value)]:
                if work.group_of[link.kernel] != group or link.kernel in asked:
                    continue
                inside = [x for x in work.links_of[link.kernel] if work.group_of[work.node_of_value(x.value)] == group]
                best = None
                state = at[link.kernel]
                assert isinstance(state, KernelState)
                for request in self.requests(link.kernel, state, level):
                    if all(place_at(request, x) == places.get(x.value, place_at(request, x)) for x in inside):
                        loss = sum(isinstance(p, Partial) for p in request.inputs), request.exchanged
                        if best is None or loss < best[0]:
                            best = loss, request
                if best is None:
                    return None
                asked[link.kernel] = best[1]
                for x in inside:
                    there = place_at(best[1], x)
                    region = at[work.node_of_value(x.value)]
                    assert isinstance(region, Region)
                    if x.value not in places:
                        if not isinstance(there, Shard) or not divides(region, there, parts):
                            return None
                        places[x.value] = there
                        queue.append(x.value)
                    elif places[x.value] != there:
                        return None
        found: list[Placement | Request] = []
        for node in work.groups[group]:
            chosen: Placement | Request | None
            chosen = asked.get(node) if node < len(work.kernels) else places.get(node - len(work.kernels))
            if chosen is None:
                return None
            found.append(chosen)
        return tuple(found)


def check_factors(parts: int, factors: Sequence[int] | None) -> tuple[int, ...]:
    """The factors of the recursion, largest first; prime factors if none are given."""
    if parts < 1:
        raise UserError(f"tofu divides work among at least 1 device, got {parts}")
    if factors is None:
        found, rest, p = [], parts, 2
        while rest > 1:
            while rest % p == 0:
                found.append(p)
                rest //= p
            p += 1 if p * p <= rest else max(1, rest - p)
        return tuple(sorted(found, reverse=True))
    if prod(factors) != parts or list(factors) != sorted(factors, reverse=True) or min(factors, default=2) < 2:
        raise UserError(
            f"factors of the recursion multiply to the {parts} devices, largest first, got "
            f"{'·'.join(map(str, factors))}; leave them out for prime factors"
        )
    return tuple(factors)
