"""Following values through an expression: which cut loops one depends on, and whether it is a partial result.

One abstract interpreter decides which loops can be cut and which inputs may come in as partial sums. What it cannot
follow is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from simpart.tdl.expression import (
    Access,
    Binary,
    Choose,
    Constant,
    Expression,
    Extent,
    Opaque,
    Pick,
    Position,
    Reduction,
    Shared,
    Whole,
)
from simpart.tdl.index import Index
from simpart.tdl.layout import Cut, Cuts, Key, Unsplittable, cuts_of

__all__ = ["Exchange", "Follower"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-reduce inside the kernel: a statistic of `elements` numbers."""

    reducer: str
    elements: int


@dataclass(frozen=True, slots=True)
class _Value:
    """What is known of a value on one member: the cut loops it depends on, its pending reduction, and how its local
    value is off by loop extents (a power of the number of members)."""

    loops: frozenset[Key] = frozenset()
    partial: str | None = None
    power: int = 0


class Follower:
    """Follows values through an expression for given cuts and partial inputs; raises Unsplittable where they do not
    go."""

    def __init__(self, cuts: Cuts, partial: Mapping[int, str]) -> None:
        self.cuts, self.partial = cuts, partial
        self.exchanges: dict[str, Exchange] = {}
        self.masked: set[int] = set()

    def value(self, node: Expression) -> _Value:
        found: _Value = getattr(self, "_" + type(node).__name__.lower())(node)
        if found.partial and found.loops:
            raise Unsplittable
        return found

    def _loops(self, index: Index | None) -> frozenset[Key]:
        if index is None:
            return frozenset()
        return frozenset(index.terms[k][0].variable.key for k, _, _ in cuts_of(index, self.cuts))

    def _constant(self, node: Constant) -> _Value:
        return _Value()

    def _access(self, node: Access) -> _Value:
        loops = frozenset().union(*map(self._loops, node.indices))
        return _Value(loops, self.partial.get(node.tensor.position))

    def _binary(self, node: Binary) -> _Value:
        left, right = self.value(node.left), self.value(node.right)
        loops = left.loops | right.loops
        if node.sign == "+":
            zero = [isinstance(side, Constant) and side.value == 0 for side in (node.left, node.right)]
            if any(zero):
                return left if zero[1] else right
            if left.partial != right.partial or left.partial not in (None, "sum", "avg") or left.power != right.power:
                raise Unsplittable
            return _Value(loops, left.partial, left.power)
        if (left.partial and right.partial) or (node.sign == "/" and right.partial):
            raise Unsplittable
        partial = left.partial or right.partial
        if partial not in (None, "sum", "avg"):
            raise Unsplittable
        return _Value(loops, partial, left.power + (right.power if node.sign == "*" else -right.power))

    def _reduction(self, node: Reduction) -> _Value:
        body = self.value(node.body)
        cut = {v.key for v in node.variables if v.key in self.cuts}
        if not cut:
            if body.partial and body.partial != node.reducer and not (body.partial == "avg" and node.reducer == "sum"):
                raise Unsplittable
            if body.power and node.reducer != "sum":
                raise Unsplittable
            return body
        if body.partial or body.loops - cut or node.reducer == "prod" or (body.power and node.reducer != "sum"):
            raise Unsplittable
        if len(cut) > 1:
            raise Unsplittable
        return _Value(frozenset(), node.reducer, body.power)

    def _opaque(self, node: Opaque) -> _Value:
        if any(self._loops(index) for index in node.inner):
            raise Unsplittable
        values = [self.value(argument) for argument in node.arguments]
        if any(value.power for value in values):
            raise Unsplittable
        partial = {value.partial for k, value in enumerate(values) if k in node.linear}
        if any(value.partial for k, value in enumerate(values) if k not in node.linear) or len(partial) > 1:
            raise Unsplittable
        pending = next(iter(partial), None)
        if pending not in (None, "sum", "avg"):
            raise Unsplittable
        return _Value(frozenset().union(*(value.loops for value in values)), pending)

    def _position(self, node: Position) -> _Value:
        if self._loops(node.index):
            raise Unsplittable
        return _Value()

    def _whole(self, node: Whole) -> _Value:
        if any(self._loops(index) for index in node.indices):
            raise Unsplittable
        return _Value()

    def _pick(self, node: Pick) -> _Value:
        element = self.value(node.element)
        variable = node.index.alone
        assert variable is not None
        cut = self.cuts.get(variable.key)
        if element.partial or (cut is not None and (cut != Cut(1, variable.key[1]) or element.loops)):
            raise Unsplittable
        if cut is None:
            return element
        self.masked.add(node.element.tensor.position)
        return _Value(frozenset({variable.key}))

    def _extent(self, node: Extent) -> _Value:
        return _Value(power=sum(v.key in self.cuts for v in node.variables))

    def _choose(self, node: Choose) -> _Value:
        if self._loops(node.index):
            raise Unsplittable
        values = [self.value(branch) for branch in node.branches]
        if len({(value.partial, value.power) for value in values}) != 1:
            raise Unsplittable
        return _Value(frozenset().union(*(value.loops for value in values)), values[0].partial, values[0].power)

    def _shared(self, node: Shared) -> _Value:
        body = self.value(node.body)
        if not self.cuts:
            return body
        if body.partial is None:
            return _Value(body.loops)
        if self.partial:
            raise Unsplittable
        self.exchanges[node.name] = Exchange(body.partial, _free_elements(node.body))
        return _Value(body.loops)


def _free_elements(body: Expression) -> int:
    """How many values an expression has: the product of the loops that its accesses use and no reduction in it
    binds."""
    bound = {v.key for node in body.walk() if isinstance(node, Reduction) for v in node.variables}
    free = {
        variable.key
        for node in body.walk()
        if isinstance(node, Access)
        for index in node.indices
        if index is not None
        for variable in index.variables
    }
    return prod(size for _, size in free - bound)
