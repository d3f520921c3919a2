"""Cost graphs: every method against enumeration."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpart.searchers import _cost_graph as ladder
from simpart.searchers._cost_graph import (
    CostGraph,
    Ints,
    Row,
    Solution,
    linear_bound,
    minimise,
    near_optimal,
    price,
    rows_hold,
)
from simpart.searchers._cost_graph.buckets import eliminate, elimination_order, marginals
from simpart.searchers._cost_graph.messages import pass_messages
from simpart.searchers._cost_graph.program import solve_program
from simpart.searchers._cost_graph.reduce import reduce_graph
from simpart.searchers._cost_graph.rows import price_rows


@st.composite
def graphs(draw: st.DrawFn, *, rows: bool = False, forbidden: bool = True, variables: int = 6) -> CostGraph:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = random.integers(1, 5, draw(st.integers(1, variables)))
    share = random.choice([0.0, 0.2, 0.5]) if forbidden else 0.0

    def costs(*shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        table = random.integers(0, 20, shape).astype(float)
        table[random.random(shape) < share] = math.inf
        return table

    pairs = [p for p in itertools.product(range(len(sizes)), repeat=2) if random.random() < 0.35]
    edges = tuple((i, j, costs(sizes[i], sizes[j])) for i, j in pairs)
    limits = []
    for _ in range(int(random.integers(1, 4)) if rows else 0):
        weights = [
            (v, random.integers(0, 10, sizes[v]).astype(float)) for v in range(len(sizes)) if random.random() < 0.7
        ]
        most = sum(float(w.max()) for _, w in weights)
        limits.append(Row(limit=float(random.integers(0, int(most) + 2)), weights=tuple(weights)))
    unary = tuple(np.where(random.random(k) < share / 3, math.inf, costs(k)) for k in sizes)
    return CostGraph(unary=unary, edges=edges, rows=tuple(limits))


def chosen(solution: Solution) -> Ints:
    assert solution.choice is not None
    return solution.choice


def enumerate_costs(graph: CostGraph) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Cost of each choice that keeps the rows."""
    for options in itertools.product(*(range(len(c)) for c in graph.unary)):
        choice = np.array(options)
        if rows_hold(graph, choice) and math.isfinite(cost := price(graph, choice)):
            yield cost, options


def optimum(graph: CostGraph) -> float:
    return min((cost for cost, _ in enumerate_costs(graph)), default=math.inf)


def check(graph: CostGraph, solution: Solution) -> None:
    best = optimum(graph)
    assert solution.cost == pytest.approx(best, rel=1e-9)
    assert solution.bound <= best + 1e-6
    assert solution.bound == pytest.approx(best, rel=1e-6, abs=1e-5)
    if solution.choice is None:
        assert solution.why
    else:
        assert price(graph, solution.choice) == solution.cost
        assert rows_hold(graph, solution.choice)


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_least_cost_without_rows(graph: CostGraph) -> None:
    check(graph, minimise(graph))


@settings(max_examples=120, deadline=None)
@given(graphs(rows=True))
def test_least_cost_with_rows(graph: CostGraph) -> None:
    check(graph, minimise(graph))


@settings(max_examples=60, deadline=None)
@given(graphs(rows=True))
def test_least_cost_when_the_graph_is_too_wide_for_elimination(graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "elimination_order", lambda graph: [])
        check(graph, minimise(graph))


@settings(max_examples=60, deadline=None)
@given(graphs(rows=True))
def test_message_passing_alone_gives_a_valid_bound(graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "elimination_order", lambda graph: [])
        solution = minimise(graph, level="quick")
    best = optimum(graph)
    assert solution.bound <= best + 1e-6 <= solution.cost + 2e-6
    assert solution.choice is None or rows_hold(graph, solution.choice)


@settings(max_examples=80, deadline=None)
@given(graphs(rows=True))
def test_reductions_keep_the_optimum_and_expand_to_it(graph: CostGraph) -> None:
    core = reduce_graph(graph)
    best = optimum(graph)
    if core.why:
        assert best == math.inf
        return
    variables = sorted(core.unary)
    left = core.graph(variables)
    found = min(enumerate_costs(left), default=None)
    assert (core.constant + found[0] if found else math.inf) == pytest.approx(best)
    if found:
        choice = core.expand(dict(zip(variables, found[1], strict=True)))
        assert price(graph, choice) == pytest.approx(best)
        assert rows_hold(graph, choice)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_marginals_are_the_least_cost_with_each_option(graph: CostGraph) -> None:
    buckets = eliminate(graph, elimination_order(graph))
    own = [np.full(len(c), math.inf) for c in graph.unary]
    for cost, options in enumerate_costs(graph):
        for v, x in enumerate(options):
            own[v][x] = min(own[v][x], cost)
    for found, expected in zip(marginals(buckets), own, strict=True):
        if math.isfinite(buckets.cost):
            np.testing.assert_allclose(found, expected)


