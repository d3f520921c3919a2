"""Closed forms around pipeline schedules: the lock-step estimate, a lower bound, DAPPLE's pivot.

Prune or rank with them, never report them as time. All take per-stage times of one micro-batch, in stage order.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["dapple_pivot", "lockstep_s", "schedule_lower_bound_s"]


def lockstep_s(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """RaNNC's estimate: stages that run together in a step wait for the slowest, forward and backward apart.

    In step t these are the stages x with 0 <= t - x < micro_batches. Never below the makespan of GPipe without
    latency. Pass times that include transfers.

    >>> lockstep_s([3, 1, 2, 1], [6, 2, 4, 2], 8)
    87.0
    """
    stages = len(forward_s)
    total = 0.0
    for step in range(micro_batches + stages - 1):
        active = slice(max(0, step - micro_batches + 1), min(stages, step + 1))
        total += max(forward_s[active]) + max(backward_s[active])
    return total


def schedule_lower_bound_s(
    forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, latency_s: float = 0.0
) -> float:
    """What GPipe and 1F1B need at least: max over s of M (f_s + b_s) + sum of the earlier stages' f + b + 2 s latency.

    >>> schedule_lower_bound_s([2, 2, 2, 2], [4, 4, 4, 4], 8, 1)
    72.0
    """
    before = best = 0.0
    for stage, (f, b) in enumerate(zip(forward_s, backward_s, strict=True)):
        best = max(best, micro_batches * (f + b) + before + 2 * stage * latency_s)
        before += f + b
    return best


def dapple_pivot(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> tuple[int, float]:
    """DAPPLE's pivot stage Q and its estimate of 1F1B, without all-reduce and transfers.

    Never above `schedule_lower_bound_s` at latency 0. Reference: Fan et al., PPoPP 2021. Low by up to a half for few
    micro-batches: prune with it, do not rank.

    >>> dapple_pivot([3, 1, 2, 1], [6, 2, 4, 2], 8)
    (0, 72.0)
    """
    pivot = len(forward_s) - 1
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    steady = micro_batches - 1
    for stage in range(len(both) - 2, -1, -1):
        if steady * both[stage] > steady * both[pivot] + sum(both[stage + 1 : pivot]):
            pivot = stage
    # Without all-reduce the last term is largest for stage 0: the backward drain from the pivot to the first stage.
    return pivot, float(sum(forward_s[: pivot + 1]) + steady * both[pivot] + sum(backward_s[: pivot + 1]))
