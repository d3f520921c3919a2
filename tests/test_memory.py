"""What a stage holds: closed forms, and a slow walk through its kernels that keeps a set of what is alive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simpart.capture import capture
from simpart.graph import Graph
from simpart.kernels.split_backward import weight_share
from simpart.memory import StageActivations, activations_of, state_of, state_values, update_transient_bytes
from simpart.model_spec import ModelFactory, parse_model
from simpart.training import TrainingSpec
from tests.toy_graphs import Toy, chain, device


def slow_activations(graph: Graph, ops: list[int], b: int, regions: list[list[int]]) -> StageActivations:
    """Walk forward and backward kernel by kernel, with storages in sets; a storage goes when nobody will read it
    again."""
    flat = graph.flat
    kernels = [k for k, op in enumerate(flat.kernel_op.tolist()) if op in ops]
    reads = {k: flat.kernel_inputs[flat.kernel_indptr[k] : flat.kernel_indptr[k + 1]].tolist() for k in kernels}
    output = {k: int(flat.kernel_outputs[k]) for k in kernels}
    view = {k: graph.kernel_classes[flat.kernel_class[k]].view for k in kernels}
    forward = [k for k in kernels if flat.kernel_forward[k]]
    backward = sorted((k for k in kernels if not flat.kernel_forward[k]), key=lambda k: (-flat.kernel_op[k], k))
    home = {op: r for r, region in enumerate(regions) for op in region}
    region = {k: home.get(int(flat.kernel_op[k])) for k in kernels}
    owner: dict[int, int] = {}
    for k in kernels:
        owner[output[k]] = owner.get(reads[k][0], reads[k][0]) if view[k] else output[k]

    def base(value: int) -> int:
        return owner.get(value, value)

    def size(value: int) -> int:
        return flat.kernel_value_spec[value].bytes(b)

    made_by = {output[k]: k for k in kernels if not view[k]}
    sequence: list[int] = []
    started: set[int] = set()
    for k in backward:
        r = region[k]
        if r is not None and r not in started:
            started.add(r)
            sequence += [f for f in forward if region[f] == r]
        sequence.append(k)
    kept = set()
    for k in sequence:
        for value in map(base, reads[k]):
            maker = made_by.get(value)
            if maker in forward and (region[maker] is None or region[maker] != region[k]):
                kept.add(value)

    def walk(order: list[int], alive: dict[tuple[str, int], int], tag: str) -> int:
        highest = sum(alive.values())
        for i, k in enumerate(order):
            if not view[k]:
                alive[tag, output[k]] = size(output[k])
            highest = max(highest, sum(alive.values()))
            needed = set()
            for later in order[i + 1 :]:
                for value in map(base, reads[later]):
                    maker = made_by.get(value)
                    inner = maker is not None and (maker not in forward or region[maker] == region[later] is not None)
                    needed.add((tag if inner or tag == "forward" else "kept", value))
            for item in list(alive):
                if item not in needed and not (tag == "forward" and item[1] in kept):
                    del alive[item]
        return highest

    stash = sum(size(value) for value in kept)
    up = walk(forward, {}, "forward")
    down = walk(sequence, {("kept", value): size(value) for value in kept}, "backward")
    share = weight_share(graph)
    halves = [k for k in sequence if share[k] < 1], [k for k in backward if share[k] > 0]

    def needs(k: int) -> set[tuple[str, int]]:
        found = set()
        for value in map(base, reads[k]):
            maker = made_by.get(value)
            inner = maker is not None and (maker not in forward or region[maker] == region[k] is not None)
            found.add(("backward" if inner else "kept", value))
        return found

    alive = {("kept", value): size(value) for value in kept}
    highest = [0, 0]
    for half, order in enumerate(halves):
        before = sum(alive.values())
        most = before
        for i, k in enumerate(order):
            if not view[k] and (half == 0 or share[k] == 1):
                alive["backward", output[k]] = size(output[k])
            most = max(most, sum(alive.values()))
            wanted = set().union(*(needs(later) for later in (order + halves[1] if half == 0 else order)[i + 1 :]))
            alive = {item: bytes_ for item, bytes_ in alive.items() if item in wanted}
        highest[half] = most - before
        if half == 0:
            wanted = set().union(*(needs(k) for k in halves[1]))
            alive = {item: bytes_ for item, bytes_ in alive.items() if item in wanted}
            between = sum(alive.values())
    return StageActivations(
        stash=stash, forward_transient=max(0, up - stash), backward_transient=max(0, down - stash), kept=between,
        input_transient=highest[0], weight_transient=highest[1],
    )  # fmt: skip


@st.composite
def toys(draw: st.DrawFn) -> tuple[Graph, list[int], list[list[int]]]:
    """A random net of layers, views and skips, some of its ops as a stage, some of those as regions."""
    toy = Toy()
    values = [toy.input(3)]
    for i in range(draw(st.integers(1, 7))):
        x = values[-1] if draw(st.booleans()) else draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["linear", "act", "view", "add"]))
        if kind == "linear":
            values.append(toy.linear(x, toy.parameter(f"w{i}", 3, 3)))
        elif kind == "add":
            values.append(toy.add(x, draw(st.sampled_from(values))))
        else:
            values.append(getattr(toy, kind)(x))
    values.append(toy.linear(values[-1], toy.parameter("last", 3, 3)))
    toy.loss(values[-1])
    graph = toy.graph()
    n = len(graph.op_ids)
    first, last = sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))))
    ops = list(range(first, last + 1))
    cuts = sorted(draw(st.lists(st.integers(first, last + 1), min_size=2, max_size=4)))
    regions = [list(range(a, b)) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b > a]
    return graph, ops, regions


@given(toys(), st.integers(1, 4))
def test_activations_equal_a_slow_walk(toy: tuple[Graph, list[int], list[list[int]]], b: int) -> None:
    graph, ops, regions = toy
    found = activations_of(graph, np.array(ops), b, [np.array(r) for r in regions])
    assert found == slow_activations(graph, ops, b, regions)


def test_a_chain_keeps_what_its_backward_reads() -> None:
    """Each layer keeps its linear's output (for act) and, but for the last, act's output (for the next linear)."""
    layers, width, b = 5, 6, 3
    found = activations_of(chain(layers, width), np.arange(2 * layers + 1), b)
    assert found.stash == (2 * layers - 1) * b * width * 4


def test_full_recomputation_keeps_only_what_enters_the_layers() -> None:
    layers, width, b = 5, 6, 3
    regions = [np.array([2 * i, 2 * i + 1]) for i in range(layers)]
    found = activations_of(chain(layers, width), np.arange(2 * layers + 1), b, regions)
    assert found.stash == (layers - 1) * b * width * 4
    assert found.backward_transient >= 2 * b * width * 4  # one layer at a time comes back


def test_views_and_parameters_are_not_counted_again() -> None:
    toy = Toy()
    x = toy.linear(toy.input(8), toy.parameter("w", 8, 8))
    toy.loss(toy.act(toy.view(x)))
    assert activations_of(toy.graph(), np.arange(4), 2).stash == 2 * 8 * 4


def test_what_a_stage_receives_is_no_activation_of_its_own() -> None:
    layers, width, b = 4, 6, 2
    found = activations_of(chain(layers, width), np.arange(4, 2 * layers + 1), b)  # layers 2 and 3
    assert found.stash == 3 * b * width * 4


@pytest.mark.parametrize(
    ("training", "state"),
    [(TrainingSpec(optimizer="sgd"), 0), (TrainingSpec(optimizer="momentum"), 4), (TrainingSpec(optimizer="adamw"), 8),
     (TrainingSpec(optimizer="adamw", master_weights=True), 12)],
)  # fmt: skip
def test_state_follows_the_recipe(training: TrainingSpec, state: int) -> None:
    graph = chain(3, width=4)
    found = state_of(graph, training, state_values(graph, np.arange(4)).tolist())  # layers 0 and 1
    assert (found.parameters, found.gradients, found.optimizer_state) == (2 * 16 * 4, 2 * 16 * 4, 2 * 16 * state)


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    graph = chain(2)
    found = state_of(graph, TrainingSpec(frozen=("w0",)), state_values(graph, np.arange(4)).tolist())
    assert (found.parameters, found.gradients, found.optimizer_state) == (128, 64, 128)


def test_an_update_holds_temporaries_unless_fused() -> None:
    graph = chain(2)
    state = state_of(graph, TrainingSpec(), state_values(graph, np.arange(4)).tolist())
    assert update_transient_bytes(TrainingSpec(), device(), state) == 2 * 16 * 4
    assert update_transient_bytes(TrainingSpec(fused=True), device(), state) == 0
    assert update_transient_bytes(TrainingSpec(optimizer="sgd"), device(), state) == 0
    assert update_transient_bytes(TrainingSpec(fused=True, master_weights=True), device(), state) == 2 * 16 * 4


def saved_bytes(factory: ModelFactory, micro_batch: int) -> int:
    """Storages that autograd keeps after a forward, but for parameters, buffers and inputs."""
    module, inputs = factory(micro_batch)
    outside = [*module.parameters(), *module.buffers(), *inputs]
    known = {t.untyped_storage().data_ptr() for t in outside}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*inputs)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [("tests.models:mlp", 0.0), ("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100", 0.0),
     pytest.param("llama:layers=2,hidden=64,heads=4,seq=32,vocab=100", 0.0, marks=pytest.mark.slow),
     pytest.param("resnet50", 0.002, marks=pytest.mark.slow)],
)  # fmt: skip
def test_activations_are_what_autograd_keeps(model: str, tolerance: float) -> None:
    """Statistics of batch norms, kept by autograd or not, make up the tolerance."""
    factory = parse_model(model)
    graph = capture(factory)
    found = activations_of(graph, np.arange(len(graph.op_ids)), 3)
    assert found.stash == pytest.approx(saved_bytes(factory, 3), rel=tolerance, abs=0)
