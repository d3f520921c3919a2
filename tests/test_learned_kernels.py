"""Kernels that move memory, batched products and convolutions: what their analytic cores say of caches and steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simpart.costmodels.learned._convolution import WINOGRAD_SAVES
from simpart.costmodels.learned._families import FAMILY_MODELS, Family, Rows, op_codes
from simpart.costmodels.learned._measurements import Measurements
from simpart.costmodels.learned._sheet import sheet_of
from simpart.costmodels.learned._training import train
from simpart.hardware import load_device

A100, H100 = load_device("a100"), load_device("h100")


def asked(family: Family, op: str = "", **dims: float | np.ndarray) -> Rows:
    """Rows of a family on an A100; dims that are not given are those of its smallest kernel."""
    whole = np.broadcast_arrays(*(np.atleast_1d({**family.smallest, **dims}[name]) for name in family.dims))
    count = len(whole[0])
    return Rows(
        op=op_codes(np.full(count, op, dtype=object)),
        dims={name: values.astype(np.float64) for name, values in zip(family.dims, whole, strict=True)},
        sheet=sheet_of(A100, family.dtype)[0],
    )


def core_s(family: Family, rows: Rows) -> np.ndarray:
    """Seconds by the first variant of the core, constants at the centres of their priors."""
    return family.variants[0](np.log([centre for centre, _ in family.constants.values()]), rows)


@pytest.mark.parametrize(("op", "passes"), [("softmax", 4), ("layer_norm", 3)])
def test_rows_are_read_again_from_memory_once_those_under_way_exceed_l2(op: str, passes: int) -> None:
    family, moved = FAMILY_MODELS["memory32"], 2.0**34
    widths = np.array([1100.0, 2.0**20])  # elements of a row: a few MB under way, and some GB
    rows = asked(family, op, bytes=moved, rows=moved / 8 / widths, element_bytes=4, reduces=1)
    short, long = core_s(family, rows)
    counted = moved / (A100.memory_bytes_per_s * 0.8)
    assert short == pytest.approx(counted, rel=0.1)
    assert long / counted == pytest.approx(passes / 2, rel=0.1)


def test_a_softmax_whose_rows_fit_into_registers_reads_them_once() -> None:
    family, moved = FAMILY_MODELS["memory32"], 2.0**34
    rows = asked(family, "softmax", bytes=moved, rows=moved / 8 / np.array([768.0, 1024.0]), reduces=1)
    assert core_s(family, rows) == pytest.approx(moved / (A100.memory_bytes_per_s * 0.8), rel=0.02)


def test_elementwise_kernels_do_not_care_how_their_rows_are_cut() -> None:
    family = FAMILY_MODELS["memory32"]
    times = core_s(family, asked(family, "mul", bytes=2.0**30, rows=2.0 ** np.arange(4, 20)))
    assert np.ptp(times) == 0


def test_batched_products_take_the_inner_dim_in_whole_steps() -> None:
    family = FAMILY_MODELS["bgemm32"]
    times = core_s(family, asked(family, batch=512, m=512, n=512, k=np.array([65.0, 100, 128, 129])))
    assert times[0] == pytest.approx(times[2], rel=0.02)  # limited by arithmetic: 65 takes what 128 does
    assert times[3] > 1.2 * times[2]


def test_convolutions_of_three_taps_save_at_most_what_winograd_does() -> None:
    family, product = FAMILY_MODELS["conv32"], FAMILY_MODELS["gemm32"]
    channels = np.array([64.0, 256, 1024])
    rows = asked(family, m=16 * 56.0**2, n=256.0, channels=channels, side=56.0, k=9 * channels, kernel=3, stride=1)
    direct = product.variants[0](np.log([c for c, _ in family.constants.values()]), rows)
    saved = direct / core_s(family, rows)
    assert (saved > 1.2).all()
    assert (saved <= 2**0.25 * WINOGRAD_SAVES).all()
    strided = replace(rows, dims={**rows.dims, "stride": np.full(3, 2.0)})
    assert core_s(family, strided) == pytest.approx(direct)


def made(latency_factor: np.ndarray, moved: np.ndarray, device: str) -> Measurements:
    """fp16 additions on a device that take so many times their roofline."""
    count, bandwidth = len(moved), load_device(device).memory_bytes_per_s
    text = {name: np.full(count, "", dtype=object) for name in ("software", "source", "split")}
    dims = {"bytes": moved, "rows": moved / 8192, "element_bytes": np.full(count, 2.0), "reduces": np.zeros(count)}
    return Measurements(
        family="memory16", op=np.full(count, "residual_add", dtype=object), device=np.full(count, device, dtype=object),
        dtype=np.full(count, "float16", dtype=object), dims=dims, latency_s=latency_factor * moved / bandwidth,
        row=np.arange(count, dtype=np.float64), **text,
    )  # fmt: skip


def test_bandwidth_that_a_kernel_leaves_unused_on_one_device_it_leaves_on_the_next() -> None:
    moved = np.geomspace(2.0**25, 2.0**31, 600)
    factor = np.where(moved > 2.0**28, 1.2, 2.0)  # by size, as no constant of the core says
    model = train(made(factor, moved, A100.name))
    family = FAMILY_MODELS["memory16"]
    there = replace(
        asked(family, "residual_add", bytes=moved, rows=moved / 8192), sheet=sheet_of(H100, family.dtype)[0]
    )
    told = np.exp(model.predict(there, H100.name).log_seconds) / (moved / H100.memory_bytes_per_s)
    away = np.abs(np.log2(moved) - 28) > 0.2
    assert np.median(np.abs(told / factor - 1)[away]) < 0.1
