"""The whole of capture: several micro-batches, fit, expansion, Graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from simpart.capture import _torch
from simpart.capture._build import build
from simpart.capture._exported import facts_of
from simpart.capture._fit import fit, fit_with_one
from simpart.capture._module import build_module, default_dtype, user_errors, valid_precision
from simpart.capture._ops import export_clean, needs_dynamo
from simpart.capture._ownership import trace_of
from simpart.capture._trace import Trace
from simpart.errors import UserError
from simpart.graph import Graph

__all__ = ["capture", "trace_at"]


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
    traces = []
    for b in (*sizes, 1):
        say(f"capturing micro-batch {b}")
        traces.append(trace_at(factory, b, dtype))
    *several, at_one = traces
    fitted = fit(several, sizes)
    whole = fit_with_one(fitted, several, sizes, at_one)
    say("finding repeated regions")
    if whole is not None:
        return build(whole, model=model, precision=precision)
    one = build(fit([at_one], [1]), model=model, precision=precision)
    return build(fitted, model=model, precision=precision, at_one=one)


def trace_at(factory: Any, micro_batch: int, dtype: torch.dtype) -> Trace:
    """Capture at one micro-batch."""
    mode = _torch.fake_mode()
    with mode:
        module, inputs = build_module(factory, micro_batch, dtype)
        dynamo = needs_dynamo(module, inputs, dtype)
        graph = export_clean(module, inputs, dynamo=dynamo, dtype=dtype)
    facts = facts_of(graph, inputs, mode)
    with user_errors("tracing the backward"), default_dtype(dtype):
        joint = _torch.joint(graph, inputs)
    return trace_of(module, graph, facts, joint, inputs)
