"""The two engines and a reference that is too simple to be wrong say the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.engines import Deadlock, compiled, replay, static_order
from simpart.engines.simpy_engine import simulate_events
from simpart.errors import UserError
from simpart.program import MEMORY_KINDS, Durations, MemoryDeltas, Program, Topology


def reference_ends(topology: Topology, durations: Durations) -> list[float]:
    """Look again and again for a task that may run now; quadratic and without any order computed beforehand."""
    queues = [
        topology.resource_order[topology.resource_indptr[r] : topology.resource_indptr[r + 1]].tolist()
        for r in range(len(topology.resource_indptr) - 1)
    ] + [[int(i)] for i in np.flatnonzero(topology.resource < 0)]
    end: dict[int, float] = {}
    free = [0.0] * len(queues)
    while any(queues):
        progress = False
        for q, queue in enumerate(queues):
            if not queue:
                continue
            task = queue[0]
            edges = range(topology.indptr[task], topology.indptr[task + 1])
            if any(int(topology.predecessors[k]) not in end for k in edges):
                continue
            start = free[q]
            for k in edges:
                lag = topology.lag[k]
                start = max(start, end[int(topology.predecessors[k])] + (durations.lag_s[lag] if lag >= 0 else 0.0))
            free[q] = end[task] = start + durations.task_s[topology.task_class[task]]
            queue.pop(0)
            progress = True
        assert progress, "deadlock"
    return [end[i] for i in range(topology.size)]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any tasks on any resources with edges from lower to higher numbers, then renumbered at random."""
    size = draw(st.integers(1, 24))
    resources = draw(st.integers(1, 4))
    groups = draw(st.integers(1, resources))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    name = rng.permutation(size)
    resource = np.empty(size, dtype=np.int64)
    resource[name] = rng.integers(-1, resources, size)
    before: list[list[int]] = [[] for _ in range(size)]
    for i in range(size):
        before[name[i]] = name[rng.permutation(i)[: rng.integers(0, 4)]].tolist()
    queues = [[int(i) for i in name if resource[i] == r] for r in range(resources)]
    indptr = np.cumsum([0] + [len(b) for b in before])
    predecessors = np.array([p for b in before for p in b], dtype=np.int64)
    resource_indptr = np.cumsum([0] + [len(q) for q in queues])
    resource_order = np.array([i for q in queues for i in q], dtype=np.int64)
    classes = 5
    tables = [
        rng.integers(-8, 9, (n, len(MEMORY_KINDS))).astype(float) for n in (groups, groups, classes, classes, classes)
    ]
    topology = Topology(
        resource=resource, kind=rng.integers(0, 4, size), stage=np.zeros(size, dtype=np.int64),
        micro_batch=np.arange(size), task_class=rng.integers(0, classes, size), indptr=indptr,
        predecessors=predecessors, lag=rng.integers(-1, 3, predecessors.size),
        resource_indptr=resource_indptr, resource_order=resource_order,
        order=static_order(indptr, predecessors, resource, resource_indptr, resource_order), groups=groups,
        resource_names=tuple(f"r{r}" for r in range(resources)), class_names=tuple(f"c{c}" for c in range(classes)),
    )  # fmt: skip
    durations = Durations(task_s=rng.choice([0.0, 0.5, 1.0, rng.random()], classes), lag_s=rng.random(3))
    memory = MemoryDeltas(static=tables[0], late=tables[1], start=tables[2], end=tables[3], within=tables[4])
    return Program(topology=topology, durations=durations, memory=memory, multiplicity=(1,) * groups)


@given(programs())
def test_both_engines_and_the_quadratic_reference_agree(program: Program) -> None:
    expected = reference_ends(program.topology, program.durations)
    for engine in ("compiled", "simpy"):
        times, _ = replay(program, engine)
        np.testing.assert_allclose(times.end_s, expected, rtol=0, atol=1e-9)


@given(programs())
def test_engines_agree_on_memory(program: Program) -> None:
    _, mine = replay(program, "compiled")
    _, theirs = replay(program, "simpy")
    np.testing.assert_allclose(mine.bytes, theirs.bytes, atol=1e-9)
    assert mine.bytes.tolist() == mine.by_kind.sum(axis=1).tolist()
    np.testing.assert_array_equal(mine.task, theirs.task)


@given(programs())
def test_times_and_memory_in_one_pass_are_those_of_two(program: Program) -> None:
    pytest.importorskip("numba")  # once it is there, the compiled loop runs
    times, held = compiled.times_and_peaks(program.topology, program.durations, program.memory)
    apart, alone = compiled.times(program.topology, program.durations), compiled.peaks(program.topology, program.memory)
    np.testing.assert_array_equal(times.start_s, apart.start_s)
    np.testing.assert_array_equal(times.end_s, apart.end_s)
    np.testing.assert_array_equal(held.by_kind, alone.by_kind)
    np.testing.assert_array_equal(held.bytes, alone.bytes)
    np.testing.assert_array_equal(held.task, alone.task)


