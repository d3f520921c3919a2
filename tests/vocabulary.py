"""Eight plans of very different kinds, written by hand: what the vocabulary must say without special cases.

`python -m tests.vocabulary --write docs/formats.md` renews their words and JSON in the document.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from simpart.describe import describe
from simpart.graph import Graph, Source
from simpart.hardware import load_cluster
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.placement import AxisStrategy, Partial, Placement, Replicate, Shard, StatePlacement
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.format import plan_to_json
from simpart.schedule import Schedule
from tests.sharding_rule import follow, sharding_of

__all__ = ["EXAMPLES", "GPT", "TIED", "UNET", "Example", "graph_of", "megatron", "rests"]

GPT = "gpt:layers=7,hidden=48,heads=4,seq=20,vocab=112"
LLAMA = "llama:layers=2,hidden=16,heads=2,seq=8,vocab=32,ffn=24"
MLP, TOWERS = "tests.models:mlp", "tests.models:two_towers"
UNET = "unet:image=16,base=2,depth=2"
TIED = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32,tied=true"
R = Replicate()


@functools.cache
def graph_of(model: str) -> Graph:
    """From the cache of captured graphs, so that every process and run of the tests captures a model once."""
    return captured(parse_model(model), "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A plan with what it needs; `about` says what is special."""

    name: str
    about: str
    model: str
    cluster: str
    build: Callable[[Graph], Plan]

    @property
    def graph(self) -> Graph:
        return graph_of(self.model)

    @property
    def plan(self) -> Plan:
        return self.build(self.graph)


def run(first: str, last: str | None = None) -> OpSet:
    return OpSet(((first, last or first),))


def group(devices: str, **axes: int) -> DeviceGroup:
    return DeviceGroup(devices=Devices.from_text(devices), axes=tuple(axes.items()))


def after_layer(layer: int) -> str:
    """The last op of a layer of a GPT or Llama."""
    return f"h.{layer}/aten.add.Tensor#1"


def first_of(layer: int) -> str:
    return f"h.{layer}.ln_1/aten.layer_norm.default#0"


EMBEDDING, LOSS = "wte/aten.embedding.default#0", "/aten.cross_entropy_loss.default#0"


# --- the plans -------------------------------------------------------------------------------------------------------
def rannc(graph: Graph) -> Plan:
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:3", dp=3), group("3:4", dp=1)),
        stages=(
            Stage(ops=run(EMBEDDING, after_layer(4)), group=0),
            Stage(ops=run(first_of(5), LOSS), group=1, recompute=(run(first_of(5), after_layer(5)),)),
        ),
        batch=Batch(micro_batches=8, sizes=((2, 1, 1), (4,))),
        schedule=Schedule(kind="gpipe"),
    )


TENSOR_PARALLEL = {
    "*.qkv.*": Shard(0), "*.fc.*": Shard(0), "*.proj.weight": Shard(1), "wte.weight": Shard(0), "head.weight": Shard(0)
}  # fmt: skip


def rests(places: Mapping[str, Placement]) -> Callable[[Source], Placement]:
    """Where a parameter rests, by pattern of its name; all else is whole."""
    return lambda source: next((p for name, p in places.items() if fnmatchcase(source.name, name)), R)


def at_rest(axis: str, places: Mapping[str, Placement]) -> tuple[tuple[str, StatePlacement], ...]:
    """Parameter, gradient and optimizer state alike."""
    each = {name: ((axis, place),) for name, place in places.items()}
    return tuple((name, StatePlacement(parameter=p, gradient=p, optimizer=p)) for name, p in each.items())


def megatron(graph: Graph, *, sequence_parallel: bool = True) -> Plan:
    """Column- and row-parallel linears, vocabulary split; the residual stream whole, or split along the sequence."""
    wishes: dict[str, AxisStrategy | str] = {
        "wte/aten.embedding.default#0|F|aten.embedding.default#0": AxisStrategy((Shard(0), R), (Partial(mask=0),)),
        "wte/aten.embedding.default#0|B|aten.embedding_dense_backward.default#0": AxisStrategy((R, R), (Shard(0),)),
    }
    if sequence_parallel:
        wishes["/aten.add.Tensor#0|F|aten.add.Tensor#0"] = AxisStrategy((Shard(1), Shard(0)), (Shard(1),))
    strategies = follow(graph, rests(TENSOR_PARALLEL), wishes.get)
    layers = ((0, 1), (2, 3), (4, 5), (6, 6))
    stages = [
        Stage(
            ops=run(EMBEDDING if s == 0 else first_of(first), LOSS if s == 3 else after_layer(last)),
            group=s % 2,
            sharding="tensor",
        )
        for s, (first, last) in enumerate(layers)
    ]
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:4", dp=2, tp=2), group("4:8", dp=2, tp=2)),
        stages=tuple(stages),
        batch=Batch(micro_batches=4, sizes=((1, 1), (1, 1))),
        schedule=Schedule(kind="interleaved-1f1b"),
        shardings=(("tensor", sharding_of(graph, {"tp": strategies})),),
        state=at_rest("tp", TENSOR_PARALLEL),
    )


