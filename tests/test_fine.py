"""The fine grain: its work is the coarse grain's, its streams run one thing at a time, its overlap is worked out by
hand."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpart.configure import Configuration, attention_regions, configure
from simpart.cost import Collective, CollectiveTable, Costs, SignatureTable
from simpart.cost.signatures import signatures_of
from simpart.costmodels import AlphaBeta, Roofline
from simpart.engines import replay
from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.lowering import lower
from simpart.lowering.fine import FineSettings
from simpart.lowering.fine._buckets import buckets_of
from simpart.lowering.fine._events import Steps
from simpart.lowering.sharded import local_share
from simpart.lowering.transfers import sharing
from simpart.placement import Shard, StatePlacement
from simpart.plan import OpSet, Plan
from simpart.problem import Problem
from simpart.program import Program, TaskKind
from simpart.report.timeline import timeline
from simpart.schedule import Schedule
from simpart.sharding.flow import Conversion, flows
from simpart.sharding.mesh import axis_members, local_signature
from simpart.simulation import simulate, simulate_plan
from simpart.simulation.limits import critical_path
from simpart.simulation.stochastic import Disturbances, sample_steps
from simpart.trace import trace_events
from simpart.training import TrainingSpec
from tests.test_cli import document, simpart
from tests.test_engines import reference_ends
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitCompute, UnitLinks, chain, costs
from tests.vocabulary import EXAMPLES, GPT, graph_of

OFF = FineSettings(overlap=False)
LAYER_BYTES = 4 * 4 * 4
"""Of a layer of `chain`: its gradient, in one bucket in these tests."""
ONE_LAYER = FineSettings(bucket_bytes=LAYER_BYTES)


def seconds(program: Program, engine: str = "compiled") -> float:
    return replay(program, engine)[0].makespan_s


@cache
def gpt(batch: int, free_links: bool = False, slowdown: float = 0.0) -> Problem:
    links: Any = UnitLinks() if free_links else AlphaBeta()
    return Problem(
        graph=graph_of(GPT), training=TrainingSpec(gradient_clip_norm=1.0), cluster=load_cluster("dgx-a100"),
        costs=Costs(compute=Roofline(), communication=links, overlap_slowdown=slowdown), global_batch=batch,
    )  # fmt: skip


CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    {"tp": 2, "sp": True, "pp": 2, "dp": 2, "recompute": "full"},
    {"pp": 2, "dp": 4, "zero": 3},
    {"tp": 2, "pp": 1, "dp": 4, "zero": 3, "recompute": "full"},
    {"pp": 2, "dp": 2, "zero": 2, "schedule": "gpipe"},
    {"tp": 2, "pp": 2, "dp": 2, "schedule": "zb-h1"},
    {"tp": 2, "pp": 2, "dp": 1, "schedule": "interleaved-1f1b"},
    {"tp": 2, "pp": 2, "dp": 1, "schedule": "dualpipe"},
)  # fmt: skip


CASES = st.tuples(st.sampled_from([16, 32]), st.sampled_from(range(len(CONFIGURATIONS))))
"""Global batch, number of the configuration."""


def made(case: tuple[int, int]) -> tuple[Problem, Plan]:
    return gpt(case[0]), configure(gpt(case[0]), Configuration(**CONFIGURATIONS[case[1]]))


# --- the same work as the coarse grain --------------------------------------------------------------------------------
@given(CASES)
@settings(max_examples=18)
def test_without_overlap_it_is_the_coarse_grain(case: tuple[int, int]) -> None:
    """Step, memory and communication are equal: kernels and collectives are priced alike and each occurs as often."""
    given_problem, given_plan = made(case)
    coarse, fine = lower(given_problem, given_plan), lower(given_problem, given_plan, "fine", OFF)
    assert seconds(fine) == pytest.approx(seconds(coarse), rel=1e-9)
    np.testing.assert_allclose(replay(fine)[1].bytes, replay(coarse)[1].bytes, rtol=1e-12)
    theirs, mine = simulate(coarse).limits, simulate(fine).limits
    for limits in (theirs, mine):  # transfers queued on a link are communication in the fine grain, bubble in the other
        limits["waiting"] = limits.pop("communication pp") + limits.pop("bubble")
    assert {name: mine.get(name, 0.0) for name in theirs} == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@given(CASES)
@settings(max_examples=18)
def test_overlap_hides_communication_and_loses_no_work(case: tuple[int, int]) -> None:
    given_problem, given_plan = made(case)
    alone, fine = lower(given_problem, given_plan, "fine", OFF), lower(given_problem, given_plan, "fine")
    assert seconds(fine) <= seconds(alone) * (1 + 1e-12)
    work = [program.durations.task_s[program.topology.task_class].sum() for program in (alone, fine)]
    assert work[1] == pytest.approx(work[0], rel=1e-9)
    spread = fine.spread
    assert spread is not None
    np.testing.assert_allclose(spread.by_provenance.sum(axis=1), spread.by_factor.sum(axis=1), rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-zb"])
def test_actions_wait_for_the_host_as_in_the_coarse_grain(schedule: str) -> None:
    """The last one too, whose gradients are sent in buckets: it launches its own kernels, not those of a whole B."""
    slow = dataclasses.replace(gpt(16), costs=dataclasses.replace(gpt(16).costs, eager_launch_s=1e-4))
    made = configure(slow, Configuration(pp=2, dp=4, schedule=schedule))
    programs = lower(slow, made), lower(slow, made, "fine")
    work = [
        p.durations.task_s[
            p.topology.task_class[np.isin(p.topology.kind, (TaskKind.SEND, TaskKind.REDUCE), invert=True)]
        ]
        for p in programs
    ]
    assert work[1].sum() == pytest.approx(work[0].sum(), rel=1e-9)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_plans_of_every_kind(example: Any) -> None:
    cluster = load_cluster(example.cluster)
    given_problem = Problem(
        graph=example.graph, training=TrainingSpec(), cluster=cluster,
        costs=Costs(compute=Roofline(), communication=AlphaBeta()), global_batch=example.plan.global_batch,
    )  # fmt: skip
    coarse = lower(given_problem, example.plan)
    fine = lower(given_problem, example.plan, "fine")
    assert seconds(fine) <= seconds(coarse) * (1 + 1e-9)
    assert seconds(lower(given_problem, example.plan, "fine", OFF)) == pytest.approx(seconds(coarse), rel=1e-9)
    result = simulate(fine)
    assert sum(result.limits.values()) == pytest.approx(1) and sum(result.provenance.values()) == pytest.approx(1)
    assert result.interval_s[0] <= result.step_s <= result.interval_s[1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_with_nothing_to_send_tasks_are_the_actions(schedule: str) -> None:
    graph = chain(4)
    given_plan = plan(graph, [2, 4, 6], 5, schedule=Schedule(kind=schedule))
    given_problem = problem(graph, 10, costs=costs(links=UnitLinks({"p2p": 0.01}), action_overhead_s=0.5))
    coarse, fine = lower(given_problem, given_plan), lower(given_problem, given_plan, "fine")
    assert fine.topology.size == coarse.topology.size
    assert seconds(fine) == pytest.approx(seconds(coarse), rel=1e-12)
    theirs, mine = simulate(coarse), simulate(fine)
    assert mine.limits == pytest.approx(theirs.limits) and mine.memory == theirs.memory


def test_with_links_of_infinite_speed_only_computing_is_left() -> None:
    for configuration in CONFIGURATIONS:
        free = gpt(32, free_links=True)
        given_plan = configure(free, Configuration(**configuration))
        fine = lower(free, given_plan, "fine")
        assert seconds(fine) == pytest.approx(seconds(lower(free, given_plan)), rel=1e-9)
        limits = simulate(fine).limits
        assert sum(share for name, share in limits.items() if name.startswith("communication")) < 1e-12


# --- engines ----------------------------------------------------------------------------------------------------------
@given(CASES)
@settings(max_examples=10)
def test_engines_and_the_quadratic_reference_agree(case: tuple[int, int]) -> None:
    fine = lower(*made(case), "fine")
    times, held = replay(fine)
    events, held_there = replay(fine, "simpy")
    np.testing.assert_allclose(times.end_s, reference_ends(fine.topology, fine.durations), rtol=0, atol=1e-9)
    np.testing.assert_allclose(times.end_s, events.end_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(held.bytes, held_there.bytes, rtol=1e-12)


@given(CASES)
@settings(max_examples=10)
def test_no_stream_runs_two_tasks_at_once(case: tuple[int, int]) -> None:
    fine = lower(*made(case), "fine")
    topology, times = fine.topology, replay(fine)[0]
    for row in np.split(topology.resource_order, topology.resource_indptr[1:-1]):
        assert (times.start_s[row[1:]] >= times.end_s[row[:-1]]).all()
    path = critical_path(fine, times)
    assert times.start_s[path[0]] == 0
    assert all(times.end_s[a] == times.start_s[b] for a, b in pairwise(path))


def test_links_may_be_shared_by_streams() -> None:
    given_plan = configure(gpt(32), Configuration(tp=2, pp=2, dp=2, zero=3))
    fine = lower(gpt(32), given_plan, "fine")
    assert fine.flows is not None and fine.flows.bytes_by_class.any(axis=1).sum() > 10
    assert seconds(fine, "contention") >= seconds(fine) * (1 - 1e-9)


def kernel_by_kernel(given_problem: Problem, given_plan: Plan, bucket_bytes: int) -> float:
    """A step of a plan in one stage whose parameters are not gathered, told again from its flow: a clock per stream,
    one kernel after the other."""
    graph, cluster, group = given_problem.graph, given_problem.cluster, given_plan.groups[0]
    (found,) = flows(given_plan, graph)
    flat, device = graph.flat, cluster.device(0)
    whole = signatures_of(graph, found.micro_batch)
    table = SignatureTable(tuple(local_signature(whole[flat.kernel_class[k]], use) for k, use in found.uses.items()))
    kernel_s = dict(zip(found.uses, given_problem.costs.compute.estimate(table, device).mean_s.tolist(), strict=True))
    ranks = {name: axis_members(group, name) for name, _ in found.axes}

    def length(collective: Collective) -> float:
        return float(given_problem.costs.communication.estimate(CollectiveTable((collective,)), cluster).mean_s[0])

    def sent(conversion: Conversion) -> list[tuple[str, Collective]]:
        steps = [(found.axes[step.axis][0], step) for step in conversion.steps if step.kind != "local"]
        return [
            (a, Collective(x.kind, x.bytes, ranks[a][0], max(sharing(cluster, ranks[a])), conversion.dtype))  # type: ignore[arg-type]
            for a, x in steps
        ]

    before: dict[int, list[tuple[str, Collective]]] = {}
    behind: dict[int, list[tuple[str, Collective]]] = {}
    ready: dict[int, list[list[tuple[str, Collective]]]] = {}
    for conversion in found.conversions:
        for value, kernel in zip(conversion.values, conversion.kernels, strict=True):
            if conversion.role == "value":
                before.setdefault(kernel, []).extend(sent(conversion))
            elif conversion.role == "gradient":
                assert conversion.per_step
                ready.setdefault(int(flat.kernel_value_kernel[value]), []).append(sent(conversion))
    for x in found.exchanges:
        axis = found.axes[x.axis][0]
        each = Collective("all_reduce", x.bytes, ranks[axis][0], max(sharing(cluster, ranks[axis])))
        for kernel in x.kernels:
            behind.setdefault(kernel, []).append((axis, each))
    rows, _, accumulate = given_problem.update_prices(device)
    added: dict[int, float] = {}
    count = given_plan.batch.micro_batches
    times = 1.0 if group.replicas > 1 else (count - 1) / count  # a buffer of one's own starts as the first gradient
    for value, source in graph.parameters.items():
        kernel = int(flat.kernel_value_kernel[graph.gradients[value]])
        share = times * local_share(given_plan, group, source, "gradient")
        added[kernel] = added.get(kernel, 0.0) + share * float(accumulate.seconds[rows[value]])

    clock, streams, filled = 0.0, dict.fromkeys(ranks, 0.0), Counter[tuple[str, Collective]]()
    left = Counter[tuple[str, Collective]]()
    for several in ready.values():
        for axis, collective in (one for steps in several for one in steps):
            left[axis, dataclasses.replace(collective, bytes=0)] += collective.bytes
    kernels = list(found.uses)
    forward = sorted(k for k in kernels if flat.kernel_forward[k])
    backward = [k for k in kernels if not flat.kernel_forward[k]]
    backward.sort(key=lambda k: (-int(flat.op_call[flat.kernel_op[k]]), k))

    def send(axis: str, collective: Collective, wait: bool) -> None:
        nonlocal clock
        streams[axis] = max(streams[axis], clock) + length(collective)
        clock = streams[axis] if wait else clock

    for m in range(count):
        for kernel in forward + backward:
            for axis, collective in before.get(kernel, ()):
                send(axis, collective, wait=True)
            clock += kernel_s[kernel] + (0.0 if flat.kernel_forward[kernel] else added.get(kernel, 0.0))
            for axis, collective in behind.get(kernel, ()):
                send(axis, collective, wait=True)
            for steps in ready.get(kernel, ()) if m == count - 1 else ():
                ((axis, collective),) = steps
                kind = (axis, dataclasses.replace(collective, bytes=0))
                for _ in range(collective.bytes):
                    filled[kind] += 1
                    left[kind] -= 1
                    if filled[kind] == bucket_bytes or left[kind] == 0:
                        send(axis, dataclasses.replace(collective, bytes=filled.pop(kind)), wait=False)
    return max(clock, *streams.values())


@pytest.mark.parametrize("more", [{"dp": 4, "zero": 1}, {"dp": 4, "vocab_parallel": False}, {"dp": 1, "sp": True}])
def test_a_stage_is_its_kernels_one_after_the_other(more: dict[str, Any]) -> None:
    given_problem = gpt(8)
    given_plan = configure(given_problem, Configuration(tp=2, pp=1, **more))
    fine = lower(given_problem, given_plan, "fine", FineSettings(bucket_bytes=5000))
    times, kind = replay(fine)[0], fine.topology.kind
    until = times.end_s[(kind < TaskKind.OPTIMIZER) & (fine.topology.stage >= 0)].max()  # the norm and updates follow
    assert until == pytest.approx(kernel_by_kernel(given_problem, given_plan, 5000), rel=1e-9)


def test_slow_devices_and_links_slow_kernels_and_collectives() -> None:
    fine = lower(gpt(32), configure(gpt(32), Configuration(tp=2, pp=2, dp=2)), "fine")
    quiet = seconds(fine)
    slow = sample_steps(fine, 64, disturbances=Disturbances(straggler_share=1.0, straggler_factor=2.0)).mean()
    both = sample_steps(
        fine, 64,
        disturbances=Disturbances(straggler_share=1.0, straggler_factor=2.0, link_share=1.0, link_factor=3.0),
    ).mean()  # fmt: skip
    assert quiet < slow < both < 3.5 * quiet


@pytest.mark.parametrize("number", [0, 2])
def test_how_sure_a_step_is_hardly_depends_on_the_grain(number: int) -> None:
    """Errors of different kernels are independent, however they are put into tasks."""
    given_problem, given_plan = made((32, number))
    coarse = np.log(sample_steps(lower(given_problem, given_plan)))
    fine = np.log(sample_steps(lower(given_problem, given_plan, "fine", OFF)))
    assert fine.std() == pytest.approx(coarse.std(), rel=0.2) and coarse.std() > 0.01


# --- gradients in buckets ---------------------------------------------------------------------------------------------
def replicas(layers: int, each: float, count: int = 1, **more: Any) -> tuple[Problem, Plan]:
    """A chain on two replicas, whose reduction of a layer's gradient takes `each` seconds."""
    graph = chain(layers)
    links = UnitLinks({"all_reduce": each / LAYER_BYTES})
    return problem(graph, 4 * count, costs=costs(links=links)), plan(graph, [], count, [(2, 2)], **more)


