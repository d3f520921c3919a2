"""A trace of four equal blocks made as deep as the module: the inner block repeated, everything around it kept.

The blocks split the rows into segments: A (all up to and with block 0), B1 and B2 (blocks 1 and 2) and C (block 3
and the rest).
If B1 and B2 are the same row by row, the refs of the two tell what a further block refers to: its own rows, the same
place
one block earlier (B2 refers to B1 where B1 refers to A), one block later, or a value that all blocks share.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from simpart.capture._trace import KernelRow, OpRow, Ref, Trace
from simpart.graph import Source

__all__ = ["SHALLOW_DEPTH", "Irregular", "Names", "Stack", "expand", "expand_rows", "segments"]

SHALLOW_DEPTH = 4


class Irregular(Exception):
    """The rows do not prove that deeper blocks look like these; capture the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A list of blocks: its dotted name in the module and its true depth."""

    name: str
    depth: int

    def block(self, path: str) -> int | None:
        """Number of the block that a dotted path lies in."""
        if not path.startswith(self.name + "."):
            return None
        head = path[len(self.name) + 1 :].split(".", 1)[0]
        return int(head) if head.isdigit() else None

    def renamed(self, path: str, block: int) -> str:
        """The path in another block; a path outside stays.

        >>> Stack(name="h", depth=9).renamed("h.2.mlp", 7)
        'h.7.mlp'
        """
        old = self.block(path)
        if old is None:
            return path
        return f"{self.name}.{block}{path[len(self.name) + 1 + len(str(old)) :]}"

    def true_block(self, shallow: int) -> int:
        """Number in the full module of a block of the shallow one."""
        return shallow if shallow < 2 else self.depth - SHALLOW_DEPTH + shallow

    def shallow(self, path: str) -> str:
        """The path in the shallow module of the same thing; block 1 stands for all inner blocks."""
        block = self.block(path)
        if block is None or block == 0:
            return path
        return self.renamed(path, SHALLOW_DEPTH - 1 if block == self.depth - 1 else 1)


def segments(paths: Sequence[str], stack: Stack) -> list[int]:
    """Segment 0 … 3 of each row; raises Irregular if the blocks don't run once each, in order."""
    blocks = [stack.block(path) for path in paths]
    starts = [next((i for i, block in enumerate(blocks) if block == n), None) for n in range(SHALLOW_DEPTH)]
    if None in starts or starts != sorted(starts, key=lambda s: -1 if s is None else s):
        raise Irregular(f"blocks of {stack.name} do not run in order")
    found, segment = [], 0
    for i, block in enumerate(blocks):
        if segment < SHALLOW_DEPTH - 1 and i == starts[segment + 1]:
            segment += 1
        if block is not None and block != segment:
            raise Irregular(f"blocks of {stack.name} do not run once each")
        found.append(segment)
    return found


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the sources of the shallow form, and where each stands in the deep form."""

    stack: Stack
    shallow: Sequence[str]
    deep: Mapping[str, int]

    def block(self, source: int) -> int | None:
        return self.stack.block(self.shallow[source])

    def twins(self, one: int, two: int) -> bool:
        """True if the two are the same tensor of block 1 and of block 2."""
        name = self.shallow[one]
        return self.stack.block(name) == 1 and self.stack.renamed(name, 2) == self.shallow[two]

    def in_block(self, source: int, block: int) -> Ref:
        return self._deep(self.stack.renamed(self.shallow[source], block))

    def _deep(self, name: str) -> Ref:
        if name not in self.deep:
            raise Irregular(f"the whole module has no tensor {name}")
        return -1, self.deep[name]

    def outside(self, source: int) -> Ref:
        """A source as rows outside of the inner blocks read it; they may not read an inner block's own."""
        block = self.block(source)
        if block is None:
            return self._deep(self.shallow[source])
        if block in (1, 2):
            raise Irregular("a tensor of an inner block is read outside of it")
        return self.in_block(source, self.stack.true_block(block))


@dataclass(frozen=True, slots=True)
class Deep:
    """Rows of the deep form: `rows` holds the shallow row behind each and its block (-1 outside of inner blocks),
    `inputs` what
    it reads; `place` says where a shallow row of a block went. Rows of B2 stand as copies of B1's."""

    rows: list[tuple[int, int]]
    inputs: list[tuple[Ref, ...]]
    place: dict[tuple[int, int], int]
    to_first: dict[int, int]
    segment: Sequence[int]
    last: int

    def at(self, row: int, block: int = -1) -> int:
        """Deep row of a shallow row; rows of inner blocks without a block are those of B1 and B2 themselves."""
        if self.segment[row] in (0, 3):
            return self.place[row, -1]
        if self.segment[row] == 2:
            row, block = self.to_first[row], self.last if block < 0 else block
        return self.place[row, 1 if block < 0 else block]


