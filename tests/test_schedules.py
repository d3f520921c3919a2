"""Schedules replayed: closed forms, bounds, goldens, and refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.engines import compiled
from simpart.engines.simpy_engine import simulate_events
from simpart.errors import ScheduleError, UserError
from simpart.lowering.topology import Shape, StageEdge, actions_of, actions_of_rows, build_topology, topology_of
from simpart.program import Durations
from simpart.schedule import (
    SCHEDULES,
    Action,
    Rows,
    Schedule,
    StageTimes,
    exact_zero_bubble,
    format_rows,
    gpipe,
    group_spans,
    one_f_one_b,
    parse_rows,
    read_schedule,
    zero_bubble,
)
from simpart.simulation import chain_times, makespan
from simpart.testing.schedule_suite import ScheduleCase, check_schedule, held, placement, schedule_cases

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
    for kind in ("gpipe", "1f1b", "looped-bfs"):
        assert makespan(SCHEDULES[kind](range(len(f)), count), f, b, latency)[0] >= bound - 1e-9


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


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("1f1b", (0,)), ("1f1b", (0, 1, 2)), ("1f1b", (2, 0, 1)), ("gpipe", (0, 1, 2)), ("gpipe", (0, 1, 0, 1)),
     ("interleaved-1f1b", (0, 1)), ("interleaved-1f1b", (1, 0, 2) * 3), ("interleaved-1f1b", (0, 0)), ("zb-h1", (1, 0)),
     ("zb-h2", (0, 1, 2)), ("v-half", (0, 1, 1, 0)), ("v-min", (1, 0, 2, 2, 0, 1))],
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 2, 7])
def test_fast_rows_equal_the_schedules_own(groups: tuple[int, ...], kind: str, count: int) -> None:
    shape = Shape(groups, Schedule(kind=kind), count, ())
    expected = actions_of_rows(shape.schedule.rows(groups, count))
    assert all((a == b).all() for a, b in zip(actions_of(shape), expected, strict=True))


EDGES = (StageEdge(0, 1), StageEdge(1, 2), StageEdge(0, 2), StageEdge(1, 3, False), StageEdge(2, 3))


@pytest.mark.parametrize("transfers", ["tasks", "lags"])
@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_engines_agree_on_every_schedule_with_skips(transfers: str, kind: str) -> None:
    groups = next(tuple(home) for n in (4, 2) if len(home := placement(kind, n)) == 4)
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
    [("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", r"group 0 cannot run 0B0 \(action 1\), which waits for 1B0"),
     ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1", None), ("0B0,0F0\n1F0,1B0", "0B0 in row 0 comes before 0F0"),
     ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1", "stage 0 must run the backward of micro-batch 1"),
     ("0F0,0B0", "stage 1 has no action")],
)  # fmt: skip
def test_impossible_schedules_are_refused(text: str, message: str | None) -> None:
    rows = parse_rows(text)
    if message is None:
        assert makespan(rows, [1, 1], [2, 2])[0] > 0
    else:
        with pytest.raises(UserError, match=message) as caught:
            makespan(rows, [1, 1], [2, 2])
        assert "deadlocks" not in str(caught.value) or ">0B0<" in caught.value.grid  # type: ignore[attr-defined]


def test_a_deadlock_in_a_long_schedule_shows_where() -> None:
    rows = [list(row) for row in one_f_one_b(range(4), 40)]
    at = rows[1].index(parse_rows("1B7")[0][0])
    rows[1][at : at + 4] = [
        rows[1][at + 1],
        rows[1][at + 3],
        rows[1][at],
        rows[1][at + 2],
    ]  # 1F11 needs 0F11, behind 0B7
    with pytest.raises(ScheduleError, match=r"group 0 cannot run 0B7 \(action 18\), which waits for 1B7") as caught:
        makespan(tuple(map(tuple, rows)), [1] * 4, [1] * 4)
    assert ">0B7<" in caught.value.grid and len(caught.value.grid) < 2000


# --- all schedules ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_every_schedule_keeps_its_promises(kind: str) -> None:
    cases: list[ScheduleCase] = [case for case in schedule_cases() if case.kind == kind]
    assert len(cases) >= 10
    for case in cases:
        check_schedule(case)


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_schedules_survive_torchs_text(kind: str, tmp_path: Path) -> None:
    home = placement(kind, 4)
    schedule = Schedule(kind=kind)
    rows = schedule.rows(home, 17)
    (tmp_path / "rows.csv").write_text(format_rows(rows))
    explicit = read_schedule(tmp_path / "rows.csv")
    assert explicit.explicit == rows
    assert bool(explicit.overlapped) == kind.startswith("dualpipe")
    pairs = [chain_times(r, [1.0] * len(home), [2.0] * len(home), [1.5] * len(home)) for r in (rows, explicit.explicit)]
    assert pairs[0].end_s.tolist() == pairs[1].end_s.tolist()


def test_overlapped_actions_start_and_end_together() -> None:
    rows = parse_rows("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")
    plain = parse_rows("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")
    assert rows == plain and Schedule(kind="explicit", explicit=rows) != Schedule(kind="explicit", explicit=plain)
    times = [chain_times(r, [1, 1], [3, 1], [1, 1]) for r in (rows, plain)]
    assert [float(t.start_s[2]) for t in times] == [4.0, 2.0]  # the pair waits for 1B0, which ends at 4
    assert [float(t.start_s[10]) for t in times] == [9.0, 7.0]  # 1F2 waits for the pair, or only for 1B1


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [("interleaved-1f1b", [0, 1, 1, 0], "go round all groups"), ("zb-v", [0, 1, 0, 1], "down the groups and back up"),
     ("zb-h1", [0, 0], "one stage per device group"), ("dualpipe", [0, 1, 2], "even number of stages, got 3"),
     ("1f2b", [0], "1f1b")],
)  # fmt: skip
def test_a_placement_that_a_schedule_cannot_use_is_refused(kind: str, groups: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Schedule(kind=kind).rows(groups, 4)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("0F0,2F0\n1F0", "names stage 2 of 2"), ("0F0,1F0\n1F0", "stands in row 0"),
     ("0F0,0F7\n1F0", "micro-batch 7 of 1"), ("0F0,0F0\n1F0", "occurs twice"), ("0B0,0F0\n1F0", "comes before 0F0"),
     ("0F0,0B0,0I0\n1F0", "runs a backward again; keep 0B0, or 0I0 and 0W0"),
     ("0F0,0I0,0W0,0B0\n1F0", "runs a backward again")],
)  # fmt: skip
def test_the_first_action_at_fault_is_marked(text: str, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault) as caught:
        Schedule(kind="explicit", explicit=parse_rows(text)).rows([0, 1], 1)
    assert f">{str(caught.value).split()[1]}<" in caught.value.grid


# --- zero bubble ------------------------------------------------------------------------------------------------------
@st.composite
def stage_times(draw: st.DrawFn) -> tuple[list[int], int, StageTimes, float]:
    home = draw(st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 1, 1, 0], [0, 1, 0, 1], [1, 0]]))
    n = len(home)
    f, i, w = (tuple(draw(st.lists(SECONDS, min_size=n, max_size=n))) for _ in range(3))
    send = tuple(draw(st.lists(st.sampled_from([0.0, 0.5, 4.0]), min_size=n - 1, max_size=n - 1)))
    times = StageTimes(forward_s=f, input_s=i, weight_s=w, send_s=send, held=(1.0,) * n, kept=(0.5,) * n)
    return home, draw(st.integers(1, 6)), times, draw(st.sampled_from([3.0, 5.0, 100.0]))


@given(stage_times())
def test_zero_bubble_orders_are_complete_and_stay_within_memory(
    case: tuple[list[int], int, StageTimes, float],
) -> None:
    home, count, times, limit = case
    rows = zero_bubble(home, count, times, limit)
    Schedule(kind="explicit", explicit=rows).rows(home, count)
    assert max(map(held, rows)) <= limit
    work = [0.0] * len(rows)
    for s, g in enumerate(home):
        work[g] += count * (times.forward_s[s] + times.input_s[s] + times.weight_s[s])
    assert max(end for _, end in group_spans(rows, times)) >= max(work) - 1e-9


@pytest.mark.parametrize("home", [(0, 1, 2, 3), (1, 2, 0), (0, 1, 2, 2, 1, 0)])
def test_zero_bubble_orders_are_the_same_with_and_without_machine_code(
    home: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    f, i, w, held = rng.uniform(0.2, 2.0, (4, len(home))).tolist()
    times = StageTimes(
        forward_s=tuple(f), input_s=tuple(i), weight_s=tuple(w), send_s=(0.3,) * (len(home) - 1), held=tuple(held),
        kept=tuple(x / 2 for x in held),
    )  # fmt: skip
    fast = zero_bubble(home, 20, times, 12.0)
    monkeypatch.setenv("SIMPART_NO_JIT", "1")
    assert zero_bubble(home, 20, times, 12.0) == fast


def all_orders(stage: int, count: int) -> list[tuple[Action, ...]]:
    """Every order of a stage's actions in which each kind runs in order and I follows F, W follows I."""
    found: list[tuple[Action, ...]] = []

    def extend(row: tuple[Action, ...], done: tuple[int, int, int]) -> None:
        if sum(done) == 3 * count:
            found.append(row)
        for k, kind in enumerate("FIW"):
            if done[k] < (count if k == 0 else done[k - 1]):
                after = tuple(n + (j == k) for j, n in enumerate(done))
                extend((*row, Action(stage, kind, done[k])), after)  # type: ignore[arg-type]

    extend((), (0, 0, 0))
    return found


