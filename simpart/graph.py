"""What a training step computes: ops that own kernels, as templates (functions) and calls (instances).

A deep model repeats its layers, so a Graph stores each repeated region once as a `Template` and every occurrence as a `Call`
that says which values flow in. Ops not repeated are templates called once. Everything per op is derived by `flat`,
in numpy arrays, in the order of the exported forward graph.

Values are numbered per call: first the template's own sources (parameters and buffers that only this call reads), then
what its ops (or, at kernel level, its kernels) produce. Globally: the Graph's shared sources come first, then the values of
call 0, call 1, … Refs inside a template are local value numbers when >= 0, and `~slot` (that is `-1-slot`) for the call's
external `slot`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from simpart.errors import MismatchError, UnknownNameError
from simpart.files import dump_json
from simpart.sizes import TensorSpec

__all__ = ["Call", "Flat", "Graph", "Kernel", "Op", "Source", "Template"]

Phase = Literal["F", "B"]
SourceKind = Literal["parameter", "buffer", "input", "constant", "tangent"]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that no op makes. `name` is a dotted parameter or buffer name (with `{0}` for a call's variables when the
    source belongs to a template), or the position of a graph input. `aliases` are further names of a tied parameter."""

    kind: SourceKind
    name: str
    spec: TensorSpec
    trainable: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One ATen node of the joint graph. `op` is the index of its owner in the template.

    `arguments` is the call as JSON: `{"positional": […], "named": {…}}` with `{"tensor": i}` for the i-th input and sizes
    that depend on the micro-batch written as in `simpart.sizes`. `view` says that output 0 shares the storage of input 0.
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
    """An instance of a template. `variables` fill `{0}`, `{1}` … in paths and names; `externals` and `kernel_externals` are global
    value numbers for the slots at op and at kernel level. `omits` lists kernels this instance lacks: gradient-accumulation
    adds (k users of a value need k - 1); the output of an omitted kernel is its last input."""

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
    """A captured training step of one precision, for any micro-batch >= 2 (and 1, unless `at_one` holds its own structure).

    `loss` is the op-level value number of the scalar loss; `gradients` maps each trainable parameter's global op-level value
    number to the kernel-level value that is its gradient. `model` is the spec it was captured from. Two Graphs are the same when their
    `fingerprint` is; `==` is identity.
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
        """The structure that runs at this micro-batch: micro-batch 1 may be another graph (`specs`: views for copies)."""
        return self.at_one if micro_batch == 1 and self.at_one is not None else self

    @cached_property
    def op_classes(self) -> tuple[Op, ...]:
        return tuple(op for template in self.templates for op in template.ops)

    @cached_property
    def kernel_classes(self) -> tuple[Kernel, ...]:
        return tuple(kernel for template in self.templates for kernel in template.kernels)

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
        return len(self.sources) + np.concatenate([[0], np.cumsum(each)[:-1]]).astype(np.int64)

    @cached_property
    def flat(self) -> Flat:
        return flatten(self)

    # --- identity ----------------------------------------------------------------------------------------------------
    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure, names, dims and precision; independent of how the model was asked for."""
        from simpart.graph_format import graph_to_json

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
    """Derive the flat arrays; cost is linear in ops and kernels, with numpy doing the work per call."""
    templates = [_TemplateArrays(t) for t in graph.templates]
    op_base = np.cumsum([0] + [len(t.ops) for t in graph.templates])
    kernel_base = np.cumsum([0] + [len(t.kernels) for t in graph.templates])
    op_start = np.cumsum([0] + [len(graph.templates[c.template].ops) for c in graph.calls])
    parts: dict[str, list[Any]] = {name: [] for name in (
        "op_class", "op_call", "op_group", "op_count", "op_inputs", "op_outputs", "value_op",
        "kernel_class", "kernel_op", "kernel_forward", "kernel_count", "kernel_inputs", "kernel_outputs", "kernel_value")}  # fmt: skip
    value_spec: list[TensorSpec] = [s.spec for s in graph.sources]
    kernel_value_spec: list[TensorSpec] = list(value_spec)
    kernels_so_far = 0
    for i, call in enumerate(graph.calls):
        arrays, first_op = templates[call.template], op_start[i]
        first_value, first_kernel_value = graph.value_offsets[i], graph.kernel_value_offsets[i]
        parts["op_class"].append(op_base[call.template] + arrays.op_range)
        parts["op_call"].append(np.full(arrays.op_range.size, i))
        parts["op_group"].append(first_op + arrays.op_group)
        parts["op_count"].append(arrays.op_count)
        parts["op_inputs"].append(resolve(arrays.op_inputs, first_value, call.externals))
        parts["op_outputs"].append(first_value + arrays.op_outputs)
        parts["value_op"].append(np.where(arrays.value_op < 0, -1, first_op + arrays.value_op))
        value_spec.extend(arrays.value_spec)
        kernel_value_spec.extend(arrays.kernel_value_spec)
        inputs = resolve(arrays.kernel_inputs, first_kernel_value, call.kernel_externals)
        keep = np.ones(arrays.kernel_range.size, dtype=bool)
        keep[list(call.omits)] = False
        parts["kernel_class"].append((kernel_base[call.template] + arrays.kernel_range)[keep])
        parts["kernel_op"].append(first_op + arrays.kernel_op[keep])
        parts["kernel_forward"].append(arrays.kernel_forward[keep])
        parts["kernel_count"].append(arrays.kernel_count[keep])
        parts["kernel_inputs"].append(inputs[np.repeat(keep, arrays.kernel_count)])
        parts["kernel_outputs"].append(first_kernel_value + arrays.kernel_outputs[keep])
        number = np.where(keep, kernels_so_far + np.cumsum(keep) - 1, -2)
        parts["kernel_value"].append(np.where(arrays.value_kernel < 0, -1, number[arrays.value_kernel]))
        kernels_so_far += int(keep.sum())
    joined = {name: np.concatenate([np.zeros(0, dtype=np.int64), *arrays]) for name, arrays in parts.items()}
    sources = np.full(len(graph.sources), -1)
    group = joined["op_group"].astype(np.int64)
    for members in graph.joined:
        group[np.isin(group, group[list(members)])] = min(group[list(members)])
    kernel_inputs = _through_omitted(graph, joined["kernel_inputs"].astype(np.int64))
    return Flat(
        op_class=joined["op_class"].astype(np.int64),
        op_call=joined["op_call"].astype(np.int64),
        op_group=group,
        op_indptr=np.concatenate([[0], np.cumsum(joined["op_count"])]).astype(np.int64),
        op_inputs=joined["op_inputs"].astype(np.int64),
        op_outputs=joined["op_outputs"].astype(np.int64),
        value_op=np.concatenate([sources, joined["value_op"]]).astype(np.int64),
        value_spec=tuple(value_spec),
        kernel_class=joined["kernel_class"].astype(np.int64),
        kernel_op=joined["kernel_op"].astype(np.int64),
        kernel_forward=joined["kernel_forward"].astype(np.bool_),
        kernel_indptr=np.concatenate([[0], np.cumsum(joined["kernel_count"])]).astype(np.int64),
        kernel_inputs=kernel_inputs,
        kernel_outputs=joined["kernel_outputs"].astype(np.int64),
        kernel_value_kernel=np.concatenate([sources, joined["kernel_value"]]).astype(np.int64),
        kernel_value_spec=tuple(kernel_value_spec),
    )