def expand_rows(
    keys: Sequence[Hashable], inputs: Sequence[Sequence[Ref]], segment: Sequence[int], names: Names
) -> Deep:
    """Repeat segment 1 for blocks 2 … depth - 3; segment 2 is block depth - 2. `keys` are equal for rows that do the
    same.

    Raises Irregular when the rows don't prove what a further block would be.
    """
    last = names.stack.depth - 2
    rows: list[tuple[int, int]] = []
    to_first: dict[int, int] = {}
    pieces = [(s, [i for i, _ in group]) for s, group in groupby(enumerate(segment), key=lambda pair: pair[1])]
    while pieces:
        s, piece = pieces.pop(0)
        if s in (0, 3):
            rows += [(row, -1) for row in piece]
            continue
        if not pieces or pieces[0][0] != 3 - s:
            raise Irregular("the rows of an inner block are not together")
        other = pieces.pop(0)[1]
        one, two = (piece, other) if s == 1 else (other, piece)
        if [keys[i] for i in one] != [keys[i] for i in two]:
            raise Irregular("two inner blocks differ")
        to_first.update(zip(two, one, strict=True))
        rows += [(row, r) for r in (range(1, last + 1) if s == 1 else range(last, 0, -1)) for row in one]
    place = {pair: i for i, pair in enumerate(rows)}
    deep = Deep(rows, [], place, to_first, segment, last)
    to_second = {one: two for two, one in to_first.items()}
    rules = {one: _rules(inputs[one], inputs[two], segment, to_first, names) for one, two in to_second.items()}

    def outside(ref: Ref) -> Ref:
        return names.outside(ref[1]) if ref[0] < 0 else (deep.at(ref[0]), ref[1])

    for row, r in rows:
        found: list[Ref] = []
        if r < 0:
            _check_outside(row, inputs[row], segment)
            deep.inputs.append(tuple(map(outside, inputs[row])))
            continue
        for kind, ref1, ref2 in rules[row]:
            if kind == "own source":
                found.append(names.in_block(ref1[1], r))
            elif kind == "own":
                found.append((place[ref1[0], r], ref1[1]))
            elif kind == "previous":
                found.append(outside(ref1) if r == 1 else (place[ref2[0], r - 1], ref2[1]))
            elif kind == "next":
                found.append(outside(ref2) if r == last else (place[to_first[ref1[0]], r + 1], ref1[1]))
            else:
                found.append(outside(ref1))
        deep.inputs.append(tuple(found))
    return deep


def _rules(
    one: Sequence[Ref], two: Sequence[Ref], segment: Sequence[int], to_first: Mapping[int, int], names: Names
) -> list[tuple[str, Ref, Ref]]:
    """What each input of a row of B1, and of its twin in B2, means for a block in general."""
    if len(one) != len(two):
        raise Irregular("two inner blocks read different numbers of values")
    found = []
    for ref1, ref2 in zip(one, two, strict=True):
        if ref1 == ref2 and (ref1[0] < 0 or segment[ref1[0]] in (0, 3)):
            kind = "shared"
        elif ref1[0] < 0 and ref2[0] < 0 and names.twins(ref1[1], ref2[1]):
            kind = "own source"
        elif min(ref1[0], ref2[0]) < 0 or ref1[1] != ref2[1]:
            raise Irregular("two inner blocks read values that do not correspond")
        elif (segment[ref1[0]], segment[ref2[0]]) == (1, 2) and to_first[ref2[0]] == ref1[0]:
            kind = "own"
        elif (segment[ref1[0]], segment[ref2[0]]) == (0, 1):
            kind = "previous"
        elif (segment[ref1[0]], segment[ref2[0]]) == (2, 3):
            kind = "next"
        else:
            raise Irregular("two inner blocks read values that do not correspond")
        found.append((kind, ref1, ref2))
    return found


def _check_outside(row: int, refs: Sequence[Ref], segment: Sequence[int]) -> None:
    """What stands before the second block may not look into the third, nor the rest into the second: depth could
    matter.
    """
    if any(ref[0] >= 0 and (segment[row], segment[ref[0]]) in ((0, 2), (3, 1)) for ref in refs):
        raise Irregular("a value of an inner block is read far away")


