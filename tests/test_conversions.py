"""Conversions between placements, against simulated devices that hold arrays and count what they receive."""

from __future__ import annotations

from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.errors import UnsupportedError
from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.placement.conversions import Step, collective_of, conversions, convertible, received_bytes
from simpart.placement.region_conversions import box_of, device_level_cost, step_cost

R, P = Replicate(), Partial()
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Devices = dict[tuple[int, ...], Array]


def rows(size: int, shard: Shard, members: int, part: int) -> list[int]:
    """Which elements of a dim a member holds, one by one."""
    span = shard.block or size
    each = ceil(span / members)
    return [k for k in range(size) if k % span // each == part]


def laid_out(whole: Array, layout: tuple[Placement, ...], sizes: tuple[int, ...]) -> Devices:
    """What every device holds; axes apply in order, so two shards of one dim nest."""
    found = {}
    for device in product(*map(range, sizes)):
        piece = whole
        for placement, members, part in zip(layout, sizes, device, strict=True):
            if isinstance(placement, Shard):
                piece = np.take(piece, rows(piece.shape[placement.dim], placement, members, part), placement.dim)
            elif isinstance(placement, Partial) and placement.reducer == "sum":
                piece = piece * ((part + 1) / sum(range(1, members + 1)))
        found[device] = piece
    return found


def carried_out(devices: Devices, step: Step, sizes: tuple[int, ...]) -> Devices:
    """One step, group by group: put together what the members of the axis hold, then hand out the target's parts."""
    found, members = {}, sizes[step.axis]
    for device in devices:
        group = [devices[(*device[: step.axis], k, *device[step.axis + 1 :])] for k in range(members)]
        whole: Array
        if isinstance(step.source, Partial):
            whole = np.sum(group, axis=0)
        elif isinstance(step.source, Shard):
            dim = step.source.dim
            size = sum(part.shape[dim] for part in group)
            places = [rows(size, step.source, members, k) for k in range(members)]
            order = [k for place in places for k in place]
            whole = np.concatenate(group, dim).take(np.argsort(order), dim)
        else:
            whole = group[device[step.axis]]
        part = device[step.axis]
        if isinstance(step.target, Shard):
            whole = whole.take(rows(whole.shape[step.target.dim], step.target, members, part), step.target.dim)
        elif isinstance(step.target, Partial):
            whole = whole if part == 0 else np.zeros_like(whole)
        found[device] = whole
    return found


PLACEMENTS = st.sampled_from([R, P, Shard(0), Shard(1), Shard(1, 4), Shard(1, 12), Shard(2)])


@given(st.lists(PLACEMENTS, min_size=3, max_size=3), st.lists(PLACEMENTS, min_size=3, max_size=3), st.integers(1, 3))
def test_steps_lead_to_the_target_on_simulated_devices(
    source: list[Placement], target: list[Placement], axes: int
) -> None:
    sizes, shape = (2, 2, 3)[:axes], (12, 24, 12)
    before, after = tuple(source[:axes]), tuple(target[:axes])
    if not convertible(shape, before, after, sizes):
        return
    whole = np.random.default_rng(0).normal(size=shape)
    devices = laid_out(whole, before, sizes)
    for step in conversions(shape, 8, before, after, sizes):
        devices = carried_out(devices, step, sizes)
    wanted = laid_out(whole, after, sizes)
    axes_of_terms = tuple(axis for axis, p in enumerate(after) if isinstance(p, Partial))
    for device in product(*map(range, sizes)):
        terms = [
            {**dict(enumerate(device)), **dict(zip(axes_of_terms, parts, strict=True))}
            for parts in product(*(range(sizes[a]) for a in axes_of_terms))
        ]
        keys = [tuple(term[a] for a in range(axes)) for term in terms]
        np.testing.assert_allclose(sum(devices[k] for k in keys), sum(wanted[k] for k in keys), atol=1e-12)


@given(
    st.sampled_from([Shard(0), Shard(1), Shard(1, 6)]),
    st.sampled_from([R, Shard(0), Shard(1), Shard(1, 6), Shard(1, 2)]),
)
def test_bytes_between_shards_are_those_of_elements_needed_and_not_held(source: Shard, target: Placement) -> None:
    shape, members = (4, 12), 2
    if not convertible(shape, (source,), (target,), (members,)):
        return
    numbers = np.arange(48).reshape(shape)
    held = laid_out(numbers.astype(float), (source,), (members,))
    needed = laid_out(numbers.astype(float), (target,), (members,))
    counted = max(len(set(needed[(k,)].ravel()) - set(held[(k,)].ravel())) for k in range(members))
    assert received_bytes(conversions(shape, 4, (source,), (target,), (members,))) == 4 * counted


@pytest.mark.parametrize(
    ("source", "target", "kind", "received"),
    [
        (P, R, "all_reduce", 1.5),
        (P, Shard(0), "reduce_scatter", 0.75),
        (Shard(0), R, "all_gather", 0.75),
        (Shard(0), Shard(1), "all_to_all", 0.1875),
        (R, Shard(1), "local", 0),
        (R, P, "local", 0),
        (Shard(0), P, "local", 0),
        (Shard(0), Halo(Shard(0), 1, 2), "halo", 0.375),
    ],
)
def test_each_collective_moves_what_its_formula_says(
    source: Placement, target: Placement, kind: str, received: float
) -> None:
    (step,) = conversions((8, 16), 4, (source,), (target,), (4,))
    assert (step.kind, step.received_bytes) == (kind, received * 8 * 16 * 4)


def test_equal_layouts_need_no_step() -> None:
    assert conversions((8, 8), 4, (Shard(0), P), (Shard(0), P), (2, 2)) == ()


def test_an_all_reduce_beats_reduce_scatter_with_gather_only_on_a_tie() -> None:
    assert [s.kind for s in conversions((8, 8), 4, (P,), (R,), (4,))] == ["all_reduce"]


def test_scattering_before_gathering_moves_less() -> None:
    steps = conversions((64, 64), 4, (P, Shard(0)), (Shard(1), R), (4, 4))
    assert [s.kind for s in steps] == ["reduce_scatter", "all_gather"]


def test_the_inner_of_two_nested_shards_is_undone_first() -> None:
    steps = conversions((8, 8), 4, (Shard(0), Shard(0)), (R, Shard(0)), (2, 2))
    assert [(s.axis, s.kind) for s in steps] == [(1, "all_gather"), (0, "all_gather"), (1, "local")]


def test_a_price_in_seconds_can_choose_another_path() -> None:
    def slow_first_axis(step: Step) -> float:
        return step.received_bytes * (100.0 if step.axis == 0 else 1.0)

    steps = conversions((8, 8), 4, (Shard(0), R), (R, Shard(0)), (2, 2), slow_first_axis)
    assert sum(s.received_bytes for s in steps) >= received_bytes(
        conversions((8, 8), 4, (Shard(0), R), (R, Shard(0)), (2, 2))
    )


@pytest.mark.parametrize(
    ("shape", "source", "target", "sizes", "message"),
    [
        ((3, 8), (Shard(0),), (R,), (4,), "does not divide"),
        ((8, 6), (R,), (Shard(1, 3),), (2,), "does not divide"),
        ((8,), (R,), (Shard(1),), (2,), "does not divide"),
        ((8, 8), (R,), (R, R), (2, 2), "one placement per mesh axis"),
        ((8, 8), (P,), (Partial("max"),), (2,), ""),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    sizes: tuple[int, ...],
    message: str,
) -> None:
    if not message:  # a sum becomes a maximum through its value
        assert [s.kind for s in conversions(shape, 4, source, target, sizes)] == ["all_reduce", "local"]
        return
    with pytest.raises(UnsupportedError) as error:
        conversions(shape, 4, source, target, sizes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_step_becomes_the_collective_that_a_communication_model_prices() -> None:
    (step,) = conversions((8, 8), 4, (P,), (R,), (4,))
    made = collective_of(step, (0, 1, 2, 3))
    assert made is not None and (made.kind, made.bytes) == ("all_reduce", 256)
    (local,) = conversions((8, 8), 4, (R,), (Shard(0),), (4,))
    assert collective_of(local, (0, 1, 2, 3)) is None


@given(st.sampled_from([Shard(0), Shard(1)]), st.sampled_from([R, Shard(0), Shard(1)]), st.sampled_from([2, 3, 4]))
def test_one_step_of_the_recursion_is_the_device_level_count(lies: Shard, needed: Placement, parts: int) -> None:
    shape = (12, 24)
    exact = device_level_cost(shape, (lies,), (needed,), (parts,))
    assert step_cost(box_of(shape), lies, box_of(shape), needed, parts) == exact


@given(
    st.lists(st.sampled_from([Shard(0), Shard(1)]), min_size=2, max_size=2), st.sampled_from([(2, 2), (3, 3), (4, 2)])
)
def test_gathering_whole_in_two_steps_counts_every_device(lies: list[Shard], factors: tuple[int, int]) -> None:
    from simpart.placement.region_conversions import part_of

    shape = (72, 72)
    tensor = box_of(shape)
    first = step_cost(tensor, lies[0], tensor, R, factors[0])
    inner = part_of(tensor, lies[0], factors[0], 0)
    assert first is not None and inner is not None
    second = step_cost(inner, lies[1], tensor, R, factors[1])
    assert second is not None
    assert first + factors[0] * second == device_level_cost(shape, lies, (R, R), factors)
