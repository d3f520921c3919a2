"""From a flat Trace to a Graph: windows become calls of templates, every other stretch a template called once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from simpart.capture._repeats import find_windows
from simpart.capture._trace import KernelRow, Ref, Trace
from simpart.graph import Call, Graph, Kernel, Op, Template
from simpart.kernels.ops import kind_of

__all__ = ["build"]


def build(trace: Trace, *, model: str, precision: str, at_one: Graph | None = None) -> Graph:
    """The Graph of a trace; equal traces give equal graphs."""
    flat = _Flat(trace)
    windows = find_windows(flat.tokens, flat.live, flat.equal)
    regions: list[tuple[int, int, int | None]] = []  # start, stop, form
    at = 0
    for window in windows:
        if at < window.start:
            regions.append((at, window.start, None))
        regions.append((window.start, window.stop, window.form))
        at = window.stop
    if at < len(trace.ops):
        regions.append((at, len(trace.ops), None))
    return _Assembly(flat, regions).graph(model, precision, at_one)


# --- canonical forms -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Region:
    """Ops start … stop with what one call needs: its own sources and external values, in order of first use.

    `kernels` are the rows of its kernels; `form` says everything about ops that equal instances share.
    """

    start: int
    stop: int
    sources: tuple[int, ...]
    externals: tuple[Ref, ...]
    inputs: tuple[tuple[int, ...], ...]
    kernels: tuple[int, ...]
    form: Any


@dataclass(frozen=True, slots=True)
class _Alignment:
    """How a region's kernels follow those of a model region: the row of each kernel (None: omitted) and of each
    slot's value.
    """

    rows: tuple[int | None, ...]
    externals: tuple[Ref, ...]
    omits: tuple[int, ...]


class _Flat:
    """A trace with the indices that comparisons of regions need."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kernels_of: list[list[int]] = [[] for _ in trace.ops]
        for i, kernel in enumerate(trace.kernels):
            self.kernels_of[kernel.op].append(i)
        readers: list[list[int]] = [[] for _ in trace.sources]
        for i, op in enumerate(trace.ops):
            for row, k in op.inputs:
                if row < 0:
                    readers[k].append(i)
        for kernel in trace.kernels:
            for row, k in kernel.inputs:
                if row < 0:
                    readers[k].append(kernel.op)
        owned = ("parameter", "buffer")
        self.span = [
            (min(r), max(r)) if r and s.kind in owned else (-1, len(trace.ops))
            for r, s in zip(readers, trace.sources, strict=True)
        ]
        last: dict[int, int] = {}
        for i, op in enumerate(trace.ops):
            last[op.group] = i
        self.group_stop = [last[op.group] for op in trace.ops]
        self._regions: dict[tuple[int, int], _Region] = {}
        self._aligned: dict[tuple[int, int, int], bool] = {}

    @cached_property
    def tokens(self) -> list[int]:
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(self._token(i), len(numbers)) for i in range(len(self.trace.ops))]

    def _token(self, i: int) -> Any:
        op = self.trace.ops[i]
        inputs = tuple(self._seen(ref) for ref in op.inputs)
        return (op.target, op.arguments, inputs, op.outputs, op.carries_gradient, op.mutates_buffer)

    def _seen(self, ref: Ref) -> Any:
        row, k = ref
        if row >= 0:
            return self.trace.ops[row].outputs[k]
        source = self.trace.sources[k]
        return (source.kind, source.spec, source.trainable)

    @cached_property
    def live(self) -> list[int]:
        """How many values cross the cut before each op; a cut through an indivisible group counts as very many."""
        last_use: dict[Ref, int] = {self.trace.loss: len(self.trace.ops)}
        for i, op in enumerate(self.trace.ops):
            for ref in op.inputs:
                if ref[0] >= 0:
                    last_use[ref] = max(i, last_use.get(ref, 0))
        change = [0] * (len(self.trace.ops) + 2)
        for (row, _), last in last_use.items():
            change[row + 1] += 1
            change[last + 1] -= 1
        for i, op in enumerate(self.trace.ops):
            if op.group == i:
                change[i + 1] += 1000
                change[self.group_stop[i] + 1] -= 1000
        return list(accumulate(change))[: len(self.trace.ops)]

    def region(self, start: int, stop: int) -> _Region:
        found = self._regions.get((start, stop))
        if found is None:
            found = self._regions[start, stop] = self._make_region(start, stop)
        return found

    def _make_region(self, start: int, stop: int) -> _Region:
        sources: dict[int, int] = {}
        externals: dict[Ref, int] = {}
        first_value = list(accumulate((len(op.outputs) for op in self.trace.ops[start:stop]), initial=0))
        inputs: list[tuple[Any, ...]] = []
        for op in self.trace.ops[start:stop]:
            inputs.append(tuple(self._place(ref, start, stop, sources, externals, first_value) for ref in op.inputs))
        kernels = sorted(k for op in range(start, stop) for k in self.kernels_of[op])
        for k in kernels:
            for row, number in self.trace.kernels[k].inputs:
                if row < 0 and self._local(number, start, stop):
                    sources.setdefault(number, len(sources))
        own = len(sources)
        numbered = tuple(tuple(n + own if made else n for made, n in refs) for refs in inputs)
        kinds = tuple(
            (s.kind, s.spec, s.trainable, len(s.aliases)) for s in (self.trace.sources[number] for number in sources)
        )
        groups = tuple(self._group(i, start, stop) for i in range(start, stop))
        return _Region(
            start, stop, tuple(sources), tuple(externals), numbered, tuple(kernels), (numbered, kinds, groups)
        )

    def _local(self, source: int, start: int, stop: int) -> bool:
        first, last = self.span[source]
        return start <= first and last < stop

    def _place(
        self,
        ref: Ref,
        start: int,
        stop: int,
        sources: dict[int, int],
        externals: dict[Ref, int],
        first_value: list[int],
    ) -> tuple[bool, int]:
        """(made inside, number): the value's number among those made inside, or of an own source, or `~slot`."""
        row, k = ref
        if start <= row < stop:
            return True, first_value[row - start] + k
        if row < 0 and self._local(k, start, stop):
            return False, sources.setdefault(k, len(sources))
        return False, ~externals.setdefault(ref, len(externals))

    def _group(self, i: int, start: int, stop: int) -> tuple[bool, int]:
        """(whether the group ends here too, its first op relative to the start)."""
        first = self.trace.ops[i].group
        return start <= first and self.group_stop[i] < stop, max(first, start) - start

    def equal(self, a: int, b: int, length: int) -> bool:
        """True if the regions from a and b are instances of one function, up to omitted accumulation adds."""
        if self.tokens[a : a + length] != self.tokens[b : b + length]:
            return False
        key = (a, b, length)
        if key not in self._aligned:
            one, other = self.region(a, a + length), self.region(b, b + length)
            if len(one.kernels) < len(other.kernels):
                one, other = other, one
            self._aligned[key] = one.form == other.form and self.align(one, other) is not None
        return self._aligned[key]

    def align(self, model: _Region, other: _Region) -> _Alignment | None:
        """Match the kernels of a region with those of a model that has as many or more; None if they are not the
        same.
        """
        twin: dict[Ref, Ref] = dict(
            zip(((-1, s) for s in model.sources), ((-1, s) for s in other.sources), strict=True)
        )
        slots: dict[Ref, None] = {}
        bound: set[Ref] = set()
        rows: list[int | None] = []
        omits: list[int] = []
        j = 0
        made = set(model.kernels)
        made_other = set(other.kernels)
        for i, k in enumerate(model.kernels):
            mine = self.trace.kernels[k]
            for ref in mine.inputs:
                if ref[0] not in made and ref not in twin:
                    slots.setdefault(ref)
            theirs = self.trace.kernels[other.kernels[j]] if j < len(other.kernels) else None
            fresh = None if theirs is None else self._matches(mine, theirs, model, other, twin, bound, made_other)
            if fresh is not None:
                twin.update(fresh)
                bound.update(fresh.values())
                for number in range(len(mine.outputs)):
                    twin[k, number] = (other.kernels[j], number)
                rows.append(other.kernels[j])
                j += 1
            elif mine.accumulates and len(mine.outputs) == 1 and mine.inputs[-1] in twin:
                twin[k, 0] = twin[mine.inputs[-1]]
                rows.append(None)
                omits.append(i)
            else:
                return None
        if j < len(other.kernels):
            return None
        stand_in = {
            ref: twin[self.trace.kernels[model.kernels[i]].inputs[-1]]
            for i in omits
            for ref in self.trace.kernels[model.kernels[i]].inputs
        }
        return _Alignment(tuple(rows), tuple(twin.get(s) or stand_in[s] for s in slots), tuple(omits))

    def _matches(
        self,
        mine: KernelRow,
        theirs: KernelRow,
        model: _Region,
        other: _Region,
        twin: Mapping[Ref, Ref],
        bound: set[Ref],
        made_other: set[int],
    ) -> dict[Ref, Ref] | None:
        """Twins of external values first seen here, or None if the kernels differ."""
        alike = (
            mine.op - model.start == theirs.op - other.start
            and (mine.phase, mine.target, mine.view) == (theirs.phase, theirs.target, theirs.view)
            and (mine.arguments, mine.outputs) == (theirs.arguments, theirs.outputs)
        )
        if not alike or len(mine.inputs) != len(theirs.inputs):
            return None
        fresh: dict[Ref, Ref] = {}
        for one, two in zip(mine.inputs, theirs.inputs, strict=True):
            known = twin.get(one) or fresh.get(one)
            if known is None:
                if two[0] in made_other or two in bound or two in fresh.values():
                    return None
                fresh[one] = two
            elif known != two:
                return None
        return fresh


