"""A replayed step for Perfetto (ui.perfetto.dev) or chrome://tracing: rows of device groups (fine grain: and of
their streams) and links, flows, memory.

Written in the Trace Event Format (JSON): complete events in microseconds, flow arrows from a transfer's producer
through it to its reader, counters of each group's memory by kind and of what every physical link carries. Tasks that
the step's length hangs on are marked critical.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from simpart.engines import completes_backward, task_name
from simpart.errors import FormatError
from simpart.files import dump_json, write_atomically
from simpart.program import MEMORY_KINDS, Program, TaskKind
from simpart.simulation import SimResult
from simpart.simulation.limits import critical_path

__all__ = ["load_trace", "save_trace", "trace_events"]

GROUPS, LINKS = 1, 2
"""Process numbers in the trace: a row per device group, a row per link."""
_COLORS = {
    TaskKind.FORWARD: "thread_state_running",
    TaskKind.BACKWARD: "thread_state_iowait",
    TaskKind.BACKWARD_INPUT: "thread_state_iowait",
    TaskKind.BACKWARD_WEIGHT: "thread_state_runnable",
    TaskKind.SEND: "grey",
    TaskKind.REDUCE: "terrible",
    TaskKind.OPTIMIZER: "good",
    TaskKind.COLLECTIVE: "bad",
}


def save_trace(path: Path | str, result: SimResult) -> None:
    """Write the step as a trace file."""
    content = {"traceEvents": trace_events(result), "displayTimeUnit": "ms", "otherData": {"made by": "simpart"}}
    write_atomically(path, dump_json(content) + "\n")


def load_trace(path: Path | str) -> list[dict[str, Any]]:
    """The events of a trace file; raises FormatError in one line for what is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        events = content["traceEvents"]
    except OSError as error:
        raise FormatError(f"cannot read trace {path}: {error.strerror}; give a trace file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is not a trace ({type(error).__name__}); give a file with traceEvents") from error
    if not isinstance(events, list) or not all(isinstance(e, dict) and "ph" in e and "pid" in e for e in events):
        raise FormatError(f"{path} holds events without ph or pid; give a trace in the Trace Event Format")
    return events


def trace_events(result: SimResult) -> list[dict[str, Any]]:
    """All events; times in microseconds from the start of the step."""
    return [*_names(result), *_tasks(result), *_flows(result), *_counters(result), *_link_counters(result)]


def _names(result: SimResult) -> list[dict[str, Any]]:
    program = result.program
    topology, facts = program.topology, program.facts
    found = [_metadata("process_name", GROUPS, 0, "device groups"), _metadata("process_name", LINKS, 0, "links")]
    for r, name in enumerate(topology.resource_names):
        if r < topology.groups and facts is not None:
            stages = ", ".join(map(str, facts.stages_of_group[r]))
            name += f": stage {stages} on {program.multiplicity[r]} × {facts.device_names[r]}"
        process = _process(program, r)
        place = r
        if name.startswith("stream "):  # below the group's own row
            _, group, axis = name.split(" ", 2)
            place, name = int(group), f"group {group}: {axis} communication"
        found += [_metadata("thread_name", process, r, name), _sort(process, r, place)]
    return found


def _process(program: Program, resource: int) -> int:
    return LINKS if program.topology.resource_names[resource].startswith("link ") else GROUPS


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _sort(process: int, thread: int, place: int) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": place}}


def _row(program: Program, task: int) -> dict[str, int]:
    resource = int(program.topology.resource[task])
    return {"pid": _process(program, resource), "tid": resource}


