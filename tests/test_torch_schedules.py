"""simpart's orders are those that torch generates, wherever torch generates one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from simpart.schedule import SCHEDULES, Action, Rows, Schedule, check_rows, parse_rows

pytestmark = pytest.mark.slow

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def torch_rows(kind: str, groups: int, depth: int, micro_batches: int) -> Rows:
    """The order that torch's class runs; it looks at its stages only for their counts."""
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    found = getattr(schedules, CLASSES[kind])
    if kind in ("gpipe", "1f1b"):
        return tuple(what_runs(found, s, groups, micro_batches) for s in range(groups))
    stage = SimpleNamespace(
        group_size=groups, group_rank=0, num_stages=groups * depth, stage_index=0, is_first=False, is_last=False,
        has_backward=True, submod=None, stage_index_to_group_rank={},
    )  # fmt: skip
    order = found([stage] * depth, micro_batches, loss_fn=lambda: None).pipeline_order
    return parse_rows("\n".join(",".join(str(a) for a in order[r] if a is not None) for r in range(groups)))


def what_runs(found: Any, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """The calls that a schedule of one stage per rank makes (its `_get_pipeline_order` is off by one on the last)."""
    made, row = Mock(_n_microbatches=micro_batches, _num_stages=stages), []
    made._check_inputs.return_value = ([None] * micro_batches,) * 2
    made._stage.stage_index = stage
    made._stage.forward_one_chunk = lambda m, *_, **__: row.append(Action(stage, "F", m))
    made._stage.backward_one_chunk = lambda m, **_: row.append(Action(stage, "B", m))
    for name in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(made._stage, f"get_{name}_ops").return_value = []
    found._step_microbatches(made)
    return tuple(row)


def placement(kind: str, groups: int, depth: int) -> list[int]:
    once = list(range(groups))
    return once + once[::-1] if kind in ("zb-v", "dualpipev") else once * depth


@pytest.mark.parametrize("kind", sorted(CLASSES))
@pytest.mark.parametrize("groups", [2, 3, 4, 6])
def test_orders_equal_those_of_torch(kind: str, groups: int) -> None:
    compared = 0
    for depth in {"gpipe": [1], "1f1b": [1], "zb-v": [2], "dualpipev": [2]}.get(kind, [1, 2, 3]):
        for count in range(1, 4 * groups + 2):
            home = placement(kind, groups, depth)
            mine = Schedule(kind=kind).rows(home, count)
            check_rows(mine, home, count)
            if kind == "dualpipev" and count < 2 * groups:
                continue  # torch refuses fewer
            if kind.startswith("interleaved") and count % max(1, count // groups):
                continue
            assert mine == torch_rows(kind, groups, depth, count), (depth, count)
            compared += 1
    assert compared >= 2 * groups


def test_every_schedule_that_torch_has_is_compared() -> None:
    assert set(CLASSES) | {"zb-h1", "zb-h2", "v-half", "v-min", "dualpipe"} == set(SCHEDULES)
