"""Plug-ins by name: a built-in table first, so that a plain clone works; entry points add to it."""

from __future__ import annotations

import importlib
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from simpart.cost import Costs
from simpart.errors import UnknownNameError
from simpart.hardware import Cluster

__all__ = ["SEARCHERS", "default_costs", "folder", "load_searcher", "local_profiler", "searcher_names"]

SEARCHERS = {
    "alpa": "simpart.searchers.alpa:Alpa",
    "alpa_ilp": "simpart.searchers.alpa_ilp:AlpaIlp",
    "annealing": "simpart.searchers.annealing:Annealing",
    "dapple": "simpart.searchers.dapple:DappleSearcher",
    "equal_flops": "simpart.searchers.equal:equal_flops",
    "equal_layers": "simpart.searchers.equal:equal_layers",
    "equal_parameters": "simpart.searchers.equal:equal_parameters",
    "exhaustive": "simpart.searchers.exhaustive:Exhaustive",
    "grid": "simpart.searchers.grid:Grid",
    "pipedream": "simpart.searchers.pipedream:PipeDream",
    "piper": "simpart.searchers.piper:Piper",
    "random": "simpart.searchers.random:Random",
    "rannc": "simpart.searchers.rannc:Rannc",
    "tofu": "simpart.searchers.tofu:Tofu",
    "tofu_allrow": "simpart.searchers.tofu:tofu_allrow",
    "tofu_data_parallel": "simpart.searchers.tofu:tofu_data_parallel",
    "tofu_equalchop": "simpart.searchers.tofu:tofu_equalchop",
    "tofu_icml18": "simpart.searchers.tofu:tofu_icml18",
    "tofu_one_weird_trick": "simpart.searchers.tofu:tofu_one_weird_trick",
    "tofu_seconds": "simpart.searchers.tofu:tofu_seconds",
    "tofu_shared": "simpart.searchers.tofu:tofu_shared",
    "tofu_spartan": "simpart.searchers.tofu:tofu_spartan",
    "rhino": "simpart.searchers.rhino:Rhino",
    "rhino_o1": "simpart.searchers.rhino:rhino_o1",
    "rhino_o2": "simpart.searchers.rhino:rhino_o2",
    "rhino_o4": "simpart.searchers.rhino:rhino_o4",
    "two_bw": "simpart.searchers.two_bw:two_bw",
}
"""Name of a searcher → `module:class or function`, called without arguments."""


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
    costs: Costs = folder("costmodels").default_costs(cluster, store=store, profiles=profiles)
    return costs


def folder(name: str) -> Any:
    """A module of the four folders (`costmodels`, `hardware_profiles._store`, …), found by name like a plug-in."""
    return importlib.import_module(f"simpart.{name}")


def local_profiler(store: Path | None = None) -> tuple[Any, Any]:
    """(profile_graph_ops, profile_links), which measure this machine into the store in that folder (default: the user's
    data folder)."""
    opened = folder("hardware_profiles._store").Store.at(store)
    opened.read()  # a store that is none is refused before the work
    ops, links = folder("hardware_profiles._profile_ops"), folder("hardware_profiles._profile_links")
    return partial(ops.profile_graph_ops, store=opened), partial(links.profile_links, store=opened)
