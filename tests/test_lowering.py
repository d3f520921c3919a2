"""Plans become programs: what a step takes and holds, worked out by hand on toy graphs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.cost import Costs
from simpart.costmodels import AlphaBeta, Roofline
from simpart.errors import MismatchError, UnknownNameError, UnsupportedError
from simpart.graph import Graph
from simpart.hardware import Device, load_cluster
from simpart.lowering import lower
from simpart.lowering.transfers import messages
from simpart.placement import Shard, Sharding, StatePlacement
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.problem import Problem
from simpart.program import MEMORY_KINDS
from simpart.report.timeline import timeline
from simpart.schedule import Schedule
from simpart.simulation import SimResult, evaluate, simulate, simulate_plan
from simpart.simulation.stochastic import sample_steps
from simpart.training import TrainingSpec
from tests.toy_graphs import UnitCompute, UnitLinks, chain, cluster, costs, device


def problem(graph: Graph, batch: int, devices: list[Device] | None = None, **more: Any) -> Problem:
    given_costs = more.pop("costs", None) or costs()
    training = more.pop("training", TrainingSpec(optimizer="sgd"))
    machines = cluster(*(devices or [device()] * 8))
    return Problem(graph=graph, training=training, cluster=machines, costs=given_costs, global_batch=batch)


def plan(
    graph: Graph, cuts: list[int], micro_batches: int, sizes: list[tuple[int, ...]] | None = None, **more: Any
) -> Plan:
    """Stages end before the ops in `cuts`; group g takes the next len(sizes[g]) devices."""
    bounds = [0, *cuts, len(graph.op_ids)]
    homes = more.pop("homes", list(range(len(cuts) + 1)))
    sizes = sizes or [(2,)] * (max(homes) + 1)
    starts = np.cumsum([0] + [len(s) for s in sizes]).tolist()
    groups = tuple(
        DeviceGroup(devices=Devices.of(range(a, a + len(s))), axes=(("dp", len(s)),))
        for a, s in zip(starts, sizes, strict=False)
    )
    recompute = more.pop("recompute", False)
    stages = tuple(
        Stage(ops=OpSet.of(graph, range(a, b)), group=g, recompute=(OpSet.of(graph, range(a, b)),) if recompute else ())
        for a, b, g in zip(bounds, bounds[1:], homes, strict=False)
    )
    batch = Batch(micro_batches=micro_batches, sizes=tuple(sizes))
    return Plan(graph=graph.fingerprint, groups=groups, stages=stages, batch=batch, **more)


# --- time ------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_take_the_closed_form(stages: int, count: int, schedule: str) -> None:
    """A layer is 2 s of forward and 3 s of backward; the first has no input gradient: 1 s less at the end of the
    drain."""
    graph = chain(stages)
    given_plan = plan(graph, [2 * s for s in range(1, stages)], count, schedule=Schedule(kind=schedule))
    result = simulate_plan(problem(graph, 2 * count), given_plan)
    expected = (count + stages - 1) * (2 + 3) - (count if stages == 1 else 1)
    assert result.step_s == pytest.approx(expected)


def test_a_group_is_as_slow_as_its_slowest_replica() -> None:
    graph = chain(1)
    both = [device(), device("slow")]
    assert simulate_plan(problem(graph, 4, both), plan(graph, [], 1, [(2, 2)])).step_s == pytest.approx(2 * (2 + 2))
    assert simulate_plan(problem(graph, 4, both), plan(graph, [], 1, [(4,)])).step_s == pytest.approx(2 + 2)


def test_recomputation_runs_forward_again() -> None:
    graph = chain(4)
    once = simulate_plan(problem(graph, 6), plan(graph, [4], 3))
    again = simulate_plan(problem(graph, 6), plan(graph, [4], 3, recompute=True))
    one, two = (r.program.durations.task_s for r in (once, again))
    assert (two - one)[:8].tolist() == [0, 4, 4, 0, 0, 4, 4, 0]  # F, B, I, W of both stages
    held = [sum(row.by_kind["activations"] for row in r.memory) for r in (once, again)]
    assert held[1] < held[0]


def test_transfers_take_their_links_time() -> None:
    """One value of 2 × 4 float32 there and back, at 1/32 s per byte: 1 s each way."""
    graph = chain(2)
    links = UnitLinks({"p2p": 1 / 32})
    result = simulate_plan(problem(graph, 2, costs=costs(links=links)), plan(graph, [2], 1))
    assert result.step_s == pytest.approx(2 + 1 + 2 + 3 + 1 + 2)
    assert {c.bytes for table in links.asked for c in table.collectives} == {32}
    assert result.limits["communication pp"] == pytest.approx(1 / 11)  # stage 1, the busiest, waits for one


def test_gradients_are_summed_over_replicas_once_per_step() -> None:
    graph = chain(3)
    links = UnitLinks({"all_reduce": 1 / 64})
    result = simulate_plan(problem(graph, 16, costs=costs(links=links)), plan(graph, [], 4, [(2, 2)]))
    assert result.step_s == pytest.approx(4 * (6 + 8) + 3)
    assert [(c.kind, c.bytes, c.ranks) for c in links.asked[0].collectives] == [("all_reduce", 3 * 64, (0, 1))]
    assert result.limits["communication dp"] == pytest.approx(3 / 59)


def test_gradients_travel_in_buckets() -> None:
    graph = chain(1, width=3000)
    links = UnitLinks({"all_reduce": 1.0})
    lower(problem(graph, 4, costs=costs(links=links)), plan(graph, [], 1, [(2, 2)]))
    bucket = 25 << 20
    assert [c.bytes for c in links.asked[0].collectives] == [bucket, 36_000_000 - bucket]


def test_a_parameter_of_two_stages_is_summed_over_both() -> None:
    graph = chain(3, tied=True)
    links = UnitLinks({"all_reduce": 1.0})
    program = lower(problem(graph, 4, costs=costs(links=links)), plan(graph, [2, 4], 2))
    asked = [(c.bytes, c.ranks) for table in links.asked for c in table.collectives if c.kind == "all_reduce"]
    assert asked == [(64, (0, 2))]
    times = simulate(program).times
    joint = np.flatnonzero(program.topology.kind == 5)
    assert program.topology.resource[joint].tolist() == [0, 2]
    assert len(set(times.start_s[joint].tolist())) == 1  # both enter it together


@pytest.mark.parametrize(
    ("skips", "edges", "sizes"),
    [("send", {(0, 1), (0, 2), (1, 2)}, {32}), ("relay", {(0, 1), (1, 2)}, {32, 64})],
)
def test_skips_are_sent_or_relayed(skips: str, edges: set[tuple[int, int]], sizes: set[int]) -> None:
    graph = chain(3, skip=True)
    links = UnitLinks({"p2p": 1 / 32})
    result = simulate_plan(problem(graph, 2, costs=costs(links=links)), plan(graph, [2, 4], 1, skips=skips))
    names = {n.split()[1] for n in result.program.topology.class_names if n.startswith("send") and "(" not in n}
    assert names == {f"{a}>{b}" for a, b in edges}
    inputs = [row.by_kind["stage inputs"] for row in result.memory]
    assert inputs == [32, 32 if skips == "send" else 64 - 32, 64]


def test_replicas_of_unequal_groups_exchange_the_samples_they_share() -> None:
    assert [tuple(m)[:3] for m in messages((3, 1), (0, 1), (2, 1, 1), (4, 5, 6))] == [
        (0, 4, 2), (0, 5, 1), (1, 6, 1),
    ]  # fmt: skip
    graph = chain(2)
    links = UnitLinks({"p2p": 1 / 16})  # a second per sample
    program = lower(problem(graph, 4, costs=costs(links=links)), plan(graph, [2], 1, [(3, 1), (2, 2)]))
    sends = [i for i, name in enumerate(program.topology.class_names) if name.startswith("send")]
    assert program.durations.task_s[sends].tolist() == [3.0, 3.0]  # device 0 sends 2 + 1, and gets them back


def test_virtual_stages_share_their_group() -> None:
    graph = chain(4)
    links = UnitLinks({"p2p": 1.0})
    two = plan(graph, [2, 4, 6], 2, homes=[0, 1, 0, 1], schedule=Schedule(kind="gpipe"))
    same = plan(graph, [2, 4, 6], 2, homes=[0, 0, 0, 0], schedule=Schedule(kind="gpipe"))
    assert lower(problem(graph, 4), two).facts.stages_of_group == ((0, 2), (1, 3))  # type: ignore[union-attr]
    result = simulate_plan(problem(graph, 4, costs=costs(links=links)), same)
    assert result.step_s == pytest.approx(2 * (8 + 11))  # no transfers
    assert not links.asked


def test_overheads_count_per_step_and_per_action() -> None:
    graph = chain(1)
    slow = costs(step_overhead_s=5.0, action_overhead_s=0.25)
    result = simulate_plan(problem(graph, 6, costs=slow), plan(graph, [], 3))
    assert result.step_s == pytest.approx(5 + 3 * (4 + 0.5))
    assert result.limits["overhead"] == pytest.approx(6.5 / result.step_s)


@given(st.floats(0.01, 100))
def test_times_scale(x: float) -> None:
    graph = chain(3)
    given_plan = plan(graph, [2, 4], 3, [(2, 2), (4,), (1, 3)])

    class Scaled(UnitCompute):
        def estimate(self, table: Any, device: Device) -> Any:
            found = super().estimate(table, device)
            return dataclasses.replace(found, mean_s=found.mean_s * x)

    base = simulate_plan(problem(graph, 12, costs=costs(links=UnitLinks({"p2p": 0.1, "all_reduce": 0.1}))), given_plan)
    more = costs(Scaled(), UnitLinks({"p2p": 0.1 * x, "all_reduce": 0.1 * x}))
    assert simulate_plan(problem(graph, 12, costs=more), given_plan).step_s == pytest.approx(base.step_s * x)


@pytest.mark.parametrize("skips", ["send", "relay"])
def test_engines_agree_on_lowered_plans(skips: str) -> None:
    graph = chain(4, tied=True, skip=True)
    given_costs = costs(links=UnitLinks({"p2p": 0.03, "all_reduce": 0.01}))
    given_plan = plan(graph, [2, 4, 6], 5, [(3, 1), (4,), (2, 2), (4,)], skips=skips)
    p = problem(graph, 20, costs=given_costs, training=TrainingSpec(gradient_clip_norm=1.0))
    one, two = (simulate_plan(p, given_plan, engine) for engine in ("compiled", "simpy"))
    np.testing.assert_allclose(one.times.end_s, two.times.end_s, atol=1e-9)
    assert one.to_json() == two.to_json()


def test_evaluation_in_batches_equals_one_by_one() -> None:
    graph = chain(4)
    p = problem(graph, 12, costs=costs(links=UnitLinks({"p2p": 0.03, "all_reduce": 0.01})))
    plans = [plan(graph, [cut], m, [(12 // m,), (12 // m,)]) for cut in (2, 4, 6) for m in (2, 3)]
    plans += [plan(graph, [], 3, [(2, 2)])]
    found = evaluate(p, plans)
    for given_plan, evaluation in zip(plans, found, strict=True):
        result = simulate_plan(p, given_plan)
        assert (evaluation.step_s, evaluation.peak_bytes) == (result.step_s, result.peak_bytes)


# --- how sure, what limits --------------------------------------------------------------------------------------------
def test_a_shared_error_moves_the_whole_step() -> None:
    graph = chain(2)
    result = simulate_plan(problem(graph, 8, costs=costs(UnitCompute((0.2, 0.0)))), plan(graph, [2], 4))
    low, high = result.interval_s
    assert math.log(high / low) / 2 == pytest.approx(1.645 * 0.2, rel=0.15)
    assert low < result.step_s < high


def test_sampling_is_seeded_and_paired() -> None:
    graph = chain(2)
    p = problem(graph, 8, costs=costs(UnitCompute((0.2, 0.1))))
    programs = [lower(p, plan(graph, cuts, 4)) for cuts in ([2], [3])]
    steps = [sample_steps(q) for q in programs]
    again = sample_steps(programs[0])
    assert (steps[0] == again).all()
    assert np.corrcoef(np.log(steps))[0, 1] > 0.9


def test_shares_sum_to_one() -> None:
    graph = chain(4, tied=True)
    given_costs = costs(links=UnitLinks({"p2p": 0.03, "all_reduce": 0.01}), step_overhead_s=1.0, action_overhead_s=0.1)
    p = problem(graph, 20, costs=given_costs, training=TrainingSpec(gradient_clip_norm=1.0))
    result = simulate_plan(p, plan(graph, [2, 4, 6], 5, [(3, 1), (4,), (2, 2), (4,)]))
    assert sum(result.limits.values()) == pytest.approx(1)
    assert sum(result.provenance.values()) == pytest.approx(1)
    assert set(result.limits) == {
        "compute", "communication pp", "communication dp", "communication tied", "communication norm", "bubble",
        "overhead",
    }  # fmt: skip


# --- memory -----------------------------------------------------------------------------------------------------------
def test_memory_counts_micro_batches_in_flight() -> None:
    graph, b = chain(4, width=8), 30  # samples enough that activations outweigh gradients
    tensor = b * 8 * 4
    for schedule, in_flight in (("1f1b", (2, 1)), ("gpipe", (5, 5))):
        given_plan = plan(graph, [4], 5, [(b,), (b,)], schedule=Schedule(kind=schedule))
        result = simulate_plan(problem(graph, 5 * b), given_plan)
        stash = 3  # tensors per micro-batch: the last act is read by no linear of its stage
        assert [row.by_kind["activations"] for row in result.memory] == [n * stash * tensor for n in in_flight]
        assert [row.by_kind["parameters"] for row in result.memory] == [2 * 256, 2 * 256]
        assert [row.by_kind["stage inputs"] for row in result.memory] == [in_flight[0] * tensor, in_flight[1] * tensor]


def test_too_little_memory_is_a_result_with_a_reason() -> None:
    graph = chain(4, width=8)
    small = device(memory_bytes=1500)
    result = simulate_plan(problem(graph, 10, [small] * 2), plan(graph, [4], 5))
    assert not result.feasible
    over = max(row.device_bytes - row.capacity_bytes for row in result.memory)
    assert result.why_infeasible.startswith("stage 0 needs ")
    assert f"{over} B more than fast has; most of it parameters (512 B)" in result.why_infeasible
    (evaluation,) = evaluate(problem(graph, 10, [small] * 2), [plan(graph, [4], 5)])
    assert (evaluation.feasible, evaluation.why_infeasible) == (False, result.why_infeasible)


def test_memory_is_that_of_the_replica_with_the_least_room() -> None:
    graph = chain(2, width=8)
    machines = [device("large", 10**9), device("small", 10**4)]
    for sizes in ((6, 2), (2, 6)):
        result = simulate_plan(problem(graph, 8, machines), plan(graph, [], 1, [sizes]))
        assert result.memory[0].capacity_bytes == 10**4
        assert result.memory[0].by_kind["stage inputs"] == sizes[1] * 32


def test_device_bytes_are_what_the_allocator_reserves_and_the_driver_keeps() -> None:
    graph = chain(1)
    machine = dataclasses.replace(device(), reserved_bytes=1000)
    (row,) = simulate_plan(problem(graph, 2, [machine]), plan(graph, [], 1)).memory
    assert row.allocated_bytes == sum(row.by_kind.values())
    assert row.reserved_bytes == round(row.allocated_bytes * 1.05)
    assert row.device_bytes == row.reserved_bytes + 1000
    assert list(row.by_kind) == list(MEMORY_KINDS)


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_what_is_not_lowered_is_refused_plainly() -> None:
    graph = chain(2)
    good = plan(graph, [2], 2)
    p = problem(graph, 4)
    sharded = dataclasses.replace(good, shardings=(("s", Sharding()),), mode="compiled")
    with pytest.raises(UnsupportedError, match="compiled"):
        lower(dataclasses.replace(p, mode="compiled"), sharded)
    with pytest.raises(UnknownNameError, match="coarse, fine"):
        lower(p, good, grain="finest")  # type: ignore[arg-type]


def test_plans_of_another_problem_are_refused() -> None:
    graph = chain(2)
    with pytest.raises(MismatchError, match="global batch is 4, the problem's 6"):
        lower(problem(graph, 6), plan(graph, [2], 2))
    with pytest.raises(MismatchError, match="uses device 1, cluster toys has 1"):
        lower(problem(graph, 4, [device()]), plan(graph, [2], 2))
    with pytest.raises(MismatchError, match="made for graph"):
        lower(problem(chain(3), 4), plan(graph, [2], 2))


def test_the_timeline_is_a_grid_of_its_width() -> None:
    graph = chain(2)
    given_costs = costs(links=UnitLinks({"p2p": 1 / 32}))
    text = timeline(simulate_plan(problem(graph, 6, costs=given_costs), plan(graph, [2], 3)), width=60)
    rows = [line for line in text.splitlines() if "|" in line]
    assert [row.split("|")[0].strip() for row in rows] == ["group 0", "group 1", "link 0>1", "link 1>0"]
    assert max(map(len, rows)) <= 60
    assert rows[0].split("|")[1].startswith("F")


# --- split kernels and state ------------------------------------------------------------------------------------------
def test_tensor_parallel_devices_share_the_work_and_pay_for_it_inside_their_actions() -> None:
    from tests.vocabulary import GPT, graph_of, megatron

    graph = graph_of(GPT)
    split = dataclasses.replace(megatron(graph, sequence_parallel=False), schedule=Schedule(kind="gpipe"))
    groups = tuple(dataclasses.replace(g, axes=(("dp", 4),)) for g in split.groups)
    stages = tuple(dataclasses.replace(stage, sharding=None) for stage in split.stages)
    batch = dataclasses.replace(split.batch, micro_batches=2, sizes=((1,) * 4,) * 2)
    whole = dataclasses.replace(split, groups=groups, stages=stages, batch=batch, shardings=(), state=())

    def simulated(plan: Plan) -> SimResult:
        cluster = load_cluster("dgx-a100")
        costs = Costs(compute=Roofline(), communication=AlphaBeta())
        return simulate_plan(Problem(
            graph=graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=plan.global_batch
        ), plan)  # fmt: skip

    ours, theirs = simulated(split), simulated(whole)
    assert ours.limits["communication tp"] > 0.01 and "communication tp" not in theirs.limits
    assert sum(ours.limits.values()) == pytest.approx(1)
    for mine, other in zip(ours.memory, theirs.memory, strict=True):
        assert mine.by_kind["optimizer state"] < 0.7 * other.by_kind["optimizer state"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_state_takes_its_share_of_memory(zero: int) -> None:
    from tests.vocabulary import EXAMPLES

    example = EXAMPLES[2]
    shard = (("dp", Shard(0)),)
    rest = StatePlacement(parameter=shard if zero == 3 else (), gradient=shard if zero >= 2 else (), optimizer=shard)
    cluster = load_cluster("dgx-a100")

    def kinds(plan: Plan) -> dict[str, int]:
        costs = Costs(compute=Roofline(), communication=AlphaBeta())
        p = Problem(graph=example.graph, training=TrainingSpec(), cluster=cluster, costs=costs, global_batch=32)
        return dict(simulate_plan(p, plan).memory[0].by_kind)

    ours = kinds(dataclasses.replace(example.plan, state=(("*", rest),)))
    whole = kinds(dataclasses.replace(example.plan, state=()))
    assert ours["optimizer state"] == pytest.approx(whole["optimizer state"] / 8, rel=0.05)
    assert ours["gradients"] == pytest.approx(whole["gradients"] / (8 if zero >= 2 else 1), rel=0.05)
    buffers = sum(s.spec.bytes(1) for _, s in example.graph.all_sources() if s.kind in ("buffer", "constant"))
    trained = (whole["parameters"] - buffers) / (8 if zero == 3 else 1)
    assert ours["parameters"] == pytest.approx(trained + buffers, rel=0.05)


def test_kernels_slow_down_beside_transfers_by_the_time_these_take() -> None:
    """Two stages of a layer each: 2 s forward, 3 s backward (2 s on the first), 1 s there and 1 s back."""
    graph = chain(2)
    found = []
    for slowdown in (0.0, 0.5):
        priced = dataclasses.replace(costs(links=UnitLinks({"p2p": 1 / 32})), overlap_slowdown=slowdown)
        given = problem(graph, 6, costs=priced)
        one = plan(graph, [2], 3)
        assert evaluate(given, [one])[0].step_s == simulate_plan(given, one).step_s
        found.append(lower(given, one).durations.task_s)
    np.testing.assert_allclose(found[1][:2], found[0][:2] * (1 + 0.5 * 2 / found[0][:2].sum()))
    np.testing.assert_allclose(found[1][8:], found[0][8:])
