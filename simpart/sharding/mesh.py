"""Kernels on a mesh: how their inputs and outputs lie on all axes, what they exchange inside, what a device runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from simpart.cost import Signature, TensorForm
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES
from simpart.placement import AxisStrategy, Halo, Partial, Placement, Replicate, Shard, Strategy
from simpart.plan import REPLICA_AXIS, DeviceGroup
from simpart.tdl import Call, Split, call_like, local_call, splits_following, splits_of
from simpart.tdl.local import local_shape

__all__ = [
    "Axes", "InnerExchange", "Layout", "Use", "axis_members", "calls_of", "layout_text", "local_signature", "matching",
    "replicated", "rest_layout", "use_of",
]  # fmt: skip

Axes = tuple[tuple[str, int], ...]
"""Mesh axes by name and size, outermost first, `dp` included, those of size 1 left out."""
Layout = tuple[Placement | Halo, ...]
"""A placement per axis of the mesh. On `dp` a value is Replicate: every replica has its own, of its own samples."""
R = Replicate()


@dataclass(frozen=True, slots=True)
class InnerExchange:
    """An all-reduce that a kernel does on one axis, of `bytes`, with what is local on the axes outside it."""

    axis: int
    reducer: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A kernel class under a strategy. `local` is the call of the first device. `splits` are the splits by axis number
    (see `tdl.Split`), None where descriptions do not know the strategy: then shapes are local, arguments are not."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    local: Call
    exchanges: tuple[InnerExchange, ...] = ()
    splits: tuple[tuple[int, Split | None], ...] = ()


def mesh_of(axes: Sequence[tuple[str, int]]) -> Axes:
    """Axes that divide something."""
    return tuple((name, size) for name, size in axes if size > 1)


def layout_text(layout: Sequence[Placement | Halo], axes: Axes) -> str:
    """`S(0) on tp`, `whole` where no axis divides it."""
    words = [f"{p} on {name}" for p, (name, _) in zip(layout, axes, strict=True) if not isinstance(p, Replicate)]
    return ", ".join(words) or "whole"


def rest_layout(places: Sequence[tuple[str, Placement]], axes: Axes) -> Layout:
    """Where something rests on each axis."""
    known = dict(places)
    return tuple(known.get(name, R) for name, _ in axes)


def replicated(axes: Axes) -> Layout:
    return (R,) * len(axes)


_calls: WeakKeyDictionary[Graph, dict[int, tuple[Call, ...]]] = WeakKeyDictionary()


def calls_of(graph: Graph, micro_batch: int) -> tuple[Call, ...]:
    """The call of every kernel class of this structure, sizes filled in."""
    known = _calls.setdefault(graph, {})
    if micro_batch not in known:
        bare = graph if graph.at_one is None else replace(graph, at_one=None)
        known[micro_batch] = tuple(call_like(s) for s in signatures_of(bare, micro_batch))
    return known[micro_batch]


@lru_cache(maxsize=65536)
def matching(call: Call, members: int, strategy: AxisStrategy) -> Split | None:
    """The split of a call that has this strategy; None if its description does not offer it.

    Splits are distinct by their strategy, so masks, scales and exchanges follow from it.
    """
    for split in splits_of(call, members):
        if split.strategy == strategy:
            return split
    for output, places in ((False, strategy.inputs), (True, strategy.outputs)):
        for k, place in enumerate(places):
            if isinstance(place, Shard | Partial):
                for split in splits_following(call, members, k, place, output=output):
                    if split.strategy == strategy:
                        return split
    return None


@lru_cache(maxsize=65536)
def use_of(call: Call, strategy: Strategy, axes: Axes) -> Use:
    """A call under a strategy; axes it does not name replicate."""
    known = dict(strategy.axes)
    inputs: list[list[Placement | Halo]] = [[] for _ in call.inputs]
    outputs: list[list[Placement | Halo]] = [[] for _ in call.outputs]
    exchanges, splits = [], []
    for number, (name, size) in enumerate(axes):
        split = known.get(name) if name != REPLICA_AXIS else None
        if split is None:
            split = AxisStrategy((R,) * len(call.inputs), (R,) * len(call.outputs))
        for rows, places in ((inputs, split.inputs), (outputs, split.outputs)):
            for row, place in zip(rows, places, strict=True):
                row.append(place)
        if all(p == R for p in (*split.inputs, *split.outputs)):
            continue
        found = matching(call, size, split)
        splits.append((number, found))
        if found is None:
            call = Call(
                call.target,
                tuple(local_shape(s, p, size) for s, p in zip(call.inputs, split.inputs, strict=True)),
                tuple(local_shape(s, p, size) for s, p in zip(call.outputs, split.outputs, strict=True)),
                call.arguments,
                call.dtypes,
            )
        else:
            call = local_call(call, found, size)
            itemsize = next((DTYPE_BYTES[d] for d in call.dtypes if d.startswith(("float", "bfloat"))), 4)
            exchanges += [InnerExchange(number, e.reducer, e.elements * itemsize) for e in found.exchanges]
    return Use(
        inputs=tuple(map(tuple, inputs)),
        outputs=tuple(map(tuple, outputs)),
        local=call,
        exchanges=tuple(exchanges),
        splits=tuple(splits),
    )


def local_signature(signature: Signature, use: Use) -> Signature:
    """What the cost model prices for one device: a kernel's signature with the shapes and arguments of its local
    call."""

    def localised(forms: tuple[TensorForm, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[TensorForm, ...]:
        return tuple(replace(form, shape=shape) for form, shape in zip(forms, shapes, strict=True))

    return replace(
        signature,
        target=use.local.target,
        inputs=localised(signature.inputs, use.local.inputs),
        outputs=localised(signature.outputs, use.local.outputs),
        arguments=use.local.arguments,
    )


def axis_members(group: DeviceGroup, axis: str) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that communicate along an axis of a group, each in the order of the axis."""
    names = [name for name, _ in group.axes]
    devices = np.array(list(group.devices)).reshape([size for _, size in group.axes])
    rows = np.moveaxis(devices, names.index(axis), -1).reshape(-1, dict(group.axes)[axis])
    return tuple(tuple(int(d) for d in row) for row in rows)
