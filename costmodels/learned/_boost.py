"""Boosted oblivious trees: every node of a level asks the same question, so that a tree is a table of 2^depth values.

Grown by histogram boosting on a smoothed absolute loss (iteratively reweighted squares). Trained with numba, evaluated
with numpy: 300 trees of depth 6 on 10,000 rows in about 10 ms. References: Prokhorenkova et al., "CatBoost"
(2018), for the trees; Friedman, "Greedy function approximation" (2001), for the boosting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["Boost", "fit_boost"]

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.int32]]

_BINS = 128
_LEAF_PRIOR = 4.0  # rows' worth of evidence for a leaf value of zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Boost:
    """`leaves[t, code]` summed over trees; bit d of a code says whether `features[t, d]` exceeds `thresholds[t, d]`."""

    features: Table
    thresholds: Matrix
    leaves: Matrix

    def predict(self, columns: Matrix) -> Floats:
        """The sum of all trees for each row; `columns[f]` is feature f of all rows."""
        rows, column = columns.shape[1], list(columns)
        total, value = np.zeros(rows, dtype=np.float32), np.empty(rows, dtype=np.float32)
        above, code = np.empty(rows, dtype=bool), np.empty(rows, dtype=np.uint8)
        bit, first = above.view(np.uint8), code.view(bool)
        greater, add = np.greater, np.add
        for features, thresholds, leaves in zip(
            self.features[:, ::-1].tolist(), self.thresholds[:, ::-1].tolist(), self.leaves, strict=True
        ):
            greater(column[features[0]], thresholds[0], first)
            for feature, threshold in zip(features[1:], thresholds[1:], strict=True):
                greater(column[feature], threshold, above)
                add(code, code, code)
                add(code, bit, code)
            leaves.take(code, out=value, mode="clip")
            add(total, value, total)
        return total.astype(np.float64)


def fit_boost(
    columns: Matrix,
    target: Floats,
    weights: Floats,
    *,
    trees: int = 150,
    depth: int = 5,
    rate: float = 0.1,
    share: float = 0.7,
    smoothing: float = 0.05,
    seed: int = 0,
) -> Boost:
    """Trees for `target`, in its units; `share` of the features stand for choice in each tree, errors below `smoothing`
    count squared. One thread, same seed, same trees."""
    grow = _compiled()
    rng = np.random.default_rng(seed)
    edges = _edges(columns)
    binned = np.stack([np.searchsorted(e, c, side="left") for e, c in zip(edges, columns, strict=True)]).astype(
        np.uint8
    )
    lengths = np.array([len(e) for e in edges], dtype=np.int64)
    count = len(columns)
    chosen = max(1, round(share * count))
    prediction = np.zeros(len(target))
    features = np.zeros((trees, depth), dtype=np.int32)
    cuts = np.zeros((trees, depth), dtype=np.int32)
    leaves = np.zeros((trees, 1 << depth), dtype=np.float32)
    scaled = weights / weights.mean()
    for tree in range(trees):
        candidates = np.sort(rng.choice(count, chosen, replace=False))
        error = target - prediction
        weight = scaled / np.sqrt(1.0 + (error / smoothing) ** 2)
        weight /= weight.mean()
        code = grow(binned, error, weight, candidates, lengths, features[tree], cuts[tree], _LEAF_PRIOR)
        above = np.bincount(code, weight * error, 1 << depth)
        leaves[tree] = rate * above / (np.bincount(code, weight, 1 << depth) + _LEAF_PRIOR)
        prediction += leaves[tree][code]
    thresholds = np.array(
        [[edges[f][c] for f, c in zip(*row, strict=True)] for row in zip(features, cuts, strict=True)]
    )
    return Boost(features=features, thresholds=thresholds.astype(np.float32), leaves=leaves)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True)(_grow)


def _edges(columns: Matrix) -> list[Matrix]:
    """Bin edges per feature: midpoints of its values when few, else its quantiles; a value ≤ edge lies below."""
    found = []
    for column in columns:
        values = np.unique(column)
        if len(values) > _BINS:
            values = np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)))
        middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        found.append(middle if len(middle) else values)
    return found


def _grow(binned, error, weight, candidates, lengths, features, cuts, prior):  # type: ignore[no-untyped-def]
    """Choose feature and cut of each level in place; the code of the leaf of each row. Compiled by numba."""
    rows, depth = binned.shape[1], len(features)
    code = np.zeros(rows, dtype=np.int64)
    for level in range(depth):
        groups = 1 << level
        best, best_feature, best_cut = -1.0, candidates[0], 0
        for feature in candidates:
            column, bins = binned[feature], lengths[feature]
            sums = np.zeros((groups, bins + 1))
            mass = np.zeros((groups, bins + 1))
            for i in range(rows):
                sums[code[i], column[i]] += weight[i] * error[i]
                mass[code[i], column[i]] += weight[i]
            gains = np.zeros(bins)
            for group in range(groups):
                total, heavy = sums[group].sum(), mass[group].sum()
                left, light = 0.0, 0.0
                for cut in range(bins):
                    left += sums[group, cut]
                    light += mass[group, cut]
                    right = total - left
                    gains[cut] += left * left / (light + prior) + right * right / (heavy - light + prior)
            for cut in range(bins):
                if gains[cut] > best + 1e-12:
                    best, best_feature, best_cut = gains[cut], feature, cut
        features[level], cuts[level] = best_feature, best_cut
        chosen = binned[best_feature]
        for i in range(rows):
            if chosen[i] > best_cut:
                code[i] += groups
    return code
