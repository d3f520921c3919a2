"""Learned compute models: cores against simpler counts, trees against a plain loop, and what must always hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.cost import PROVENANCES, Signature, SignatureTable, TensorForm
from simpart.costmodels.learned import Learned, _command, shipped_models
from simpart.costmodels.learned._adapters import device_named, import_frame, read_frame
from simpart.costmodels.learned._artifact import SHIPPED, load_models, save_models
from simpart.costmodels.learned._attention import attention_flops
from simpart.costmodels.learned._boost import Boost, fit_boost
from simpart.costmodels.learned._evaluating import judge_import
from simpart.costmodels.learned._families import FAMILY_MODELS, Rows
from simpart.costmodels.learned._fitting import fit_constants
from simpart.costmodels.learned._model import SIZES
from simpart.costmodels.learned._records import import_kernels, overheads_of_trace, read_trace
from simpart.costmodels.learned._sheet import assumptions, distance, sheet_of
from simpart.costmodels.learned._signatures import question_of
from simpart.costmodels.learned._training import fit_family, train
from simpart.costmodels.learned_comm import _command as comm_command
from simpart.costmodels.learned_comm._artifact import shipped
from simpart.costmodels.roofline import physical_bound_s
from simpart.errors import FormatError, UserError
from simpart.hardware import Device, load_device
from tests.test_cli import simpart

pd = pytest.importorskip("pandas")

A100 = load_device("a100")


def form(*shape: int, dtype: str = "bfloat16") -> TensorForm:
    return TensorForm(shape, dtype, tuple(range(len(shape))))


def mm(m: int, k: int, n: int, dtype: str = "bfloat16") -> Signature:
    return Signature("aten.mm.default", (form(m, k, dtype=dtype), form(k, n, dtype=dtype)), (form(m, n, dtype=dtype),))


def frame(devices: dict[str, float], count: int = 120, seed: int = 0) -> Any:
    """Products whose latency is a multiple of the roofline and a floor, per device."""
    rng = np.random.default_rng(seed)
    sizes = 2 ** rng.integers(5, 13, (count, 3))
    sizes[:, 0] = 16 + 24 * rng.permutation(count)
    rows = []
    for name, factor in devices.items():
        device = load_device(name)
        for m, n, k in sizes.tolist():
            bound = max(
                2 * m * n * k / device.peak("bfloat16"), 2 * (m * k + n * k + m * n) / device.memory_bytes_per_s
            )
            rows.append((name, "fw", "1", "lib", "bfloat16", m, n, k, 1e3 * (3e-6 + factor * bound), "made up"))
    columns = ["system", "fw", "fw_version", "kernel_source", "dtype", "m", "n", "k", "latency_ms", "source"]
    return pd.DataFrame(rows, columns=columns)


# --- pieces -----------------------------------------------------------------------------------------------------------
def test_trees_predict_what_a_plain_loop_does() -> None:
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(4, 300)).astype(np.float32)
    boost = fit_boost(columns, np.sin(columns[0]).astype(float) + columns[1], np.ones(300), trees=20, depth=3)
    slow = np.zeros(300)
    for features, thresholds, leaves in zip(boost.features, boost.thresholds, boost.leaves, strict=True):
        for row in range(300):
            code = sum(
                int(columns[f, row] > t) << bit for bit, (f, t) in enumerate(zip(features, thresholds, strict=True))
            )
            slow[row] += leaves[code]
    assert boost.predict(columns) == pytest.approx(slow, abs=1e-5)


def test_trees_learn_and_repeat() -> None:
    rng = np.random.default_rng(1)
    columns = rng.uniform(-1, 1, size=(3, 2000)).astype(np.float32)
    target = np.where(columns[0] > 0.2, 1.0, -1.0) * (columns[2] > -0.5)
    one, other = (fit_boost(columns, target, np.ones(2000), trees=100, depth=3, seed=7) for _ in range(2))
    assert np.abs(one.predict(columns) - target).mean() < 0.1
    assert one.leaves.tobytes() == other.leaves.tobytes()


def test_constants_come_back_from_rows_made_with_them() -> None:
    x = np.linspace(1, 50, 400)
    truth = np.log([3.0, 0.5])
    found = fit_constants(
        lambda c: np.log(np.exp(c[0]) + np.exp(c[1]) * x),
        np.log(3.0 + 0.5 * x),
        np.log([1.0, 1.0]),
        np.array([1.0, 1.0]),
    )
    assert found == pytest.approx(truth, abs=0.05)


def test_causal_attention_counts_the_pairs_under_the_diagonal() -> None:
    sizes = {"batch": 2, "seq": 5, "heads": 3, "head_dim": 8, "window": 0, "causal": 1}
    dims = {name: np.array([float(value)]) for name, value in sizes.items()}
    pairs = sum(1 for i in range(5) for j in range(5) if j <= i)
    assert attention_flops(dims)[0] == 4 * 2 * 3 * 8 * pairs
    windowed = {**dims, "window": np.array([2.0])}
    assert attention_flops(windowed)[0] == 4 * 2 * 3 * 8 * sum(1 for i in range(5) for j in range(5) if i - 2 < j <= i)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_no_analytic_core_beats_the_roofline_by_much_or_shrinks_with_a_slower_device(name: str) -> None:
    family = FAMILY_MODELS[name]
    constants = np.log([c for c, _ in family.constants.values()])
    fixed = {
        "in_bytes",
        "out_bytes",
        "causal",
        "cached",
        "kernel",
        "stride",
        "element_bytes",
        "matrices",
        "skew",
        "reduces",
        "window",
    }
    big = {k: np.array([v * (1.0 if k in fixed else 64.0)]) for k, v in family.smallest.items()}
    slow = replace(A100, memory_bytes_per_s=A100.memory_bytes_per_s / 2,
                   peak_flops_per_s=tuple((d, r / 2) for d, r in A100.peak_flops_per_s))  # fmt: skip
    for variant in family.variants:
        fast_s, slow_s = (
            variant(constants, Rows(op=np.zeros(1, dtype=np.int64), dims=big, sheet=sheet_of(d, family.dtype)[0]))[0]
            for d in (A100, slow)
        )
        assert np.isfinite(fast_s)
        assert 0 < fast_s <= slow_s * 1.001


def test_a_sheet_says_what_it_assumes() -> None:
    bare = Device(name="bare", kind="gpu", memory_bytes=2**34, memory_bytes_per_s=1e12,
                  peak_flops_per_s=(("float32", 1e13),), kernel_launch_s=5e-6)  # fmt: skip
    sheet, assumed, widened = sheet_of(bare, "bfloat16")
    assert set(assumed) == {"multiprocessors", "clock_hz", "l2_bytes", "power_w"}
    assert widened > 0.15
    assert sheet_of(A100, "bfloat16")[1:] == ({}, 0.0)
    assert distance(sheet, sheet) == 0
    assert assumptions(bare) == (
        "bare states no multiprocessors and no clock and no l2 and no power: assumed multiprocessors 108, "
        "clock 1.7 GHz, l2 40 MiB, power 400 W; intervals are wider by 21%; states no vector: the float32 peak is "
        "taken for it"
    )
    assert assumptions(A100) == ""


# --- data -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spelling", "name"),
    [("a100_sxm (p4de)", "A100-SXM-80GB"), ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("Tesla T4", "T4"),
     ("b300_sxm", "B300-SXM-270GB"), ("AMD_Instinct_MI210", "MI210"), ("unheard of", None)],
)  # fmt: skip
def test_devices_are_found_by_the_spellings_of_data_files(spelling: str, name: str | None) -> None:
    assert device_named(spelling) == name


def test_bad_rows_are_left_out_and_counted() -> None:
    table = frame({"a100_sxm": 2.0, "h100_sxm": 2.0}, 50)
    table.loc[0, "latency_ms"] = 0.0
    table.loc[1, "latency_ms"] = -1.0
    table.loc[2, "latency_ms"] = float("nan")
    table.loc[3, "latency_ms"] = 1e-9
    table.loc[4, "system"] = "unheard of"
    table.loc[5, "dtype"] = "int3"
    table = pd.concat([table, table.iloc[[10]]], ignore_index=True)
    found = import_frame(table)
    fast = found.refused.get("beyond_peak", 0) + found.refused.get("warm_cache", 0)
    assert {**found.refused, "beyond_peak": fast, "warm_cache": 0} == {
        "unusable": 3, "unknown_device": 1, "no_model_of_this_op_or_dtype": 1, "duplicate": 1, "beyond_peak": 1,
        "warm_cache": 0,
    }  # fmt: skip
    assert sum(len(t) for t in found.tables) + sum(found.refused.values()) == len(table)


def test_a_group_in_another_unit_is_found() -> None:
    table = frame({"a100_sxm": 2.0, "h100_sxm": 2.0, "l40s": 2.0}, 60)
    table.loc[table.system == "l40s", "latency_ms"] *= 1000
    assert import_frame(table).refused == {"unit_mistake": 60}


def test_single_rows_in_another_unit_are_found() -> None:
    table = frame({"a100_sxm": 2.0, "h100_sxm": 2.0}, 100)
    table.loc[table.index % 10 == 0, "latency_ms"] *= 1000
    assert import_frame(table).refused == {"unit_mistake": 20}


def test_latencies_in_two_units_must_agree() -> None:
    table = frame({"a100_sxm": 2.0}, 40)
    table = table.assign(latency_us=1000 * table.latency_ms)
    table.loc[:4, "latency_us"] /= 1000
    table.loc[5:9, "latency_ms"] = float("nan")
    found = import_frame(table)
    assert (found.refused, len(found.tables[0])) == ({"unusable": 5}, 35)


@pytest.mark.parametrize("device", ["device", "gpu"])
@pytest.mark.parametrize(("unit", "per_ms"), [("latency_us", 1e3), ("latency_s", 1e-3)])
def test_device_and_latency_may_have_other_names(device: str, unit: str, per_ms: float) -> None:
    table = frame({"a100_sxm": 2.0}, 20)
    other = table.rename(columns={"system": device, "latency_ms": unit})
    other[unit] *= per_ms
    found = import_frame(other).tables[0]
    np.testing.assert_allclose(found.latency_s, import_frame(table).tables[0].latency_s)
    assert found.devices() == ["A100-SXM-80GB"]


def test_data_do_not_say_which_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text((SHIPPED.parents[2] / "hardware_profiles" / "devices" / "l40s.yaml").read_text())
    assert device_named("L40S") == "L40S"
    assert device_named(str(tmp_path / "own.yaml")) is None


def test_a_file_without_a_usable_row_says_why() -> None:
    table = frame({"a100_sxm": 2.0}, 10).assign(latency_ms=0.0)
    with pytest.raises(UserError, match=r"all 10 rows were left out \(10 unusable\)"):
        judge_import(import_frame(table), {}, "shipped")


def test_other_separators_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    frame({"a100_sxm": 2.0}, 10).to_csv(path, sep=";")
    with pytest.raises(FormatError, match="separated by ';'"):
        read_frame(path)


def test_a_spread_over_experts_that_is_no_number_makes_a_row_unusable() -> None:
    row = {
        "system": "h100_sxm", "dtype": "bfloat16", "num_tokens": 4096, "hidden_size": 4096, "inter_size": 14336,
        "topk": 2, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1, "latency_ms": 9.0,
    }  # fmt: skip
    spreads = ["power_law_1.2", "power_law_x", "balanced"]
    found = import_frame(pd.DataFrame([{**row, "distribution": spread} for spread in spreads]))
    assert found.refused == {"unusable": 1}
    assert found.tables[0].dims["skew"].tolist() == [1.2, 0.0]


def test_every_row_is_counted_once_whatever_it_holds() -> None:
    row = {
        "op": "add", "device": "a100", "num_tokens": 4096, "tp": 1, "n_embd": 4096, "n_ffn": 11008, "n_head": 32,
        "n_kv_head": 32, "gated": True, "m": 8, "n": 8, "k": 8, "median_ms": 9.0,
    }  # fmt: skip
    found = import_frame(pd.DataFrame([row, {**row, "k": float("nan")}]))
    assert sum(map(len, found.tables)) + sum(found.refused.values()) == 2


def test_missing_columns_are_named() -> None:
    with pytest.raises(FormatError, match=r"by kind, products: latency_ms; .*experts: "):
        import_frame(frame({"a100_sxm": 2.0}, 3).drop(columns="latency_ms"), "x.csv")


def test_a_profiler_trace_becomes_measurements(tmp_path: Path) -> None:
    def op(number: int, name: str, dims: list[list[int]], kind: str) -> dict[str, Any]:
        return {
            "cat": "cpu_op",
            "name": name,
            "args": {"External id": number, "Input Dims": dims, "Input type": [kind] * 2},
        }

    def kernel(number: int, microseconds: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": "k", "dur": microseconds, "args": {"External id": number}}

    half = "c10::BFloat16"
    events = [
        *(op(1, "aten::mm", [[512, 256], [256, 128]], half), kernel(1, 12.5)),
        *(op(2, "aten::sort", [[9]], "float"), kernel(2, 3.0)),
        *(op(3, "aten::mm", [[8, 8], [8, 8]], half), kernel(3, 1.0), kernel(3, 1.0)),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": events}))
    found = read_trace(path)
    (table,) = found.tables
    assert (table.family, table.device[0]) == ("gemm16", "A100-SXM-80GB")
    assert table.latency_s[0] == pytest.approx(12.5e-6)
    assert [table.dims[d][0] for d in "mnk"] == [512, 128, 256]
    assert (found.rows, found.refused) == (3, {"no_model_of_this_op_or_dtype": 2})
    path.write_text(json.dumps({"deviceProperties": [{"name": "toaster"}], "traceEvents": []}))
    with pytest.raises(FormatError, match="recorded on 'toaster'"):
        read_trace(path)


def traced(path: Path, name: str, shapes: object, microseconds: object, concrete: object = None) -> Any:
    """What is imported of a trace with one op of bfloat16 tensors and one kernel."""
    kinds = ["c10::BFloat16"] * (len(shapes) if isinstance(shapes, list) else 1)
    arguments = {"External id": 1, "Input Dims": shapes, "Input type": kinds, "Concrete Inputs": concrete}
    events = [
        7, {"cat": "kernel", "args": None}, {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": "x"},
        {"cat": "cpu_op", "name": name, "args": arguments},
        {"cat": "kernel", "dur": microseconds, "args": {"External id": 1}},
    ]  # fmt: skip
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": events}))
    assert overheads_of_trace(path) == {}
    return read_trace(path)


@pytest.mark.parametrize(
    ("name", "shapes", "microseconds"),
    [("aten::mm", "x", 5.0), ("aten::mm", [[4, 4], [4, 4]], "x"), ("aten::mm", [[4, 4], [4, 4]], -3.0),
     ("aten::mm", [[2**62, 2**62]] * 2, 5.0), ("aten::mm", [[-4, 4], [4, 4]], 5.0), ("aten::addmm", [[5]] * 3, 5.0),
     ("aten::add", [[3], [4]], 5.0), ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], 50.0),
     ("aten::_scaled_dot_product_flash_attention", [[1, 8, 512, 64]] * 3, 50.0)],
)  # fmt: skip
def test_what_a_trace_does_not_say_is_left_out(name: str, shapes: object, microseconds: object, tmp_path: Path) -> None:
    assert traced(tmp_path / "trace.json", name, shapes, microseconds).tables == ()


@pytest.mark.parametrize(("causal", "family"), [("True", "attention16"), ("False", "attention16full")])
def test_attention_of_a_trace_is_causal_where_it_says_so(causal: str, family: str, tmp_path: Path) -> None:
    heads_first = ["", "", "", "0.", causal, "False", ""]
    op = "aten::_scaled_dot_product_flash_attention"
    (one,) = traced(tmp_path / "trace.json", op, [[2, 8, 512, 64]] * 3, 90.0, heads_first).tables
    heads_second = [*[""] * 7, "0.", causal, "False"]
    (other,) = traced(
        tmp_path / "trace.json", "aten::_flash_attention_forward", [[2, 512, 8, 64]] * 3, 90.0, heads_second
    ).tables
    for table in (one, other):
        assert (table.family, table.dims["heads"][0], table.dims["seq"][0]) == (family, 8, 512)


def test_kernels_of_a_profile_become_measurements() -> None:
    found = import_kernels("profiles", [(mm(64, 32, 16), "a100", 5e-6, "torch"), (mm(64, 32, 16), "?", 5e-6, "")], "x")
    assert found.refused == {"unknown_device": 1}
    assert [found.tables[0].dims[d][0] for d in "mnk"] == [64, 16, 32]


def test_tables_of_the_package_keep_their_own_column_names() -> None:
    table = frame({"a100_sxm": 2.0}, 20).rename(
        columns={"fw": "framework", "dtype": "gemm_dtype", "latency_ms": "latency"}
    )
    assert len(import_frame(table).tables[0]) == 20


# --- models -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def made() -> Any:
    table = import_frame(frame({"a100_sxm": 1.5, "h100_sxm": 1.5, "h200_sxm": 1.5, "l40s": 1.5}, 150)).tables[0]
    return table, train(table, quick=True)


def test_a_model_knows_how_a_device_stands_to_the_trained_ones(made: Any) -> None:
    _, model = made
    sheet = {name: sheet_of(load_device(name), "bfloat16")[0] for name in ("a100", "b200", "l4", "h200")}
    assert model.status("A100-SXM-80GB", sheet["a100"]) == "seen"
    assert model.status("other name", sheet["h200"]) == "sibling"
    assert model.status("L4", sheet["l4"]) in ("far", "new")
    assert model.status("x", sheet_of(replace(A100, memory_bytes_per_s=1e14), "bfloat16")[0]) == "far"


def test_a_far_device_gets_the_analytic_core_alone(made: Any) -> None:
    table, model = made
    device = replace(A100, memory_bytes_per_s=1e14)
    part = table.at(table.device == "A100-SXM-80GB")
    rows = Rows(op=np.zeros(len(part), dtype=np.int64), dims=part.dims, sheet=sheet_of(device, "bfloat16")[0])
    found = model.predict(rows, "x", floor_s=3e-6)
    assert found.status == "far"
    assert found.log_seconds == pytest.approx(model.analytic(rows, 3e-6))


def test_a_measured_floor_is_what_the_smallest_kernel_takes(made: Any) -> None:
    _, model = made
    family = FAMILY_MODELS["gemm16"]
    dims = {name: np.array([float(v)]) for name, v in family.smallest.items()}
    rows = Rows(op=np.zeros(1, dtype=np.int64), dims=dims, sheet=sheet_of(load_device("b60"), "bfloat16")[0])
    assert np.exp(model.analytic(rows, 30e-6))[0] == pytest.approx(30e-6, rel=0.02)


def test_fitting_twice_writes_the_same_bytes_and_reads_back(made: Any, tmp_path: Path) -> None:
    table, _ = made
    small = table.at(np.arange(len(table)) % 4 == 0)
    for name in ("a.npz", "b.npz"):
        save_models(tmp_path / name, {"gemm16": fit_family(small)})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    model = load_models(tmp_path / "a.npz")["gemm16"]
    assert set(model.facts["held_out"]) >= {"A100-SXM-80GB", "L40S"}  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"hello",
        lambda raw: raw[:3000] + b"x" + raw[3001:],
    ],
)
def test_a_damaged_artifact_is_refused_in_one_line(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "models.npz"
    path.write_bytes(damage(SHIPPED.read_bytes()))
    with pytest.raises(FormatError, match=r"models\.npz.*simpart fit") as caught:
        load_models(path)
    assert "\n" not in str(caught.value)


def test_a_foreign_artifact_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", header=np.frombuffer(json.dumps({"kind": "other"}).encode(), dtype=np.uint8))
    with pytest.raises(FormatError, match="is a other, not simpart-compute-models"):
        load_models(tmp_path / "x.npz")


# --- as a cost model --------------------------------------------------------------------------------------------------
def single(*shape: int) -> TensorForm:
    return form(*shape, dtype="float32")


HEADS = form(2, 16, 1024, 64)
FLASH = "aten._scaled_dot_product_flash_attention"
SIGNATURES = (
    mm(4096, 4096, 4096), mm(1, 64, 64), mm(512, 1024, 256, "float32"),
    Signature("aten.bmm.default", (form(8, 64, 32), form(8, 32, 64)), (form(8, 64, 64),)),
    Signature(f"{FLASH}.default", (HEADS,) * 3, (HEADS,),
              '{"positional":[{"tensor":0},{"tensor":1},{"tensor":2},0.0,true],"named":{}}'),
    Signature(f"{FLASH}_backward.default", (HEADS,) * 5, (HEADS,) * 3),
    Signature("aten.native_layer_norm.default", (single(4096, 1024), single(1024)), (single(4096, 1024),)),
    Signature("aten.add.Tensor", (form(4096, 1024), form(4096, 1024)), (form(4096, 1024),)),
    Signature("aten.convolution.default", (single(8, 64, 56, 56), single(64, 64, 3, 3)), (single(8, 64, 56, 56),)),
    Signature("simpart.optimizer.adamw", (single(1024, 1024),) * 4, (single(1024, 1024),) * 3),
    Signature("aten.view.default", (form(4, 4),), (form(4, 4),), view=True),
    Signature("aten.mm.default", (form(0, 4), form(4, 4)), (form(0, 4),)),
)  # fmt: skip


@pytest.mark.parametrize("name", ["a100", "h100", "b300", "l4", "t4", "mi210", "rtx-pro-6000", "cpu"])
def test_every_signature_has_an_estimate_above_the_physical_bound(name: str) -> None:
    device = load_device(name)
    found = Learned().estimate(SignatureTable(SIGNATURES), device)
    bound = np.array([physical_bound_s(s, device) for s in SIGNATURES])
    assert (found.mean_s >= 0.999 * bound).all()
    assert np.isfinite(found.mean_s).all()
    assert (found.shared_log_sd >= 0).all()
    assert found.mean_s[10] == 0


def test_provenance_tells_trained_devices_and_transferred_kernels() -> None:
    def names(device: str) -> list[str]:
        return [PROVENANCES[i] for i in Learned().estimate(SignatureTable(SIGNATURES), load_device(device)).provenance]

    assert names("a100")[0] == "interpolated"
    assert names("b300")[0] == "extrapolated"
    assert names("a100")[5] == "analytic"  # the backward of attention was never measured
    assert names("cpu")[0] == "analytic"


def test_a_thin_data_sheet_widens_the_interval() -> None:
    table = SignatureTable(SIGNATURES[:1])
    thin = replace(load_device("b300"), name="thin", clock_hz=None, l2_bytes=None)
    full = replace(load_device("b300"), name="full")
    narrow, wide = (Learned().estimate(table, device) for device in (full, thin))
    assert wide.shared_log_sd[0] > narrow.shared_log_sd[0]


def test_estimates_need_neither_torch_nor_sklearn_nor_numba() -> None:
    code = (
        "import sys; from simpart.costmodels.learned import Learned, shipped_models; shipped_models();"
        "from simpart.cost import SignatureTable; from simpart.hardware import load_device;"
        "Learned().estimate(SignatureTable(()), load_device('a100'));"
        "print([m for m in ('torch', 'sklearn', 'numba', 'pandas', 'scipy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_shipped_models_say_what_they_were_trained_on() -> None:
    for model in shipped_models().values():
        assert model.facts["rows"]
        assert len(str(model.facts["fingerprint"])) == 16
        assert isinstance(model.boost, Boost)


def test_grouped_products_are_told_through_batches_of_the_mean_size() -> None:
    def form(*shape: int) -> TensorForm:
        return TensorForm(shape, "bfloat16", tuple(range(len(shape))))

    forward = Signature("aten._grouped_mm.default", (form(512, 64), form(8, 64, 32)), (form(512, 32),))
    towards_weights = Signature("aten._grouped_mm.default", (form(64, 512), form(512, 32)), (form(8, 64, 32),))
    asked = [question_of(s) for s in (forward, towards_weights)]
    assert [q.dims[:4] for q in asked if q] == [(8, 64.0, 32, 64), (8, 64, 32, 64.0)]
    found = Learned().estimate(SignatureTable((forward, towards_weights)), load_device("h100"))
    assert {PROVENANCES[p] for p in found.provenance} == {"analytic"}
    assert all(
        t >= physical_bound_s(s, load_device("h100"))
        for t, s in zip(found.mean_s, (forward, towards_weights), strict=True)
    )


def test_a_trace_shows_what_launching_takes(tmp_path: Path) -> None:
    launches = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 7.0 * i} for i in range(60)
    ]
    others = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": 900.0 * i} for i in range(9)
    ]
    kernels = [{"cat": "kernel", "name": "k", "dur": 2.5 + i, "args": {}} for i in range(60)]
    path = tmp_path / "trace.json"
    events = [*launches, *others, *kernels]
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": events}))
    found = overheads_of_trace(path)
    assert found["kernel_launch_s"] == pytest.approx(7e-6) and 2.5e-6 < found["launch_floor_s"] < 4e-6
    answer = simpart("fit", str(path))
    assert answer.status == 0 and "kernel_launch: 7.00 µs" in answer.out
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": launches[:9]}))
    assert overheads_of_trace(path) == {}


def test_what_is_shipped_cannot_lose_families_or_systems() -> None:
    models, fitted = dict(load_models()), shipped()
    _command._check_complete(models)
    comm_command._check_complete(fitted)
    models.pop("gemm16")
    with pytest.raises(UserError, match="hold too little of gemm16, which simpart ships"):
        _command._check_complete(models)
    with pytest.raises(UserError, match=f"lack {len(fitted.systems)} systems that simpart ships"):
        comm_command._check_complete(replace(fitted, systems={}))


def test_a_fit_says_before_it_starts_what_it_cannot_do(tmp_path: Path) -> None:
    table, collectives = tmp_path / "t.csv", tmp_path / "c.csv"
    frame({"a100_sxm": 2.0}, 20).assign(latency_ms=0.0).to_csv(table, index=False)
    collectives.write_text("op,size_bytes,num_gpus,latency_us,interconnect,gpu\n")
    for arguments, words in (
        ((str(table),), "30 usable rows are needed, found none; left out: 20 unusable"),
        ((str(table), "--family", "gem16"), "unknown family 'gem16'; did you mean 'gemm16'"),
        ((str(table), "-o", str(tmp_path / "no" / "m.npz")), "there is no folder"),
        ((str(collectives), str(table), "-o", str(tmp_path / "m.json")), "give .*m.npz"),
    ):
        found = simpart("fit", *arguments)
        assert found.status == 2
        assert re.search(words, found.err), found.err


@pytest.mark.parametrize("device", ["V100-SXM2-32GB", "B200-SXM-180GB", "a100", "L40S"])
@pytest.mark.parametrize(("taps", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 4)])
def test_a_convolution_takes_as_long_as_moving_what_it_touches(device: str, taps: int, stride: int) -> None:
    n, channels, side, out = 50, 309, 144, 2
    x, w = single(n, channels, side, side), single(out, channels, taps, taps)
    y = single(n, out, side // stride, side // stride)
    seconds = Learned().estimate(
        SignatureTable((Signature("aten.convolution.default", (x, w), (y,)),)), load_device(device)
    )
    touched = channels * (side // stride) ** 2 * min(taps**2, stride**2) + out * (side // stride) ** 2
    assert seconds.mean_s[0] >= 4 * n * touched / load_device(device).memory_bytes_per_s


def _trees(change: Callable[[Any], Any], part: str) -> Callable[[Any], Any]:
    return lambda model: replace(model, boost=replace(model.boost, **{part: change(getattr(model.boost, part))}))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: replace(model, sheets={}),
        lambda model: replace(model, domain={"martian": (1.0, 2.0)}),
        lambda model: replace(model, offsets={"vllm": {"launch": float("nan")}}),
        lambda model: replace(model, spreads={s: dict.fromkeys(SIZES, (-1.0, 0.1)) for s in model.spreads}),
        lambda model: replace(model, constants=tuple(c * np.inf for c in model.constants)),
        lambda model: replace(
            model, sheets={n: replace(s, peak=np.array([-1.0])) for n, s in model.sheets.items()}
        ),
        _trees(lambda features: features + 1000, "features"),
        _trees(lambda features: features[:5], "features"),
        _trees(lambda leaves: leaves * np.float32("nan"), "leaves"),
    ],
)  # fmt: skip
def test_models_that_could_not_answer_are_refused_when_read(change: Any, made: Any, tmp_path: Path) -> None:
    path = tmp_path / "models.npz"
    save_models(path, {"gemm16": made[1]})
    assert set(load_models(path)) == {"gemm16"}
    try:
        save_models(path, {"gemm16": change(made[1])})
    except ValueError:
        return  # not even made: trees that fit are the class's own rule, and JSON has no NaN
    with pytest.raises(FormatError, match=r"is not a file of fitted models .*run simpart fit"):
        load_models(path)


def test_a_peak_that_stands_for_another_is_named() -> None:
    v100 = load_device("v100")
    assert "states no peak of bfloat16: that of float32 is taken" in assumptions(v100, "bfloat16")
    assert assumptions(v100, "float16") == assumptions(v100)
    assert v100.peak("float64") == v100.peak("float32") / 32 or "float64" in dict(v100.peak_flops_per_s)
