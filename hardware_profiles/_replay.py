"""Runs kernels again, alone and many times, with torch. A worker process of `profile ops`; see `_profile_ops`.

Kept as in a training step: one thread, freed memory kept by the allocator, operands that were not used a moment ago
(they rotate through twice the last-level cache), results that stay alive for a while. Timings are CPU seconds of the
thread: on a core of its own the same as wall seconds, and deaf to strangers that share the machine.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from simpart.cost import Signature, TensorForm
from simpart.cost.signatures import total_bytes
from simpart.errors import UnsupportedError
from simpart.files import dump_json
from simpart.graph.sizes import DTYPE_BYTES
from simpart.hardware_profiles._environment import keep_freed_memory, last_level_cache_bytes, pin
from simpart.hardware_profiles._store import signature_from_json
from simpart.kernels.ops import base_name

__all__ = ["Bench", "kernel_overhead_s", "main"]

_MOST_SETS = 64  # operands of one kernel rotate through at most as many places
_BATCH_S = 100e-6  # calls are timed together until they take about this long
_MOST_SAMPLES = 200


class Bench:
    """Operands in arenas of memory, one per dtype, and the timing loop."""

    def __init__(self, cold_bytes: int | None = None) -> None:
        self.cold_bytes = 2 * last_level_cache_bytes() if cold_bytes is None else cold_bytes
        self.arenas: dict[str, torch.Tensor] = {}
        self.place: dict[str, int] = {}

    def seconds(self, signature: Signature, repeats: int, least_s: float) -> list[float]:
        """Timings of one signature: at least `repeats` and, together, about `least_s`.

        Raises UnsupportedError for a target or argument that cannot be called from its description.
        """
        if signature.target.startswith("simpart.optimizer."):
            return self._update(signature, repeats, least_s)
        call = self._accumulate if signature.target == "simpart.accumulate" else operator(signature.target)
        size = max(1, total_bytes(signature.inputs) + total_bytes(signature.outputs))
        sets = max(2, min(_MOST_SETS, self.cold_bytes // size + 1))
        calls = [self._call(signature) for _ in range(sets)]
        results: list[Any] = [None] * max(1, min(_MOST_SETS, self.cold_bytes // max(1, total_bytes(signature.outputs))))
        number = 0

        def run(times: int) -> None:
            nonlocal number
            for _ in range(times):
                positional, named = calls[number % sets]
                results[number % len(results)] = call(*positional, **named)
                number += 1

        try:
            run(1)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise UnsupportedError(f"{signature.target} cannot be replayed: {reason}") from error
        return timings(run, repeats, least_s)

    @staticmethod
    def _accumulate(gradient: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        return gradient.add_(fresh)

    def _call(self, signature: Signature) -> tuple[list[Any], dict[str, Any]]:
        content = json.loads(signature.arguments) if signature.arguments else {}
        bound = index_bound(signature, content)
        tensors = [self._tensor(form, bound) for form in signature.inputs]
        positional = [decoded(item, tensors) for item in content.get("positional", [])]
        named = {key: decoded(item, tensors) for key, item in content.get("named", {}).items()}
        return positional if content else list(tensors), named

    def _tensor(self, form: TensorForm, bound: int = 1) -> torch.Tensor:
        """A tensor of this form somewhere in the arena, behind the one made before it."""
        strides = strides_of(form)
        steps = zip(form.shape, strides, strict=True)
        extent = 1 + sum((dim - 1) * step for dim, step in steps) if prod(form.shape) else 0
        arena, start = self._room(form.dtype, extent)
        found = torch.as_strided(arena, form.shape, strides, start)
        if form.dtype in ("int64", "int32") and bound > 1:
            found.copy_(torch.randint(bound, form.shape, dtype=found.dtype))
        return found

    def _room(self, dtype: str, extent: int) -> tuple[torch.Tensor, int]:
        aligned = -(-extent // 64) * 64 + 64
        arena = self.arenas.get(dtype)
        if arena is None or arena.numel() < 2 * aligned:
            kind = getattr(torch, dtype)
            size = max(self.cold_bytes // DTYPE_BYTES[dtype], 2 * aligned)
            floating = kind.is_floating_point
            arena = torch.empty(size, dtype=kind).uniform_(0.01, 1) if floating else torch.zeros(size, dtype=kind)
            self.arenas[dtype], self.place[dtype] = arena, 0
        start = self.place[dtype]
        if start + aligned > arena.numel():
            start = 0
        self.place[dtype] = start + aligned
        return arena, start

    def _update(self, signature: Signature, repeats: int, least_s: float) -> list[float]:
        """Seconds of an optimizer step per parameter tensor, over enough equal ones that they are not cached."""
        form = signature.inputs[0]
        each = max(1, total_bytes(signature.inputs))
        count = max(1, min(32, self.cold_bytes // each + 1))
        parameters = []
        for _ in range(count):
            parameter = torch.nn.Parameter(self._tensor(form).clone())
            parameter.grad = self._tensor(signature.inputs[1]).to(parameter.dtype, copy=True)
            parameters.append(parameter)
        optimizer = make_optimizer(signature.target.rpartition(".")[2], parameters)

        def run(times: int) -> None:
            for _ in range(times):
                optimizer.step()

        return [seconds / count for seconds in timings(run, repeats, least_s)]


def timings(run: Callable[[int], None], repeats: int, least_s: float) -> list[float]:
    """Seconds per call after a warm-up; short calls are timed in batches."""
    run(1)
    start = time.thread_time()
    run(1)
    once = max(1e-7, time.thread_time() - start)
    if once < _BATCH_S:  # once more, now that all is warm
        run(8)
        start = time.thread_time()
        run(8)
        once = max(1e-7, (time.thread_time() - start) / 8)
    batch = max(1, min(64, round(_BATCH_S / once)))
    found: list[float] = []
    total = 0.0
    while len(found) < repeats or (total < least_s and len(found) < _MOST_SAMPLES):
        start = time.thread_time()
        run(batch)
        seconds = time.thread_time() - start
        found.append(seconds / batch)
        total += seconds
    return found


# --- from a description to a call ------------------------------------------------------------------------------------
def operator(target: str) -> Callable[..., Any]:
    """The ATen overload of a kernel's target."""
    found: Any = torch.ops
    for part in target.replace("::", ".").split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError) as error:
            raise UnsupportedError(f"this torch has no kernel {target}; it cannot be replayed") from error
    if not callable(found):
        raise UnsupportedError(f"{target} is no kernel; it cannot be replayed")
    checked: Callable[..., Any] = found
    return checked


