"""Published profiles that planners came with: PipeDream's text graphs and Piper's JSON.

A profile is a graph of nodes with times and bytes, so a published plan can be looked for on the numbers it was made of.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpart.errors import FormatError

__all__ = [
    "PipeDreamNode",
    "PiperNode",
    "PiperVariant",
    "find_profile",
    "read_pipedream",
    "read_piper",
]

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamNode:
    """One op at the batch size of the profile."""

    name: str
    compute_s: float  # forward + backward
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperVariant:
    """One way to run a node on a number of devices: per sample, and bytes kept per sample in flight and always."""

    name: str
    time_s: float
    parameter_bytes: float
    bytes_in_flight: float
    bytes_static: float
    sync_bytes: tuple[tuple[int, float], ...]
    """Extra bytes per sample for each edge that leaves or enters a stage, by the neighbour at its other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperNode:
    """Variants by tensor degree."""

    name: str
    variants: dict[int, tuple[PiperVariant, ...]]


def find_profile(name: str, folders: Iterable[Path | str]) -> Path:
    """The file of a profile as golden cases name it: "vgg16", or "inputs/bert32a100.json (37 nodes)".

    Raises FileNotFoundError where no folder has it.
    """
    short = name.split(" ")[0]
    file = f"piper_{Path(short).name}" if short.endswith(".json") else f"pipedream_{short}.txt"
    for folder in folders:
        path = Path(folder) / file
        if path.is_file():
            return path
    raise FileNotFoundError(f"the published profile {file} is not here")


_NODE = re.compile(
    r"node(?P<id>\d+) -- (?P<name>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+), activation_size=(?P<activation>.+), parameter_size=(?P<weight>[\d.]+)"
)
_EDGE = re.compile(r"node(\d+) -- node(\d+)")


def read_pipedream(path: Path) -> tuple[tuple[PipeDreamNode, ...], Edges]:
    """Nodes and edges of a PipeDream profile without its inputs, in a topological order; ms become s.

    Lines of nodes stand in no particular order. A node with several outputs (written `[a; b]`) counts their sum.
    """
    nodes: dict[int, PipeDreamNode] = {}
    edges: list[tuple[int, int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text:
            continue
        if (edge := _EDGE.fullmatch(text)) is not None:
            edges.append((int(edge[1]), int(edge[2])))
        elif (node := _NODE.match(text)) is not None:
            nodes[int(node["id"])] = PipeDreamNode(
                name=node["name"],
                compute_s=(float(node["forward"]) + float(node["backward"])) / 1000,
                activation_bytes=sum(float(part) for part in re.findall(r"[\d.]+", node["activation"])),
                parameter_bytes=float(node["weight"]),
            )
        else:
            raise FormatError(
                f"{path}, line {number}: neither a node nor an edge of a profile; give a profile as published"
            )
    kept = {v for v, node in nodes.items() if not node.name.startswith("Input")}
    inner = [(a, b) for a, b in edges if a in kept and b in kept]
    order = _topological(sorted(kept), inner)
    place = {v: x for x, v in enumerate(order)}
    return tuple(nodes[v] for v in order), tuple((place[a], place[b]) for a, b in inner)


def read_piper(path: Path) -> tuple[tuple[PiperNode, ...], dict[tuple[int, int], float]]:
    """Nodes in a topological order and bytes per sample of each edge."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        edges = {(e["sourceId"], e["destId"]): float(e["communicationCost"]) for e in document["edges"]}
        raw = {int(n["id"]): n for n in document["nodes"]}
        order = _topological(sorted(raw), list(edges))
        place = {v: x for x, v in enumerate(order)}
        nodes = tuple(
            PiperNode(
                name=raw[v]["name"],
                variants={
                    int(degree): tuple(_variant(each, place) for each in choices)
                    for degree, choices in sorted(raw[v]["TMPCs"].items(), key=lambda item: int(item[0]))
                },
            )
            for v in order
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} is not a Piper profile: {type(error).__name__} {error}; give one as published"
        ) from error
    return nodes, {(place[a], place[b]): size for (a, b), size in edges.items()}


def _variant(raw: dict[str, Any], place: dict[int, int]) -> PiperVariant:
    sync = [*raw["syncTimeFw"].items(), *raw["syncTimeBw"].items()]
    return PiperVariant(
        name=raw["id"],
        time_s=float(raw["timePerSample"]),
        parameter_bytes=float(raw["parameterSize"]),
        bytes_in_flight=float(raw["memoryUsageA"]),
        bytes_static=float(raw["memoryUsageB"]),
        sync_bytes=tuple((place[int(neighbour)], float(size)) for neighbour, size in sync),
    )


def _topological(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Smallest number first among those whose predecessors are done."""
    waiting = dict.fromkeys(nodes, 0)
    after: dict[int, list[int]] = {v: [] for v in nodes}
    for source, target in edges:
        waiting[target] += 1
        after[source].append(target)
    ready = [v for v in nodes if waiting[v] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        v = heapq.heappop(ready)
        order.append(v)
        for target in after[v]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, target)
    if len(order) != len(nodes):
        raise ValueError("its edges form a cycle")
    return order
