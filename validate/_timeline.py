"""Timelines of a step, measured or predicted, in one form: where each rank's time went, and a trace for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from simpart.simulation import SimResult

__all__ = ["COMPONENTS", "Event", "Timeline", "components", "measured_timelines", "predicted_timelines", "trace_of"]

COMPONENTS = ("forward", "backward", "communication", "optimizer", "bubble and other")
"""What a step consists of. Communication is exposed time only: waiting for a transfer that is under way, or in a
gradient sum that everybody has entered."""


class Event(TypedDict, total=False):
    """kind: F, B, I, W, send, receive (waiting for messages), reduce or optimizer. Times are seconds from the step's
    begin."""

    kind: str
    stage: int
    micro_batch: int
    messages: list[int]
    cpu_s: float
    start_s: float
    end_s: float


Timeline = Sequence[Event]
_OF_KIND = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
    "optimizer": "optimizer",
    "send": "communication",
}


def components(timelines: Sequence[Timeline], step_s: float) -> dict[str, float]:
    """Seconds of a step in each of COMPONENTS, the mean over ranks; they sum to `step_s`.

    >>> steps = [[{"kind": "F", "start_s": 0.0, "end_s": 1.0}], [{"kind": "F", "start_s": 1.0, "end_s": 3.0}]]
    >>> components(steps, 4.0)["forward"], components(steps, 4.0)["bubble and other"]
    (1.5, 2.5)
    """
    sent = {
        tag: e["start_s"]
        for events in timelines
        for e in events
        if e["kind"] == "send"
        for tag in e.get("messages", ())
    }
    joins = sorted(e["start_s"] for events in timelines for e in events if e["kind"] == "reduce")
    total = dict.fromkeys(COMPONENTS, 0.0)
    for events in timelines:
        for event in events:
            start, end = event["start_s"], event["end_s"]
            if event["kind"] == "receive":
                total["communication"] += end - min(
                    end, max([start, *(sent.get(tag, end) for tag in event.get("messages", ()))])
                )
            elif event["kind"] == "reduce":
                total["communication"] += end - max([start, *(s for s in joins if s < end)])
            else:
                total[_OF_KIND[event["kind"]]] += end - start
    mean = {name: seconds / max(1, len(timelines)) for name, seconds in total.items()}
    mean["bubble and other"] = step_s - sum(mean.values())
    return mean


def measured_timelines(ranks: Sequence[Mapping[str, Any]], step: int) -> list[Timeline]:
    return [rank["steps"][step]["events"] for rank in ranks]


def predicted_timelines(result: SimResult) -> list[Timeline]:
    """One timeline per rank, in the order of devices; waiting for a transfer shows as a receive event that begins when
    the transfer does."""
    from simpart.program import TaskKind

    topology, times = result.program.topology, result.times
    names = {
        TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.BACKWARD_INPUT: "I", TaskKind.BACKWARD_WEIGHT: "W",
        TaskKind.REDUCE: "reduce", TaskKind.OPTIMIZER: "optimizer", TaskKind.COLLECTIVE: "collective",
    }  # fmt: skip
    facts = result.program.facts
    found: list[tuple[int, Timeline]] = []
    for group in range(topology.groups):
        events: list[Event] = []
        before = 0.0
        for task in topology.resource_order[
            topology.resource_indptr[group] : topology.resource_indptr[group + 1]
        ].tolist():
            start, end = float(times.start_s[task]), float(times.end_s[task])
            edges = topology.predecessors[topology.indptr[task] : topology.indptr[task + 1]]
            sends = [int(e) for e in edges if topology.kind[e] == TaskKind.SEND]
            if sends and start > before:
                last = max(sends, key=lambda e: float(times.end_s[e]))
                begin = max(before, float(times.start_s[last]))
                if begin < start:
                    events.append({"kind": "receive", "messages": [], "start_s": begin, "end_s": start})
            event: Event = {"kind": names[TaskKind(int(topology.kind[task]))], "start_s": start, "end_s": end}
            if event["kind"] in "FBIW":
                event |= {"stage": int(topology.stage[task]), "micro_batch": int(topology.micro_batch[task])}
            events.append(event)
            before = end
        ranks = range(result.program.multiplicity[group]) if facts is None else facts.devices[group]
        found += [(rank if facts is not None else len(found), events) for rank in ranks]
    return [events for _, events in sorted(found, key=lambda pair: pair[0])]


def trace_of(measured: Sequence[Timeline], predicted: Sequence[Timeline]) -> dict[str, Any]:
    """Both runs as a trace-event document; opens in ui.perfetto.dev. A process per rank with two lanes, measured above
    predicted, both from the step's begin."""
    rows: list[dict[str, Any]] = []
    for rank in range(max(len(measured), len(predicted))):
        rows.append({"ph": "M", "pid": rank + 1, "name": "process_name", "args": {"name": f"rank {rank}"}})
        rows.append({"ph": "M", "pid": rank + 1, "name": "process_sort_index", "args": {"sort_index": rank}})
        for lane, (name, timelines) in enumerate((("measured", measured), ("predicted", predicted))):
            if rank >= len(timelines):
                continue
            place = {"pid": rank + 1, "tid": lane}
            rows.append({"ph": "M", **place, "name": "thread_name", "args": {"name": name}})
            rows.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": lane}})
            rows += [{"ph": "X", **place, **_slice(event)} for event in timelines[rank]]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _slice(event: Event) -> dict[str, Any]:
    name = f"{event['stage']}{event['kind']}{event['micro_batch']}" if event["kind"] in "FBIW" else event["kind"]
    begin, length = event["start_s"] * 1e6, (event["end_s"] - event["start_s"]) * 1e6
    return {"name": name, "cat": event["kind"], "ts": begin, "dur": length}