def decoded(item: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of how capture writes an argument."""
    if isinstance(item, list):
        return [decoded(part, tensors) for part in item]
    if not isinstance(item, dict):
        return item
    key: str = next(iter(item), "")
    value: Any = item.get(key)
    if key == "tensor":
        return tensors[value]
    if key in ("dtype", "layout", "memory_format"):
        return getattr(torch, value)
    if key == "device":
        return torch.device(value)
    if key == "float":
        return float(value)
    if key == "complex":
        return complex(*value)
    if key == "slice":
        return slice(*(decoded(part, tensors) for part in value))
    raise UnsupportedError(f"an argument {json.dumps(item)} cannot be made again; the kernel is not replayed")


def strides_of(form: TensorForm) -> tuple[int, ...]:
    """Strides in elements."""
    if form.strides is not None:
        return form.strides
    order = form.order or tuple(range(len(form.shape)))
    strides, step = [0] * len(form.shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, form.shape[dim])
    return tuple(strides)


def index_bound(signature: Signature, call: Any) -> int:
    """Indices of tables are drawn below this bound, as tokens would be; all others are 0, which is always valid."""
    name, inputs = base_name(signature.target), signature.inputs
    if name == "embedding":
        return inputs[0].shape[0]
    if name == "embedding_dense_backward":
        rows = call.get("positional", [0, 0, 1])[2]
        return rows if isinstance(rows, int) else 1
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        return inputs[0].shape[1] if len(inputs[0].shape) > 1 else 1
    if name in ("nll_loss_backward", "nll_loss2d_backward"):
        return inputs[1].shape[1] if len(inputs[1].shape) > 1 else 1
    return 1


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own, with its default implementation."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-4)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    raise UnsupportedError(f"unknown optimizer {name!r}; its update cannot be replayed")


# --- what a step takes beyond its kernels ----------------------------------------------------------------------------
class _Block(torch.nn.Module):
    """Norm, linear, activation and residual: what most models consist of, so small that the arithmetic is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = torch.nn.LayerNorm(_WIDTH), torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.act(self.linear(self.norm(x)))
        return out


_WIDTH, _BLOCKS = 16, 16
_BLOCK_KERNELS = (  # (target, arguments with `x` for a square tensor, `v` for a vector, `n` for its width)
    ("aten.native_layer_norm.default", ["x", ["n"], "v", "v", 1e-5]),
    ("aten.addmm.default", ["v", "x", "x"]),
    ("aten.gelu.default", ["x"]),
    ("aten.add.Tensor", ["x", "x"]),
    ("aten.gelu_backward.default", ["x", "x"]),
    ("aten.mm.default", ["x", "x"]),
    ("aten.mm.default", ["x", "x"]),
    ("aten.sum.dim_IntList", ["x", [0], True]),
    ("aten.native_layer_norm_backward.default", ["x", "x", ["n"], "c", "c", "v", "v", [True, True, True]]),
    ("aten.add.Tensor", ["x", "x"]),
)


def kernel_overhead_s(bench: Bench, repeats: int = 15) -> list[float]:
    """Seconds per kernel that a real forward and backward take beyond replayed kernels: Python, autograd, views."""
    forms = {
        "x": TensorForm((_WIDTH, _WIDTH), "float32", (0, 1)),
        "v": TensorForm((_WIDTH,), "float32", (0,)),
        "c": TensorForm((_WIDTH, 1), "float32", (0, 1)),
    }
    replayed = 0.0
    for target, arguments in _BLOCK_KERNELS:
        inputs = [forms[a] for a in arguments if isinstance(a, str)]
        places = iter(range(len(inputs)))
        positional = [
            {"tensor": next(places)} if isinstance(a, str) else [_WIDTH] if a == ["n"] else a for a in arguments
        ]
        call = dump_json({"positional": positional, "named": {}})
        found = sorted(bench.seconds(Signature(target, tuple(inputs), (forms["x"],), call), 5, 1e-3))
        replayed += _BLOCKS * found[len(found) // 2]
    module = torch.nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
    x, gradient = torch.ones(_WIDTH, _WIDTH, requires_grad=True), torch.ones(_WIDTH, _WIDTH)

    def run(times: int) -> None:
        for _ in range(times):
            module.zero_grad(set_to_none=True)
            x.grad = None
            module(x).backward(gradient)

    run(5)
    return [max(0.0, seconds - replayed) / (_BLOCKS * len(_BLOCK_KERNELS)) for seconds in timings(run, repeats, 0.1)]


# --- the worker ------------------------------------------------------------------------------------------------------
def main() -> None:
    """Reads a job as one line of JSON, answers `{"row": i, "seconds": […]}` or `{"row": i, "why": …}` per signature,
    then works on as a busy neighbour until another line or the end of its input."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = json.loads(sys.stdin.readline())
    pin(job["worker"])
    bench = Bench()
    stop = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    signatures = [signature_from_json(content) for content in job["signatures"]]
    if job["overhead"]:
        answer({"row": -1, "seconds": kernel_overhead_s(bench)})
    last = None
    for row in order(len(signatures), job["worker"]):
        if stop.is_set():
            return
        try:
            answer({"row": row, "seconds": bench.seconds(signatures[row], job["repeats"], job["least_s"])})
            last = row
        except UnsupportedError as error:
            answer({"row": row, "why": str(error)})
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:  # its tensors are too large, for example
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            answer({"row": row, "why": f"{signatures[row].target} cannot be replayed: {reason}"})
    answer({"row": None})
    while last is not None and not stop.is_set():
        bench.seconds(signatures[last], 1, 0.0)
    stop.wait()


def answer(content: dict[str, Any]) -> None:
    """One line to the profiler; without one, which ended or was interrupted, there is nothing left to do."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)


def order(count: int, worker: int) -> Iterator[int]:
    """The most expensive first, but within each eight another order per worker: neighbours do unlike work."""
    import random

    for start in range(0, count, 8):
        block = list(range(start, min(start + 8, count)))
        if worker:
            random.Random(worker).shuffle(block)
        yield from block


if __name__ == "__main__":
    main()
