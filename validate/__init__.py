"""Run a plan on real processes, and say how far its prediction was from what the clock and the allocator showed.

Importing this package imports no torch; the processes it starts do.
"""

from simpart.validate._launch import RunFailed, collect, launch, prepare
from simpart.validate._timeline import COMPONENTS, Event, Timeline, components
from simpart.validate.compare import RankReport, ValidationReport, report_of, validate

__all__ = [
    "COMPONENTS", "Event", "RankReport", "RunFailed", "Timeline", "ValidationReport", "collect", "components", "launch",
    "prepare", "report_of", "validate",
]  # fmt: skip
