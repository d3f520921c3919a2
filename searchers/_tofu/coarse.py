"""From a captured graph to what the partition search decides on: classes of kernels and values, and groups of them.

Instances of a template are one class with a count, so a repeated layer's interior has one set of variables; what
flows between layers links classes as often as it does. Steps of an unrolled loop are merged too: kernels of one
module and operator that look alike some way back. A parameter and its gradient are one value. Element-wise kernels,
and those that only move elements about, decide together with their values, forward and backward apart; optimizer
updates are element-wise on a parameter's own shard and cost nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES, TensorSpec, size_at
from simpart.kernels.ops import base_name
from simpart.searchers._tofu.steps import Steps
from simpart.searchers._tofu.work import AtenKernel, Link, Request, Value, Workload
from simpart.sharding.mesh import calls_of
from simpart.tdl import Call, is_elementwise, undescribed_reason

__all__ = ["Coarse", "coarsen"]

LOOK_BACK = 2
"""How many producers back two kernels of one module must look alike to be merged."""
MOVERS = frozenset({
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "clone", "detach", "alias",
    "unbind", "split", "split_with_sizes", "stack", "cat", "chunk", "copy", "contiguous", "_to_copy",
})  # fmt: skip
"""Kernels that only move elements about."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coarse:
    """A workload, and which kernel classes and values of a graph its nodes stand for.

    `kernel_of[c]` is the workload's kernel for class c of the graph (-1: not in use), `value_of[v]` the workload's
    value for kernel-level value v; `first_class[i]` a class that kernel i stands for.
    """

    graph: Graph
    micro_batch: int
    work: Workload
    kernel_of: tuple[int, ...]
    value_of: tuple[int, ...]
    first_class: tuple[int, ...]


def coarsen(graph: Graph, micro_batch: int, factors: tuple[int, ...], *, merge: bool = True) -> Coarse:
    """The workload of a graph at a micro-batch. `merge` off leaves every class and tensor to decide for itself."""
    graph = graph.at(micro_batch)
    flat, calls = graph.flat, calls_of(graph, micro_batch)
    kernel_of = _merged(graph, calls) if merge else np.arange(len(calls))
    used, kernel_of = _dense(kernel_of, flat.kernel_class)
    mine = kernel_of[flat.kernel_class]
    value_of = _values(graph, micro_batch, mine)
    first = {int(k): int(c) for c, k in zip(flat.kernel_class[::-1], mine[::-1], strict=True)}
    kernels = tuple(AtenKernel(calls[first[k]]) for k in range(used))
    counts = tuple(np.bincount(mine, minlength=used).tolist())
    values = _value_table(graph, micro_batch, value_of)
    links = _links(graph, mine, value_of)
    names = _names(graph, first, used)
    groups = _groups(graph, kernels, values, links, first) if merge else _apart(kernels, values)
    undescribed = tuple(
        (k, reason) for k, kernel in enumerate(kernels) if (reason := undescribed_reason(kernel.call)) is not None
    )
    work = Workload(
        names=names, kernels=kernels, counts=counts, values=values, links=links, groups=groups, undescribed=undescribed
    )
    return Coarse(
        graph=graph, micro_batch=micro_batch, work=_without_misfits(work, factors), kernel_of=tuple(kernel_of.tolist()),
        value_of=tuple(value_of.tolist()), first_class=tuple(first[k] for k in range(used)),
    )  # fmt: skip


def _dense(kernel_of: np.ndarray, classes: np.ndarray) -> tuple[int, np.ndarray]:
    """Numbers without gaps for the classes in use, by first use."""
    order: dict[int, int] = {}
    for k in kernel_of[classes].tolist():
        order.setdefault(k, len(order))
    return len(order), np.array([order.get(k, -1) for k in kernel_of.tolist()], dtype=np.int64)


