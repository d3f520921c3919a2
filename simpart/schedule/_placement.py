"""On which group a schedule expects each stage."""

from __future__ import annotations

from collections.abc import Sequence

from simpart.errors import UnsupportedError

__all__ = ["LOOPED", "V_SHAPED", "loops", "one_each", "placement", "v_shape"]

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipev")
LOOPED = ("interleaved-1f1b", "interleaved-zb", "looped-bfs")


def placement(kind: str, groups: int, depth: int = 2) -> list[int]:
    """Groups of the stages as a named schedule wants them: one each, down and back up, or round `depth` times."""
    once = list(range(groups))
    if kind in V_SHAPED:
        return once + once[::-1]
    return once * depth if kind in LOOPED else once


def one_each(kind: str, group_of_stage: Sequence[int]) -> None:
    """One stage per group, in any order."""
    if len(set(group_of_stage)) != len(group_of_stage):
        raise UnsupportedError(
            f"schedule {kind} needs one stage per device group, got stages on groups {_list(group_of_stage)}; "
            "use interleaved-1f1b or gpipe, or give the actions explicitly"
        )


def loops(kind: str, group_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Groups in pipeline order, where the stages go round them one or several times."""
    order = tuple(dict.fromkeys(group_of_stage))
    if len(group_of_stage) % len(order) or tuple(group_of_stage) != order * (len(group_of_stage) // len(order)):
        raise UnsupportedError(
            f"schedule {kind} needs stages that go round all groups in one order, got groups {_list(group_of_stage)}; "
            f"{_example(group_of_stage, order * 2)}"
        )
    return order


def v_shape(kind: str, group_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Groups in pipeline order, where the stages go down them and back up."""
    order = tuple(dict.fromkeys(group_of_stage))
    if tuple(group_of_stage) != order + order[::-1]:
        raise UnsupportedError(
            f"schedule {kind} needs two stages per group, down the groups and back up, got groups "
            f"{_list(group_of_stage)}; {_example(group_of_stage, order + order[::-1])}"
        )
    return order


def _example(found: Sequence[int], wanted: tuple[int, ...]) -> str:
    return f"place them {_list(wanted)}" if len(found) else "give it stages"


def _list(groups: Sequence[int]) -> str:
    shown = [str(g) for g in groups]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "…", *shown[-3:]])
