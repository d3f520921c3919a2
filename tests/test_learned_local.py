"""Kernels learned from a store's own profiles: known laws found again, seen shapes left as measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simpart.cost import PROVENANCES, Signature, SignatureTable, TensorForm
from simpart.costmodels import Calibrated, Roofline, Table, default_costs, physical_bound_s
from simpart.costmodels.learned_local import FILE, Local, Unseen, load_local
from simpart.costmodels.learned_local._fit import base_of, fit_device, fit_store
from simpart.errors import FormatError, UserError
from simpart.hardware import Device, load_cluster, load_device
from simpart.hardware_profiles._environment import Environment
from simpart.hardware_profiles._store import KernelRecord, Profiles, Samples, Store
from tests.test_cli import document, simpart


def device() -> Device:
    return load_cluster("local").kinds[0]


def product(m: int, n: int, k: int) -> Signature:
    def form(*shape: int) -> TensorForm:
        return TensorForm(shape, "float32", tuple(range(len(shape))))

    return Signature("aten.mm.default", (form(m, k), form(k, n)), (form(m, n),))


def added(count: int) -> Signature:
    form = TensorForm((count,), "float32", (0,))
    return Signature("aten.add.Tensor", (form, form), (form,))


def law(signature: Signature) -> float:
    """Products slower than the roofline by a factor that falls with the inner size; additions by three."""
    plain = float(Roofline().estimate(SignatureTable((signature,)), device()).mean_s[0])
    inner = signature.inputs[0].shape[-1]
    return plain * (2.0 + 60.0 / inner if "mm" in signature.target else 3.0)


def record(signature: Signature, seconds: float) -> KernelRecord:
    here = Environment(device=device().name, processor="p", system="s", python="3", torch="2", processes=1)
    return KernelRecord(signature=signature, samples=Samples.of([seconds]), environment=here)


def kernels() -> list[Signature]:
    products = [product(m, n, k) for m in (16, 64, 256) for n in (32, 128, 512) for k in (16, 32, 64, 128, 256)]
    return [*products, *(added(2**i) for i in range(8, 20))]


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return Profiles(kernels=tuple(record(s, law(s)) for s in kernels()))


def test_a_law_is_found_again_at_sizes_between_the_measured_ones(profiles: Profiles) -> None:
    model = Local({device().name: fit_device(profiles, device())}, Roofline())
    fresh = [product(m, n, k) for m in (32, 128) for n in (64, 256) for k in (24, 48, 96, 192)]
    asked = SignatureTable(tuple(fresh))
    truth = np.array([law(s) for s in fresh])
    off = np.abs(model.estimate(asked, device()).mean_s / truth - 1)
    nearest = np.abs(Calibrated(Table(profiles), Roofline()).estimate(asked, device()).mean_s / truth - 1)
    assert off.mean() < 0.12 and off.mean() < nearest.mean()
    assert {PROVENANCES[p] for p in model.estimate(asked, device()).provenance} == {"interpolated"}


def test_beyond_the_measured_sizes_it_says_so(profiles: Profiles) -> None:
    model = Local({device().name: fit_device(profiles, device())}, Roofline())
    found = model.estimate(SignatureTable((product(8192, 8192, 8192), product(64, 64, 64))), device())
    assert [PROVENANCES[p] for p in found.provenance] == ["extrapolated", "interpolated"]
    assert found.own_log_sd[0] > found.own_log_sd[1]


def test_on_a_device_with_a_data_sheet_nothing_is_faster_than_its_bound(profiles: Profiles) -> None:
    gpu = load_device("a100")
    quick = Profiles(
        kernels=tuple(replace(r, environment=replace(r.environment, device=gpu.name)) for r in profiles.kernels)
    )
    model = Local({gpu.name: fit_device(quick, gpu)}, base_of(gpu))
    asked = SignatureTable((product(8192, 8192, 8192), product(1, 1, 1)))
    found = model.estimate(asked, gpu).mean_s
    assert all(t >= physical_bound_s(s, gpu) for t, s in zip(found, asked.signatures, strict=True))


def test_families_and_devices_never_profiled_are_not_known(profiles: Profiles) -> None:
    model = Local({device().name: fit_device(profiles, device())}, Roofline())
    norm = Signature("aten.native_layer_norm.default", (added(64).inputs[0],), (added(64).inputs[0],))
    assert model.knows(SignatureTable((product(8, 8, 8), norm)), device()).tolist() == [True, False]
    assert not Local({}, Roofline()).knows(SignatureTable((product(8, 8, 8),)), device()).any()


def test_measured_shapes_stay_as_measured_and_others_are_learned(profiles: Profiles, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(profiles.kernels)
    before = default_costs(load_cluster("local"), tmp_path).compute
    found = simpart("fit", str(tmp_path))
    assert found.status == 0 and "kernels of" in found.out and (tmp_path / FILE).exists()
    after = default_costs(load_cluster("local"), tmp_path).compute
    seen, fresh = SignatureTable(tuple(kernels())), SignatureTable((product(32, 64, 48),))
    assert np.array_equal(before.estimate(seen, device()).mean_s, after.estimate(seen, device()).mean_s)
    assert before.estimate(fresh, device()).mean_s[0] != after.estimate(fresh, device()).mean_s[0]
    table = Calibrated(Table(profiles), Roofline())
    both = Unseen(Local(load_local(tmp_path / FILE), Roofline()), table).estimate(fresh, device()).mean_s[0]
    assert after.estimate(fresh, device()).mean_s[0] == pytest.approx(both)


def test_the_same_profiles_make_the_same_bytes(profiles: Profiles, tmp_path: Path) -> None:
    Store(tmp_path).append(profiles.kernels)
    fit_store(tmp_path, tmp_path / "one.npz", 0, print)
    fit_store(tmp_path, tmp_path / "two.npz", 0, print)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    facts = document("fit", str(tmp_path))["families"][f"kernels of {device().name}"]
    assert facts["rows"] == len(kernels())


def test_too_few_kernels_are_refused_with_their_number(tmp_path: Path) -> None:
    Store(tmp_path).append([record(added(64), 1e-5)])
    with pytest.raises(UserError, match=r"1 kernels of .*at least 40"):
        fit_store(tmp_path, None, 0, print)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:100], lambda raw: b"nothing", lambda raw: raw[:-40] + bytes(40), lambda raw: b""]
)
def test_a_damaged_file_is_refused_in_one_line(
    damage: Callable[[bytes], bytes], profiles: Profiles, tmp_path: Path
) -> None:
    Store(tmp_path).append(profiles.kernels)
    fit_store(tmp_path, None, 0, print)
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with pytest.raises(FormatError, match="run simpart fit"):
        load_local(tmp_path / FILE)


def test_no_file_is_no_model(tmp_path: Path) -> None:
    assert load_local(tmp_path / FILE) == {}
