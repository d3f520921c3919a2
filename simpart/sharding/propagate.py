"""From a few pins to a strategy of every kernel: greedy, in running order, one mesh axis after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

from simpart.errors import UserError
from simpart.graph import Graph, Kernel, Phase
from simpart.placement import AxisStrategy, Halo, Partial, Placement, Replicate, Shard, Sharding, Strategy
from simpart.plan import REPLICA_AXIS
from simpart.sharding._greedy import Lie, Spread, choose, converted_bytes
from simpart.sharding._pairs import parameter_values
from simpart.sharding._regions import Region, Wiring, wiring_of
from simpart.sharding.mesh import Axes, calls_of, mesh_of, use_of
from simpart.sharding.pins import Pin, Pinned, pinned
from simpart.tdl import Call, splits_following, splits_of, undescribed_reason

__all__ = ["Propagated", "propagate", "undescribed"]

R = Replicate()
NONE = Strategy(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagated:
    """Strategies of all kernels that do not replicate, and `reasons` why classes could only do that, by name of
    class."""

    sharding: Sharding
    reasons: Mapping[str, str]


def propagate(
    graph: Graph,
    micro_batch: int,
    axes: Sequence[tuple[str, int]],
    pins: Mapping[str, Sequence[Pin]],
    spreads: Mapping[str, Spread] | None = None,
) -> Propagated:
    """Strategies along the sharding axes of a mesh, outermost first, each on what the axes before it left.

    `pins` and `spreads` (where work that is else replicated may be cut, see `presets.sequence_spread`) go by axis.
    Raises UserError for pins that cannot hold.
    """
    mesh = tuple((name, size) for name, size in mesh_of(axes) if name != REPLICA_AXIS)
    for name in pins:
        if name not in dict(axes) or name == REPLICA_AXIS:
            known = ", ".join(n for n, _ in axes if n != REPLICA_AXIS) or "none"
            raise UserError(f"pins are on axis {name!r}, which splits no kernel of this mesh; it has {known}")
    sharding = Sharding()
    for number, (name, size) in enumerate(mesh):
        found = pinned(graph, wiring_of(graph), pins.get(name, ()), name, size, micro_batch)
        walk = _Walk(graph, micro_batch, mesh[:number], (name, size), sharding, found, (spreads or {}).get(name))
        sharding = walk.result()
    return Propagated(sharding=sharding, reasons=undescribed(graph, micro_batch))


def undescribed(graph: Graph, micro_batch: int) -> dict[str, str]:
    """Classes of kernels without a description, by name, with the reason: they replicate."""
    names, found = wiring_of(graph).name_of_class, {}
    for cls, call in enumerate(calls_of(graph, micro_batch)):
        reason = undescribed_reason(call)
        if reason is not None and cls in names:
            found[names[cls]] = reason
    return found


@dataclass(slots=True)
class _Done:
    """What a region does: strategies by kernel, how what it makes lies, and which inputs were converted."""

    strategies: dict[int, AxisStrategy] = field(default_factory=dict)
    lies: dict[int, Lie] = field(default_factory=dict)
    reached: set[tuple[int, Placement | Halo]] = field(default_factory=set)


class _Walk:
    """One axis."""

    def __init__(
        self,
        graph: Graph,
        micro_batch: int,
        outer: Axes,
        axis: tuple[str, int],
        before: Sharding,
        pins: Pinned,
        spread: Spread | None,
    ) -> None:
        self.graph, self.outer, self.pins, self.spread = graph, outer, pins, spread
        self.axis, self.members = axis
        self.wiring: Wiring = wiring_of(graph)
        self.calls = calls_of(graph, micro_batch)
        names = self.wiring.class_names
        self.classes = {names[n]: s for n, s in before.classes}
        self.overrides = {self.wiring.kernel_number[n]: s for n, s in before.overrides}
        self.wants = self._wanted()
        self.lies: dict[int, Lie] = {}
        for value, place in pins.values.items():
            parameter = graph_source(graph, self.wiring, value) == "parameter"
            self.lies[value] = Lie(place, "pinned" if parameter else "value")
        self.known: dict[object, _Done] = {}
        self.followed: list[tuple[int, Region, _Done]] = []
        self._run()

    def _wanted(self) -> dict[int, Placement]:
        """Where gradients of parameters go, those not pinned whole; carried back through views."""
        found: dict[int, Placement] = {}
        flat = self.graph.flat
        kernel_value = {op: value for value, op in parameter_values(self.graph).items()}
        for op_value, last in self.graph.gradients.items():
            place: Placement = self.pins.values.get(kernel_value[op_value], R)
            gradient = last
            while gradient not in found:
                found[gradient] = place
                k = int(flat.kernel_value_kernel[gradient])
                kernel = self.graph.kernel_classes[int(flat.kernel_class[k])]
                if not kernel.view or len(kernel.outputs) > 1:
                    break
                if place != R:
                    back = splits_following(self._call(k), self.members, 0, place, output=True)
                    if not back or not isinstance(back[0].strategy.inputs[0], Shard):
                        break
                    place = back[0].strategy.inputs[0]
                gradient = int(flat.kernel_inputs[flat.kernel_indptr[k]])
        return found

    def _call(self, kernel: int) -> Call:
        cls = int(self.graph.flat.kernel_class[kernel])
        strategy = self.overrides.get(kernel) or self.classes.get(cls, NONE)
        return use_of(self.calls[cls], strategy, self.outer).local

    def _run(self) -> None:
        wiring = self.wiring
        parts = [wiring.whole(call) for call in self.graph.calls]
        forward: list[_Done] = []
        for i, (kernels, _) in enumerate(parts):
            forward.append(self._region(i, kernels, "F", None))
        for i in range(len(parts) - 1, -1, -1):
            self._region(i, parts[i][1], "B", forward[i])

    def _region(self, call: int, kernels: tuple[int, ...], phase: Phase, forward: _Done | None) -> _Done:
        wiring = self.wiring
        region = wiring.region(wiring.calls[call], kernels)
        lies = []
        for ref in region.outside:
            value = wiring.value(call, ref)
            lie = self.lies.get(value)
            if lie is None:
                kind = graph_source(self.graph, wiring, value)
                lie = self.lies[value] = Lie(R, "parameter" if kind == "parameter" else "value")
            lies.append(lie)
        flat = {k: wiring.flat_kernel(call, k) for k, *_ in region.kernels} if self._single else {}
        pins = tuple((k, self.pins.kernels[n]) for k, n in flat.items() if n in self.pins.kernels)
        own = tuple((k, self.overrides[n]) for k, n in flat.items() if n in self.overrides)
        base = wiring.offsets[call]
        wants = tuple(
            (first + n, self.wants[base + first + n])
            for _, _, first, count in region.kernels
            for n in range(count)
            if base + first + n in self.wants
        )
        template = wiring.calls[call].template
        key = (template, phase, id(region), tuple(lies), pins, own, wants, id(forward))
        done = self.known.get(key)
        if done is None:
            start = dict(zip(region.outside, lies, strict=True))
            chosen: dict[int, AxisStrategy] = {}
            for _ in range(2):  # again, when it is known where views are better made of what is converted
                done, moved = self._follow(
                    template, region, dict(start), dict(pins), dict(own), dict(wants), forward, chosen
                )
                if not moved:
                    break
                chosen |= moved
            assert done is not None
            self.known[key] = done
        self.lies.update([(base + ref, lie) for ref, lie in done.lies.items()])
        self.followed.append((call, region, done))
        return done

    @property
    def _single(self) -> bool:
        return bool(self.pins.kernels or self.overrides)

    def _follow(
        self,
        template: int,
        region: Region,
        lies: dict[int, Lie],
        pins: Mapping[int, Placement],
        own: Mapping[int, Strategy],
        wants: Mapping[int, Placement],
        forward: _Done | None,
        views: Mapping[int, AxisStrategy],
    ) -> tuple[_Done, dict[int, AxisStrategy]]:
        """What the region does, and the strategies of views that were changed at the end."""
        done = _Done(reached=set(forward.reached) if forward is not None else set())
        base, kernels = self.wiring.class_base[template], self.graph.templates[template].kernels
        local: dict[int, Call] = {}
        viewed: dict[int, int] = {}

        def reached(ref: int, place: Placement | Halo) -> bool:
            """Whether a value is there already, or will be made of what is (see `_before_views`)."""
            if (ref, place) in done.reached:
                return True
            return place == R and ref in viewed and (lies[viewed[ref]].placement == R or reached(viewed[ref], R))

        for k, refs, first, count in region.kernels:
            strategy = own.get(k) or self.classes.get(base + k, NONE)
            call = local[k] = use_of(self.calls[base + k], strategy, self.outer).local
            wanted = {n: wants[first + n] for n in range(count) if first + n in wants}
            having = [lies[ref] for ref in refs]
            if k in pins:
                chosen = self._pinned(call, having, pins[k], base + k)
            elif k in views:
                chosen = views[k]
            else:
                chosen = choose(
                    call,
                    self.members,
                    having,
                    lambda i, p, refs=refs: reached(refs[i], p),  # type: ignore[misc]
                    view=kernels[k].view,
                    wants=wanted,
                    spread=self.spread,
                ).strategy
            done.strategies[k] = chosen
            for ref, target in zip(refs, chosen.inputs, strict=True):
                if lies[ref].placement != target:
                    done.reached.add((ref, target))
            if kernels[k].view and count == 1 and len(refs) == 1:
                viewed[first] = refs[0]
            alias = kernels[k].view and bool(refs) and having[0].kind != "value"
            for n, place in enumerate(chosen.outputs):
                lie = lies[first + n] = done.lies[first + n] = Lie(place, having[0].kind if alias else "value")
                assert lie.placement == place
        return done, self._before_views(kernels, region, lies, done, local)

    def _pinned(self, call: Call, lies: Sequence[Lie], place: Placement, cls: int) -> AxisStrategy:
        """The cheapest split whose first output lies as pinned."""
        found = splits_following(call, self.members, 0, place, output=True)
        if isinstance(place, Replicate):
            found = splits_of(call, self.members)[:1]
        if not found:
            known = dict.fromkeys(
                str(s.strategy.outputs[0]) for s in splits_of(call, self.members) if s.strategy.outputs
            )
            raise UserError(
                f"kernel {self.wiring.name_of_class[cls]} cannot make {place} on {self.axis}={self.members}; "
                f"its first output can be {', '.join(known)}"
            )

        def size(strategy: AxisStrategy) -> float:
            return sum(
                converted_bytes(shape, 4, lie.placement, target, self.members)
                for shape, lie, target in zip(call.inputs, lies, strategy.inputs, strict=True)
            )

        strategies = [s.strategy for s in found]
        best = min(strategies, key=size)
        if size(best) == inf:
            raise UserError(
                f"no conversion brings what kernel {self.wiring.name_of_class[cls]} reads to where {place} needs it on "
                f"{self.axis}; pin what it reads too"
            )
        return best

    def _before_views(
        self, kernels: Sequence[Kernel], region: Region, lies: dict[int, Lie], done: _Done, local: Mapping[int, Call]
    ) -> dict[int, AxisStrategy]:
        """Where all readers of a view, in the same op, want it one other way, convert what is viewed: it is done once
        for all views of a value, and at the border of an op."""
        changed: dict[int, AxisStrategy] = {}
        readers: dict[int, list[tuple[int, int]]] = {}
        for k, refs, _, _ in region.kernels:
            for i, ref in enumerate(refs):
                readers.setdefault(ref, []).append((k, i))
        for k, refs, first, count in reversed(region.kernels):
            if not kernels[k].view or count > 1 or len(refs) != 1 or lies[first].kind == "pinned":
                continue
            asked = readers.get(first, [])
            wanted = {done.strategies[reader].inputs[i] for reader, i in asked}
            left = done.strategies[k].outputs[0]
            if wanted == {left} or left == R or not asked or any(kernels[r].op != kernels[k].op for r, _ in asked):
                continue
            target = R if R in wanted else next(iter(wanted)) if len(wanted) == 1 else left
            if target == left or isinstance(target, Halo | Partial):
                continue
            call = local[k]
            if isinstance(target, Replicate):
                chosen = splits_of(call, self.members)[0].strategy
            else:
                back = splits_following(call, self.members, 0, target, output=True)
                if not back:
                    continue
                chosen = back[0].strategy
            if prod(call.inputs[0]) > prod(call.outputs[0]):
                continue
            done.strategies[k] = changed[k] = chosen
            done.reached.discard((first, target))
            if lies[refs[0]].placement != chosen.inputs[0]:
                done.reached.add((refs[0], chosen.inputs[0]))
            lies[first] = done.lies[first] = replace(lies[first], placement=target)
        return changed

    def result(self) -> Sharding:
        """The most frequent strategy of a class stands for it; other instances are overrides."""
        wiring = self.wiring
        votes: dict[int, Counter[int]] = {}
        by_id: dict[int, _Done] = {}
        rows: list[tuple[int, int, int, _Done]] = []
        for call, region, done in self.followed:
            by_id[id(done)] = done
            cls = wiring.class_base[wiring.calls[call].template]
            for k, *_ in region.kernels:
                votes.setdefault(cls + k, Counter())[id(done)] += 1
                rows.append((call, k, cls + k, done))
        shared: dict[int, AxisStrategy] = {}
        for cls, counts in votes.items():
            k = cls - wiring.class_base[_template_of(wiring, cls)]
            tally: Counter[AxisStrategy] = Counter()
            for number, n in counts.items():
                tally[by_id[number].strategies[k]] += n
            shared[cls] = tally.most_common(1)[0][0]
        classes = {
            cls: merged(self.classes.get(cls, NONE), self.axis, strategy) for cls, strategy in sorted(shared.items())
        }
        overrides: dict[int, Strategy] = {}
        for call, k, cls, done in rows:
            numbered = self.overrides and wiring.flat_kernel(call, k)
            if done.strategies[k] != shared[cls] or (self.overrides and numbered in self.overrides):
                number = wiring.flat_kernel(call, k)
                outer = self.overrides.get(number, self.classes.get(cls, NONE))
                overrides[number] = merged(outer, self.axis, done.strategies[k])
        return Sharding(
            classes=tuple((wiring.name_of_class[cls], s) for cls, s in classes.items() if s.axes),
            overrides=tuple((wiring.ids[k], overrides[k]) for k in sorted(overrides)),
        )


def merged(outer: Strategy, axis: str, strategy: AxisStrategy) -> Strategy:
    """A strategy with one axis more; one that replicates is not named."""
    if all(p == R for p in (*strategy.inputs, *strategy.outputs)):
        return outer
    return Strategy((*outer.axes, (axis, strategy)))


def _template_of(wiring: Wiring, cls: int) -> int:
    t = len(wiring.class_base) - 2
    while wiring.class_base[t] > cls:
        t -= 1
    return t


def graph_source(graph: Graph, wiring: Wiring, value: int) -> str | None:
    """Kind of the source behind a value; None if a kernel makes it."""
    if value < len(graph.sources):
        return graph.sources[value].kind
    if int(graph.flat.kernel_value_kernel[value]) >= 0:
        return None
    call = int(graph.kernel_value_offsets.searchsorted(value, side="right")) - 1
    return graph.templates[graph.calls[call].template].sources[value - wiring.offsets[call]].kind
