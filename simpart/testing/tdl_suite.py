"""The numerical check of descriptions: run the real ATen kernel on parts as each strategy says, put the results
together, compare with the whole kernel, in float64.

It is the reason to trust what is derived from descriptions; a wrong description fails it. `check_call` checks one
kernel on concrete tensors with every strategy; `cases` of `tdl_cases` gives random ones for every described operator.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from simpart.kernels.ops import base_name
from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.tdl import Call, Split, local_call, splits_following, splits_of
from simpart.tdl.layout import chunk
from simpart.testing.tdl_exchange import EXCHANGED

__all__ = [
    "Case",
    "Failure",
    "call_of",
    "check_blocks",
    "check_call",
    "check_split",
    "grouped_product",
    "run_kernel",
    "tensors_for",
]

Tensors = list[torch.Tensor]
RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "empty", "empty_like", "new_empty",
          "empty_strided", "new_empty_strided", "bernoulli_"}  # fmt: skip
"""Kernels whose values are not a function of their inputs: only shapes are compared."""


class Failure(AssertionError):
    """A strategy that does not reproduce the whole kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One kernel on concrete tensors."""

    call: Call
    tensors: Tensors


def call_of(target: str, arguments: Sequence[Any], named: dict[str, Any] | None = None) -> Case:
    """Run a kernel once, so that the outputs' shapes are known, and write the call down as graphs do."""
    tensors: Tensors = []

    def encode(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return {"tensor": len(tensors) - 1}
        if isinstance(item, list | tuple):
            return [encode(part) for part in item]
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        return item

    content = {"positional": [encode(a) for a in arguments], "named": {k: encode(v) for k, v in (named or {}).items()}}
    call = Call(target, tuple(tuple(t.shape) for t in tensors), (), json.dumps(content), tuple(map(_dtype, tensors)))
    outputs = tuple(tuple(t.shape) for t in run_kernel(call, tensors))
    return Case(Call(call.target, call.inputs, outputs, call.arguments, call.dtypes), tensors)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def run_kernel(call: Call, tensors: Sequence[torch.Tensor]) -> Tensors:
    """The real kernel on these tensors; floating-point dtypes in its arguments become float64."""
    if call.target.startswith("simpart."):
        return _update(call, tensors)
    if call.target.startswith("aten._grouped_mm"):
        return [grouped_product(*tensors)]
    namespace, name, overload = call.target.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def decode(item: Any) -> Any:
        if isinstance(item, list):
            return [decode(part) for part in item]
        if not isinstance(item, dict):
            return item
        if "tensor" in item:
            return tensors[item["tensor"]]
        if "dtype" in item:
            dtype = getattr(torch, item["dtype"])
            return torch.float64 if dtype.is_floating_point else dtype
        if "float" in item:
            return float(item["float"])
        if "memory_format" in item:
            return getattr(torch, item["memory_format"])
        return torch.device("cpu") if "device" in item else torch.strided

    content = json.loads(call.arguments)
    named = {key: decode(value) for key, value in content["named"].items()}
    found = operator(*(decode(item) for item in content["positional"]), **named)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    return [t for t in outputs if isinstance(t, torch.Tensor)]


def grouped_product(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """`_grouped_mm` written out, for it has no float64 kernel."""
    if offsets is None:
        return a @ b
    ends = offsets.tolist()
    runs = [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, run] @ b[run] for run in runs])
    if b.dim() == 3:
        return torch.cat([a[run] @ b[e] for e, run in enumerate(runs)])
    return torch.cat([a[e] @ b[:, run] for e, run in enumerate(runs)], dim=1)


