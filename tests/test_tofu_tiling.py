"""Pictures of which device holds which part of a plan's tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simpart.placement import Placement, Replicate, Shard
from simpart.report import save_report
from simpart.report.tiling import POINTS, owners, save_tiling, tiled_blocks, tiling
from simpart.searchers._tofu.plan import plan_of
from simpart.searchers.tofu import partition
from simpart.simulation import simulate_plan
from simpart.tdl.local import local_shape
from tests.test_tofu import GPT, graph_of, problem_of

AXES = (("x", 2), ("y", 3))


@pytest.mark.parametrize(
    "layout", [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1, 8), Shard(1)), (Replicate(), Shard(1, 24))]
)
def test_every_device_has_its_share_of_the_picture(layout: tuple[Placement, ...]) -> None:
    shape = (POINTS, POINTS)
    held = np.bincount(owners(shape, layout, AXES, (0, 1)).ravel(), minlength=6)
    local: tuple[int, ...] = shape
    for place, (_, members) in zip(layout, AXES, strict=True):
        local = local_shape(local, place, members)
    assert set(held[held > 0]) == {local[0] * local[1]}


def test_a_strided_shard_shows_as_stripes() -> None:
    device = owners((POINTS, POINTS), (Shard(1, 8), Replicate()), AXES, (0, 1)) // 3
    assert device[0, :8].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (device[:, :8] == device[:, 8:16]).all()


def test_blocks_name_layers_with_weight_and_what_they_make() -> None:
    graph = graph_of(GPT)
    found = partition(graph, 8, 4)
    blocks = tiled_blocks(plan_of(found.coarse, found.found, 1, "1f1b"), graph)
    layers = {name: [layer.name for layer in inside] for name, inside in blocks}
    assert layers["h.0  (×2)"] == ["qkv", "proj", "fc", "proj"]
    fc = next(inside for name, inside in blocks if name.startswith("h.0"))[2]
    assert fc.weight_shape == (128, 32)
    assert all(isinstance(p, Shard) for p in (*fc.weight, *fc.made))


def test_picture_and_report_are_written_the_same_twice(tmp_path: Path) -> None:
    graph = graph_of(GPT)
    problem = problem_of(graph, 4, 8)
    found = partition(graph, 8, 4)
    plan = plan_of(found.coarse, found.found, 1, "1f1b")
    result = simulate_plan(problem, plan)
    pages = []
    for name in ("one", "two"):
        save_tiling(tmp_path / f"{name}.png", plan, graph)
        save_report(tmp_path / f"{name}.html", result, "title", "words", tiling(plan, graph))
        pages.append((tmp_path / f"{name}.html").read_text())
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert pages[0] == pages[1]
    assert "Which device holds what" in pages[0]
