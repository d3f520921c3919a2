"""Piper's stages of an acyclic graph of nodes: tensor and data degrees of each stage, a variant of each node, exactly.

The choice of variants is a knapsack: the release swaps variants in order of time lost per byte saved; here it is solved
exactly unless that rule is asked for. Reference: Tarnawski et al., NeurIPS 2021; https://github.com/msr-fiddle/piper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from simpart.searchers._downsets import closed_sets, members, nested
from simpart.searchers._inputs import costs_array
from simpart.searchers._profiles import PiperNode

__all__ = ["PiperPlan", "PiperProblem", "PiperStage", "Variants", "repeated", "solve", "stage_time_s"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Variants = Literal["exact", "swaps"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PiperProblem:
    """Nodes in topological order with edges (bytes per sample), on at most `devices` with `limit_bytes` each.

    `micro_batches` per batch; data degrees divide it. Times are per sample.
    """

    nodes: tuple[PiperNode, ...]
    edges: dict[tuple[int, int], float]
    devices: int
    micro_batches: int
    bytes_per_s: float
    limit_bytes: float = math.inf

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tensor degrees that some node offers."""
        return tuple(sorted({t for node in self.nodes for t in node.variants if t <= self.devices}))

    def data_degrees(self, tensor: int) -> list[int]:
        """Data degrees possible beside a tensor degree."""
        most = min(self.devices // tensor, self.micro_batches)
        return [d for d in range(1, most + 1) if self.micro_batches % d == 0]

    def tables(self, tensor: int) -> _Tables:
        """Numbers of every node and variant at a tensor degree."""
        return _tables(self, tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperStage:
    """Nodes with the number of the variant of each, on `data` × `tensor` devices."""

    nodes: tuple[int, ...]
    variants: tuple[int, ...]
    data: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperPlan:
    """Stages in the order of the pipeline and the seconds per sample of the slowest."""

    stages: tuple[PiperStage, ...]
    value_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tables:
    """[node, variant]; infinite time where there is none. `crossing[u, v, x]`: bytes if v is inside and u is not."""

    time_s: Floats
    parameters: Floats
    in_flight: Floats
    static: Floats
    crossing: Floats


def _tables(problem: PiperProblem, tensor: int) -> _Tables:
    n = len(problem.nodes)
    offered = [node.variants.get(tensor, ()) for node in problem.nodes]
    most = max(map(len, offered))
    time_s = np.full((n, most), np.inf)
    parameters, in_flight, static = np.zeros((n, most)), np.zeros((n, most)), np.zeros((n, most))
    crossing = np.zeros((n, n, most))
    for v, variants in enumerate(offered):
        for x, each in enumerate(variants):
            time_s[v, x], parameters[v, x] = each.time_s, each.parameter_bytes
            in_flight[v, x], static[v, x] = each.bytes_in_flight, each.bytes_static
            for neighbour, size in each.sync_bytes:
                crossing[neighbour, v, x] += 2 * size
    for (source, target), size in problem.edges.items():
        crossing[source, target] += 2 * size
        crossing[target, source] += 2 * size
    named = {"time": time_s, "parameter bytes": parameters, "bytes in flight": in_flight, "static bytes": static}
    for name, values in named.items():
        costs_array(name, values)
    return _Tables(time_s=time_s, parameters=parameters, in_flight=in_flight, static=static, crossing=crossing)


def stage_time_s(problem: PiperProblem, stage: PiperStage, later_degrees: int) -> float:
    """Seconds per sample of a stage when data degrees from it on sum to `later_degrees`; infinite if too large."""
    d, inside = stage.data, set(stage.nodes)
    picked = [problem.nodes[v].variants[stage.tensor][x] for v, x in zip(stage.nodes, stage.variants, strict=True)]
    flying = -(-later_degrees // d)
    if sum(each.bytes_in_flight * flying + each.bytes_static for each in picked) > problem.limit_bytes:
        return math.inf
    cut = sum(2 * size for (u, v), size in problem.edges.items() if (u in inside) != (v in inside))
    cut += sum(2 * size for each in picked for neighbour, size in each.sync_bytes if neighbour not in inside)
    gradients = sum(4 * (d - 1) * each.parameter_bytes for each in picked) / (d * problem.micro_batches)
    return sum(each.time_s for each in picked) / d + (cut / d + gradients) / problem.bytes_per_s


def solve(problem: PiperProblem, *, variants: Variants = "exact", most_cuts: int = 40_000) -> PiperPlan | None:
    """The plan whose slowest stage takes least per sample; None if none fits. See `closed_sets` about `most_cuts`."""
    n = len(problem.nodes)
    inside = members(closed_sets(n, problem.edges, most=most_cuts), n)
    pairs = np.argwhere(nested(inside))  # sorted by the smaller set: nodes done before the stage, and after it
    stages = inside[pairs[:, 1]] & ~inside[pairs[:, 0]]
    search = _Search(problem, pairs, stages, variants)
    return search.best(len(inside))


class _Search:
    """Tables over closed sets x: least[x, k, s] is the least time of the slowest stage for the nodes outside x.

    They run on k devices, with data degrees that sum to s.
    """

    def __init__(
        self, problem: PiperProblem, pairs: Integers, stages: npt.NDArray[np.bool_], variants: Variants
    ) -> None:
        self.problem, self.pairs, self.variants = problem, pairs, variants
        self.stages = stages.astype(np.float64)
        self.sent: dict[int, Floats] = {}
        self.most_degrees = min(problem.micro_batches, problem.devices)
        self.choices = [(t, d) for t in problem.degrees for d in problem.data_degrees(t)]

    def best(self, sets: int) -> PiperPlan | None:
        """First a good plan without solving knapsacks, then the best: no stage of it takes longer than the good one's.

        Few stages are left whose variants must be chosen.
        """
        rough = self._plan([self._times(t, d, None) for t, d in self.choices], sets)
        if rough is None:
            return None
        return self._plan([self._times(t, d, rough.value_s) for t, d in self.choices], sets)

    def _times(self, tensor: int, data: int, most_s: float | None) -> Floats:
        """[pair, s] seconds of every stage when data degrees from it on sum to s, infinite above `most_s`.

        Without `most_s`, stages whose fastest variants do not fit take those of least bytes.
        """
        tables = self.problem.tables(tensor)
        seconds = self._contributions(tensor, data)
        fastest = seconds.argmin(axis=2)
        fastest_s = self._sums(seconds, fastest)
        growing, fixed = self._sums(tables.in_flight[None], fastest), self._sums(tables.static[None], fastest)
        limit = self.problem.limit_bytes
        offered = np.isfinite(tables.time_s)
        whole = self.stages @ (~offered.any(axis=1)) == 0
        most_flying = -(-self.most_degrees // data)
        times = np.full((len(self.pairs), most_flying + 1), np.inf)
        for flying in range(1, most_flying + 1):
            held = np.where(offered, tables.in_flight * flying + tables.static, np.inf)
            least = held.min(axis=1)
            usable = whole & (self.stages @ np.where(np.isfinite(least), least, 0.0) <= limit)
            if not usable.any():
                break
            tight = growing * flying + fixed > limit
            time_s = np.where(usable, fastest_s, np.inf)
            if most_s is None:
                smallest = np.broadcast_to(held.argmin(axis=1), fastest.shape)
                time_s = np.where(tight & np.isfinite(time_s), self._sums(seconds, smallest), time_s)
            else:
                time_s[time_s > most_s] = np.inf
                for row in np.flatnonzero(tight & np.isfinite(time_s)):
                    nodes = np.flatnonzero(self.stages[row])
                    time_s[row], _ = self._choose(seconds[row, nodes], held[nodes], limit)
            times[:, flying] = time_s
        return times[:, -(-np.arange(self.most_degrees + 1) // data)]

    @property
    def _choose(self) -> Callable[[Floats, Floats, float], tuple[float, Integers]]:
        return _exact if self.variants == "exact" else _swaps

    def _sums(self, values: Floats, choice: Integers) -> Floats:
        """Sums over the nodes of each stage of the values of the chosen variants; those that do not exist count 0."""
        picked = np.take_along_axis(values, choice[:, :, None], axis=2)[:, :, 0]
        sums: Floats = np.einsum("pv,pv->p", np.where(np.isfinite(picked), picked, 0.0), self.stages)
        return sums

    def _contributions(self, tensor: int, data: int) -> Floats:
        """[pair, node, variant] seconds that each node of a stage adds; infinite for those that do not exist."""
        tables = self.problem.tables(tensor)
        n, most = tables.time_s.shape
        if tensor not in self.sent:
            sent = (1.0 - self.stages) @ tables.crossing.reshape(n, n * most)
            self.sent[tensor] = sent.reshape(-1, n, most)
        gradients = 4 * (data - 1) * tables.parameters / (data * self.problem.micro_batches)
        return self.sent[tensor] / (data * self.problem.bytes_per_s) + (
            gradients / self.problem.bytes_per_s + tables.time_s / data
        )

    def _plan(self, all_times: list[Floats], sets: int) -> PiperPlan | None:
        """Fill the tables from the full set down, then walk them."""
        k_most, s_most = self.problem.devices, self.most_degrees
        least = np.full((sets, k_most + 1, s_most + 1), np.inf)
        least[-1, 0, 0] = 0.0
        starts = np.searchsorted(self.pairs[:, 0], np.arange(sets + 1))
        for x in range(sets - 2, -1, -1):
            rows = slice(starts[x], starts[x + 1])
            after = least[self.pairs[rows, 1]]
            for (t, d), times in zip(self.choices, all_times, strict=True):
                stage = times[rows, None, d:]
                if np.isfinite(stage).any():
                    reached = np.maximum(after[:, : k_most + 1 - t * d, : s_most + 1 - d], stage).min(axis=0)
                    np.minimum(least[x, t * d :, d:], reached, out=least[x, t * d :, d:])
        k, s = (int(a) for a in np.unravel_index(int(np.argmin(least[0])), least[0].shape))
        value = float(least[0, k, s])
        if value == math.inf:
            return None
        x, stages = 0, []
        while k > 0:
            row, (t, d) = self._step(all_times, least, slice(starts[x], starts[x + 1]), x, k, s)
            stages.append(self._stage(row, t, d, s))
            x, k, s = int(self.pairs[row, 1]), k - t * d, s - d
        return PiperPlan(stages=tuple(stages), value_s=value)

    def _step(
        self, all_times: list[Floats], least: Floats, rows: slice, x: int, k: int, s: int
    ) -> tuple[int, tuple[int, int]]:
        for (t, d), times in zip(self.choices, all_times, strict=True):
            if t * d <= k and d <= s:
                reached = np.maximum(least[self.pairs[rows, 1], k - t * d, s - d], times[rows, s])
                if (row := int(np.argmin(reached))) is not None and reached[row] == least[x, k, s]:
                    return rows.start + row, (t, d)
        raise AssertionError("some stage gave the table's value")

    def _stage(self, row: int, tensor: int, data: int, s: int) -> PiperStage:
        tables = self.problem.tables(tensor)
        nodes = np.flatnonzero(self.stages[row])
        seconds = self._contributions(tensor, data)[row, nodes]
        held = (tables.in_flight * -(-s // data) + tables.static)[nodes]
        _, picked = self._choose(seconds, held, self.problem.limit_bytes)
        return PiperStage(
            nodes=tuple(int(v) for v in nodes), variants=tuple(int(p) for p in picked), data=data, tensor=tensor
        )


def _swaps(seconds: Floats, held: Floats, limit: float) -> tuple[float, Integers]:
    """The released rule: from the fastest variants, swap where least time is lost per byte that is still too much."""
    nodes = np.arange(len(seconds))
    picked = seconds.argmin(axis=1)
    over = held[nodes, picked].sum() - limit
    while over > 0:
        saved = held[nodes, picked][:, None] - held
        lost = seconds - seconds[nodes, picked][:, None]
        price = np.where(saved > 0, lost / np.maximum(np.minimum(saved, over), 1e-300), np.inf)
        v, x = (int(a) for a in np.unravel_index(int(np.argmin(price)), price.shape))
        if price[v, x] == np.inf:
            return math.inf, picked
        over -= saved[v, x]
        picked[v] = x
    return float(seconds[nodes, picked].sum()), picked


def _exact(seconds: Floats, held: Floats, limit: float) -> tuple[float, Integers]:
    """Least time that fits, over the Pareto set of (bytes, seconds) built node by node."""
    least = np.where(np.isfinite(seconds), held, np.inf).min(axis=1)
    room = limit - np.append(np.cumsum(least[::-1])[::-1][1:], 0.0)  # what the nodes so far may hold
    room = room + np.abs(room) * 1e-12
    fronts = [(np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64))]
    for v in range(len(seconds)):
        size, time_s, path = fronts[-1]
        usable = np.flatnonzero(np.isfinite(seconds[v]))
        sizes = (size[:, None] + held[v, usable]).ravel()
        times = (time_s[:, None] + seconds[v, usable]).ravel()
        order = np.lexsort((times, sizes))
        order = order[sizes[order] <= room[v]]
        ordered = times[order]
        best_before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
        order = order[ordered < best_before]
        parent, choice = np.divmod(order, len(usable))
        fronts = [(sizes[order], times[order], np.column_stack([path[parent], usable[choice]]))]
    sizes, times, paths = fronts[-1]
    fits = np.flatnonzero(sizes <= limit)
    if fits.size == 0:
        return math.inf, seconds.argmin(axis=1)
    best = fits[int(np.argmin(times[fits]))]
    return float(times[best]), paths[best]


def repeated(nodes: Sequence[PiperNode]) -> list[int]:
    """Nodes of the commonest name: the layers of a deep model."""
    names = [node.name for node in nodes]
    return [v for v, name in enumerate(names) if name == max(sorted(set(names)), key=names.count)]
