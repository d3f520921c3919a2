"""Graphs written down op by op, with costs that are whole numbers: what a simulated step takes can be worked out by
hand.

    toy = Toy()
    x = toy.input(4)
    toy.loss(toy.act(toy.linear(x, toy.parameter("w", 4, 4))))
    graph = toy.graph()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from simpart.cost import PROVENANCES, CollectiveTable, Costs, Estimate, SignatureTable
from simpart.graph import Call, Graph, Kernel, Op, Source, Template
from simpart.graph.sizes import Affine, TensorSpec
from simpart.hardware import Cluster, Device, LinkLevel

Value = str
"""An op-level value; `d value` is its gradient."""


@dataclass
class _Node:
    path: str
    inputs: list[Value]
    output: Value
    spec: TensorSpec
    gradient: bool
    forward: list[Value]
    backward: list[tuple[list[Value], Value, TensorSpec]] = field(default_factory=list)
    view: bool = False


class Toy:
    """Every op is a template of its own. Gradients of a value read several times are added by the earliest reader."""

    def __init__(self) -> None:
        self.sources: dict[Value, Source] = {}
        self.nodes: list[_Node] = []
        self.spec: dict[Value, TensorSpec] = {}

    def parameter(self, name: str, rows: int, columns: int, trainable: bool = True) -> Value:
        spec = TensorSpec((rows, columns), "float32", (0, 1))
        self.sources[name] = Source(kind="parameter", name=name, spec=spec, trainable=trainable)
        self.spec[name] = spec
        return name

    def input(self, width: int, name: str = "0") -> Value:
        spec = TensorSpec((Affine(0, 1), width), "float32", (0, 1))
        self.sources[name] = Source(kind="input", name=name, spec=spec)
        self.spec[name] = spec
        return name

    def linear(self, x: Value, weight: Value) -> Value:
        """Backward reads the input and the weight."""
        width = self.spec[weight].dims[0]
        return self._add("linear", [x, weight], TensorSpec((Affine(0, 1), width), "float32", (0, 1)), [x, weight])

    def act(self, x: Value) -> Value:
        """Backward reads the input."""
        return self._add("act", [x], self.spec[x], [x])

    def view(self, x: Value) -> Value:
        return self._add("view", [x], self.spec[x], [], view=True)

    def add(self, x: Value, y: Value) -> Value:
        """Backward reads nothing of forward."""
        return self._add("add", [x, y], self.spec[x], [])

    def loss(self, x: Value) -> Value:
        return self._add("loss", [x], TensorSpec((), "float32", ()), [])

    def _add(self, kind: str, inputs: list[Value], spec: TensorSpec, kept: list[Value], view: bool = False) -> Value:
        number = len(self.nodes)
        output = f"{kind}{number}"
        gradient = any(self._wants(v) for v in inputs)
        self.nodes.append(_Node(f"{kind}_{number}", inputs, output, spec, gradient, kept, view=view))
        self.spec[output] = spec
        return output

    def _wants(self, value: Value) -> bool:
        if value in self.sources:
            return self.sources[value].trainable
        return next(node.gradient for node in self.nodes if node.output == value)

    def graph(self) -> Graph:
        self._differentiate()
        numbers = {value: i for i, value in enumerate(self.sources)}
        kernel_numbers = dict(numbers)
        count, kernel_count = len(numbers), len(numbers)
        for node in self.nodes:
            numbers[node.output] = count
            count += 1
            for name in (node.output, *(made for _, made, _ in node.backward)):
                kernel_numbers[name] = kernel_count
                kernel_count += 1
        templates: list[Template] = []
        calls: list[Call] = []
        for node in self.nodes:
            rows = [(node.inputs, node.output, node.spec, "F"), *((*b, "B") for b in node.backward)]
            slots: dict[Value, int] = {}
            local = {made: i for i, (_, made, _, _) in enumerate(rows)}
            kernels = []
            for reads, _, spec, phase in rows:
                inputs = tuple(local[v] if v in local else ~slots.setdefault(v, len(slots)) for v in reads)
                target = f"toy.{node.path.split('_')[0]}.{phase}"
                view = node.view
                kernels.append(
                    Kernel(op=0, phase=phase, target=target, inputs=inputs, outputs=(spec,), arguments="{}", view=view)  # type: ignore[arg-type]
                )
            op = Op(
                path=node.path, target=f"toy.{node.path.split('_')[0]}", kind="pointwise",
                inputs=tuple(~i for i in range(len(node.inputs))), outputs=(node.spec,), carries_gradient=node.gradient,
            )  # fmt: skip
            templates.append(Template(sources=(), ops=(op,), kernels=tuple(kernels)))
            calls.append(
                Call(template=len(calls), externals=tuple(numbers[v] for v in node.inputs),
                     kernel_externals=tuple(kernel_numbers[v] for v in slots))
            )  # fmt: skip
        gradients = {numbers[v]: kernel_numbers[f"d {v}"] for v, s in self.sources.items() if s.trainable}
        return Graph(
            model="toy", precision="float32", sources=tuple(self.sources.values()), templates=tuple(templates),
            calls=tuple(calls), loss=numbers[self.nodes[-1].output], gradients=gradients,
        )  # fmt: skip

    def _differentiate(self) -> None:
        needed = {self.nodes[-1].output}
        for node in reversed(self.nodes):
            needed |= set(node.inputs) if node.output in needed else set()
        self.nodes = [node for node in self.nodes if node.output in needed]
        self.sources = {value: source for value, source in self.sources.items() if value in needed}
        readers: dict[Value, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(i)
        for i, node in reversed(list(enumerate(self.nodes))):
            node.backward = []
            for value in dict.fromkeys(node.inputs):
                if not node.gradient or not self._wants(value):
                    continue
                kept = [v for v in node.forward if v != value or node.path.startswith("act")]
                above = [] if i == len(self.nodes) - 1 else [f"d {node.output}"]
                users = readers[value]
                mine = f"d {value}" if users == [i] else f"d {value} of {i}"
                node.backward.append((above + kept, mine, self.spec[value]))
                if i == users[0] and len(users) > 1:  # the last to run backward adds up
                    parts = [f"d {value} of {u}" for u in users]
                    node.backward.append((parts, f"d {value}", self.spec[value]))


def chain(layers: int, width: int = 4, tied: bool = False, skip: bool = False) -> Graph:
    """Layers of linear and act (two forward kernels, three backward) and a loss; the first linear has no input
    gradient.

    `tied` makes the last linear use the first one's weight, `skip` adds the first layer's output to the last one's.
    """
    toy = Toy()
    x = toy.input(width)
    first = None
    for i in range(layers):
        weight = "w0" if tied and i == layers - 1 else toy.parameter(f"w{i}", width, width)
        x = toy.act(toy.linear(x, weight))
        first = first or x
    if skip:
        assert first is not None
        x = toy.add(x, first)
    toy.loss(x)
    return toy.graph()


class UnitCompute:
    """Every kernel that is no view takes one second, on devices named slow two; views, losses and updates nothing."""

    def __init__(self, log_sd: tuple[float, float] = (0.0, 0.0), free: tuple[str, ...] = ("loss", "simpart.")) -> None:
        self.log_sd, self.free = log_sd, free

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        speed = 2.0 if device.name == "slow" else 1.0
        seconds = [0.0 if s.view or any(part in s.target for part in self.free) else speed for s in table.signatures]
        return _estimate(seconds, "compute", self.log_sd)


class UnitLinks:
    """A transfer or collective takes `seconds[kind]` per byte; remembers what it was asked."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})
        self.asked: list[CollectiveTable] = []

    def estimate(self, table: CollectiveTable, cluster: Cluster) -> Estimate:
        self.asked.append(table)
        return _estimate([self.seconds.get(c.kind, 0.0) * c.bytes for c in table.collectives], "link", (0.0, 0.0))


