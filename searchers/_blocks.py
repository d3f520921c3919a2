"""From a graph of ops to a short chain of blocks: atoms, coarsening, compaction.

Atoms are the indivisible groups of ops, each with clones of the ops that only prepare weights or constants for it.
Blocks are convex sets of atoms in topological order, so that every cut of the chain is a valid pipeline cut.
Reference: Tanaka et al., IPDPS 2021 (arXiv 2103.16063), phases 1 and 2. Mended here: compaction goes on where a merge
misses memory, all orders are fixed, and the last merges balance the blocks exactly instead of greedily.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simpart.searchers._contraction import Contraction
from simpart.searchers._op_dag import OpDag
from simpart.searchers._uncoarsen import uncoarsen

__all__ = ["blocks"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SEARCH_LIMIT = 500
"""Nodes looked at, per op and pass, for other paths to its successors before farther ones are given up: linear time."""

SPARE_NODES = 8
"""Nodes per wanted block that greedy compaction leaves for the exact balancing after it."""


def blocks(
    dag: OpDag,
    most: int,
    *,
    seconds_per_byte: float = 0.0,
    limit_bytes: float = math.inf,
    released: bool = False,
    connected: bool = False,
    uncoarsening: bool = False,
) -> list[Integers]:
    """Sorted op indices of at most `most` blocks, in chain order, without clones; more only where memory forbids less.

    `seconds_per_byte` prices what crosses between blocks. `released`: coarsening down to 5 nodes and greedy compaction
    alone, as published. `connected`: no block holds ops of branches that do not meet in it; there may be more blocks.
    `uncoarsening`: coarse nodes exchange parts where that saves transfers (see `uncoarsen`).
    """
    if most < 1:
        raise ValueError(f"the number of blocks must be at least 1, got {most}")
    contraction = Contraction(dag)
    levels = [contraction.nodes_of_ops(dag.size)]
    _coarsen(contraction, 5 if released else SPARE_NODES * most, seconds_per_byte, limit_bytes, levels)
    if uncoarsening and len(levels) > 1:
        contraction = _uncoarsened(dag, levels, limit_bytes)
    chain = _compact(contraction, most if released else SPARE_NODES * most, limit_bytes, connected)
    if len(chain) > most and not released:
        chain = _balance(contraction, chain, most, seconds_per_byte, limit_bytes, connected)
    parts = ([op for node in nodes for op in contraction.members[node]] for nodes in chain)
    return [np.array(sorted(ops), dtype=np.int64) for ops in parts]


def _uncoarsened(dag: OpDag, levels: Sequence[Integers], limit_bytes: float) -> Contraction:
    edges = dag.edge_source, dag.edge_target, dag.edge_value
    node = uncoarsen(levels, edges, dag.value_bytes, dag.time_s, dag.memory_bytes, limit_bytes)
    first = np.arange(dag.size)
    for _, ops in itertools.groupby(np.argsort(node, kind="stable").tolist(), key=lambda op: int(node[op])):
        together = list(ops)
        if node[together[0]] >= 0:
            first[together] = min(together)
    return Contraction(replace(dag, group=first))


def _coarsen(
    graph: Contraction, at_least: int, seconds_per_byte: float, limit_bytes: float, levels: list[Integers]
) -> None:
    """Passes of matching until few nodes are left or a pass changes nothing.

    In a pass each node, lightest first, joins the unmatched successor that saves most (shared clones and transfer),
    unless the two together are heavier than the mean plus two deviations of this level. `levels` gets the node of each
    op after every pass.
    """
    while len(graph.time_s) > max(at_least, 3):
        graph.renumber()
        nodes = sorted(graph.nodes(), key=lambda node: graph.time_s[node])
        times = [graph.time_s[node] for node in nodes]
        ceiling_s = statistics.fmean(times) + 2 * statistics.pstdev(times)
        left = len(nodes)
        matched: set[int] = set()
        for node in nodes:
            if node in matched:
                continue
            matched.add(node)
            if len(graph.time_s) <= at_least:
                break
            best: tuple[float, int, set[int]] | None = None
            budget = SEARCH_LIMIT
            for other in sorted(graph.after[node], key=lambda x: graph.position[x]):
                if other in matched or budget <= 0:
                    continue
                shared_s = graph.shared_time_s(node, other)
                if graph.time_s[node] + graph.time_s[other] - shared_s > ceiling_s:
                    continue
                if graph.memory_bytes[node] + graph.memory_bytes[other] >= limit_bytes:
                    continue
                gain_s = shared_s + seconds_per_byte * sum(graph.value_bytes[v] for v in graph.after[node][other])
                if best is None or gain_s >= best[0]:
                    between, budget = graph.other_path(node, other, budget)
                    if between is not None:
                        best = gain_s, other, between
            if best is not None:
                matched.add(best[1])
                graph.merge(node, *best[1:])
        if len(graph.time_s) == left:
            return
        levels.append(graph.nodes_of_ops(len(levels[0])))


def _compact(graph: Contraction, most: int, limit_bytes: float, connected: bool) -> list[list[int]]:
    """Merge the lightest block with the neighbour that makes the lighter pair, until `most` are left."""
    graph.renumber()
    order = graph.nodes()
    left: dict[int, int | None] = dict(zip(order, [None, *order[:-1]], strict=True))
    right: dict[int, int | None] = dict(zip(order, [*order[1:], None], strict=True))
    rank = {node: at for at, node in enumerate(order)}
    # A block goes by its first node; it may hold nodes that no edge joins, so the contraction itself is left alone.
    parts, clones = {node: [node] for node in order}, {node: set(graph.clones[node]) for node in order}
    time_s, memory_bytes = dict(graph.time_s), dict(graph.memory_bytes)
    heap = [(time_s[node], rank[node], node) for node in order]
    heapq.heapify(heap)
    while len(parts) > most and heap:
        lightest_s, _, block = heapq.heappop(heap)
        if block not in parts or lightest_s != time_s[block]:
            continue  # merged since
        options = []
        for first, second in ((left[block], block), (block, right[block])):
            if first is None or second is None or memory_bytes[first] + memory_bytes[second] >= limit_bytes:
                continue
            if connected and not any(graph.after[a].keys() & set(parts[second]) for a in parts[first]):
                continue
            shared_s = math.fsum(graph.op_time[op] for op in clones[first] & clones[second])
            options.append((time_s[first] + time_s[second] - shared_s, rank[first], first, second))
        if not options:
            continue  # its neighbours only grow: it stays as it is
        time, _, first, second = min(options)
        parts[first] += parts.pop(second)
        clones[first] |= clones.pop(second)
        time_s[first] = time
        memory_bytes[first] += memory_bytes[second]
        following = right.pop(second)
        right[first] = following
        if following is not None:
            left[following] = first
        heapq.heappush(heap, (time, rank[first], first))
    return [parts[node] for node in order if node in parts]


def _balance(
    graph: Contraction,
    chain: list[list[int]],
    most: int,
    seconds_per_byte: float,
    limit_bytes: float,
    connected: bool,
) -> list[list[int]]:
    """Join neighbours into `most` blocks (more where memory or branches force it) of least sum of squared times.

    A block's time includes what leaves it, so that cuts fall where little crosses.
    """
    m = len(chain)
    time_s = np.concatenate([[0.0], np.cumsum([sum(graph.time_s[node] for node in nodes) for nodes in chain])])
    memory = np.concatenate([[0.0], np.cumsum([sum(graph.memory_bytes[node] for node in nodes) for nodes in chain])])
    leaving_s = seconds_per_byte * _crossing_bytes(graph, chain)
    starts, ends = np.arange(m)[:, None], np.arange(m + 1)[None, :]
    allowed = (ends == starts + 1) | ((ends > starts) & (memory[None, :] - memory[:-1, None] < limit_bytes))
    if connected:
        allowed &= _meeting(graph, chain)
    cost = np.where(allowed, (time_s[None, :] - time_s[:-1, None] + leaving_s[None, :]) ** 2, np.inf)
    best = np.full(m + 1, np.inf)
    best[0] = 0.0
    choices: list[Integers] = []
    while len(choices) < most or best[m] == np.inf:
        totals = best[:-1, None] + cost
        choices.append(np.argmin(totals, axis=0))
        best = totals.min(axis=0)
    cuts = [m]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    cuts.reverse()
    return [[node for part in chain[i:j] for node in part] for i, j in itertools.pairwise(cuts)]


def _meeting(graph: Contraction, chain: list[list[int]]) -> npt.NDArray[np.bool_]:
    """[i, j]: parts i … j-1 of a chain hang together by edges among them."""
    place = {node: at for at, nodes in enumerate(chain) for node in nodes}
    m = len(chain)
    near: list[set[int]] = [set() for _ in chain]
    for node, at in place.items():
        for reader in graph.after[node]:
            near[place[reader]].add(at)
    meeting = np.zeros((m, m + 1), dtype=np.bool_)
    for i in range(m):
        root = list(range(m))
        pieces = 0
        for j in range(i, m):
            pieces += 1
            for a in near[j]:
                if i <= a < j:
                    one, other = _root(root, a), _root(root, j)
                    if one != other:
                        root[other] = one
                        pieces -= 1
            meeting[i, j + 1] = pieces == 1
    return meeting


def _root(root: list[int], x: int) -> int:
    while root[x] != x:
        root[x] = root[root[x]]
        x = root[x]
    return x


def _crossing_bytes(graph: Contraction, chain: list[list[int]]) -> Floats:
    """Bytes of the values that cross each cut of a chain: entry j is the cut in front of its j-th part, ends are 0."""
    place = {node: at for at, nodes in enumerate(chain) for node in nodes}
    steps = np.zeros(len(chain) + 1)
    for node, at in place.items():
        last: dict[int, int] = {}
        for reader, values in graph.after[node].items():
            for value in values:
                last[value] = max(last.get(value, at), place[reader])
        for value, end in last.items():
            steps[at + 1] += graph.value_bytes[value]
            steps[end + 1] -= graph.value_bytes[value]
    return np.cumsum(steps)
