"""Two ways to replay a Program: `compiled` (fast, for search and sampling) and `simpy` (readable, the reference)."""

from __future__ import annotations

from simpart.engines.order import Deadlock, static_order
from simpart.engines.result import Peaks, Times, check_durations, completes_backward, task_name
from simpart.errors import UnknownNameError
from simpart.program import Program

__all__ = [
    "ENGINES",
    "Deadlock",
    "Peaks",
    "Times",
    "check_durations",
    "completes_backward",
    "replay",
    "static_order",
    "task_name",
]

ENGINES = ("compiled", "simpy")


def replay(program: Program, engine: str = "compiled") -> tuple[Times, Peaks]:
    """All times of the program's tasks and the peak memory of its groups, by the named engine."""
    if engine == "compiled":
        from simpart.engines.compiled import peaks, times

        return times(program.topology, program.durations), peaks(program.topology, program.memory)
    if engine == "simpy":
        from simpart.engines.simpy_engine import simulate_events

        found, held = simulate_events(program.topology, program.durations, program.memory)
        assert held is not None  # memory was given
        return found, held
    raise UnknownNameError("engine", engine, ENGINES)
