"""Which kernels each stage of a sharded plan must run, and which of their values cross between stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simpart.errors import UnsupportedError
from simpart.graph import Graph
from simpart.kernels.ops import base_name
from simpart.placement import StatePlacement
from simpart.sharding import Flow
from simpart.sharding._state import StateOf, _contributions

__all__ = ["Needs", "Updated", "Way", "loss_value", "needs_of"]


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """A value on its way from the stage that makes it to one that reads it, in forward or with the gradients."""

    value: int
    source: int
    destination: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class Updated:
    """A buffer and the value that it becomes."""

    buffer: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Per stage: forward and backward kernels in running order, gradients of parameters as (op-level parameter, terms),
    buffers written. `ways` in a fixed order, the same on all ranks."""

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    gradients: tuple[Mapping[int, tuple[int, ...]], ...]
    updates: tuple[tuple[Updated, ...], ...]
    ways: tuple[Way, ...]
    loss: int
    loss_stage: int


def needs_of(
    graph: Graph,
    flows: Sequence[Flow],
    state: tuple[tuple[str, StatePlacement], ...],
    loss_stage: int,
    trained: set[str],
) -> Needs:
    """Kernels that the loss, the buffers and the gradients of `trained` parameters (by first names) depend on."""
    flat = graph.flat
    indptr, inputs = flat.kernel_indptr.tolist(), flat.kernel_inputs.tolist()
    maker = flat.kernel_value_kernel.tolist()
    forward = flat.kernel_forward.tolist()
    call = flat.op_call[flat.kernel_op].tolist()
    loss = loss_value(graph)
    gradients: list[dict[int, tuple[int, ...]]] = []
    updates = [updates_of(graph, flow) for flow in flows]
    roots: list[tuple[int, int]] = [(loss_stage, loss)]
    for s, flow in enumerate(flows):
        found: dict[int, tuple[int, ...]] = {}
        kernel_value = _kernel_level(graph)
        for parameter, source in graph.parameters.items():
            if parameter not in graph.gradients or source.name not in trained:
                continue
            if kernel_value[parameter] in flow.layouts:
                terms = _contributions(graph, graph.gradients[parameter], flow.layouts, flow.uses)
                if terms:
                    found[parameter] = tuple(terms)
                    roots += [(s, value) for value in terms]
        gradients.append(found)
        roots += [(s, update.value) for update in updates[s]]
    needed: list[set[int]] = [set() for _ in flows]
    ways: set[Way] = set()
    stack = roots
    while stack:
        s, value = stack.pop()
        k = maker[value]
        if k < 0:
            continue
        if k not in flows[s].uses:
            home = next(other for other, flow in enumerate(flows) if k in flow.uses)
            ways.add(Way(value, home, s, not forward[k]))
            s = home
        if k not in needed[s]:
            needed[s].add(k)
            stack += [(s, v) for v in inputs[indptr[k] : indptr[k + 1]]]
    return Needs(
        forward=tuple(tuple(sorted(k for k in each if forward[k])) for each in needed),
        backward=tuple(
            tuple(sorted((k for k in each if not forward[k]), key=lambda k: (-call[k], k))) for each in needed
        ),
        gradients=tuple(gradients),
        updates=tuple(updates),
        ways=tuple(sorted(ways, key=lambda w: (w.gradient, w.source, w.destination, w.value))),
        loss=loss,
        loss_stage=loss_stage,
    )


def _kernel_level(graph: Graph) -> dict[int, int]:
    """Kernel-level value number of each op-level source."""
    found = {i: i for i in range(len(graph.sources))}
    for start, first, call in zip(
        graph.value_offsets.tolist(), graph.kernel_value_offsets.tolist(), graph.calls, strict=True
    ):
        for i in range(len(graph.templates[call.template].sources)):
            found[start + i] = first + i
    return found


def loss_value(graph: Graph) -> int:
    """The kernel-level value of the loss: the last scalar that a forward kernel of its op makes."""
    flat = graph.flat
    op = int(flat.value_op[graph.loss])
    for k in reversed((flat.kernel_op == op).nonzero()[0].tolist()):
        if flat.kernel_forward[k] and graph.kernel_classes[int(flat.kernel_class[k])].outputs[0].dims == ():
            return int(flat.kernel_outputs[k])
    raise UnsupportedError(
        f"op {graph.op_ids[op]} makes no scalar loss by a kernel of its own; plans of it are not run"
    )


def updates_of(graph: Graph, flow: Flow) -> tuple[Updated, ...]:
    """What a stage's kernels write into buffers: in-place ops on a buffer, and statistics of batch norms."""
    flat, state = graph.flat, StateOf(graph, (), flow.axes)
    stands_for: dict[int, int] = {}
    found = []
    for k in sorted(flow.uses):
        op = int(flat.kernel_op[k])
        if not flat.kernel_forward[k] or not graph.op_classes[int(flat.op_class[op])].mutates_buffer:
            continue
        kernel = graph.kernel_classes[int(flat.kernel_class[k])]
        read = flat.kernel_inputs[flat.kernel_indptr[k] : flat.kernel_indptr[k + 1]].tolist()
        first = int(flat.kernel_outputs[k])
        pairs: list[tuple[int, int]] = []
        if base_name(kernel.target) == "_native_batch_norm_legit_functional":
            positional = json.loads(kernel.arguments)["positional"]
            pairs = [(read[positional[i]["tensor"]], first + i) for i in (3, 4) if positional[i] is not None]
        elif base_name(graph.op_classes[int(flat.op_class[op])].target).endswith("_") and read:
            pairs = [(read[0], first)]
        for before, after in pairs:
            buffer = stands_for.get(before, before)
            source = state.source(buffer)
            if source is not None and source.kind == "buffer":
                stands_for[after] = buffer
                found.append(Updated(buffer, after))
    written = {int(flat.kernel_op[int(flat.kernel_value_kernel[u.value])]) for u in found}
    for k in flow.uses:
        op = int(flat.kernel_op[k])
        if graph.op_classes[int(flat.op_class[op])].mutates_buffer and op not in written:
            raise UnsupportedError(
                f"op {graph.op_ids[op]} writes a buffer in a way that sharded plans are not run with; "
                "leave shardings and state empty"
            )
    return tuple(found)
