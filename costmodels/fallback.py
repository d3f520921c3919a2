"""Models one after the other: the first that knows a row answers it. And the rest, calibrated by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from simpart.cost import PROVENANCES, ComputeModel, Estimate, Floats, Ints, SignatureTable
from simpart.costmodels.roofline import signature_family
from simpart.costmodels.table import Bools, Table
from simpart.hardware import Device

__all__ = ["Calibrated", "Fallback", "Partial", "merge"]

LEAST_ROWS = 5
"""Measured rows of a target or family that calibrate the others of it."""


class Partial(Protocol):
    """A ComputeModel that says which rows it can answer."""

    def knows(self, table: SignatureTable, device: Device) -> Bools: ...

    def estimate(self, table: SignatureTable, device: Device) -> Estimate: ...


@dataclass(frozen=True, slots=True)
class Fallback:
    """A ComputeModel: each row from the first of `models` that knows it, else from `last`."""

    models: tuple[Partial, ...]
    last: ComputeModel

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        open_rows = np.arange(len(table.signatures))
        parts: list[tuple[Ints, Estimate]] = []
        for model in self.models:
            known = model.knows(_rows(table, open_rows), device)
            if known.any():
                parts.append((open_rows[known], model.estimate(_rows(table, open_rows[known]), device)))
            open_rows = open_rows[~known]
        if open_rows.size or not parts:
            parts.append((open_rows, self.last.estimate(_rows(table, open_rows), device)))
        return merge(parts, len(table.signatures))


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Knows kernels whose like was measured on the device: `base` times the measured ratio to it.

    The ratio is that of measured rows of the same target, else of the same family, weighted by nearness in size (log of
    `base`'s time); at least LEAST_ROWS of them. Within their range of sizes a row counts as interpolated, outside as
    extrapolated. The spread is that of the ratios.
    """

    table: Table
    base: ComputeModel

    def knows(self, table: SignatureTable, device: Device) -> Bools:
        neighbours = _Neighbours(self, device)
        found = [not s.view and neighbours.of(s.target, signature_family(s)) is not None for s in table.signatures]
        return np.array(found, dtype=bool)

    def estimate(self, table: SignatureTable, device: Device) -> Estimate:
        plain, neighbours = self.base.estimate(table, device), _Neighbours(self, device)
        mean = plain.mean_s.copy()
        own, shared, provenance = plain.own_log_sd.copy(), plain.shared_log_sd.copy(), plain.provenance.copy()
        for i, signature in enumerate(table.signatures):
            near = neighbours.of(signature.target, signature_family(signature))
            if near is None or signature.view:
                continue
            sizes, ratios = near
            size = np.log(plain.mean_s[i])
            inside = sizes.min() <= size <= sizes.max()
            weight = np.exp(-0.5 * (np.clip(size, sizes.min(), sizes.max()) - sizes) ** 2)
            weight /= weight.sum()
            ratio = float(weight @ ratios)
            spread = float(np.sqrt(weight @ (ratios - ratio) ** 2))
            mean[i] *= np.exp(ratio)
            own[i] = max(0.05, spread) * (1.0 if inside else 2.0)
            shared[i] = 0.03 + max(0.05, spread) / np.sqrt(len(ratios))
            provenance[i] = PROVENANCES.index("interpolated" if inside else "extrapolated")
        return Estimate(
            mean_s=mean,
            family=plain.family,
            families=plain.families,
            shared_log_sd=shared,
            own_log_sd=own,
            provenance=provenance,
        )


class _Neighbours:
    """(log size, log ratio) of measured rows on one device, by target and by family."""

    def __init__(self, model: Calibrated, device: Device) -> None:
        rows = [s for s in model.table.rows(device) if not s.view]
        self.found: dict[str, tuple[Floats, Floats]] = {}
        if len(rows) < LEAST_ROWS:
            return
        known = SignatureTable(tuple(rows))
        plain = np.log(model.base.estimate(known, device).mean_s)
        ratio = np.log(model.table.estimate(known, device).mean_s) - plain
        for names in ([s.target for s in rows], [f"family {signature_family(s)}" for s in rows]):
            labels = np.array(names)
            for name in dict.fromkeys(names):
                chosen = labels == name
                if chosen.sum() >= LEAST_ROWS:
                    self.found[name] = (plain[chosen], ratio[chosen])

    def of(self, target: str, family: str) -> tuple[Floats, Floats] | None:
        return self.found.get(target) or self.found.get(f"family {family}")


def merge(parts: Sequence[tuple[Ints, Estimate]], count: int) -> Estimate:
    """One Estimate of `count` rows from estimates of some rows each."""
    families = tuple(dict.fromkeys(name for _, part in parts for name in part.families))
    mean, shared, own = np.zeros(count), np.zeros(count), np.zeros(count)
    family, provenance = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for rows, part in parts:
        place = np.array([families.index(name) for name in part.families], dtype=np.int64)
        mean[rows], shared[rows], own[rows] = part.mean_s, part.shared_log_sd, part.own_log_sd
        family[rows], provenance[rows] = place[part.family], part.provenance
    return Estimate(
        mean_s=mean,
        family=family,
        families=families,
        shared_log_sd=shared,
        own_log_sd=own,
        provenance=provenance,
    )


def _rows(table: SignatureTable, rows: Ints) -> SignatureTable:
    return SignatureTable(tuple(table.signatures[i] for i in rows.tolist()))
