"""The local form of a kernel: shapes of one member's tensors, and arguments that hold global sizes made local."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

from simpart.files import dump_json
from simpart.kernels.ops import base_name
from simpart.placement import Halo, Placement, Shard
from simpart.tdl.layout import chunk
from simpart.tdl.splitting import Split
from simpart.tdl.tracing import Call

__all__ = ["local_call", "local_shape"]

Shape = tuple[int, ...]


def local_shape(shape: Shape, placement: Placement | Halo, members: int, part: int = 0) -> Shape:
    """Shape of member `part`'s piece; the halo is counted.

    >>> local_shape((8, 12), Shard(1, block=6), 2)
    (8, 6)
    """
    if isinstance(placement, Halo):
        dim, extra = placement.shard.dim, placement.before + placement.after
        return _with(shape, dim, chunk(shape[dim], members, part)[1] + extra)
    if not isinstance(placement, Shard):
        return shape
    size = shape[placement.dim]
    span = placement.block or size
    return _with(shape, placement.dim, size // span * chunk(span, members, part)[1])


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


@lru_cache(maxsize=65536)
def local_call(call: Call, split: Split, members: int, part: int = 0, *, masked: bool = False) -> Call:
    """What member `part` runs. A dim read through a window is as long as the window, and padding there is gone.

    With `masked`, a split that looks rows up gets one more row of zeros at the end of the cut dim, for indices that
    belong to other members; without, sizes are those of the data.
    """
    inputs = [local_shape(s, p, members, part) for s, p in zip(call.inputs, split.strategy.inputs, strict=True)]
    outputs = [local_shape(s, p, members, part) for s, p in zip(call.outputs, split.strategy.outputs, strict=True)]
    for position, dim, window in split.windows:
        first, last = window.bounds(members, part)
        inputs[position] = _with(inputs[position], dim, last - first + 1)
    if masked and split.masked:
        for shapes, placements in ((inputs, split.strategy.inputs), (outputs, split.strategy.outputs)):
            for k, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    shapes[k] = _with(shapes[k], placement.dim, shapes[k][placement.dim] + 1)
    arguments, target = call.arguments, call.target
    rule = _RULES.get(base_name(call.target))
    if rule is not None and arguments:
        content = json.loads(arguments)
        local = _Local(call, split, content["positional"], content["named"], inputs, outputs)
        rule(local)
        arguments, target = dump_json(content), local.target
    return Call(target, tuple(inputs), tuple(outputs), arguments, call.dtypes)


class _Local:
    """One call being localised: its arguments are changed in place."""

    def __init__(
        self,
        call: Call,
        split: Split,
        positional: list[Any],
        named: dict[str, Any],
        inputs: list[Shape],
        outputs: list[Shape],
    ) -> None:
        self.call, self.split, self.positional, self.named = call, split, positional, named
        self.inputs, self.outputs, self.target = inputs, outputs, call.target

    def shape(self, number: int) -> Shape:
        """Local shape of the tensor at a positional argument."""
        position: int = self.positional[number]["tensor"]
        return self.inputs[position]

    def windowed(self, number: int) -> set[int]:
        """Dims of that tensor that are read through a window."""
        return {dim for position, dim, _ in self.split.windows if position == self.positional[number]["tensor"]}


def _output_size(at: int) -> Callable[[_Local], None]:
    def rule(local: _Local) -> None:
        if len(local.positional) > at and isinstance(local.positional[at], list):
            local.positional[at] = list(local.outputs[0])

    return rule


def _first_list(local: _Local) -> None:
    """The only list among the arguments is the output's shape."""
    for k, item in enumerate(local.positional):
        if isinstance(item, list):
            local.positional[k] = list(local.outputs[0])


def _squeeze(local: _Local) -> None:
    """Names the dims: a cut one may be of size one on a member."""
    if local.call.target == "aten.squeeze.default":
        before = local.call.inputs[0]
        local.target = "aten.squeeze.dims"
        local.positional.append([d for d, size in enumerate(before) if size == 1])


def _slice(local: _Local) -> None:
    """Start and end move with the shard; a window begins where the slice does."""
    x, dim, start, *_ = [*local.positional, 0, 0][:3]
    before = local.call.inputs[x["tensor"]]
    d = dim % max(len(before), 1)
    after = local.inputs[x["tensor"]]
    if after == before:
        return
    step = local.positional[4] if len(local.positional) > 4 else 1
    first, _, _ = slice(start, None, step).indices(before[d])
    first = 0 if d in local.windowed(0) else first * after[d] // before[d]
    end = first + (local.outputs[0][d] - 1) * step + 1
    local.positional[1:] = [d, first, end, *local.positional[4:]]


def _slice_backward(local: _Local) -> None:
    _, sizes, dim, start, _, step = local.positional
    d = dim % len(sizes)
    after = local.outputs[0]
    if list(after) != list(sizes):
        first, _, _ = slice(start, None, step).indices(sizes[d])
        first = first * after[d] // sizes[d]
        local.positional[1:5] = [list(after), d, first, first + (local.shape(0)[d] - 1) * step + 1]


def _split(local: _Local) -> None:
    dim = (local.positional[2] if len(local.positional) > 2 else 0) % max(len(local.outputs[0]), 1)
    if isinstance(local.positional[1], int):
        local.positional[1] = local.outputs[0][dim]
    else:
        local.positional[1] = [shape[dim] for shape in local.outputs]


def _repeat(local: _Local) -> None:
    times, before = local.positional[1], local.shape(0)
    lead = len(times) - len(before)
    local.positional[1] = [
        n if k < lead else local.outputs[0][k] // before[k - lead] for k, n in enumerate(local.outputs[0])
    ]


def _convolution(local: _Local) -> None:
    weight, transposed = local.shape(1), local.positional[6]
    channels = local.outputs[0][1] if transposed else local.shape(0)[1]
    local.positional[8] = channels // weight[1]
    gone = local.windowed(0)
    padding = local.positional[4] * (len(weight) - 2) if len(local.positional[4]) == 1 else local.positional[4]
    local.positional[4] = [0 if k + 2 in gone else p for k, p in enumerate(padding)]


def _convolution_backward(local: _Local) -> None:
    dy, x, weight = (local.shape(k) for k in range(3))
    local.positional[9] = (dy if local.positional[7] else x)[1] // weight[1]
    if local.positional[3] is not None and local.positional[3] != [0]:
        local.positional[3] = [dy[1]]


def _group_norm(local: _Local) -> None:
    _group_sizes(local, 3)


def _group_norm_backward(local: _Local) -> None:
    _group_sizes(local, 5)


def _group_sizes(local: _Local, first: int) -> None:
    x = local.shape(0 if first == 3 else 1)
    channels, groups = local.positional[first + 1], local.positional[first + 3]
    local.positional[first : first + 4] = [x[0], x[1], prod(x[2:]), groups * x[1] // channels]


def _embedding_rows(local: _Local) -> None:
    local.positional[2] = local.outputs[0][0]


_RULES: dict[str, Callable[[_Local], None]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "expand", "broadcast_to", "_reshape_alias"), _output_size(1)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), _output_size(1)),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "randint", "empty_strided"), _first_list),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "slice_backward": _slice_backward,
    "select_backward": _output_size(1),
    "unfold_backward": _output_size(1),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "split_with_sizes_copy"), _split),
    "repeat": _repeat,
    "squeeze": _squeeze,
    **dict.fromkeys(
        ("upsample_nearest2d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"), _output_size(2)
    ),
    **dict.fromkeys(("convolution", "_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "embedding_dense_backward": _embedding_rows,
}
