"""Families of kernels that models are learned for: what their dims mean, how they are computed, what the residual sees.

gemm16, gemm8, gemm4, gemm32, bgemm32   batch, m, n, k, in_bytes, out_bytes       (batch,) m×k times k×n
conv32         as gemm32 (implicit product), and kernel, stride, channels, side (of the output)
attention16    batch, seq, heads, kv_heads, head_dim, window (0: none), causal, cached, in_bytes,
               out_bytes; cached: keys and values go through a cache, as they do in serving but not in training
memory32, memory16   bytes, rows, element_bytes, reduces; op is one of MEMORY_OPS
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from simpart.costmodels.learned._attention import (
    ATTENTION_CONSTANTS,
    attention_bound_s,
    attention_features,
    attention_scaling_s,
    attention_seconds,
)
from simpart.costmodels.learned._convolution import WINOGRAD_SAVES, convolution_features, convolution_seconds
from simpart.costmodels.learned._grouped import (
    GROUPED_CONSTANTS,
    grouped_arithmetic_s,
    grouped_bound_s,
    grouped_features,
    grouped_seconds,
)
from simpart.costmodels.learned._memory import MEMORY_OPS, memory_constants, memory_features, memory_seconds
from simpart.costmodels.learned._sheet import Sheet
from simpart.costmodels.learned._tile import TILE_CONSTANTS, product_bound_s, product_features, tile_seconds

__all__ = ["FAMILY_MODELS", "REGIMES", "Dims", "Family", "Rows", "op_codes", "regime_of"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
Dims = Mapping[str, Floats]

REGIMES = ("launch", "memory", "compute")
_SHORTEST = 64  # queries from which attention is tiles rather than launches
_LAUNCH_S = 5e-6  # below this roofline time a kernel's start and end decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Kernels of one family on devices: `op` indexes MEMORY_OPS (else 0), `sheet` has one entry or one per row."""

    op: Ints
    dims: Dims
    sheet: Sheet

    def __len__(self) -> int:
        return len(self.op)


