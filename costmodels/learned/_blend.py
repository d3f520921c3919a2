"""How the parts of a fitted family tell a device nobody measured, and which blend does best on held-out ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

__all__ = ["PARTS", "Blend", "Judged", "Parts", "Score", "choose", "scores"]

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_LEAST_KINDS = 2
PARTS = frozenset({"trees", "net", "ratio"})
_CLEARLY = 0.93  # of the other's error, in the mean over the kinds of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What each part says of rows of one device, in logs of seconds: the analytic `core`; what `trees` and `net` would
    add; the time on the nearest measured device scaled by the roofline (`ratio`); the physical `bound`. None: not asked
    for, or not allowed here."""

    core: Floats
    trees: Floats | None
    net: Floats | None
    ratio: Floats | None
    bound: Floats

    def at(self, rows: Bools) -> Parts:
        """Some of the rows."""
        trees, net, ratio = (None if part is None else part[rows] for part in (self.trees, self.net, self.ratio))
        return Parts(core=self.core[rows], trees=trees, net=net, ratio=ratio, bound=self.bound[rows])


Judged = tuple[Parts, Floats]
"""Parts of a device held out and the logs of its measured seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Shares of the parts, each within [0, 1], trees and net together too:

        (1 - ratio) · (core + trees · residual trees + net · residual net) + ratio · roofline ratio

    A part that a device may not use counts nothing. Raises ValueError for other shares.
    """

    trees: float = 0.5
    net: float = 0.0
    ratio: float = 0.25

    def __post_init__(self) -> None:
        if not all(0.0 <= share <= 1.0 for share in (self.trees, self.net, self.ratio, self.trees + self.net)):
            raise ValueError(f"shares of a blend must be within 0 and 1, got {self}")

    def log_seconds(self, parts: Parts) -> Floats:
        """Log seconds of each row, never below the bound."""
        found = parts.core
        for share, part in ((self.trees, parts.trees), (self.net, parts.net)):
            if share and part is not None:
                found = found + share * part
        if self.ratio and parts.ratio is not None:
            found = (1.0 - self.ratio) * found + self.ratio * parts.ratio
        return np.maximum(found, parts.bound)

    def takes(self) -> frozenset[str]:
        """The parts that count something."""
        return frozenset(name for name in PARTS if getattr(self, name))

    def words(self) -> str:
        """In words, as `core + 0.5 trees, 0.25 ratio`."""
        residual = "".join(
            f" + {share:g} {name}" for name, share in (("trees", self.trees), ("net", self.net)) if share
        )
        return f"core{residual}" + (f", {self.ratio:g} ratio" if self.ratio else "")


_RESIDUALS = ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.25, 0.25), (0.5, 0.5))
_RATIOS = (0.0, 0.25, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Mean |predicted / measured - 1| of a blend, over the kinds of devices held out and for each of them."""

    blend: Blend
    mape: float
    by_kind: Mapping[str, float]

    def plain(self) -> dict[str, object]:
        """As numbers for a file."""
        by_kind = {kind: round(value, 4) for kind, value in self.by_kind.items()}
        return {**asdict(self.blend), "mape": round(self.mape, 4), "held_out": by_kind}


def scores(held_out: Mapping[str, Sequence[Judged]], default: Blend) -> list[Score]:
    """Every blend of coarse shares on devices held out, by kind: siblings are one observation. A part that none of them
    may use keeps its share of the default."""
    every = [parts for kind in held_out.values() for parts, _ in kind]
    learned = any(parts.trees is not None for parts in every)
    scaled = any(parts.ratio is not None for parts in every)
    residuals = _RESIDUALS if learned else ((default.trees, default.net),)
    found = []
    for (trees, net), ratio in product(residuals, _RATIOS if scaled else (default.ratio,)):
        blend = Blend(trees=trees, net=net, ratio=ratio)
        by_kind = {kind: float(np.mean([_mape(blend, *one) for one in rows])) for kind, rows in held_out.items()}
        found.append(Score(blend=blend, mape=float(np.mean([*by_kind.values()])), by_kind=by_kind))
    return found


def choose(found: Sequence[Score], default: Blend) -> Blend:
    """The best blend where it is clearly better than the default; one with the net only where it is clearly better than
    all without. Few devices were held out, so what one chooses, or several by a hair or against one, says nothing."""
    chosen = next(score for score in found if score.blend == default)
    if len(chosen.by_kind) < _LEAST_KINDS:
        return default
    plain = min((score for score in found if not score.blend.net), key=lambda score: score.mape)
    if _clearly_better(plain, chosen):
        chosen = plain
    netted = min(found, key=lambda score: score.mape)
    if netted.mape < _CLEARLY * plain.mape and _clearly_better(netted, chosen):
        chosen = netted
    return chosen.blend


def _clearly_better(one: Score, other: Score) -> bool:
    worse = any(value > other.by_kind[kind] for kind, value in one.by_kind.items())
    return one.mape < _CLEARLY * other.mape and not worse


def _mape(blend: Blend, parts: Parts, truth: Floats) -> float:
    return float(np.abs(np.expm1(blend.log_seconds(parts) - truth)).mean())
