"""The learned communication model: protocols, adapter, cleaning rules, systems, intervals, artifact, clusters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simpart.cost import PROVENANCES, Collective, CollectiveTable
from simpart.costmodels import AlphaBeta, default_costs
from simpart.costmodels.learned_comm import SHIPPED, LearnedComm, load, save
from simpart.costmodels.learned_comm._calibrate import size_fold, with_floors
from simpart.costmodels.learned_comm._command import collectives_in
from simpart.costmodels.learned_comm._evaluating import clean, judge_records
from simpart.costmodels.learned_comm._fit import centres, fit_shared
from simpart.costmodels.learned_comm._interconnects import interconnect_of
from simpart.costmodels.learned_comm._model import train
from simpart.costmodels.learned_comm._nccl_tests import read_log
from simpart.costmodels.learned_comm._protocol import seconds
from simpart.costmodels.learned_comm._records import Records, joined, read_records
from simpart.costmodels.learned_comm._rules import judge, superseded
from simpart.costmodels.learned_comm._situation import situation_of
from simpart.errors import FormatError, UnknownNameError
from simpart.evaluation import summary
from simpart.hardware import Cluster, load_cluster, load_device
from simpart.testing.costmodel_suite import check_comm_model

SIZES = [2**k for k in range(9, 30)]


def table(times: dict[str, float], ranks: tuple[int, ...] = (2, 4, 8), **more: object) -> pd.DataFrame:
    """All-reduces through NVSwitches that take `floor · 2 (n-1) us + bytes / (0.75 link)`, by device and floor."""
    links = {"a100_sxm": 300e9, "h100_sxm": 450e9, "b200_sxm": 900e9}
    rows = [
        {
            "gpu": gpu, "interconnect": "NVLink+NVSwitch", "nodes": 1, "num_gpus": n, "op": "all_reduce",
            "dtype": "int8", "size_bytes": size, "source": "made", "kernel": "NCCL", "lib": "NCCL",
            "latency_us": 1e6 * (floor * (5e-6 + 1e-6 * n) + 2 * (n - 1) / n * size / (0.75 * links[gpu])), **more,
        }
        for gpu, floor in times.items() for n in ranks for size in SIZES
    ]  # fmt: skip
    return pd.DataFrame(rows)


def records(times: dict[str, float]) -> Records:
    return read_records(table(times))


# --- the analytic form ----------------------------------------------------------------------------------------------
def test_the_bytes_of_each_kind_are_those_of_textbooks() -> None:
    cluster, ranks, size = load_cluster("dgx-a100:2"), tuple(range(8)), 10**9
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    found = situation_of([Collective(kind, size, ranks) for kind in kinds], cluster)  # type: ignore[arg-type]
    assert np.allclose(found.local_s * 300e9 / size, [2 * 7 / 8, 7 / 8, 7 / 8, 7 / 8, 1])
    both = situation_of([Collective(kind, size, tuple(range(16))) for kind in ("all_reduce", "all_to_all")], cluster)
    assert np.allclose(
        both.network_s * 25e9 / size, [1 / 8, 8 / 16]
    )  # halves meet over eight cards; half of all goes there
    assert both.hosts.tolist() == [2, 2] and both.local.tolist() == [8, 8]


def test_groups_that_share_a_card_get_their_share_of_it() -> None:
    cluster = load_cluster("dgx-v100:2")  # two devices on a card
    one, two = (situation_of([Collective("all_reduce", 10**8, (0, 8), c)], cluster).network_s[0] for c in (1, 2))
    assert two == pytest.approx(2 * one)


def test_only_fourth_generation_switches_reduce_and_only_what_they_can_add() -> None:
    rows = [Collective("all_reduce", 10**8, tuple(range(8)), 1, dtype) for dtype in ("bfloat16", "int8")]
    switch, ring = situation_of(rows, load_cluster("dgx-h100")).switch_s
    assert switch == pytest.approx(10**8 * (1 + 1 / 8) / 450e9) and ring == np.inf
    assert np.isinf(situation_of(rows, load_cluster("dgx-a100")).switch_s).all()


def test_no_time_is_below_the_bytes_at_the_rate_of_the_links() -> None:
    rng = np.random.default_rng(0)
    wild = {g: {n: v * float(np.exp(rng.normal())) for n, v in values.items()} for g, values in centres().items()}
    cluster = load_cluster("dgx-h100:4")
    rows = [Collective("all_reduce", 2**k, tuple(range(n))) for k in range(34) for n in (2, 8, 16, 32)]
    at = situation_of(rows, cluster)
    assert (seconds(wild, at, np.ones(len(at)), np.ones(len(at))) >= at.bound_s()).all()


def test_latency_scales_with_the_floor_and_bytes_do_not() -> None:
    at = situation_of(
        [Collective("all_reduce", size, tuple(range(8))) for size in (8, 2**34)], load_cluster("dgx-a100")
    )
    one, two = (seconds(centres(), at, np.full(2, f), np.ones(2)) for f in (1.0, 2.0))
    assert two[0] / one[0] == pytest.approx(2.0, rel=1e-3) and two[1] / one[1] == pytest.approx(1.0, rel=1e-3)


# --- adapter and rules ----------------------------------------------------------------------------------------------
def test_links_are_read_from_words() -> None:
    assert interconnect_of("NVLink4+NVSwitch", "H200-SXM-141GB").bytes_per_s == 450e9  # type: ignore[union-attr]
    assert interconnect_of("NVLink3 + EFA 4x100Gb/node", "A100-SXM-80GB").network_bytes_per_s == 50e9  # type: ignore[union-attr]
    assert interconnect_of("PCIe5 (no GPU link)", "H100-PCIE-80GB").fabric == "pcie"  # type: ignore[union-attr]
    assert interconnect_of("NVLink5 + NDR InfiniBand", "B200-SXM-180GB").network_bytes_per_s == 400e9  # type: ignore[union-attr]
    assert interconnect_of("carrier pigeons", "A100-SXM-80GB") is None


def test_rows_that_cannot_be_used_are_counted_by_rule() -> None:
    frame = table({"a100_sxm": 1.0}).astype({"latency_us": float})
    frame.loc[0, "latency_us"], frame.loc[1, "latency_us"] = -1.0, 1e-3
    frame.loc[2, "gpu"], frame.loc[3, "op"], frame.loc[4, "interconnect"] = "abacus", "gossip", "string"
    frame.loc[5, "nodes"] = 2
    frame = pd.concat([frame, frame.iloc[[7]]], ignore_index=True)
    verdict = judge(read_records(frame))
    assert verdict[:6].tolist() == [
        "unusable", "faster_than_link", "unknown_device", "unknown_op", "unknown_interconnect", "network_not_stated",
    ]  # fmt: skip
    assert verdict[-1] == "duplicate" and set(verdict[6:-1]) == {""}


def test_a_system_in_another_unit_and_a_curve_that_jumps_are_left_out() -> None:
    frame = table({"a100_sxm": 1.0, "h100_sxm": 0.7})
    frame.loc[frame.gpu == "h100_sxm", "latency_us"] *= 1000
    assert set(judge(read_records(frame))[frame.gpu == "h100_sxm"]) == {"unit_mistake"}
    frame = table({"a100_sxm": 1.0}, ranks=(8,))
    frame.loc[[2, 4, 6], "latency_us"] *= 4
    assert judge(read_records(frame)).tolist() == ["unsteady"] * 8 + [""] * 13


def test_missing_columns_are_named() -> None:
    with pytest.raises(FormatError, match=r"needs the columns size_bytes, gpu or device or system"):
        read_records(table({"a100_sxm": 1.0}).drop(columns=["size_bytes", "gpu"]))


def test_two_hosts_that_send_every_byte_twice_are_not_fitted_on() -> None:
    frame = pd.DataFrame([
        {"gpu": "a100_sxm", "interconnect": "NVLink + EFA 4x100Gb/node", "nodes": 2, "num_gpus": 16, "op": "all_reduce",
         "size_bytes": size, "latency_us": 1e6 * factor * size / 50e9 + 200, "source": name}
        for name, factor in (("tree", 1.2), ("ring", 2.1)) for size in (2**28, 2**30)
    ])  # fmt: skip
    assert superseded(read_records(frame)).tolist() == [False, False, True, True]


# --- learning -------------------------------------------------------------------------------------------------------
def test_a_law_of_the_form_is_found_again() -> None:
    """Rows made with known constants: what is fitted predicts them within 2 %."""
    made = records({"a100_sxm": 1.0, "h100_sxm": 0.6, "b200_sxm": 1.1})
    true = centres()
    true["nvlink/all_reduce"].update(start=9e-6, step=2e-6, low=0.1, bulk=0.7)
    factor = np.array([{"A": 1.0, "H": 0.6, "B": 1.1}[name[0]] for name in made.device.tolist()])
    exact = replace(made, latency_s=seconds(true, made.situation, factor, np.ones(len(made))))
    model = train(exact)
    found = model.predict(exact.situation, exact.device.tolist(), exact.system.tolist())
    assert np.abs(np.expm1(found.log_seconds - np.log(exact.latency_s))).mean() < 0.02


def test_a_measured_floor_replaces_the_latency_of_a_device_never_seen() -> None:
    left_in, held = records({"a100_sxm": 1.0, "b200_sxm": 1.0}), records({"h100_sxm": 0.4})
    model = train(left_in)
    small = held.situation.bytes <= 2**14

    def error(rows: Records) -> float:
        found = model.predict(rows.situation, rows.device.tolist())
        return float(np.abs(np.expm1(found.log_seconds - np.log(rows.latency_s)))[small].mean())

    assert error(held) > 0.5 > 0.2 > error(with_floors(held))


def test_constants_of_a_split_never_see_the_rows_held_out() -> None:
    left_in, held = records({"a100_sxm": 1.0, "b200_sxm": 1.2}), records({"h100_sxm": 0.4})
    wrong = replace(held, latency_s=held.latency_s * 50)
    one = fit_shared(left_in.medians())[0]
    whole = joined([left_in, wrong])
    assert fit_shared(whole.at(whole.device != "H100-SXM-80GB").medians())[0] == one


def test_systems_seen_keep_what_their_measurements_leave() -> None:
    seen = records({"a100_sxm": 1.0})
    bumped = replace(seen, latency_s=seen.latency_s * np.where(seen.situation.bytes == 2**20, 1.5, 1.0))
    model = train(bumped)
    found = model.predict(bumped.situation, bumped.device.tolist(), bumped.system.tolist())
    at = seen.situation.bytes == 2**20
    assert np.abs(found.log_seconds - np.log(bumped.latency_s))[at].max() < 0.03


def test_size_folds_part_the_sizes_and_cover_them() -> None:
    made = records({"a100_sxm": 1.0})
    folds = [size_fold(made, number) for number in range(5)]
    assert (np.sum(folds, axis=0) == 1).all()
    for fold in folds:
        held = {(n, b) for n, b in zip(made.situation.local[fold], made.situation.bytes[fold], strict=True)}
        assert not any((n, 2 * b) in held for n, b in held)


@pytest.mark.parametrize("split", ["shipped", "leave-one-device-out", "leave-one-group-size-out"])
def test_every_split_judges_every_row_beside_the_baselines(split: str) -> None:
    cleaned, refused = clean(records({"a100_sxm": 1.0, "h100_sxm": 0.7}))
    found = summary(judge_records(cleaned, split, refused), charge="alpha_beta")
    assert found["covered"] == len(cleaned) and set(found["baselines"]) == {"alpha_beta", "roofline", "ratio"}
    assert 0 < found["mape"] < (1.0 if split == "shipped" else 0.5) and found["interval_half_width_median"] > 0


def test_an_unknown_split_is_answered_with_the_known_ones() -> None:
    from simpart.costmodels.learned_comm import evaluate

    with pytest.raises(UnknownNameError, match="leave-one-cluster-out"):
        evaluate(table({"a100_sxm": 1.0}), "t.csv", "leave-everything-out", False, None, print)


# --- the model that is shipped ---------------------------------------------------------------------------------------
def test_the_shipped_model_passes_the_suite() -> None:
    check_comm_model(LearnedComm())


def test_gpu_clusters_use_it_and_processors_do_not(tmp_path: Path) -> None:
    assert isinstance(default_costs(load_cluster("dgx-a100"), tmp_path).communication, LearnedComm)
    assert isinstance(default_costs(load_cluster("local:2"), tmp_path).communication, AlphaBeta)
    rows = CollectiveTable((Collective("all_reduce", 2**20, (0, 1)),))
    local = load_cluster("local:2")
    assert LearnedComm().estimate(rows, local).mean_s == AlphaBeta().estimate(rows, local).mean_s


def test_large_all_reduces_on_measured_hosts_are_near_what_was_measured() -> None:
    """Published bus bandwidths at 512 MB on eight devices, NCCL: A100 213, H100 445 GB/s."""
    for name, bus in (("dgx-a100", 219e9), ("dgx-h100", 445e9)):
        row = Collective("all_reduce", 2**29, tuple(range(8)), 1, "float16")
        found = LearnedComm().estimate(CollectiveTable((row,)), load_cluster(name))
        assert found.mean_s[0] == pytest.approx(2 * 7 / 8 * 2**29 / bus, rel=0.08)
        assert PROVENANCES[found.provenance[0]] == "interpolated"


def test_kinds_and_devices_never_measured_say_so_and_are_less_sure() -> None:
    def spread(cluster: Cluster, kind: str, dtype: str = "float16") -> tuple[float, str]:
        row = Collective(kind, 2**24, tuple(range(8)), 1, dtype)  # type: ignore[arg-type]
        found = LearnedComm().estimate(CollectiveTable((row,)), cluster)
        return float(np.hypot(found.shared_log_sd[0], found.own_log_sd[0])), PROVENANCES[found.provenance[0]]

    seen = load_cluster("dgx-h100")
    new = replace(seen, devices=((load_device("h200"), 8),))
    assert spread(seen, "all_reduce")[1] == "interpolated" and spread(new, "all_reduce")[1] == "extrapolated"
    assert spread(seen, "broadcast")[1] == "analytic"
    assert spread(seen, "all_reduce")[0] < spread(new, "all_reduce")[0]


def test_a_device_with_the_links_of_a_measured_one_is_told_by_it() -> None:
    """H200 has the NVLink of H100, so its collectives inside a host are H100's, less surely."""
    seen = load_cluster("dgx-h100")
    alike = replace(seen, devices=((load_device("h200"), 8),))
    rows = CollectiveTable(tuple(Collective("all_gather", 2**e, tuple(range(8))) for e in range(10, 30, 4)))
    one, other = (LearnedComm().estimate(rows, cluster) for cluster in (seen, alike))
    assert np.allclose(one.mean_s, other.mean_s, rtol=1e-12)
    assert (np.hypot(other.shared_log_sd, other.own_log_sd) > np.hypot(one.shared_log_sd, one.own_log_sd)).all()


