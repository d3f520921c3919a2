"""The stage problem and the search around it, against plain enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simpart.searchers._bounds import dapple_pivot, lockstep_s, schedule_lower_bound_s
from simpart.searchers._chain import ChainPlan, Unplannable, plan_value_s, solve_chain
from simpart.searchers._linear import linear_costs
from simpart.searchers._pipelines import (
    PipelineChoice,
    PipelineSearch,
    PipelineShape,
    all_shapes,
    plan_lockstep_s,
    released_search,
    search_pipelines,
)
from simpart.searchers._stages import StageCosts, later_stages_allowed
from simpart.searchers.rannc import solve_outer, solve_stages

Plan = tuple[tuple[int, int, int], ...]


def every_plan(n: int, stages: int, devices: int, replicas: tuple[int, ...], at_most: bool = False) -> Iterator[Plan]:
    for cuts in itertools.combinations(range(1, n), stages - 1):
        ends = (*cuts, n)
        for choice in itertools.product(replicas, repeat=stages):
            if sum(choice) == devices or (at_most and sum(choice) <= devices):
                yield tuple(zip((0, *cuts), ends, choice, strict=True))


def enumerated(costs: StageCosts, stages: int, devices: int, at_most: bool = False) -> tuple[float, float]:
    """Least value over plans that fit (infinite if none), and least memory excess over all plans within the rules."""
    best = least_over = math.inf
    for plan in every_plan(costs.blocks, stages, devices, costs.replicas, at_most):
        f = g = over = -math.inf
        for x, (i, j, r) in enumerate(plan):
            at = (i, j, costs.replicas.index(r))
            if not costs.allowed[at]:
                over = math.inf
                break
            flying = costs.micro_batches if costs.in_flight == "gpipe" else min(costs.micro_batches, stages - x)
            over = max(over, costs.static_bytes[at] + flying * costs.stash_bytes[at] - costs.limit_bytes)
            f = max(f, costs.forward_s[at] + costs.transfer_s[at])
            g = max(g, costs.backward_s[at] + costs.transfer_s[at])
        least_over = min(least_over, over)
        if over < 0:
            best = min(best, f + g)
    return best, least_over


def dense(seed: int, *, n: int, devices: int, power_of_two: bool = False) -> StageCosts:
    """Costs without any structure: every entry drawn alone."""
    rng = np.random.default_rng(seed)
    replicas = tuple(r for r in range(1, devices + 1) if not power_of_two or r & (r - 1) == 0)
    shape = (n, n + 1, len(replicas))
    return StageCosts(
        replicas=replicas,
        forward_s=rng.integers(1, 12, shape).astype(float),
        backward_s=rng.integers(1, 25, shape).astype(float),
        transfer_s=rng.integers(0, 5, shape).astype(float),
        allreduce_s=rng.integers(0, 9, shape).astype(float),
        static_bytes=rng.integers(1, 30, shape).astype(float),
        stash_bytes=rng.integers(0, 5, shape).astype(float),
        limit_bytes=float(rng.choice([12, 25, 40, 60])),
        micro_batches=int(rng.integers(1, 6)),
        allowed=rng.random(shape) < 0.9,
        in_flight="gpipe" if rng.random() < 0.5 else "1f1b",
    )


def linear(seed: int) -> dict[str, Any]:
    """A stage problem of the published form."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    devices = int(rng.integers(1, 7))
    micro_batches = int(rng.choice([1, 2, 4]))

    def draw(low: int, high: int) -> list[int]:
        return [int(x) for x in rng.integers(low, high, n)]

    return {
        "f": draw(1, 10), "g": draw(1, 20), "w": draw(0, 6), "a": draw(0, 4), "out": draw(0, 9),
        "c": float(rng.choice([0.0, 0.5])), "bw": None if rng.random() < 0.3 else float(rng.integers(1, 6)),
        "M": None if rng.random() < 0.3 else int(rng.integers(10, 80)),
        "S": int(rng.integers(1, min(n, devices) + 1)), "D": devices, "R": int(rng.integers(1, 3)), "MB": micro_batches,
        "BS": int(rng.choice([4, 8, 12, 16])), "power_of_two_replicas": bool(rng.random() < 0.6),
    }  # fmt: skip


