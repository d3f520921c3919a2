"""Clusters of several kinds of devices: costs by a stage's place, exact; plans that follow speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.problem import Problem, Space
from simpart.registry import load_searcher
from simpart.searchers._bottleneck import least_bottlenecks
from simpart.searchers._chain import ChainPlan, Shortfall, Unplannable, solve_chain
from simpart.searchers._lines import kind_orders, lines, shares
from simpart.searchers._pipelines import PipelineShape
from simpart.searchers._stages import ChainStage, StageCosts
from simpart.searchers.alpa import InterOp, InterOpCosts
from simpart.searching import search
from simpart.simulation import evaluate
from simpart.testing.searcher_suite import check_searcher
from simpart.training import TrainingSpec

MIXED = "a100-v100"


def random_costs(seed: int) -> tuple[StageCosts, int]:
    """A short chain on devices of two kinds: a stage costs by the kinds it lies on and by where it begins."""
    rng = np.random.default_rng(seed)
    n, devices = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    fast = int(rng.integers(0, devices + 1))
    choices: dict[tuple[int, int, bool], list[int]] = {}
    for r in range(1, devices + 1):
        for first in range(devices - r + 1):
            profile = r, max(0, min(first + r, fast) - first), first == fast
            choices.setdefault(profile, []).append(devices - first)
    shape = (n, n + 1, len(choices))
    places = np.zeros((len(choices), devices + 1), dtype=np.bool_)
    for k, left in enumerate(choices.values()):
        places[k, left] = True
    length = np.maximum(np.arange(n + 1)[None, :] - np.arange(n)[:, None], 0)[:, :, None]
    static, stash = (rng.integers(0, 6, shape) * length.astype(float) for _ in range(2))
    costs = StageCosts(
        replicas=tuple(r for r, _, _ in choices),
        forward_s=rng.integers(1, 12, shape).astype(float),
        backward_s=rng.integers(1, 12, shape).astype(float),
        transfer_s=rng.integers(0, 3, shape).astype(float),
        allreduce_s=np.zeros(shape),
        static_bytes=static,
        stash_bytes=stash,
        limit_bytes=float(rng.integers(10, 40)),
        micro_batches=int(rng.integers(1, 5)),
        allowed=rng.random(shape) < 0.9,
        in_flight="1f1b" if rng.random() < 0.5 else "gpipe",
        places=places,
    )
    return costs, devices


def every_plan(
    costs: StageCosts, devices: int, count: int, at_most: bool
) -> Iterator[list[tuple[int, int, int, bool]]]:
    """(start, end, choice, fits) of the stages of every plan, found stage by stage from the places alone."""
    assert costs.places is not None
    for cuts in itertools.combinations(range(1, costs.blocks), count - 1):
        ends = (0, *cuts, costs.blocks)
        for counts in itertools.product(range(1, devices + 1), repeat=count):
            used = sum(counts)
            if used > devices or (used < devices and not at_most):
                continue
            stages, left = [], used
            for x, r in enumerate(counts):
                (k,) = (k for k, size in enumerate(costs.replicas) if size == r and costs.places[k, left])
                at = ends[x], ends[x + 1], k
                flying = costs.micro_batches if costs.in_flight == "gpipe" else min(costs.micro_batches, count - x)
                held = costs.static_bytes[at] + flying * costs.stash_bytes[at]
                stages.append((*at, bool(costs.allowed[at] and held < costs.limit_bytes)))
                left -= r
            yield stages


def values(costs: StageCosts, stages: list[tuple[int, int, int, bool]]) -> tuple[float, float, float]:
    """(max f + max g, slowest, sum + (M - 1) slowest), transfers included; infinite where a stage does not fit."""
    if not all(fits for *_, fits in stages):
        return math.inf, math.inf, math.inf
    f = [float(costs.forward_s[i, j, k] + costs.transfer_s[i, j, k]) for i, j, k, _ in stages]
    g = [float(costs.backward_s[i, j, k] + costs.transfer_s[i, j, k]) for i, j, k, _ in stages]
    both = [a + b for a, b in zip(f, g, strict=True)]
    return max(f) + max(g), max(both), sum(both) + (costs.micro_batches - 1) * max(both)


def check(seed: int) -> None:
    """All three exact solvers on one instance."""
    costs, devices = random_costs(seed)
    both = costs.forward_s + costs.backward_s + 2 * costs.transfer_s
    most = min(devices, costs.blocks)
    from simpart.searchers._stages import later_stages_allowed

    allowed = later_stages_allowed(costs)
    for at_most in (False, True):
        chains = solve_chain(costs, devices, most, all_devices=not at_most)
        slowest = least_bottlenecks(
            lambda later: np.where(allowed >= later, both, np.inf), costs.replicas, devices, most,
            all_devices=not at_most, places=costs.places,
        )  # fmt: skip
        inter_op = InterOp(
            InterOpCosts(time_s=both, successors=allowed, sizes=costs.replicas, places=costs.places),
            devices, costs.micro_batches, all_devices=not at_most,
        )  # fmt: skip
        for count in range(1, most + 1):
            plans = list(every_plan(costs, devices, count, at_most))
            value, largest, total = (min(x) for x in zip(*(values(costs, p) for p in plans), strict=True))
            answer, bottleneck, alpa = chains[count], slowest[count], inter_op.best(count)
            assert (answer.value_s if isinstance(answer, ChainPlan) else math.inf) == value, seed
            assert (math.inf if bottleneck is None else bottleneck.value) == largest, seed
            assert (math.inf if alpa is None else alpa.total_s) == pytest.approx(total), seed
            if isinstance(answer, ChainPlan) and bottleneck is not None:
                for stages, found in ((answer.stages, (value, 0)), (bottleneck.stages, (largest, 1))):
                    again = [(*at, True) for at in costs.entries(stages)]
                    assert values(costs, again)[found[1]] == found[0]
            else:
                assert isinstance(answer, Unplannable)
                short = min(_bytes_over(costs, plan) for plan in plans)
                assert (short == math.inf) == (answer.shortfall is None)
                if isinstance(answer.shortfall, Shortfall):
                    assert answer.shortfall.bytes_over == short


def _bytes_over(costs: StageCosts, plan: list[tuple[int, int, int, bool]]) -> float:
    over, count = -math.inf, len(plan)
    for x, (i, j, k, _) in enumerate(plan):
        if not costs.allowed[i, j, k]:
            return math.inf
        over = max(over, float(costs.bytes_needed(count - 1 - x)[i, j, k]) - costs.limit_bytes)
    return over


@pytest.mark.parametrize("part", range(2))
def test_planners_on_two_kinds_agree_with_enumeration(part: int) -> None:
    for seed in range(60 * part, 60 * part + 60):
        check(seed)


@pytest.mark.slow
def test_planners_on_two_kinds_agree_with_enumeration_on_a_thousand() -> None:
    for seed in range(1000, 2000):
        check(seed)


def test_a_stage_that_stands_nowhere_is_refused() -> None:
    costs, devices = random_costs(3)
    none = replace(costs, places=np.zeros_like(costs.places))
    with pytest.raises(ValueError, match="no stage of"):
        none.entries((ChainStage(start=0, end=1, replicas=1),))
    assert all(isinstance(a, Unplannable) for a in solve_chain(none, devices, 1).values())


def test_pipelines_take_an_equal_part_of_each_kind_in_every_order() -> None:
    cluster = load_cluster(MIXED)
    assert kind_orders(cluster, 1, False) == {(1, 0): 16}
    assert kind_orders(cluster, 2, False) == {(0, 1): 8, (1, 0): 8}
    assert kind_orders(cluster, 3, False) == {}
    assert kind_orders(cluster, 3, True) == {(0, 1): 4, (1, 0): 4}
    assert kind_orders(load_cluster("dgx-a100:2"), 2, True) == {}
    shape = PipelineShape(nodes=1, pipelines=2, devices=8, micro_batches=1, recompute=False, kinds=(1, 0))
    assert lines(cluster, shape) == ((8, 9, 10, 11, 0, 1, 2, 3), (12, 13, 14, 15, 4, 5, 6, 7))
    assert lines(cluster, replace(shape, kinds=()))[1] == tuple(range(8, 16))


def test_uneven_shares_follow_speed_and_never_do_worse_than_equal_ones() -> None:
    def seconds(kind: int, samples: int) -> float:
        return 0.5 + samples * (1 + 2 * kind)

    assert shares([0, 0, 1, 1], 16, 1, seconds, True) == (6, 6, 2, 2)
    assert shares([0, 0, 1, 1], 16, 1, seconds, False) == (4, 4, 4, 4)
    assert shares([0, 0, 0], 8, 1, seconds, False) is None
    assert shares([0, 0, 0], 8, 1, seconds, True) == (3, 3, 2)
    assert shares([0, 1], 3, 2, seconds, True) is None
    for samples in range(4, 40):
        for least in (1, 2):
            taken = shares([1, 0, 0, 1], samples, least, seconds, True)
            if samples < 4 * least:
                assert taken is None
                continue
            assert taken is not None and sum(taken) == samples and min(taken) >= least
            slowest = max(seconds(k, b) for k, b in zip((1, 0, 0, 1), taken, strict=True))
            assert slowest <= seconds(1, -(-samples // 4))


@pytest.fixture(scope="module")
def gpt() -> Graph:
    from simpart.capture import capture
    from simpart.zoo import GPTDims, ZooFactory

    dims = GPTDims(layers=12, hidden=1024, heads=16, seq=512, vocab=8192)
    return capture(ZooFactory("gpt", dims), model="gpt", precision="float16")


def problem_on(graph: Graph, cluster: str, space: Space, global_batch: int = 32) -> Problem:
    costs = Costs(compute=Roofline(), communication=AlphaBeta())
    return Problem(
        graph=graph, training=TrainingSpec(), cluster=load_cluster(cluster), costs=costs, global_batch=global_batch,
        space=space,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["rannc", "alpa"])
def test_plans_on_two_kinds_beat_those_for_the_slowest_kind(gpt: Graph, name: str) -> None:
    space = Space(min_stages=2, max_stages=4, schedules=("1f1b",), recompute=("none",))
    mixed = problem_on(gpt, MIXED, space)
    found = search(mixed, load_searcher(name))
    blind = search(problem_on(gpt, "dgx-v100:2", space), load_searcher(name))
    assert found.best is not None and blind.best is not None and blind.best.candidate.plan is not None
    (slow,) = evaluate(mixed, [blind.best.candidate.plan])
    assert found.best.evaluation.step_s < slow.step_s * 0.95
    plan = found.best.candidate.plan
    assert plan is not None
    per_kind: dict[str, list[float]] = {}
    for stage in plan.stages:
        devices = list(plan.groups[stage.group].devices)
        kinds = {mixed.cluster.device(d).name for d in devices}
        if len(kinds) == 1:
            per_kind.setdefault(kinds.pop(), []).append(len(stage.ops.indices(gpt)) / len(devices))
    if len(per_kind) == 2:
        assert np.mean(per_kind["A100-SXM-80GB"]) > np.mean(per_kind["V100-SXM2-32GB"])


@pytest.mark.parametrize("name", ["pipedream", "piper"])
def test_the_slowest_stage_is_faster_than_on_the_slowest_kind(gpt: Graph, name: str) -> None:
    space = Space(min_stages=2, max_stages=4, schedules=("1f1b",), recompute=("none",))
    mixed, slow = (search(problem_on(gpt, cluster, space), load_searcher(name)) for cluster in (MIXED, "dgx-v100:2"))
    assert mixed.bound_s is not None and slow.bound_s is not None and mixed.bound_s < 0.95 * slow.bound_s


def test_uneven_replicas_share_the_batch_by_speed(gpt: Graph) -> None:
    space = Space(max_stages=1, schedules=("1f1b",), recompute=("none",))
    even = search(problem_on(gpt, MIXED, space, 128), load_searcher("pipedream")).best
    uneven = search(problem_on(gpt, MIXED, replace(space, uneven_replicas=True), 128), load_searcher("pipedream")).best
    assert even is not None and uneven is not None and uneven.candidate.plan is not None
    assert uneven.evaluation.step_s < even.evaluation.step_s
    (sizes,) = uneven.candidate.plan.batch.sizes
    assert min(sizes[:8]) > max(sizes[8:]) and sum(sizes) * uneven.candidate.plan.batch.micro_batches == 128


def test_uneven_replicas_take_batches_that_do_not_divide(gpt: Graph) -> None:
    space = Space(max_stages=1, max_micro_batches=1, schedules=("1f1b",), recompute=("none",))
    assert search(problem_on(gpt, "local:3", space, 8), load_searcher("rannc")).best is None
    best = search(problem_on(gpt, "local:3", replace(space, uneven_replicas=True), 8), load_searcher("rannc")).best
    assert best is not None and best.candidate.plan is not None and best.candidate.plan.batch.sizes == ((3, 3, 2),)


@pytest.mark.parametrize("name", ["rannc", "alpa", "pipedream", "piper", "equal_layers", "two_bw", "random"])
def test_searchers_keep_the_rules_on_two_kinds(gpt: Graph, name: str) -> None:
    space = Space(max_stages=3, max_micro_batches=4, schedules=("1f1b",), uneven_replicas=True, use_fewer_devices=True)
    cluster = load_cluster(MIXED)
    few = replace(cluster, devices=tuple((device, 2) for device, _ in cluster.devices))
    problem = replace(problem_on(gpt, MIXED, space, 8), cluster=few)
    assert check_searcher(lambda: load_searcher(name), problem).best is not None
