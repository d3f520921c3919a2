"""What a description computes: tensor elements, arithmetic, reductions and opaque functions, as a small tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from simpart.tdl.index import DescriptionError, Index, Variable

__all__ = [
    "ALL",
    "Access",
    "Binary",
    "Choose",
    "Constant",
    "Expression",
    "Extent",
    "Max",
    "Min",
    "Opaque",
    "Pick",
    "Position",
    "Prod",
    "Reduction",
    "Shared",
    "Sum",
    "Tensor",
    "Whole",
    "choose",
    "equal",
    "extent",
    "hidden",
    "opaque",
    "shared",
    "variables_of",
    "whole",
]

ReducerName = Literal["sum", "max", "min", "prod"]
ALL = slice(None)


class Expression:
    """A value at one coordinate. Arithmetic builds larger ones; coordinates in arithmetic count as their values."""

    __slots__ = ()

    def __add__(self, other: object) -> Expression:
        return Binary("+", self, as_expression(other))

    def __radd__(self, other: object) -> Expression:
        return Binary("+", as_expression(other), self)

    def __sub__(self, other: object) -> Expression:
        return self + -as_expression(other)

    def __rsub__(self, other: object) -> Expression:
        return as_expression(other) + -self

    def __mul__(self, other: object) -> Expression:
        return Binary("*", self, as_expression(other))

    def __rmul__(self, other: object) -> Expression:
        return Binary("*", as_expression(other), self)

    def __truediv__(self, other: object) -> Expression:
        return Binary("/", self, as_expression(other))

    def __rtruediv__(self, other: object) -> Expression:
        return Binary("/", as_expression(other), self)

    def __neg__(self) -> Expression:
        return Binary("*", Constant(-1), self)

    def __bool__(self) -> bool:
        raise DescriptionError(
            "a description has no branches on data, got a test of a tensor element; use an opaque function"
        )

    @property
    def parts(self) -> tuple[Expression, ...]:
        return ()

    def walk(self) -> Iterator[Expression]:
        """This node and all below it."""
        yield self
        for part in self.parts:
            yield from part.walk()


def as_expression(value: object) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, Index):
        return Position(value)
    if isinstance(value, int | float):
        return Constant(value)
    if isinstance(value, Tensor):
        raise DescriptionError(f"{value.name} is a tensor, not an element; index it: {value.name}[…]")
    raise DescriptionError(f"a description is arithmetic on tensor elements, got {type(value).__name__} {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Expression):
    """A number."""

    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Access(Expression):
    """One element, or inside an opaque function a slice, of input `tensor`: an index per dim, None for a whole dim.

    `padded` accesses may leave the tensor; what they read there is a constant (zero padding).
    """

    tensor: Tensor
    indices: tuple[Index | None, ...]
    padded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Binary(Expression):
    """`left + right`, `left * right` or `left / right`."""

    sign: Literal["+", "*", "/"]
    left: Expression
    right: Expression

    @property
    def parts(self) -> tuple[Expression, ...]:
        return self.left, self.right


@dataclass(frozen=True, slots=True, eq=False)
class Reduction(Expression):
    """Sum, Max, Min or Prod of `body` over `variables`."""

    reducer: ReducerName
    variables: tuple[Variable, ...]
    body: Expression

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.body,)


@dataclass(frozen=True, slots=True, eq=False)
class Opaque(Expression):
    """A function whose arguments alone are known; `linear` numbers those in which it is jointly linear.

    `inner` are the coordinates at which its result is read: they lie inside what it computes, so they cannot be cut.
    """

    arguments: tuple[Expression, ...]
    linear: tuple[int, ...] = ()
    inner: tuple[Index, ...] = ()

    @property
    def parts(self) -> tuple[Expression, ...]:
        return self.arguments

    def __getitem__(self, coordinates: object) -> Opaque:
        found = coordinates if isinstance(coordinates, tuple) else (coordinates,)
        if not all(isinstance(item, Index) for item in found):
            raise DescriptionError("the result of an opaque function is read at coordinates, as in opaque(x[b, :])[j]")
        return Opaque(self.arguments, self.linear, (*self.inner, *found))


@dataclass(frozen=True, slots=True, eq=False)
class Position(Expression):
    """A coordinate used as a value: it must be known absolutely, so it cannot be cut."""

    index: Index


@dataclass(frozen=True, slots=True, eq=False)
class Whole(Expression):
    """One, for loops that stay whole. How far apart their steps read is the kernel's argument (a dilation), so they
    are never the upper digit of a strided shard either."""

    indices: tuple[Index, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pick(Expression):
    """1 where an integer tensor's element equals a variable, else 0: how rows are looked up. Cutting the variable
    masks rows."""

    element: Access
    index: Index

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.element,)


@dataclass(frozen=True, slots=True, eq=False)
class Extent(Expression):
    """The number of steps of some loops, as a value: a cut loop makes the kernel see fewer."""

    variables: tuple[Variable, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choose(Expression):
    """One of several values, by an index (the tensors of a concatenation)."""

    index: Index
    branches: tuple[Expression, ...]

    @property
    def parts(self) -> tuple[Expression, ...]:
        return self.branches


@dataclass(frozen=True, slots=True, eq=False)
class Shared(Expression):
    """A statistic that members of a group agree on in the middle of the kernel: partial ones are all-reduced, once
    per name."""

    body: Expression
    name: str

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.body,)


class Tensor:
    """An input while a description is traced: `x[b, :, i+1]` is an element or slice; `shape` and `rank` are numbers."""

    __slots__ = ("dtype", "may_leave", "name", "position", "shape")

    def __init__(
        self, position: int, name: str, shape: tuple[int, ...], dtype: str = "float32", may_leave: bool = False
    ) -> None:
        self.position, self.name, self.shape, self.dtype, self.may_leave = position, name, shape, dtype, may_leave

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def padded(self) -> Tensor:
        """The same tensor, zero wherever it is read outside its dims."""
        return Tensor(self.position, self.name, self.shape, self.dtype, may_leave=True)

    def __getitem__(self, item: object) -> Access:
        items = item if isinstance(item, tuple) else (item,)
        if len(items) != self.rank:
            raise DescriptionError(
                f"{self.name} has {self.rank} dims, the description indexes it with {len(items)}; write one index a dim"
            )
        indices = tuple(None if part == ALL else _as_index(part, self, d) for d, part in enumerate(items))
        return Access(self, indices, self.may_leave)

    def __iter__(self) -> Iterator[Any]:
        raise DescriptionError(f"{self.name} is a tensor; index it, a description has no loops over data")

    def aligned(self, coordinates: Sequence[Any]) -> Access:
        """The element that broadcasting pairs with these output coordinates: trailing dims, 0 where this tensor has
        one."""
        if self.rank > len(coordinates):
            raise DescriptionError(f"{self.name} has {self.rank} dims, more than the {len(coordinates)} coordinates")
        last = coordinates[len(coordinates) - self.rank :]
        picked = tuple(0 if size == 1 and not _size_is(i, 1) else i for size, i in zip(self.shape, last, strict=True))
        return self[picked]


def _size_is(index: object, size: int) -> bool:
    return isinstance(index, Index) and index.alone is not None and index.alone.size == size


def _as_index(part: object, tensor: Tensor, dim: int) -> Index:
    if isinstance(part, Index):
        return part
    if isinstance(part, int) and not isinstance(part, bool):
        return Index((), part)
    if isinstance(part, Expression):
        raise DescriptionError(
            f"dim {dim} of {tensor.name} is indexed by data; sum over the dim with equal(…) or make it opaque"
        )
    raise DescriptionError(f"dim {dim} of {tensor.name} is indexed by {part!r}; use an affine index or ':'")


def variables_of(function: Callable[..., Any], sizes: Sequence[int | None], what: str) -> list[Variable]:
    """Variables named as the parameters of a lambda, one per size; `*i` gives i0, i1, …"""
    names: list[tuple[str, bool]] = []
    parameters = list(inspect.signature(function).parameters.values())
    fixed = sum(p.kind is not inspect.Parameter.VAR_POSITIONAL for p in parameters)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [(f"{parameter.name}{k}", True) for k in range(len(sizes) - fixed)]
        else:
            names.append((parameter.name, False))
    if len(names) != len(sizes):
        given = ", ".join(name for name, _ in names) or "none"
        raise DescriptionError(f"{what} has {len(sizes)} dims, the description has {len(names)} coordinates ({given})")
    return [Variable(name, size, loose) for (name, loose), size in zip(names, sizes, strict=True)]


def _reduction(reducer: ReducerName, body: Callable[..., Any], extents: Sequence[int] | None) -> Reduction:
    if extents is None:
        parameters = inspect.signature(body).parameters.values()
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
            raise DescriptionError(
                "a reduction over *r needs the sizes of its variables: Sum(lambda *r: …, extents=(…))"
            )
        sizes: Sequence[int | None] = [None] * len(parameters)
    else:
        sizes = extents
    variables = variables_of(body, sizes, "the reduction")
    return Reduction(reducer, tuple(variables), as_expression(body(*map(Index.of, variables))))


def Sum(body: Callable[..., Any], extents: Sequence[int] | None = None) -> Reduction:
    """Sum over the lambda's variables: `Sum(lambda k: a[i, k] * b[k, j])`. Sizes come from the dims they index, or
    `extents`."""
    return _reduction("sum", body, extents)


def Max(body: Callable[..., Any], extents: Sequence[int] | None = None) -> Reduction:
    """Largest value over the lambda's variables."""
    return _reduction("max", body, extents)


