"""Tofu: every kernel cut by its description, every tensor in shards, found step by step over the devices' factors.

Reference: Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (EuroSys 2019).
Plans are one stage on all devices. The paper counts bytes; `tofu_seconds` takes the seconds of the links instead, which
the paper does not. Each is tried with one micro-batch, as in the paper, then with more of them while memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

from simpart.errors import UserError
from simpart.graph import Graph
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.searchers._tofu.baselines import METHODS, UNNESTED, Method, solve
from simpart.searchers._tofu.choices import check_factors
from simpart.searchers._tofu.coarse import Coarse, coarsen
from simpart.searchers._tofu.counts import Found, counted_bytes, link_bytes, lone_bound, recount, weighed
from simpart.searchers._tofu.joint import joint
from simpart.searchers._tofu.parallel import replicas, weird_trick
from simpart.searchers._tofu.plan import mesh_group, plan_of
from simpart.searchers._tofu.price import axis_names, seconds_of
from simpart.searchers._tofu.steps import Steps
from simpart.searchers._tofu.work import Workload
from simpart.searching import Candidate, Control

__all__ = [
    "Partition", "Tofu", "partition", "tofu_allrow", "tofu_data_parallel", "tofu_equalchop", "tofu_icml18",
    "tofu_one_weird_trick", "tofu_seconds", "tofu_shared", "tofu_spartan",
]  # fmt: skip

SEVERAL = (UNNESTED, 10 * UNNESTED, 30 * UNNESTED)
"""How much nested cuts count in the plans of one search, from which simulation chooses."""
MOST_JOINT = 64
"""Sequences of one group up to which all steps are tried together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """A partition of a graph. Costs and bounds are bytes received by all devices in a micro-batch, as the recursion
    counts them in its first groups; `devices_bytes` are counted device by device. In `seconds` both are seconds of
    conversions, one after the other. `replicated` are kernels that no description can cut, with the bytes that are
    gathered for them."""

    coarse: Coarse
    steps: Steps
    found: Found
    bound: float
    devices_bytes: float
    bytes: float
    replicated: tuple[tuple[str, str, float], ...]

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, as a fraction of it."""
        return 0.0 if self.found.total <= 0 else max(0.0, 1 - self.bound / self.found.total)


def partition(
    graph: Graph,
    micro_batch: int,
    devices: int,
    *,
    factors: tuple[int, ...] | None = None,
    method: Method = METHODS["tofu"],
    beam: int = 4,
    ties: int = 8,
    slack: float = 0.0,
    joint_s: float | None = 2.0,
    share: bool = False,
    unnested: float = UNNESTED,
    problem: Problem | None = None,
    check: Callable[[], None] = lambda: None,
    coarse: Coarse | None = None,
) -> Partition:
    """Cut a graph at a micro-batch among devices. `joint_s` limits the attempt at all steps together (None: left out);
    with a `problem` the objective is seconds on its cluster; `share` and `unnested` see `Rules`.

    Raises UserError where nothing can be cut.
    """
    steps_of = check_factors(devices, factors)
    coarse = coarse or coarsen(graph, micro_batch, steps_of)
    taken = method.factors(steps_of)
    for parts in sorted(set(taken), reverse=True):
        _check_divides(coarse, parts)
    weigh = None
    if problem is not None:
        group = mesh_group(taken)
        weigh = seconds_of(problem.costs.communication, problem.cluster, group, axis_names(taken))
    steps, found = solve(
        method,
        coarse.work,
        steps_of,
        weigh=weigh,
        beam=beam,
        ties=ties,
        slack=slack,
        share=share,
        unnested=unnested,
        check=check,
    )
    check()
    bound = found.bound
    if method.name == "tofu":
        if joint_s is not None and len(taken) > 1 and not share:
            better = joint(steps, most=MOST_JOINT, seconds=joint_s, relative_gap=1e-3)
            if better is not None:
                bound = max(bound, better.bound)
                found = better if better.total + better.taste < found.total + found.taste else found
        if weigh is None and not share:
            bound = max(bound, lone_bound(steps))
    work = coarse.work
    return Partition(
        coarse=coarse, steps=steps, found=found, bound=min(bound, found.total), bytes=counted_bytes(work, found),
        devices_bytes=recount(work, found), replicated=_replicated(work, found),
    )  # fmt: skip


def _replicated(work: Workload, found: Found) -> tuple[tuple[str, str, float], ...]:
    rows, each = [], link_bytes(work, found)
    for kernel, reason in work.undescribed:
        gathered = sum(size for size, link in zip(each, work.links, strict=True) if link.kernel == kernel)
        rows.append((work.names[kernel], reason, gathered))
    return tuple(rows)


def _check_divides(coarse: Coarse, parts: int) -> None:
    """Refuse a factor by which no kernel that computes can be cut."""
    steps = Steps(coarse.work, (parts,))
    start = steps.start()
    for k in range(len(coarse.work.kernels)):
        if any(r.cuts for r in steps.choices.requests(k, steps.kernel(start, k), 0)):
            return
    raise UserError(
        f"tofu cuts dims into {parts} parts, and no dim of this model at micro-batch {coarse.micro_batch} divides by "
        f"{parts}; use a number of devices whose prime factors divide its dims, such as {_fitting(coarse)}"
    )


def _fitting(coarse: Coarse) -> str:
    sizes = [n for value in coarse.work.values for n in value.shape]
    return ", ".join(str(p) for p in (2, 3, 4, 5, 6, 8) if any(n % p == 0 for n in sizes)) or "1"


# --- the searcher ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tofu:
    """Partitions by bytes or by seconds, see the module. `method` is one of the paper's rules."""

    name: str = "tofu"
    method: Method = METHODS["tofu"]
    seconds: bool = False
    share: bool = False
    unnested: tuple[float, ...] = (UNNESTED,)
    beam: int = 4
    ties: int = 8
    slack: float = 0.0
    factors: tuple[int, ...] | None = None

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        space, devices = problem.space, problem.cluster.size
        family = f"{self.method.name} by {'seconds' if self.seconds else 'bytes'}{', shared' if self.share else ''}"
        if space.min_stages > 1:
            yield Candidate(plan=None, family=family, why="tofu makes plans of one stage; allow one")
            return
        least_s = inf
        most = min(problem.global_batch, space.max_micro_batches or problem.global_batch)
        for count in (m for m in range(1, most + 1) if problem.global_batch % m == 0):
            control.check()
            micro_batch = problem.global_batch // count
            fits = False
            for unnested in self.unnested:
                try:
                    found = partition(
                        problem.graph, micro_batch, devices, factors=self.factors, method=self.method, beam=self.beam,
                        ties=self.ties, slack=self.slack, problem=problem if self.seconds else None, share=self.share,
                        unnested=unnested, check=control.check,
                    )  # fmt: skip
                except UserError as error:
                    yield Candidate(plan=None, family=f"{family}, {count} micro-batches", why=str(error))
                    break
                candidate = self._candidate(problem, found, count, family)
                least_s = min(least_s, candidate.bound_s)
                yield candidate
                fits = fits or (control.latest is not None and control.latest.evaluation.feasible)
            if fits:
                break
        if isfinite(least_s):
            control.report(bound=least_s)

    def _candidate(self, problem: Problem, found: Partition, count: int, family: str) -> Candidate:
        objective, least = found.found.total, found.bound
        unit = "s of conversions" if self.seconds else "B received"
        words = f"{count} micro-batch{'es' if count > 1 else ''}, {objective:.4g} {unit}"
        if self.method.name == "tofu":
            words += f" (at least {least:.4g}, gap {100 * found.gap:.1f} %)"
        if not self.seconds:
            group = mesh_group(found.found.factors)
            weigh = seconds_of(problem.costs.communication, problem.cluster, group, axis_names(found.found.factors))
            objective, least = weighed(found.coarse.work, found.found, weigh), 0.0
        if found.replicated:
            several = "s" if len(found.replicated) > 1 else ""
            gathered = sum(size for *_, size in found.replicated)
            words += f", {len(found.replicated)} kernel{several} replicated for {gathered:.4g} B"
        work_s = _work_s(problem, found.coarse.micro_batch)
        plan = plan_of(found.coarse, found.found, count, problem.space.schedules[0], problem.mode)
        return Candidate(
            plan=plan, family=f"{family}: {words}", objective_s=count * (work_s + objective),
            bound_s=count * (work_s + least),
        )  # fmt: skip


