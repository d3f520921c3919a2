"""How commands print: a document for programs, rich text for people."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "print_document"]


def console() -> Console:
    """Standard output. Off a terminal lines are not wrapped at 80 columns: people search and cut them."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)


def print_document(document: dict[str, Any]) -> None:
    """One JSON document on standard output. ASCII, so that every locale can print it."""
    json.dump(document, sys.stdout, allow_nan=False, indent=1)
    sys.stdout.write("\n")
