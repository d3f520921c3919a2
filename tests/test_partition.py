"""What stages hold and exchange, against a slow second account in sets of op ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpart.errors import MismatchError, UnknownNameError, UserError
from simpart.graph import Graph
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage, check_shape
from simpart.plan.partition import Partition, check_plan, clonable_ops, partition
from simpart.schedule import Schedule, parse_rows
from tests.vocabulary import EXAMPLES, GPT, TIED, UNET, graph_of, group

RESNET = "resnet50:image=32,classes=10,width=2,blocks=1-1"
SHIFTED = "tests.models:shifted"
MODELS = [GPT, TIED, UNET, RESNET, SHIFTED]


# --- the slow account ------------------------------------------------------------------------------------------------
class Account:
    """The graph as dicts of ids: who reads whom, who reads which parameter."""

    def __init__(self, graph: Graph) -> None:
        flat = graph.flat
        self.ids = graph.op_ids
        self.reads: dict[str, list[tuple[str, int]]] = {}  # op -> (producer, value)
        self.parameters: dict[str, set[str]] = {}
        self.takes_input: set[str] = set()
        sources = dict(graph.all_sources())
        for i, name in enumerate(self.ids):
            self.reads[name], self.parameters[name] = [], set()
            for value in flat.op_inputs[flat.op_indptr[i] : flat.op_indptr[i + 1]].tolist():
                if flat.value_op[value] >= 0:
                    self.reads[name].append((self.ids[flat.value_op[value]], value))
                elif sources[value].kind == "parameter":
                    self.parameters[name].add(sources[value].name)
                elif sources[value].kind == "input":
                    self.takes_input.add(name)
        ops = {name: graph.op_classes[c] for name, c in zip(self.ids, flat.op_class.tolist(), strict=True)}
        depends: set[str] = set()
        for name in self.ids:
            if name in self.takes_input or any(producer in depends for producer, _ in self.reads[name]):
                depends.add(name)
        members: dict[int, list[str]] = {}
        for name, head in zip(self.ids, flat.op_group.tolist(), strict=True):
            members.setdefault(head, []).append(name)
        self.group = {name: names for names in members.values() for name in names}
        self.clones = {
            name
            for name in self.ids
            if not (name in depends and ops[name].carries_gradient)
            and not ops[name].mutates_buffer
            and ops[name].kind != "random"
        }
        while True:  # a clone needs clones only, and its whole group with it
            kept = {
                name
                for name in self.clones
                if all(p in self.clones for p, _ in self.reads[name]) and set(self.group[name]) <= self.clones
            }
            if kept == self.clones:
                break
            self.clones = kept
        self.gradient = {name: op.carries_gradient for name, op in ops.items()}

    def holds(self, stage_of: dict[str, int], stage: int) -> set[str]:
        held = {name for name in self.ids if name not in self.clones and stage_of[name] == stage}
        waiting = list(held)
        while waiting:  # a clone comes with all that writes into its storage
            for producer, _ in self.reads[waiting.pop()]:
                if producer in self.clones and producer not in held:
                    held.update(self.group[producer])
                    waiting.extend(self.group[producer])
        return held


def compare(graph: Graph, stage_of: np.ndarray[tuple[int], np.dtype[np.int64]], stages: int) -> Partition:
    account, found = Account(graph), partition(graph, stage_of, stages)
    by_name = dict(zip(graph.op_ids, stage_of.tolist(), strict=True))
    held = [account.holds(by_name, s) for s in range(stages)]
    assert [{graph.op_ids[i] for i in ops} for ops in found.ops] == held
    crossing: dict[int, tuple[int, set[int], bool]] = {}
    for name in account.ids:
        if name in account.clones:
            continue
        for producer, value in account.reads[name]:
            if producer not in account.clones and by_name[producer] != by_name[name]:
                row = crossing.setdefault(value, (by_name[producer], set(), account.gradient[producer]))
                row[1].add(by_name[name])
    assert {c.value: (c.source, set(c.destinations), c.carries_gradient) for c in found.crossings} == crossing
    assert set(found.edges) == {(s, d) for s, to, _ in crossing.values() for d in to}
    parameters = [set().union(*(account.parameters[name] for name in names)) for names in held]
    assert [{graph.parameters[int(v)].name for v in values} for values in found.parameters] == parameters
    several = {p: tuple(s for s in range(stages) if p in parameters[s]) for p in set().union(*parameters)}
    shared = {graph.parameters[v].name: where for v, where in found.shared.items()}
    assert shared == {p: where for p, where in several.items() if len(where) > 1}
    assert found.loss_stage == by_name[graph.op_ids[int(graph.flat.value_op[graph.loss])]]
    return found


def random_cut(graph: Graph, stages: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Any cut into non-empty stages along which values flow forward and groups stay whole: not only runs of ops."""
    account, random = Account(graph), np.random.default_rng(seed)
    place: dict[str, int] = {}
    heads = list(dict.fromkeys(account.group[name][0] for name in account.ids))
    own = [head for head in heads if head not in account.clones]
    bounds = np.sort(random.choice(np.arange(1, len(own)), stages - 1, replace=False))
    for rank, head in enumerate(own):
        names = account.group[head]
        least = max((place.get(p, 0) for name in names for p, _ in account.reads[name] if p not in names), default=0)
        usual = int(np.searchsorted(bounds, rank, side="right"))
        stage = max(least, usual - (1 if random.random() < 0.2 and usual else 0))
        for name in names:
            place[name] = stage
    return np.array([place.get(name, -1) for name in graph.op_ids])


