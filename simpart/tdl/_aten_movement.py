"""Kernels that only move elements: views, transposes, slices, concatenations, and their backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from simpart.tdl.expression import ALL, Constant, Expression, Position, Tensor, choose, hidden, opaque
from simpart.tdl.index import DescriptionError, Index
from simpart.tdl.registry import describe

Coordinates = tuple[Index, ...]


def replaced(i: Coordinates, dim: int, value: Any) -> tuple[Any, ...]:
    """Coordinates with another entry at `dim`."""
    return (*i[:dim], value, *i[dim + 1 :])


# --- reshapes --------------------------------------------------------------------------------------------------------
@describe("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unflatten", "aten.flatten")
def view(x: Tensor, size: Sequence[int], *_: Any) -> Any:
    """Row-major order stays: a merged dim is the digits of several, a split dim one digit each."""
    if any(not isinstance(n, int) for n in size):
        raise DescriptionError(f"a view takes whole sizes, got {list(size)}")
    known = prod(n for n in size if n != -1)
    return lambda *i: reshaped(x, i, [x.elements // max(known, 1) if n == -1 else n for n in size])


def reshaped(x: Tensor, i: Coordinates, size: Sequence[int]) -> Expression:
    """`x` read in row-major order at coordinates `i` of shape `size`. Dims that share no factors stay whole
    together."""
    place: list[Any] = [0] * x.rank
    inner: list[Index] = []
    for ins, outs in _groups(x.shape, size):
        flat: Index | int = 0
        for d in outs:
            flat = flat * size[d] + (0 if size[d] == 1 else i[d])
        try:
            found, rest = [], flat
            for d in reversed(ins):
                found.append(0 if x.shape[d] == 1 else rest % x.shape[d])
                rest = rest if x.shape[d] == 1 else rest // x.shape[d]
            for d, index in zip(reversed(ins), found, strict=True):
                place[d] = index
        except DescriptionError:
            for d in ins:
                place[d] = ALL
            inner += [i[d] for d in outs]
    return opaque(linear=[x[tuple(place)]])[tuple(inner)] if inner else x[tuple(place)]


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims on both sides that hold equally many elements."""
    groups, a, b = [], 0, 0
    while a < len(before) or b < len(after):
        ins, outs = [a] if a < len(before) else [], [b] if b < len(after) else []
        a, b = a + len(ins), b + len(outs)
        while (left := prod(before[d] for d in ins)) != (right := prod(after[d] for d in outs)):
            if left < right and a < len(before):
                ins.append(a)
                a += 1
            elif b < len(after):
                outs.append(b)
                b += 1
            else:
                raise DescriptionError(f"a view keeps the number of elements, got {list(before)} as {list(after)}")
        groups.append((ins, outs))
    return groups


@describe("aten.expand", "aten.broadcast_to", "aten.expand_as")
def expand(x: Tensor, *_: Any, **__: Any) -> Any:
    return lambda *i: x.aligned(i)


@describe("aten.permute")
def permute(x: Tensor, dims: Sequence[int]) -> Any:
    order = [d % max(x.rank, 1) for d in dims]
    return lambda *i: x[tuple(i[order.index(d)] for d in range(x.rank))]


@describe("aten.transpose", "aten.swapaxes")
def transpose(x: Tensor, first: int, second: int) -> Any:
    order = list(range(x.rank))
    first, second = first % max(x.rank, 1), second % max(x.rank, 1)
    if x.rank:
        order[first], order[second] = second, first
    return lambda *i: x[tuple(i[d] for d in order)]


describe("aten.t", "aten.numpy_T", "aten.mT")(lambda x: lambda *i: x[tuple(reversed(i))])


@describe("aten.squeeze")
def squeeze(x: Tensor, dims: int | Sequence[int] | None = None) -> Any:
    picked = range(x.rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % max(x.rank, 1) for d in picked if x.rank and x.shape[d] == 1}

    def read(*i: Index) -> Expression:
        rest = iter(i)
        return x[tuple(0 if d in gone else next(rest) for d in range(x.rank))]

    return read


@describe("aten.unsqueeze")
def unsqueeze(x: Tensor, dim: int) -> Any:
    d = dim % (x.rank + 1)
    return lambda *i: x[(*i[:d], *i[d + 1 :])]


@describe("aten.repeat")
def repeat(x: Tensor, times: Sequence[int]) -> Any:
    lead = len(times) - x.rank
    return lambda *i: x[tuple(0 if n == 1 else i[lead + d] % n for d, n in enumerate(x.shape))]


# --- parts -----------------------------------------------------------------------------------------------------------
def part(x: Tensor, dim: int, start: int, step: int = 1) -> Callable[..., Any]:
    """Elements `start`, `start + step`, … of a dim."""
    return lambda *i: x[replaced(i, dim, i[dim] * step + start)]


