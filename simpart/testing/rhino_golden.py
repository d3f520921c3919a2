"""Golden cases of strategy graphs, stage assignment on graphs and the schedules and evaluator around them."""

from __future__ import annotations

import heapq
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from simpart.errors import FormatError
from simpart.testing.golden import Accepts
from simpart.testing.schedules import replay_schedule

__all__ = [
    "list_schedule",
    "read_graph",
    "solve_evaluator",
    "solve_inter_op",
    "solve_list_schedule",
    "solve_staging",
    "solve_strategy_graph",
]


def _numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers, null read as forbidden."""
    return np.array(
        [_numbers(v) if isinstance(v, list) else (math.inf if v is None else v) for v in values], dtype=float
    )


def read_graph(document: Mapping[str, Any]) -> Any:
    """The CostGraph of a case."""
    graphs = importlib.import_module("simpart.searchers._cost_graph")
    nodes = document["nodes"]
    number = {node["name"]: n for n, node in enumerate(nodes)}
    rows = tuple(
        graphs.Row(
            limit=row["budget"],
            weights=tuple(
                (number[node["name"]], _numbers(node["memory"]))
                for node in nodes
                if "memory" in node and (row["nodes"] == "all" or node["name"] in row["nodes"])
            ),
            name="the memory row",
        )
        for row in document.get("memory_rows", [])
    )
    return graphs.CostGraph(
        unary=tuple(_numbers(node["cost"]) for node in nodes),
        edges=tuple((number[e["source"]], number[e["target"]], _numbers(e["matrix"])) for e in document["edges"]),
        rows=rows,
    )


def solve_strategy_graph(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The optimum by the whole ladder, compared with the levels; which options attain it; the relaxation."""
    graphs = importlib.import_module("simpart.searchers._cost_graph")
    levels = importlib.import_module("simpart.searchers._rhino.levels")
    document = inputs["graph"]
    graph, nodes = read_graph(document), document["nodes"]
    solution = graphs.minimise(graph)
    costs = {level: levels.solve_level(graph, level).cost for level in levels.LEVELS}
    if not math.isclose(costs["O3"], costs["O4"], rel_tol=1e-9) or not costs["O1"] >= costs["O2"] * (1 - 1e-9):
        raise FormatError(f"the levels disagree: {costs}")
    if costs["O3"] != solution.cost or costs["O2"] < costs["O3"] * (1 - 1e-9):
        raise FormatError(f"a level undercuts the optimum {solution.cost}: {costs}")
    greedy = np.array([int(np.argmin(costs)) for costs in graph.unary])
    answer: dict[str, Any] = {
        "feasible": solution.choice is not None,
        "optimum": None,
        "per_node_greedy": {"assignment": _named(nodes, greedy), "cost": graphs.price(graph, greedy)},
    }
    if solution.choice is None:
        return answer

    def attained(v: int, x: int) -> bool:
        fixed = np.full(len(graph.unary[v]), math.inf)
        fixed[x] = graph.unary[v][x]
        unary = tuple(fixed if u == v else costs for u, costs in enumerate(graph.unary))
        found = graphs.minimise(graphs.CostGraph(unary=unary, edges=graph.edges, rows=graph.rows))
        return math.isclose(found.cost, solution.cost, rel_tol=1e-9)

    def fault(assignment: Any) -> str:
        choice = np.array([node["options"].index(assignment[node["name"]]) for node in nodes])
        if not graphs.rows_hold(graph, choice):
            return "the assignment breaks a memory row"
        cost = graphs.price(graph, choice)
        same = math.isclose(cost, solution.cost, rel_tol=1e-9)
        return "" if same else f"the assignment costs {cost}, the optimum found {solution.cost}"

    answer["optimum"] = solution.cost
    relaxed = graphs.linear_bound(graph)
    if relaxed > solution.cost * (1 + 1e-9):
        raise FormatError(f"the relaxation {relaxed} is above the optimum {solution.cost}")
    answer["lp_lower_bound"] = Accepts(lambda value: _near(value, relaxed))
    answer["one_optimal_assignment"] = Accepts(fault)
    answer["options_attaining_optimum"] = {
        node["name"]: [option for x, option in enumerate(node["options"]) if attained(v, x)]
        for v, node in enumerate(nodes)
    }
    return answer


def _near(written: float, relaxed: float) -> str:
    """Relaxations are written with four decimals and solved to a relative 1e-8."""
    same = math.isclose(written, relaxed, rel_tol=1e-8, abs_tol=5.1e-5)
    return "" if same else f"the relaxation is {relaxed}"


def _named(nodes: Sequence[Mapping[str, Any]], choice: Iterable[int]) -> dict[str, str]:
    return {node["name"]: node["options"][x] for node, x in zip(nodes, choice, strict=True)}


