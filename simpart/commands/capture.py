"""`simpart capture`: a model's training step as a graph file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simpart.commands._console import console, print_document
from simpart.commands._place import PLACE
from simpart.errors import UserError

if TYPE_CHECKING:
    from simpart.graph import Graph

__all__ = ["capture"]


@click.command(epilog="Example:  simpart capture gpt:layers=24,hidden=1024,heads=16,seq=2048,vocab=51200 -o g.graph")
@click.argument("model")
@click.option("-o", "--output", type=PLACE, default=None, help="Graph file to write.")
@click.option("--precision", default="float32", show_default=True, help="Of parameters and activations.")
@click.option(
    "--micro-batch",
    "micro_batches",
    type=click.IntRange(min=1),
    multiple=True,
    help="Capture this micro-batch size too; needed where sizes are not affine in it. Repeatable.",
)
@click.option("--full", is_flag=True, help="Trace every layer instead of a few and expanding; slower.")
@click.option("--no-cache", is_flag=True, help="Capture afresh.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def capture(
    model: str,
    output: Path | None,
    precision: str,
    micro_batches: tuple[int, ...],
    full: bool,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Capture a model's training step as a graph: ops, their kernels, what repeats. No memory is used for its tensors.

    MODEL is a zoo model with its dims (gpt, llama, resnet50, unet), a .graph file, or package.module:factory, where
    factory(micro_batch) returns an nn.Module, whose forward returns the loss, and the tuple of its inputs.
    """
    from simpart.commands._notice import notice
    from simpart.graph.format import save_graph
    from simpart.model_spec import load_graph_or_model

    start = time.perf_counter()
    if Path(model).is_file() and (full or no_cache or micro_batches):
        raise UserError(f"{model} is captured already; leave --micro-batch, --full and --no-cache out, or name a model")
    with notice(f"capturing {model}"):
        graph = load_graph_or_model(model, precision, micro_batches=micro_batches, full=full, cache=not no_cache)
    seconds = time.perf_counter() - start
    if output is not None:
        save_graph(graph, output)
    document = summary(graph, output)
    if as_json:
        print_document({**document, "timing": {"capture_s": seconds}})
    else:
        print_summary(document)


def summary(graph: Graph, output: Path | None) -> dict[str, Any]:
    """Counts of a graph as plain values; FLOPs are of forward and backward, per sample."""
    from simpart.kernels.flops import executed_flops, model_flops

    calls = [call.template for call in graph.calls]
    kernels = sum(len(graph.templates[t].kernels) for t in calls) - sum(len(call.omits) for call in graph.calls)
    return {
        "model": graph.model,
        "precision": graph.precision,
        "fingerprint": graph.fingerprint,
        "ops": sum(len(graph.templates[t].ops) for t in calls),
        "kernels": kernels,
        "templates": [
            {"ops": len(t.ops), "kernels": len(t.kernels), "instances": calls.count(i)}
            for i, t in enumerate(graph.templates)
        ],
        "parameters": graph.parameter_count,
        "tokens_per_sample": graph.tokens_per_sample,
        "model_flops_per_sample": model_flops(graph, 2) // 2,
        "executed_flops_per_sample": executed_flops(graph, 2) // 2,
        "file": None if output is None else str(output),
        "file_bytes": None if output is None else output.stat().st_size,
    }


def print_summary(document: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    repeated = [t for t in document["templates"] if t["instances"] > 1]
    words = ", ".join(f"{t['ops']} ops x {t['instances']}" for t in sorted(repeated, key=lambda t: -t["ops"]))
    extra = document["executed_flops_per_sample"] / max(document["model_flops_per_sample"], 1) - 1
    table.add_row("model", escape(document["model"]))
    table.add_row("precision", document["precision"])
    table.add_row("ops", f"{document['ops']:,} in {document['kernels']:,} kernels")
    table.add_row("repeated", words or "nothing")
    table.add_row("parameters", f"{document['parameters']:,}")
    table.add_row("FLOPs/sample", f"{document['model_flops_per_sample']:.5g} (kernels execute {extra:.1%} more)")
    if document["file"] is not None:
        table.add_row("file", f"{escape(document['file'])} ({document['file_bytes']:,} bytes)")
    console().print(table)
