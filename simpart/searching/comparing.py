"""Several searchers side by side on one problem: what each finds, how long it takes, how good its plan may be."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpart.describe.words import plan_words
from simpart.errors import UserError
from simpart.files import write_atomically
from simpart.plan import Plan
from simpart.problem import Problem, Space
from simpart.searching import Budget, Evaluated, Progress, Searcher, SearchResult, search

__all__ = ["Comparison", "Entry", "beyond", "candidates_csv", "compare", "figure", "reason_kinds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One searcher: what it found, or why it found nothing at all."""

    searcher: str
    result: SearchResult | None
    why: str = ""

    @property
    def best(self) -> Evaluated | None:
        return self.result.best if self.result is not None else None

    def row(self, portfolio: Evaluated | None, space: Space | None = None) -> dict[str, Any]:
        """What a table says of it; times of the search stand apart, under `timing`."""
        result, best = self.result, self.best
        plan = best.candidate.plan if best is not None else None
        why = self.why
        if result is not None and best is None and not why:
            why = result.why_none
        return {
            "searcher": self.searcher,
            "objective": result.objective if result is not None else None,
            "objective_s": _finite(best.candidate.objective_s) if best is not None else None,
            "step_s": best.evaluation.step_s if best is not None else None,
            "peak_bytes": best.evaluation.peak_bytes if best is not None else None,
            "least_objective_s": result.least_s if result is not None else None,
            "bound": result.bound_s if result is not None else None,
            "gap": result.gap if result is not None else None,
            "floor_gap": result.floor_gap if result is not None else None,
            "proposed": result.proposed if result is not None else 0,
            "evaluated": len(result.ranked) if result is not None else 0,
            "infeasible": reason_kinds(result.infeasible) if result is not None else {},
            "stopped": result.stopped if result is not None else "failed",
            "plan": plan_words(plan) if plan is not None else None,
            "cuts": best.candidate.why if best is not None else "",
            "differs": _differs(best, portfolio),
            "beyond_space": beyond(plan, space) if plan is not None and space is not None else [],
            "why": why,
            "timing": {
                "search_s": result.wall_s if result is not None else None,
                "best_at_s": best.at_s if best is not None else None,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`pricing_s` is the time that prices took, which all searchers share and no search time contains."""

    entries: tuple[Entry, ...]
    floor_s: float | None
    pricing_s: float
    interrupted: bool = False

    @property
    def portfolio(self) -> tuple[str, Evaluated] | None:
        """The best plan of all, and who found it (of several the first)."""
        found = [(entry.searcher, entry.best) for entry in self.entries]
        known = [(name, best) for name, best in found if best is not None]
        return min(known, key=lambda item: item[1].evaluation.step_s, default=None)


def compare(
    problem: Problem,
    searchers: Mapping[str, Callable[[], Searcher]],
    budget: Budget,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    log: Path | None = None,
    progress: Callable[[str, Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Run every searcher under the same budget, one after the other; the budget is each one's own.

    Prices are asked once, before; each searcher starts without what another one worked out. One that fails is left out
    with its reason; Ctrl-C ends the comparison with what is there. A `log` is shared: then what one searcher had
    simulated, the next finds there, and search times say less.
    """
    start, entries, interrupted = clock(), list[Entry](), False
    try:
        _price_all(problem)
    except KeyboardInterrupt:
        return Comparison(entries=(), floor_s=None, pricing_s=clock() - start, interrupted=True)
    pricing_s = clock() - start
    for name, make in searchers.items():
        report = None if progress is None else (lambda p, name=name: progress(name, p))
        try:
            found = search(
                _fresh(problem), make(), budget,
                seed=seed, executor=executor, log=log, progress=report, clock=clock,
            )  # fmt: skip
        except KeyboardInterrupt:
            entries.append(Entry(searcher=name, result=None, why="interrupted"))
            interrupted = True
        except UserError as error:
            entries.append(Entry(searcher=name, result=None, why=str(error)))
        except Exception as error:  # one searcher's fault must not lose the others' answers
            why = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
            entries.append(Entry(searcher=name, result=None, why=why))
        else:
            entries.append(Entry(searcher=name, result=found))
            interrupted = found.stopped == "interrupted"
        if interrupted:
            break
    floors = [entry.result.floor_s for entry in entries if entry.result is not None]
    return Comparison(
        entries=tuple(entries), floor_s=floors[0] if floors else None, pricing_s=pricing_s, interrupted=interrupted
    )


def _price_all(problem: Problem) -> None:
    """All prices that even plans and the floor need, and what is compiled on first use."""
    from simpart.configure import Configuration, configure
    from simpart.searching.floor import step_floor_s
    from simpart.simulation import evaluate

    sizes = [b for b in range(1, problem.global_batch + 1) if problem.global_batch % b == 0]
    for device in problem.cluster.kinds:
        problem.prices(sizes, device)
        problem.update_prices(device)
    step_floor_s(problem)
    plan = configure(_fresh(problem), Configuration(pp=1, dp=1, micro_batch=sizes[0]))
    evaluate(_fresh(problem), [plan])


def _fresh(problem: Problem) -> Problem:
    """The same problem with its prices, but without what was worked out for plans."""
    copy = dataclasses.replace(problem)
    copy._prices.update(problem._prices)
    copy._updates.update(problem._updates)
    return copy


def reason_kinds(infeasible: Mapping[str, int]) -> dict[str, int]:
    """Reasons counted without their numbers, the commonest first.

    >>> reason_kinds({"stage 0 needs 3.10 GiB": 2, "stage 4 needs 12.0 GiB": 1})
    {'stage … needs … GiB': 3}
    """
    counts: Counter[str] = Counter()
    for why, count in infeasible.items():
        counts[re.sub(r"\d+(?:\.\d+)?(?:, \d+(?:\.\d+)?)*", "…", why)] += count
    return dict(counts.most_common())


def _differs(best: Evaluated | None, portfolio: Evaluated | None) -> list[str]:
    """In what a searcher's best plan differs from the best of all; empty for the same plan."""
    from simpart.report.diff import differing_parts

    mine = best.candidate.plan if best is not None else None
    other = portfolio.candidate.plan if portfolio is not None else None
    return [] if mine is None or other is None else differing_parts(mine, other)


def beyond(plan: Plan, space: Space) -> list[str]:
    """In what a plan goes beyond a space: some searchers have a space of their own."""
    stages, kind = len(plan.stages), plan.schedule.kind
    found = []
    if any(degree > 1 for group in plan.groups for _, degree in group.sharding_axes) and space.tp == (1,):
        found.append("kernels split")
    if plan.state and space.zero == (0,) and space.tp == (1,):
        found.append("state divided")
    if kind not in space.schedules and stages > 1:
        found.append(f"schedule {kind}")
    if not space.min_stages <= stages <= (space.max_stages or stages):
        found.append(f"{stages} stages")
    return found


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


COLUMNS = ("searcher", "number", "family", "objective_s", "step_s", "peak_bytes", "feasible", "why", "plan")


def candidates_csv(comparison: Comparison) -> str:
    """All candidates in the order proposed, and why families have none; numbers as they are, without times of the
    search: the same for the same candidates."""
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(COLUMNS)
    for entry in comparison.entries:
        if entry.result is None:
            table.writerow([entry.searcher, "", "", "", "", "", False, entry.why, ""])
            continue
        for e in sorted(entry.result.ranked, key=lambda e: e.number):
            objective_s, evaluation, plan = _finite(e.candidate.objective_s), e.evaluation, e.candidate.plan
            assert plan is not None
            step_s = _finite(evaluation.step_s)
            numbers = ["" if x is None else repr(x) for x in (objective_s, step_s)]
            table.writerow(
                [entry.searcher, e.number, e.candidate.family, *numbers, evaluation.peak_bytes, evaluation.feasible,
                 evaluation.why_infeasible, plan_words(plan)]
            )  # fmt: skip
        for family, why in entry.result.families.items():
            if isinstance(why, str):
                table.writerow([entry.searcher, "", family, "", "", "", False, why, ""])
    return buffer.getvalue()


def figure(path: Path, comparison: Comparison, title: str) -> None:
    """Best simulated step so far against search time, a line per searcher (`.png`, `.svg` or `.pdf`)."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.5, 5), layout="constrained")
    axes = picture.subplots()
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    markers = "osv^D*PX<>hp"
    for i, entry in enumerate(comparison.entries):
        if entry.result is None or entry.best is None:
            continue
        times, steps = _falling(entry.result.ranked)
        times, steps = [*times, max(entry.result.wall_s, times[-1])], [*steps, steps[-1]]
        axes.plot(
            times, steps, drawstyle="steps-post", color=colors[i % len(colors)], marker=markers[i % len(markers)],
            markersize=4, label=f"{entry.searcher} ({steps[-1]:.4g} s)",
        )  # fmt: skip
    if comparison.floor_s is not None:
        axes.axhline(comparison.floor_s, color="#909090", linestyle=":", label=f"floor ({comparison.floor_s:.4g} s)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("search time in s (prices not included)")
    axes.set_ylabel("best simulated step in s")
    axes.set_title(textwrap.fill(title, 90, break_on_hyphens=False), fontsize=9)
    axes.grid(True, which="both", color="#e4e4e0", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    buffer, kind = io.BytesIO(), path.suffix.lstrip(".").lower() or "png"
    with rc_context({"svg.hashsalt": "simpart"}):
        picture.savefig(buffer, format=kind, dpi=130, metadata=None if kind == "png" else {"Date": None})
    write_atomically(path, buffer.getvalue())


def _falling(ranked: Sequence[Evaluated]) -> tuple[list[float], list[float]]:
    """When a better feasible plan was found, and how long its step is."""
    times: list[float] = []
    steps: list[float] = []
    for e in sorted(ranked, key=lambda e: e.number):
        if e.evaluation.feasible and (not steps or e.evaluation.step_s < steps[-1]):
            times.append(max(e.at_s, 1e-3))
            steps.append(e.evaluation.step_s)
    return times, steps
