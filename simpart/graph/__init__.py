"""What a training step computes: ops that own kernels, as templates (functions) and calls (instances).

A deep model repeats its layers, so a Graph stores each repeated region once as a `Template` and every occurrence as a
`Call` that says which values flow in. Ops not repeated are templates called once. Everything per op is derived by
`flat`, in numpy arrays, in the order of the exported forward graph.

Values are numbered per call: first the template's own sources (parameters and buffers that only this call reads),
then what its ops (or, at kernel level, its kernels) produce. Globally: the Graph's shared sources come first, then
the values of call 0, call 1, … Refs inside a template are local value numbers when >= 0, and `~slot` (that is
`-1-slot`) for the call's external `slot`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from simpart.errors import MismatchError, UnknownNameError
from simpart.files import dump_json
from simpart.graph.sizes import TensorSpec

__all__ = ["Call", "Flat", "Graph", "Kernel", "Op", "Source", "Template"]

Phase = Literal["F", "B"]
SourceKind = Literal["parameter", "buffer", "input", "constant", "tangent"]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that no op makes. `name` is a dotted parameter or buffer name (with `{0}` for a call's variables when
    the source belongs to a template), or the position of a graph input. `aliases` are further names of a tied
    parameter."""

    kind: SourceKind
    name: str
    spec: TensorSpec
    trainable: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One ATen node of the joint graph. `op` is the index of its owner in the template.

    `arguments` is the call as JSON: `{"positional": […], "named": {…}}` with `{"tensor": i}` for the i-th input and
    sizes that depend on the micro-batch written as in `simpart.graph.sizes`. `view` says that output 0 shares the
    storage of input 0.
    """

    op: int
    phase: Phase
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: str
    view: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op of the exported forward graph. `path` is its module path, with `{0}` for a call's variables."""

    path: str
    target: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    carries_gradient: bool
    mutates_buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A function: its ops in forward order, its kernels in the order they run (forward ones first).

    `groups` lists sets of ops that share mutated storage and must not be parted (indices, at least two each).
    """

    sources: tuple[Source, ...]
    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...]
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An instance of a template. `variables` fill `{0}`, `{1}` … in paths and names; `externals` and
    `kernel_externals` are global value numbers for the slots at op and at kernel level, as many in every call of a
    template. `omits` lists kernels this instance lacks: gradient-accumulation adds (k users of a value need k - 1);
    the output of an omitted kernel is its last input."""

    template: int
    variables: tuple[str, ...] = ()
    externals: tuple[int, ...] = ()
    kernel_externals: tuple[int, ...] = ()
    omits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Per-op and per-kernel arrays of a Graph. A class is a template's op or kernel; equal classes cost the same.

    Value numbers are global; `indptr` pairs with its list in the usual compressed-row form.
    """

    op_class: Ints
    op_call: Ints
    op_group: Ints  # smallest op index of the indivisible group
    op_indptr: Ints
    op_inputs: Ints
    op_outputs: Ints  # number of the first output value of each op; outputs are consecutive
    value_op: Ints  # producer op, -1 for sources
    value_spec: tuple[TensorSpec, ...]
    kernel_class: Ints  # omitted kernels are left out
    kernel_op: Ints
    kernel_forward: np.ndarray[tuple[int], np.dtype[np.bool_]]
    kernel_indptr: Ints
    kernel_inputs: Ints
    kernel_outputs: Ints
    kernel_value_kernel: Ints
    kernel_value_spec: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A captured training step of one precision, for any micro-batch >= 2, and for 1 unless `at_one` holds another.

    `loss` is the op-level value number of the scalar loss; `gradients` maps each trainable parameter's global
    op-level value number to the kernel-level value that is its gradient. `model` is the spec it was captured from.
    Two Graphs are the same when their `fingerprint` is; `==` is identity.
    """

    model: str
    precision: str
    sources: tuple[Source, ...]
    templates: tuple[Template, ...]
    calls: tuple[Call, ...]
    loss: int
    gradients: Mapping[int, int]
    joined: tuple[tuple[int, ...], ...] = ()  # indivisible groups that span calls, as op indices
    tokens_per_sample: int = 1
    at_one: Graph | None = None

    # --- which graph, which name -------------------------------------------------------------------------------------
    def at(self, micro_batch: int) -> Graph:
        """The structure that runs at this micro-batch: 1 may be another graph (views where others copy)."""
        return self.at_one if micro_batch == 1 and self.at_one is not None else self

    @cached_property
    def op_classes(self) -> tuple[Op, ...]:
        return tuple(op for template in self.templates for op in template.ops)

    @cached_property
    def kernel_classes(self) -> tuple[Kernel, ...]:
        return tuple(kernel for template in self.templates for kernel in template.kernels)

    @cached_property
    def op_class_inputs(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Specs of the inputs of each op class; a template that is never called has none."""
        values = [_TemplateArrays(t).value_spec for t in self.templates]
        refs = [[op.inputs for op in t.ops] for t in self.templates]
        return self._class_inputs(values, refs, self.value_offsets, [call.externals for call in self.calls])

    @cached_property
    def kernel_class_inputs(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Specs of the inputs of each kernel class; a template that is never called has none."""
        values = [_TemplateArrays(t).kernel_value_spec for t in self.templates]
        refs = [[kernel.inputs for kernel in t.kernels] for t in self.templates]
        return self._class_inputs(
            values, refs, self.kernel_value_offsets, [call.kernel_externals for call in self.calls]
        )

    def _class_inputs(
        self,
        values: list[list[TensorSpec]],
        refs: list[list[tuple[int, ...]]],
        offsets: Ints,
        externals: list[tuple[int, ...]],
    ) -> tuple[tuple[TensorSpec, ...], ...]:
        """What flows into a template's slots has the same spec in every call: look at the first."""

        def spec(value: int) -> TensorSpec:
            if value < len(self.sources):
                return self.sources[value].spec
            call = int(np.searchsorted(offsets, value, side="right")) - 1
            return values[self.calls[call].template][value - int(offsets[call])]

        first: dict[int, int] = {}
        for i, call in enumerate(self.calls):
            first.setdefault(call.template, i)
        found = []
        for t, rows in enumerate(refs):
            slots = [spec(value) for value in externals[first[t]]] if t in first else None
            for row in rows:
                found.append(() if slots is None else tuple(values[t][r] if r >= 0 else slots[~r] for r in row))
        return tuple(found)

    @cached_property
    def op_ids(self) -> tuple[str, ...]:
        """`module.path/target#k` of every op, k counting equal (path, target) pairs in order."""
        seen: dict[str, int] = {}
        names = []
        for call in self.calls:
            for op in self.templates[call.template].ops:
                key = f"{fill(op.path, call.variables)}/{op.target}"
                k = seen[key] = seen.get(key, -1) + 1
                names.append(f"{key}#{k}")
        return tuple(names)

    @cached_property
    def op_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.op_ids)}

    def find(self, op_id: str) -> int:
        """Index of an op by id; raises UnknownNameError with the nearest spelling."""
        index = self.op_index.get(op_id)
        if index is None:
            near = [name for name in self.op_index if name.split("/")[0] == op_id.split("/")[0]][:8]
            raise UnknownNameError("op", op_id, near or list(self.op_ids[:8]))
        return index

    # --- sources -----------------------------------------------------------------------------------------------------
    def all_sources(self) -> Iterator[tuple[int, Source]]:
        """(global op-level value number, source with its name filled in), the shared ones first."""
        yield from enumerate(self.sources)
        for first, call in zip(self.value_offsets, self.calls, strict=True):
            for i, source in enumerate(self.templates[call.template].sources):
                yield int(first) + i, named(source, call.variables)

    @cached_property
    def parameters(self) -> dict[int, Source]:
        return {value: source for value, source in self.all_sources() if source.kind == "parameter"}

    @cached_property
    def reads(self) -> dict[SourceKind, tuple[Ints, Ints]]:
        """Per kind of source every read of one: ops, in order, and the values they read."""
        kind_of = {value: source.kind for value, source in self.all_sources()}
        kinds = np.array([kind_of.get(value, "") for value in range(len(self.flat.value_op))])
        reader = np.repeat(np.arange(len(self.flat.op_class)), np.diff(self.flat.op_indptr))
        found: dict[SourceKind, tuple[Ints, Ints]] = {}
        for kind in get_args(SourceKind):
            at = np.flatnonzero(kinds[self.flat.op_inputs] == kind)
            found[kind] = (reader[at], self.flat.op_inputs[at])
        return found

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied ones once."""
        counts = [sum(s.spec.elements(1) for s in t.sources if s.kind == "parameter") for t in self.templates]
        shared = sum(s.spec.elements(1) for s in self.sources if s.kind == "parameter")
        return shared + sum(counts[call.template] for call in self.calls)

    # --- numbering ---------------------------------------------------------------------------------------------------
    @cached_property
    def value_offsets(self) -> Ints:
        """First global op-level value number of each call."""
        return self._offsets([len(t.sources) + sum(len(op.outputs) for op in t.ops) for t in self.templates])

    @cached_property
    def kernel_value_offsets(self) -> Ints:
        """First global kernel-level value number of each call."""
        return self._offsets([len(t.sources) + sum(len(k.outputs) for k in t.kernels) for t in self.templates])

    def _offsets(self, sizes: list[int]) -> Ints:
        each = np.array([sizes[call.template] for call in self.calls], dtype=np.int64)
        return len(self.sources) + np.cumsum(each) - each

    @cached_property
    def flat(self) -> Flat:
        return flatten(self)

    # --- identity ----------------------------------------------------------------------------------------------------
    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure, names, dims and precision; independent of how the model was asked for."""
        from simpart.graph.format import graph_to_json

        content = graph_to_json(self)
        content.pop("model")
        return hashlib.sha256(dump_json(content).encode()).hexdigest()[:32]

    def check_same(self, other: Graph) -> None:
        """Raise MismatchError naming the first op in which two graphs differ."""
        if self.fingerprint == other.fingerprint:
            return
        for mine, theirs in zip(self.op_ids, other.op_ids, strict=False):
            if mine != theirs:
                raise MismatchError(f"the graphs differ at op {mine} (the other has {theirs}); capture the same model")
        for i, (mine_op, their_op) in enumerate(zip(self.flat.op_class, other.flat.op_class, strict=False)):
            if self.op_classes[mine_op].outputs != other.op_classes[their_op].outputs:
                raise MismatchError(f"the graphs differ in the shapes of op {self.op_ids[i]}; capture the same model")
        counts = f"{len(self.op_ids)} against {len(other.op_ids)} ops"
        raise MismatchError(
            f"the graphs differ ({counts}, equal as far as both go); capture the same model and precision"
        )


