"""What flows where under shardings: the layout each value is left in, every conversion once, what kernels exchange.

A tensor rests as its producer left it (a source: as it rests between steps); a reader that needs it another way makes
a conversion, and all readers of that way share it, forward and backward alike. Work is done once per template and
way its inputs lie, so that a deep model costs little more than a shallow one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from simpart.errors import UnsupportedError
from simpart.graph import Graph, Phase
from simpart.graph.sizes import DTYPE_BYTES
from simpart.placement import Partial, Replicate, Sharding, StatePlacement, Strategy
from simpart.placement.conversions import Step, conversions
from simpart.plan import REPLICA_AXIS, Plan
from simpart.plan.partition import partition_of
from simpart.sharding._regions import Region, Wiring, wiring_of
from simpart.sharding._state import StateOf, state_conversions
from simpart.sharding.mesh import Axes, Layout, Use, calls_of, layout_text, mesh_of, use_of

__all__ = ["Conversion", "Exchanged", "Flow", "flow", "flow_between", "flows"]

Role = Literal["value", "boundary", "parameter", "gradient", "update"]
NONE = Strategy(())
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion in all its instances. `values` are kernel-level value numbers, `kernels` the kernels of
    `graph.flat` before which each happens (-1: at the end of the stage's phase, or of the step).

    Roles: a `value` on its way to a kernel; a `boundary` value made presentable before it leaves the stage; a
    `parameter` gathered over replicas, in forward and, if backward reads it, there again; a `gradient` brought to
    where it accumulates (per micro-batch) or to the optimizer (per step); an `update`d parameter brought back to where
    it rests. Steps name axes by their number in the flow's.
    """

    role: Role
    phase: Phase
    per_step: bool
    values: tuple[int, ...]
    kernels: tuple[int, ...]
    producer: str
    consumer: str
    before: Layout
    after: Layout
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[Step, ...]

    @property
    def times(self) -> int:
        return len(self.values)

    @property
    def moves(self) -> bool:
        """Whether any byte is sent."""
        return any(step.kind != "local" for step in self.steps)

    @property
    def received_bytes(self) -> int:
        """By the busiest device, of all instances."""
        return self.times * sum(step.received_bytes for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """An all-reduce of `bytes` inside a kernel on one axis, in all its instances."""

    phase: Phase
    axis: int
    reducer: str
    bytes: int
    kernels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Flow:
    """Of one stage, or of a whole graph. `layouts` maps kernel-level values made or first read here to how they lie;
    `uses` maps kernels of `graph.flat` to what they do."""

    graph: Graph
    axes: Axes
    micro_batch: int
    layouts: Mapping[int, Layout]
    uses: Mapping[int, Use]
    conversions: tuple[Conversion, ...]
    exchanges: tuple[Exchanged, ...]

    def counts(self, role: Role | None = None, phase: Phase | None = None) -> Counter[tuple[str, str]]:
        """How often each (kind of collective, axis) happens, per micro-batch or step; exchanges inside kernels count
        as `exchange`, all roles together only."""
        found: Counter[tuple[str, str]] = Counter()
        for conversion in self.conversions:
            if role in (None, conversion.role) and phase in (None, conversion.phase):
                for step in conversion.steps:
                    if step.kind != "local":
                        found[step.kind, self.axes[step.axis][0]] += conversion.times
        for exchange in self.exchanges if role is None else ():
            if phase in (None, exchange.phase):
                found["exchange", self.axes[exchange.axis][0]] += len(exchange.kernels)
        return found

    def received_bytes(self) -> Counter[str]:
        """Bytes that the busiest device receives, by axis; of one micro-batch and one step end."""
        found: Counter[str] = Counter()
        for conversion in self.conversions:
            for step in conversion.steps:
                found[self.axes[step.axis][0]] += conversion.times * step.received_bytes
        for exchange in self.exchanges:
            name, size = self.axes[exchange.axis]
            found[name] += len(exchange.kernels) * (-(-2 * (size - 1) * exchange.bytes // size))
        return found


def flow(
    graph: Graph,
    sharding: Sharding,
    axes: Sequence[tuple[str, int]],
    micro_batch: int,
    state: tuple[tuple[str, StatePlacement], ...] = (),
) -> Flow:
    """The flow of a whole graph in one stage on a mesh. Raises UnsupportedError naming the kernel where a layout does
    not divide a tensor or no conversion leads to it."""
    stages = [_Stage(graph, sharding, mesh_of(axes), micro_batch, state)]
    return _follow(graph, stages, None)[0]


def flows(
    plan: Plan, graph: Graph, micro_batches: Sequence[int] | None = None, only: Collection[int] | None = None
) -> tuple[Flow, ...]:
    """The flow of every stage, or `only` of these in rising order, each at a replica's micro-batch (not given: the
    largest of its group).

    A value comes to a later stage as its maker left it, on axes of the same name and size; on others it comes whole.
    Nothing crosses as partial: it is reduced first.
    """
    shardings = dict(plan.shardings)
    stages = []
    for s, stage in enumerate(plan.stages):
        size = max(plan.batch.sizes[stage.group]) if micro_batches is None else micro_batches[s]
        sharding = shardings[stage.sharding] if stage.sharding is not None else Sharding()
        stages.append(_Stage(graph, sharding, mesh_of(plan.groups[stage.group].axes), size, plan.state))
    return _follow(graph, stages, list(partition_of(graph, plan).ops), only)


def flow_between(
    graph: Graph, sharding: Sharding, axes: Axes, micro_batch: int, state: tuple[tuple[str, StatePlacement], ...],
    parts: Sequence[Ints], which: int,
) -> Flow:  # fmt: skip
    """The flow of one of several stages that hold these ops, all split alike on equal meshes."""
    other, mine = (_Stage(graph, sharding, axes, micro_batch, state) for _ in range(2))
    return _follow(graph, [mine if s == which else other for s in range(len(parts))], list(parts), [which])[0]


# --- one stage -------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Group:
    """A conversion being collected."""

    role: Role
    phase: Phase
    before: Layout
    after: Layout
    values: list[int] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Followed:
    """What a region does, given how its inputs lie."""

    made: list[tuple[int, Layout]]
    demands: list[tuple[int, Layout, Layout, int]]  # ref, before, after, first kernel
    uses: list[tuple[int, Use]]
    exchanges: list[tuple[int, Use]]


class _Stage:
    """State of one stage while its graph is followed."""

    def __init__(
        self,
        graph: Graph,
        sharding: Sharding,
        axes: Axes,
        micro_batch: int,
        state: tuple[tuple[str, StatePlacement], ...],
    ) -> None:
        self.graph, self.axes, self.micro_batch = graph, axes, micro_batch
        self.wiring = wiring_of(graph)
        self.calls = calls_of(graph, micro_batch)
        self.state = StateOf(graph, state, axes)
        names = self.wiring.class_names
        self.classes = {names[name]: strategy for name, strategy in sharding.classes}
        self.overrides = {self.wiring.kernel_number[name]: strategy for name, strategy in sharding.overrides}
        self.layouts: dict[int, Layout] = {}
        self.uses: dict[int, Use] = {}
        self.groups: dict[object, _Group] = {}
        self.exchanged: dict[object, tuple[Phase, int, str, int, list[int]]] = {}
        self.seen: set[tuple[int, Layout]] = set()
        self._known: dict[object, _Followed] = {}

    def run(self, call: int, region: Region, phase: Phase, inputs: tuple[Layout, ...]) -> None:
        """Follow a region of a call whose outside inputs lie like this."""
        wiring = self.wiring
        own: tuple[tuple[int, Strategy], ...] = ()
        if self.overrides:
            numbers = [(k, wiring.flat_kernel(call, k)) for k, *_ in region.kernels]
            own = tuple((k, self.overrides[n]) for k, n in numbers if n in self.overrides)
        template = wiring.calls[call].template
        key = (template, phase, id(region), inputs, own)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._follow(template, region, inputs, dict(own))
        first, omits = wiring.first_kernel[call], wiring.calls[call].omits
        base = wiring.offsets[call]
        self.layouts.update([(base + ref, layout) for ref, layout in found.made])
        if omits:
            self.uses.update([(wiring.flat_kernel(call, k), use) for k, use in found.uses])
        else:
            self.uses.update([(first + k, use) for k, use in found.uses])
        for ref, before, after, kernel in found.demands:
            value = wiring.value(call, ref)
            if (value, after) not in self.seen:
                self.seen.add((value, after))
                self.add(("value", template, ref, kernel), "value", phase, before, after, value,
                         wiring.flat_kernel(call, kernel))  # fmt: skip
        for kernel, use in found.exchanges:
            for e in use.exchanges:
                row = self.exchanged.setdefault((template, kernel, e), (phase, e.axis, e.reducer, e.bytes, []))
                row[4].append(wiring.flat_kernel(call, kernel))

    def add(
        self, key: object, role: Role, phase: Phase, before: Layout, after: Layout, value: int, kernel: int
    ) -> None:
        group = self.groups.setdefault((key, before, after), _Group(role, phase, before, after))
        group.values.append(value)
        group.kernels.append(kernel)

    def _follow(
        self, template: int, region: Region, inputs: tuple[Layout, ...], overrides: Mapping[int, Strategy]
    ) -> _Followed:
        base = self.wiring.class_base[template]
        place = dict(zip(region.outside, inputs, strict=True))
        demands: dict[tuple[int, Layout], tuple[int, Layout, Layout, int]] = {}
        made, uses, exchanges = [], [], []
        for k, refs, first, count in region.kernels:
            strategy = overrides[k] if k in overrides else self.classes.get(base + k, NONE)
            use = use_of(self.calls[base + k], strategy, self.axes)
            for ref, wanted in zip(refs, use.inputs, strict=True):
                if place[ref] != wanted and (ref, wanted) not in demands:
                    demands[ref, wanted] = (ref, place[ref], wanted, k)
            for n in range(count):
                place[first + n] = use.outputs[n]
                made.append((first + n, use.outputs[n]))
            uses.append((k, use))
            if use.exchanges:
                exchanges.append((k, use))
        return _Followed(made, list(demands.values()), uses, exchanges)

    def finished(self) -> Flow:
        graph, wiring = self.graph, self.wiring
        specs = graph.flat.kernel_value_spec
        found = []
        for group in self.groups.values():
            spec, producer = specs[group.values[0]], self.producer(group.values[0])
            consumer = wiring.ids[group.kernels[0]] if group.kernels[0] >= 0 else "the next stage"
            shape = spec.shape(self.micro_batch)
            found.append(
                Conversion(
                    role=group.role, phase=group.phase, per_step=False, values=tuple(group.values),
                    kernels=tuple(group.kernels), producer=producer, consumer=consumer, before=group.before,
                    after=group.after, shape=shape, dtype=spec.dtype,
                    steps=self.steps(shape, spec.dtype, group.before, group.after, f"{consumer} needs {producer}"),
                )
            )  # fmt: skip
        for row in state_conversions(self.state, self.layouts, self.wiring, self.uses):
            spec = specs[row.values[0]]
            shape = spec.shape(self.micro_batch)
            found.append(
                Conversion(
                    role=row.role, phase=row.phase, per_step=row.per_step, values=row.values, kernels=row.kernels,
                    producer=row.producer, consumer=row.consumer, before=row.before, after=row.after, shape=shape,
                    dtype=spec.dtype, steps=self.steps(shape, spec.dtype, row.before, row.after, row.producer),
                )
            )  # fmt: skip
        exchanges = [
            Exchanged(phase=phase, axis=axis, reducer=reducer, bytes=size, kernels=tuple(kernels))
            for phase, axis, reducer, size, kernels in self.exchanged.values()
        ]
        return Flow(
            graph=graph, axes=self.axes, micro_batch=self.micro_batch, layouts=self.layouts, uses=self.uses,
            conversions=tuple(found), exchanges=tuple(exchanges),
        )  # fmt: skip

    def made(self, value: int) -> Layout:
        """How a value of this stage rests, by its maker's strategy alone."""
        flat = self.graph.flat
        kernel = int(flat.kernel_value_kernel[value])
        cls = int(flat.kernel_class[kernel])
        strategy = self.overrides.get(kernel) or self.classes.get(cls, NONE)
        return use_of(self.calls[cls], strategy, self.axes).outputs[value - int(flat.kernel_outputs[kernel])]

    def producer(self, value: int) -> str:
        """Who made a value, in words."""
        maker = int(self.graph.flat.kernel_value_kernel[value])
        if maker >= 0:
            return self.wiring.ids[maker]
        return self.state.name_of(value)

    def steps(self, shape: tuple[int, ...], dtype: str, before: Layout, after: Layout, what: str) -> tuple[Step, ...]:
        sizes = tuple(size for _, size in self.axes)
        try:
            return conversions(shape, DTYPE_BYTES[dtype], before, after, sizes)  # type: ignore[arg-type]
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{what}: from {layout_text(before, self.axes)} to {layout_text(after, self.axes)}: {error}"
            ) from None


# --- all stages ------------------------------------------------------------------------------------------------------
def _follow(
    graph: Graph, stages: list[_Stage], ops: list[Ints] | None, only: Collection[int] | None = None
) -> tuple[Flow, ...]:
    """Values rest as the strategies of their makers leave them, so that a stage can be followed without those that
    send to it; those that read from it are looked at, for what must be reduced before it leaves."""
    wiring = wiring_of(graph)
    followed = frozenset(range(len(stages)) if only is None else only)
    home: Ints = _homes(graph, ops) if ops is not None else np.zeros(0, dtype=np.int64)
    member = np.zeros((len(stages), len(graph.flat.op_class)), dtype=bool)
    for s, held in enumerate(ops or ()):
        member[s, held] = True
    maker_op = graph.flat.kernel_op
    near: Sequence[int] = range(len(graph.calls))
    if ops is not None and only is not None:
        near = _near(graph, np.flatnonzero(member[sorted(followed)].any(axis=0)))
    for phase, call, s, kernels in _regions(graph, wiring, ops, near):
        stage = stages[s]
        region = wiring.region(wiring.calls[call], kernels)
        if s not in followed:
            for ref in region.outside:
                value = wiring.value(call, ref)
                source = int(home[value])
                if source in followed and source != s:
                    kernel = int(graph.flat.kernel_value_kernel[value])
                    if not member[s, maker_op[kernel]]:
                        _arrive(stages[source], stage, value, followed=True)
            continue
        inputs = []
        for ref in region.outside:
            value = wiring.value(call, ref)
            layout = stage.layouts.get(value)
            if layout is None:
                layout = stage.state.layout_of(value)
                if layout is None:
                    source = int(home[value])
                    layout = _arrive(stages[source], stage, value, followed=source in followed)
                stage.layouts[value] = layout
            inputs.append(layout)
        stage.run(call, region, phase, tuple(inputs))
    return tuple(stages[s].finished() for s in sorted(followed))


def _near(graph: Graph, held: Ints) -> list[int]:
    """The calls that hold some of these ops, or read what these make."""
    flat = graph.flat
    inside = np.isin(flat.kernel_op, held)
    maker = flat.kernel_value_kernel[flat.kernel_inputs]
    reads = np.flatnonzero((maker >= 0) & inside[np.maximum(maker, 0)])
    reader = np.searchsorted(flat.kernel_indptr, reads, side="right") - 1
    here = np.zeros(len(graph.calls), dtype=bool)
    here[flat.op_call[held]] = True
    here[flat.op_call[flat.kernel_op[reader]]] = True
    found: list[int] = np.flatnonzero(here).tolist()
    return found


def _homes(graph: Graph, ops: list[Ints]) -> Ints:
    """Stage of each kernel-level value, clones aside: the first that makes it; -1 for sources."""
    flat = graph.flat
    first, last = (np.full(len(flat.op_class), -1, dtype=np.int64) for _ in range(2))
    for s in range(len(ops) - 1, -1, -1):
        first[ops[s]] = s
    for s, held in enumerate(ops):
        last[held] = s
    maker = flat.kernel_value_kernel
    op = flat.kernel_op[np.maximum(maker, 0)]
    stage = np.where(flat.kernel_forward[np.maximum(maker, 0)], first[op], last[op])
    found: Ints = np.where(maker >= 0, stage, -1)
    return found


def _arrive(source: _Stage, target: _Stage, value: int, followed: bool) -> Layout:
    """How a value lies on the axes of the stage that it comes to; a partial one is reduced before it leaves."""
    left = source.layouts[value] if followed else source.made(value)
    sent = tuple(Replicate() if isinstance(p, Partial) else p for p in left)
    if followed and sent != left and (value, sent) not in source.seen:
        source.seen.add((value, sent))
        kernel = int(source.graph.flat.kernel_value_kernel[value])
        phase: Phase = "F" if source.graph.flat.kernel_forward[kernel] else "B"
        cls = int(source.graph.flat.kernel_class[kernel])
        source.add(("boundary", cls), "boundary", phase, left, sent, value, -1)
    known = {axis: place for axis, place in zip(source.axes, sent, strict=True) if axis[0] != REPLICA_AXIS}
    return tuple(known.get(axis, Replicate()) for axis in target.axes)


def _regions(
    graph: Graph, wiring: Wiring, ops: list[Ints] | None, near: Sequence[int]
) -> Iterator[tuple[Phase, int, int, tuple[int, ...]]]:
    """(phase, call, stage, kernels) of these calls in running order: forward by calls, then backward from the last call
    to the first."""
    whole: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for i in near:
        c = graph.calls[i]
        if not c.omits and c.template not in whole:
            whole[c.template] = wiring.whole(c)
    shares: list[list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = []
    if ops is not None:
        call_of = graph.flat.op_call
        chosen = np.zeros(len(graph.calls), dtype=bool)
        chosen[list(near)] = True
        first_op = np.searchsorted(call_of, np.arange(len(graph.calls)))
        members: dict[int, dict[int, set[int]]] = {i: {} for i in near}
        for s, held in enumerate(ops):
            mine = held[chosen[call_of[held]]]
            at = call_of[mine]
            for i, local in zip(at.tolist(), (mine - first_op[at]).tolist(), strict=True):
                members[i].setdefault(s, set()).add(local)
    for i in near:
        call = graph.calls[i]
        forward, backward = whole[call.template] if not call.omits else wiring.whole(call)
        if ops is None:
            shares.append([(0, forward, backward)])
            continue
        template, rows = graph.templates[call.template], []
        for s, inside in sorted(members[i].items()):
            if len(inside) == len(template.ops):
                rows.append((s, forward, backward))
            else:
                first, second = (
                    tuple(k for k in part if template.kernels[k].op in inside) for part in (forward, backward)
                )
                rows.append((s, first, second))
        shares.append(rows)
    for i, rows in zip(near, shares, strict=True):
        for s, forward, _ in rows:
            if forward:
                yield "F", i, s, forward
    for i, rows in zip(reversed(near), reversed(shares), strict=True):
        for s, _, backward in reversed(rows):
            if backward:
                yield "B", i, s, backward