# --- classes ---------------------------------------------------------------------------------------------------------
def _merged(graph: Graph, calls: tuple[Call, ...]) -> np.ndarray:
    """For every kernel class the one that stands for it: same module, same operator, same call, and producers alike."""
    base = 0
    stands: list[int] = []
    for template in graph.templates:
        first_value = len(template.sources)
        maker: dict[int, tuple[int, int]] = {}
        for k, kernel in enumerate(template.kernels):
            for n in range(len(kernel.outputs)):
                maker[first_value] = (k, n)
                first_value += 1
        colours: list[object] = [
            (template.ops[k.op].path, template.ops[k.op].target, k.phase, calls[base + i])
            for i, k in enumerate(template.kernels)
        ]
        for _ in range(LOOK_BACK):
            numbers: dict[object, int] = {}
            plain = [numbers.setdefault(colour, len(numbers)) for colour in colours]
            colours = [
                (
                    plain[i],
                    tuple(
                        # what comes from a kernel counts by its kind, a parameter by itself
                        (plain[maker[ref][0]], template.kernels[maker[ref][0]].outputs[maker[ref][1]])
                        if ref in maker
                        else ref
                        for ref in kernel.inputs
                    ),
                )
                for i, kernel in enumerate(template.kernels)
            ]
        known: dict[object, int] = {}
        stands += [base + known.setdefault(colour, i) for i, colour in enumerate(colours)]
        base += len(template.kernels)
    return np.array(stands, dtype=np.int64)


def _values(graph: Graph, micro_batch: int, mine: np.ndarray) -> np.ndarray:
    """The value of the workload that each kernel-level value belongs to: by its maker's class and its form, or by the
    source of its template. A gradient goes with its parameter."""
    flat = graph.flat
    keys: list[object] = [None] * len(flat.kernel_value_spec)
    for i in range(len(graph.sources)):
        keys[i] = ("shared", i)
    for call, start in zip(graph.calls, graph.kernel_value_offsets.tolist(), strict=True):
        for i in range(len(graph.templates[call.template].sources)):
            keys[start + i] = ("source", call.template, i)
    maker, first = flat.kernel_value_kernel.tolist(), flat.kernel_outputs.tolist()
    for v, spec in enumerate(flat.kernel_value_spec):
        if maker[v] >= 0:
            k = maker[v]
            kernel = graph.kernel_classes[int(flat.kernel_class[k])]
            several = base_name(kernel.target) in MOVERS
            keys[v] = ("made", int(mine[k]), spec.shape(micro_batch) if several else v - first[k])
    joined: dict[object, object] = {}
    starts = dict(zip(graph.value_offsets.tolist(), graph.kernel_value_offsets.tolist(), strict=True))
    ordered = np.array(sorted(starts), dtype=np.int64)
    for op_value, gradient in graph.gradients.items():
        value = op_value
        if op_value >= len(graph.sources):
            start = int(ordered[np.searchsorted(ordered, op_value, side="right") - 1])
            value = starts[start] + op_value - start
        spec, other = flat.kernel_value_spec[value], flat.kernel_value_spec[gradient]
        if spec.shape(micro_batch) == other.shape(micro_batch):
            joined.setdefault(keys[gradient], keys[value])
    number: dict[object, int] = {}
    return np.array([number.setdefault(joined.get(k, k), len(number)) for k in keys], dtype=np.int64)


def _value_table(graph: Graph, micro_batch: int, value_of: np.ndarray) -> tuple[Value, ...]:
    flat = graph.flat
    made = set(np.flatnonzero(flat.kernel_value_kernel >= 0).tolist())
    counts = np.bincount(value_of)
    parameters, sources = _source_values(graph)
    found: dict[int, Value] = {}
    for v, number in enumerate(value_of.tolist()):
        if number in found and v not in parameters:
            continue
        spec = flat.kernel_value_spec[v]
        name = sources.get(v, "")
        known = found.get(number)
        if known is not None and known.is_parameter:
            continue
        found[number] = Value(
            name=name, shape=spec.shape(micro_batch), itemsize=DTYPE_BYTES[spec.dtype], count=int(counts[number]),
            is_parameter=v in parameters, is_free=v not in made, **_row(spec, micro_batch),
        )  # fmt: skip
    return tuple(found[n] for n in range(len(found)))


def _row(spec: TensorSpec, micro_batch: int) -> dict[str, Any]:
    """Along which dim samples differ; a dim of several per sample may have them behind something else."""
    for dim, size in enumerate(spec.dims):
        if not isinstance(size, int):
            return {"row": dim, "row_block": micro_batch if size_at(size, micro_batch) > micro_batch else None}
    long = [dim for dim, size in enumerate(spec.dims) if isinstance(size, int) and size > 1]
    return {"row": long[0] if long else 0}


