"""Pipeline schedules: for every device group, the order of its actions. Named ones, and any other from a text.

The text form is torch's action grammar: `{stage}{F|B|I|W}{micro-batch}`, F forward, B whole backward, I gradient of
inputs, W gradient of weights; rows are comma-separated, one per device group.
"""

from __future__ import annotations

from simpart.schedule._actions import Action, ActionKind, Overlapped, Rows, format_rows, grid, parse_rows
from simpart.schedule._check import check_rows
from simpart.schedule._classic import (
    gpipe,
    interleaved_1f1b,
    interleaved_arrays,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
)
from simpart.schedule._dual import dualpipe, dualpipev, zb_v
from simpart.schedule._exact import ExactOrder, exact_zero_bubble
from simpart.schedule._named import SCHEDULES, Schedule, read_schedule
from simpart.schedule._placement import LOOPED, V_SHAPED, placement
from simpart.schedule._zero_bubble import StageTimes, group_spans, zero_bubble

__all__ = [
    "LOOPED", "SCHEDULES", "V_SHAPED", "Action", "ActionKind", "ExactOrder", "Overlapped", "Rows", "Schedule",
    "StageTimes", "check_rows", "dualpipe", "dualpipev", "exact_zero_bubble", "format_rows", "gpipe", "grid",
    "group_spans", "interleaved_1f1b", "interleaved_arrays", "interleaved_zb", "looped_bfs", "one_f_one_b",
    "parse_rows", "placement", "read_schedule", "zb_v", "zero_bubble",
]  # fmt: skip
