"""Cuts of a graph that is not a chain: sets of nodes closed under predecessors, as bits of integers.

A stage is the difference of two nested closed sets, so that values only flow forward between stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from simpart.errors import UnsupportedError

__all__ = ["closed_sets", "members", "nested"]

Bools = npt.NDArray[np.bool_]


def closed_sets(nodes: int, edges: Iterable[tuple[int, int]], *, most: int = 40_000) -> list[int]:
    """All sets closed under predecessors, from the empty to the full one, smaller ones first; bit v stands for node v.

    Raises UnsupportedError beyond `most` sets; a graph of parallel branches has a number exponential in the branches.

    >>> closed_sets(3, [(0, 1), (0, 2)])
    [0, 1, 3, 5, 7]
    """
    needs = [0] * nodes
    for source, target in edges:
        needs[target] |= 1 << source
    found, layer = [0], [0]
    while layer:
        grown = {
            closed | 1 << v for closed in layer for v in range(nodes) if not closed >> v & 1 and not needs[v] & ~closed
        }
        layer = sorted(grown)
        found += layer
        if len(found) > most:
            raise UnsupportedError(
                f"the graph has more than {most} cuts; merge parallel branches or search on a chain of blocks"
            )
    if found[-1] != (1 << nodes) - 1:
        raise UnsupportedError("the graph has a cycle, so no order of stages exists; merge the nodes on it into one")
    return found


def members(sets: Sequence[int], nodes: int) -> Bools:
    """[x, v]: node v is in set x."""
    return np.array([[closed >> v & 1 for v in range(nodes)] for closed in sets], dtype=np.bool_).reshape(-1, nodes)


def nested(inside: Bools) -> Bools:
    """[x, y]: set x is a proper subset of set y."""
    outside = inside.astype(np.float32) @ (~inside).T.astype(np.float32)  # [x, y] = members of x that y lacks
    sizes = inside.sum(axis=1)
    return np.asarray((outside == 0) & (sizes[:, None] < sizes[None, :]), dtype=np.bool_)
