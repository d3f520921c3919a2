"""Golden cases of conversions. The cases count elements received by all devices; simpart counts bytes received per
device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpart.errors import FormatError
from simpart.placement import Partial, Placement, Replicate, Shard
from simpart.placement.conversions import conversions, received_bytes
from simpart.placement.region_conversions import box_of, device_level_cost, part_of, step_cost

__all__ = ["scheme", "solve_one_step", "solve_two_steps"]


def scheme(text: str) -> Placement:
    """`cut0`, `whole` or `reduce`."""
    if text.startswith("cut") and text[3:].isdigit():
        return Shard(int(text[3:]))
    if text in ("whole", "reduce"):
        return Replicate() if text == "whole" else Partial()
    raise FormatError(f"a scheme is cut0, cut1, …, whole or reduce, got {text!r}")


def solve_one_step(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes per device of the derived conversion, as elements over all devices; indivisible cuts are infeasible
    here."""
    shape, parts = tuple(inputs["shape"]), inputs["parts"]
    source, target = scheme(inputs["source"]), scheme(inputs["target"])
    if any(part_of(box_of(shape), p, parts, 0) is None for p in (source, target)):
        return {"received_elements": None, "feasible": False}
    # an element of as many bytes as there are parts: bytes per device stay whole
    elements = received_bytes(conversions(shape, parts, (source,), (target,), (parts,)))
    counted = step_cost(box_of(shape), source, box_of(shape), target, parts)
    if counted != elements:
        raise FormatError(f"two ways of counting disagree: {elements} and {counted}")
    return {"received_elements": counted, "feasible": True}


def solve_two_steps(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Costs of the recursion, step by step in the first group, and counted over all devices."""
    factors = inputs["k_factors"]
    lies = [scheme(text) for text in inputs["tensor_schemes"]]
    needed = [scheme(text) for text in inputs["request_schemes"]]
    tensor = working = box_of(inputs["shape"])
    deltas: list[int | None] = []
    groups = 1
    for own, use, parts in zip(lies, needed, factors, strict=True):
        cost = step_cost(tensor, own, working, use, parts)
        deltas.append(None if cost is None else groups * cost)
        groups *= parts
        tensor, working = part_of(tensor, own, parts, 0) or tensor, part_of(working, use, parts, 0) or working
    total = None if any(d is None for d in deltas) else sum(d for d in deltas if d is not None)
    exact = device_level_cost(inputs["shape"], lies, needed, factors)
    return {
        "step_deltas": deltas,
        "recursion_total": total,
        "device_level_received": exact,
        "group0_is_representative": total == exact,
    }
