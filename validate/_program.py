"""Local programs: a list of instructions over the numbered slots of a frame, on tensors of one process.

Ops of the exported graph, recomputed regions and whatever moves a tensor from one placement to another are all
instructions: a sharded stage differs from a whole one by conversions between its ops and by other callables where an
op needs localising.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.checkpoint import checkpoint

from simpart.validate._torch import RecomputationDone

__all__ = ["Instruction", "Program", "Recomputed", "Slot", "StageError", "slots_in"]


class StageError(RuntimeError):
    """An op failed while a stage ran; says which."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of the frame, standing for a value among an instruction's arguments."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """`call(*arguments, **keywords)`, slots filled in, goes to the one slot of `outputs`; with `spread` the call
    returns one value for each. Then the slots of `release` are emptied. `owner` is the op it belongs to, `name` what
    errors call it."""

    owner: int
    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    outputs: tuple[int, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    spread: bool = False
    release: tuple[int, ...] = ()
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None

    @property
    def reads(self) -> set[int]:
        return {*slots_in(self.arguments), *slots_in(tuple(self.keywords.values()))}


def slots_in(value: Any) -> Iterator[int]:
    if type(value) is Slot:
        yield value.number
    elif isinstance(value, list | tuple):
        for item in value:
            yield from slots_in(item)
    elif isinstance(value, slice):
        yield from slots_in((value.start, value.stop, value.step))


def _filled(value: Any, frame: list[Any]) -> Any:
    kind = type(value)
    if kind is Slot:
        return frame[value.number]
    if kind is list or kind is tuple:
        return kind([_filled(item, frame) for item in value])
    if kind is slice:
        return slice(_filled(value.start, frame), _filled(value.stop, frame), _filled(value.step, frame))
    return value


class Program:
    """Instructions over a frame of `slots` places: the caller gives `inputs`, gets `outputs`.

    Values are dropped after their last use, so that only autograd keeps what backward needs. An op that fails raises
    StageError.
    """

    def __init__(
        self, instructions: Sequence[Instruction], inputs: Sequence[int], outputs: Sequence[int], slots: int
    ) -> None:
        self.instructions = with_releases(instructions, keep={*inputs, *outputs})
        self.inputs, self.outputs, self.slots = tuple(inputs), tuple(outputs), slots

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        frame: list[Any] = [None] * self.slots
        for slot, value in zip(self.inputs, values, strict=True):
            frame[slot] = value
        name = "?"
        try:
            for instruction in self.instructions:
                name = instruction.name
                arguments = [_filled(a, frame) for a in instruction.arguments]
                keywords = (
                    {k: _filled(a, frame) for k, a in instruction.keywords.items()} if instruction.keywords else {}
                )
                with instruction.context() if instruction.context is not None else _NO_CONTEXT:
                    result = instruction.call(*arguments, **keywords)
                if instruction.spread:
                    for slot, value in zip(instruction.outputs, result, strict=True):
                        frame[slot] = value
                else:
                    frame[instruction.outputs[0]] = result
                del arguments, keywords, result
                for slot in instruction.release:
                    frame[slot] = None
        except (StageError, RecomputationDone):
            raise
        except Exception as error:
            raise StageError(f"op {name} failed: {type(error).__name__}: {error}") from error
        return tuple([frame[slot] for slot in self.outputs])


_NO_CONTEXT = contextlib.nullcontext()


def with_releases(instructions: Sequence[Instruction], keep: set[int]) -> tuple[Instruction, ...]:
    """The same instructions, each emptying the slots that no later one reads."""
    later = set(keep)
    result = []
    for instruction in reversed(instructions):
        touched = instruction.reads | set(instruction.outputs)
        result.append(replace(instruction, release=tuple(sorted(touched - later))))
        later |= touched
    return tuple(reversed(result))


class Recomputed:
    """A region as one call: forward keeps only its inputs, backward runs it again with the same random draws.

    The second run writes to copies of the inputs numbered in `written` (buffers), so that statistics are updated once.
    """

    def __init__(self, program: Program, written: frozenset[int]) -> None:
        self.program, self.written = program, written

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        runs = 0
        kept = {i: values[i] for i in self.written}  # not as arguments: autograd would refuse to find them changed

        def run(*inputs: Any) -> tuple[Any, ...]:
            nonlocal runs
            runs += 1
            given = iter(inputs)
            buffers = kept if runs == 1 else {i: v.clone() for i, v in kept.items()}
            return self.program(*(buffers[i] if i in buffers else next(given) for i in range(len(values))))

        rest = [v for i, v in enumerate(values) if i not in kept]
        result: tuple[Any, ...] = checkpoint(run, *rest, use_reentrant=False, preserve_rng_state=True)
        return result
