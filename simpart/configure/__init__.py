"""A plan from the configuration people state by hand: tp, pp, dp, micro-batch, schedule, recomputation, ZeRO."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from simpart.errors import ScheduleError, UnknownNameError, UserError
from simpart.graph import Graph, Op
from simpart.placement import Sharding
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.partition import clonable_ops
from simpart.problem import Problem
from simpart.schedule import LOOPED, SCHEDULES, Schedule, grid, placement, read_schedule
from simpart.sharding.combine import Degrees, shard

__all__ = [
    "RECOMPUTE",
    "SELECTIVE",
    "ZERO_BUBBLE",
    "Configuration",
    "attention_regions",
    "configure",
    "equal_layers",
    "layer_calls",
    "recompute_regions",
]

Ints = npt.NDArray[np.int64]
RECOMPUTE = ("none", "full")
SELECTIVE = "selective"
ZERO_BUBBLE = "zero-bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Parallel degrees as launch scripts state them. `dp` None takes the devices that the others leave; `micro_batch`
    is per replica. `sp` splits along the sequence what lies between tensor-parallel products; `vocab_parallel` None
    splits vocabularies where tp divides them; `ep` and `cp` split experts and sequences on axes of their own.
    `schedule` is a name, `zero-bubble` (an order made from the plan's own times within its devices' memory) or a .csv
    file of rows; `recompute` is none, full (layer by layer) or selective (of each layer its attention);
    `virtual_stages` are those of a group where the schedule goes round several times."""

    pp: int = 1
    dp: int | None = None
    tp: int = 1
    micro_batch: int | None = None
    schedule: str = "1f1b"
    recompute: str = "none"
    zero: int = 0
    sp: bool = False
    vocab_parallel: bool | None = None
    ep: int = 1
    cp: int = 1
    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "ep", "cp", "micro_batch", "virtual_stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, got {value}")
        if self.schedule not in (*SCHEDULES, ZERO_BUBBLE) and not self.schedule.endswith(".csv"):
            raise UnknownNameError("schedule", self.schedule, [*SCHEDULES, ZERO_BUBBLE, "FILE.csv"])
        if self.virtual_stages is not None and self.schedule not in LOOPED:
            raise UserError(f"virtual stages go with {', '.join(LOOPED)}, got schedule {self.schedule}; leave them out")
        if self.recompute not in (*RECOMPUTE, SELECTIVE):
            raise UnknownNameError("recomputation", self.recompute, (*RECOMPUTE, SELECTIVE))
        if not 0 <= self.zero <= 3:
            raise UserError(f"zero is 0, 1, 2 or 3, got {self.zero}")
        if self.tp == 1 and (self.sp or self.vocab_parallel):
            flag = "sp" if self.sp else "vocab-parallel"
            raise UserError(f"{flag} splits over the devices of tensor parallelism, got tp=1; give --tp too")


