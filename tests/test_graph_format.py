"""A Graph survives its file; broken files are told from sound ones; the flat arrays agree with a slow derivation."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.capture import capture
from simpart.errors import FormatError
from simpart.graph import Call, Graph, Kernel, Op, Source, Template
from simpart.graph.format import graph_from_json, graph_to_json, load_graph, save_graph
from simpart.graph.sizes import Affine, Table, TensorSpec
from simpart.zoo import Dims, GPTDims, ResNetDims, ZooFactory

FIELDS = ("model", "precision", "sources", "templates", "calls", "loss", "gradients", "joined", "tokens_per_sample")


def same(a: Graph | None, b: Graph | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(getattr(a, name) == getattr(b, name) for name in FIELDS) and same(a.at_one, b.at_one)


sizes = st.one_of(
    st.integers(0, 99),
    st.builds(Affine, st.integers(-5, 5), st.sampled_from([-1, 1, 2, 64])),
    st.just(Table(((2, 3), (3, 5), (5, 9)))),
)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    dims = tuple(draw(st.lists(sizes, max_size=3)))
    dtype = draw(st.sampled_from(["float32", "int64", "bfloat16"]))
    if draw(st.booleans()):
        return TensorSpec(dims, dtype, tuple(draw(st.permutations(range(len(dims))))))
    return TensorSpec(dims, dtype, None, tuple(draw(sizes) for _ in dims))


@st.composite
def sources(draw: st.DrawFn) -> tuple[Source, ...]:
    kinds = st.sampled_from(["parameter", "buffer", "input", "constant", "tangent"])
    names = st.sampled_from(["w", "h.{0}.w", "0"])
    one = st.builds(
        Source, kind=kinds, name=names, spec=specs(), trainable=st.booleans(), aliases=st.sampled_from([(), ("x",)])
    )
    return tuple(draw(st.lists(one, max_size=3)))


@st.composite
def templates(draw: st.DrawFn) -> tuple[Template, int, int]:
    """A template, and how many slots it has at op and at kernel level."""
    slots = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    own = draw(sources())
    ops: list[Op] = []
    values = len(own)
    for _ in range(draw(st.integers(1, 4))):
        inputs = tuple(draw(st.lists(st.integers(-slots[0], values - 1), min_size=1, max_size=3)))
        outputs = tuple(draw(st.lists(specs(), min_size=1, max_size=2)))
        target = draw(st.sampled_from(["aten.add.Tensor", "aten.linear.default"]))
        flags = draw(st.tuples(st.booleans(), st.booleans()))
        ops.append(
            Op(
                path=draw(st.sampled_from(["", "h.{0}"])),
                target=target,
                kind="linear",
                inputs=inputs,
                outputs=outputs,
                carries_gradient=flags[0],
                mutates_buffer=flags[1],
            )
        )
        values += len(outputs)
    kernels: list[Kernel] = []
    values = len(own)
    for _ in range(draw(st.integers(1, 5))):
        inputs = tuple(draw(st.lists(st.integers(-slots[1], values - 1), min_size=1, max_size=3)))
        arguments = json.dumps({"positional": [{"tensor": i} for i in range(len(inputs))], "named": {}})
        outputs = (draw(specs()),)
        owner, phase = draw(st.integers(0, len(ops) - 1)), draw(st.sampled_from(["F", "B"]))
        kernels.append(
            Kernel(
                op=owner,
                phase=phase,  # type: ignore[arg-type]  # sampled from its two values
                target="aten.mm.default",
                inputs=inputs,
                outputs=outputs,
                arguments=arguments,
                view=draw(st.booleans()),
            )
        )
        values += 1
    groups = ((0, len(ops) - 1),) if len(ops) > 2 and draw(st.booleans()) else ()
    return Template(sources=own, ops=tuple(ops), kernels=tuple(kernels), groups=groups), *slots


@st.composite
def graphs(draw: st.DrawFn, nested: bool = True) -> Graph:
    shared = (Source(kind="input", name="0", spec=draw(specs())), *draw(sources()))
    pool = draw(st.lists(templates(), min_size=1, max_size=3))
    called = draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=6))
    op_values = len(shared)
    kernel_values = len(shared) + sum(
        len(pool[t][0].sources) + sum(len(k.outputs) for k in pool[t][0].kernels) for t in called
    )
    calls, values = [], st.integers(0, kernel_values - 1)
    for t in called:
        template, op_slots, kernel_slots = pool[t]
        omits = draw(st.sets(st.integers(0, len(template.kernels) - 1), max_size=2))
        calls.append(
            Call(
                template=t,
                variables=tuple(draw(st.lists(st.sampled_from(["0", "1", "ä"]), max_size=2))),
                externals=tuple(draw(st.integers(0, op_values - 1)) for _ in range(op_slots)),
                kernel_externals=tuple(draw(values) for _ in range(kernel_slots)),
                omits=tuple(sorted(omits)),
            )
        )
        op_values += len(template.sources) + sum(len(op.outputs) for op in template.ops)
    ops = sum(len(pool[t][0].ops) for t in called)
    return Graph(
        model="made",
        precision="float32",
        sources=shared,
        templates=tuple(t for t, _, _ in pool),
        calls=tuple(calls),
        loss=op_values - 1,
        gradients=draw(st.dictionaries(st.integers(0, op_values - 1), values, max_size=4)),
        joined=draw(st.sampled_from([(), ((0, ops - 1),)])),
        tokens_per_sample=draw(st.integers(1, 9)),
        at_one=draw(st.none() | graphs(nested=False)) if nested else None,
    )


def like_outer(graph: Graph) -> Graph:
    """What holds of the whole graph is said once: micro-batch 1's own structure has the same."""
    if graph.at_one is None:
        return graph
    parts = {name: getattr(graph, name) for name in FIELDS}
    inner = {name: getattr(graph.at_one, name) for name in FIELDS} | {"tokens_per_sample": graph.tokens_per_sample}
    return Graph(**parts, at_one=Graph(**inner))


