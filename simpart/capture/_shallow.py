"""Deep stacks of equal blocks: found, cut to four blocks for capture, and proved regular by a log of the whole forward.

The log is what the module's forward dispatches in fake mode: cheap, at the true depth. The cut module's log,
expanded, must
equal it row by row, so that nothing in the forward may depend on the depth or on the number of a block unnoticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpart.capture._expand import SHALLOW_DEPTH, Irregular, Names, Stack, expand_rows, segments
from simpart.capture._exported import tensors_in
from simpart.capture._trace import Ref

__all__ = ["Log", "cut", "is_regular", "logged", "stacks_of"]


def stacks_of(module: nn.Module) -> tuple[Stack, ...]:
    """Outermost ModuleLists and Sequentials of at least five blocks that have the same classes, shapes and names."""
    found: list[Stack] = []
    seen: set[int] = set()
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or len(part) <= SHALLOW_DEPTH or id(part) in seen:
            continue
        if not name or any(name.startswith(stack.name + ".") for stack in found):
            continue
        blocks = list(part.children())
        if len(blocks) == len(part) and list(part._modules) == [str(i) for i in range(len(part))]:
            first = _shape(blocks[0])
            tensors = [id(t) for block in blocks for t in (*block.parameters(), *block.buffers())]
            if len(set(tensors)) == len(tensors) and first[1] and all(_shape(block) == first for block in blocks[1:]):
                found.append(Stack(name=name, depth=len(blocks)))
                seen.update(id(m) for m in part.modules())
    return tuple(found)


def _shape(block: nn.Module) -> tuple[Any, ...]:
    modules = tuple((name, type(part)) for name, part in block.named_modules())
    parameters = tuple(
        (n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters(remove_duplicate=False)
    )
    buffers = tuple((n, b.shape, b.dtype) for n, b in block.named_buffers(remove_duplicate=False))
    return modules, parameters, buffers, block.training


@contextlib.contextmanager
def cut(module: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """The module with the first three and the last block of each stack; whole again afterwards."""
    kept: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    for stack in stacks:
        part = module.get_submodule(stack.name)
        kept.append((part, part._modules))
        blocks = list(part._modules.values())
        part._modules = {str(i): b for i, b in enumerate([*blocks[: SHALLOW_DEPTH - 1], blocks[-1]])}
    try:
        yield
    finally:
        for part, modules in kept:
            part._modules = modules


# --- the log ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Log:
    """What a forward dispatched: per row the block it ran in or after, what it did, what it read; and the sources'
    names.
    """

    paths: list[str]
    keys: list[Hashable]
    inputs: list[list[Ref]]
    names: list[str]


class _Logger(TorchDispatchMode):
    """Writes the log; tensors made by no row, and not named, are numbered by first use."""

    def __init__(self, named: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.log = Log([], [], [], [])
        self.path = ""
        self.named = named
        self._where: dict[int, Ref] = {}
        self._keep: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # questions such as tensor.device
            return func(*args, **(kwargs or {}))
        inputs: list[Ref] = []
        call = (self._plain(args, inputs), self._plain(kwargs or {}, inputs))
        result = func(*args, **(kwargs or {}))
        row = len(self.log.keys)
        outputs = list(tensors_in(result))
        for k, tensor in enumerate(outputs):
            self._where[id(tensor)] = (row, k)
        self._keep.append((args, kwargs, result))
        described = tuple((tuple(t.shape), t.stride(), t.dtype) for t in outputs)
        self.log.paths.append(self.path)
        self.log.keys.append((str(func), call, described, torch.is_grad_enabled()))
        self.log.inputs.append(inputs)
        return result

    def _plain(self, item: Any, inputs: list[Ref]) -> Hashable:
        if isinstance(item, torch.Tensor):
            inputs.append(self._ref(item))
            return "tensor", tuple(item.shape), item.stride(), item.dtype
        if isinstance(item, list | tuple):
            return tuple(self._plain(part, inputs) for part in item)
        if isinstance(item, dict):
            return tuple((key, self._plain(value, inputs)) for key, value in item.items())
        return item if isinstance(item, Hashable) else str(item)

    def _ref(self, tensor: torch.Tensor) -> Ref:
        found = self._where.get(id(tensor))
        if found is None:
            number = len(self.log.names)
            self.log.names.append(self.named.get(id(tensor), f"<unnamed>.{number}"))
            found = self._where[id(tensor)] = (-1, number)
            self._keep.append(tensor)
        return found


def logged(module: nn.Module, inputs: tuple[Any, ...], stacks: Sequence[Stack]) -> tuple[Log, Any]:
    """Run the forward in the current fake mode: its log and its result."""
    named = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    named |= {id(t): f"<input>.{i}" for i, t in enumerate(tensors_in(inputs))}
    logger = _Logger(named)
    hooks = []

    def entering(path: str) -> Any:
        def hook(*_: Any) -> None:
            logger.path = path

        return hook

    for stack in stacks:
        for name, block in module.get_submodule(stack.name).named_children():
            hooks.append(block.register_forward_pre_hook(entering(f"{stack.name}.{name}")))
    try:
        with logger:
            result = module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return logger.log, result


def is_regular(shallow: Log, whole: Log, stacks: Sequence[Stack]) -> bool:
    """True if the log of the cut module, expanded, is that of the whole."""
    for stack in stacks:
        try:
            shallow = _expanded(shallow, stack, whole)
        except Irregular:
            return False
    if shallow.keys != whole.keys or shallow.paths != whole.paths:
        return False
    return all(
        a == b or (a[0] < 0 and b[0] < 0 and shallow.names[a[1]] == whole.names[b[1]])
        for mine, theirs in zip(shallow.inputs, whole.inputs, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def _expanded(log: Log, stack: Stack, whole: Log) -> Log:
    paths = log.paths
    deep_names = dict.fromkeys([*log.names, *whole.names])
    for name in log.names:
        if stack.block(name) in (2, 3):
            deep_names.setdefault(stack.renamed(name, stack.true_block(stack.block(name) or 0)))
    names = Names(stack, log.names, {name: i for i, name in enumerate(deep_names)})
    deep = expand_rows(log.keys, log.inputs, segments(paths, stack), names)
    renamed = []
    for row, r in deep.rows:
        block = stack.block(paths[row])
        renamed.append(
            paths[row] if block is None else stack.renamed(paths[row], r if r >= 0 else stack.true_block(block))
        )
    return Log(renamed, [log.keys[row] for row, _ in deep.rows], [list(refs) for refs in deep.inputs], list(deep_names))
