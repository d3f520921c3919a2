"""The cost graph of a whole training step on one mesh, and the sharding that a choice in it stands for.

Variables: the strategy of every kernel class (instances of a template share it), where every parameter rests with its
gradient and optimizer state, and, for a value with several readers, in which layouts it is made available; each is
converted once however many readers share it. The cost is the seconds of a step that all stages together take: kernels,
exchanges inside them and conversions of every micro-batch, and once per step what brings gradients to the optimizer,
its update and what brings parameters back. Rows are the bytes of one device of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

import numpy as np

from simpart.cost import Collective, CollectiveKind
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES
from simpart.lowering.transfers import CommPrices, sharing
from simpart.memory import state_table
from simpart.placement import Halo, Placement, Replicate, Shard, Sharding, StatePlacement
from simpart.plan import REPLICA_AXIS, DeviceGroup
from simpart.problem import Problem
from simpart.searchers._cost_graph import CostGraph, Floats, Ints, Row, Table
from simpart.searchers._rhino.choices import Choices, choices
from simpart.searchers._rhino.conversions import ConversionTimes, Key, shard_fraction
from simpart.searchers._rhino.guess import stashed_values
from simpart.searchers._rhino.settings import slowest_row
from simpart.searchers._rhino.wires import Maker, ValueGroup, Wires, wires_of
from simpart.sharding._regions import wiring_of
from simpart.sharding.mesh import Axes, Layout, axis_members
from simpart.sharding.patterns import by_pattern

__all__ = ["Mesh", "MeshModel", "StageLoad"]

BUCKET_BYTES = 25 << 20
MOST_SETS = 160
"""Sets of layouts in which a value is made available; more readers than this are offered one layout or two alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Where a stage runs: devices of the first stage, replicas and sharding axes (outermost first), and how often."""

    group: DeviceGroup
    replicas: int
    axes: Axes
    micro_batch: int
    micro_batches: int
    stages: int
    zero: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLoad:
    """What one stage holds: its ops, micro-batches in flight, and bytes of a device for all that is counted."""

    name: str
    ops: Ints
    in_flight: int
    limit_bytes: float


@dataclass(slots=True)
class _Draft:
    """A cost graph being written."""

    unary: list[Floats] = field(default_factory=list)
    edges: list[tuple[int, int, Table]] = field(default_factory=list)
    weights: list[dict[int, Floats]] = field(default_factory=list)  # per row

    def variable(self, costs: Floats) -> int:
        self.unary.append(costs)
        return len(self.unary) - 1

    def weigh(self, row: int, variable: int, weights: Floats) -> None:
        known = self.weights[row]
        known[variable] = known[variable] + weights if variable in known else weights


class MeshModel:
    """Problem × mesh as a cost graph; `graph` is what the solver gets."""

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh,
        loads: Sequence[StageLoad],
        regions: Ints | None = None,
        allowed: Mapping[tuple[int, str], Mapping[tuple[str, int], Placement]] | None = None,
        rests: Mapping[Maker, Mapping[str, Placement]] | None = None,
        communication: CommPrices | None = None,
        known: tuple[list[Choices], ConversionTimes] | None = None,
    ) -> None:
        """`regions`: per op the number of the region that backward runs again, or -1; `allowed` as in `choices`;
        `rests` pins where parameters rest, per axis; `known` are the prices of another model of the same mesh."""
        self.problem, self.mesh = problem, mesh
        self.source: Graph = problem.graph.at(mesh.micro_batch)
        self.wires: Wires = wires_of(self.source)
        self.prices = communication or CommPrices(problem.costs.communication, problem.cluster)
        self._rests = rests or {}
        self._regions = np.full(len(self.source.flat.op_class), -1) if regions is None else regions
        # a step takes about (micro-batches + stages - 1) × the time of a stage: an equal share of all work
        self._per_micro_batch = (mesh.micro_batches + mesh.stages - 1) / mesh.stages
        self._per_step = 1.0 / mesh.stages
        if known is None:
            found = choices(
                self.source, mesh.micro_batch, mesh.group, mesh.axes, problem.cluster, problem.costs, self.prices,
                allowed or {},
            )  # fmt: skip
            known = found, ConversionTimes(mesh.group, mesh.axes, problem.cluster, self.prices)
        self.choices, self._times = known
        self._loads = loads
        self._draft = _Draft(weights=[{} for _ in loads])
        self._rest_of: dict[Maker, int] = {}
        self.rest_options: dict[Maker, list[tuple[Layout, int]]] = {}
        self._graph: CostGraph | None = None

    @property
    def known(self) -> tuple[list[Choices], ConversionTimes]:
        """Prices, for other models of the same mesh."""
        return self.choices, self._times

    @property
    def graph(self) -> CostGraph:
        """What the solver gets; made when first asked for."""
        if self._graph is None:
            self._graph = self._build()
        return self._graph

    @property
    def without_strategy(self) -> str:
        """Kernels that pins leave no strategy; "" where all have some."""
        ids, kernel_class = wiring_of(self.source).ids, self.source.flat.kernel_class
        stuck = [cls for cls, found in enumerate(self.choices) if not found.splits and self.wires.count[cls]]
        return ", ".join(ids[int(np.argmax(kernel_class == cls))] for cls in stuck)

    @property
    def floor_s(self) -> float:
        """What the kernels alone take, each at its fastest."""
        times = self._runs() * self._per_micro_batch
        return float(sum(t * np.min(c.compute_s + c.exchange_s) for t, c in zip(times, self.choices, strict=True)))

    def _runs(self) -> Floats:
        """Times that each kernel class runs per micro-batch, in all stages together."""
        flat = self.source.flat
        again = flat.kernel_forward & (self._regions[flat.kernel_op] >= 0)
        count = self.wires.count + np.bincount(flat.kernel_class[again], minlength=len(self.wires.count))
        return count.astype(np.float64)

    # --- the graph ----------------------------------------------------------------------------------------------------
    def _build(self) -> CostGraph:
        for found, times in zip(self.choices, self._runs(), strict=True):
            self._draft.variable((found.compute_s + found.exchange_s) * times * self._per_micro_batch)
        groups = [g for g in self.wires.groups if g.readers]
        for group in groups:
            self._times.want(self._key(group.maker), self._left(group.maker))
            for reader in group.readers:
                self._times.want(self._key(group.maker), self._needed(reader))
        for maker, (source, _, _) in self.wires.sources.items():
            if source.kind == "parameter":
                self._rest(maker)
        for (parameter, gradient), _ in self.wires.gradients.items():
            key = self._key(gradient)
            self._times.want(key, self._left(gradient))
            self._times.want(key, [layout for layout, _ in self.rest_options[parameter]])
        for group in groups:
            self._connect(group)
        for (parameter, gradient), values in self.wires.gradients.items():
            self._return_gradient(parameter, gradient, len(values))
        for number, load in enumerate(self._loads):
            self._weigh_activations(number, load)
        return CostGraph(
            unary=tuple(self._draft.unary),
            edges=tuple(self._draft.edges),
            rows=tuple(
                Row(limit=load.limit_bytes, weights=tuple(sorted(weights.items())), name=f"memory of {load.name}")
                for load, weights in zip(self._loads, self._draft.weights, strict=True)
            ),
        )

    def _key(self, maker: Maker) -> Key:
        if maker[0] == "kernel":
            spec = self.source.kernel_classes[maker[1]].outputs[maker[2]]
        else:
            spec = self.wires.sources[maker][0].spec
        return spec.shape(self.mesh.micro_batch), spec.dtype

    def _whole(self) -> Layout:
        return (Replicate(),) * len(self.mesh.axes)

    def _left(self, maker: Maker) -> list[Layout]:
        """Layouts in which a value may be left, by option of its maker."""
        if maker[0] == "kernel":
            return [outputs[maker[2]] for outputs in self.choices[maker[1]].outputs]
        if maker in self.rest_options:
            return [layout for layout, _ in self.rest_options[maker]]
        return [self._whole()]

    def _needed(self, reader: tuple[int, int]) -> list[Layout]:
        return [inputs[reader[1]] for inputs in self.choices[reader[0]].inputs]

    def _variable(self, maker: Maker) -> int | None:
        return maker[1] if maker[0] == "kernel" else self._rest_of.get(maker)

    def _connect(self, group: ValueGroup) -> None:
        """Conversions of a value to its readers."""
        variable = self._variable(group.maker)
        if variable is None and not any(isinstance(p, Halo) for r in group.readers for n in self._needed(r) for p in n):
            return  # inputs and constants are whole everywhere: parts of them cost nothing
        key, left = self._key(group.maker), self._left(group.maker)
        forward = self.source.kernel_classes[group.readers[0][0]].phase == "F"
        ops = self.source.flat.kernel_op[group.reader_kernel]
        times = len(group.values) + (int((self._regions[ops] >= 0).sum()) if forward else 0)
        weight = times * self._per_micro_batch
        if len(group.readers) == 1 or len({t for r in group.readers for t in self._needed(r)}) == 1:
            needed = self._needed(group.readers[0])
            table = self._times.table(key, left, needed) * weight
            if variable is None:
                self._draft.unary[group.readers[0][0]] = self._draft.unary[group.readers[0][0]] + table[0]
            else:
                self._draft.edges.append((variable, group.readers[0][0], table))
            return
        targets = list(dict.fromkeys(t for reader in group.readers for t in self._needed(reader)))
        sets = _sets(targets)
        each = self._times.table(key, left, targets) * weight
        with np.errstate(invalid="ignore"):
            costs = np.stack([each[:, list(chosen)].sum(axis=1) for chosen in sets], axis=1)
        available = self._draft.variable(np.zeros(len(sets)))
        if variable is None:
            self._draft.unary[available] = self._draft.unary[available] + costs[0]
        else:
            self._draft.edges.append((variable, available, costs))
        member = np.full((len(sets), len(targets)), math.inf)
        for row, chosen in enumerate(sets):
            member[row, list(chosen)] = 0.0
        place = {t: n for n, t in enumerate(targets)}
        for reader in group.readers:
            self._draft.edges.append((available, reader[0], member[:, [place[t] for t in self._needed(reader)]]))
        self._weigh_copies(group, available, targets, sets, key)

    # --- parameters ---------------------------------------------------------------------------------------------------
    def _rest(self, maker: Maker) -> None:
        """A variable for where a parameter rests: layouts that readers ask for, each divided among replicas or not."""
        source, _, op_values = self.wires.sources[maker]
        shape = source.spec.shape(1)
        wanted: dict[Layout, None] = {self._whole(): None}
        for group in self.wires.groups:
            if group.maker == maker:
                for reader in group.readers:
                    wanted.update(dict.fromkeys(self._needed(reader)))
        gradients = [g for (p, g) in self.wires.gradients if p == maker]
        for gradient in gradients:
            wanted.update(dict.fromkeys(self._left(gradient)))
        pinned = self._rests.get(maker, {})
        wanted[tuple(pinned.get(name, Replicate()) for name, _ in self.mesh.axes)] = None
        layouts = [
            layout
            for layout in wanted
            if all(isinstance(p, Replicate | Shard) for p in layout)
            and all(pinned.get(name, p) == p for p, (name, _) in zip(layout, self.mesh.axes, strict=True))
        ]
        options = [
            (layout, zero)
            for layout in layouts
            for zero in self.mesh.zero
            if zero == 0 or (gradients and self._replica_dim(shape, layout) is not None)
        ]
        self.rest_options[maker] = options
        self._times.want(self._key(maker), [layout for layout, _ in options])
        table = state_table(self.source, self.problem.training)[:, op_values]
        trained = bool(gradients) and bool(table[3].any())
        costs = np.zeros(len(options))
        bytes_each = np.zeros(len(options))
        for n, (layout, zero) in enumerate(options):
            part = shard_fraction(shape, layout, self.mesh.axes)
            over = part / self.mesh.replicas
            parts = (over if zero > 2 else part, over if zero > 1 else part, over if zero > 0 else part)
            bytes_each[n] = float(np.dot(table[:3, 0], parts))  # parameter, gradient, optimizer state
            if trained:
                costs[n] = self._state_seconds(float(table[1, 0]) * part, float(table[0, 0]) * part, zero)
                costs[n] += self._update_seconds(int(op_values[0])) * (over if zero else part) * self._per_step
        self._rest_of[maker] = variable = self._draft.variable(costs * len(op_values))
        for row, load in enumerate(self._loads):
            held = len(np.intersect1d(op_values, self._held_values(load)))
            if held:
                self._draft.weigh(row, variable, bytes_each * held)

    def _held_values(self, load: StageLoad) -> Ints:
        reader, values = self.source.reads["parameter"]
        return np.unique(values[np.isin(reader, load.ops)])

    def _replica_dim(self, shape: tuple[int, ...], layout: Layout) -> int | None:
        taken = {p.dim for p in layout if isinstance(p, Shard)}
        if self.mesh.replicas == 1:
            return None
        return next((d for d, n in enumerate(shape) if d not in taken and n % self.mesh.replicas == 0), None)

    def _rate(self, kind: CollectiveKind, size: float) -> float:
        """Seconds over the replicas, in buckets."""
        if size <= 0 or self.mesh.replicas == 1:
            return 0.0
        members = axis_members(self.mesh.group, REPLICA_AXIS)
        row, shared = slowest_row(self.problem.cluster, members), max(sharing(self.problem.cluster, members))
        return self.prices.of([Collective(kind, BUCKET_BYTES, row, shared)])[0].seconds * size / BUCKET_BYTES

    def _state_seconds(self, gradient: float, parameter: float, zero: int) -> float:
        """What replicas exchange for one parameter in a step, as a share of what all stages take."""
        times = self.mesh.micro_batches
        if zero == 0:
            return self._rate("all_reduce", gradient) * self._per_step
        scatter = self._rate("reduce_scatter", gradient) * (times if zero > 1 else 1)
        gather = self._rate("all_gather", parameter) * (2 * times if zero > 2 else 1)
        return (scatter + gather) * self._per_step

    def _update_seconds(self, op_value: int) -> float:
        rows, update, _ = self.problem.update_prices(self.problem.cluster.device(next(iter(self.mesh.group.devices))))
        return float(update.seconds[rows[op_value]]) if op_value in rows else 0.0

    def _return_gradient(self, parameter: Maker, gradient: Maker, times: int) -> None:
        """A gradient that rests whole is summed once per step; one that rests in shards, after every micro-batch."""
        variable = self._variable(gradient)
        if variable is None:
            return
        left = self._left(gradient)
        layouts = [layout for layout, _ in self.rest_options[parameter]]
        seconds = self._times.table(self._key(gradient), left, layouts)
        often = np.array(
            [
                [
                    self._per_micro_batch
                    if any(isinstance(w, Shard) and p != w for p, w in zip(place, rest, strict=True))
                    else self._per_step
                    for rest in layouts
                ]
                for place in left
            ]
        )
        self._draft.edges.append((variable, self._rest_of[parameter], seconds * often * times))

    # --- memory -------------------------------------------------------------------------------------------------------
    def _weigh_activations(self, row: int, load: StageLoad) -> None:
        flat = self.source.flat
        stashed = stashed_values(self.source, self.mesh.micro_batch, self._regions)
        inside = np.zeros(len(flat.op_class), dtype=bool)
        inside[load.ops] = True
        values = np.flatnonzero(stashed)
        makers = flat.kernel_value_kernel[values]
        here = inside[flat.kernel_op[makers]]
        values, makers = values[here], makers[here]
        number = values - flat.kernel_outputs[makers]
        pairs, counts = np.unique(np.stack([flat.kernel_class[makers], number]), axis=1, return_counts=True)
        for cls, output, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            shape, dtype = self._key(("kernel", cls, output))
            whole = prod(shape) * DTYPE_BYTES[dtype]
            parts = [shard_fraction(shape, layout, self.mesh.axes) for layout in self._left(("kernel", cls, output))]
            self._draft.weigh(row, cls, np.array(parts) * whole * count * load.in_flight)

    def _weigh_copies(
        self, group: ValueGroup, variable: int, targets: Sequence[Layout], sets: Sequence[tuple[int, ...]], key: Key
    ) -> None:
        """Converted values that forward makes and backward reads again are kept: all of a set but the largest, which
        stands for the value itself."""
        phases = {self.source.kernel_classes[cls].phase for cls, _ in group.readers}
        if phases != {"F", "B"}:
            return
        whole = prod(key[0]) * DTYPE_BYTES[key[1]]
        sizes = np.array([shard_fraction(key[0], t, self.mesh.axes) * whole for t in targets])
        extra = np.array([sizes[list(chosen)].sum() - sizes[list(chosen)].max() for chosen in sets])
        if not extra.any():
            return
        ops = self.source.flat.kernel_op[group.reader_kernel]
        for row, load in enumerate(self._loads):
            held = int(np.isin(ops[self._regions[ops] < 0], load.ops).sum())
            if held:
                self._draft.weigh(row, variable, extra * held * load.in_flight)

    # --- answers ------------------------------------------------------------------------------------------------------
    @property
    def work(self) -> Floats:
        """Per variable the least time of its kernels, 0 for what is no kernel: products stand out."""
        kernels = [float(found.compute_s[0]) for found in self.choices]
        return np.array(kernels + [0.0] * (len(self.graph.unary) - len(kernels)))

    def op_seconds(self, choice: Ints) -> Floats:
        """What each op takes per micro-batch, conversions aside; forward twice in regions that run again."""
        flat = self.source.flat
        each = np.array([float(c.compute_s[x] + c.exchange_s[x]) for c, x in zip(self.choices, choice, strict=False)])
        times = np.where(flat.kernel_forward & (self._regions[flat.kernel_op] >= 0), 2.0, 1.0)
        return np.bincount(flat.kernel_op, each[flat.kernel_class] * times, len(flat.op_class)).astype(np.float64)

    def sharding(self, choice: Ints) -> Sharding:
        """Strategies of kernel classes that do not replicate."""
        names = wiring_of(self.source).name_of_class
        found = []
        for cls, options in enumerate(self.choices):
            strategy = options.strategy(int(choice[cls]), self.mesh.axes)
            if strategy is not None and cls in names:
                found.append((names[cls], strategy))
        return Sharding(classes=tuple(found))

    def state(self, choice: Ints) -> tuple[tuple[str, StatePlacement], ...]:
        """Where parameters rest."""
        return by_pattern(self.source, self.state_table(choice))

    def state_table(self, choice: Ints) -> dict[int, StatePlacement]:
        """Where parameters rest that don't rest whole, by op-level value."""
        table: dict[int, StatePlacement] = {}
        for maker, variable in self._rest_of.items():
            layout, zero = self.rest_options[maker][int(choice[variable])]
            source, _, op_values = self.wires.sources[maker]
            own = tuple((name, p) for p, (name, _) in zip(layout, self.mesh.axes, strict=True) if isinstance(p, Shard))
            dim = self._replica_dim(source.spec.shape(1), layout)
            split = ((REPLICA_AXIS, Shard(dim)),) if zero and dim is not None else ()
            rest = StatePlacement(
                parameter=(*(split if zero > 2 else ()), *own),
                gradient=(*(split if zero > 1 else ()), *own),
                optimizer=(*split, *own),
            )
            table.update(dict.fromkeys(op_values.tolist(), rest))
        plain = StatePlacement()
        return {value: rest for value, rest in table.items() if rest != plain}

    def block_shares(self, choice: Ints, block_of: Ints, blocks: int) -> tuple[Floats, Floats, Floats]:
        """By block of ops (-1: none): seconds of a step with its conversions, bytes of state, bytes kept per
        micro-batch. A variable's cost is shared among blocks as its instances are."""
        shares = self._shares(block_of, blocks)
        seconds = np.array([float(costs[x]) for costs, x in zip(self.graph.unary, choice, strict=True)])
        for i, j, table in self.graph.edges:
            seconds[i] += float(table[choice[i], choice[j]])
        state, kept = np.zeros(blocks), np.zeros(blocks)
        rests = set(self._rest_of.values())
        for variable, weights in self._draft.weights[0].items():
            into = state if variable in rests else kept
            into += float(weights[choice[variable]]) * shares[variable]
        return seconds @ shares, state, kept / self._loads[0].in_flight

    def _shares(self, block_of: Ints, blocks: int) -> Floats:
        """Part of each variable in each block: a kernel class by its instances, a parameter by who reads it, a value
        with several readers as what makes it."""
        flat = self.source.flat
        shares = np.zeros((len(self.graph.unary), blocks))
        block = block_of[flat.kernel_op]
        np.add.at(shares, (flat.kernel_class[block >= 0], block[block >= 0]), 1.0)
        reader, values = self.source.reads["parameter"]
        for maker, variable in self._rest_of.items():
            found = block_of[reader[np.isin(values, self.wires.sources[maker][2])]]
            shares[variable] = np.bincount(found[found >= 0], minlength=blocks)
        for i, j, _ in self.graph.edges:
            if not shares[j].any():
                shares[j] = shares[i]
        total: Floats = shares.sum(axis=1, keepdims=True)
        return shares / np.where(total > 0, total, 1.0)

    def rest_layouts(self, choice: Ints) -> dict[Maker, tuple[Layout, int]]:
        """Layout on the sharding axes and ZeRO level of every parameter."""
        return {m: self.rest_options[m][int(choice[v])] for m, v in self._rest_of.items()}


def _sets(targets: Sequence[Layout]) -> list[tuple[int, ...]]:
    """One layout, or two: any two where they are few, else two that differ on one axis."""
    count = len(targets)
    found: list[tuple[int, ...]] = [(n,) for n in range(count)]
    pairs = list(combinations(range(count), 2))
    if count + len(pairs) > MOST_SETS:
        alike = [(a, b) for a, b in pairs if sum(p != q for p, q in zip(targets[a], targets[b], strict=True)) == 1]
        pairs = alike[: MOST_SETS - count]
    return found + pairs
