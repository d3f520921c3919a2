"""Matrix products as tiles in waves: ten constants for all devices, everything else from shapes and data sheet.

For each tile and split of the inner dim: arithmetic in waves of tiles over the multiprocessors, memory traffic (less
what is still in L2), L2 traffic, and overhead; the fastest choice counts. Rates are per clock and overheads in clocks,
so that they carry over between generations. The form and the centres of the priors: see docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._sheet import Sheet

__all__ = ["TILE_CONSTANTS", "product_bound_s", "product_bytes", "product_features", "product_flops", "tile_seconds"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Dims = Mapping[str, Floats]

# name: (centre, log-sd of the prior)
TILE_CONSTANTS: Mapping[str, tuple[float, float]] = {
    "floor_s": (2.0e-6, 0.3),  # of the smallest kernel, at REFERENCE_HZ
    "compute_share": (0.9, 0.15),  # of the sustained peak, by an endless product
    "memory_share": (0.82, 0.08),
    "l2_share": (0.6, 0.4),  # of three times the memory bandwidth
    "feed_share": (0.8, 0.3),  # of the bytes per clock that a multiprocessor takes in
    "wave_s": (0.5e-6, 0.5),  # start and end of a wave of tiles
    "warm_share": (0.1, 0.4),  # of L2 that still holds inputs
    "power": (5.0, 0.3),  # how sharply the slowest of the three resources decides
    "edge": (30.0, 0.4),  # cost of a tile's edge against its area, in elements
    "split_s": (2.2e-6, 0.3),  # adding up a split inner dim
}
REFERENCE_HZ = 1.8e9
_BYTES_PER_CLOCK = 64.0
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (16, 64), (16, 128))
_SPLITS = (1, 2, 4, 8, 16)
_LEAST_SPLIT = 128


def product_flops(dims: Dims) -> Floats:
    return 2.0 * dims["batch"] * dims["m"] * dims["n"] * dims["k"]


def product_bytes(dims: Dims) -> Floats:
    """Bytes that must move: both inputs read, the output written."""
    m, n, k = dims["m"], dims["n"], dims["k"]
    return dims["batch"] * (dims["in_bytes"] * (m * k + n * k) + dims["out_bytes"] * m * n)


def product_bound_s(dims: Dims, sheet: Sheet) -> Floats:
    """Roofline at full peak and bandwidth."""
    return np.maximum(product_flops(dims) / sheet.peak, product_bytes(dims) / sheet.bandwidth)


def tile_seconds(
    constants: Floats, dims: Dims, sheet: Sheet, *, by_clock: bool, floor_in_clocks: bool = True, step: float = 32.0
) -> Floats:
    """Seconds of each product. `constants` as logs in the order of TILE_CONSTANTS.

    `by_clock` takes a multiprocessor's intake as the mean (in logs) of bytes per clock and its share of the memory
    bandwidth, and overheads in clocks; without it intake is the share of the bandwidth and overheads are seconds. Tiles
    take the inner dim in whole steps of `step` elements.
    """
    floor, compute, memory, l2, feed, wave_s, warm, power, edge, split_s = np.exp(constants)
    batch, m, n, k = (dims[name] for name in ("batch", "m", "n", "k"))
    in_bytes, out_bytes = dims["in_bytes"], dims["out_bytes"]
    units = sheet.multiprocessors
    clocks = REFERENCE_HZ / sheet.clock_hz
    pace = clocks if by_clock else 1.0
    rate = sheet.sustained * compute / units
    share = 4.0 * sheet.bandwidth / units
    intake = feed * (np.sqrt(_BYTES_PER_CLOCK * sheet.clock_hz * share) if by_clock else share)
    unique, output = product_bytes(dims), batch * m * n
    warmth = np.maximum(0.0, 1.0 - unique / (warm * sheet.l2_bytes))
    traffic = unique * (1.0 - warmth) / (sheet.bandwidth * memory)
    spilled = 4.0 * output / (sheet.bandwidth * memory)
    cached = (unique + out_bytes * output) / (3.0 * sheet.bandwidth * l2)

    lengths = [step * np.ceil(k / (step * s)) for s in _SPLITS]
    allowed = [None if s == 1 else k >= _LEAST_SPLIT * s for s in _SPLITS]
    splits = [i for i, mask in enumerate(allowed) if mask is None or mask.any()]
    slowest = [np.maximum(cached, traffic + (spilled * _SPLITS[i] if i else 0.0)) for i in splits]
    best = np.full(m.shape, np.inf)
    compute_s, overhead_s, split = np.zeros(m.shape), np.zeros(m.shape), np.ones(m.shape)
    for rows, columns in _TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        pace_s = np.maximum(
            2.0 * rows * columns * (1.0 + edge * (1.0 / rows + 1.0 / columns)) / rate,
            (np.minimum(rows, m) + np.minimum(columns, n)) * in_bytes / intake,
        )
        for i, other in zip(splits, slowest, strict=True):
            waves = np.ceil(tiles * _SPLITS[i] / units)  # exact where units divide the tiles
            busy = waves * lengths[i] * pace_s
            extra = waves * (wave_s * pace) + (split_s * pace if i else 0.0)
            total = np.maximum(busy, other) + extra
            better = total < best
            if allowed[i] is not None:
                better &= allowed[i]
            np.copyto(best, total, where=better)
            np.copyto(compute_s, busy, where=better)
            np.copyto(overhead_s, extra, where=better)
            np.copyto(split, _SPLITS[i], where=better)
    traffic = traffic + np.where(split > 1.0, spilled * split, 0.0)
    most = np.maximum(np.maximum(compute_s, traffic), cached)
    bent = (compute_s / most) ** power + (traffic / most) ** power + (cached / most) ** power
    found: Floats = floor * (clocks if floor_in_clocks else 1.0) + overhead_s + most * bent ** (1.0 / power)
    return found


def product_features(dims: Dims, sheet: Sheet, analytic: Floats, *, step: float = 32.0) -> list[Floats]:
    """What the residual sees of a product: sizes, times against each other, tile and wave fill; where the steps
    of the inner dim are long, how much of one, and of two at a time, it fills."""
    m, n, k = dims["m"], dims["n"], dims["k"]
    arithmetic, moved = product_flops(dims) / sheet.peak, product_bytes(dims)
    traffic = moved / sheet.bandwidth
    roofline = np.maximum(arithmetic, traffic)
    found = [np.log(m), np.log(n), np.log(k), np.log(dims["batch"]), np.log(arithmetic), np.log(traffic)]
    found += [np.log(roofline), np.log(arithmetic / traffic), np.log(moved / sheet.l2_bytes)]
    found.append(np.log(dims["batch"] * dims["out_bytes"] * m * n / sheet.l2_bytes))
    for rows, columns in ((256, 128), (128, 128), (64, 64), (128, 32)):
        waves = np.ceil(m / rows) * np.ceil(n / columns) * dims["batch"] / sheet.multiprocessors
        found += [np.log(waves), waves / np.ceil(waves)]
    found += [m % 128 / 128, (n % 128 != 0) * 1.0, (m % 8 != 0) * 1.0, (n % 8 != 0) * 1.0, (k % 8 != 0) * 1.0]
    if step > 32.0:
        found += [k / (length * np.ceil(k / length)) for length in (step, 2.0 * step)]
    return [*found, np.log(analytic), np.log(analytic / roofline)]
