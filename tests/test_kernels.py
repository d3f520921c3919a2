"""Kernel groups and signatures."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.cost import TensorForm
from simpart.cost.pricing import price_ops
from simpart.cost.signatures import MEMBER, fill_sizes, form_of, signatures_of, total_bytes
from simpart.errors import MismatchError
from simpart.graph import Call, Graph, Kernel, Op, Source, Template
from simpart.graph.sizes import Affine, TensorSpec
from simpart.hardware import load_cluster
from simpart.kernels import FUSIBLE, kernels
from simpart.kernels.ops import family_of
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from tests.toy_graphs import UnitCompute

SPEC = TensorSpec((Affine(0, 1), 4), "float32", (0, 1))


def kernel(target: str, *inputs: int, phase: str = "F", view: bool = False, outputs: int = 1) -> Kernel:
    return Kernel(
        op=0,
        phase=phase,  # type: ignore[arg-type]  # a literal at each call
        target=target,
        inputs=inputs,
        outputs=(SPEC,) * outputs,
        arguments='{"positional":[{"tensor":0},"2b+1"],"named":{}}',
        view=view,
    )


def graph_of(*parts: Kernel, calls: int = 1, omits: tuple[int, ...] = ()) -> Graph:
    """One template with one op that owns all kernels; its value 0 is external slot 0, `~0` in refs."""
    op = Op(path="m", target="t", kind="other", inputs=(~0,), outputs=(SPEC,), carries_gradient=True)
    size = sum(len(k.outputs) for k in parts)
    return Graph(
        model="",
        precision="float32",
        sources=(Source(kind="input", name="0", spec=SPEC),),
        templates=(Template(sources=(), ops=(op,), kernels=parts),),
        calls=tuple(
            Call(
                template=0,
                externals=(i,),
                kernel_externals=(0 if i == 0 else i * size,),  # the last value of the call before
                omits=omits if i == 0 else (),
            )
            for i in range(calls)
        ),
        loss=1,
        gradients={},
    )


MM, RELU, ADD, SUM = "aten.mm.default", "aten.relu.default", "aten.add.Tensor", "aten.sum.default"


def test_eager_kernels_stand_alone() -> None:
    groups = kernels(graph_of(kernel(RELU, ~0), kernel(RELU, 0)), "eager")
    assert groups.members == ((0,), (1,)) and groups.group.tolist() == [0, 1]
    assert groups.inputs == ((SPEC,), (SPEC,))


def test_compiled_chain_is_one_group_that_reads_and_writes_outside_once() -> None:
    groups = kernels(graph_of(kernel(MM, ~0, ~0), kernel(ADD, 0, ~0), kernel(RELU, 1), kernel(MM, 2, 2)), "compiled")
    assert groups.members == ((0,), (1, 2), (3,))
    assert groups.inputs[1] == (SPEC, SPEC) and groups.outputs[1] == (SPEC,)


def test_group_never_comes_back_to_itself() -> None:
    """relu → mm → add, and relu → add: fused, the pair would both feed and need the product."""
    groups = kernels(graph_of(kernel(RELU, ~0), kernel(MM, 0, 0), kernel(ADD, 0, 1)), "compiled")
    assert groups.members == ((0,), (1,), (2,))


def test_phases_do_not_fuse() -> None:
    groups = kernels(graph_of(kernel(RELU, ~0), kernel(RELU, 0, phase="B")), "compiled")
    assert groups.members == ((0,), (1,))


def test_value_that_another_call_reads_is_written() -> None:
    parts = (kernel(RELU, ~0), kernel(SUM, 0), kernel(RELU, 1))
    assert kernels(graph_of(*parts, calls=2), "compiled").outputs == ((SPEC,),)


def test_kernel_that_some_call_lacks_stands_alone() -> None:
    groups = kernels(graph_of(kernel(RELU, ~0), kernel(ADD, 0, 0), kernel(RELU, 1), omits=(1,)), "compiled")
    assert (1,) in groups.members


@st.composite
def templates(draw: st.DrawFn) -> list[Kernel]:
    count = draw(st.integers(1, 14))
    parts = []
    for k in range(count):
        target = draw(st.sampled_from([MM, RELU, ADD, SUM]))
        refs = draw(st.lists(st.integers(-1, k - 1), min_size=1, max_size=3))
        view = draw(st.booleans()) and target == RELU
        parts.append(kernel(target, *(~0 if ref < 0 else ref for ref in refs), view=view))
    return parts


@given(templates())
def test_groups_partition_and_can_run_one_after_the_other(parts: list[Kernel]) -> None:
    groups = kernels(graph_of(*parts), "compiled")
    assert sorted(k for members in groups.members for k in members) == list(range(len(parts)))
    needs: dict[int, set[int]] = {g: set() for g in range(len(groups.members))}
    for k, part in enumerate(parts):
        own = int(groups.group[k])
        needs[own] |= {int(groups.group[ref]) for ref in part.inputs if ref >= 0} - {own}
    done: set[int] = set()
    while ready := [g for g in needs if g not in done and needs[g] <= done]:
        done.update(ready)
    assert len(done) == len(needs), "groups wait for one another"
    for members in groups.members:
        alone = len(members) == 1
        assert alone or all(parts[k].view or family_of(parts[k].target) in FUSIBLE for k in members)


def test_sizes_are_filled_in() -> None:
    (signature,) = signatures_of(graph_of(kernel(RELU, ~0)), 3)
    assert signature.inputs == (TensorForm((3, 4), "float32", (0, 1)),)
    assert json.loads(signature.arguments)["positional"][1] == 7


def test_table_argument_is_taken_at_its_micro_batch_or_refused() -> None:
    text = '{"positional":[{"2":5,"3":0.5},"mean",{"dtype":"bfloat16"}],"named":{}}'
    assert json.loads(fill_sizes(text, 3))["positional"] == [0.5, "mean", {"dtype": "bfloat16"}]
    with pytest.raises(MismatchError, match="captured at micro-batches 2, 3"):
        fill_sizes(text, 4)


def test_strided_tensor_keeps_its_strides_and_expanded_dims_hold_no_bytes() -> None:
    spec = TensorSpec((Affine(0, 1), 8), "float32", None, (0, 1))
    assert form_of(spec, 5) == TensorForm((5, 8), "float32", None, (0, 1))
    assert total_bytes([form_of(spec, 5)]) == 8 * 4


def test_fused_work_is_carried_by_the_first_member_alone() -> None:
    graph = graph_of(kernel(MM, ~0, ~0), kernel(ADD, 0, ~0), kernel(RELU, 1))
    product, fused, member = signatures_of(graph, 2, "compiled")
    assert product.target == MM and product.mode == "compiled"
    assert fused.target == "fused" and [m.target for m in fused.members] == [ADD, RELU]
    assert member == MEMBER and member.view


def test_layers_of_a_real_model_cost_the_same_signatures() -> None:
    def graph(layers: int) -> Graph:
        model = f"gpt:layers={layers},hidden=32,heads=2,seq=16,vocab=64"
        return captured(parse_model(model), "float32", use_cache=False)

    two, three = graph(2), graph(3)
    eager = [set(signatures_of(found, 2)) for found in (two, three)]
    assert eager[0] == eager[1]
    compiled = signatures_of(three, 2, "compiled")
    assert len(compiled) == len(three.kernel_classes)
    assert any(s.target == "fused" for s in compiled)
    assert np.bincount(kernels(three, "compiled").group).max() > 1


def test_prices_of_ops_add_up_to_the_kernels_that_run() -> None:
    """A call that omits a kernel does not pay for it: 3 calls of 4 kernels, of which one is left out once."""
    graph = graph_of(
        kernel(MM, ~0), kernel(RELU, 0), kernel(ADD, 1, 1, phase="B"), kernel(MM, 2, phase="B"), calls=3, omits=(2,)
    )
    found = price_ops(graph, [2], UnitCompute(), load_cluster("dgx-a100").kinds[0], "eager")[2]
    each = graph.at(2).flat.op_class
    assert found.forward.seconds[each].sum() == pytest.approx(6.0)
    assert found.backward.seconds[each].sum() == found.backward.launches[each].sum() == pytest.approx(5.0)
    assert (found.inputs.seconds + found.weights.seconds)[each].sum() == pytest.approx(5.0)
