"""A schedule's rows as arrays, one after the other: what topologies are built from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simpart.schedule import Overlapped, Rows, interleaved_arrays

if TYPE_CHECKING:
    from simpart.lowering.topology import Shape

__all__ = ["INDEX", "KINDS", "Actions", "actions_of", "actions_of_rows"]

Ints = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
INDEX = np.int32
NONE = np.zeros(0, dtype=np.int64)
KINDS = "FBIW"
"""Actions by the number of their `TaskKind`."""


class Actions(NamedTuple):
    """All rows one after the other, as arrays; `kind` indexes KINDS, `pairs` are the places of overlapped forwards."""

    indptr: Ints
    stage: Ints
    kind: Ints
    micro_batch: Ints
    pairs: Ints


def actions_of(shape: Shape) -> Actions:
    """The schedule's rows; most without a Python object per action (equal to `schedule.rows`)."""
    stages, count = len(shape.group_of_stage), shape.micro_batches
    one_each = len(set(shape.group_of_stage)) == stages
    if shape.schedule.kind == "1f1b" and one_each:
        order = np.argsort(np.array(shape.group_of_stage))
        warm_up = np.minimum(stages - order, count).astype(INDEX)[:, None]
        m = np.arange(count, dtype=INDEX)[None, :]
        forward_at = np.where(m < warm_up, m, 2 * m - warm_up + 1)
        backward_at = warm_up + m + np.minimum(m, count - warm_up)
        kind, micro_batch = np.empty((2, stages, 2 * count), dtype=INDEX)
        for at, number in ((forward_at, 0), (backward_at, 1)):
            np.put_along_axis(kind, at, number, axis=1)
            np.put_along_axis(micro_batch, at, np.broadcast_to(m, at.shape), axis=1)
        return Actions(
            np.arange(stages + 1) * 2 * count,
            np.repeat(order.astype(INDEX), 2 * count),
            kind.ravel(),
            micro_batch.ravel(),
            NONE,
        )
    if shape.schedule.kind == "gpipe":
        home = np.array(shape.group_of_stage)
        order = np.argsort(home, kind="stable").astype(INDEX)
        parts = np.split(order, np.flatnonzero(np.diff(home[order])) + 1)
        there = np.concatenate([np.concatenate([found, found[::-1]]) for found in parts])
        kinds = np.concatenate([np.repeat(np.array([0, 1], dtype=INDEX), found.size) for found in parts])
        indptr = np.cumsum([0] + [2 * count * found.size for found in parts])
        each = np.tile(np.arange(count, dtype=INDEX), there.size)
        return Actions(indptr, np.repeat(there, count), np.repeat(kinds, count), each, NONE)
    if shape.schedule.kind == "interleaved-1f1b":
        return _of(*interleaved_arrays(shape.group_of_stage, count))
    known = shape.schedule.order(shape.group_of_stage, count)
    if known is not None:
        return _of(known.indptr, known.stage, known.kind, known.micro_batch)
    return actions_of_rows(shape.schedule.rows(shape.group_of_stage, count))


def _of(indptr: Ints, stage: Ints, kind: Ints, micro_batch: Ints) -> Actions:
    return Actions(indptr, stage.astype(INDEX), kind.astype(INDEX), micro_batch.astype(INDEX), NONE)


def actions_of_rows(rows: Rows) -> Actions:
    flat = [action for row in rows for action in row]
    indptr = np.cumsum([0] + [len(row) for row in rows])
    number = {kind: i for i, kind in enumerate(KINDS)}
    stages, letters, micro_batches = zip(*flat, strict=True) if flat else ((), (), ())
    stage, micro_batch = np.array(stages, dtype=INDEX), np.array(micro_batches, dtype=INDEX)
    kind = np.array([number[letter] for letter in letters], dtype=INDEX)
    pairs = np.array([i for i, a in enumerate(flat) if type(a) is Overlapped], dtype=np.int64)
    return Actions(indptr, stage, kind, micro_batch, pairs)
