"""A rank's place in the mesh of its device group, and the collectives that bring tensors from one layout to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from simpart.errors import UnsupportedError
from simpart.placement import Halo, Partial, Placement, Shard
from simpart.placement.conversions import Step, conversions
from simpart.plan import Plan
from simpart.sharding import Axes, Layout, axis_members, layout_text
from simpart.sharding.mesh import mesh_of
from simpart.validate._torch import all_gather, reduce_scatter

__all__ = ["Convert", "Mesh", "chunk_rows", "mesh_ranks", "part_of", "rank_of_device"]

Shape = tuple[int, ...]
Convert = Callable[[torch.Tensor], torch.Tensor]
OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def rank_of_device(plan: Plan) -> dict[int, int]:
    """The plan's devices in the cluster's order are ranks 0, 1, …"""
    return {d: rank for rank, d in enumerate(sorted(d for group in plan.groups for d in group.devices))}


def mesh_ranks(plan: Plan, group: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ranks of a group, shaped like its mesh of axes larger than 1."""
    order, chosen = rank_of_device(plan), plan.groups[group]
    ranks = np.array([order[d] for d in chosen.devices], dtype=np.int64)
    return ranks.reshape([size for _, size in mesh_of(chosen.axes)])


# --- parts of tensors ------------------------------------------------------------------------------------------------
def chunk_rows(size: int, shard: Shard, members: int, part: int) -> list[tuple[int, int]]:
    """Runs (start, length) of a dim that a member holds."""
    span = shard.block or size
    each = ceil(span / members)
    start, stop = min(part * each, span), min((part + 1) * each, span)
    return [(first + start, stop - start) for first in range(0, size, span)]


def taken(tensor: torch.Tensor, shard: Shard, members: int, part: int) -> torch.Tensor:
    """A member's part of what the axis holds together."""
    runs = chunk_rows(tensor.shape[shard.dim], shard, members, part)
    pieces = [tensor.narrow(shard.dim, start, length) for start, length in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, shard.dim)


def part_of(tensor: torch.Tensor, layout: Layout, axes: Axes, coordinates: Sequence[int]) -> torch.Tensor:
    """What the device at `coordinates` holds of a whole tensor; partial counts as whole."""
    for placement, (_, size), part in zip(layout, axes, coordinates, strict=True):
        if isinstance(placement, Shard):
            tensor = taken(tensor, placement, size, part)
    return tensor


def joined(pieces: Sequence[torch.Tensor], shard: Shard, size: int) -> torch.Tensor:
    """The inverse of `taken`, given every member's part."""
    if shard.block is None or shard.block == size:
        return torch.cat(list(pieces), shard.dim)
    blocks = size // shard.block
    rows = [piece.chunk(blocks, shard.dim) for piece in pieces]
    return torch.cat([row[k] for k in range(blocks) for row in rows], shard.dim)


