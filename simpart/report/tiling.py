"""A picture of a sharded plan: weights and activations of each block, tiled by the device that holds each part.

After figure 11 of Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (2019).
matplotlib is imported when a picture is made.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simpart.files import write_atomically
from simpart.graph import Graph, fill, named
from simpart.kernels.ops import base_name
from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.plan import Plan
from simpart.sharding.flow import Flow, flows
from simpart.sharding.mesh import Axes, Layout, rest_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Plot
    from matplotlib.figure import Figure

__all__ = ["Tiled", "owners", "save_tiling", "tiled_blocks", "tiling"]

PRODUCTS = frozenset({"convolution", "mm", "addmm", "bmm", "baddbmm", "embedding"})
"""Kernels whose weights and outputs are drawn."""
POINTS = 48
"""Points along each side of a tile map."""
MOST_PER_COLUMN = 8
MOST_EDGES = 15
"""Edges along a side up to which tiles are told apart by lines and numbers; of more, stripes speak for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """A layer of a block: how its weight rests and how what it makes lies, on the axes of the plan."""

    name: str
    weight_shape: tuple[int, ...]
    weight: Layout
    made_shape: tuple[int, ...]
    made: Layout


def owners(shape: Sequence[int], layout: Layout, axes: Axes, dims: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Number of the (first) device that holds each of POINTS × POINTS places of a tensor along two dims, at the start
    of the others.

    >>> owners((4, 4), (Shard(0), Shard(1)), (("x", 2), ("y", 2)), (0, 1))[::24, ::24].tolist()
    [[0, 1], [2, 3]]
    """
    at = {d: np.zeros((1, 1), dtype=np.int64) for d in range(len(shape))}
    for side, dim in enumerate(dims):
        steps = np.arange(POINTS) * shape[dim] // POINTS
        at[dim] = steps[:, None] if side == 0 else steps[None, :]
    size = dict(enumerate(shape))
    device = np.zeros((POINTS, POINTS), dtype=np.int64)
    for place, (_, members) in zip(layout, axes, strict=True):
        device = device * members
        shard = place.shard if isinstance(place, Halo) else place
        if isinstance(shard, Shard):
            span = shard.block or size[shard.dim]
            each = ceil(span / members)
            within = at[shard.dim] % span
            device = device + within // each
            at[shard.dim] = at[shard.dim] // span * each + within % each
            size[shard.dim] = size[shard.dim] // span * each
    return np.broadcast_to(device, (POINTS, POINTS))


def tiled_blocks(plan: Plan, graph: Graph) -> list[tuple[str, list[Tiled]]]:
    """Blocks of a plan's first stage, repeated ones once (named with how often), and their layers with weights."""
    size = plan.batch.sizes[plan.stages[0].group][0]
    graph = graph.at(size)
    flow = flows(plan, graph)[0]
    settled = _settled(flow)
    counts: dict[int, int] = {}
    for call in graph.calls:
        counts[call.template] = counts.get(call.template, 0) + 1
    blocks, seen, kernel = [], set(), 0
    for c, call in enumerate(graph.calls):
        template = graph.templates[call.template]
        kept = [k for k in range(len(template.kernels)) if k not in call.omits]
        if call.template not in seen:
            seen.add(call.template)
            layers = _layers(plan, graph, flow, settled, c, {k: kernel + i for i, k in enumerate(kept)})
            if layers:
                paths = [fill(op.path, call.variables) for op in template.ops]
                name = _common(paths) or f"{layers[0].name} …"
                times = counts[call.template]
                blocks.append((f"{name}  (×{times})" if times > 1 else name, layers))
        kernel += len(kept)
    return blocks


def _settled(flow: Flow) -> dict[int, Layout]:
    """How values with pending sums lie once they are reduced."""
    found: dict[int, Layout] = {}
    for conversion in flow.conversions:
        if any(isinstance(p, Partial) for p in conversion.before):
            for value in conversion.values:
                found.setdefault(value, conversion.after)
    return found


def _layers(
    plan: Plan, graph: Graph, flow: Flow, settled: dict[int, Layout], c: int, numbers: dict[int, int]
) -> list[Tiled]:
    call, flat = graph.calls[c], graph.flat
    template, base = graph.templates[call.template], int(graph.kernel_value_offsets[c])
    weights = {i: named(s, call.variables) for i, s in enumerate(template.sources) if s.kind == "parameter"}
    found, drawn = [], set()
    for k, number in numbers.items():
        kernel = template.kernels[k]
        if kernel.phase != "F" or base_name(kernel.target) not in PRODUCTS or number not in flow.uses:
            continue
        read = [v - base for v in _behind(graph, flat.kernel_inputs, number)]
        own = [i for i in read if i in weights and len(weights[i].spec.dims) > 1 and i not in drawn]
        if not own:
            continue
        drawn.add(own[0])
        source, value = weights[own[0]], int(flat.kernel_outputs[number])
        rest = plan.state_of(source)[1]
        found.append(
            Tiled(
                name=fill(template.ops[kernel.op].path, call.variables).rpartition(".")[2] or source.name,
                weight_shape=source.spec.shape(1), weight=rest_layout(rest.parameter, flow.axes),
                made_shape=flat.kernel_value_spec[value].shape(flow.micro_batch),
                made=settled.get(value, flow.layouts[value]),
            )
        )  # fmt: skip
    return found


def _behind(graph: Graph, inputs: npt.NDArray[np.int64], kernel: int) -> list[int]:
    """What a kernel reads, seen through views."""
    flat, found = graph.flat, []
    for value in inputs[flat.kernel_indptr[kernel] : flat.kernel_indptr[kernel + 1]].tolist():
        maker = int(flat.kernel_value_kernel[value])
        while maker >= 0 and graph.kernel_classes[int(flat.kernel_class[maker])].view:
            value = int(inputs[flat.kernel_indptr[maker]])
            maker = int(flat.kernel_value_kernel[value])
        found.append(value)
    return found


def _common(paths: Sequence[str]) -> str:
    """The module that all of these paths lie in."""
    parts = [path.split(".") for path in paths if path]
    if not parts:
        return ""
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


# --- drawing ---------------------------------------------------------------------------------------------------------
def tiling(plan: Plan, graph: Graph, title: str = "") -> Figure:
    """Per block a column of layers: the weight on the left, what the layer makes on the right, a colour per device."""
    from matplotlib.figure import Figure

    blocks = tiled_blocks(plan, graph)
    flow_axes = tuple((name, size) for name, size in plan.groups[plan.stages[0].group].axes if size > 1)
    columns = [
        (name if start == 0 else "", layers[start : start + MOST_PER_COLUMN])
        for name, layers in blocks
        for start in range(0, len(layers), MOST_PER_COLUMN)
    ]
    rows = max((len(layers) for _, layers in columns), default=1)
    figure = Figure(figsize=(max(4.0, 2.5 * len(columns)), 1.5 * rows + 1.3), layout="constrained")
    plots = figure.subplots(rows, 2 * max(1, len(columns)), squeeze=False)
    devices = 1
    for _, members in flow_axes:
        devices *= members
    for plot in plots.ravel():
        plot.set_axis_off()
    for x, (name, layers) in enumerate(columns):
        for y, layer in enumerate(layers):
            left, right = plots[y, 2 * x], plots[y, 2 * x + 1]
            _draw(left, layer.weight_shape, layer.weight, flow_axes, devices, f"{layer.name}: weight")
            _draw(right, layer.made_shape, layer.made, flow_axes, devices, "makes")
            if y == 0 and name:
                left.annotate(name, (0, 1.42), xycoords="axes fraction", fontsize=9, fontweight="bold")
    mesh = " × ".join(f"{name}={members}" for name, members in flow_axes)
    figure.suptitle(title or f"Tensors by device, mesh {mesh}", fontsize=11)
    return figure


def _draw(plot: Plot, shape: tuple[int, ...], layout: Layout, axes: Axes, devices: int, label: str) -> None:
    from matplotlib import colormaps

    if len(shape) < 2:
        shape, layout = (1, *shape), tuple(_moved(p) for p in layout)
    cut = dict.fromkeys(p.dim for p in layout if isinstance(p, Shard))
    dims = sorted([*cut, *(d for d in range(len(shape)) if d not in cut)][:2])
    device = owners(shape, layout, axes, (dims[0], dims[1]))
    colours = colormaps["viridis" if devices > 20 else "tab20" if devices > 10 else "tab10"]
    scale = device / max(1, devices - 1) if devices > 20 else device
    plot.set_axis_on()
    plot.imshow(colours(scale), interpolation="nearest", aspect="auto")
    striped = False
    for side in (0, 1):
        changes = np.flatnonzero((np.diff(device, axis=side) != 0).any(axis=1 - side)) + 0.5
        if changes.size > MOST_EDGES:
            striped = True
            continue
        draw = plot.hlines if side == 0 else plot.vlines
        draw(changes, -0.5, POINTS - 0.5, colors="white", linewidths=0.8)
    if devices <= 16 and not striped:
        for number in np.unique(device).tolist():
            where = np.argwhere(device == number)
            y, x = where[(np.abs(where - np.median(where, axis=0)).sum(axis=1)).argmin()]
            plot.text(x, y, str(number), ha="center", va="center", fontsize=6, color="white")
    parts = dict.fromkeys(range(len(shape)), 1)
    for place, (_, members) in zip(layout, axes, strict=True):
        if isinstance(place, Shard):
            parts[place.dim] *= members
    whole = any(isinstance(p, Replicate | Partial) for p in layout)
    plot.set_title(f"{label}\n{'×'.join(map(str, shape))}", fontsize=6.5, pad=2)
    plot.set_ylabel(f"dim {dims[0]} / {parts[dims[0]]}", fontsize=6, labelpad=1)
    more = "".join(f", dim {d} / {n}" for d, n in parts.items() if n > 1 and d not in dims)
    plot.set_xlabel(f"dim {dims[1]} / {parts[dims[1]]}{more}{', copies' if whole else ''}", fontsize=6, labelpad=1)
    plot.set_xticks([])
    plot.set_yticks([])


def _moved(place: Placement | Halo) -> Placement | Halo:
    return Shard(place.dim + 1, place.block) if isinstance(place, Shard) else place


def save_tiling(path: Path | str, plan: Plan, graph: Graph, title: str = "") -> None:
    """Write the picture (`.png`, `.svg` or `.pdf`)."""
    path, buffer = Path(path), io.BytesIO()
    kind = path.suffix.lstrip(".") or "png"
    tiling(plan, graph, title).savefig(buffer, format=kind, dpi=130, metadata=None if kind == "png" else {"Date": None})
    write_atomically(path, buffer.getvalue())
