"""Collectives inside a stage's actions: at which kernel each stands, on which axis, and who waits for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from simpart.cost import Collective
from simpart.graph import Graph
from simpart.hardware import Cluster
from simpart.lowering.fine._sequence import Places
from simpart.lowering.transfers import sharing
from simpart.placement.conversions import collective_of
from simpart.plan import DeviceGroup
from simpart.sharding.flow import Conversion, Flow
from simpart.sharding.mesh import axis_members

__all__ = ["Event", "Steps", "events_of", "step_rows"]

END = float("inf")
Part = Literal["F", "I", "W"]
Wait = Literal["kernel", "unit", "none"]


class Steps(NamedTuple):
    """Collectives on one axis, one after the other."""

    axis: str
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Collectives before the kernel at `place` of a phase. The next kernel waits for them (`kernel`); or they gather
    the parameters of a layer ahead of its first kernel that reads one (`unit`); or only the end
    of the step waits (`none`: what brings a layer's gradients to where they accumulate). `what` is sent, in a word."""

    place: float
    wait: Wait
    steps: tuple[Steps, ...]
    what: str = "values"


class _Axes:
    """The axes of a group as collectives see them."""

    def __init__(self, group: DeviceGroup, cluster: Cluster, flow: Flow) -> None:
        self.names = [name for name, _ in flow.axes]
        self.members = {name: axis_members(group, name) for name in self.names}
        self.shared = {name: max(sharing(cluster, rows)) for name, rows in self.members.items()}

    def steps(self, conversion: Conversion) -> tuple[Steps, ...]:
        found = []
        for step in conversion.steps:
            name = self.names[step.axis]
            collective = collective_of(step, self.members[name][0], self.shared[name], conversion.dtype)
            if collective is not None:
                found.append(Steps(name, (collective,)))
        return tuple(found)


class _Units:
    """What is gathered together, by kernel: a call of a template that repeats (a layer), elsewhere a module."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.times = Counter(call.template for call in graph.calls)

    def __call__(self, kernel: int) -> tuple[int, str]:
        flat = self.graph.flat
        op = int(flat.kernel_op[kernel])
        call = int(flat.op_call[op])
        repeats = self.times[self.graph.calls[call].template] > 1
        return call, "" if repeats else self.graph.op_classes[int(flat.op_class[op])].path


def step_rows(flow: Flow, group: DeviceGroup, cluster: Cluster) -> list[tuple[int, tuple[Steps, ...]]]:
    """(gradient value, what brings it to its optimizer) of the gradients that are reduced once per step."""
    axes, found = _Axes(group, cluster, flow), []
    for conversion in flow.conversions:
        if conversion.per_step and conversion.role == "gradient" and (steps := axes.steps(conversion)):
            found += [(value, steps) for value in conversion.values]
    return found


def events_of(flow: Flow, group: DeviceGroup, cluster: Cluster, places: Places) -> dict[Part, list[Event]]:
    """Of F, I and W, in no order; B has those of both its parts. What is run again in backward sends again."""
    axes, flat, unit_of = _Axes(group, cluster, flow), places.graph.flat, _Units(places.graph)
    found: dict[Part, list[Event]] = {"F": [], "I": [], "W": []}
    units: dict[tuple[Part, tuple[int, str]], list[tuple[float, tuple[Steps, ...]]]] = defaultdict(list)
    for conversion in flow.conversions:
        steps = () if conversion.per_step else axes.steps(conversion)
        if not steps:
            continue
        if conversion.role == "gradient":
            for kernel in flat.kernel_value_kernel[list(conversion.values)].tolist():
                units["W", unit_of(kernel)].append((float(places.backward[kernel]) + 0.5, steps))
            continue
        for kernel in conversion.kernels:
            if kernel < 0:
                found["F" if conversion.phase == "F" else "I"].append(Event(END, "kernel", steps))
                continue
            spots: list[tuple[Part, int]] = [("I", int(places.backward[kernel]))]
            if conversion.phase == "F":
                spots.append(("F", int(places.forward[kernel])))
            for part, place in spots:
                if place < 0:
                    continue
                if conversion.role == "parameter":
                    units[part, unit_of(kernel)].append((float(place), steps))
                else:
                    found[part].append(Event(float(place), "kernel", steps))
    for exchange in flow.exchanges:
        name = axes.names[exchange.axis]
        collective = Collective("all_reduce", exchange.bytes, axes.members[name][0], axes.shared[name])
        steps = (Steps(name, (collective,)),)
        for kernel in exchange.kernels:
            if places.backward[kernel] >= 0:
                found["I"].append(Event(places.backward[kernel] + 0.5, "kernel", steps))
            if exchange.phase == "F":
                found["F"].append(Event(places.forward[kernel] + 0.5, "kernel", steps))
    for (place_in, _), rows in units.items():
        by_axis: dict[str, list[Collective]] = defaultdict(list)
        for _, steps in rows:
            for axis, collectives in steps:
                by_axis[axis] += collectives
        merged = tuple(Steps(axis, tuple(each)) for axis, each in by_axis.items())
        spots_of = [place for place, _ in rows]
        if place_in == "W":
            found["W"].append(Event(max(spots_of), "none", merged, "gradients"))
        else:
            found[place_in].append(Event(min(spots_of), "unit", merged, "parameters"))
    return found
