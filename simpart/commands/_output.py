"""What several commands print: a prediction as JSON and as a table."""

from __future__ import annotations

import json
import sys
from typing import Any

from simpart.describe import describe, human_bytes, human_seconds
from simpart.plan import Plan
from simpart.plan_format import plan_to_json
from simpart.problem import Problem
from simpart.simulation import SimResult

__all__ = ["prediction_document", "print_document", "print_prediction"]


def prediction_document(problem: Problem, plan: Plan, result: SimResult, **more: Any) -> dict[str, Any]:
    """The document of plan, simulate and search: keys of the design, `more` last."""
    return {
        "plan": plan_to_json(plan),
        "feasible": result.feasible,
        "why_infeasible": result.why_infeasible,
        "predicted": result.to_json(),
        **more,
    }


def print_document(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, ensure_ascii=False, allow_nan=False, indent=1)
    sys.stdout.write("\n")


def print_prediction(problem: Problem, plan: Plan, result: SimResult, title: str) -> None:
    """Plan in words, then what is predicted, for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{title}[/bold]")
    console.print(describe(plan, problem.graph.at(max(plan.batch.sizes[0])), problem.cluster), markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    low, high = result.interval_s
    table.add_row("step time", f"{human_seconds(result.step_s)}   (90 %: {human_seconds(low)} … {human_seconds(high)})")
    table.add_row(
        "throughput", f"{result.samples_per_s:.4g} samples/s, {result.tokens_per_s:.4g} tokens/s, MFU {result.mfu:.1%}"
    )
    table.add_row("peak memory", human_bytes(result.peak_bytes))
    for row in result.memory:
        kinds = sorted(row.by_kind.items(), key=lambda item: -item[1])[:4]
        words = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds if size)
        table.add_row(f"  stage {row.stage}", f"{human_bytes(row.device_bytes)}: {words}")
    table.add_row(
        "limited by", ", ".join(f"{name} {share:.0%}" for name, share in result.limits.items() if share >= 0.005)
    )
    table.add_row(
        "prices", ", ".join(f"{name} {share:.0%}" for name, share in result.provenance.items() if share >= 0.005)
    )
    console.print(table)
    if not result.feasible:
        console.print(f"[bold red]does not fit:[/bold red] {result.why_infeasible}")
