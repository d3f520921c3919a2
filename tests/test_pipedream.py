"""PipeDream against enumeration, on chains, on graphs and on nested machines; its published profiles where they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.errors import FormatError, UnsupportedError
from simpart.searchers._downsets import closed_sets, members, nested
from simpart.searchers._profiles import PipeDreamNode, find_profile, read_pipedream
from simpart.searchers._stages import ChainStage
from simpart.searchers.pipedream import Cuts, Level, chain_cuts, data_parallel_s, graph_cuts, solve


def chain(seed: int, most: int = 6) -> Cuts:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, most))
    draw = [rng.integers(low, high, n).astype(float) for low, high in ((1, 12), (0, 9), (0, 6), (0, 12))]
    return chain_cuts(*draw)  # type: ignore[arg-type]


def every_split(cuts: Cuts, devices: int, straight: bool, at_most: bool) -> Iterator[list[tuple[int, int, int]]]:
    def paths(start: int) -> Iterator[list[int]]:
        if start == cuts.last:
            yield []
        for end in np.flatnonzero(cuts.precedes[start]).tolist():
            for rest in paths(end):
                yield [end, *rest]

    for ends in paths(0):
        starts = [0, *ends[:-1]]
        for counts in itertools.product(range(1, 2 if straight else devices + 1), repeat=len(ends)):
            if sum(counts) == devices or (at_most and sum(counts) <= devices):
                yield list(zip(starts, ends, counts, strict=True))


def value_of(
    cuts: Cuts,
    plan: list[tuple[int, int, int]],
    devices: int,
    rate: float,
    transfers: bool,
    limit: float,
    released: bool,
) -> float:
    """The published formulas (released) or the mended ones, for one plan."""
    slowest = 0.0
    used = 0
    for x, (i, j, r) in enumerate(plan):
        used += r
        c, p, act = (float(a[j] - a[i]) for a in (cuts.compute_s, cuts.parameter_bytes, cuts.activation_bytes))
        last = j == cuts.last
        if released:
            flying = math.ceil((devices - used) / r)
        else:
            behind = sum(count for *_, count in plan[x:])
            flying = math.ceil((behind + devices - sum(count for *_, count in plan)) / r)
        if flying * (act + p) > limit:
            return math.inf
        slowest = max(slowest, (c + 4 * (r - 1) * p / (rate * r)) / r)
        if transfers:
            if x > 0:
                slowest = max(slowest, 2 * cuts.output_bytes[i] / (rate * r))
            if not last and (x > 0 or not released):
                slowest = max(slowest, 2 * cuts.output_bytes[j] / (rate * r))
    return slowest


def agrees(seed: int, cuts: Cuts) -> None:
    rng = np.random.default_rng(20_000 + seed)
    devices = int(rng.integers(1, 6))
    rate = float(rng.choice([0.5, 2, 10]))
    transfers, straight, released = (bool(rng.random() < 0.5) for _ in range(3))
    limit = float(rng.choice([math.inf, 8, 20, 40]))
    plans = list(every_split(cuts, devices, straight, False))
    expected = min((value_of(cuts, p, devices, rate, transfers, limit, released) for p in plans), default=math.inf)
    plan = solve(
        cuts,
        [Level(units=devices, bytes_per_s=rate)],
        transfers=transfers,
        limit_bytes=limit,
        straight=straight,
        released=released,
    )
    if plan is None:
        assert expected == math.inf
        return
    found = [(s.start, s.end, s.replicas) for s in plan.stages]
    assert plan.value_s == pytest.approx(expected, rel=1e-12)
    assert value_of(cuts, found, devices, rate, transfers, limit, released) == pytest.approx(expected, rel=1e-12)


def random_graph(seed: int) -> Cuts:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 5))
    nodes = [
        PipeDreamNode(
            name=f"n{v}",
            compute_s=float(rng.integers(1, 9)),
            activation_bytes=float(rng.integers(0, 9)),
            parameter_bytes=float(rng.integers(0, 5)),
        )
        for v in range(n)
    ]
    edges = tuple((u, v) for u in range(n) for v in range(u + 1, n) if rng.random() < 0.5)
    return graph_cuts(nodes, edges)


@pytest.mark.parametrize("part", range(4))
def test_slowest_stage_is_that_of_enumeration(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        agrees(seed, chain(seed))
        agrees(seed, random_graph(seed))


@pytest.mark.slow
def test_slowest_stage_is_that_of_enumeration_on_a_thousand_instances() -> None:
    for seed in range(1_000, 2_000):
        agrees(seed, chain(seed, 7))


def nested_value(cuts: Cuts, levels: list[Level], transfers: bool, limit: float) -> float:
    """Least value on machines of equal devices: every outer plan, with the best inner plan of each of its stages."""
    inner, outer = levels
    best = math.inf
    for plan in every_split(cuts, outer.units, False, False):
        slowest, used = 0.0, 0
        for x, (i, j, r) in enumerate(plan):
            used += r
            held = math.ceil((outer.units - used + r) / r) - 1
            inside = math.inf
            for part in every_split_between(cuts, i, j, inner.units):
                value, taken = 0.0, 0
                for y, (a, b, q) in enumerate(part):
                    taken += q
                    p = float(cuts.parameter_bytes[b] - cuts.parameter_bytes[a])
                    act = float(cuts.activation_bytes[b] - cuts.activation_bytes[a])
                    if (math.ceil((inner.units - taken + q) / q) + held) * (p + act) > limit:
                        value = math.inf
                    value = max(
                        value,
                        (float(cuts.compute_s[b] - cuts.compute_s[a]) + 4 * (q - 1) * p / (inner.bytes_per_s * q)) / q,
                    )
                    if transfers and y > 0:
                        value = max(value, 2 * cuts.output_bytes[a] / (inner.bytes_per_s * q))
                    if transfers and b != cuts.last:
                        value = max(value, 2 * cuts.output_bytes[b] / (inner.bytes_per_s * q))
                inside = min(inside, value)
            p = float(cuts.parameter_bytes[j] - cuts.parameter_bytes[i])
            slowest = max(slowest, (inside + 4 * (r - 1) * p / (outer.bytes_per_s * r)) / r)
            if transfers and x > 0:
                slowest = max(slowest, 2 * cuts.output_bytes[i] / (outer.bytes_per_s * r))
            if transfers and j != cuts.last:
                slowest = max(slowest, 2 * cuts.output_bytes[j] / (outer.bytes_per_s * r))
        best = min(best, slowest)
    return best


def every_split_between(cuts: Cuts, start: int, end: int, devices: int) -> Iterator[list[tuple[int, int, int]]]:
    for count in range(1, min(devices, end - start) + 1):
        for marks in itertools.combinations(range(start + 1, end), count - 1):
            ends = (start, *marks, end)
            for counts in itertools.product(range(1, devices + 1), repeat=count):
                if sum(counts) == devices:
                    yield [(ends[x], ends[x + 1], counts[x]) for x in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_machines_of_devices_are_nested_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = chain(seed, 5)
    levels = [
        Level(units=int(rng.integers(1, 4)), bytes_per_s=10.0),
        Level(units=int(rng.integers(1, 4)), bytes_per_s=1.0),
    ]
    transfers, limit = bool(rng.random() < 0.5), float(rng.choice([math.inf, 15, 40]))
    plan = solve(cuts, levels, transfers=transfers, limit_bytes=limit)
    expected = nested_value(cuts, levels, transfers, limit)
    assert (math.inf if plan is None else plan.value_s) == pytest.approx(expected, rel=1e-12)
    if plan is not None:
        assert sum(s.replicas for s in plan.stages) <= levels[0].units * levels[1].units


def test_more_memory_or_devices_never_hurt() -> None:
    for seed in range(60):
        cuts = chain(seed)

        def value(devices: int, limit: float, cuts: Cuts = cuts) -> float:
            plan = solve(cuts, [Level(units=devices, bytes_per_s=2.0)], limit_bytes=limit, fewer_devices=True)
            return math.inf if plan is None else plan.value_s

        assert value(3, 30) >= value(3, 60)
        # Idle devices count as in flight, so devices are compared without a limit.
        assert value(3, math.inf) >= value(4, math.inf)


def test_the_last_stage_is_not_free_unless_asked() -> None:
    cuts = chain_cuts([1, 1], [10, 10], [10, 10], [0, 0])
    levels = [Level(units=2, bytes_per_s=1e9)]
    assert solve(cuts, levels, limit_bytes=25, straight=True) is None
    released = solve(cuts, levels, limit_bytes=25, straight=True, released=True)
    assert released is not None and len(released.stages) == 2


def test_times_and_bytes_in_any_unit_scale_the_value() -> None:
    cuts = chain(3)
    base = solve(cuts, [Level(units=4, bytes_per_s=2.0)])
    tiny = replace(cuts, compute_s=cuts.compute_s * 1e-7)
    scaled = solve(tiny, [Level(units=4, bytes_per_s=2e7)])
    assert base is not None and scaled is not None
    assert scaled.value_s == pytest.approx(base.value_s * 1e-7, rel=1e-9)


def test_one_device_takes_the_plain_sum_and_data_parallel_is_one_stage() -> None:
    cuts = chain_cuts([3, 5], [1, 1], [0, 0], [9, 9])
    plan = solve(cuts, [Level(units=1, bytes_per_s=1.0)])
    assert plan is not None and (plan.value_s, plan.stages) == (8.0, (ChainStage(start=0, end=2, replicas=1),))
    assert data_parallel_s(cuts, [Level(units=2, bytes_per_s=1.0)]) == (8 + 4 * 2 / 2) / 2


def test_closed_sets_of_branches() -> None:
    sets = closed_sets(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert sets == [0, 1, 3, 5, 7, 15]
    assert nested(members(sets, 4)).sum() == 14  # all ordered pairs but the two branches
    with pytest.raises(UnsupportedError, match="more than 10 cuts"):
        closed_sets(6, [], most=10)
    with pytest.raises(UnsupportedError, match="cycle"):
        closed_sets(2, [(0, 1), (1, 0)])


def test_profiles_are_read_in_topological_order_without_inputs(tmp_path: Path) -> None:
    numbers = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[4.0; 2.0], parameter_size=8.0"
    path = tmp_path / "pipedream_toy.txt"
    nodes_text = "".join(f"node{v} -- {name} -- {numbers}\n" for v, name in ((3, "B"), (1, "Input0"), (2, "A(1, 2)")))
    path.write_text(nodes_text + "\tnode1 -- node3\n\tnode3 -- node2\n")
    nodes, edges = read_pipedream(find_profile("toy", [tmp_path]))
    assert [node.name for node in nodes] == ["B", "A(1, 2)"] and edges == ((0, 1),)
    assert (nodes[0].compute_s, nodes[0].activation_bytes, nodes[0].parameter_bytes) == (0.003, 6.0, 8.0)
    path.write_text("what is this\n")
    with pytest.raises(FormatError, match="line 1: neither a node nor an edge"):
        read_pipedream(path)
    with pytest.raises(FileNotFoundError, match=r"pipedream_other\.txt is not here"):
        find_profile("other", [tmp_path])


@pytest.mark.slow
def test_a_profile_with_few_branches_is_planned_on_nested_machines(root: Path) -> None:
    folders: list[Any] = [root.parent / "shared" / "data" / "planner_profiles"]
    try:
        cuts = graph_cuts(*read_pipedream(find_profile("resnet50", folders)))
    except FileNotFoundError as absent:
        pytest.skip(str(absent))
    levels = [Level(units=4, bytes_per_s=25e9), Level(units=4, bytes_per_s=3e9)]
    plan = solve(cuts, levels, released=True)
    assert plan is not None and sum(s.replicas for s in plan.stages) == 16
    assert plan.value_s <= data_parallel_s(cuts, levels)
