"""The runtime of sharded plans: one rank's row of a schedule, kernels in place of autograd.

The loss counts as in `_runtime`: every replica's with its share of the samples, so that contributions add up. Within a
replica each device reports what only it has: its term of a pending sum, the whole where it stands first on the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from simpart.placement import Partial, Replicate
from simpart.plan import Plan
from simpart.schedule import Action
from simpart.validate._boundary import Message
from simpart.validate._crossings import Updated
from simpart.validate._kernel_stage import Frame, GradientOf, KernelStage
from simpart.validate._measure import Clock
from simpart.validate._mesh_share import MeshShare
from simpart.validate._mesh_traffic import MeshTraffic
from simpart.validate._mesh_update import MeshUpdater
from simpart.validate._program import StageError
from simpart.validate._runtime import slices
from simpart.validate._transport import Transport

__all__ = ["MeshRunner", "mesh_message_shape"]


class MeshRunner:
    """Runs steps of a sharded plan on one rank. `inputs(micro_batch)` gives the model's inputs for its replica."""

    def __init__(
        self,
        plan: Plan,
        share: MeshShare,
        traffic: MeshTraffic,
        transport: Transport,
        updater: MeshUpdater,
        row: Sequence[Action],
        clock: Clock,
    ) -> None:
        self.plan, self.share, self.traffic, self.transport = plan, share, traffic, transport
        self.updater, self.row, self.clock = updater, row, clock
        self.weight = share.micro_batch / (plan.batch.micro_batch * plan.batch.micro_batches)
        self.frames: dict[tuple[int, int], Frame] = {}
        self.loss: torch.Tensor | None = None
        self.tangent = torch.full((), self.weight, dtype=share.dtype, device=share.device)

    @torch.no_grad()
    def step(
        self, inputs: Callable[[int], Sequence[Any]], *, before_update: Callable[[], None] | None = None
    ) -> torch.Tensor | None:
        """One training step; returns this rank's contribution to the loss, None where no loss is computed."""
        self.loss = None
        mesh = self.share.mesh
        mesh.counts.clear()
        self.transport.begin()
        for index, action in enumerate(self.row):
            mesh.phase = "F" if action.kind == "F" else "B"
            self.share.draw.micro_batch = action.micro_batch
            try:
                self._act(index, action, inputs)
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
        self.share.draw.step += 1
        return self.loss

    def _act(self, index: int, action: Action, inputs: Callable[[int], Sequence[Any]]) -> None:
        stage, key = self.share.stages[action.stage], (action.stage, action.micro_batch)
        arrived = self._arrived(index, action)
        with self.clock.event(action.kind, action):
            if action.kind == "F":
                self.frames[key] = self._fresh(stage, inputs(action.micro_batch))
            frame = self.frames[key]
            for value, tensor in arrived.items():
                frame[stage.arriving[value]] = tensor
            steps = {"F": stage.forward, "I": stage.inputs, "W": stage.weights, "B": stage.inputs}[action.kind]
            left = stage.run(frame, steps)
            if action.kind == "B" and stage.weights:
                left |= stage.run(frame, stage.weights)
            if action.kind in "BW":
                del self.frames[key]
            for name, tensors in left.items():
                for tensor in tensors:
                    self._keep(stage, name, tensor)
        self._send(index, action, {name: tensors[0] for name, tensors in left.items() if isinstance(name, int)})

    def _fresh(self, stage: KernelStage, inputs: Sequence[Any]) -> Frame:
        share = self.share
        frame: Frame = [None] * stage.slots
        for slot, source in stage.held:
            name = source.name
            if source.kind == "parameter":
                frame[slot] = share.parameters[name].detach()
            elif source.kind == "input":
                frame[slot] = inputs[int(name)]
            elif source.kind == "tangent":
                frame[slot] = self.tangent
            else:
                frame[slot] = (share.buffers if source.kind == "buffer" else share.constants)[name]
        return frame

    def _keep(self, stage: KernelStage, name: Any, tensor: torch.Tensor) -> None:
        """Take what a stage leaves besides messages: gradients, buffers, the loss."""
        if isinstance(name, GradientOf):
            self.updater.add(name, tensor)
        elif isinstance(name, Updated):
            buffer, layout = stage.buffers[name.buffer]
            self.share.mesh.part(self.share.buffers[buffer], layout).copy_(tensor)
        elif name == "loss":
            assert stage.loss_layout is not None
            share = self.share.mesh
            factor = self.weight
            for placement, (axis, size), part in zip(stage.loss_layout, share.axes, share.coordinates, strict=True):
                if isinstance(placement, Replicate) and axis != "dp":
                    factor *= part == 0
                elif isinstance(placement, Partial) and placement.reducer == "avg":
                    factor /= size
            mine = tensor.detach() * factor
            self.loss = mine if self.loss is None else self.loss + mine

    # --- messages -----------------------------------------------------------------------------------------------------
    def _arrived(self, index: int, action: Action) -> dict[int, torch.Tensor]:
        """What an action needs from elsewhere, put together."""
        messages = self.traffic.incoming.get(index, [])
        found: dict[int, torch.Tensor] = {}
        if not messages:
            return found
        with self.clock.event("receive", action, messages=[m.tag for m in messages]):
            for message in messages:
                value = self.traffic.ways[message.hop].value
                tensor = self.transport.receive(message)
                if message.receiver_box is None:
                    found[value] = tensor
                    continue
                if value not in found:
                    shape, dtype = whole_shape(self.share, self.traffic, message)
                    found[value] = torch.empty(shape, dtype=dtype, device=self.share.device)
                found[value][slices(message.receiver_box)] = tensor
        return found

    def _send(self, index: int, action: Action, tensors: dict[int, torch.Tensor]) -> None:
        messages = self.traffic.outgoing.get(index, [])
        if not messages:
            return
        with self.clock.event("send", action, messages=[m.tag for m in messages]):
            for message in messages:
                tensor = tensors[self.traffic.ways[message.hop].value]
                self.transport.send(
                    message, tensor if message.sender_box is None else tensor[slices(message.sender_box)]
                )


def whole_shape(share: MeshShare, traffic: MeshTraffic, message: Message) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of this rank's part of the value that a message brings."""
    way = traffic.ways[message.hop]
    spec = share.graph.flat.kernel_value_spec[way.value]
    dtype = getattr(torch, spec.dtype)
    layout = share.flows[way.destination].layouts[way.value]
    shape = share.mesh.local_shape(spec.shape(share.micro_batch), layout)
    return shape, share.dtype if dtype.is_floating_point and share.overrides_dtype else dtype


def mesh_message_shape(share: MeshShare, traffic: MeshTraffic, message: Message) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a message that this rank receives."""
    shape, dtype = whole_shape(share, traffic, message)
    if message.receiver_box is not None:
        shape = tuple(end - start for start, end in message.receiver_box)
    return shape, dtype
