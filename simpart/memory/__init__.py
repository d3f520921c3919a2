"""What a stage holds on one device, from the lifetimes of storages in its kernels.

Activations kept for backward are the storages that forward kernels make and backward kernels read; views count as the
storage they look into, parameters and inputs are not counted again. Working sets are the largest sum of what is alive
besides. Reference of the in-flight rule: Narayanan et al., arXiv 2104.04473.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from simpart.graph import Graph
from simpart.graph.sizes import TensorSpec
from simpart.hardware import Device
from simpart.kernels.split_backward import weight_share
from simpart.training import TrainingSpec

__all__ = ["ALLOCATOR_FACTOR", "StageActivations", "StateBytes", "activations_of", "state_of", "update_transient_bytes"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

ALLOCATOR_FACTOR = {"gpu": 1.08, "cpu": 1.05}
"""Bytes an allocator reserves per byte allocated at the peak: rounding to blocks and fragmentation. Assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """Bytes of one replica of a stage at one micro-batch size: `stash` per micro-batch in flight, and what forward and
    backward hold besides while they run (backward: over the stash of its own micro-batch). Of a split backward: `kept`
    is what is left of the stash, and made, for W; I holds its transient over the stash, W over what was kept."""

    stash: int
    forward_transient: int
    backward_transient: int
    kept: int = 0
    input_transient: int = 0
    weight_transient: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes held all the time for a set of parameters (and buffers); `largest_elements` and `elements` are those that
    are trained."""

    parameters: int
    gradients: int
    optimizer_state: int
    largest_elements: int
    elements: int


# --- parameters and their state --------------------------------------------------------------------------------------
def state_of(graph: Graph, training: TrainingSpec, values: Iterable[int]) -> StateBytes:
    """State of the parameters and buffers with these op-level value numbers, each once."""
    chosen = np.fromiter(values, dtype=np.int64)
    table = state_table(graph, training)[:, chosen]
    parameters, gradients, state, elements = table.sum(axis=1).tolist()
    return StateBytes(
        parameters=parameters, gradients=gradients, optimizer_state=state,
        largest_elements=int(table[3].max(initial=0)), elements=elements,
    )  # fmt: skip


_state_tables: WeakKeyDictionary[Graph, dict[TrainingSpec, np.ndarray[tuple[int, int], np.dtype[np.int64]]]]
_state_tables = WeakKeyDictionary()


def state_table(graph: Graph, training: TrainingSpec) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """By op-level value number: bytes of a parameter, buffer or constant, of its gradient and its optimizer state, and
    its elements where it is trained; zero for other values."""
    known = _state_tables.setdefault(graph, {})
    if training not in known:
        table = known[training] = np.zeros((4, len(graph.flat.value_op)), dtype=np.int64)
        for value, source in graph.all_sources():
            if source.kind not in ("parameter", "buffer", "constant"):
                continue
            table[0, value] = source.spec.bytes(1)
            if source.trainable and source.kind == "parameter" and training.trains(source.name):
                elements = source.spec.elements(1)
                table[1, value] = training.gradient_bytes(elements, source.spec.dtype)
                table[2, value], table[3, value] = training.state_bytes(elements), elements
    return known[training]


def state_values(graph: Graph, ops: Ints) -> Ints:
    """Value numbers of the parameters, buffers and constants that these ops read."""
    member = np.zeros(len(graph.flat.op_class), dtype=bool)
    member[ops] = True
    pairs = [graph.reads[kind] for kind in ("parameter", "buffer", "constant")]
    return np.unique(np.concatenate([value[member[reader]] for reader, value in pairs]))


def update_transient_bytes(training: TrainingSpec, device: Device, state: StateBytes) -> int:
    """What an update holds besides: with master weights the gradients in float32; in torch's Adam, unless fused, the
    root of every second moment at once on GPUs (foreach), two temporaries of one parameter on CPUs."""
    cast = 4 * state.elements if training.master_weights else 0
    if training.fused or not training.optimizer.startswith("adam"):
        return cast
    return cast + 4 * (state.elements if device.kind == "gpu" else 2 * state.largest_elements)


# --- activations -----------------------------------------------------------------------------------------------------
def activations_of(
    graph: Graph, ops: Ints, micro_batch: int, regions: Sequence[Ints] = (), value_bytes: Ints | None = None
) -> StageActivations:
    """Of a stage that runs these ops; the inner storages of each region are dropped after forward and made again in
    backward."""
    storages = storages_of(graph, micro_batch)
    if value_bytes is not None:  # what one device holds of each kernel-level value
        storages = storages._replace(bytes=value_bytes)
    flat = graph.flat
    member = np.zeros(len(flat.op_class), dtype=bool)
    member[ops] = True
    region_of_op = np.full(len(flat.op_class), -1, dtype=np.int64)
    for r, region in enumerate(regions):
        region_of_op[region] = r
    kernels = np.flatnonzero(member[flat.kernel_op])
    if kernels.size == 0:
        return StageActivations(stash=0, forward_transient=0, backward_transient=0)
    inside = np.zeros(len(flat.kernel_op), dtype=bool)
    inside[kernels] = True
    region = region_of_op[flat.kernel_op]

    reads = np.repeat(inside, np.diff(flat.kernel_indptr))
    reader = storages.reader[reads]
    read = storages.base[flat.kernel_inputs[reads]]
    maker = flat.kernel_value_kernel[read]
    ours = maker >= 0
    ours[ours] = inside[maker[ours]]
    reader, read, maker = reader[ours], read[ours], maker[ours]

    made = np.flatnonzero((flat.kernel_value_kernel >= 0) & (storages.base == np.arange(len(storages.base))))
    made = made[inside[flat.kernel_value_kernel[made]]]
    size = storages.bytes[made]
    row = np.full(len(storages.base), -1, dtype=np.int64)
    row[made] = np.arange(made.size)
    read_row = row[read]
    made_by = flat.kernel_value_kernel[made]
    made_forward, made_region = flat.kernel_forward[made_by], region[made_by]

    again, steps = backward_places(graph, kernels, region)
    reader_forward, reader_region = flat.kernel_forward[reader], region[reader]
    late = again[reader] >= 0  # runs, or runs again, during backward
    parted = (made_region[read_row] < 0) | (made_region[read_row] != reader_region)
    kept = late & parted & made_forward[read_row]  # reads what forward left
    stashed = np.zeros(made.size, dtype=bool)
    stashed[read_row[kept]] = True
    stash = int(size[stashed].sum())

    place = np.full(len(flat.kernel_op), -1, dtype=np.int64)
    forward = kernels[flat.kernel_forward[kernels]]
    place[forward] = np.arange(forward.size)
    mine = np.flatnonzero(made_forward)
    last = _last_use(place, place[made_by], read_row[reader_forward], reader[reader_forward])
    end = np.where(stashed, forward.size, last + 1)
    held = _highest(forward.size, place[made_by[mine]], end[mine], size[mine])
    forward_transient = max(0, held - stash)

    fresh = late & ~kept  # reads what backward made, or made again

    def span(place: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Storages in use at the places of a sequence, with first and last place: those that forward left (first: -1),
        then new ones; and how many are old."""
        used = _last_use(place, np.full(made.size, -1), read_row[kept], reader[kept])
        again_used = _last_use(place, place[made_by], read_row[fresh], reader[fresh])
        old, new = np.flatnonzero(stashed), np.flatnonzero(again_used >= 0)
        begin = np.concatenate([np.full(old.size, -1), place[made_by[new]]])
        return np.concatenate([old, new]), begin, np.concatenate([used[old], again_used[new]]), np.arange(1) + old.size

    def highest(rows: Ints, begin: Ints, last: Ints) -> int:
        return _highest(steps, np.maximum(begin, 0), last + 1, size[rows])

    whole = span(again)
    backward_transient = max(0, highest(*whole[:3]) - stash)
    share = weight_share(graph)
    rows, begin, last, olds = span(np.where(share < 1, again, -1))
    later_rows, later_begin, later_last, later_olds = span(np.where(share > 0, again, -1))
    # What W reads and was there before it is kept: what forward left, or I made.
    known = np.arange(later_rows.size) < later_olds
    before = (later_last >= 0) & (known | (later_begin < 0))
    kept_bytes = int(size[later_rows[before]].sum())
    waits = np.zeros((2, made.size), dtype=bool)
    waits[np.where(known, 0, 1)[before], later_rows[before]] = True
    last = np.where(waits[np.where(np.arange(rows.size) < olds, 0, 1), rows], steps - 1, last)
    input_transient = max(0, highest(rows, begin, last) - stash)
    used = later_last >= 0
    weight_transient = max(0, highest(later_rows[used], later_begin[used], later_last[used]) - kept_bytes)
    return StageActivations(
        stash=stash, forward_transient=forward_transient, backward_transient=backward_transient, kept=kept_bytes,
        input_transient=input_transient, weight_transient=weight_transient,
    )  # fmt: skip