@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=20)
def test_only_the_last_bucket_is_exposed(layers: int, count: int, each: float) -> None:
    """Where reducing a layer takes no longer than its backward (2 s of products, 1 s of activation)."""
    given_problem, given_plan = replicas(layers, each, count)
    result = simulate_plan(given_problem, given_plan, grain="fine", settings=ONE_LAYER)
    work = count * (2 * layers + 3 * layers - 1)
    last = each if layers == 1 or each <= 2 else each + max(0.0, each - 2)  # the first layer's backward takes 2 s
    assert result.step_s == pytest.approx(work + last)
    assert result.limits["communication dp"] == pytest.approx(last / result.step_s)
    assert simulate_plan(given_problem, given_plan).step_s == pytest.approx(work + layers * each)


@given(st.integers(2, 5), st.sampled_from([3.0, 4.0, 7.5]))
@settings(max_examples=10)
def test_slow_links_are_busy_from_the_first_bucket_on(layers: int, each: float) -> None:
    given_problem, given_plan = replicas(layers, each)
    fine = lower(given_problem, given_plan, "fine", ONE_LAYER)
    assert seconds(fine) == pytest.approx(2 * layers + 3 + layers * each)


def test_stages_that_end_early_reduce_while_others_work() -> None:
    """In 1F1B the last stage is done first: its gradients are reduced during the others' backward."""
    graph = chain(3)
    links = UnitLinks({"all_reduce": 5.0 / LAYER_BYTES})
    given_problem = problem(graph, 16, costs=costs(links=links))
    given_plan = plan(graph, [2, 4], 4, [(2, 2)] * 3)
    fine = lower(given_problem, given_plan, "fine")
    times = replay(fine)[0]
    reduces = [i for i, axis in enumerate(fine.facts.class_axes) if axis == "dp"]  # type: ignore[union-attr]
    sent = np.flatnonzero(np.isin(fine.topology.task_class, reduces) & (times.end_s > times.start_s))
    assert sorted(times.start_s[sent].tolist()) == pytest.approx([24.0, 27.0, 29.0])
    assert times.makespan_s == pytest.approx(29.0 + 5.0)


