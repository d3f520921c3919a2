"""Plan files: Plan, recipe, Cluster and Graph by value, enough to simulate without torch or cache.

They hold no times, paths or dates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from simpart.errors import FormatError, UserError
from simpart.files import read_document, write_document
from simpart.graph import Graph
from simpart.graph_format import graph_from_json, graph_to_json
from simpart.hardware import Cluster
from simpart.partition import check_plan
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
    texts: list[tuple[Any, Callable[[Any], Any], Callable[[str], Any]]] = [
        (Devices, str, Devices.from_text),
        (OpSet, _op_set_text, _op_set_from_text),
        *[(kind, str, placement_from_text) for kind in (Replicate, Shard, Partial, Halo, Placement, Placement | Halo)],
    ]
    for kind, write, read in texts:
        converter.register_unstructure_hook(kind, write)
        converter.register_structure_hook(kind, _reader(read))
    converter.register_unstructure_hook(Schedule, _schedule_to_json)
    converter.register_structure_hook(Schedule, _schedule_from_json)
    for kind in (Plan, Stage, DeviceGroup, Batch, TrainingSpec, Sharding, Strategy, AxisStrategy, StatePlacement):
        write_one = make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=True)
        converter.register_unstructure_hook(kind, write_one)
        converter.register_structure_hook(kind, make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True))
    return converter


def _reader(read: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, str | list):
            raise FormatError(f"expected text, got {value!r}")
        return read(value)  # type: ignore[arg-type]

    return structure


def _op_set_text(ops: OpSet) -> list[Any]:
    return [first if first == last else [first, last] for first, last in ops.runs]


def _op_set_from_text(content: Any) -> OpSet:
    runs = [(run, run) if isinstance(run, str) else tuple(run) for run in content]
    if not all(len(run) == 2 and all(isinstance(name, str) for name in run) for run in runs):
        raise FormatError("a set of ops is a list of ids and of [first id, last id] runs")
    return OpSet(tuple((str(a), str(b)) for a, b in runs))


def _schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    content: dict[str, Any] = {"kind": schedule.kind}
    if schedule.parameters:
        content["parameters"] = dict(schedule.parameters)
    if schedule.explicit:
        content["rows"] = format_rows(schedule.explicit).splitlines()
    return content


def _schedule_from_json(content: Any, _: Any) -> Schedule:
    known = {"kind", "parameters", "rows"}
    if not isinstance(content, Mapping) or not set(content) <= known or not isinstance(content.get("kind"), str):
        raise FormatError(f"a schedule has the keys {', '.join(sorted(known))}, got {content!r}")
    parameters = tuple((str(k), int(v)) for k, v in content.get("parameters", {}).items())
    return Schedule(
        kind=content["kind"], parameters=parameters, explicit=parse_rows("\n".join(content.get("rows", [])))
    )


_CONVERTER = _converter()


def _structure(kind: type[T], content: Any, what: str) -> T:
    try:
        return _CONVERTER.structure(content, kind)
    except UserError:
        raise
    except Exception as error:  # cattrs wraps whatever a hook raised in its own groups
        reasons = cattrs.transform_error(error, path="$")
        raise FormatError(f"{what} is malformed: {reasons[0]}") from error


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
    """Read a plan file and check that plan and graph belong together. Runs nothing that the file says."""
    content = read_document(path, KIND, VERSION)
    missing = [key for key in ("plan", "training", "cluster", "graph") if key not in content]
    if missing:
        raise FormatError(f"{path} lacks {', '.join(missing)}; write it again with simpart plan or simpart search")
    file = PlanFile(
        plan=plan_from_json(content["plan"]),
        training=training_from_json(content["training"]),
        cluster=Cluster.from_dict(content["cluster"]),
        graph=graph_from_json(content["graph"]),
    )
    check_plan(file.plan, file.graph)
    return file
