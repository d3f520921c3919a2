"""How far a prediction rests on measurements; kernels to profile next against trying each."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simpart.commands._coverage import coverage_documents
from simpart.cost import PROVENANCES, Estimate, SignatureTable
from simpart.errors import UserError
from simpart.hardware import Device, load_device
from simpart.simulation import simulate_plan
from simpart.simulation.coverage import _with_measured, beyond_measurements, parse_share, profile_next
from tests.test_cli import document, simpart
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitCompute, chain, cluster, costs


class BySize(UnitCompute):
    """Kernels take as long as their target is named, products are the least sure; adding is measured already."""

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        plain = super().estimate(table, device)
        names = [s.target for s in table.signatures]
        seconds = plain.mean_s * np.array([len(n) + 10.0 * ("mm" in n or "linear" in n) for n in names])
        product = np.array(["mm" in n or "linear" in n for n in names])
        return replace(
            plain, mean_s=seconds, families=("product", "other"), family=np.where(product, 0, 1),
            shared_log_sd=np.where(product, 0.3, 0.1), own_log_sd=np.where(product, 0.1, 0.05),
        )  # fmt: skip


def test_the_first_kernel_named_is_the_one_that_narrows_most_when_each_is_tried() -> None:
    graph = chain(4)
    asked, made = problem(graph, 8, costs=costs(BySize())), plan(graph, [], 4)
    found = profile_next(asked, made, 100)

    def width(count: int) -> float:
        known = {(k.signature, k.device) for k in found.kernels[count : count + 1]}
        low, high = _with_measured(asked, made, known).interval_s
        return math.log(high / low)

    widths = [width(i) for i in range(len(found.kernels))]
    assert len(found.kernels) > 3
    assert widths[0] == pytest.approx(min(widths), rel=0.02)
    assert sum(k.share for k in found.kernels) == pytest.approx(1.0)
    assert all(a.removes >= 0 for a in found.kernels) and found.kernels[0].removes > 0.2


def test_measuring_everything_leaves_the_spread_of_measurements() -> None:
    graph = chain(4)
    asked, made = problem(graph, 8, costs=costs(BySize())), plan(graph, [], 4)
    few, all_of_them = profile_next(asked, made, 1), profile_next(asked, made, 100)
    before, one, every = (
        np.log(b / a) for a, b in (few.interval_s, few.interval_after_s, all_of_them.interval_after_s)
    )
    assert before > one > every
    assert every == pytest.approx(2 * 1.645 * 0.03, rel=0.25)


def test_what_is_measured_is_not_named() -> None:
    class Known(BySize):
        def estimate(self, table: SignatureTable, device: Device) -> Estimate:
            found = super().estimate(table, device)
            return replace(found, provenance=np.full(len(found.mean_s), PROVENANCES.index("measured")))

    graph = chain(2)
    assert profile_next(problem(graph, 8, costs=costs(Known())), plan(graph, [], 4), 5).kernels == ()


def test_the_question_leaves_the_prediction_as_it_was() -> None:
    graph = chain(4)
    asked, made = problem(graph, 8, costs=costs(BySize())), plan(graph, [4], 4)
    before = simulate_plan(asked, made)
    found = profile_next(asked, made, 3)
    assert found.interval_s == before.interval_s and simulate_plan(asked, made).step_s == before.step_s
    assert beyond_measurements(before.provenance) == 1.0


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), (" 0.5 ", 0.5), ("0", 0.0), ("100%", 1.0)])
def test_a_share_is_read_with_or_without_percent(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "120%", "-1%", "nan", "2", "much"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="share must be"):
        parse_share(text)


def test_commands_name_kernels_and_stop_scripts(tmp_path: Path) -> None:
    what = ["gpt:layers=2,hidden=64,heads=4,seq=32,vocab=512", "--cluster", "dgx-a100", "--global-batch", "8"]
    file = str(tmp_path / "plan.json")
    made = simpart("plan", *what, "--no-profiles", "-o", file, "--fail-if-extrapolated", "0%")
    assert made.status == 1 and "beyond measurements" in made.err and made.out
    found = document("simulate", file, "--no-profiles", "--profile-next", "2", "--fail-if-extrapolated", "100%")
    assert len(found["profile_next"]["kernels"]) == 2
    assert {"kernel", "inputs", "device", "share", "removes"} <= set(found["profile_next"]["kernels"][0])
    low, high = found["profile_next"]["interval_s"]
    assert [low, high] == found["predicted"]["interval_s"]
    assert "profile next" in simpart("simulate", file, "--no-profiles", "--profile-next", "1").out
    assert simpart("simulate", file, "--fail-if-extrapolated", "many").status == 2


def test_a_thin_data_sheet_is_told_with_every_prediction() -> None:
    thin = replace(load_device("a100"), clock_hz=None, l2_bytes=None)
    asked = replace(problem(chain(2), 8), cluster=cluster(thin))
    words = coverage_documents(asked, plan(chain(2), [], 4), None)["assumed"]
    assert (
        len(words) == 1
        and "states no clock and no l2: assumed clock 1.7 GHz, l2 40 MiB;" in words[0]
        and "wider by" in words[0]
    )
    assert coverage_documents(problem(chain(2), 8), plan(chain(2), [], 4), None) == {}
