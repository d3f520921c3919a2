"""Recomputed regions: the instructions of each become one that forward keeps nothing inside of."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from simpart.errors import UserError
from simpart.validate._program import Instruction, Program, Recomputed, Slot

__all__ = ["with_regions"]


def with_regions(
    instructions: Sequence[Instruction],
    regions: Sequence[Collection[int]],
    groups: Sequence[int],
    *,
    keep: set[int],
    written: set[int],
    slots: int,
) -> list[Instruction]:
    """Gather each region (a set of ops) into one instruction.

    `groups[op]` is the smallest op of its indivisible group, which goes wherever one of its ops goes; `keep` are
    slots needed after the last instruction, `written` those of buffers that ops change. Raises UserError for a region
    that an op outside both depends on and feeds.
    """
    unit_of = _units({i.owner for i in instructions}, regions, groups)
    members: dict[int, list[Instruction]] = {}
    for instruction in instructions:
        members.setdefault(unit_of[instruction.owner], []).append(instruction)
    recomputed = {unit_of[op] for region in regions for op in region if op in unit_of}
    read_by = {unit: set().union(*(i.reads for i in inside)) for unit, inside in members.items()}
    readers: dict[int, set[int]] = {}
    for unit, slots_read in read_by.items():
        for slot in slots_read:
            readers.setdefault(slot, set()).add(unit)
    result: list[Instruction] = []
    for unit in _order(members, read_by, readers):
        inside = members[unit]
        if unit not in recomputed:
            result.extend(inside)
            continue
        made = {slot for i in inside for slot in i.outputs}
        inputs = sorted(read_by[unit] - made)
        outputs = sorted(slot for slot in made if slot in keep or readers.get(slot, set()) - {unit})
        program = Program(inside, inputs, outputs, slots)
        copied = frozenset(i for i, slot in enumerate(inputs) if slot in written)
        name = f"{inside[0].name} … {inside[-1].name} (recomputed)"
        arguments = tuple(Slot(s) for s in inputs)
        call = Recomputed(program, copied)
        result.append(
            Instruction(
                owner=inside[0].owner, name=name, call=call, arguments=arguments, outputs=tuple(outputs), spread=True
            )
        )
    return result


def _units(ops: set[int], regions: Sequence[Collection[int]], groups: Sequence[int]) -> dict[int, int]:
    """Ops that must stay together, named by the smallest: regions and indivisible groups, joined where they overlap."""
    root = {op: op for op in ops}

    def find(op: int) -> int:
        while root[op] != op:
            op = root[op]
        return op

    def join(a: int, b: int) -> None:
        a, b = find(a), find(b)
        root[max(a, b)] = min(a, b)

    for region in regions:
        inside = sorted(op for op in region if op in ops)
        for op in inside[1:]:
            join(inside[0], op)
    for op in ops:
        if groups[op] in ops:
            join(groups[op], op)
    return {op: find(op) for op in ops}


def _order(
    members: dict[int, list[Instruction]], read_by: dict[int, set[int]], readers: dict[int, set[int]]
) -> list[int]:
    """Units so that each comes after what it reads, else in the order of their first ops."""
    maker = {slot: unit for unit, inside in members.items() for i in inside for slot in i.outputs}
    waits = {unit: {maker[s] for s in read_by[unit] if s in maker} - {unit} for unit in members}
    ready = [unit for unit, needs in waits.items() if not needs]
    heapq.heapify(ready)
    done: list[int] = []
    while ready:
        unit = heapq.heappop(ready)
        done.append(unit)
        following = set().union(*(readers.get(s, set()) for i in members[unit] for s in i.outputs)) - {unit}
        for reader in following:
            waits[reader].discard(unit)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(done) < len(members):
        stuck = min(set(members) - set(done))
        name = members[stuck][0].name
        raise UserError(
            f"the recomputed region at op {name} needs a result of an op that itself needs the region; "
            "put that op into the region or end the region before it"
        )
    return done
