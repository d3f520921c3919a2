"""DAPPLE against enumeration of every cut, replica count and placement on real machines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from simpart.errors import UserError
from simpart.searchers._dapple_tables import Dapple, DappleCosts, DappleStage, plan_estimate_s, plan_latency_s
from simpart.searchers._machines import placements, situations


def costs_of(seed: int, n: int, replicas: tuple[int, ...]) -> DappleCosts:
    rng = np.random.default_rng(seed)
    shape = (n, n + 1, len(replicas))

    def draw(low: int, high: int, *dims: int) -> np.ndarray:
        return rng.integers(low, high, dims).astype(float)

    return DappleCosts(
        replicas=replicas,
        time_s=draw(1, 20, *shape),
        later=rng.integers(-1, 4, shape) if rng.random() < 0.6 else np.full(shape, 9),
        inside_s=draw(0, 4, n, len(replicas)),
        across_s=draw(2, 12, n, len(replicas)),
        allreduce_inside_s=draw(0, 5, *shape),
        allreduce_across_s=draw(0, 15, *shape),
    )


def every_plan(
    n: int, machines: tuple[int, ...], replicas: tuple[int, ...], count: int
) -> Iterator[tuple[DappleStage, ...]]:
    def place(
        used: list[int], last: tuple[int, ...] | None, counts: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not counts:
            yield ()
            return
        for taken in placements(used, machines, counts[0], last):
            now = [a + b for a, b in zip(used, taken, strict=True)]
            for rest in place(now, taken, counts[1:]):
                yield taken, *rest

    for cuts in itertools.combinations(range(1, n), count - 1):
        ends = (0, *cuts, n)
        for counts in itertools.product(replicas, repeat=count):
            if sum(counts) == sum(machines):
                for placed in place([0] * len(machines), None, counts):
                    yield tuple(DappleStage(start=ends[x], end=ends[x + 1], placement=p) for x, p in enumerate(placed))


def enumerated(costs: DappleCosts, machines: tuple[int, ...], count: int, micro_batches: int) -> float:
    """Least sum of blocks + (M - 1) × slowest, written out apart from the searcher."""
    best = math.inf
    for plan in every_plan(costs.blocks, machines, costs.replicas, count):
        blocks: list[float] = []
        fits = True
        for x, stage in enumerate(plan):
            k = costs.replicas.index(sum(stage.placement))
            fits = fits and costs.later[stage.start, stage.end, k] >= count - 1 - x
            blocks.append(costs.time_s[stage.start, stage.end, k])
            if x:
                both = [m for m in range(len(machines)) if stage.placement[m] or plan[x - 1].placement[m]]
                table = costs.inside_s if len(both) == 1 else costs.across_s
                blocks.append(table[stage.start, k])
        if fits:
            best = min(best, sum(blocks) + (micro_batches - 1) * max(blocks))
    return best


MACHINES = ((4,), (2, 2), (3, 2), (2, 2, 2), (1, 1, 1), (4, 3), (7,))


def agrees(seed: int) -> None:
    rng = np.random.default_rng(10_000 + seed)
    machines = MACHINES[seed % len(MACHINES)]
    n = int(rng.integers(1, 5))
    replicas = tuple(r for r in range(1, sum(machines) + 1) if rng.random() < 0.7) or (1,)
    costs, micro_batches = costs_of(seed, n, replicas), int(rng.integers(1, 9))
    search = Dapple(costs, machines, micro_batches)
    for count in range(1, min(n, sum(machines)) + 1):
        plan, expected = search.best(count), enumerated(costs, machines, count, micro_batches)
        if plan is None:
            assert expected == math.inf
            continue
        assert plan.latency_s == pytest.approx(expected, rel=1e-12)
        assert plan.latency_s == pytest.approx(plan_latency_s(costs, plan.stages, micro_batches), rel=1e-12)
        assert np.sum([s.placement for s in plan.stages], axis=0).tolist() == list(machines)


@pytest.mark.parametrize("part", range(4))
def test_least_latency_is_that_of_enumeration(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        agrees(seed)


@pytest.mark.slow
def test_least_latency_is_that_of_enumeration_on_a_thousand_instances() -> None:
    for seed in range(1_000, 2_000):
        agrees(seed)


def enumerated_on_kinds(
    costs: DappleCosts, machines: tuple[int, ...], kinds: tuple[int, ...], count: int, micro_batches: int
) -> float:
    """The same where what a stage takes depends on how many devices of each kind it has."""
    profiles, best = costs.profiles or (), math.inf

    def grow(start: int, used: list[int], last: tuple[int, ...] | None, left: int, blocks: list[float]) -> None:
        nonlocal best
        if left == 0:
            if start == costs.blocks and used == list(machines):
                best = min(best, sum(blocks) + (micro_batches - 1) * max(blocks))
            return
        taken = {p for r in range(1, sum(machines) + 1) for p in placements(used, machines, r, last, kinds=kinds)}
        for each in taken:
            own = tuple(sum(c for c, kind in zip(each, kinds, strict=True) if kind == x) for x in sorted(set(kinds)))
            if own not in profiles:
                continue
            k = profiles.index(own)
            for end in range(start + 1, costs.blocks + 1):
                if costs.later[start, end, k] >= left - 1:
                    more = [float(costs.time_s[start, end, k])]
                    if last is not None:
                        both = [m for m in range(len(machines)) if each[m] or last[m]]
                        more.append(float((costs.inside_s if len(both) == 1 else costs.across_s)[start, k]))
                    grow(end, [a + b for a, b in zip(used, each, strict=True)], each, left - 1, blocks + more)

    grow(0, [0] * len(machines), None, count, [])
    return best


@pytest.mark.parametrize(
    ("machines", "kinds"), [((2, 1), (0, 1)), ((2, 2), (0, 1)), ((1, 1, 1), (0, 1, 0)), ((1, 2, 1), (0, 0, 1))]
)
def test_least_latency_on_two_kinds_is_that_of_enumeration(machines: tuple[int, ...], kinds: tuple[int, ...]) -> None:
    sizes = [sum(c for c, kind in zip(machines, kinds, strict=True) if kind == x) for x in (0, 1)]
    every = sorted(itertools.product(*(range(size + 1) for size in sizes)), key=lambda p: (sum(p), p))[1:]
    feasible = 0
    for seed in range(12):
        rng = np.random.default_rng(30_000 + seed)
        profiles = tuple(p for p in every if rng.random() < 0.8) or tuple(every[:1])
        n, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        costs = replace(costs_of(seed, n, tuple(sum(p) for p in profiles)), kinds=kinds, profiles=profiles)
        search = Dapple(costs, machines, micro_batches)
        for count in range(1, min(n, sum(machines)) + 1):
            plan, expected = search.best(count), enumerated_on_kinds(costs, machines, kinds, count, micro_batches)
            assert (math.inf if plan is None else plan.latency_s) == pytest.approx(expected, rel=1e-12)
            feasible += plan is not None
    assert feasible > 5


def test_stages_may_be_placed_whole_partly_or_spread() -> None:
    assert placements([2, 0, 0], [4, 4, 4], 4) == [(0, 4, 0), (2, 2, 0), (2, 1, 1)]
    assert placements([4, 4], [4, 4], 1) == []


def test_neighbours_on_one_machine_are_preferred_when_links_between_machines_are_slow() -> None:
    time_s = np.full((2, 3, 1), 4.0)
    zero = np.zeros((2, 3, 1))
    costs = DappleCosts(
        replicas=(1,),
        time_s=time_s,
        later=np.full((2, 3, 1), 9),
        inside_s=np.full((2, 1), 1.0),
        across_s=np.full((2, 1), 100.0),
        allreduce_inside_s=zero,
        allreduce_across_s=zero,
    )
    plan = Dapple(costs, (2,), 8).best(2)
    split = Dapple(costs, (1, 1), 8).best(2)
    assert plan is not None and split is not None
    assert (plan.latency_s, split.latency_s) == (4 + 1 + 4 + 7 * 4, 4 + 100 + 4 + 7 * 100)


def test_an_allreduce_hides_behind_the_drain_of_earlier_stages() -> None:
    costs = replace(costs_of(3, 2, (1,)), later=np.full((2, 3, 1), 9), allreduce_inside_s=np.full((2, 3, 1), 10.0))
    stages = (DappleStage(start=0, end=1, placement=(1,)), DappleStage(start=1, end=2, placement=(1,)))
    slowest = max(costs.time_s[0, 1, 0], costs.time_s[1, 2, 0], costs.inside_s[1, 0])
    assert plan_estimate_s(costs, stages, 4) - plan_latency_s(costs, stages, 4) == max(10.0, 10.0 - slowest)


def test_times_in_any_unit_give_the_same_plan() -> None:
    costs = costs_of(5, 4, (1, 2, 3))
    tiny = replace(costs, time_s=costs.time_s * 1e-7, inside_s=costs.inside_s * 1e-7, across_s=costs.across_s * 1e-7)
    for count in (1, 2, 3):
        a, b = Dapple(costs, (3, 2), 6).best(count), Dapple(tiny, (3, 2), 6).best(count)
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert b.latency_s == pytest.approx(a.latency_s * 1e-7, rel=1e-9)


def test_without_numba_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(8, 5, (1, 2, 4))
    usual = [Dapple(costs, (4, 4), 6).best(count) for count in range(1, 6)]
    monkeypatch.setenv("SIMPART_NO_JIT", "1")
    assert [Dapple(costs, (4, 4), 6).best(count) for count in range(1, 6)] == usual


def test_too_many_situations_give_up_spreading() -> None:
    costs = replace(costs_of(2, 3, (1, 2, 4)), later=np.full((3, 4, 3), 9))
    choices: dict[tuple[int, ...], int] = {(1,): 0, (2,): 1, (4,): 2}
    all_ways, one_way = situations((4, 4), choices), situations((4, 4), choices, most=5)
    assert (all_ways.ways, one_way.ways) == (3, 1)
    best, narrow = (Dapple(costs, (4, 4), 4, places=places).best(2) for places in (all_ways, one_way))
    assert best is not None and narrow is not None and best.latency_s <= narrow.latency_s
    assert sum(map(sum, (s.placement for s in narrow.stages))) == 8


def test_costs_with_holes_are_refused() -> None:
    costs = costs_of(1, 2, (1,))
    costs.time_s[0, 1, 0] = math.nan
    with pytest.raises(UserError, match="time_s must be numbers >= 0, got nan at"):
        Dapple(costs, (2,), 2)
