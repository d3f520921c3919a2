"""Simulation of many plans, here or on an executor's workers: the same answers either way."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from simpart.errors import ScheduleError, UnsupportedError, UserError
from simpart.plan import Plan
from simpart.problem import Problem
from simpart.simulation import Evaluation, evaluate

__all__ = ["Evaluator", "evaluate_each", "process_pool"]


def evaluate_each(problem: Problem, plans: Sequence[Plan]) -> list[Evaluation]:
    """`simulation.evaluate`; a plan that this version cannot carry out is infeasible for that reason."""
    try:
        return evaluate(problem, plans)
    except (UnsupportedError, ScheduleError) as error:
        if len(plans) == 1:
            return [Evaluation(step_s=float("inf"), peak_bytes=0, feasible=False, why_infeasible=str(error))]
    return [evaluate_each(problem, [plan])[0] for plan in plans]


@dataclass(slots=True)
class Evaluator:
    """Evaluates plans of one problem on an executor, or here where there is none. The problem travels as bytes that a
    worker reads once; a pool whose workers die is given up for this process."""

    problem: Problem
    executor: Executor | None = None
    shipped: bytes = b""

    def __call__(self, plans: Sequence[Plan]) -> list[Evaluation]:
        if self.executor is None or len(plans) < 2:
            return evaluate_each(self.problem, plans) if plans else []
        if not self.shipped:
            buffer = io.BytesIO()
            pickle.Pickler(buffer, protocol=5).dump(self.problem)
            self.shipped = buffer.getvalue()
        workers = getattr(self.executor, "_max_workers", None) or os.cpu_count() or 1
        size = -(-len(plans) // workers)
        parts = [list(plans[i : i + size]) for i in range(0, len(plans), size)]
        try:
            answers = list(self.executor.map(_evaluate_shipped, [self.shipped] * len(parts), parts))
        except BrokenExecutor:
            self.executor = None
            return evaluate_each(self.problem, plans)
        return [evaluation for part in answers for evaluation in part]


@lru_cache(maxsize=2)
def _problem_of(shipped: bytes) -> Problem:
    problem = pickle.loads(shipped)  # noqa: S301 - what the parent process has just written
    assert isinstance(problem, Problem)
    return problem


def _evaluate_shipped(shipped: bytes, plans: list[Plan]) -> list[Evaluation]:
    try:
        return evaluate_each(_problem_of(shipped), plans)
    except UserError as error:
        raise UserError(str(error)) from None  # some kinds of it do not travel


@contextmanager
def process_pool(jobs: int) -> Iterator[Executor | None]:
    """`jobs` worker processes, which leave Ctrl-C to this one and end with it, however it ends; None for one job."""
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1:
        yield None
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare_worker)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