def configure(problem: Problem, configuration: Configuration) -> Plan:
    """The plan of a configuration: pp stages of equal layers, each on dp consecutive replicas of cp × ep × tp devices.

    Raises UserError, with values that would work, when the degrees do not fit the devices, the global batch or the
    model's dims.
    """
    size, pp = problem.cluster.size, configuration.pp
    degrees = Degrees(
        tp=configuration.tp,
        sp=configuration.sp,
        vocabulary=configuration.vocab_parallel,
        ep=configuration.ep,
        cp=configuration.cp,
        zero=configuration.zero,
    )
    replica = prod(n for _, n in degrees.axes)
    if configuration.dp is None and size % (pp * replica):
        if replica == 1:
            raise UserError(
                f"pp must divide the {size} devices when dp is not given, got pp={pp}; try {_divisors(size)}"
            )
        given = " × ".join([f"pp={pp}", *(f"{name}={n}" for name, n in degrees.axes)])
        raise UserError(f"{given} must divide the {size} devices when dp is not given; try products {_divisors(size)}")
    dp = configuration.dp or size // (pp * replica)
    if pp * dp * replica > size:
        given = " and ".join([f"pp={pp}", *([f"dp={dp}"]), *(f"{name}={n}" for name, n in degrees.axes)])
        raise UserError(
            f"{given} need {pp * dp * replica} devices, {problem.cluster.name} has {size}; lower one of them"
        )
    if configuration.zero and dp == 1:
        raise UserError(f"zero={configuration.zero} divides state among replicas and dp is 1; raise dp or use zero=0")
    micro_batch, count = split_batch(problem.global_batch, dp, configuration.micro_batch)
    graph = problem.graph.at(micro_batch)
    sharded = shard(graph, micro_batch, degrees, dp) if degrees.axes or degrees.zero else None
    name = "+".join(axis for axis, _ in degrees.axes) if sharded and sharded.sharding != Sharding() else None
    schedule, homes = _schedule(configuration)
    stages = _stages(graph, homes, configuration.recompute, name)
    width = dp * replica
    groups = tuple(
        DeviceGroup(devices=Devices.of(range(s * width, (s + 1) * width)), axes=(("dp", dp), *degrees.axes))
        for s in range(pp)
    )
    plan = Plan(
        graph=graph.fingerprint,
        groups=groups,
        stages=stages,
        batch=Batch(micro_batches=count, sizes=((micro_batch,) * dp,) * pp),
        schedule=schedule,
        shardings=((name, sharded.sharding),) if sharded and name else (),
        state=sharded.state if sharded else (),
        mode=problem.mode,
    )
    if configuration.schedule == ZERO_BUBBLE:
        from simpart.configure.scheduling import fit_schedule

        return fit_schedule(problem, plan)
    return plan


def _schedule(configuration: Configuration) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule and the group of each stage."""
    kind, pp = configuration.schedule, configuration.pp
    if kind in SCHEDULES:
        return Schedule(kind=kind), tuple(placement(kind, pp, configuration.virtual_stages or 2))
    if kind == ZERO_BUBBLE:
        return Schedule(), tuple(range(pp))
    schedule = read_schedule(kind)
    rows = schedule.explicit
    if len(rows) != pp:
        count = f"{len(rows)} row{'s' * (len(rows) > 1)}"
        raise UserError(f"schedule {kind} has {count} for {pp} groups; give --pp {len(rows)}")
    home = {action.stage: g for g, row in enumerate(rows) for action in row}
    missing = next(s for s in range(len(home) + 1) if s not in home)
    if missing < len(home):
        at = next((g, c) for g, row in enumerate(rows) for c, action in enumerate(row) if action.stage > missing)
        raise ScheduleError(
            f"schedule {kind} names stage {rows[at[0]][at[1]].stage}, but has no action of stage {missing}; count "
            "stages from 0 without a gap",
            grid(rows, at),
        )
    return schedule, tuple(home[s] for s in range(len(home)))


_staged: WeakKeyDictionary[Graph, dict[tuple[tuple[int, ...], str, str | None], tuple[Stage, ...]]]
_staged = WeakKeyDictionary()


def _stages(graph: Graph, homes: tuple[int, ...], recompute: str, sharding: str | None) -> tuple[Stage, ...]:
    """Stages of equal layers on these groups; made once, so that plans share them."""
    known = _staged.setdefault(graph, {})
    key = (homes, recompute, sharding)
    if key not in known:
        stage_of, stages = equal_layers(graph, len(homes)), []
        for s, group in enumerate(homes):
            ops = np.flatnonzero(stage_of == s)
            regions = recompute_regions(graph, ops) if recompute == "full" else ()
            if recompute == SELECTIVE:
                regions = attention_regions(graph, ops)
            stages.append(Stage(ops=OpSet.of(graph, ops), group=group, recompute=regions, sharding=sharding))
        known[key] = tuple(stages)
    return known[key]


def split_batch(global_batch: int, dp: int, micro_batch: int | None) -> tuple[int, int]:
    """(samples per replica and micro-batch, number of micro-batches). Default: the smallest, one sample."""
    if global_batch % dp:
        raise UserError(
            f"dp must divide the global batch, got dp={dp}, global batch {global_batch}; try {_divisors(global_batch)}"
        )
    share = global_batch // dp
    chosen = micro_batch or 1
    if share % chosen:
        raise UserError(
            f"micro-batch × dp must divide the global batch, got {chosen} × {dp} and {global_batch}; "
            f"try micro-batch {_divisors(share)}"
        )
    return chosen, share // chosen


_layers: WeakKeyDictionary[Graph, list[int]] = WeakKeyDictionary()


def layer_calls(graph: Graph) -> list[int]:
    """The calls of the template that makes up most of the graph's ops: its layers. Empty when none does."""
    if graph not in _layers:
        sizes: dict[int, int] = {}
        for call in graph.calls:
            sizes[call.template] = sizes.get(call.template, 0) + len(graph.templates[call.template].ops)
        template = max(sizes, key=lambda t: (sizes[t], -t))
        found = [i for i, call in enumerate(graph.calls) if call.template == template]
        _layers[graph] = found if len(found) > 1 and 2 * sizes[template] > sum(sizes.values()) else []
    return _layers[graph]