def _tasks(result: SimResult) -> list[dict[str, Any]]:
    topology, times = result.program.topology, result.times
    critical = set(critical_path(result.program, times)) if result.contention_s == 0 else set()
    found = []
    for task in np.argsort(times.start_s, kind="stable").tolist():
        kind = TaskKind(int(topology.kind[task]))
        start, end = float(times.start_s[task]) * 1e6, float(times.end_s[task]) * 1e6
        arguments: dict[str, Any] = {
            "kind": kind.name.lower(),
            "class": topology.class_names[topology.task_class[task]],
        }
        if task in critical:
            arguments["critical"] = True
        if topology.stage[task] >= 0:
            arguments["stage"] = int(topology.stage[task])
        if topology.micro_batch[task] >= 0:
            arguments["micro-batch"] = int(topology.micro_batch[task])
        name, words = task_name(topology, task), topology.class_names[topology.task_class[task]]
        if topology.parts and kind < TaskKind.SEND and ": " in words:  # say which part of the action
            name += " " + words.split(": ", 1)[1]
        found.append(
            {"ph": "X", "name": name, "cat": kind.name.lower(), "ts": start, "dur": end - start,
             **_row(result.program, task), "cname": _COLORS[kind], "args": arguments}
        )  # fmt: skip
    return found


def _flows(result: SimResult) -> list[dict[str, Any]]:
    """An arrow for each transfer: from the end of what made the value, over the link, to the start of what reads it."""
    program, times = result.program, result.times
    topology, found = program.topology, []
    consumer = np.repeat(np.arange(topology.size), np.diff(topology.indptr))
    for edge in np.flatnonzero(topology.kind[topology.predecessors] == TaskKind.SEND).tolist():
        send, reader = int(topology.predecessors[edge]), int(consumer[edge])
        maker = int(topology.predecessors[topology.indptr[send]])
        for phase, task, at in (("s", maker, times.end_s), ("t", send, times.start_s), ("f", reader, times.start_s)):
            # A flow binds to the slice around its time: step inside the slice where it has a length.
            length = float(times.end_s[task] - times.start_s[task])
            shift = -length * 1e-3 if phase == "s" else length * 1e-3
            at_us = (float(at[task]) + shift) * 1e6
            event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": edge, "ts": at_us, **_row(program, task)}
            found.append(event if phase != "f" else {**event, "bp": "e"})
    return found


def _counters(result: SimResult) -> list[dict[str, Any]]:
    """Bytes of each group by kind, before and after every change."""
    program = result.program
    topology, memory, times = program.topology, program.memory, result.times
    completes, found = completes_backward(topology), []
    for g in range(topology.groups):
        level, waiting = memory.static[g].copy(), True
        row = topology.resource_order[topology.resource_indptr[g] : topology.resource_indptr[g + 1]]
        found.append(_counter(g, 0.0, level))
        for task in row.tolist():
            c = topology.task_class[task]
            level = level + memory.start[c]
            found.append(_counter(g, float(times.start_s[task]), level + memory.within[c]))
            level = level + memory.end[c]
            if waiting and completes[task]:
                level, waiting = level + memory.late[g], False
            found.append(_counter(g, float(times.end_s[task]), level))
    return found


def _counter(group: int, time_s: float, level: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, Any]:
    kinds = {kind: round(float(size)) for kind, size in zip(MEMORY_KINDS, level, strict=True)}
    return {"ph": "C", "name": f"memory of group {group}", "pid": GROUPS, "ts": time_s * 1e6, "args": kinds}


def _link_counters(result: SimResult) -> list[dict[str, Any]]:
    """Bytes per second over each physical link, at every change."""
    program, times = result.program, result.times
    found: list[dict[str, Any]] = []
    if program.flows is None:
        return found
    classes, length = program.topology.task_class, times.end_s - times.start_s
    tasks = np.flatnonzero(length > 0)
    for number, name in enumerate(program.flows.links):
        size = program.flows.bytes_by_class[classes[tasks], number]
        mine = tasks[size > 0]
        rate = size[size > 0] / length[mine]
        at = np.concatenate([times.end_s[mine], times.start_s[mine]])
        order = np.argsort(at, kind="stable")  # what ends makes room before what begins
        level = np.concatenate([-rate, rate])[order].cumsum()
        for time_s, now in zip(at[order].tolist(), level.tolist(), strict=True):
            event = {"ph": "C", "name": f"link {name}", "pid": LINKS, "ts": time_s * 1e6}
            found.append(event | {"args": {"bytes_per_s": max(0.0, now)}})
    return found
