"""Capture of small real models against the joint graph itself, against other captures and against counts by hand."""

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simpart.capture import capture, export_ops
from simpart.capture._build import build
from simpart.capture._trace import Trace
from simpart.errors import UserError
from simpart.graph import Graph
from simpart.zoo import MODELS, ZooFactory

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 100},
    "llama": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "seq": 32, "vocab": 100},
    "resnet50": {"image": 64, "width": 8, "classes": 10, "blocks": (1, 4, 1, 1)},
    "unet": {"image": 32, "base": 4, "depth": 3},
}


def zoo(name: str, **dims: Any) -> ZooFactory:
    return ZooFactory(name, MODELS[name][0](**{**SMALL[name], **dims}))


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return capture(zoo("gpt", layers=6))


@pytest.fixture(scope="module")
def resnet() -> Graph:
    return capture(zoo("resnet50"), (2, 3))


@pytest.fixture(scope="module")
def unet() -> Graph:
    return capture(zoo("unet"), (2, 3))


def joint_counts(factory: Any, micro_batch: int) -> Counter[tuple[str, str]]:
    """(phase, target) of every node of the joint graph that computes, straight from torch."""
    import contextlib

    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        module, inputs = factory(micro_batch)
        exported = torch.export.export(module, inputs, strict=False).module(check_guards=False)
        joint = aot_export_joint_with_descriptors(stack, exported, inputs).graph_module
    nodes = [n for n in joint.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    return Counter(("B" if n.meta["partitioner_tag"] == "is_backward" else "F", str(n.target)) for n in nodes)


def kernel_counts(graph: Graph) -> Counter[tuple[str, str]]:
    kernels = (graph.kernel_classes[i] for i in graph.flat.kernel_class)
    return Counter((k.phase, k.target) for k in kernels)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_joint_node_is_one_kernel_of_one_op(name: str) -> None:
    assert kernel_counts(capture(zoo(name), (2, 3))) == joint_counts(zoo(name), 3)


def test_every_joint_node_is_one_kernel_of_one_op_with_buffers_and_skips(resnet: Graph, unet: Graph) -> None:
    assert kernel_counts(resnet) == joint_counts(zoo("resnet50"), 3)
    assert kernel_counts(unet) == joint_counts(zoo("unet"), 2)


def captured_with_trace(factory: Any, **options: Any) -> tuple[Graph, Trace]:
    """A graph and the flat trace it was built from."""
    import simpart.capture._capture as module

    traces: list[Trace] = []

    def watched(trace: Trace, **rest: Any) -> Graph:
        traces.append(trace)
        return build(trace, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build", watched)
        graph = capture(factory, (2, 3), **options)
    return graph, traces[-1]


def check_wiring(graph: Graph, trace: Trace) -> None:
    """Undo the templates: every op and kernel of the flat arrays must read just what its row of the trace reads."""
    flat = graph.flat
    names = {(s.kind, s.name): (-1, i) for i, s in enumerate(trace.sources)}
    op_refs: dict[int, tuple[int, int]] = {v: names[s.kind, s.name] for v, s in graph.all_sources()}
    assert [trace.ops[i].path + "/" + trace.ops[i].target for i in range(len(trace.ops))] == [
        name.rsplit("#", 1)[0] for name in graph.op_ids
    ]
    for i, op in enumerate(trace.ops):
        op_refs.update({int(flat.op_outputs[i]) + k: (i, k) for k in range(len(op.outputs))})
    for i, op in enumerate(trace.ops):
        assert (
            tuple(op_refs[v] for v in flat.op_inputs[flat.op_indptr[i] : flat.op_indptr[i + 1]].tolist()) == op.inputs
        )
    calls = flat.op_call[flat.kernel_op]
    order = sorted(range(len(trace.kernels)), key=lambda k: (int(flat.op_call[trace.kernels[k].op]), k))
    assert [trace.kernels[k].op for k in order] == flat.kernel_op.tolist()
    assert sorted(calls.tolist()) == calls.tolist()
    refs: dict[int, tuple[int, int]] = {}
    firsts = zip(graph.value_offsets.tolist(), graph.kernel_value_offsets.tolist(), graph.calls, strict=True)
    refs.update({v: op_refs[v] for v in range(len(graph.sources))})
    for op_first, first, call in firsts:
        for n in range(len(graph.templates[call.template].sources)):
            refs[first + n] = op_refs[op_first + n]
    for i, k in enumerate(order):
        refs.update({int(flat.kernel_outputs[i]) + n: (k, n) for n in range(len(trace.kernels[k].outputs))})
    for i, k in enumerate(order):
        row, kernel = trace.kernels[k], graph.kernel_classes[flat.kernel_class[i]]
        assert (row.target, row.arguments, row.outputs) == (kernel.target, kernel.arguments, kernel.outputs)
        read = flat.kernel_inputs[flat.kernel_indptr[i] : flat.kernel_indptr[i + 1]].tolist()
        assert tuple(refs[v] for v in read) == row.inputs
    assert {op_refs[v][1]: refs[g] for v, g in graph.gradients.items()} == dict(trace.gradients)
    assert op_refs[graph.loss] == trace.loss


def test_templates_and_calls_read_exactly_what_was_traced() -> None:
    check_wiring(*captured_with_trace(zoo("gpt", layers=3, tied=True), shallow=False))
    check_wiring(*captured_with_trace(lambda b: (SharedMemory(4), (torch.zeros(b, 16),)), shallow=False))
    check_wiring(*captured_with_trace(zoo("resnet50")))


def test_ids_follow_module_paths_and_counts(gpt: Graph) -> None:
    assert "wte/aten.embedding.default#0" in gpt.op_ids
    assert (
        sum(name.startswith("h.3.") for name in gpt.op_ids) == sum(name.startswith("h.4.") for name in gpt.op_ids) > 0
    )
    assert len(set(gpt.op_ids)) == len(gpt.op_ids)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_ids_are_the_same_at_every_micro_batch(name: str) -> None:
    factory = zoo(name)
    assert export_ops(factory, 2).ids == export_ops(factory, 5).ids


def test_fingerprint_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from simpart.capture import capture; from simpart.zoo import *; "
        f"print(capture(ZooFactory('gpt', GPTDims(**{SMALL['gpt']!r})), (2, 3)).fingerprint)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert found.stdout.strip() == capture(zoo("gpt"), (2, 3)).fingerprint


def test_importing_capture_does_not_import_torch() -> None:
    code = "import sys, simpart.capture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- sizes -----------------------------------------------------------------------------------------------------------
def shapes_at(graph: Graph, micro_batch: int) -> list[tuple[int, ...]]:
    return [spec.shape(micro_batch) for spec in graph.flat.value_spec]


def test_dims_hold_at_a_micro_batch_that_was_not_captured(gpt: Graph) -> None:
    factory = zoo("gpt", layers=6)
    exported = export_ops(factory, 7)
    flat = gpt.flat
    for i, node in enumerate(exported.nodes):
        value = node.meta["simpart_value"]
        tensors = value if isinstance(value, tuple | list) else (value,)
        specs = flat.value_spec[flat.op_outputs[i] : flat.op_outputs[i] + len(tensors)]
        assert [spec.shape(7) for spec in specs] == [tuple(t.shape) for t in tensors]


def test_kernel_dims_equal_a_direct_capture_there(gpt: Graph) -> None:
    direct = capture(zoo("gpt", layers=6), (4, 7))
    assert [s.shape(4) for s in gpt.flat.kernel_value_spec] == [s.shape(4) for s in direct.flat.kernel_value_spec]
    assert direct.fingerprint == gpt.fingerprint


class FloorDims(nn.Module):
    """Keeps int(1.5 b) rows: not affine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.repeat(2, 1)[: int(1.5 * x.shape[0])]).sum()


def test_floor_dims_become_a_table() -> None:
    graph = capture(lambda b: (FloorDims(), (torch.zeros(b, 8),)))
    shapes = {b: {spec.shape(b)[0] for spec in graph.flat.value_spec if spec.batched} for b in (1, 2, 3, 5)}
    assert all(int(1.5 * b) in shapes[b] for b in shapes)
    with pytest.raises(UserError, match=r"captured at .*2.*got micro-batch 4"):
        shapes_at(graph, 4)


def test_tokens_per_sample(gpt: Graph, resnet: Graph) -> None:
    assert (gpt.tokens_per_sample, resnet.tokens_per_sample) == (32, 1)


# --- templates -------------------------------------------------------------------------------------------------------
def covered(graph: Graph) -> float:
    calls = Counter(call.template for call in graph.calls)
    ops = sum(len(graph.templates[call.template].ops) for call in graph.calls if calls[call.template] > 1)
    return ops / len(graph.op_ids)


def test_layers_become_calls_of_one_template(gpt: Graph) -> None:
    assert max(Counter(call.template for call in gpt.calls).values()) == 6
    assert covered(gpt) > 0.9
    assert [call.variables for call in gpt.calls if call.variables] == [(str(i),) for i in range(6)]


def test_residual_groups_lie_inside_calls(resnet: Graph) -> None:
    assert covered(resnet) > 0.3
    assert resnet.joined == ()
    inplace = [i for i, name in enumerate(resnet.op_ids) if "relu_" in name]
    assert inplace
    for i in inplace:
        producer = resnet.flat.value_op[resnet.flat.op_inputs[resnet.flat.op_indptr[i]]]
        assert resnet.flat.op_group[i] == resnet.flat.op_group[producer]


class SharedMemory(nn.Module):
    """All blocks read one computed value: k users need k - 1 accumulation adds."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.memory = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> Any:
        memory = self.memory(x)
        y = torch.zeros_like(x)
        for block in self.blocks:
            y = y * 2 + block(torch.tanh(y) * memory)
        return y.pow(2).mean()


def test_a_shared_value_has_one_accumulation_add_less_than_users() -> None:
    graph = capture(lambda b: (SharedMemory(4), (torch.zeros(b, 16),)), (2, 3), shallow=False)
    assert max(Counter(call.template for call in graph.calls).values()) >= 3
    assert [len(call.omits) for call in graph.calls].count(1) == 1
    assert kernel_counts(graph) == joint_counts(lambda b: (SharedMemory(4), (torch.zeros(b, 16),)), 3)


# --- parameters, gradients, buffers ----------------------------------------------------------------------------------
def test_parameters_match_the_closed_form_and_tied_ones_count_once(gpt: Graph) -> None:
    tied = capture(zoo("gpt", tied=True), (2, 3))
    for graph, factory in ((gpt, zoo("gpt", layers=6)), (tied, zoo("gpt", tied=True))):
        assert graph.parameter_count == factory.parameter_count
        assert len(graph.gradients) == len(graph.parameters)
    weight = next(s for s in tied.sources if s.aliases)
    assert (weight.name, weight.aliases) == ("wte.weight", ("head.weight",))


def test_gradients_have_the_shape_of_their_parameters(resnet: Graph) -> None:
    for value, gradient in resnet.gradients.items():
        assert resnet.flat.value_spec[value].shape(3) == resnet.flat.kernel_value_spec[gradient].shape(3)
        assert not resnet.flat.kernel_forward[resnet.flat.kernel_value_kernel[gradient]]


def test_batch_norm_mutates_buffers(resnet: Graph) -> None:
    writers = [op for op in resnet.op_classes if op.mutates_buffer]
    assert {op.target for op in writers} == {"aten.batch_norm.default", "aten.add_.Tensor"}


def test_gradient_flows_through_adds_but_not_through_indices(gpt: Graph) -> None:
    carries = {gpt.op_ids[i]: gpt.op_classes[c].carries_gradient for i, c in enumerate(gpt.flat.op_class)}
    assert not any(flag for name, flag in carries.items() if "arange" in name)
    assert all(flag for name, flag in carries.items() if name.startswith("h."))


def test_unet_skips_are_live_across_its_bottom(unet: Graph) -> None:
    flat = unet.flat
    last_use = {}
    for i in range(len(flat.op_class)):
        for value in flat.op_inputs[flat.op_indptr[i] : flat.op_indptr[i + 1]]:
            last_use[int(value)] = i
    live = [
        sum(flat.value_op[v] < i <= use for v, use in last_use.items() if flat.value_op[v] >= 0)
        for i in range(len(flat.op_class))
    ]
    assert max(live) >= 4  # one per level of depth 3, and the path itself


# --- micro-batch 1, autocast, precision ------------------------------------------------------------------------------
class CopiesUnlessAlone(nn.Module):
    """Flattening a broadcast query copies it, except at micro-batch 1, where it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(4, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.query.expand(x.shape[0], 4, 8).reshape(-1, 8)
        return (self.linear(rows) * x.sum()).sum()


def test_micro_batch_one_keeps_its_own_structure_where_it_differs(gpt: Graph) -> None:
    graph = capture(lambda b: (CopiesUnlessAlone(), (torch.zeros(b, 8),)))
    assert gpt.at_one is None
    assert graph.at_one is not None
    assert graph.at(1).op_ids == graph.op_ids
    assert kernel_counts(graph) != kernel_counts(graph.at(1))
    assert ("F", "aten.clone.default") in kernel_counts(graph)


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module, no_grad: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.frozen = nn.Linear(8, 8)
        self.no_grad = no_grad

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inner(x)
            with torch.set_grad_enabled(not self.no_grad):
                scale = self.frozen(y)
            return (y * scale).float().mean()


def test_casts_belong_to_the_op_that_needs_them() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = F.gelu(self.inner(x))
            return y.float().mean()

    graph = capture(lambda b: (Plain(), (torch.zeros(b, 8),)))
    assert [name for name in graph.op_ids if name.startswith("inner")] == ["inner/aten.linear.default#0"]
    linear = graph.find("inner/aten.linear.default#0")
    owned = [
        graph.kernel_classes[c].target
        for c, op in zip(graph.flat.kernel_class, graph.flat.kernel_op, strict=True)
        if op == linear
    ]
    assert owned.count("aten._to_copy.default") == 5  # of input, weight and bias; backward of the two parameters
    assert export_ops(lambda b: (Plain(), (torch.zeros(b, 8),)), 2).contexts[linear][1][0][:2] == (
        "cpu",
        torch.bfloat16,
    )


def test_no_grad_under_autocast_is_not_lost() -> None:
    def factory(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        return Autocast(nn.Linear(8, 8), no_grad=True), (torch.ones(micro_batch, 8),)

    graph = capture(factory)
    assert {graph.parameters[value].name for value in graph.gradients} == {"inner.weight", "inner.bias"}
    exported = export_ops(factory, 2, real=True)
    module: Any = exported.module
    x = factory(2)[1][0]
    expected = torch.autograd.grad(module(x), [module.inner.weight])[0]
    assert torch.equal(torch.autograd.grad(exported.graph(x), [module.inner.weight])[0], expected)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(exported.graph(x), [module.frozen.weight])


def test_precision_is_the_default_dtype_of_the_factory() -> None:
    graph = capture(lambda b: (FloorDims(), (torch.zeros(b, 8),)), (2, 4), precision="bfloat16")
    assert {source.spec.dtype for source in graph.parameters.values()} == {"bfloat16"}
    assert graph.precision == "bfloat16"
    assert torch.get_default_dtype() is torch.float32


# --- exported ops ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(SMALL))
def test_exported_graph_runs_with_real_parameters(name: str) -> None:
    factory = zoo(name)

    def seeded(micro_batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        return factory(micro_batch)

    exported = export_ops(seeded, 2, real=True, precision="float64")
    inputs = [x.double() if x.is_floating_point() else x for x in seeded(2)[1]]
    loss, again = exported.graph(*inputs), exported.module(*inputs)
    torch.testing.assert_close(loss, again, rtol=1e-12, atol=1e-12)
    assert len(exported.ids) == len(exported.nodes) == len(exported.groups) == len(exported.contexts)


def test_exported_ids_and_groups_equal_those_of_the_graph(resnet: Graph) -> None:
    exported = export_ops(zoo("resnet50"), 2)
    assert exported.ids == resnet.op_ids
    assert list(exported.groups) == resnet.flat.op_group.tolist()


class TwoViews(nn.Module):
    """A view taken before an in-place write sees the write: all of it is one indivisible group."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x) * 1.5
        z = y[:, :4]
        y.mul_(2)
        return (z.sin() + y[:, 4:]).sum()


def test_views_of_a_written_tensor_are_one_group() -> None:
    exported = export_ops(lambda b: (TwoViews(), (torch.zeros(b, 8),)), 2)
    group = {name.split("/")[1].split(".")[1]: g for name, g in zip(exported.ids, exported.groups, strict=True)}
    assert group["mul_"] == group["mul"]
    sliced = [g for name, g in zip(exported.ids, exported.groups, strict=True) if "slice" in name]
    assert sliced[0] == group["mul_"]
    assert group["sin"] != group["mul_"]