def fill(pattern: str, variables: tuple[str, ...]) -> str:
    """Replace `{0}`, `{1}` … in a path or name.

    >>> fill("h.{0}.mlp.{1}", ("3", "fc"))
    'h.3.mlp.fc'
    """
    for i, value in enumerate(variables):
        pattern = pattern.replace(f"{{{i}}}", value)
    return pattern


def named(source: Source, variables: tuple[str, ...]) -> Source:
    aliases = tuple(fill(a, variables) for a in source.aliases)
    name = fill(source.name, variables)
    return Source(kind=source.kind, name=name, spec=source.spec, trainable=source.trainable, aliases=aliases)


def flatten(graph: Graph) -> Flat:
    """Derive the flat arrays; numpy does the work for all calls of a template at once."""
    arrays = [_TemplateArrays(t) for t in graph.templates]
    callee = np.array([call.template for call in graph.calls], dtype=np.int64)
    members = [np.flatnonzero(callee == t) for t in range(len(arrays))]
    op_sizes = np.array([a.op_count.size for a in arrays], dtype=np.int64)
    kernel_sizes = np.array([a.kernel_count.size for a in arrays], dtype=np.int64)
    op_base, kernel_base = _starts(op_sizes), _starts(kernel_sizes)
    first_op, first_kernel = _starts(op_sizes[callee]), _starts(kernel_sizes[callee])
    first_value, first_kernel_value = graph.value_offsets, graph.kernel_value_offsets

    def spread(part: Callable[[_TemplateArrays], Ints], base: Ints) -> Ints:
        """One row of `part` per call, each raised by the call's `base`, in the order of the calls."""
        rows = [part(a) for a in arrays]
        sizes = np.array([row.size for row in rows], dtype=np.int64)
        start = _starts(sizes[callee])
        out = np.empty(int(sizes[callee].sum()), dtype=np.int64)
        for row, calls in zip(rows, members, strict=True):
            out[start[calls, None] + np.arange(row.size)] = base[calls, None] + row
        return out

    def inputs(part: Callable[[_TemplateArrays], Ints], first: Ints, slots: Callable[[Call], tuple[int, ...]]) -> Ints:
        """Local refs as global value numbers."""
        rows = [part(a) for a in arrays]
        sizes = np.array([row.size for row in rows], dtype=np.int64)
        start = _starts(sizes[callee])
        out = np.empty(int(sizes[callee].sum()), dtype=np.int64)
        for row, calls in zip(rows, members, strict=True):
            found = first[calls, None] + row
            outside = np.flatnonzero(row < 0)
            if outside.size and calls.size:
                bound = np.array([slots(graph.calls[i]) for i in calls.tolist()], dtype=np.int64)
                found[:, outside] = bound[:, ~row[outside]]
            out[start[calls, None] + np.arange(row.size)] = found
        return out

    def specs(part: Callable[[_TemplateArrays], list[TensorSpec]]) -> tuple[TensorSpec, ...]:
        found = [s.spec for s in graph.sources]
        rows = [part(a) for a in arrays]
        for t in callee.tolist():
            found.extend(rows[t])
        return tuple(found)

    def producer(part: Callable[[_TemplateArrays], Ints], first: Ints) -> Ints:
        """Producer of each value, -1 for sources."""
        own = spread(part, np.zeros(callee.size, dtype=np.int64))
        raised = spread(part, first)
        return np.concatenate([np.full(len(graph.sources), -1), np.where(own < 0, -1, raised)])

    none = np.zeros(callee.size, dtype=np.int64)
    group = spread(lambda a: a.op_group, first_op)
    for joined in graph.joined:
        group[np.isin(group, group[list(joined)])] = min(group[list(joined)])
    op_count, kernel_count = spread(lambda a: a.op_count, none), spread(lambda a: a.kernel_count, none)
    keep = np.ones(int(kernel_sizes[callee].sum()), dtype=bool)
    for i, call in enumerate(graph.calls):
        if call.omits:
            keep[first_kernel[i] + np.array(call.omits)] = False
    kernel_inputs = inputs(lambda a: a.kernel_inputs, first_kernel_value, lambda call: call.kernel_externals)
    value_kernel = producer(lambda a: a.value_kernel, first_kernel)
    kernel_class = spread(lambda a: a.kernel_range, kernel_base[callee])
    kernel_op = spread(lambda a: a.kernel_op, first_op)
    kernel_outputs = spread(lambda a: a.kernel_outputs, first_kernel_value)
    kernel_forward = spread(lambda a: a.kernel_forward, none).astype(np.bool_)
    if not keep.all():
        kernel_inputs = _through_omitted(graph, kernel_inputs[np.repeat(keep, kernel_count)], value_kernel.size)
        number = np.where(keep, np.cumsum(keep) - 1, -2)
        value_kernel = np.where(value_kernel < 0, -1, number[value_kernel])
        kernel_class, kernel_op, kernel_outputs = kernel_class[keep], kernel_op[keep], kernel_outputs[keep]
        kernel_forward, kernel_count = kernel_forward[keep], kernel_count[keep]
    return Flat(
        op_class=spread(lambda a: a.op_range, op_base[callee]),
        op_call=spread(lambda a: np.zeros_like(a.op_range), np.arange(callee.size)),
        op_group=group,
        op_indptr=np.concatenate([[0], np.cumsum(op_count)]),
        op_inputs=inputs(lambda a: a.op_inputs, first_value, lambda call: call.externals),
        op_outputs=spread(lambda a: a.op_outputs, first_value),
        value_op=producer(lambda a: a.value_op, first_op),
        value_spec=specs(lambda a: a.value_spec),
        kernel_class=kernel_class,
        kernel_op=kernel_op,
        kernel_forward=kernel_forward,
        kernel_indptr=np.concatenate([[0], np.cumsum(kernel_count)]),
        kernel_inputs=kernel_inputs,
        kernel_outputs=kernel_outputs,
        kernel_value_kernel=value_kernel,
        kernel_value_spec=specs(lambda a: a.kernel_value_spec),
    )


