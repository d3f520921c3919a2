"""Flash attention, forward, from its tiles: pairs of query and key tiles that the mask leaves, spread over a device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._sheet import Sheet

__all__ = [
    "ATTENTION_CONSTANTS", "attention_bound_s", "attention_bytes", "attention_features", "attention_flops",
    "attention_scaling_s", "attention_seconds",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Dims = Mapping[str, Floats]

# name: (centre, log-sd of the prior)
ATTENTION_CONSTANTS: Mapping[str, tuple[float, float]] = {
    "floor_s": (8.0e-6, 0.5),  # of the smallest kernel, at REFERENCE_HZ
    "compute_share": (0.72, 0.2),  # of the peak
    "memory_share": (0.8, 0.15),
    "cache_passes": (2.0, 0.3),  # in which a call with a cache moves keys and values once more: into it and back
    "warm_share": (0.8, 0.4),  # of L2 that still holds inputs
    "power": (2.5, 0.3),  # how sharply the slower of arithmetic and traffic decides
    "head_cost": (0.1, 0.6),  # arithmetic lost at head dim 64, less in proportion at wider heads
    "exponentials": (0.6, 0.5),  # share of their time that counts
    "tile_clocks": (1500.0, 0.6),  # start and end of a tile
}
REFERENCE_HZ = 1.8e9
_KEYS = 64
_EXPONENTIALS_PER_CLOCK = 16.0  # of a multiprocessor's special function units, the same from Volta to Blackwell
_LEAST_COLD = 0.1  # what L2 holds still counts a tenth: it is not infinitely fast


def _key_tiles(dims: Dims, rows: float) -> tuple[Floats, Floats, Floats]:
    """(query tiles, key tiles they meet in all, key tiles of the longest row) of one head of one batch entry."""
    length, causal = dims["seq"], dims["causal"] > 0
    window = np.where(dims["window"] > 0, np.minimum(dims["window"], length), length)
    queries = np.ceil(length / rows)
    whole = np.ceil(length / _KEYS)
    reach = np.minimum(whole, np.ceil((window + rows) / _KEYS))
    # Row i of a causal mask meets the key tiles up to its diagonal: (i + 1) rows / keys, at most `reach`.
    ratio = rows / _KEYS
    full = np.minimum(queries, np.floor(reach / ratio))
    below = ratio * full * (full + 1) / 2 + (queries - full) * reach
    met = np.where(causal, np.maximum(below, queries), queries * reach)
    return queries, met, reach


def attention_flops(dims: Dims) -> Floats:
    """FLOPs that the mask leaves: `4 · pairs · head dim`."""
    length, heads = dims["seq"], dims["batch"] * dims["heads"]
    window = np.where(dims["window"] > 0, np.minimum(dims["window"], length), length)
    triangle = window * length - window * (window - 1) / 2
    pairs = np.where(dims["causal"] > 0, np.where(window < length, triangle, length * (length + 1) / 2), length**2)
    return 4.0 * heads * pairs * dims["head_dim"]


def attention_bytes(dims: Dims) -> Floats:
    """Queries, keys and values read, outputs written, once each."""
    queries, keys = _queries_and_keys_bytes(dims)
    return queries + keys


def _queries_and_keys_bytes(dims: Dims) -> tuple[Floats, Floats]:
    """(queries and outputs, keys and values)."""
    elements = dims["batch"] * dims["seq"] * dims["head_dim"]
    return (
        elements * dims["heads"] * (dims["in_bytes"] + dims["out_bytes"]),
        elements * 2.0 * dims["kv_heads"] * dims["in_bytes"],
    )


def attention_bound_s(dims: Dims, sheet: Sheet) -> Floats:
    return np.maximum(attention_flops(dims) / sheet.peak, attention_bytes(dims) / sheet.bandwidth)


def attention_scaling_s(dims: Dims, sheet: Sheet) -> Floats:
    """The bound, with exponentials on top of products: a peak that grew alone helps narrow heads least."""
    flops, share = attention_flops(dims), ATTENTION_CONSTANTS["exponentials"][0]
    exponentials = share * flops / (4.0 * dims["head_dim"]) / _EXPONENTIALS_PER_CLOCK
    busy = flops / sheet.peak + exponentials / (sheet.multiprocessors * sheet.clock_hz)
    return np.maximum(busy, attention_bytes(dims) / sheet.bandwidth)


def attention_seconds(constants: Floats, dims: Dims, sheet: Sheet, *, by_clock: bool) -> Floats:
    """Seconds of each forward attention, `constants` as logs in the order of ATTENTION_CONSTANTS.

    A pair of tiles takes its products at a share of the peak and its exponentials at a rate per clock; the busiest
    multiprocessor decides. Kernels differ in how far they hide exponentials, and devices in what they lose under a
    power cap, hence two forms. `by_clock`: exponentials come on top of products, which run at the sustained peak, and
    the floor is told in clocks. Else they are half hidden (root of squares) but in a row that is alone on its
    multiprocessor, the peak is between the sustained one and that of the data sheet, and the floor is told in seconds.
    """
    floor, compute, memory, passes, warm, power, head_cost, exponentials, tile_clocks = np.exp(constants)
    heads, width = dims["batch"] * dims["heads"], dims["head_dim"]
    units, clock = sheet.multiprocessors, sheet.clock_hz
    peak = sheet.sustained if by_clock else np.sqrt(sheet.sustained * sheet.peak)
    product_s = 4.0 * _KEYS * (width + head_cost * 64.0) * units / (peak * compute)
    exponential_s = exponentials * _KEYS / _EXPONENTIALS_PER_CLOCK / clock
    alone_s = product_s + exponential_s
    query_s = alone_s if by_clock else np.hypot(product_s, exponential_s)
    busy = np.full(width.shape, np.inf)
    for rows in (64.0, 128.0):
        queries, met, longest = _key_tiles(dims, rows)
        slots = heads * queries / units
        waves = np.ceil(slots)
        few = np.where(waves <= 3.0, waves * met / queries, 0.0)
        pairs_s = rows * np.maximum(np.maximum(heads * met / units, few) * query_s, longest * alone_s)
        busy = np.minimum(busy, pairs_s + tile_clocks / clock * np.maximum(slots, 1.0))
    ends, keys = _queries_and_keys_bytes(dims)
    moved = ends + keys * (1.0 + passes * dims["cached"])
    # Calls are timed on the same buffers again and again: what fits into L2 stays there.
    cold = 1.0 - (1.0 - _LEAST_COLD) * np.minimum(1.0, warm * sheet.l2_bytes / moved)
    stored = moved * cold / (sheet.bandwidth * memory)
    most, least = np.maximum(busy, stored), np.minimum(busy, stored)
    bent = (1.0 + (least / most) ** power) ** (1.0 / power)
    found: Floats = floor * (REFERENCE_HZ / clock if by_clock else 1.0) + most * bent
    return found


def attention_features(dims: Dims, sheet: Sheet, analytic: Floats) -> list[Floats]:
    """What the residual sees: sizes, grouping, window, times against each other, wave fill."""
    arithmetic, traffic = attention_flops(dims) / sheet.peak, attention_bytes(dims) / sheet.bandwidth
    roofline = np.maximum(arithmetic, traffic)
    window = np.where(dims["window"] > 0, np.minimum(dims["window"], dims["seq"]), dims["seq"])
    found = [np.log(dims["batch"]), np.log(dims["seq"]), np.log(dims["heads"]), dims["head_dim"], dims["causal"]]
    found += [np.log(dims["heads"] / dims["kv_heads"]), np.log(window / dims["seq"]), np.log(arithmetic)]
    found += [np.log(traffic), np.log(roofline), np.log(arithmetic / traffic)]
    found.append(np.log(attention_bytes(dims) / sheet.l2_bytes))
    waves = dims["batch"] * dims["heads"] * np.ceil(dims["seq"] / 128) / sheet.multiprocessors
    found += [np.log(waves), waves / np.ceil(waves)]
    return [*found, np.log(analytic), np.log(analytic / roofline)]
