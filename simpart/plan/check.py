"""Do a plan's shardings and states at rest fit its graph? Each refusal is one line: rule, value, way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from simpart.errors import UnknownNameError, UserError
from simpart.graph import Graph
from simpart.graph.sizes import Size, TensorSpec, size_at
from simpart.placement import Halo, Partial, Placement, Shard, Sharding, StatePlacement, Strategy
from simpart.plan import REPLICA_AXIS, Plan, kernel_ids

if TYPE_CHECKING:
    from simpart.plan.partition import Partition

__all__ = ["check_shardings", "check_state"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Axes = tuple[tuple[str, int], ...]


def check_shardings(plan: Plan, graph: Graph) -> None:
    """Refuse strategies of kernels that do not exist, on axes that a group lacks, or that don't fit the kernel's
    tensors."""
    _once("sharding", [name for name, _ in plan.shardings])
    for name, sharding in plan.shardings:
        users = [(s, plan.groups[stage.group]) for s, stage in enumerate(plan.stages) if stage.sharding == name]
        if not users:
            raise UserError(f"sharding {name!r} is used by no stage; name it in a stage or leave it out")
        batches = sorted({size for s, _ in users for size in set(plan.batch.sizes[plan.stages[s].group])})
        meshes: dict[Axes, int] = {}  # of stages on equal ones the first speaks for all
        for s, group in users:
            meshes.setdefault(group.sharding_axes, s)
        fits = (sharding, frozenset(meshes), tuple(batches))
        if fits not in (known := _fitting.setdefault(graph, set())):
            _check_sharding(name, sharding, graph, [(s, axes) for axes, s in meshes.items()], batches)
            known.add(fits)


_fitting: WeakKeyDictionary[Graph, set[tuple[Sharding, frozenset[Axes], tuple[int, ...]]]] = WeakKeyDictionary()
"""Shardings that were found to fit, on groups of these meshes at these micro-batches."""


def _check_sharding(
    what: str, sharding: Sharding, graph: Graph, users: Sequence[tuple[int, Axes]], batches: Sequence[int]
) -> None:
    class_of = dict(zip(kernel_ids(graph), graph.flat.kernel_class.tolist(), strict=True))
    first: dict[int, str] = {}
    for kernel, cls in class_of.items():
        first.setdefault(cls, kernel)
    for rows, shared in ((sharding.classes, True), (sharding.overrides, False)):
        _once(f"sharding {what!r}: kernel", [kernel for kernel, _ in rows])
        for kernel, strategy in rows:
            if kernel not in class_of:
                op = kernel.partition("|")[0]
                near = [known for known in class_of if known.startswith(f"{op}|")] or list(graph.op_ids[:8])
                raise UnknownNameError("kernel", kernel, near)
            cls = class_of[kernel]
            if shared and first[cls] != kernel:
                raise UserError(
                    f"a class of kernels is named by its first instance {first[cls]}, got {kernel}; "
                    "name that one, or put this one under overrides"
                )
            if REPLICA_AXIS in dict(strategy.axes):
                raise UserError(f"kernel {kernel}: axis dp holds replicas, which split no kernel; use another axis")
            for stage, axes in users:
                _check_axes(f"kernel {kernel}", strategy.axes, axes, f"the group of stage {stage}")
            _check_strategy(
                kernel, strategy, graph.kernel_class_inputs[cls], graph.kernel_classes[cls].outputs, batches
            )


def _check_strategy(
    kernel: str, strategy: Strategy, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec],
    batches: Sequence[int],
) -> None:  # fmt: skip
    for axis, split in strategy.axes:
        for what, places, specs in (("inputs", split.inputs, inputs), ("outputs", split.outputs, outputs)):
            if len(places) != len(specs):
                raise UserError(
                    f"kernel {kernel} has {len(specs)} {what}, its strategy on {axis} names {len(places)}; "
                    "give one placement for each"
                )
            for i, (place, spec) in enumerate(zip(places, specs, strict=True)):
                _check_placement(f"kernel {kernel}, {what[:-1]} {i}", place, spec, batches)


_sound: WeakKeyDictionary[Graph, dict[tuple[tuple[str, StatePlacement], ...], Ints]] = WeakKeyDictionary()


def check_state(plan: Plan, graph: Graph, found: Partition) -> None:
    """Refuse state at rest of unknown parameters, on axes that their stages' groups lack, or that doesn't fit them."""
    known = _sound.setdefault(graph, {})
    if plan.state not in known:
        known[plan.state] = _check_places(plan, graph)
    pattern_of = known[plan.state]
    for stage, values in zip(plan.stages, found.parameters, strict=True):
        axes, where = plan.groups[stage.group].axes, f"group {stage.group}"
        for number, first in zip(*np.unique(pattern_of[values], return_index=True), strict=True):
            if number >= 0:
                name, rest = graph.parameters[int(values[first])].name, plan.state[number][1]
                for what, places in _places(name, rest):
                    _check_axes(what, places, axes, where)


def _places(name: str, rest: StatePlacement) -> Iterator[tuple[str, tuple[tuple[str, Placement], ...]]]:
    yield f"parameter {name}", rest.parameter
    yield f"gradient of {name}", rest.gradient
    yield f"optimizer state of {name}", rest.optimizer


def _check_places(plan: Plan, graph: Graph) -> Ints:
    """What holds whatever the stages; returns which pattern each parameter matches, by its value number; -1: none."""
    patterns = [pattern for pattern, _ in plan.state]
    _once("state of", patterns)
    pattern_of = np.full(len(graph.flat.value_op), -1, dtype=np.int64)
    for value, source in graph.parameters.items():
        pattern, rest = plan.state_of(source)
        if pattern is None:
            continue
        pattern_of[value] = patterns.index(pattern)
        for name, places in _places(source.name, rest):
            for _, place in places:
                _check_placement(name, place, source.spec)
                if isinstance(place, Partial) and places is not rest.gradient:
                    raise UserError(f"{name} rests whole or in shards, got {place}; write R or S(0)")
    unmatched = [pattern for i, pattern in enumerate(patterns) if not (pattern_of == i).any()]
    if unmatched:
        names = ", ".join([source.name for source in graph.parameters.values()][:8])
        raise UserError(
            f"state of {unmatched[0]!r} matches no parameter that an earlier pattern leaves; "
            f"the graph's begin with {names}"
        )
    return pattern_of


def _check_axes(what: str, places: Iterable[tuple[str, object]], axes: Sequence[tuple[str, int]], where: str) -> None:
    known = [name for name, _ in axes]
    names = [axis for axis, _ in places]
    _once(f"{what}: axis", names)
    for axis in names:
        if axis not in known:
            raise UserError(f"{what}: {where} has no axis {axis!r}; it has {', '.join(known) or 'none'}")


def _check_placement(what: str, place: Placement | Halo, spec: TensorSpec, batches: Sequence[int] = (1,)) -> None:
    shard = place.shard if isinstance(place, Halo) else place
    if not isinstance(shard, Shard):
        return
    if shard.dim >= len(spec.dims):
        raise UserError(f"{what} has {len(spec.dims)} dims, its placement {place} names dim {shard.dim}; count from 0")
    size = spec.dims[shard.dim]
    if shard.block is not None and (shard.block < 1 or not _divides(shard.block, size, batches)):
        raise UserError(f"{what}: block must divide dim {shard.dim} of size {size}, got {shard.block}; use a divisor")


def _divides(block: int, size: Size, batches: Sequence[int]) -> bool:
    """At the micro-batches of the plan."""
    return all(size_at(size, batch) % block == 0 for batch in batches)


def _once(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{what} {name} is given twice; keep one")
