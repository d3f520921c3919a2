"""Symbolic intervals: lower and upper bound are affine in size symbols, each with its own constant; bounds are
inclusive.

Tofu prints one shared constant, which can say neither a halo nor a negative factor; so the two are separate here, and a
negative factor swaps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from simpart.tdl.index import DescriptionError, Index, Number

__all__ = ["Bound", "Interval", "interval_of"]


@dataclass(frozen=True, slots=True)
class Bound:
    """`Σ coefficient · symbol + constant`; zero coefficients are left out, symbols sorted."""

    coefficients: tuple[tuple[str, Number], ...] = ()
    constant: Number = 0

    @staticmethod
    def of(coefficients: Mapping[str, Number], constant: Number = 0) -> Bound:
        return Bound(tuple(sorted((s, c) for s, c in coefficients.items() if c != 0)), constant)

    def plus(self, other: Bound) -> Bound:
        total = dict(self.coefficients)
        for symbol, coefficient in other.coefficients:
            total[symbol] = total.get(symbol, 0) + coefficient
        return Bound.of(total, self.constant + other.constant)

    def times(self, factor: Number) -> Bound:
        return Bound.of({s: c * factor for s, c in self.coefficients}, self.constant * factor)

    def at(self, sizes: Mapping[str, int]) -> Number:
        """The bound for concrete sizes."""
        return self.constant + sum(c * sizes[s] for s, c in self.coefficients)


@dataclass(frozen=True, slots=True)
class Interval:
    """All values from `lower` to `upper`.

    >>> (Interval.between(0, 3) * -1 + 7).at({})
    (4, 7)
    """

    lower: Bound
    upper: Bound

    @staticmethod
    def between(lower: Number, upper: Number) -> Interval:
        return Interval(Bound((), lower), Bound((), upper))

    @staticmethod
    def full(symbol: str) -> Interval:
        """A variable of size `symbol`: 0 … symbol - 1."""
        return Interval(Bound(), Bound.of({symbol: 1}, -1))

    def __add__(self, other: Interval | Number) -> Interval:
        other = other if isinstance(other, Interval) else Interval.between(other, other)
        return Interval(self.lower.plus(other.lower), self.upper.plus(other.upper))

    def __sub__(self, other: Interval | Number) -> Interval:
        return self + other * -1

    def __mul__(self, factor: object) -> Interval:
        if not isinstance(factor, int | Fraction):
            raise DescriptionError(
                "intervals are multiplied by constants only; the product of two index ranges is not affine"
            )
        low, high = self.lower.times(factor), self.upper.times(factor)
        return Interval(high, low) if factor < 0 else Interval(low, high)

    def __truediv__(self, divisor: object) -> Interval:
        if not isinstance(divisor, int | Fraction) or divisor == 0:
            raise DescriptionError("intervals are divided by constants other than 0 only")
        return self * (Fraction(1) / Fraction(divisor))

    def at(self, sizes: Mapping[str, int]) -> tuple[Number, Number]:
        """Both bounds for concrete sizes."""
        return self.lower.at(sizes), self.upper.at(sizes)


def interval_of(index: Index, ranges: Mapping[tuple[str, int], tuple[int, int]]) -> tuple[Number, Number]:
    """Inclusive bounds of an index when some variables, by key, run over part of their range. Digits of such a variable
    that are not the whole of it must lie below the cut or be its top."""
    total = Interval.between(index.constant, index.constant)
    for digit, coefficient in index.terms:
        low, high = 0, digit.extent - 1
        if digit.variable.key in ranges:
            first, last = ranges[digit.variable.key]
            if digit.top == digit.variable.size:
                low, high = first // digit.low, last // digit.low
            elif last // digit.top == first // digit.top:
                low, high = first % digit.top // digit.low, last % digit.top // digit.low
        total = total + Interval.between(low, high) * coefficient
    return total.at({})
