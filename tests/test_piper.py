"""Piper and the 2BW-like planner against enumeration of stages, degrees and variants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simpart.errors import FormatError, UserError
from simpart.searchers._piper_graph import PiperProblem, PiperStage, _exact, _swaps, solve, stage_time_s
from simpart.searchers._profiles import PiperNode, PiperVariant, read_piper
from simpart.searchers.two_bw import equal_stages
from simpart.searchers.two_bw import solve as solve_2bw


def problem_of(seed: int) -> PiperProblem:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    edges = {
        (u, v): float(rng.integers(0, 6)) for u in range(n) for v in range(u + 1, n) if v == u + 1 or rng.random() < 0.3
    }

    def variant(neighbours: list[int], tensor: int, x: int) -> PiperVariant:
        p = float(rng.integers(2, 12)) / tensor
        return PiperVariant(
            name=str(x),
            time_s=p * (1 + 0.3 * x),
            parameter_bytes=float(rng.integers(0, 5)),
            bytes_in_flight=float(rng.integers(1, 5)) / (1 + 2 * x),
            bytes_static=float(rng.integers(0, 5)),
            sync_bytes=tuple((u, float(rng.integers(0, 3))) for u in neighbours) if tensor > 1 else (),
        )

    nodes = []
    for v in range(n):
        near = [b if a == v else a for a, b in edges if v in (a, b)]
        tensors = [1, 2] if rng.random() < 0.7 else [1]
        nodes.append(
            PiperNode(
                name="layer",
                variants={t: tuple(variant(near, t, x) for x in range(int(rng.integers(1, 4)))) for t in tensors},
            )
        )
    return PiperProblem(
        nodes=tuple(nodes),
        edges=edges,
        devices=int(rng.integers(1, 5)),
        micro_batches=int(rng.choice([1, 2, 4, 6])),
        bytes_per_s=float(rng.choice([1.0, 10.0])),
        limit_bytes=float(rng.choice([math.inf, 12, 20, 40])),
    )


def chains_of_sets(n: int, edges: dict[tuple[int, int], float]) -> Iterator[list[tuple[int, ...]]]:
    """Every ordered split of the nodes into non-empty stages in which no edge goes backwards."""

    def grow(left: frozenset[int]) -> Iterator[list[tuple[int, ...]]]:
        if not left:
            yield []
        for size in range(1, len(left) + 1):
            for stage in itertools.combinations(sorted(left), size):
                rest = left - set(stage)
                if not any(u in rest and v in stage for u, v in edges):
                    for others in grow(rest):
                        yield [stage, *others]

    yield from grow(frozenset(range(n)))


def enumerated(problem: PiperProblem) -> float:
    n, best = len(problem.nodes), math.inf
    kinds = [(t, d) for t in (1, 2, 3, 4) for d in range(1, problem.devices + 1)]
    kinds = [(t, d) for t, d in kinds if t * d <= problem.devices and problem.micro_batches % d == 0]
    for split in chains_of_sets(n, problem.edges):
        for degrees in itertools.product(kinds, repeat=len(split)):
            if sum(t * d for t, d in degrees) > problem.devices or sum(d for _, d in degrees) > problem.micro_batches:
                continue
            slowest = 0.0
            for x, (stage, (t, d)) in enumerate(zip(split, degrees, strict=True)):
                offered = [range(len(problem.nodes[v].variants.get(t, ()))) for v in stage]
                later = sum(d for _, d in degrees[x:])
                least = min(
                    (
                        stage_time_s(problem, PiperStage(nodes=stage, variants=picked, data=d, tensor=t), later)
                        for picked in itertools.product(*offered)
                    ),
                    default=math.inf,
                )
                slowest = max(slowest, least)
                if slowest >= best:
                    break
            best = min(best, slowest)
    return best


def agrees(seed: int) -> None:
    problem = problem_of(seed)
    plan, expected = solve(problem), enumerated(problem)
    if plan is None:
        assert expected == math.inf
        return
    assert plan.value_s == pytest.approx(expected, rel=1e-12)
    degrees = [stage.data for stage in plan.stages]
    again = max(stage_time_s(problem, stage, sum(degrees[x:])) for x, stage in enumerate(plan.stages))
    assert again == pytest.approx(plan.value_s, rel=1e-12)
    assert sorted(v for stage in plan.stages for v in stage.nodes) == list(range(len(problem.nodes)))
    rough, equal = solve(problem, variants="swaps"), solve_2bw(problem)
    assert rough is None or rough.value_s >= plan.value_s * (1 - 1e-12)
    assert equal is None or equal.value_s >= plan.value_s * (1 - 1e-12)


@pytest.mark.parametrize("part", range(4))
def test_time_per_sample_is_that_of_enumeration(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        agrees(seed)


@pytest.mark.slow
def test_time_per_sample_is_that_of_enumeration_on_a_thousand_instances() -> None:
    for seed in range(1_000, 2_000):
        agrees(seed)


def test_variants_are_chosen_exactly_and_the_swaps_can_be_worse() -> None:
    worse = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        seconds, held = rng.integers(1, 9, (5, 3)).astype(float), rng.integers(1, 9, (5, 3)).astype(float)
        limit = float(rng.integers(5, 30))
        choices = list(itertools.product(range(3), repeat=5))
        fitting = [
            sum(seconds[v, x] for v, x in enumerate(c))
            for c in choices
            if sum(held[v, x] for v, x in enumerate(c)) <= limit
        ]
        value, picked = _exact(seconds, held, limit)
        assert value == min(fitting, default=math.inf)
        if fitting:
            assert sum(held[np.arange(5), picked]) <= limit
            swapped, _ = _swaps(seconds, held, limit)
            assert swapped >= value
            worse += swapped > value
    assert worse > 0


def test_more_memory_or_devices_never_hurt_and_units_scale() -> None:
    for seed in range(40):
        problem = problem_of(seed)

        def value(problem: PiperProblem) -> float:
            plan = solve(problem)
            return math.inf if plan is None else plan.value_s

        base = value(problem)
        assert value(replace(problem, limit_bytes=problem.limit_bytes * 2)) <= base
        assert value(replace(problem, devices=problem.devices + 1)) <= base
        fast = tuple(
            PiperNode(
                name=node.name,
                variants={t: tuple(replace(v, time_s=v.time_s * 1e-7) for v in vs) for t, vs in node.variants.items()},
            )
            for node in problem.nodes
        )
        scaled = value(replace(problem, nodes=fast, bytes_per_s=problem.bytes_per_s * 1e7))
        assert scaled == pytest.approx(base * 1e-7, rel=1e-9)


def test_equal_stages_give_the_remainder_to_the_last() -> None:
    assert equal_stages(3, [2, 3, 4, 5], 7) == [(0, 1, 2), (3,), (4, 5, 6)]


def test_a_profile_with_nan_or_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "piper_x.json"
    path.write_text('{"nodes": [], "edges": [{}]}')
    with pytest.raises(FormatError, match="not a Piper profile"):
        read_piper(path)
    bad = PiperVariant(name="x", time_s=math.nan, parameter_bytes=0, bytes_in_flight=0, bytes_static=0, sync_bytes=())
    with pytest.raises(UserError, match="time must be numbers >= 0, got nan"):
        solve(
            PiperProblem(
                nodes=(PiperNode(name="l", variants={1: (bad,)}),),
                edges={},
                devices=1,
                micro_batches=1,
                bytes_per_s=1.0,
            )
        )