class Mesh:
    """One rank among those of its group. `counts` says how often each (phase, kind of collective, axis) was issued;
    `phase` is set by whoever runs.

    Process groups are per axis, of the ranks that differ along it alone; all ranks must make them together.
    """

    def __init__(self, axes: Axes, coordinates: Sequence[int], groups: Mapping[str, Any]) -> None:
        self.axes, self.coordinates, self.groups = axes, tuple(coordinates), groups
        self.sizes = tuple(size for _, size in axes)
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.phase = "F"

    @staticmethod
    def of(plan: Plan, rank: int) -> Mesh:
        """The mesh of a rank's group, with its process groups."""
        order, mine = rank_of_device(plan), {}
        for group in plan.groups:
            for name, _ in mesh_of(group.axes):
                for line in axis_members(group, name):
                    ranks = [order[d] for d in line]
                    made = dist.new_group(ranks)
                    if rank in ranks:
                        mine[name] = made
        for g, group in enumerate(plan.groups):
            found = np.argwhere(mesh_ranks(plan, g) == rank)
            if len(found):
                return Mesh(mesh_of(group.axes), [int(c) for c in found[0]], mine)
        raise AssertionError(f"rank {rank} is in no group")

    def coordinate(self, name: str) -> int:
        return dict(zip((n for n, _ in self.axes), self.coordinates, strict=True)).get(name, 0)

    def issued(self, kind: str, axis: int) -> Any:
        """Count a collective and give its process group."""
        name = self.axes[axis][0]
        self.counts[self.phase, kind, name] += 1
        return self.groups[name]

    def all_reduce(
        self, tensor: torch.Tensor, axis: int, reducer: str = "sum", kind: str = "all_reduce"
    ) -> torch.Tensor:
        """In place; the tensor is contiguous."""
        dist.all_reduce(tensor, OPERATIONS[reducer], group=self.issued(kind, axis))
        return tensor.div_(self.sizes[axis]) if reducer == "avg" else tensor

    def local_shape(self, shape: Shape, layout: Layout, skipped: int | None = None) -> Shape:
        """Shape of this rank's part, or of what the members of axis `skipped` hold together."""
        found = list(shape)
        for axis, placement in enumerate(layout):
            if axis != skipped and isinstance(placement, Shard):
                runs = chunk_rows(found[placement.dim], placement, self.sizes[axis], self.coordinates[axis])
                found[placement.dim] = sum(length for _, length in runs)
        return tuple(found)

    def part(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return part_of(tensor, layout, self.axes, self.coordinates)

    def converter(self, shape: Shape, itemsize: int, before: Layout, after: Layout, what: str) -> Convert | None:
        """What brings this rank's part of a tensor of whole `shape` from one layout to another; None if nothing need
        be done. Raises UnsupportedError, naming the layouts, where no conversion leads or a halo is asked for."""
        if before == after:
            return None
        if any(isinstance(p, Halo) for p in after):
            raise UnsupportedError(
                f"{what} needs {layout_text(after, self.axes)}: halos between neighbours are not run yet; "
                "split another dim than the one read through a window"
            )
        places: tuple[Placement, ...] = before  # type: ignore[assignment]  # nothing rests with a halo
        steps = conversions(shape, itemsize, places, after, self.sizes)
        state, calls = list(before), []
        for step in steps:
            held = self.local_shape(shape, tuple(state), skipped=step.axis)
            calls.append(self._step(step, held))
            state[step.axis] = step.target

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            for call in calls:
                tensor = call(tensor)
            return tensor

        return convert if calls else None

    def _step(self, step: Step, held: Shape) -> Convert:
        """One step; `held` is the shape of what the members of its axis hold together."""
        axis, source, target = step.axis, step.source, step.target
        n, part = self.sizes[axis], self.coordinates[axis]
        if step.kind == "all_reduce":
            assert isinstance(source, Partial)
            reducer = source.reducer
            return lambda t: self.all_reduce(t.clone(memory_format=torch.contiguous_format), axis, reducer)
        if step.kind == "all_gather":
            assert isinstance(source, Shard)
            return self._gather(axis, source, held[source.dim])
        if step.kind == "reduce_scatter":
            assert isinstance(source, Partial) and isinstance(target, Shard)
            return self._scatter(axis, source.reducer, target, held[target.dim])
        if step.kind == "all_to_all":
            assert isinstance(source, Shard) and isinstance(target, Shard)
            return self._exchange(axis, source, target, held)
        if isinstance(target, Shard):
            return lambda t: taken(t, target, n, part).contiguous()
        if isinstance(source, Shard):  # to a sum: zeros where others have theirs
            whole = source

            def spread(t: torch.Tensor) -> torch.Tensor:
                found, at = t.new_zeros(held), 0
                for start, length in chunk_rows(held[whole.dim], whole, n, part):
                    found.narrow(whole.dim, start, length).copy_(t.narrow(whole.dim, at, length))
                    at += length
                return found

            return spread
        if isinstance(target, Partial) and not isinstance(source, Partial) and target.reducer == "sum" and part:
            return torch.zeros_like
        return lambda t: t

    def _gather(self, axis: int, shard: Shard, size: int) -> Convert:
        n = self.sizes[axis]
        lengths = [sum(length for _, length in chunk_rows(size, shard, n, p)) for p in range(n)]
        most, dim = max(lengths), shard.dim

        def gather(t: torch.Tensor) -> torch.Tensor:
            short = most - t.shape[dim]
            if short:
                t = torch.cat([t, t.new_zeros([*t.shape[:dim], short, *t.shape[dim + 1 :]])], dim)
            found = t.new_empty([n, *t.shape])
            all_gather(found.view(-1), t.contiguous().view(-1), self.issued("all_gather", axis))
            return joined([found[p].narrow(dim, 0, lengths[p]) for p in range(n)], shard, size)

        return gather

    def _scatter(self, axis: int, reducer: str, shard: Shard, size: int) -> Convert:
        n, part = self.sizes[axis], self.coordinates[axis]
        lengths = [sum(length for _, length in chunk_rows(size, shard, n, p)) for p in range(n)]
        most, dim = max(lengths), shard.dim
        if reducer not in ("sum", "avg"):
            raise UnsupportedError(f"a pending {reducer} is not scattered yet; bring it to R first")

        def scatter(t: torch.Tensor) -> torch.Tensor:
            sent = t.new_zeros([n, *t.shape[:dim], most, *t.shape[dim + 1 :]])
            for p in range(n):
                sent[p].narrow(dim, 0, lengths[p]).copy_(taken(t, shard, n, p))
            found = t.new_empty(sent.shape[1:])
            reduce_scatter(found.view(-1), sent.view(-1), self.issued("reduce_scatter", axis))
            found = found.narrow(dim, 0, lengths[part]).contiguous()
            return found / n if reducer == "avg" else found

        return scatter

    def _exchange(self, axis: int, source: Shard, target: Shard, held: Shape) -> Convert:
        """A real all-to-all: each member sends each other just what that one will hold."""
        n, part = self.sizes[axis], self.coordinates[axis]

        def rows(shard: Shard, p: int) -> list[int]:
            runs = chunk_rows(held[shard.dim], shard, n, p)
            return [start + k for start, length in runs for k in range(length)]

        have = [rows(source, p) for p in range(n)]
        want = [rows(target, p) for p in range(n)]
        mine = have[part]
        if source.dim == target.dim:
            sending = [[mine.index(r) for r in sorted(set(mine) & set(want[p]))] for p in range(n)]
            arriving = [[want[part].index(r) for r in sorted(set(have[p]) & set(want[part]))] for p in range(n)]
        else:
            sending, arriving = want, [[] for _ in range(n)]
        out = list(held)
        out[target.dim] = len(want[part])
        shapes = []
        for p in range(n):
            shape = list(out)
            shape[source.dim] = len(arriving[p]) if source.dim == target.dim else len(have[p])
            shapes.append(shape)

        def exchange(t: torch.Tensor) -> torch.Tensor:
            pieces = [t.index_select(target.dim, torch.tensor(r, dtype=torch.long, device=t.device)) for r in sending]
            sent = torch.cat([piece.reshape(-1) for piece in pieces])
            counts = [int(np.prod(shape)) for shape in shapes]
            found = sent.new_empty(sum(counts))
            group = self.issued("all_to_all", axis)
            dist.all_to_all_single(found, sent, counts, [piece.numel() for piece in pieces], group=group)
            parts = [piece.view(shape) for piece, shape in zip(found.split(counts), shapes, strict=True)]
            if source.dim != target.dim:
                return joined(parts, source, held[source.dim])
            result = found.new_empty(out)
            for piece, places in zip(parts, arriving, strict=True):
                result.index_copy_(target.dim, torch.tensor(places, dtype=torch.long, device=t.device), piece)
            return result

        return exchange