def Min(body: Callable[..., Any], extents: Sequence[int] | None = None) -> Reduction:
    """Smallest value over the lambda's variables."""
    return _reduction("min", body, extents)


def Prod(body: Callable[..., Any], extents: Sequence[int] | None = None) -> Reduction:
    """Product over the lambda's variables."""
    return _reduction("prod", body, extents)


def opaque(*arguments: object, linear: Sequence[object] = ()) -> Opaque:
    """Some function of slices: `opaque(x[b, :])[j]`. It is jointly linear in the `linear` arguments, which come
    last."""
    known = tuple(map(as_expression, arguments))
    moving = tuple(map(as_expression, linear))
    return Opaque((*known, *moving), tuple(range(len(known), len(known) + len(moving))))


def hidden(*arguments: object) -> Opaque:
    """Some function of elements: `hidden(x[i])`."""
    return opaque(*arguments)


def equal(element: object, index: Index) -> Pick:
    """1 where the integer element equals the index, else 0: `Sum(lambda v: equal(ids[t], v) * table[v, h])` looks
    rows up."""
    if not isinstance(element, Access) or not isinstance(index, Index) or index.alone is None:
        raise DescriptionError("equal(…) compares a tensor element with one index variable, as in equal(ids[t], v)")
    return Pick(element, index)


def extent(*indices: Index) -> Extent:
    """Number of steps of these loops together, as a divisor or factor: a mean is `Sum(…) / extent(r)`."""
    variables = [index.alone for index in indices]
    if any(v is None for v in variables):
        raise DescriptionError("extent(…) takes index variables, as in extent(i, j)")
    return Extent(tuple(v for v in variables if v is not None))


def choose(index: Index, branches: Sequence[object]) -> Choose:
    """The branch with the index's number: how a concatenation of equal parts reads."""
    return Choose(index, tuple(map(as_expression, branches)))


def shared(body: object, name: str) -> Shared:
    """A statistic all members must know before the kernel goes on (mean of a batch norm): all-reduced when its loop
    is cut."""
    return Shared(as_expression(body), name)


def whole(*indices: Index) -> Whole:
    """A factor that keeps loops whole: the kernel has no argument to run on part of them (the taps of a
    convolution)."""
    return Whole(indices)
