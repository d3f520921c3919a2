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
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simpart.searchers._uncoarsen import uncoarsen

__all__ = ["OpDag", "block_numbers", "blocks", "clones_of", "crossing_values"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SEARCH_LIMIT = 500
"""Nodes looked at, per op and pass, for other paths to its successors before farther ones are given up: linear time."""

SPARE_NODES = 8
"""Nodes per wanted block that greedy compaction leaves for the exact balancing after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpDag:
    """Ops 0 … n-1 in a topological order, and which of them read which value of which other.

    Edge e says that op `edge_target[e]` reads value `edge_value[e]` made by op `edge_source[e]`. `group` holds, per op,
    the smallest op of its indivisible group; `cloned` marks ops that are repeated wherever they are needed.
    """

    time_s: Floats  # forward + backward
    memory_bytes: Floats
    edge_source: Integers
    edge_target: Integers
    edge_value: Integers
    value_bytes: Floats  # by value number
    group: Integers
    cloned: npt.NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Number of ops."""
        return len(self.time_s)


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
    contraction = _Contraction(dag)
    levels = [contraction.nodes_of_ops(dag.size)]
    _coarsen(contraction, 5 if released else SPARE_NODES * most, seconds_per_byte, limit_bytes, levels)
    if uncoarsening and len(levels) > 1:
        contraction = _uncoarsened(dag, levels, limit_bytes)
    chain = _compact(contraction, most if released else SPARE_NODES * most, limit_bytes, connected)
    if len(chain) > most and not released:
        chain = _balance(contraction, chain, most, seconds_per_byte, limit_bytes, connected)
    parts = ([op for node in nodes for op in contraction.members[node]] for nodes in chain)
    return [np.array(sorted(ops), dtype=np.int64) for ops in parts]


def clones_of(dag: OpDag, ops: Integers) -> Integers:
    """The cloned ops that a set of ops needs, directly or through other clones."""
    needed = np.zeros(dag.size, dtype=np.bool_)
    needed[ops] = True
    feeding = dag.cloned[dag.edge_source]
    source, target = dag.edge_source[feeding], dag.edge_target[feeding]
    for e in np.argsort(-target, kind="stable").tolist():
        if needed[target[e]]:
            needed[source[e]] = True
    needed[ops] = False
    return np.flatnonzero(needed & dag.cloned)


def block_numbers(dag: OpDag, chain: Sequence[Integers]) -> Integers:
    """The block of each op, -1 for clones."""
    block = np.full(dag.size, -1, dtype=np.int64)
    for b, ops in enumerate(chain):
        block[ops] = b
    return block


def crossing_values(dag: OpDag, chain: Sequence[Integers]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Values by the block that makes them and all other blocks that read them."""
    block = block_numbers(dag, chain)
    made, read = block[dag.edge_source], block[dag.edge_target]
    readers: dict[int, tuple[int, set[int]]] = {}
    for e in np.flatnonzero((made >= 0) & (read >= 0) & (made != read)).tolist():
        readers.setdefault(int(dag.edge_value[e]), (int(made[e]), set()))[1].add(int(read[e]))
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for value, (maker, others) in readers.items():
        found.setdefault((maker, tuple(sorted(others))), []).append(value)
    return found


class _Contraction:
    """A graph of atoms in a topological order, both kept while nodes are merged into others."""

    def __init__(self, dag: OpDag) -> None:
        if np.any(dag.edge_source >= dag.edge_target):
            raise ValueError("ops must be numbered in a topological order: every edge goes to a later op")
        source, target, value = dag.edge_source.tolist(), dag.edge_target.tolist(), dag.edge_value.tolist()
        cloned, group, self.op_time = dag.cloned.tolist(), dag.group.tolist(), dag.time_s.tolist()
        self.value_bytes = dag.value_bytes
        self.members: dict[int, list[int]] = {}
        for op in range(dag.size):
            if not cloned[op]:
                self.members.setdefault(group[op], []).append(op)
        self.clones: dict[int, set[int]] = {node: set() for node in self.members}
        owners: dict[int, set[int]] = {}
        self.after: dict[int, dict[int, set[int]]] = {node: {} for node in self.members}
        self.before: dict[int, set[int]] = {node: set() for node in self.members}
        # Targets in descending order: whatever reads a cloned op has its own owners settled first.
        for e in np.argsort(-dag.edge_target, kind="stable").tolist():
            a, b = source[e], target[e]
            if cloned[a]:
                owners.setdefault(a, set()).update(owners.get(b, set()) if cloned[b] else (group[b],))
            elif not cloned[b] and group[a] != group[b]:
                self.after[group[a]].setdefault(group[b], set()).add(value[e])
                self.before[group[b]].add(group[a])
            elif cloned[b]:
                raise ValueError(f"op {b} is cloned but reads op {a}, which is not; clone ops only with all they read")
        for op, nodes in owners.items():
            for node in nodes:
                self.clones[node].add(op)
        memory = dag.memory_bytes.tolist()
        self.time_s: dict[int, float] = {}
        self.memory_bytes: dict[int, float] = {}
        for node, ops in self.members.items():
            everything = [*ops, *sorted(self.clones[node])]
            self.time_s[node] = sum(self.op_time[op] for op in everything)
            self.memory_bytes[node] = sum(memory[op] for op in everything)
        self.order: list[int | None] = list(self._sorted())
        self.position: dict[int, int] = {}
        self.renumber()

    def _sorted(self) -> list[int]:
        """Topological order, the smallest op first among those that are ready."""
        waiting = {node: len(before) for node, before in self.before.items()}
        ready = [node for node, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for follower in self.after[node]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(ready, follower)
        if len(order) < len(waiting):
            raise ValueError("indivisible groups of ops depend on one another in a cycle; join them into one group")
        return order

    def renumber(self) -> None:
        """Close the gaps that merges left in the order."""
        self.order = [node for node in self.order if node is not None]
        self.position = {node: at for at, node in enumerate(self.order) if node is not None}

    def nodes(self) -> list[int]:
        """All nodes in topological order."""
        return [node for node in self.order if node is not None]

    def nodes_of_ops(self, ops: int) -> Integers:
        """The node of each op, -1 for clones."""
        found = np.full(ops, -1, dtype=np.int64)
        for node, inside in self.members.items():
            found[inside] = node
        return found

    def shared_time_s(self, first: int, second: int) -> float:
        """Time of clones that both need, and that a merge runs once."""
        common = self.clones[first] & self.clones[second]
        return math.fsum(self.op_time[op] for op in common)

    def other_path(self, first: int, second: int, budget: int) -> tuple[set[int] | None, int]:
        """Whether `second` is reachable from `first` other than by their edge, looking at `budget` nodes at most.

        Answers None if so (or if the budget is used up), otherwise all nodes that follow `first` and stand before
        `second` in the order; and the budget left.
        """
        end = self.position[second]
        seen: set[int] = set()
        stack = [node for node in self.after[first] if node != second and self.position[node] < end]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if second in self.after[node] or len(seen) > budget:
                return None, budget - len(seen)
            stack.extend(x for x in self.after[node] if self.position[x] < end and x not in seen)
        return seen, budget - len(seen)

    def merge(self, first: int, second: int, between: set[int]) -> None:
        """Merge `second` into `first`; `between` are the followers of `first` that stand before `second`."""
        self.time_s[first] += self.time_s.pop(second) - self.shared_time_s(first, second)
        self.memory_bytes[first] += self.memory_bytes.pop(second)
        self.members[first].extend(self.members.pop(second))
        self.clones[first] |= self.clones.pop(second)
        self.after[first].pop(second, None)
        self.before[second].discard(first)
        for follower, values in self.after.pop(second).items():
            self.after[first].setdefault(follower, set()).update(values)
            self.before[follower].discard(second)
            self.before[follower].add(first)
        for source in self.before.pop(second):
            self.after[source].setdefault(first, set()).update(self.after[source].pop(second))
            self.before[first].add(source)
        # What does not follow `first` moves in front of it, what does moves behind: the order stays topological.
        low, high = self.position[first], self.position.pop(second)
        region = [node for node in self.order[low : high + 1] if node is not None and node not in (first, second)]
        moved: list[int | None] = [node for node in region if node not in between]
        moved += [first, *(node for node in region if node in between)]
        moved += [None] * (high + 1 - low - len(moved))
        self.order[low : high + 1] = moved
        self.position.update({node: at for at, node in enumerate(moved, low) if node is not None})


def _uncoarsened(dag: OpDag, levels: Sequence[Integers], limit_bytes: float) -> _Contraction:
    edges = dag.edge_source, dag.edge_target, dag.edge_value
    node = uncoarsen(levels, edges, dag.value_bytes, dag.time_s, dag.memory_bytes, limit_bytes)
    first = np.arange(dag.size)
    for _, ops in itertools.groupby(np.argsort(node, kind="stable").tolist(), key=lambda op: int(node[op])):
        together = list(ops)
        if node[together[0]] >= 0:
            first[together] = min(together)
    return _Contraction(replace(dag, group=first))


def _coarsen(
    graph: _Contraction, at_least: int, seconds_per_byte: float, limit_bytes: float, levels: list[Integers]
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


def _compact(graph: _Contraction, most: int, limit_bytes: float, connected: bool) -> list[list[int]]:
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
    graph: _Contraction,
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


def _meeting(graph: _Contraction, chain: list[list[int]]) -> npt.NDArray[np.bool_]:
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


def _crossing_bytes(graph: _Contraction, chain: list[list[int]]) -> Floats:
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
