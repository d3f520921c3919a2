"""Tagged point-to-point messages between ranks: any order of actions that respects dependencies runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from simpart.validate._boundary import Message

__all__ = ["Transport", "pair_groups"]


class Traffic(Protocol):
    """What a transport must know: the messages from each peer in the order in which they are sent, and all pairs
    (sender, receiver) of the plan."""

    @property
    def channels(self) -> Mapping[int, Sequence[Message]]: ...

    @property
    def pairs(self) -> set[tuple[int, int]]: ...


def pair_groups(traffic: Traffic, backend: str) -> dict[tuple[int, int], Any]:
    """A process group for each pair (sender, receiver) under NCCL, which knows no tags; none under gloo. All ranks
    must call it."""
    if backend == "gloo":
        return {}
    return {pair: dist.new_group(list(pair), backend=backend) for pair in sorted(traffic.pairs)}


class Transport:
    """Sends and receives the messages of one step after another.

    A peer's messages are received in the order in which it sends them, one action ahead of need, so that transfers
    run beside computation and NCCL's order is kept. What is sent stays alive until a message from the receiver shows
    that it arrived there, at the latest until the end of the step. `shape_of` gives shape and dtype of a whole
    message.
    """

    def __init__(
        self,
        traffic: Traffic,
        rank: int,
        shape_of: Callable[[Message], tuple[Sequence[int], torch.dtype]],
        device: torch.device,
        groups: Mapping[tuple[int, int], Any],
    ) -> None:
        self.traffic, self.rank, self.shape_of, self.device, self.groups = traffic, rank, shape_of, device, groups
        self.local: dict[int, torch.Tensor] = {}
        self.posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self.next: dict[int, int] = {}
        self.outstanding: dict[int, int] = defaultdict(int)
        self.sent: dict[int, deque[tuple[Message, Any, torch.Tensor]]] = defaultdict(deque)

    def begin(self) -> None:
        """Start a step: post the first receives."""
        self.next = dict.fromkeys(self.traffic.channels, 0)
        for peer in self.next:
            if peer != self.rank:
                self._post_ahead(peer)

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        if message.receiver == self.rank:
            self.local[message.tag] = tensor
            return
        tensor = tensor.contiguous()
        group = self.groups.get((message.sender, message.receiver))
        work = dist.isend(tensor, message.receiver, group=group, tag=message.tag)
        self.sent[message.receiver].append((message, work, tensor))

    def receive(self, message: Message) -> torch.Tensor:
        """The message's tensor, waiting for it if need be."""
        peer = message.sender
        if peer == self.rank:
            return self.local.pop(message.tag)
        while message.tag not in self.posted:
            self._post(peer)
        work, tensor = self.posted.pop(message.tag)
        self.outstanding[peer] -= 1
        work.wait()
        self._release(peer, message.sent_at)
        self._post_ahead(peer)
        return tensor

    def end(self) -> None:
        """Wait until all that was sent has left."""
        for queue in self.sent.values():
            while queue:
                queue.popleft()[1].wait()

    def _post(self, peer: int) -> None:
        message = self.traffic.channels[peer][self.next[peer]]
        self.next[peer] += 1
        shape, dtype = self.shape_of(message)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        work = dist.irecv(tensor, peer, group=self.groups.get((peer, self.rank)), tag=message.tag)
        self.posted[message.tag] = (work, tensor)
        self.outstanding[peer] += 1

    def _post_ahead(self, peer: int) -> None:
        """Post the messages that the peer's next action sends, unless some of an earlier one are still out."""
        if self.outstanding[peer]:
            return
        channel, start = self.traffic.channels[peer], self.next[peer]
        while self.next[peer] < len(channel) and channel[self.next[peer]].sent_at == channel[start].sent_at:
            self._post(peer)

    def _release(self, peer: int, sent_at: int) -> None:
        """A message that the peer sent after its action `sent_at` proves that what that action needed had arrived."""
        queue, kept = self.sent[peer], deque[tuple[Message, Any, torch.Tensor]]()
        while queue:
            message, work, tensor = queue.popleft()
            if message.needed_at <= sent_at:
                work.wait()
            else:
                kept.append((message, work, tensor))
        self.sent[peer] = kept