@pytest.mark.parametrize("model", MODELS)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_partitions_agree_with_the_slow_account(model: str, stages: int, seed: int) -> None:
    graph = graph_of(model)
    stage_of = random_cut(graph, stages, seed)
    own = stage_of[stage_of >= 0]
    if len(set(own.tolist())) == stages:
        compare(graph, stage_of, stages)
    else:
        with pytest.raises(UserError, match="has no op of its own"):
            partition(graph, stage_of, stages)


@pytest.mark.parametrize("model", MODELS)
def test_clones_agree_with_the_slow_account(model: str) -> None:
    graph = graph_of(model)
    assert {name for name, yes in zip(graph.op_ids, clonable_ops(graph), strict=True) if yes} == Account(graph).clones


def test_tied_parameters_are_shared_between_first_and_last_stage() -> None:
    graph = graph_of(TIED)
    found = check_plan(EXAMPLES[-1].plan, graph)
    assert {graph.parameters[v].name: stages for v, stages in found.shared.items()} == {"wte.weight": (0, 1)}


def test_parallel_towers_have_no_edge_between_them() -> None:
    example = next(e for e in EXAMPLES if e.name.startswith("Two towers"))
    assert check_plan(example.plan, example.graph).edges == ((0, 2), (1, 2))


# --- sets of ops -----------------------------------------------------------------------------------------------------
@given(st.sets(st.integers(0, 113), min_size=1))
def test_op_sets_survive_compression(indices: set[int]) -> None:
    graph = graph_of(GPT)
    ops = OpSet.of(graph, indices)
    assert ops.indices(graph).tolist() == sorted(indices)
    assert len(ops.runs) == 1 + sum(b - a > 1 for a, b in zip(sorted(indices), sorted(indices)[1:], strict=False))


def test_op_sets_refuse_what_the_graph_lacks() -> None:
    graph = graph_of(GPT)
    with pytest.raises(
        UnknownNameError, match=r"unknown op 'h\.0\.mlp/aten\.relu\.default#0'; did you mean 'h\.0\.mlp/"
    ):
        OpSet((("h.0.mlp/aten.relu.default#0",) * 2,)).indices(graph)
    with pytest.raises(UserError, match="ends before it begins"):
        OpSet(((graph.op_ids[5], graph.op_ids[2]),)).indices(graph)


# --- refusals of plans -----------------------------------------------------------------------------------------------
def refused(plan: Plan, graph: Graph, kind: type[UserError] = UserError) -> str:
    with pytest.raises(kind) as caught:
        check_plan(plan, graph)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def two_stages(graph: Graph, first: OpSet, second: OpSet) -> Plan:
    return Plan(
        graph=graph.fingerprint,
        groups=(group("0:1", dp=1), group("1:2", dp=1)),
        stages=(Stage(ops=first, group=0), Stage(ops=second, group=1)),
        batch=Batch(micro_batches=2, sizes=((1,), (1,))),
    )


def cut(graph: Graph, at: int, overlap: int = 0, gap: int = 0) -> Plan:
    ids = graph.op_ids
    return two_stages(graph, OpSet(((ids[0], ids[at + overlap]),)), OpSet(((ids[at + 1 + gap], ids[-1]),)))


def test_an_op_in_two_stages_is_refused() -> None:
    message = refused(cut(graph_of(GPT), 40, overlap=1), graph_of(GPT))
    assert f"op {graph_of(GPT).op_ids[41]} is in stages 0 and 1; every op belongs to one stage" in message


def test_an_op_in_no_stage_is_refused() -> None:
    message = refused(cut(graph_of(GPT), 40, gap=1), graph_of(GPT))
    assert f"op {graph_of(GPT).op_ids[41]} is in no stage" in message


def test_an_unknown_op_is_refused() -> None:
    graph = graph_of(GPT)
    plan = two_stages(graph, OpSet((("h.0/none#0",) * 2,)), OpSet(((graph.op_ids[0], graph.op_ids[-1]),)))
    assert "unknown op 'h.0/none#0'" in refused(plan, graph)


def test_clones_may_be_named_or_left_out() -> None:
    graph, named = graph_of(GPT), cut(graph_of(GPT), 40)
    left_out = replace(
        named, stages=(replace(named.stages[0], ops=OpSet(((graph.op_ids[1], graph.op_ids[40]),))), named.stages[1])
    )
    one, other = check_plan(named, graph), check_plan(left_out, graph)
    assert [o.tolist() for o in one.ops] == [o.tolist() for o in other.ops]


