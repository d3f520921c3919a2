"""Stages of many equal layers: what they take follows from two short ones of the same kind.

A call of a template repeats the one before it where it reads the same from its neighbours and from far away, makes the
same for them, and holds parameters that rest alike. Where a stage is some first ops, k such calls and the neighbour of
one more (or the mirror image), everything that is counted in it grows by the same with each call from the second on: so
it is counted for up to three calls and carried on to k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simpart.cost.pricing import Amount
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.kernels.split_backward import weight_share
from simpart.lowering.interning import Interner
from simpart.lowering.sharded import Sent, StageShares, converted_bytes, local_bytes, only_at, sent_by
from simpart.memory import state_table, storages_of
from simpart.placement import Sharding
from simpart.plan import DeviceGroup, Plan
from simpart.plan.partition import clonable_ops, members
from simpart.sharding.flow import Flow, flow_between
from simpart.sharding.mesh import mesh_of

__all__ = ["Grown", "Repeats", "Run"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
SHORT = 2
"""Calls of the shorter of the two stages that others are carried on from: a first and a last one."""
WORTH = 5
"""Calls from which on a stage is carried on that begins and ends within other calls, which must be equal to its own:
others like it may have been followed anywhere."""
ANY = (0, 1)
_FAR = 1 << 40
_OWN = 1 << 41


class Run(NamedTuple):
    """Calls `first` … `first + length - 1` of a stage, equal but for their place, after the other ops of the stage
    (or, with `mirrored`, before them); `key` is equal for stages that differ in nothing but `length` and place."""

    first: int
    length: int
    mirrored: bool
    others: Ints
    key: tuple[Any, ...]


class Grown(NamedTuple):
    """What `sharded.StageShare` says, without its flow."""

    forward: Amount
    backward: Amount
    inputs: Amount
    weights: Amount
    again: Amount | None
    sent: tuple[Sent, ...]
    sent_again: tuple[Sent, ...]
    value_bytes: Ints
    kept_bytes: int
    largest_bytes: int


class _Words(NamedTuple):
    """Of every call: its number among unlike ones, what it reads of the call before and of the call behind, and its
    first op and kernel-level value. `own[i]` of the first i ops are no clones."""

    number: Ints
    before: list[bytes]
    behind: list[bytes]
    ops: Ints
    values: Ints
    own: Ints


class _Counted(NamedTuple):
    """Of a short stage: by row of prices, how often it is run in F, I, W and again; collectives; bytes."""

    times: tuple[Floats, ...]
    again: bool
    sent: Counter[Sent]
    sent_again: Counter[Sent]
    kept_bytes: int
    largest_bytes: int
    value_bytes: Ints
    first: int


class _Followed(NamedTuple):
    flow: Flow
    value_bytes: Ints
    sent: Counter[Sent]
    kept_bytes: int
    largest_bytes: int


@dataclass(slots=True)
class Repeats:
    """Runs of equal calls in the stages of one problem's plans. `least` is the fewest calls for which it is used."""

    shares: StageShares
    least: int = 1
    numbers: Interner = field(default_factory=Interner)
    words: dict[tuple[str, int], _Words] = field(default_factory=dict)
    flows: dict[tuple[Any, ...], _Followed] = field(default_factory=dict)
    counted: dict[tuple[Any, ...], _Counted] = field(default_factory=dict)

    def run(self, plan: Plan, graph: Graph, ops: Ints, regions: Sequence[Ints]) -> Run | None:
        """The longest run in a stage with these ops; None where there is none that can be carried on."""
        clonable = clonable_ops(graph)
        own = ops[~clonable[ops]]
        low, high = int(own[0]), int(own[-1]) + 1
        words = self._words(plan, graph)
        if words.own[high] - words.own[low] != own.size:
            return None
        calls = graph.flat.op_call
        start, stop = int(calls[low]), int(calls[high - 1]) + 1
        ends = words.ops[start : stop + 1]
        whole = np.diff(np.searchsorted(ops, ends)) == np.diff(ends)
        start, stop = _longest(words.number[start:stop], whole, start)
        count = stop - start
        if count < self.least:
            return None
        a, b = int(words.ops[start]), int(words.ops[stop])
        if count < WORTH and (low < a or high > b) and words.own[low] > 0 and words.own[high] < words.own[-1]:
            return None
        mirrored = high > b
        before, behind = self._joins(graph, words, start, -1), self._joins(graph, words, stop - 1, 1)
        if mirrored and (low < a or not before):
            return None
        if not mirrored and not behind:
            return None
        others = ops[(ops < a) | (ops >= b)]
        pattern, elsewhere = b"", b""
        if regions:
            region = np.full(len(clonable), -1, dtype=np.int64)
            for r, found in enumerate(regions):
                region[found] = r
            within = _pattern(region[a:b].reshape(count, -1), regions)
            if within is None:
                return None
            pattern, elsewhere = within, np.unique(region[others], return_inverse=True)[1].tobytes()
        place = -1 if mirrored or low < a or before else start
        key = (
            graph.fingerprint, int(words.number[start]), mirrored, others.tobytes(), place, len(regions) > 0, pattern,
            elsewhere,
        )  # fmt: skip
        return Run(start, count, mirrored, others, key)

    def of(
        self, plan: Plan, graph: Graph, run: Run, sharding: Sharding, micro_batch: int, device: Device,
        group: DeviceGroup, axes: int, regions: Sequence[Ints],
    ) -> Grown:  # fmt: skip
        """What one device does, with collectives of any one group whose axes have this number."""
        number = self.numbers.of
        key = (*run.key, number(sharding), number(plan.state), axes, micro_batch, device.name)
        lengths = (SHORT, SHORT + 1) if run.length > SHORT + 1 else (run.length,) * 2
        for count in lengths:
            if (count, *key) not in self.counted:
                self.shares.prices.ask(graph, micro_batch, device, sharding, mesh_of(group.axes))
                counted = self._count(plan, graph, run, count, sharding, micro_batch, device, group, regions, key)
                self.counted[count, *key] = counted
        short, more = (self.counted[count, *key] for count in lengths)
        return self._grow(plan, graph, run, micro_batch, device, short, more, max(1, run.length - SHORT))

    def _count(
        self, plan: Plan, graph: Graph, run: Run, count: int, sharding: Sharding, micro_batch: int, device: Device,
        group: DeviceGroup, regions: Sequence[Ints], key: tuple[Any, ...],
    ) -> _Counted:  # fmt: skip
        flat, clonable, words = graph.flat, clonable_ops(graph), self._words(plan, graph)
        first = run.first + (run.length - count if run.mirrored else 0)
        ops = np.union1d(run.others, np.arange(words.ops[first], words.ops[first + count]))
        own = ops[~clonable[ops]]
        size = len(flat.op_class)
        alike = (count, first, *key[: len(run.key) - 3], *key[len(run.key) :])  # whatever is made again
        if alike not in self.flows:
            self.flows[alike] = self._flow(plan, graph, own, sharding, micro_batch, group)
        found, held, sent, kept, largest = self.flows[alike]
        prices = self.shares.prices.of(graph, found, device)
        forward, kernels = flat.kernel_forward, prices.kernels
        there = forward[kernels].astype(np.float64)
        weights = (1.0 - there) * weight_share(graph)[kernels]
        member = np.zeros(size, dtype=bool)
        member[ops] = True
        mine = [region for region in regions if member[region].all()]
        inside = np.zeros(len(flat.kernel_op), dtype=bool)
        if mine:
            inside = np.isin(flat.kernel_op, np.concatenate(mine)) & forward
        rows = len(prices.amounts.seconds)
        times = tuple(
            np.bincount(prices.row, weights=part, minlength=rows).astype(np.float64)
            for part in (there, 1.0 - there - weights, weights, inside[kernels].astype(np.float64))
        )
        cluster = self.shares.problem.cluster
        return _Counted(
            times=times, again=bool(mine), sent=sent,
            sent_again=_counter(sent_by(only_at(found, inside), group, cluster)) if mine else Counter(),
            kept_bytes=kept, largest_bytes=largest, value_bytes=held, first=first,
        )  # fmt: skip

    def _flow(
        self, plan: Plan, graph: Graph, own: Ints, sharding: Sharding, micro_batch: int, group: DeviceGroup
    ) -> _Followed:
        """Of the stage that holds these ops and their clones."""
        places = np.arange(len(graph.flat.op_class))
        stage_of = np.where(places < own[0], 0, np.where(places > own[-1], 2, 1))
        parts = [np.flatnonzero(row) for row in members(graph, stage_of, 3)]
        found = flow_between(graph, sharding, mesh_of(group.axes), micro_batch, plan.state, parts, 1)
        kept, largest = converted_bytes(found)
        sent = _counter(sent_by(found, group, self.shares.problem.cluster))
        return _Followed(found, local_bytes(graph, found), sent, kept, largest)

    def _grow(
        self, plan: Plan, graph: Graph, run: Run, micro_batch: int, device: Device, short: _Counted, more: _Counted,
        further: int,
    ) -> Grown:  # fmt: skip
        known = self.shares.prices.known[graph.fingerprint, micro_batch, device.name].amounts
        assert known is not None  # the short stages are priced
        totals = []
        for a, b in zip(short.times, more.times, strict=True):
            times = np.zeros(known.seconds.size)
            times[: b.size] = b * further
            times[: a.size] -= a * (further - 1)
            totals.append(times)
        forward, inputs, weights, again = totals
        words = self._words(plan, graph)
        size = int(words.values[run.first + 1] - words.values[run.first])
        held = storages_of(graph, micro_batch).bytes.copy()
        if run.others.size:  # they lie where they lay
            held = short.value_bytes.copy()
        block = short.value_bytes[words.values[short.first] :][:size]
        start = int(words.values[run.first])
        held[start : start + size * run.length] = np.tile(block, run.length)
        return Grown(
            forward=known.total(forward), backward=known.total(inputs + weights), inputs=known.total(inputs),
            weights=known.total(weights), again=known.total(again) if more.again else None,
            sent=_carried(short.sent, more.sent, further),
            sent_again=_carried(short.sent_again, more.sent_again, further), value_bytes=held,
            kept_bytes=short.kept_bytes + further * (more.kept_bytes - short.kept_bytes),
            largest_bytes=more.largest_bytes,
        )  # fmt: skip

    # --- which calls are alike ----------------------------------------------------------------------------------------
    def _joins(self, graph: Graph, words: _Words, call: int, step: int) -> bool:
        """Whether the neighbour of a call of a run is to it as another of the run would be."""
        other = call + step
        if not 0 <= other < len(graph.calls):
            return False
        one, two = graph.calls[call], graph.calls[other]
        read = words.before if step > 0 else words.behind
        return (one.template, one.omits) == (two.template, two.omits) and read[call] == read[other]

    def _words(self, plan: Plan, graph: Graph) -> _Words:
        key = (graph.fingerprint, self.numbers.of(plan.state))
        if key not in self.words:
            self.words[key] = _words(graph, self._rests(plan, graph))
        return self.words[key]

    def _rests(self, plan: Plan, graph: Graph) -> Ints:
        """By op-level value: which pattern of state a parameter matches, and whether it is trained."""
        order = {pattern: i for i, (pattern, _) in enumerate(plan.state)}
        table = np.full(len(graph.flat.value_op), -1, dtype=np.int64)
        for value, source in graph.parameters.items() if plan.state else ():
            pattern = plan.state_of(source)[0]
            table[value] = -1 if pattern is None else order[pattern]
        trained = state_table(graph, self.shares.problem.training)[3] > 0
        found: Ints = 2 * table + trained
        return found