def solve_staging(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All optimal stagings, and the best contiguous cut of the lowest-number-first order."""
    stages = importlib.import_module("simpart.searchers._stage_ilp")
    cap = sum(inputs["flops"]) / inputs["stages"] * (1 + inputs["tolerance"])
    if not math.isclose(cap, inputs["per_stage_flops_cap"], rel_tol=1e-9):
        raise FormatError(f"the cap per stage is {cap}, the case says {inputs['per_stage_flops_cap']}")
    problem = stages.StageProblem(
        work=_numbers(inputs["flops"]),
        edges=tuple((u, v, float(size)) for u, v, size in inputs["edges"]),
        stages=inputs["stages"],
        cap=cap,
    )
    found = sorted(stage.tolist() for stage in stages.optimal_stagings(problem))
    order = stages.topological(len(problem.work), problem.edges)
    cut = stages.contiguous(problem, order)
    return {
        "objective": stages.objective(problem, found[0]),
        "all_optimal_stagings": found,
        "best_contiguous_cut": {"order": order, "objective": cut.objective},
    }


def solve_inter_op(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Alpa's inter-operator pass on a table of stage costs."""
    alpa = importlib.import_module("simpart.searchers.alpa")
    layers, sizes = len(inputs["layer_work"]), list(inputs["submesh_sizes"])
    time_s = np.full((layers, layers + 1, len(sizes)), np.inf)
    for entry in inputs["stage_cost_table"]:
        time_s[entry["first"], entry["end"], sizes.index(entry["submesh"])] = entry["time"]
    successors = np.full(time_s.shape, layers + 1)
    costs = alpa.InterOpCosts(time_s=time_s, successors=successors, sizes=tuple(sizes))
    plan = alpa.InterOp(costs, inputs["devices"], inputs["micro_batches"]).best()
    return {
        "optimum": plan.total_s,
        "optimal_stages": [[stage.start, stage.end, sizes[stage.option]] for stage in plan.stages],
    }


def solve_list_schedule(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """List scheduling of forwards and backwards; with the limit in flight it must be simpart's own 1F1B."""
    stages, micro_batches = inputs["stages"], inputs["micro_batches"]
    forward, backward = float(inputs["forward_time"]), float(inputs["backward_time"])
    transfer = float(inputs["transfer_time"])
    limits = [min(micro_batches, stages - s) for s in range(stages)]
    makespan, peaks, order = list_schedule(stages, micro_batches, forward, backward, transfer, limits)
    own = replay_schedule("1f1b", [forward] * stages, [backward] * stages, micro_batches, transfer)
    if own != (makespan, peaks):
        raise FormatError(f"1F1B takes {own}, list scheduling {(makespan, peaks)}")
    free, free_peaks, _ = list_schedule(stages, micro_batches, forward, backward, transfer, [micro_batches] * stages)
    return {
        "makespan": makespan,
        "peak_in_flight": peaks,
        "order_per_stage": order,
        "without_limit": {"makespan": free, "peak_in_flight": free_peaks},
    }


def list_schedule(
    stages: int, micro_batches: int, forward: float, backward: float, transfer: float, limits: Sequence[int]
) -> tuple[float, list[int], list[list[str]]]:
    """Makespan, peak in flight and order per stage of the rule: the task that can start earliest, forward first."""
    free, flying, peaks = [0.0] * stages, [0] * stages, [0] * stages
    order: list[list[str]] = [[] for _ in range(stages)]
    # (earliest start, 0 forward or 1 backward, stage, micro-batch) of tasks whose input is there
    ready = [(0.0, 0, 0, m) for m in range(micro_batches)]
    end = 0.0
    while ready:
        able = [(max(start, free[s]), kind, s, m) for start, kind, s, m in ready if kind == 1 or flying[s] < limits[s]]
        heapq.heapify(able)
        start, kind, s, m = able[0]
        ready = [task for task in ready if task[1:] != (kind, s, m)]
        order[s].append(f"{'FB'[kind]}{m}")
        done = start + (backward if kind else forward)
        free[s], end = done, max(end, done)
        flying[s] += -1 if kind else 1
        peaks[s] = max(peaks[s], flying[s])
        if kind == 0:
            ready.append((done + transfer, 0, s + 1, m) if s + 1 < stages else (done, 1, s, m))
        elif s:
            ready.append((done + transfer, 1, s - 1, m))
    return end, peaks, order


def solve_evaluator(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Forward sweep, then backward sweep: simpart's GPipe schedule replayed by its own engine."""
    forward, backward = [float(x) for x in inputs["forward_time"]], [float(x) for x in inputs["backward_time"]]
    makespan, _ = replay_schedule("gpipe", forward, backward, inputs["micro_batches"], float(inputs["transfer_time"]))
    return {"makespan": makespan}