def enumerated_linear(case: dict[str, Any], order: str = "value") -> float:
    """The published model straight from its text, one plan after the other."""
    n, samples = len(case["f"]), math.ceil(case["BS"] / (case["R"] * case["MB"]))
    replicas = tuple(
        r for r in range(1, min(case["D"], samples) + 1) if not case["power_of_two_replicas"] or bin(r).count("1") == 1
    )
    best = math.inf
    for plan in every_plan(n, case["S"], case["D"], replicas):
        f = g = 0.0
        for i, j, r in plan:
            bs = math.ceil(samples / r)
            c = 0.0
            if case["bw"] is not None:
                c += case["out"][i - 1] * bs / case["bw"] if i > 0 else 0.0
                c += case["out"][j - 1] * bs / case["bw"] if j < n else 0.0
            if case["M"] is not None and sum(case["w"][i:j]) + bs * sum(case["a"][i:j]) >= case["M"]:
                break
            f = max(f, bs * sum(case["f"][i:j]) + case["c"] + c)
            g = max(g, bs * sum(case["g"][i:j]) + case["c"] + c)
        else:
            best = min(best, f + g)
    return best


def single_record(case: dict[str, Any], *, with_transfers: bool) -> float:
    """The inexact dynamic program: one (f, g) record per cell, kept by its sum; transfers in the record or not."""
    n, samples = len(case["f"]), math.ceil(case["BS"] / (case["R"] * case["MB"]))
    cells: dict[tuple[int, int], tuple[float, float, float]] = {(0, 0): (0.0, 0.0, 0.0)}
    for _ in range(case["S"]):
        following: dict[tuple[int, int], tuple[float, float, float]] = {}
        for (i, used), (f, g, total) in cells.items():
            for j in range(i + 1, n + 1):
                for r in range(1, min(case["D"] - used, samples) + 1):
                    if case["power_of_two_replicas"] and r & (r - 1):
                        continue
                    bs = math.ceil(samples / r)
                    if case["M"] is not None and sum(case["w"][i:j]) + bs * sum(case["a"][i:j]) >= case["M"]:
                        continue
                    c = 0.0
                    if case["bw"] is not None:
                        c = (case["out"][i - 1] if i else 0) * bs / case["bw"] + (
                            case["out"][j - 1] if j < n else 0
                        ) * bs / case["bw"]
                    ff, gg = bs * sum(case["f"][i:j]) + case["c"], bs * sum(case["g"][i:j]) + case["c"]
                    if with_transfers:
                        new = (max(f, ff + c), max(g, gg + c))
                        record = (*new, sum(new))
                    else:
                        record = (max(f, ff), max(g, gg), max(total, max(f, ff + c) + max(g, gg + c)))
                    key = (j, used + r)
                    if key not in following or record[2] < following[key][2]:
                        following[key] = record
        cells = following
    return cells.get((n, case["D"]), (0.0, 0.0, math.inf))[2]


def test_best_value_and_shortfall_equal_enumeration_on_unstructured_costs() -> None:
    feasible = infeasible = 0
    for seed in range(150):
        rng = np.random.default_rng(1000 + seed)
        n, devices = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        costs = dense(seed, n=n, devices=devices, power_of_two=bool(seed % 2))
        answers = solve_chain(costs, devices, n)
        assert list(answers) == list(range(1, n + 1))
        for stages, answer in answers.items():
            best, over = enumerated(costs, stages, devices)
            if isinstance(answer, ChainPlan):
                feasible += 1
                assert answer.value_s == best
                assert len(answer.stages) == stages and sum(stage.replicas for stage in answer.stages) == devices
            else:
                infeasible += 1
                assert best == math.inf
                assert (answer.shortfall.bytes_over if answer.shortfall else math.inf) == over
    assert min(feasible, infeasible) > 100


