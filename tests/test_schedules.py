"""Schedules replayed: closed forms, bounds, goldens, and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.engines import compiled
from simpart.engines.simpy_engine import simulate_events
from simpart.errors import UserError
from simpart.program import Durations
from simpart.schedule import SCHEDULES, Schedule, gpipe, one_f_one_b, parse_rows
from simpart.simulation import makespan
from simpart.topology import Shape, StageEdge, actions_of, actions_of_rows, topology_of

SECONDS = st.integers(1, 9).map(float)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[float], int]:
    forward = draw(st.lists(SECONDS, min_size=1, max_size=5))
    backward = draw(st.lists(SECONDS, min_size=len(forward), max_size=len(forward)))
    return forward, backward, draw(st.integers(1, 9))


@given(chains(), st.sampled_from([0.0, 0.5, 3.0]))
def test_gpipe_takes_its_closed_form(chain: tuple[list[float], list[float], int], latency: float) -> None:
    f, b, count = chain
    expected = sum(f) + sum(b) + (count - 1) * (max(f) + max(b)) + 2 * (len(f) - 1) * latency
    assert makespan(gpipe(range(len(f)), count), f, b, latency) == (expected, (count,) * len(f))


@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS)
def test_1f1b_of_equal_stages_takes_its_closed_form(stages: int, count: int, f: float, b: float) -> None:
    seconds, in_flight = makespan(one_f_one_b(range(stages), count), [f] * stages, [b] * stages)
    assert seconds == (count + stages - 1) * (f + b)
    assert in_flight == tuple(min(stages - s, count) for s in range(stages))


@given(chains(), st.sampled_from([0.0, 0.5, 3.0]))
def test_no_schedule_beats_the_bound(chain: tuple[list[float], list[float], int], latency: float) -> None:
    f, b, count = chain
    bound = max(count * (f[s] + b[s]) + sum(f[x] + b[x] for x in range(s)) + 2 * s * latency for s in range(len(f)))
    for build in SCHEDULES.values():
        assert makespan(build(range(len(f)), count), f, b, latency)[0] >= bound - 1e-9


@given(chains())
def test_lock_step_takes_longest_and_1f1b_least(chain: tuple[list[float], list[float], int]) -> None:
    f, b, count = chain
    lock_step = (count + len(f) - 1) * (max(f) + max(b))
    slow = makespan(gpipe(range(len(f)), count), f, b)[0]
    assert lock_step >= slow >= makespan(one_f_one_b(range(len(f)), count), f, b)[0]


@given(chains(), st.sampled_from([0.25, 8.0]))
def test_times_scale(chain: tuple[list[float], list[float], int], x: float) -> None:
    f, b, count = chain
    rows = one_f_one_b(range(len(f)), count)
    assert makespan(rows, [x * t for t in f], [x * t for t in b], x)[0] == x * makespan(rows, f, b, 1.0)[0]


@given(chains(), st.floats(0, 5), st.floats(0, 5))
def test_a_faster_link_never_lengthens_the_step(
    chain: tuple[list[float], list[float], int], one: float, two: float
) -> None:
    f, b, count = chain
    rows = one_f_one_b(range(len(f)), count)
    assert makespan(rows, f, b, min(one, two))[0] <= makespan(rows, f, b, max(one, two))[0]


@pytest.mark.parametrize(
    ("f", "b", "count", "latency", "expected"),
    [([1, 1], [2, 2], 2, 0, (9, 9)), ([1, 2, 1], [2, 4, 2], 4, 0, (30, 28)),
     ([3, 1, 2, 1], [6, 2, 4, 2], 8, 0, (84, 75)), ([1, 2, 1], [2, 4, 2], 4, 0.5, (32, 30)),
     ([2] * 4, [4] * 4, 8, 1, (72, 82))],
)  # fmt: skip
def test_worked_examples(
    f: list[float], b: list[float], count: int, latency: float, expected: tuple[float, float]
) -> None:
    found = [makespan(build(range(len(f)), count), f, b, latency)[0] for build in (gpipe, one_f_one_b)]
    assert tuple(found) == expected


@pytest.mark.parametrize("groups", [(0,), (0, 1, 2), (2, 0, 1), (0, 1, 0, 1), (1, 0, 1)])
@pytest.mark.parametrize("kind", sorted(SCHEDULES))
@pytest.mark.parametrize("count", [1, 2, 7])
def test_fast_rows_equal_the_schedules_own(groups: tuple[int, ...], kind: str, count: int) -> None:
    if kind == "1f1b" and len(set(groups)) < len(groups):
        pytest.skip("1f1b has one stage per group")
    shape = Shape(groups, Schedule(kind=kind), count, ())
    expected = actions_of_rows(shape.schedule.rows(groups, count))
    assert all((a == b).all() for a, b in zip(actions_of(shape), expected, strict=True))


EDGES = (StageEdge(0, 1), StageEdge(1, 2), StageEdge(0, 2), StageEdge(1, 3, False), StageEdge(2, 3))


@pytest.mark.parametrize("transfers", ["tasks", "lags"])
@pytest.mark.parametrize(("groups", "kind"), [((0, 1, 2, 3), "1f1b"), ((0, 1, 2, 3), "gpipe"), ((0, 1, 0, 1), "gpipe")])
def test_engines_agree_on_every_schedule_with_skips(transfers: str, groups: tuple[int, ...], kind: str) -> None:
    topology = topology_of(Shape(groups, Schedule(kind=kind), 5, EDGES, transfers, (), True))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    durations = Durations(task_s=rng.random(len(topology.class_names)), lag_s=rng.random(2 * len(EDGES)))
    events, _ = simulate_events(topology, durations)
    np.testing.assert_allclose(compiled.times(topology, durations).end_s, events.end_s, atol=1e-9)


@pytest.mark.parametrize("transfers", ["tasks", "lags"])
def test_dependencies_follow_stage_edges(transfers: str) -> None:
    """A task's predecessors, looked through transfers, are those the edges name; nothing else."""
    topology = topology_of(Shape((0, 1, 2, 3), Schedule(kind="gpipe"), 3, EDGES, transfers))  # type: ignore[arg-type]

    def name(i: int) -> tuple[int, str, int]:
        return int(topology.stage[i]), "FBIW"[topology.kind[i]], int(topology.micro_batch[i])

    found = set()
    for i in np.flatnonzero(topology.kind < 4).tolist():
        for p in topology.predecessors[topology.indptr[i] : topology.indptr[i + 1]].tolist():
            source = p if topology.kind[p] < 4 else int(topology.predecessors[topology.indptr[p]])
            found.add((name(source), name(i)))
    expected = set()
    for edge, m in itertools.product(EDGES, range(3)):
        expected.add(((edge.source, "F", m), (edge.target, "F", m)))
        if edge.backward:
            expected.add(((edge.target, "B", m), (edge.source, "B", m)))
    assert found == expected


