"""Blocks of random graphs: a partition into convex sets in topological order, and as few as asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpart.searchers._block_sets import BlockSets
from simpart.searchers._blocks import blocks
from simpart.searchers._contraction import Contraction
from simpart.searchers._op_dag import OpDag, crossing_values
from simpart.searchers._uncoarsen import uncoarsen


def dag_of(
    edges: list[tuple[int, int]], times: list[float], cloned: list[int] | None = None, group: list[int] | None = None
) -> OpDag:
    """Every op makes one value, of `10 + op` bytes."""
    n = len(times)
    source, target = (np.array([e[x] for e in edges], dtype=np.int64) for x in (0, 1))
    return OpDag(
        time_s=np.array(times, dtype=float),
        memory_bytes=np.ones(n),
        edge_source=source,
        edge_target=target,
        edge_value=source,
        value_bytes=10.0 + np.arange(n, dtype=np.float64),
        group=np.arange(n) if group is None else np.array(group),
        cloned=np.isin(np.arange(n), cloned or []),
    )


@st.composite
def dags(draw: st.DrawFn) -> OpDag:
    n = draw(st.integers(1, 24))
    pairs = [(a, b) for b in range(n) for a in range(max(0, b - 6), b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3 * n)) if pairs else []
    times = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0]), min_size=n, max_size=n))
    readers_of_none = set(range(n)) - {b for _, b in chosen}
    cloned = sorted(draw(st.sets(st.sampled_from(sorted(readers_of_none)), max_size=3)))
    if len(cloned) == n:
        cloned = cloned[1:]
    group = list(range(n))
    for start in sorted(draw(st.lists(st.integers(0, max(0, n - 2)), max_size=3))):
        if start + 1 < n and start not in cloned and start + 1 not in cloned:
            group[start + 1] = group[start]
    return dag_of(chosen, times, cloned, group)


def reachable(dag: OpDag) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which op reaches which, through ops and indivisible groups that are no clones."""
    n = dag.size
    reach = np.zeros((n, n), dtype=bool)
    for a, b in zip(dag.edge_source, dag.edge_target, strict=True):
        reach[a, b] = not dag.cloned[a] and not dag.cloned[b]
    same = (dag.group[:, None] == dag.group[None, :]) & ~dag.cloned[:, None] & ~dag.cloned[None, :]
    reach |= same & ~np.eye(n, dtype=bool)
    for middle in range(n):
        reach |= reach[:, middle : middle + 1] & reach[middle : middle + 1, :]
    return reach


@settings(max_examples=150, deadline=None)
@given(
    dag=dags(), most=st.integers(1, 9), released=st.booleans(), price=st.sampled_from([0.0, 0.1]), back=st.booleans()
)
def test_blocks_partition_the_ops_into_convex_sets_in_topological_order(
    dag: OpDag, most: int, released: bool, price: float, back: bool
) -> None:
    chain = blocks(dag, most, released=released, seconds_per_byte=price, uncoarsening=back)
    own = np.flatnonzero(~dag.cloned)
    assert sorted(np.concatenate(chain).tolist()) == own.tolist()
    assert len(chain) <= most
    block = np.full(dag.size, -1)
    for b, ops in enumerate(chain):
        block[ops] = b
        assert ops.tolist() == sorted(ops.tolist()) and ops.size
    for a, b in zip(dag.edge_source, dag.edge_target, strict=True):
        assert dag.cloned[a] or block[a] <= block[b]
    assert (block == block[dag.group])[own].all()
    reach = reachable(dag)
    for b in range(len(chain)):
        inside = block == b
        for other in np.flatnonzero(~inside & ~dag.cloned):
            assert not (reach[inside, other].any() and reach[other, inside].any())


@settings(max_examples=60, deadline=None)
@given(dag=dags(), most=st.integers(1, 6))
def test_same_graph_same_blocks_whatever_the_order_of_its_edges(dag: OpDag, most: int) -> None:
    turned = OpDag(
        time_s=dag.time_s, memory_bytes=dag.memory_bytes, value_bytes=dag.value_bytes, group=dag.group,
        cloned=dag.cloned, edge_source=dag.edge_source[::-1], edge_target=dag.edge_target[::-1],
        edge_value=dag.edge_value[::-1],
    )  # fmt: skip
    assert [b.tolist() for b in blocks(dag, most)] == [b.tolist() for b in blocks(turned, most)]


