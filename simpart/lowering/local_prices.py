"""Prices of kernels as one device runs them: each (kernel class, use) is asked for once, whatever holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from simpart.cost import ComputeModel, Signature, checked, unique
from simpart.cost.pricing import Amount, sum_rows
from simpart.cost.signatures import signatures_of
from simpart.graph import Graph
from simpart.hardware import Device
from simpart.kernels import Mode
from simpart.placement import Sharding, Strategy
from simpart.sharding._regions import wiring_of
from simpart.sharding.flow import Flow
from simpart.sharding.mesh import Axes, Use, calls_of, local_signature, use_of

__all__ = ["LocalPrices", "UseCounts"]

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Known:
    """Rows priced so far at one micro-batch on one device. Uses are kept, so that their ids stay theirs. `signatures`
    gives a row of each local signature."""

    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    signatures: dict[Signature, int] = field(default_factory=dict)
    asked: set[tuple[Sharding, Axes]] = field(default_factory=set)
    amounts: Amount | None = None


@dataclass(frozen=True, slots=True)
class UseCounts:
    """Rows of the prices of one graph, micro-batch and device: by kernel, for the kernels of a flow."""

    amounts: Amount
    kernels: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]

    def total(self, weights: Floats) -> Amount:
        """The sum over the flow's kernels, each taken `weights` times (by kernel of the flow)."""
        times = np.bincount(self.row, weights=weights, minlength=self.amounts.seconds.size)
        return self.amounts.total(times.astype(np.float64))


@dataclass(slots=True)
class LocalPrices:
    """Prices by one model, for kernels run in one mode."""

    compute: ComputeModel
    mode: Mode
    known: dict[tuple[str, int, str], _Known] = field(default_factory=dict)

    def ask(self, graph: Graph, micro_batch: int, device: Device, sharding: Sharding, axes: Axes) -> None:
        """Prices all kernels of a graph under a sharding in one question, before any flow is followed."""
        known = self.known.setdefault((graph.fingerprint, micro_batch, device.name), _Known())
        if sharding.overrides or (sharding, axes) in known.asked:
            return
        known.asked.add((sharding, axes))
        names = wiring_of(graph).class_names
        strategies = {names[name]: strategy for name, strategy in sharding.classes}
        calls = calls_of(graph, micro_batch)
        uses = [use_of(call, strategies.get(cls, Strategy(())), axes) for cls, call in enumerate(calls)]
        keys = [(cls, id(use)) for cls, use in enumerate(uses) if (cls, id(use)) not in known.rows]
        self._add(known, graph, micro_batch, device, keys, {id(use): use for use in uses})

    def of(self, graph: Graph, found: Flow, device: Device) -> UseCounts:
        """Of all kernels of a flow; those not yet known are asked for together."""
        known = self.known.setdefault((graph.fingerprint, found.micro_batch, device.name), _Known())
        classes = graph.flat.kernel_class
        kernels = np.fromiter(found.uses, dtype=np.int64, count=len(found.uses))
        keys = list(zip(classes[kernels].tolist(), map(id, found.uses.values()), strict=True))
        missing = dict.fromkeys(key for key in keys if key not in known.rows)
        if missing:
            self._add(known, graph, found.micro_batch, device, missing, {id(use): use for use in found.uses.values()})
        assert known.amounts is not None
        row = np.array([known.rows[key] for key in keys], dtype=np.int64)
        return UseCounts(known.amounts, kernels, row)

    def _add(
        self, known: _Known, graph: Graph, micro_batch: int, device: Device, keys: Iterable[tuple[int, int]],
        uses: Mapping[int, Use],
    ) -> None:  # fmt: skip
        whole = signatures_of(graph, micro_batch, self.mode)
        wanted = [((cls, use), local_signature(whole[cls], uses[use])) for cls, use in keys]
        known.uses += [uses[use] for (_, use), _ in wanted]
        missing = [row for row in wanted if row[1] not in known.signatures]
        rows = known.amounts.seconds.size if known.amounts is not None else 0
        if missing:
            table, index = unique([signature for _, signature in missing])
            estimate = checked(self.compute.estimate(table, device), table.signatures)
            fresh = sum_rows(estimate, index, np.arange(len(missing)), len(missing))
            known.amounts = fresh if known.amounts is None else _joined(known.amounts, fresh)
        again = [row for row in wanted if row[1] in known.signatures]  # each class has a row of its own
        if again and known.amounts is not None:
            equal = np.array([known.signatures[signature] for _, signature in again])
            known.amounts = _joined(known.amounts, _taken(known.amounts, equal))
        for number, (key, signature) in enumerate(missing + again, rows):
            known.rows[key] = number
            known.signatures.setdefault(signature, number)


def _taken(a: Amount, rows: npt.NDArray[np.int64]) -> Amount:
    """These rows."""
    return replace(
        a, seconds=a.seconds[rows], by_family=a.by_family[rows], by_provenance=a.by_provenance[rows],
        own_variance=a.own_variance[rows], shared_log_sd=a.shared_log_sd[rows], launches=a.launches[rows],
    )  # fmt: skip


def _joined(a: Amount, b: Amount) -> Amount:
    """The rows of both, one after the other."""
    families = tuple(dict.fromkeys((*a.families, *b.families)))
    tables: list[Floats] = []
    shared: list[Floats] = []
    for part in (a, b):
        columns = [families.index(name) for name in part.families]
        for found, values in ((tables, part.by_family), (shared, part.shared_log_sd)):
            table = np.zeros((part.seconds.size, len(families)))
            table[:, columns] = values
            found.append(table)
    return Amount(
        seconds=np.concatenate([a.seconds, b.seconds]),
        by_family=np.concatenate(tables),
        by_provenance=np.concatenate([a.by_provenance, b.by_provenance]),
        own_variance=np.concatenate([a.own_variance, b.own_variance]),
        families=families,
        shared_log_sd=np.concatenate(shared),
        launches=np.concatenate([a.launches, b.launches]),
    )
