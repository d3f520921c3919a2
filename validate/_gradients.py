"""From accumulated gradients to updated parameters: sums over the ranks that hold a parameter, clipping, the
optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from simpart.errors import UnsupportedError
from simpart.lowering.group_costs import BUCKET_BYTES
from simpart.training import TrainingSpec

__all__ = ["Updater", "holder_groups"]


def holder_groups(holders: Mapping[str, tuple[int, ...]], world_size: int) -> dict[tuple[int, ...], Any]:
    """A process group for every set of ranks that share parameters. All ranks must call it, with the same holders."""
    found: dict[tuple[int, ...], Any] = {}
    for ranks in sorted({r for r in holders.values() if len(r) > 1}, key=lambda r: (len(r), r)):
        found[ranks] = dist.group.WORLD if len(ranks) == world_size else dist.new_group(list(ranks))
    return found


class Updater:
    """Owns the gradients of one rank's parameters and steps its optimizer.

    Gradients of parameters that several ranks hold live in flat buffers, are summed in place by all-reduces of at
    most `BUCKET_BYTES` and are zeroed after the step; those of others are dropped then (`set_to_none`). With
    `gradient_dtype` other than the parameter's, every micro-batch's gradient is added to a buffer of that dtype. With
    `master_weights` the optimizer works on float32 copies. Clipping scales by the norm over all parameters of the
    model, each counted once.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        holders: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], Any],
        training: TrainingSpec,
        world_size: int,
    ) -> None:
        self.training, self.groups, self.world_size = training, groups, world_size
        self.trained = {n: p for n, p in parameters.items() if p.requires_grad}
        self.share = {n: 1 / len(holders[n]) for n in self.trained}
        self.master = (
            {n: p.detach().float().requires_grad_() for n, p in self.trained.items()} if training.master_weights else {}
        )
        wanted = None if training.gradient_dtype is None else getattr(torch, training.gradient_dtype)
        self.separate = {n: wanted or p.dtype for n, p in self.trained.items() if wanted not in (None, p.dtype)}
        self.sums: dict[str, torch.Tensor] = {}
        self.flat: list[tuple[tuple[int, ...], torch.Tensor]] = []
        order: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, parameter in self.trained.items():
            if len(holders[name]) > 1:
                order.setdefault((holders[name], self.separate.get(name, parameter.dtype)), []).append(name)
        for (ranks, dtype), names in sorted(
            order.items(), key=lambda item: (len(item[0][0]), item[0][0], str(item[0][1]))
        ):
            self._flatten(ranks, dtype, sorted(names))
        for name, dtype in self.separate.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(self.trained[name], dtype=dtype)
        self.begin()
        targets = [self.master.get(n, p) for n, p in self.trained.items()]
        self.optimizer = make_optimizer(training, targets) if targets else None

    def _flatten(self, ranks: tuple[int, ...], dtype: torch.dtype, names: Sequence[str]) -> None:
        tensors = [self.trained[n] for n in names]
        buffer = torch.zeros(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
        self.flat.append((ranks, buffer))
        start = 0
        for name, tensor in zip(names, tensors, strict=True):
            self.sums[name] = buffer[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()

    def begin(self) -> None:
        """Point `grad` at the buffers: autograd then adds in place."""
        for name, parameter in self.trained.items():
            parameter.grad = self.sums[name] if name in self.sums and name not in self.separate else None

    def accumulate(self) -> None:
        """After each backward: move gradients into buffers of another dtype."""
        for name in self.separate:
            parameter = self.trained[name]
            if parameter.grad is not None:
                self.sums[name].add_(parameter.grad)
                parameter.grad = None

    def reduce(self) -> None:
        """Sum over the ranks that hold each parameter, in the same order on all of them."""
        for ranks, buffer in self.flat:
            step = max(1, BUCKET_BYTES // buffer.element_size())
            for start in range(0, buffer.numel(), step):
                dist.all_reduce(buffer[start : start + step], group=self.groups[ranks])

    def gradient(self, name: str) -> torch.Tensor | None:
        return self.sums[name] if name in self.separate else self.trained[name].grad

    def clip(self) -> float | None:
        """Scale all gradients so that their global norm is at most the recipe's; returns the norm before."""
        limit = self.training.gradient_clip_norm
        if limit is None:
            return None
        found = {n: g for n in self.trained if (g := self.gradient(n)) is not None}
        device = next((g.device for g in found.values()), torch.device("cpu"))
        square = torch.zeros((), dtype=torch.float64, device=device)
        for name, gradient in found.items():
            square += self.share[name] * torch.linalg.vector_norm(gradient).double() ** 2
        if self.world_size > 1:
            dist.all_reduce(square)
        norm = float(square.sqrt())
        scale = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if scale < 1:
            for gradient in found.values():
                gradient.mul_(scale)
        return norm

    def step(self) -> None:
        """One optimizer step, then fresh gradients."""
        if self.optimizer is None:
            return
        for name, parameter in self.trained.items():
            gradient = self.gradient(name)
            target: torch.Tensor = self.master.get(name, parameter)
            if target is not parameter or name in self.separate:
                target.grad = None if gradient is None else gradient.to(target.dtype)
        self.optimizer.step()
        for name, target in self.master.items():
            self.trained[name].data.copy_(target.data)
            target.grad = None
        for _, buffer in self.flat:
            buffer.zero_()
        for name in self.separate:
            self.sums[name].zero_()
        self.begin()

    def held(self) -> list[torch.Tensor]:
        """Buffers that live between steps, optimizer state apart."""
        return [*(buffer for _, buffer in self.flat), *self.sums.values()]

    def state_bytes(self) -> int:
        """Bytes of optimizer state, master weights included."""
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in (*tensors, *self.master.values()))


def make_optimizer(training: TrainingSpec, targets: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The recipe's optimizer; raises UnsupportedError where torch.optim keeps its state in another dtype than asked
    for."""
    dtypes = {t.dtype for t in targets}
    state = getattr(torch, training.state_dtype)
    if training.optimizer != "sgd" and not dtypes <= {state, torch.float64}:
        other = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UnsupportedError(
            f"optimizer state in {training.state_dtype} beside parameters in {other} runs only with master_weights; "
            f"set master_weights or state_dtype {other}"
        )
    rate, decay = training.learning_rate, training.weight_decay
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(targets, rate, weight_decay=decay, fused=training.fused),
        "momentum": lambda: torch.optim.SGD(targets, rate, training.momentum, weight_decay=decay, fused=training.fused),
        "adam": lambda: torch.optim.Adam(
            targets, rate, training.betas, training.epsilon, weight_decay=decay, fused=training.fused
        ),
        "adamw": lambda: torch.optim.AdamW(
            targets, rate, training.betas, training.epsilon, weight_decay=decay, fused=training.fused
        ),
    }
    return makers[training.optimizer]()
