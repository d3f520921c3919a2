"""Loops compiled with numba where it is there and worth its start-up, else plain Python with equal answers.

Machine code is kept in the user's cache folder (never beside the package), unless `SIMPART_NO_CACHE=1` or that
folder cannot be written. `SIMPART_NO_JIT=1` keeps numba away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["compiled"]

WORTH_IMPORTING = 40_000
"""Tasks × plans from which importing numba (about half a second) pays; measured with `benchmarks/engines.py`."""


def compiled(function: Callable[..., Any], work: int) -> Callable[..., Any] | None:
    """The machine code of `function`, or None: no numba, switched off, or too little `work` (in tasks)."""
    if os.environ.get("SIMPART_NO_JIT", "0") not in ("", "0") or (
        "numba" not in sys.modules and work < WORTH_IMPORTING
    ):
        return None
    return _compile(function)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any] | None:
    try:
        import numba
    except ImportError:
        return None
    folder = _cache_folder()
    if folder is None:
        return numba.njit(function)  # type: ignore[no-any-return]
    config: Any = numba.config
    theirs = config.CACHE_DIR
    config.CACHE_DIR = folder  # read when the decorator runs; other users of numba keep their own
    try:
        machine_code: Callable[..., Any] = numba.njit(cache=True)(function)
        return machine_code
    finally:
        config.CACHE_DIR = theirs


@cache
def _cache_folder() -> str | None:
    if os.environ.get("SIMPART_NO_CACHE", "") not in ("", "0"):
        return None
    from platformdirs import user_cache_dir

    folder = Path(user_cache_dir("simpart", appauthor=False)) / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None
