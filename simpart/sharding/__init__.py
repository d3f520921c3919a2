"""Shardings: how kernels are split over a mesh, what that makes flow, and where strategies come from."""

from __future__ import annotations

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

__all__ = [
    "Axes",
    "Conversion",
    "Exchanged",
    "Flow",
    "InnerExchange",
    "Layout",
    "Use",
    "axis_members",
    "calls_of",
    "flow",
    "flows",
    "layout_text",
    "local_signature",
    "matching",
    "use_of",
]
