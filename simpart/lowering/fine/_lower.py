"""From a plan to a fine-grain Program: kernels on a compute stream per group, collectives on a stream per mesh axis.

The coarse program gives the order of actions, the transfers between groups and what is held; here each action becomes
a chain of kernels and collectives (`_chain`), gradients go out in buckets as backward completes them (`_buckets`), and
everything is put on streams (`_tasks`). Prices are those of the coarse grain, so the work is the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simpart.lowering import Costed, Lowering
from simpart.lowering.fine._chain import COMPUTE, Item
from simpart.lowering.fine._classes import Classes, collective_words
from simpart.lowering.fine._settings import FineSettings
from simpart.lowering.fine._stage import ActionChain, StageChains, stage_chains
from simpart.lowering.fine._tasks import Pattern, expand
from simpart.lowering.fine._traffic import traffic
from simpart.lowering.flows import LinkUse, flows_of
from simpart.lowering.footprint import BUFFERS
from simpart.lowering.group_costs import BUCKET_BYTES
from simpart.lowering.ledger import ClassCost, Ledger, Priced, class_cost, moving
from simpart.lowering.sharded import bucketed
from simpart.lowering.topology.arrays import KINDS
from simpart.plan import Plan
from simpart.program import Durations, MemoryDeltas, Program, TaskKind, Topology
from simpart.sharding.mesh import axis_members

__all__ = ["lower_fine"]

Floats = npt.NDArray[np.float64]
ALONE = (True, True)
SEND, REDUCE, OPTIMIZER, COLLECTIVE = map(int, (
    TaskKind.SEND, TaskKind.REDUCE, TaskKind.OPTIMIZER, TaskKind.COLLECTIVE
))  # fmt: skip


def lower_fine(lowering: Lowering, plan: Plan, settings: FineSettings) -> Program:
    """The plan's kernels and collectives as tasks with durations and memory."""
    costed = lowering.cost(plan)
    base = lowering.topology(plan, costed, "tasks")
    held, chosen = lowering.memory(plan, costed, base)
    builder = _Builder(lowering, plan, costed, base, settings)
    topology = builder.topology()
    classes = builder.classes
    ledger = Ledger(len(classes.costs))
    for row, cost in enumerate(classes.costs):
        ledger.add(row, cost)
    facts = replace(
        lowering.facts(plan, costed, chosen),
        inside=(),
        class_axes=tuple(classes.axes),
        class_overhead_s=np.array(classes.overhead_s),
    )
    return Program(
        topology=topology,
        durations=Durations(task_s=ledger.total, lag_s=np.zeros(1)),
        memory=builder.memory(held),
        multiplicity=tuple(group.replicas for group in plan.groups),
        spread=ledger.spread(),
        facts=facts,
        flows=flows_of(lowering.problem.cluster, builder.uses()),
        grain="fine",
    )