@pytest.mark.parametrize("model", [RESNET, UNET])
def test_ops_that_share_changed_storage_stay_together(model: str) -> None:
    graph = graph_of(model)
    heads = graph.flat.op_group
    split = next(i for i in range(len(heads) - 1) if heads[i] == heads[i + 1] and not clonable_ops(graph)[i])
    assert "share storage that is changed in place and must be in one stage" in refused(cut(graph, split), graph)


def test_values_that_flow_back_are_refused() -> None:
    graph = graph_of(GPT)
    ids = graph.op_ids
    plan = two_stages(graph, OpSet(((ids[50], ids[-1]),)), OpSet(((ids[0], ids[49]),)))
    message = refused(plan, graph)
    assert f"op {ids[50]} of stage 0 needs {ids[49]} of the later stage 1; order stages" in message


def test_a_stage_without_ops_is_refused() -> None:
    graph = graph_of(GPT)
    plan = two_stages(graph, OpSet(((graph.op_ids[1], graph.op_ids[-1]),)), OpSet(((graph.op_ids[0],) * 2,)))
    assert "stage 1 has no op of its own; use at most 1 stages" in refused(plan, graph)


def test_another_graph_is_refused_with_the_first_difference() -> None:
    plan = cut(graph_of(GPT), 40)
    last = graph_of(GPT).op_ids[40]
    assert f"it has no op {last}" in refused(plan, graph_of(TIED), MismatchError)
    inside = replace(plan, graph=graph_of(TIED).fingerprint)
    assert "the same, their sizes, number or precision differ" in refused(inside, graph_of(GPT), MismatchError)
    partial = replace(inside, stages=cut(graph_of(GPT), 40, gap=1).stages)
    assert f"the plan has no op {graph_of(GPT).op_ids[41]}" in refused(partial, graph_of(GPT), MismatchError)


TWICE = DeviceGroup(devices=Devices.of([0, 1]), axes=(("a", 1), ("a", 2)))
SHORT = Schedule(kind="explicit", explicit=parse_rows("0F0,0B0\n1F0"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": (group("0:2", dp=2), group("1:2", dp=1))}, "device groups must not share devices"),
        ({"groups": (group("0:3", dp=2), group("3:4", dp=1))}, "axes {'dp': 2} do not multiply to its 3 devices"),
        ({"groups": (group("0:1", dp=-1, tp=-1), group("3:4", dp=1))}, "sizes of at least 1"),
        ({"groups": (TWICE, group("3:4"))}, "different names"),
        ({"batch": Batch(micro_batches=2, sizes=((1, 1), (3,)))}, "micro-batches [3] must be at least 1 and sum to 2"),
        ({"batch": Batch(micro_batches=2, sizes=((2, 0), (2,)))}, "group 0: replica micro-batches [2, 0]"),
        ({"batch": Batch(micro_batches=2, sizes=((1,), (1,)))}, "group 0 has 2 replicas but 1 micro-batch sizes"),
        ({"batch": Batch(micro_batches=0, sizes=((1, 1), (2,)))}, "at least one micro-batch"),
        ({"batch": Batch(micro_batches=1, sizes=((1, 1),))}, "replica sizes for every group"),
        ({"stages": ()}, "at least one stage"),
        ({"groups": ()}, "at least one stage and one device group"),
        ({"schedule": SHORT}, "stage 0 must run the forward of micro-batch 1"),
    ],
)  # fmt: skip
def test_plans_that_contradict_themselves_are_refused(changes: dict[str, object], message: str) -> None:
    plan = replace(
        cut(graph_of(GPT), 40),
        groups=(group("0:2", dp=2), group("2:3", dp=1)),
        batch=Batch(micro_batches=2, sizes=((1, 1), (2,))),
    )
    check_shape(plan)
    assert message in refused(replace(plan, **changes), graph_of(GPT))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "message"),
    [(2, "stage 1 names group 2 of 2"), (-1, "stage 1 names group -1 of 2"), (0, "group 1 holds no stage")],
)
def test_stages_name_groups_that_exist(number: int, message: str) -> None:
    plan = cut(graph_of(GPT), 40)
    extra = (*plan.stages, replace(plan.stages[1], group=1)) if number != 0 else plan.stages
    stages = tuple(replace(stage, group=number) if s == 1 else stage for s, stage in enumerate(extra))
    assert message in refused(replace(plan, stages=stages), graph_of(GPT))


def test_one_stage_per_group_is_the_schedules_rule_not_the_plans() -> None:
    plan = cut(graph_of(GPT), 40)
    one = replace(
        plan,
        groups=plan.groups[:1],
        stages=tuple(replace(stage, group=0) for stage in plan.stages),
        batch=Batch(micro_batches=2, sizes=((1,),)),
    )
    assert "needs one stage per device group" in refused(one, graph_of(GPT))
    check_plan(replace(one, schedule=Schedule(kind="gpipe")), graph_of(GPT))