# --- assembly --------------------------------------------------------------------------------------------------------
class _Assembly:
    """Numbers values globally and writes templates, calls and shared sources."""

    def __init__(self, flat: _Flat, regions: Sequence[tuple[int, int, int | None]]) -> None:
        self.flat, self.trace = flat, flat.trace
        self.regions = [flat.region(start, stop) for start, stop, _ in regions]
        members: list[list[int]] = []
        of_form: dict[int, list[int]] = {}
        for i, (_, _, form) in enumerate(regions):
            if form is None:
                members.append([i])
            elif form in of_form:
                of_form[form].append(i)
            else:
                of_form[form] = [i]
                members.append(of_form[form])
        self.alignments: dict[int, _Alignment] = {}
        self.models: list[int] = []  # per template, the region it is written from
        self.members: list[list[int]] = []
        for regions_of_form in members:
            self._add_templates(regions_of_form)

    def _add_templates(self, members: list[int]) -> None:
        """One template for regions that follow the one with most kernels, and further ones for any that do not."""
        while members:
            model = max(members, key=lambda i: (len(self.regions[i].kernels), -i))
            left = []
            for i in members:
                found = self.flat.align(self.regions[model], self.regions[i])
                if found is None:
                    left.append(i)
                else:
                    self.alignments[i] = found
            self.models.append(model)
            self.members.append([i for i in members if i not in left])
            members = left

    def graph(self, model: str, precision: str, at_one: Graph | None) -> Graph:
        trace = self.trace
        owned = {source for region in self.regions for source in region.sources}
        shared = [i for i in range(len(trace.sources)) if i not in owned]
        place, kernel_place = self._numbers(shared)
        order = sorted(range(len(self.models)), key=lambda t: self.members[t][0])
        template_of = {i: number for number, t in enumerate(order) for i in self.members[t]}
        written = [self._template(self.models[t], self.members[t]) for t in order]
        variables = {i: values for _, each in written for i, values in each.items()}
        calls = [
            Call(
                template=template_of[i],
                variables=variables[i],
                externals=tuple(place[ref] for ref in region.externals),
                kernel_externals=tuple(kernel_place[ref] for ref in self.alignments[i].externals),
                omits=self.alignments[i].omits,
            )
            for i, region in enumerate(self.regions)
        ]
        return Graph(
            model=model,
            precision=precision,
            sources=tuple(trace.sources[i] for i in shared),
            templates=tuple(template for template, _ in written),
            calls=tuple(calls),
            loss=place[trace.loss],
            gradients={place[-1, source]: kernel_place[ref] for source, ref in trace.gradients},
            joined=self._joined(),
            tokens_per_sample=trace.tokens_per_sample,
            at_one=at_one,
        )

    def _numbers(self, shared: list[int]) -> tuple[dict[Ref, int], dict[Ref, int]]:
        """Global number of every value at op and at kernel level."""
        place: dict[Ref, int] = {(-1, source): number for number, source in enumerate(shared)}
        kernel_place = dict(place)
        at = kernel_at = len(shared)
        model_of = {i: self.models[t] for t, members in enumerate(self.members) for i in members}
        for i, region in enumerate(self.regions):
            for n, source in enumerate(region.sources):
                place[-1, source], kernel_place[-1, source] = at + n, kernel_at + n
            at += len(region.sources)
            kernel_at += len(region.sources)
            for row in range(region.start, region.stop):
                for k in range(len(self.trace.ops[row].outputs)):
                    place[row, k] = at
                    at += 1
            for model_row, own in zip(self.regions[model_of[i]].kernels, self.alignments[i].rows, strict=True):
                for k in range(len(self.trace.kernels[model_row].outputs)):
                    if own is not None:
                        kernel_place[own, k] = kernel_at
                    kernel_at += 1
        return place, kernel_place

    def _template(self, model: int, members: list[int]) -> tuple[Template, dict[int, tuple[str, ...]]]:
        trace, region = self.trace, self.regions[model]
        names = _Names(len(members))
        all_regions = [self.regions[i] for i in members]
        paths = [
            names.pattern([trace.ops[r.start + n].path for r in all_regions]) for n in range(region.stop - region.start)
        ]
        sources = []
        for n, number in enumerate(region.sources):
            each = [trace.sources[r.sources[n]] for r in all_regions]
            aliases = tuple(names.pattern(list(a)) for a in zip(*(s.aliases for s in each), strict=True))
            name = names.pattern([s.name for s in each])
            sources.append(replace(trace.sources[number], name=name, aliases=aliases))
        ops = tuple(
            Op(
                path=path,
                target=row.target,
                kind=kind_of(row.target),
                inputs=inputs,
                outputs=row.outputs,
                carries_gradient=row.carries_gradient,
                mutates_buffer=row.mutates_buffer,
            )
            for path, row, inputs in zip(paths, trace.ops[region.start : region.stop], region.inputs, strict=True)
        )
        template = Template(
            sources=tuple(sources), ops=ops, kernels=self._kernels(region, model), groups=self._groups(region)
        )
        return template, dict(zip(members, names.variables(), strict=True))

    def _kernels(self, region: _Region, model: int) -> tuple[Kernel, ...]:
        place: dict[Ref, int] = {(-1, source): n for n, source in enumerate(region.sources)}
        place.update({ref: ~slot for slot, ref in enumerate(self.alignments[model].externals)})
        at = len(region.sources)
        for row in region.kernels:
            for k in range(len(self.trace.kernels[row].outputs)):
                place[row, k] = at
                at += 1
        return tuple(
            Kernel(
                op=row.op - region.start,
                phase=row.phase,
                target=row.target,
                inputs=tuple(place[ref] for ref in row.inputs),
                outputs=row.outputs,
                arguments=row.arguments,
                view=row.view,
            )
            for row in (self.trace.kernels[k] for k in region.kernels)
        )

    def _groups(self, region: _Region) -> tuple[tuple[int, ...], ...]:
        found: dict[int, list[int]] = {}
        for i in range(region.start, region.stop):
            inside, first = self.flat._group(i, region.start, region.stop)
            if inside:
                found.setdefault(first, []).append(i - region.start)
        return tuple(tuple(members) for members in found.values() if len(members) > 1)

    def _joined(self) -> tuple[tuple[int, ...], ...]:
        spanning: dict[int, list[int]] = {}
        for region in self.regions:
            for i in range(region.start, region.stop):
                if not self.flat._group(i, region.start, region.stop)[0]:
                    spanning.setdefault(self.trace.ops[i].group, []).append(i)
        return tuple(tuple(members) for members in spanning.values())


class _Names:
    """Patterns with `{0}`, `{1}` … for the parts of dotted names in which the instances of a template differ."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.columns: dict[tuple[str, ...], int] = {}

    def pattern(self, names: Sequence[str]) -> str:
        """
        >>> _Names(2).pattern(["h.3.mlp", "h.4.mlp"])
        'h.{0}.mlp'
        """
        parts = [name.split(".") for name in names]
        if len({len(each) for each in parts}) > 1:
            return self._column(tuple(names))
        return ".".join(self._column(tuple(column)) for column in zip(*parts, strict=True))

    def _column(self, column: tuple[str, ...]) -> str:
        if all(part == column[0] for part in column):
            return column[0]
        return f"{{{self.columns.setdefault(column, len(self.columns))}}}"

    def variables(self) -> list[tuple[str, ...]]:
        return [tuple(column[i] for column in self.columns) for i in range(self.instances)]
