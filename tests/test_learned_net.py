"""The net of the learned compute models and the choice of blends: against torch, a slow count, and on made-up data."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpart.costmodels.learned._adapters import import_frame
from simpart.costmodels.learned._artifact import _digest, load_models, save_models
from simpart.costmodels.learned._blend import Blend, Parts, Score, choose, scores
from simpart.costmodels.learned._boost import fit_boost
from simpart.costmodels.learned._families import FAMILY_MODELS
from simpart.costmodels.learned._model import FamilyModel
from simpart.costmodels.learned._net import NET_PARTS, fit_net, standardised
from simpart.costmodels.learned._training import _left_out, errors_on, fit_family, rows_of, sheets_for, train
from simpart.errors import FormatError
from tests.test_cli import simpart
from tests.test_learned import frame

pytest.importorskip("pandas")


def columns_and_target(rows: int = 3000, seed: int = 0) -> tuple[Any, Any]:
    columns = np.random.default_rng(seed).normal(5.0, 3.0, size=(6, rows)).astype(np.float32)
    return columns, np.tanh((columns[0] - 5.0) / 3.0).astype(np.float64) * 0.5 + 0.1 * (columns[1] > 5.0)


def test_numpy_says_what_torch_does() -> None:
    import torch

    columns, target = columns_and_target()
    net = fit_net(columns, target, np.ones(len(target)), epochs=3)
    hidden = torch.tensor(((columns - net.middle[:, None]) / net.scale[:, None]).T.clip(-3, 3).copy())
    for weights, bias in ((net.first, net.first_bias), (net.second, net.second_bias)):
        hidden = torch.relu(hidden @ torch.tensor(weights).T + torch.tensor(bias))
    out = 1.5 * torch.tanh((hidden @ torch.tensor(net.last).T + torch.tensor(net.last_bias))[:, 0] / 1.5)
    assert net.predict(columns) == pytest.approx(out.numpy(), abs=1e-5)


def test_a_net_learns_stays_bounded_and_repeats() -> None:
    columns, target = columns_and_target()
    one, other = (fit_net(columns, target, np.ones(len(target)), seed=3, epochs=60) for _ in range(2))
    unseen, truth = columns_and_target(seed=1)
    assert np.abs(one.predict(unseen) - truth).mean() < 0.05
    assert np.abs(one.predict(1e6 * unseen)).max() <= 1.5
    assert all(getattr(one, part).tobytes() == getattr(other, part).tobytes() for part in NET_PARTS)


def test_training_leaves_the_state_of_torch_alone() -> None:
    import torch

    columns, target = columns_and_target(600)
    torch.manual_seed(1)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    fit_net(columns, target, np.ones(len(target)), epochs=1)
    assert torch.equal(torch.random.get_rng_state(), before) and torch.get_num_threads() == threads


def test_standardised_columns_have_no_unit_and_no_tails() -> None:
    columns, _ = columns_and_target()
    found = standardised(columns, columns.mean(axis=1), columns.std(axis=1))
    assert found.mean(axis=1) == pytest.approx(0, abs=0.02) and np.abs(found).max() <= 3


@pytest.mark.parametrize("trees", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 4, 6])
def test_pairs_of_trees_say_what_single_ones_do(trees: int, depth: int) -> None:
    rng = np.random.default_rng(depth)
    columns = rng.normal(size=(4, 50)).astype(np.float32)
    boost = fit_boost(columns, rng.normal(size=50), np.ones(50), trees=trees, depth=depth)
    slow = np.zeros(50)
    for tree in range(trees):
        above = columns[boost.features[tree]] > boost.thresholds[tree][:, None]
        slow += boost.leaves[tree][(above << np.arange(depth)[:, None]).sum(axis=0)]
    assert boost.predict(columns) == pytest.approx(slow, abs=1e-5)
    assert boost.predict(columns[:, :0]).shape == (0,)


# --- blends -----------------------------------------------------------------------------------------------------------
def parts(core: float, trees: float | None, net: float | None, ratio: float | None, bound: float = -99.0) -> Parts:
    given = [None if value is None else np.array([value]) for value in (trees, net, ratio)]
    return Parts(core=np.array([core]), trees=given[0], net=given[1], ratio=given[2], bound=np.array([bound]))


def test_a_blend_is_the_stated_sum_of_what_a_device_may_use() -> None:
    blend = Blend(trees=0.25, net=0.5, ratio=0.25)
    assert blend.log_seconds(parts(1.0, 2.0, 3.0, 9.0))[0] == pytest.approx(0.75 * (1.0 + 0.5 + 1.5) + 0.25 * 9.0)
    assert blend.log_seconds(parts(1.0, None, None, None))[0] == 1.0
    assert blend.log_seconds(parts(1.0, None, None, None, bound=4.0))[0] == 4.0
    assert blend.words() == "core + 0.25 trees + 0.5 net, 0.25 ratio"
    with pytest.raises(ValueError, match="within 0 and 1"):
        Blend(trees=0.75, net=0.5)


def test_scores_count_siblings_once_and_only_what_was_allowed() -> None:
    truth = np.array([0.0])
    alike = [(parts(0.0, 0.2, 0.0, None), truth)] * 2
    found = scores({"two siblings": alike, "other": [(parts(0.0, -0.2, 0.0, None), truth)]}, Blend())
    assert {score.blend.ratio for score in found} == {0.25}
    full = next(score for score in found if score.blend.trees == 1.0)
    assert full.mape == pytest.approx((np.expm1(0.2) - np.expm1(-0.2)) / 2)


def score(mapes: tuple[float, float], **shares: float) -> Score:
    return Score(blend=Blend(**shares), mape=sum(mapes) / 2, by_kind=dict(zip("ab", mapes, strict=True)))


def test_only_what_is_clearly_better_on_every_kind_takes_the_place_of_the_default() -> None:
    default = score((0.2, 0.2))
    better, by_a_hair, on_one = (
        score((0.15, 0.19), trees=1.0), score((0.19, 0.19), trees=1.0), score((0.05, 0.21), trees=1.0)
    )  # fmt: skip
    assert choose([default, better], Blend()) == better.blend
    assert choose([default, by_a_hair], Blend()) == Blend()
    assert choose([default, on_one], Blend()) == Blend()
    alone = [replace(one, by_kind={"a": one.by_kind["a"]}) for one in (default, better)]
    assert choose(alone, Blend()) == Blend()


def test_a_net_must_be_clearly_better_than_all_that_goes_without() -> None:
    default, trees = score((0.2, 0.2)), score((0.16, 0.16), trees=1.0)
    little, much = score((0.155, 0.155), trees=0.0, net=1.0), score((0.1, 0.1), trees=0.0, net=1.0)
    assert choose([default, trees, little], Blend()) == trees.blend
    assert choose([default, trees, much], Blend()) == much.blend


def test_siblings_are_also_left_out_together() -> None:
    names = ["A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "L40S"]
    sheets = sheets_for(names, FAMILY_MODELS["gemm16"])
    assert _left_out(sheets) == [*([name] for name in names), ["H100-SXM-80GB", "H200-SXM-141GB"]]
    assert _left_out({name: sheets[name] for name in names[1:3]}) == [[name] for name in names[1:3]]


def made_up(residual: Any) -> Any:
    """Products of three new kinds of devices whose latencies are off the core's form by a function of the sizes."""
    table = frame({"a100_sxm": 1.8, "h100_sxm": 1.8, "b200_sxm": 1.8, "l40s": 1.8}, 150)
    table["latency_ms"] *= 2 * residual(table)
    found = import_frame(table).tables[0]
    known = found.device != "L40S"
    return found.at(known), found.at(~known)