def _work_s(problem: Problem, micro_batch: int) -> float:
    """A device's share of the kernels of one micro-batch, if they divided without loss."""
    device = problem.cluster.device(0)
    prices = problem.prices([micro_batch], device)[micro_batch]
    classes = np.bincount(problem.graph.at(micro_batch).flat.op_class, minlength=len(prices.forward.seconds))
    return float(classes @ (prices.forward.seconds + prices.backward.seconds)) / problem.cluster.size


def tofu_seconds() -> Tofu:
    """Conversions by the seconds of the links that they cross, and gathers shared by their readers."""
    return Tofu(name="tofu_seconds", seconds=True, share=True, unnested=SEVERAL)


def tofu_shared() -> Tofu:
    """Bytes, with gathers shared by their readers: what a plan receives when it runs."""
    return Tofu(name="tofu_shared", share=True, unnested=SEVERAL)


def tofu_allrow() -> Tofu:
    """Every tensor by samples, every kernel its cheapest request."""
    return Tofu(name="tofu_allrow", method=METHODS["allrow"])


def tofu_spartan() -> Tofu:
    """Kernel by kernel, most undecided bytes first."""
    return Tofu(name="tofu_spartan", method=METHODS["spartan"])


def tofu_equalchop() -> Tofu:
    """One step for all devices: every tensor along one dim."""
    return Tofu(name="tofu_equalchop", method=METHODS["equalchop"])


def tofu_icml18() -> Tofu:
    """Without sums over devices."""
    return Tofu(name="tofu_icml18", method=METHODS["icml18"])


@dataclass(frozen=True, slots=True)
class Parallel:
    """One plan by rule: replicas, or one weird trick."""

    name: str
    make: Callable[[Problem], Plan]

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        control.check()
        if problem.space.min_stages > 1:
            yield Candidate(plan=None, family=self.name, why=f"{self.name} makes plans of one stage; allow one")
            return
        try:
            plan = self.make(problem)
        except UserError as error:
            yield Candidate(plan=None, family=self.name, why=str(error))
            return
        work_s = plan.batch.micro_batches * _work_s(problem, plan.batch.micro_batch)
        yield Candidate(plan=plan, family=self.name, objective_s=work_s, bound_s=work_s)


def tofu_data_parallel() -> Parallel:
    """A replica per device, one micro-batch."""
    return Parallel("tofu_data_parallel", replicas)


def tofu_one_weird_trick() -> Parallel:
    """Samples split everywhere but in fully connected layers, which split their outputs."""
    return Parallel("tofu_one_weird_trick", weird_trick)
