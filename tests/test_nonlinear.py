"""Cuts of graphs with skips and branches: closed under predecessors, what crosses priced once per reader, all found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.plan.partition import partition_of
from simpart.problem import Problem, Space
from simpart.searchers._chain_plans import Answer, ChainCase, chain_cases, chain_plan
from simpart.searchers._stage_costs import ChainProblem
from simpart.searchers._stages import ChainStage
from simpart.searchers.piper import Piper
from simpart.searching import Control, search
from simpart.training import TrainingSpec

SPACE = Space(schedules=("1f1b",), recompute=("none",), max_stages=3, max_micro_batches=2)


@pytest.fixture(scope="module", params=["unet", "two_tower"])
def graph(request: pytest.FixtureRequest) -> Graph:
    from simpart.capture import capture
    from simpart.zoo import TwoTowerDims, UNetDims, ZooFactory

    small = TwoTowerDims(
        image=64, patch=16, image_layers=2, image_hidden=64, image_heads=2, seq=16, vocab=200, text_layers=2,
        text_hidden=64, text_heads=2, embed=32,
    )  # fmt: skip
    if request.param == "unet":
        return capture(ZooFactory("unet", UNetDims(image=32, base=8, depth=2)), model="unet")
    return capture(ZooFactory("two_tower", small), model="two_tower")


def problem_of(graph: Graph, space: Space = SPACE) -> Problem:
    costs = Costs(compute=Roofline(), communication=AlphaBeta())
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=load_cluster("local:4"), costs=costs, global_batch=8, space=space
    )


def block_edges(chain: ChainProblem) -> set[tuple[int, int]]:
    """Which block feeds which, read off the ops themselves."""
    own = {int(op): b for b, ops in enumerate(chain.cut.chain) for op in ops}
    pairs = zip(chain.cut.dag.edge_source.tolist(), chain.cut.dag.edge_target.tolist(), strict=True)
    return {(own[a], own[b]) for a, b in pairs if a in own and b in own and own[a] != own[b]}


def ordered_splits(blocks: int, edges: set[tuple[int, int]], most: int) -> Iterator[list[frozenset[int]]]:
    """Every way to do the blocks in at most `most` stages, none of which needs a later one."""

    def grow(left: frozenset[int], stages: int) -> Iterator[list[frozenset[int]]]:
        if not left:
            yield []
            return
        if stages:
            for size in range(1, len(left) + 1):
                for picked in itertools.combinations(sorted(left), size):
                    rest = left - set(picked)
                    if not any(a in rest and b in picked for a, b in edges):
                        for others in grow(rest, stages - 1):
                            yield [frozenset(picked), *others]

    yield from grow(frozenset(range(blocks)), most)


def test_a_skip_or_a_branch_leaves_more_cuts_than_a_line(graph: Graph) -> None:
    chain = ChainProblem(problem_of(graph), graph, 2, 8, 64)
    edges = block_edges(chain)
    for inside in chain.cut.sets.inside:
        assert all(inside[a] or not inside[b] for a, b in edges)
    if graph.model == "two_tower":
        assert len(chain.cut.sets.inside) > chain.size + 1


def test_what_crosses_is_what_the_plan_sends_once_per_reading_stage(graph: Graph) -> None:
    problem = problem_of(graph)
    chain = ChainProblem(problem, graph, 2, 6, 64)
    (cases,) = chain_cases(problem, Control(), most_blocks=6, most_sets=64)
    case = next(c for c in cases if c.shape.pipelines == 1 and 1 in c.costs.counts)
    entering, leaving = chain.runs.crossing_bytes(2)
    rng, last = np.random.default_rng(0), len(chain.cut.sets.inside) - 1
    for _ in range(20):
        path = [0]
        while path[-1] != last:
            after = np.flatnonzero(chain.cut.sets.nested[path[-1]])
            path.append(last if len(path) == 4 else int(rng.choice(after)))
        stages = tuple(ChainStage(start=a, end=b, replicas=1) for a, b in itertools.pairwise(path))
        plan = chain_plan(problem, case.chain, case.shape, Answer(stages=stages, objective_s=1.0), "1f1b")
        held = partition_of(graph, plan)
        for x, stage in enumerate(stages):
            received = sum(graph.flat.value_spec[c.value].bytes(2) for c in held.crossings if x in c.destinations)
            sent = sum(graph.flat.value_spec[c.value].bytes(2) for c in held.crossings if c.source == x)
            assert entering[stage.start, stage.end] == received
            assert leaving[stage.start, stage.end] == sent


def test_piper_finds_the_best_of_all_closed_sets(graph: Graph) -> None:
    problem = problem_of(graph)
    result = search(problem, Piper(most_blocks=6))
    cases = [c for group in chain_cases(problem, Control(), most_blocks=6, most_sets=64) for c in group]
    best = min(_enumerated(problem, case) for case in cases)
    assert result.bound_s == pytest.approx(best, rel=1e-9)
    line = search(problem, Piper(most_blocks=6, most_sets=0))
    assert line.bound_s is not None and result.bound_s is not None
    if len(cases[0].chain.cut.chain) == 6:  # the same blocks
        assert result.bound_s <= line.bound_s * (1 + 1e-12)
    assert result.best is not None and "stages begin at" in result.best.candidate.why


def _enumerated(problem: Problem, case: ChainCase) -> float:
    """M × the slowest stage with its transfers over all ordered splits, each stage summed up from its blocks."""
    costs, chain, best = case.costs, case.chain, math.inf
    number = {tuple(inside): s for s, inside in enumerate(chain.cut.sets.inside.tolist())}
    seconds = costs.forward_s + costs.backward_s + 2 * costs.transfer_s
    held = costs.static_bytes + min(costs.micro_batches, 3) * costs.stash_bytes
    assert (held[chain.cut.sets.nested] < costs.limit_bytes).all()  # memory decides nothing here
    for split in ordered_splits(chain.size, block_edges(chain), min(3, case.shape.devices)):
        done: frozenset[int] = frozenset()
        at = []
        for stage in split:
            after = done | stage
            at.append(tuple(number[tuple(b in part for b in range(chain.size))] for part in (done, after)))
            done = after
        for counts in itertools.product(range(len(costs.replicas)), repeat=len(split)):
            if sum(costs.replicas[k] for k in counts) == case.shape.devices:
                slowest = max(float(seconds[s, t, k]) for (s, t), k in zip(at, counts, strict=True))
                best = min(best, costs.micro_batches * slowest)
    return best
