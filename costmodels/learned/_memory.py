"""Kernels that mostly move memory: a floor and bytes at a share of the bandwidth that each op has for its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simpart.costmodels.learned._sheet import Sheet

__all__ = ["MEMORY_OPS", "memory_constants", "memory_features", "memory_seconds"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Dims = Mapping[str, Floats]

# op: centre of the share of the bandwidth that it reaches. `bytes` counts what must move.
MEMORY_OPS: Mapping[str, float] = {
    "add": 0.85, "add_scalar": 0.85, "mul": 0.85, "mul_scalar": 0.85, "div": 0.85, "div_scalar": 0.85, "pow": 0.8,
    "pow_scalar": 0.85, "relu": 0.85, "gelu": 0.8, "tanh": 0.8, "softmax": 0.8, "layer_norm": 0.8,
    "rms_norm": 0.4, "gated_activation": 0.6, "rope": 0.6, "residual_add": 0.85, "embedding": 0.6,
}  # fmt: skip
_OP_SPREAD = 0.35
# Kernels that read a row again, from L2 if the rows under way fit there: (reads more, rows at a time on a
# multiprocessor). PyTorch's softmax looks for the maximum, adds up and writes, in blocks of 512 of the 2048 threads
# that a multiprocessor holds, unless a row fits into the registers of a warp; its layer norm takes moments and writes,
# in small blocks, of which there are at most 32.
_READ_AGAIN: Mapping[str, tuple[float, float]] = {"softmax": (2.0, 4.0), "layer_norm": (1.0, 32.0)}
_SPILL_POWER = 2.0
_VECTOR_BYTES, _MOST_THREADS = 16.0, 1024.0
REFERENCE_HZ = 1.8e9


def memory_constants() -> dict[str, tuple[float, float]]:
    """name: (centre, log-sd of the prior); the shares of all ops come last, in the order of MEMORY_OPS."""
    return {
        "floor_s": (2.5e-6, 0.4),  # of the smallest kernel, at REFERENCE_HZ
        "power": (2.5, 0.4),  # how sharply the slower of floor and traffic decides
        "row_s": (0.6e-6, 0.6),  # a wave of rows in kernels that reduce over one
        "share": (1.0, 0.15),  # common to all ops
        "kept": (1.0, 0.4),  # of L2, by rows that are read again
        **{op: (share, _OP_SPREAD) for op, share in MEMORY_OPS.items()},
    }


def memory_seconds(constants: Floats, op: Ints, dims: Dims, sheet: Sheet, *, floor_in_clocks: bool) -> Floats:
    """Seconds of each kernel; `op` indexes MEMORY_OPS. A row of few bytes leaves its multiprocessor waiting."""
    floor, power, row_s, share, kept = np.exp(constants[:5])
    reached = share * np.exp(constants[5:])[op]
    clocks = REFERENCE_HZ / sheet.clock_hz
    spill = (_under_way(op, dims, sheet) / kept) ** _SPILL_POWER
    again = np.where(dims["bytes"] > 2.0 * _IN_REGISTERS[op] * dims["rows"], _MORE_READS[op], 0.0)
    moved = dims["bytes"] * (1.0 + again / 2.0 * spill / (1.0 + spill))  # counted: a read and a write
    traffic = moved / (sheet.bandwidth * reached)
    waves = np.ceil(dims["rows"] / (16.0 * sheet.multiprocessors))
    reduced = np.where(dims["reduces"] > 0, waves * row_s * clocks, 0.0)
    moving = np.maximum(traffic, reduced)
    least = floor * (clocks if floor_in_clocks else 1.0)
    most = np.maximum(moving, least)
    found: Floats = most * ((least / most) ** power + (moving / most) ** power) ** (1.0 / power)
    return found


_MORE_READS = np.array([_READ_AGAIN.get(name, (0.0, 1.0))[0] for name in MEMORY_OPS])
_ROWS_AT_ONCE = np.array([_READ_AGAIN.get(name, (0.0, 1.0))[1] for name in MEMORY_OPS])
_IN_REGISTERS = np.array([4096.0 if name == "softmax" else 0.0 for name in MEMORY_OPS])  # bytes of a row


def _under_way(op: Ints, dims: Dims, sheet: Sheet) -> Floats:
    """Input bytes of the rows under way, over the size of L2."""
    rows = np.minimum(_ROWS_AT_ONCE[op] * sheet.multiprocessors, dims["rows"])
    found: Floats = rows * dims["bytes"] / dims["rows"] / 2.0 / sheet.l2_bytes
    return found


def _fill(dims: Dims) -> tuple[Floats, Floats]:
    """Of kernels that give a row to a block of threads, sixteen bytes to each: whether rows start on such a boundary,
    and how much of the turns of the block (a power of two, at most 1024 threads) a row fills; 0 for others."""
    vectors = np.maximum(1.0, dims["bytes"] / dims["rows"] / 2.0 / _VECTOR_BYTES)
    turns = vectors / np.minimum(_MOST_THREADS, 2.0 ** np.floor(np.log2(vectors)))
    return dims["reduces"] * (vectors % 1.0 == 0.0), dims["reduces"] * turns / np.ceil(turns)


def memory_features(op: Ints, dims: Dims, sheet: Sheet, analytic: Floats) -> list[Floats]:
    """What the residual sees: the op, size against L2, rows and their width."""
    traffic = dims["bytes"] / sheet.bandwidth
    width = dims["bytes"] / dims["rows"]
    found = [op.astype(np.float64), np.log(traffic), np.log(dims["bytes"] / sheet.l2_bytes), np.log(dims["rows"])]
    found += [np.log(width), np.log(dims["rows"] / sheet.multiprocessors), dims["element_bytes"], dims["reduces"]]
    found += [np.log(_under_way(op, dims, sheet)) * dims["reduces"], *_fill(dims)]
    return [*found, np.log(analytic), np.log(analytic / traffic)]
