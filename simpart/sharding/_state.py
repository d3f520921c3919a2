"""Parameters, gradients and optimizer state: where they rest, and what brings them to their uses and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal
from weakref import WeakKeyDictionary

from simpart.graph import Graph, Phase, Source, named
from simpart.kernels.ops import base_name
from simpart.placement import Partial, Replicate, Shard, StatePlacement
from simpart.plan import REPLICA_AXIS
from simpart.sharding._regions import Wiring
from simpart.sharding.mesh import Axes, Layout, Use, replicated, rest_layout

__all__ = ["StateOf", "StateRow", "state_conversions"]


@dataclass(slots=True)
class StateRow:
    """A conversion of state, see `flow.Conversion`."""

    role: Literal["parameter", "gradient", "update"]
    phase: Phase
    per_step: bool
    before: Layout
    after: Layout
    producer: str
    consumer: str
    value_list: list[int] = field(default_factory=list)
    kernel_list: list[int] = field(default_factory=list)

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(self.value_list)

    @property
    def kernels(self) -> tuple[int, ...]:
        return tuple(self.kernel_list)


@dataclass(slots=True)
class _Known:
    """What was looked up in a graph: sources by value; how they rest, by placement of state and name; how they lie, by
    placement of state, mesh and value."""

    sources: dict[int, Source | None] = field(default_factory=dict)
    rests: dict[tuple[tuple[str, StatePlacement], ...], dict[str, StatePlacement]] = field(default_factory=dict)
    layouts: dict[tuple[tuple[tuple[str, StatePlacement], ...], Axes], dict[int, Layout | None]] = field(
        default_factory=dict
    )


_known: WeakKeyDictionary[Graph, _Known] = WeakKeyDictionary()


class StateOf:
    """How the sources of a graph lie on the axes of one stage."""

    def __init__(self, graph: Graph, state: tuple[tuple[str, StatePlacement], ...], axes: Axes) -> None:
        self.graph, self.state, self.axes = graph, state, axes
        self._shared = len(graph.sources)
        self._whole = replicated(axes)
        known = _known.setdefault(graph, _Known())
        self._sources = known.sources
        self._rests = known.rests.setdefault(state, {})
        self._layouts: dict[int, Layout | None] = known.layouts.setdefault((state, axes), {})

    def source(self, value: int) -> Source | None:
        """The source behind a kernel-level value; None if a kernel makes it."""
        if value < self._shared:
            return self.graph.sources[value]
        if value not in self._sources:
            self._sources[value] = self._find(value)
        return self._sources[value]

    def _find(self, value: int) -> Source | None:
        offsets = self.graph.kernel_value_offsets
        call = int(offsets.searchsorted(value, side="right")) - 1
        local = value - int(offsets[call])
        template = self.graph.templates[self.graph.calls[call].template]
        if local >= len(template.sources):
            return None
        return named(template.sources[local], self.graph.calls[call].variables)

    def name_of(self, value: int) -> str:
        source = self.source(value)
        assert source is not None
        return f"{source.kind} {source.name}"

    def rest_of(self, source: Source) -> StatePlacement:
        found = self._rests.get(source.name)
        if found is None:
            found = self._rests[source.name] = self._match(source)
        return found

    def _match(self, source: Source) -> StatePlacement:
        for pattern, rest in self.state:
            if any(fnmatchcase(name, pattern) for name in (source.name, *source.aliases)):
                return rest
        return StatePlacement()

    def layout_of(self, value: int) -> Layout | None:
        """How a source lies for the kernels: parameters gathered over replicas; None for a value that a kernel
        makes."""
        if value not in self._layouts:
            self._layouts[value] = self._lies(value)
        return self._layouts[value]

    def _lies(self, value: int) -> Layout | None:
        source = self.source(value)
        if source is None:
            return None
        if source.kind != "parameter" or not self.state:
            return self._whole
        rest = rest_layout(self.rest_of(source).parameter, self.axes)
        return gathered(rest, self.axes)


def gathered(rest: Layout, axes: Axes) -> Layout:
    """Whole on the axis of replicas."""
    return tuple(Replicate() if name == REPLICA_AXIS else p for p, (name, _) in zip(rest, axes, strict=True))


def state_conversions(
    state: StateOf, layouts: Mapping[int, Layout], wiring: Wiring, uses: Mapping[int, Use]
) -> list[StateRow]:
    """Conversions of the state of every parameter that a stage reads, equal ones of a template together.

    A gradient that is to rest whole accumulates as the backward leaves it and is reduced once per step, straight to
    where the optimizer's state rests. One that rests in shards is brought there for every micro-batch.
    """
    rows: dict[object, StateRow] = {}
    graph, axes = state.graph, state.axes
    readers = _Readers(graph, uses)
    starts, firsts = graph.value_offsets.tolist(), graph.kernel_value_offsets.tolist()
    spots: list[tuple[object, int, int, Source]] = [
        (("shared", i), i, i, s) for i, s in enumerate(graph.sources) if s.kind == "parameter"
    ]
    for call, start, first in zip(graph.calls, starts, firsts, strict=True):
        for i, s in enumerate(graph.templates[call.template].sources):
            if s.kind == "parameter" and first + i in layouts:
                known = state.source(first + i)
                assert known is not None  # it is one
                spots.append(((call.template, i), start + i, first + i, known))
    rests: dict[int, tuple[Layout, Layout, Layout, Layout]] = {}  # few, of many parameters
    for key, op_value, value, source in spots:
        if value not in layouts:
            continue
        rest = state.rest_of(source)
        if id(rest) not in rests:
            placed = [rest_layout(places, axes) for places in (rest.parameter, rest.gradient, rest.optimizer)]
            rests[id(rest)] = placed[0], gathered(placed[0], axes), placed[1], placed[2]
        parameter, whole, wanted, optimizer = rests[id(rest)]

        def add(role: Literal["parameter", "gradient", "update"], phase: Phase, per_step: bool, before: Layout,
                after: Layout, value: int, kernel: int, words: tuple[str, str], key: object = key) -> None:  # fmt: skip
            if before != after:
                full = (key, role, phase, per_step, before, after)
                row = rows.setdefault(full, StateRow(role, phase, per_step, before, after, *words))
                row.value_list.append(value)
                row.kernel_list.append(kernel)

        name = f"parameter {source.name}"
        if whole != parameter:
            for phase, kernel in readers.of(value):
                add("parameter", phase, False, parameter, whole, value, kernel, (name, wiring.ids[kernel]))
        if not source.trainable or op_value not in graph.gradients:
            continue
        for gradient in _contributions(graph, graph.gradients[op_value], layouts, uses):
            left = tuple(
                Partial() if n == REPLICA_AXIS else p for p, (n, _) in zip(layouts[gradient], axes, strict=True)
            )
            kept = _kept(left, wanted, axes)
            maker = wiring.ids[int(graph.flat.kernel_value_kernel[gradient])]
            add("gradient", "B", False, left, kept, gradient, -1, (maker, f"gradient of {source.name}"))
            add("gradient", "B", True, kept, optimizer, gradient, -1, (maker, f"update of {source.name}"))
        add("update", "B", True, optimizer, parameter, value, -1, (f"update of {source.name}", name))
    return list(rows.values())


def _kept(left: Layout, wanted: Layout, axes: Axes) -> Layout:
    """Where a gradient accumulates."""
    if all(p == w or not isinstance(w, Shard) for p, w in zip(left, wanted, strict=True)):
        return left
    return tuple(
        p if name == REPLICA_AXIS and not isinstance(w, Shard) else w
        for p, w, (name, _) in zip(left, wanted, axes, strict=True)
    )


def _contributions(graph: Graph, gradient: int, layouts: Mapping[int, Layout], uses: Mapping[int, Use]) -> list[int]:
    """The gradient of a parameter that a stage makes: the sum, or of a parameter that several stages hold the terms
    from here."""
    flat = graph.flat
    maker = int(flat.kernel_value_kernel[gradient])
    if base_name(graph.kernel_classes[int(flat.kernel_class[maker])].target) != "add":
        return [gradient] if gradient in layouts and maker in uses else []
    terms = flat.kernel_inputs[flat.kernel_indptr[maker] : flat.kernel_indptr[maker + 1]].tolist()
    near = [v for v in terms if int(flat.kernel_value_kernel[v]) in uses]
    return [gradient] if len(near) == len(terms) and maker in uses else near


class _Readers:
    """First kernels of a stage that read a parameter, itself or through views, in each phase."""

    def __init__(self, graph: Graph, uses: Mapping[int, Use]) -> None:
        self.graph, self.uses = graph, uses
        self._kernels: dict[int, list[int]] | None = None

    def of(self, value: int) -> list[tuple[Phase, int]]:
        if self._kernels is None:
            self._kernels = {}
            flat = self.graph.flat
            indptr, inputs = flat.kernel_indptr.tolist(), flat.kernel_inputs.tolist()
            for k in self.uses:
                for v in inputs[indptr[k] : indptr[k + 1]]:
                    self._kernels.setdefault(v, []).append(k)
        flat, classes = self.graph.flat, self.graph.kernel_classes
        first: dict[Phase, int] = {}
        stack = [value]
        while stack:
            v = stack.pop()
            for k in self._kernels.get(v, ()):
                phase: Phase = "F" if flat.kernel_forward[k] else "B"
                first[phase] = min(first.get(phase, k), k)
                if classes[int(flat.kernel_class[k])].view:
                    out = int(flat.kernel_outputs[k])
                    stack += range(out, out + len(classes[int(flat.kernel_class[k])].outputs))
        return sorted(first.items(), key=lambda item: item[1])
