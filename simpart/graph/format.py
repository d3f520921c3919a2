"""The Graph as a JSON document and as a file: each spec, text and repeated call row once; nothing in it is executed.

`calls` rows are `[template, binding, variables…]`. A binding row holds the externals at op and at kernel level as
differences to the previous call of the same template, so that the layers of a deep model share one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import numpy as np

from simpart.errors import FormatError
from simpart.files import read_document, write_document
from simpart.graph import Call, Graph, Kernel, Op, Source, SourceKind, Template
from simpart.graph.sizes import TensorSpec

__all__ = ["GRAPH_KIND", "GRAPH_VERSION", "graph_from_json", "graph_to_json", "load_graph", "save_graph"]

GRAPH_KIND = "simpart graph"
GRAPH_VERSION = 1


def save_graph(graph: Graph, path: Path | str) -> None:
    """Write a .graph file (gzip); the same graph gives the same bytes. Raises UserError when it cannot be written."""
    write_document(path, GRAPH_KIND, GRAPH_VERSION, graph_to_json(graph), compress=True)


def load_graph(path: Path | str) -> Graph:
    """Read a .graph file; raises FormatError in one line when it is not a sound one."""
    try:
        return graph_from_json(read_document(path, GRAPH_KIND, GRAPH_VERSION))
    except FormatError as error:
        message = str(error)
        raise error if str(path) in message else FormatError(f"{path}: {message}") from error


# --- writing ---------------------------------------------------------------------------------------------------------
def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain JSON values; raises FormatError if calls of one template bind unequal numbers of externals."""
    specs: dict[TensorSpec, int] = {}
    texts: dict[str, int] = {}
    body = _body_to_json(graph, specs, texts)
    at_one = None if graph.at_one is None else _body_to_json(graph.at_one, specs, texts)
    return {
        "model": graph.model,
        "precision": graph.precision,
        "tokens_per_sample": graph.tokens_per_sample,
        "specs": [spec.to_json() for spec in specs],
        "texts": list(texts),
        "body": body,
        "at_one": at_one,
    }


def _body_to_json(graph: Graph, specs: dict[TensorSpec, int], texts: dict[str, int]) -> dict[str, Any]:
    def spec(item: TensorSpec) -> int:
        return specs.setdefault(item, len(specs))

    def text(item: str) -> int:
        return texts.setdefault(item, len(texts))

    def source(item: Source) -> list[Any]:
        return [item.kind, text(item.name), spec(item.spec), int(item.trainable), *map(text, item.aliases)]

    def op(item: Op) -> list[Any]:
        flags = int(item.carries_gradient) + 2 * int(item.mutates_buffer)
        outputs = list(map(spec, item.outputs))
        return [text(item.path), text(item.target), text(item.kind), list(item.inputs), outputs, flags]

    def kernel(item: Kernel) -> list[Any]:
        flags = int(item.phase == "B") + 2 * int(item.view)
        outputs = list(map(spec, item.outputs))
        return [item.op, text(item.target), list(item.inputs), outputs, text(item.arguments), flags]

    bindings: dict[tuple[tuple[int, ...], ...], int] = {}
    last: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    calls: list[list[Any]] = []
    for call in graph.calls:
        now = (call.externals, call.kernel_externals)
        before = last.get(call.template, ((0,) * len(now[0]), (0,) * len(now[1])))
        if [len(refs) for refs in now] != [len(refs) for refs in before]:
            raise FormatError(
                f"calls of one template bind the same slots, template {call.template} does not; capture again"
            )
        last[call.template] = now
        row = (
            *(tuple(n - b for n, b in zip(*pair, strict=True)) for pair in zip(now, before, strict=True)),
            call.omits,
        )
        calls.append([call.template, bindings.setdefault(row, len(bindings)), *call.variables])
    return {
        "sources": [source(item) for item in graph.sources],
        "templates": [
            {
                "sources": [source(item) for item in template.sources],
                "ops": [op(item) for item in template.ops],
                "kernels": [kernel(item) for item in template.kernels],
                "groups": [list(members) for members in template.groups],
            }
            for template in graph.templates
        ],
        "bindings": [[list(part) for part in row] for row in bindings],
        "calls": calls,
        "loss": graph.loss,
        "gradients": [
            _differences(sorted(graph.gradients)),
            _differences(g for _, g in sorted(graph.gradients.items())),
        ],
        "joined": [list(members) for members in graph.joined],
    }


def _differences(values: Iterable[int]) -> list[int]:
    before, found = 0, []
    for value in values:
        found.append(int(value) - before)
        before = int(value)
    return found


