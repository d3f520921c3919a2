"""What crosses between stages of a sharded plan: which part of which value each device sends to which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from simpart.errors import UnsupportedError
from simpart.graph import Graph
from simpart.placement import Partial, Replicate, Shard
from simpart.plan import REPLICA_AXIS, Plan
from simpart.plan import kernel_ids as ids_of
from simpart.schedule import Action, Rows
from simpart.sharding import Flow, Layout, layout_text
from simpart.validate._boundary import Box, Message, Piece, _inside, backward_at, split
from simpart.validate._crossings import Way
from simpart.validate._mesh import chunk_rows, mesh_ranks

__all__ = ["MeshTraffic", "pieces_of"]


class MeshTraffic:
    """All messages of a step that this rank sends or receives, by action, as `_boundary.Traffic` has them; `hop`
    numbers the way."""

    def __init__(
        self, plan: Plan, graph: Graph, flows: Sequence[Flow], ways: Sequence[Way], rows: Rows, rank: int
    ) -> None:
        self.ways = tuple(ways)
        self.outgoing: dict[int, list[Message]] = defaultdict(list)
        self.incoming: dict[int, list[Message]] = defaultdict(list)
        self.channels: dict[int, list[Message]] = defaultdict(list)
        self.pairs: set[tuple[int, int]] = set()
        position = {action: i for row in rows for i, action in enumerate(row)}
        found = [pieces_of(plan, graph, flows, way) for way in self.ways]
        most = max((len(p) for p in found), default=1)
        count = plan.batch.micro_batches
        for w, (way, parts) in enumerate(zip(self.ways, found, strict=True)):
            for p, piece in enumerate(parts):
                if piece.source != piece.destination:
                    self.pairs.add((piece.source, piece.destination))
                if rank not in (piece.source, piece.destination):
                    continue
                for m in range(count):
                    ends = [
                        backward_at(position, s, m) if way.gradient else position[Action(s, "F", m)]
                        for s in (way.source, way.destination)
                    ]
                    message = Message(
                        tag=(w * count + m) * most + p, hop=w, micro_batch=m, gradient=way.gradient,
                        sender=piece.source, receiver=piece.destination, sender_box=piece.source_box,
                        receiver_box=piece.destination_box, sent_at=ends[0], needed_at=ends[1],
                    )  # fmt: skip
                    if message.sender == rank:
                        self.outgoing[message.sent_at].append(message)
                    if message.receiver == rank:
                        self.incoming[message.needed_at].append(message)
                        self.channels[message.sender].append(message)
        for received in self.channels.values():
            received.sort(key=lambda message: (message.sent_at, message.tag))
        for by_action in (self.outgoing, self.incoming):
            for messages in by_action.values():
                messages.sort(key=lambda message: message.tag)


def sent_layout(layout: Layout) -> Layout:
    """How a value crosses: what is pending is reduced first."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in layout)


def pieces_of(plan: Plan, graph: Graph, flows: Sequence[Flow], way: Way) -> list[Piece]:
    """The transfers of one value: every device gets each part that it needs once, from a device that has it."""
    source, target = flows[way.source], flows[way.destination]
    groups = [plan.stages[s].group for s in (way.source, way.destination)]
    sizes = [plan.batch.sizes[g] for g in groups]
    ranks = [mesh_ranks(plan, g) for g in groups]
    left, wanted = sent_layout(source.layouts[way.value]), target.layouts[way.value]
    if source.axes == target.axes and left == wanted and sizes[0] == sizes[1]:
        return [Piece(int(a), int(b), None, None) for a, b in zip(ranks[0].ravel(), ranks[1].ravel(), strict=True)]
    spec = graph.flat.kernel_value_spec[way.value]
    name = ids_of(graph)[int(graph.flat.kernel_value_kernel[way.value])]
    for layout, flow in ((left, source), (wanted, target)):
        if any(isinstance(p, Shard) and p.block is not None for p in layout):
            raise UnsupportedError(
                f"the result of kernel {name} lies as {layout_text(layout, flow.axes)} and crosses to another layout: "
                "strided parts are not run across stages; give both stages the same axes"
            )
    same = sizes[0] == sizes[1]
    if not same and not spec.batched and (way.gradient or len(sizes[0]) > 1):
        raise UnsupportedError(
            f"kernel {name} makes a tensor without a batch dim on {len(sizes[0])} replicas and its reader has "
            f"{len(sizes[1])}; use the same replicas on both sides of the cut"
        )
    frames = []  # per side: (rank, replica, box)
    for side, (flow, layout) in enumerate(((source, left), (target, wanted))):
        if same:
            replicas: list[Box] = [tuple((0, n) for n in spec.shape(size)) for size in sizes[side]]
        else:
            try:
                replicas = split(spec, sizes[side])
            except UnsupportedError as error:
                raise UnsupportedError(f"kernel {name}: {error}") from error
        names = [axis for axis, _ in flow.axes]
        rows = []
        for coordinates in np.ndindex(*ranks[side].shape):
            replica = coordinates[names.index(REPLICA_AXIS)] if REPLICA_AXIS in names else 0
            sides = list(replicas[replica])
            for placement, (_, size), part in zip(layout, flow.axes, coordinates, strict=True):
                if isinstance(placement, Shard):
                    start, stop = sides[placement.dim]
                    ((first, length),) = chunk_rows(stop - start, placement, size, part)
                    sides[placement.dim] = (start + first, start + first + length)
            rows.append((int(ranks[side][coordinates]), replica, tuple(sides)))
        frames.append(rows)
    found = []
    for number, (rank, replica, box) in enumerate(frames[1]):
        owners: dict[Box, list[int]] = defaultdict(list)
        for other, from_replica, theirs in frames[0]:
            if not same or from_replica == replica:
                owners[theirs].append(other)
        for theirs, having in owners.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, theirs, strict=True))
            if all(a < b for a, b in common):
                giver = rank if rank in having else having[number % len(having)]
                found.append(Piece(giver, rank, _inside(common, theirs), _inside(common, box)))
    return found
