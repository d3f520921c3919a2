"""What every cost model must satisfy, for authors of one: `check_compute_model(model)`, `check_comm_model(model)`.

A model that fails raises AssertionError, which says which property and on which row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simpart.cost import (
    PROVENANCES,
    Collective,
    CollectiveKind,
    CollectiveTable,
    CommModel,
    ComputeModel,
    Estimate,
    Signature,
    SignatureTable,
    TensorForm,
)
from simpart.hardware import Cluster, Device, load_cluster, load_device
from simpart.registry import folder

__all__ = ["check_comm_model", "check_compute_model", "faster", "sample_collectives", "sample_signatures"]

DEVICES = ("A100-SXM-80GB", "V100-SXM2-32GB")
CLUSTERS = ("dgx-a100", "dgx-a100:2", "a100-v100", "p2.8xlarge", "local:2")


def _form(*shape: int, dtype: str = "float32") -> TensorForm:
    return TensorForm(shape, dtype, tuple(range(len(shape))))


def sample_signatures() -> tuple[Signature, ...]:
    """Kernels of several families, tiny to large, a view, a fused chain and an optimizer update."""

    def mm(m: int, k: int, n: int, dtype: str = "float32") -> Signature:
        inputs = (_form(m, k, dtype=dtype), _form(k, n, dtype=dtype))
        arguments = '{"positional":[{"tensor":0},{"tensor":1}],"named":{}}'
        return Signature("aten.mm.default", inputs, (_form(m, n, dtype=dtype),), arguments)

    def pointwise(target: str, *shape: int) -> Signature:
        arguments = '{"positional":[{"tensor":0}],"named":{}}'
        return Signature(target, (_form(*shape),), (_form(*shape),), arguments)

    gelu, relu = pointwise("aten.gelu.default", 512, 1024), pointwise("aten.relu.default", 512, 1024)
    fused = Signature("fused", gelu.inputs, relu.outputs, mode="compiled", members=(gelu, relu))
    parameter = _form(1024, 1024)
    update = Signature("simpart.optimizer.adamw", (parameter,) * 4, (parameter,) * 3)
    view = replace(pointwise("aten.view.default", 64, 64), view=True)
    sizes = [mm(m, 1024, 4096, dtype) for m in (1, 64, 8192) for dtype in ("float32", "bfloat16")]
    return (*sizes, gelu, relu, pointwise("aten.relu.default", 1), fused, update, view)


def sample_collectives(cluster: Cluster) -> tuple[Collective, ...]:
    """All kinds, 1 byte to 1 GiB, among 1, 2 and all devices."""
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    groups = [tuple(range(n)) for n in sorted({1, 2, cluster.size}) if n <= cluster.size]
    sizes = (1, 2**10, 2**20, 2**30)
    many = [Collective(kind, size, ranks) for kind in kinds for ranks in groups for size in sizes]
    pairs = [Collective("p2p", size, (0, other)) for other in sorted({1, cluster.size - 1}) for size in sizes]
    return (*many, *pairs)


def faster(device: Device, factor: float = 2.0) -> Device:
    """A device with all rates `factor` times and all overheads one `factor`-th."""
    return replace(
        device,
        memory_bytes_per_s=device.memory_bytes_per_s * factor,
        peak_flops_per_s=tuple((dtype, rate * factor) for dtype, rate in device.peak_flops_per_s),
        vector_flops_per_s=None if device.vector_flops_per_s is None else device.vector_flops_per_s * factor,
        kernel_launch_s=device.kernel_launch_s / factor,
        launch_floor_s=None if device.launch_floor_s is None else device.launch_floor_s / factor,
    )


def check_compute_model(model: ComputeModel, *, scaling: bool = False) -> None:
    """Shape, sign, determinism, independence of rows and their order, the physical bound; with `scaling` also that a
    device twice as fast in everything takes exactly half the time."""
    physical_bound_s = folder("costmodels").physical_bound_s

    signatures = sample_signatures()
    table = SignatureTable(signatures)
    for name in DEVICES:
        device = load_device(name)
        found = model.estimate(table, device)
        _check_estimate(found, len(signatures), [s.view for s in signatures])
        _check_same(found, model.estimate(table, device), "a second estimate differs")
        backwards = model.estimate(SignatureTable(signatures[::-1]), device)
        assert np.array_equal(found.mean_s, backwards.mean_s[::-1]), "the order of rows changes their times"
        assert model.estimate(SignatureTable(()), device).mean_s.shape == (0,), "an empty table has an empty answer"
        for signature, mean in zip(signatures, found.mean_s.tolist(), strict=True):
            bound = physical_bound_s(signature, device)
            assert mean >= bound * (1 - 1e-12), f"{signature.target} takes {mean} s on {name}, physics {bound} s"
        if scaling:
            half = model.estimate(table, faster(device)).mean_s
            assert np.allclose(half * 2, found.mean_s, rtol=1e-12, atol=0), "twice the device is not twice as fast"


def check_comm_model(model: CommModel) -> None:
    """Shape, sign, determinism, no time among one rank, more bytes never faster, no byte faster than its link."""
    for name in CLUSTERS:
        cluster = load_cluster(name)
        rows = sample_collectives(cluster)
        found = model.estimate(CollectiveTable(rows), cluster)
        _check_estimate(found, len(rows), [len(row.ranks) == 1 for row in rows])
        _check_same(found, model.estimate(CollectiveTable(rows), cluster), "a second estimate differs")
        before: dict[tuple[str, tuple[int, ...]], float] = {}
        fastest = max(level.bytes_per_s for level in cluster.levels)
        for row, mean in zip(rows, found.mean_s.tolist(), strict=True):
            key = (row.kind, row.ranks)
            assert mean >= before.get(key, 0.0), f"{row.kind} of {row.bytes} bytes on {name} is faster than of fewer"
            before[key] = mean
            if len(row.ranks) > 1:  # at least a half of the bytes leaves or reaches some device
                assert mean >= row.bytes / 2 / fastest, f"{row.kind} of {row.bytes} bytes on {name} beats its links"


def _check_estimate(found: Estimate, rows: int, free: list[bool]) -> None:
    arrays = (found.mean_s, found.shared_log_sd, found.own_log_sd)
    assert all(a.shape == (rows,) and a.dtype == np.float64 for a in arrays), "an array is not one float64 per row"
    assert all(np.isfinite(a).all() and (a >= 0).all() for a in arrays), "times and spreads are finite and not negative"
    assert (found.mean_s[~np.array(free)] > 0).all(), "work takes time"
    assert (found.mean_s[np.array(free)] == 0).all(), "views and groups of one rank take none"
    assert found.family.shape == found.provenance.shape == (rows,), "family and provenance are one number per row"
    assert rows == 0 or 0 <= found.family.min() <= found.family.max() < len(found.families), "family out of range"
    known = set(range(len(PROVENANCES)))
    assert set(found.provenance.tolist()) <= known, "provenance out of range"


def _check_same(one: Estimate, other: Estimate, what: str) -> None:
    assert np.array_equal(one.mean_s, other.mean_s) and np.array_equal(one.own_log_sd, other.own_log_sd), what