# --- reading ---------------------------------------------------------------------------------------------------------
def graph_from_json(content: Mapping[str, Any]) -> Graph:
    """The inverse of `graph_to_json`; raises FormatError when anything is missing, of a wrong type or out of range."""
    try:
        tables = _Tables(content["specs"], content["texts"])
        shared = {
            "model": _text(content["model"]),
            "precision": _text(content["precision"]),
            "tokens_per_sample": _number(content["tokens_per_sample"], 1, 2**62, "tokens_per_sample"),
        }
        one = content["at_one"]
        at_one = None if one is None else _body_from_json(one, tables, shared, None)
        return _body_from_json(content["body"], tables, shared, at_one)
    except FormatError:
        raise
    except KeyError as error:
        raise FormatError(f"not a sound graph: it lacks {error}; capture it again") from error
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(f"not a sound graph: {reason}; capture it again") from error


class _Tables:
    """The specs and texts that rows name by position."""

    def __init__(self, specs: list[Any], texts: list[Any]) -> None:
        self.specs = [_sound_spec(TensorSpec.from_json(row)) for row in _listed(specs)]
        self.texts = [_text(item) for item in _listed(texts)]
        self._tensors: dict[int, int] = {}

    def spec(self, index: Any) -> TensorSpec:
        return self.specs[_number(index, 0, len(self.specs) - 1, "spec")]

    def outputs(self, indices: Any) -> tuple[TensorSpec, ...]:
        return tuple(self.spec(index) for index in _listed(indices))

    def text(self, index: Any) -> str:
        return self.texts[_number(index, 0, len(self.texts) - 1, "text")]

    def arguments(self, index: Any, inputs: int) -> str:
        """A kernel's arguments: a JSON object that names only tensors it has."""
        text = self.text(index)
        if index not in self._tensors:
            call = json.loads(text)
            if not isinstance(call, dict):
                raise FormatError(
                    f"not a sound graph: kernel arguments are a JSON object, got {text[:40]!r}; capture it again"
                )
            self._tensors[index] = max(_tensors(call), default=-1)
        _number(self._tensors[index], -1, inputs - 1, "tensor of a kernel's arguments")
        return text


def _tensors(item: Any) -> Iterator[int]:
    """Positions of all `{"tensor": i}` in a kernel's arguments."""
    if isinstance(item, dict):
        if set(item) == {"tensor"}:
            yield _number(item["tensor"], 0, 2**31, "tensor")
        else:
            for value in item.values():
                yield from _tensors(value)
    elif isinstance(item, list):
        for value in item:
            yield from _tensors(value)


def _body_from_json(content: Any, tables: _Tables, shared: dict[str, Any], at_one: Graph | None) -> Graph:
    templates = tuple(_template(item, tables) for item in _listed(content["templates"]))
    sources = tuple(_source(row, tables) for row in _listed(content["sources"]))
    calls = _calls(content, templates)
    keys, values = (list(accumulate(_numbers(part, -(2**62), 2**62, "gradient"))) for part in content["gradients"])
    joined = tuple(tuple(_numbers(members, 0, 2**62, "joined op")) for members in _listed(content["joined"]))
    graph = Graph(
        sources=sources,
        templates=templates,
        calls=calls,
        loss=_number(content["loss"], 0, 2**62, "loss"),
        gradients=dict(zip(keys, values, strict=True)),
        joined=joined,
        at_one=at_one,
        **shared,
    )
    _check_values(graph)
    return graph


def _calls(content: Any, templates: tuple[Template, ...]) -> tuple[Call, ...]:
    """Add up the differences, one matrix per template."""
    rows = _listed(content["calls"])
    bindings = [(_ints(a), _ints(b), tuple(_numbers(c, 0, 2**62, "omit"))) for a, b, c in _listed(content["bindings"])]
    members: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        _number(row[1], 0, len(bindings) - 1, "binding")
        members.setdefault(_number(row[0], 0, len(templates) - 1, "template"), []).append(i)
    found: list[Any] = [None] * len(rows)
    for template, where in members.items():
        used = [rows[i][1] for i in where]
        per_level = []
        for level in (0, 1):
            matrix = np.array([bindings[k][level] for k in used], dtype=np.int64).reshape(len(used), -1)
            per_level.append(map(tuple, np.cumsum(matrix, axis=0).tolist()))
        for i, k, externals, kernel_externals in zip(where, used, *per_level, strict=True):
            variables = tuple(_text(v) for v in rows[i][2:])
            omits = bindings[k][2]
            if omits and (
                max(omits) >= len(templates[template].kernels) or not all(_can_omit(templates[template], omits))
            ):
                raise FormatError(
                    f"not a sound graph: call {i} omits {omits}, not all are kernels with inputs; capture it again"
                )
            found[i] = Call(
                template=template,
                variables=variables,
                externals=externals,
                kernel_externals=kernel_externals,
                omits=omits,
            )
    return tuple(found)


def _can_omit(template: Template, omits: tuple[int, ...]) -> Iterator[bool]:
    return (bool(template.kernels[k].inputs) and len(template.kernels[k].outputs) == 1 for k in omits)


def _source(row: Any, tables: _Tables) -> Source:
    kind, name, spec, trainable, *aliases = row
    if kind not in get_args(SourceKind):
        raise FormatError(f"not a sound graph: a source is one of {', '.join(get_args(SourceKind))}, got {kind!r}")
    return Source(
        kind=kind,
        name=tables.text(name),
        spec=tables.spec(spec),
        trainable=bool(_number(trainable, 0, 1, "trainable")),
        aliases=tuple(map(tables.text, aliases)),
    )


