"""The sweep people do by hand, as Megatron-LM users know it: pp × dp × tp × micro-batch × schedule × recomputation ×
ZeRO, stages of equal layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpart.configure import Configuration, configure
from simpart.errors import UserError
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searchers._chain_plans import stages_text, why_no_plans
from simpart.searchers._points import BATCH, batched
from simpart.searching import Candidate, Control, Proposal

__all__ = ["Grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every configuration that `simpart plan` takes by flags and the space allows."""

    name: str = "grid"
    objective: str = "micro-batches × the compute of the slowest stage"

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Proposal]:
        """Fewest stages first; estimates leave transfers out, and what tensor parallelism adds."""
        reasons: dict[int, str] = {}
        planned: set[int] = set()
        settings = list(_configurations(problem))
        least_s = math.inf
        for number, batch in enumerate(batched(settings, BATCH)):
            control.check()
            control.report(done=number * BATCH, total=len(settings))
            candidates = []
            for configuration in batch:
                try:
                    plan = configure(problem, configuration)
                except UserError as error:
                    reasons.setdefault(configuration.pp, str(error))
                    continue
                planned.add(configuration.pp)
                objective_s = _slowest_s(problem, plan, configuration.tp)
                least_s = min(least_s, objective_s)
                candidates.append(Candidate(plan=plan, family=stages_text(configuration.pp), objective_s=objective_s))
            if candidates:
                yield candidates
        if planned:
            control.report(done=len(settings), total=len(settings), bound=least_s)
        yield from why_no_plans(problem, reasons, planned, problem.space.tp)


def _configurations(problem: Problem) -> Iterator[Configuration]:
    size, space = problem.cluster.size, problem.space
    for pp in range(space.min_stages, min(space.max_stages or size, size) + 1):
        for tp in space.tp:
            for dp in range(size // (pp * tp), 0, -1):
                if pp * dp * tp != size and not space.use_fewer_devices:
                    continue
                for micro_batch in range(1, problem.global_batch // dp + 1):
                    count, rest = divmod(problem.global_batch, dp * micro_batch)
                    if rest or count > (space.max_micro_batches or count):
                        continue
                    for schedule, recompute, zero in itertools.product(space.schedules, space.recompute, space.zero):
                        if not (zero and dp == 1):
                            yield Configuration(
                                pp=pp,
                                dp=dp,
                                tp=tp,
                                micro_batch=micro_batch,
                                schedule=schedule,
                                recompute=recompute,
                                zero=zero,
                            )


def _slowest_s(problem: Problem, plan: Plan, tp: int) -> float:
    micro_batch = plan.batch.sizes[0][0]
    graph = problem.graph.at(micro_batch)
    device = min(problem.cluster.kinds, key=lambda d: d.peak(graph.precision))
    prices = problem.prices([micro_batch], device)[micro_batch]
    op_class = graph.flat.op_class
    forward_s, backward_s = prices.forward.seconds[op_class], prices.backward.seconds[op_class]
    slowest = 0.0
    for stage in plan.stages:
        ops = stage.ops.indices(graph)
        again = sum(float(forward_s[region.indices(graph)].sum()) for region in stage.recompute)
        slowest = max(slowest, float(forward_s[ops].sum() + backward_s[ops].sum()) + again)
    return plan.batch.micro_batches * slowest / tp
