"""Plan files: read back exactly; anything else is refused in one line, whatever it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simpart.errors import FormatError, MismatchError, UserError
from simpart.files import dump_json
from simpart.graph.format import save_graph
from simpart.hardware import load_cluster
from simpart.placement import AxisStrategy, Halo, Partial, Replicate, Shard, Sharding, Strategy, placement_from_text
from simpart.plan import Devices
from simpart.plan.format import (
    PlanFile,
    load_plan,
    plan_from_json,
    plan_to_json,
    save_plan,
    training_from_json,
    training_to_json,
)  # fmt: skip
from simpart.schedule import Action, Schedule, format_rows, parse_rows
from simpart.training import TrainingSpec
from tests.vocabulary import EXAMPLES, MLP, Example, graph_of, tofu

TOFU = next(e for e in EXAMPLES if e.model == MLP)


def written(example: Example, path: Path) -> Path:
    cluster = load_cluster(example.cluster)
    save_plan(path, PlanFile(plan=example.plan, training=TrainingSpec(), cluster=cluster, graph=example.graph))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(TOFU, tmp_path / "plan.json")


def refused(path: Path, kind: type[UserError] = FormatError) -> str:
    with pytest.raises(kind) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edited(path: Path, *keys: str | int, to: Any) -> Path:
    """The file with one place of its JSON changed."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    path.write_text(json.dumps(content))
    return path


# --- files -----------------------------------------------------------------------------------------------------------
def test_an_empty_file_is_refused(file: Path) -> None:
    file.write_bytes(b"")
    assert "is empty; expected a simpart plan" in refused(file)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    assert "truncated or corrupt" in refused(file)


def test_a_newer_version_is_refused(file: Path) -> None:
    assert "version 99; this simpart reads up to 1" in refused(edited(file, "version", to=99))


def test_a_graph_file_is_no_plan(tmp_path: Path) -> None:
    save_graph(graph_of(MLP), tmp_path / "g.graph")
    assert "is a simpart graph, not a simpart plan" in refused(tmp_path / "g.graph")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "none.json")


@pytest.mark.parametrize("part", ["model", "plan", "training", "cluster", "graph"])
def test_a_missing_part_is_named(file: Path, part: str) -> None:
    content = json.loads(file.read_text())
    del content[part]
    file.write_text(json.dumps(content))
    assert f"lacks {part}" in refused(file)


def test_unknown_keys_are_named(file: Path) -> None:
    assert "unknown key 'notes'" in refused(edited(file, "notes", to="mine"))


@pytest.mark.parametrize(
    "where", [("plan",), ("plan", "batch"), ("plan", "groups", 0), ("plan", "stages", 0), ("training",)]
)
def test_unknown_inner_keys_are_named(file: Path, where: tuple[str | int, ...]) -> None:
    assert "colour" in refused(edited(file, *where, "colour", to="red"), UserError)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("plan", "batch", "micro_batches"), 2.7, "expected a whole number, got 2.7"),
        (("plan", "batch", "micro_batches"), "3", "expected a whole number, got '3'"),
        (("plan", "batch", "micro_batches"), True, "expected a whole number, got True"),
        (("plan", "batch", "micro_batches"), None, "expected a whole number, got None"),
        (("plan", "groups", 0, "devices"), "0..4", "devices are written 0:8"),
        (("plan", "groups", 0, "devices"), "0:1000000000000", "up to 10000000"),
        (("plan", "groups", 0, "devices"), [0, 1], "expected text"),
        (("plan", "stages", 0, "ops"), "fc1", "a set of ops is a list"),
        (("plan", "stages", 0, "ops"), [["a", "b", "c"]], "a set of ops is a list"),
        (("plan", "schedule"), "1f1b", "a schedule has a kind"),
        (("plan", "schedule"), {"kind": "1f1b", "parameters": {"v": 1.5}}, "expected a whole number, got 1.5"),
        (("plan", "schedule"), {"kind": "explicit", "rows": ["0X0"]}, "'0X0' is not an action"),
        (("plan", "mode"), "fast", "mode"),
        (("training", "learning_rate"), "high", "expected a number"),
        (("training", "optimizer"), "adamax", "optimizer"),
    ],
)
def test_nonsense_is_named(file: Path, keys: tuple[str | int, ...], value: Any, message: str) -> None:
    assert message in refused(edited(file, *keys, to=value), UserError)


def test_only_inputs_have_halos(file: Path) -> None:
    content = json.loads(file.read_text())
    content["plan"]["shardings"][0][1]["classes"][0][1]["axes"][0][1]["outputs"][0] = "S(0)~(1,1)"
    file.write_text(json.dumps(content))
    assert "only an input has a halo, got S(0)~(1,1); write S(0)" in refused(file)


def test_devices_lie_in_the_cluster(file: Path) -> None:
    moved = edited(file, "plan", "groups", 0, "devices", to="5:9")
    assert "group 0 uses device 8, cluster dgx-a100 has 8; count from 0" in refused(moved, UserError)


def test_plan_and_graph_belong_together(file: Path, tmp_path: Path) -> None:
    other = json.loads(written(EXAMPLES[0], tmp_path / "other.json").read_text())
    mixed = edited(edited(file, "graph", to=other["graph"]), "model", to=other["model"])
    assert "it has no op fc1/aten.linear.default#0; capture the same model" in refused(mixed, MismatchError)


def test_the_model_stated_is_the_graphs(file: Path) -> None:
    assert "says model 'gpt', its graph 'tests.models:mlp'" in refused(edited(file, "model", to="gpt"))