def resolve(refs: Ints, first: int, externals: tuple[int, ...]) -> Ints:
    """Local refs of a template as global value numbers of one call."""
    if not externals:
        return first + refs
    slots = np.array(externals, dtype=np.int64)
    return np.where(refs >= 0, first + refs, slots[np.clip(~refs, 0, len(externals) - 1)])


def omitted_values(graph: Graph) -> dict[int, int]:
    """Global kernel-level value of each omitted kernel, with the value that stands for it (its last input)."""
    found: dict[int, int] = {}
    for first, call in zip(graph.kernel_value_offsets, graph.calls, strict=True):
        if not call.omits:
            continue
        template = graph.templates[call.template]
        starts = np.cumsum([len(template.sources)] + [len(k.outputs) for k in template.kernels])
        for k in call.omits:
            ref = template.kernels[k].inputs[-1]
            found[int(first + starts[k])] = int(first + ref) if ref >= 0 else call.kernel_externals[~ref]
    return found


def _through_omitted(graph: Graph, inputs: Ints) -> Ints:
    for value, stand_in in omitted_values(graph).items():
        inputs[inputs == value] = stand_in
    return inputs


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
        self.kernel_forward = np.array([k.phase == "F" for k in template.kernels], dtype=bool)
        self.kernel_count = ints([len(k.inputs) for k in template.kernels])
        self.kernel_inputs = ints([ref for k in template.kernels for ref in k.inputs])
        self.kernel_outputs = own + ints([0, *np.cumsum(kernel_sizes)][: len(kernel_sizes)])
        value_kernel = np.repeat(np.arange(len(kernel_sizes)), kernel_sizes)
        self.value_kernel = np.concatenate([np.full(own, -1), value_kernel]).astype(np.int64)
        self.kernel_value_spec = specs + [spec for k in template.kernels for spec in k.outputs]
