"""Tables inside the package aiconfigurator-core: found and read without running its code, never learned from where
devices are there to judge by. Against the shared data, which was made from the same tables, where both are there."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from simpart.commands.evaluate import evaluate
from simpart.commands.fit import fit
from simpart.costmodels.learned._fittable import COLLECTIVES_FROM, KERNELS_FROM, fittable
from simpart.costmodels.learned._package import (
    KERNELS,
    chosen,
    find_package,
    nearest_tables,
    read_kernels,
)
from simpart.costmodels.learned_comm._packaged import read_collectives
from simpart.errors import FormatError, UnknownNameError, UserError

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

SYSTEMS = {"a100_sxm": "NVIDIA A100-SXM4-80GB", "h100_sxm": "NVIDIA H100 80GB HBM3", "b300_sxm": "NVIDIA B300 SXM6 AC"}
RATES = {"a100_sxm": (2e14, 1.5e12), "h100_sxm": (6e14, 2.5e12), "b300_sxm": (1.5e15, 6e12)}
LINKS = {"a100_sxm": (3e11, 3.2e10), "h100_sxm": (4.5e11, 6.4e10), "b300_sxm": (9e11, 1.28e11)}


def write(folder: Path, frame: Any) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder, index=False)
    return folder


def products(system: str) -> Any:
    """Sixty products whose latencies follow from two rates of the device."""
    shapes = np.array(list(itertools.product((64, 512, 1000, 4096, 8192), (256, 1024, 4096), (512, 1024, 2048, 4096))))
    m, n, k = shapes.T
    flops, bandwidth = RATES[system]
    latency = 3e-3 + 1e3 * np.maximum(2.0 * m * n * k / flops, 2.0 * (m * k + n * k + m * n) / bandwidth)
    return pd.DataFrame({
        "framework": "VLLM", "version": "0.24.0", "device": SYSTEMS[system], "op_name": "gemm",
        "kernel_source": "torch.nn.functional.linear", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k,
        "latency": latency,
    })  # fmt: skip


def attention(system: str) -> Any:
    shapes = list(itertools.product((1, 2, 8), (1024, 4096), (8, 32)))
    frame = pd.DataFrame(shapes, columns=["batch_size", "isl", "num_heads"])
    flops = 2.0 * frame.batch_size * frame.num_heads * frame.isl**2 * 128
    return frame.assign(
        framework="TRTLLM", version="1.3", device=SYSTEMS[system], op_name="context_attention", kernel_source="flow",
        num_key_value_heads=8, head_dim=128, beam_width=1, attn_dtype="bfloat16", kv_cache_dtype="bfloat16", step=0,
        window_size=0, latency=8e-3 + 1e3 * flops / (0.5 * RATES[system][0]),
    )  # fmt: skip


def reductions(system: str, version: str = "2.29.2") -> Any:
    counts = list(itertools.product((2, 4, 8), [2**i for i in range(9, 29)]))
    frame = pd.DataFrame(counts, columns=["num_gpus", "message_size"])
    wire = 2.0 * (frame.num_gpus - 1) / frame.num_gpus * 2 * frame.message_size
    return frame.assign(
        framework="TRTLLM", version=version, device=SYSTEMS[system], op_name="all_reduce", kernel_source="NCCL",
        nccl_dtype="half", latency=1e3 * (12e-6 + wire / (0.7 * LINKS[system][0])),
    )  # fmt: skip


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """A wheel unpacked, with three systems, code that must not run, and tables of kinds that nothing reads."""
    code = tmp_path / "wheel" / "aiconfigurator_core"
    systems = code / "systems"
    for system in SYSTEMS:
        write(systems / "data" / system / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet", products(system))
        place = systems / "data" / system / "attention" / "trtllm" / "1.3.0rc20"
        write(place / "context_attention_perf.parquet", attention(system))
        write(place / "generation_attention_perf.parquet", attention(system))
        write(systems / "data" / system / "mla" / "vllm" / "0.24.0" / "context_mla_perf.parquet", attention(system))
        write(systems / "data" / system / "comm" / "nccl" / "2.29.2" / "nccl_perf.parquet", reductions(system))
        direct, bus = LINKS[system]
        (systems / f"{system}.yaml").write_text(f"node:\n  intra_node_bw: {direct}\n  pcie_bw: {bus}\n")
    (code / "__init__.py").write_text("raise RuntimeError('the code of the package was run')\n")
    (tmp_path / "wheel" / "aiconfigurator_core-9.8.7.dist-info").mkdir()
    return tmp_path / "wheel"


def run(command: Any, *arguments: str) -> Any:
    return json.loads(CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False).stdout)


# --- finding and reading ----------------------------------------------------------------------------------------------
def test_the_installed_package_is_found_by_name_and_its_code_not_run(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(unpacked))
    package = find_package("aiconfigurator-core")
    assert package is not None
    assert package.source == "aiconfigurator-core-9.8.7"
    assert {table.content for table in package.tables} == {"gemm", "attention", "collectives"}
    assert package.not_read == {"attention: generation_attention": 36, "mla: context_mla": 36}


@pytest.mark.parametrize("inside", ["", "aiconfigurator_core", "aiconfigurator_core/systems"])
def test_a_wheel_unpacked_is_found_at_any_of_its_folders(unpacked: Path, inside: str) -> None:
    package = find_package(str(unpacked / inside))
    assert package is not None
    assert len(package.tables) == 9


def test_anything_else_is_not_taken_for_it(tmp_path: Path) -> None:
    assert find_package(str(tmp_path)) is None
    assert find_package("op_gemm_aic.parquet") is None


def test_its_absence_and_a_packed_wheel_are_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"aiconfigurator-core is not installed here; install simpart\[aic\]"):
        find_package("aiconfigurator-core")
    with pytest.raises(UserError, match=r"core\.whl is packed; unpack it"):
        find_package("core.whl")


def test_rows_are_the_files_rows_with_software_from_the_folders(unpacked: Path) -> None:
    package = find_package(str(unpacked))
    assert package is not None
    found = read_kernels(package, chosen(package, KERNELS, ["h100_sxm"]))
    by_family = {table.family: table for table in found.tables}
    assert (found.rows, set(by_family)) == (72, {"gemm16", "attention16"})
    expected = products("h100_sxm")
    assert np.allclose(np.sort(by_family["gemm16"].latency_s), np.sort(expected.latency) * 1e-3)
    assert set(by_family["gemm16"].software) == {"vllm 0.24.0 torch.nn.functional.linear"}
    assert set(by_family["attention16"].software) == {"trtllm 1.3.0rc20 flow"}
    assert set(by_family["gemm16"].source) == {"aiconfigurator-core-9.8.7"}


def test_versions_stay_apart_and_borrowed_tables_are_read_once(unpacked: Path) -> None:
    data = unpacked / "aiconfigurator_core" / "systems" / "data" / "a100_sxm" / "gemm" / "vllm"
    write(data / "0.14.0" / "gemm_perf.parquet", products("a100_sxm").assign(latency=lambda f: 1.1 * f.latency))
    (data / "0.25.0").mkdir()
    (data / "0.25.0" / "reuse.yaml").write_text("reuse:\n- table: gemm_perf\n  from_version: 0.24.0\n")
    package = find_package(str(unpacked))
    assert package is not None
    assert package.reused == 1
    (table,) = read_kernels(package, chosen(package, ("gemm",), ["a100"])).tables
    versions, counts = np.unique(table.software.astype(str), return_counts=True)
    assert [name.split(" ")[1] for name in versions] == ["0.14.0", "0.24.0"]
    assert counts.tolist() == [60, 60]


def test_the_rules_of_every_table_hold_here_too(unpacked: Path) -> None:
    path = unpacked / "aiconfigurator_core/systems/data/h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    frame = products("h100_sxm")
    frame.loc[0, "latency"], frame.loc[59, "latency"] = -1.0, 1e-3  # the largest product in a microsecond
    frame.loc[1, "device"] = "NVIDIA A100-SXM4-80GB"
    frame = pd.concat([frame, frame.iloc[[5]], frame.iloc[[6]].assign(gemm_dtype="int4_wo")])
    package = find_package(str(write(path, frame) and unpacked))
    assert package is not None
    found = read_kernels(package, chosen(package, ("gemm",), ["h100_sxm"]))
    assert dict(found.refused) == {
        "unusable": 1, "beyond_peak": 1, "duplicate": 1, "no_model_of_this_op_or_dtype": 1,
        "other_device_than_its_folder": 1,
    }  # fmt: skip
    assert found.rows == 62 == sum(len(table) for table in found.tables) + sum(found.refused.values())


def test_prompts_that_continue_others_are_left_out(unpacked: Path) -> None:
    path = unpacked / "aiconfigurator_core/systems/data/h100_sxm/attention/trtllm/1.3.0rc20/x"
    write(path.with_name("context_attention_perf.parquet"), attention("h100_sxm").assign(step=[128] * 3 + [0] * 9))
    package = find_package(str(unpacked))
    assert package is not None
    assert read_kernels(package, chosen(package, ("attention",), ["h100_sxm"])).refused == {"continued_prompt": 3}


def test_a_broken_file_is_named(unpacked: Path) -> None:
    (unpacked / "aiconfigurator_core/systems/data/h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet").write_text("no table")
    with pytest.raises(FormatError, match=r"cannot read .*h100_sxm/gemm.*install it anew"):
        find_package(str(unpacked))


def test_collectives_count_bytes_and_copies(unpacked: Path) -> None:
    data = unpacked / "aiconfigurator_core/systems/data/h100_sxm/comm/nccl"
    write(data / "2.27.3" / "nccl_perf.parquet", reductions("h100_sxm"))  # says 2.29.2 inside: a copy of that
    package = find_package(str(unpacked))
    assert package is not None
    frame = read_collectives(package, chosen(package, ("collectives",), ["h100_sxm"]))
    assert frame.size_bytes.min() == 1024  # 512 elements of two bytes
    assert frame.groupby("lib").quality.agg(set).to_dict() == {
        "NCCL 2.27.3": {"reused copy of another version"}, "NCCL 2.29.2": {""},
    }  # fmt: skip
    assert set(frame.interconnect) == {"NVLink + NVSwitch"}


def test_a_table_of_collectives_without_its_columns_is_named(unpacked: Path) -> None:
    path = unpacked / "aiconfigurator_core/systems/data/h100_sxm/comm/nccl/2.29.2/nccl_perf.parquet"
    write(path, reductions("h100_sxm").drop(columns=["message_size"]))
    with pytest.raises(FormatError, match=r"nccl_perf\.parquet: columns are missing: message_size"):
        run(evaluate, str(unpacked), "--table", "collectives")


def test_the_nearest_tables_are_of_devices_that_may_be_learned_from(unpacked: Path) -> None:
    package = find_package(str(unpacked))
    assert package is not None
    near = nearest_tables(package, chosen(package, ("gemm",), ["h100_sxm"]))
    assert [table.system for table in near] == ["a100_sxm"]


# --- evaluating -------------------------------------------------------------------------------------------------------
def test_evaluate_reads_it_and_says_what_it_left_out(unpacked: Path) -> None:
    found = run(evaluate, str(unpacked), "--device", "h100_sxm", "--table", "gemm")
    assert (found["kind"], found["rows"], found["covered"]) == ("ops", 60, 60)
    assert set(found["by"]["device"]) == {"H100-SXM-80GB"}
    assert found["baselines"]["ratio"]["covered"] == 60
    assert found["not_read"]["mla: context_mla"] == 36
    links = run(evaluate, str(unpacked), "--table", "collectives")
    assert (links["kind"], links["covered"]) == ("collectives", 180)


def test_no_split_learns_from_devices_that_are_there_to_judge_by(unpacked: Path) -> None:
    arguments = ("--table", "gemm", "--split", "leave-one-device-out", "--csv")
    both = [str(unpacked / "rows.csv"), str(unpacked / "again.csv")]
    run(evaluate, str(unpacked), *arguments, both[0])
    path = unpacked / "aiconfigurator_core/systems/data/b300_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    write(path, products("b300_sxm").assign(latency=lambda f: 3 * f.latency))  # must not reach any prediction
    run(evaluate, str(unpacked), *arguments, both[1])
    one, other = (pd.read_csv(path).set_index(["device", "row"]).sort_index() for path in both)
    assert one.predicted_s.notna().any()
    assert one.predicted_s.equals(other.predicted_s)


def test_any_table_can_be_judged_on_one_device(tmp_path: Path) -> None:
    frame = pd.concat([products(name).assign(device=name) for name in ("a100_sxm", "h100_sxm")])
    frame.drop(columns=["framework", "version"]).rename(
        columns={"device": "system", "gemm_dtype": "dtype", "latency": "latency_ms"}
    ).to_csv(tmp_path / "ops.csv", index=False)
    assert run(evaluate, str(tmp_path / "ops.csv"), "--device", "A100-SXM-80GB")["rows"] == 60
    with pytest.raises(UnknownNameError, match=r"unknown device of .*ops\.csv 'L40S'"):
        run(evaluate, str(tmp_path / "ops.csv"), "--device", "l40s")
    with pytest.raises(UserError, match="--table is for aiconfigurator-core"):
        run(evaluate, str(tmp_path / "ops.csv"), "--table", "gemm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--table", "gem"), "unknown table 'gem'"),
        (("--table", "gemm", "--table", "collectives"), "collectives is judged alone"),
        (("--device", "t4"), "unknown device of these tables 't4'"),
        (("--split", "by-moon"), "unknown split 'by-moon'"),
        (("--table", "moe"), "has no table of moe"),
    ],
)
def test_mistakes_are_told_in_one_line(unpacked: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        run(evaluate, str(unpacked), *arguments)
    assert "\n" not in str(caught.value)


# --- fitting ----------------------------------------------------------------------------------------------------------
def test_fit_leaves_out_devices_to_judge_by_and_counts_them(unpacked: Path) -> None:
    found = run(fit, str(unpacked), "-o", str(unpacked / "models.npz"), "--family", "gemm16")
    assert set(found["families"]["gemm16"]["devices"]) == {"A100-SXM-80GB", "H100-SXM-80GB"}
    assert found["files"]["wheel"]["never_fitted"] == {"B300-SXM-270GB": 72}
    links = run(fit, str(unpacked), "-o", str(unpacked / "links.npz"), "--family", "communication")
    assert links["files"]["wheel, collectives"]["never_fitted"] == {"B300-SXM-270GB": 60}
    text = CliRunner().invoke(fit, [str(unpacked), "-o", str(unpacked / "x.npz"), "--family", "gemm16"]).output
    assert "left out, because these devices are only there to judge by: 72 of B300-SXM-270GB" in text


def test_its_rows_copied_into_a_table_are_not_learned_from_either(unpacked: Path) -> None:
    frame = pd.concat([products(name) for name in SYSTEMS])
    frame.to_csv(unpacked / "table.csv", index=False)
    found = run(fit, str(unpacked / "table.csv"), "-o", str(unpacked / "models.npz"))
    assert found["files"]["table.csv"]["never_fitted"] == {"B300-SXM-270GB": 60}


def test_a_device_of_ones_own_is_learned_from() -> None:
    sources = np.array(["aiconfigurator-core-0.12.0", "our lab", "aiconfigurator-core-0.12.0"], dtype=object)
    devices = np.array(["GB200", "GB200", "L40S"], dtype=object)
    assert fittable(sources, devices, KERNELS_FROM).tolist() == [False, True, True]


# --- against the shared data ------------------------------------------------------------------------------------------
def real_package() -> Any:
    """The package where it is installed or where AICONFIGURATOR_CORE says that it is unpacked."""
    try:
        package = find_package(os.environ.get("AICONFIGURATOR_CORE", "aiconfigurator-core"))
    except UserError as error:
        pytest.skip(str(error))
    assert package is not None
    return package


@pytest.fixture(scope="module")
def shared() -> Path:
    data = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not data.is_dir():
        pytest.skip("the shared data is not beside the clone")
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "file"),
    [
        ("gemm", "op_gemm_aic"),
        ("attention", "op_attention_fwd_aic"),
        ("encoder_attention", "op_attention_encoder_aic"),
        ("moe", "op_moe_aic"),
    ],
)
def test_the_shared_tables_are_rows_of_it(content: str, file: str, shared: Path) -> None:
    from simpart.costmodels.learned._adapters import read_measurements

    package = real_package()
    known = read_measurements(shared / "ops" / f"{file}.parquet")
    devices = sorted({name for table in known.tables for name in table.devices()})
    found = {table.family: table for table in read_kernels(package, chosen(package, (content,), devices)).tables}
    for table in known.tables:
        other = found[table.family]
        columns = sorted(table.dims)
        frames = [
            pd.DataFrame({
                "device": t.device, "software": t.software, "latency": np.round(t.latency_s * 1e9, 3),
                **{name: t.dims[name] for name in columns},
            })
            for t in (table, other)
        ]  # fmt: skip
        joined = frames[0].merge(frames[1].drop_duplicates(), how="left", indicator=True)
        assert (joined["_merge"] == "both").mean() == 1.0
        assert other.devices() and len(other) >= len(table)


@pytest.mark.slow
def test_the_shared_collectives_are_medians_of_it(shared: Path) -> None:
    package = real_package()
    known = pd.read_csv(shared / "comm" / "collectives.csv")
    known = known[known.source == "aiconfigurator"]
    devices = known.gpu.unique().tolist()
    found = read_collectives(package, chosen(package, ("collectives",), devices))
    found["op"] = found.op.replace("alltoall", "all_to_all")
    keys = ["gpu", "lib", "kernel", "op", "dtype", "num_gpus", "size_bytes"]
    medians = found.groupby(keys, as_index=False).latency_us.median()
    joined = known.merge(medians, on=keys, how="left", suffixes=("", "_package"))
    assert joined.latency_us_package.notna().all()
    assert np.allclose(joined.latency_us, joined.latency_us_package, rtol=2e-3)
    assert set(COLLECTIVES_FROM) >= {"A100-SXM-80GB", "B200-SXM-180GB"}