def test_best_value_equals_enumeration_under_the_published_model_where_the_released_program_errs() -> None:
    solved = inexact = without_transfers = 0
    for seed in range(1500):
        case = linear(seed)
        best, answer = enumerated_linear(case), solve_stages(case)
        assert answer["feasible"] == (best < math.inf)
        if answer["feasible"]:
            assert answer["value"] == pytest.approx(best, rel=1e-12)
            solved += 1
            inexact += single_record(case, with_transfers=True) > best * (1 + 1e-9)
            released = single_record(case, with_transfers=False)
            without_transfers += released > best * (1 + 1e-9)
    assert solved > 600
    assert inexact >= 2, "no instance shows that one record per cell is not enough"
    assert without_transfers >= 2, "no instance shows that transfers belong into the state"


def test_seven_blocks_on_eight_devices() -> None:
    for seed in range(6):
        costs = dense(seed, n=7, devices=8, power_of_two=True)
        for stages, answer in solve_chain(costs, 8, 4).items():
            best, _ = enumerated(costs, stages, 8)
            assert (answer.value_s if isinstance(answer, ChainPlan) else math.inf) == best


def test_unused_devices_may_be_allowed_and_more_devices_then_never_hurt() -> None:
    for seed in range(40):
        costs = dense(seed, n=4, devices=6)
        values = []
        for devices in range(2, 7):
            answer = solve_chain(costs, devices, 2, all_devices=False)[2]
            best, _ = enumerated(costs, 2, devices, at_most=True)
            values.append(answer.value_s if isinstance(answer, ChainPlan) else math.inf)
            assert values[-1] == best
        assert values == sorted(values, reverse=True)


def test_more_memory_never_hurts() -> None:
    for seed in range(40):
        costs = dense(seed, n=5, devices=4)
        for stages in (1, 2, 3):
            answers = [
                solve_chain(replace(costs, limit_bytes=limit), 4, 5)[stages] for limit in (10.0, 20.0, 40.0, 1000.0)
            ]
            values = [answer.value_s if isinstance(answer, ChainPlan) else math.inf for answer in answers]
            assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("factor", [1e-7, 3.0])
def test_scaling_all_times_scales_the_value(factor: float) -> None:
    for seed in range(30):
        costs = dense(seed, n=5, devices=5)
        times = {name: getattr(costs, name) * factor for name in ("forward_s", "backward_s", "transfer_s")}
        for stages, answer in solve_chain(costs, 5, 5).items():
            scaled = solve_chain(replace(costs, **times), 5, 5)[stages]
            assert isinstance(scaled, ChainPlan) == isinstance(answer, ChainPlan)
            if isinstance(answer, ChainPlan) and isinstance(scaled, ChainPlan):
                assert scaled.value_s == pytest.approx(answer.value_s * factor, rel=1e-12)


def test_one_stage_one_micro_batch_is_the_plain_sum() -> None:
    case = linear(3) | {"S": 1, "D": 1, "MB": 1, "R": 1, "bw": None, "M": None, "c": 0.0, "BS": 1}
    assert solve_stages(case) == {
        "feasible": True,
        "value": sum(case["f"] + case["g"]),
        "plan": [[0, len(case["f"]), 1]],
    }


def test_memory_exactly_at_the_limit_does_not_fit_and_says_so() -> None:
    case = linear(3) | {"S": 1, "D": 1, "w": [4] * len(linear(3)["f"]), "a": [0] * len(linear(3)["f"])}
    assert not solve_stages(case | {"M": 4 * len(case["w"])})["feasible"]
    assert solve_stages(case | {"M": 4 * len(case["w"]) + 1})["feasible"]
    n = len(case["w"])
    stage = f"blocks 0..{n - 1} on 1 device"
    reason = solve_stages(case | {"M": 10})["why_infeasible"]
    assert reason == f"at best, the stage with {stage} is {4 * n - 10} B over the memory limit"


