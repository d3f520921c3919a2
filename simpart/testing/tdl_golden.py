"""Golden cases of the description language: interval arithmetic, partition-n-reduce and the authors' strategy
tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import floor
from typing import Any

from simpart.errors import FormatError
from simpart.placement import AxisStrategy, Halo, Partial, Placement, Shard
from simpart.tdl import DESCRIPTIONS
from simpart.tdl.expression import Access, Constant, Expression, Opaque, Reduction, Sum, Tensor, as_expression, opaque
from simpart.tdl.index import Index, Variable
from simpart.tdl.interval import Bound, Interval
from simpart.tdl.regions import loop_splits, loops_of
from simpart.tdl.splitting import splits
from simpart.tdl.tracing import Call, trace

__all__ = ["solve_interval", "solve_interval_symbolic", "solve_strategies", "solve_table"]

_REDUCERS = {"Sum": "sum", "Max": "max", "Min": "min", "Prod": "prod"}


# --- intervals -------------------------------------------------------------------------------------------------------
def solve_interval(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`{coefficients, constant, inclusive_ranges}` to the range of the index."""
    total = Interval.between(inputs["constant"], inputs["constant"])
    for name, factor in inputs["coefficients"].items():
        total = total + Interval.between(*inputs["inclusive_ranges"][name]) * _exact(factor)
    low, high = total.at({})
    return {"inclusive_range": [_plain(low), _plain(high)]}


