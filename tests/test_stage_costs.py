"""Costs of runs of blocks against the partition that their plan has: the same ops, parameters and values."""

from __future__ import annotations

import numpy as np
import pytest

from simpart.capture import capture
from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.plan.partition import partition
from simpart.problem import Problem
from simpart.searchers._remembered import remembered
from simpart.searchers._stage_costs import ChainProblem
from simpart.training import TrainingSpec
from tests.models import shifted


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(shifted, model="tests.models:shifted")


def problem_of(graph: Graph) -> Problem:
    costs = Costs(compute=Roofline(), communication=AlphaBeta())
    return Problem(graph=graph, training=TrainingSpec(), cluster=load_cluster("local:4"), costs=costs, global_batch=8)


def test_both_sides_of_a_cut_cost_what_the_ops_of_their_stages_cost_writes_into_clones_too(graph: Graph) -> None:
    problem = problem_of(graph)
    chain = ChainProblem(problem, graph, 2, 8)
    price, last = problem.prices([2], chain.cut.kinds[0])[2], chain.size
    seconds = [(price.forward.seconds + price.backward.seconds)[c] for c in graph.flat.op_class.tolist()]
    forward, backward = chain.runs.times_s(0, 2, False)
    entering, leaving = chain.runs.crossing_bytes(2)
    assert last > 3
    for cut in range(1, last):
        stage_of = np.full(len(seconds), -1)
        stage_of[chain.cut.ops(0, cut)], stage_of[chain.cut.ops(cut, last)] = 0, 1
        held = partition(graph, stage_of, 2)
        sent = sum(graph.flat.value_spec[crossing.value].bytes(2) for crossing in held.crossings)
        assert entering[cut, last] == leaving[0, cut] == sent
        for run, ops in zip(((0, cut), (cut, last)), held.ops, strict=True):
            assert forward[run] + backward[run] == pytest.approx(sum(seconds[op] for op in ops))


def test_remembered_answers_go_with_their_object() -> None:
    class Counter:
        asked = 0

        @remembered
        def twice(self, x: int) -> int:
            self.asked += 1
            return 2 * x

    one, other = Counter(), Counter()
    assert [one.twice(3), one.twice(3), one.twice(4), other.twice(3)] == [6, 6, 8, 6]
    assert (one.asked, other.asked) == (2, 1)
