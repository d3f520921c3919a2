"""Exact reductions of a cost graph: what is left is smaller and has the same optimum.

Forbidden and dominated options go (Goldstein's rule), parallel edges merge, variables that follow another one merge
into it, and variables without rows and with at most two neighbours are eliminated by a min-plus product.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simpart.searchers._cost_graph.types import ROW_TOLERANCE, CostGraph, Floats, Ints, Row, Table

__all__ = ["Core", "reduce_graph"]

_LARGEST_PRODUCT = 1 << 22  # entries of one min-plus or dominance table at a time
_LARGEST_ELIMINATION = 1 << 27  # work of one min-plus product


class Core:
    """A graph being reduced: variables by their number in the original graph, options by their original number."""

    def __init__(self, graph: CostGraph) -> None:
        self.unary: dict[int, Floats] = {v: np.asarray(c, dtype=np.float64) for v, c in enumerate(graph.unary)}
        self.options: dict[int, Ints] = {v: np.arange(len(c)) for v, c in self.unary.items()}
        self.neighbours: dict[int, dict[int, Table]] = {v: {} for v in self.unary}
        self.rows: list[tuple[str, float, dict[int, Floats]]] = [
            (
                row.name,
                row.limit + ROW_TOLERANCE * max(1.0, abs(row.limit)),
                {v: np.asarray(w, dtype=np.float64) for v, w in row.weights},
            )
            for row in graph.rows
        ]
        self.constant = 0.0
        self.why = ""
        self._sizes = [len(c) for c in graph.unary]
        self._trail: list[Callable[[Ints], None]] = []
        for i, j, table in graph.edges:
            if i == j:
                self.unary[i] = self.unary[i] + np.diagonal(table)
            else:
                self.connect(i, j, np.asarray(table, dtype=np.float64))

    def connect(self, i: int, j: int, table: Table) -> None:
        """Add a table between two variables, merging it with what is there."""
        there = self.neighbours[i].get(j)
        table = table if there is None else there + table
        self.neighbours[i][j], self.neighbours[j][i] = table, table.T

    def keep(self, v: int, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Drop the options of `v` outside `mask`."""
        self.unary[v], self.options[v] = self.unary[v][mask], self.options[v][mask]
        for u, table in self.neighbours[v].items():
            self.neighbours[v][u] = kept = table[mask]
            self.neighbours[u][v] = kept.T
        for _, _, weights in self.rows:
            if v in weights:
                weights[v] = weights[v][mask]

    def forget(self, v: int) -> None:
        """Take a variable out; the caller has put its cost elsewhere."""
        for u in self.neighbours.pop(v):
            del self.neighbours[u][v]
        del self.unary[v]

    def positions(self, v: int) -> Ints:
        """Original option → position among the present ones."""
        found = np.zeros(self._sizes[v], dtype=np.int64)
        found[self.options[v]] = np.arange(len(self.options[v]))
        return found

    def later(self, step: Callable[[Ints], None]) -> None:
        """A step that completes a choice, run in the reverse order of recording."""
        self._trail.append(step)

    def expand(self, chosen: dict[int, int]) -> Ints:
        """The choice in the original graph that belongs to options (by position) of the remaining variables."""
        choice = np.zeros(len(self._sizes), dtype=np.int64)
        for v, x in chosen.items():
            choice[v] = self.options[v][x]
        for step in reversed(self._trail):
            step(choice)
        return choice

    def in_rows(self) -> set[int]:
        return {v for _, _, weights in self.rows for v in weights}

    def graph(self, variables: list[int]) -> CostGraph:
        """The remaining graph on some variables, renumbered in their order."""
        number = {v: n for n, v in enumerate(variables)}
        return CostGraph(
            unary=tuple(self.unary[v] for v in variables),
            edges=tuple(
                (number[v], number[u], table)
                for v in variables
                for u, table in sorted(self.neighbours[v].items())
                if v < u
            ),
            rows=tuple(
                Row(limit=limit, weights=tuple((number[v], w) for v, w in sorted(weights.items())), name=name)
                for name, limit, weights in self.rows
                if any(v in number for v in weights)
            ),
        )

    def components(self) -> list[list[int]]:
        """Variables connected by tables or rows, apart from the others."""
        leader = {v: v for v in self.unary}

        def find(v: int) -> int:
            while leader[v] != v:
                leader[v] = v = leader[leader[v]]
            return v

        groups = [[v, u] for v, table in self.neighbours.items() for u in table]
        for group in [*groups, *(list(weights) for _, _, weights in self.rows)]:
            for v in group[1:]:
                leader[find(v)] = find(group[0])
        found: dict[int, list[int]] = {}
        for v in sorted(self.unary):
            found.setdefault(find(v), []).append(v)
        return list(found.values())


def reduce_graph(graph: CostGraph, *, dominance: bool = True) -> Core:
    """Reduce to the fixed point of all rules; `why` of the result says so where nothing can be chosen."""
    core = Core(graph)
    _tidy_rows(core)
    waiting = set(core.unary)
    while waiting and not core.why:
        rowed = core.in_rows()
        for v in sorted(waiting):
            waiting.discard(v)
            if v not in core.unary:
                continue
            touched = set(core.neighbours[v])
            if _drop_forbidden(core, v):
                waiting |= touched
            if not len(core.options[v]):
                core.why = f"every option of variable {v} is forbidden, or fits no row"
                break
            if v not in rowed and _eliminate(core, v):
                waiting |= touched
            elif (leader := _leader(core, v)) is not None:
                _merge(core, v, *leader)
                waiting |= touched
                rowed = core.in_rows()
            elif dominance and _drop_dominated(core, v):
                waiting |= touched | {v}
        if not waiting and core.rows and not core.why:
            before = core.in_rows()
            waiting |= _tidy_rows(core) & set(core.unary)
            waiting |= (before - core.in_rows()) & set(core.unary)
    return core