def test_transfers_on_one_link_queue() -> None:
    """Two forwards of 1 s feed a link that takes 5 s for each: the second arrives at 11 s."""
    shape = Shape((0, 1), Schedule(kind="gpipe"), 2, (StageEdge(0, 1),))
    topology = topology_of(shape)
    task_s = np.zeros(len(topology.class_names))
    task_s[[0, 4, 8]] = 1, 1, 5  # F of both stages, sends forward
    times = compiled.times(topology, Durations(task_s=task_s, lag_s=np.zeros(1)))
    assert times.makespan_s == 1 + 5 + 5 + 1


def test_a_split_backward_sends_its_gradient_before_the_weight_part() -> None:
    rows = parse_rows("0F0,0B0\n1F0,1I0,1W0")
    assert makespan(rows, [1, 1], [2, 2])[0] == 1 + 1 + 1 + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", r"(?s)group 0 cannot run 0B0 \(action 1\), which waits for 1B0.*>0B0<"),
     ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1", None), ("0B0,0F0\n1F0,1B0", "0B0 in row 0 comes before 0F0"),
     ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1", "stage 0 must run the backward of micro-batch 1"),
     ("0F0,0B0", "stage 1 has no action")],
)  # fmt: skip
def test_impossible_schedules_are_refused(text: str, message: str | None) -> None:
    rows = parse_rows(text)
    if message is None:
        assert makespan(rows, [1, 1], [2, 2])[0] > 0
    else:
        with pytest.raises(UserError, match=message):
            makespan(rows, [1, 1], [2, 2])


def test_a_deadlock_in_a_long_schedule_shows_where() -> None:
    rows = [list(row) for row in one_f_one_b(range(4), 40)]
    at = rows[1].index(parse_rows("1B7")[0][0])
    rows[1][at : at + 4] = [
        rows[1][at + 1],
        rows[1][at + 3],
        rows[1][at],
        rows[1][at + 2],
    ]  # 1F11 needs 0F11, behind 0B7
    with pytest.raises(
        UserError, match=r"(?s)group 0 cannot run 0B7 \(action 18\), which waits for 1B7.*>0B7<"
    ) as caught:
        makespan(tuple(map(tuple, rows)), [1] * 4, [1] * 4)
    assert len(str(caught.value)) < 2000
