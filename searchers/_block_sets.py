"""Sets of blocks that may be done before a cut, and sums over what lies between two of them, for all pairs at once.

On a chain of blocks the sets are its beginnings, in the order of the chain: one linearisation of the graph. Other
graphs have more sets closed under predecessors; then a stage may leave out a branch that runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simpart.searchers._downsets import closed_sets, members, nested

__all__ = ["BlockSets"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BlockSets:
    """`inside[s, b]`: block b is in set s. Sets go from none to all blocks, smaller ones first.

    Results are (sets - 1, sets): [s, t] is for the blocks that t has beyond s. Where s is no part of t they are
    meaningless.
    """

    inside: Bools

    @staticmethod
    def of_chain(blocks: int) -> BlockSets:
        """The beginnings of a chain.

        >>> BlockSets.of_chain(3).sums(np.array([1.0, 2.0, 4.0])).tolist()[1]
        [0.0, 0.0, 2.0, 6.0]
        """
        return BlockSets(np.tri(blocks + 1, blocks, -1, dtype=np.bool_))

    @staticmethod
    def of_graph(blocks: int, edges: Iterable[tuple[int, int]], most: int) -> BlockSets:
        """All sets closed under predecessors; raises UnsupportedError for more than `most`."""
        return BlockSets(members(closed_sets(blocks, edges, most=most), blocks))

    @cached_property
    def nested(self) -> Bools:
        """Which pairs are a stage."""
        return nested(self.inside)[:-1]

    def blocks(self, start: int, end: int) -> list[int]:
        """Blocks of a stage."""
        return [int(b) for b in np.flatnonzero(self.inside[end] & ~self.inside[start])]

    def sums(self, per_block: Floats) -> Floats:
        """Sum over the blocks of each stage."""
        prefix = np.concatenate([[0.0], np.cumsum(per_block)])
        if len(self.inside) != len(prefix):
            prefix = self.inside @ per_block
        sums: Floats = np.maximum(prefix[None, :] - prefix[:-1, None], 0.0)
        return sums

    def any_of(self, blocks: Sequence[int]) -> Bools:
        """Whether a stage has any of these blocks."""
        held = self.inside[:, list(blocks)].sum(axis=1)
        return np.asarray(held[None, :] > held[:-1, None])

    def largest(self, per_block: Floats) -> Floats:
        """Largest of the blocks of each stage; 0 for none."""
        found = np.zeros(self.nested.shape)
        for b, value in enumerate(per_block):
            np.maximum(found, np.where(self.any_of([b]), value, 0.0), out=found)
        return found

    def both(self, per_pair: Floats) -> Floats:
        """Sum over all pairs of blocks that are both in the stage."""
        held = self.inside.astype(np.float64)
        whole = held @ per_pair @ held.T
        inner = np.diag(whole)
        sums: Floats = inner[None, :] - whole.T[:-1] - whole[:-1] + inner[:-1, None]
        return np.maximum(sums, 0.0)

    def crossing(self, size_of: Mapping[tuple[int, tuple[int, ...]], float]) -> tuple[Floats, Floats]:
        """What enters and what leaves each stage, of values with (block of the maker, blocks of all readers elsewhere).

        Each value counts once per stage that reads it and once where it leaves its maker's.
        """
        entering, leaving = np.zeros(self.nested.shape), np.zeros(self.nested.shape)
        for (maker, readers), size in size_of.items():
            makes = self.any_of([maker])
            entering += np.where(~makes & self.any_of(readers), size, 0.0)
            outside = len(readers) - self.inside[:, list(readers)].sum(axis=1)
            leaving += np.where(makes & (outside > 0)[None, :], size, 0.0)
        return entering, leaving
