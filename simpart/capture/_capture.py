"""The whole of capture: several micro-batches, fit, expansion, Graph."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from simpart.capture import _torch
from simpart.capture._build import build
from simpart.capture._expand import Irregular, Stack, expand
from simpart.capture._exported import facts_of
from simpart.capture._fit import fit, fit_with_one
from simpart.capture._module import build_module, check_loss, default_dtype, user_errors, valid_precision
from simpart.capture._ops import export_clean
from simpart.capture._ownership import module_sources, trace_of
from simpart.capture._shallow import cut, is_regular, logged, stacks_of
from simpart.capture._trace import Trace
from simpart.errors import UserError
from simpart.graph import Graph, Source

__all__ = ["capture"]


def capture(
    factory: Any,
    micro_batches: Sequence[int],
    *,
    model: str,
    precision: str,
    shallow: bool,
    progress: Callable[[str], None] | None,
) -> Graph:
    dtype = valid_precision(precision)
    sizes = sorted({b for b in micro_batches if b != 1})
    if len(sizes) < 2 or not all(type(b) is int and b >= 2 for b in sizes):
        raise UserError(f"capture needs at least two micro-batches >= 2 to fit sizes, got {list(micro_batches)}")
    say = progress or (lambda text: None)
    with fewer_collections():
        if shallow:
            try:
                return _capture(factory, sizes, dtype, say, model=model, precision=precision, shallow=True)
            except Irregular as reason:
                say(f"capturing the whole module: {reason}")
        return _capture(factory, sizes, dtype, say, model=model, precision=precision, shallow=False)


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Tracing makes many small objects that live on; looking for cycles among them all the time costs a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _capture(
    factory: Any,
    sizes: list[int],
    dtype: torch.dtype,
    say: Callable[[str], None],
    *,
    model: str,
    precision: str,
    shallow: bool,
) -> Graph:
    takes: list[_Take] = []
    for b in sizes:
        say(f"capturing micro-batch {b}")
        takes.append(_take(factory, b, dtype, takes[0] if takes else None, shallow))
    first = takes[0]
    several = [take.trace for take in takes]
    _check_inputs_grow(several[:2], sizes)
    say("capturing micro-batch 1")
    try:
        at_one = _take(factory, 1, dtype, first, shallow).trace
    except UserError as error:  # batch norm over one value, for example
        say(f"the module does not run at micro-batch 1: {error}")
        at_one = None

    def deep(trace: Trace) -> Trace:
        for i, stack in enumerate(first.stacks):
            rest = first.stacks[i + 1 :]
            trace = expand(trace, stack, _sources_at(trace, first, rest))
        return trace

    fitted = fit(several, sizes)
    whole = fitted if at_one is None else fit_with_one(fitted, several, sizes, at_one)
    say("finding repeated regions")
    if whole is not None or at_one is None:
        return build(deep(whole or fitted), model=model, precision=precision)
    one = build(deep(fit([at_one], [1])), model=model, precision=precision)
    return build(deep(fitted), model=model, precision=precision, at_one=one)


@dataclass(frozen=True, slots=True)
class _Take:
    """One micro-batch: the trace, of the module cut at `stacks`, and the parameters and buffers of the whole module."""

    trace: Trace
    stacks: tuple[Stack, ...]
    owned: tuple[Source, ...]
    dynamo: bool


def _take(factory: Any, micro_batch: int, dtype: torch.dtype, first: _Take | None, shallow: bool) -> _Take:
    mode = _torch.fake_mode()
    with mode:
        module, inputs = build_module(factory, micro_batch, dtype)
        owned = tuple(source for source, _ in module_sources(module))
        stacks = stacks_of(module) if shallow else ()
        if first is None:
            watch = _torch.GradModeUnderAutocast()
            with user_errors("the module's forward"), default_dtype(dtype), torch.enable_grad(), watch:
                log, loss = logged(module, inputs, stacks)
            check_loss(module, loss)
            dynamo = watch.seen
            if stacks and not _proved(module, inputs, stacks, log, dtype):
                stacks = ()
        else:
            dynamo = first.dynamo
            if first.stacks and (not set(first.stacks) <= set(stacks) or owned != first.owned):
                raise Irregular("the module depends on the micro-batch")
            stacks = first.stacks
        with cut(module, stacks):
            return _Take(trace_module(module, inputs, mode, dynamo, dtype), stacks, owned, dynamo)


def _proved(module: nn.Module, inputs: tuple[Any, ...], stacks: Sequence[Stack], log: Any, dtype: torch.dtype) -> bool:
    try:
        with cut(module, stacks), default_dtype(dtype), torch.enable_grad():
            shallow, _ = logged(module, inputs, stacks)
    except Exception:  # a module that does not run with fewer blocks is captured whole
        return False
    return is_regular(shallow, log, stacks)


def trace_module(module: nn.Module, inputs: tuple[Any, ...], mode: Any, dynamo: bool, dtype: torch.dtype) -> Trace:
    """Capture at one micro-batch, in fake mode."""
    graph = export_clean(module, inputs, dynamo=dynamo, dtype=dtype)
    facts = facts_of(graph, inputs)
    with user_errors("tracing the backward"), default_dtype(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say of an error stands in it
        joint = _torch.joint(graph, inputs)
    return trace_of(module, graph, facts, joint, inputs)


def _check_inputs_grow(traces: Sequence[Trace], sizes: Sequence[int]) -> None:
    """A factory that ignores its argument would make every figure per sample wrong."""
    dims = [[source.spec.dims for source in trace.sources if source.kind == "input"] for trace in traces]
    if dims[0] == dims[1]:
        raise UserError(
            f"a factory returns inputs with as many samples as it is asked for, this one's are as large for "
            f"{sizes[0]} as for {sizes[1]}; use its argument as their first dim"
        )


def _sources_at(trace: Trace, first: _Take, still_cut: Sequence[Stack]) -> list[Source]:
    """Sources after the next expansion: those of the whole module, but for stacks that are still cut, and the rest
    as is.
    """
    owned = []
    for source in first.owned:
        name = source.name
        for stack in still_cut:
            block = stack.block(name)
            if block is None:
                continue
            shallow = {0: 0, 1: 1, 2: 2, stack.depth - 1: 3}.get(block)
            name = "" if shallow is None else stack.renamed(name, shallow)
        if name:
            owned.append(
                Source(
                    kind=source.kind, name=name, spec=source.spec, trainable=source.trainable, aliases=source.aliases
                )
            )
    return [*owned, *(s for s in trace.sources if s.kind not in ("parameter", "buffer"))]
