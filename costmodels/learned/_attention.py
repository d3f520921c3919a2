"""Flash attention, forward, from its tiles: pairs of query and key tiles that the mask leaves, spread over a device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._sheet import Sheet

__all__ = [
    "ATTENTION_CONSTANTS", "attention_bound_s", "attention_bytes", "attention_features", "attention_flops",
    "attention_seconds",
]  # fmt: skip

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Dims = Mapping[str, Floats]

# name: (centre, log-sd of the prior)
ATTENTION_CONSTANTS: Mapping[str, tuple[float, float]] = {
    "floor_s": (9.0e-6, 0.6),  # of the smallest kernel, at REFERENCE_HZ
    "compute_share": (0.85, 0.15),  # of the sustained peak
    "memory_share": (0.7, 0.15),
    "idle": (250.0, 0.5),  # arithmetic in FLOP that a byte of short rows keeps from being done
    "warm_share": (0.5, 0.4),  # of L2 that still holds inputs
    "power": (4.0, 0.3),  # how sharply the slower of arithmetic and traffic decides
    "head_cost": (0.25, 0.4),  # arithmetic lost at head dim 64, less in proportion at wider heads
    "exponentials": (0.3, 0.4),  # of a clock per 64 exponentials that products don't hide
    "wave_s": (2.0e-6, 0.5),  # start and end of a wave of tiles
}
REFERENCE_HZ = 1.8e9
_KEYS = 128
_FLOPS_PER_CLOCK = 3000.0  # of a multiprocessor, the mean of several generations


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
    below = ratio * full * (full + 1) / 2 + 0.5 * (1.0 - min(ratio, 1.0)) * full + (queries - full) * reach
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
    per_token = dims["head_dim"] * (dims["heads"] * (dims["in_bytes"] + dims["out_bytes"]))
    per_token = per_token + 2.0 * dims["head_dim"] * dims["kv_heads"] * dims["in_bytes"]
    return dims["batch"] * dims["seq"] * per_token


def attention_bound_s(dims: Dims, sheet: Sheet) -> Floats:
    return np.maximum(attention_flops(dims) / sheet.peak, attention_bytes(dims) / sheet.bandwidth)


def attention_seconds(constants: Floats, dims: Dims, sheet: Sheet, *, by_clock: bool) -> Floats:
    """Seconds of each forward attention, `constants` as logs in the order of ATTENTION_CONSTANTS. What short rows lose
    is told in arithmetic at the device's peak or, `by_clock`, at one rate per clock for all devices."""
    floor, compute, memory, idle, warm, power, head_cost, exponentials, wave_s = np.exp(constants)
    heads, width = dims["batch"] * dims["heads"], dims["head_dim"]
    clocks = REFERENCE_HZ / sheet.clock_hz
    units = sheet.multiprocessors
    best = np.full(width.shape, np.inf)
    for rows in (64.0, 128.0):
        queries, met, longest = _key_tiles(dims, rows)
        work = 4.0 * rows * _KEYS * width * (1.0 + head_cost * 64.0 / width) * units / (sheet.sustained * compute)
        pair_s = work + exponentials * rows * _KEYS / 64.0 / sheet.clock_hz
        waves = np.ceil(heads * queries / units)
        spread = heads * met / units
        few = np.where(waves <= 3.0, waves * met / queries, 0.0)
        busy = np.maximum(np.maximum(spread, longest), few) * pair_s
        best = np.minimum(best, busy + waves * wave_s * clocks)
    moved = attention_bytes(dims)
    warmth = np.maximum(0.0, 1.0 - moved / (warm * sheet.l2_bytes))
    stored = moved * (1.0 - warmth) / (sheet.bandwidth * memory)
    rate = units * sheet.clock_hz * _FLOPS_PER_CLOCK if by_clock else sheet.sustained
    busy = best + moved * idle / rate
    most = np.maximum(busy, stored)
    bent = ((busy / most) ** power + (stored / most) ** power) ** (1.0 / power)
    found: Floats = floor * clocks + most * bent
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
