"""Minimising a sum plus a multiple of a maximum: a search over caps on the maximum, exact and short.

For a cap, a solver gives the least sum of plans that keep below it. That sum falls as the cap grows, so between two
caps already asked, every plan is bounded from below by the sum at the upper and the first value above the lower one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

__all__ = ["least_sum_and_maximum"]


def least_sum_and_maximum(
    caps: Sequence[float],
    weight: float,
    least: Callable[[float], tuple[float, float]],
    *,
    relative_gap: float = 0.0,
    below: float = math.inf,
    relaxed: Callable[[float], float] | None = None,
) -> tuple[float, float, float]:
    """(cap, value, bound) of a plan of least sum + `weight` × maximum; infinite if there is none `below`.

    `caps` are all values the maximum may take, ascending; `least(cap)` gives the least sum below a cap and the maximum
    of a plan that has it. The bound equals the value unless `relative_gap` allows less. `relaxed(cap)` is a cheap
    lower bound of the least sum: where it decides that no cap of a range can be better, `least` is not asked.

    >>> least_sum_and_maximum([1.0, 2.0, 3.0], 2.0, lambda cap: {1: (9.0, 1.0), 2: (8.0, 2.0), 3: (2.0, 3.0)}[int(cap)])
    (3.0, 8.0, 8.0)
    """
    known: list[tuple[float, float]] = [(-math.inf, math.inf)]
    best, best_cap = below, math.inf
    asking = caps[-1] if caps else None
    bound, lowest = math.inf, caps[0] if caps else math.inf
    while asking is not None:
        hopeless = relaxed is not None and relaxed(asking) + weight * lowest >= best
        total, largest = (math.inf, math.inf) if hopeless else least(asking)
        bisect.insort(known, (asking, total))
        if total < math.inf:
            if largest < asking:  # caps down to the maximum really reached have the same least sum
                bisect.insort(known, (largest, total))
            if total + weight * largest < best:
                best, best_cap = total + weight * largest, asking
        bound, asking = math.inf, None
        for (low, low_sum), (high, high_sum) in itertools.pairwise(known):
            first, last = bisect.bisect_right(caps, low), bisect.bisect_left(caps, high)
            if high_sum < low_sum and first < last and high_sum + weight * caps[first] < bound:
                bound, asking = high_sum + weight * caps[first], caps[(first + last - 1) // 2]
                lowest = caps[first]
        if bound * (1 + relative_gap) >= best:
            break
    return (best_cap, best, min(bound, best)) if best_cap < math.inf else (math.inf, math.inf, bound)
