"""Plug-ins by name: a built-in table first, so that a plain clone works; entry points add to it."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from simpart.cost import Costs
from simpart.errors import UnknownNameError
from simpart.hardware import Cluster

__all__ = ["SEARCHERS", "default_costs", "load_searcher", "local_profiler", "searcher_names"]

SEARCHERS = {"rannc": "simpart.searchers.rannc:Rannc"}
"""Name of a searcher → `module:class`; the class is called without arguments."""


def searcher_names() -> list[str]:
    return sorted({*SEARCHERS, *(point.name for point in entry_points(group="simpart.searchers"))})


def load_searcher(name: str) -> Any:
    """An instance of the named searcher; raises UnknownNameError with the known names."""
    if name in SEARCHERS:
        module, _, attribute = SEARCHERS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)()
    for point in entry_points(group="simpart.searchers", name=name):
        return point.load()()
    raise UnknownNameError("searcher", name, searcher_names())


def default_costs(cluster: Cluster, *, store: Path | None = None, profiles: bool = True) -> Costs:
    """The cost models that commands use: profiles measured on this kind of device where there are any (unless
    `profiles` is off), data sheets for the rest."""
    costs: Costs = importlib.import_module("simpart.costmodels").default_costs(cluster, store=store, profiles=profiles)
    return costs


def local_profiler() -> tuple[Any, Any]:
    """(profile_graph_ops, profile_links) of `simpart.hardware_profiles`, which measure this machine."""
    package = "simpart.hardware_profiles"
    ops, links = (importlib.import_module(f"{package}.{name}") for name in ("_profile_ops", "_profile_links"))
    return ops.profile_graph_ops, links.profile_links
