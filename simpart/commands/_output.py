"""What several commands print: a prediction as JSON and as a table."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from simpart.commands._console import console, print_document
from simpart.describe import describe, human_bytes, human_seconds
from simpart.plan import Plan
from simpart.plan.format import plan_to_json
from simpart.problem import Problem
from simpart.simulation import MemoryRow, SimResult

__all__ = ["prediction_document", "print_document", "print_prediction"]

PREDICTED = (
    "step_s", "interval_s", "samples_per_s", "tokens_per_s", "mfu", "peak_bytes", "memory", "limits", "gains",
    "contention_s", "provenance",
)  # fmt: skip
"""Keys of `SimResult.to_json`."""


def prediction_document(plan: Plan | None, result: SimResult | None, why: str = "", /, **more: Any) -> dict[str, Any]:
    """The document of plan, simulate and search: the same keys always, `more` last. Without a plan, all that would be
    predicted of it is null and `why` says why there is none."""
    predicted = dict.fromkeys(PREDICTED) if result is None else result.to_json()
    return {
        "plan": None if plan is None else plan_to_json(plan),
        "grain": None if result is None else result.program.grain,
        "feasible": result is not None and result.feasible,
        "why_infeasible": why if result is None else result.why_infeasible,
        "predicted": predicted,
        "bound": None,
        "evaluated": 0 if result is None else 1,
        **more,
    }


def print_prediction(problem: Problem, plan: Plan, result: SimResult, title: str) -> None:
    """Plan in words, then what is predicted, for people."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(f"[bold]{escape(title)}[/bold]")
    out.print(describe(plan, problem.graph.at(max(plan.batch.sizes[0])), problem.cluster), markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    low, high = result.interval_s
    table.add_row("step time", f"{human_seconds(result.step_s)}   (90 %: {human_seconds(low)} … {human_seconds(high)})")
    table.add_row(
        "throughput", f"{result.samples_per_s:.4g} samples/s, {result.tokens_per_s:.4g} tokens/s, MFU {result.mfu:.1%}"
    )
    if result.program.grain == "fine":
        table.add_row("grain", "fine: kernels and collectives on streams")
    table.add_row("peak memory", human_bytes(result.peak_bytes))
    for words, rows in groupby(result.memory, key=_memory_words):
        first, *rest = [row.stage for row in rows]
        table.add_row(f"  stages {first}–{rest[-1]}" if rest else f"  stage {first}", words)
    table.add_row(
        "limited by", ", ".join(f"{name} {share:.0%}" for name, share in result.limits.items() if share >= 0.005)
    )
    table.add_row(
        "prices", ", ".join(f"{name} {share:.0%}" for name, share in result.provenance.items() if share >= 0.005)
    )
    out.print(table)
    if not result.feasible:
        out.print(f"[bold red]does not fit:[/bold red] {escape(result.why_infeasible)}")


def _memory_words(row: MemoryRow) -> str:
    kinds = sorted(row.by_kind.items(), key=lambda item: -item[1])[:4]
    return f"{human_bytes(row.device_bytes)}: " + ", ".join(f"{k} {human_bytes(size)}" for k, size in kinds if size)