def test_a_floor_in_the_cluster_file_is_used_for_new_devices() -> None:
    seen = load_cluster("dgx-h100")
    row = CollectiveTable((Collective("all_reduce", 1024, (0, 1)),))

    def small(floor_s: float | None) -> float:
        levels = (replace(seen.levels[0], floor_s=floor_s), *seen.levels[1:])
        cluster = replace(seen, devices=((load_device("h200"), 8),), levels=levels)
        return float(LearnedComm().estimate(row, cluster).mean_s[0])

    assert small(6e-6) == pytest.approx(6e-6, rel=0.01) and small(20e-6) == pytest.approx(20e-6, rel=0.01)


def test_faster_links_never_take_longer() -> None:
    cluster = load_cluster("dgx-a100:4")
    quick = replace(
        cluster, devices=((load_device("b300"), 32),),
        levels=tuple(replace(level, bytes_per_s=1.5 * level.bytes_per_s) for level in cluster.levels),
    )  # fmt: skip
    slow = replace(quick, levels=cluster.levels)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast")
    groups = [(kind, n) for kind in kinds for n in ((2,) if kind == "p2p" else (2, 8, 32))]
    rows = CollectiveTable(
        tuple(Collective(kind, 2**k, tuple(range(n))) for kind, n in groups for k in range(0, 32, 3))  # type: ignore[arg-type]
    )
    assert (LearnedComm().estimate(rows, quick).mean_s <= LearnedComm().estimate(rows, slow).mean_s * (1 + 1e-9)).all()