def _source_values(graph: Graph) -> tuple[set[int], dict[int, str]]:
    """Kernel-level values that are parameters, and names of all sources."""
    parameters, names = set(), {}
    rows = [(i, s) for i, s in enumerate(graph.sources)]
    for call, start in zip(graph.calls, graph.kernel_value_offsets.tolist(), strict=True):
        rows += [(start + i, s) for i, s in enumerate(graph.templates[call.template].sources)]
    for value, source in rows:
        names[value] = source.name
        if source.kind == "parameter":
            parameters.add(value)
    return parameters, names


def _links(graph: Graph, mine: np.ndarray, value_of: np.ndarray) -> tuple[Link, ...]:
    flat = graph.flat
    found: Counter[tuple[int, int, int, bool]] = Counter()
    read: dict[tuple[int, int, int], set[int]] = {}
    raw = flat.kernel_inputs
    indptr, inputs = flat.kernel_indptr.tolist(), value_of[raw].tolist()
    outputs = [len(graph.kernel_classes[c].outputs) for c in flat.kernel_class.tolist()]
    for k, (own, first) in enumerate(zip(mine.tolist(), flat.kernel_outputs.tolist(), strict=True)):
        for position, value in enumerate(inputs[indptr[k] : indptr[k + 1]]):
            found[own, position, value, False] += 1
            read.setdefault((own, position, value), set()).add(int(raw[indptr[k] + position]))
        for position in range(outputs[k]):
            found[own, position, int(value_of[first + position]), True] += 1
    return tuple(Link(k, p, v, n, makes, 0 if makes else len(read[k, p, v])) for (k, p, v, makes), n in found.items())


def _names(graph: Graph, first: dict[int, int], used: int) -> tuple[str, ...]:
    from simpart.plan import kernel_ids

    ids, seen = kernel_ids(graph), dict[int, str]()
    for name, cls in zip(ids, graph.flat.kernel_class.tolist(), strict=True):
        seen.setdefault(cls, name)
    return tuple(seen[first[k]] for k in range(used))


# --- groups ----------------------------------------------------------------------------------------------------------
def _apart(kernels: tuple[AtenKernel, ...], values: tuple[Value, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((node,) for node in range(len(kernels) + len(values)))


def _groups(
    graph: Graph,
    kernels: tuple[AtenKernel, ...],
    values: tuple[Value, ...],
    links: tuple[Link, ...],
    first: dict[int, int],
) -> tuple[tuple[int, ...], ...]:
    """Union of kernels that only follow with the values they follow, within a phase."""
    count = len(kernels)
    parent = list(range(count + len(values)))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    phase_of = {x.value: graph.kernel_classes[first[x.kernel]].phase for x in links if x.makes}
    for k, kernel in enumerate(kernels):
        moves = base_name(kernel.call.target) in MOVERS
        if not moves and not is_elementwise(kernel.call):
            continue
        own = [x for x in links if x.kernel == k]
        whole = {values[x.value].shape for x in own if x.makes}
        for x in own:
            shape = values[x.value].shape
            if x.makes:
                joins = True
            elif moves:
                joins = sum(prod(s) for s in kernel.inputs) == sum(prod(s) for s in kernel.outputs)
            else:
                joins = shape in whole
            value = values[x.value]
            same = value.is_parameter or value.is_free or phase_of.get(x.value) == graph.kernel_classes[first[k]].phase
            if joins and (x.makes or same) and prod(shape) > 1:
                parent[find(count + x.value)] = find(k)
    members: dict[int, list[int]] = {}
    for node in range(len(parent)):
        members.setdefault(find(node), []).append(node)
    return tuple(tuple(nodes) for nodes in members.values())


def _without_misfits(work: Workload, factors: tuple[int, ...]) -> Workload:
    """Groups whose nodes cannot be cut together, though each could, are taken apart."""
    if not factors:
        return work
    steps = Steps(work, factors)
    start, groups = steps.start(), list[tuple[int, ...]]()
    for number, members in enumerate(work.groups):
        domain = steps.domain(number, start[number], 0)
        stuck = all(not _cuts(a) for a in domain.assignments)
        if len(members) > 1 and stuck:
            groups += [(node,) for node in members]
        else:
            groups.append(members)
    return work if len(groups) == len(work.groups) else replace(work, groups=tuple(groups))


def _cuts(assignment: tuple[object, ...]) -> bool:
    return any(x.cuts if isinstance(x, Request) else str(x).startswith("S") for x in assignment)
