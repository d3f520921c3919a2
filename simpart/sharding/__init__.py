"""Shardings: how kernels are split over a mesh, what that makes flow, and where strategies come from."""

from __future__ import annotations

from simpart.sharding.combine import Degrees, Sharded, shard
from simpart.sharding.flow import Conversion, Exchanged, Flow, flow, flows
from simpart.sharding.mesh import (
    Axes,
    InnerExchange,
    Layout,
    Use,
    axis_members,
    calls_of,
    layout_text,
    local_signature,
    matching,
    use_of,
)
from simpart.sharding.options import Options, options
from simpart.sharding.pins import Pin
from simpart.sharding.presets import context_parallel, expert_parallel, state_at_rest, tensor_parallel
from simpart.sharding.propagate import Propagated, propagate

__all__ = [
    "Axes",
    "Conversion",
    "Degrees",
    "Exchanged",
    "Flow",
    "InnerExchange",
    "Layout",
    "Options",
    "Pin",
    "Propagated",
    "Sharded",
    "Use",
    "axis_members",
    "calls_of",
    "context_parallel",
    "expert_parallel",
    "flow",
    "flows",
    "layout_text",
    "local_signature",
    "matching",
    "options",
    "propagate",
    "shard",
    "state_at_rest",
    "tensor_parallel",
    "use_of",
]