def _last_use(place: Ints, made_at: Ints, rows: Ints, readers: Ints) -> Ints:
    """Last place in a sequence at which each storage is made or read."""
    last = made_at.copy()
    np.maximum.at(last, rows, place[readers])
    return last


def _highest(steps: int, begin: Ints, end: Ints, size: Ints) -> int:
    """Largest sum of sizes alive at one step, each from `begin` up to but not including `end`."""
    change = np.zeros(steps + 2, dtype=np.int64)
    np.add.at(change, begin, size)
    np.add.at(change, np.minimum(end, steps + 1), -size)
    return int(np.cumsum(change).max(initial=0))


def backward_places(graph: Graph, kernels: Ints, region: Ints) -> tuple[Ints, int]:
    """Place of each kernel in the sequence that backward runs: last call first, a region's forward before its first
    backward kernel."""
    flat = graph.flat
    backward = kernels[~flat.kernel_forward[kernels]]
    backward = backward[np.lexsort((backward, -flat.op_call[flat.kernel_op[backward]]))]
    major = [2 * np.arange(backward.size) + 1]
    members = [backward]
    seen, first = np.unique(region[backward], return_index=True)
    again = kernels[flat.kernel_forward[kernels] & (region[kernels] >= 0)]
    start = dict(zip(seen.tolist(), first.tolist(), strict=True))
    again = again[np.isin(region[again], seen)]
    major.append(2 * np.array([start[r] for r in region[again].tolist()], dtype=np.int64))
    members.append(again)
    sequence = np.concatenate(members)
    sequence = sequence[np.lexsort((sequence, np.concatenate(major)))] if again.size else backward
    place = np.full(len(flat.kernel_op), -1, dtype=np.int64)
    place[sequence] = np.arange(sequence.size)
    return place, int(sequence.size)