def fsdp(graph: Graph) -> Plan:
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:8", dp=8),),
        stages=(Stage(ops=run(graph.op_ids[0], graph.op_ids[-1]), group=0),),
        batch=Batch(micro_batches=2, sizes=((2,) * 8,)),
        state=at_rest("dp", {"*": Shard(0)}),
    )


PRODUCTS = {  # the dim of each matrix product that is split on x and on y: m rows, n columns, k the sum
    "fc1/aten.linear.default#0|F|aten.addmm.default#0": "mn",
    "fc2/aten.linear.default#0|F|aten.addmm.default#0": "mk",
    "fc2/aten.linear.default#0|B|aten.mm.default#0": "nm",  # gradient of what is between
    "fc2/aten.linear.default#0|B|aten.mm.default#1": "nk",  # of the weight
    "fc1/aten.linear.default#0|B|aten.mm.default#0": "mk",
}


def tofu(graph: Graph) -> Plan:
    """The products as in the table, the loss by rows on x and by columns on y; the rest follows."""
    places = {"x": rests({}), "y": rests({"fc1.*": Shard(0), "fc2.weight": Shard(1)})}
    strategies = {}
    for i, (axis, rest) in enumerate(places.items()):
        wishes: dict[str, AxisStrategy | str] = {name: split[i] for name, split in PRODUCTS.items()}
        wishes["/aten.sub.Tensor#0|F|aten.sub.Tensor#0"] = AxisStrategy((Shard(i), Shard(i)), (Shard(i),))
        wishes["/aten.mean.default#0|B|aten.expand.default#0"] = AxisStrategy((R,), (Shard(i),))
        strategies[axis] = follow(graph, rest, wishes.get)
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:4", x=2, y=2),),
        stages=(Stage(ops=run(graph.op_ids[0], graph.op_ids[-1]), group=0, sharding="tofu"),),
        batch=Batch(micro_batches=1, sizes=((8,),)),
        shardings=(("tofu", sharding_of(graph, strategies)),),
        state=at_rest("y", {"fc1.*": Shard(0), "fc2.weight": Shard(1)}),
    )


def towers(graph: Graph) -> Plan:
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:2", dp=2), group("2:4", dp=2), group("4:5", dp=1)),
        stages=(
            Stage(ops=run("image.0/aten.conv2d.default#0", "image.4/aten.linear.default#0"), group=0),
            Stage(ops=run("tokens/aten.embedding.default#0", "text.2/aten.linear.default#0"), group=1),
            Stage(ops=run("/aten.cosine_similarity.default#0", "/aten.mean.default#0"), group=2),
        ),
        batch=Batch(micro_batches=4, sizes=((3, 3), (3, 3), (6,))),
    )


def unet(graph: Graph) -> Plan:
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:1", dp=1), group("1:3", dp=2), group("3:4", dp=1)),
        stages=(
            Stage(ops=run("down.0.0/aten.conv2d.default#0", "/aten.max_pool2d.default#0"), group=0),
            Stage(ops=run("down.1.0/aten.conv2d.default#0", "merge.0.5/aten.relu_.default#0"), group=1),
            Stage(ops=run("up.1/aten.conv_transpose2d.input#0", LOSS), group=2),
        ),
        batch=Batch(micro_batches=4, sizes=((2,), (1, 1), (2,))),
        skips="relay",
    )


def mixed(graph: Graph) -> Plan:
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:2", dp=2), group("7:10", dp=3)),
        stages=(
            Stage(ops=run(EMBEDDING, after_layer(3)), group=0),
            Stage(ops=run(first_of(4), LOSS), group=1),
        ),
        batch=Batch(micro_batches=8, sizes=((2, 2), (2, 1, 1))),
    )