def test_buckets_are_cut_at_exact_sizes_in_the_order_of_completion() -> None:
    def reduce(size: int) -> tuple[Steps, ...]:
        return (Steps("dp", (Collective("all_reduce", size, (0, 1)),)),)

    rows = [(9.0, reduce(10)), (1.0, reduce(70)), (4.0, reduce(150)), (2.0, reduce(0))]
    found = buckets_of(rows, 100)
    assert [(b.place, b.collective.bytes) for b in found] == [(4.0, 100), (4.0, 100), (9.0, 30)]
    assert all(b.after == () for b in found)


def test_a_gradient_that_takes_two_steps_waits_for_its_first() -> None:
    first, second = Collective("all_reduce", 60, (0, 1)), Collective("reduce_scatter", 60, (0, 2))
    steps = (Steps("tp", (first,)), Steps("dp", (second,)))
    found = buckets_of([(1.0, steps), (2.0, steps)], 100)
    order = [(b.axis, b.collective.bytes, [found[i].axis for i in b.after]) for b in found]
    assert order == [("tp", 100, []), ("tp", 20, []), ("dp", 100, ["tp", "tp"]), ("dp", 20, ["tp"])]
    assert all(i < n for n, b in enumerate(found) for i in b.after)


def test_smaller_buckets_start_earlier() -> None:
    given_problem, given_plan = replicas(6, 1.0)
    sizes = [LAYER_BYTES, 2 * LAYER_BYTES, 6 * LAYER_BYTES]
    steps = [seconds(lower(given_problem, given_plan, "fine", FineSettings(bucket_bytes=size))) for size in sizes]
    assert steps == pytest.approx([29 + 1, 29 + 2, 29 + 6])


