"""Convolutions as implicit products or, of 3×3 taps at stride 1, as sixteen smaller ones (Winograd's F(2×2, 3×3)).

Which of the two a library takes is its own affair; the faster is assumed, and where both are near, a mix. Reference:
Lavin & Gray, "Fast algorithms for convolutional neural networks" (2016).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._sheet import Sheet
from simpart.costmodels.learned._tile import product_features, tile_seconds

__all__ = ["WINOGRAD_SAVES", "convolution_features", "convolution_seconds", "convolution_traffic_s"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Dims = Mapping[str, Floats]

WINOGRAD_SAVES = 2.25  # 36 multiplications of four outputs in 16
_PRODUCTS, _OUTPUTS, _TAPS = 16.0, 4.0, 9.0
_POWER = 4.0  # how sharply the faster algorithm decides


def convolution_seconds(constants: Floats, dims: Dims, sheet: Sheet, *, by_clock: bool) -> Floats:
    """Seconds of each convolution. `constants` and `by_clock` as in `tile_seconds`."""
    direct = tile_seconds(constants, dims, sheet, by_clock=by_clock, floor_in_clocks=False)
    smaller = {**dims, "batch": _PRODUCTS * dims["batch"], "m": dims["m"] / _OUTPUTS, "k": dims["channels"]}
    winograd = tile_seconds(constants, smaller, sheet, by_clock=by_clock, floor_in_clocks=False)
    allowed = (dims["stride"] == 1.0) & (np.round(dims["k"] / dims["channels"]) == _TAPS)
    winograd = np.where(allowed, winograd, np.inf)
    least = np.minimum(direct, winograd)
    found: Floats = least * ((least / direct) ** _POWER + (least / winograd) ** _POWER) ** (-1.0 / _POWER)
    return found


def convolution_features(dims: Dims, sheet: Sheet, analytic: Floats) -> list[Floats]:
    """What the residual sees: the product, the taps, and how the image falls into tiles of two and four outputs."""
    side = dims["side"]
    found = product_features(dims, sheet, analytic)
    found += [dims["kernel"], dims["stride"], dims["channels"] % 4, np.log(dims["channels"])]
    found.append(np.log(dims["k"] / dims["channels"] / dims["kernel"] ** 2 + 1.0))
    found += [np.log(side), np.log(dims["m"] / side**2), side % 4]
    return [*found, *((tile * np.ceil(side / tile) / side) ** 2 for tile in (2.0, 4.0))]


def convolution_traffic_s(dims: Dims, sheet: Sheet) -> Floats:
    """Seconds that the outputs, the weights and those inputs that some window covers take at the memory bandwidth."""
    taps = dims["k"] / dims["channels"]
    spatial = np.log(np.maximum(taps, 2.0)) / np.log(np.maximum(dims["kernel"], 2.0))  # irrelevant for a single tap
    covered = np.minimum(taps, dims["stride"] ** np.where(taps > 1, spatial, 0.0))
    read = dims["m"] * dims["channels"] * covered + dims["k"] * dims["n"]
    moved = dims["batch"] * (read * dims["in_bytes"] + dims["m"] * dims["n"] * dims["out_bytes"])
    found: Floats = moved / sheet.bandwidth
    return found
