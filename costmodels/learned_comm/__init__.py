"""Learned communication: protocols on link levels with few fitted constants, and what is known of measured systems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simpart.costmodels.learned_comm._artifact import SHIPPED, load, save
from simpart.costmodels.learned_comm._estimate import LearnedComm

if TYPE_CHECKING:
    from simpart.evaluation import Judged

__all__ = ["SHIPPED", "LearnedComm", "evaluate", "evaluate_package", "load", "save"]


def evaluate(*arguments: Any) -> tuple[Judged, Mapping[str, Any]]:
    """What `simpart evaluate` asks for tables of collectives; see `_evaluating.evaluate`."""
    from simpart.costmodels.learned_comm._evaluating import evaluate as run

    return run(*arguments)


def evaluate_package(*arguments: Any) -> tuple[Judged, Mapping[str, Any]]:
    """What `simpart evaluate` asks for the collectives in aiconfigurator-core; see `_evaluating.evaluate_package`."""
    from simpart.costmodels.learned_comm._evaluating import evaluate_package as run

    return run(*arguments)