def equal_layers(graph: Graph, stages: int) -> Ints:
    """Stage of each op when every stage gets the same number of layers (the first stages one more where it does not
    divide), what stands before the first layer goes to the first stage, behind the last to the last. Where fewer
    layers than stages repeat, runs of ops with about equal FLOPs. Raises UserError for more stages than ops.
    """
    flat = graph.flat
    layers = layer_calls(graph)
    if len(layers) >= stages:
        share = [len(part) for part in np.array_split(np.arange(len(layers)), stages)]
        first_calls = [layers[k] for k in np.cumsum([0, *share[:-1]])]
        stage_of = np.searchsorted(np.array(first_calls), flat.op_call, side="right") - 1
        stage_of = np.maximum(stage_of, 0)
    else:
        stage_of = _equal_work(graph, stages)
    return _keep_groups_whole(graph, stage_of)


def _equal_work(graph: Graph, stages: int) -> Ints:
    """Runs of indivisible groups of about equal FLOPs, none empty."""
    from simpart.kernels.flops import op_class_flops

    flat, clonable = graph.flat, clonable_ops(graph)
    heads = _ordered_groups(graph)
    if stages > heads.size:
        raise UserError(
            f"pp must be at most {heads.size}, the ops that may stand in different stages, got pp={stages}; lower pp"
        )
    flops = np.where(clonable, 0.0, op_class_flops(graph, 2)[flat.op_class] + 1.0)
    weight = np.bincount(flat.op_group, weights=flops, minlength=flops.size)[heads]
    middle = np.cumsum(weight) - weight / 2
    starts = np.searchsorted(np.floor(middle / weight.sum() * stages), np.arange(stages))
    for s in range(1, stages):
        starts[s] = max(starts[s], starts[s - 1] + 1)
    starts = np.minimum(starts, heads.size - np.arange(stages, 0, -1))
    stage_of_group = np.zeros(flops.size, dtype=np.int64)
    stage_of_group[heads] = np.searchsorted(starts, np.arange(heads.size), side="right") - 1
    stage_of: Ints = stage_of_group[flat.op_group]
    own = np.flatnonzero(~clonable)  # a clone is written where the op before it is: then runs stay long
    before = np.maximum(np.searchsorted(own, np.arange(flops.size), side="right") - 1, 0)
    stage_of[clonable] = stage_of[own[before]][clonable]
    return stage_of