def _tidy_rows(core: Core) -> set[int]:
    """Rows without what all options weigh; rows that always hold go, a row that never holds is said.

    Returns the variables of which an option no longer fits a row.
    """
    rows = []
    for name, limit, weights in core.rows:
        least = {v: float(w.min()) for v, w in weights.items()}
        spare = {v: w - least[v] for v, w in weights.items() if w.max() > least[v]}
        rest = limit - sum(least.values())
        if rest < 0:
            core.why = core.why or (
                f"{name or 'a row'} needs at least {limit - rest:.6g} and may use {limit:.6g}, whatever is chosen"
            )
            return set()
        if sum(float(w.max()) for w in spare.values()) > rest:
            rows.append((name, rest, spare))
    core.rows = rows
    touched: set[int] = set()
    for _, rest, weights in rows:
        for v, w in weights.items():
            if (misfits := w > rest).any():
                core.unary[v] = np.where(misfits, np.inf, core.unary[v])
                touched.add(v)
    return touched


def _drop_forbidden(core: Core, v: int) -> bool:
    possible = np.isfinite(core.unary[v])
    for table in core.neighbours[v].values():
        possible &= np.isfinite(table).any(axis=1)
    if possible.all():
        return False
    core.keep(v, possible)
    return True


def _eliminate(core: Core, v: int) -> bool:
    """Take out a variable with at most two neighbours."""
    neighbours = sorted(core.neighbours[v])
    if len(neighbours) > 2:
        return False
    options, unary = core.options[v], core.unary[v]
    if not neighbours:
        best = int(options[np.argmin(unary)])
        core.constant += float(unary.min())
        core.later(lambda choice: choice.__setitem__(v, best))
    elif len(neighbours) == 1:
        (u,) = neighbours
        table = unary[:, None] + core.neighbours[v][u]
        pick, place = options[np.argmin(table, axis=0)], core.positions(u)
        core.unary[u] = core.unary[u] + table.min(axis=0)
        core.later(lambda choice: choice.__setitem__(v, pick[place[choice[u]]]))
    else:
        u, w = neighbours
        left, right = unary[:, None] + core.neighbours[v][u], core.neighbours[v][w]
        if left.size * right.shape[1] > _LARGEST_ELIMINATION:
            return False
        cost, where = _min_plus(left.T, right)
        pick2, place_u, place_w = options[where], core.positions(u), core.positions(w)
        core.later(lambda choice: choice.__setitem__(v, pick2[place_u[choice[u]], place_w[choice[w]]]))
        core.forget(v)
        core.connect(u, w, cost)
        return True
    core.forget(v)
    return True


def _min_plus(left: Table, right: Table) -> tuple[Table, Table]:
    """`min over k of left[i, k] + right[k, j]` and where."""
    rows = max(1, _LARGEST_PRODUCT // max(1, right.size))
    cost = np.empty((len(left), right.shape[1]))
    where = np.empty((len(left), right.shape[1]), dtype=np.int64)
    for start in range(0, len(left), rows):
        total = left[start : start + rows, :, None] + right[None]
        where[start : start + rows] = np.argmin(total, axis=1)
        cost[start : start + rows] = total.min(axis=1)
    return cost, where


def _leader(core: Core, v: int) -> tuple[int, Ints] | None:
    """A neighbour whose option leaves `v` exactly one, and which one."""
    for u, table in sorted(core.neighbours[v].items()):
        finite = np.isfinite(table)
        if len(core.options[u]) > 1 and (finite.sum(axis=0) == 1).all():
            return u, np.argmax(finite, axis=0)
        if len(core.options[v]) == 1:
            return u, np.zeros(len(core.options[u]), dtype=np.int64)
    return None


def _merge(core: Core, v: int, u: int, option: Ints) -> None:
    """Merge `v` into `u`, whose option says which one `v` takes."""
    pick, place = core.options[v][option], core.positions(u)
    core.later(lambda choice: choice.__setitem__(v, pick[place[choice[u]]]))
    tables = dict(core.neighbours[v])
    own = core.unary[v][option] + tables.pop(u)[option, np.arange(len(option))]
    core.unary[u] = core.unary[u] + own
    core.forget(v)
    for w, table in tables.items():
        core.connect(u, w, table[option])
    for _, _, weights in core.rows:
        if v in weights:
            weight = weights.pop(v)[option]
            weights[u] = weights[u] + weight if u in weights else weight


def _drop_dominated(core: Core, v: int) -> bool:
    """Drop options that another one replaces without loss, whatever the neighbours take."""
    unary = core.unary[v]
    size = len(unary)
    if size < 2 or any(size * table.size > _LARGEST_PRODUCT for table in core.neighbours[v].values()):
        return False
    excess = unary[None, :] - unary[:, None]  # [a, b]: how much worse b is than a at worst
    with np.errstate(invalid="ignore"):
        for table in core.neighbours[v].values():
            difference = table[None] - table[:, None]
            difference[np.isnan(difference)] = -np.inf
            excess = excess + difference.max(axis=2)
    never_worse = excess <= 0
    for _, _, weights in core.rows:
        if v in weights:
            never_worse &= weights[v][None, :] <= weights[v][:, None]
    keep = np.ones(size, dtype=np.bool_)
    for a in range(size - 1, -1, -1):
        others = never_worse[a] & keep
        others[a] = False
        keep[a] = not others.any()
    if keep.all():
        return False
    core.keep(v, keep)
    return True
