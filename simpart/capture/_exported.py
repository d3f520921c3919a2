"""The forward graph made clean: regions spliced in, asserts and dead ops gone; then what each op shares and carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from simpart.capture import _torch

__all__ = ["Facts", "call_nodes", "clean", "facts_of", "groups_of", "op_nodes", "resolve", "tensors_in"]


def clean(graph: fx.GraphModule) -> fx.GraphModule:
    """Splice regions (autocast, no_grad, checkpoint) between the nodes that enter and leave them, drop asserts and
    dead ops,
    and turn plain tensor attributes into buffers. Changes `graph` in place and returns it."""
    while (node := next((n for n in graph.graph.nodes if _torch.region(n)), None)) is not None:
        _splice(graph, node)
    for node in list(graph.graph.nodes):
        if _torch.is_dropped(node):
            node.replace_all_uses_with(None)
            graph.graph.erase_node(node)
    _drop_dead(graph)
    _constants_to_buffers(graph)
    graph.recompile()
    return graph


def _splice(graph: fx.GraphModule, node: fx.Node) -> None:
    found = _torch.region(node)
    assert found is not None
    kind, context, name, inputs = found
    inner = graph.get_submodule(name)
    assert isinstance(inner, fx.GraphModule)
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    outer = True
    for before in graph.graph.nodes:
        if before is node:
            break
        if before.target is _torch.set_grad_enabled:
            outer = before.args[0]
    with graph.graph.inserting_before(node):
        if kind == "autocast":
            token = graph.graph.call_function(_torch.enter_autocast, context)
        elif kind == "grad":
            graph.graph.call_function(_torch.set_grad_enabled, context)
        result: Any = None
        for part in inner.graph.nodes:
            if part.op == "placeholder":
                values[part] = next(given)
            elif part.op == "output":
                result = map_arg(part.args[0], values.__getitem__)
            else:
                values[part] = graph.graph.node_copy(part, values.__getitem__)
                if part.op == "get_attr":
                    values[part].target = _adopt(graph, name, inner, part.target)
        if kind == "autocast":
            graph.graph.call_function(_torch.exit_autocast, (token,))
        elif kind == "grad":
            graph.graph.call_function(_torch.set_grad_enabled, (outer,))
    for user in list(node.users):
        if user.target is _torch.getitem and isinstance(result, tuple | list):
            user.replace_all_uses_with(result[int(user.args[1])])  # type: ignore[arg-type]  # fx types arguments loosely
            graph.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(result[0] if isinstance(result, tuple | list) else result)
    graph.graph.erase_node(node)


def _adopt(graph: fx.GraphModule, prefix: str, inner: fx.GraphModule, name: str) -> str:
    """Give the outer graph an attribute of a spliced sub-graph; its new name."""
    value: Any = inner
    for part in name.split("."):
        value = getattr(value, part)
    unique = f"{prefix}_{name}".replace(".", "_")
    if isinstance(value, nn.Module):
        graph.add_module(unique, value)
    else:
        setattr(graph, unique, value)
    return unique


def _drop_dead(graph: fx.GraphModule) -> None:
    live: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        writes = node.op in ("call_function", "call_method") and _writes(node)
        if node in live or node.op in ("placeholder", "output") or node.target in _torch.CONTEXT_TARGETS or writes:
            live.add(node)
            live.update(node.all_input_nodes)
    for node in reversed(list(graph.graph.nodes)):
        if node not in live:
            graph.graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return next(_torch.mutated_inputs(node), None) is not None


def _constants_to_buffers(graph: fx.GraphModule) -> None:
    """The joint graph lifts buffers to inputs, and refuses other fake tensors."""
    for node in graph.graph.nodes:
        if node.op != "get_attr":
            continue
        path, _, name = node.target.rpartition(".")
        owner = graph.get_submodule(path)
        value = getattr(owner, name)
        if isinstance(value, torch.Tensor) and name not in owner._parameters and name not in owner._buffers:
            delattr(owner, name)
            owner.register_buffer(name, value, persistent=False)


# --- nodes and values ------------------------------------------------------------------------------------------------
def call_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module"))


def op_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that are ops: calls other than `getitem` of a tuple and switches of modes."""
    return [n for n in call_nodes(graph) if n.target not in _torch.CONTEXT_TARGETS and not is_glue(n)]


def is_glue(node: fx.Node) -> bool:
    """A `getitem` that picks one output of a node with several; indexing a tensor is an op."""
    if node.target is not _torch.getitem or not isinstance(node.args[0], fx.Node):
        return False
    return isinstance(_torch.node_value(node.args[0]), tuple | list)