def _words(graph: Graph, rests: Ints) -> _Words:
    flat, calls = graph.flat, graph.calls
    starts = np.append(graph.kernel_value_offsets, len(flat.kernel_value_kernel)).astype(np.int64)
    sources = np.append(graph.value_offsets, len(flat.value_op)).astype(np.int64)
    kernel_call = flat.op_call[flat.kernel_op]
    kernels = np.searchsorted(kernel_call, np.arange(len(calls) + 1))
    ops = np.searchsorted(flat.op_call, np.arange(len(calls) + 1))
    base = storages_of(graph, 2).base if graph.at_one is not None else storages_of(graph, 1).base
    reader = np.repeat(np.arange(len(flat.kernel_op)), np.diff(flat.kernel_indptr))
    read_at = kernel_call[reader]

    def from_call(values: Ints, at: Any) -> tuple[Ints, Ints]:
        """Words for values as seen from a call, and by how many calls they are behind."""
        maker = np.searchsorted(starts, values, side="right") - 1
        step = np.where(maker < 0, 1 << 20, maker - at)
        near = np.abs(step) <= 1
        local = values - starts[np.maximum(maker, 0)]
        return np.where(near, (step + 1) * _OWN + local, _FAR + values), step

    read, steps = from_call(flat.kernel_inputs, read_at)
    under, _ = from_call(base[flat.kernel_inputs], read_at)
    far = np.abs(steps) > 1
    far_maker = np.searchsorted(starts, flat.kernel_inputs, side="right") - 1
    far_rows = np.flatnonzero(far & (far_maker >= 0))
    shares = (2 * weight_share(graph)).astype(np.int64)
    interned = Interner()
    number, before, behind = [], [], []
    for c, call in enumerate(calls):
        k0, k1 = int(kernels[c]), int(kernels[c + 1])
        i0, i1 = int(flat.kernel_indptr[k0]), int(flat.kernel_indptr[k1])
        mine = np.arange(sources[c], sources[c] + len(graph.templates[call.template].sources))
        held = np.array([graph.gradients.get(v, -1) for v in mine.tolist()], dtype=np.int64)
        sent = far_rows[far_maker[far_rows] == c]
        parts = (
            read[i0:i1], under[i0:i1], rests[mine], np.where(held >= 0, from_call(held, c)[0], -1), shares[k0:k1],
            flat.kernel_inputs[sent] - starts[c], reader[sent], flat.op_group[ops[c] : ops[c + 1]] - ops[c],
        )  # fmt: skip
        of_call = b"|".join(part.astype(np.int64).tobytes() for part in parts)
        number.append(interned.of((call.template, call.omits, of_call)))
        step, what = steps[i0:i1], read[i0:i1]
        before.append(np.unique(what[step == -1]).tobytes())
        behind.append(np.unique(what[step == 1]).tobytes())
    own = np.concatenate([[0], np.cumsum(~clonable_ops(graph))])
    return _Words(np.array(number), before, behind, ops, starts, own)


