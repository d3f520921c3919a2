"""A host's launch time from one measured step: the one at which the prediction takes as long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simpart.costmodels.learned._overheads import GRID_S, at_launch_times
from simpart.engines import compiled
from simpart.lowering import lowering_of
from simpart.plan import Plan
from simpart.problem import Problem

__all__ = ["launch_time_of"]


def launch_time_of(problem: Problem, plan: Plan, measured_s: float) -> float | None:
    """Seconds per launch at which a step of the plan takes `measured_s`. None where none within GRID_S does: kernels
    alone take as long, or other things than launches keep the step."""
    if not any(device.kind == "gpu" for device in problem.cluster.kinds):
        return None
    costs = replace(problem.costs, eager_launch_s=0.0, compiled_launch_s=0.0)
    lowering = lowering_of(replace(problem, costs=costs))
    costed = lowering.cost(plan)
    launches = np.array([cost.launches for cost in costed.costs])
    task_s = at_launch_times(costed.seconds, launches, len(plan.stages), GRID_S)
    steps = compiled.makespans(lowering.topology(plan, costed, "tasks"), task_s) + costs.step_overhead_s
    if not steps[0] < measured_s <= steps[-1]:
        return None
    right = int(np.searchsorted(steps, measured_s))
    part = (measured_s - steps[right - 1]) / (steps[right] - steps[right - 1])
    return float(GRID_S[right - 1] + part * (GRID_S[right] - GRID_S[right - 1]))
