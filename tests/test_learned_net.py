"""The net of the learned compute models and the choice of blends: against torch, a slow count, and on made-up data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simpart.costmodels.learned._blend import Blend, Parts, Score, choose, scores
from simpart.costmodels.learned._boost import fit_boost
from simpart.costmodels.learned._families import FAMILY_MODELS
from simpart.costmodels.learned._net import NET_PARTS, fit_net, standardised
from simpart.costmodels.learned._training import _left_out, sheets_for

pd = pytest.importorskip("pandas")


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
