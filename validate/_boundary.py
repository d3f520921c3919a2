"""What crosses between stages: which part of which tensor each rank sends to which, in both directions, and in which
order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from simpart.errors import UnsupportedError, UserError
from simpart.graph import Graph
from simpart.graph.sizes import Affine, TensorSpec
from simpart.plan import Plan
from simpart.plan.partition import Partition
from simpart.schedule import Action, Rows

__all__ = [
    "BoundaryValue",
    "Hop",
    "Message",
    "Piece",
    "Traffic",
    "batch_dim",
    "boundary_values",
    "check_order",
    "pieces",
    "split",
]

Box = tuple[tuple[int, int], ...]
"""Per dim, where a part of a tensor begins and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryValue:
    """A value made in stage `source` and read in later stages."""

    key: tuple[str, int]
    spec: TensorSpec
    source: int
    destinations: tuple[int, ...]
    carries_gradient: bool


@dataclass(frozen=True, slots=True)
class Hop:
    """One way of a value: from a stage that has it to one that reads it or passes it on."""

    value: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank has and another needs, in the coordinates of each (None: the whole tensor)."""

    source: int
    destination: int
    source_box: Box | None
    destination_box: Box | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A piece of a hop's value for one micro-batch, or (`gradient`) of its gradient, which goes the other way.

    It is sent after action `sent_at` of the sender's row, and needed for action `needed_at` of the receiver's.
    """

    tag: int
    hop: int
    micro_batch: int
    gradient: bool
    sender: int
    receiver: int
    sender_box: Box | None
    receiver_box: Box | None
    sent_at: int
    needed_at: int


def boundary_values(graph: Graph, partition: Partition) -> tuple[BoundaryValue, ...]:
    flat = graph.flat
    found = []
    for crossing in partition.crossings:
        op = int(flat.value_op[crossing.value])
        found.append(
            BoundaryValue(
                key=(graph.op_ids[op], crossing.value - int(flat.op_outputs[op])),
                spec=flat.value_spec[crossing.value],
                source=crossing.source,
                destinations=crossing.destinations,
                carries_gradient=crossing.carries_gradient,
            )
        )
    return tuple(found)


def hops_of(values: Sequence[BoundaryValue], skips: str) -> tuple[Hop, ...]:
    """Direct ways from the source to each reader, or with `relay` through every stage up to the last reader."""
    found = []
    for v, value in enumerate(values):
        if skips == "relay":
            found += [Hop(v, s, s + 1) for s in range(value.source, value.destinations[-1])]
        else:
            found += [Hop(v, value.source, d) for d in value.destinations]
    return tuple(found)


def batch_dim(spec: TensorSpec) -> tuple[int, int] | None:
    """(dim, elements per sample) along which samples lie one after the other; None where no single dim is a multiple
    of the batch.

    A dim `[b*s]` is taken to be batch-major, as flattening (b, s) makes it.
    """
    batched = [(d, size) for d, size in enumerate(spec.dims) if not isinstance(size, int)]
    if len(batched) == 1 and isinstance(batched[0][1], Affine) and batched[0][1].base == 0 and batched[0][1].slope > 0:
        return batched[0][0], batched[0][1].slope
    return None


def split(spec: TensorSpec, sizes: Sequence[int]) -> list[Box]:
    """The box that each replica has of a tensor of the whole micro-batch; the same box for all when it does not
    depend on the batch."""
    shape = spec.shape(sum(sizes)) if spec.batched else spec.shape(0)
    whole: Box = tuple((0, n) for n in shape)
    if not spec.batched:
        return [whole] * len(sizes)
    found = batch_dim(spec)
    if found is None:
        raise UnsupportedError(
            f"a tensor of dims ({', '.join(map(str, spec.dims))}) cannot be divided by samples; "
            "use the same micro-batch sizes on both sides of the cut, or cut elsewhere"
        )
    dim, slope = found
    ends = [slope * n for n in accumulate(sizes)]
    return [(*whole[:dim], (end - slope * n, end), *whole[dim + 1 :]) for n, end in zip(sizes, ends, strict=True)]


def pieces(
    value: BoundaryValue,
    source: Sequence[int],
    source_sizes: Sequence[int],
    destination: Sequence[int],
    sizes: Sequence[int],
) -> list[Piece]:
    """Transfers of a value from the replicas at ranks `source` to those at `destination`: what their boxes share.

    Equal divisions pass whole tensors from replica to replica, whatever their dims mean. A tensor without a batch dim
    goes from one replica to all. Raises UnsupportedError where samples cannot be told apart.
    """
    if tuple(source_sizes) == tuple(sizes):
        return [Piece(a, b, None, None) for a, b in zip(source, destination, strict=True)]
    if not value.spec.batched:
        if len(source) > 1:
            raise UnsupportedError(
                f"op {value.key[0]} makes a tensor without a batch dim on {len(source)} replicas and its reader "
                f"has {len(destination)}; "
                "use the same replicas on both sides of the cut"
            )
        return [Piece(source[0], b, None, None) for b in destination]
    try:
        have, want = split(value.spec, source_sizes), split(value.spec, sizes)
    except UnsupportedError as error:
        raise UnsupportedError(f"op {value.key[0]}: {error}") from error
    found = []
    for a, mine in zip(source, have, strict=True):
        for b, theirs in zip(destination, want, strict=True):
            common = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(mine, theirs, strict=True))
            if all(x < y for x, y in common):
                found.append(Piece(a, b, _inside(common, mine), _inside(common, theirs)))
    return found


