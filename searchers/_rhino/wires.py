"""Which kernel classes feed which: the values of a graph, equal ones of all instances of a template together."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from simpart.graph import Graph, Source
from simpart.searchers._cost_graph import Ints

__all__ = ["Maker", "ValueGroup", "Wires", "wires_of"]

Maker = tuple[str, int, int]
"""`("kernel", class, output)`, `("shared", source, 0)` or `("own", template, source)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueGroup:
    """Kernel-level values with the same maker and the same readers: (kernel class, input)."""

    maker: Maker
    readers: tuple[tuple[int, int], ...]
    values: Ints
    reader_kernel: Ints  # one kernel of the first reader per value, in `graph.flat`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wires:
    """Everything that a cost graph over kernel classes is made of."""

    groups: tuple[ValueGroup, ...]
    sources: dict[Maker, tuple[Source, Ints, Ints]]  # source, its kernel-level and op-level values
    links: tuple[tuple[int, int, int, int], ...]  # distinct (class, output, class, input)
    gradients: dict[tuple[Maker, Maker], Ints]  # (parameter, maker of its gradient) → op-level values
    count: Ints  # instances of each kernel class


_kept: WeakKeyDictionary[Graph, Wires] = WeakKeyDictionary()


def wires_of(graph: Graph) -> Wires:
    """The wires of a graph, made once."""
    if graph not in _kept:
        _kept[graph] = _make(graph)
    return _kept[graph]


def _make(graph: Graph) -> Wires:
    flat = graph.flat
    values = len(flat.kernel_value_kernel)
    makers: list[Maker] = [("shared", i, 0) for i in range(len(graph.sources))]
    op_level = list(range(len(graph.sources)))
    counts = [[len(k.outputs) for k in t.kernels] for t in graph.templates]
    bases = np.cumsum([0] + [len(t.kernels) for t in graph.templates]).tolist()
    shapes: list[list[Maker]] = []
    for t, template in enumerate(graph.templates):
        own: list[Maker] = [("own", t, i) for i in range(len(template.sources))]
        own += [("kernel", bases[t] + k, n) for k, size in enumerate(counts[t]) for n in range(size)]
        shapes.append(own)
    for call, start in zip(graph.calls, graph.value_offsets.tolist(), strict=True):
        makers += shapes[call.template]
        own_sources = len(graph.templates[call.template].sources)
        op_level += range(start, start + own_sources)
        op_level += [-1] * (len(shapes[call.template]) - own_sources)
    reader = np.repeat(np.arange(len(flat.kernel_op)), np.diff(flat.kernel_indptr))
    position = np.arange(len(reader)) - flat.kernel_indptr[reader]
    code = flat.kernel_class[reader] * 64 + position
    order = np.lexsort((code, flat.kernel_inputs))
    read, code, reader = flat.kernel_inputs[order], code[order], reader[order]
    starts = np.searchsorted(read, np.arange(values + 1)).tolist()
    codes, readers = code.tolist(), reader.tolist()
    members: dict[tuple[Maker, tuple[int, ...]], list[int]] = {}
    firsts: dict[tuple[Maker, tuple[int, ...]], list[int]] = {}
    for value in range(values):
        a, b = starts[value], starts[value + 1]
        if a == b and makers[value][0] == "kernel":
            continue
        key = (makers[value], tuple(dict.fromkeys(codes[a:b])))
        members.setdefault(key, []).append(value)
        firsts.setdefault(key, []).append(min(readers[a:b], default=-1))
    groups = tuple(
        ValueGroup(
            maker=maker,
            readers=tuple((c // 64, c % 64) for c in found),
            values=np.array(members[maker, found], dtype=np.int64),
            reader_kernel=np.array(firsts[maker, found], dtype=np.int64),
        )
        for maker, found in members
    )
    kernel_values: dict[Maker, list[int]] = {}
    op_values: dict[Maker, list[int]] = {}
    for value, maker in enumerate(makers):
        if maker[0] != "kernel":
            kernel_values.setdefault(maker, []).append(value)
            op_values.setdefault(maker, []).append(op_level[value])
    sources = {
        maker: (
            graph.sources[maker[1]] if maker[0] == "shared" else graph.templates[maker[1]].sources[maker[2]],
            np.array(found, dtype=np.int64),
            np.array(op_values[maker], dtype=np.int64),
        )
        for maker, found in kernel_values.items()
    }
    maker_of_op = {v: maker for maker, found in op_values.items() for v in found}
    gradients: dict[tuple[Maker, Maker], list[int]] = {}
    for op_value, gradient in graph.gradients.items():
        gradients.setdefault((maker_of_op[op_value], makers[gradient]), []).append(op_value)
    links = {(g.maker[1], g.maker[2], c, i): None for g in groups if g.maker[0] == "kernel" for c, i in g.readers}
    return Wires(
        groups=groups,
        sources=sources,
        links=tuple(links),
        gradients={key: np.array(found, dtype=np.int64) for key, found in gradients.items()},
        count=np.bincount(flat.kernel_class, minlength=bases[-1]),
    )