@given(graphs())
def test_a_graph_survives_its_json(graph: Graph) -> None:
    graph = like_outer(graph)
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert same(graph, again)
    assert graph.fingerprint == again.fingerprint


@given(graphs(nested=False))
def test_flat_arrays_agree_with_a_slow_derivation(graph: Graph) -> None:
    flat, slow = graph.flat, slow_flatten(graph)
    for name, expected in slow.items():
        got = getattr(flat, name)
        assert (list(got) if isinstance(got, tuple) else got.tolist()) == expected, name


def slow_flatten(graph: Graph) -> dict[str, list[Any]]:
    """One op, one kernel, one value at a time."""
    names = """op_class op_call op_indptr op_inputs op_outputs value_op value_spec kernel_class kernel_op kernel_forward
        kernel_indptr kernel_inputs kernel_outputs kernel_value_kernel kernel_value_spec"""
    found: dict[str, list[Any]] = {name: [] for name in names.split()}
    stand_in: dict[int, int] = {}
    for source in graph.sources:
        for level in ("value", "kernel_value"):
            found[f"{level}_spec"].append(source.spec)
        found["value_op"].append(-1)
        found["kernel_value_kernel"].append(-1)
    found["op_indptr"].append(0)
    found["kernel_indptr"].append(0)
    for i, call in enumerate(graph.calls):
        template = graph.templates[call.template]
        first_op, first, first_kernel = (
            len(found["op_class"]),
            len(found["value_op"]),
            len(found["kernel_value_kernel"]),
        )
        for source in template.sources:
            for level in ("value", "kernel_value"):
                found[f"{level}_spec"].append(source.spec)
            found["value_op"].append(-1)
            found["kernel_value_kernel"].append(-1)
        for j, op in enumerate(template.ops):
            found["op_class"].append(sum(len(t.ops) for t in graph.templates[: call.template]) + j)
            found["op_call"].append(i)
            found["op_inputs"] += [first + r if r >= 0 else call.externals[-1 - r] for r in op.inputs]
            found["op_indptr"].append(len(found["op_inputs"]))
            found["op_outputs"].append(len(found["value_op"]))
            found["value_op"] += [first_op + j] * len(op.outputs)
            found["value_spec"] += op.outputs
        for j, kernel in enumerate(template.kernels):
            inputs = [first_kernel + r if r >= 0 else call.kernel_externals[-1 - r] for r in kernel.inputs]
            output = len(found["kernel_value_kernel"])
            found["kernel_value_spec"] += kernel.outputs
            if j in call.omits:
                stand_in[output] = inputs[-1]
                found["kernel_value_kernel"].append(-2)
                continue
            found["kernel_value_kernel"].append(len(found["kernel_class"]))
            found["kernel_class"].append(sum(len(t.kernels) for t in graph.templates[: call.template]) + j)
            found["kernel_op"].append(first_op + kernel.op)
            found["kernel_forward"].append(kernel.phase == "F")
            found["kernel_inputs"] += inputs
            found["kernel_indptr"].append(len(found["kernel_inputs"]))
            found["kernel_outputs"].append(output)

    def last(value: int) -> int:
        seen = set()
        while value in stand_in and value not in seen:
            seen.add(value)
            value = stand_in[value]
        return value

    if not any(last(value) in stand_in for value in stand_in):  # no sound graph omits kernels in a circle
        found["kernel_inputs"] = [last(value) for value in found["kernel_inputs"]]
    else:
        del found["kernel_inputs"]
    return found


