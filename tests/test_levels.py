"""Peak memory from the combinations that occur is that of a walk through every task."""

from __future__ import annotations

import numpy as np
import pytest

from simpart.engines import compiled
from simpart.engines.levels import peak_bytes
from simpart.engines.simpy_engine import simulate_events
from simpart.lowering.topology import Reduction, Shape, StageEdge, class_of_action, topology_of
from simpart.program import MEMORY_KINDS, Durations, MemoryDeltas, Topology
from simpart.schedule import SCHEDULES, Schedule
from simpart.testing.schedule_suite import placement


def topology(kind: str, groups: int, count: int) -> Topology:
    home = tuple(placement(kind, groups))
    edges = tuple(StageEdge(s, s + 1) for s in range(len(home) - 1))
    norm = (Reduction("norm", "norm", -1, tuple(range(groups))),)
    return topology_of(Shape(home, Schedule(kind=kind), count, edges, "tasks", norm, True))


def balanced(given: Topology, rng: np.random.Generator) -> MemoryDeltas:
    """What F takes goes after B, or in two parts after I and W; what I gives back may be less than nothing."""
    classes, kinds = len(given.class_names), len(MEMORY_KINDS)
    static, late = rng.integers(0, 50, (2, given.groups, kinds)).astype(float)
    start, end = np.zeros((2, classes, kinds))
    within = rng.integers(0, 60, (classes, kinds)).astype(float)
    for s in range(int(given.stage.max()) + 1):
        whole, kept = rng.integers(0, 40, (2, kinds)).astype(float)
        start[class_of_action(s, "F")] = whole
        for kind, given_back in (("B", whole), ("I", whole - kept), ("W", kept)):
            end[class_of_action(s, kind)] = -given_back
    return MemoryDeltas(static=static, late=late, start=start, end=end, within=within)


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
@pytest.mark.parametrize("groups", [2, 4])
def test_peaks_of_many_plans_are_those_of_each(kind: str, groups: int) -> None:
    rng = np.random.default_rng(groups)
    for count in (1, 2, 9):
        given = topology(kind, groups, count)
        memory = [balanced(given, rng) for _ in range(16)]
        found = peak_bytes(given, memory)
        durations = Durations(task_s=rng.random(len(given.class_names)), lag_s=np.zeros(1))
        for row, one in zip(found, memory, strict=True):
            assert row.tolist() == compiled.peaks(given, one).bytes.tolist()
            _, held = simulate_events(given, durations, one)
            assert held is not None and row.tolist() == held.bytes.tolist()


def test_memory_that_is_not_given_back_is_followed_task_by_task() -> None:
    given = topology("1f1b", 3, 4)
    rng = np.random.default_rng(0)
    tables = [rng.integers(-9, 9, (len(given.class_names), len(MEMORY_KINDS))).astype(float) for _ in range(3)]
    still = np.zeros((3, len(MEMORY_KINDS)))
    odd = MemoryDeltas(static=still, late=still, start=tables[0], end=tables[1], within=tables[2])
    assert peak_bytes(given, [odd] * 16)[0].tolist() == compiled.peaks(given, odd).bytes.tolist()
