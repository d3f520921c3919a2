"""The exported ops of a whole module for those who run them: graph, ids, groups, contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from simpart.capture import _torch
from simpart.capture._exported import Facts, call_nodes, clean, facts_of, op_nodes, resolve
from simpart.capture._module import build_module, check_loss, default_dtype, user_errors, valid_precision

__all__ = ["ExportedOps", "export_clean", "export_ops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedOps:
    """A module as a runnable graph of ops. Op i is `nodes[i]`; ids, order and flags equal those of the captured Graph.

    op_of: the op of each node by node name: ops themselves, and each `getitem` with its producer; other nodes are
    absent.
    graph: runs as `graph(*inputs)` and returns the loss. Its other nodes are placeholders (the flattened inputs in
    order),
        `get_attr` of parameters, buffers and constants by dotted name, `getitem` that picks one output of an op, and
        mode
        switches (see `contexts`).
    ids: `module.path/target#k` of each op.
    groups: smallest op of each op's indivisible group (itself if alone).
    carries_gradient, mutates_buffer: as in simpart.graph.Op.
    contexts: per op, the modes it runs under: (grad mode enabled, the arguments (device type, dtype, enabled, cache)
    of each
        autocast entered around it, outermost first). Cut stages must enter them anew.
    names: first name of each parameter and buffer by any of its names (a tied parameter has several).
    constants: tensors that the graph reads under names that the module does not own.
    """

    module: nn.Module
    graph: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    ids: tuple[str, ...]
    groups: tuple[int, ...]
    carries_gradient: tuple[bool, ...]
    mutates_buffer: tuple[bool, ...]
    contexts: tuple[tuple[bool, tuple[tuple[Any, ...], ...]], ...]
    names: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    op_of: Mapping[str, int]


def export_clean(module: nn.Module, inputs: tuple[Any, ...], *, dynamo: bool, dtype: torch.dtype) -> fx.GraphModule:
    """The clean forward graph; `dynamo` takes the path that keeps grad-mode switches under autocast."""
    with user_errors("exporting the module"), default_dtype(dtype):
        return clean((_torch.dynamo_export if dynamo else _torch.export)(module, inputs))


def needs_dynamo(module: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Run the forward once in fake mode; check the loss; True if `export` would lose a grad-mode switch."""
    watch = _torch.GradModeUnderAutocast()
    with user_errors("the module's forward"), default_dtype(dtype), torch.enable_grad(), watch:
        loss = module(*inputs)
    check_loss(module, loss)
    return watch.seen


def export_ops(factory: Any, micro_batch: int, *, real: bool = False, precision: str = "float32") -> ExportedOps:
    dtype = valid_precision(precision)
    mode = _torch.fake_mode()
    with mode:
        module, inputs = build_module(factory, micro_batch, dtype)
        dynamo = needs_dynamo(module, inputs, dtype)
        graph = export_clean(module, inputs, dynamo=dynamo, dtype=dtype)
        facts = facts_of(graph, inputs)
    ids = op_ids(facts)
    if real:
        module, inputs = build_module(factory, micro_batch, dtype)
        graph = export_clean(module, inputs, dynamo=dynamo, dtype=dtype)
        nodes = tuple(op_nodes(graph.graph))
        if [(_torch.module_path(n), _torch.target_name(n)) for n in nodes] != [
            (_torch.module_path(n), _torch.target_name(n)) for n in facts.ops
        ]:
            raise AssertionError("the module exports other ops with real tensors than with fake ones")
    else:
        nodes = facts.ops
    own = {
        n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(tensor), name)
        for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        for name, tensor in named
    }
    return ExportedOps(
        module=module,
        graph=graph,
        nodes=nodes,
        ids=ids,
        groups=facts.groups,
        carries_gradient=facts.carries_gradient,
        mutates_buffer=facts.mutates_buffer,
        contexts=contexts_of(graph.graph, nodes),
        names=names,
        op_of=_op_of(graph.graph, nodes),
        constants={name: value for name, value in graph.named_buffers() if name not in own},
    )


def _op_of(graph: fx.Graph, nodes: tuple[fx.Node, ...]) -> dict[str, int]:
    number = {node: i for i, node in enumerate(nodes)}
    producers = ((node.name, resolve(node)[0]) for node in call_nodes(graph))
    return {name: number[producer] for name, producer in producers if producer in number}


def op_ids(facts: Facts) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    ids = []
    for node in facts.ops:
        key = f"{_torch.module_path(node)}/{_torch.target_name(node)}"
        seen[key] = seen.get(key, -1) + 1
        ids.append(f"{key}#{seen[key]}")
    return tuple(ids)


def contexts_of(graph: fx.Graph, nodes: tuple[fx.Node, ...]) -> tuple[tuple[bool, tuple[tuple[Any, ...], ...]], ...]:
    """Modes in force at each op."""
    wanted = set(nodes)
    gradient: Any = True
    entered: dict[fx.Node, tuple[Any, ...]] = {}
    found = []
    for node in graph.nodes:
        if node.target is _torch.set_grad_enabled:
            gradient = node.args[0]
        elif node.target is _torch.enter_autocast:
            entered[node] = tuple(node.args)
        elif node.target is _torch.exit_autocast:
            with contextlib.suppress(KeyError):
                del entered[node.args[0]]
        elif node in wanted:
            found.append((bool(gradient), tuple(entered.values())))
    return tuple(found)
