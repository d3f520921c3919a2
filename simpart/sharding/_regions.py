"""What a call of a template reads and makes, phase by phase: the unit in which placements are followed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from simpart.graph import Call, Graph, Template, omitted_values
from simpart.plan import kernel_ids

__all__ = ["Region", "Wiring", "wiring_of"]


@dataclass(frozen=True, slots=True)
class Region:
    """Kernels of one template that run together, in order: (kernel, inputs, first output, outputs). Numbers are local;
    `outside` are inputs that none of them makes."""

    kernels: tuple[tuple[int, tuple[int, ...], int, int], ...]
    outside: tuple[int, ...]


class Wiring:
    """Numbers of a graph that placements are followed along; made once per graph, which it must not keep alive."""

    def __init__(self, graph: Graph) -> None:
        self.templates, self.calls = graph.templates, graph.calls
        self.ids = kernel_ids(graph)
        self._class_of = graph.flat.kernel_class
        self.offsets: list[int] = graph.kernel_value_offsets.tolist()
        self.class_base: list[int] = np.cumsum([0] + [len(t.kernels) for t in graph.templates]).tolist()
        self.omitted = omitted_values(graph)
        self._regions: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Region] = {}
        self._first_output = [_first_outputs(t) for t in graph.templates]
        counts = [len(graph.templates[c.template].kernels) - len(c.omits) for c in graph.calls]
        self.first_kernel: list[int] = (np.cumsum(counts) - counts).tolist()

    @cached_property
    def kernel_number(self) -> dict[str, int]:
        return {name: k for k, name in enumerate(self.ids)}

    @cached_property
    def class_names(self) -> dict[str, int]:
        """Kernel classes by the id of their first instance."""
        found: dict[int, str] = {}
        for name, cls in zip(self.ids, self._class_of.tolist(), strict=True):
            found.setdefault(cls, name)
        return {name: cls for cls, name in found.items()}

    @cached_property
    def name_of_class(self) -> dict[int, str]:
        return {cls: name for name, cls in self.class_names.items()}

    def whole(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Forward and backward kernels of a call."""
        kernels = self.templates[call.template].kernels
        there = [k for k in range(len(kernels)) if k not in call.omits]
        forward = tuple(k for k in there if kernels[k].phase == "F")
        return forward, tuple(k for k in there if kernels[k].phase == "B")

    def region(self, call: Call, kernels: tuple[int, ...]) -> Region:
        key = (call.template, kernels, call.omits)
        if key not in self._regions:
            self._regions[key] = self._make(call, kernels)
        return self._regions[key]

    def _make(self, call: Call, kernels: tuple[int, ...]) -> Region:
        template, first = self.templates[call.template], self._first_output[call.template]
        stands_for: dict[int, int] = {first[k]: template.kernels[k].inputs[-1] for k in sorted(call.omits)}
        rows: list[tuple[int, tuple[int, ...], int, int]] = []
        made: set[int] = set()
        outside: dict[int, None] = {}
        for k in kernels:
            kernel = template.kernels[k]
            refs = []
            for ref in kernel.inputs:
                while ref in stands_for:
                    ref = stands_for[ref]
                refs.append(ref)
                if ref not in made:
                    outside[ref] = None
            made.update(range(first[k], first[k] + len(kernel.outputs)))
            rows.append((k, tuple(refs), first[k], len(kernel.outputs)))
        return Region(tuple(rows), tuple(outside))

    def value(self, call: int, ref: int) -> int:
        """Global number of a local one."""
        if ref >= 0:
            return self.offsets[call] + ref
        value = self.calls[call].kernel_externals[~ref]
        return self.omitted.get(value, value)

    def flat_kernel(self, call: int, kernel: int) -> int:
        """Number in `graph.flat` of a kernel of a call."""
        return self.first_kernel[call] + kernel - sum(k < kernel for k in self.calls[call].omits)


def _first_outputs(template: Template) -> list[int]:
    sizes = [len(k.outputs) for k in template.kernels]
    return [len(template.sources) + start for start in (np.cumsum([0, *sizes])[: len(sizes)]).tolist()]


_wirings: WeakKeyDictionary[Graph, Wiring] = WeakKeyDictionary()


def wiring_of(graph: Graph) -> Wiring:
    if graph not in _wirings:
        _wirings[graph] = Wiring(graph)
    return _wirings[graph]