def test_an_artifact_survives_its_round_trip_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "copy.json", load())
    assert (tmp_path / "copy.json").read_bytes() == SHIPPED.read_bytes()
    changed = json.loads(SHIPPED.read_text())
    changed["constants"]["nvlink/all_reduce"]["bulk"] = 99
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    with pytest.raises(FormatError, match="corrupt"):
        load(tmp_path / "changed.json")
    (tmp_path / "other.json").write_text('{"kind": "simpart-plan", "version": 1}')
    with pytest.raises(FormatError):
        load(tmp_path / "other.json")
    with pytest.raises(FormatError):
        load(tmp_path / "missing.json")


def test_tables_of_collectives_are_found_by_their_columns(tmp_path: Path) -> None:
    table({"a100_sxm": 1.0}).to_csv(tmp_path / "collectives.csv", index=False)
    (tmp_path / "collectives_not.csv").write_text("a,b\n1,2\n")
    assert collectives_in([str(tmp_path)]) == [tmp_path / "collectives.csv"]


def test_hardware_show_says_on_how_many_rows_links_were_validated() -> None:
    from simpart.costmodels.learned_comm._validated import validated_rows
    from tests.test_cli import document, simpart

    found = document("hardware", "show", "dgx-v100")["validated"]
    assert found["links"]["nvlink"] > 400 and found["links"]["infiniband"] == 0
    assert "never validated" in simpart("hardware", "show", "dgx-v100").out
    cluster = load_cluster("dgx-h100")
    rows = {level.name: validated_rows(cluster, level) for level in cluster.levels}
    assert rows["nvlink"] > rows["infiniband"] > 0