# --- sharded parameters -----------------------------------------------------------------------------------------------
SPLIT = (("dp", Shard(0)),)
ZERO3 = (("*", StatePlacement(parameter=SPLIT, gradient=SPLIT, optimizer=SPLIT)),)


def sharded_step(layers: int, gather: float, scatter: float, prefetch: int) -> float:
    """A step of `chain` on two replicas with sharded parameters, one event after the other. A gather is issued when the
    compute stream comes to the product `prefetch` gathers before its own; a layer's gradient is sent when it is there.

    Uses are (seconds, gathers, reduces): forward of products with their activations, then of each layer backward the
    activation and the product; the first one's needs no weight and makes one gradient."""
    uses = [(2.0, True, False)] * layers
    for i in reversed(range(layers)):
        uses += [(1.0, False, False), (2.0 if i else 1.0, i > 0, True)]
    gathering = [i for i, (_, gathers, _) in enumerate(uses) if gathers]
    arrival: dict[int, float] = {}
    clock = stream = 0.0
    for i, (length, _, reduces) in enumerate(uses):
        for number, use in enumerate(gathering):
            gate = gathering[number - prefetch] if number >= prefetch else 0
            if use not in arrival and gate <= i:
                stream = max(stream, clock) + gather
                arrival[use] = stream
        clock = max(clock, arrival.get(i, 0.0)) + length
        if reduces:
            stream = max(stream, clock) + scatter
    return max(clock, stream)


