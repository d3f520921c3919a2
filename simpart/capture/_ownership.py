"""From an exported graph and its joint graph to a Trace: which op owns which kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from simpart.capture import _torch
from simpart.capture._arguments import call_of, spec_of, specs_of
from simpart.capture._exported import Facts, call_nodes, resolve, tensors_in
from simpart.capture._trace import KernelRow, OpRow, Ref, Trace
from simpart.errors import UserError
from simpart.graph import Source

__all__ = ["Sources", "trace_of"]


class Sources:
    """Sources of a module in a fixed order: parameters, buffers, constants of the graph, inputs, the tangent of the
    loss.
    """

    def __init__(self, module: nn.Module, graph: fx.GraphModule, inputs: tuple[Any, ...], loss: torch.Tensor) -> None:
        self.rows: list[Source] = []
        self.number: dict[str, int] = {}
        self._by_tensor: dict[int, int] = {}
        for source, tensor in module_sources(module):
            self._add(source, tensor)
        for name, buffer in graph.named_buffers():
            if name not in self.number and id(buffer) not in self._by_tensor:
                self._add(Source(kind="constant", name=name, spec=spec_of(buffer)), buffer)
        for i, tensor in enumerate(tensors_in(inputs)):
            self._add(Source(kind="input", name=str(i), spec=spec_of(tensor)), None)
        self._add(Source(kind="tangent", name="loss", spec=spec_of(loss)), None)

    def _add(self, source: Source, tensor: torch.Tensor | None) -> None:
        number = len(self.rows)
        self.rows.append(source)
        for name in (source.name, *source.aliases) if source.kind in ("parameter", "buffer") else ():
            self.number[name] = number
        if source.kind not in ("parameter", "buffer"):
            self.number[f"{source.kind}:{source.name}"] = number
        if tensor is not None:
            self._by_tensor[id(tensor)] = number

    def of_tensor(self, tensor: torch.Tensor, name: str) -> int:
        """Number of a parameter, buffer or constant, by identity (tied names are one tensor), else by name."""
        found = self._by_tensor.get(id(tensor), self.number.get(name, self.number.get(f"constant:{name}")))
        if found is None:
            raise UserError(
                f"the captured graph reads a tensor {name!r} that the module does not own; make it a buffer"
            )
        return found

    def of_kind(self, kind: str, name: str) -> int:
        return (
            self.number[name]
            if kind in ("parameter", "buffer") and name in self.number
            else (self.number[f"{'constant' if kind in ('parameter', 'buffer') else kind}:{name}"])
        )


def module_sources(module: nn.Module) -> list[tuple[Source, torch.Tensor]]:
    """Parameters, then buffers, each once under its first name, with the other names as aliases."""
    found: list[tuple[Source, torch.Tensor]] = []
    for kind, named in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, (name, *aliases) in names.items():
            tensor = tensors[key]
            source = Source(
                kind=kind,  # type: ignore[arg-type]  # one of the two words above
                name=name,
                spec=spec_of(tensor),
                trainable=kind == "parameter" and tensor.requires_grad,
                aliases=tuple(aliases),
            )
            found.append((source, tensor))
    return found


@dataclass(frozen=True, slots=True)
class _Names:
    """Where values come from while rows are written: the row of each node, the number of each of its tensors."""

    row: dict[fx.Node, int]
    source: dict[fx.Node, int]

    def refs(self, node: fx.Node) -> list[Ref] | None:
        if node in self.source:
            return [(-1, self.source[node])]
        producer, picks = resolve(node)
        if producer not in self.row:
            return None
        value = _torch.node_value(producer)
        before = 0
        for pick in picks:
            before += len(list(tensors_in(list(value[:pick]))))
            value = value[pick]
        return [(self.row[producer], before + i) for i in range(len(list(tensors_in(value))))]


def trace_of(
    module: nn.Module, graph: fx.GraphModule, facts: Facts, joint: fx.GraphModule, inputs: tuple[Any, ...]
) -> Trace:
    """Rows of one capture. Raises UserError when the loss does not depend on a trainable parameter."""
    loss_node = next(n for n in graph.graph.nodes if n.op == "output").all_input_nodes[0]
    sources = Sources(module, graph, inputs, next(tensors_in(_torch.node_value(resolve(loss_node)[0]))))
    ops, names = _op_rows(graph, facts, sources)
    kernels, loss_gradients = _kernel_rows(joint, names.row, facts, sources)
    loss = names.refs(loss_node)
    assert loss is not None
    return Trace(
        sources=tuple(sources.rows),
        ops=ops,
        kernels=kernels,
        loss=loss[0],
        gradients=loss_gradients,
        tokens_per_sample=_tokens_per_sample(inputs),
    )


def _tokens_per_sample(inputs: tuple[Any, ...]) -> int:
    first = next(tensors_in(inputs), None)
    counted = first is not None and first.dim() == 2 and not first.is_floating_point() and first.dtype != torch.bool
    return int(first.shape[1]) if counted and first is not None else 1


def _op_rows(graph: fx.GraphModule, facts: Facts, sources: Sources) -> tuple[tuple[OpRow, ...], _Names]:
    names = _Names({node: i for i, node in enumerate(facts.ops)}, {})
    inputs = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            names.source[node] = sources.number[f"input:{inputs}"]
            inputs += 1
        elif node.op == "get_attr" and isinstance(node.meta.get("simpart_value"), torch.Tensor):
            names.source[node] = sources.of_tensor(node.meta["simpart_value"], str(node.target))
    rows = []
    for i, node in enumerate(facts.ops):
        refs, arguments = call_of(node, names.refs)
        rows.append(
            OpRow(
                path=_torch.module_path(node),
                target=_torch.target_name(node),
                arguments=arguments,
                inputs=refs,
                outputs=specs_of(tensors_in(_torch.node_value(node))),
                group=facts.groups[i],
                carries_gradient=facts.carries_gradient[i],
                mutates_buffer=facts.mutates_buffer[i],
            )
        )
    return tuple(rows), names


def _kernel_rows(
    joint: fx.GraphModule, op_row: Mapping[fx.Node, int], facts: Facts, sources: Sources
) -> tuple[tuple[KernelRow, ...], tuple[tuple[int, Ref], ...]]:
    names = _Names({}, {})
    nodes: list[fx.Node] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            kind, name = _torch.source_name(node) or ("input", node.name)
            names.source[node] = sources.of_kind(kind, name)
        elif node.op == "get_attr":
            value = getattr(joint, str(node.target), None)
            if isinstance(value, torch.Tensor):
                names.source[node] = sources.of_tensor(value, str(node.target))
    for node in call_nodes(joint.graph):
        if resolve(node)[0] is node:
            names.row[node] = len(nodes)
            nodes.append(node)
    owners = _owners(nodes, {node.name: row for node, row in op_row.items()}, names.row)
    rows = []
    for node, (owner, accumulates) in zip(nodes, owners, strict=True):
        refs, arguments = call_of(node, names.refs)
        rows.append(
            KernelRow(
                op=owner,
                phase="B" if _torch.is_backward(node) else "F",
                target=_torch.target_name(node),
                arguments=arguments,
                inputs=refs,
                outputs=specs_of(tensors_in(_torch.node_value(node))),
                view=_torch.is_view(node),
                accumulates=accumulates,
            )
        )
    output = next(n for n in joint.graph.nodes if n.op == "output")
    gradients = []
    for value, described in zip(output.args[0], output.meta["desc"], strict=True):
        name = _torch.gradient_of(described)
        if name is not None and value is not None:
            ref = names.refs(value)
            assert ref is not None
            gradients.append((sources.of_kind("parameter", name), ref[0]))
    return tuple(rows), tuple(sorted(gradients))


def _owners(
    nodes: list[fx.Node], by_name: Mapping[str, int], position: Mapping[fx.Node, int]
) -> list[tuple[int, bool]]:
    """(op, whether an accumulation add) of each kernel.

    Forward by the exported node it came from; backward by autograd's sequence number, which belongs to the op of the
    first
    forward node that shows it; an add that accumulates gradients to the owner of its operand computed last.
    """
    owner: dict[fx.Node, tuple[int, bool]] = {}
    of_sequence: dict[int, int] = {}
    for node in nodes:
        if _torch.is_backward(node):
            continue
        name = _torch.origin(node) or ""
        if name not in by_name:
            raise AssertionError(f"forward kernel {node.name} came from {name}, which is no op")
        op = by_name[name]
        owner[node] = (op, False)
        if (number := _torch.sequence_number(node)) is not None:
            of_sequence.setdefault(number, op)
    for node in nodes:
        if not _torch.is_backward(node):
            continue
        number = _torch.sequence_number(node)
        if is_accumulation(node):
            last = max((resolve(n)[0] for n in node.all_input_nodes), key=lambda n: position.get(n, -1))
            owner[node] = (owner[last][0], True)
        elif number in of_sequence:
            owner[node] = (of_sequence[number], False)
        else:
            producers = [resolve(n)[0] for n in node.all_input_nodes if resolve(n)[0] in owner]
            if not producers:
                raise AssertionError(f"backward kernel {node.name} belongs to no op")
            owner[node] = (owner[max(producers, key=lambda n: position[n])][0], False)
    return [owner[node] for node in nodes]


def is_accumulation(node: fx.Node) -> bool:
    """An add made by autograd itself: it has no module path in the backward graph."""
    return _torch.target_name(node) == "aten.add.Tensor" and _torch.backward_owner_path(node) is None
