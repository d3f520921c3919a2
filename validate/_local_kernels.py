"""Kernels of the joint graph as functions of one device's parts: arguments made local, masks, scales, exchanges and
seeded random draws included."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from simpart.errors import UnsupportedError
from simpart.hardware_profiles._replay import decoded, operator
from simpart.kernels.ops import base_name, kind_of
from simpart.placement import AxisStrategy, Halo, Partial, Placement, Replicate, Shard, Strategy
from simpart.sharding.mesh import matching
from simpart.tdl import Call, Split, local_call, splits_of
from simpart.tdl.layout import chunk
from simpart.validate._attention import ANYWHERE
from simpart.validate._exchanges import EXCHANGED
from simpart.validate._mesh import Mesh, taken

__all__ = ["Draw", "bind"]

Tensors = list[torch.Tensor]
Run = Callable[[Tensors], Tensors]
R = Replicate()
VIEWS = ("view", "_unsafe_view", "_reshape_alias")
"""Parts may lie in memory in another order than the whole: where a view cannot be had, a copy is made."""


@dataclass(slots=True)
class Draw:
    """What random kernels are seeded by, beside their names: the same on all devices of a replica."""

    step: int = 0
    micro_batch: int = 0
    replica: int = 0
    seed: int = 0

    def generator_seed(self, name: str) -> int:
        text = f"{self.seed} {self.replica} {self.step} {self.micro_batch} {name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class _Axis:
    """A split of a kernel on one axis: the call it divides, and factors on its outputs."""

    number: int
    before: Call
    split: Split
    factors: tuple[float, ...]


def bind(
    name: str,
    call: Call,
    strategy: Strategy,
    mesh: Mesh,
    *,
    floating: torch.dtype | None,
    device: torch.device,
    draw: Draw,
) -> Run:
    """The function that runs this device's part of a kernel. `floating` replaces the floating-point dtypes among its
    arguments (None: as they are).

    Raises UnsupportedError, naming kernel and placements, for a halo, a strategy that descriptions do not know, or an
    argument that cannot be made again.
    """
    axes, local = _divided(name, call, strategy, mesh)
    target = base_name(call.target)
    if kind_of(call.target) == "random" and not target.endswith("_backward"):
        return _random(name, call, axes, mesh, _plain(call, floating, device), draw)
    run = _plain(local, floating, device)
    exchanging = [a for a in axes if a.split.exchanges]
    if exchanging:
        if target not in EXCHANGED:
            raise UnsupportedError(
                f"kernel {name} needs an exchange inside under {_text(strategy)}, which is not run yet"
            )
        run = _exchanging(EXCHANGED[target], call, local, [a.number for a in exchanging], mesh, run)
    for axis in axes:
        if axis.split.masked:
            run = _masked(axis, mesh, run)
    factors = [1.0] * len(call.outputs)
    for axis in axes:
        factors = [f * g for f, g in zip(factors, axis.factors, strict=True)]
    if any(f != 1 for f in factors):
        inner = run
        run = lambda tensors: [t if f == 1 else t * f for t, f in zip(inner(tensors), factors, strict=True)]  # noqa: E731
    return run


def _divided(name: str, call: Call, strategy: Strategy, mesh: Mesh) -> tuple[list[_Axis], Call]:
    """The splits of a kernel, axis by axis, and the call of this device (one more row where it is masked)."""
    known, found = dict(strategy.axes), []
    for number, (axis, size) in enumerate(mesh.axes):
        wanted = known.get(axis)
        if wanted is None or all(p == R for p in (*wanted.inputs, *wanted.outputs)):
            continue
        if any(isinstance(p, Halo) for p in wanted.inputs):
            raise UnsupportedError(
                f"kernel {name} reads neighbours under {_text(strategy)}: halos are not run yet; split another dim"
            )
        matched = _matched(call, size, wanted)
        if matched is None:
            offered = "; ".join(_words(s.strategy) for s in splits_of(call, size)[1:9]) or "only whole"
            raise UnsupportedError(f"kernel {name} is not run as {axis} {_words(wanted)}; it can be {offered}")
        split, factors = matched
        if split.windows:
            raise UnsupportedError(
                f"kernel {name} reads a window under {_text(strategy)}: halos are not run yet; split another dim"
            )
        found.append(_Axis(number, call, split, factors))
        call = local_call(call, split, size, mesh.coordinates[number], masked=True)
    return found, call


def _matched(call: Call, members: int, wanted: AxisStrategy) -> tuple[Split, tuple[float, ...]] | None:
    """The split of a strategy and factors on its outputs. One that says `P(sum)` where the description masks rows, or
    `P(avg)` where it sums, is the same up to a factor."""
    split = matching(call, members, wanted)
    if split is None:
        split = next((s for s in splits_of(call, members) if _alike(s.strategy, wanted)), None)
    if split is None:
        return None
    scales = [float(s) for s in split.scales] or [1.0] * len(call.outputs)
    for k, (mine, theirs) in enumerate(zip(split.strategy.outputs, wanted.outputs, strict=True)):
        if (
            isinstance(mine, Partial)
            and isinstance(theirs, Partial)
            and (mine.reducer, theirs.reducer) == ("sum", "avg")
        ):
            scales[k] *= members
    return split, tuple(scales)


def _alike(one: AxisStrategy, other: AxisStrategy) -> bool:
    def bare(p: Placement | Halo) -> Placement | Halo:
        return Partial() if isinstance(p, Partial) and p.reducer in ("sum", "avg") else p

    return one.inputs == other.inputs and list(map(bare, one.outputs)) == list(map(bare, other.outputs))


def _words(strategy: AxisStrategy) -> str:
    return f"{', '.join(map(str, strategy.inputs))} → {', '.join(map(str, strategy.outputs))}"


def _text(strategy: Strategy) -> str:
    return "; ".join(f"{axis} {_words(s)}" for axis, s in strategy.axes)


# --- calls -----------------------------------------------------------------------------------------------------------
def _plain(call: Call, floating: torch.dtype | None, device: torch.device) -> Run:
    """The ATen overload on tensors, its other arguments filled in once."""
    target = base_name(call.target)
    function: Any = torch.reshape if target in VIEWS else operator(call.target)
    if device.type != "cpu":
        function = ANYWHERE.get(target, function)
    everything: Any = {"positional": [{"tensor": i} for i in range(len(call.inputs))], "named": {}}
    content = json.loads(call.arguments) if call.arguments else everything
    marks = [_Mark(i) for i in range(len(call.inputs))]

    def made(item: Any) -> Any:
        found = decoded(item, marks)  # type: ignore[arg-type]  # marks stand for tensors
        if isinstance(item, dict) and "dtype" in item and floating is not None and found.is_floating_point:
            return floating
        if isinstance(item, list):
            return [made(part) for part in item]
        if type(item) is float and floating is not None:
            return as_written(item)
        return device if isinstance(found, torch.device) else found

    positional = [made(item) for item in content["positional"]]
    named = {key: made(item) for key, item in content["named"].items()}

    def run(tensors: Tensors) -> Tensors:
        result = function(*[_put(a, tensors) for a in positional], **{k: _put(a, tensors) for k, a in named.items()})
        if isinstance(result, torch.Tensor):
            return [result]
        return [t for t in result if isinstance(t, torch.Tensor)]

    return run


def as_written(value: float) -> float:
    """The constant behind one that a graph of lower precision has rounded to float32: of at most six digits.

    >>> as_written(9.999999747378752e-06), as_written(1 / 3), as_written(2**-12)
    (1e-05, 0.3333333333333333, 0.000244140625)
    """
    near = float(f"{value:.6g}")
    return near if float(np.float32(near)) == value else value


@dataclass(frozen=True, slots=True)
class _Mark:
    """Stands for a tensor among arguments."""

    number: int


def _put(item: Any, tensors: Tensors) -> Any:
    if type(item) is _Mark:
        return tensors[item.number]
    return [_put(part, tensors) for part in item] if type(item) is list else item


def _exchanging(
    exchange: Callable[..., Tensors], call: Call, local: Call, axes: Sequence[int], mesh: Mesh, run: Run
) -> Run:
    def total(term: torch.Tensor, reducer: str = "sum") -> torch.Tensor:
        term = term.clone(memory_format=torch.contiguous_format)
        for axis in axes:
            term = mesh.all_reduce(term, axis, reducer, kind="exchange")
        return term

    content = json.loads(local.arguments)
    return lambda tensors: exchange(call, content["positional"], tensors, total, run)


def _masked(axis: _Axis, mesh: Mesh, run: Run) -> Run:
    """Rows looked up elsewhere point to one more row, of zeros; negative numbers (ignored) stay."""
    split, members = axis.split, mesh.sizes[axis.number]
    rows = [(k, p.dim) for k, p in enumerate(split.strategy.inputs) if isinstance(p, Shard)]
    made = [(k, p.dim) for k, p in enumerate(split.strategy.outputs) if isinstance(p, Shard)]
    sizes = [axis.before.inputs[k][d] for k, d in rows] + [axis.before.outputs[k][d] for k, d in made]
    start, length = chunk(sizes[0], members, mesh.coordinates[axis.number])

    def masked(tensors: Tensors) -> Tensors:
        given = list(tensors)
        for k, dim in rows:
            piece = given[k]
            row = piece.new_zeros([1 if d == dim else n for d, n in enumerate(piece.shape)])
            given[k] = torch.cat([piece, row], dim)
        for k in split.masked:
            ids = given[k]
            mine = (ids >= start) & (ids < start + length)
            given[k] = torch.where(ids < 0, ids, torch.where(mine, ids - start, length))
        found = run(given)
        for k, dim in made:
            found[k] = found[k].narrow(dim, 0, found[k].shape[dim] - 1).contiguous()
        return found

    return masked


def _random(name: str, call: Call, axes: Sequence[_Axis], mesh: Mesh, run: Run, draw: Draw) -> Run:
    """Draw for the whole tensor from a seed that all devices of a replica share, and take this device's part.

    `native_dropout` scales its own part of x by the mask drawn.
    """

    def part(tensor: torch.Tensor, output: int) -> torch.Tensor:
        for axis in axes:
            placement = axis.split.strategy.outputs[output]
            if isinstance(placement, Shard):
                tensor = taken(tensor, placement, mesh.sizes[axis.number], mesh.coordinates[axis.number])
        return tensor

    positional = json.loads(call.arguments)["positional"] if call.arguments else []
    dropout = base_name(call.target) == "native_dropout"

    def drawn(tensors: Tensors) -> Tensors:
        like = tensors[0] if tensors else torch.empty(0)
        with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
            torch.manual_seed(draw.generator_seed(name))
            if dropout:
                mask = part(torch.rand(call.outputs[0], device=like.device) >= positional[1], 1)
                return [tensors[0] * mask / (1 - positional[1]), mask]
            whole = [
                like.new_empty(shape) if t.shape != shape else t for t, shape in zip(tensors, call.inputs, strict=True)
            ]
            return [part(t, k).contiguous() for k, t in enumerate(run(whole))]

    return drawn
