"""Training recipes: files, flags over them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpart.commands._problem import training_of
from simpart.errors import UserError
from simpart.training import TrainingSpec
from simpart.training_files import load_training

GOOD = "optimizer: adam\nprecision: bfloat16\nmaster_weights: true\nbetas: [0.9, 0.95]\nlearning_rate: 3e-4\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, "utf-8")
    return path


def options(path: Path | None, **flags: Any) -> dict[str, Any]:
    return {"training": path, "precision": None, "optimizer": None, "clip": None, **flags}


def test_a_recipe_is_the_fields_of_the_training_spec(tmp_path: Path) -> None:
    expected = TrainingSpec(
        optimizer="adam", precision="bfloat16", master_weights=True, betas=(0.9, 0.95), learning_rate=3e-4
    )
    assert load_training(written(tmp_path, GOOD)) == expected
    assert load_training(written(tmp_path, "{}")) == TrainingSpec()


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    found = training_of(options(written(tmp_path, GOOD), optimizer="sgd", clip=1.0))
    assert (found.optimizer, found.gradient_clip_norm, found.precision) == ("sgd", 1.0, "bfloat16")
    assert training_of(options(None)) == TrainingSpec()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("optmizer: adam", "unknown key 'optmizer'"),
        ("- adam", "a recipe is a table of keys"),
        ("precision: [1", "is no YAML"),
        ("precision: float17", "unknown dtype 'float17'"),
        ("optimizer: lion", "optimizer must be one of"),
        ("optimizer: [adam]", "optimizer must be one of"),
        ("betas: 3", "betas"),
        ("gradient_clip_norm: -1", "gradient_clip_norm must be positive"),
        ("!!python/object/apply:os.system [true]", "is no YAML"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule) as caught:
        load_training(written(tmp_path, text))
    assert "\n" not in str(caught.value) and "recipe.yaml" in str(caught.value)


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the recipe"):
        load_training(tmp_path / "none.yaml")
