"""Numbers with units as text, such as '312 TFLOP/s': the edge where units are converted, once.

Decimal prefixes are powers of 1000 (k M G T P E, m u n p), binary ones powers of 1024 (Ki Mi Gi Ti Pi); `b` is a bit,
`B` a byte. Values are exact: the nearest float to what the text says.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from simpart.errors import UserError

__all__ = ["format_quantity", "parse_quantity"]

_BASES = {  # base unit: (dimension, how many SI units it is)
    "B": ("byte", Fraction(1)),
    "b": ("byte", Fraction(1, 8)),
    "FLOP": ("FLOP", Fraction(1)),
    "s": ("second", Fraction(1)),
    "min": ("second", Fraction(60)),
    "h": ("second", Fraction(3600)),
    "Hz": ("hertz", Fraction(1)),
    "W": ("watt", Fraction(1)),
    "J": ("joule", Fraction(1)),
    "USD": ("USD", Fraction(1)),
}
_DECIMAL = {"E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "": 0, "m": -3, "u": -6, "n": -9, "p": -12}
_BINARY = {"Pi": 2**50, "Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10}
_PREFIXES = {name: Fraction(10) ** power for name, power in _DECIMAL.items()} | {
    name: Fraction(factor) for name, factor in _BINARY.items()
}
_UNITS = {prefix + base: (dimension, scale * factor) for prefix, scale in _PREFIXES.items()
          for base, (dimension, factor) in _BASES.items()} | _BASES  # fmt: skip
_TEXT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*)", re.ASCII)
_EXAMPLES = {"B": "80 GiB", "B/s": "2039 GB/s", "FLOP/s": "312 TFLOP/s", "s": "4 us", "Hz": "1410 MHz", "W": "400 W",
             "USD/h": "2.5 USD/h"}  # fmt: skip


def parse_quantity(text: object, unit: str) -> float:
    """The number that `text` states, in `unit`, which also fixes the dimension.

    Raises UserError, in one line, when it is not a number, has no unit, another dimension's unit or is negative.

    >>> parse_quantity("312 TFLOP/s", "FLOP/s")
    312000000000000.0
    >>> parse_quantity("200 Gb/s", "B/s")
    25000000000.0
    """
    way_out = f"write it as in '{_EXAMPLES.get(unit, '1 ' + unit)}'"
    found = _TEXT.fullmatch(" ".join(str(text).split())) if isinstance(text, str | int | float) else None
    if found is None or isinstance(text, bool):
        raise UserError(f"{text!r} is not a number with a unit; {way_out}")
    number, given = found[1], found[2].replace("µ", "u").replace("μ", "u")
    if not given:
        raise UserError(f"'{number}' has no unit; {way_out}")
    measure = _measure(given)
    if measure is None:
        raise UserError(f"'{number} {given}' has an unknown unit; {way_out}")
    expected = _measure(unit)
    assert expected is not None, unit
    if measure[0] != expected[0]:
        raise UserError(f"'{number} {given}' is not in {unit}; {way_out}")
    if number.startswith("-") and Fraction(number) != 0:
        raise UserError(f"'{number} {given}' is negative; it must be at least 0")
    try:
        return float(abs(Fraction(number)) * measure[1] / expected[1])
    except OverflowError:
        raise UserError(f"'{number} {given}' is too large for a number; {way_out}") from None


def format_quantity(value: float, unit: str, *, digits: int | None = None) -> str:
    """Text of a value >= 0 that `parse_quantity` reads back: exactly, or rounded to significant `digits` for people.

    >>> format_quantity(312e12, "FLOP/s"), format_quantity(80 * 2**30, "B"), format_quantity(4e-6, "s")
    ('312 TFLOP/s', '80 GiB', '4 us')
    >>> format_quantity(25_769_803_776.5, "B/s", digits=3)
    '25.8 GB/s'
    """
    if unit.startswith("USD"):
        return f"{_plain(_rounded(Decimal(repr(float(value))), digits))} {unit}"
    if unit == "B" and value >= 1024 and value == int(value):
        for prefix, factor in _BINARY.items():
            if value >= factor and (digits is not None or value % factor == 0):
                return f"{_plain(_rounded(Decimal(int(value)) / factor, digits))} {prefix}B"
    exact = _rounded(Decimal(repr(float(value))), digits)
    prefix = next((name for name, power in _DECIMAL.items() if abs(exact) >= Decimal(1).scaleb(power)), "p")
    return f"{_plain(exact.scaleb(-_DECIMAL[prefix]))} {prefix}{unit}" if exact else f"0 {unit}"


def _measure(unit: str) -> tuple[tuple[str, ...], Fraction] | None:
    """Dimension and scale of `A` or `A/B`, None when a part is unknown."""
    parts = [_UNITS.get(part) for part in unit.split("/")]
    if len(parts) > 2 or any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    scale = known[0][1] / known[1][1] if len(known) == 2 else known[0][1]
    return tuple(part[0] for part in known), scale


def _rounded(value: Decimal, digits: int | None) -> Decimal:
    return value if digits is None or not value else round(value, digits - 1 - value.adjusted())


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
