"""The append-only log of searches of one problem: every candidate with its simulated step, one JSON document a line.

The first line names the problem. What stands in the log is not simulated again, by whichever searcher it is proposed;
finished outer work is found again by a search with the same searcher, seed and space.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from simpart.cost import Collective, CollectiveTable
from simpart.errors import FormatError, MismatchError, UserError
from simpart.files import dump_json
from simpart.plan import Plan
from simpart.plan.format import plan_to_json, training_to_json
from simpart.problem import Problem
from simpart.simulation import Evaluation

if TYPE_CHECKING:
    from simpart.searching import Candidate

__all__ = ["SearchLog", "plan_digest", "problem_digest"]

KIND, VERSION = "simpart search log", 1
SYNC_S = 1.0
"""Lines reach the system at once, the disk at least so often: a killed process loses nothing, a power cut a second."""


def plan_digest(plan: Plan) -> str:
    """A name of a plan by its content."""
    return hashlib.sha256(dump_json(plan_to_json(plan)).encode()).hexdigest()[:24]


def problem_digest(problem: Problem) -> str:
    """A name of all that a simulated step depends on; of the prices a sample: all ops at one micro-batch, and one
    message and one all-reduce of two devices."""
    costs, cluster = problem.costs, problem.cluster
    micro_batch = next((b for b in range(2, problem.global_batch + 1) if problem.global_batch % b == 0), 1)
    found = hashlib.sha256(
        dump_json(
            {
                "graph": problem.graph.fingerprint,
                "training": training_to_json(problem.training),
                "cluster": cluster.to_dict(),
                "global_batch": problem.global_batch,
                "mode": problem.mode,
                "overheads": [
                    v for v in (getattr(costs, f.name) for f in dataclasses.fields(costs)) if type(v) is float
                ],
            }
        ).encode()
    )
    for device in cluster.kinds:
        prices = problem.prices([micro_batch], device)[micro_batch]
        for seconds in (prices.forward.seconds, prices.backward.seconds):
            found.update(np.ascontiguousarray(seconds).tobytes())
    if cluster.size > 1:
        pair = (0, cluster.size - 1)
        rows = CollectiveTable((Collective("p2p", 1 << 20, pair), Collective("all_reduce", 1 << 20, pair)))
        found.update(costs.communication.estimate(rows, cluster).mean_s.tobytes())
    return found.hexdigest()[:24]


class SearchLog:
    """The log of one search. A torn last line is dropped; anything else that is no such log is refused and stays."""

    def __init__(self, path: Path, problem: Problem, searcher: str, seed: int) -> None:
        self.finished: dict[str, Any] = {}
        self.known: dict[str, Evaluation] = {}
        self.run = f"{searcher}/{seed}/{_digest_of_space(problem)}"
        self._written: set[tuple[str, str]] = set()
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write the log {path}: it is no plain file; give another place")
        digest = problem_digest(problem)
        try:
            self._file = path.open("r+b" if path.exists() else "x+b")
            try:
                end = self._begin(path, digest)
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror}; give another place") from error
        self._synced = time.monotonic()
        if not end:
            self._append({"kind": KIND, "version": VERSION, "problem": digest})

    def _begin(self, path: Path, digest: str) -> int:
        """Read what is there, through the file that is locked; the bytes kept."""
        _lock(self._file, path)
        raw = self._file.read()
        end = raw.rfind(b"\n") + 1
        self._read(path, raw[:end], digest)
        if not end and raw and not f'{{"kind":"{KIND}"'.encode().startswith(raw[: len(KIND)]):
            raise FormatError(f"{path}: not a search log; give another file to --log")
        self._file.truncate(end)
        self._file.seek(end)
        return end

    def _read(self, path: Path, raw: bytes, digest: str) -> None:
        for number, line in enumerate(raw.splitlines(), 1):
            try:
                row = json.loads(line)
                if number == 1:
                    kind, version, problem = row["kind"], row["version"], row["problem"]
                    if kind != KIND or type(version) is not int:
                        raise ValueError(kind)
                elif "done" in row:
                    if row["run"] == self.run:
                        self.finished[row["done"]] = row["value"]
                else:
                    if row["candidate"] is not None:
                        self.known[row["candidate"]] = _evaluation(row)
                    if row["run"] == self.run:
                        self._written.add((row["family"], row["candidate"] or row["why"]))
            except (ValueError, TypeError, KeyError) as error:
                raise FormatError(f"{path}, line {number}: not a search log; give another file to --log") from error
            if number == 1 and version > VERSION:
                raise FormatError(f"{path} has {KIND} version {version}; this simpart reads {VERSION}: update simpart")
            if number == 1 and problem != digest:
                raise MismatchError(
                    f"{path} logs another problem (model, cluster, batch, recipe or prices); give another file to --log"
                )

    def candidate(self, candidate: Candidate, evaluation: Evaluation | None, digest: str, number: int) -> None:
        """Write a candidate, unless this search wrote it before; without a plan, why there is none."""
        key = (candidate.family, digest or candidate.why)
        if key in self._written:
            return
        self._written.add(key)
        row: dict[str, Any] = {"run": self.run, "number": number, "family": candidate.family}
        if evaluation is None or candidate.plan is None:
            self._append({**row, "candidate": None, "why": candidate.why})
            return
        self.known[digest] = evaluation
        row |= {
            "candidate": digest,
            "objective_s": _finite(candidate.objective_s),
            "feasible": evaluation.feasible,
            "step_s": _finite(evaluation.step_s),
            "peak_bytes": evaluation.peak_bytes,
            "why": evaluation.why_infeasible,
            "plan": plan_to_json(candidate.plan),
        }
        self._append(row)

    def done(self, key: str, value: Any) -> None:
        """Write a finished piece of outer work."""
        self._append({"run": self.run, "done": key, "value": value})

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(dump_json(row).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    """One search at a time writes a log; a killed one lets go of it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another search is writing the log {path}; wait for it or give another file to --log"
        ) from None


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    """Raises ValueError where no simulation can have said so."""
    step_s = math.inf if row["step_s"] is None else float(row["step_s"])
    peak_bytes = int(row["peak_bytes"])
    if not step_s >= 0 or peak_bytes < 0:
        raise ValueError(step_s)
    return Evaluation(
        step_s=step_s, peak_bytes=peak_bytes, feasible=bool(row["feasible"]), why_infeasible=str(row["why"])
    )


def _digest_of_space(problem: Problem) -> str:
    return hashlib.sha256(repr(sorted(dataclasses.asdict(problem.space).items())).encode()).hexdigest()[:8]


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
