"""Which machines the devices of stages are on: ways to take free ones, and how stages can leave the machines.

Reference: Fan et al., PPoPP 2021. Machines may have any number of devices, each machine of one kind; where there are
several kinds, every order of them is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Placement", "Situations", "one_machine", "placements", "profile", "same_machine", "situations", "state_of"]

Integers = npt.NDArray[np.int64]
Placement = tuple[int, ...]
"""Devices that a stage takes on each machine."""
Profile = tuple[int, ...]
"""Devices that a stage has of each kind."""


def placements(
    used: Sequence[int],
    sizes: Sequence[int],
    count: int,
    last: Placement | None = None,
    ways: int = 3,
    kinds: Sequence[int] | None = None,
) -> list[Placement]:
    """The first `ways` of three to take `count` free devices, where `last` are those of the stage before.

    Unused machines whole; partly used machines first; one by one from every machine with free devices. Where `kinds`
    (of the machines) differ, each for every order of the kinds.

    >>> placements([1, 0], [4, 4], 2)
    [(0, 2), (2, 0), (1, 1)]
    """
    machines = range(len(sizes))
    free = [sizes[m] - used[m] for m in machines]
    if sum(free) < count:
        return []
    # The fullest first, then by the stage before, so that equal situations are met in equal order on any machines.
    order = sorted(machines, key=lambda m: (-used[m], -(last[m] if last else 0), sizes[m], m))
    found: list[Placement] = []
    for ranking in itertools.permutations(sorted(set(kinds))) if kinds is not None else [()]:
        if kinds is not None:
            order = sorted(order, key=lambda m: ranking.index(kinds[m]))
        fresh, partly = [m for m in order if used[m] == 0], [m for m in order if used[m] > 0]
        three = [_fill(fresh + partly, free, count), _fill(partly + fresh, free, count), _scatter(order, free, count)]
        found += three[:ways]
    return list(dict.fromkeys(found))


def _fill(order: Sequence[int], free: Sequence[int], count: int) -> Placement:
    taken = [0] * len(free)
    for m in order:
        taken[m] = min(free[m], count)
        count -= taken[m]
    return tuple(taken)


def _scatter(order: Sequence[int], free: Sequence[int], count: int) -> Placement:
    taken = [0] * len(free)
    while count:
        for m in order:
            if count and taken[m] < free[m]:
                taken[m] += 1
                count -= 1
    return tuple(taken)


def one_machine(placement: Sequence[int]) -> bool:
    return sum(x > 0 for x in placement) == 1


def same_machine(a: Sequence[int], b: Sequence[int]) -> bool:
    return one_machine([x + y for x, y in zip(a, b, strict=True)])


def profile(placement: Sequence[int], kinds: Sequence[int] | None) -> Profile:
    """How many devices of each kind a stage has.

    >>> profile((2, 0, 1), (0, 0, 1))
    (2, 1)
    """
    if kinds is None:
        return (sum(placement),)
    return tuple(sum(x for x, k in zip(placement, kinds, strict=True) if k == kind) for kind in range(max(kinds) + 1))


# Free devices, used devices, those of the stage before where it and the next could share the machine, kind; sorted.
_State = tuple[tuple[int, int, int, int], ...]


def state_of(used: Sequence[int], sizes: Sequence[int], last: Placement | None, kinds: Sequence[int] | None) -> _State:
    """What the machines look like after a stage on `last`; equal where the same can follow."""
    shared = last is not None and one_machine(last)
    marks = [
        last[m] if shared and last is not None and last[m] and used[m] < sizes[m] else 0 for m in range(len(sizes))
    ]
    return tuple(sorted((sizes[m], used[m], marks[m], kinds[m] if kinds else 0) for m in range(len(sizes))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situations:
    """How stages can leave the machines, and the steps between: rows from, end; `ends` are rows to, choice, across.

    `ways` of placements are looked at; `full` are the situations without free devices.
    """

    ways: int
    numbers: dict[_State, int]
    steps: Integers
    ends: Integers
    full: list[int]
    followers: dict[tuple[Placement, Placement | None], list[tuple[int, Placement, int, int]]] = field(
        default_factory=dict
    )
    """What may come after devices in use and a stage, as far as it was asked for, on machines in the order given."""

    def restricted(self, own: Mapping[Profile, int], wanted: Mapping[Profile, int]) -> Situations:
        """The same with steps of some choices alone: `own` are the numbers of the choices here, `wanted` those there.

        Situations that these do not reach are kept; no step leads to them.
        """
        renumbered = np.full(max(own.values(), default=0) + 1, -1, dtype=np.int64)
        for each, k in wanted.items():
            renumbered[own[each]] = k
        kept = renumbered[self.ends[1]] >= 0
        end_number = np.cumsum(kept) - 1
        ends = self.ends[:, kept]
        ends[1] = renumbered[ends[1]]
        steps = self.steps[:, kept[self.steps[1]]]
        steps[1] = end_number[steps[1]]
        return Situations(ways=self.ways, numbers=self.numbers, steps=steps, ends=ends, full=self.full)


def situations(
    machines: Sequence[int],
    choices: Mapping[Profile, int],
    most: int = 3_000,
    check: Callable[[], None] = lambda: None,
    kinds: Sequence[int] | None = None,
) -> Situations:
    """Of all three ways of placing, or of fewer where those lead to more than `most` situations.

    First stages are no longer spread over all machines, then they do not prefer partly used ones. `choices` numbers
    what a stage may have of each kind.
    """
    for ways in (3, 2):
        if (found := _situations(machines, choices, ways, most, check, kinds)) is not None:
            return found
    found = _situations(machines, choices, 1, 1 << 60, check, kinds)
    assert found is not None
    return found


def _situations(
    machines: Sequence[int],
    choices: Mapping[Profile, int],
    ways: int,
    most: int,
    check: Callable[[], None],
    kinds: Sequence[int] | None,
) -> Situations | None:
    start = state_of([0] * len(machines), machines, None, kinds)
    numbers: dict[_State, int] = {start: 0}
    ends: dict[tuple[int, int, int], int] = {}
    steps: set[tuple[int, int]] = set()
    waiting = [start]
    counts = sorted({sum(each) for each in choices})
    while waiting:
        check()
        if len(numbers) > most:
            return None
        state = waiting.pop()
        sizes, used, marks, own = ([row[x] for row in state] for x in range(4))
        own_kinds = own if kinds is not None else None
        for r in counts:
            for taken in placements(used, sizes, r, tuple(marks), ways, own_kinds):
                k = choices.get(profile(taken, own_kinds))
                if k is None:
                    continue
                after = state_of([a + b for a, b in zip(used, taken, strict=True)], sizes, taken, own_kinds)
                if after not in numbers:
                    numbers[after] = len(numbers)
                    waiting.append(after)
                across = not any(marks) or not same_machine(marks, taken)
                end = ends.setdefault((numbers[after], k, int(across)), len(ends))
                steps.add((numbers[state], end))
    return Situations(
        ways=ways,
        numbers=numbers,
        steps=np.array(sorted(steps), dtype=np.int64).reshape(-1, 2).T,
        ends=np.array(list(ends), dtype=np.int64).reshape(-1, 3).T,
        full=[x for state, x in numbers.items() if all(size == used for size, used, _, _ in state)],
    )