def _ordered_groups(graph: Graph) -> Ints:
    """Indivisible groups that are no clones, by their first op, each after those it reads."""
    flat, clonable = graph.flat, clonable_ops(graph)
    consumer = np.repeat(np.arange(flat.op_class.size), np.diff(flat.op_indptr))
    producer = flat.value_op[flat.op_inputs]
    real = (producer >= 0) & ~clonable[consumer] & ~clonable[producer]
    pairs = np.unique(np.stack([flat.op_group[producer[real]], flat.op_group[consumer[real]]], axis=1), axis=0)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    readers: dict[int, list[int]] = {}
    for source, target in pairs.tolist():
        readers.setdefault(source, []).append(target)
    missing = np.bincount(pairs[:, 1], minlength=flat.op_class.size)
    ready = [head for head in np.unique(flat.op_group[~clonable]).tolist() if not missing[head]]
    order = []
    while ready:
        head = heapq.heappop(ready)
        order.append(head)
        for reader in readers.get(head, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    return np.array(order, dtype=np.int64)


def _keep_groups_whole(graph: Graph, stage_of: Ints) -> Ints:
    """Ops of an indivisible group go where its last op is, and ops in between with them if values would otherwise
    flow back."""
    flat = graph.flat
    last = np.zeros(len(stage_of), dtype=np.int64)
    np.maximum.at(last, flat.op_group, stage_of)
    moved = last[flat.op_group]
    producers = flat.value_op[flat.op_inputs]
    consumer = np.repeat(np.arange(len(moved)), np.diff(flat.op_indptr))
    clonable = clonable_ops(graph)
    for _ in range(len(moved)):
        real = (producers >= 0) & ~clonable[np.maximum(producers, 0)] & ~clonable[consumer]
        raised = moved.copy()
        np.maximum.at(raised, consumer[real], moved[producers[real]])
        np.maximum.at(last, flat.op_group, raised)
        raised = last[flat.op_group]
        if (raised == moved).all():
            break
        moved = raised
    return moved


_regions: WeakKeyDictionary[Graph, tuple[Ints, dict[int, OpSet]]] = WeakKeyDictionary()


def recompute_regions(graph: Graph, ops: Ints) -> tuple[OpSet, ...]:
    """One region per layer that lies in `ops` whole; where nothing repeats, one region of all ops that can be run
    twice."""
    flat = graph.flat
    if graph not in _regions:
        layers = {call: OpSet.of(graph, np.flatnonzero(flat.op_call == call)) for call in layer_calls(graph)}
        _regions[graph] = np.bincount(flat.op_call, minlength=len(graph.calls)), layers
    sizes, layers = _regions[graph]
    whole = np.flatnonzero(np.bincount(flat.op_call[ops], minlength=sizes.size) == sizes)
    regions = tuple(layers[call] for call in whole.tolist() if call in layers and sizes[call])
    if not regions:
        mutates = np.array([graph.op_classes[c].mutates_buffer for c in flat.op_class[ops]], dtype=bool)
        usable = ops[~mutates & (ops != int(flat.value_op[graph.loss]))]
        return (OpSet.of(graph, usable),) if usable.size else ()
    return regions


def attention_regions(graph: Graph, ops: Ints) -> tuple[OpSet, ...]:
    """Of each layer that lies in `ops` whole the modules that hold an attention, products before and behind it
    included: inside is most of what grows with the sequence. Raises UserError where a model has no such layer."""
    flat, found = graph.flat, []
    sizes = np.bincount(flat.op_call, minlength=len(graph.calls))
    whole = np.bincount(flat.op_call[ops], minlength=sizes.size) == sizes
    layers = layer_calls(graph)
    for call in layers:
        inside = np.flatnonzero(flat.op_call == call)
        classes = [graph.op_classes[c] for c in flat.op_class[inside]]
        for path in _attention_paths(classes):
            mine = [i for i, op in enumerate(classes) if op.path == path or op.path.startswith(f"{path}.")]
            found.append((call, inside[mine[0] : mine[-1] + 1]))
    if not found:
        raise UserError("selective recomputation is of the attention in repeated layers, this model has none; use full")
    return tuple(OpSet.of(graph, region) for call, region in found if whole[call])


def _attention_paths(classes: Sequence[Op]) -> list[str]:
    """Modules of a layer that hold an attention: one kernel, or a softmax between two products."""
    kinds: dict[str, Counter[str]] = {}
    for op in classes:
        kinds.setdefault(op.path, Counter())[op.kind] += 1
    return [path for path, n in kinds.items() if n["attention"] or (n["softmax"] and n["matmul"] > 1)]


def _divisors(n: int) -> str:
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    found = [str(d) for d in [*low, *(n // d for d in reversed(low) if d * d != n)]]
    return ", ".join(found if len(found) <= 8 else [*found[:4], "…", *found[-3:]])
