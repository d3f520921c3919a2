"""The partition search against brute force, and its plans: costs, bounds, coarsening, baselines, refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache
from math import inf, prod

import numpy as np
import pytest

from simpart.capture import capture
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.hardware import load_cluster
from simpart.model_spec import parse_model
from simpart.placement import Partial, Placement, Replicate, Shard
from simpart.placement.region_conversions import Box, box_of, part_of, step_cost
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.registry import default_costs, load_searcher
from simpart.searchers._tofu.baselines import METHODS
from simpart.searchers._tofu.choices import check_factors
from simpart.searchers._tofu.coarse import coarsen
from simpart.searchers._tofu.counts import counted_bytes, lone_bound, recount
from simpart.searchers._tofu.joint import joint
from simpart.searchers._tofu.plan import plan_of
from simpart.searchers._tofu.regions import Region, cut, device_received, received
from simpart.searchers._tofu.search import recursion, tie_range
from simpart.searchers._tofu.steps import Steps
from simpart.searchers._tofu.work import EinsumKernel, Link, Request, Rules, Value, Workload
from simpart.searchers.tofu import Tofu, partition
from simpart.searching import Control, search
from simpart.sharding import flows
from simpart.simulation import simulate_plan
from simpart.tdl import DESCRIPTIONS
from simpart.training import TrainingSpec

GPT = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64"
LSTM = "lstm:layers=2,hidden=16,seq=4,vocab=64"
MLP = "tests.models:mlp"


@cache
def graph_of(model: str) -> Graph:
    return capture(parse_model(model), (2, 3), precision="float32", shallow=False)


def problem_of(graph: Graph, devices: int, batch: int, cluster: str = "local") -> Problem:
    chosen = load_cluster(f"{cluster}:{devices}" if cluster == "local" else cluster)
    costs = default_costs(chosen, profiles=False)
    return Problem(graph=graph, training=TrainingSpec(precision="float32"), cluster=chosen, costs=costs,
                   global_batch=batch)  # fmt: skip


def first_plan(problem: Problem, name: str = "tofu") -> Plan:
    candidate = next(iter(load_searcher(name).propose(problem, np.random.default_rng(0), Control())))
    assert candidate.plan is not None, candidate.why
    plan: Plan = candidate.plan
    return plan


# --- brute force ------------------------------------------------------------------------------------------------------
Product = tuple[str, tuple[str, str], str, tuple[str, str, str]]  # name, operands, result, einsum


def random_mlp(chance: random.Random, layers: int) -> tuple[dict[str, tuple[int, ...]], list[Product]]:
    """Tensors and products of a training step of an MLP; gradients of weights are the weights."""
    batch, *dims = (chance.choice([12, 24, 48]) for _ in range(layers + 2))
    shapes: dict[str, tuple[int, ...]] = {f"X{i}": (batch, n) for i, n in enumerate(dims)}
    shapes |= {f"W{i}": (dims[i + 1], dims[i]) for i in range(layers)}
    shapes |= {f"dX{i}": (batch, dims[i]) for i in range(1, layers)}
    products: list[Product] = []
    for i in range(layers):
        products.append((f"forward{i}", (f"X{i}", f"W{i}"), f"X{i + 1}", ("bi", "oi", "bo")))
    for i in reversed(range(layers)):
        above = f"dX{i + 1}" if i + 1 < layers else f"X{layers}"
        if i:
            products.append((f"data{i}", (above, f"W{i}"), f"dX{i}", ("bo", "oi", "bi")))
        products.append((f"weight{i}", (above, f"X{i}"), f"W{i}", ("bo", "bi", "oi")))
    return shapes, products


def workload(shapes: dict[str, tuple[int, ...]], products: list[Product]) -> Workload:
    names = list(shapes)
    kernels, links = [], []
    for k, (_, operands, result, einsum) in enumerate(products):
        sizes: dict[str, int] = {}
        for operand, name in zip(einsum, (*operands, result), strict=True):
            sizes |= dict(zip(operand, shapes[name], strict=True))
        kernels.append(EinsumKernel(einsum[:2], einsum[2], tuple(sizes.items())))
        links += [Link(k, p, names.index(name), 1, False) for p, name in enumerate(operands)]
        links.append(Link(k, 0, names.index(result), 1, True))
    return Workload(
        names=tuple(p[0] for p in products), kernels=tuple(kernels), counts=(1,) * len(kernels),
        values=tuple(Value(name=name, shape=shape) for name, shape in shapes.items()), links=tuple(links),
        groups=tuple((n,) for n in range(len(kernels) + len(shapes))),
    )  # fmt: skip


def brute_force(shapes: dict[str, tuple[int, ...]], products: list[Product], factors: tuple[int, ...]) -> float:
    """The least total over all schemes and requests of all steps: one axis per tensor, each product at its best."""
    names, sequences = list(shapes), list(itertools.product((0, 1), repeat=len(factors)))
    total = np.zeros((len(sequences),) * len(names))
    for _, operands, result, einsum in products:
        tensors = (*operands, result)
        each: list[np.ndarray] = []
        for indices in itertools.product("bio", repeat=len(factors)):
            sides = []
            for position, (name, letters) in enumerate(zip(tensors, einsum, strict=True)):
                other = Partial() if position == 2 else Replicate()
                needs = [Shard(letters.index(x)) if x in letters else other for x in indices]
                costs = [conversion(shapes[name], s, needs, factors, made=position == 2) for s in sequences]
                sides.append(np.array(costs))
            each.append(sides[0][:, None, None] + sides[1][None, :, None] + sides[2][None, None, :])
        best = np.minimum.reduce(each)
        axes = [names.index(name) for name in tensors]
        shape = [len(sequences) if n in axes else 1 for n in range(len(names))]
        total = total + np.transpose(best, np.argsort(axes)).reshape(shape)
    return float(total.min())


def conversion(
    shape: tuple[int, ...], scheme: tuple[int, ...], needs: list[Placement], factors: tuple[int, ...], made: bool
) -> float:
    """Of one operand through all steps, by the definition."""
    total, groups = 0, 1
    tensor: Box | None = box_of(shape)
    working: Box | None = box_of(shape)
    for dim, need, parts in zip(scheme, needs, factors, strict=True):
        if tensor is None or working is None:
            return inf
        if made:
            cost = step_cost(working, need, tensor, Shard(dim), parts)
        else:
            cost = step_cost(tensor, Shard(dim), working, need, parts)
        if cost is None:
            return inf
        total += groups * cost
        groups *= parts
        tensor, working = part_of(tensor, Shard(dim), parts, 0), part_of(working, need, parts, 0)
    return total


@pytest.mark.parametrize("factors", [(2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("layers", [1, 2])
def test_steps_and_joint_optimum_equal_brute_force_on_random_mlps(factors: tuple[int, ...], layers: int) -> None:
    chance = random.Random(len(factors) * 10 + layers)
    for _ in range(4 if prod(factors) < 8 else 2):
        shapes, products = random_mlp(chance, layers)
        steps = Steps(workload(shapes, products), factors)
        expected = brute_force(shapes, products, factors)
        found = joint(steps)
        assert found is not None
        assert found.total == pytest.approx(expected, rel=1e-12)
        assert sum(found.deltas) == pytest.approx(expected, rel=1e-12)
        assert lone_bound(steps) <= expected
        low, high = tie_range(steps)
        kept = recursion(steps, beam=10_000, ties=10_000)
        assert kept.total == pytest.approx(low, rel=1e-12)
        assert expected <= low <= high
        if len(factors) == 1:
            assert kept.total == expected == high


def test_near_ties_find_the_optimum_that_step_wise_greed_misses() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "X0": (4, 4), "X1": (4, 64), "X2": (4, 64), "X3": (4, 4), "dX1": (4, 64), "dX2": (4, 64), "W0": (64, 4),
        "W1": (64, 64), "W2": (4, 64),
    }  # fmt: skip
    _, products = random_mlp(random.Random(0), 3)
    steps = Steps(workload(shapes, products), (2, 2))
    assert recursion(steps, beam=1000, ties=1000).total == 2160
    assert recursion(steps, beam=1000, ties=1000, slack=0.2).total == 2096
    best = joint(steps)
    assert best is not None
    assert (best.total, best.bound) == (2096, 2096)


def test_costs_are_the_same_counted_by_steps_and_by_powers_of_two_of_devices() -> None:
    shapes, products = random_mlp(random.Random(3), 2)
    work = workload(shapes, products)
    for factors in ((2,), (2, 2)):
        found = recursion(Steps(work, factors))
        assert counted_bytes(work, found) == found.total
        assert recount(work, found) == pytest.approx(found.total, rel=0.1)
    one = recursion(Steps(work, (3,)))
    assert recount(work, one) == one.total


@dataclass(frozen=True)
class ByOutputs:
    """A product that can only be cut by its outputs, and needs the other operand whole."""

    inputs: tuple[tuple[int, ...], ...] = ((4, 4), (8, 4))
    outputs: tuple[tuple[int, ...], ...] = ((4, 8),)

    def requests(self, parts: int, wished: frozenset[tuple[bool, int, Shard]]) -> tuple[Request, ...]:
        return (Request("o", (Replicate(), Shard(0)), (Shard(1),)),)


def test_readers_share_a_gather_if_asked() -> None:
    names = ("X", "V", "W", "Y", "Z")
    shapes = ((4, 4), (8, 4), (8, 4), (4, 8), (4, 8))
    rows = [(k, 0, 0, False) for k in (0, 1)] + [(0, 1, 1, False), (1, 1, 2, False), (0, 0, 3, True), (1, 0, 4, True)]
    links = [Link(kernel, position, value, 1, makes) for kernel, position, value, makes in rows]
    work = Workload(
        names=("first", "second"), kernels=(ByOutputs(), ByOutputs()), counts=(1, 1),
        values=tuple(Value(name=n, shape=s) for n, s in zip(names, shapes, strict=True)), links=tuple(links),
        groups=tuple((n,) for n in range(7)),
    )  # fmt: skip
    assert recursion(Steps(work, (2,))).total == 2 * 16
    assert recursion(Steps(work, (2,), Rules(share=True))).total == 16


# --- regions ----------------------------------------------------------------------------------------------------------
def members_of(shape: tuple[int, ...], place: Placement, parts: int) -> list[set[int]]:
    """Elements that each member holds, by number; of a strided shard the same chunk of every run."""
    numbers = np.arange(prod(shape)).reshape(shape)
    found = []
    for part in range(parts):
        if isinstance(place, Shard):
            block = place.block or shape[place.dim]
            each = block // parts
            keep = [i for i in range(shape[place.dim]) if part * each <= i % block < (part + 1) * each]
            found.append(set(numbers.take(keep, place.dim).ravel().tolist()))
        else:
            found.append(set(numbers.ravel().tolist()))
    return found


@pytest.mark.parametrize("lies", [Shard(0), Shard(1), Shard(1, 4), Shard(1, 8)])
@pytest.mark.parametrize("needed", [Shard(0), Shard(1), Shard(1, 4), Replicate()])
def test_strided_conversions_count_the_elements_that_move(lies: Placement, needed: Placement) -> None:
    shape, parts = (4, 16), 2
    held, wanted = (members_of(shape, place, parts) for place in (lies, needed))
    moved = sum(len(w - h) for w, h in zip(wanted, held, strict=True))
    assert received(Region(shape), lies, Region(shape), needed, parts) == moved
    assert device_received(shape, (lies,), (needed,), (parts,)) == moved


def test_a_strided_cut_goes_on_inside_its_runs() -> None:
    region = cut(cut(Region((4, 24)), Shard(1, 12), 3), Shard(1, 4), 2)
    assert region.shape == (4, 4)
    assert received(region, Shard(1, 2), region, Shard(1, 2), 2) == 0


# --- captured graphs --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [MLP, GPT, "resnet50:image=16,classes=6,width=8,blocks=1-1"])
def test_coarsening_costs_nothing(model: str) -> None:
    graph = graph_of(model)
    totals = []
    for merge in (True, False):
        work = coarsen(graph, 8, (2,), merge=merge).work
        totals.append(recursion(Steps(work, (2,)), beam=1, ties=1).total)
    assert totals[1] <= totals[0] <= 1.02 * totals[1]


def test_unrolled_steps_are_one_set_of_variables() -> None:
    short, long = (coarsen(graph_of(f"lstm:layers=1,hidden=16,seq={n},vocab=64"), 8, (2,)).work for n in (5, 7))
    assert len(short.groups) <= len(long.groups) <= len(short.groups) + 3
    products = [k for k, name in enumerate(long.names) if ".mm." in name or ".addmm." in name]
    assert max(long.counts[k] for k in products) >= 4


def test_a_repeated_layer_has_one_set_of_variables_whatever_the_depth() -> None:
    two, four = (coarsen(graph_of(f"gpt:layers={n},hidden=32,heads=4,seq=16,vocab=64"), 8, (2,)).work for n in (2, 4))
    assert len(two.groups) == len(four.groups)
    assert sum(two.counts) < sum(four.counts)
    deep, shallow = (recursion(Steps(work, (2,)), beam=1, ties=1).total for work in (four, two))
    assert deep > shallow


def test_gates_are_cut_in_step_with_the_rows_of_their_weights() -> None:
    graph = graph_of(LSTM)
    found = partition(graph, 2, 2)
    plan = plan_of(found.coarse, found.found, 1, "1f1b")
    rest = dict(plan.state)
    assert rest["layers.0.weight_ih_l0"].parameter == (("k1", Shard(0, 16)),)


@pytest.mark.parametrize("model", [GPT, LSTM])
def test_everything_rests_in_shards_and_memory_is_a_share(model: str) -> None:
    graph = graph_of(model)
    whole = simulate_plan(problem_of(graph, 1, 8), first_plan(problem_of(graph, 1, 8))).memory[0].by_kind
    problem = problem_of(graph, 4, 8)
    plan = first_plan(problem)
    assert {p.name for p in graph.parameters.values() if plan.state_of(p)[0] is None} == set()
    share = simulate_plan(problem, plan).memory[0].by_kind
    for kind in ("parameters", "gradients", "optimizer state"):
        assert share[kind] == pytest.approx(whole[kind] / 4, rel=0.01)
    assert share["activations"] < 0.75 * whole["activations"], "a share, and what was gathered and is read again"


def test_what_a_plan_runs_is_no_more_than_what_the_search_counts() -> None:
    graph = graph_of(GPT)
    found = partition(graph, 8, 4)
    plan = plan_of(found.coarse, found.found, 1, "1f1b")
    run = 4 * sum(flows(plan, graph)[0].received_bytes().values())
    assert 0.8 * found.bytes < run < 1.05 * found.bytes
    assert found.bound <= found.bytes
    assert found.gap < 0.2


def test_seconds_prefer_the_links_that_are_fast() -> None:
    graph = graph_of(GPT)
    cluster = load_cluster("dgx-a100:2")
    problem = Problem(
        graph=graph, training=TrainingSpec(), cluster=cluster, costs=default_costs(cluster, profiles=False),
        global_batch=16,
    )  # fmt: skip
    plain, quick = (partition(graph, 16, 16, problem=p) for p in (None, problem))
    assert quick.bytes >= plain.bytes
    assert quick.found.total < 1.0  # seconds


def test_baselines_move_more_than_the_search() -> None:
    graph = graph_of(MLP)
    found = {name: partition(graph, 8, 4, method=method) for name, method in METHODS.items()}
    best = found.pop("tofu")
    for other in found.values():
        assert other.bytes >= best.bytes * (1 - 1e-9)
    requests = [r for step in found["icml18"].found.steps for a in step for r in a if hasattr(r, "outputs")]
    assert not any(isinstance(p, Partial) for r in requests for p in r.outputs)
    assert len(found["equalchop"].found.factors) == 1


# --- bad input --------------------------------------------------------------------------------------------------------
def test_devices_whose_prime_divides_no_dim_are_refused() -> None:
    with pytest.raises(UserError, match="no dim of this model at micro-batch 8 divides by 13; use a number of devices"):
        partition(graph_of(MLP), 8, 13)
    result = search(problem_of(graph_of(MLP), 13, 8), Tofu())
    assert result.best is None
    assert "divides by 13" in next(iter(result.infeasible))


def test_factors_multiply_to_the_devices_largest_first() -> None:
    assert check_factors(12, None) == (3, 2, 2)
    assert check_factors(1, None) == ()
    assert check_factors(12, (6, 2)) == (6, 2)
    for wrong in ((2, 6), (3, 3), (12, 1)):
        with pytest.raises(UserError, match="multiply to the 12 devices, largest first"):
            check_factors(12, wrong)


def test_a_dim_smaller_than_its_axis_is_cut_elsewhere() -> None:
    graph = graph_of(MLP)
    found = partition(graph, 2, 8)  # two samples for eight devices
    plan = plan_of(found.coarse, found.found, 1, "1f1b")
    assert {p.name for p in graph.parameters.values() if plan.state_of(p)[0] is None} == set()
    simulate_plan(problem_of(graph, 8, 2), plan)


def test_undescribed_kernels_are_replicated_and_their_cost_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DESCRIPTIONS, "aten.relu")
    graph = graph_of(MLP)
    found = partition(graph, 34, 2)
    ((kernel, reason, gathered),) = found.replicated
    assert "aten.relu" in kernel
    assert "simpart.tdl.describe" in reason
    assert gathered == 4 * 34 * 40, "each of two devices fetches the half that it lacks, 4 bytes an element"
    candidate = next(iter(Tofu().propose(problem_of(graph, 2, 34), np.random.default_rng(0), Control())))
    assert "1 kernel replicated for" in candidate.family


def test_memory_that_no_partition_meets_is_said_by_how_much() -> None:
    problem = problem_of(graph_of("gpt:layers=3,hidden=16384,heads=64,seq=512,vocab=64"), 8, 2, "p2.8xlarge")
    result = search(problem, Tofu())
    assert result.best is None
    assert all("more than K80 has" in why for why in result.infeasible)
    assert result.proposed == 2, "one micro-batch, then two"