class Storages(NamedTuple):
    base: Ints  # kernel-level value that owns the storage each value looks into
    bytes: Ints
    reader: Ints  # kernel of each entry of flat.kernel_inputs


_tables: WeakKeyDictionary[Graph, dict[int, Storages]] = WeakKeyDictionary()


def storages_of(graph: Graph, micro_batch: int) -> Storages:
    """Storages of all kernel-level values at one micro-batch size; kept as long as the graph."""
    kept = _tables.setdefault(graph, {})
    if micro_batch not in kept:
        flat = graph.flat
        base = next(iter(kept.values())).base if kept else _bases(graph)
        reader = np.repeat(np.arange(len(flat.kernel_op)), np.diff(flat.kernel_indptr))
        kept[micro_batch] = Storages(base, spec_bytes(flat.kernel_value_spec, micro_batch), reader)
    return kept[micro_batch]


def spec_bytes(specs: Sequence[TensorSpec], micro_batch: int) -> Ints:
    """Bytes of each; equal objects (templates share theirs) are computed once."""
    known: dict[int, int] = {}
    sizes = np.empty(len(specs), dtype=np.int64)
    for i, spec in enumerate(specs):
        size = known.get(id(spec))
        if size is None:
            size = known[id(spec)] = spec.bytes(micro_batch)
        sizes[i] = size
    return sizes


def _bases(graph: Graph) -> Ints:
    flat = graph.flat
    view = np.array([k.view for k in graph.kernel_classes], dtype=bool)[flat.kernel_class]
    outputs = np.array([len(k.outputs) for k in graph.kernel_classes], dtype=np.int64)[flat.kernel_class]
    kernels = np.flatnonzero(view & (np.diff(flat.kernel_indptr) > 0))
    count = outputs[kernels]  # split and the like: every output looks into the input
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    base = np.arange(len(flat.kernel_value_kernel))
    base[np.repeat(flat.kernel_outputs[kernels], count) + offset] = np.repeat(
        flat.kernel_inputs[flat.kernel_indptr[kernels]], count
    )
    while True:
        further = base[base]
        if (further == base).all():
            return base
        base = further
