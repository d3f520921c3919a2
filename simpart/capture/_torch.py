"""What depends on torch's version: private names, graph metadata and higher-order operators of torch 2.13."""

from __future__ import annotations

import contextlib
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = [
    "CONTEXT_TARGETS",
    "DATA_DEPENDENT",
    "GradModeUnderAutocast",
    "backward_owner_path",
    "convertible_modules",
    "dynamo_export",
    "enter_autocast",
    "exit_autocast",
    "export",
    "fake_mode",
    "gradient_of",
    "is_backward",
    "is_dropped",
    "is_loss",
    "is_view",
    "joint",
    "module_path",
    "mutated_inputs",
    "node_value",
    "origin",
    "region",
    "sequence_number",
    "source_name",
    "target_name",
]  # fmt: skip

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Raised by a fake tensor when the module asks for a value that only real data can give."""

set_grad_enabled = torch._C._set_grad_enabled
enter_autocast, exit_autocast = _enter_autocast, _exit_autocast
CONTEXT_TARGETS = frozenset({enter_autocast, exit_autocast, set_grad_enabled})
"""Call nodes that switch a mode on or off; they make no tensor."""


class _Mode(FakeTensorMode):
    """A module that copies its own parts (nn.Transformer) must not copy the mode along with their fake parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return self


def fake_mode() -> FakeTensorMode:
    """A mode without symbolic shapes: all sizes are integers and no memory is used."""
    return _Mode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def convertible_modules() -> Iterator[None]:
    """Here `module.to(…)`, `.half()` and the like work on fake parameters, which torch wants to swap in place and
    cannot. Tied parameters stay tied."""
    made: dict[tuple[int, torch.dtype, torch.device], tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}

    def apply(self: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(function)
        for key, old in self._parameters.items():
            if old is None:
                continue
            with torch.no_grad():
                value = function(old)
            if value is not old:
                again = (id(old), value.dtype, value.device)
                _, self._parameters[key] = made.setdefault(
                    again, (old, torch.nn.Parameter(value, requires_grad=old.requires_grad))
                )
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = function(buffer)
        return self

    before = torch.nn.Module._apply
    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = before  # type: ignore[method-assign]


def export(module: torch.nn.Module, inputs: tuple[Any, ...]) -> GraphModule:
    """The forward graph with torch's composite operators whole and a module path on every node."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on exporting for inference (weights of nn.LSTM, for example)
        exported = torch.export.export(module, inputs, strict=False).module(check_guards=False)
    assert isinstance(exported, GraphModule)
    return exported


def dynamo_export(module: torch.nn.Module, inputs: tuple[Any, ...]) -> GraphModule:
    """The forward graph as dynamo sees it: grad-mode switches under autocast survive; targets are torch functions.

    Its form is that of `export`: placeholders are the inputs, everything else is an attribute.
    """
    import torch._dynamo
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    torch._dynamo.reset()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
        graph = dynamo_graph_capture_for_export(module)(*inputs)
    assert isinstance(graph, GraphModule)
    _normalise(graph, module, inputs)
    return graph


def _normalise(graph: GraphModule, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Dynamo passes parameters as inputs, in the order of use, and inputs only if used."""
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
        *graph.named_parameters(remove_duplicate=False),
        *graph.named_buffers(remove_duplicate=False),
    )
    names: dict[int, str] = {}
    for name, tensor in tensors:
        if _has_attribute(graph, name):
            names.setdefault(id(tensor), name)
    flat = pytree.tree_leaves(inputs)
    values = graph.graph.process_inputs(*inputs)
    old = [node for node in graph.graph.nodes if node.op == "placeholder"]
    with graph.graph.inserting_before(old[0] if old else None):
        new = [graph.graph.placeholder(f"input_{i}") for i in range(len(flat))]
    for node, value in zip(old, values, strict=True):
        position = next((i for i, item in enumerate(flat) if item is value), None)
        with graph.graph.inserting_before(node):
            if position is not None:
                twin = new[position]
            elif id(value) in names:
                twin = graph.graph.get_attr(names[id(value)])
            else:
                graph.register_buffer(f"constant_{node.name}", value, persistent=False)
                twin = graph.graph.get_attr(f"constant_{node.name}")
        node.replace_all_uses_with(twin)
        graph.graph.erase_node(node)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    if isinstance(output.args[0], tuple | list) and len(output.args[0]) == 1:
        output.args = (output.args[0][0],)
    graph.graph.set_codegen(CodeGen())
    graph.recompile()


def _has_attribute(graph: GraphModule, name: str) -> bool:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part, None)
    return isinstance(value, torch.Tensor)


def joint(graph: GraphModule, inputs: tuple[Any, ...]) -> GraphModule:
    """Forward and backward as one functional ATen graph; `graph` keeps its tensors in parameters and buffers only."""
    with contextlib.ExitStack() as stack:
        if (mode := graph.meta.get("fake_mode")) is not None:
            stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        return aot_export_joint_with_descriptors(stack, graph, inputs).graph_module