@settings(max_examples=80, deadline=None)
@given(dag=dags(), most=st.integers(1, 6))
def test_transfers_count_each_value_once_per_stage(dag: OpDag, most: int) -> None:
    chain = blocks(dag, most)
    size_of = {ends: float(dag.value_bytes[values].sum()) for ends, values in crossing_values(dag, chain).items()}
    entering, leaving = BlockSets.of_chain(len(chain)).crossing(size_of)
    edges = list(zip(dag.edge_source.tolist(), dag.edge_target.tolist(), strict=True))
    where = {op: b for b, ops in enumerate(chain) for op in ops.tolist()}
    for i in range(len(chain)):
        for j in range(i + 1, len(chain) + 1):
            crossing = [(a, b) for a, b in edges if a in where and b in where]
            into = {a for a, b in crossing if where[a] < i <= where[b] < j}
            out = {a for a, b in crossing if i <= where[a] < j <= where[b]}
            assert entering[i, j] == sum(10 + a for a in into)
            assert leaving[i, j] == sum(10 + a for a in out)


def test_a_chain_is_cut_into_equal_blocks() -> None:
    dag = dag_of([(x, x + 1) for x in range(31)], [1.0] * 32)
    assert [len(ops) for ops in blocks(dag, 8)] == [4] * 8
    uneven = dag_of([(x, x + 1) for x in range(5)], [3.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert [ops.tolist() for ops in blocks(uneven, 3)] == [[0], [1, 2], [3, 4, 5]]


def test_cuts_fall_where_little_crosses() -> None:
    dag = dag_of([(0, 1), (1, 2), (2, 3), (1, 3)], [1.0] * 4)  # two values cross behind op 2
    assert [ops.tolist() for ops in blocks(dag, 2, seconds_per_byte=0.1)] == [[0], [1, 2, 3]]


def test_cloned_ops_are_in_no_block_and_found_by_who_needs_them() -> None:
    # 0 -> 1 prepare a mask that 3 and 5 read; 2 -> 3 -> 4 -> 5 is the model.
    dag = dag_of([(0, 1), (1, 3), (1, 5), (2, 3), (3, 4), (4, 5)], [1.0] * 6, cloned=[0, 1])
    chain = blocks(dag, 4)
    assert [ops.tolist() for ops in chain] == [[2], [3], [4], [5]]
    assert Contraction(dag).clones == {2: set(), 3: {0, 1}, 4: set(), 5: {0, 1}}


def test_a_write_into_a_clone_goes_with_it_and_with_what_it_reads() -> None:
    # 0 is a fresh tensor into which 2 writes what 1 made; 3 and 5 read it, through a view (4) the latter.
    edges = [(0, 2), (1, 2), (0, 3), (0, 4), (4, 5), (3, 5)]
    dag = dag_of(edges, [1.0] * 6, cloned=[0, 1, 2, 4], group=[0, 1, 0, 3, 4, 5])
    assert Contraction(dag).clones == {3: {0, 1, 2}, 5: {0, 1, 2, 4}}


def test_compaction_goes_on_where_a_merge_misses_memory() -> None:
    dag = dag_of([(x, x + 1) for x in range(5)], [1.0, 1.0, 9.0, 9.0, 9.0, 9.0])
    memory = np.array([1.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    heavy = OpDag(
        time_s=dag.time_s, memory_bytes=memory, edge_source=dag.edge_source, edge_target=dag.edge_target,
        edge_value=dag.edge_value, value_bytes=dag.value_bytes, group=dag.group, cloned=dag.cloned,
    )  # fmt: skip
    assert [ops.tolist() for ops in blocks(heavy, 4, limit_bytes=10.0)] == [[0], [1], [2, 3], [4, 5]]
    assert [ops.tolist() for ops in blocks(heavy, 1, limit_bytes=10.0)] == [[0], [1], [2, 3, 4, 5]]


def test_a_long_skip_does_not_join_its_ends() -> None:
    dag = dag_of([(0, 1), (1, 2), (2, 3), (0, 3)], [1.0, 50.0, 50.0, 1.0])
    assert [ops.tolist() for ops in blocks(dag, 3, released=True)] != [[0, 3], [1], [2]]
    assert [ops.tolist() for ops in blocks(dag, 3)] in ([[0, 1], [2], [3]], [[0], [1], [2, 3]])


def test_bad_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="topological order"):
        blocks(dag_of([(1, 0)], [1.0, 1.0]), 2)
    with pytest.raises(ValueError, match="cycle"):
        blocks(dag_of([(0, 1), (1, 2)], [1.0] * 3, group=[0, 1, 0]), 2)
    with pytest.raises(ValueError, match="which is not"):
        blocks(dag_of([(0, 1)], [1.0, 1.0], cloned=[1]), 2)
    with pytest.raises(ValueError, match="at least 1"):
        blocks(dag_of([], [1.0]), 0)


@settings(max_examples=60, deadline=None)
@given(dag=dags(), most=st.integers(1, 6), seed=st.integers(0, 9))
def test_sums_over_closed_sets_are_those_of_their_blocks(dag: OpDag, most: int, seed: int) -> None:
    chain, rng = blocks(dag, most), np.random.default_rng(seed)
    n, size_of = len(chain), {ends: float(len(values)) for ends, values in crossing_values(dag, chain).items()}
    edges = {(maker, reader) for maker, readers in size_of for reader in readers}
    sets = BlockSets.of_graph(n, edges, 1000)
    per_block, per_pair = rng.integers(0, 9, n).astype(float), rng.integers(0, 9, (n, n)).astype(float)
    sums, largest, both = sets.sums(per_block), sets.largest(per_block), sets.both(per_pair)
    entering, leaving = sets.crossing(size_of)
    for s, t in np.argwhere(sets.nested).tolist():
        stage = sets.blocks(s, t)
        assert {a for a, b in edges if b in stage} <= set(np.flatnonzero(sets.inside[t]).tolist())
        assert sums[s, t] == per_block[stage].sum() and largest[s, t] == max(per_block[stage])
        assert both[s, t] == per_pair[np.ix_(stage, stage)].sum()
        assert entering[s, t] == sum(x for (m, r), x in size_of.items() if m not in stage and set(r) & set(stage))
        assert leaving[s, t] == sum(x for (m, r), x in size_of.items() if m in stage and set(r) - set(stage))


def test_uncoarsening_moves_a_part_to_the_side_where_it_is_read() -> None:
    # 0 -> 1 -> 2 -> 3 was coarsened to {0, 1} and {2, 3}, but little crosses behind op 0 and much behind op 1.
    levels = [np.arange(4), np.array([0, 0, 2, 2])]
    edges = np.array([0, 1, 2]), np.array([1, 2, 3]), np.array([0, 1, 2])
    value_bytes, ones = np.array([1.0, 50.0, 5.0]), np.array([1.0, 1.0, 1.0, 1.0])
    assert uncoarsen(levels, edges, value_bytes, ones, ones, math.inf).tolist() == [0, 0, 2, 2]  # too heavy
    light = np.array([2.0, 0.5, 0.5, 0.5])
    assert uncoarsen(levels, edges, value_bytes, light, ones, math.inf).tolist() == [0, 2, 2, 2]
    assert uncoarsen(levels, edges, value_bytes, light, ones, 2.5).tolist() == [0, 0, 2, 2]


def test_uncoarsening_keeps_an_order_of_nodes() -> None:
    # Op 1 would save most beside op 3, but 2 reads 0 and 3 reads 2: {1, 3} and {0, 2} must not feed one another.
    levels = [np.arange(5), np.array([0, 0, 2, 3, 3])]
    edges = np.array([0, 1, 1, 2, 3]), np.array([1, 2, 3, 3, 4]), np.array([0, 1, 4, 2, 3])
    ones = np.ones(5)
    moved = uncoarsen(levels, edges, np.array([1.0, 9.0, 1.0, 1.0, 30.0]), np.array([4.0, 1, 1, 1, 1]), ones, math.inf)
    assert moved[1] != moved[3] or moved[2] == moved[3]


@settings(max_examples=40, deadline=None)
@given(dag=dags())
def test_blocks_of_connected_ops_alone_when_asked(dag: OpDag) -> None:
    for ops in blocks(dag, 3, connected=True):
        reach = {int(ops[0])}
        inside = set(ops.tolist())
        pairs = [(a, b) for a, b in zip(dag.edge_source.tolist(), dag.edge_target.tolist(), strict=True)]
        pairs += list(enumerate(dag.group.tolist()))
        for _ in inside:
            reach |= {x for pair in pairs if set(pair) <= inside and set(pair) & reach for x in pair}
        assert reach == inside
