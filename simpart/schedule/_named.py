"""Schedules by name, and the Schedule of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

from simpart.errors import UnknownNameError, UserError
from simpart.schedule._actions import Overlapped, Rows, parse_rows
from simpart.schedule._check import check_rows
from simpart.schedule._classic import gpipe, interleaved_1f1b, interleaved_zb, looped_bfs, one_f_one_b
from simpart.schedule._dual import dualpipe, dualpipev, zb_v
from simpart.schedule._placement import one_each, v_shape
from simpart.schedule._zero_bubble import Order, StageTimes, zero_bubble_order

__all__ = ["SCHEDULES", "Schedule", "read_schedule"]

WEIGHTS = ("forward", "input", "weight", "send", "limit")
"""Parameters of schedules made by `zero_bubble`: relative times of equal stages, micro-batches of a stage that a group
may hold."""


def _zb_h1(group_of_stage: Sequence[int], micro_batches: int, **given: int) -> Order:
    """Holds no more than 1F1B at its fullest: P micro-batches."""
    one_each("zb-h1", group_of_stage)
    return _scheduled(group_of_stage, micro_batches, len(group_of_stage), given)


def _zb_h2(group_of_stage: Sequence[int], micro_batches: int, **given: int) -> Order:
    """Holds up to 2 P micro-batches, for almost no bubble."""
    one_each("zb-h2", group_of_stage)
    return _scheduled(group_of_stage, micro_batches, 2 * len(group_of_stage), given)


def _v_half(group_of_stage: Sequence[int], micro_batches: int, **given: int) -> Order:
    """V-shaped, with about half of what 1F1B holds (2 P, in micro-batches of one of its two stages)."""
    groups = len(v_shape("v-half", group_of_stage))
    return _scheduled(group_of_stage, micro_batches, groups + 2, given)


def _v_min(group_of_stage: Sequence[int], micro_batches: int, **given: int) -> Order:
    """V-shaped, with about a third of what 1F1B holds."""
    groups = len(v_shape("v-min", group_of_stage))
    return _scheduled(group_of_stage, micro_batches, (2 * groups + 2) // 3 + 2, given)


def _scheduled(group_of_stage: Sequence[int], micro_batches: int, limit: int, given: dict[str, int]) -> Order:
    forward, split, weight, send = (
        float(given.get(name, default)) for name, default in zip(WEIGHTS, (1, 1, 1, 0), strict=False)
    )
    times = StageTimes.equal(len(group_of_stage), forward, split, weight, send)
    return zero_bubble_order(group_of_stage, micro_batches, times, given.get("limit", limit))


def _rows_of(build: Callable[..., Order]) -> Callable[..., Rows]:
    @wraps(build)
    def rows(group_of_stage: Sequence[int], micro_batches: int, **given: int) -> Rows:
        return build(group_of_stage, micro_batches, **given).rows()

    return rows


_FILLED: dict[str, Callable[..., Order]] = {"zb-h1": _zb_h1, "zb-h2": _zb_h2, "v-half": _v_half, "v-min": _v_min}
SCHEDULES: dict[str, Callable[..., Rows]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "zb-h1": _rows_of(_zb_h1),
    "zb-h2": _rows_of(_zb_h2),
    "interleaved-zb": interleaved_zb,
    "zb-v": zb_v,
    "v-half": _rows_of(_v_half),
    "v-min": _rows_of(_v_min),
    "dualpipev": dualpipev,
    "dualpipe": dualpipe,
}
_PARAMETERS = dict.fromkeys(_FILLED, WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A named schedule with its parameters, or explicit rows of actions (kind "explicit")."""

    kind: str = "1f1b"
    parameters: tuple[tuple[str, int], ...] = ()
    explicit: Rows = ()
    overlapped: tuple[tuple[int, int], ...] = field(default=(), init=False)
    """Row and place of overlapped actions, which compare equal to plain ones."""

    def __post_init__(self) -> None:
        pairs = ((g, c) for g, row in enumerate(self.explicit) for c, a in enumerate(row) if isinstance(a, Overlapped))
        object.__setattr__(self, "overlapped", tuple(pairs))

    def rows(self, group_of_stage: Sequence[int], micro_batches: int) -> Rows:
        """The actions of each device group, checked to be complete; raises UserError where they are not."""
        if self.kind == "explicit":
            check_rows(self.explicit, group_of_stage, micro_batches)
            return self.explicit
        build = SCHEDULES.get(self.kind)
        if build is None:
            raise UnknownNameError("schedule", self.kind, [*SCHEDULES, "explicit"])
        return build(group_of_stage, micro_batches, **self._given())

    def order(self, group_of_stage: Sequence[int], micro_batches: int) -> Order | None:
        """The same as arrays, where the schedule is made as such."""
        build = _FILLED.get(self.kind)
        return None if build is None else build(group_of_stage, micro_batches, **self._given())

    def _given(self) -> dict[str, int]:
        allowed = _PARAMETERS.get(self.kind, ())
        for name, value in self.parameters:
            if name not in allowed:
                raise UnknownNameError(f"parameter of schedule {self.kind}", name, allowed or ["none"])
            if value < (name != "send"):
                raise UserError(f"parameter {name} of schedule {self.kind} must be positive, got {value}")
        return dict(self.parameters)

    @property
    def overlaps(self) -> bool:
        """Whether forwards run together with backwards, so that two results may be there at the same time."""
        return self.kind in ("dualpipe", "dualpipev") or bool(self.overlapped)

    def holders(self, group_of_stage: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Groups that hold each stage: its own, and in dualpipe that of the mirrored stage too."""
        if self.kind != "dualpipe":
            return tuple((g,) for g in group_of_stage)
        return tuple(zip(group_of_stage, reversed(group_of_stage), strict=True))


def read_schedule(path: Path | str) -> Schedule:
    """An explicit schedule from a file of rows."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot read schedule {path}: {reason}; give a file with a row of actions per group"
        ) from error
    rows = parse_rows(text)
    if not any(rows):
        raise UserError(f"schedule {path} holds no actions; give a row such as 0F0,0B0 per device group")
    return Schedule(kind="explicit", explicit=rows)