@pytest.mark.parametrize(
    ("count", "limit", "seconds", "send"),
    [(2, 2, (1, 1, 1), 0), (3, 2, (2, 3, 1), 0.5), (3, 3, (1, 2, 4), 0), (2, 1, (1, 1, 1), 2)],
)
def test_the_exact_order_is_that_of_enumeration(
    count: int, limit: int, seconds: tuple[int, int, int], send: float
) -> None:
    times = StageTimes.equal(2, *seconds, send)

    def span(rows: Rows) -> float:
        try:
            f, i, w = ([float(x)] * 2 for x in seconds)
            return chain_times(rows, f, i, w, send).makespan_s
        except UserError:
            return float("inf")

    orders = [[row for row in all_orders(s, count) if held(row) <= limit] for s in range(2)]
    best = min(span(pair) for pair in itertools.product(*orders))
    found = exact_zero_bubble([0, 1], count, times, limit)
    assert found.cost_s == pytest.approx(best) == pytest.approx(found.bound_s) == pytest.approx(span(found.rows))
    assert max(map(held, found.rows)) <= limit
    heuristic = max(end for _, end in group_spans(zero_bubble([0, 1], count, times, limit), times))
    assert heuristic >= best - 1e-9


def test_a_limit_below_one_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"holds at most 0.5 per group; raise the limit"):
        zero_bubble([0, 1], 4, StageTimes.equal(2, 1, 1, 1), 0.5)


