"""Cost models against physics, closed forms and measurements that a test makes up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.cost import PROVENANCES, Collective, CollectiveTable, Signature, SignatureTable, TensorForm
from simpart.costmodels import (
    COMM_MODELS,
    COMPUTE_MODELS,
    AlphaBeta,
    Calibrated,
    Fallback,
    MeasuredLinks,
    Roofline,
    Table,
    default_costs,
    physical_bound_s,
)
from simpart.costmodels.alpha_beta import path_of
from simpart.costmodels.learned import Learned
from simpart.errors import UnsupportedError
from simpart.hardware import Cluster, Device, LinkLevel, load_cluster, load_device
from simpart.hardware_profiles._environment import Environment, local_device_name, torch_version
from simpart.hardware_profiles._store import KernelRecord, LinkRecord, OverheadRecord, Profiles, Samples, Store
from simpart.testing.costmodel_suite import check_comm_model, check_compute_model, sample_signatures

A100 = load_device("A100-SXM-80GB")
CALL = '{"positional":[{"tensor":0},{"tensor":1}],"named":{}}'


def form(*shape: int, dtype: str = "float32") -> TensorForm:
    return TensorForm(shape, dtype, tuple(range(len(shape))))


def mm(m: int, k: int, n: int, dtype: str = "float32") -> Signature:
    return Signature(
        "aten.mm.default", (form(m, k, dtype=dtype), form(k, n, dtype=dtype)), (form(m, n, dtype=dtype),), CALL
    )


def relu(elements: int) -> Signature:
    return Signature(
        "aten.relu.default", (form(elements),), (form(elements),), '{"positional":[{"tensor":0}],"named":{}}'
    )


def environment(device: str = A100.name, processes: int = 2) -> Environment:
    return Environment(
        device=device, processor="x", system="y", python="3", torch=torch_version() or "none", processes=processes
    )


def kernel(signature: Signature, seconds: float, processes: int = 2) -> KernelRecord:
    samples = Samples.of([seconds * factor for factor in (0.98, 1.0, 1.02)])
    return KernelRecord(signature=signature, samples=samples, environment=environment(processes=processes))


def link(size: int, seconds: float, device: str, kind: str = "p2p") -> LinkRecord:
    return LinkRecord(
        kind=kind,  # type: ignore[arg-type]  # made up by tests
        bytes=size,
        ranks=2,
        busy=False,
        samples=Samples.of([seconds]),
        environment=environment(device),
    )


# --- the shared suite ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", COMPUTE_MODELS)
def test_every_compute_model_passes_the_suite(name: str) -> None:
    check_compute_model(COMPUTE_MODELS[name](Profiles()), scaling=name != "learned")  # launches are no rates


@pytest.mark.parametrize("name", COMM_MODELS)
def test_every_comm_model_passes_the_suite(name: str) -> None:
    check_comm_model(COMM_MODELS[name](Profiles()))


def test_importing_cost_models_imports_no_torch() -> None:
    code = "import sys, simpart.costmodels; print({'torch', 'sklearn', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# --- roofline --------------------------------------------------------------------------------------------------------
sizes = st.integers(1, 4096)


@given(m=sizes, k=sizes, n=sizes, dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_roofline_is_never_faster_than_peak_or_bandwidth(m: int, k: int, n: int, dtype: str) -> None:
    width = 4 if dtype == "float32" else 2
    seconds = Roofline().estimate(SignatureTable((mm(m, k, n, dtype),)), A100).mean_s[0]
    assert seconds >= 2 * m * k * n / A100.peak(dtype)
    assert seconds >= width * (m * k + k * n + m * n) / A100.memory_bytes_per_s


@given(m=sizes, k=sizes, n=sizes, more=st.integers(1, 64))
def test_more_rows_never_take_less_time(m: int, k: int, n: int, more: int) -> None:
    small, large = Roofline().estimate(SignatureTable((mm(m, k, n), mm(m + more, k, n))), A100).mean_s
    assert small <= large


def test_fused_chain_moves_only_what_is_read_and_written_outside() -> None:
    one = relu(1 << 20)
    chain = Signature("fused", one.inputs, one.outputs, mode="compiled", members=(one, one, one))
    assert physical_bound_s(chain, A100) == pytest.approx(2 * 4 * (1 << 20) / A100.memory_bytes_per_s)


def test_embedding_reads_rows_and_not_the_table() -> None:
    look_up = Signature("aten.embedding.default", (form(50000, 1024), form(8, dtype="int64")), (form(8, 1024),), CALL)
    assert physical_bound_s(look_up, A100) == pytest.approx((2 * 8 * 1024 * 4 + 8 * 8) / A100.memory_bytes_per_s)


def test_expanded_dim_is_one_read() -> None:
    wide = TensorForm((1024, 1024), "float32", None, (0, 1))
    spread = Signature("aten.neg.default", (wide,), (form(1024, 1024),))
    assert physical_bound_s(spread, A100) == pytest.approx((1024 + 1024 * 1024) * 4 / A100.memory_bytes_per_s)


def test_host_that_launches_slowly_sets_the_pace_of_small_kernels() -> None:
    device = replace(A100, launch_floor_s=2e-6, kernel_launch_s=5e-6)
    tiny, large = Roofline().estimate(SignatureTable((relu(1), relu(1 << 28))), device).mean_s
    assert tiny == pytest.approx(5e-6)
    assert large > 2 * 4 * (1 << 28) / A100.memory_bytes_per_s + 2e-6


# --- table and fallback ----------------------------------------------------------------------------------------------
def test_table_answers_what_was_measured_with_the_overhead_of_a_real_step() -> None:
    overhead = OverheadRecord(name="kernel", samples=Samples.of([1e-5]), environment=environment())
    table = Table(Profiles(kernels=(kernel(relu(8), 1e-3),), overheads=(overhead,)))
    found = table.estimate(SignatureTable((relu(8),)), A100)
    assert found.mean_s[0] == pytest.approx(1.01e-3)
    assert PROVENANCES[found.provenance[0]] == "measured"


def test_table_refuses_what_was_not_measured_and_other_devices() -> None:
    table = Table(Profiles(kernels=(kernel(relu(8), 1e-3),)))
    assert table.knows(SignatureTable((relu(8), relu(9))), A100).tolist() == [True, False]
    assert not table.knows(SignatureTable((relu(8),)), load_device("V100-SXM2-32GB")).any()
    with pytest.raises(UnsupportedError, match="never measured"):
        table.estimate(SignatureTable((relu(9),)), A100)


def test_table_prefers_as_many_busy_processes_then_the_latest() -> None:
    records = (kernel(relu(8), 3.0, 2), kernel(relu(8), 2.0, 2), kernel(relu(8), 1.0, 1))
    assert Table(Profiles(kernels=records), 2).rows(A100)[relu(8)].median_s == 2.0
    assert Table(Profiles(kernels=records), 1).rows(A100)[relu(8)].median_s == 1.0


def test_fallback_says_where_each_answer_is_from() -> None:
    plain = Roofline().estimate(SignatureTable(tuple(relu(2**p) for p in range(16, 24))), A100).mean_s
    records = tuple(kernel(relu(2**p), 3 * t) for p, t in zip(range(16, 24), plain.tolist(), strict=True))
    table = Table(Profiles(kernels=records))
    model = Fallback((table, Calibrated(table, Roofline())), Roofline())
    asked = SignatureTable((relu(2**20), relu(3 * 2**20), relu(2**26), mm(512, 512, 512)))
    found = model.estimate(asked, A100)
    assert [PROVENANCES[p] for p in found.provenance] == ["measured", "interpolated", "extrapolated", "analytic"]
    assert np.allclose(found.mean_s[:3] / Roofline().estimate(asked, A100).mean_s[:3], 3.0)
    assert [found.families[f] for f in found.family] == ["pointwise"] * 3 + ["gemm"]
    assert found.own_log_sd[0] < found.own_log_sd[1] < found.own_log_sd[2]


def test_too_few_measurements_calibrate_nothing() -> None:
    table = Table(Profiles(kernels=tuple(kernel(relu(n), 1.0) for n in range(1, 5))))
    assert not Calibrated(table, Roofline()).knows(SignatureTable((relu(99),)), A100).any()


def test_default_costs_use_profiles_of_the_cluster_and_no_others(tmp_path: Path) -> None:
    store = Store.at(tmp_path)
    here = environment(local_device_name())
    store.append([KernelRecord(signature=relu(8), samples=Samples.of([1.0]), environment=here)])
    store.append([link(1024, 1e-4, local_device_name())])
    local = default_costs(load_cluster("local:2"), tmp_path)
    assert isinstance(local.compute, Fallback) and isinstance(local.communication, MeasuredLinks)
    assert isinstance(default_costs(load_cluster("dgx-a100"), tmp_path).compute, Learned)
    assert isinstance(default_costs(load_cluster("local:2"), tmp_path, profiles=False).compute, Roofline)


# --- communication ---------------------------------------------------------------------------------------------------
def flat(n: int, **more: object) -> Cluster:
    level = LinkLevel(name="link", size=n, bytes_per_s=1e9, latency_s=1e-6, **more)  # type: ignore[arg-type]
    return Cluster(name="flat", devices=((A100, n),), levels=(level,))


def nodes(count: int, **more: object) -> Cluster:
    """Nodes of 4 devices."""
    inner = LinkLevel(name="inner", size=4, bytes_per_s=1e11, latency_s=1e-6)
    outer = LinkLevel(name="outer", size=4 * count, bytes_per_s=1e10, latency_s=1e-5, **more)  # type: ignore[arg-type]
    return Cluster(name="nodes", devices=((A100, 4 * count),), levels=(inner, outer))


def seconds(cluster: Cluster, kind: str, size: int, ranks: tuple[int, ...], concurrent: int = 1) -> float:
    row = Collective(kind, size, ranks, concurrent)  # type: ignore[arg-type]  # a literal at each call
    return float(AlphaBeta().estimate(CollectiveTable((row,)), cluster).mean_s[0])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_large_all_reduce_is_a_ring(n: int) -> None:
    expected = 2 * (n - 1) / n * 1e9 / 1e9 + 2 * (n - 1) * 1e-6
    assert seconds(flat(n), "all_reduce", 10**9, tuple(range(n))) == pytest.approx(expected)


def test_small_all_reduce_is_a_tree() -> None:
    assert seconds(flat(64), "all_reduce", 1, tuple(range(64))) == pytest.approx(2 * 6 * 1e-6, rel=1e-3)


def test_gather_and_scatter_move_half_an_all_reduce() -> None:
    ring = 3 * 1e-6 + 3 / 4 * 1.0
    assert seconds(flat(4), "all_gather", 10**9, (0, 1, 2, 3)) == pytest.approx(ring)
    assert seconds(flat(4), "reduce_scatter", 10**9, (0, 1, 2, 3)) == pytest.approx(ring)


def test_all_to_all_sends_a_part_to_each_other_rank() -> None:
    assert seconds(flat(4), "all_to_all", 4 * 10**9, (0, 1, 2, 3)) == pytest.approx(3 * (1e-6 + 1.0))


def test_all_to_all_over_nodes_sends_each_part_over_the_level_where_both_meet() -> None:
    parts = 8 * 10**9 / 8
    expected = 3 * (1e-6 + parts / 1e11) + 4 * (1e-5 + parts / 1e10)
    assert seconds(nodes(2), "all_to_all", 8 * 10**9, tuple(range(8))) == pytest.approx(expected)


def test_all_reduce_over_nodes_is_hierarchical() -> None:
    inside = 2 * 3 * (1e-6 + 1e9 / 4 / 1e11)
    across = 2 * (1 / 2 * 1e9 / 4 / 1e10 + 1e-5)
    assert seconds(nodes(2), "all_reduce", 10**9, tuple(range(8))) == pytest.approx(inside + across)


def test_group_across_nodes_uses_the_outer_level_alone() -> None:
    expected = 2 * (1 / 2 * 1e9 / 1e10 + 1e-5)
    assert seconds(nodes(2), "all_reduce", 10**9, (0, 4)) == pytest.approx(expected)


def test_concurrent_groups_share_a_network_card() -> None:
    one = seconds(nodes(2, shared_by=4), "all_reduce", 10**9, (0, 4))
    four = seconds(nodes(2, shared_by=4), "all_reduce", 10**9, (0, 4), concurrent=4)
    assert four - 2e-5 == pytest.approx(4 * (one - 2e-5))
    own = seconds(nodes(2), "all_reduce", 10**9, (0, 4), concurrent=4)
    assert own == pytest.approx(seconds(nodes(2), "all_reduce", 10**9, (0, 4)))


def test_a_bus_is_shared_by_all_senders() -> None:
    assert seconds(flat(4, kind="shared"), "all_gather", 10**9, (0, 1, 2, 3)) == pytest.approx(3 * (1e-6 + 0.25 * 4))


def test_pair_on_a_mesh_has_its_own_link() -> None:
    mesh = flat(4, kind="mesh", pair_bytes_per_s=0.25e9)
    assert seconds(mesh, "p2p", 10**9, (0, 1)) == pytest.approx(1e-6 + 4.0)


def test_switch_that_reduces_sends_each_byte_once() -> None:
    row = Collective("all_reduce", 10**9, tuple(range(8)))
    found = AlphaBeta(in_switch=True).estimate(CollectiveTable((row,)), flat(8)).mean_s[0]
    assert found == pytest.approx(1.0 + 2e-6)


def test_mixed_cluster_reduces_inside_both_kinds_at_once() -> None:
    path = path_of(Collective("all_reduce", 1, tuple(range(16))), load_cluster("a100-v100"))
    assert [[(hop.members, hop.inside) for hop in tier] for tier in path] == [[(8, 1), (8, 1)], [(2, 8)]]


def test_measured_links_interpolate_on_a_log_scale() -> None:
    cluster = load_cluster("local:2")
    name = cluster.kinds[0].name
    profiles = Profiles(links=(link(2**10, 1e-4, name), link(2**20, 1e-3, name), link(2**24, 1.6e-2, name)))
    rows = CollectiveTable(tuple(Collective("p2p", size, (0, 1)) for size in (2**20, 2**22, 2**25, 2)))
    found = MeasuredLinks(profiles, AlphaBeta()).estimate(rows, cluster)
    assert [PROVENANCES[p] for p in found.provenance] == ["measured", "interpolated", "extrapolated", "extrapolated"]
    assert found.mean_s[:2] == pytest.approx([1e-3, 4e-3])
    growth = seconds(cluster, "p2p", 2**25, (0, 1)) / seconds(cluster, "p2p", 2**24, (0, 1))
    assert found.mean_s[2:] == pytest.approx([1.6e-2 * growth, 1e-4])


def test_links_of_other_devices_stay_analytic() -> None:
    profiles = Profiles(links=(link(2**10, 1.0, "another"),))
    rows = CollectiveTable((Collective("p2p", 2**10, (0, 1)),))
    found = MeasuredLinks(profiles, AlphaBeta()).estimate(rows, load_cluster("local:2"))
    assert PROVENANCES[found.provenance[0]] == "analytic"


def test_sample_signatures_cover_a_view_a_fusion_and_an_update() -> None:
    targets = {s.target for s in sample_signatures()}
    assert {"fused", "simpart.optimizer.adamw"} <= targets and any(s.view for s in sample_signatures())
    assert isinstance(A100, Device)