def small() -> Graph:
    spec = TensorSpec((Affine(0, 1), 4), "float32")
    op = Op(
        path="l.{0}", target="aten.relu.default", kind="pointwise", inputs=(-1,), outputs=(spec,), carries_gradient=True
    )
    kernel = Kernel(
        op=0,
        phase="F",
        target="aten.relu.default",
        inputs=(-1,),
        outputs=(spec,),
        arguments='{"positional":[{"tensor":0}]}',
    )
    calls = tuple(Call(template=0, variables=(str(i),), externals=(i,), kernel_externals=(i,)) for i in range(5))
    return Graph(
        model="made:n=5",
        precision="float32",
        sources=(Source(kind="input", name="0", spec=spec),),
        templates=(Template(sources=(), ops=(op,), kernels=(kernel,)),),
        calls=calls,
        loss=5,
        gradients={},
    )


def test_a_file_has_the_same_bytes_each_time_and_equal_layers_share_one_row(tmp_path: Path) -> None:
    save_graph(small(), tmp_path / "a.graph")
    save_graph(load_graph(tmp_path / "a.graph"), tmp_path / "b.graph")
    assert (tmp_path / "a.graph").read_bytes() == (tmp_path / "b.graph").read_bytes()
    assert len(graph_to_json(small())["body"]["bindings"]) == 2
    assert load_graph(tmp_path / "a.graph").op_ids[4] == "l.4/aten.relu.default#0"


def damaged(content: Any) -> list[tuple[str, Any]]:
    """The document with one part taken away or replaced, for every part of it."""
    found: list[tuple[str, Any]] = []

    def walk(item: Any, path: tuple[Any, ...]) -> None:
        if path:
            bad: Any
            for bad in (None, -7, 10**6, "x", [], {}, 1.5, [[]], True, 2**70):
                copy = json.loads(json.dumps(content))
                inside = copy
                for key in path[:-1]:
                    inside = inside[key]
                inside[path[-1]] = bad
                found.append((f"{path} = {bad!r}", copy))
        for key in item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ():
            walk(item[key], (*path, key))

    walk(content, ())
    return found


def test_damage_gives_one_line_or_another_sound_graph() -> None:
    refused = 0
    for _, content in damaged(graph_to_json(small())):
        try:
            graph_from_json(content).flat  # noqa: B018  # what is accepted must also be usable
        except FormatError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 200
    assert refused > 300


@pytest.mark.parametrize("keep", [0, 10, 100])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    save_graph(small(), tmp_path / "a.graph")
    (tmp_path / "a.graph").write_bytes((tmp_path / "a.graph").read_bytes()[:keep])
    with pytest.raises(FormatError, match=r"a\.graph"):
        load_graph(tmp_path / "a.graph")


