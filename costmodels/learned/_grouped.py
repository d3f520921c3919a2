"""Mixture-of-experts layers as grouped products: one pair of products per expert that has tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._sheet import Sheet
from simpart.costmodels.learned._tile import TILE_CONSTANTS, product_features, tile_seconds

__all__ = ["GROUPED_CONSTANTS", "grouped_arithmetic_s", "grouped_bound_s", "grouped_features", "grouped_seconds"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Dims = Mapping[str, Floats]

GROUPED_CONSTANTS: Mapping[str, tuple[float, float]] = {
    **TILE_CONSTANTS,
    "floor_s": (15e-6, 0.5),  # sorting tokens and summing experts are kernels of their own
    "skew": (0.15, 0.6),  # time added by a power law of loads, per unit of its exponent
    "shuffle": (3.0, 0.5),  # passes over the tokens of all experts, in and out
}


def _products(dims: Dims) -> tuple[Dims, Dims]:
    """Up (and gate) and down products: as many as experts have tokens, each with its share of them."""
    experts, pairs = dims["experts"], np.maximum(dims["pairs"], 1.0)
    active = np.maximum(1.0, experts * -np.expm1(-pairs / experts))
    common = {
        "batch": active,
        "m": np.maximum(1.0, pairs / active),
        "in_bytes": dims["in_bytes"],
        "out_bytes": dims["out_bytes"],
    }
    up = {**common, "n": (dims["matrices"] - 1.0) * dims["inter"], "k": dims["hidden"]}
    return up, {**common, "n": dims["hidden"], "k": dims["inter"]}


def grouped_arithmetic_s(dims: Dims, sheet: Sheet) -> Floats:
    found: Floats = 2.0 * dims["pairs"] * dims["hidden"] * dims["inter"] * dims["matrices"] / sheet.peak
    return found


def _weight_bytes(dims: Dims) -> Floats:
    up, _ = _products(dims)
    found: Floats = up["batch"] * dims["matrices"] * dims["hidden"] * dims["inter"] * dims["in_bytes"]
    return found


def grouped_bound_s(dims: Dims, sheet: Sheet) -> Floats:
    """Least arithmetic against weights of one expert; how many experts have tokens is left to chance."""
    return np.maximum(grouped_arithmetic_s(dims, sheet), 0.5 * _weight_bytes(dims) / sheet.bandwidth)


def grouped_seconds(constants: Floats, dims: Dims, sheet: Sheet, *, by_clock: bool) -> Floats:
    """Seconds of each layer, `constants` as logs in the order of GROUPED_CONSTANTS."""
    tile, (skew, shuffle) = constants[:-2], np.exp(constants[-2:])
    nothing = tile.copy()
    nothing[0] = -40.0
    up, down = _products(dims)
    products = tile_seconds(tile, up, sheet, by_clock=by_clock) + tile_seconds(nothing, down, sheet, by_clock=by_clock)
    moved = dims["pairs"] * (2.0 * dims["hidden"] + dims["matrices"] * dims["inter"]) * 2.0 * shuffle / sheet.bandwidth
    found: Floats = products * (1.0 + skew * dims["skew"]) + moved
    return found


def grouped_features(dims: Dims, sheet: Sheet, analytic: Floats) -> list[Floats]:
    """As of its up product, and loads of experts."""
    up, _ = _products(dims)
    found = product_features(up, sheet, analytic)
    found += [np.log(dims["pairs"] / dims["experts"]), np.log(dims["experts"]), dims["skew"], np.log(dims["hidden"])]
    return [*found, np.log(dims["inter"]), dims["matrices"], np.log(analytic * sheet.bandwidth / _weight_bytes(dims))]