@given(programs(), st.integers(1, 70))
def test_a_batch_is_its_plans_one_by_one(program: Program, plans: int) -> None:
    rng = np.random.default_rng(plans)
    task_s, lag_s = rng.random((plans, 5)), rng.random((plans, 3))
    single = [
        compiled.times(program.topology, Durations(task_s=t, lag_s=g)).makespan_s
        for t, g in zip(task_s, lag_s, strict=True)
    ]
    assert compiled.makespans(program.topology, task_s, lag_s).tolist() == single


@given(programs())
def test_no_resource_runs_two_tasks_at_once_and_work_is_conserved(program: Program) -> None:
    topology, times = program.topology, replay(program)[0]
    for r in range(len(topology.resource_names)):
        row = topology.resource_order[topology.resource_indptr[r] : topology.resource_indptr[r + 1]]
        assert (times.start_s[row[1:]] >= times.end_s[row[:-1]]).all()
    work = program.durations.task_s[topology.task_class]
    np.testing.assert_allclose(times.end_s - times.start_s, work, atol=1e-12)


@given(programs())
def test_shorter_tasks_never_lengthen_the_step(program: Program) -> None:
    whole = program.durations
    less = Durations(task_s=whole.task_s * np.array([1, 0.3, 1, 0.9, 0]), lag_s=whole.lag_s * np.array([1, 0.5, 0]))
    assert compiled.times(program.topology, less).makespan_s <= compiled.times(program.topology, whole).makespan_s


def test_without_numba_answers_are_equal_to_the_last_bit() -> None:
    script = """
import sys, numpy as np
from simpart.engines import compiled
from simpart.program import Durations, MemoryDeltas
from simpart.lowering.topology import Shape, StageEdge, topology_of
from simpart.schedule import Schedule
edges = tuple(StageEdge(s, s + 1) for s in range(3))
topology = topology_of(Shape((0, 1, 2, 3), Schedule(kind="1f1b"), 9, edges))
rng = np.random.default_rng(0)
task_s = rng.random((20, len(topology.class_names)))
durations = Durations(task_s=task_s[0], lag_s=np.zeros(1))
memory = MemoryDeltas(static=rng.random((4, 7)), late=rng.random((4, 7)), start=rng.random((len(task_s[0]), 7)),
                      end=-rng.random((len(task_s[0]), 7)), within=rng.random((len(task_s[0]), 7)))
print([x.hex() for x in compiled.times(topology, durations).end_s.tolist()])
print([x.hex() for x in compiled.makespans(topology, task_s).tolist()])
print([x.hex() for x in compiled.peaks(topology, memory).bytes.tolist()], topology.order.tolist())
print("numba" in sys.modules, file=sys.stderr)
"""
    out = {}
    for flag, lead in (("1", ""), ("0", "import numba\n")):
        environment = {"SIMPART_NO_JIT": flag, "PYTHONPATH": ":".join(sys.path), "HOME": str(Path.home())}
        command = [sys.executable, "-c", lead + script]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert run.stderr.strip() == str(flag == "0")
        out[flag] = run.stdout
    assert out["0"] == out["1"]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("engine", ["compiled", "simpy", "batch"])
def test_impossible_durations_are_refused_naming_the_task(value: float, engine: str) -> None:
    from simpart.lowering.topology import Shape, StageEdge, class_of_action, topology_of
    from simpart.schedule import Schedule

    topology = topology_of(Shape((0, 1), Schedule(), 3, (StageEdge(0, 1),)))
    task_s = np.ones(len(topology.class_names))
    task_s[class_of_action(1, "B")] = value
    durations = Durations(task_s=task_s, lag_s=np.zeros(1))
    with pytest.raises(UserError, match=f"got {value} for task 1B0"):
        if engine == "compiled":
            compiled.times(topology, durations)
        elif engine == "simpy":
            simulate_events(topology, durations)
        else:
            compiled.makespans(topology, np.stack([np.ones_like(task_s), task_s]))


def test_tasks_that_wait_for_one_another_are_found() -> None:
    indptr, predecessors = np.array([0, 1, 2, 2]), np.array([1, 0])
    with pytest.raises(Deadlock) as caught:
        static_order(indptr, predecessors, np.array([0, 1, 1]), np.array([0, 1, 3]), np.array([0, 1, 2]))
    assert caught.value.stuck == (0, 1)
