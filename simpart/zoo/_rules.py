"""Rules that dimensions must keep, and how a dimension is written. No torch here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from simpart.errors import UserError

__all__ = ["divides", "positive", "rotary", "spell"]


def spell(value: object) -> str:
    """A dimension as it is written in a MODEL text.

    >>> spell(True), spell(0.1), spell((3, 4, 6, 3))
    ('true', '0.1', '3-4-6-3')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def positive(dims: Any) -> None:
    """Raise UserError unless every integer dimension is at least 1 and no float is negative."""
    for item in fields(dims):
        value = getattr(dims, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if isinstance(value, float) and value < 0:
            raise UserError(f"{item.name} must not be negative, got {item.name}={value:g}; try {item.name}=0")
        if not isinstance(value, float | bool) and min(numbers, default=1) < 1:
            usual = spell(item.default or 1)
            raise UserError(f"{item.name} must be at least 1, got {item.name}={spell(value)}; try {item.name}={usual}")


def divides(divisor: str, value: int, name: str, whole: int) -> None:
    """Raise UserError unless `value` divides `whole`, naming the nearest divisors."""
    if whole % value:
        fits = [d for d in range(1, min(whole, 2**20) + 1) if whole % d == 0]
        near = [max(d for d in fits if d <= value), *[d for d in fits if d > value][:1]]
        choice = " or ".join(f"{divisor}={d}" for d in near)
        raise UserError(f"{divisor} must divide {name}, got {divisor}={value}, {name}={whole}; try {choice}")


def rotary(hidden: int, heads: int) -> None:
    """Raise UserError unless a head holds pairs to rotate."""
    if hidden // heads % 2:
        raise UserError(
            f"rotary positions need an even hidden / heads, got hidden={hidden}, heads={heads}; try hidden={2 * hidden}"
        )