def solve_interval_symbolic(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """An expression over variables with symbolic ranges `"[X/2, X-1]"` to its lower and upper bound."""
    ranges, symbols = {}, set()
    for name, text in inputs["variables"].items():
        low, high = (_bound(ast.parse(part.strip(), mode="eval").body) for part in text.strip("[] ").split(","))
        ranges[name] = Interval(low, high)
        symbols |= {symbol for symbol, _ in (*low.coefficients, *high.coefficients)}
    found = _interval(ast.parse(inputs["expression"], mode="eval").body, ranges)
    sides = {"lower": found.lower, "upper": found.upper}
    return {
        side: {**{s: _plain(dict(b.coefficients).get(s, 0)) for s in symbols}, "const": _plain(b.constant)}
        for side, b in sides.items()
    }


def _bound(node: ast.expr) -> Bound:
    return _interval(node, {}).lower


def _interval(node: ast.expr, ranges: Mapping[str, Interval]) -> Interval:
    if isinstance(node, ast.Name):
        symbol = Bound.of({node.id: 1})
        return ranges.get(node.id) or Interval(symbol, symbol)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _interval(node.operand, ranges) * -1
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Interval.between(_exact(node.value), _exact(node.value))
    if isinstance(node, ast.BinOp):
        left, right = _interval(node.left, ranges), _interval(node.right, ranges)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return right * _factor(left) if _is_number(left) else left * _factor(right)
        if isinstance(node.op, ast.Div):
            return left / _factor(right)
    raise FormatError(f"an interval expression has names, numbers, + - * /, got {ast.unparse(node)}")


def _is_number(interval: Interval) -> bool:
    return interval.lower == interval.upper and not interval.lower.coefficients


def _factor(interval: Interval) -> object:
    return interval.lower.constant if _is_number(interval) else interval


def _exact(value: float) -> int | Fraction:
    return value if isinstance(value, int) else Fraction(value)


def _plain(value: int | Fraction) -> int | float:
    return int(value) if value == int(value) else float(value)


# --- partition-n-reduce ----------------------------------------------------------------------------------------------
def solve_strategies(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A description in the paper's words to its strategies with exact regions."""
    sizes: dict[str, int] = inputs["index_sizes"]
    reader = _Reader(inputs["description"], sizes, inputs["output_indices"])
    call = Call("described", tuple(reader.shapes.values()), (tuple(sizes[i] for i in inputs["output_indices"]),))
    description = trace(reader.function(), call)
    strategies, found = [], {split.loop: split for split in loop_splits(description, inputs["workers"])}
    names = list(reader.shapes)
    order = [*inputs["output_indices"], *inputs["reduction_indices"]]
    for loop in (name for name in order if name in found):
        split = found[loop]
        entry: dict[str, Any] = {"index": loop, "output": "reduce" if split.output is None else f"cut{split.output}"}
        for worker, regions in enumerate(split.regions):
            entry[f"regions_worker{worker}"] = {names[t]: [list(b) for b in region] for t, region in regions.items()}
        strategies.append(entry)
    known = [name for name, _ in loops_of(description)]
    return {"strategies": strategies, "not_partitionable": [n for n in order if n in known and n not in found]}


class _Reader:
    """Reads `out[b,x] = Sum over k of A[b,x+k]*B[k]` into the language; tensor dims are as large as their indices
    reach."""

    def __init__(self, text: str, sizes: Mapping[str, int], coordinates: list[str]) -> None:
        self.sizes, self.coordinates = sizes, coordinates
        body = text.split("=", 1)[1]
        while (changed := re.sub(r"\b(Sum|Max|Min|Prod) over ([\w, ]+?) of (.*)", r"\1([\2], \3)", body)) != body:
            body = changed
        self.tree = ast.parse(body.strip(), mode="eval").body
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shapes_in(self.tree, ())

    def _shapes_in(self, node: ast.expr, inner: tuple[ast.expr, ...]) -> None:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            whole = iter(inner)
            dims = []
            for part in _items(node.slice):
                index = next(whole) if isinstance(part, ast.Slice) else part
                dims.append(floor(_interval(index, self._ranges()).upper.constant) + 1)
            before = self.shapes.get(node.value.id, tuple(dims))
            self.shapes[node.value.id] = tuple(map(max, before, dims))
            return
        if isinstance(node, ast.Subscript):
            self._shapes_in(node.value, tuple(_items(node.slice)))
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._shapes_in(child, inner)

    def _ranges(self) -> dict[str, Interval]:
        return {name: Interval.between(0, size - 1) for name, size in self.sizes.items()}

    def function(self) -> Callable[..., Any]:
        """The description as the tracer takes it."""

        def describe(*tensors: Tensor) -> Callable[..., Expression]:
            symbols = dict(zip(self.shapes, tensors, strict=True))

            def output(*coordinates: Index) -> Expression:
                for name, index in zip(self.coordinates, coordinates, strict=True):
                    index.variables[0].name = name
                return self._expression(self.tree, symbols, dict(zip(self.coordinates, coordinates, strict=True)))

            return output

        return describe

    def _expression(self, node: ast.expr, tensors: Mapping[str, Tensor], loops: Mapping[str, Index]) -> Expression:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            parts = [None if isinstance(p, ast.Slice) else self._index(p, loops) for p in _items(node.slice)]
            return Access(tensors[node.value.id], tuple(parts), padded=True)
        if isinstance(node, ast.Subscript):
            inner = self._expression(node.value, tensors, loops)
            assert isinstance(inner, Opaque)
            return Opaque(inner.arguments, inner.linear, tuple(self._index(p, loops) for p in _items(node.slice)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in _REDUCERS and isinstance(node.args[0], ast.List):
                names = [item.id for item in node.args[0].elts if isinstance(item, ast.Name)]
                variables = {name: Variable(name, self.sizes[name]) for name in names}
                inside = {**loops, **{n: Index.of(v) for n, v in variables.items()}}
                body = self._expression(node.args[1], tensors, inside)
                return Reduction(_REDUCERS[node.func.id], tuple(variables.values()), body)  # type: ignore[arg-type]
            return opaque(*(self._expression(part, tensors, loops) for part in node.args))
        if isinstance(node, ast.BinOp):
            left, right = (self._expression(side, tensors, loops) for side in (node.left, node.right))
            sign: Mapping[type[ast.operator], Callable[[], Expression]] = {
                ast.Add: lambda: left + right, ast.Sub: lambda: left - right,
                ast.Mult: lambda: left * right, ast.Div: lambda: left / right,
            }  # fmt: skip
            return sign[type(node.op)]()
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return Constant(node.value)
        if isinstance(node, ast.Name):
            return as_expression(loops[node.id]) if node.id in loops else Constant(1)
        raise FormatError(f"cannot read {ast.unparse(node)!r} in a description")

    def _index(self, node: ast.expr, loops: Mapping[str, Index]) -> Index:
        if isinstance(node, ast.Name):
            return loops[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return Index((), node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._index(node.operand, loops)
        if isinstance(node, ast.BinOp):
            left, right = self._index(node.left, loops), self._index(node.right, loops)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return left / right
        raise FormatError(f"cannot read the index {ast.unparse(node)!r}")


def _items(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


# --- the authors' tables ---------------------------------------------------------------------------------------------
# one letter per loop: what the table calls it, in the authors' order
_FORWARD = {"n": "batch", "o": "out", "i": "in"}
_BACKWARD = {"o": "out", "i": "in", "n": "batch"}
_CONVOLUTION = [1], [0], [1], False, [0], 1
_TENSORS = {
    "fully_connected_forward": (("x", "weight", "bias"), ("y",)),
    "convolution_forward": (("x", "weight", "bias"), ("y",)),
    "fully_connected_backward": (("dy", "x", "weight"), ("dx", "dw", "db")),
    "convolution_backward": (("dy", "x", "weight"), ("dx", "dw", "db")),
}
_N, _O, _I, _S, _K = 4, 6, 8, 12, 2


def solve_table(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The authors' table for one operator, derived: only the first two dims of a tensor are ever cut, statistics
    stay whole."""
    op = inputs["op"]
    if op in _TENSORS:
        return _joint_table(op)
    families = {
        "elementwise": ["aten.relu", "aten.add", "aten.native_dropout", "aten.clone"],
        "pooling_flatten_and_backward": ["aten.max_pool2d_with_indices", "aten.avg_pool2d", "aten.avg_pool2d_backward"],
        "softmax_output_and_backward": ["aten._softmax", "aten._softmax_backward_data"],
        "concat_and_backward": ["aten.cat", "aten.split_with_sizes"],
        "batch_norm": ["aten._native_batch_norm_legit_functional"],
    }
    if op == "global_rule":
        everywhere = [_dims(target, alone=False) for targets in families.values() for target in targets]
        return {"cuttable_dims": sorted(set.union(*everywhere))}
    if op not in families:
        raise FormatError(f"no table for operator {op!r}; known: {', '.join([*_TENSORS, *families, 'global_rule'])}")
    alone = [_dims(target, alone=True) for target in families[op]]
    # cutting a batch norm's samples needs shared statistics, which the authors leave whole
    together = [_dims(target, alone=op != "batch_norm") for target in families[op]]
    cuttable = sorted(set.intersection(*together))
    found: dict[str, Any] = {"cuttable_dims": cuttable, "exact_dims": sorted(set.intersection(*alone))}
    if op == "concat_and_backward":
        found["example"] = {"concat_dim": 1, "cuttable_dims": cuttable}
    return found


def _joint_table(op: str) -> dict[str, Any]:
    """Strategies of an operator with weights, one per loop index."""
    ins, outs = _TENSORS[op]
    backward, space = op.endswith("backward"), (_S,) if op.startswith("convolution") else ()
    x, y, w, b = (_N, _I, *space), (_N, _O, *space), (_O, _I, *[1 for _ in space]), (_O,)
    function: Callable[..., Any]
    if backward:
        call = Call(op, (y, x, w), (x, w, b))
        made = DESCRIPTIONS["aten.convolution_backward"]
        function = (lambda *t: made(*t, [_O], *_CONVOLUTION, [True] * 3)) if space else _linear_backward
    else:
        call = Call(op, (x, w, b), (y,))
        made = DESCRIPTIONS["aten.convolution"]
        function = (lambda *t: made(*t, *_CONVOLUTION)) if space else DESCRIPTIONS["aten.linear"]
    rows: dict[str, dict[str, str]] = {}
    for split in splits(function, call, 2):
        row = {n: _cut(p) for n, p in zip((*ins, *outs), _all(split.strategy), strict=True)}
        label = _loop_of(row, backward)
        if label and "reduce" not in [row[n] for n in ins if n != "bias"]:
            rows[label] = {n: "whole" if n in ins and c == "reduce" else c for n, c in row.items()}
    order = _BACKWARD if backward else _FORWARD
    found = [{**rows[label], "index": label} for label in order.values() if label in rows]
    return {"strategies": found, "count": len(found)}


def _loop_of(row: Mapping[str, str], backward: bool) -> str | None:
    """The loop a strategy cuts, by how the activations lie."""
    if row["x"] == "cut0":
        return "batch"
    if row["x"] == "cut1":
        return "in"
    return "out" if row["dy" if backward else "y"] == "cut1" else None


def _linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
    """One node for all three gradients of a linear layer."""
    return (
        lambda n, i: Sum(lambda o: dy[n, o] * weight[o, i]),
        lambda o, i: Sum(lambda n: dy[n, o] * x[n, i]),
        lambda o: Sum(lambda n: dy[n, o]),
    )


def _all(strategy: AxisStrategy) -> tuple[Placement | Halo, ...]:
    return (*strategy.inputs, *strategy.outputs)


def _cut(placement: Placement | Halo) -> str:
    if isinstance(placement, Shard):
        return f"cut{placement.dim}"
    return "reduce" if isinstance(placement, Partial) else "whole"


def _dims(target: str, alone: bool) -> set[int]:
    """Of the first two dims, those on which all 4-dim tensors of an operator can be cut together."""
    function = DESCRIPTIONS[target]
    full, half, unequal = (4, 6, 8, 8), (4, 6, 4, 4), (4, 2, 8, 8)
    channels = (6,)
    calls = {
        "aten.add": Call(target, (full, full), (full,)),
        "aten.native_dropout": Call(target, (full,), (full, full)),
        "aten.max_pool2d_with_indices": Call(target, (full,), (half, half)),
        "aten.avg_pool2d": Call(target, (full,), (half,)),
        "aten.avg_pool2d_backward": Call(target, (half, full), (full,)),
        "aten._softmax": Call(target, ((4, 6),), ((4, 6),)),
        "aten._softmax_backward_data": Call(target, ((4, 6), (4, 6)), ((4, 6),)),
        "aten.cat": Call(target, (full, unequal), ((4, 8, 8, 8),)),
        "aten.split_with_sizes": Call(target, ((4, 8, 8, 8),), (full, unequal)),
        "aten._native_batch_norm_legit_functional": Call(target, (full, *[channels] * 4), (full, *[channels] * 4)),
    }
    more: Mapping[str, Callable[..., Any]] = {
        "aten.max_pool2d_with_indices": lambda x: function(x, [2, 2]),
        "aten.avg_pool2d": lambda x: function(x, [2, 2]),
        "aten.avg_pool2d_backward": lambda dy, x: function(dy, x, [2, 2]),
        "aten._softmax": lambda x: function(x, 1),
        "aten._softmax_backward_data": lambda dy, y: function(dy, y, 1),
        "aten.cat": lambda a, b: function([a, b], 1),
        "aten.split_with_sizes": lambda x: function(x, [6, 2], 1),
        "aten._native_batch_norm_legit_functional": lambda *t: function(*t, True, 0.1, 1e-5),
    }
    call = calls.get(target, Call(target, (full,), (full,)))
    found = set()
    for split in splits(more.get(target, function), call, 2):
        shapes = (*call.inputs, *call.outputs)
        lying = zip(_all(split.strategy), shapes, strict=True)
        cuts = {p.dim if isinstance(p, Shard) else None for p, shape in lying if len(shape) > 1}
        if len(cuts) == 1 and (dim := cuts.pop()) in (0, 1) and not (alone and split.exchanges):
            found.add(dim)
    return {dim for dim in found if dim is not None}