class GradModeUnderAutocast(TorchFunctionMode):
    """Notices a module that switches grad mode while autocast is on, which `export` drops silently."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is set_grad_enabled and torch.is_autocast_enabled("cpu"):
            self.seen = True
        return func(*args, **(kwargs or {}))


# --- nodes of the exported graph -------------------------------------------------------------------------------------
def node_value(node: Node) -> Any:
    """The fake value of a node: from our own run if there was one, else from tracing; None where tracing leaves
    none.
    """
    for key in ("simpart_value", "val", "example_value"):
        if key in node.meta:
            return node.meta[key]
    return None


def region(node: Node) -> tuple[str, tuple[Any, ...], str, tuple[Any, ...]] | None:
    """(kind, arguments of the context, name of the sub-graph, its inputs) of a node that wraps a region of the
    model.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    name, arguments = node.target.name(), node.args
    if name not in _REGIONS:
        return None
    kind, contexts = _REGIONS[name]
    inner = arguments[contexts]
    assert isinstance(inner, Node) and isinstance(inner.target, str)
    return kind, tuple(arguments[:contexts]), inner.target, tuple(arguments[contexts + 1 :])


_REGIONS = {
    "wrap_with_autocast": ("autocast", 4),
    "wrap_with_set_grad_enabled": ("grad", 1),
    "tag_activation_checkpoint": ("plain", 0),  # recomputation is chosen by the plan, not by the module
    "wrap": ("plain", 0),
}


def is_dropped(node: Node) -> bool:
    """Asserts that tracing inserts; they compute nothing."""
    return node.op == "call_function" and "_assert" in target_name(node)


def target_name(node: Node) -> str:
    """A name of the function that is the same in every process.

    `aten.linear.default`, `torch.nn.functional.linear`, `Tensor.view`.
    """
    target = node.target
    if node.op == "call_method":
        return f"Tensor.{target}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    return function_name(target)


def function_name(target: Any) -> str:
    module = (getattr(target, "__module__", None) or "torch").replace("_operator", "operator")
    if module == "torch._C._nn":
        module = "torch.nn.functional"
    name = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{module}.{name.removeprefix('_VariableFunctionsClass.')}"


def module_path(node: Node) -> str:
    """Dotted path of the module whose forward made the node; the root is ''."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return clean_path(str(next(reversed(stack.values()))[0]))


_DYNAMO_ROOT = re.compile(r"^(L\['\w+'\]|L__self__|self|_export_root)\.?")


def clean_path(path: str) -> str:
    path = _DYNAMO_ROOT.sub("", path)
    path = re.sub(r"\._modules\['(\w+)'\]|\['?(\w+)'?\]", lambda m: f".{m[1] or m[2]}", path)
    return re.sub(r"@\d+", "", path).lstrip(".")


def mutated_inputs(node: Node) -> Iterator[Any]:
    """Arguments that the op writes, by its schema; batch norm's running statistics are not in its schema."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        for i, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
    if (known := _HIDDEN_WRITES.get(target_name(node))) is not None:
        names, training = known
        values = {**dict(zip(_HIDDEN_ARGUMENTS[target_name(node)], node.args, strict=False)), **node.kwargs}
        if values.get(training):
            yield from (values.get(name) for name in names)


_HIDDEN_ARGUMENTS = {
    "aten.batch_norm.default": ("input", "weight", "bias", "running_mean", "running_var", "training"),
    "aten.instance_norm.default": ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
    "torch.nn.functional.batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training"),
    "torch.nn.functional.instance_norm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
}
_HIDDEN_WRITES = {name: (("running_mean", "running_var"), keys[5]) for name, keys in _HIDDEN_ARGUMENTS.items()}


# --- nodes of the joint graph ----------------------------------------------------------------------------------------
def is_backward(node: Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def origin(node: Node) -> str | None:
    """Name of the exported node that a forward node of the joint graph came from."""
    trail = node.meta.get("from_node")
    return str(trail[0].name) if trail else None


def sequence_number(node: Node) -> int | None:
    """Autograd's number, equal on a forward node and on the backward nodes it causes; not unique per op."""
    number = node.meta.get("seq_nr")
    return None if number is None else int(number)


def backward_owner_path(node: Node) -> str | None:
    """Module path of a backward node; None marks an add that accumulates gradients."""
    stack = node.meta.get("fwd_nn_module_stack")
    return clean_path(str(next(reversed(stack.values()))[0])) if stack else None


def source_name(node: Node) -> tuple[str, str] | None:
    """(kind, name) of a placeholder: kind is parameter, buffer, input or tangent."""
    described: Any = node.meta.get("desc")
    kind = type(described).__name__
    if kind == "ParamAOTInput":
        return "parameter", described.target
    if kind == "BufferAOTInput":
        return "buffer", described.target
    if kind == "PlainAOTInput":
        return "input", str(described.idx)
    if kind == "TangentAOTInput":
        return "tangent", "loss"
    return None


def is_loss(described: Any) -> bool:
    return type(described).__name__ == "PlainAOTOutput" and described.idx == 0


def gradient_of(described: Any) -> str | None:
    """Name of the parameter whose gradient this output of the joint graph is."""
    if type(described).__name__ != "GradAOTOutput" or type(described.grad_of).__name__ != "ParamAOTInput":
        return None
    return str(described.grad_of.target)


def is_view(node: Node) -> bool:
    """True if output 0 shares the storage of input 0 (`_unsafe_view` does too: its input is a temporary)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True
    returned = target._schema.returns
    return bool(returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write)


getitem = operator.getitem