def test_many_micro_batches_cost_nothing_to_read(file: Path) -> None:
    assert load_plan(edited(file, "plan", "batch", "micro_batches", to=2**17)).plan.batch.micro_batches == 2**17
    with pytest.raises(UserError, match="make larger or fewer micro-batches"):
        load_plan(edited(file, "plan", "batch", "micro_batches", to=10**15))


def test_nothing_is_written_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        written(TOFU, tmp_path / "no folder" / "plan.json")
    assert list(tmp_path.iterdir()) == []


# --- whatever the file says, a UserError or a plan -------------------------------------------------------------------
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from(["0:4", "R", "S(9)", "P(sum)", "explicit", "x", "dp", "0F0", "fc1/aten.linear.default#0", "a\nb"]),
    st.lists(st.one_of(st.integers(-2, 3), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["kind", "rows", "axes", "inputs", "classes", "x"]), st.integers(), max_size=2),
)  # fmt: skip


def places(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(content: Any, path: tuple[str | int, ...], action: str, junk: Any) -> Any:
    if not path:
        return junk
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if action == "drop":
        del parent[path[-1]]
    elif action == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[path[-1]]))  # type: ignore[index]
    else:
        parent[path[-1]] = junk
    return content


@pytest.mark.parametrize("part", ["plan", "training", "cluster"])
def test_a_changed_file_gives_a_plan_or_one_line(part: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "plan.json"
    whole = json.loads(written(TOFU, path).read_text())
    sites = list(places(whole[part]))

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(sites) - 1), st.sampled_from(["drop", "double", "set"]), JUNK)
    def check(site: int, action: str, junk: Any) -> None:
        content = {**whole, part: changed(whole[part], sites[site], action, junk)}
        path.write_text(json.dumps(content))
        try:
            found = load_plan(path)
        except UserError as error:
            assert "\n" not in str(error), error
            return
        dump_json(plan_to_json(found.plan))
        dump_json(training_to_json(found.training))

    check()


@given(
    st.recursive(
        JUNK, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    )
)
def test_anything_is_a_plan_or_a_format_error(content: Any) -> None:
    for read in (plan_from_json, training_from_json):
        try:
            read(content)
        except FormatError as error:
            assert "\n" not in str(error)


# --- texts inside ----------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 60), unique=True, min_size=1))
def test_devices_survive_their_text(positions: list[int]) -> None:
    devices = Devices.of(positions)
    assert list(devices) == positions
    assert len(devices) == len(positions)
    assert list(Devices.from_text(str(devices))) == positions


@given(st.integers(0, 50), st.integers(1, 30), st.integers(1, 7))
def test_devices_at_equal_distance_are_one_run(start: int, count: int, step: int) -> None:
    positions = list(range(start, start + count * step, step))
    assert len(Devices.of(positions).runs) == 1


@pytest.mark.parametrize(
    "text", ["", "4", "4:4", "5:4", "0:4:0", "-1:4", "0:4,", "0:4;5:6", "a:b", "٣:٤", "0:99999999999999"]
)
def test_other_texts_are_no_devices(text: str) -> None:
    with pytest.raises(FormatError, match="devices are written 0:8"):
        Devices.from_text(text)


SHARDS = st.builds(Shard, st.integers(0, 9), st.none() | st.integers(1, 10**6))
PLACEMENTS = st.one_of(
    st.just(Replicate()),
    SHARDS,
    st.builds(Partial, st.sampled_from(["sum", "avg", "max", "min"]), st.none() | st.integers(0, 9)),
)
INPUTS = PLACEMENTS | st.builds(Halo, SHARDS, st.integers(0, 99), st.integers(0, 99))


@given(INPUTS)
def test_placements_survive_their_text(place: Any) -> None:
    assert placement_from_text(str(place)) == place


@given(st.text(max_size=12) | INPUTS.map(lambda p: f"{p} ") | INPUTS.map(lambda p: str(p)[:-1]))
def test_other_texts_are_no_placements(text: str) -> None:
    try:
        place = placement_from_text(text)
        assert placement_from_text(str(place)) == place
    except FormatError as error:
        assert "is not a placement" in str(error)


@given(
    st.lists(
        st.tuples(st.sampled_from("xy"), st.lists(INPUTS, max_size=3), st.lists(PLACEMENTS, max_size=3)), max_size=2
    )
)
def test_strategies_survive_json(rows: list[tuple[str, list[Any], list[Any]]]) -> None:
    strategy = Strategy(tuple((axis, AxisStrategy(tuple(i), tuple(o))) for axis, i, o in rows))
    plan = tofu(graph_of(MLP))
    object.__setattr__(plan, "shardings", (("s", Sharding(overrides=(("k", strategy),))),))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


ACTIONS = st.builds(Action, st.integers(0, 20), st.sampled_from("FBIW"), st.integers(0, 200))
ROWS = st.lists(st.lists(ACTIONS, min_size=1).map(tuple), min_size=1).map(tuple)


@given(ROWS)
def test_rows_survive_their_text(rows: Any) -> None:
    assert parse_rows(format_rows(rows)) == rows


@given(ROWS, st.dictionaries(st.text(max_size=5), st.integers(), max_size=3))
def test_schedules_survive_json(rows: Any, parameters: dict[str, int]) -> None:
    plan = tofu(graph_of(MLP))
    schedule = Schedule(kind="explicit", parameters=tuple(parameters.items()), explicit=rows)
    object.__setattr__(plan, "schedule", schedule)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))).schedule == schedule
