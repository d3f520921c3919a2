"""Gradients, parameters and optimizer state where they rest: reduced, clipped, updated and brought back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from simpart.errors import UnsupportedError
from simpart.lowering.group_costs import BUCKET_BYTES
from simpart.placement import Partial, Replicate
from simpart.placement.conversions import conversions
from simpart.plan import Plan
from simpart.sharding import Layout
from simpart.training import TrainingSpec
from simpart.validate._gradients import make_optimizer
from simpart.validate._kernel_stage import GradientOf
from simpart.validate._mesh import Convert, Mesh, mesh_ranks

__all__ = ["MeshUpdater", "Resting", "shared_groups"]

R = Replicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """Where a parameter's state rests on the mesh of this rank's group; `groups` are the device groups that hold it,
    if it has a gradient."""

    shape: tuple[int, ...]
    itemsize: int
    parameter: Layout
    optimizer: Layout
    groups: tuple[int, ...]


def shared_groups(plan: Plan, resting: Mapping[str, tuple[int, ...]], rank: int) -> dict[tuple[int, ...], Any]:
    """Process groups of devices at the same place of several device groups that hold a parameter. All ranks must call
    it. `resting` says which device groups hold each parameter, on all ranks alike."""
    mine: dict[tuple[int, ...], Any] = {}
    for groups in sorted({g for g in resting.values() if len(g) > 1}):
        meshes = [mesh_ranks(plan, g) for g in groups]
        axes = [plan.groups[g].axes for g in groups]
        if len({tuple(a for a in x if a[1] > 1) for x in axes}) > 1:
            name = next(n for n, g in resting.items() if g == groups)
            raise UnsupportedError(
                f"parameter {name} is held by groups of axes {' and '.join(str(dict(a)) for a in axes)}: its "
                "gradients are summed only between equal meshes; give these groups the same axes"
            )
        for places in zip(*(m.ravel().tolist() for m in meshes), strict=True):
            made = dist.new_group(list(places))
            if rank in places:
                mine[groups] = made
    return mine


class MeshUpdater:
    """Owns the gradients of one rank's parts of parameters and steps its optimizer on them.

    Gradients accumulate as the stages leave them, are brought to the optimizer's layout once per step (equal
    all-reduces in buckets of at most `BUCKET_BYTES`), summed over stages that share the parameter, clipped by the norm
    over the whole model, each element once; the optimizer works on parts, and what it made is brought to where the
    parameter rests.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        resting: Mapping[str, Resting],
        gradients: Sequence[GradientOf],
        training: TrainingSpec,
        mesh: Mesh,
        shared: Mapping[tuple[int, ...], Any],
        world_size: int,
    ) -> None:
        self.training, self.mesh, self.shared, self.resting = training, mesh, shared, resting
        self.parameters, self.world_size = parameters, world_size
        self.trained = {n: p for n, p in parameters.items() if p.requires_grad}
        self.keys = [g for g in sorted(set(gradients), key=lambda g: (g.name, str(g.layout))) if g.name in self.trained]
        self.wanted = None if training.gradient_dtype is None else getattr(torch, training.gradient_dtype)
        self.sums: dict[GradientOf, torch.Tensor] = {}
        self.flat: list[tuple[int, torch.Tensor]] = []
        self.bucketed: dict[GradientOf, torch.Tensor] = {}
        self.to_optimizer: dict[GradientOf, Convert | None] = {}
        self._place_gradients()
        self.reduced: dict[str, torch.Tensor] = {}
        self.targets: dict[str, torch.Tensor] = {}
        self.back: dict[str, Convert | None] = {}
        for name, parameter in self.trained.items():
            rest = resting[name]
            start = self._converter(name, rest.parameter, rest.optimizer)
            self.back[name] = self._converter(name, rest.optimizer, rest.parameter)
            target = parameter.detach() if start is None else start(parameter.detach()).clone()
            if training.master_weights:
                target = target.float() if target.dtype != torch.float32 else target.clone()
            elif start is None:
                target = parameter
            self.targets[name] = target.requires_grad_()
        self.optimizer = make_optimizer(training, list(self.targets.values())) if self.targets else None

    def _converter(self, name: str, before: Layout, after: Layout) -> Convert | None:
        rest = self.resting[name]
        return self.mesh.converter(rest.shape, rest.itemsize, before, after, f"state of {name}")

    def _place_gradients(self) -> None:
        """Those that one plain all-reduce brings home lie in flat buffers."""
        order: dict[tuple[int, torch.dtype], list[GradientOf]] = {}
        for key in self.keys:
            rest = self.resting[key.name]
            self.to_optimizer[key] = self._converter(key.name, key.layout, rest.optimizer)
            steps = conversions(rest.shape, rest.itemsize, key.layout, rest.optimizer, self.mesh.sizes)  # type: ignore[arg-type]
            if len(steps) == 1 and steps[0].kind == "all_reduce" and steps[0].source == Partial():
                dtype = self.wanted or self.trained[key.name].dtype
                order.setdefault((steps[0].axis, dtype), []).append(key)
        for (axis, dtype), keys in sorted(order.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            shapes = [self.mesh.local_shape(self.resting[k.name].shape, k.layout) for k in keys]
            sizes = [torch.Size(shape).numel() for shape in shapes]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(self.trained.values())).device)
            self.flat.append((axis, buffer))
            for key, shape, part in zip(keys, shapes, buffer.split(sizes), strict=True):
                self.bucketed[key] = part.view(shape)

    def add(self, key: GradientOf, tensor: torch.Tensor) -> None:
        """Add a micro-batch's gradient."""
        if key.name not in self.trained:
            return
        if key in self.bucketed:
            self.bucketed[key].add_(tensor)
        elif key in self.sums:
            self.sums[key].add_(tensor)
        else:
            dtype = self.wanted or self.trained[key.name].dtype
            self.sums[key] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def reduce(self) -> None:
        """Bring all gradients to where the optimizer's state rests, in the same order on all ranks."""
        self.mesh.phase = "step"
        for axis, buffer in self.flat:
            each = max(1, BUCKET_BYTES // buffer.element_size())
            for start in range(0, buffer.numel(), each):
                self.mesh.all_reduce(buffer[start : start + each], axis)
        for key in self.keys:
            convert = self.to_optimizer[key]
            if key in self.bucketed:
                tensor = self.bucketed[key]
            else:
                tensor = self.sums.pop(key)
                tensor = tensor if convert is None else convert(tensor)
            known = self.reduced.get(key.name)
            self.reduced[key.name] = tensor if known is None else known + tensor
        for name, rest in self.resting.items():
            if len(rest.groups) > 1 and name in self.trained:
                term = self.reduced.get(name)  # none where only other stages make one
                term = torch.zeros_like(self.targets[name]) if term is None else term.contiguous()
                dist.all_reduce(term, group=self.shared[rest.groups])
                self.reduced[name] = term

    def gradient(self, name: str) -> torch.Tensor | None:
        """This rank's part of a parameter's whole gradient, after `reduce`."""
        return self.reduced.get(name)

    def clip(self) -> float | None:
        """Scale all gradients so that their global norm is at most the recipe's; returns the norm before."""
        limit = self.training.gradient_clip_norm
        if limit is None:
            return None
        device = next((g.device for g in self.reduced.values()), torch.device("cpu"))
        square = torch.zeros((), dtype=torch.float64, device=device)
        for name, gradient in self.reduced.items():
            rest = self.resting[name]
            copies = len(rest.groups)
            for placement, size in zip(rest.optimizer, self.mesh.sizes, strict=True):
                copies *= size if placement == R else 1
            square += torch.linalg.vector_norm(gradient).double() ** 2 / copies
        if self.world_size > 1:
            dist.all_reduce(square)
        norm = float(square.sqrt())
        scale = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if scale < 1:
            for gradient in self.reduced.values():
                gradient.mul_(scale)
        return norm

    def step(self) -> None:
        """One optimizer step, parameters brought back to where they rest, then fresh gradients."""
        if self.optimizer is None:
            return
        for name, target in self.targets.items():
            gradient = self.reduced.get(name)
            target.grad = None if gradient is None else gradient.to(target.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for name, target in self.targets.items():
                target.grad = None
                if target is not self.trained[name]:
                    made, convert = target.detach().to(self.trained[name].dtype), self.back[name]
                    self.trained[name].copy_(made if convert is None else convert(made))
        self.reduced.clear()
        for _, buffer in self.flat:
            buffer.zero_()

    def held(self) -> list[torch.Tensor]:
        """Tensors that live between steps, optimizer state apart."""
        return [*(b for _, b in self.flat), *(t for n, t in self.targets.items() if t is not self.trained[n])]

    def state_bytes(self) -> int:
        """Bytes of optimizer state."""
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in tensors)