def _inside(box: Box, frame: Box) -> Box | None:
    """`box` in the coordinates of `frame`; None if it is all of it."""
    return None if box == frame else tuple((x - u, y - u) for (x, y), (u, _) in zip(box, frame, strict=True))


def box_size(box: Box) -> int:
    return prod(end - start for start, end in box)


class Traffic:
    """All messages of a step that rank `rank` sends or receives, by action; the same tags on both sides.

    `ranks[g]` are the ranks of group g's replicas. `outgoing` and `incoming` are keyed by the index of the action in
    the rank's row; `channels[peer]` lists what comes from a peer in the order in which it is sent.
    """

    def __init__(
        self, plan: Plan, values: Sequence[BoundaryValue], rows: Rows, ranks: Sequence[Sequence[int]], rank: int
    ) -> None:
        self.values = tuple(values)
        self.hops = hops_of(values, plan.skips)
        self.outgoing: dict[int, list[Message]] = defaultdict(list)
        self.incoming: dict[int, list[Message]] = defaultdict(list)
        self.channels: dict[int, list[Message]] = defaultdict(list)
        self.pairs: set[tuple[int, int]] = set()
        per_hop = []
        for hop in self.hops:
            a, b = plan.stages[hop.source].group, plan.stages[hop.destination].group
            per_hop.append(pieces(self.values[hop.value], ranks[a], plan.batch.sizes[a], ranks[b], plan.batch.sizes[b]))
        position = {action: i for row in rows for i, action in enumerate(row)}
        most = max((len(p) for p in per_hop), default=1)
        for h, (hop, parts) in enumerate(zip(self.hops, per_hop, strict=True)):
            gradient = self.values[hop.value].carries_gradient
            for p, piece in enumerate(parts):
                if piece.source != piece.destination:
                    self.pairs |= {
                        (piece.source, piece.destination),
                        *([(piece.destination, piece.source)] if gradient else []),
                    }
                if rank not in (piece.source, piece.destination):
                    continue
                for m in range(plan.batch.micro_batches):
                    tag = 2 * ((h * plan.batch.micro_batches + m) * most + p)
                    self._add(
                        rank,
                        Message(
                            tag=tag,
                            hop=h,
                            micro_batch=m,
                            gradient=False,
                            sender=piece.source,
                            receiver=piece.destination,
                            sender_box=piece.source_box,
                            receiver_box=piece.destination_box,
                            sent_at=position[Action(hop.source, "F", m)],
                            needed_at=position[Action(hop.destination, "F", m)],
                        ),
                    )
                    if gradient:
                        self._add(
                            rank,
                            Message(
                                tag=tag + 1,
                                hop=h,
                                micro_batch=m,
                                gradient=True,
                                sender=piece.destination,
                                receiver=piece.source,
                                sender_box=piece.destination_box,
                                receiver_box=piece.source_box,
                                sent_at=backward_at(position, hop.destination, m),
                                needed_at=backward_at(position, hop.source, m),
                            ),
                        )
        for received in self.channels.values():
            received.sort(key=lambda message: (message.sent_at, message.tag))
        for by_action in (self.outgoing, self.incoming):
            for messages in by_action.values():
                messages.sort(key=lambda message: message.tag)

    def _add(self, rank: int, message: Message) -> None:
        if message.sender == rank:
            self.outgoing[message.sent_at].append(message)
        if message.receiver == rank:
            self.incoming[message.needed_at].append(message)
            self.channels[message.sender].append(message)


def backward_at(position: dict[Action, int], stage: int, micro_batch: int) -> int:
    """Where the action stands that makes the gradients of a stage's inputs: B, or I where it is split."""
    whole = position.get(Action(stage, "B", micro_batch))
    return position[Action(stage, "I", micro_batch)] if whole is None else whole


def check_order(rows: Rows, edges: Sequence[tuple[int, int]]) -> None:
    """Raise UserError unless the rows can run to the end: no action waits for one that waits for it. `edges` are
    pairs of stages."""
    position = {action: i for row in rows for i, action in enumerate(row)}
    done = [0] * len(rows)
    group = {action.stage: g for g, row in enumerate(rows) for action in row}

    def needs(action: Action) -> Iterator[Action]:
        for a, b in edges:
            if action.kind == "F" and b == action.stage:
                yield Action(a, "F", action.micro_batch)
            if action.kind in "BI" and a == action.stage:
                other: Action = Action(b, "B", action.micro_batch)
                yield other if other in position else Action(b, "I", action.micro_batch)

    moved = True
    while moved:
        moved = False
        for g, row in enumerate(rows):
            while done[g] < len(row) and all(position[n] < done[group[n.stage]] for n in needs(row[done[g]])):
                done[g] += 1
                moved = True
    for g, row in enumerate(rows):
        if done[g] < len(row):
            raise UserError(
                f"the schedule cannot run: group {g} waits at {row[done[g]]} for an action that itself waits; "
                f"reorder its rows"
            )