def test_a_newer_file_and_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.graph"
    save_graph(small(), path)
    content = json.loads(gzip.decompress(path.read_bytes()))
    path.write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(FormatError, match="version 2; this simpart reads up to 1"):
        load_graph(path)
    path.write_text(json.dumps({**content, "kind": "simpart plan"}))
    with pytest.raises(FormatError, match="is a simpart plan, not a simpart graph"):
        load_graph(path)


def test_a_faulty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.graph"
    save_graph(small(), path)
    content = json.loads(gzip.decompress(path.read_bytes()))
    path.write_text(json.dumps({**content, "body": {**content["body"], "loss": 99}}))
    with pytest.raises(FormatError, match=r"a\.graph: not a sound graph: loss must be from 0 to 5, got 99"):
        load_graph(path)


MODELS = [
    ("gpt", GPTDims(layers=3, hidden=16, heads=2, seq=8, vocab=11, tied=True)),
    ("resnet50", ResNetDims(image=32, classes=3, width=4, blocks=(1, 2))),
]


@pytest.mark.parametrize(("name", "dims"), MODELS)
def test_a_captured_graph_survives_its_file(tmp_path: Path, name: str, dims: Dims) -> None:
    graph = capture(ZooFactory(name, dims), model="one spelling")
    save_graph(graph, tmp_path / "a.graph")
    again = load_graph(tmp_path / "a.graph")
    assert same(graph, again)
    assert graph.op_ids == again.op_ids
    assert graph.fingerprint == again.fingerprint == replace(graph, model="another spelling").fingerprint
    assert again.at(1).flat.kernel_inputs.tolist() == graph.at(1).flat.kernel_inputs.tolist()


def deep(layers: int) -> Graph:
    """Layers of 24 ops, 110 kernels and 12 parameters; each reads the one before and, backward, the one behind."""
    x, w = TensorSpec((Affine(0, 1), 128, 1024), "bfloat16"), TensorSpec((1024, 1024), "bfloat16")
    weights = 12
    parameters = tuple(Source(kind="parameter", name=f"h.{{0}}.w{i}", spec=w, trainable=True) for i in range(weights))
    ops = tuple(
        Op(
            path="h.{0}",
            target="aten.linear.default",
            kind="linear",
            inputs=(-1 if i == 0 else weights + i - 1, i % weights),
            outputs=(x,),
            carries_gradient=True,
        )
        for i in range(24)
    )
    kernels = tuple(
        Kernel(
            op=i if i < 24 else (109 - i) % 24,
            phase="F" if i < 40 else "B",
            target="aten.mm.default",
            inputs=(-1 if i == 0 else -2 if i == 40 else weights + i - 1, i % weights),
            outputs=(x,),
            arguments='{"positional":[{"tensor":0},{"tensor":1}],"named":{}}',
        )
        for i in range(110)
    )
    per_op, per_kernel = weights + 24, weights + 110
    calls = tuple(
        Call(
            template=0,
            variables=(str(c),),
            externals=(0 if c == 0 else 2 + c * per_op - 1,),
            kernel_externals=(
                0 if c == 0 else 2 + (c - 1) * per_kernel + weights + 39,
                1 if c == layers - 1 else 2 + (c + 2) * per_kernel - 1,
            ),
        )
        for c in range(layers)
    )
    return Graph(
        model="deep",
        precision="bfloat16",
        sources=(Source(kind="input", name="0", spec=x), Source(kind="tangent", name="loss", spec=x)),
        templates=(Template(sources=parameters, ops=ops, kernels=kernels),),
        calls=calls,
        loss=2 + layers * per_op - 1,
        gradients={
            2 + c * per_op + i: 2 + c * per_kernel + weights + 40 + i for c in range(layers) for i in range(weights)
        },
    )


@pytest.mark.slow
def test_a_million_ops_fit_in_seconds_and_gigabytes(tmp_path: Path) -> None:
    code = (
        "import resource, sys, test_graph_format as t\n"
        "t.save_graph(t.deep(41_667), sys.argv[1])\n"
        "graph = t.load_graph(sys.argv[1])\n"
        "assert len(graph.op_ids) == graph.flat.op_class.size == 1_000_008\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    path = tmp_path / "a.graph"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 2e9
    assert path.stat().st_size < 500_000