@describe("aten.slice", "aten.narrow")
def slice_(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    d = dim % max(x.rank, 1)
    first, _, _ = slice(start, end, step).indices(x.shape[d])
    return part(x, d, first, step)


@describe("aten.select")
def select(x: Tensor, dim: int, index: int) -> Any:
    d = dim % max(x.rank, 1)
    return lambda *i: x[(*i[:d], index % x.shape[d], *i[d:])]


@describe("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.split_with_sizes_copy")
def split(x: Tensor, size: int | Sequence[int], dim: int = 0) -> Any:
    d = dim % max(x.rank, 1)
    if isinstance(size, int):
        return [part(x, d, start) for start in range(0, x.shape[d], size)]
    return [part(x, d, sum(size[:k])) for k in range(len(size))]


@describe("aten.unbind")
def unbind(x: Tensor, dim: int = 0) -> Any:
    return [select(x, dim, k) for k in range(x.shape[dim])]


@describe("aten.unfold")
def unfold(x: Tensor, dim: int, size: int, step: int) -> Any:
    d = dim % max(x.rank, 1)
    return lambda *i: x[replaced(i[:-1], d, i[d] * step + i[-1])] * hidden(Position(i[-1]))


@describe("aten.flip")
def flip(x: Tensor, dims: Sequence[int]) -> Any:
    gone = {d % max(x.rank, 1) for d in dims}
    return lambda *i: x[tuple(x.shape[d] - 1 - j if d in gone else j for d, j in enumerate(i))]


@describe("aten.roll")
def roll(x: Tensor, shifts: Any, dims: int | Sequence[int] = ()) -> Any:
    gone = [d % max(x.rank, 1) for d in ([dims] if isinstance(dims, int) else dims)] or list(range(x.rank))
    return lambda *i: opaque(linear=[x[tuple(ALL if d in gone else j for d, j in enumerate(i))]])[
        tuple(i[d] for d in gone)
    ]


@describe("aten.constant_pad_nd")
def constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Any:
    """Padded dims stay whole."""
    gone = [x.rank - 1 - k for k in range(len(pad) // 2) if pad[2 * k] or pad[2 * k + 1]]

    def read(*i: Index) -> Expression:
        inside = x[tuple(ALL if d in gone else j for d, j in enumerate(i))]
        made = opaque(inside) if value else opaque(linear=[inside])
        return made[tuple(i[d] for d in gone)] if gone else inside

    return read


@describe("aten.slice_backward")
def slice_backward(dy: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """Zeros around; a part that is one of several equal ones can be cut inside, in all of them alike."""
    d = dim % max(dy.rank, 1)
    length, total = dy.shape[d], sizes[d]
    first, _, _ = slice(start, end, step).indices(total)
    if step == 1 and length and total % length == 0 and first % length == 0:
        return lambda *i: dy[replaced(i, d, i[d] % length)] * hidden(Position(i[d] // length))
    return lambda *i: opaque(linear=[dy[replaced(i, d, ALL)]])[i[d]]


@describe("aten.select_backward")
def select_backward(dy: Tensor, sizes: Sequence[int], dim: int, index: int) -> Any:
    d = dim % len(sizes)
    return lambda *i: dy[(*i[:d], *i[d + 1 :])] * hidden(Position(i[d]))


@describe("aten.slice_scatter")
def slice_scatter(x: Tensor, source: Tensor, dim: int = 0, *_: Any, **__: Any) -> Any:
    d = dim % max(x.rank, 1)
    return lambda *i: opaque(linear=[x[replaced(i, d, ALL)], source[replaced(i, d, ALL)]])[i[d]]


@describe("aten.select_scatter")
def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Any:
    d = dim % max(x.rank, 1)
    return lambda *i: opaque(linear=[x[replaced(i, d, ALL)], source[(*i[:d], *i[d + 1 :])]])[i[d]]


@describe("aten.unfold_backward")
def unfold_backward(dy: Tensor, sizes: Sequence[int], dim: int, size: int, step: int) -> Any:
    d = dim % len(sizes)
    return lambda *i: opaque(linear=[dy[(*replaced(i, d, ALL), ALL)]])[i[d]]


# --- several into one ------------------------------------------------------------------------------------------------
@describe("aten.cat", "aten.concat")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Equal parts can be cut inside, all alike; the concatenation itself is never cut between parts."""
    parts = [t for t in tensors if t.shape != (0,)]
    d = dim % max(parts[0].rank, 1)
    length = parts[0].shape[d]
    if all(t.shape[d] == length for t in parts):
        return lambda *i: choose(i[d] // length, [t[replaced(i, d, i[d] % length)] for t in parts])
    return lambda *i: opaque(linear=[t[replaced(i, d, ALL)] for t in parts])[i[d]]


@describe("aten.stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    d = dim % (tensors[0].rank + 1)
    return lambda *i: choose(i[d], [t[(*i[:d], *i[d + 1 :])] for t in tensors])


# --- made from nothing -----------------------------------------------------------------------------------------------
describe("aten.zeros", "aten.scalar_tensor")(lambda *_, **__: lambda *i: Constant(0))
describe("aten.ones", "aten.full", "aten.empty")(lambda *_, **__: lambda *i: hidden())
describe("aten.rand", "aten.randn", "aten.randint", "aten.bernoulli_", "aten.empty_strided")(
    lambda *_, **__: lambda *i: hidden()
)
describe("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided")(
    lambda x, *_, **__: lambda *i: hidden()
)
describe("aten.arange", "aten.linspace")(lambda *_, **__: lambda i: hidden(Position(i)))
describe("aten.eye", "aten.tril_indices", "aten.triu_indices")(
    lambda *_, **__: lambda i, j: hidden(Position(i), Position(j))
)


@describe("aten.tril", "aten.triu")
def triangle(x: Tensor, diagonal: int = 0) -> Any:
    return lambda *i: x[i] * hidden(Position(i[-2]), Position(i[-1]))