@settings(max_examples=60, deadline=None)
@given(graphs(rows=True), st.integers(0, 10))
def test_near_optimal_choices_are_all_there_cheapest_first(graph: CostGraph, slack: int) -> None:
    found = near_optimal(graph, float(slack), 10_000)
    costs = [price(graph, choice) for choice in found]
    best = optimum(graph)
    expected = {options for cost, options in enumerate_costs(graph) if cost <= best + slack}
    assert {tuple(map(int, choice)) for choice in found} == expected
    assert costs == sorted(costs)


@settings(max_examples=60, deadline=None)
@given(graphs(rows=True, forbidden=False))
def test_bounds_of_prices_and_relaxation_are_below_the_optimum(graph: CostGraph) -> None:
    best = optimum(graph)
    relaxed = linear_bound(graph)
    priced = price_rows(graph, elimination_order(graph))
    assert relaxed <= best + 1e-6
    assert priced.bound <= best + 1e-6
    if math.isfinite(best):
        assert priced.bound >= relaxed - 1e-5
        for cost, options in enumerate_costs(graph):
            assert all(bounds[x] <= cost + 1e-6 for bounds, x in zip(priced.option_bounds, options, strict=True))


def chain(length: int, options: int, seed: int = 0) -> CostGraph:
    random = np.random.default_rng(seed)
    return CostGraph(
        unary=tuple(random.random(options) for _ in range(length)),
        edges=tuple((v, v + 1, random.random((options, options))) for v in range(length - 1)),
    )


def test_a_chain_is_solved_by_reduction_alone() -> None:
    graph = chain(200, 8)
    total = graph.unary[0]
    for v in range(199):
        total = (total[:, None] + graph.edges[v][2]).min(axis=0) + graph.unary[v + 1]
    solution = minimise(graph)
    assert solution.method == "reduction"
    assert solution.cost == pytest.approx(total.min())


def test_message_passing_is_exact_on_a_chain() -> None:
    graph = chain(30, 5)
    choice, bound = pass_messages(graph)
    assert choice is not None
    assert price(graph, choice) == pytest.approx(minimise(graph).cost)
    assert bound == pytest.approx(minimise(graph).cost)


def test_a_grid_too_wide_for_elimination_has_a_choice_and_a_bound() -> None:
    random = np.random.default_rng(1)
    side = 14
    number = np.arange(side * side).reshape(side, side)
    ends = [*zip(number[:, :-1].flat, number[:, 1:].flat, strict=True)]
    ends += [*zip(number[:-1].flat, number[1:].flat, strict=True)]
    graph = CostGraph(
        unary=tuple(random.random(4) for _ in range(side * side)),
        edges=tuple((int(i), int(j), random.random((4, 4))) for i, j in ends),
    )
    solution = minimise(graph, level="quick")
    assert solution.method == "messages"
    assert 0 <= solution.gap < 0.2
    assert minimise(graph, seconds=5, relative_gap=0.02).gap < 0.1


def test_followers_merge_even_where_rows_weigh_them() -> None:
    equal = np.where(np.eye(3) > 0, 0.0, math.inf)
    weights = np.array([5.0, 2.0, 1.0])
    graph = CostGraph(
        unary=tuple(np.array([0.0, 1.0, 5.0]) for _ in range(10)),
        edges=tuple((v, v + 1, equal) for v in range(9)),
        rows=(Row(limit=25.0, weights=tuple((v, weights) for v in range(10))),),
    )
    solution = minimise(graph)
    assert (solution.method, solution.cost, chosen(solution).tolist()) == ("reduction", 10.0, [1] * 10)


def test_a_row_that_cannot_hold_is_named() -> None:
    graph = CostGraph(
        unary=(np.zeros(2), np.zeros(2)),
        edges=(),
        rows=(Row(limit=3.0, weights=((0, np.array([2.0, 3.0])), (1, np.array([2.0, 4.0]))), name="memory at step 3"),),
    )
    solution = minimise(graph)
    assert solution.choice is None
    assert solution.why == "memory at step 3 needs at least 4 and may use 3, whatever is chosen"


def test_costs_of_microseconds_are_solved_as_well_as_costs_of_bytes() -> None:
    graph = CostGraph(
        unary=tuple(np.array([1e-6, 3e-6 + v * 1e-9]) for v in range(8)),
        edges=(),
        rows=(Row(limit=1e10, weights=tuple((v, np.array([3e9, 1e9])) for v in range(8))),),
    )
    check(graph, minimise(graph))
    assert solve_program(graph, integral=True).value == pytest.approx(minimise(graph).cost, rel=1e-9)


def test_the_same_graph_gives_the_same_choice() -> None:
    graph = CostGraph(unary=(np.zeros(3),) * 4, edges=((0, 1, np.zeros((3, 3))), (1, 2, np.ones((3, 3)))))
    assert chosen(minimise(graph)).tolist() == chosen(minimise(graph)).tolist()
