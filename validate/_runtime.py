"""The runtime: one rank's row of a schedule, action by action, then gradient sums, clipping and the optimizer.

The loss of a step is the mean over micro-batches of the mean over samples: each replica's loss, itself a mean over
its samples, counts with its share `samples / (samples of the micro-batch · micro-batches)`, so that all contributions
add up to it, and gradients need no averaging anywhere, unequal replicas included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from simpart.plan import Plan
from simpart.schedule import Action
from simpart.validate._boundary import Box, Message, Traffic
from simpart.validate._compile import Key
from simpart.validate._gradients import Updater
from simpart.validate._measure import Clock
from simpart.validate._program import StageError
from simpart.validate._rank import Share
from simpart.validate._torch import backward_of_inputs, backward_of_weights
from simpart.validate._transport import Transport

__all__ = ["Runner"]


@dataclass(slots=True)
class _Pass:
    """What one micro-batch leaves in a stage between its forward and its backward."""

    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, Any] = field(default_factory=dict)  # gradient edges, or tensors where backward is split
    loss: tuple[Any, torch.Tensor] | None = None
    groups: list[dict[str, Any]] | None = None


class Runner:
    """Runs steps of a plan on one rank. `inputs(micro_batch)` gives the model's inputs for this rank's samples."""

    def __init__(
        self,
        plan: Plan,
        share: Share,
        traffic: Traffic,
        transport: Transport,
        updater: Updater,
        row: Sequence[Action],
        clock: Clock,
    ) -> None:
        self.plan, self.share, self.traffic, self.transport = plan, share, traffic, transport
        self.updater, self.row, self.clock = updater, row, clock
        self.split = {action.stage for action in row if action.kind == "I"}
        self.weight = share.micro_batch / (plan.batch.micro_batch * plan.batch.micro_batches)
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.loss: torch.Tensor | None = None

    def step(
        self, inputs: Callable[[int], Sequence[Any]], *, before_update: Callable[[], None] | None = None
    ) -> torch.Tensor | None:
        """One training step; returns this rank's contribution to the loss, None where no loss is computed."""
        self.loss = None
        self.transport.begin()
        for index, action in enumerate(self.row):
            try:
                if action.kind == "F":
                    self._forward(index, action, inputs)
                elif action.kind == "W":
                    self._weights(action)
                else:
                    self._backward(index, action)
            except StageError as error:
                raise StageError(f"stage {action.stage}, {action}: {error}") from error
        with self.clock.event("send"):
            self.transport.end()
        with self.clock.event("reduce"):
            self.updater.reduce()
        if before_update is not None:
            before_update()
        with self.clock.event("optimizer"):
            self.updater.clip()
            self.updater.step()
        return self.loss

    # --- actions ------------------------------------------------------------------------------------------------------
    def _forward(self, index: int, action: Action, inputs: Callable[[int], Sequence[Any]]) -> None:
        program = self.share.programs[action.stage]
        arrived = self._arrived(index, action)
        with self.clock.event("F", action):
            state = self.passes[action.stage, action.micro_batch] = _Pass()
            carries = {v.key: v.carries_gradient for v in self.share.values}
            for key in program.inputs:
                state.leaves[key] = arrived[key].detach().requires_grad_(carries[key])
            made = program.run(list(state.leaves.values()), inputs(action.micro_batch))
            outputs = dict(zip(program.outputs, made, strict=False))
            keep: Callable[[torch.Tensor], Any] = (lambda t: t) if action.stage in self.split else get_gradient_edge
            for key, tensor in outputs.items():
                if carries[key] and tensor.requires_grad:
                    state.outputs[key] = keep(tensor)
            if program.has_loss:
                loss = made[-1]
                contribution = loss.detach() * self.weight
                self.loss = contribution if self.loss is None else self.loss + contribution
                if loss.requires_grad:
                    state.loss = keep(loss), torch.full_like(loss, self.weight)
        leaving = {**arrived, **{key: tensor.detach() for key, tensor in outputs.items()}}
        self._send(index, action, leaving)

    def _backward(self, index: int, action: Action) -> None:
        program = self.share.programs[action.stage]
        arrived = self._arrived(index, action)
        with self.clock.event(action.kind, action):
            state = self.passes[action.stage, action.micro_batch]
            targets = list(state.outputs.values())
            gradients = [arrived[key] for key in state.outputs]
            if state.loss is not None:
                targets.append(state.loss[0])
                gradients.append(state.loss[1])
            leaves = [leaf for leaf in state.leaves.values() if leaf.requires_grad]
            if action.kind == "I" and leaves and targets:
                trained = [p for p in program.parameters.values() if p.requires_grad]
                state.groups = backward_of_inputs(targets, gradients, leaves, trained)
            elif targets:
                torch.autograd.backward(targets, gradients)
                self.updater.accumulate()
            state.outputs.clear()
            state.loss = None
        leaving = self._input_gradients(state, arrived)
        state.leaves.clear()
        if action.kind == "B":
            del self.passes[action.stage, action.micro_batch]
        self._send(index, action, leaving)

    def _weights(self, action: Action) -> None:
        with self.clock.event("W", action):
            state = self.passes.pop((action.stage, action.micro_batch))
            if state.groups is not None:
                trained = [p for p in self.share.programs[action.stage].parameters.values() if p.requires_grad]
                backward_of_weights(trained, state.groups)
                self.updater.accumulate()

    def _input_gradients(self, state: _Pass, arrived: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Gradient of every value that came in: of its use here plus what came back for one passed on."""
        found = dict(arrived)
        for key, leaf in state.leaves.items():
            if leaf.requires_grad:
                own = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                found[key] = own if key not in arrived else own + arrived[key]
        return found

    # --- messages -----------------------------------------------------------------------------------------------------
    def _arrived(self, index: int, action: Action) -> dict[Key, torch.Tensor]:
        """What an action needs from elsewhere, whole: values before a forward; before a backward, the sum of what
        readers send back."""
        messages = self.traffic.incoming.get(index, [])
        if not messages:
            return {}
        found: dict[Key, torch.Tensor] = {}
        with self.clock.event("receive", action, messages=[m.tag for m in messages]):
            hops: dict[int, list[Message]] = {}
            for message in messages:
                hops.setdefault(message.hop, []).append(message)
            for hop, parts in hops.items():
                key = self.traffic.values[self.traffic.hops[hop].value].key
                tensor = self._assembled(key, parts)
                found[key] = tensor if key not in found else found[key] + tensor
        return found

    def _assembled(self, key: Key, parts: Sequence[Message]) -> torch.Tensor:
        """One tensor of its pieces; whole ones (gradients from several replicas of a value without a batch dim) are
        summed."""
        result: torch.Tensor | None = None
        for message in parts:
            tensor = self.transport.receive(message)
            if message.receiver_box is None:
                result = tensor if result is None else result + tensor
                continue
            if result is None:
                shape, dtype = self.share.tensors[key]
                result = torch.zeros(shape, dtype=dtype, device=self.share.device)
            result[slices(message.receiver_box)] += tensor
        assert result is not None
        return result

    def _send(self, index: int, action: Action, tensors: dict[Key, torch.Tensor]) -> None:
        messages = self.traffic.outgoing.get(index, [])
        if not messages:
            return
        with self.clock.event("send", action, messages=[m.tag for m in messages]):
            for message in messages:
                key = self.traffic.values[self.traffic.hops[message.hop].value].key
                tensor = tensors.get(key)
                if tensor is None:  # nothing in this stage depends on it
                    shape, dtype = self.share.tensors[key]
                    tensor = torch.zeros(shape, dtype=dtype, device=self.share.device)
                self.transport.send(
                    message, tensor if message.sender_box is None else tensor[slices(message.sender_box)]
                )


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)


def message_shape(share: Share, traffic: Traffic, message: Message) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a message that this rank receives."""
    shape, dtype = share.tensors[traffic.values[traffic.hops[message.hop].value].key]
    if message.receiver_box is not None:
        shape = tuple(end - start for start, end in message.receiver_box)
    return shape, dtype