class _Builder:
    """Classes and patterns of one plan."""

    def __init__(self, lowering: Lowering, plan: Plan, costed: Costed, base: Topology, settings: FineSettings) -> None:
        self.lowering, self.plan, self.costed, self.base, self.settings = lowering, plan, costed, base, settings
        self.problem, self.communication = lowering.problem, lowering.actions.communication
        self.classes = Classes()
        self.axes = list(dict.fromkeys(["dp", *(name for group in plan.groups for name, _ in group.axes)]))
        self.rows = int(base.resource_indptr[base.groups])
        self.last = [self._last(s) for s in range(len(plan.stages))]
        self.stages = [self._stage(s) for s in range(len(plan.stages))]
        every = [c for stage in self.stages for a in stage.chains for i in a.chain.items for c in i.collectives]
        self.communication.of(every)  # all at once
        self.costs = {
            id(item): self._cost(s, stage, kind, action, item)
            for s, stage in enumerate(self.stages)
            for kind, action in [*stage.actions.items(), *([(self._last_kind(s), stage.last)] if stage.last else [])]
            for item in action.chain.items
        }
        self.beside = self._beside()

    # --- what runs ----------------------------------------------------------------------------------------------------
    def _last(self, s: int) -> int:
        """The task after which the gradients of a stage are complete on the group that reduces them."""
        base = self.base
        ours = (base.stage[: self.rows] == s) & (base.resource[: self.rows] == self.plan.stages[s].group)
        done = ours & np.isin(base.kind[: self.rows], (TaskKind.BACKWARD, TaskKind.BACKWARD_WEIGHT))
        return int(np.flatnonzero(done)[-1]) if done.any() else -1

    def _last_kind(self, s: int) -> str:
        """The kind of that task."""
        return KINDS[int(self.base.kind[self.last[s]])]

    def _stage(self, s: int) -> StageChains:
        kind = self.base.kind[: self.rows]
        mine = np.unique(kind[(self.base.stage[: self.rows] == s) & (kind < SEND)])
        kinds = [KINDS[k] for k in mine.tolist()]
        last = None if self.last[s] < 0 else self._last_kind(s)
        return stage_chains(self.lowering, self.plan, self.costed, s, kinds, last, self.settings)

    def _coarse_action(self, s: int, kind: str) -> ClassCost:
        """The action of the coarse grain, which says how long the host keeps it waiting."""
        return self.costed.costs[4 * s + KINDS.index(kind)]

    def _cost(self, s: int, stage: StageChains, kind: str, action: ActionChain, item: Item) -> ClassCost:
        """What an item takes when nothing slows it down, the first with what the host takes of the action. Its own
        error is shared by equal kernels or collectives."""
        device = action.variant.device
        if item.collectives:
            priced = [(row, 1.0) for row in self.communication.of(item.collectives)]
            words = collective_words(item.axis, item.collectives, item.what)
            return class_cost(f"{words}, {sum(c.bytes for c in item.collectives)} bytes", (), priced)
        source = f"{device.name} {'F' if kind == 'F' else 'B'} {action.words(item)}"
        row, weight = action.content(item)
        each = action.kernels.seconds.size
        rows = each + action.accumulations.seconds.size
        counts = np.bincount(row, weights=weight, minlength=rows).astype(np.float64)
        amounts = [(action.kernels.total(counts[:each]), device.name)]
        if counts[each:].any():
            amounts.append((action.accumulations.total(counts[each:]), device.name))
        first, last = action.ends(item)
        copies = [(moving(stage.copies_s, device), 1.0)] if kind == "F" and last else []
        if not first:
            return class_cost(source, amounts, copies)
        overhead_s, waiting = self.problem.costs.action_overhead_s, self._coarse_action(s, kind).waiting
        return class_cost(source, amounts, copies, overhead_s, waiting=waiting)

    def _beside(self) -> Floats:
        """Part of each group's actions beside which its transfers go on, as in the coarse grain: those of a
        micro-batch, spread evenly over a forward and a backward."""
        stages, layout, costs = len(self.plan.stages), self.costed.layout, self.costed.costs
        sending, working = np.zeros((2, len(self.plan.groups)))
        for stage, chains in zip(self.plan.stages, self.stages, strict=True):
            for kind in "FB" if "B" in chains.actions else "FIW":
                items = chains.actions[kind].chain.items if kind in chains.actions else []
                working[stage.group] += sum(self.costs[id(item)].seconds for item in items)
        for e, edge in enumerate(layout.edges):
            both = costs[4 * stages + 2 * e].seconds + costs[4 * stages + 2 * e + 1].seconds
            for end in (edge.source, edge.target):
                sending[self.plan.stages[end].group] += both
        return np.minimum(1.0, np.divide(sending, working, out=np.zeros_like(working), where=working > 0))

    # --- classes and patterns -----------------------------------------------------------------------------------------
    def topology(self) -> Topology:
        base, count = self.base, len(self.plan.stages)
        kind, coarse = base.kind[: self.rows], base.task_class[: self.rows]
        patterns: list[Pattern] = []
        number_of: dict[int, int] = {}
        for cost, name in self._coarse(4 * count, 2 * len(self.costed.layout.edges)):
            self.classes.add(cost, name)  # transfers come first, in their order
        for c in np.unique(coarse).tolist():
            s, letter = divmod(c, 4)
            if c < 4 * count:
                patterns.append(self._action(s, KINDS[letter], self.stages[s].actions[KINDS[letter]]))
            else:
                patterns.append(self._tail(c, int(kind[np.flatnonzero(coarse == c)[0]])))
            number_of[c] = len(patterns) - 1
        table = np.full(len(base.class_names), -1, dtype=np.int64)
        table[list(number_of)] = list(number_of.values())
        pattern_of = table[coarse]
        for s, (stage, last) in enumerate(zip(self.stages, self.last, strict=True)):
            if stage.last is not None:
                patterns.append(self._action(s, self._last_kind(s), stage.last))
                pattern_of[last] = len(patterns) - 1
        names = tuple(self.classes.names)
        return expand(base, pattern_of, patterns, self.axes, self.settings.prefetch, -4 * count, names)

    def _coarse(self, first: int, count: int) -> list[tuple[ClassCost, str]]:
        rows = slice(first, first + count)
        return list(zip(self.costed.costs[rows], self.base.class_names[rows], strict=True))

    def _action(self, s: int, kind: str, action: ActionChain) -> Pattern:
        """Equal runs of kernels within a stage, and equal collectives of a group, are one class."""
        items, group, classes = action.chain.items, self.plan.stages[s].group, self.classes
        computing = sum(self.costs[id(item)].seconds for item in items if item.computes)
        sending = sum(self.costs[id(item)].seconds for item in items if item.beside)
        part = min(1.0, self.beside[group] + (sending / computing if computing > 0 else 0.0))
        slowdown = self.problem.costs.overlap_slowdown * part if self.settings.slowdown else 0.0
        numbers = []
        for item in items:
            ends, cost = action.ends(item), self.costs[id(item)]
            mine = (s, kind, ends) if item.stream == COMPUTE else ()
            coarse = 4 * s + KINDS.index(kind) if item.stream == COMPUTE else -1
            key: tuple[object, ...] = (group, item.axis, item.what, item.reduces, item.collectives, *mine)
            if item.computes:
                key = (*mine, action.variant, slowdown, *(part.tobytes() for part in action.content(item)))
            if key not in classes.known:
                if item.collectives:
                    words = collective_words(item.axis, item.collectives, item.what)
                    number = classes.add(cost, words, axis=item.axis, coarse=coarse, ends=ends)
                    classes.sent[number] = (group, item.axis, item.collectives)
                else:
                    extra = cost.seconds * slowdown
                    cost = cost._replace(seconds=cost.seconds + extra, fixed_s=cost.fixed_s + extra)
                    name = f"{kind} of stage {s}" + ("" if ends == ALONE else f": {action.words(item)}")
                    overhead = self._coarse_action(s, kind).overhead_s if ends[0] else 0.0
                    number = classes.add(cost, name, coarse=coarse, ends=ends, overhead_s=overhead)
                classes.known[key] = number
            numbers.append(classes.known[key])
        edges = [(i, wait) for i, item in enumerate(items) for wait in item.waits]
        gathers = [(i, item.gathers) for i, item in enumerate(items) if item.gathers >= 0]
        kinds = [KINDS.index(kind) if i.computes else REDUCE if i.reduces else COLLECTIVE for i in items]
        streams = [0 if i.stream == COMPUTE else 1 + self.axes.index(i.stream) for i in items]
        return _pattern(streams, numbers, kinds, edges, action.chain.exit, gathers)

    def _tail(self, c: int, kind: int) -> Pattern:
        """Reductions that are sent in buckets are nothing by themselves; the gather of updated parameters follows the
        update on the streams of its axes."""
        cost, name = self._coarse(c, 1)[0]
        first_reduction = 4 * len(self.plan.stages) + 2 * len(self.costed.layout.edges)
        if kind == REDUCE:
            reduction = self.costed.reductions[c - first_reduction]
            if reduction.stage >= 0 and self.settings.overlap:
                cost = class_cost("")
            number = self.classes.add(cost, name, axis=reduction.axis, coarse=c, ends=ALONE)
            return _pattern([0], [number], [REDUCE], [], 0, [])
        group = c - first_reduction - len(self.costed.reductions)
        by_axis = self._updated(group) if self.settings.overlap else {}
        if by_axis:
            cost = class_cost(cost.source, cost.amounts, cost.priced[-1:])
        numbers = [self.classes.add(cost, name, coarse=c, ends=ALONE)]
        for axis, priced in by_axis.items():
            after = class_cost("reductions", (), priced)
            numbers.append(self.classes.add(after, f"{axis} all-gather of updated parameters", axis=axis))
        streams = [0, *(1 + self.axes.index(axis) for axis in by_axis)]
        edges = [(i, 0) for i in range(1, len(numbers))]
        return _pattern(streams, numbers, [OPTIMIZER] + [COLLECTIVE] * len(by_axis), edges, 0, [])

    def _updated(self, g: int) -> dict[str, list[tuple[Priced, float]]]:
        """What brings updated parameters back to where they rest, by axis."""
        if self.costed.sharded < 0:
            return {}
        largest = max(self.costed.arrangement.variants[g], key=lambda v: v.micro_batch)
        sent = [
            x
            for s, stage in enumerate(self.plan.stages) if stage.group == g
            for x in self.lowering.actions.share(self.plan, self.costed.layout, s, largest).sent
            if x.per_step and x.role == "update"
        ]  # fmt: skip
        found = {}
        for axis in dict.fromkeys(x.axis for x in sent):
            calls = bucketed([x for x in sent if x.axis == axis], "update", BUCKET_BYTES)
            prices = self.communication.of([collective for collective, _ in calls])
            found[axis] = [(row, float(times)) for row, (_, times) in zip(prices, calls, strict=True)]
        return found

    # --- what is held, what is sent -----------------------------------------------------------------------------------
    def memory(self, held: MemoryDeltas) -> MemoryDeltas:
        """As in the coarse grain: an action takes what it keeps when it begins and gives back when it ends. Besides,
        parameters gathered ahead are held while its kernels run."""
        classes = self.classes
        start, end, within = (
            classes.rows(t, which) for t, which in ((held.start, 0), (held.end, 1), (held.within, None))
        )
        for s, stage in enumerate(self.stages):
            for kind, action in stage.actions.items():
                ahead = self._ahead(s, action)
                if ahead > 0:
                    mine = np.array([coarse == 4 * s + KINDS.index(kind) for coarse in classes.coarse])
                    within[mine, BUFFERS] += ahead
        return MemoryDeltas(static=held.static, late=held.late, start=start, end=end, within=within)

    def _ahead(self, s: int, action: ActionChain) -> float:
        """The most bytes of gathers that are ahead or in use at once, but for the largest tensor that the coarse grain
        counts."""
        sizes = np.array(action.gathered_bytes, dtype=np.float64)
        if sizes.size == 0 or not self.settings.overlap:
            return 0.0
        width = min(sizes.size, self.settings.prefetch + 1)
        most = np.convolve(sizes, np.ones(width), "valid").max()
        share = self.lowering.actions.share(self.plan, self.costed.layout, s, action.variant)
        return max(0.0, float(most) - share.largest_bytes)

    def uses(self) -> list[LinkUse]:
        """Bytes over links of each class."""
        coarse = self.lowering.groups.uses(self.plan, self.costed)
        names = {name: use for name, use in zip(self.base.class_names, coarse, strict=True) if use}
        cluster, found = self.problem.cluster, []
        for c, (name, seconds) in enumerate(zip(self.classes.names, self.classes.costs, strict=True)):
            if c in self.classes.sent:
                group, axis, collectives = self.classes.sent[c]
                found.append(traffic(cluster, axis_members(self.plan.groups[group], axis), collectives))
            else:
                found.append(names.get(name, {}) if seconds.seconds > 0 else {})
        return found


def _pattern(
    streams: list[int], classes: list[int], kinds: list[int], edges: list[tuple[int, int]], leaves: int,
    gathers: list[tuple[int, int]],
) -> Pattern:  # fmt: skip
    waits, ahead = (np.array(pairs, dtype=np.int64).reshape(-1, 2) for pairs in (edges, gathers))
    return Pattern(
        stream=np.array(streams), task_class=np.array(classes), kind=np.array(kinds), waiting=waits[:, 0],
        awaited=waits[:, 1], exit=leaves, gathers=ahead[:, 0], users=ahead[:, 1],
    )  # fmt: skip
