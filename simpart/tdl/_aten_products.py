"""Matrix products, convolutions, attention, look-ups: what ATen's heavy kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from simpart.tdl.expression import ALL, Access, Expression, Opaque, Sum, Tensor, equal, hidden, opaque, whole
from simpart.tdl.index import Index
from simpart.tdl.registry import describe

Coordinates = tuple[Index, ...]


def some(access: Access) -> Opaque:
    """Something linear in a slice."""
    return opaque(linear=[access])


describe("aten.mm")(lambda a, b: lambda i, j: Sum(lambda k: a[i, k] * b[k, j]))
describe("aten.bmm")(lambda a, b: lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j]))
describe("aten.mv")(lambda a, x: lambda i: Sum(lambda k: a[i, k] * x[k]))
describe("aten.dot", "aten.vdot")(lambda a, b: lambda: Sum(lambda k: a[k] * b[k]))


@describe("aten.addmm", "aten.addmv", "aten.baddbmm")
def addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Any:
    def product(*i: Index) -> Expression:
        row, last = i[: a.rank - 1], i[a.rank - 1 :]
        batch = i[: a.rank - 2]
        return beta * c.aligned(i) + alpha * Sum(lambda k: a[(*row, k)] * b[(*batch, k, *last)])

    return product


@describe("aten.linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    def row(*i: Index) -> Expression:
        product = Sum(lambda k: x[(*i[:-1], k)] * weight[i[-1], k])
        return product if bias is None else product + bias[i[-1]]

    return row


@describe("aten._grouped_mm")
def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any) -> Any:
    """A product for each expert. Where the experts' rows, columns or terms are runs of one dim that end at `offsets`,
    their bounds are data: that dim and the experts are not cut."""
    if offsets is None:
        return lambda e, i, j: Sum(lambda k: a[e, i, k] * b[e, k, j])
    bounds = opaque(offsets[:])
    if b.rank == 3:  # runs of rows
        return lambda t, j: Sum(lambda k: some(a[:, k])[t] * some(b[:, k, j]) * bounds[t])
    if a.rank == 3:  # runs of columns
        return lambda i, t: Sum(lambda k: some(a[:, i, k]) * some(b[k, :])[t] * bounds[t])
    return lambda e, i, j: some(a[i, :])[e] * some(b[:, j])[e] * bounds[e]


# --- convolution -----------------------------------------------------------------------------------------------------
def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


@describe("aten.convolution", "aten._convolution")
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *_: Any,
) -> Any:  # fmt: skip
    """Spatial dims are cut with halos; of a transposed convolution only if its windows lie side by side."""
    dims = x.rank - 2
    steps, pads, gaps = _each(stride, dims), _each(padding, dims), _each(dilation, dims)
    kernel, per_in, per_out = weight.shape[2:], x.shape[1] // groups, weight.shape[1]

    def forward(n: Index, o: Index, *s: Index) -> Expression:
        group = o // (weight.shape[0] // groups) * per_in

        def tap(i: Index, *k: Index) -> Expression:
            place = [a * t - p + b * d for a, b, t, p, d in zip(s, k, steps, pads, gaps, strict=True)]
            return x.padded[(n, group + i, *place)] * weight[(o, i, *k)] * whole(*k)

        return Sum(tap, extents=(per_in, *kernel))

    def backward(n: Index, o: Index, *s: Index) -> Expression:
        group = o // per_out * per_in
        beside = list(kernel) == steps and not any(pads) and set(gaps) == {1} and not any(_each(output_padding, dims))

        def term(i: Index) -> Expression:
            if not beside:
                return some(x[(n, group + i, *[ALL] * dims)])[s] * some(weight[(group + i, o % per_out, *[ALL] * dims)])
            place, inside = (
                [a // t for a, t in zip(s, steps, strict=True)],
                [a % t for a, t in zip(s, steps, strict=True)],
            )
            return x[(n, group + i, *place)] * weight[(group + i, o % per_out, *inside)] * whole(*inside)

        return Sum(term, extents=(per_in,))

    make = backward if transposed else forward
    return make if bias is None else lambda n, o, *s: make(n, o, *s) + bias[o]


@describe("aten.convolution_backward")
def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """The kernel takes x and the weight in the shapes of their gradients, so dx reads x and dw reads the weight."""
    space = (ALL,) * (x.rank - 2)
    first, second = weight.shape[0] // groups, weight.shape[1]
    # per group, the rows of the weight meet `rows`' channels and its columns the other tensor's
    columns, rows = (dy, x) if transposed else (x, dy)

    def through(c: Index, own: int, other: int) -> Index:
        return c // own * other

    def dx(n: Index, c: Index, *s: Index) -> Expression:
        if transposed:
            pair = lambda q: some(dy[(n, through(c, first, second) + q, *space)])[s] * some(weight[(c, q, *space)])  # noqa: E731
            return Sum(pair, extents=(second,)) * hidden(x[(n, c, *space)])

        def term(q: Index) -> Expression:
            row = through(c, second, first) + q
            return some(dy[(n, row, *space)])[s] * some(weight[(row, c % second, *space)])

        return Sum(term, extents=(first,)) * hidden(x[(n, c, *space)])

    def dw(r: Index, j: Index, *k: Index) -> Expression:
        other = through(r, first, second) + j
        pair = lambda n: some(rows[(n, r, *space)])[k] * some(columns[(n, other, *space)])  # noqa: E731
        return Sum(pair) * hidden(weight[(r, j, *space)])

    def db(o: Index) -> Expression:
        return Sum(lambda n: some(dy[(n, o, *space)]))

    return [output for output, wanted in zip((dx, dw, db), mask, strict=True) if wanted]


# --- attention -------------------------------------------------------------------------------------------------------
@describe("aten._scaled_dot_product_flash_attention_for_cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Any:
    """Heads and samples are independent; queries too unless a causal mask counts their positions. Query heads may
    share keys."""
    share = q.shape[1] // k.shape[1]

    def scores(b: Index, h: Index, s: Index) -> tuple[list[Access], Access, list[Index]]:
        row = q[b, h, :, :] if causal else q[b, h, s, :]
        known = [row, k[b, h // share, :, :]]
        if attn_mask is not None:
            last = [0 if n == 1 else i for n, i in zip(attn_mask.shape[-2:], (s, ALL), strict=True)]
            lead = [0 if n == 1 else i for n, i in zip(attn_mask.shape[:-2], (b, h)[4 - attn_mask.rank :], strict=True)]
            known.append(attn_mask[(*lead, ALL if causal and last[0] is s else last[0], last[1])])
        return known, v[b, h // share, :, :], [s] if causal else []

    def out(b: Index, h: Index, s: Index, d: Index) -> Expression:
        known, values, inner = scores(b, h, s)
        return opaque(*known, linear=[values])[(*inner, d)]

    def logsumexp(b: Index, h: Index, s: Index) -> Expression:
        known, values, inner = scores(b, h, s)
        made = opaque(*known, hidden(values))
        return made[tuple(inner)] if inner else made

    return out, logsumexp


@describe("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool,
    attn_mask: Tensor | None = None, **_: Any,
) -> Any:  # fmt: skip
    share = q.shape[1] // k.shape[1]

    def masked(*lead: Index) -> list[Access]:
        if attn_mask is None:
            return []
        rank = attn_mask.rank
        wanted = (*lead, ALL, ALL)[4 - rank :]
        return [attn_mask[tuple(0 if n == 1 else i for n, i in zip(attn_mask.shape, wanted, strict=True))]]

    def gradient(b: Index, h: Index, kv: Index) -> Opaque:
        known = [q[b, h, :, :], k[b, kv, :, :], v[b, kv, :, :], out[b, h, :, :], lse[b, h, :]]
        return opaque(*known, *masked(b, h), linear=[dout[b, h, :, :]])

    def dq(b: Index, h: Index, s: Index, d: Index) -> Expression:
        return gradient(b, h, h // share)[s, d]

    def dkv(b: Index, g: Index, t: Index, d: Index) -> Expression:
        return Sum(lambda r: gradient(b, g * share + r, g)[t, d], extents=(share,))

    return dq, dkv, dkv


# --- look-ups --------------------------------------------------------------------------------------------------------
@describe("aten.embedding")
def embedding(weight: Tensor, ids: Tensor, *_: Any, **__: Any) -> Any:
    return lambda *i: Sum(lambda v: equal(ids[i[:-1]], v) * weight[v, i[-1]])


@describe("aten.embedding_dense_backward")
def embedding_dense_backward(dy: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Any:
    if by_frequency:
        return lambda v, h: opaque(ids[(ALL,) * ids.rank], linear=[dy[(*(ALL,) * ids.rank, h)]])[v]
    return lambda v, h: Sum(lambda *t: equal(ids[t], v) * dy[(*t, h)], extents=ids.shape)


@describe("aten.gather")
def gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Any:
    def picked(*i: Index) -> Expression:
        d = dim % max(x.rank, 1)
        return Sum(lambda v: equal(index[i], v) * x[(*i[:d], v, *i[d + 1 :])])

    return picked


@describe("aten.scatter_add")
def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    d = dim % max(x.rank, 1)
    same = [a == b for k, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if k != d]
    if index.shape != source.shape or not all(same):
        return lambda *i: _along_all(i, x, index, source)

    def added(*i: Index) -> Expression:
        def term(t: Index) -> Expression:
            place = (*i[:d], t, *i[d + 1 :])
            return equal(index[place], i[d]) * source[place]

        return x[i] + Sum(term)

    return added


def _along_all(i: Coordinates, *tensors: Tensor) -> Expression:
    return opaque(*(t[(ALL,) * t.rank] for t in tensors))[i]


@describe("aten.index_select")
def index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    d = dim % max(x.rank, 1)
    return lambda *i: Sum(lambda v: equal(index[i[d]], v) * x[(*i[:d], v, *i[d + 1 :])])


@describe("aten.index", "aten._unsafe_index")
def index_tensor(x: Tensor, indices: list[Tensor | None]) -> Any:
    """Rows picked by integer tensors on neighbouring dims; what they index broadcasts together."""
    places = [d for d, t in enumerate(indices) if t is not None]
    picks = [t for t in indices if t is not None]
    rank = max(t.rank for t in picks)
    start = places[0] if places == list(range(places[0], places[-1] + 1)) else 0

    def picked(*i: Index) -> Expression:
        rows, rest = i[start : start + rank], [*i[:start], *i[start + rank :]]

        def term(*v: Index) -> Expression:
            free, chosen = iter(rest), iter(v)
            place = tuple(next(chosen) if d in places else next(free) for d in range(x.rank))
            value: Expression = x[place]
            for pick, variable in zip(picks, v, strict=True):
                value = equal(pick.aligned(rows), variable) * value
            return value

        return Sum(term, extents=[x.shape[d] for d in places])

    return picked


@describe("aten.index_put", "aten._unsafe_index_put")
def index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Only sums into the rows of the first dim are followed; else the indexed dims stay whole."""
    places = [d for d, t in enumerate(indices) if t is not None]
    picks = [t for t in indices if t is not None]
    rank = max(t.rank for t in picks)
    if accumulate and places == [0] and prod(values.shape) == prod(picks[0].shape) * prod(x.shape[1:]):

        def added(v: Index, *i: Index) -> Expression:
            return x[(v, *i)] + Sum(lambda *t: equal(picks[0][t], v) * values[(*t, *i)], extents=picks[0].shape)

        return added
    if places == list(range(len(places))) and values.rank == rank + x.rank - len(places):

        def put(*i: Index) -> Expression:
            rest = i[len(places) :]
            known = [t[(ALL,) * t.rank] for t in picks]
            kept, new = x[(*(ALL,) * len(places), *rest)], values[(*(ALL,) * rank, *rest)]
            return opaque(*known, linear=[kept, new])[i[: len(places)]]

        return put
    return lambda *i: _along_all(i, x, values, *picks)
