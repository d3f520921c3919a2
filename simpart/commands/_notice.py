"""A sign of life on stderr from work that cannot say how far it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["notice"]


@contextmanager
def notice(what: str, delay_s: float = 2.0, every_s: float = 5.0) -> Iterator[None]:
    """Print `what` and the seconds so far on stderr, first after `delay_s`, then every `every_s`."""
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = delay_s
        while not done.wait(wait):
            print(f"{what}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            wait = every_s

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
