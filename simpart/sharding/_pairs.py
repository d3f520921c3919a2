"""Which parameters tensor parallelism may split together, found by looking ahead.

A matrix (or filter) whose output features are split makes a split value. As long as every kernel keeps it split
without talking, the split goes on: through views, activations, attention by heads; what else those kernels read must
come split alike, and so must what made it, back to its parameters. It ends well where a product with another parameter
sums over the split dim: there a sum is pending, one all-reduce for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary

from simpart.graph import Graph
from simpart.kernels.ops import family_of
from simpart.placement import Halo, Partial, Shard
from simpart.sharding._regions import wiring_of
from simpart.sharding.mesh import calls_of
from simpart.tdl import Call, Split, splits_following

__all__ = ["Lookahead", "Pair", "parameter_values"]

FAR = 2000
"""Kernels that one split may reach: more than any layer has. It is no pair then."""


@dataclass(slots=True)
class Pair:
    """Parameters (kernel-level value numbers) that are split together; `ends`: kernels that leave a sum pending;
    `heads`: (heads, key-value heads) of attention split by them."""

    parameters: dict[int, Shard] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)


class _Fails(Exception):
    """The split cannot go on."""


class Lookahead:
    """Forward kernels of a graph, by what they make and read."""

    def __init__(self, graph: Graph, micro_batch: int) -> None:
        flat = graph.flat
        self.calls = calls_of(graph, micro_batch)
        self.classes = graph.kernel_classes
        self.class_of: list[int] = flat.kernel_class.tolist()
        self.outputs: list[int] = flat.kernel_outputs.tolist()
        self.maker: list[int] = flat.kernel_value_kernel.tolist()
        indptr, inputs = flat.kernel_indptr.tolist(), flat.kernel_inputs.tolist()
        self.inputs: list[list[int]] = [inputs[a:b] for a, b in pairwise(indptr)]
        self.readers: dict[int, list[int]] = {}
        for k, forward in enumerate(flat.kernel_forward.tolist()):
            if forward:
                for value in dict.fromkeys(self.inputs[k]):
                    self.readers.setdefault(value, []).append(k)
        self.parameters = parameter_values(graph)
        specs = graph.flat.kernel_value_spec
        self.shape_of = {v: specs[v].shape(micro_batch) for v in self.parameters}
        self.from_input = self._depends_on_inputs(graph)

    def call(self, kernel: int) -> Call:
        return self.calls[self.class_of[kernel]]

    def _depends_on_inputs(self, graph: Graph) -> set[int]:
        """Values that come from graph inputs through views and integer arithmetic: tokens, not positions."""
        found = {v for v, s in enumerate(graph.sources) if s.kind == "input"}
        stack = list(found)
        while stack:
            for k in self.readers.get(stack.pop(), ()):
                if all(self.call(k).dtypes[i].startswith("int") for i in range(len(self.inputs[k]))):
                    for n in range(len(self.classes[self.class_of[k]].outputs)):
                        value = self.outputs[k] + n
                        if value not in found:
                            found.add(value)
                            stack.append(value)
        return found

    def tables(self) -> list[int]:
        """Parameters whose rows are looked up by tokens."""
        return [
            value
            for value in self.parameters
            for k in self.readers.get(value, ())
            if family_of(self.call(k).target) == "embedding" and self.from_input & set(self.inputs[k])
        ]

    def pairs(self, members: int, *, exchanges: bool, taken: Set[int] = frozenset()) -> list[Pair]:
        """All pairs of parameters not taken, in the order in which forward reads them. `exchanges`: kernels may
        exchange statistics, and rows of a table may be looked up with a mask (a split vocabulary)."""
        found: list[Pair] = []
        gone = set(taken)
        order = {v: min(self.readers[v]) for v in self.parameters if v in self.readers}
        for value in sorted(order, key=lambda v: (order[v], v)):
            shape = self.shape_of[value]
            if value in gone or len(shape) < 2 or shape[0] % members:
                continue
            try:
                pair = _Closure(self, members, exchanges, gone).run(value, Shard(0))
            except _Fails:
                continue
            if pair.ends:
                found.append(pair)
                gone |= set(pair.parameters)
        return found


_parameters: WeakKeyDictionary[Graph, dict[int, int]] = WeakKeyDictionary()


def parameter_values(graph: Graph) -> dict[int, int]:
    """Kernel-level to op-level numbers of parameters."""
    if graph in _parameters:
        return _parameters[graph]
    found = {v: v for v, s in enumerate(graph.sources) if s.kind == "parameter"}
    starts, firsts = graph.value_offsets.tolist(), wiring_of(graph).offsets
    for start, first, call in zip(starts, firsts, graph.calls, strict=True):
        for i, source in enumerate(graph.templates[call.template].sources):
            if source.kind == "parameter":
                found[first + i] = start + i
    return _parameters.setdefault(graph, found)


class _Closure:
    """Placements that follow from one."""

    def __init__(self, ahead: Lookahead, members: int, exchanges: bool, taken: Set[int]) -> None:
        self.ahead, self.members, self.exchanges, self.taken = ahead, members, exchanges, taken
        self.place: dict[int, Shard] = {}
        self.chosen: dict[int, Split] = {}
        self.queue: deque[int] = deque()
        self.found = Pair()

    def run(self, parameter: int, placement: Shard) -> Pair:
        self._assign(parameter, placement)
        while self.queue:
            value = self.queue.popleft()
            maker = self.ahead.maker[value]
            if maker >= 0 and maker not in self.chosen:
                self._back(maker, value)
            for kernel in self.ahead.readers.get(value, ()):
                self._through(kernel, value)
            if len(self.chosen) > FAR:
                raise _Fails
        return self.found

    def _assign(self, value: int, placement: Shard) -> None:
        if value in self.place:
            if self.place[value] != placement:
                raise _Fails
            return
        self.place[value] = placement
        if value in self.taken:
            raise _Fails
        if value in self.ahead.parameters:
            self.found.parameters[value] = placement
        self.queue.append(value)

    def _through(self, kernel: int, value: int) -> None:
        if kernel in self.chosen:
            values = self.ahead.inputs[kernel]
            places = self.chosen[kernel].strategy.inputs
            if any(v == value and p != self.place[value] for v, p in zip(values, places, strict=True)):
                raise _Fails
            return
        position = self.ahead.inputs[kernel].index(value)
        options = splits_following(self.ahead.call(kernel), self.members, position, self.place[value])
        self._take(kernel, options)

    def _back(self, kernel: int, value: int) -> None:
        number = value - self.ahead.outputs[kernel]
        self._take(
            kernel, splits_following(self.ahead.call(kernel), self.members, number, self.place[value], output=True)
        )

    def _take(self, kernel: int, options: tuple[Split, ...]) -> None:
        """The first split that agrees with all that is known."""
        usable = [split for split in options if self._agrees(kernel, split)]
        if not usable:
            raise _Fails
        split = usable[0]
        self.chosen[kernel] = split
        values, strategy = self.ahead.inputs[kernel], split.strategy
        for value, place in zip(values, strategy.inputs, strict=True):
            if isinstance(place, Shard) and self._carries(value):
                self._assign(value, place)
        partial = [p for p in strategy.outputs if isinstance(p, Partial)]
        for n, place in enumerate(strategy.outputs):
            if isinstance(place, Shard):
                self._assign(self.ahead.outputs[kernel] + n, place)
        if partial:
            self._end(kernel, split)
        if family_of(self.ahead.call(kernel).target) == "attention" and Shard(1) in strategy.inputs:
            call = self.ahead.call(kernel)
            self.found.heads.append((call.inputs[0][1], call.inputs[1][1]))

    def _carries(self, value: int) -> bool:
        """Buffers and inputs can be sliced anywhere; parameters and what is computed must come split."""
        return value in self.ahead.parameters or self.ahead.maker[value] >= 0

    def _agrees(self, kernel: int, split: Split) -> bool:
        if split.exchanges and not self.exchanges:
            return False
        values = self.ahead.inputs[kernel]
        for value, place in zip(values, split.strategy.inputs, strict=True):
            known = self.place.get(value)
            if isinstance(place, Halo) or (known is not None and place != known):
                return False
            if known is None and isinstance(place, Partial) and self._root(value) is None:
                return False  # only parameters count as one term
        return True

    def _end(self, kernel: int, split: Split) -> None:
        """A pending sum: over a dim of another parameter, of rows looked up by the tokens, or of a loss."""
        call = self.ahead.call(kernel)
        if split.masked:
            indices = [self.ahead.inputs[kernel][i] for i in split.masked]
            if not self.exchanges or not all(i in self.ahead.from_input for i in indices):
                raise _Fails
        else:
            roots = [
                self._root(v)
                for v, p in zip(self.ahead.inputs[kernel], split.strategy.inputs, strict=True)
                if isinstance(p, Shard)
            ]
            if not any(r is not None for r in roots) or family_of(call.target) not in ("gemm", "bgemm", "conv"):
                raise _Fails
        self.found.ends.append(kernel)

    def _root(self, value: int) -> int | None:
        """The parameter that a value is a view of."""
        while self.ahead.maker[value] >= 0:
            kernel = self.ahead.maker[value]
            if not self.ahead.classes[self.ahead.class_of[kernel]].view:
                return None
            value = self.ahead.inputs[kernel][0]
        return value if value in self.ahead.parameters else None
