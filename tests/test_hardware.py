"""Hardware: quantities, files and their faults, clusters and their links, detection, commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from simpart.commands.hardware import hardware
from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.hardware import (
    Cluster,
    Device,
    LinkLevel,
    device_from_dict,
    device_to_dict,
    list_clusters,
    list_devices,
    load_cluster,
    load_device,
)
from simpart.hardware.files import read_hardware
from simpart.hardware.quantity import format_quantity, parse_quantity
from simpart.hardware_profiles._detect import Machine, describe, detect_local

DEVICE = """\
kind: device
version: 1
name: tiny
type: gpu
memory: 8 GiB
memory_bandwidth: 100 GB/s
peak:
  float32: 1 TFLOP/s
kernel_launch: 5 us
source:
  memory: sheet
  memory_bandwidth: sheet
  peak: sheet
  kernel_launch: "assumption: typical"
"""
CLUSTER = """\
kind: cluster
version: 1
name: pair
nodes:
  - {device: k80, count: 4}
levels:
  - {name: bus, joins: 4, type: shared, bandwidth: 10 GB/s, latency: 5 us, inside_host: true,
     source: {bandwidth: s, latency: s}}
  - {name: net, joins: all, bandwidth: 10 Gb/s, latency: 30 us, shared_by: 4, source: {bandwidth: s, latency: s}}
