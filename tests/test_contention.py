"""Links that are shared: max-min fair rates, and what they do to a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.engines.fabric import fair_rates
from simpart.engines.simpy_engine import simulate_events
from simpart.errors import UserError
from simpart.hardware import load_cluster
from simpart.lowering.flows import link_of, ring_use, transfer_use
from simpart.lowering.topology import Shape, StageEdge, class_of_action, class_of_send, topology_of
from simpart.lowering.transfers import loads, messages
from simpart.program import Durations, Flows, Topology
from simpart.schedule import Schedule
from simpart.simulation import simulate, simulate_plan
from tests.test_lowering import plan, problem
from tests.toy_graphs import UnitLinks, chain, costs


@st.composite
def demands(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    flows, links = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    size = st.sampled_from([0.0, 1.0, 2.0, 5.0])
    demand = np.array(draw(st.lists(st.lists(size, min_size=links, max_size=links), min_size=flows, max_size=flows)))
    return demand, np.array(draw(st.lists(st.sampled_from([1.0, 3.0, 5.0, 100.0]), min_size=links, max_size=links)))


@given(demands())
def test_rates_are_feasible_and_max_min_fair(case: tuple[np.ndarray, np.ndarray]) -> None:
    """No link carries more than it can; a flow below its own speed meets a full link on which none is faster."""
    demand, capacity = case
    rates = fair_rates(demand, capacity)
    load = rates @ demand
    assert (load <= capacity * (1 + 1e-9)).all() and (rates <= 1 + 1e-9).all()
    full = load >= capacity * (1 - 1e-9)
    for i, rate in enumerate(rates):
        if rate < 1 - 1e-9:
            mine = full & (demand[i] > 0)
            assert any(rate >= rates[demand[:, link] > 0].max() - 1e-9 for link in np.flatnonzero(mine))


def two_senders(size: float, capacity: float) -> tuple[Topology, Durations, Flows]:
    """Stages 0 and 1 feed stage 2 at the same time, over one link; a message takes 4 s alone."""
    edges = (StageEdge(0, 2, False), StageEdge(1, 2, False))
    topology = topology_of(Shape((0, 1, 2), Schedule(kind="gpipe"), 1, edges))
    task_s = np.ones(len(topology.class_names))
    table = np.zeros((len(task_s), 1))
    shape = Shape((0, 1, 2), Schedule(kind="gpipe"), 1, edges)
    for edge in range(2):
        task_s[class_of_send(shape, edge, False)] = 4.0
        table[class_of_send(shape, edge, False)] = size
    flows = Flows(links=("net 2 in",), bytes_per_s=np.array([capacity]), bytes_by_class=table)
    return topology, Durations(task_s=task_s, lag_s=np.zeros(1)), flows


@pytest.mark.parametrize(("size", "capacity", "arrival"), [(8, 2, 9.0), (8, 3, 1 + 16 / 3), (8, 4, 5.0), (8, 100, 5.0)])
def test_two_transfers_share_a_link(size: float, capacity: float, arrival: float) -> None:
    topology, durations, flows = two_senders(size, capacity)
    times, _ = simulate_events(topology, durations, None, flows)
    forward = int(np.flatnonzero(topology.task_class == class_of_action(2, "F"))[0])
    assert times.start_s[forward] == pytest.approx(arrival)


def test_the_one_that_is_left_speeds_up() -> None:
    topology, durations, flows = two_senders(8, 2)
    durations.task_s[class_of_action(1, "F")] = 3.0  # begins when the other is half done: 1-3 alone, then shared
    times, _ = simulate_events(topology, durations, None, flows)
    sends = np.flatnonzero(topology.kind == 4)
    assert times.end_s[sends].tolist() == pytest.approx([7.0, 9.0])


def test_links_that_are_never_full_change_nothing() -> None:
    graph = chain(4)
    given = problem(graph, 8, costs=costs(links=UnitLinks({"p2p": 1 / 32, "all_reduce": 1 / 8})))
    one = plan(graph, [2, 4, 6], 4, [(1, 1)] * 4)
    static, shared = (simulate_plan(given, one, engine) for engine in ("compiled", "contention"))
    np.testing.assert_allclose(static.times.end_s, shared.times.end_s, atol=1e-9)
    assert shared.contention_s == pytest.approx(0, abs=1e-9) and static.contention_s == 0


def test_what_sharing_adds_is_a_component() -> None:
    """All devices share one bus: messages of both directions and gradient sums meet on it."""
    from dataclasses import replace

    graph = chain(4)
    given = problem(graph, 8, costs=costs(links=UnitLinks({"p2p": 1 / 16})))
    bus = replace(given.cluster.levels[0], kind="shared", bytes_per_s=17.0, shared_by=1)
    given = replace(given, cluster=replace(given.cluster, levels=(bus,)))
    one = plan(graph, [2, 4, 6], 4)
    static, shared = (simulate_plan(given, one, engine) for engine in ("compiled", "contention"))
    assert shared.contention_s > 0
    assert shared.step_s == pytest.approx(static.step_s + shared.contention_s)
    assert shared.to_json()["contention_s"] == shared.contention_s


def test_programs_without_flows_are_refused() -> None:
    from dataclasses import replace

    graph = chain(2)
    program = simulate_plan(problem(graph, 4), plan(graph, [2], 2)).program
    with pytest.raises(UserError, match="which links its transfers use"):
        simulate(replace(program, flows=None), "contention")


def test_messages_leave_one_card_and_enter_another() -> None:
    cluster = load_cluster("dgx-a100:2")
    found = messages((1, 1), (6, 7), (1, 1), (8, 9))
    use = transfer_use(cluster, loads(cluster, found, lambda samples: [(100 * samples, True, "float32")]))
    out = {link_of(cluster, cluster.levels[-1], rank) + " out" for rank in (6, 7)}
    assert sum(use.values()) == 400 and out <= set(use)


def test_a_ring_moves_what_the_textbook_says() -> None:
    cluster = load_cluster("dgx-a100:1")
    use = ring_use(cluster, (0, 1, 2, 3), 1000)
    assert len(use) == 8 and set(use.values()) == {2 * 3 / 4 * 1000}
    assert ring_use(cluster, (5,), 1000) == {}
