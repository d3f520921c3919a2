"""Kernels grouped into the units that run and are priced: each alone when eager, pointwise chains fused when compiled.

A fused group lies in one template and one phase and is convex: no path leaves it and comes back. So groups can run one
after the other, and a pipeline cut between templates never parts one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from simpart.graph import Graph, Template, omitted_values
from simpart.graph.sizes import TensorSpec
from simpart.kernels.ops import family_of

__all__ = ["FUSIBLE", "KernelGroups", "Mode", "kernels"]

Mode = Literal["eager", "compiled"]
"""Kernels run one by one, or pointwise chains fused by a compiler."""

FUSIBLE = frozenset({"pointwise", "reduction", "norm", "softmax", "copy", "fill", "random"})
"""Families that a compiler such as torch's Inductor fuses; views ride along with what they are between."""

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGroups:
    """`group[k]` is the group of kernel class k; `members[g]` are its classes in order. `inputs[g]` and `outputs[g]`
    are the tensors that a group reads from outside and those that are read outside of it."""

    group: Ints
    members: tuple[tuple[int, ...], ...]
    inputs: tuple[Specs, ...]
    outputs: tuple[Specs, ...]


def kernels(graph: Graph, mode: Mode) -> KernelGroups:
    """Group the kernel classes of a graph (of one structure: `graph.at(b)`). Pure: same graph, same groups."""
    read_outside = _read_by_other_calls(graph)
    omitted = {(call.template, k) for call in graph.calls for k in call.omits}
    flat_inputs = graph.kernel_class_inputs
    members: list[tuple[int, ...]] = []
    inputs: list[Specs] = []
    outputs: list[Specs] = []
    base = 0
    for t, template in enumerate(graph.templates):
        fixed = {k for owner, k in omitted if owner == t}
        local = _fuse(template, fixed) if mode == "compiled" else [[k] for k in range(len(template.kernels))]
        edges = _Edges(template)
        for chosen in local:
            members.append(tuple(base + k for k in chosen))
            if len(chosen) == 1:
                inputs.append(flat_inputs[base + chosen[0]])
                outputs.append(template.kernels[chosen[0]].outputs)
            else:
                inputs.append(edges.read(chosen, flat_inputs, base))
                outputs.append(edges.written(chosen, read_outside[t]))
        base += len(template.kernels)
    group = np.zeros(base, dtype=np.int64)
    for g, classes in enumerate(members):
        group[list(classes)] = g
    return KernelGroups(group=group, members=tuple(members), inputs=tuple(inputs), outputs=tuple(outputs))


class _Edges:
    """Who makes and who reads each value of a template."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.maker: dict[int, tuple[int, int]] = {}  # value -> (kernel, which output)
        self.readers: dict[int, set[int]] = {}
        value = len(template.sources)
        for k, kernel in enumerate(template.kernels):
            for ref in kernel.inputs:
                self.readers.setdefault(ref, set()).add(k)
            for i in range(len(kernel.outputs)):
                self.maker[value] = (k, i)
                value += 1

    def producers(self, k: int) -> set[int]:
        return {self.maker[ref][0] for ref in self.template.kernels[k].inputs if ref in self.maker}

    def read(self, chosen: list[int], specs: tuple[Specs, ...], base: int) -> Specs:
        """Each value from outside once."""
        inside = set(chosen)
        found: dict[int, TensorSpec] = {}
        for k in chosen:
            for i, ref in enumerate(self.template.kernels[k].inputs):
                if ref not in self.maker or self.maker[ref][0] not in inside:
                    found.setdefault(ref, specs[base + k][i])
        return tuple(found.values())

    def written(self, chosen: list[int], read_outside: set[int]) -> Specs:
        inside = set(chosen)
        return tuple(
            self.template.kernels[k].outputs[i]
            for value, (k, i) in self.maker.items()
            if k in inside and (value in read_outside or self.readers.get(value, set()) - inside)
        )


def _fuse(template: Template, fixed: set[int]) -> list[list[int]]:
    """Let each fusible kernel join a producer's group, the latest first, when no group comes to depend on itself."""
    edges = _Edges(template)
    group = list(range(len(template.kernels)))  # named by its first kernel
    before: dict[int, set[int]] = {}  # group -> groups it reads from
    members: dict[int, list[int]] = {}
    for k, kernel in enumerate(template.kernels):
        producers = edges.producers(k)
        if _fusible(template, k, fixed):
            for candidate in sorted({group[p] for p in producers}, reverse=True):
                first = members[candidate][0]
                if not _fusible(template, first, fixed) or template.kernels[first].phase != kernel.phase:
                    continue
                if not _reaches({group[p] for p in producers} - {candidate}, candidate, before):
                    group[k] = candidate
                    break
        members.setdefault(group[k], []).append(k)
        before.setdefault(group[k], set()).update({group[p] for p in producers} - {group[k]})
    return [members[g] for g in sorted(members)]


def _fusible(template: Template, k: int, fixed: set[int]) -> bool:
    kernel = template.kernels[k]
    return k not in fixed and (kernel.view or family_of(kernel.target) in FUSIBLE)


def _reaches(start: set[int], goal: int, before: dict[int, set[int]]) -> bool:
    """True when some group of `start` reads, directly or not, from `goal`."""
    stack, seen = list(start), set(start)
    while stack:
        for g in before[stack.pop()]:
            if g == goal:
                return True
            if g not in seen:
                seen.add(g)
                stack.append(g)
    return False


def _read_by_other_calls(graph: Graph) -> list[set[int]]:
    """Per template, the local values that another call, a gradient or the step's end reads."""
    found: list[set[int]] = [set() for _ in graph.templates]
    offsets = graph.kernel_value_offsets
    wanted = [np.array(call.kernel_externals, dtype=np.int64) for call in graph.calls]
    wanted.append(np.array([*graph.gradients.values(), *omitted_values(graph).values()], dtype=np.int64))
    values = np.unique(np.concatenate(wanted))
    values = values[values >= len(graph.sources)]
    calls = np.searchsorted(offsets, values, side="right") - 1
    for value, call in zip(values.tolist(), calls.tolist(), strict=True):
        found[graph.calls[call].template].add(value - int(offsets[call]))
    return found
