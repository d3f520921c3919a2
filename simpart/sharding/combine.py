"""Parallel degrees on a mesh, as they are stated by hand, made into a sharding and state at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from simpart.graph import Graph
from simpart.placement import Placement, Sharding, StatePlacement
from simpart.plan import REPLICA_AXIS
from simpart.sharding.presets import Preset, context_parallel, expert_parallel, state_at_rest, tensor_parallel
from simpart.sharding.propagate import propagate

__all__ = ["Degrees", "Sharded", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How far each kind of parallelism inside a stage goes; 1 is not at all. `vocabulary` None: where it divides."""

    tp: int = 1
    sp: bool = False
    vocabulary: bool | None = None
    ep: int = 1
    cp: int = 1
    zero: int = 0

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Sharding axes, outermost first: those that talk most are innermost, on the fastest links."""
        return tuple((name, size) for name, size in (("cp", self.cp), ("ep", self.ep), ("tp", self.tp)) if size > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """What a plan holds of it: strategies of kernels and state at rest."""

    sharding: Sharding
    state: tuple[tuple[str, StatePlacement], ...]


_made: WeakKeyDictionary[Graph, dict[tuple[int, Degrees, int], Sharded]] = WeakKeyDictionary()


def shard(graph: Graph, micro_batch: int, degrees: Degrees, replicas: int = 1) -> Sharded:
    """The sharding of a whole graph at a replica's micro-batch; kept per graph.

    Raises UserError with degrees that work, UnsupportedError where the model lacks the structure.
    """
    known = _made.setdefault(graph, {})
    key = (micro_batch, degrees, replicas)
    if key not in known:
        known[key] = _make(graph, micro_batch, degrees, replicas)
    return known[key]


def _make(graph: Graph, micro_batch: int, degrees: Degrees, replicas: int) -> Sharded:
    presets: dict[str, Preset] = {}
    for name, size in degrees.axes:
        if name == "tp":
            presets[name] = tensor_parallel(
                graph, micro_batch, size, vocabulary=degrees.vocabulary, sequence=degrees.sp
            )
        else:
            presets[name] = (expert_parallel if name == "ep" else context_parallel)(graph, micro_batch, size)
    found = propagate(
        graph,
        micro_batch,
        ((REPLICA_AXIS, replicas), *degrees.axes),
        {name: preset.pins for name, preset in presets.items()},
        {name: preset.spread for name, preset in presets.items() if preset.spread is not None},
    )
    rest: Mapping[str, Mapping[int, Placement]] = {name: preset.parameters for name, preset in presets.items()}
    return Sharded(sharding=found.sharding, state=state_at_rest(graph, rest, degrees.zero, replicas))