def _estimate(seconds: list[float], family: str, log_sd: tuple[float, float]) -> Estimate:
    n = len(seconds)
    return Estimate(
        mean_s=np.array(seconds, dtype=np.float64),
        family=np.zeros(n, dtype=np.int64),
        families=(family,),
        shared_log_sd=np.full(n, log_sd[0]),
        own_log_sd=np.full(n, log_sd[1]),
        provenance=np.full(n, PROVENANCES.index("analytic")),
    )


def device(name: str = "fast", memory_bytes: int = 10**9) -> Device:
    """Moves bytes at no time worth counting, so that only what the toy costs say remains."""
    return Device(
        name=name, kind="cpu", memory_bytes=memory_bytes, memory_bytes_per_s=1e30,
        peak_flops_per_s=(("float32", 1e12),), kernel_launch_s=0.0,
    )  # fmt: skip


def cluster(*devices: Device) -> Cluster:
    level = LinkLevel(name="net", size=len(devices), bytes_per_s=1e9, latency_s=0.0)
    return Cluster(name="toys", devices=tuple((d, 1) for d in devices), levels=(level,))


def costs(
    compute: UnitCompute | None = None,
    links: UnitLinks | None = None,
    step_overhead_s: float = 0.0,
    action_overhead_s: float = 0.0,
) -> Costs:
    return Costs(
        compute=compute or UnitCompute(),
        communication=links or UnitLinks(),
        step_overhead_s=step_overhead_s,
        action_overhead_s=action_overhead_s,
    )