def _template(content: Any, tables: _Tables) -> Template:
    sources = tuple(_source(row, tables) for row in _listed(content["sources"]))
    ops: list[Op] = []
    values = len(sources)
    for path, target, kind, inputs, outputs, flags in _listed(content["ops"]):
        bits = _number(flags, 0, 3, "op flags")
        op = Op(
            path=tables.text(path),
            target=tables.text(target),
            kind=tables.text(kind),
            inputs=tuple(_numbers(inputs, -(2**31), values - 1, "input of an op")),
            outputs=tables.outputs(outputs),
            carries_gradient=bool(bits & 1),
            mutates_buffer=bool(bits & 2),
        )
        values += len(op.outputs)
        ops.append(op)
    kernels: list[Kernel] = []
    values = len(sources)
    for owner, target, inputs, outputs, arguments, flags in _listed(content["kernels"]):
        bits = _number(flags, 0, 3, "kernel flags")
        refs = tuple(_numbers(inputs, -(2**31), values - 1, "input of a kernel"))
        kernel = Kernel(
            op=_number(owner, 0, len(ops) - 1, "owner of a kernel"),
            phase="B" if bits & 1 else "F",
            target=tables.text(target),
            inputs=refs,
            outputs=tables.outputs(outputs),
            arguments=tables.arguments(arguments, len(refs)),
            view=bool(bits & 2),
        )
        values += len(kernel.outputs)
        kernels.append(kernel)
    groups = tuple(tuple(_numbers(g, 0, len(ops) - 1, "op of a group")) for g in _listed(content["groups"]))
    if any(len(set(members)) < 2 for members in groups):
        raise FormatError("not a sound graph: a group has at least two ops; capture it again")
    return Template(sources=sources, ops=tuple(ops), kernels=tuple(kernels), groups=groups)


def _check_values(graph: Graph) -> None:
    """Every global number names a value that exists; at op level, one made earlier."""

    def slots(refs: Iterable[tuple[int, ...]]) -> int:
        return max((-ref for inputs in refs for ref in inputs if ref < 0), default=0)

    def size(outputs: Callable[[Template], Iterable[tuple[TensorSpec, ...]]]) -> int:
        each = [len(t.sources) + sum(map(len, outputs(t))) for t in graph.templates]
        return len(graph.sources) + sum(each[call.template] for call in graph.calls)

    op_values = size(lambda t: (op.outputs for op in t.ops))
    kernel_values = size(lambda t: (kernel.outputs for kernel in t.kernels))
    needs = [(slots(op.inputs for op in t.ops), slots(k.inputs for k in t.kernels)) for t in graph.templates]
    for i, (call, first) in enumerate(zip(graph.calls, graph.value_offsets.tolist(), strict=True)):
        op_slots, kernel_slots = needs[call.template]
        _number(op_slots, 0, len(call.externals), f"slot of call {i}")
        _number(kernel_slots, 0, len(call.kernel_externals), f"kernel slot of call {i}")
        for refs, limit in ((call.externals, first), (call.kernel_externals, kernel_values)):
            if refs and not (min(refs) >= 0 and max(refs) < limit):
                raise FormatError(f"not a sound graph: call {i} reads a value out of range; capture it again")
    _number(graph.loss, 0, op_values - 1, "loss")
    for key, value in graph.gradients.items():
        _number(key, 0, op_values - 1, "parameter with a gradient")
        _number(value, 0, kernel_values - 1, "gradient")
    ops = sum(len(graph.templates[call.template].ops) for call in graph.calls)
    for members in graph.joined:
        _numbers(list(members), 0, ops - 1, "joined op")
        if not members:
            raise FormatError("not a sound graph: a joined group is empty; capture it again")


# --- plain values ----------------------------------------------------------------------------------------------------
def _sound_spec(spec: TensorSpec) -> TensorSpec:
    rank = len(spec.dims)
    if spec.order is not None and sorted(spec.order) != list(range(rank)):
        raise FormatError(f"not a sound graph: order {list(spec.order)} is none of {rank} dims; capture it again")
    if spec.strides is not None and len(spec.strides) != rank:
        raise FormatError(f"not a sound graph: {len(spec.strides)} strides of {rank} dims; capture it again")
    return spec


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"not a sound graph: expected a list, got {str(value)[:40]!r}; capture it again")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FormatError(f"not a sound graph: expected a text, got {str(value)[:40]!r}; capture it again")
    return value


def _number(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise FormatError(
            f"not a sound graph: {what} must be from {low} to {high}, got {str(value)[:40]}; capture it again"
        )
    return value


def _numbers(values: Any, low: int, high: int, what: str) -> list[int]:
    return [_number(value, low, high, what) for value in _listed(values)]


def _ints(values: Any) -> list[int]:
    return _numbers(values, -(2**62), 2**62, "external")