def test_more_stages_than_blocks_or_devices_is_an_answer() -> None:
    costs = dense(0, n=3, devices=2)
    assert isinstance(solve_chain(costs, 2, 5)[5], Unplannable)
    assert solve_chain(costs, 2, 5)[5].reason() == "no replica counts within the rules use the devices"  # type: ignore[union-attr]


def test_later_stages_allowed_counts_micro_batches_in_flight() -> None:
    costs = replace(dense(0, n=4, devices=1), in_flight="1f1b", micro_batches=9, limit_bytes=10.0)
    ones = np.ones_like(costs.static_bytes)
    costs = replace(costs, static_bytes=4 * ones, stash_bytes=2 * ones, allowed=ones > 0)
    # 4 + 2 * 2 < 10, 4 + 3 * 2 is not: one stage may follow.
    assert later_stages_allowed(costs)[0, 1, 0] == 1
    assert later_stages_allowed(replace(costs, micro_batches=2))[0, 1, 0] == 4
    assert later_stages_allowed(replace(costs, in_flight="gpipe"))[0, 1, 0] == -1


def test_same_input_same_plan() -> None:
    first, second = (solve_chain(dense(5, n=6, devices=6), 6, 6) for _ in range(2))
    assert first == second


# --- around the stage problem ----------------------------------------------------------------------------------------


def outer_case(seed: int) -> dict[str, Any]:
    case = linear(seed)
    rng = np.random.default_rng(seed)
    size = {
        "nodes": int(rng.choice([1, 2, 4])),
        "devices_per_node": int(rng.choice([1, 2])),
        "max_MB": 4,
        "include_allreduce": False,
    }
    n = min(4, len(case["f"]))
    return (
        {k: v[:n] if isinstance(v, list) else v for k, v in case.items() if k not in ("S", "D", "R", "MB")}
        | size
        | {"BS": 8}
    )


def outer_costs(case: dict[str, Any], shape: PipelineShape) -> StageCosts:
    return linear_costs(
        forward=case["f"], backward=case["g"], weight_bytes=case["w"],
        activation_bytes=case["a"], output_bytes=case["out"], constant_s=case["c"], bandwidth=case["bw"],
        limit_bytes=case["M"],
        devices=shape.devices, pipelines=shape.pipelines, micro_batches=shape.micro_batches, global_batch=case["BS"],
        power_of_two=case["power_of_two_replicas"],
    )  # fmt: skip


def enumerated_shape(case: dict[str, Any], shape: PipelineShape, stages: int) -> float:
    """Least lock-step estimate among all plans of least value."""
    costs = outer_costs(case, shape)
    ranked = []
    for plan in every_plan(costs.blocks, stages, shape.devices, costs.replicas):
        at = [(i, j, costs.replicas.index(r)) for i, j, r in plan]
        if all(costs.static_bytes[x] < costs.limit_bytes for x in at):
            f = [costs.forward_s[x] + costs.transfer_s[x] for x in at]
            g = [costs.backward_s[x] + costs.transfer_s[x] for x in at]
            steps = shape.micro_batches + stages - 1
            active = [[x for x in range(stages) if 0 <= t - x < shape.micro_batches] for t in range(steps)]
            ranked.append((max(f) + max(g), sum(max(f[x] for x in who) + max(g[x] for x in who) for who in active)))
    return min(ranked, default=(math.inf, math.inf))[1]


def finished(shapes: list[PipelineShape], case: dict[str, Any]) -> PipelineSearch:
    *_, last = search_pipelines(
        shapes, lambda shape: outer_costs(case, shape), max_stages=6, include_allreduce=False, tie_limit=10_000
    )
    return last


