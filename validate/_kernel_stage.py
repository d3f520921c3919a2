"""The stage compiler of sharded plans: kernels of the joint graph on one device's parts, in the order they run.

Each kernel runs as its strategy says, forward and backward alike, so that no rule relates the two. A value rests as its
kernel left it; what a reader needs otherwise is converted once per (value, layout). Parameters that rest in shards
over replicas are gathered before their first reader in forward and again in backward, views of them made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from simpart.errors import UnsupportedError
from simpart.graph import Graph, Source
from simpart.graph.sizes import DTYPE_BYTES
from simpart.placement import Partial, Replicate, Shard, Sharding, StatePlacement, Strategy
from simpart.plan import REPLICA_AXIS
from simpart.sharding import Flow, Layout, calls_of, layout_text
from simpart.sharding._regions import wiring_of
from simpart.sharding._state import StateOf, _kept
from simpart.sharding.mesh import rest_layout
from simpart.validate._crossings import Needs, Updated
from simpart.validate._local_kernels import Draw, bind
from simpart.validate._mesh import Convert, Mesh
from simpart.validate._program import StageError

__all__ = ["Frame", "GradientOf", "KernelStage", "compile_kernels"]

Frame = list[Any]
Call = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class GradientOf:
    """A gradient as it accumulates over micro-batches: of this parameter, in this layout."""

    name: str
    layout: Layout


@dataclass(slots=True)
class Step:
    """A call on slots of the frame; `results` names what leaves the stage (values, gradients, buffers, the loss)."""

    name: str
    call: Call | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[Any, ...] = ()
    release: tuple[int, ...] = ()


@dataclass(kw_only=True)
class KernelStage:
    """A stage ready to run.

    `held` says which sources fill which slots of a new frame; `arriving` the slots of values that come from other
    stages; `buffers` the name of each buffer that is written and how what it becomes lies. `run` takes the steps of
    one phase and returns what leaves, by value number, GradientOf, Updated or "loss".
    """

    slots: int
    held: tuple[tuple[int, Source], ...]
    arriving: dict[int, int]
    forward: list[Step]
    inputs: list[Step]
    weights: list[Step]
    gradients: tuple[GradientOf, ...]
    loss_layout: Layout | None
    buffers: dict[int, tuple[str, Layout]]

    def run(self, frame: Frame, steps: Sequence[Step]) -> dict[Any, list[torch.Tensor]]:
        left: dict[Any, list[torch.Tensor]] = {}
        name = "?"
        try:
            for step in steps:
                name = step.name
                given = [frame[s] for s in step.reads]
                if step.call is None:
                    for key, tensor in zip(step.results, given, strict=True):
                        left.setdefault(key, []).append(tensor)
                else:
                    for slot, tensor in zip(step.writes, step.call(given), strict=True):
                        frame[slot] = tensor
                del given
                for slot in step.release:
                    frame[slot] = None
        except Exception as error:
            raise StageError(f"{name} failed: {type(error).__name__}: {error}") from error
        return left


def compile_kernels(
    graph: Graph,
    flow: Flow,
    needs: Needs,
    stage: int,
    mesh: Mesh,
    *,
    sharding: Sharding,
    state: tuple[tuple[str, StatePlacement], ...],
    recompute: Sequence[Iterable[int]] = (),
    split: bool = False,
    floating: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    draw: Draw | None = None,
) -> KernelStage:
    """Compile a stage's kernels for this rank. `recompute` are regions of op indices; `split` puts what only gradients
    of parameters need into `weights`; `floating` replaces the graph's floating-point dtypes.

    Raises UnsupportedError, naming kernel and placements, for what is not run.
    """
    compiler = _Compiler(
        graph, flow, needs, stage, mesh, sharding, state, floating, torch.device(device), draw or Draw()
    )
    return compiler.compiled([set(region) for region in recompute], split)


@dataclass(slots=True)
class _Compiler:
    graph: Graph
    flow: Flow
    needs: Needs
    stage: int
    mesh: Mesh
    sharding: Sharding
    state: tuple[tuple[str, StatePlacement], ...]
    floating: torch.dtype | None
    device: torch.device
    draw: Draw
    slots: int = 0
    slot: dict[tuple[int, Layout], int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    arriving: dict[int, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    bound: dict[int, Call] = field(default_factory=dict)
    sources: StateOf = field(init=False)
    strategies: dict[int, Strategy] = field(default_factory=dict)
    overrides: dict[int, Strategy] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)

    def compiled(self, regions: list[set[int]], split: bool) -> KernelStage:
        needs, s = self.needs, self.stage
        wiring = wiring_of(self.graph)
        self.sources = StateOf(self.graph, self.state, self.flow.axes)
        self.strategies = {wiring.class_names[n]: strategy for n, strategy in self.sharding.classes}
        self.overrides = {wiring.kernel_number[n]: strategy for n, strategy in self.sharding.overrides}
        forward, backward = needs.forward[s], needs.backward[s]
        leaving = {w.value for w in needs.ways if w.source == s}
        for way in needs.ways:
            if way.destination == s:
                self.arriving[way.value] = self.slot[way.value, self.flow.layouts[way.value]] = self.new_slot()
        terms: dict[int, list[int]] = {}
        for parameter, values in needs.gradients[s].items():
            for value in values:
                terms.setdefault(value, []).append(parameter)
        written = {u.value: u for u in needs.updates[s]}
        self.again = self._made_again(forward, backward, regions)
        gradients: list[GradientOf] = []

        for k in forward:
            self.kernel(k)
            for value in self.outputs(k):
                if value in leaving:
                    self.leave(value)
                if value in written:
                    self.write(written[value])
        loss_layout = None
        if s == needs.loss_stage:
            loss_layout = self.flow.layouts[needs.loss]
            self.result("the loss", [self.slot[needs.loss, loss_layout]], ["loss"])
        first = self.steps
        copies = self._copies_made_again(forward, backward, regions)
        for key in [key for key in self.slot if key[0] in self.again or key in copies]:
            del self.slot[key]

        early = self._for_inputs(backward, leaving) if split else list(backward)
        late = [k for k in backward if k not in set(early)]
        parts = []
        for kernels in (early, late):
            self.steps = []
            for k in kernels:
                self.kernel(k)
                for value in self.outputs(k):
                    if value in leaving:
                        self.leave(value)
                    for parameter in terms.get(value, ()):
                        gradients.append(self.gradient(value, parameter))
            parts.append(self.steps)
        self.released([first, *parts])
        return KernelStage(
            slots=self.slots,
            held=tuple((slot, self.source(value)) for value, slot in self.held.items()),
            arriving=self.arriving,
            forward=first, inputs=parts[0], weights=parts[1],
            gradients=tuple(dict.fromkeys(gradients)),
            loss_layout=loss_layout,
            buffers={u.buffer: (self.source(u.buffer).name, self.flow.layouts[u.value]) for u in needs.updates[s]},
        )  # fmt: skip

    # --- what backward makes again -----------------------------------------------------------------------------------
    def _made_again(self, forward: Sequence[int], backward: Sequence[int], regions: list[set[int]]) -> set[int]:
        """Values dropped after forward and made again when backward asks for them: gathered parameters, views of them,
        and what lies inside recomputed regions."""
        flat = self.graph.flat
        again = {v for v in self.flow.layouts if self.gathers(v)}
        op_of = flat.kernel_op.tolist()
        region_of = {op: r for r, region in enumerate(regions) for op in region}
        read_elsewhere: set[int] = {w.value for w in self.needs.ways if w.source == self.stage}
        for k in (*forward, *backward):
            for value in self.inputs(k):
                maker = int(flat.kernel_value_kernel[value])
                if maker >= 0 and region_of.get(op_of[k], -1) != region_of.get(op_of[maker], -2):
                    read_elsewhere.add(value)
        if self.stage == self.needs.loss_stage:
            read_elsewhere.add(self.needs.loss)
        for k in forward:
            kernel = self.graph.kernel_classes[int(flat.kernel_class[k])]
            inside = op_of[k] in region_of
            view = kernel.view and self.inputs(k)[0] in again and not self.source_of(self.outputs(k)[0])
            again.update(v for v in self.outputs(k) if view or (inside and v not in read_elsewhere))
        return again

    def _copies_made_again(
        self, forward: Sequence[int], backward: Sequence[int], regions: list[set[int]]
    ) -> set[tuple[int, Layout]]:
        """Values in other layouts than they were made in, which only one recomputed region reads."""
        region_of = {op: r for r, region in enumerate(regions) for op in region}
        readers: dict[tuple[int, Layout], set[int]] = {}
        for k in (*forward, *backward) if regions else ():
            region = region_of.get(int(self.graph.flat.kernel_op[k]), -1)
            for key in zip(self.inputs(k), self.flow.uses[k].inputs, strict=True):
                readers.setdefault(key, set()).add(region)
        return {
            key for key, found in readers.items()
            if len(found) == 1 and -1 not in found and key[1] != self.flow.layouts[key[0]] and key[0] not in self.held
        }  # fmt: skip

    def _for_inputs(self, backward: Sequence[int], leaving: set[int]) -> list[int]:
        """The backward kernels that gradients sent to other stages need; all where none is sent."""
        inside, needed = set(backward), set()
        flat = self.graph.flat
        stack = [int(flat.kernel_value_kernel[v]) for v in leaving]
        while stack:
            k = stack.pop()
            if k in inside and k not in needed:
                needed.add(k)
                stack += [int(flat.kernel_value_kernel[v]) for v in self.inputs(k)]
        return [k for k in backward if k in needed] or list(backward)

    # --- the graph ---------------------------------------------------------------------------------------------------
    def inputs(self, k: int) -> list[int]:
        flat = self.graph.flat
        found: list[int] = flat.kernel_inputs[flat.kernel_indptr[k] : flat.kernel_indptr[k + 1]].tolist()
        return found

    def outputs(self, k: int) -> range:
        first = int(self.graph.flat.kernel_outputs[k])
        return range(first, first + len(self.graph.kernel_classes[int(self.graph.flat.kernel_class[k])].outputs))

    def source_of(self, value: int) -> Source | None:
        return self.sources.source(value) if int(self.graph.flat.kernel_value_kernel[value]) < 0 else None

    def source(self, value: int) -> Source:
        found = self.source_of(value)
        assert found is not None
        return found

    def rest(self, source: Source) -> Layout:
        return rest_layout(self.sources.rest_of(source).parameter, self.flow.axes)

    def gathers(self, value: int) -> bool:
        source = self.source_of(value)
        return source is not None and source.kind == "parameter" and self.rest(source) != self.flow.layouts[value]

    def shape(self, value: int) -> tuple[int, ...]:
        return self.graph.flat.kernel_value_spec[value].shape(self.flow.micro_batch)

    def itemsize(self, value: int) -> int:
        return DTYPE_BYTES[self.graph.flat.kernel_value_spec[value].dtype]

    # --- emitting ----------------------------------------------------------------------------------------------------
    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def emit(self, name: str, call: Call | None, reads: Sequence[int], writes: Sequence[int]) -> None:
        self.steps.append(Step(name, call, tuple(reads), tuple(writes)))

    def result(self, name: str, reads: Sequence[int], results: Sequence[Any]) -> None:
        self.steps.append(Step(name, None, tuple(reads), (), tuple(results)))

    def kernel(self, k: int) -> None:
        flat, wiring = self.graph.flat, wiring_of(self.graph)
        use, cls = self.flow.uses[k], int(flat.kernel_class[k])
        reads = [self.at(v, layout) for v, layout in zip(self.inputs(k), use.inputs, strict=True)]
        if k not in self.bound:
            call = calls_of(self.graph, self.flow.micro_batch)[cls]
            strategy = self.overrides.get(k) or self.strategies.get(cls, Strategy(()))
            self.bound[k] = bind(
                wiring.ids[k], call, strategy, self.mesh, floating=self.floating, device=self.device, draw=self.draw
            )
        writes = [self.new_slot() for _ in use.outputs]
        for value, layout, slot in zip(self.outputs(k), use.outputs, writes, strict=True):
            self.slot.setdefault((value, layout), slot)
        axes = self.flow.axes
        made, given = (" ".join(f"[{layout_text(x, axes)}]" for x in side) for side in (use.outputs, use.inputs))
        self.emit(f"kernel {wiring.ids[k]} ({given} → {made})", self.bound[k], reads, writes)

    def at(self, value: int, layout: Layout) -> int:
        """The slot of a value in a layout, made if need be."""
        known = self.slot.get((value, layout))
        if known is not None:
            return known
        made = self.flow.layouts[value]
        if layout != made:
            base = self.at(value, made)
            return self.convert(value, made, layout, base, remember=True)
        source = self.source_of(value)
        if source is None:
            self.kernel(int(self.graph.flat.kernel_value_kernel[value]))
            return self.slot[value, layout]
        if value not in self.held:
            self.held[value] = self.new_slot()
        slot = self.held[value]
        if self.gathers(value):
            return self.convert(value, self.rest(source), made, slot, remember=True)
        self.slot[value, made] = slot
        return slot

    def convert(self, value: int, before: Layout, after: Layout, slot: int, *, remember: bool = False) -> int:
        maker = int(self.graph.flat.kernel_value_kernel[value])
        name = wiring_of(self.graph).ids[maker] if maker >= 0 else self.sources.name_of(value)
        what = f"{name} from [{layout_text(before, self.flow.axes)}] to [{layout_text(after, self.flow.axes)}]"
        found = self.mesh.converter(self.shape(value), self.itemsize(value), before, after, what)
        to = slot
        if found is not None:
            to = self.new_slot()
            self.emit(f"conversion of {what}", _on_first(found), [slot], [to])
        if remember:
            self.slot[value, after] = to
        return to

    def leave(self, value: int) -> None:
        """Hand a value to another stage; what is pending is reduced first."""
        left = self.flow.layouts[value]
        sent: Layout = tuple(Replicate() if isinstance(p, Partial) else p for p in left)
        self.result(f"value {value} leaves", [self.at(value, sent)], [value])

    def gradient(self, value: int, parameter: int) -> GradientOf:
        """Bring a term of a parameter's gradient to where it accumulates."""
        source, axes = self.graph.parameters[parameter], self.flow.axes
        wanted = rest_layout(self.sources.rest_of(source).gradient, axes)
        made = self.flow.layouts[value]
        left: Layout = tuple(Partial() if n == REPLICA_AXIS else p for p, (n, _) in zip(made, axes, strict=True))
        kept: Layout = _kept(left, wanted, axes)
        slot = self.convert(value, left, kept, self.slot[value, made])
        found = GradientOf(source.name, kept)
        self.result(f"gradient of {source.name}", [slot], [found])
        return found

    def write(self, update: Updated) -> None:
        layout = self.flow.layouts[update.value]
        if any(not isinstance(p, Replicate) and not (isinstance(p, Shard) and p.block is None) for p in layout):
            raise UnsupportedError(
                f"buffer {self.source(update.buffer).name} becomes {layout_text(layout, self.flow.axes)}, which is not "
                "run; split its kernel along whole chunks"
            )
        name = self.source(update.buffer).name
        self.result(f"buffer {name}", [self.slot[update.value, layout]], [update])

    def released(self, parts: Sequence[list[Step]]) -> None:
        """Let each step empty the slots that no later one reads; sources stay."""
        later = set(self.held.values())
        for steps in reversed(parts):
            for step in reversed(steps):
                touched = {*step.reads, *step.writes}
                step.release = tuple(sorted(touched - later))
                later |= touched


def _on_first(convert: Convert) -> Call:
    return lambda given: [convert(given[0])]
