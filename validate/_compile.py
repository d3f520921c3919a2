"""The stage compiler: the ops of one stage of a plan as a local program on the stage's own parameters."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from simpart.capture._ops import ExportedOps
from simpart.errors import UserError
from simpart.validate._program import Instruction, Program, Slot
from simpart.validate._regions import with_regions

__all__ = ["Key", "StageProgram", "compile_stage", "paths", "value_of"]

Key = tuple[str, int]
"""A value by the op that makes it and the number of its output: the same on every rank, whatever its micro-batch."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """A stage ready to run. Parameters, buffers and constants are those that the stage reads, by their first names.

    `inputs` and `outputs` are the boundary values; the loss, where `has_loss`, comes after the outputs.
    """

    program: Program
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    graph_inputs: tuple[int, ...]
    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    has_loss: bool

    def run(self, boundary: Sequence[torch.Tensor], graph_inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Boundary outputs (and the loss) of one micro-batch, given its boundary inputs and all the model's inputs."""
        given = [graph_inputs[i] for i in self.graph_inputs]
        return self.program(*boundary, *given, *self.parameters.values(), *self.buffers.values())


def compile_stage(
    exported: ExportedOps,
    ops: Sequence[int],
    *,
    inputs: Sequence[Key],
    outputs: Sequence[Key],
    parameters: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    recompute: Sequence[Collection[int]] = (),
    loss: bool = False,
    device: torch.device | str = "cpu",
) -> StageProgram:
    """Compile the ops `ops` (sorted, clones included), which receive `inputs` and give `outputs`.

    `parameters` and `buffers` (constants among them) offer tensors by their first names; those that are read are
    kept. Outputs are contiguous clones: what leaves a stage shares no storage with what stays. Raises UserError for a
    region that cannot be recomputed as one piece.
    """
    builder = _Builder(exported, torch.device(device))
    boundary = [builder.receive(key) for key in inputs]
    for op in ops:
        builder.add(op)
    leaving = [builder.slot_of_key(key) for key in outputs]
    wanted = [builder.loss()] if loss else []
    instructions = builder.instructions
    if recompute:
        writers = {i.name for i in instructions if exported.mutates_buffer[i.owner]}
        buffer_slots = {slot for name, slot in builder.held.items() if name not in parameters}
        written = set().union(*(i.reads & buffer_slots for i in instructions if i.name in writers))
        keep = {*leaving, *wanted}
        instructions = with_regions(
            instructions, recompute, exported.groups, keep=keep, written=written, slots=builder.slots
        )
    clones = []
    ends = [
        (f"{op} (output {output} leaves the stage)", slot) for (op, output), slot in zip(outputs, leaving, strict=True)
    ]
    for name, slot in [*ends, *(("the loss", slot) for slot in wanted)]:
        clones.append(builder.new_slot())
        instructions.append(
            Instruction(
                owner=-1, name=name, call=torch.clone, arguments=(Slot(slot),),
                keywords={"memory_format": torch.contiguous_format}, outputs=(clones[-1],),
            )
        )  # fmt: skip
    own = {name: parameters[name] for name in builder.held if name in parameters}
    rest = {name: buffers[name] for name in builder.held if name not in parameters}
    entering = [*boundary, *builder.given.values(), *(builder.held[n] for n in own), *(builder.held[n] for n in rest)]
    return StageProgram(
        program=Program(instructions, entering, clones, builder.slots),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        graph_inputs=tuple(builder.given),
        parameters=own,
        buffers=rest,
        has_loss=loss,
    )


def is_pick(node: fx.Node) -> bool:
    """True for the `getitem` that takes one output of an op with several."""
    source = node.args[0] if node.args else None
    return (
        node.target is operator.getitem
        and isinstance(source, fx.Node)
        and not isinstance(value_of(source), torch.Tensor)
    )


def value_of(node: fx.Node) -> Any:
    """The fake value that tracing left at a node."""
    return next(node.meta[key] for key in ("simpart_value", "val", "example_value") if key in node.meta)


def paths(value: Any) -> list[tuple[int, ...]]:
    """For each tensor of a nested value, in order, the picks that lead to it."""
    if isinstance(value, torch.Tensor):
        return [()]
    if isinstance(value, list | tuple):
        return [(i, *path) for i, item in enumerate(value) for path in paths(item)]
    return []


