"""The core of attention: its tiles against a loop over pairs, its limits in closed form, and what its rows must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simpart.costmodels.learned._adapters import import_frame
from simpart.costmodels.learned._attention import (
    ATTENTION_CONSTANTS,
    _key_tiles,
    attention_bytes,
    attention_flops,
    attention_scaling_s,
    attention_seconds,
)
from simpart.costmodels.learned._families import FAMILY_MODELS, Rows
from simpart.costmodels.learned._measurements import Measurements
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._sheet import Sheet
from simpart.costmodels.learned._training import (
    _by_kind,
    _without_fallbacks,
    rows_of,
    sheets_for,
    software_offsets,
    spoken_of,
    trainable,
)

pd = pytest.importorskip("pandas")

CAUSAL = FAMILY_MODELS["attention16"]
CENTRES = np.log([centre for centre, _ in ATTENTION_CONSTANTS.values()])
COLUMNS = [
    "system", "fw", "fw_version", "kernel_source", "batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim",
    "window_size", "attn_dtype", "kv_cache_dtype", "latency_ms", "source",
]  # fmt: skip


def dims(**change: float) -> dict[str, Any]:
    usual: dict[str, float] = {
        "batch": 4,
        "seq": 2048,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 128,
        "window": 0,
        "causal": 1,
    }
    usual["cached"] = change.get("causal", 1)
    return {k: np.array([float(v)]) for k, v in {**usual, "in_bytes": 2, "out_bytes": 2, **change}.items()}


def sheet(name: str, **change: float) -> Sheet:
    found = sheets_for([name], CAUSAL)[name]
    return Sheet(**{f: np.array([change.get(f, getattr(found, f)[0])]) for f in Sheet.__dataclass_fields__})


def constants(**change: float) -> Any:
    """Logs of the constants, all at the centre of their priors but the named ones."""
    with np.errstate(divide="ignore"):
        return np.log([change.get(name, centre) for name, (centre, _) in ATTENTION_CONSTANTS.items()])


def met_by_loop(length: int, rows: int, window: int, causal: bool, keys: int = 64) -> int:
    """Pairs of tiles with at least one pair of tokens that the mask leaves."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    allowed = np.ones((length, length), dtype=bool)
    if causal:
        allowed = (key <= query) & (key > query - (window or length))
    return sum(
        bool(allowed[i : i + rows, j : j + keys].any()) for i in range(0, length, rows) for j in range(0, length, keys)
    )


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [64, 128, 256, 1024])
def test_tiles_met_are_those_with_a_pair_that_the_mask_leaves(length: int, rows: int, causal: bool) -> None:
    queries, met, _ = _key_tiles(dims(seq=length, causal=causal), float(rows))
    assert queries[0] == -(-length // rows)
    assert met[0] == met_by_loop(length, rows, 0, causal)


@pytest.mark.parametrize("rows", [64, 128])
def test_a_window_leaves_a_band_of_tiles(rows: int) -> None:
    queries, met, reach = _key_tiles(dims(seq=2048, window=256), float(rows))
    exact = met_by_loop(2048, rows, 256, True)
    assert abs(met[0] - exact) <= queries[0]  # at most one tile a row: where a band starts depends on its place
    assert reach[0] < 2048 / 64


def test_long_rows_take_their_products_and_exponentials() -> None:
    device = sheet("H100-SXM-80GB")
    shape = dims(batch=8, seq=16384, heads=32, kv_heads=4)
    at = constants(floor_s=0.0, tile_clocks=0.0, compute_share=0.7, head_cost=0.0, exponentials=0.5)
    pairs = 8 * 32 * 64 * 64 * (256 * 257 / 2)  # in tiles of 64 by 64, on and under the diagonal
    products = 4 * pairs * 128 / (0.7 * device.sustained[0])
    exponentials = 0.5 * pairs / 16 / (132 * device.clock_hz[0])
    found = attention_seconds(at, shape, device, by_clock=True)[0]
    assert found == pytest.approx(products + exponentials, rel=0.02)
    between = 4 * pairs * 128 / (0.7 * np.sqrt(device.sustained[0] * device.peak[0]))
    hidden = attention_seconds(at, shape, device, by_clock=False)[0]
    assert hidden == pytest.approx(np.hypot(between, exponentials), rel=0.02)


def test_short_causal_rows_move_keys_and_values_into_a_cache_and_back() -> None:
    cold = sheet("L40S", l2_bytes=1.0, bandwidth=1e10)  # nothing but memory counts
    at = constants(floor_s=0.0, tile_clocks=0.0, memory_share=1.0, cache_passes=2.0, power=20.0)
    seconds = attention_seconds(at, dims(seq=128), cold, by_clock=True)[0]
    once = 4 * 128 * 16 * 128 * 2  # bytes of queries; as many of keys, of values, of outputs
    assert seconds == pytest.approx((2 * once + 3 * 2 * once) / 1e10, rel=1e-3)
    for other in (dims(seq=128, causal=0), dims(seq=128, cached=0)):
        assert attention_seconds(at, other, cold, by_clock=True)[0] == pytest.approx(4 * once / 1e10, rel=1e-3)
    assert attention_bytes(dims(seq=128))[0] == 4 * once


def test_what_fits_into_l2_is_read_from_there() -> None:
    at = constants(floor_s=0.0, tile_clocks=0.0, power=20.0)
    shape = dims(seq=128, causal=0)
    small, large = (sheet("L40S", l2_bytes=size, bandwidth=1e10) for size in (1.0, 1e9))
    cold, warm = (attention_seconds(at, shape, s, by_clock=True)[0] for s in (small, large))
    assert warm == pytest.approx(0.1 * cold, rel=1e-3)


def test_more_work_never_takes_less_time() -> None:
    device = sheet("A100-SXM-80GB")
    for by_clock in (True, False):
        for name, values in {"batch": (1, 2, 4, 8), "heads": (16, 32, 64), "head_dim": (64, 128, 256)}.items():
            times = [attention_seconds(CENTRES, dims(**{name: v}), device, by_clock=by_clock)[0] for v in values]
            assert times == sorted(times)
        windows = [
            attention_seconds(CENTRES, dims(seq=8192, window=w), device, by_clock=by_clock)[0] for w in (128, 1024, 0)
        ]
        assert windows == sorted(windows)
    assert attention_flops(dims(window=128))[0] < attention_flops(dims())[0]


def test_a_floor_that_is_asked_for_is_what_the_smallest_call_takes() -> None:
    model = FamilyModel(
        family="attention16", constants=(CENTRES, CENTRES), boost=None, sheets={"L40S": sheet("L40S")}, domain={}
    )
    smallest = {name: np.array([float(v)]) for name, v in CAUSAL.smallest.items()}
    for name in ("A100-SXM-80GB", "L40S"):
        rows = Rows(op=np.zeros(1, dtype=np.int64), dims=smallest, sheet=sheet(name))
        assert np.exp(model.analytic(rows, 20e-6)[0]) == pytest.approx(20e-6)


def test_the_launch_floor_of_a_new_device_is_not_that_of_its_attention() -> None:
    model = FamilyModel(
        family="attention16", constants=(CENTRES, CENTRES), boost=None, sheets={"L40S": sheet("L40S")}, domain={}
    )
    op, shape = np.zeros(1, dtype=np.int64), dims(seq=64, batch=1)
    known, none = (Rows(op=op, dims=shape, sheet=sheet("B200-SXM-180GB", floor_s=f)) for f in (1.8e-6, np.nan))
    assert model.predict(known, "other").log_seconds[0] == model.predict(none, "other").log_seconds[0]


def test_a_peak_that_grew_alone_helps_narrow_heads_least() -> None:
    def gain(width: int) -> float:
        times = [attention_scaling_s(dims(seq=8192, head_dim=width), s)[0] for s in (once, twice)]
        return float(times[0] / times[1])

    once = sheet("H100-SXM-80GB")
    twice = sheet("H100-SXM-80GB", peak=2 * once.peak[0])
    assert 1.0 < gain(64) < gain(128) < gain(256) < 2.0


def frame(*caches: str) -> Any:
    rows = [
        ("h100_sxm", "fw", "1", "lib", 1, 1024 * (i + 1), 8, 8, 128, 0, "bfloat16", cache, 1.0, "made up")
        for i, cache in enumerate(caches)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def test_rows_with_a_cache_of_another_dtype_are_counted_and_left_out() -> None:
    found = import_frame(frame("bfloat16", "fp8", "auto"))
    assert [len(table) for table in found.tables] == [2]
    assert found.refused == {"no_model_of_this_op_or_dtype": 1}
    without = import_frame(frame("bfloat16", "fp8").drop(columns="kv_cache_dtype"))
    assert [len(table) for table in without.tables] == [2]


def test_siblings_count_together_as_one_device() -> None:
    names = ["H100-SXM-80GB", "H200-SXM-141GB", "L40S"]
    table = _table(names)
    sheets = sheets_for(names, CAUSAL)
    assert _by_kind(table, sheets).tolist() == [0.5, 0.5, 1.0]
    assert len(rows_of(table, sheets)) == 3


def test_kernels_of_triton_and_fallbacks_are_not_what_intervals_are_about() -> None:
    kernels = ["lib", "triton", "slow"]
    rows = frame(*["bfloat16"] * 3).assign(seq_len=4096, kernel_source=kernels, latency_ms=[1.0, 0.5, 4.0])
    (table,) = import_frame(rows).tables
    assert spoken_of(table).latency_s.tolist() == [1.0e-3, 4.0e-3]
    assert trainable(table).latency_s.tolist() == [1.0e-3]
    assert _without_fallbacks(spoken_of(table)).latency_s.tolist() == [1.0e-3]


@pytest.mark.parametrize(("devices", "share"), [(["L40S"], 0.5), (["L40S", "A100-SXM-80GB"], 1.0)])
def test_an_offset_that_one_device_alone_showed_counts_half(devices: list[str], share: float) -> None:
    table = _table([name for name in devices for _ in range(30)])
    sheets = sheets_for(devices, CAUSAL)
    model = FamilyModel(family="attention16", constants=(CENTRES, CENTRES), boost=None, sheets=sheets, domain={})
    known = {name: model.predict(_rows(table, name), name).log_seconds for name in devices}
    seconds = np.concatenate([np.exp(known[name] + 0.3) for name in devices])
    offsets = software_offsets(model, replace(table, latency_s=seconds))
    assert set(np.round(list(offsets["fw lib"].values()), 6)) == {round(share * 0.3, 6)}


def _rows(table: Measurements, name: str) -> Rows:
    part = table.at(table.device == name)
    return Rows(op=np.zeros(len(part), dtype=np.int64), dims=part.dims, sheet=sheets_for([name], CAUSAL)[name])


def _table(names: list[str]) -> Measurements:
    (table,) = import_frame(frame(*["bfloat16"] * len(names)).assign(system=names, latency_ms=100.0)).tables
    return table