"""
NUMBERS = ("memory", "memory_bandwidth", "kernel_launch", "vector", "clock", "power")


def device(name: str = "d", **other: object) -> Device:
    fixed = {"kind": "gpu", "memory_bytes": 2**30, "memory_bytes_per_s": 1e9, "kernel_launch_s": 1e-6}
    peak = {"peak_flops_per_s": (("float32", 1e12), ("float16", 8e12))}
    return Device(**{"name": name, **fixed, **peak, **other})  # type: ignore[arg-type]


def link(name: str, size: int, **other: object) -> LinkLevel:
    return LinkLevel(**{"name": name, "size": size, "bytes_per_s": 1e9, "latency_s": 1e-6, **other})  # type: ignore[arg-type]


# --- quantities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("2039 GB/s", "B/s", 2039e9),
        ("3.35 TB/s", "B/s", 3350e9),
        ("80 GiB", "B", 85_899_345_920.0),
        ("200 Gb/s", "B/s", 25e9),
        ("4us", "s", 4e-6),
        ("4 µs", "s", 4e-6),
        ("1e-3 ms", "s", 1e-6),
        ("7.20 USD/h", "USD/h", 7.2),
        ("1.5 h", "s", 5400.0),
        ("-0 B", "B", 0.0),
    ],
)
def test_quantities_are_converted_to_si(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit", "fault"),
    [
        (312, "B", "'312' has no unit; write it as in '80 GiB'"),
        ("3 GB", "s", "'3 GB' is not in s; write it as in '4 us'"),
        ("312 TFLOPS", "FLOP/s", "'312 TFLOPS' has an unknown unit; write it as in '312 TFLOP/s'"),
        ("-3 us", "s", "'-3 us' is negative; it must be at least 0"),
        ("nan B", "B", "'nan B' is not a number with a unit; write it as in '80 GiB'"),
        (".inf", "s", "'.inf' is not a number with a unit; write it as in '4 us'"),
        (True, "s", "True is not a number with a unit; write it as in '4 us'"),
        ("1e999 GB", "B", "'1e999 GB' is too large for a number; write it as in '80 GiB'"),
        ("1 GB/s/s", "B/s", "'1 GB/s/s' has an unknown unit; write it as in '2039 GB/s'"),
    ],
)
def test_a_bad_quantity_is_one_line(text: object, unit: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_quantity(text, unit)
    assert str(caught.value) == fault


@given(st.floats(min_value=0, max_value=1e300), st.sampled_from(["B", "B/s", "FLOP/s", "s", "Hz", "W", "USD/h"]))
def test_what_is_formatted_is_read_back(value: float, unit: str) -> None:
    assert parse_quantity(format_quantity(value, unit), unit) == value


@given(st.integers(0, 2**60))
def test_bytes_are_read_back(value: int) -> None:
    assert parse_quantity(format_quantity(value, "B"), "B") == float(value)


@given(st.floats(min_value=1e-9, max_value=1e18))
def test_rounded_text_is_close(value: float) -> None:
    assert parse_quantity(format_quantity(value, "B/s", digits=4), "B/s") == pytest.approx(value, rel=1e-3)


# --- shipped profiles ----------------------------------------------------------------------------------------------


def shipped(root: Path) -> Iterator[Path]:
    return (path for path in sorted((root / "hardware_profiles").rglob("*.yaml")))


def test_every_shipped_file_reads_and_names_its_sources(root: Path) -> None:
    found = [read_hardware(path) for path in shipped(root)]
    assert len(found) == len(list_devices()) + len(list_clusters()) - 1
    for item in found:
        for part in (item,) if isinstance(item, Device) else item.levels:
            assert all(len(text) > 5 for _, text in part.sources), part


def test_devices_agree_with_the_vendor() -> None:
    a100, h100, v100, k80 = (load_device(name) for name in ("a100", "h100", "v100", "k80"))
    assert (a100.memory_bytes, a100.memory_bytes_per_s, a100.peak("bfloat16")) == (80 * 2**30, 2039e9, 312e12)
    assert (h100.memory_bytes_per_s, h100.peak("float16"), h100.peak("float8")) == (3350e9, 989e12, 1978e12)
    assert (v100.memory_bytes, v100.peak("float16"), v100.power_w) == (32 * 2**30, 125e12, 300)
    assert (k80.memory_bytes, k80.memory_bytes_per_s) == (12 * 2**30, 240e9)
    for gpu in (
        a100,
        h100,
        v100,
        k80,
    ):  # cores x clock x 2; 64 lanes per multiprocessor on V100 and A100, else 128 or 192
        lanes = {"A100-SXM-80GB": 64, "V100-SXM2-32GB": 64, "H100-SXM-80GB": 128, "K80": 192}[gpu.name]
        assert gpu.multiprocessors is not None
        assert gpu.clock_hz is not None
        assert gpu.peak("float32") == pytest.approx(gpu.multiprocessors * lanes * gpu.clock_hz * 2, rel=0.01)


@pytest.mark.parametrize("spelling", ["A100-SXM-80GB", "a100", "a100_80gb", "A100 SXM4 80GB"])
def test_a_device_has_several_spellings(spelling: str) -> None:
    assert load_device(spelling).name == "A100-SXM-80GB"


def test_nodes_are_counted_after_a_colon() -> None:
    cluster = load_cluster("dgx-a100:48")
    assert (cluster.name, cluster.size, len(cluster.devices)) == ("dgx-a100:48", 384, 1)
    assert load_cluster("dgx-a100:1") == load_cluster("DGX-A100")
    assert [count for _, count in load_cluster("a100-v100:2").devices] == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("dgx-a10", "unknown cluster 'dgx-a10'; did you mean 'dgx-a100'? "
                    "Known: a100-v100, dgx-a100, dgx-h100, dgx-v100, local, p2.8xlarge"),
        ("dgx-a100:0",
         "cluster 'dgx-a100:0': the number of nodes after ':' must be a whole number from 1 to 99999, got '0'"),
        ("dgx-a100:two",
         "cluster 'dgx-a100:two': the number of nodes after ':' must be a whole number from 1 to 99999, got 'two'"),
        ("local:-1",
         "cluster 'local:-1': the number of nodes after ':' must be a whole number from 1 to 99999, got '-1'"),
        ("k80", "'k80' is a device, not a cluster; "
                "known clusters: a100-v100, dgx-a100, dgx-h100, dgx-v100, local, p2.8xlarge"),
        ("nowhere/x.yaml", "cannot read nowhere/x.yaml: No such file or directory"),
    ],
)  # fmt: skip
def test_an_unknown_cluster_is_answered_with_the_known_ones(name: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        load_cluster(name)
    assert str(caught.value) == fault


# --- faults in files -----------------------------------------------------------------------------------------------


def edit(old: str, new: str) -> Callable[[str], str]:
    def apply(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return apply


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (edit("memory:", "memroy:"), "memroy: unknown key; did you mean 'memory'?"),
        (edit("type: gpu", "type: gpu\nzzz: 1"),
         "zzz: unknown key; known: kind, version, name, type, memory, memory_bandwidth, peak, kernel_launch, source, "
         "aliases, multiprocessors, vector, launch_floor, clock, l2, power, price, reserved"),
        (edit("5 us", "-5 us"), "kernel_launch: '-5 us' is negative; it must be at least 0"),
        (edit("8 GiB", "8"), "memory: '8' has no unit; write it as in '80 GiB'"),
        (edit("8 GiB", "0 GiB"), "memory: must be positive, got '0 GiB'"),
        (edit("1 TFLOP/s", "1 TB/s"), "peak.float32: '1 TB/s' is not in FLOP/s; write it as in '312 TFLOP/s'"),
        (edit("float32", "float33"), "peak.float33: unknown key; did you mean 'float32'?"),
        (edit("  memory: sheet\n", ""),
         "memory: has no source; add source.memory: the data sheet's name, or 'assumption: …'"),
        (edit("  peak: sheet", "  peak: sheet\n  power: sheet"),
         "source.power: is the source of a number that is not there"),
        (edit("peak: sheet", "peak: ''"), "source.peak: must be text, got ''"),
        (edit("name: tiny\n", ""), "name: missing"),
        (edit("kernel_launch: 5 us\n", ""), "kernel_launch: missing"),
        (edit("type: gpu", "type: tpu"), "type: must be one of gpu, cpu, got 'tpu'"),
        (edit("type: gpu", "type: gpu\ntype: cpu"), "line 5: key 'type' is given twice"),
        (edit("version: 1", "version: 2"), "version 2 is newer than 1; update simpart"),
        (edit("version: 1", "version: one"), "version: must be a whole number, at least 1, got 'one'"),
        (edit("kind: device", "kind: plan"),
         "has kind 'plan'; expected a mapping with 'kind: device' or 'kind: cluster'"),
        (edit("kind: device\n", ""),
         "has no kind; expected a mapping with 'kind: device' or 'kind: cluster'"),
        (edit("type: gpu", "type: gpu\nreserved: 9 GiB"),
         "reserved: has no source; add source.reserved: the data sheet's name, or 'assumption: …'"),
        (edit("source:\n", "reserved: 9 GiB\nsource:\n  reserved: sheet\n"),
         "device 'tiny': reserved_bytes must be less than memory_bytes, got 9663676416 of 8589934592"),
        (edit("type: gpu", "type: [gpu"),
         "line 5: not valid YAML, or truncated: did not find expected ',' or ']'"),
        (lambda text: "", "is empty; expected the YAML of a device or a cluster"),
        (lambda text: "# only this\n", "is empty; expected the YAML of a device or a cluster"),
        (lambda text: "- a\n- b\n", "has no kind; expected a mapping with 'kind: device' or 'kind: cluster'"),
        (lambda text: text[: text.index("kernel")], "kernel_launch: missing"),
        (lambda text: text[: text.index("/s")], "peak: missing"),
        (lambda text: "kind: !!python/object:os.system x\n",
         "line 1: not valid YAML, or truncated: "
         "could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"),
    ],
)  # fmt: skip
def test_a_fault_in_a_device_file_is_one_line(tmp_path: Path, change: Callable[[str], str], fault: str) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(change(DEVICE))
    with pytest.raises(UserError) as caught:
        load_device(path)
    assert str(caught.value) == f"{path}: {fault}"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (edit("k80", "k81"), "nodes[0].device: unknown device 'k81'; "
         f"Known: {', '.join(sorted(list_devices()))}"),
        (edit("count: 4", "count: 0"), "nodes[0].count: must be a whole number, at least 1, got 0"),
        (edit("joins: 4", "joins: 3"), "levels[0].joins: 3 devices inside a host contradict a node of 4 K80"),
        (edit("joins: all, bandwidth: 10 Gb/s, latency: 30 us, shared_by: 4",
              "joins: 3, bandwidth: 1 B/s, latency: 1 s"),
         "cluster 'pair': level 'net' must join a multiple of the 4 devices of level 'bus', got 3"),
        (edit("joins: 4", "joins: four"), "levels[0].joins: must be a whole number, at least 1, got 'four'"),
        (edit("shared_by: 4", "shared_by: 5"), "link level 'net': shared_by must be at most size, got 5 of 4"),
        (edit("30 us", "30"), "levels[1].latency: '30' has no unit; write it as in '4 us'"),
        (edit("10 Gb/s", "0 Gb/s"), "levels[1].bandwidth: must be positive, got '0 Gb/s'"),
        (edit("type: shared", "type: star"), "levels[0].type: must be one of switch, mesh, shared, got 'star'"),
        (edit("inside_host: true", "inside_host: 1"), "levels[0].inside_host: must be true or false, got 1"),
        (edit("inside_host: true", "only: a100"),
         "unknown device in level 'bus' of cluster 'pair' 'a100'; Known: K80"),
        (edit("nodes:\n  - {device: k80, count: 4}", "nodes: []"), "nodes: must be a list of mappings, got []"),
        (lambda text: DEVICE, "is a device, not a cluster"),
    ],
)  # fmt: skip
def test_a_fault_in_a_cluster_file_is_one_line(tmp_path: Path, change: Callable[[str], str], fault: str) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(change(CLUSTER))
    with pytest.raises(UserError) as caught:
        load_cluster(path)
    assert str(caught.value) == f"{path}: {fault}"


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x00\x01", b"a: &a [*a]\n", b"[" * 5000, b"x" * 1_000_001])
def test_bytes_that_are_no_hardware_file_are_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "junk.yaml"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        read_hardware(path)
    assert "\n" not in str(caught.value)


def test_a_cluster_file_takes_nodes_and_devices_from_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(DEVICE)
    (tmp_path / "pair.yaml").write_text(CLUSTER.replace("k80", "tiny.yaml"))
    cluster = load_cluster(f"{tmp_path / 'pair.yaml'}:3")
    assert (cluster.name, cluster.size, cluster.device(11).name) == ("pair:3", 12, "tiny")
    assert cluster.levels[0].shared_by == 4  # a bus is shared by all whom it joins


# --- devices, links, clusters --------------------------------------------------------------------------------------


def test_a_dtype_without_units_runs_at_the_rate_of_the_next_wider_one() -> None:
    gpu = device()
    assert [gpu.peak(name) for name in ("float16", "float8_e4m3fn", "int8")] == [8e12] * 3
    assert [gpu.peak(name) for name in ("torch.bfloat16", "tf32", "int64", "bool")] == [1e12] * 4
    assert gpu.peak("float64") == 1e12 / 32
    with pytest.raises(UnknownNameError, match="unknown dtype 'complex64'"):
        gpu.peak("complex64")


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (lambda: device(memory_bytes=-1), "device 'd': memory_bytes must be positive, got -1"),
        (lambda: device(kernel_launch_s=float("nan")), "device 'd': kernel_launch_s must be at least 0, got nan"),
        (lambda: device(reserved_bytes=2**30),
         "device 'd': reserved_bytes must be less than memory_bytes, got 1073741824 of 1073741824"),
        (lambda: device(peak_flops_per_s=(("float16", 1.0),)),
         "device 'd': peak must state float32, which other dtypes fall back to"),
        (lambda: Cluster(name="c", devices=(), levels=()), "cluster 'c': must have at least one device"),
        (lambda: Cluster(name="c", devices=((device(), 0),), levels=()),
         "cluster 'c': count of devices must be a whole number, at least 1, got 0"),
        (lambda: Cluster(name="c", devices=((device(), 12),), levels=(link("a", 4), link("b", 6), link("d", 12))),
         "cluster 'c': level 'b' must join a multiple of the 4 devices of level 'a', got 6"),
        (lambda: Cluster(name="c", devices=((device(), 12),), levels=(link("a", 4),)),
         "cluster 'c': the outermost level must join all 12 devices, got 4"),
        (lambda: link("a", 8, shared_by=9), "link level 'a': shared_by must be at most size, got 9 of 8"),
        (lambda: load_cluster("dgx-a100").device(8), "device 8 must lie in cluster 'dgx-a100', which has 8 devices"),
    ],
)  # fmt: skip
def test_impossible_hardware_is_refused(build: Callable[[], object], fault: str) -> None:
    with pytest.raises(UserError) as caught:
        build()
    assert str(caught.value) == fault


@pytest.mark.parametrize("name", ["dgx-a100:48", "a100-v100:3", "p2.8xlarge", "local"])
def test_clusters_survive_json(name: str) -> None:
    cluster = load_cluster(name)
    back = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert back == cluster
    assert hash(back) == hash(cluster)
    assert [device_from_dict(device_to_dict(kind)) for kind in cluster.kinds] == list(cluster.kinds)


def test_unknown_and_missing_keys_of_plain_data_are_refused() -> None:
    data = load_cluster("dgx-a100").to_dict()
    with pytest.raises(FormatError, match=r"link level: unknown key 'latency'; did you mean 'latency_s'\?"):
        Cluster.from_dict({**data, "levels": [{**data["levels"][0], "latency": 1}]})
    with pytest.raises(FormatError, match="cluster: key 'order' is missing"):
        Cluster.from_dict({key: value for key, value in data.items() if key != "order"})
    with pytest.raises(FormatError, match="devices, order and levels don't fit together"):
        Cluster.from_dict({**data, "order": [[5, 8]]})


def test_equal_runs_are_one_run() -> None:
    one = Cluster(name="c", devices=((device(), 2), (device(), 6)), levels=(link("a", 8),))
    assert one == Cluster(name="c", devices=((device(), 8),), levels=(link("a", 8),))


def test_the_innermost_level_that_joins_devices() -> None:
    cluster = Cluster(name="c", devices=((device(), 32),), levels=(link("a", 4), link("b", 16), link("c", 32)))
    for one in range(32):  # the obvious definition: the first level in whose block both lie
        for other in range(32):
            expected = next(level for level in cluster.levels if one // level.size == other // level.size)
            assert cluster.level_between(one, other) == expected
    assert cluster.level_of(range(4, 8)).name == "a"
    assert cluster.level_of([2, 9, 3]).name == "b"
    assert cluster.level_of(range(31, -1, -1)).name == "c"


def test_a_mixed_cluster_has_a_level_for_each_kind() -> None:
    cluster = load_cluster("a100-v100:2")
    names = [cluster.level_between(*pair).name for pair in ((0, 7), (8, 15), (7, 8), (0, 16), (24, 31))]
    assert names == ["nvlink-a100", "nvlink-v100", "network", "network", "nvlink-v100"]
    assert [(host.start, host.stop) for host in cluster.hosts()] == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert cluster.host_of(13) == range(8, 16)
    assert [(kind.name[:4], count) for kind, count in cluster.slice(6, 18)] == [("A100", 2), ("V100", 8), ("A100", 2)]


def test_nodes_of_unequal_size_keep_their_hosts() -> None:
    big, small = device("big"), device("small")
    levels = (
        link("x", 8, only="big", inside_host=True),
        link("y", 4, only="small", inside_host=True),
        link("net", 12),
    )
    cluster = Cluster(name="c", devices=((big, 8), (small, 4)), levels=levels)
    assert list(cluster.hosts()) == [range(8), range(8, 12)]
    assert cluster.level_between(8, 11).name == "y"


def test_devices_that_share_a_link_share_its_rate() -> None:
    network = load_cluster("dgx-v100:2").levels[1]
    assert [network.share_bytes_per_s(active) for active in (1, 2, 8)] == [12.5e9, 6.25e9, 6.25e9]
    assert load_cluster("dgx-v100").levels[0].point_to_point_bytes_per_s == 25e9


def test_a_hundred_thousand_devices_stay_small() -> None:
    cluster = load_cluster("dgx-h100:12500")
    assert (cluster.size, len(json.dumps(cluster.to_dict())) < 5000) == (100_000, True)
    assert cluster.level_of(range(100_000)).name == "infiniband"
    assert cluster.host_of(99_999) == range(99_992, 100_000)


# --- this machine --------------------------------------------------------------------------------------------------


def test_local_has_one_device_per_core_and_repeats() -> None:
    cluster = load_cluster("local")
    assert cluster == detect_local()
    assert cluster.size >= 1
    assert cluster.device(0).kind == "cpu"
    assert load_cluster("local:3").size == 3


def machine(**other: object) -> Machine:
    known = {"model": "M", "vendor": "GenuineIntel", "family": 6, "flags": frozenset({"fma", "avx2", "avx512f"})}
    rest = {"clock_hz": 2e9, "clock_source": "s", "cores": 4, "memory_bytes": 16 * 2**30}
    return Machine(**{**known, **rest, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "flop_per_cycle"),
    [
        (machine(), 64),
        (machine(vendor="AuthenticAMD", family=25), 32),
        (machine(vendor="AuthenticAMD", family=26), 64),
        (machine(flags=frozenset({"fma", "avx2"})), 32),
        (machine(flags=frozenset({"asimd"})), 16),
        (machine(flags=frozenset()), 8),
    ],
)
def test_the_peak_is_clock_times_lanes_times_units(what: Machine, flop_per_cycle: int) -> None:
    cluster = describe(what)
    assert cluster.device(0).peak("float32") == 2e9 * flop_per_cycle
    assert (cluster.size, cluster.device(0).memory_bytes) == (4, 4 * 2**30)


def test_more_processes_than_cores_share_them() -> None:
    alone, crowded = describe(machine()), describe(machine(), 8)
    assert crowded.size == 8
    assert crowded.device(0).peak("float32") == alone.device(0).peak("float32") / 2
    assert crowded.device(0).memory_bytes == 2 * 2**30


# --- commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["list", "show a100", "show dgx-a100:2", "detect", "check FILE"])
def test_commands_print_one_json_document_or_tables(root: Path, command: str) -> None:
    words = command.replace("FILE", str(root / "hardware_profiles/clusters/a100-v100.yaml")).split()
    plain, document = (
        CliRunner().invoke(hardware, [*words, *more], catch_exceptions=False) for more in ([], ["--json"])
    )
    assert (plain.exit_code, document.exit_code) == (0, 0)
    assert plain.stdout
    assert json.loads(document.stdout)


def test_show_answers_an_unknown_name_with_all_known_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown device or cluster 'nope'; Known: .*A100-SXM-80GB, .*p2\.8xlarge"
    ):
        CliRunner().invoke(hardware, ["show", "nope"], catch_exceptions=False)


def test_every_command_has_an_example() -> None:
    for name in ("list", "show", "check", "detect"):
        assert f"Example: simpart hardware {name}" in CliRunner().invoke(hardware, [name, "--help"]).stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [("clock", "0 Hz"), ("power", "0 W"), ("l2", "0 B"), ("vector", "0 FLOP/s"), ("launch_floor", "0 s"),
     ("clock", "1e300 Hz"), ("memory_bandwidth", "2039 B/s"), ("power", "1e-300 W"), ("l2", "0.4 B"),
     ("launch_floor", "10 h"), ("multiprocessors", 10**30)],
)  # fmt: skip
def test_numbers_that_no_device_can_have_are_refused(key: str, value: object, tmp_path: Path) -> None:
    """They would be divided by, or drown everything else; a zero is not how a data sheet says that it doesn't know."""
    path = tmp_path / "device.yaml"
    content = yaml.safe_load(DEVICE)
    path.write_text(yaml.safe_dump({**content, key: value, "source": {**content["source"], key: "test"}}))
    with pytest.raises(UserError, match=f"device.yaml: {key}: must ") as caught:
        load_device(path)
    assert "\n" not in str(caught.value)