def test_a_family_gets_the_net_where_it_is_clearly_better_on_held_out_devices(tmp_path: Path) -> None:
    known, other = made_up(lambda t: (t.k / 1024) ** 0.4 * (t.n / 512) ** -0.4 * (t.m / 512) ** 0.3)
    model = fit_family(known)
    assert model.blend.net > 0 and model.net is not None
    given: Any = model.facts["blends"]
    least = {bool(row["net"]): min(r["mape"] for r in given if bool(r["net"]) == bool(row["net"])) for row in given}
    assert least[True] < 0.93 * least[False]
    usual = replace(model, blend=Blend())
    chosen, default = (np.abs(np.expm1(errors_on(m, other, "L40S").error)).mean() for m in (model, usual))
    assert chosen < default  # of a device that had no part in the choice
    save_models(tmp_path / "x.npz", {"gemm16": model})
    read = load_models(tmp_path / "x.npz")["gemm16"]
    sheets = sheets_for(["L40S"], FAMILY_MODELS["gemm16"])
    rows = replace(rows_of(other, sheets), sheet=sheets["L40S"])
    assert read.blend == model.blend
    assert read.predict(rows, "L40S").log_seconds.tolist() == model.predict(rows, "L40S").log_seconds.tolist()


def test_a_family_keeps_the_trees_where_the_net_is_not_clearly_better() -> None:
    known, _ = made_up(lambda t: np.where(t.n % 256 == 0, 1.8, 1.0) * np.where(t.k > 512, 0.7, 1.3))
    model = fit_family(known)
    assert model.blend.net == 0 and model.blend.trees > 0 and model.net is None


