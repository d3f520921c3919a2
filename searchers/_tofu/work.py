"""What a partition search sees of a model: kernels with their requests, values to be cut, groups that decide together.

Kernels and values are nodes: kernel i is node i, value j node `len(kernels) + j`. The nodes of a group have one
decision, an *assignment*: a way to cut each of its values and a request of each of its kernels that fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.searchers._tofu.regions import Region, cut
from simpart.tdl import Call, local_call, splits_following, splits_of

__all__ = [
    "AtenKernel", "EinsumKernel", "Kernel", "KernelState", "Link", "Request", "Rules", "Value", "Workload", "place_at",
    "whole_request",
]  # fmt: skip

R = Replicate()


@dataclass(frozen=True, slots=True)
class Request:
    """One way to run a kernel on an axis. `exchanged` are elements that the kernel itself all-reduces, `after` is what
    each member runs."""

    label: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    exchanged: int = 0
    after: Kernel | None = None

    @property
    def cuts(self) -> bool:
        """Whether the members share the work."""
        return any(isinstance(p, Shard) for p in (*self.inputs, *self.outputs))


class Kernel(Protocol):
    """An operator that can be asked how it may be cut, given that neighbours would like these cuts of its tensors."""

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]: ...

    def requests(self, parts: int, wished: frozenset[tuple[bool, int, Shard]]) -> tuple[Request, ...]: ...


@dataclass(frozen=True, slots=True)
class EinsumKernel:
    """One index per dim and one request per index, as in the paper's tables; indices of size not divisible by the
    parts are left whole."""

    indices: tuple[str, ...]
    result: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        sizes = dict(self.sizes)
        return tuple(tuple(sizes[i] for i in operand) for operand in self.indices)

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        sizes = dict(self.sizes)
        return (tuple(sizes[i] for i in self.result),)

    def requests(self, parts: int, wished: frozenset[tuple[bool, int, Shard]]) -> tuple[Request, ...]:
        found = []
        for name, size in self.sizes:
            if size % parts == 0:
                smaller = tuple((n, s // parts if n == name else s) for n, s in self.sizes)
                inputs = tuple(Shard(o.index(name)) if name in o else R for o in self.indices)
                output = Shard(self.result.index(name)) if name in self.result else Partial()
                found.append(Request(name, inputs, (output,), 0, EinsumKernel(self.indices, self.result, smaller)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class AtenKernel:
    """A kernel of a captured graph; its requests are derived from its description. Sums that come in as terms of a
    linear kernel, and halos, are left out: the one is no partition of the paper, the other cannot be run. Nor can a
    table whose rows are looked up be cut along them twice: `is_table_cut` says that it has been."""

    call: Call
    is_table_cut: bool = False

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        return self.call.inputs

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        return self.call.outputs

    def requests(self, parts: int, wished: frozenset[tuple[bool, int, Shard]]) -> tuple[Request, ...]:
        splits = list(splits_of(self.call, parts))
        for is_output, position, shard in sorted(wished, key=str):
            splits += splits_following(self.call, parts, position, shard, output=is_output)
        found: dict[object, Request] = {}
        for split in splits:
            places = (*split.strategy.inputs, *split.strategy.outputs)
            if split.strategy in found or not any(isinstance(p, Shard) for p in places):
                continue
            if any(isinstance(p, Halo) for p in places) or split.windows or (split.masked and self.is_table_cut):
                continue
            inputs = tuple(p for p in split.strategy.inputs if not isinstance(p, Halo))
            found[split.strategy] = Request(
                split.label, inputs, split.strategy.outputs, sum(e.elements for e in split.exchanges),
                AtenKernel(local_call(self.call, split, parts), self.is_table_cut or bool(split.masked)),
            )  # fmt: skip
        return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor, `count` of them. `is_free`: it may lie any way at no cost before it is used (weights, inputs). `row` is
    the dim along which samples differ, 0 for a parameter; in runs of `row_block` where samples do not come first."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 1
    count: int = 1
    is_parameter: bool = False
    is_free: bool = False
    row: int = 0
    row_block: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """`count` times this kernel reads (or makes) a value at this position; `tensors` of them are different (0: all)."""

    kernel: int
    position: int
    value: int
    count: int
    makes: bool
    tensors: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """`counts[i]` is how often kernel i runs; `groups` are sets of nodes, all together every node once."""

    names: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    counts: tuple[int, ...]
    values: tuple[Value, ...]
    links: tuple[Link, ...]
    groups: tuple[tuple[int, ...], ...]
    undescribed: tuple[tuple[int, str], ...] = ()
    group_of: tuple[int, ...] = field(init=False)
    links_of: tuple[tuple[Link, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        where = [0] * (len(self.kernels) + len(self.values))
        for number, members in enumerate(self.groups):
            for node in members:
                where[node] = number
        object.__setattr__(self, "group_of", tuple(where))
        links: list[list[Link]] = [[] for _ in where]
        for link in self.links:
            links[link.kernel].append(link)
            links[len(self.kernels) + link.value].append(link)
        object.__setattr__(self, "links_of", tuple(map(tuple, links)))

    def node_of_value(self, value: int) -> int:
        return len(self.kernels) + value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a search may choose. `reduce`: kernels may leave terms to be summed (ICML18: no).

    Beyond the paper: `whole`, values may also stay whole. `unnested` is what cutting a value once more along a dim
    counts, as a part of moving it all: conversions of nested cuts undo the inner one first when they run. `share`:
    what several kernels need whole is gathered once, as plans run; so is what a loop reads again and again.
    """

    reduce: bool = True
    whole: bool = False
    unnested: float = 0.0
    share: bool = False

    def allows(self, request: Request) -> bool:
        return self.reduce or not any(isinstance(p, Partial) for p in request.outputs)


# --- one node's state and options ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class KernelState:
    """A kernel after some steps: what each group runs, and the regions of its tensors."""

    kernel: Kernel
    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]

    @staticmethod
    def of(kernel: Kernel) -> KernelState:
        return KernelState(kernel, tuple(map(Region, kernel.inputs)), tuple(map(Region, kernel.outputs)))

    def region(self, link: Link) -> Region:
        return self.outputs[link.position] if link.makes else self.inputs[link.position]

    def after(self, request: Request, parts: int) -> KernelState:
        def each(regions: Sequence[Region], places: Sequence[Placement]) -> tuple[Region, ...]:
            return tuple(cut(region, place, parts) for region, place in zip(regions, places, strict=True))

        kernel = self.kernel if request.after is None else request.after
        return KernelState(kernel, each(self.inputs, request.inputs), each(self.outputs, request.outputs))


def whole_request(kernel: Kernel) -> Request:
    """Every member runs the whole kernel."""
    return Request("replicate", (R,) * len(kernel.inputs), (R,) * len(kernel.outputs), 0, None)


def place_at(request: Request, link: Link) -> Placement:
    return request.outputs[link.position] if link.makes else request.inputs[link.position]
