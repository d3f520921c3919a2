"""simpart's own profiles and traces of torch's profiler (Kineto) into the one schema, by way of kernel signatures."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simpart.cost import Signature, TensorForm
from simpart.costmodels.learned._adapters import cleaned, device_named
from simpart.costmodels.learned._families import FAMILY_MODELS
from simpart.costmodels.learned._measurements import Imported, Measurements
from simpart.costmodels.learned._signatures import question_of
from simpart.errors import FormatError
from simpart.graph.sizes import DTYPE_BYTES
from simpart.hardware_profiles._store import Store

__all__ = ["LEAST_LAUNCHES", "import_kernels", "overheads_of_trace", "read_profiles", "read_trace"]

LEAST_LAUNCHES = 50

_DTYPES = {
    "float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64", "long": "int64",
    "long int": "int64", "int": "int32", "bool": "bool",
}  # fmt: skip
Kernel = tuple[Signature, str, float, str]
"""(signature, device, seconds, software)."""


def read_profiles(path: Path) -> Imported:
    """A profile store (its folder or its file): the medians of kernels that a learned family describes."""
    store = Store(path if path.is_dir() else path.parent)
    kernels = [
        (r.signature, r.environment.device, r.samples.median_s, f"torch {r.environment.torch}")
        for r in store.read().kernels
    ]
    return import_kernels("profiles", kernels, source="simpart profile")


def read_trace(path: Path) -> Imported:
    """A Kineto trace, JSON or gzipped JSON, made with record_shapes: kernels joined to the op that launched them.

    Raises FormatError when it is no such trace or names no device that simpart knows.
    """
    events, name = _events(path)
    device = device_named(name)
    if device is None:
        raise FormatError(f"{path} was recorded on {name or 'an unnamed device'!r}, which no device file describes")
    named = [e for e in events if "External id" in e.get("args", {})]
    ops = {e["args"]["External id"]: e for e in named if e.get("cat") == "cpu_op"}
    spent: Counter[int] = Counter()
    launched: Counter[int] = Counter()
    for event in named:
        if event.get("cat") == "kernel" and event["args"]["External id"] in ops:
            spent[event["args"]["External id"]] += event["dur"]
            launched[event["args"]["External id"]] += 1
    found: list[Kernel] = []
    for key, microseconds in spent.items():
        signature = _signature(ops[key]) if launched[key] == 1 else None
        found.append((signature or Signature("aten.unknown", (), ()), device, microseconds * 1e-6, "torch"))
    return import_kernels("kineto", found, source="kineto trace")


def overheads_of_trace(path: Path) -> dict[str, float]:
    """What launching takes on the host and the shortest kernels on the device, of a Kineto trace: `kernel_launch_s` is
    the median time from one launch to the next on the thread that launches most, `launch_floor_s` the hundredth part
    from below of kernel durations. Only those that the trace shows at least LEAST_LAUNCHES of."""
    events, _ = _events(path)
    starts: dict[Any, list[float]] = {}
    durations = []
    for event in events:
        if event.get("cat") == "cuda_runtime" and str(event.get("name", "")).startswith("cudaLaunchKernel"):
            starts.setdefault((event.get("pid"), event.get("tid")), []).append(float(event["ts"]))
        elif event.get("cat") == "kernel" and event.get("dur", 0) > 0:
            durations.append(float(event["dur"]))
    found = {}
    launches = max(starts.values(), key=len, default=[])
    if len(launches) >= LEAST_LAUNCHES:
        found["kernel_launch_s"] = float(np.median(np.diff(np.sort(launches)))) * 1e-6
    if len(durations) >= LEAST_LAUNCHES:
        found["launch_floor_s"] = float(np.quantile(durations, 0.01)) * 1e-6
    return found


def _events(path: Path) -> tuple[Any, str]:
    """Events of a trace and the name of its first device."""
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = content["traceEvents"]
        return events, str((content.get("deviceProperties") or [{}])[0].get("name", ""))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{path} is not a trace of torch's profiler: {' '.join(str(error).split())}") from error


def import_kernels(kind: str, kernels: Sequence[Kernel], source: str) -> Imported:
    """Kernels by family, cleaned; those that no family describes are counted."""
    groups: dict[str, list[tuple[Any, str, float, str, int]]] = {}
    refused: Counter[str] = Counter()
    for i, (signature, device, seconds, software) in enumerate(kernels):
        question = question_of(signature)
        if question is None or question.prior_sd >= 0.1:
            refused["no_model_of_this_op_or_dtype"] += 1
        else:
            groups.setdefault(question.family, []).append((question, device, seconds, software, i))
    tables = []
    for family, rows in groups.items():
        table, counts = cleaned(_table(family, rows, source))
        refused.update(counts)
        if len(table):
            tables.append(table)
    return Imported(kind=kind, tables=tuple(tables), rows=len(kernels), refused=dict(refused))


def _table(family: str, rows: Sequence[tuple[Any, str, float, str, int]], source: str) -> Measurements:
    def names(values: Iterable[str]) -> Any:
        return np.array(list(values), dtype=object)

    dims = np.array([question.dims for question, *_ in rows], dtype=np.float64)
    return Measurements(
        family=family,
        op=names(question.op for question, *_ in rows),
        device=names(device_named(device) or f"?{device}" for _, device, *_ in rows),
        dtype=names(FAMILY_MODELS[family].dtype for _ in rows),
        software=names(software for *_, software, _ in rows),
        source=names(source for _ in rows),
        split=names("" for _ in rows),
        dims={name: dims[:, i] for i, name in enumerate(FAMILY_MODELS[family].dims)},
        latency_s=np.array([seconds for _, _, seconds, _, _ in rows], dtype=np.float64),
        row=np.array([i for *_, i in rows], dtype=np.float64),
    )


def _signature(event: Any) -> Signature | None:
    """The op of a trace as a signature. Traces state no outputs: those of products and of shape-keeping ops follow."""
    arguments = event["args"]
    name = str(event["name"]).removeprefix("aten::")
    shapes, dtypes = arguments.get("Input Dims") or [], arguments.get("Input type") or []
    forms = [
        TensorForm(tuple(shape), _DTYPES[dtype], tuple(range(len(shape))))
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if shape and _DTYPES.get(dtype) in DTYPE_BYTES and all(isinstance(dim, int) for dim in shape)
    ]
    if not forms:
        return None
    first = forms[0]
    if name in ("mm", "bmm") and len(forms) == 2:
        shape = (*first.shape[:-1], forms[1].shape[-1])
    elif name == "addmm" and len(forms) == 3:
        shape = (forms[1].shape[0], forms[2].shape[1])
    else:
        shape = first.shape
    return Signature(f"aten.{name}.default", tuple(forms), (TensorForm(shape, first.dtype, tuple(range(len(shape)))),))
