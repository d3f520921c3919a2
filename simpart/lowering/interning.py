"""Small numbers for large hashable things, so that they can be keys at no cost."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Interner"]

REMEMBERED = 4096


class Interner:
    """Equal things get equal numbers. The same object asked for again is not hashed again.

    >>> numbers = Interner()
    >>> numbers.of((1, 2)), numbers.of("x"), numbers.of((1, 2))
    (0, 1, 0)
    """

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.recent: dict[int, tuple[Hashable, int]] = {}

    def of(self, thing: Hashable) -> int:
        found = self.recent.get(id(thing))
        if found is not None and found[0] is thing:
            return found[1]
        number = self.numbers.setdefault(thing, len(self.numbers))
        if len(self.recent) >= REMEMBERED:
            self.recent.clear()
        self.recent[id(thing)] = (thing, number)
        return number