@given(st.integers(1, 5), st.sampled_from([0.5, 2.0, 4.0]), st.sampled_from([0.25, 3.5]), st.integers(0, 3))
@settings(max_examples=40)
def test_parameters_are_gathered_ahead_of_their_layers(layers: int, gather: float, scatter: float, ahead: int) -> None:
    graph = chain(layers)
    links = UnitLinks({"all_gather": gather / LAYER_BYTES, "reduce_scatter": scatter / LAYER_BYTES})
    given_problem = problem(graph, 4, costs=costs(links=links))
    given_plan = plan(graph, [], 1, [(2, 2)], state=ZERO3)
    fine = lower(given_problem, given_plan, "fine", FineSettings(prefetch=ahead))
    assert seconds(fine) == pytest.approx(sharded_step(layers, gather, scatter, ahead))


def test_gathering_further_ahead_is_never_slower_and_holds_more() -> None:
    given_plan = configure(gpt(32), Configuration(pp=2, dp=4, zero=3))
    programs = [lower(gpt(32), given_plan, "fine", FineSettings(prefetch=ahead)) for ahead in range(4)]
    steps = [seconds(program) for program in programs]
    assert steps == sorted(steps, reverse=True) and steps[1] < steps[0]
    held = [replay(program)[1].bytes.max() for program in programs]
    assert held == sorted(held) and held[3] > held[0]


