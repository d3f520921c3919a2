"""The description language: rules, intervals, regions, and what is derived from descriptions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.placement import Halo, Partial, Placement, Replicate, Shard
from simpart.tdl import (
    DESCRIPTIONS,
    Call,
    DescriptionError,
    Max,
    Sum,
    call_like,
    describe,
    equal,
    is_elementwise,
    local_call,
    mesh_strategies,
    opaque,
    shared,
    splits_following,
    splits_of,
    strategies,
    trace,
    undescribed_reason,
)
from simpart.tdl.index import Digit, Index, Variable
from simpart.tdl.interval import Interval, interval_of
from simpart.tdl.local import local_shape
from simpart.tdl.regions import loop_splits
from simpart.tdl.splitting import splits

R, P = Replicate(), Partial()


def call(target: str, inputs: list[tuple[int, ...]], *outputs: tuple[int, ...], arguments: str = "") -> Call:
    return Call(target, tuple(inputs), outputs, arguments, ("float32",) * len(inputs))


def texts(made: Call, members: int = 2) -> set[str]:
    return {" ".join(map(str, s.inputs)) + " -> " + " ".join(map(str, s.outputs)) for s in strategies(made, members)}


# --- rules -----------------------------------------------------------------------------------------------------------
WRONG: list[tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]], str]] = [
    (lambda a, b: lambda i, j: Sum(lambda k: a[i, k] * b[j]), [(2, 4), (4, 2)], [(2, 2)], "b has 2 dims"),
    (lambda a: lambda i, j: a[i, j], [(2, 4), (4, 2)], [(2, 4)], "2 of them tensors"),
    (lambda a: lambda i: a[i, 0], [(2, 4)], [(2, 4)], "output 0 has 2 dims"),
    (lambda a: (lambda i: a[i], lambda i: a[i]), [(2,)], [(2,)], "2 outputs, the operator 1"),
    (lambda a: lambda i, j: a[i * j], [(4,)], [(2, 2)], "multiplies index variables"),
    (lambda a: lambda i: a[i**2], [(4,)], [(2,)], "affine"),
    (lambda a: lambda i, j: a[i // j], [(4,)], [(2, 2)], "affine"),
    (lambda a: lambda i: a[i * 0.5], [(4,)], [(4,)], "affine"),
    (lambda a: lambda i: a[i // 3], [(4,)], [(4,)], "falls between its digits"),
    (lambda a, ids: lambda i: a[ids[i]], [(4,), (2,)], [(2,)], "indexed by data"),
    (lambda a: lambda i: a[i + 2], [(4,)], [(4,)], "a is read at i+2 = 2…5 in dim 0, which has 4 elements"),
    (lambda a: lambda i: a[i, :], [(4, 2)], [(4,)], "sliced by ':' outside an opaque function"),
    (lambda a: lambda i: Sum(lambda k: opaque(a[i, :])), [(4, 2)], [(4,)], "the size of k is unknown"),
    (lambda a: lambda i: a, [(4,)], [(4,)], "a is a tensor, not an element"),
    (lambda a: lambda i: a[i] if a[i] else 0, [(4,)], [(4,)], "no branches on data"),
    (lambda a: lambda i: a[i] if i else 0, [(4,)], [(4,)], "no branches on coordinates"),
    (lambda a: [sum(x for x in a)], [(4,)], [(4,)], "no loops over data"),
    (lambda a: a, [(4,)], [(4,)], "must be a lambda"),
    (lambda a: lambda i: 1 // 0, [(4,)], [(4,)], "ZeroDivisionError"),
    (lambda a: (lambda n: a[n, 0], lambda n: a[0, n]), [(4, 2)], [(4,), (2,)], "n runs over 4 elements in one place"),
    (
        lambda a, b: lambda i: Sum(lambda k: a[i, k] * b[k]),
        [(2, 4), (3,)],
        [(2,)],
        "k runs over 4 elements, dim 0 of b",
    ),
    (lambda a: lambda i: Sum(lambda *r: a[(i, *r)]), [(2, 4)], [(2,)], "needs the sizes"),
]


@pytest.mark.parametrize(("function", "inputs", "outputs", "message"), WRONG)
def test_a_wrong_description_is_refused_in_one_line(
    function: Callable[..., Any], inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(DescriptionError) as error:
        trace(function, call("mylib.op", inputs, *outputs))
    assert message in str(error.value) and "mylib.op" in str(error.value)
    assert "\n" not in str(error.value)


def test_users_register_a_description_like_any_other() -> None:
    @describe("mylib.outer")
    def outer(a: Any, b: Any) -> Any:
        return lambda i, j: a[i] * b[j]

    try:
        assert {"S(0) R -> S(0)", "R S(0) -> S(1)", "P(sum) R -> P(sum)"} <= texts(
            call("mylib.outer", [(4,), (6,)], (4, 6))
        )
    finally:
        del DESCRIPTIONS["mylib.outer"]


def test_a_users_wrong_description_raises_and_one_of_ours_replicates_with_the_reason() -> None:
    odd = call("aten.mm.default", [(4, 8), (8, 6), (2, 2)], (4, 6))
    assert strategies(odd, 2) == [s.strategy for s in splits_of(odd, 2)] and len(strategies(odd, 2)) == 1
    assert "it takes (a, b)" in (undescribed_reason(odd) or "")
    describe("mylib.wrong")(lambda a: lambda i: a[i, i])
    try:
        with pytest.raises(DescriptionError, match="a has 1 dims"):
            splits_of(call("mylib.wrong", [(4,)], (4,)), 2)
    finally:
        del DESCRIPTIONS["mylib.wrong"]


def test_an_undescribed_kernel_replicates_with_a_reason() -> None:
    unknown = call("mylib.unknown", [(4, 4)], (4, 4))
    assert texts(unknown) == {"R -> R"}
    assert "simpart.tdl.describe" in (undescribed_reason(unknown) or "")
    assert "memory layout" in (undescribed_reason(call("aten.as_strided.default", [(4,)], (4,))) or "")


# --- indices and intervals -------------------------------------------------------------------------------------------
@given(st.data())
def test_intervals_of_affine_indices_match_enumeration(data: st.DataObject) -> None:
    number = st.integers(-4, 4)
    count = data.draw(st.integers(1, 3))
    sizes = [data.draw(st.integers(1, 5)) for _ in range(count)]
    factors, constant = [data.draw(number) for _ in range(count)], data.draw(number)
    variables = [Variable(f"v{k}", size) for k, size in enumerate(sizes)]
    index = sum((Index.of(v) * f for v, f in zip(variables, factors, strict=True)), Index((), constant))
    values = [
        constant + sum(f * x for f, x in zip(factors, point, strict=True))
        for point in product(*(range(s) for s in sizes))
    ]
    assert interval_of(index, {}) == (min(values), max(values))


@given(st.sampled_from([6, 8, 12, 24, 36]), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 6]))
def test_quotient_and_remainder_are_digits(size: int, first: int, second: int) -> None:
    v = Index.of(Variable("v", size))
    if size % (first * second):
        return
    digits = (v // first) % second
    low, high = interval_of(digits, {})
    assert (low, high) == (0, min(second, size // first) - 1)
    for digit, factor in digits.terms:
        assert factor == 1 and digit == Digit(
            digit.variable, first, first * second if first * second < size else digit.high
        )


def test_a_negative_factor_swaps_the_bounds_and_halos_need_two_constants() -> None:
    assert (Interval.between(0, 3) * -1 + 7).at({}) == (4, 7)
    both = Interval.full("X") + Interval.full("D")
    assert (both.lower.constant, both.upper.constant) == (0, -2)
    with pytest.raises(DescriptionError, match="constants only"):
        Interval.full("X") * Interval.full("D")


# --- partition-n-reduce ----------------------------------------------------------------------------------------------
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.sampled_from([2, 3]))
def test_regions_are_exactly_what_enumeration_reads(taps: int, step: int, gap: int, workers: int) -> None:
    out = 2 * workers
    size = step * (out - 1) + gap * (taps - 1) + 1
    description = trace(
        lambda x, w: lambda o: Sum(lambda k: x[step * o + gap * k] * w[k]),
        call("conv", [(size,), (taps,)], (out,)),
    )
    split = next(s for s in loop_splits(description, workers) if s.loop == "o")
    for worker, regions in enumerate(split.regions):
        mine = range(worker * 2, worker * 2 + 2)
        read = [step * o + gap * k for o in mine for k in range(taps)]
        assert regions[0] == ((min(read), max(read)),)
        assert regions[1] == ((0, taps - 1),)


def test_only_indices_outside_an_opaque_function_are_cut() -> None:
    description = trace(lambda m: lambda b, i, j: opaque(m[b, :, :])[i, j], call("cholesky", [(4, 6, 6)], (4, 6, 6)))
    assert [s.loop for s in loop_splits(description)] == ["b"]


# --- strategies ------------------------------------------------------------------------------------------------------
def test_a_matrix_product_has_one_strategy_per_loop_and_is_linear_in_each_factor() -> None:
    assert texts(call("aten.mm.default", [(4, 8), (8, 6)], (4, 6))) == {
        "R R -> R",
        "S(0) R -> S(0)",
        "R S(1) -> S(1)",
        "S(1) S(0) -> P(sum)",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    }


def test_a_row_parallel_linear_takes_its_bias_as_partial() -> None:
    assert "P(sum) S(1) S(0) -> P(sum)" in texts(call("aten.addmm.default", [(6,), (4, 8), (8, 6)], (4, 6)))


def test_sums_pass_partial_terms_only_if_both_are_partial_and_nonlinear_kernels_pass_none() -> None:
    add = texts(call("aten.add.Tensor", [(4, 6), (4, 6)], (4, 6)))
    assert "P(sum) P(sum) -> P(sum)" in add and "P(sum) R -> P(sum)" not in add
    assert not any("P" in text for text in texts(call("aten.gelu.default", [(4, 6)], (4, 6))))
    assert "P(sum) R -> P(sum)" in texts(call("aten.gelu_backward.default", [(4, 6), (4, 6)], (4, 6)))


def test_dims_that_do_not_divide_are_offered_only_if_uneven_is_asked_for() -> None:
    made = call("aten.relu.default", [(5, 4)], (5, 4))
    assert {s.strategy.outputs[0] for s in splits_of(made, 2)} == {R, Shard(1)}
    assert Shard(0) in {s.strategy.outputs[0] for s in splits_of(made, 2, uneven=True)}
    assert {s.strategy.outputs[0] for s in splits_of(made, 8, uneven=True)} == {R}


VIEW = call("aten.view.default", [(4, 8, 6)], (32, 6), arguments='{"positional":[{"tensor":0},[32,6]],"named":{}}')


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0, 8)),
        (Shard(1, 4), Shard(0, 4)),
        (Shard(2), Shard(1)),
        (Shard(2, 2), Shard(1, 2)),
    ],
)
def test_strided_shards_keep_their_element_stride_through_a_view(given: Placement, carried: Placement) -> None:
    forward = splits_following(VIEW, 2, 0, given)
    assert [s.strategy.outputs[0] for s in forward] == [carried]
    assert [s.strategy.inputs[0] for s in splits_following(VIEW, 2, 0, carried, output=True)] == [given]


def test_a_fused_qkv_is_split_inside_each_part() -> None:
    arguments = '{"positional":[{"tensor":0},8,-1],"named":{}}'
    split = call("aten.split.Tensor", [(4, 24)], (4, 8), (4, 8), (4, 8), arguments=arguments)
    assert "S(1,block=8) -> S(1) S(1) S(1)" in texts(split)
    assert not splits_following(split, 2, 0, Shard(1))


def test_a_convolution_is_cut_in_space_with_the_halo_its_taps_need() -> None:
    arguments = '{"positional":[{"tensor":0},{"tensor":1},null,[1],[2],[1],false,[0],1],"named":{}}'
    conv = call("aten.convolution.default", [(2, 4, 16), (4, 4, 5)], (2, 4, 16), arguments=arguments)
    split = next(s for s in splits_of(conv, 2) if isinstance(s.strategy.inputs[0], Halo))
    assert split.strategy.inputs[0] == Halo(Shard(2), 2, 2)
    assert (
        local_call(conv, split, 2).inputs[0] == (2, 4, 12) and "[0],[1],false" in local_call(conv, split, 2).arguments
    )


def test_a_vocabulary_split_masks_rows_and_its_backward_needs_no_communication() -> None:
    forward = call("aten.embedding.default", [(8, 4), (2, 3)], (2, 3, 4))
    forward = Call(forward.target, forward.inputs, forward.outputs, "", ("float32", "int64"))
    assert "S(0) R -> P(sum,mask=0)" in texts(forward)
    arguments = '{"positional":[{"tensor":0},{"tensor":1},8,-1,false],"named":{}}'
    backward = Call(
        "aten.embedding_dense_backward.default", ((2, 3, 4), (2, 3)), ((8, 4),), arguments, ("float32", "int64")
    )
    masked = [s for s in splits_of(backward, 2) if s.masked]
    assert [(s.strategy.inputs, s.strategy.outputs) for s in masked] == [((R, R), (Shard(0),))]


def test_statistics_that_members_share_are_counted_once() -> None:
    norm = DESCRIPTIONS["aten._native_batch_norm_legit_functional"]
    made = call("bn", [(8, 6, 4, 4), (6,), (6,), (6,), (6,)], (8, 6, 4, 4), (6,), (6,), (6,), (6,))
    found = {s.label: s for s in splits(lambda *t: norm(*t, True, 0.1, 1e-5), made, 2)}
    assert [(e.reducer, e.elements) for e in found["n"].exchanges] == [("sum", 6), ("sum", 6)]
    assert not found["c"].exchanges


def test_a_mean_over_a_cut_dim_is_scaled_because_members_see_fewer_elements() -> None:
    mean = call("aten.mean.dim", [(4, 8)], (4,), arguments='{"positional":[{"tensor":0},[1]],"named":{}}')
    split = next(s for s in splits_of(mean, 4) if s.strategy.inputs[0] == Shard(1))
    assert split.strategy.outputs == (P,) and split.scales[0] * 4 == 1


def test_cutting_a_loop_cuts_what_reads_the_same_dim_in_other_outputs() -> None:
    made = call("two", [(4, 6)], (4, 6), (6,))
    found = splits(lambda x: (lambda i, j: x[i, j], lambda k: Sum(lambda r: x[r, k])), made, 2)
    assert {tuple(map(str, s.strategy.outputs)) for s in found} == {
        ("R", "R"), ("S(0)", "P(sum)"), ("S(1)", "S(0)"), ("P(sum)", "P(sum)"),
    }  # fmt: skip


def test_a_loop_that_meets_itself_is_not_cut() -> None:
    made = call("self", [(4,)], (4, 4))
    assert len(splits(lambda x: lambda i, j: x[i] * x[j], made, 2)) == 1


def test_a_diagonal_is_not_cut_by_one_axis() -> None:
    assert {
        str(s.strategy.inputs[0]) for s in splits(lambda x: lambda i: x[i, i], call("diag", [(4, 4)], (4,)), 2)
    } == {
        "R",
        "P(sum)",
    }


def test_a_partial_maximum_passes_a_view_but_no_sum() -> None:
    assert [s.strategy.outputs[0] for s in splits_following(VIEW, 2, 0, Partial("max"))] == [Partial("max")]
    add = call("aten.add.Tensor", [(4, 6), (4, 6)], (4, 6))
    assert not splits_following(add, 2, 0, Partial("max"))
    rows = splits(lambda x: lambda i: Max(lambda k: x[i, k]), call("amax", [(4, 6)], (4,)), 2)
    assert Partial("max") in {s.strategy.outputs[0] for s in rows}


def test_masks_need_the_whole_row_number() -> None:
    made = Call("look", ((8, 4), (3,)), ((3, 4),), "", ("float32", "int64"))
    found = splits(lambda w, ids: lambda t, h: Sum(lambda v: equal(ids[t], v) * w[v, h]), made, 2)
    assert {s.label: s.masked for s in found}["v"] == (1,)


def test_a_shared_statistic_of_an_uncut_loop_costs_nothing() -> None:
    made = call("norm", [(4, 6)], (4, 6))
    found = splits(lambda x: lambda i, j: x[i, j] / shared(Sum(lambda r: x[i, r]), "sum"), made, 2)
    assert {s.label: len(s.exchanges) for s in found} == {"replicate": 0, "i": 0, "j, r": 1}


def test_element_wise_ness_is_derived() -> None:
    assert is_elementwise(call("aten.add.Tensor", [(4, 6), (6,)], (4, 6)))
    assert is_elementwise(call("simpart.optimizer.adam", [(4,)] * 4, (4,), (4,), (4,)))
    assert not is_elementwise(call("aten.mm.default", [(4, 4), (4, 4)], (4, 4)))
    assert not is_elementwise(call("aten.t.default", [(4, 4)], (4, 4)))


def test_strategies_on_two_axes_divide_what_the_first_axis_left() -> None:
    mm = call("aten.mm.default", [(4, 8), (8, 6)], (4, 6))
    found = mesh_strategies(mm, (4, 2))
    pairs = {(a.strategy.outputs[0], b.strategy.outputs[0]) for a, b in found}
    assert (Shard(0), Shard(1)) in pairs and (P, Shard(0)) in pairs
    assert (Shard(0), Shard(0)) not in pairs  # one row each is left
    assert mesh_strategies(mm, ()) == ((),)


def test_local_shapes_of_shards_blocks_and_uneven_parts() -> None:
    assert local_shape((8, 12), Shard(1, 6), 3) == (8, 4)
    assert [local_shape((5,), Shard(0), 3, part)[0] for part in range(3)] == [2, 2, 1]
    assert local_shape((8, 12), Halo(Shard(0), 1, 2), 4) == (5, 12)


def test_a_signature_of_a_cost_model_is_a_call() -> None:
    from simpart.cost import Signature, TensorForm

    form = TensorForm((4, 4), "float32")
    assert call_like(Signature("aten.mm.default", (form, form), (form,))).inputs == ((4, 4), (4, 4))
