"""Stages on a chain with the slowest as fast as possible, for every number of stages, within memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simpart.searchers._stages import Bools, ChainStage, Floats, choices_at

__all__ = ["Bottleneck", "bottleneck_layer", "least_bottlenecks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Stages and the cost of the largest."""

    stages: tuple[ChainStage, ...]
    value: float


def least_bottlenecks(
    cost_of: Callable[[int], Floats],
    replicas: tuple[int, ...],
    devices: int,
    most_stages: int,
    *,
    all_devices: bool = True,
    places: Bools | None = None,
) -> dict[int, Bottleneck | None]:
    """Best stages for 1 … `most_stages`; None where no plan exists.

    `cost_of(later)` is the cost [i, j, k] of blocks [i, j) on replicas[k] devices when `later` stages follow; infinite
    where it cannot be, also for j <= i. All devices are used, or at most that many. `places` as in StageCosts.
    """
    first = cost_of(0)
    n = first.shape[0]
    done = np.full((n + 1, devices + 1), np.inf)
    done[n, 0] = -np.inf
    tables, costs = [done], [first]
    answers: dict[int, Bottleneck | None] = {}
    for count in range(1, most_stages + 1):
        costs.append(cost_of(count - 1))
        tables.append(bottleneck_layer(costs[count], replicas, tables[-1], places))
        totals = tables[count][0]
        used = devices if all_devices else int(np.argmin(totals))
        value = float(totals[used])
        answers[count] = (
            None
            if value == np.inf
            else Bottleneck(stages=_trace(tables, costs, replicas, places, count, used), value=value)
        )
    return answers


def _trace(
    tables: list[Floats],
    costs: list[Floats],
    replicas: tuple[int, ...],
    places: Bools | None,
    count: int,
    devices: int,
) -> tuple[ChainStage, ...]:
    """The first stages, by end then replicas, that keep the table's value."""
    block, stages = 0, []
    for left in range(count, 0, -1):
        usable = choices_at(replicas, places, devices)
        reached = np.stack(
            [np.maximum(costs[left][block, :, k], tables[left - 1][:, devices - replicas[k]]) for k in usable], axis=1
        )
        end, x = (int(a) for a in np.argwhere(reached <= tables[left][block, devices])[0])
        r = replicas[usable[x]]
        stages.append(ChainStage(start=block, end=end, replicas=r))
        block, devices = end, devices - r
    return tuple(stages)


def bottleneck_layer(cost: Floats, replicas: tuple[int, ...], after: Floats, places: Bools | None = None) -> Floats:
    """Least possible maximum with one stage put before what `after` describes: [block, devices] -> the same.

    out[i, d] = min over j, k of max(cost[i, j, k], after[j, d - replicas[k]]); k only where `places[k, d]`.
    """
    out = np.full_like(after, np.inf)
    n = cost.shape[0]
    width = after.shape[1]
    # A stage must cover a block: cost[i, j <= i] is infinite, so column 0 of `after` never helps.
    for k, r in enumerate(replicas):
        if r >= width:
            continue
        if places is not None:
            left = r + np.flatnonzero(places[k, r:])
            reached = np.maximum(cost[:, 1:, k, None], after[None, 1:, left - r]).min(axis=1)
            out[:n, left] = np.minimum(out[:n, left], reached)
            continue
        reached = np.maximum(cost[:, 1:, k, None], after[None, 1:, : width - r]).min(axis=1)
        np.minimum(out[:n, r:], reached, out=out[:n, r:])
    return out