# --- published bubbles ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("groups", [4, 8, 16])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.5, 1.0)])
def test_bubbles_of_dualpipe_are_the_published_ones(kind: str, groups: int, f: float, i: float, w: float) -> None:
    """`(PP/2 - 1)(F&B + B - 3W)` with PP stages, B a whole backward and F&B an overlapped pair, here F + B. References:
    DeepSeek-V3 technical report, arXiv 2412.19437, table 2; DualPipeV (PP/2 devices, two stages each): the README of
    github.com/deepseek-ai/DualPipe. Where F and I differ in length the real order may do better."""
    home = placement(kind, groups, 2)
    chain = tuple(StageEdge(s, s + 1) for s in range(len(home) - 1))
    for count in (2 * len(home), 4 * len(home)):
        shape = Shape(tuple(home), Schedule(kind=kind), count, chain, "lags")
        topology = build_topology(shape, actions_of(shape))
        task_s = np.tile([f, i + w, i, w], len(home))
        step_s = compiled.times(topology, Durations(task_s=task_s, lag_s=np.zeros(2 * len(chain)))).makespan_s
        bubble_s = step_s - count * (f + i + w) * len(home) / groups
        published = (len(home) / 2 - 1) * (f + (i + w) + (i + w) - 3 * w)
        assert bubble_s == pytest.approx(published) if f == i else bubble_s <= published


@pytest.mark.parametrize("groups", [4, 8])
def test_bubbles_of_zero_bubble_orders_are_the_published_ones(groups: int) -> None:
    """Of each group's own span, with F = I = W = 1: `(p - 1)(F + I - W)` within p micro-batches (ZB-H1), none within
    2 p (ZB-H2), none V-shaped (ZB-V). References: Qi et al., arXiv 2401.10241, table 2; arXiv 2405.15362, section 3."""
    count, times = 3 * groups, StageTimes.equal(groups, 1, 1, 1)

    def bubble(rows: Rows, times: StageTimes, stages_each: int) -> float:
        return max(end - begin for begin, end in group_spans(rows, times)) - 3 * count * stages_each

    chain = list(range(groups))
    assert bubble(zero_bubble(chain, count, times, groups, "span"), times, 1) <= groups - 1
    assert bubble(zero_bubble(chain, count, times, 2 * groups, "span"), times, 1) == 0
    v_shape = placement("zb-v", groups, 2)
    assert bubble(Schedule(kind="zb-v").rows(v_shape, count), StageTimes.equal(2 * groups, 1, 1, 1), 2) == 0
