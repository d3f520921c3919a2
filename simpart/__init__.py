"""simpart: plan, predict and check how a PyTorch model trains when it is split over a cluster.

What things are:   simpart.graph, training, hardware, plan, schedule, program
From a module:     simpart.capture, simpart.zoo
What they cost:    simpart.cost (interface), simpart.costmodels
Finding a plan:    simpart.problem, searching (interface and loop), simpart.searchers
Predicting it:     simpart.lowering, memory, engines, simulation, trace
Running it:        simpart.validate
The machines:      simpart.hardware_profiles

Importing simpart imports none of these; the few names below are looked up on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpart.errors import UserError
    from simpart.graph import Graph
    from simpart.hardware import Cluster, Device, load_cluster, load_device
    from simpart.plan import Plan
    from simpart.training import TrainingSpec

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Device",
    "Graph",
    "Plan",
    "TrainingSpec",
    "UserError",
    "__version__",
    "load_cluster",
    "load_device",
]

_HOME = {
    "Cluster": "hardware",
    "Device": "hardware",
    "Graph": "graph",
    "Plan": "plan",
    "TrainingSpec": "training",
    "UserError": "errors",
    "load_cluster": "hardware",
    "load_device": "hardware",
}

_broken = [
    name
    for name in ("costmodels", "searchers", "hardware_profiles", "validate")
    if not os.path.isdir(os.path.join(os.path.dirname(__file__), name))
]
if _broken:
    raise ImportError(
        f"simpart/{_broken[0]} must be a link to the folder ../{_broken[0]} and is not; "
        "clone again with symbolic links (git config core.symlinks true) or install simpart with pip"
    )


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'simpart' has no attribute {name!r}")
    return getattr(importlib.import_module(f"simpart.{_HOME[name]}"), name)