def expand(trace: Trace, stack: Stack, deep_sources: Sequence[Source]) -> Trace:
    """The trace with one stack at its true depth. `deep_sources` names the sources that the result has, in order."""
    names = Names(stack, [_key(s) for s in trace.sources], {_key(s): i for i, s in enumerate(deep_sources)})
    op_segment = segments([row.path for row in trace.ops], stack)
    _check_groups(trace.ops, op_segment)
    ops = expand_rows([_op_key(r, stack) for r in trace.ops], [r.inputs for r in trace.ops], op_segment, names)
    local = _local_numbers(op_segment)
    kernels = expand_rows(
        [_kernel_key(row, local[row.op]) for row in trace.kernels],
        [row.inputs for row in trace.kernels],
        [op_segment[row.op] for row in trace.kernels],
        names,
    )
    spec = {_key(s): s.spec for s in trace.sources}
    if missing := [s.name for s in deep_sources if stack.shallow(_key(s)) not in spec]:
        raise Irregular(f"{missing[0]} has no counterpart among the captured blocks")
    shallow = {_key(s): i for i, s in enumerate(trace.sources)}
    return replace(
        trace,
        sources=tuple(replace(s, spec=spec[stack.shallow(_key(s))]) for s in deep_sources),
        ops=tuple(
            replace(
                trace.ops[row],
                path=_path(trace.ops[row].path, stack, r),
                inputs=refs,
                group=ops.at(trace.ops[row].group, r),
            )
            for (row, r), refs in zip(ops.rows, ops.inputs, strict=True)
        ),
        kernels=tuple(
            replace(trace.kernels[row], op=ops.at(trace.kernels[row].op, r), inputs=refs)
            for (row, r), refs in zip(kernels.rows, kernels.inputs, strict=True)
        ),
        loss=(ops.at(trace.loss[0]), trace.loss[1]),
        gradients=tuple(_gradients(dict(trace.gradients), stack, [_key(s) for s in deep_sources], shallow, kernels)),
    )


def _key(source: Source) -> str:
    """A name among all sources: inputs and constants have names of their own kind."""
    return source.name if source.kind in ("parameter", "buffer") else f"<{source.kind}>.{source.name}"


def _path(path: str, stack: Stack, r: int) -> str:
    block = stack.block(path)
    return path if block is None else stack.renamed(path, r if r >= 0 else stack.true_block(block))


def _gradients(
    old: Mapping[int, Ref], stack: Stack, deep: Sequence[str], shallow: Mapping[str, int], kernels: Deep
) -> Iterator[tuple[int, Ref]]:
    """Gradients of all parameters; those of inner blocks must come from their own rows in the same way."""
    for i, name in enumerate(deep):
        source = shallow[stack.shallow(name)]
        if source not in old:
            continue
        row, k = old[source]
        block = stack.block(name)
        if block is None or block in (0, stack.depth - 1):
            yield i, (row, k) if row < 0 else (kernels.at(row), k)
            continue
        twin = old.get(shallow[stack.renamed(name, 2)])
        if row < 0 or kernels.segment[row] != 1 or twin is None or (kernels.to_first.get(twin[0]), twin[1]) != (row, k):
            raise Irregular("gradients of inner blocks do not correspond")
        yield i, (kernels.at(row, block), k)


def _local_numbers(segment: Sequence[int]) -> list[int]:
    """Position of each row in its segment; -1 outside of inner blocks."""
    counts = [0] * SHALLOW_DEPTH
    found = []
    for s in segment:
        found.append(counts[s] if s in (1, 2) else -1)
        counts[s] += 1
    return found


def _op_key(row: OpRow, stack: Stack) -> Hashable:
    path = stack.renamed(row.path, 0)
    return (path, row.target, row.arguments, row.outputs, row.carries_gradient, row.mutates_buffer)


def _kernel_key(row: KernelRow, owner: int) -> Hashable:
    return (owner, row.phase, row.target, row.arguments, row.outputs, row.view, row.accumulates)


def _check_groups(ops: Sequence[OpRow], segment: Sequence[int]) -> None:
    local = _local_numbers(segment)
    inner: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    for i, row in enumerate(ops):
        if segment[row.group] != segment[i]:
            raise Irregular("an indivisible group spans two blocks")
        inner[segment[i]].append(local[row.group])
    if inner[1] != inner[2]:
        raise Irregular("two inner blocks have different groups")
