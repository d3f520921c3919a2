"""A graph of atoms whose nodes are merged, with their order: atoms are the indivisible groups of ops, each with clones
of the ops that only prepare weights or constants for it."""

from __future__ import annotations

import heapq
import math

import numpy as np
import numpy.typing as npt

from simpart.searchers._op_dag import OpDag

__all__ = ["Contraction"]

Integers = npt.NDArray[np.int64]


class Contraction:
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
        self.after: dict[int, dict[int, set[int]]] = {node: {} for node in self.members}
        self.before: dict[int, set[int]] = {node: set() for node in self.members}
        for e in np.argsort(-dag.edge_target, kind="stable").tolist():
            a, b = source[e], target[e]
            if cloned[b] and not cloned[a]:
                raise ValueError(f"op {b} is cloned but reads op {a}, which is not; clone ops only with all they read")
            if not cloned[a] and group[a] != group[b]:
                self.after[group[a]].setdefault(group[b], set()).add(value[e])
                self.before[group[b]].add(group[a])
        owners: dict[int, set[int]] = {}
        for clones, readers in dag.clones():
            nodes = set[int]().union(*(owners[group[b]] if cloned[b] else {group[b]} for b in readers.tolist()))
            owners[group[int(clones[0])]] = nodes
            for node in nodes:
                self.clones[node].update(clones.tolist())
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
