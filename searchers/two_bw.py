"""The planner that Piper's authors compare with, after PipeDream-2BW: equal layers per stage, the same degrees for all.

All layers are recomputed or none. Reference: msr-fiddle/piper, and Narayanan et al., arXiv 2006.09503, whose released
code only has a sweep script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from simpart.searchers._piper_graph import PiperPlan, PiperProblem, PiperStage, repeated, stage_time_s
from simpart.searchers.equal import Equal

__all__ = ["equal_stages", "solve", "two_bw"]


def equal_stages(count: int, layers: Sequence[int], nodes: int) -> list[tuple[int, ...]]:
    """Nodes of each of `count` stages: equal numbers of layers, the last stages one more where it does not divide.

    Nodes before the last layer that are none go to the first stage, those behind it to the last.

    >>> equal_stages(2, [1, 2, 3], 5)
    [(0, 1), (2, 3, 4)]
    """
    share, larger = divmod(len(layers), count)
    stages, start, inner = [], 0, set(layers)
    for s in range(count):
        end = start + share + (s >= count - larger)
        stages.append(list(layers[start:end]))
        start = end
    others = [v for v in range(nodes) if v not in inner]
    stages[0] += [v for v in others if v < layers[-1]]
    stages[-1] += [v for v in others if v > layers[-1]]
    return [tuple(sorted(stage)) for stage in stages]


def solve(problem: PiperProblem) -> PiperPlan | None:
    """The best of these plans by Piper's time per sample; None if none fits."""
    layers, count = repeated(problem.nodes), len(problem.nodes)
    best: PiperPlan | None = None
    for stage_count in range(1, min(problem.devices, len(layers)) + 1):
        cuts = equal_stages(stage_count, layers, count)
        for data in problem.data_degrees(1):
            for tensor in problem.degrees:
                if stage_count * data * tensor > problem.devices or stage_count * data > problem.micro_batches:
                    continue
                for variant in range(2):
                    plan = _plan(problem, cuts, data, tensor, variant)
                    if plan is not None and (best is None or plan.value_s < best.value_s):
                        best = plan
    return best


def _plan(problem: PiperProblem, cuts: list[tuple[int, ...]], data: int, tensor: int, variant: int) -> PiperPlan | None:
    stages = []
    for nodes in cuts:
        offered = [problem.nodes[v].variants.get(tensor, ()) for v in nodes]
        if any(len(each) <= variant for each in offered):
            return None
        stages.append(PiperStage(nodes=nodes, variants=(variant,) * len(nodes), data=data, tensor=tensor))
    value = max(stage_time_s(problem, stage, data * (len(stages) - x)) for x, stage in enumerate(stages))
    return None if value == math.inf else PiperPlan(stages=tuple(stages), value_s=value)


def two_bw() -> Equal:
    """The same rules on simpart's prices: equal layers, the same replicas for all, all layers recomputed or none.

    Only what fits is ranked, by M × the slowest stage.
    """
    return Equal(name="two_bw", weigh="layers", within_memory=True)
