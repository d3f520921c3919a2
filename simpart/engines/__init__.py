"""Ways to replay a Program: `compiled` (fast, for search and sampling), `simpy` (readable, the reference) and
`contention` (the same, where transfers share links)."""

from __future__ import annotations

from simpart.engines.order import Deadlock, static_order
from simpart.engines.result import Peaks, Times, check_durations, completes_backward, task_name
from simpart.errors import UnknownNameError, UserError
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

ENGINES = ("compiled", "simpy", "contention")


def replay(program: Program, engine: str = "compiled") -> tuple[Times, Peaks]:
    """All times of the program's tasks and the peak memory of its groups, by the named engine."""
    if engine == "compiled":
        from simpart.engines.compiled import times_and_peaks

        return times_and_peaks(program.topology, program.durations, program.memory)
    if engine in ("simpy", "contention"):
        from simpart.engines.simpy_engine import simulate_events

        flows = program.flows if engine == "contention" else None
        if engine == "contention" and flows is None:
            raise UserError("this program does not say which links its transfers use; make it with lower()")
        found, held = simulate_events(program.topology, program.durations, program.memory, flows)
        assert held is not None  # memory was given
        return found, held
    raise UnknownNameError("engine", engine, ENGINES)
