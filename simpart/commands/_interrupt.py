"""Ctrl-C while modules are imported: an exception there may be swallowed or turned into another by what is half
imported, so the process ends instead; nothing is lost yet."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interrupt_ends"]


@contextmanager
def interrupt_ends() -> Iterator[None]:
    """Within, Ctrl-C ends the process with one line and status 130, unless somebody else has a say in it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: Any) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, b"interrupted\n")
    os._exit(130)
