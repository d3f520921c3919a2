"""A step time that no plan of a space can beat, whatever its searcher: all work, at its cheapest, on all devices."""

from __future__ import annotations

import numpy as np

from simpart.problem import Problem

__all__ = ["FLOOR_OF", "step_floor_s"]

FLOOR_OF = "simulated step of any plan that keeps kernels whole"
MOST_SIZES = 64
"""Micro-batch sizes that are priced; for more the floor would cost more than it says."""


def step_floor_s(problem: Problem) -> float | None:
    """A lower bound of the simulated step of every plan that splits no kernel.

    Each op takes at least its least time per sample over all micro-batch sizes, and a device of kind k does at most
    max over ops of r / t_k of any work r per second (r: the ops' times on one of the kinds). Memory, transfers and
    gradient collectives are left out. None where too many sizes would have to be priced, or kernels may be split.
    """
    batch, cluster = problem.global_batch, problem.cluster
    even = len(cluster.kinds) == 1 and not problem.space.uneven_replicas
    sizes = [b for b in range(1, batch + 1) if batch % b == 0 or not even]
    if len(sizes) > MOST_SIZES or any(degree > 1 for degree in problem.space.tp):
        return None
    counts = [sum(n for d, n in cluster.devices if d == kind) for kind in cluster.kinds]
    structures: dict[str, list[int]] = {}
    for b in sizes:
        structures.setdefault(problem.graph.at(b).fingerprint, []).append(b)
    floors = []
    for members in structures.values():
        op_class = problem.graph.at(members[0]).flat.op_class
        per_sample = []  # [kind][op], the least over sizes
        for kind in cluster.kinds:
            prices = problem.prices(members, kind)
            times = [(prices[b].forward.seconds + prices[b].backward.seconds)[op_class] / b for b in members]
            per_sample.append(np.minimum.reduce(times))
        best = 0.0
        for work in per_sample:
            busy = work > 0
            speeds = [float((work[busy] / np.maximum(t[busy], 1e-300)).max(initial=0.0)) for t in per_sample]
            rate = sum(n * speed for n, speed in zip(counts, speeds, strict=True))
            best = max(best, batch * float(work.sum()) / rate if rate > 0 else 0.0)
        floors.append(best)
    return min(floors) + problem.costs.step_overhead_s
