"""Activations of every run of blocks at once: what `memory.activations_of` says stage by stage, as sums over storages.

A storage is kept by a run of blocks when its maker and a kernel that reads it late (in backward, or in a forward made
again) are both in the run. So each storage counts as one entry (block of its maker, block of its first late reader),
and all runs follow from sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simpart.graph import Graph
from simpart.memory import activations_of, backward_places, storages_of

__all__ = ["kept_storages", "working_sets"]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def kept_storages(
    graph: Graph, micro_batch: int, block_of: Ints, regions: Ints | None, value_bytes: Ints | None = None
) -> tuple[Ints, Ints, Ints]:
    """(block of the maker, block of the first late reader, bytes) of every storage that is kept for backward.

    `block_of` gives the block of each op; `regions` the recomputed region of each op (-1: none), or None for no
    recomputation; `value_bytes` what one device holds of each kernel-level value, if not all.
    """
    flat, storages = graph.flat, storages_of(graph, micro_batch)
    region = np.full(len(flat.kernel_op), -1, dtype=np.int64) if regions is None else regions[flat.kernel_op]
    again, _ = backward_places(graph, np.arange(len(flat.kernel_op)), region)
    read = storages.base[flat.kernel_inputs]
    maker = flat.kernel_value_kernel[read]
    reader = storages.reader
    late = (maker >= 0) & (again[reader] >= 0)
    late &= flat.kernel_forward[np.maximum(maker, 0)]
    late &= (region[maker] < 0) | (region[maker] != region[reader])
    value, maker, reader = read[late], maker[late], reader[late]
    first = np.full(len(storages.base), np.iinfo(np.int64).max)
    np.minimum.at(first, value, block_of[flat.kernel_op[reader]])
    kept = np.unique(value)
    made = block_of[flat.kernel_op[flat.kernel_value_kernel[kept]]]
    return made, np.maximum(first[kept], made), (storages.bytes if value_bytes is None else value_bytes)[kept]


def working_sets(
    graph: Graph, micro_batch: int, blocks: Sequence[Ints], regions: Ints | None, value_bytes: Ints | None = None
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Largest working set of each block, forward or backward, besides what it keeps."""
    result = []
    for ops in blocks:
        inside = [] if regions is None else [ops[regions[ops] == r] for r in np.unique(regions[ops]) if r >= 0]
        found = activations_of(graph, ops, micro_batch, inside, value_bytes)
        result.append(max(found.forward_transient, found.backward_transient))
    return np.array(result, dtype=np.float64)