def test_outer_search_finds_the_best_of_every_number_of_stages() -> None:
    pruned = 0
    for seed in range(60):
        case = outer_case(seed)
        shapes = all_shapes(case["nodes"], case["devices_per_node"], (1, 2, 4), (False,))
        result = finished(shapes, case)
        pruned += result.pruned
        for stages in range(1, len(case["f"]) + 1):
            best = min(enumerated_shape(case, shape, stages) for shape in shapes)
            found = result.by_stage_count.get(stages)
            assert (found.lockstep_s if isinstance(found, PipelineChoice) else math.inf) == pytest.approx(
                best, rel=1e-12
            )
            if isinstance(found, PipelineChoice):
                assert found in result.choices
                again = plan_lockstep_s(outer_costs(case, found.shape), found.plan.stages, include_allreduce=False)
                assert found.lockstep_s == again
                assert found.plan.value_s == plan_value_s(outer_costs(case, found.shape), found.plan.stages)
    assert pruned > 100


def test_the_first_feasible_number_of_stages_is_not_always_the_best() -> None:
    # Five devices and powers of two: few stages cannot use the devices, or balance badly.
    worse = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        lists = {"f": (1, 10), "g": (1, 20), "w": (0, 6), "a": (0, 2), "out": (0, 5)}
        case = linear(seed) | {name: rng.integers(low, high, 6).tolist() for name, (low, high) in lists.items()}
        case |= {"M": int(rng.integers(12, 40)), "power_of_two_replicas": True, "BS": 64, "max_MB": 32}
        case |= {"nodes": 1, "devices_per_node": 5, "include_allreduce": False}
        answer = solve_outer(case)
        best = finished(all_shapes(1, 5, (1, 2, 4, 8, 16, 32), (False,)), case).best
        assert (best is None) == (not answer["feasible"])
        if best is not None:
            first, every = answer["first_feasible_S"]["time"], answer["search_all_S"]["time"]
            assert best.lockstep_s == pytest.approx(every, rel=1e-12)
            worse += every < first * (1 - 1e-9)
    assert worse > 5


def test_released_order_starts_each_node_count_where_the_previous_ended() -> None:
    seen: list[PipelineShape] = []
    case = outer_case(1) | {"nodes": 2, "devices_per_node": 2, "M": None}

    def costs_of(shape: PipelineShape) -> StageCosts:
        seen.append(shape)
        return outer_costs(case, shape)

    result = released_search(2, 2, len(case["f"]), 8, costs_of, max_micro_batches=4, stop_at_first=False)
    assert [(s.nodes, s.micro_batches, s.recompute) for s in seen] == [
        (1, 1, False), (1, 2, True), (1, 4, True), (2, 1, False), (2, 2, True), (2, 4, True),
    ]  # fmt: skip
    shapes = {
        count: answer.shape.nodes
        for count, answer in result.by_stage_count.items()
        if isinstance(answer, PipelineChoice)
    }
    assert all(nodes == (1 if count <= 2 else 2) for count, nodes in shapes.items())


def test_all_shapes_take_every_divisor_of_the_node_count() -> None:
    assert [(s.nodes, s.pipelines, s.devices) for s in all_shapes(6, 4, (1,), (True,))] == [
        (1, 6, 4),
        (2, 3, 8),
        (3, 2, 12),
        (6, 1, 24),
    ]


def test_order_of_closed_forms_without_latency() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        stages, micro_batches = int(rng.integers(1, 7)), int(rng.integers(1, 12))
        f, b = rng.integers(1, 9, stages).tolist(), rng.integers(1, 19, stages).tolist()
        gpipe = sum(f) + sum(b) + (micro_batches - 1) * (max(f) + max(b))
        bound = schedule_lower_bound_s(f, b, micro_batches)
        assert lockstep_s(f, b, micro_batches) >= gpipe >= bound >= dapple_pivot(f, b, micro_batches)[1]
