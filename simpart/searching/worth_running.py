"""The few plans of a search worth running: its best ones in other words, simulated again at the fine grain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simpart.describe.words import plan_words
from simpart.problem import Problem
from simpart.searching import Evaluated
from simpart.simulation import SimResult, simulate_plan

__all__ = ["WorthRunning", "worth_running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthRunning:
    """A plan with its step at both grains. `coarse_rank` counts from 1 among those looked at; what taking it instead of
    the first costs is `slower_s` (fine grain) and `more_bytes`, the difference of peaks."""

    evaluated: Evaluated
    words: str
    coarse_rank: int
    fine: SimResult
    slower_s: float
    more_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Plan in words, both steps, and the price of switching to it."""
        first_s = self.fine.step_s - self.slower_s
        return {
            "words": self.words,
            "family": self.evaluated.candidate.family,
            "why": self.evaluated.candidate.why,
            "coarse_rank": self.coarse_rank,
            "step_s": self.evaluated.evaluation.step_s,
            "fine_step_s": self.fine.step_s,
            "peak_bytes": self.fine.peak_bytes,
            "fits": self.fine.feasible,
            "switching": {"step_s": self.slower_s, "share": self.slower_s / first_s, "peak_bytes": self.more_bytes},
        }


def worth_running(problem: Problem, ranked: Sequence[Evaluated], count: int = 3) -> list[WorthRunning]:
    """Of `ranked` (best first) the first `count` that fit and differ in words, in the order of the fine grain; plans
    that do not fit at that grain come last."""
    chosen: dict[str, Evaluated] = {}
    for entry in ranked:
        plan = entry.candidate.plan
        if len(chosen) == count:
            break
        if plan is not None and entry.evaluation.feasible:
            chosen.setdefault(plan_words(plan), entry)
    rows = []
    for rank, (words, entry) in enumerate(chosen.items(), 1):
        assert entry.candidate.plan is not None
        rows.append((rank, words, entry, simulate_plan(problem, entry.candidate.plan, grain="fine")))
    rows.sort(key=lambda row: (not row[3].feasible, row[3].step_s, row[0]))
    return [
        WorthRunning(
            evaluated=entry, words=words, coarse_rank=rank, fine=fine, slower_s=fine.step_s - rows[0][3].step_s,
            more_bytes=fine.peak_bytes - rows[0][3].peak_bytes,
        )
        for rank, words, entry, fine in rows
    ]  # fmt: skip
