"""Pipelines within pipelines on machines of equal devices: a segment of the chain runs on some machines, on each of
them as the same pipeline of stages, so that what talks most stays inside.

A stage of r devices on each of m machines has r × m replicas. Tables are over blocks and what is left: machines, and
inside a segment devices of each machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpart.hardware import Cluster
from simpart.lowering.transfers import sharing
from simpart.searchers._pipelines import PipelineShape
from simpart.searchers._stage_costs import ChainProblem
from simpart.searchers._stages import ChainStage

__all__ = ["Machines", "NestedCosts", "NestedPlan", "least_nested", "machines_of", "nested_costs"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Machines(NamedTuple):
    """Equal machines of equal devices."""

    number: int
    devices: int


def machines_of(cluster: Cluster) -> Machines | None:
    """None where devices or machines are unequal, and where there is one machine or every device is one."""
    devices = len(cluster.host_of(0))
    count, rest = divmod(cluster.size, devices)
    if len(cluster.kinds) > 1 or rest or count < 2 or devices < 2:
        return None
    equal = all(len(cluster.host_of(x * devices)) == devices for x in range(count))
    return Machines(count, devices) if equal else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NestedCosts:
    """`choices[k]` is (devices of a machine, machines). `compute_s[i, j, k]`; `entering_s[across][i, j, k]` there and
    back, and `leaving_s`, by whether the border lies between machines; `fits(later)` as for flat pipelines."""

    choices: tuple[tuple[int, int], ...]
    compute_s: Floats
    entering_s: tuple[Floats, Floats]
    leaving_s: tuple[Floats, Floats]
    fits: Callable[[int], Bools]

    def stage_s(self, later: int, entering: bool, leaving: bool) -> Floats:
        """The slower of a stage and its transfers, infinite where it does not fit."""
        sent_s = self.entering_s[entering] + self.leaving_s[leaving]
        return np.where(self.fits(later), np.maximum(self.compute_s, sent_s), np.inf)


def nested_costs(
    chain: ChainProblem,
    shape: PipelineShape,
    schedule: str,
    machines: Machines,
    fitting: Callable[..., Callable[[int], Bools]],
) -> NestedCosts | None:
    """Costs on a cluster of such machines; None where no stage can share the samples."""
    cluster, wide = chain.cut.problem.cluster, machines.devices
    choices, stages, sizes = [], [], []
    for m in range(1, machines.number + 1):
        for r in range(1, wide + 1):
            ranks = tuple(h * wide + d for h in range(m) for d in range(r))
            taken = chain.places.shares(shape, ranks)
            if taken is not None:
                choices.append((r, m))
                stages.append(ranks)
                sizes.append(max(taken))
    if not choices:
        return None
    costs = chain.costs_of(shape, schedule, stages, reduced=True)
    passing: list[list[Floats]] = [[], [], [], []]
    for (r, _), size in zip(choices, sizes, strict=True):
        inside = chain.runs.passing_s(size, (0, min(r, wide - 1)), 1)
        together = max(sharing(cluster, [(d, wide + d) for d in range(r)]))
        across = chain.runs.passing_s(size, (0, wide), together)
        for found, seconds in zip(passing, (*inside, *across), strict=True):
            found.append(2 * seconds)
    entering, leaving, far_entering, far_leaving = (np.stack(found, axis=-1) for found in passing)
    return NestedCosts(
        choices=tuple(choices),
        compute_s=costs.forward_s + costs.backward_s,
        entering_s=(entering, far_entering),
        leaving_s=(leaving, far_leaving),
        fits=fitting(costs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedPlan:
    """Stages, the devices of each, and the cost of the slowest."""

    stages: tuple[ChainStage, ...]
    devices: tuple[tuple[int, ...], ...]
    value: float


class _Step(NamedTuple):
    """One way to put a stage first: its choice, and whether a machine's border is before and behind it. `after` is
    what is left: (machines, machines of the open segment, devices of each), the last two 0 between segments."""

    k: int
    entering: bool
    leaving: bool
    after: tuple[int, int, int]


def least_nested(costs: NestedCosts, machines: Machines, most_stages: int) -> dict[int, NestedPlan | None]:
    """Best stages for 1 … `most_stages` on all machines; None where no plan exists."""
    steps = _steps(costs, machines)
    n = costs.compute_s.shape[0]
    done = np.full(n + 1, np.inf)
    done[n] = -np.inf
    tables: list[dict[tuple[int, int, int], Floats]] = [{(0, 0, 0): done}]
    start, found = (machines.number, 0, 0), dict[int, NestedPlan | None]()
    for count in range(1, most_stages + 1):
        seconds = {
            (e, f): costs.stage_s(count - 1, e, f) for e in (False, True) for f in (False, True)
        }  # fmt: skip
        table: dict[tuple[int, int, int], Floats] = {}
        for state, ways in steps.items():
            best = np.full(n + 1, np.inf)
            for step in ways:
                after = tables[-1].get(step.after)
                if after is not None:
                    reached = np.maximum(seconds[step.entering, step.leaving][:, :, step.k], after[None, :])
                    np.minimum(best[:n], reached.min(axis=1), out=best[:n])
            if np.isfinite(best).any():
                table[state] = best
        tables.append(table)
        value = float(table[start][0]) if start in table else np.inf
        found[count] = None if value == np.inf else _trace(costs, machines, steps, tables, count, value)
    return found


def _steps(costs: NestedCosts, machines: Machines) -> dict[tuple[int, int, int], list[_Step]]:
    """What can be done first in every situation."""
    found: dict[tuple[int, int, int], list[_Step]] = {}
    for k, (r, m) in enumerate(costs.choices):
        for left in range(machines.number - m + 1):
            for q in range(r, machines.devices + 1):
                whole = q == machines.devices
                state = (left + m, 0, 0) if whole else (left, m, q)
                after = (left, 0, 0) if q == r else (left, m, q - r)
                found.setdefault(state, []).append(_Step(k, whole, q == r, after))
    return found


def _trace(
    costs: NestedCosts,
    machines: Machines,
    steps: dict[tuple[int, int, int], list[_Step]],
    tables: list[dict[tuple[int, int, int], Floats]],
    count: int,
    value: float,
) -> NestedPlan:
    """The first stages, by choice then end, that keep the table's value."""
    state, block = (machines.number, 0, 0), 0
    stages, devices = [], []
    for left in range(count, 0, -1):
        step, end = _first(costs, steps[state], tables[left - 1], left, block, float(tables[left][state][block]))
        r, m = costs.choices[step.k]
        first = (machines.number - step.after[0] - m) * machines.devices
        offset = machines.devices - r - step.after[2]
        stages.append(ChainStage(start=block, end=end, replicas=r * m))
        devices.append(tuple(first + h * machines.devices + offset + d for h in range(m) for d in range(r)))
        state, block = step.after, end
    return NestedPlan(stages=tuple(stages), devices=tuple(devices), value=value)


def _first(
    costs: NestedCosts,
    ways: list[_Step],
    after: dict[tuple[int, int, int], Floats],
    left: int,
    block: int,
    value: float,
) -> tuple[_Step, int]:
    for step in ways:
        if step.after in after:
            seconds = costs.stage_s(left - 1, step.entering, step.leaving)[block, :, step.k]
            ends = np.flatnonzero(np.maximum(seconds, after[step.after]) <= value)
            if ends.size:
                return step, int(ends[0])
    raise AssertionError("some stage gave the table's value")
