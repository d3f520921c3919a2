"""Captured graphs kept in the user's cache folder, so that a model is captured once.

An entry is found by everything a capture depends on: the model, precision, micro-batches, the versions of torch and of
the file format, the code that captures, for a user's factory the sources of all its modules, and for a Hugging Face
configuration what is in it. SIMPART_NO_CACHE=1 switches it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import platformdirs

from simpart.errors import UnknownNameError, UserError
from simpart.files import dump_json, read_document, write_document
from simpart.graph import Graph
from simpart.graph.format import GRAPH_VERSION, graph_from_json, graph_to_json
from simpart.model_spec import ModelFactory, UserFactory
from simpart.zoo.hf import HFFactory

__all__ = ["cache_folder", "captured"]

PRECISIONS = ("bfloat16", "float16", "float32", "float64")
_KIND = "simpart cached graph"


def captured(
    factory: ModelFactory,
    precision: str,
    micro_batches: Sequence[int] = (),
    *,
    full: bool = False,
    use_cache: bool = True,
) -> Graph:
    """The Graph of a model, from the cache or captured now. An entry that cannot be read is captured again.

    `micro_batches` come on top of those every capture uses; `full` traces every layer instead of a few.
    """
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    use_cache = use_cache and os.environ.get("SIMPART_NO_CACHE", "") in ("", "0")
    path = cache_folder() / f"{_key(factory, precision, micro_batches, full)}.json.gz" if use_cache else None
    found = None if path is None else _read(path)
    if found is not None:
        return found
    from simpart.capture import capture

    sizes = tuple(dict.fromkeys((2, 3, 5, *micro_batches)))
    graph = capture(factory, sizes, model=factory.model, precision=precision, shallow=not full)
    tokens = factory.tokens_per_sample
    if tokens is not None and tokens != graph.tokens_per_sample:
        one = None if graph.at_one is None else replace(graph.at_one, tokens_per_sample=tokens)
        graph = replace(graph, tokens_per_sample=tokens, at_one=one)
    if path is not None:
        _write(path, graph, isinstance(factory, UserFactory))
    return graph


def cache_folder() -> Path:
    """Where captured graphs are kept; safe to delete."""
    return Path(platformdirs.user_cache_dir("simpart")) / "graphs"


def _key(factory: ModelFactory, precision: str, micro_batches: Sequence[int], full: bool) -> str:
    here = Path(__file__).parent.parent
    own = [here / "kernels" / "ops.py"]
    own += sorted(path for name in ("graph", "capture", "zoo") for path in (here / name).glob("*.py"))
    module = None
    if isinstance(factory, UserFactory):
        module = factory.source_file()
        if module is None:
            factory.check()  # most likely it does not exist: say so before torch is imported
    parts = [
        factory.model,
        precision,
        sorted(set(micro_batches)),
        full,
        GRAPH_VERSION,
        importlib.metadata.version("torch"),
        [_digest(path) for path in own],
        None if module is None else [str(module.resolve()), _digest(module)],
        factory.digest if isinstance(factory, HFFactory) else None,
    ]
    return hashlib.sha256(dump_json(parts).encode()).hexdigest()[:40]


def _digest(path: Path | str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _read(path: Path) -> Graph | None:
    if not path.exists():
        return None
    try:
        content = read_document(path, _KIND, GRAPH_VERSION)
        if any(_digest(name) != digest for name, digest in content["sources"].items()):
            return None
        return graph_from_json(content["graph"])
    except (UserError, KeyError, AttributeError, TypeError):
        return None


def _write(path: Path, graph: Graph, of_user: bool) -> None:
    """A cache that cannot be written costs time only."""
    sources = {name: _digest(name) for name in _user_sources()} if of_user else {}
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document(path, _KIND, GRAPH_VERSION, {"sources": sources, "graph": graph_to_json(graph)}, compress=True)


def _user_sources() -> Iterable[str]:
    """Files of all imported modules that are neither installed nor simpart's: the model is made of some of them."""
    installed = {str(Path(__file__).resolve().parent.parent), *map(os.path.realpath, _library_folders())}

    def files() -> Iterator[str]:
        for module in list(sys.modules.values()):
            name = getattr(module, "__file__", None)
            if isinstance(name, str) and name.endswith(".py"):
                real = os.path.realpath(name)
                if not any(real.startswith(folder + os.sep) for folder in installed):
                    yield real

    return sorted(set(files()))


def _library_folders() -> Iterator[str]:
    paths = sysconfig.get_paths()
    yield from (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
