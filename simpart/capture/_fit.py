"""Captures at several micro-batches become one Trace whose sizes are affine in the micro-batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from simpart.capture._trace import KernelRow, OpRow, Trace
from simpart.errors import UnsupportedError
from simpart.files import dump_json
from simpart.graph import Source
from simpart.graph.sizes import Affine, Size, Table, TensorSpec, size_at, size_to_json

__all__ = ["fit", "fit_with_one"]


class _Fitter:
    """Fits at the first two micro-batches, checks at the others, and where that fails keeps a table."""

    def __init__(self, micro_batches: Sequence[int]) -> None:
        self.micro_batches = tuple(micro_batches)
        self.specs: dict[tuple[TensorSpec, ...], TensorSpec] = {}
        self.texts: dict[str, str] = {}

    def size(self, values: Sequence[int]) -> Size:
        first = values[0]
        if all(value == first for value in values):
            return first
        b = self.micro_batches
        slope, rest = divmod(values[1] - first, b[1] - b[0])
        base = first - slope * b[0]
        if rest == 0 and slope != 0 and all(base + slope * at == v for at, v in zip(b, values, strict=True)):
            return Affine(base, slope)
        return Table(tuple(zip(b, values, strict=True)))

    def spec(self, each: tuple[TensorSpec, ...]) -> TensorSpec:
        found = self.specs.get(each)
        if found is None:
            dims = tuple(map(self.size, zip(*(s.dims for s in each), strict=True)))
            order = each[0].order if all(s.order == each[0].order for s in each) else None
            strides = None
            if order is None:
                strides = tuple(map(self.size, zip(*(_strides(s) for s in each), strict=True)))
            found = self.specs[each] = TensorSpec(dims, each[0].dtype, order, strides)
        return found

    def arguments(self, each: Sequence[Any]) -> Any:
        first = each[0]
        if isinstance(first, dict):
            return {key: self.arguments([item[key] for item in each]) for key in first}
        if isinstance(first, list):
            return [self.arguments(items) for items in zip(*each, strict=True)]
        if all(type(item) is type(first) and item == first for item in each):
            return first
        if all(type(item) is int for item in each):
            return size_to_json(self.size(each))
        if all(type(item) in (int, float) for item in each):
            return {str(b): item for b, item in zip(self.micro_batches, each, strict=True)}
        raise ValueError("arguments of unlike kinds")

    def text(self, each: Sequence[Any]) -> str:
        text = dump_json(self.arguments(each))
        return self.texts.setdefault(text, text)


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    if spec.strides is not None:
        return spec.strides  # type: ignore[return-value]  # integers before the fit
    assert spec.order is not None
    strides, step = [0] * len(spec.dims), 1
    for i in reversed(spec.order):
        strides[i] = step
        step *= spec.dims[i]  # type: ignore[operator]  # integers before the fit
    return tuple(strides)


def fit(traces: Sequence[Trace], micro_batches: Sequence[int]) -> Trace:
    """One trace for all micro-batches; raises UnsupportedError naming the first op in which their structure differs."""
    _require_same(traces, micro_batches)
    fitter = _Fitter(micro_batches)
    first = traces[0]

    def specs(items: Sequence[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
        return tuple(fitter.spec(each) for each in zip(*items, strict=True))

    ops = [
        OpRow(
            path=row.path,
            target=row.target,
            arguments=fitter.text([r.arguments for r in rows]),
            inputs=row.inputs,
            outputs=specs([r.outputs for r in rows]),
            group=row.group,
            carries_gradient=row.carries_gradient,
            mutates_buffer=row.mutates_buffer,
        )
        for rows in zip(*(t.ops for t in traces), strict=True)
        for row in rows[:1]
    ]
    kernels = [
        KernelRow(
            op=row.op,
            phase=row.phase,
            target=row.target,
            arguments=fitter.text([r.arguments for r in rows]),
            inputs=row.inputs,
            outputs=specs([r.outputs for r in rows]),
            view=row.view,
            accumulates=row.accumulates,
        )
        for rows in zip(*(t.kernels for t in traces), strict=True)
        for row in rows[:1]
    ]
    sources = [
        Source(
            kind=row.kind,
            name=row.name,
            spec=fitter.spec(tuple(r.spec for r in rows)),
            trainable=row.trainable,
            aliases=row.aliases,
        )
        for rows in zip(*(t.sources for t in traces), strict=True)
        for row in rows[:1]
    ]
    return Trace(
        sources=tuple(sources),
        ops=tuple(ops),
        kernels=tuple(kernels),
        loss=first.loss,
        gradients=first.gradients,
        tokens_per_sample=first.tokens_per_sample,
    )


# --- structure -------------------------------------------------------------------------------------------------------
def _require_same(traces: Sequence[Trace], micro_batches: Sequence[int]) -> None:
    first = traces[0]
    for trace, b in zip(traces[1:], micro_batches[1:], strict=True):
        if (difference := _difference(first, trace)) is not None:
            raise UnsupportedError(
                f"a module must run the same ops at every micro-batch >= 2, at {micro_batches[0]} and {b} it differs "
                f"first at {difference}; make the forward independent of the batch size"
            )


def _difference(a: Trace, b: Trace) -> str | None:
    """The first op, source or kernel in which two structures differ, in words."""
    for mine, theirs in zip(a.ops, b.ops, strict=False):
        if _op_shape(mine) != _op_shape(theirs):
            return f"op {mine.path}/{mine.target} (the other has {theirs.path}/{theirs.target})"
    if len(a.ops) != len(b.ops):
        return f"the number of ops ({len(a.ops)} and {len(b.ops)})"
    for one, other in zip(a.sources, b.sources, strict=False):
        if (one.kind, one.name, one.trainable, len(one.spec.dims)) != (
            other.kind, other.name, other.trainable, len(other.spec.dims),
        ):  # fmt: skip
            return f"{one.kind} {one.name}"
    if len(a.sources) != len(b.sources):
        return "the number of parameters, buffers and inputs"
    for kernel, twin in zip(a.kernels, b.kernels, strict=False):
        if _kernel_shape(kernel) != _kernel_shape(twin):
            return f"kernel {kernel.target} of op {a.ops[kernel.op].path}/{a.ops[kernel.op].target}"
    if len(a.kernels) != len(b.kernels):
        return f"the number of kernels ({len(a.kernels)} and {len(b.kernels)})"
    return None if (a.loss, a.gradients) == (b.loss, b.gradients) else "the gradients"


def _op_shape(row: OpRow) -> tuple[Any, ...]:
    return (
        row.path, row.target, row.inputs, row.group, row.carries_gradient, row.mutates_buffer,
        _skeleton(row.arguments), [(len(s.dims), s.dtype) for s in row.outputs],
    )  # fmt: skip


def _kernel_shape(row: KernelRow) -> tuple[Any, ...]:
    return (
        row.op, row.phase, row.target, row.inputs, row.view, row.accumulates,
        _skeleton(row.arguments), [(len(s.dims), s.dtype) for s in row.outputs],
    )  # fmt: skip


def _skeleton(item: Any) -> Any:
    """Arguments with numbers blanked."""
    if isinstance(item, dict):
        return {key: _skeleton(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_skeleton(value) for value in item]
    return "number" if type(item) in (int, float) else item


# --- micro-batch 1 ---------------------------------------------------------------------------------------------------
def fit_with_one(fitted: Trace, traces: Sequence[Trace], micro_batches: Sequence[int], at_one: Trace) -> Trace | None:
    """The fitted trace, its tables extended by micro-batch 1, if it tells the truth about 1 too; None if 1 is
    another graph.
    """
    if _difference(traces[0], at_one) is not None:
        return None
    both = fit([*traces, _with_layout_of(fitted, at_one)], [*micro_batches, 1])
    pairs: list[tuple[OpRow, OpRow] | tuple[KernelRow, KernelRow]] = [
        *zip(both.ops, fitted.ops, strict=True),
        *zip(both.kernels, fitted.kernels, strict=True),
    ]
    agree = all(a.outputs == b.outputs or all(map(_agree, a.outputs, b.outputs)) for a, b in pairs) and all(
        a.arguments == b.arguments or _blank(a.arguments) == _blank(b.arguments) for a, b in pairs
    )
    return (
        both
        if agree and all(_agree(a.spec, b.spec) for a, b in zip(both.sources, fitted.sources, strict=True))
        else None
    )


def _with_layout_of(fitted: Trace, at_one: Trace) -> Trace:
    """A dim of size 1 may stand anywhere in memory: name the layout as the fitted trace does, where that is true."""

    def spec(general: TensorSpec, mine: TensorSpec) -> TensorSpec:
        strides = None if general.strides is None else _at_one(general.strides, _strides(mine))
        seen = TensorSpec(mine.dims, mine.dtype, general.order, strides)
        same = all(a == b or d == 1 for a, b, d in zip(_strides(seen), _strides(mine), mine.dims, strict=True))
        return seen if _at_one(general.dims, mine.dims) == mine.dims and same else mine

    def outputs(general: tuple[TensorSpec, ...], mine: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(map(spec, general, mine))

    return replace(
        at_one,
        ops=tuple(
            replace(row, outputs=outputs(g.outputs, row.outputs)) for g, row in zip(fitted.ops, at_one.ops, strict=True)
        ),
        kernels=tuple(
            replace(row, outputs=outputs(g.outputs, row.outputs))
            for g, row in zip(fitted.kernels, at_one.kernels, strict=True)
        ),
        sources=tuple(
            replace(s, spec=spec(g.spec, s.spec)) for g, s in zip(fitted.sources, at_one.sources, strict=True)
        ),
    )


def _at_one(sizes: Sequence[Size], known: Sequence[Size]) -> tuple[Size, ...]:
    """Sizes at micro-batch 1; a table, which has no entry for it yet, takes the known one."""
    return tuple(k if isinstance(s, Table) else size_at(s, 1) for s, k in zip(sizes, known, strict=True))


def _agree(a: TensorSpec, b: TensorSpec) -> bool:
    def blank(sizes: tuple[Size, ...] | None) -> list[Size | None] | None:
        return None if sizes is None else [None if isinstance(size, Table) else size for size in sizes]

    return a == b or (blank(a.dims), a.order, blank(a.strides)) == (blank(b.dims), b.order, blank(b.strides))


def _blank(text: str) -> Any:
    def blank(item: Any) -> Any:
        if isinstance(item, list):
            return [blank(part) for part in item]
        if isinstance(item, dict):
            return "table" if all(key.isdigit() for key in item) and item else {k: blank(v) for k, v in item.items()}
        return item

    return blank(json.loads(text))
