"""Partitions on real processes: losses and gradients of one process, for every kind of model."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from simpart.hardware import load_cluster
from simpart.plan.format import PlanFile
from simpart.searchers._tofu.baselines import METHODS
from simpart.searchers._tofu.plan import plan_of
from simpart.searchers.tofu import partition
from simpart.training import TrainingSpec
from tests.test_sharded_runs import GPT, MLP, MOE, RESNET, assert_exact, graph_of, run

LSTM = "lstm:layers=2,hidden=16,seq=4,vocab=64"


def plan_file(model: str, factors: tuple[int, ...], micro_batch: int = 8, method: str = "tofu") -> PlanFile:
    """Two micro-batches, so that gradients accumulate in their shards."""
    graph = graph_of(model)
    found = partition(graph, micro_batch, prod(factors), factors=factors, method=METHODS[method])
    plan = plan_of(found.coarse, found.found, 2, "1f1b")
    return PlanFile(
        plan=plan, training=TrainingSpec(precision="float64"), cluster=load_cluster(f"local:{prod(factors)}"),
        graph=graph,
    )  # fmt: skip


def test_a_partition_on_two_processes_equals_one_process(tmp_path: Path) -> None:
    files = [plan_file(MLP, (2,)), plan_file(MLP, (2,), method="icml18")]
    assert_exact(run(tmp_path, files, 2), files)


@pytest.mark.slow
def test_partitions_on_two_processes_equal_one_process(tmp_path: Path) -> None:
    files = [plan_file(model, (2,)) for model in (GPT, RESNET, LSTM, MOE)]
    assert_exact(run(tmp_path, files, 2), files)


@pytest.mark.slow
def test_partitions_on_four_processes_equal_one_process(tmp_path: Path) -> None:
    files = [plan_file(model, (2, 2)) for model in (GPT, RESNET, LSTM, MOE)]
    files.append(plan_file(MLP, (2, 2), method="allrow"))
    assert_exact(run(tmp_path, files, 4), files)


@pytest.mark.slow
def test_partitions_by_three_and_two_on_six_processes_equal_one_process(tmp_path: Path) -> None:
    files = [plan_file(MLP, (3, 2), 12), plan_file(LSTM, (3, 2), 12)]
    assert_exact(run(tmp_path, files, 6), files)
