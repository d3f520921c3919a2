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
from simpart.kernels.ops import family_of

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
    named = [e for e in events if isinstance(e["args"].get("External id"), int | str)]
    ops = {e["args"]["External id"]: e for e in named if e.get("cat") == "cpu_op"}
    spent: Counter[int] = Counter()
    launched: Counter[int] = Counter()
    for event in named:
        if event.get("cat") == "kernel" and "dur" in event and event["args"]["External id"] in ops:
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
        launches_kernel = str(event.get("name", "")).startswith("cudaLaunchKernel")
        if event.get("cat") == "cuda_runtime" and launches_kernel and "ts" in event:
            starts.setdefault((str(event.get("pid")), str(event.get("tid"))), []).append(event["ts"])
        elif event.get("cat") == "kernel" and event.get("dur", 0) > 0:
            durations.append(event["dur"])
    found = {}
    launches = max(starts.values(), key=len, default=[])
    if len(launches) >= LEAST_LAUNCHES:
        found["kernel_launch_s"] = float(np.median(np.diff(np.sort(launches)))) * 1e-6
    if len(durations) >= LEAST_LAUNCHES:
        found["launch_floor_s"] = float(np.quantile(durations, 0.01)) * 1e-6
    return found


def _events(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Events of a trace, with `args` and times that are finite numbers if at all, and the name of its first device."""
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [_event(event) for event in content["traceEvents"] if isinstance(event, dict)]
        return events, str((content.get("deviceProperties") or [{}])[0].get("name", ""))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{path} is not a trace of torch's profiler: {' '.join(str(error).split())}") from error


def _event(event: dict[str, Any]) -> dict[str, Any]:
    """Without times that are no finite numbers; `args` are at least empty."""
    kept = {k: v for k, v in event.items() if k not in ("ts", "dur") or _finite(v)}
    return kept if isinstance(kept.get("args"), dict) else {**kept, "args": {}}


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(float(value)))


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


_CAUSAL = {  # op: place of the causal flag among its arguments; whether heads come before positions
    "_scaled_dot_product_flash_attention": (4, True), "_scaled_dot_product_efficient_attention": (6, True),
    "_scaled_dot_product_cudnn_attention": (6, True), "_flash_attention_forward": (8, False),
}  # fmt: skip


def _signature(event: Any) -> Signature | None:
    """The op of a trace as a signature. Traces state no outputs: those of products, attention and ops that keep shapes
    follow; others are left out, as is attention of which the trace does not say whether it is causal."""
    arguments = event["args"]
    name = str(event.get("name", "")).removeprefix("aten::")
    shapes, dtypes = arguments.get("Input Dims") or [], arguments.get("Input type") or []
    if not (isinstance(shapes, list) and isinstance(dtypes, list)):
        return None
    forms = [
        _dense(shape, _DTYPES[dtype])
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if shape and _DTYPES.get(str(dtype)) in DTYPE_BYTES and all(isinstance(dim, int) for dim in shape)
    ]
    if not forms:
        return None
    first, words, family = forms[0], "", family_of(f"aten.{name}.default")
    if family == "attention":
        place, heads_first = _CAUSAL.get(name, (0, True))
        stated = arguments.get("Concrete Inputs") or []
        if (
            not 0 < place < len(stated)
            or stated[place] not in ("True", "False")
            or any(len(f.shape) != 4 for f in forms)
        ):
            return None
        words = '{"positional":[],"named":{"is_causal":true}}' if stated[place] == "True" else ""
        if not heads_first:
            forms = [_dense([f.shape[i] for i in (0, 2, 1, 3)], f.dtype) for f in forms]
        name, shape = "_scaled_dot_product_flash_attention", forms[0].shape
    elif name in ("mm", "bmm") and len(forms) == 2:
        shape = (*first.shape[:-1], forms[1].shape[-1])
    elif name == "addmm" and len(forms) == 3 and len(forms[1].shape) == len(forms[2].shape) == 2:
        shape = (forms[1].shape[0], forms[2].shape[1])
    elif family == "pointwise":
        try:
            shape = np.broadcast_shapes(*(form.shape for form in forms))
        except ValueError:
            return None
    elif family in ("norm", "softmax"):
        shape = first.shape
    else:
        return None
    return Signature(f"aten.{name}.default", tuple(forms), (_dense(shape, first.dtype),), words)


def _dense(shape: Sequence[int], dtype: str) -> TensorForm:
    return TensorForm(tuple(shape), dtype, tuple(range(len(shape))))