def selective(graph: Graph) -> Plan:
    core = [f"h.{layer}.attn/aten.{op}" for layer in (0, 1) for op in ("view.default#0", "reshape.default#0")]
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:2", dp=2), group("2:4", dp=2)),
        stages=(
            Stage(ops=run(EMBEDDING, after_layer(0)), group=0, recompute=(run(core[0], core[1]),)),
            Stage(ops=run(first_of(1), LOSS), group=1, recompute=(run(core[2], core[3]),)),
        ),
        batch=Batch(micro_batches=4, sizes=((2, 2), (2, 2))),
    )


EXAMPLES = (
    Example(
        name="RaNNC: unequal replicas",
        about="Two stages, on three devices and one; the first replica of stage 0 takes half of each micro-batch, "
        "the other two a quarter each. One layer is recomputed.",
        model=GPT, cluster="dgx-a100", build=rannc,
    ),
    Example(
        name="Megatron: tensor, pipeline and data parallel",
        about="Two virtual stages per group, each replica split over two devices; outside attention and MLP the "
        "tensors are split along the sequence, norms included. Kernels that are not named replicate.",
        model=GPT, cluster="dgx-a100", build=megatron,
    ),
    Example(
        name="FSDP",
        about="One stage of eight replicas; parameters, gradients and optimizer state rest in shards (ZeRO-3).",
        model=LLAMA, cluster="dgx-a100", build=fsdp,
    ),
    Example(
        name="Tofu: 2 × 2, backward unlike forward",
        about="No replicas: every kernel that computes is split on both axes, and the matrix products of the backward "
        "along other dims than those of the forward.",
        model=MLP, cluster="dgx-a100", build=tofu,
    ),
    Example(
        name="Two towers on separate stages",
        about="Stages 0 and 1 don't depend on each other; stage 2 joins them.",
        model=TOWERS, cluster="dgx-a100", build=towers,
    ),
    Example(
        name="U-Net: skips over the middle stage",
        about='The skip of the top level is relayed by stage 1; with `"skips": "send"`, the default, stage 0 sends '
        "it straight to stage 2.",
        model=UNET, cluster="dgx-a100", build=unet,
    ),
    Example(
        name="Two kinds of devices",
        about="Stage 0 on two A100; stage 1 on an A100, which takes half of each micro-batch, and two V100.",
        model=GPT, cluster="a100-v100", build=mixed,
    ),
    Example(
        name="Selective recomputation, tied embedding",
        about="Only attention is run again in backward. Embedding and head are one parameter, held by both stages.",
        model=TIED, cluster="dgx-a100", build=selective,
    ),
)  # fmt: skip


# --- the document ----------------------------------------------------------------------------------------------------
BEGIN, END = "<!-- plans: begin (python -m tests.vocabulary --write docs/formats.md) -->", "<!-- plans: end -->"


def shortened(content: Any, depth: int = 0) -> Any:
    """JSON for people: long lists and tables cut, the fingerprint left out."""
    if isinstance(content, dict):
        return {key: "…" if key == "graph" else shortened(value, depth + 1) for key, value in content.items()}
    if isinstance(content, list) and len(content) > 4 and depth > 3:
        return [*(shortened(item, depth + 1) for item in content[:2]), f"… {len(content) - 2} more"]
    if isinstance(content, list):
        return [shortened(item, depth + 1) for item in content]
    return content


def compact(content: Any, indent: str = "", width: int = 116) -> str:
    """JSON on one line where it fits, else one item per line."""
    flat = json.dumps(content, ensure_ascii=False)
    if len(indent) + len(flat) <= width or not isinstance(content, dict | list) or not content:
        return flat
    inner = indent + "  "
    if isinstance(content, dict):
        rows = [f"{json.dumps(key)}: {compact(value, inner, width)}" for key, value in content.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + compact(item, inner, width) for item in content) + f"\n{indent}]"


def document() -> str:
    """The plans in words and as JSON."""
    parts = []
    for number, example in enumerate(EXAMPLES, 1):
        words = describe(example.plan, example.graph, load_cluster(example.cluster))
        content = compact(shortened(json.loads(json.dumps(plan_to_json(example.plan)))))
        parts.append(
            f"### {number}. {example.name}\n{example.about} `{example.model}` on `{example.cluster}`.\n"
            f"```text\n{words}\n```\n```json\n{content}\n```\n"
        )
    return "\n".join(parts)


def renewed(text: str) -> str:
    """The document with the part between the marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{document()}{END}{after}"


def relayed_or_sent(plan: Plan) -> Plan:
    """The other way of bringing skips to their readers."""
    return replace(plan, skips="send" if plan.skips == "relay" else "relay")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Renew the plans in a document.")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE")
    path = parser.parse_args().write
    path.write_text(renewed(path.read_text()))
