"""The shortest order of F, I and W within a memory limit, by integer programming; for small cases.

A start time per action, a binary per pair of actions of a group whose order is open. Micro-batches are alike, so each
kind of a stage runs them in order. Solved by HiGHS through scipy. Reference: Qi et al., arXiv 2401.10241, appendix G.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from simpart.schedule._actions import Action, Rows
from simpart.schedule._zero_bubble import Objective, StageTimes, group_spans, zero_bubble

__all__ = ["ExactOrder", "exact_zero_bubble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOrder:
    """The best rows found, what they take, and what no order can take less than."""

    rows: Rows
    cost_s: float
    bound_s: float


def exact_zero_bubble(
    group_of_stage: Sequence[int], micro_batches: int, times: StageTimes, limit: float,
    objective: Objective = "makespan", time_limit_s: float = 60.0,
) -> ExactOrder:  # fmt: skip
    """As `zero_bubble`, but optimal unless time runs out: then the better of its answer and the program's, with the
    bound. Raises UserError where `zero_bubble` does."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    rows = zero_bubble(group_of_stage, micro_batches, times, limit, objective)
    cost = _cost(rows, times, objective)
    model = _model(group_of_stage, micro_batches, times, limit, objective, cost)
    entries = [(r, c, v) for r, (line, _) in enumerate(model.lines) for c, v in line.items()]
    r, c, v = (np.array(x) for x in zip(*entries, strict=True))
    matrix = csr_matrix((v, (r, c)), shape=(len(model.lines), model.size))
    objective_row = np.zeros(model.size)
    objective_row[0] = 1.0
    upper = np.where(np.arange(model.size) < model.starts, model.horizon, 1.0)
    upper[0] = cost
    solved: Any = milp(
        objective_row,
        constraints=LinearConstraint(matrix, lb=np.array([low for _, low in model.lines])),
        integrality=(np.arange(model.size) >= model.starts).astype(np.int64),
        bounds=Bounds(0.0, upper),
        options={"time_limit": time_limit_s},
    )
    bound = float(solved.mip_dual_bound) if solved.mip_dual_bound is not None else 0.0
    if solved.x is not None:
        found = _rows(model.actions, solved.x, group_of_stage)
        if _cost(found, times, objective) < cost:
            rows, cost = found, _cost(found, times, objective)
    return ExactOrder(rows=rows, cost_s=cost, bound_s=min(bound, cost))


class _Model(NamedTuple):
    """Columns: the objective, a start per action (up to `starts`), then binaries. Each line is at least its number."""

    actions: dict[Action, int]
    lines: list[tuple[dict[int, float], float]]
    size: int
    starts: int
    horizon: float


def _model(
    home: Sequence[int], micro_batches: int, times: StageTimes, limit: float, objective: Objective, cost: float
) -> _Model:
    stages, kinds = range(len(home)), ("F", "I", "W")
    actions = {
        Action(s, k, m): 1 + i  # type: ignore[arg-type]
        for i, (s, k, m) in enumerate(itertools.product(stages, kinds, range(micro_batches)))
    }
    seconds = {"F": times.forward_s, "I": times.input_s, "W": times.weight_s}
    starts = 1 + len(actions)
    # A schedule that takes `cost` on every group may begin late on the last one.
    horizon = cost + sum(times.forward_s) + sum(times.send_s)
    lines: list[tuple[dict[int, float], float]] = []
    size = starts

    def after(a: Action, b: Action, delay: float) -> None:
        lines.append(({actions[b]: 1.0, actions[a]: -1.0}, seconds[a.kind][a.stage] + delay))

    for action in actions:
        s, kind, m = action
        hop = 0.0 if s == 0 or home[s] == home[s - 1] else times.send_s[s - 1]
        if kind == "F" and s:
            after(action._replace(stage=s - 1), action, hop)
        if kind == "I":
            after(action._replace(kind="F"), action, 0.0)
            if s:
                after(action, action._replace(stage=s - 1), hop)
        if kind == "W":
            after(action._replace(kind="I"), action, 0.0)
        if m:
            after(action._replace(micro_batch=m - 1), action, 0.0)
        for origin in stages if objective == "span" else (-1,):
            line = {0: 1.0, actions[action]: -1.0}
            if origin >= 0:
                if home[origin] != home[s]:
                    continue
                start = actions[Action(origin, "F", 0)]
                line[start] = line.get(start, 0.0) + 1.0
            lines.append((line, seconds[kind][s]))
    before: dict[tuple[Action, Action], tuple[int, float]] = {}  # a precedes b where sign × column is above the half
    for a, b in itertools.combinations(actions, 2):
        if home[a.stage] != home[b.stage] or _implied(a, b) or _implied(b, a):
            continue
        column, size = size, size + 1
        for x, y, sign in ((a, b, 1.0), (b, a, -1.0)):
            # y >= x + seconds(x) where the binary (or its opposite) is 1
            free = horizon if sign > 0 else 0.0
            line = {actions[y]: 1.0, actions[x]: -1.0, column: -sign * horizon}
            lines.append((line, seconds[x.kind][x.stage] - free))
        before[a, b], before[b, a] = (column, 1.0), (column, -1.0)
    for action in actions:
        if action.kind != "F":
            continue
        line, room = {}, limit
        for other in actions:
            if home[other.stage] != home[action.stage] or other == action:
                continue
            held, kept = times.held[other.stage], times.kept[other.stage]
            change = {"F": held, "I": kept - held, "W": -kept}[other.kind]
            if (other, action) in before:
                column, sign = before[other, action]
                line[column] = line.get(column, 0.0) - sign * change
                room -= change if sign < 0 else 0.0
            elif _implied(other, action):
                room -= change
        lines.append((line, times.held[action.stage] - room))
    return _Model(actions, lines, size, starts, horizon)


def _implied(a: Action, b: Action) -> bool:
    """True where a runs before b in any schedule."""
    if a.micro_batch > b.micro_batch:
        return False
    if a.stage == b.stage:
        return (a.kind, a.micro_batch) != (b.kind, b.micro_batch) and "FIW".index(a.kind) <= "FIW".index(b.kind)
    if a.kind == "F":
        return a.stage < b.stage or b.kind != "F"
    return a.kind == "I" and b.kind != "F" and a.stage > b.stage


def _rows(actions: dict[Action, int], x: Any, home: Sequence[int]) -> Rows:
    rows: list[list[Action]] = [[] for _ in range(max(home) + 1)]
    for action in sorted(actions, key=lambda a: (round(float(x[actions[a]]), 6), "FIW".index(a.kind))):
        rows[home[action.stage]].append(action)
    return tuple(map(tuple, rows))


def _cost(rows: Rows, times: StageTimes, objective: Objective) -> float:
    spans = group_spans(rows, times)
    return max(end - (start if objective == "span" else 0.0) for start, end in spans)