def test_hardware_show_names_what_a_thin_data_sheet_makes_models_assume(tmp_path: Path) -> None:
    from tests.test_cli import document

    sheet = tmp_path / "new.yaml"
    sheet.write_text(
        "kind: device\nversion: 1\nname: NEW-1\ntype: gpu\nmemory: 100 GiB\nmemory_bandwidth: 4 TB/s\n"
        "peak: {bfloat16: 1000 TFLOP/s, float32: 60 TFLOP/s}\nkernel_launch: 5 us\n"
        "source: {memory: x, memory_bandwidth: x, peak: x, kernel_launch: x}\n"
    )
    found = document("hardware", "show", str(sheet))
    assert found["validated"]["kernels"] == {}
    assert "states no multiprocessors" in found["assumed"] and "wider by 21%" in found["assumed"]


LOG = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid 71 on   node-a device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid 72 on   node-a device  1 [0x0f] NVIDIA A100-SXM4-80GB
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    35.10   29.87   29.87      0    34.90   30.05   30.05      0
     2097152        524288     float     sum      -1    41.20   50.90   50.90      0    41.00   51.15   51.15      0
     4194304       1048576     float     sum   52.33   80.15   80.15      0    52.00   80.66   80.66      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 53.8
"""


def test_logs_of_nccl_tests_become_measurements(tmp_path: Path) -> None:
    from tests.test_cli import document

    log = tmp_path / "run.log"
    log.write_text(LOG)
    frame = read_log(log)
    assert frame["op"].tolist() == ["all_reduce"] * 3 and frame["latency_us"].tolist() == [35.10, 41.20, 52.33]
    records = read_records(frame)
    assert set(records.reason) == {""} and set(records.device) == {"A100-SXM-80GB"}
    found = document("evaluate", str(log))
    assert (found["kind"], found["covered"]) == ("collectives", 3) and found["mape"] < 1.0
    assert collectives_in([str(log)]) == [log]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing of the kind\n", "no log of nccl-tests"),
        (LOG.replace("all_reduce_perf", "some test"), "does not say which test"),
        (LOG.replace("1 [0x0f] NVIDIA A100-SXM4-80GB", "1 [0x0f] NVIDIA L40S"), "one kind of device"),
    ],
)
def test_other_logs_are_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(text)
    with pytest.raises(FormatError, match=says):
        read_log(log)


def test_hosts_joined_by_an_unknown_network_are_counted_not_guessed(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(LOG.replace("72 on   node-a", "72 on   node-b"))
    assert set(read_records(read_log(log)).reason) == {"network_not_stated"}
    log.write_text("# interconnect: 8x200Gb/node\n" + log.read_text())
    assert set(read_records(read_log(log)).reason) == {""}
