"""Training recipes from YAML files: the fields of `TrainingSpec`, all optional.

optimizer: adamw
precision: bfloat16
master_weights: true          # a float32 copy in the optimizer
gradient_dtype: float32
gradient_clip_norm: 1.0
frozen: ["*.lora_base.*"]
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from simpart.errors import FormatError, UserError
from simpart.plan.format import training_from_json
from simpart.training import OPTIMIZER_STATES, TrainingSpec

__all__ = ["load_training"]

_LARGEST_FILE_BYTES = 100_000


def load_training(path: Path) -> TrainingSpec:
    """Raises FormatError in one line, with the file, for what is no recipe."""
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise FormatError(f"{path}: a recipe has at most {_LARGEST_FILE_BYTES} bytes; give the right file")
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}; give another file to --training") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise FormatError(
            f"{path}{f', line {where.line + 1}' if where else ''}: is no YAML; see docs/formats.md"
        ) from error
    if not isinstance(content, dict):
        raise FormatError(
            f"{path}: a recipe is a table of keys such as `optimizer: adamw`, got {type(content).__name__}"
        )
    known = [item.name for item in fields(TrainingSpec)]
    for key in content:
        if key not in known:
            raise FormatError(f"{path}: unknown key {key!r}; a recipe has {', '.join(known)}")
    optimizer = content.get("optimizer", "adamw")
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZER_STATES:
        raise FormatError(f"{path}: optimizer must be one of {', '.join(OPTIMIZER_STATES)}, got {optimizer!r}")
    try:
        return training_from_json({key: _number(value) for key, value in content.items()})
    except UserError as error:
        raise FormatError(f"{path}: {error}") from error


def _number(value: Any) -> Any:
    """YAML 1.1 takes `3e-4`, which has no point, for text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value) else value
