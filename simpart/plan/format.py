"""Plan files: Plan, recipe, Cluster and Graph by value, enough to simulate without torch or cache.

They hold no times, paths or dates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from simpart.errors import FormatError, MismatchError, UserError
from simpart.files import read_document, write_document
from simpart.graph import Graph
from simpart.graph.format import graph_from_json, graph_to_json
from simpart.hardware import Cluster
from simpart.placement import (
    AxisStrategy,
    Halo,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StatePlacement,
    Strategy,
    placement_from_text,
)
from simpart.plan import Batch, DeviceGroup, Devices, OpSet, Plan, Stage
from simpart.plan.partition import check_plan
from simpart.schedule import Schedule, format_rows, parse_rows
from simpart.training import TrainingSpec

__all__ = [
    "PlanFile", "load_plan", "plan_from_json", "plan_to_json", "save_plan", "training_from_json", "training_to_json",
]  # fmt: skip

KIND, VERSION = "simpart plan", 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """What a plan file holds."""

    plan: Plan
    training: TrainingSpec
    cluster: Cluster
    graph: Graph


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    texts: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
        (Devices, str, lambda value: Devices.from_text(_exactly(str, value))),
        (OpSet, _op_set_text, _op_set_from_text),
        *[(kind, str, _placement) for kind in (Replicate, Shard, Partial, Placement)],
        *[(kind, str, lambda value: placement_from_text(_exactly(str, value))) for kind in (Halo, Placement | Halo)],
        (Schedule, _schedule_to_json, _schedule_from_json),
    ]
    for kind, write, read in texts:
        converter.register_unstructure_hook(kind, write)
        converter.register_structure_hook(kind, _reader(read))
    for exact in (int, str, bool):
        converter.register_structure_hook(exact, lambda value, wanted: _exactly(wanted, value))
    converter.register_structure_hook(float, lambda value, _: _number(value))
    # The inner ones first: each is built into those that hold it.
    for kind in (AxisStrategy, Strategy, Sharding, StatePlacement, DeviceGroup, Stage, Batch, Plan, TrainingSpec):
        converter.register_unstructure_hook(
            kind, make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=True)
        )
        converter.register_structure_hook(kind, make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True))
    return converter


def _reader(read: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, _: read(value)


def _exactly(kind: type[T], value: Any) -> T:
    """No silent conversion: "3", 2.7 and true are no counts."""
    if type(value) is not kind:
        words = {int: "a whole number", str: "text", bool: "true or false"}
        raise FormatError(f"expected {words.get(kind, kind.__name__)}, got {value!r}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise FormatError(f"expected a number, got {value!r}")
    return float(value)


def _placement(value: Any) -> Any:
    found = placement_from_text(_exactly(str, value))
    if isinstance(found, Halo):
        raise FormatError(f"only an input has a halo, got {value}; write {found.shard}")
    return found


def _op_set_text(ops: OpSet) -> list[Any]:
    return [first if first == last else [first, last] for first, last in ops.runs]


def _op_set_from_text(content: Any) -> OpSet:
    runs = [[run, run] if type(run) is str else run for run in content] if type(content) is list else [content]
    if not all(type(run) is list and len(run) == 2 and all(type(name) is str for name in run) for run in runs):
        raise FormatError("a set of ops is a list of ids and of [first id, last id] runs")
    return OpSet(tuple((first, last) for first, last in runs))


def _schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    content: dict[str, Any] = {"kind": schedule.kind}
    if schedule.parameters:
        content["parameters"] = dict(schedule.parameters)
    if schedule.explicit:
        content["rows"] = format_rows(schedule.explicit).splitlines()
    return content


def _schedule_from_json(content: Any) -> Schedule:
    known = {"kind": str, "parameters": dict, "rows": list}
    if (
        type(content) is not dict
        or "kind" not in content
        or not all(type(value) is known.get(key) for key, value in content.items())
    ):
        raise FormatError("a schedule has a kind (text) and may have parameters (name: number) and rows (list of text)")
    parameters = tuple((name, _exactly(int, value)) for name, value in content.get("parameters", {}).items())
    rows = parse_rows("\n".join(_exactly(str, row) for row in content.get("rows", [])))
    return Schedule(kind=content["kind"], parameters=parameters, explicit=rows)


_CONVERTER = _converter()


def _structure(kind: type[T], content: Any, what: str) -> T:
    try:
        return _CONVERTER.structure(content, kind)
    except UserError as error:
        raise FormatError(f"{what} is malformed: {_one_line(str(error))}") from error
    except Exception as error:  # cattrs wraps whatever a hook raised in its own groups
        reasons = cattrs.transform_error(error, path=what.split()[-1], format_exception=_reason)
        raise FormatError(f"{what} is malformed: {_one_line(reasons[0])}") from error


def _reason(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, UserError) else cattrs.v.format_exception(error, kind)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def plan_to_json(plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = _CONVERTER.unstructure(plan)
    return result


def plan_from_json(content: Any) -> Plan:
    """Raises FormatError in one line for anything that is not a plan."""
    return _structure(Plan, content, "the plan")


def training_to_json(training: TrainingSpec) -> dict[str, Any]:
    result: dict[str, Any] = _CONVERTER.unstructure(training)
    return result


def training_from_json(content: Any) -> TrainingSpec:
    return _structure(TrainingSpec, content, "the training recipe")


def save_plan(path: Path | str, file: PlanFile) -> None:
    """Write a plan file: the same bytes for the same content, the whole file or nothing."""
    content = {
        "model": file.graph.model,
        "plan": plan_to_json(file.plan),
        "training": training_to_json(file.training),
        "cluster": file.cluster.to_dict(),
        "graph": graph_to_json(file.graph),
    }
    write_document(path, KIND, VERSION, content)


def load_plan(path: Path | str) -> PlanFile:
    """Read a plan file and check that plan, graph and cluster belong together. Runs nothing that the file says."""
    content = read_document(path, KIND, VERSION)
    known = ("model", "plan", "training", "cluster", "graph")
    for key in known:
        if key not in content:
            raise FormatError(f"{path} lacks {key}; write it again with simpart plan or simpart search")
    for key in content:
        if key not in (*known, "kind", "version"):
            raise FormatError(f"{path}: unknown key {key!r}; a plan file has {', '.join(known)}")
    try:
        file = PlanFile(
            plan=plan_from_json(content["plan"]),
            training=training_from_json(content["training"]),
            cluster=Cluster.from_dict(content["cluster"]),
            graph=graph_from_json(content["graph"]),
        )
        _check_devices(file)
        check_plan(file.plan, file.graph)
    except UserError as error:
        raise type(error)(f"{path}: {_one_line(str(error))}") if type(error) in _PLAIN else error from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a cluster's numbers of a wrong kind
        raise FormatError(f"{path}: the cluster is malformed: {_one_line(str(error))}") from error
    if content["model"] != file.graph.model:
        raise FormatError(f"{path} says model {content['model']!r}, its graph {file.graph.model!r}; write it again")
    return file


_PLAIN = (UserError, FormatError, MismatchError)  # those made from a message alone


def _check_devices(file: PlanFile) -> None:
    for g, group in enumerate(file.plan.groups):
        last = max((range(*run)[-1] for run in group.devices.runs), default=0)
        if last >= file.cluster.size:
            raise UserError(
                f"group {g} uses device {last}, cluster {file.cluster.name} has {file.cluster.size}; count from 0"
            )
