"""What a user says of a few tensors, as conditions on Rhino's cost graph, and which of it cannot hold together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simpart.errors import UserError
from simpart.graph import Graph
from simpart.placement import Placement
from simpart.searchers._rhino.choices import along_axis
from simpart.searchers._rhino.wires import Maker, wires_of
from simpart.sharding._regions import wiring_of
from simpart.sharding.mesh import Axes
from simpart.sharding.pins import Pin, pinned

__all__ = ["INNERMOST", "Pinned", "minimal_conflict", "pins_on"]


INNERMOST = "tp"
"""In pins the name of the last sharding axis, whatever a mesh calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """`allowed` per (kernel class, axis): how its first output, or an input that a pinned graph input feeds, lies;
    `rests`: where parameters rest, per axis.

    Instances of a template share their kernels, so a pin on one holds for all.
    """

    allowed: Mapping[tuple[int, str], Mapping[tuple[str, int], Placement]] = field(default_factory=dict)
    rests: Mapping[Maker, Mapping[str, Placement]] = field(default_factory=dict)


def pins_on(graph: Graph, micro_batch: int, axes: Axes, pins: Mapping[str, Sequence[Pin]]) -> Pinned:
    """Conditions from pins by axis; axes that this mesh lacks are passed over, `tp` is its innermost. Raises UserError
    for a pin that no strategy of its kernel keeps, naming what there is."""
    allowed: dict[tuple[int, str], dict[tuple[str, int], Placement]] = {}
    rests: dict[Maker, dict[str, Placement]] = {}
    wires, ids = wires_of(graph), wiring_of(graph).ids
    maker_of = {int(v): maker for maker, (_, values, _) in wires.sources.items() for v in values}
    fed: dict[Maker, dict[tuple[int, int], None]] = {}
    for group in wires.groups:
        fed.setdefault(group.maker, {}).update(dict.fromkeys(group.readers))
    for number, (name, size) in enumerate(axes):
        here = (*pins.get(name, ()), *(pins.get(INNERMOST, ()) if number == len(axes) - 1 else ()))
        found = pinned(graph, wiring_of(graph), here, name, size, micro_batch)
        for value, place in found.values.items():
            maker = maker_of[value]
            if wires.sources[maker][0].kind == "parameter":
                rests.setdefault(maker, {})[name] = place
                continue
            for cls, position in fed.get(maker, ()):
                offered = dict.fromkeys(
                    split.strategy.inputs[position] for split in along_axis(graph, micro_batch, size)[cls]
                )
                if place not in offered:
                    reader = ids[int(np.argmax(graph.flat.kernel_class == cls))]
                    raise UserError(
                        f"kernel {reader} cannot read input {wires.sources[maker][0].name} as {place} on "
                        f"{name}={size}; it can read it as {', '.join(map(str, offered))}"
                    )
                allowed.setdefault((cls, name), {})["input", position] = place
        for kernel, place in found.kernels.items():
            cls = int(graph.flat.kernel_class[kernel])
            offered = dict.fromkeys(split.strategy.outputs[0] for split in along_axis(graph, micro_batch, size)[cls])
            if place not in offered:
                raise UserError(
                    f"kernel {ids[kernel]} cannot leave its output {place} on {name}={size}; it can leave "
                    f"{', '.join(map(str, offered))}"
                )
            allowed.setdefault((cls, name), {})["output", 0] = place
    return Pinned(allowed=allowed, rests=rests)


def minimal_conflict(
    pins: Sequence[tuple[str, Pin]], possible: Callable[[Sequence[tuple[str, Pin]]], bool]
) -> list[str]:
    """Pins (with their axes) without which a plan fits, none of them spare: each left out alone would make it fit.

    `possible` says whether some plan keeps these pins and the memory; it must hold for none of them.
    """
    needed = list(pins)
    for pin in list(pins):
        fewer = [p for p in needed if p is not pin]
        if not possible(fewer):
            needed = fewer
    return [f"{pin.kind} {pin.pattern} {pin.placement} on {axis}" for axis, pin in needed]