def test_rows_that_the_core_is_not_fitted_on_have_a_blend_of_their_own() -> None:
    sizes = FAMILY_MODELS["attention16"].smallest
    dims = {name: np.array([value, value]) for name, value in sizes.items()} | {"seq": np.array([64.0, 8.0])}
    model = FamilyModel(family="attention16", constants=(), boost=None, sheets={}, domain={},
                        blend=Blend(trees=1.0, ratio=0.0), beside=Blend(trees=0.0, ratio=0.0))  # fmt: skip
    given = Parts(core=np.zeros(2), trees=np.ones(2), net=None, ratio=None, bound=np.full(2, -9.0))
    assert model.blended(given, dims).tolist() == [1.0, 0.0]


# --- the file ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def with_net() -> Any:
    table = import_frame(frame({"a100_sxm": 1.5, "l40s": 1.5}, 60)).tables[0]
    return replace(train(table, quick=True, net=True), blend=Blend(trees=0.0, net=1.0))


def rewritten(source: Path, goal: Path, change: Any) -> None:
    """The file with other arrays and header, the digest as they want it."""
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop("header").tobytes())
    change(arrays, header)
    header["digest"] = _digest(arrays)
    np.savez(goal, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, header: arrays.update({"gemm16.net.first": arrays["gemm16.net.first"][:, :-1]}),
        lambda arrays, header: arrays.update({"gemm16.net.middle": arrays["gemm16.net.middle"] * np.float32("nan")}),
        lambda arrays, header: arrays.update({"gemm16.net.last": arrays["gemm16.net.last"].astype(np.float64)}),
        lambda arrays, header: arrays.pop("gemm16.net.last_bias"),
        lambda arrays, header: header["families"]["gemm16"].update(net=False),
        lambda arrays, header: header["families"]["gemm16"].update(blend={"trees": 2.0, "net": 0.0, "ratio": 0.0}),
        lambda arrays, header: header["families"]["gemm16"].update(beside={"forest": 1.0}),
    ],
)
def test_arrays_and_shares_that_do_not_fit_are_refused_in_one_line(change: Any, with_net: Any, tmp_path: Path) -> None:
    save_models(tmp_path / "good.npz", {"gemm16": with_net})
    rewritten(tmp_path / "good.npz", tmp_path / "bad.npz", change)
    with pytest.raises(FormatError, match=r"bad\.npz.*simpart fit") as caught:
        load_models(tmp_path / "bad.npz")
    assert "\n" not in str(caught.value)


def test_a_model_with_a_net_reads_and_predicts_without_torch(with_net: Any, tmp_path: Path) -> None:
    save_models(tmp_path / "x.npz", {"gemm16": with_net})
    code = (
        "import sys; from pathlib import Path; from simpart.costmodels.learned import Learned;"
        "from simpart.cost import Signature, SignatureTable, TensorForm; from simpart.hardware import load_device;"
        "f = TensorForm((64, 64), 'bfloat16', (0, 1)); s = Signature('aten.mm.default', (f, f), (f,));"
        "model = Learned(path=Path(sys.argv[1]));"
        "print(model.estimate(SignatureTable((s,)), load_device('t4')).mean_s[0] > 0, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.npz")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["True", "False"]


def test_fit_prints_what_it_chose_from(tmp_path: Path) -> None:
    path, output = tmp_path / "x.csv", str(tmp_path / "x.npz")
    frame({"a100_sxm": 1.8, "b200_sxm": 1.8, "l40s": 1.8}, 40).to_csv(path, index=False)
    text = simpart("fit", str(path), "-o", output)
    assert text.status == 0 and "what a new one is told by" in text.out and "core + " in text.out
    found = json.loads(simpart("fit", str(path), "-o", output, "--json").out)["families"]["gemm16"]
    assert set(found["blends"][0]) == {"trees", "net", "ratio", "mape", "held_out"}
    assert found["told_by"] == Blend(**found["blend"]).words()