class _Builder:
    """Turns nodes of the exported graph into instructions, giving each value a slot."""

    def __init__(self, exported: ExportedOps, device: torch.device) -> None:
        self.exported, self.device = exported, device
        self.slots = 0
        self.instructions: list[Instruction] = []
        self.given: dict[int, int] = {}
        self.held: dict[str, int] = {}
        self.slot: dict[tuple[fx.Node, tuple[int, ...]], int] = {}  # (op, picks) that lead to the value
        self.index = {name: i for i, name in enumerate(exported.ids)}
        placeholders = (n for n in exported.graph.graph.nodes if n.op == "placeholder")
        self.position = {node: i for i, node in enumerate(placeholders)}
        self.current = "the loss"

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def place(self, key: Key) -> tuple[fx.Node, tuple[int, ...]]:
        node = self.exported.nodes[self.index[key[0]]]
        return node, paths(value_of(node))[key[1]]

    def receive(self, key: Key) -> int:
        self.slot[self.place(key)] = slot = self.new_slot()
        return slot

    def slot_of_key(self, key: Key) -> int:
        return self.slot[self.place(key)]

    def add(self, op: int) -> None:
        """The instruction of one op, and those that take its outputs apart."""
        node, name = self.exported.nodes[op], self.exported.ids[op]
        if node.op == "call_module":
            raise UserError(
                f"op {name} calls the module {node.target} as a whole; stages run ops, so capture it as ops"
            )
        self.current = name
        call: Callable[..., Any] = node.target if callable(node.target) else _Method(str(node.target))
        arguments = tuple(self.lower(a) for a in node.args)
        keywords = {k: self.lower(a) for k, a in node.kwargs.items()}
        slot = self.slot[node, ()] = self.new_slot()
        self.instructions.append(
            Instruction(
                owner=op, name=name, call=call, arguments=arguments, keywords=keywords, outputs=(slot,),
                context=context_of(self.exported.contexts[op]),
            )
        )  # fmt: skip
        self.take_apart(op, node, node, ())

    def take_apart(self, op: int, producer: fx.Node, node: fx.Node, picks: tuple[int, ...]) -> None:
        for user in node.users:
            if not is_pick(user) or user.args[0] is not node:
                continue
            path = (*picks, int(user.args[1]))  # type: ignore[arg-type]  # fx: arguments are loosely typed
            if (producer, path) not in self.slot:
                slot = self.slot[producer, path] = self.new_slot()
                arguments = (Slot(self.slot[producer, picks]), path[-1])
                name = self.exported.ids[op]
                self.instructions.append(
                    Instruction(owner=op, name=name, call=operator.getitem, arguments=arguments, outputs=(slot,))
                )
            self.take_apart(op, producer, user, path)

    def loss(self) -> int:
        self.current = "the loss"
        output = next(n for n in self.exported.graph.graph.nodes if n.op == "output").args[0]
        return self.read(output[0] if isinstance(output, list | tuple) else output)

    def read(self, node: fx.Node) -> int:
        if node.op == "placeholder":
            position = self.position[node]
            if position not in self.given:
                self.given[position] = self.new_slot()
            return self.given[position]
        if node.op == "get_attr":
            name = self.exported.names.get(str(node.target), str(node.target))
            if name not in self.held:
                self.held[name] = self.new_slot()
            return self.held[name]
        picks: tuple[int, ...] = ()
        while is_pick(node):
            picks = (int(node.args[1]), *picks)  # type: ignore[arg-type]
            node = node.args[0]  # type: ignore[assignment]
        if (node, picks) not in self.slot:
            maker = self.exported.ids[self.exported.nodes.index(node)]
            raise UserError(f"op {self.current} reads {maker}, which its stage neither runs nor receives")
        return self.slot[node, picks]

    def lower(self, value: Any) -> Any:
        """An fx argument with slots for nodes, plain lists, and the device of this process."""
        if isinstance(value, fx.Node):
            return Slot(self.read(value))
        if isinstance(value, list):
            return [self.lower(item) for item in value]
        if type(value) is tuple:
            return tuple(self.lower(item) for item in value)
        if isinstance(value, slice):
            return slice(self.lower(value.start), self.lower(value.stop), self.lower(value.step))
        return self.device if isinstance(value, torch.device) else value


@dataclass(frozen=True, slots=True)
class _Method:
    """A tensor method by name, as a function."""

    name: str

    def __call__(self, tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(tensor, self.name)(*arguments, **keywords)


def context_of(modes: tuple[bool, tuple[tuple[Any, ...], ...]]) -> Context | None:
    """What to run an op under, given its gradient mode and autocast regions; None for neither."""
    recording, autocast = modes
    return None if recording and not autocast else _Modes(autocast, recording)


@dataclass(frozen=True, slots=True)
class _Modes:
    """Opens the autocast regions an op stands in (each: device type, dtype, enabled, cache) and its gradient mode."""

    autocast: tuple[tuple[Any, ...], ...]
    recording: bool

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        return self._opened()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device_type, dtype, enabled, cache in self.autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
            if not self.recording:
                stack.enter_context(torch.no_grad())
            yield
