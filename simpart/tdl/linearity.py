"""In which inputs a description is linear: they may come in as pending sums, and so does the result."""

from __future__ import annotations

from functools import lru_cache

from simpart.tdl.expression import Access, Binary, Choose, Constant, Expression, Opaque, Reduction, Shared
from simpart.tdl.tracing import Description

__all__ = ["FLOATS", "linear_sets"]

MAX_LINEAR_SETS = 32
FLOATS = ("float", "bfloat", "complex")
"""How the names of dtypes begin that can hold a term of a sum."""


@lru_cache(maxsize=65536)
def linear_sets(description: Description) -> tuple[frozenset[int], ...]:
    """Sets of floating-point inputs in which some output may be jointly linear, smallest first; `_attempt` decides."""
    found: dict[frozenset[int], None] = {}
    for output in description.outputs:
        found.update(dict.fromkeys(_linear(output.body)))
    floats = {t.position for t in description.tensors if t.dtype.startswith(FLOATS)}
    return tuple(sorted((s for s in found if s and s <= floats), key=lambda s: (len(s), sorted(s))))


def _linear(node: Expression) -> list[frozenset[int]]:
    if isinstance(node, Access):
        return [frozenset({node.tensor.position})]
    if isinstance(node, Reduction | Shared):
        return _linear(node.body)
    if isinstance(node, Binary):
        left, right = _linear(node.left), _linear(node.right)
        if node.sign == "+":
            return [a | b for a in left for b in right][:MAX_LINEAR_SETS]
        return (left + right if node.sign == "*" else left)[:MAX_LINEAR_SETS]
    if isinstance(node, Opaque):
        return _joint([_linear(node.arguments[k]) for k in node.linear]) if node.linear else []
    if isinstance(node, Choose):
        return _joint([_linear(branch) for branch in node.branches])
    return [frozenset()] if isinstance(node, Constant) and node.value == 0 else []


def _joint(options: list[list[frozenset[int]]]) -> list[frozenset[int]]:
    """One choice for each part, together; the first choice where a part has several."""
    if not all(options):
        return []
    return [frozenset().union(*(choice[0] for choice in options))]