def test_updated_parameters_are_gathered_after_the_update() -> None:
    fine = lower(gpt(32), configure(gpt(32), Configuration(pp=2, dp=4, zero=1)), "fine")
    topology, times = fine.topology, replay(fine)[0]
    for g in range(topology.groups):
        update = np.flatnonzero((topology.kind == TaskKind.OPTIMIZER) & (topology.resource == g))
        names = [topology.class_names[c] for c in topology.task_class]
        gathers = [i for i, name in enumerate(names) if "updated" in name and update[0] in _before(fine, i)]
        assert len(gathers) == 1 and times.start_s[gathers[0]] >= times.end_s[update[0]]


def _before(program: Program, task: int) -> list[int]:
    topology = program.topology
    return topology.predecessors[topology.indptr[task] : topology.indptr[task + 1]].tolist()  # type: ignore[no-any-return]


# --- recomputation ----------------------------------------------------------------------------------------------------
def test_a_region_is_run_again_right_before_its_backward() -> None:
    """Regions of one layer, and smaller: what is inside adds its forward, and nothing else."""
    graph = chain(3)
    given_problem = problem(graph, 2)
    steps = {}
    for name, regions in {"none": [], "layers": [(0, 2), (2, 4), (4, 6)], "activations": [(1, 2), (3, 4)]}.items():
        made = plan(graph, [], 1)
        again = tuple(OpSet.of(graph, range(a, b)) for a, b in regions)
        stage = dataclasses.replace(made.stages[0], recompute=again)
        made = dataclasses.replace(made, stages=(stage,))
        steps[name] = seconds(lower(given_problem, made, "fine"))
        assert steps[name] == pytest.approx(seconds(lower(given_problem, made)))
    assert steps == pytest.approx({"none": 14.0, "layers": 14.0 + 6, "activations": 14.0 + 2})