Analytic = Callable[[Floats, Rows], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family is computed. `variants` of the analytic form are fitted apart and averaged (in logs), which takes
    out luck of a fit; constant 0 is always the latency of the smallest kernel. `smallest` are the dims of such a one.
    `core_rows` are those that the constants are fitted on, where not on all. `by_fastest`: of the trained devices the
    one that gets nearest to its sustained peak says how near one gets; what holds others back no data sheet tells.
    `carries_over`: what the trees say of one kind of device holds on others, since a kernel that leaves bandwidth
    unused does so everywhere; of other families it does not.
    `by_kind`: siblings count together as one device where constants are fitted, and an offset of a software that one
    device alone showed counts half. `scaling_s` is what times scale by from device to device where not by the bound.
    `own_floor`: its smallest call takes several launches or a long start, so that a device's floor says nothing of it.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    constants: Mapping[str, tuple[float, float]]
    variants: tuple[Analytic, ...]
    bound_s: Callable[[Rows], Floats]
    arithmetic_s: Callable[[Rows], Floats]
    features: Callable[[Rows, Floats], list[Floats]]
    smallest: Mapping[str, float]
    timed_by_host: bool = False
    core_rows: Callable[[Dims], Bools] | None = None
    by_fastest: bool = False
    carries_over: bool = False
    own_floor: bool = False
    by_kind: bool = False
    scaling_s: Callable[[Rows], Floats] | None = None


def regime_of(family: Family, rows: Rows) -> Ints:
    """Index into REGIMES of what decides each row by its roofline."""
    bound, arithmetic = family.bound_s(rows), family.arithmetic_s(rows)
    found: Ints = np.where(bound < _LAUNCH_S, 0, np.where(arithmetic < bound, 1, 2)).astype(np.int64)
    return found


def op_codes(op: np.ndarray[tuple[int], np.dtype[np.object_]]) -> Ints:
    """Position of each op in MEMORY_OPS, 0 for others."""
    place = {name: i for i, name in enumerate(MEMORY_OPS)}
    return np.array([place.get(name, 0) for name in op], dtype=np.int64)


_PRODUCT = ("batch", "m", "n", "k", "in_bytes", "out_bytes")


def _tiles(constants: Floats, rows: Rows, *, by_clock: bool, floor_in_clocks: bool, step: float = 32.0) -> Floats:
    return tile_seconds(constants, rows.dims, rows.sheet, by_clock=by_clock, floor_in_clocks=floor_in_clocks, step=step)


def _product(
    name: str,
    dtype: str,
    in_bytes: float,
    out_bytes: float,
    *,
    timed_by_host: bool = False,
    by_fastest: bool = False,
    step: float = 32.0,
    **change: tuple[float, float],
) -> Family:
    """`timed_by_host`: the source's latencies hold some 25 µs of launch and events, in seconds rather than clocks."""
    if timed_by_host:
        change = {
            "floor_s": (25e-6, 0.5),
            "power": (2.5, 0.4),
            "edge": (6.0, 1.0),
            "compute_share": (0.95, 0.15),
            **change,
        }
    tiles = partial(_tiles, floor_in_clocks=not timed_by_host, step=step)
    return Family(
        name=name,
        dtype=dtype,
        dims=_PRODUCT,
        constants={**TILE_CONSTANTS, **change},
        variants=(partial(tiles, by_clock=True), partial(tiles, by_clock=False)),
        timed_by_host=timed_by_host,
        by_fastest=by_fastest,
        bound_s=lambda rows: product_bound_s(rows.dims, rows.sheet),
        arithmetic_s=lambda rows: (
            2.0 * rows.dims["batch"] * rows.dims["m"] * rows.dims["n"] * rows.dims["k"] / rows.sheet.peak
        ),
        features=lambda rows, analytic: product_features(rows.dims, rows.sheet, analytic, step=step),
        smallest={"batch": 1, "m": 1, "n": 64, "k": 64, "in_bytes": in_bytes, "out_bytes": out_bytes},
    )


def _convolution() -> Family:
    product = _product("conv32", "float32", 4, 4, timed_by_host=True)

    def seconds(by_clock: bool) -> Analytic:
        return lambda constants, rows: convolution_seconds(constants, rows.dims, rows.sheet, by_clock=by_clock)

    return Family(
        name="conv32",
        dtype="float32",
        dims=(*_PRODUCT, "kernel", "stride", "channels", "side"),
        constants=product.constants,
        variants=(seconds(True), seconds(False)),
        timed_by_host=True,
        bound_s=lambda rows: product.arithmetic_s(rows) / WINOGRAD_SAVES,
        arithmetic_s=product.arithmetic_s,
        features=lambda rows, analytic: convolution_features(rows.dims, rows.sheet, analytic),
        smallest={**product.smallest, "kernel": 1, "stride": 1, "channels": 64, "side": 1},
    )


def _grouped(name: str, dtype: str) -> Family:
    def seconds(by_clock: bool) -> Analytic:
        return lambda constants, rows: grouped_seconds(constants, rows.dims, rows.sheet, by_clock=by_clock)

    return Family(
        name=name,
        dtype=dtype,
        dims=("pairs", "experts", "hidden", "inter", "matrices", "skew", "in_bytes", "out_bytes"),
        constants=GROUPED_CONSTANTS,
        variants=(seconds(True), seconds(False)),
        own_floor=True,
        bound_s=lambda rows: grouped_bound_s(rows.dims, rows.sheet),
        arithmetic_s=lambda rows: grouped_arithmetic_s(rows.dims, rows.sheet),
        features=lambda rows, analytic: grouped_features(rows.dims, rows.sheet, analytic),
        smallest={"pairs": 1, "experts": 1, "hidden": 64, "inter": 64, "matrices": 3, "skew": 0, "in_bytes": 2,
                  "out_bytes": 2},
    )  # fmt: skip


def _attention(name: str, dtype: str, in_bytes: float) -> Family:
    def seconds(by_clock: bool) -> Analytic:
        return lambda constants, rows: attention_seconds(constants, rows.dims, rows.sheet, by_clock=by_clock)

    return Family(
        name=name,
        dtype=dtype,
        dims=("batch", "seq", "heads", "kv_heads", "head_dim", "window", "causal", "cached", "in_bytes", "out_bytes"),
        constants=ATTENTION_CONSTANTS,
        variants=(seconds(True), seconds(False)),
        own_floor=True,
        bound_s=lambda rows: attention_bound_s(rows.dims, rows.sheet),
        arithmetic_s=lambda rows: attention_bound_s(
            rows.dims, Sheet(**{**_numbers(rows.sheet), "bandwidth": np.array([np.inf])})
        ),
        by_kind=True,
        scaling_s=lambda rows: attention_scaling_s(rows.dims, rows.sheet),
        features=lambda rows, analytic: attention_features(rows.dims, rows.sheet, analytic),
        core_rows=lambda dims: dims["seq"] >= _SHORTEST,
        smallest={"batch": 1, "seq": 64, "heads": 1, "kv_heads": 1, "head_dim": 64, "window": 0, "causal": 1,
                  "cached": 1, "in_bytes": in_bytes, "out_bytes": 2},
    )  # fmt: skip


def _numbers(sheet: Sheet) -> dict[str, Floats]:
    return {name: getattr(sheet, name) for name in Sheet.__dataclass_fields__}


def _memory(name: str, dtype: str, element_bytes: float, *, timed_by_host: bool = False) -> Family:
    """`timed_by_host` as in `_product`: what the host takes adds to the kernel's time, nearly in full."""
    change = {"floor_s": (25e-6, 0.5), "power": (1.2, 0.3)} if timed_by_host else {}

    def seconds(constants: Floats, rows: Rows) -> Floats:
        return memory_seconds(constants, rows.op, rows.dims, rows.sheet, floor_in_clocks=not timed_by_host)

    return Family(
        name=name,
        dtype=dtype,
        dims=("bytes", "rows", "element_bytes", "reduces"),
        constants={**memory_constants(), **change},
        variants=(seconds,),
        bound_s=lambda rows: rows.dims["bytes"] / rows.sheet.bandwidth,
        arithmetic_s=lambda rows: np.zeros(len(rows)),
        features=lambda rows, analytic: memory_features(rows.op, rows.dims, rows.sheet, analytic),
        smallest={"bytes": 1024, "rows": 1, "element_bytes": element_bytes, "reduces": 0},
        timed_by_host=timed_by_host,
        carries_over=not timed_by_host,
    )


FAMILY_MODELS: Mapping[str, Family] = {
    family.name: family
    for family in (
        _product("gemm16", "float16", 2, 2),
        _product("gemm8", "float8", 1, 2, floor_s=(4.0e-6, 0.3)),
        _product("gemm8block", "float8", 1, 2, floor_s=(4.0e-6, 0.3)),
        _product("gemm4", "float4", 0.5625, 2, floor_s=(4.0e-6, 0.3)),
        _product("gemm32", "float32", 4, 4, timed_by_host=True, by_fastest=True),
        _product("bgemm32", "float32", 4, 4, timed_by_host=True, by_fastest=True, step=64.0),
        _convolution(),
        _attention("attention16", "float16", 2),
        _attention("attention16full", "float16", 2),
        _attention("attention8", "float8", 1),
        _grouped("moe16", "float16"),
        _grouped("moe8", "float8"),
        _grouped("moe4", "float4"),
        _memory("memory32", "float32", 4, timed_by_host=True),
        _memory("memory16", "float16", 2),
    )
}