def _starts(sizes: Ints) -> Ints:
    """Where each of several consecutive ranges of these sizes begins."""
    return np.cumsum(sizes) - sizes


def omitted_values(graph: Graph) -> dict[int, int]:
    """Global kernel-level value of each omitted kernel, with the value that stands for it (its last input)."""
    found: dict[int, int] = {}
    for i, call in enumerate(graph.calls):
        if not call.omits:
            continue
        first, template = int(graph.kernel_value_offsets[i]), graph.templates[call.template]
        starts = np.cumsum([len(template.sources)] + [len(k.outputs) for k in template.kernels])
        for k in call.omits:
            ref = template.kernels[k].inputs[-1]
            found[first + int(starts[k])] = first + ref if ref >= 0 else call.kernel_externals[~ref]
    for value, stand_in in found.items():
        seen = {value}
        while stand_in in found and stand_in not in seen:
            seen.add(stand_in)
            stand_in = found[stand_in]
        found[value] = stand_in
    return found


def _through_omitted(graph: Graph, inputs: Ints, values: int) -> Ints:
    stand_in = np.arange(values)
    for value, other in omitted_values(graph).items():
        stand_in[value] = other
    return stand_in[inputs]


class _TemplateArrays:
    """The arrays of one template that every call shares."""

    def __init__(self, template: Template) -> None:
        def ints(values: list[int]) -> Ints:
            return np.array(values, dtype=np.int64)

        own = len(template.sources)
        sizes = [len(op.outputs) for op in template.ops]
        kernel_sizes = [len(k.outputs) for k in template.kernels]
        group = list(range(len(template.ops)))
        for members in template.groups:
            for member in members:
                group[member] = min(members)
        self.op_range = np.arange(len(template.ops))
        self.op_group = ints(group)
        self.op_count = ints([len(op.inputs) for op in template.ops])
        self.op_inputs = ints([ref for op in template.ops for ref in op.inputs])
        self.op_outputs = own + ints([0, *np.cumsum(sizes)][: len(sizes)])
        self.value_op = np.concatenate([np.full(own, -1), np.repeat(np.arange(len(sizes)), sizes)]).astype(np.int64)
        specs = [s.spec for s in template.sources]
        self.value_spec = specs + [spec for op in template.ops for spec in op.outputs]
        self.kernel_range = np.arange(len(template.kernels))
        self.kernel_op = ints([k.op for k in template.kernels])
        self.kernel_forward = ints([int(k.phase == "F") for k in template.kernels])
        self.kernel_count = ints([len(k.inputs) for k in template.kernels])
        self.kernel_inputs = ints([ref for k in template.kernels for ref in k.inputs])
        self.kernel_outputs = own + ints([0, *np.cumsum(kernel_sizes)][: len(kernel_sizes)])
        value_kernel = np.repeat(np.arange(len(kernel_sizes)), kernel_sizes)
        self.value_kernel = np.concatenate([np.full(own, -1), value_kernel]).astype(np.int64)
        self.kernel_value_spec = specs + [spec for k in template.kernels for spec in k.outputs]