def test_selective_recomputation_is_between_none_and_full() -> None:
    """Time and memory of making the attention of each layer again."""
    found = []
    for recompute in ("none", "selective", "full"):
        given_plan = configure(gpt(32), Configuration(pp=2, dp=4, micro_batch=2, recompute=recompute))
        result = simulate_plan(gpt(32), given_plan, grain="fine")
        found.append((result.step_s, -result.memory[0].by_kind["activations"]))
    assert found[0][0] < found[1][0] < found[2][0] and found[0][1] < found[1][1] < found[2][1]
    stage = configure(gpt(32), Configuration(pp=2, recompute="selective")).stages[0]
    graph = graph_of(GPT)
    paths = [{graph.op_ids[i].split("/")[0] for i in region.indices(graph)} for region in stage.recompute]
    assert paths[1] == {"h.1.attn", "h.1.attn.qkv", "h.1.attn.proj"} and len(paths) == 4
    with pytest.raises(UserError, match="this model has none; use full"):
        attention_regions(chain(2), np.arange(4))


def test_recomputed_collectives_are_sent_again() -> None:
    def sent(recompute: str) -> dict[tuple[int, str], int]:
        given_plan = configure(gpt(16), Configuration(tp=2, pp=1, dp=1, recompute=recompute, vocab_parallel=False))
        fine = lower(gpt(16), given_plan, "fine")
        topology, found = fine.topology, {}
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
            mine = (topology.kind == kind) & (topology.micro_batch == 3)
            found[int(kind), "tasks"] = int(mine.sum())
        return found

    none, full = sent("none"), sent("full")
    forward, backward = (int(TaskKind.FORWARD), "tasks"), (int(TaskKind.BACKWARD), "tasks")
    assert full[forward] == none[forward]
    assert none[backward] + 2 * 7 - 2 <= full[backward] <= none[backward] + 2 * 7 + 1  # two a layer, seven layers


# --- slower beside communication --------------------------------------------------------------------------------------
def test_kernels_beside_communication_run_slower_and_alone_do_not() -> None:
    def computing(program: Program) -> float:
        kind = program.topology.kind
        return float(program.durations.task_s[program.topology.task_class[kind < TaskKind.SEND]].sum())

    configurations: list[dict[str, Any]] = [{"pp": 1, "dp": 8, "zero": 3}, {"pp": 2, "dp": 4}]
    for configuration in configurations:
        given_plan = configure(gpt(32), Configuration(**configuration))
        plain = computing(lower(gpt(32), given_plan, "fine"))
        slowed, switched_off = (
            computing(lower(gpt(32, slowdown=0.2), given_plan, "fine", FineSettings(slowdown=on)))
            for on in (True, False)
        )
        assert plain < slowed <= 1.2 * plain * (1 + 1e-12)
        assert switched_off == pytest.approx(plain, rel=1e-12)
    alone = configure(gpt(32), Configuration(pp=1, dp=1))
    assert seconds(lower(gpt(32, slowdown=0.2), alone, "fine")) == pytest.approx(seconds(lower(gpt(32), alone, "fine")))


def test_a_slowed_down_plan_is_still_the_coarse_one_without_overlap() -> None:
    given_problem = gpt(32, slowdown=0.3)
    given_plan = configure(given_problem, Configuration(pp=4, dp=2))
    coarse = seconds(lower(given_problem, given_plan))
    assert seconds(lower(given_problem, given_plan, "fine", OFF)) == pytest.approx(coarse, rel=1e-9)


