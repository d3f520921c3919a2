"""Figures of accuracy against hand-made rows, and the evaluate and fit commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from simpart.commands.evaluate import evaluate
from simpart.commands.fit import fit
from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.evaluation import Judged, join, size_classes, summary
from tests.test_learned import frame

pytest.importorskip("pandas")

NONE = float("nan")


def judged(**change: Any) -> Judged:
    names = np.array(["a", "a", "b", "b"], dtype=object)
    values: dict[str, Any] = {
        "measured_s": np.array([1.0, 2.0, 4.0, 8.0]), "predicted_s": np.array([1.1, 1.8, 4.0, NONE]),
        "log_sd": np.array([0.1, 0.01, 0.1, NONE]), "groups": {"device": names},
        "baselines": {"roofline": np.array([0.5, 1.0, 2.0, 4.0])},
    }  # fmt: skip
    return Judged(**{**values, **change})


def test_figures_by_hand() -> None:
    found = summary(judged())
    assert (found["rows"], found["covered"], found["not_covered"]) == (4, 3, {"no_answer": 1})
    assert found["mape"] == pytest.approx(0.2 / 3)
    assert found["median"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.0)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["interval_coverage_90"] == pytest.approx(2 / 3)
    assert found["interval_half_width_median"] == pytest.approx(np.expm1(0.16449))
    assert found["mape_all"] == pytest.approx((0.2 + 0.5) / 4)  # the open row at the roofline's error
    assert found["baselines"]["roofline"]["mape"] == pytest.approx(0.5)
    assert found["by"]["device"]["b"]["rows"] == 1


def test_refused_rows_are_counted_and_charged() -> None:
    found = summary(judged(refused={"unusable": 2}))
    assert found["rows"] == 6
    assert found["mape_all"] == pytest.approx((0.2 + 0.5 + 2 * 0.5) / 6)


def test_the_winkler_score_punishes_misses() -> None:
    calm, sharp = (summary(judged(log_sd=np.array([sd] * 3 + [NONE])))["winkler"] for sd in (0.1, 0.001))
    assert calm < sharp


def test_nothing_covered_gives_no_figures_but_an_answer() -> None:
    found = summary(judged(predicted_s=np.full(4, NONE)))
    assert found["covered"] == 0
    assert found["mape"] is None
    assert found["mape_all"] is None
    json.dumps(found, allow_nan=False)


def test_parts_join_with_their_baselines() -> None:
    both = join([judged(), judged(baselines={})])
    assert len(both.measured_s) == 8
    assert np.isnan(both.baselines["roofline"]).sum() == 4
    with pytest.raises(UserError, match="nothing to evaluate"):
        join([])


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(UserError, match="roofline must have a value for each of the 4 rows, got 1"):
        judged(baselines={"roofline": np.ones(1)})


def test_size_classes_are_decades() -> None:
    assert size_classes(np.array([1e-6, 2e-5, 0.5])).tolist() == ["<10us", "<100us", ">=10ms"]


# --- commands ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def data(tmp_path: Path) -> Path:
    table = frame({"a100_sxm": 1.3, "h100_sxm": 1.3, "b200_sxm": 1.3, "l40s": 1.3}, 80)
    table.loc[0, "latency_ms"] = -1
    table.to_csv(tmp_path / "ops.csv", index=False)
    return tmp_path / "ops.csv"


def run(command: Any, *arguments: str) -> Any:
    return json.loads(CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False).stdout)


def test_a_split_by_device_predicts_each_from_the_others(data: Path) -> None:
    found = run(evaluate, str(data), "--split", "leave-one-device-out", "--csv", str(data.parent / "rows.csv"))
    assert (found["rows"], found["covered"], found["not_covered"]) == (320, 319, {"unusable": 1})
    assert set(found["by"]["device"]) == {"A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB", "L40S"}
    assert found["mape"] < found["baselines"]["roofline"]["mape"]
    assert {"one_number", "roofline", "ratio"} == set(found["baselines"])
    assert len((data.parent / "rows.csv").read_text().splitlines()) == 320


def test_trained_devices_are_named_when_the_shipped_models_judge(data: Path) -> None:
    found = run(evaluate, str(data))
    assert "A100-SXM-80GB" in found["trained_devices"]
    assert "--split leave-one-device-out" in found["notes"][0]


def test_models_that_fit_wrote_serve_evaluate(data: Path) -> None:
    models = str(data.parent / "models.npz")
    fitted = run(fit, str(data), "-o", models)
    assert fitted["files"]["ops.csv"]["left_out"] == {"unusable": 1}
    assert set(fitted["families"]["gemm16"]["held_out"]) >= {"A100-SXM-80GB", "L40S"}
    found = run(evaluate, str(data), "--models", models)
    assert found["mape"] < 0.2
    assert found["interval_coverage_90"] > 0.8


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("nowhere.csv",), FormatError, "cannot read nowhere.csv as a table"),
        (("{data}", "--split", "by-moon"), UnknownNameError, "unknown split 'by-moon'"),
        (("{data}", "--models", "nowhere.npz"), FormatError, "cannot read nowhere.npz"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: tuple[str, ...], error: type[Exception], words: str, data: Path
) -> None:
    with pytest.raises(error, match=words):
        CliRunner().invoke(evaluate, [a.format(data=data) for a in arguments], catch_exceptions=False)


def test_a_table_of_another_kind_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FormatError, match=r"is of no known kind; missing columns are, by kind, experts: .*products: "):
        CliRunner().invoke(evaluate, [str(tmp_path / "x.csv")], catch_exceptions=False)