def _longest(number: Ints, whole: npt.NDArray[np.bool_], low: int) -> tuple[int, int]:
    """The longest run of equal numbers among whole calls, these being counted from `low`."""
    mine = np.where(whole, number, -1 - np.arange(number.size))
    edges = np.concatenate([[0], np.flatnonzero(np.diff(mine)) + 1, [number.size]])
    best = int(np.argmax(np.where(mine[edges[:-1]] >= 0, np.diff(edges), 0)))
    if mine[edges[best]] < 0:
        return low, low
    return low + int(edges[best]), low + int(edges[best + 1])


def _pattern(table: Ints, regions: Sequence[Ints]) -> bytes | None:
    """Which ops of a call are made again together, if it is the same in all calls (rows); None if not."""
    again = table >= 0
    if not again.any():
        return b"none"
    if not again.any(axis=1).all():
        return None
    low = np.where(again, table, np.iinfo(np.int64).max).min(axis=1)
    relative = np.where(again, table - low[:, None], -1)
    span = int(relative.max()) + 1
    if (relative != relative[0]).any() or (np.diff(low) < span).any():
        return None
    inside = np.unique(table[again])
    if sum(len(regions[r]) for r in inside.tolist()) != int(again.sum()):
        return None  # one reaches beyond the run
    return bytes(relative[0].tobytes())


def _counter(sent: Sequence[Sent]) -> Counter[Sent]:
    """By what is sent along which axis: on which devices is said where a stage is placed."""
    return Counter(
        {x._replace(collective=replace(x.collective, ranks=ANY, concurrent=1), times=0): x.times for x in sent}
    )


def _carried(short: Counter[Sent], more: Counter[Sent], further: int) -> tuple[Sent, ...]:
    found = ((x, short[x] + further * (n - short[x])) for x, n in more.items())
    return tuple(x._replace(times=n) for x, n in found if n)