def resolve(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]]:
    """The producer behind `getitem`s, and the picks that lead to the value."""
    picks: tuple[int, ...] = ()
    while is_glue(node):
        picks = (int(node.args[1]), *picks)  # type: ignore[arg-type]  # fx types arguments loosely
        node = node.args[0]  # type: ignore[assignment]
    return node, picks


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a value in order; a value is a tensor, or nests lists and tuples of them and of anything else."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


# --- what a fake run shows -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Per op, in order: groups (smallest op of each indivisible group), gradient flow, writes to buffers; shared
    tensors by name.
    """

    ops: tuple[fx.Node, ...]
    groups: tuple[int, ...]
    carries_gradient: tuple[bool, ...]
    mutates_buffer: tuple[bool, ...]


class _Run(fx.Interpreter):
    """Runs the graph on fake tensors and keeps every value in its node's meta, with the storages each node writes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.written: dict[fx.Node, set[int]] = {}
        self.touched: dict[fx.Node, set[int]] = {}
        self.needs_gradient: dict[fx.Node, bool] = {}
        self.keep: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        inputs = [t for node in n.all_input_nodes for t in tensors_in(self.env[node])]
        versions = [t._version for t in inputs]
        value = super().run_node(n)
        if n.op == "output":
            return value
        n.meta["simpart_value"] = value
        outputs = list(tensors_in(value))
        written = {_storage(t) for t, version in zip(inputs, versions, strict=True) if t._version != version}
        for argument in _torch.mutated_inputs(n):
            if isinstance(argument, fx.Node):
                written.update(map(_storage, tensors_in(self.env[argument])))
        self.written[n] = written
        self.touched[n] = {_storage(t) for t in (*inputs, *outputs)}
        self.needs_gradient[n] = any(t.requires_grad for t in outputs)
        self.keep.append((inputs, value))
        return value


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def facts_of(graph: fx.GraphModule, inputs: tuple[Any, ...]) -> Facts:
    """Run the clean graph once, in its fake mode: `simpart_value` of each node's meta is then its value."""
    run = _Run(graph)
    with torch.enable_grad():
        run.run(*inputs)
    ops = op_nodes(graph.graph)
    number = {node: i for i, node in enumerate(ops)}
    buffers = {_storage(b) for b in graph.buffers()}
    uses = [sorted({number[p] for a in n.all_input_nodes if (p := resolve(a)[0]) in number}) for n in ops]
    carries = [False] * len(ops)
    loss = {resolve(a)[0] for a in next(n for n in graph.graph.nodes if n.op == "output").all_input_nodes}
    flows = [run.needs_gradient[n] or any(run.needs_gradient[u] for u in n.users if is_glue(u)) for n in ops]
    for i in reversed(range(len(ops))):
        carries[i] = flows[i] and (carries[i] or ops[i] in loss)
        if carries[i]:
            for producer in uses[i]:
                carries[producer] = True
    return Facts(
        ops=tuple(ops),
        groups=tuple(groups_of(uses, [run.written[n] for n in ops], [run.touched[n] for n in ops])),
        carries_gradient=tuple(carries),
        mutates_buffer=tuple(bool(run.written[n] & buffers) for n in ops),
    )


def groups_of(uses: list[list[int]], written: list[set[int]], touched: list[set[int]]) -> list[int]:
    """Smallest op of each op's indivisible group.

    Ops that touch a storage up to its last write are one group; cycles between groups are contracted, so groups are
    convex.
    """
    last_write: dict[int, int] = {}
    for i, storages in enumerate(written):
        last_write.update(dict.fromkeys(storages, i))
    group = list(range(len(uses)))
    first: dict[int, int] = {}
    for i, storages in enumerate(touched):
        for storage in sorted(storages):
            if i <= last_write.get(storage, -1):
                _join(group, first.setdefault(storage, i), i)
    if all(_root(group, i) == i for i in group):
        return group
    return _contract(uses, [_root(group, i) for i in range(len(group))])


def _root(group: list[int], i: int) -> int:
    while group[i] != i:
        i = group[i]
    return i


def _join(group: list[int], a: int, b: int) -> None:
    a, b = _root(group, a), _root(group, b)
    group[max(a, b)] = min(a, b)


def _contract(uses: Iterable[Iterable[int]], group: list[int]) -> list[int]:
    import numpy as np
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    edges = [(group[p], group[i]) for i, producers in enumerate(uses) for p in producers]
    rows, columns = (np.array(side, dtype=np.int64) for side in zip(*edges, strict=True))
    shape = (len(group), len(group))
    _, labels = connected_components(coo_matrix((np.ones(rows.size), (rows, columns)), shape), connection="strong")
    first: dict[int, int] = {}
    return [first.setdefault(int(labels[g]), i) for i, g in enumerate(group)]
