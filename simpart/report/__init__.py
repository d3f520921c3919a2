"""A simulated plan on one page: the plan in words, what is predicted, timeline and memory as pictures.

The page is one HTML file without scripts or outside references. matplotlib and jinja2 are imported when a page is made.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpart.describe import human_bytes, human_seconds
from simpart.files import write_atomically
from simpart.program import MEMORY_KINDS, TaskKind, streams_of
from simpart.simulation import SimResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["picture", "save_report"]

COLORS = {
    TaskKind.FORWARD: "#4878a8",
    TaskKind.BACKWARD: "#e09050",
    TaskKind.BACKWARD_INPUT: "#e09050",
    TaskKind.BACKWARD_WEIGHT: "#f0c890",
    TaskKind.REDUCE: "#a05080",
    TaskKind.OPTIMIZER: "#609060",
    TaskKind.SEND: "#909090",
    TaskKind.COLLECTIVE: "#c04040",
}
NAMES = {
    TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.BACKWARD_WEIGHT: "weight gradient",
    TaskKind.REDUCE: "gradient reduction", TaskKind.OPTIMIZER: "optimizer",
    TaskKind.COLLECTIVE: "other collective",
}  # fmt: skip
MEMORY_COLORS = ("#4878a8", "#80a8d0", "#609060", "#e09050", "#f0c890", "#a05080", "#909090")
MOST_ROWS = 64
"""Groups that are drawn; more would not be told apart."""
LINED = 400
"""Tasks of a row up to which each has a white edge; of more little but edges would be seen."""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { background: #f4f4f2; padding: .8rem; overflow-x: auto; font-size: 12.5px; white-space: pre-wrap }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top }
.bad { color: #a02020; font-weight: 600 } figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
</style>
<h1>{{ title }}</h1>
{% if why %}<p class="bad">Does not fit: {{ why }}</p>{% endif %}
<table>{% for name, value in rows %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Where the time goes</h2>
<table>{% for name, value in limits %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<figure>{{ picture | safe }}</figure>
{% if tiles %}<h2>Which device holds what</h2><figure>{{ tiles | safe }}</figure>{% endif %}
<h2>The plan</h2><pre>{{ words }}</pre>
</html>
"""


