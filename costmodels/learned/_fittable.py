"""The devices that published tables may teach: the others are there to be judged by, and no model ever learns them.

A test set keeps its worth only while nothing is fitted on it. So rows of the tables in aiconfigurator-core are learned
from on the devices below alone, those of the data sets that the shipped models come from; of every other device they
are left out of each fit, also of the fits that `simpart evaluate --split` makes, and counted. What somebody measured
on a device of their own (profiles, traces, logs, tables with a source of their own) is theirs to learn from.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

__all__ = ["COLLECTIVES_FROM", "KERNELS_FROM", "fittable", "never_fitted"]

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

KERNELS_FROM = frozenset({
    "A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "L40S", "Arc-Pro-B60",
    "P100-PCIE-16GB", "V100-PCIE-32GB", "T4", "A100-PCIE-40GB", "A100-PCIE-80GB",
})  # fmt: skip
COLLECTIVES_FROM = frozenset({
    "A100-SXM-80GB", "A100-SXM-40GB", "H100-SXM-80GB", "B200-SXM-180GB", "L40S", "Arc-Pro-B60", "V100-SXM2-32GB", "A40",
})  # fmt: skip
_PUBLISHED = "aiconfigurator"


def fittable(source: Any, device: Any, allowed: frozenset[str]) -> Mask:
    """Which rows may be learned from, by the texts of their sources and the names of their devices."""
    pairs = zip(source.tolist(), device.tolist(), strict=True)
    return np.array([not s.startswith(_PUBLISHED) or d in allowed for s, d in pairs], dtype=bool)


def never_fitted(source: Any, device: Any, allowed: frozenset[str]) -> dict[str, int]:
    """How many rows of which device are left out of a fit."""
    return dict(Counter(device[~fittable(source, device, allowed)].tolist()).most_common())
