"""The actions of one stage as chains, with what their items are priced by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from simpart.cost import Collective
from simpart.cost.pricing import Amount
from simpart.graph import Graph
from simpart.lowering import Costed, Lowering
from simpart.lowering.fine._buckets import Bucket, buckets_of
from simpart.lowering.fine._chain import COMPUTE, Chain, Item, chain_of
from simpart.lowering.fine._classes import kernel_words
from simpart.lowering.fine._events import Event, Steps, events_of, step_rows
from simpart.lowering.fine._sequence import KernelPrices, Places, Run, gradient_place, price_each, price_parts, runs_of
from simpart.lowering.fine._settings import FineSettings
from simpart.lowering.layout import Variant, value_bytes
from simpart.lowering.sharded import local_share
from simpart.memory import state_of
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.sharding.flow import Flow

__all__ = ["ActionChain", "StageChains", "stage_chains"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionChain:
    """`run.row` indexes the kernels' prices, then those of accumulations. `gathered_bytes` are those of each gather of
    parameters, in order."""

    chain: Chain
    run: Run
    kernels: Amount
    accumulations: Amount
    graph: Graph
    variant: Variant
    gathered_bytes: tuple[int, ...]

    def content(self, item: Item) -> tuple[Ints, Floats]:
        """Rows of an item's elements, and how often each."""
        return self.run.row[item.begin : item.end], self.run.weight[item.begin : item.end]

    def words(self, item: Item) -> str:
        """What its kernels are."""
        kernels = self.run.kernel[item.begin : item.end]
        kernels = kernels[kernels >= 0]
        return kernel_words(self.graph, kernels) if kernels.size else "begin"

    def ends(self, item: Item) -> tuple[bool, bool]:
        """Whether an item is the first and the last of the action on the compute stream."""
        row = [other for other in self.chain.items if other.stream == COMPUTE]
        return item is row[0], item is row[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChains:
    """By kind of action; `last` is the one after which the stage's gradients are complete, with its buckets."""

    actions: dict[str, ActionChain]
    last: ActionChain | None
    copies_s: float

    @property
    def chains(self) -> list[ActionChain]:
        return [*self.actions.values(), *([self.last] if self.last else [])]


def stage_chains(
    lowering: Lowering, plan: Plan, costed: Costed, s: int, kinds: Sequence[str], last: str | None,
    settings: FineSettings,
) -> StageChains:  # fmt: skip
    """Chains of the kinds of actions that stage s runs, `last` naming the kind that completes its gradients (None:
    buckets are sent elsewhere). Of unlike replicas each kind is said of the one that computes longest."""
    problem, layout = lowering.problem, costed.layout
    group = plan.groups[plan.stages[s].group]
    found: dict[str, ActionChain] = {}
    ending: ActionChain | None = None
    longest: dict[str, float] = {}
    copies_s = 0.0
    for variant in costed.arrangement.variants[plan.stages[s].group]:
        graph, ops, regions = lowering.layouts.stage(plan, layout, s, variant.micro_batch)
        flow = None
        if costed.sharded >= 0:
            flow = lowering.actions.share(plan, layout, s, variant).flow
        places = Places.of(graph, ops, regions)
        prices = _prices(lowering, graph, variant, flow)
        values = _parameters(graph, layout.graph, layout.partition.parameters[s])
        rows, _, accumulate = problem.update_prices(variant.device)
        weights = _accumulated(plan, costed, s, graph, places, values, rows)
        runs = runs_of(places, prices, [(place, prices.amount.seconds.size + row, w) for place, row, w in weights])
        seconds = np.concatenate([prices.amount.seconds, accumulate.seconds])
        events: dict[str, list[Event]] = {kind: [] for kind in "FBIW"}
        if flow is not None:
            parts = events_of(flow, group, problem.cluster, places)
            events = {"F": parts["F"], "B": parts["I"] + parts["W"], "I": parts["I"], "W": parts["W"]}
        moved = 2 * sum(value_bytes(layout.graph, value, variant.micro_batch) for value in layout.sent[s])
        launches = len(layout.sent[s]) * variant.device.kernel_launch_s
        copies_s = max(copies_s, moved / variant.device.memory_bytes_per_s + launches)
        buckets: list[Bucket] = []
        if last is not None and settings.overlap:
            buckets = _buckets(lowering, plan, costed, s, flow, places, values, settings)
        for kind in kinds:
            run = runs[kind]
            each = seconds[run.row] * run.weight
            if kind in longest and each.sum() <= longest[kind]:
                continue
            longest[kind] = float(each.sum())

            gathered = tuple(
                sum(c.bytes for steps in event.steps for c in steps.collectives)
                for event in sorted(events[kind], key=lambda event: event.place)
                if event.wait == "unit"
            )
            found[kind], full = (
                ActionChain(
                    chain=chain_of(run, each, events[kind], sent, settings.overlap), run=run, kernels=prices.amount,
                    accumulations=accumulate, graph=graph, variant=variant, gathered_bytes=gathered,
                )
                for sent in ((), buckets)
            )  # fmt: skip
            if kind == last and buckets:
                ending = full
    return StageChains(actions=found, last=ending, copies_s=copies_s)


_known: WeakKeyDictionary[Problem, dict[tuple[str, int, str], KernelPrices]] = WeakKeyDictionary()
"""Prices of whole kernels by graph, micro-batch and device."""


def _prices(lowering: Lowering, graph: Graph, variant: Variant, flow: Flow | None) -> KernelPrices:
    if flow is not None:
        return price_parts(graph, flow, lowering.actions.shares.prices, variant.device)
    problem = lowering.problem
    known = _known.setdefault(problem, {})
    key = (graph.fingerprint, variant.micro_batch, variant.device.name)
    if key not in known:
        known[key] = price_each(graph, variant.micro_batch, problem.costs.compute, variant.device, problem.mode)
    return known[key]


def _parameters(graph: Graph, known: Graph, values: Ints) -> list[tuple[int, int]]:
    """(value in `graph`, value in `known`) of parameters; graphs of one model may number them differently."""
    if graph is known:
        return [(v, v) for v in values.tolist()]
    number = {source.name: value for value, source in graph.parameters.items()}
    return [(number[known.parameters[v].name], v) for v in values.tolist() if known.parameters[v].name in number]


def _accumulated(
    plan: Plan, costed: Costed, s: int, graph: Graph, places: Places, values: list[tuple[int, int]],
    rows: dict[int, int],
) -> list[tuple[float, int, float]]:  # fmt: skip
    """Where each gradient is added to the sum, the row of its price and how often, see `ActionCosts`."""
    layout, count, group = costed.layout, plan.batch.micro_batches, plan.groups[plan.stages[s].group]
    once = 1.0 if group.replicas > 1 else (count - 1) / count
    found = []
    for value, known in values:
        if known in rows:
            part = 1.0
            if costed.sharded >= 0:
                part = local_share(plan, group, layout.graph.parameters[known], "gradient")
            place = gradient_place(places, graph.gradients[value]) if value in graph.gradients else float("inf")
            found.append((place, rows[known], part * (1.0 if known in layout.tied_values else once)))
    return [row for row in found if row[2] > 0]


def _buckets(
    lowering: Lowering, plan: Plan, costed: Costed, s: int, flow: Flow | None, places: Places,
    values: list[tuple[int, int]], settings: FineSettings,
) -> list[Bucket]:  # fmt: skip
    """The collectives of the stage's gradient reduction."""
    number = next((i for i, r in enumerate(costed.reductions) if r.stage == s), None)
    if number is None:
        return []
    graph, layout, problem = places.graph, costed.layout, lowering.problem
    if flow is not None:
        group = plan.groups[plan.stages[s].group]
        makers = graph.flat.kernel_value_kernel
        reduced = [
            (float(places.backward[makers[value]]) + 0.5, steps)
            for value, steps in step_rows(flow, group, problem.cluster)
        ]
        return buckets_of(reduced, settings.bucket_bytes)
    members = tuple(r.groups for r in costed.reductions)
    concurrent = lowering.groups.concurrent[costed.arrangement.groups_number, members][number]
    ranks = tuple(d for g in members[number] for d in plan.groups[g].devices)
    dtype = problem.training.gradient_dtype or problem.training.precision
    own = set(layout.own[s].tolist())
    rows = []
    for value, known in values:
        if known in own:
            size = state_of(layout.graph, problem.training, [known]).gradients
            place = gradient_place(places, graph.gradients[value]) if value in graph.gradients else float("inf")
            rows.append((place + 0.25, (Steps("dp", (Collective("all_reduce", size, ranks, concurrent, dtype),)),)))
    return buckets_of(rows, settings.bucket_bytes)
