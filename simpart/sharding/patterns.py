"""Parameters as patterns of their names: a row for all layers instead of one for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from simpart.graph import Graph, Source, named

__all__ = ["by_pattern"]

T = TypeVar("T")


def by_pattern(graph: Graph, table: Mapping[int, T], *, rest: T | None = None) -> tuple[tuple[str, T], ...]:
    """Rows (pattern, what) for parameters by op-level value number; others match none. Those of value `rest` are left
    to a last row `*`; then all parameters must be in the table.

    A pattern that would match a parameter of another value is written out name by name.
    """
    rows: dict[str, T] = {}
    for pattern, members in _families(graph).items():
        chosen = {value: table[value] for value in members if value in table and table[value] != rest}
        if not chosen:
            continue
        first = next(iter(chosen.values()))
        alike = set(chosen) == set(members) and all(item == first for item in chosen.values())
        if alike and all(v in table and table[v] == first for v, s in graph.parameters.items() if _matches(s, pattern)):
            rows[pattern] = first
        else:
            rows.update({graph.parameters[value].name: item for value, item in chosen.items()})
    used, claimed = [], set[int]()
    for pattern, item in rows.items():  # a family may be covered by the pattern of another
        mine = {v for v, source in graph.parameters.items() if v not in claimed and _matches(source, pattern)}
        if mine:
            used.append((pattern, item))
            claimed |= mine
    return (*used, *([("*", rest)] if rest is not None else []))


def _families(graph: Graph) -> dict[str, list[int]]:
    """Parameters of each source of a template, by a pattern of their names, in the order of their use."""
    found: dict[str, list[int]] = {s.name: [v] for v, s in enumerate(graph.sources) if s.kind == "parameter"}
    for start, call in zip(graph.value_offsets.tolist(), graph.calls, strict=True):
        for i, source in enumerate(graph.templates[call.template].sources):
            if source.kind == "parameter":
                several = re.sub(r"\{\d+\}", "*", source.name)
                if several == source.name:
                    several = named(source, call.variables).name
                found.setdefault(several, []).append(start + i)
    return found


def _matches(source: Source, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (source.name, *source.aliases))