def picture(result: SimResult, title: str = "") -> Figure:
    """Timeline of the device groups, and the peak memory of each by kind against what its devices have."""
    from matplotlib.figure import Figure

    rows = min(result.program.topology.groups, MOST_ROWS)
    figure = Figure(figsize=(11, 2.2 + 0.42 * rows + 1.2 + 0.3 * rows), layout="constrained")
    time, memory = figure.subplots(2, 1, height_ratios=[1.6 + 0.42 * rows, 1.4 + 0.3 * rows])
    _draw_timeline(time, result, rows)
    _draw_memory(memory, result, rows)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _draw_timeline(axes: Axes, result: SimResult, rows: int) -> None:
    topology, times = result.program.topology, result.times
    scale, unit = (1e3, "ms") if times.makespan_s < 10 else (1.0, "s")
    lanes = [lane for row in range(rows) for lane in _lanes(result, row)]
    drawn = np.isin(topology.resource, [resource for resource, *_ in lanes])
    for kind, color in COLORS.items():
        for resource, bottom, height in lanes:
            tasks = np.flatnonzero((topology.kind == kind) & (topology.resource == resource))
            if tasks.size:
                spans = [(times.start_s[t] * scale, (times.end_s[t] - times.start_s[t]) * scale) for t in tasks]
                line = 0.3 if tasks.size < LINED and resource < rows else 0.0
                edge = "white" if line else "none"
                axes.broken_barh(spans, (bottom, height), facecolors=color, edgecolors=edge, linewidth=line)
                if resource < rows:
                    _number(axes, result, tasks, bottom + height / 2, scale)
        if kind in NAMES and bool((drawn & (topology.kind == kind)).any()):
            axes.plot([], [], color=color, linewidth=6, label=NAMES[kind])
    axes.set_yticks(range(rows), [topology.resource_names[r] for r in range(rows)])
    axes.set_xlim(0, times.makespan_s * scale or 1.0)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlabel(f"time in {unit}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _lanes(result: SimResult, row: int) -> list[tuple[int, float, float]]:
    """(resource, bottom, height) of a group's own row and, thinner and below it, of its streams."""
    streams = streams_of(result.program.topology, row)[1:]
    if not streams:
        return [(row, row - 0.4, 0.8)]
    each = 0.4 / len(streams)
    return [(row, row - 0.4, 0.4), *((r, row + i * each, each) for i, r in enumerate(streams))]


def _number(axes: Axes, result: SimResult, tasks: Any, row: float, scale: float) -> None:
    """Micro-batch numbers, where they have room."""
    topology, times = result.program.topology, result.times
    for task in tasks.tolist():
        wide = times.end_s[task] - times.start_s[task] > 0.018 * times.makespan_s
        if wide and topology.micro_batch[task] >= 0:
            middle = (times.start_s[task] + times.end_s[task]) / 2 * scale
            axes.text(
                middle, row, str(int(topology.micro_batch[task])), ha="center", va="center", fontsize=7, color="white"
            )


def _draw_memory(axes: Axes, result: SimResult, rows: int) -> None:
    found = result.memory[:rows]
    left = np.zeros(len(found))
    for kind, color in zip(MEMORY_KINDS, MEMORY_COLORS, strict=True):
        size = np.array([row.by_kind.get(kind, 0) / 2**30 for row in found])
        if size.any():
            axes.barh(range(len(found)), size, left=left, color=color, label=kind, height=0.7)
            left += size
    more = np.array([row.device_bytes / 2**30 for row in found]) - left
    axes.barh(range(len(found)), np.maximum(more, 0), left=left, color="#e4e4e0", label="allocator, driver", height=0.7)
    for i, row in enumerate(found):
        axes.plot([row.capacity_bytes / 2**30] * 2, [i - 0.4, i + 0.4], color="#a02020", linewidth=2)
    axes.plot([], [], color="#a02020", linewidth=2, label="device")
    axes.set_yticks(range(len(found)), [f"group {row.group}" for row in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("peak memory of a device in GiB")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def save_report(path: Path | str, result: SimResult, title: str, words: str, tiles: Figure | None = None) -> None:
    """Write the page (`.html`), or the picture alone (`.png`, `.svg`, `.pdf`). `words` describes the plan, `tiles` (see
    `simpart.report.tiling`) shows which device holds which part of its tensors."""
    path = Path(path)
    figure = picture(result, title if path.suffix != ".html" else "")
    buffer = io.BytesIO()
    if path.suffix != ".html":
        kind = path.suffix.lstrip(".") or "png"
        figure.savefig(buffer, format=kind, dpi=130, metadata=None if kind == "png" else {"Date": None})
        write_atomically(path, buffer.getvalue())
        return
    from jinja2 import Environment

    low, high = result.interval_s
    rows = [
        ("step time", f"{human_seconds(result.step_s)} (90 %: {human_seconds(low)} … {human_seconds(high)})"),
        ("throughput", f"{result.samples_per_s:.4g} samples/s, {result.tokens_per_s:.4g} tokens/s"),
        ("model FLOPs utilisation", f"{result.mfu:.1%}"),
        ("peak memory", human_bytes(result.peak_bytes)),
        ("prices are", ", ".join(f"{name} {share:.0%}" for name, share in result.provenance.items() if share >= 0.005)),
    ]
    limits = [(name, f"{share:.1%}") for name, share in result.limits.items() if share >= 0.0005]
    page = Environment(autoescape=True).from_string(PAGE)
    text = page.render(
        title=title, why=result.why_infeasible, rows=rows, limits=limits, words=words, picture=_svg(figure),
        tiles=_svg(tiles) if tiles is not None else "",
    )  # fmt: skip
    write_atomically(path, text)


def _svg(figure: Figure) -> str:
    """The same bytes for the same picture."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "simpart"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]