# --- what is shown ----------------------------------------------------------------------------------------------------
def test_exposed_communication_is_told_by_axis() -> None:
    """On one group computing and waiting for each axis make up the step."""
    given_plan = configure(gpt(16), Configuration(tp=2, pp=1, dp=4, zero=3))
    result = simulate_plan(gpt(16), given_plan, grain="fine")
    topology = result.program.topology
    busy = (result.times.end_s - result.times.start_s)[topology.resource == 0].sum()
    assert result.limits["communication tp"] > 0 and result.limits["communication dp"] > 0
    assert result.limits["bubble"] == pytest.approx(0, abs=1e-12)
    waiting = sum(share for name, share in result.limits.items() if name in ("communication tp", "communication dp"))
    norm = result.limits["communication norm"]
    assert waiting == pytest.approx(1 - busy / result.step_s, abs=1e-9) and norm > 0
    assert set(result.gains) >= {"compute", "communication tp", "communication dp"}


def test_streams_are_named_rows_of_the_trace() -> None:
    result = simulate_plan(gpt(16), configure(gpt(16), Configuration(tp=2, pp=2, dp=2, zero=1)), grain="fine")
    events = trace_events(result)
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"group 0: tp communication", "group 1: dp communication", "link 0>1"} <= set(rows.values())
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == result.program.topology.size
    by_row: dict[Any, list[tuple[float, float]]] = {}
    for e in slices:
        assert (e["pid"], e["tid"]) in rows
        by_row.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert all(a[1] <= b[0] + 1e-6 for spans in by_row.values() for a, b in pairwise(sorted(spans)))
    assert "c other collective" in timeline(result)


def test_the_same_plan_gives_the_same_program() -> None:
    given_plan = configure(gpt(32), Configuration(**CONFIGURATIONS[0]))
    a, b = (lower(dataclasses.replace(gpt(32)), given_plan, "fine") for _ in range(2))
    assert a.topology.class_names == b.topology.class_names
    assert a.topology.resource_order.tobytes() == b.topology.resource_order.tobytes()
    assert a.durations.task_s.tobytes() == b.durations.task_s.tobytes()


def test_times_twice_as_long_make_a_step_twice_as_long() -> None:
    graph, state = chain(3), ZERO3
    links = {"all_gather": 0.02, "reduce_scatter": 0.03}
    once = problem(graph, 4, costs=costs(links=UnitLinks(links)))
    doubled = UnitLinks({kind: 2 * each for kind, each in links.items()})
    slow = problem(graph, 4, costs=costs(compute=Twice(), links=doubled))
    given_plan = plan(graph, [], 1, [(2, 2)], state=state)
    assert seconds(lower(slow, given_plan, "fine")) == pytest.approx(2 * seconds(lower(once, given_plan, "fine")))


class Twice(UnitCompute):
    def estimate(self, table: Any, device: Any) -> Any:
        found = super().estimate(table, device)
        return dataclasses.replace(found, mean_s=2 * found.mean_s)


# --- commands ---------------------------------------------------------------------------------------------------------
def test_the_command_says_its_grain(tmp_path: Path) -> None:
    made = str(tmp_path / "p.json")
    flags = ["--cluster", "dgx-a100", "--global-batch", "16", "--tp", "2", "--pp", "2", "--no-profiles"]
    coarse = document("plan", GPT, *flags, "-o", made)
    fine = document("plan", GPT, *flags, "--grain", "fine")
    assert (coarse["grain"], fine["grain"]) == ("coarse", "fine") and set(coarse) == set(fine)
    again = document("simulate", made, "--grain", "fine", "--no-profiles", "--trace", str(tmp_path / "t.json"))
    assert again["predicted"] == fine["predicted"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    alone = document("simulate", made, "--grain", "fine", "--no-overlap", "--no-profiles")
    assert alone["predicted"]["step_s"] == pytest.approx(coarse["predicted"]["step_s"], rel=1e-9)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="prefetch must be at least 0"):
        FineSettings(prefetch=-1)
    with pytest.raises(UserError, match="bucket_bytes must be at least 1"):
        FineSettings(bucket_bytes=0)
    answer = simpart(
        "plan", GPT, "--cluster", "dgx-a100", "--global-batch", "16", "--grain", "coarse", "--prefetch", "2"
    )
    assert answer.status == 2 and "--grain fine" in answer.err and answer.err.count("\n") == 1
