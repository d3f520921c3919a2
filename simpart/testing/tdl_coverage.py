"""How much of a model's work is described: shares of kernel instances, FLOPs and roofline time, and what is not.

`python -m simpart.testing.tdl_coverage [docs/tdl.md]` captures the zoo and writes the table between the markers of
that file, or prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simpart.cost import ComputeModel
from simpart.cost.signatures import signatures_of
from simpart.files import write_atomically
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.kernels.flops import kernel_class_flops
from simpart.tdl import call_like, splits_of, undescribed_reason

__all__ = ["ZOO", "Coverage", "coverage_of", "markdown"]

ZOO: Mapping[str, str] = {
    "gpt": "gpt:layers=4,hidden=1024,heads=16,seq=1024,vocab=50304",
    "gpt, dropout, tied": "gpt:layers=4,hidden=1024,heads=16,seq=1024,vocab=50304,dropout=0.1,tied=true",
    "llama": "llama:layers=4,hidden=1024,heads=16,kv_heads=4,ffn=2816,seq=1024,vocab=32000",
    "resnet50": "resnet50",
    "unet": "unet",
    "bert": "bert:layers=4,hidden=1024,heads=16,ffn=4096",
    "t5": "t5:layers=4",
    "moe": "moe:layers=4,hidden=1024,heads=16,kv_heads=4,ffn=3584,seq=1024",
    "wide_resnet": "wide_resnet:factor=4",
    "lstm": "lstm:seq=20",
    "two_tower": "two_tower:image_layers=4,text_layers=4",
}
"""Models of the table, at dimensions where time is where it usually is."""

BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares (fractions) of a model that are described, and `cut`: of its time, what more than replication can
    divide among two.
    `missing` maps undescribed kernels to (instances, reason)."""

    instances: int
    described: float
    flops: float
    time: float
    cut: float
    missing: Mapping[str, tuple[int, str]]


def coverage_of(graph: Graph, micro_batch: int, compute: ComputeModel, device: Device) -> Coverage:
    """What of one training step is described."""
    from simpart.cost import unique

    graph = graph.at(micro_batch)
    signatures = signatures_of(graph, micro_batch)
    counts = np.bincount(graph.flat.kernel_class, minlength=len(signatures)).astype(np.float64)
    flops = counts * kernel_class_flops(graph, micro_batch)
    table, rows = unique(signatures)
    seconds = counts * compute.estimate(table, device).mean_s[rows]
    calls = [call_like(signature) for signature in signatures]
    reasons = [undescribed_reason(call) for call in calls]
    known = np.array([reason is None for reason in reasons])
    cut = np.array([len(splits_of(call, 2)) > 1 for call in calls])
    missing: dict[str, tuple[int, str]] = {}
    for call, reason, count in zip(calls, reasons, counts, strict=True):
        if reason is not None:
            missing[call.target] = (missing.get(call.target, (0, ""))[0] + int(count), reason)
    return Coverage(
        instances=int(counts.sum()),
        described=_share(counts, known),
        flops=_share(flops, known),
        time=_share(seconds, known),
        cut=_share(seconds, cut),
        missing=missing,
    )


def _share(weights: np.ndarray, chosen: np.ndarray) -> float:
    return float(weights[chosen].sum() / weights.sum()) if weights.sum() else 1.0


def markdown(found: Mapping[str, Coverage]) -> str:
    """The table, and a list of what is not described."""
    lines = [
        "| model | kernels | described | of FLOPs | of roofline time | time that an axis of 2 can divide |",
        "|---|---|---|---|---|---|",
    ]
    for name, c in found.items():
        shares = " | ".join(f"{100 * share:.2f} %" for share in (c.described, c.flops, c.time, c.cut))
        lines.append(f"| {name} | {c.instances} | {shares} |")
    missing = {target: reason for c in found.values() for target, (_, reason) in c.missing.items()}
    lines += ["", "Not described, hence replicated:" if missing else "Nothing in these models is left undescribed."]
    lines += [f"* `{target}`: {reason}" for target, reason in sorted(missing.items())]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write or print the table for the zoo on an H100."""
    from simpart.capture import capture
    from simpart.hardware.files import load_device
    from simpart.model_spec import parse_model
    from simpart.registry import folder

    device = load_device("h100-sxm-80gb")
    found = {}
    for name, spec in ZOO.items():
        graph = capture(parse_model(spec), model=spec)
        found[name] = coverage_of(graph, 4, folder("costmodels").Roofline(), device)
    text = markdown(found)
    if not arguments:
        print(text, end="")
        return 0
    path = Path(arguments[0])
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_atomically(path, f"{before}{BEGIN}\n{text}{END}{after}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