def _update(call: Call, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Updates of optimizers written out: what their fused kernels compute, element by element."""
    if call.target == "simpart.accumulate":
        return [tensors[0] + tensors[1]]
    parameter, gradient, *states = tensors
    if not states:
        return [parameter - 0.1 * gradient]
    moved = [0.9 * state + 0.1 * gradient ** (k + 1) for k, state in enumerate(states)]
    return [parameter - 0.1 * moved[0] / (moved[-1].abs().sqrt() + 1e-8), *moved]


# --- parts -----------------------------------------------------------------------------------------------------------
def part_of(whole: torch.Tensor, placement: Placement | Halo, members: int, part: int) -> torch.Tensor:
    """What one member holds of a tensor that is not partial."""
    shard = placement.shard if isinstance(placement, Halo) else placement
    if not isinstance(shard, Shard):
        return whole
    size = whole.shape[shard.dim]
    span = shard.block or size
    start, length = chunk(span, members, part)
    rows = [first + k for first in range(0, size, span) for k in range(start, start + length)]
    return whole.index_select(shard.dim, torch.tensor(rows, dtype=torch.long))


def _terms(whole: torch.Tensor, reducer: str, members: int, generator: torch.Generator) -> Tensors:
    """Random tensors whose reduction is `whole`."""
    others = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(members - 1)]
    if reducer == "sum":
        return [whole - sum(others), *others]
    if reducer == "avg":
        return [members * whole - sum(others), *others]
    away = -1 if reducer == "max" else 1
    return [whole, *(whole + away * other.abs() for other in others)]


def _window(whole: torch.Tensor, dim: int, first: int, last: int) -> torch.Tensor:
    """Elements first … last of a dim, zeros outside."""
    size = whole.shape[dim]
    inside = whole.narrow(dim, max(first, 0), min(last, size - 1) - max(first, 0) + 1)
    shape = list(whole.shape)
    before, after = max(-first, 0), max(last - size + 1, 0)
    zeros = [whole.new_zeros([*shape[:dim], n, *shape[dim + 1 :]]) for n in (before, after)]
    return torch.cat([zeros[0], inside, zeros[1]], dim)


def _put_together(parts: Tensors, placement: Placement, members: int, like: torch.Tensor) -> torch.Tensor:
    """The whole output from the members' ones."""
    if isinstance(placement, Replicate):
        for other in parts[1:]:
            if not _close(other, parts[0]):
                raise Failure("members disagree on a replicated output")
        return parts[0]
    if isinstance(placement, Shard):
        size = like.shape[placement.dim]
        blocks = size // (placement.block or size)
        pieces = [part.chunk(blocks, placement.dim) if blocks > 1 else (part,) for part in parts]
        return torch.cat([piece[k] for k in range(blocks) for piece in pieces], placement.dim)
    stacked = torch.stack(parts)
    if placement.reducer == "max":
        return stacked.amax(0)
    if placement.reducer == "min":
        return stacked.amin(0)
    return stacked.mean(0) if placement.reducer == "avg" else stacked.sum(0)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.is_floating_point:
        return torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    return torch.equal(a, b)


# --- the check -------------------------------------------------------------------------------------------------------
def check_split(case: Case, split: Split, members: int, generator: torch.Generator) -> None:
    """Run one strategy on all members and compare; raises Failure naming kernel, shapes and strategy."""
    call = case.call
    inputs: list[Tensors] = []
    for k, (whole, placement) in enumerate(zip(case.tensors, split.strategy.inputs, strict=True)):
        if isinstance(placement, Partial):
            inputs.append(_terms(whole, placement.reducer, members, generator))
            continue
        pieces = [part_of(whole, placement, members, part) for part in range(members)]
        for position, dim, window in split.windows:
            if position == k:
                pieces = [_window(whole, dim, *window.bounds(members, part)) for part in range(members)]
        inputs.append(pieces)
    if split.masked:
        _mask(case, split, members, inputs)
    calls = [local_call(call, split, members, part, masked=True) for part in range(members)]
    local = [[pieces[part] for pieces in inputs] for part in range(members)]
    try:
        for part in range(members):
            found = tuple(tuple(t.shape) for t in local[part])
            if found != calls[part].inputs:
                raise Failure(f"local inputs are {found}, local_call says {calls[part].inputs}")
        if split.exchanges:
            outputs = EXCHANGED[base_name(call.target)](calls, local)
        else:
            outputs = [run_kernel(c, t) for c, t in zip(calls, local, strict=True)]
        _compare(case, split, members, calls, outputs)
    except (Failure, RuntimeError, IndexError) as error:
        shapes = f"{list(map(list, call.inputs))} -> {list(map(list, call.outputs))} {call.arguments}"
        raise Failure(f"{call.target} {shapes}, {split.label} over {members}: {text_of(split)}: {error}") from error


def text_of(split: Split) -> str:
    """`S(0) R -> S(0)`."""
    return f"{' '.join(map(str, split.strategy.inputs))} -> {' '.join(map(str, split.strategy.outputs))}"


def _mask(case: Case, split: Split, members: int, inputs: list[Tensors]) -> None:
    """Rows looked up elsewhere point to one more row of zeros; negative numbers (ignored) stay."""
    shards = [(k, p) for k, p in enumerate(split.strategy.inputs) if isinstance(p, Shard)]
    sizes = [case.call.inputs[k][p.dim] for k, p in shards]
    sizes += [s[p.dim] for s, p in zip(case.call.outputs, split.strategy.outputs, strict=True) if isinstance(p, Shard)]
    for part in range(members):
        start, length = chunk(sizes[0], members, part)
        for k, placement in shards:
            piece = inputs[k][part]
            row = piece.new_zeros([1 if d == placement.dim else n for d, n in enumerate(piece.shape)])
            inputs[k][part] = torch.cat([piece, row], placement.dim)
        for k in split.masked:
            ids = inputs[k][part]
            mine = (ids >= start) & (ids < start + length)
            inputs[k][part] = torch.where(ids < 0, ids, torch.where(mine, ids - start, length))


def _compare(case: Case, split: Split, members: int, calls: Sequence[Call], outputs: list[Tensors]) -> None:
    wholes = run_kernel(case.call, case.tensors)
    scales = split.scales or (Fraction(1),) * len(wholes)
    for number, (whole, placement) in enumerate(zip(wholes, split.strategy.outputs, strict=True)):
        for part in range(members):
            if tuple(outputs[part][number].shape) != calls[part].outputs[number]:
                raise Failure(
                    f"output {number} of member {part} is {list(outputs[part][number].shape)}, "
                    f"local_call says {list(calls[part].outputs[number])}"
                )
        parts = [outputs[part][number] for part in range(members)]
        if split.masked and isinstance(placement, Shard):
            parts = [p.narrow(placement.dim, 0, p.shape[placement.dim] - 1) for p in parts]
        if scales[number] != 1:
            parts = [part * float(scales[number]) for part in parts]
        if base_name(case.call.target) in RANDOM:
            continue
        found = _put_together(parts, placement, members, whole)
        if found.shape != whole.shape:
            raise Failure(f"output {number} is {list(found.shape)}, expected {list(whole.shape)}")
        if not _close(found, whole):
            difference = (found.double() - whole.double()).abs().max()
            raise Failure(f"output {number} differs by {difference:.3g}")


def check_call(case: Case, members: int, generator: torch.Generator, *, uneven: bool = False) -> int:
    """Check every strategy of a kernel along an axis; how many there were."""
    found = splits_of(case.call, members, uneven=uneven)
    for split in found:
        check_split(case, split, members, generator)
    return len(found)


def check_blocks(case: Case, members: int, generator: torch.Generator) -> int:
    """Check strategies that follow every strided shard of every input and output; how many there were."""
    checked = 0
    for output, shapes in ((False, case.call.inputs), (True, case.call.outputs)):
        for argument, shape in enumerate(shapes):
            for dim, size in enumerate(shape):
                for block in (b for b in range(members, size, members) if size % b == 0):
                    placement = Shard(dim, block)
                    for split in splits_following(case.call, members, argument, placement, output=output):
                        check_split(case, split, members, generator)
                        checked += 1
    return checked


def tensors_for(call: Call, seed: int) -> Tensors:
    """Random tensors for a call taken from a graph: integers stay within what they index."""
    generator = torch.Generator().manual_seed(seed)
    name = base_name(call.target)
    limit = _INDEXED[name](call) if name in _INDEXED else 2
    found = []
    for shape, dtype in zip(call.inputs, call.dtypes, strict=True):
        if dtype == "bool":
            found.append(torch.randint(0, 2, shape, generator=generator).bool())
        elif dtype.startswith(("int", "uint")):
            found.append(torch.randint(0, max(limit, 1), shape, generator=generator))
        else:
            found.append(torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5)
    return found


def _argument(call: Call, number: int) -> Any:
    return json.loads(call.arguments)["positional"][number]


_INDEXED: dict[str, Callable[[Call], int]] = {
    "embedding": lambda call: call.inputs[0][0],
    "embedding_dense_backward": lambda call: call.outputs[0][0],
    "nll_loss_forward": lambda call: call.inputs[0][-1],
    "nll_loss2d_forward": lambda call: call.inputs[0][1],
    "nll_loss_backward": lambda call: call.outputs[0][-1],
    "nll_loss2d_backward": lambda call: call.outputs[0][1],
    "max_pool2d_with_indices_backward": lambda call: call.outputs[0][-1] * call.outputs[0][-2],
    "gather": lambda call: call.inputs[0][_argument(call, 1)],
    "scatter": lambda call: call.inputs[0][_argument(call, 1)],
    "scatter_add": lambda call: call.inputs[0][_argument(call, 1)],
    "index": lambda call: min(call.inputs[0]),
    "index_put": lambda call: min(call.inputs[0]),
    "index_select": lambda call: call.inputs[0][_argument(call, 1)],
}


def seeded(seed: int) -> tuple[random.Random, torch.Generator]:
    """Both generators that a case draws from."""
    return random.Random(seed), torch.Generator().manual_seed(seed)
