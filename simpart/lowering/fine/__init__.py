"""The fine grain: kernels and collectives on streams (`lower_fine`), and what may be chosen about it
(`FineSettings`)."""

from __future__ import annotations

from simpart.lowering.fine._lower import lower_fine
from simpart.lowering.fine._settings import FineSettings

__all__ = ["FineSettings", "lower_fine"]
