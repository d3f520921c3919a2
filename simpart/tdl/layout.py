"""How cutting a loop cuts a tensor dim: an index and a cut digit give a shard, a strided shard, or a shard with a
halo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from simpart.placement import Halo, Shard
from simpart.tdl.index import Index

__all__ = ["Cut", "Cuts", "DimCut", "Unsplittable", "Window", "chunk", "cut_for", "cuts_of", "dim_cut"]

Key = tuple[str, int]


class Unsplittable(Exception):
    """A cut that this description does not allow; caught where cuts are tried."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The digit of a loop that is divided among the members: steps `(v // low) % (high / low)`, in consecutive
    chunks."""

    low: int
    high: int


Cuts = Mapping[Key, Cut]


@dataclass(frozen=True, slots=True)
class Window:
    """What member `part` reads of a dim when its loop is cut with a halo: from `step · first + before` to `step ·
    last + after`, both inclusive, for the loop steps first … last of the part. It may leave the tensor: zeros lie
    there."""

    step: int
    before: int
    after: int
    loop: int

    def bounds(self, members: int, part: int) -> tuple[int, int]:
        """First and last element (inclusive) of one member."""
        first, size = chunk(self.loop, members, part)
        return self.step * first + self.before, self.step * (first + size - 1) + self.after


@dataclass(frozen=True, slots=True)
class DimCut:
    """How one dim lies: its placement, and the window if it is read with a halo."""

    placement: Shard | Halo
    window: Window | None = None


def chunk(size: int, members: int, part: int) -> tuple[int, int]:
    """Start and length of a member's chunk: ceil(size / members) each, the last ones less."""
    each = ceil(size / members)
    start = min(part * each, size)
    return start, min(each, size - start)


def cuts_of(index: Index, cuts: Cuts) -> list[tuple[int, int, int]]:
    """(term number, low, high) of the digits of an index that are cut; raises Unsplittable where a cut straddles
    digits."""
    found = []
    for number, (digit, _) in enumerate(index.terms):
        cut = cuts.get(digit.variable.key)
        if cut is None or cut.high <= digit.low or cut.low >= digit.top:
            continue
        if cut.low % digit.low or digit.top % cut.high or cut.low < digit.low or cut.high > digit.top:
            raise Unsplittable
        found.append((number, cut.low, cut.high))
    return found


def dim_cut(
    index: Index, dim: int, size: int, cuts: Cuts, members: int, fixed: frozenset[Key] = frozenset()
) -> DimCut | None:
    """How dim `dim` of this size is divided when these loops are cut; None if it is not. Loops in `fixed` read the
    neighbourhood of what another loop reads, however far it reaches."""
    found = cuts_of(index, cuts)
    if not found:
        return None
    if len(found) > 1:
        raise Unsplittable
    number, low, high = found[0]
    digit, factor = index.terms[number]
    if factor != int(factor) or factor < 1 or index.constant != int(index.constant):
        raise Unsplittable
    unit, span = int(factor) * low // digit.low, int(factor) * high // digit.low
    least, most, upper = int(index.constant), int(index.constant) + unit - int(factor), high != digit.top
    for k, (other, coefficient) in enumerate(index.terms):
        if k == number:
            continue
        if coefficient != int(coefficient):
            raise Unsplittable
        reach = int(coefficient) * (other.extent - 1)
        if coefficient % span == 0 and other.variable.key not in fixed:
            upper = True
        else:
            least, most = least + min(0, reach), most + max(0, reach)
    shift = least // span * span
    steps = high // low
    if least - shift >= 0 and most - shift < unit and size % span == 0:
        if steps % members and not (span == size and unit == 1 and (members - 1) * ceil(steps / members) < steps):
            raise Unsplittable
        return DimCut(Shard(dim, None if span == size else span))
    if upper or low != 1 or high != digit.variable.size or size % members or steps % members:
        raise Unsplittable
    window = Window(unit, least, most, steps)
    return DimCut(_halo(window, dim, size, members), window)


def _halo(window: Window, dim: int, size: int, members: int) -> Shard | Halo:
    """The shard with the neighbouring elements that the neediest member reads."""
    own = size // members
    before = after = 0
    for part in range(members):
        first, last = window.bounds(members, part)
        first, last = max(first, 0), min(last, size - 1)
        before = max(before, part * own - first)
        after = max(after, last - (part + 1) * own + 1)
    if before > own or after > own:
        raise Unsplittable
    return Halo(Shard(dim), before, after) if before or after else Shard(dim)


def cut_for(index: Index, placement: Shard, size: int, breaks: Mapping[Key, tuple[int, ...]]) -> tuple[Key, Cut]:
    """The loop and digit to cut so that a dim indexed like this lies like `placement`."""
    span = size if placement.block is None else placement.block
    for digit, factor in index.terms:
        if factor != int(factor) or factor < 1 or span % int(factor):
            continue
        high = span // int(factor) * digit.low
        if digit.low < high <= digit.top and digit.top % high == 0:
            chain = [b for b in breaks[digit.variable.key] if digit.low <= b < high and high % b == 0]
            return digit.variable.key, Cut(max(chain), high)
    raise Unsplittable
