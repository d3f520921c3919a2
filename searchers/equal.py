"""Baselines people know: stages of equal layers, equal parameters or equal FLOPs, all with the same replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from simpart.configure import layer_calls
from simpart.graph import Graph
from simpart.kernels.flops import op_class_flops
from simpart.problem import Problem
from simpart.searchers._bottleneck import least_bottlenecks
from simpart.searchers._chain_plans import Answer, Answers, ChainCase, chain_cases, fitting, propose_answers
from simpart.searchers._cut_graph import CutGraph
from simpart.searchers._points import SLOWEST, slowest_s
from simpart.searchers._stage_costs import ChainProblem
from simpart.searchers._stages import ChainStage, Floats
from simpart.searching import Candidate, Control

__all__ = ["Equal", "equal_flops", "equal_layers", "equal_parameters"]

Weigh = Literal["layers", "parameters", "flops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal:
    """Cuts that make the largest stage smallest by `weigh`; the best shapes by M × the slowest stage with transfers.

    `within_memory`: plans that the planner's memory model refuses are left out.
    """

    name: str
    weigh: Weigh
    objective: str = SLOWEST
    most_blocks: int = 64
    within_memory: bool = False

    def propose(self, problem: Problem, rng: np.random.Generator, control: Control) -> Iterator[Candidate]:
        """The best plans of every number of stages that divides the devices."""
        cuts: WeakKeyDictionary[ChainProblem, dict[int, tuple[ChainStage, ...]]] = WeakKeyDictionary()

        def answers(case: ChainCase, most: int, below: Mapping[int, float]) -> Answers:
            if case.chain not in cuts:
                cuts[case.chain] = _equal_cuts(case.chain.cut, self.weigh, problem.cluster.size)
            found = {count: self._answer(problem, case, cuts[case.chain], count) for count in range(1, most + 1)}
            return {count: answer for count, answer in found.items() if answer is not False}

        groups = chain_cases(problem, control, most_blocks=self.most_blocks)
        return propose_answers(problem, control, groups, answers)

    def _answer(
        self, problem: Problem, case: ChainCase, cuts: dict[int, tuple[ChainStage, ...]], count: int
    ) -> Answer | Literal[False] | None:
        """False where the devices or samples cannot be shared like this, None where memory is short."""
        replicas, rest = divmod(case.shape.devices, count)
        if (rest and not problem.space.use_fewer_devices) or replicas not in case.costs.counts or count not in cuts:
            return False
        stages = tuple(ChainStage(start=s.start, end=s.end, replicas=replicas) for s in cuts[count])
        at, fits = case.costs.entries(stages), fitting(case.costs)
        if self.within_memory and not all(fits(count - 1 - x)[a] for x, a in enumerate(at)):
            return None
        return Answer(stages=stages, objective_s=slowest_s(case.costs, stages))


def equal_layers() -> Equal:
    """Equal numbers of layers; what stands before and behind them goes to the first and the last stage."""
    return Equal(name="equal_layers", weigh="layers")


def equal_parameters() -> Equal:
    """Equal numbers of parameters."""
    return Equal(name="equal_parameters", weigh="parameters")


def equal_flops() -> Equal:
    """Equal FLOPs."""
    return Equal(name="equal_flops", weigh="flops")


def _equal_cuts(cut: CutGraph, weigh: Weigh, most: int) -> dict[int, tuple[ChainStage, ...]]:
    """Stages (of one replica) for each number of stages."""
    prefix = np.concatenate([[0.0], np.cumsum(cut.block_weights(_weights(cut.graph, weigh)))])
    n = cut.size
    weight = np.where(np.arange(n + 1)[None, :] > np.arange(n)[:, None], prefix[None, :] - prefix[:-1, None], np.inf)
    # Rounded, so that sums that differ by rounding alone count as equal.
    weight = np.round(np.maximum(weight, 0.0) / max(prefix[-1], 1e-300), 9)[:, :, None]
    found = least_bottlenecks(lambda _: weight, (1,), min(most, n), min(most, n), all_devices=False)
    return {count: best.stages for count, best in found.items() if best is not None}


def _weights(graph: Graph, weigh: Weigh) -> Floats:
    """Per op. A layer weighs 1, spread over its ops; a parameter counts where it is first read."""
    flat = graph.flat
    if weigh == "flops":
        return np.asarray(op_class_flops(graph, 2)[flat.op_class], dtype=np.float64)
    weights = np.zeros(len(flat.op_class))
    if weigh == "layers":
        layers = layer_calls(graph)
        if not layers:
            return np.ones(len(flat.op_class))
        inside = np.isin(flat.op_call, layers)
        sizes = np.bincount(flat.op_call[inside], minlength=int(flat.op_call.max()) + 1)
        weights[inside] = 1.0 / sizes[flat.op_call[inside]]
        return weights
    consumer = np.repeat(np.arange(len(flat.op_class)), np.diff(flat.op_indptr))
    parameters = {v: source for v, source in graph.all_sources() if source.kind == "parameter"}
    seen: set[int] = set()
    for value, op in zip(flat.op_inputs.tolist(), consumer.tolist(), strict=True):
        if value in parameters and value not in seen:
            seen.add(value)
            weights[op] += parameters[value].spec.bytes(2)
    return weights
