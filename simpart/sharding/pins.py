"""Pins: what a person, or a preset, says of a few tensors on one axis; everything else follows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from simpart.errors import ContradictionError, UnknownNameError, UserError
from simpart.graph import Graph, Source, named
from simpart.placement import Halo, Placement, Shard, placement_from_text
from simpart.sharding._regions import Wiring

__all__ = ["Pin", "Pinned", "divisors", "pinned", "pins_from_text"]


_TEXT = re.compile(r"(?P<kind>parameter|input|kernel):(?P<pattern>.+)=(?P<placement>[A-Z][^@]*)@(?P<axis>\w+)")


@dataclass(frozen=True, slots=True)
class Pin:
    """How parameters, graph inputs (by position) or first outputs of kernels lie; `pattern` matches their names, ids
    of kernels are as in `plan.kernel_ids`. The first pin that matches holds."""

    kind: Literal["parameter", "input", "kernel"]
    pattern: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class Pinned:
    """Pins found in a graph: placements of sources by kernel-level value number, and of kernels' first outputs by
    number in `graph.flat`."""

    values: Mapping[int, Placement]
    kernels: Mapping[int, Placement]


def pinned(graph: Graph, wiring: Wiring, pins: Sequence[Pin], axis: str, size: int, micro_batch: int) -> Pinned:
    """Raises UserError for a pattern that matches nothing, or a placement that a tensor of this size cannot have."""
    values: dict[int, Placement] = {}
    kernels: dict[int, Placement] = {}
    used: set[Pin] = set()
    wanted = [p for p in pins if p.kind != "kernel"]
    for value, source in _sources(graph, wiring) if wanted else ():
        for pin in wanted:
            if pin.kind == source.kind and _matches(source, pin.pattern):
                used.add(pin)
                _check(f"{source.kind} {source.name}", source.spec.shape(micro_batch), pin.placement, axis, size)
                values[value] = pin.placement
                break
    for pin in (p for p in pins if p.kind == "kernel"):
        for k, name in enumerate(wiring.ids):
            if k not in kernels and (name == pin.pattern or fnmatchcase(name, pin.pattern)):
                used.add(pin)
                spec = graph.kernel_classes[int(graph.flat.kernel_class[k])].outputs[0]
                _check(f"kernel {name}", spec.shape(micro_batch), pin.placement, axis, size)
                kernels[k] = pin.placement
    for pin in pins:
        if pin not in used:
            _refuse_unused(graph, wiring, pins, pin, axis)
    return Pinned(values, kernels)


def _refuse_unused(graph: Graph, wiring: Wiring, pins: Sequence[Pin], pin: Pin, axis: str) -> None:
    """Raise UserError for a pin that names nothing, or only what an earlier one places otherwise."""
    names: list[tuple[str, tuple[str, ...]]]
    if pin.kind == "kernel":
        names = [(name, (name,)) for name in wiring.ids]
    else:
        names = [(s.name, (s.name, *s.aliases)) for _, s in _sources(graph, wiring) if s.kind == pin.kind]

    def places(by: Pin, spellings: Sequence[str]) -> bool:
        return by.kind == pin.kind and any(n == by.pattern or fnmatchcase(n, by.pattern) for n in spellings)

    name, spellings = next(((n, all_) for n, all_ in names if places(pin, all_)), ("", ()))
    if not name:
        near = get_close_matches(pin.pattern, [n for n, _ in names], 8, 0.0)
        raise UnknownNameError(f"pinned {pin.kind}", pin.pattern, near)
    earlier = next(p for p in pins if places(p, spellings))
    if earlier.placement != pin.placement:
        raise ContradictionError(
            f"pins contradict one another: {earlier.pattern} and {pin.pattern} place {pin.kind} {name} as "
            f"{earlier.placement} and as {pin.placement} on {axis}; keep one"
        )


def pins_from_text(texts: Sequence[str]) -> tuple[tuple[str, tuple[Pin, ...]], ...]:
    """Pins by axis from `kind:pattern=placement@axis`.

    >>> pins_from_text(["parameter:h.*.mlp.fc.weight=S(0)@tp"])
    (('tp', (Pin(kind='parameter', pattern='h.*.mlp.fc.weight', placement=Shard(dim=0, block=None)),)),)
    """
    by_axis: dict[str, list[Pin]] = {}
    for text in texts:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UserError(
                f"a pin is KIND:PATTERN=PLACEMENT@AXIS with kind parameter, input or kernel, got {text!r}; "
                "write for example 'parameter:h.*.mlp.fc.weight=S(0)@tp'"
            )
        placement = placement_from_text(match["placement"])
        if isinstance(placement, Halo):
            raise UserError(
                f"a pin says where a tensor lies, without a halo, got {text!r}; write S({placement.shard.dim})"
            )
        pin = Pin(match["kind"], match["pattern"], placement)  # type: ignore[arg-type]  # one of three by the pattern
        by_axis.setdefault(match["axis"], []).append(pin)
    return tuple((axis, tuple(pins)) for axis, pins in by_axis.items())


def _sources(graph: Graph, wiring: Wiring) -> Iterable[tuple[int, Source]]:
    yield from enumerate(graph.sources)
    for first, call in zip(wiring.offsets, graph.calls, strict=True):
        for i, source in enumerate(graph.templates[call.template].sources):
            yield first + i, named(source, call.variables)


def _matches(source: Source, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (source.name, *source.aliases))


def _check(what: str, shape: tuple[int, ...], placement: Placement, axis: str, size: int) -> None:
    if not isinstance(placement, Shard) or size == 1:
        return
    fitting = [str(d) for d, n in enumerate(shape) if n % size == 0]
    other = f"dim {' or '.join(fitting)} can be" if fitting else "none of its dims can be"
    if placement.dim >= len(shape):
        raise UserError(f"{what} has {len(shape)} dims, got a pin to {placement}; on {axis}={size} {other} split")
    span = placement.block or shape[placement.dim]
    if span % size or shape[placement.dim] % span:
        kind = "block" if placement.block else f"dim {placement.dim} of {what}"
        raise UserError(
            f"{axis} must divide the {kind} of size {span} to split {what} by {placement}, got {axis}={size}; "
            f"try {divisors(span)}, or pin another dim ({other} split)"
        )


def divisors(n: int, limit: int = 64) -> str:
    """Axis sizes that divide a number: the smaller ones."""
    found = [str(d) for d in range(2, min(n, limit) + 1) if n % d == 0]
    return ", ".join(found) if found else "1"
