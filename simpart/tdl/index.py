"""Index expressions: affine in loop variables, and in their digits when a variable is read as several (`i // 16`,
`i % 16`)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from simpart.errors import UserError

__all__ = ["DescriptionError", "Digit", "Index", "Variable"]

Number = int | Fraction


class DescriptionError(UserError):
    """A description that breaks a rule of the language or disagrees with its operator."""


class Variable:
    """A loop variable. Coordinates know their `size` when a description is called; reduction variables learn it
    from the dims they index. Variables of one name and size in one description are the same loop. `loose` ones come
    from `*i`: equal names with other sizes are other loops, not a mistake.
    """

    __slots__ = ("loose", "name", "size")

    def __init__(self, name: str, size: int | None = None, loose: bool = False) -> None:
        self.name, self.size, self.loose = name, size, loose

    @property
    def key(self) -> tuple[str, int]:
        assert self.size is not None, self.name
        return self.name, self.size

    def __repr__(self) -> str:
        return self.name


class Digit(NamedTuple):
    """`(variable // low) % (high / low)`: a variable is the digit from 1 to its size, which `high` None stands for."""

    variable: Variable
    low: int = 1
    high: int | None = None

    @property
    def top(self) -> int:
        top = self.variable.size if self.high is None else self.high
        if top is None:
            raise DescriptionError(f"{self.variable.name} has no size yet; give it in Sum(…, extents=(…))")
        return top

    @property
    def extent(self) -> int:
        return self.top // self.low


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """`Σ coefficient · digit + constant`. Arithmetic with whole numbers and other indices; products of indices are
    refused."""

    terms: tuple[tuple[Digit, Number], ...]
    constant: Number = 0

    @staticmethod
    def of(variable: Variable) -> Index:
        return Index(((Digit(variable), 1),))

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(digit.variable for digit, _ in self.terms)

    @property
    def alone(self) -> Variable | None:
        """The variable, if the index is that variable and nothing else."""
        if len(self.terms) == 1 and self.constant == 0:
            (digit, coefficient), *_ = self.terms
            if coefficient == 1 and digit.low == 1 and digit.high in (None, digit.variable.size):
                return digit.variable
        return None

    def __str__(self) -> str:
        parts = []
        for digit, coefficient in self.terms:
            name = digit.variable.name
            if digit.low != 1:
                name = f"{name}//{digit.low}"
            if digit.high is not None and digit.high != digit.variable.size:
                name = f"{name}%{digit.high // digit.low}"
            parts.append(name if coefficient == 1 else f"{coefficient}*{name}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return "+".join(parts).replace("+-", "-")

    def _plus(self, other: Index, sign: int) -> Index:
        total: dict[tuple[int, int, int | None], tuple[Digit, Number]] = {}
        for digit, coefficient in (*self.terms, *((d, sign * c) for d, c in other.terms)):
            key = (id(digit.variable), digit.low, digit.high)
            before = total[key][1] if key in total else 0
            total[key] = (digit, before + coefficient)
        terms = tuple(term for term in total.values() if term[1] != 0)
        return Index(terms, self.constant + sign * other.constant)

    def __add__(self, other: object) -> Index:
        return self._plus(_index(other), 1)

    def __radd__(self, other: object) -> Index:
        return _index(other)._plus(self, 1)

    def __sub__(self, other: object) -> Index:
        return self._plus(_index(other), -1)

    def __rsub__(self, other: object) -> Index:
        return _index(other)._plus(self, -1)

    def __neg__(self) -> Index:
        return self * -1

    def __mul__(self, other: object) -> Index:
        if isinstance(other, Index):
            if other.terms and self.terms:
                raise DescriptionError(
                    f"an index must be affine, ({self})*({other}) multiplies index variables; use constants as factors"
                )
            return self * other.constant if not other.terms else other * self.constant
        factor = _number(other, "*", self)
        terms = tuple((digit, coefficient * factor) for digit, coefficient in self.terms if factor != 0)
        return Index(terms, self.constant * factor)

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Index:
        if isinstance(other, Index) and not other.terms:
            other = other.constant
        divisor = _number(other, "/", self)
        if divisor == 0:
            raise DescriptionError(f"an index must be affine, ({self})/0 divides by zero")
        return self * Fraction(1, 1) * (Fraction(1) / Fraction(divisor))

    def __rtruediv__(self, other: object) -> Index:
        raise DescriptionError(f"an index must be affine, {other}/({self}) divides by an index variable")

    def __pow__(self, other: object) -> Index:
        raise DescriptionError(f"an index must be affine, ({self})**{other} is not")

    def __floordiv__(self, other: object) -> Index:
        return self._digits(other, "//")[0]

    def __mod__(self, other: object) -> Index:
        return self._digits(other, "%")[1]

    def __bool__(self) -> bool:
        raise DescriptionError(
            f"a description has no branches on coordinates, got a test of {self}; use equal() or choose()"
        )

    def __index__(self) -> int:
        raise DescriptionError(f"a coordinate is no number while tracing, got {self} where a number is needed")

    def _digits(self, other: object, sign: str) -> tuple[Index, Index]:
        """Quotient and remainder by a number that cuts the index between two digits or inside one."""
        base = _number(other, sign, self)
        if base < 1 or base != int(base):
            raise DescriptionError(f"{sign} in an index takes a whole number >= 1, got ({self}){sign}{base}")
        base = int(base)
        failure = DescriptionError(
            f"an index must be affine, ({self}){sign}{base} falls between its digits; make the sizes divide"
        )
        upper: list[tuple[Digit, Number]] = []
        lower: list[tuple[Digit, Number]] = []
        reach = 1
        for digit, weight in sorted(self.terms, key=lambda term: term[1]):
            if weight != int(weight) or weight < reach or weight % reach or self.constant != 0:
                raise failure
            reach = int(weight) * digit.extent
            weight = int(weight)
            if reach <= base:
                lower.append((digit, weight))
            elif weight >= base:
                if weight % base:
                    raise failure
                upper.append((digit, weight // base))
            else:
                inner = base // weight
                if base % weight or digit.extent % inner:
                    raise failure
                lower.append((Digit(digit.variable, digit.low, digit.low * inner), weight))
                upper.append((Digit(digit.variable, digit.low * inner, digit.high), 1))
        return Index(tuple(upper)), Index(tuple(lower))


def _index(other: object) -> Index:
    if isinstance(other, Index):
        return other
    if isinstance(other, int | Fraction) and not isinstance(other, bool):
        return Index((), other)
    raise DescriptionError(f"an index is affine in loop variables with whole numbers, got {_described(other)}")


def _number(other: object, sign: str, index: Index) -> Number:
    if isinstance(other, int | Fraction) and not isinstance(other, bool):
        return other
    if isinstance(other, Index):
        raise DescriptionError(
            f"an index must be affine, ({index}){sign}({other}) combines index variables; use a constant"
        )
    raise DescriptionError(f"an index must be affine, ({index}){sign}… takes a whole number, got {_described(other)}")


def _described(other: object) -> str:
    from simpart.tdl.expression import Expression

    return "a value that depends on data" if isinstance(other, Expression) else repr(other)
