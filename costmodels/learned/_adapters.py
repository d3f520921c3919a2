"""Published operator tables into the one schema: the kind of a file is told from its columns."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpart.costmodels.learned._families import FAMILY_MODELS
from simpart.costmodels.learned._measurements import Imported, Measurements, concatenate, row_codes
from simpart.costmodels.learned._rules import judge
from simpart.costmodels.learned._training import rows_of, sheets_for
from simpart.errors import FormatError, UserError
from simpart.hardware import load_device

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["KINDS", "device_named", "import_frame", "latencies_s", "read_frame", "read_measurements"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp16": 2.0,
    "half": 2.0,
    "float32": 4.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
}
_REMARK = re.compile(r"\s*\([^)]*\)")


@lru_cache(maxsize=512)
def device_named(spelling: str) -> str | None:
    """Name of the device file for a spelling; a remark in brackets names the host, not the chip. None if unknown.

    >>> device_named("h100_sxm (p5)")
    'H100-SXM-80GB'
    """
    name = _REMARK.sub("", spelling).strip()
    if "/" in name or os.sep in name or name.endswith((".yaml", ".yml")):
        return None  # data may not say which files are opened
    try:
        return load_device(name).name
    except UserError:
        return None


def read_frame(path: Path | str) -> pd.DataFrame:
    """A CSV or Parquet file as a table; raises FormatError in one line."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError("reading data sets needs pandas and pyarrow; install simpart[data]") from error
    path = Path(path)
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, low_memory=False)
    except Exception as error:  # pandas and pyarrow raise a dozen kinds, none of them ours
        raise FormatError(f"cannot read {path} as a table: {' '.join(str(error).split())[:200]}") from error
    if not len(frame):
        raise FormatError(f"{path} has no rows")
    if len(frame.columns) == 1 and (found := re.search(r"[;\t|]", str(frame.columns[0]))):
        raise FormatError(f"{path} has columns separated by {found[0]!r}; write them with commas")
    return frame


def read_measurements(path: Path | str) -> Imported:
    """All operator measurements of a file, cleaned, with what was left out by reason. Raises FormatError for a file
    of no known kind, naming the columns that each kind needs."""
    return import_frame(read_frame(path), str(path))


def import_frame(frame: pd.DataFrame, name: str = "table") -> Imported:
    """As `read_measurements`, from a table in memory."""
    frame = _renamed(frame)
    columns = set(frame.columns)
    found = [kind for kind in KINDS if kind.columns <= columns and kind.accepts(frame)]
    if not found:
        nearest_first = sorted(KINDS, key=lambda k: len(k.columns - columns) / len(k.columns))
        need = "; ".join(f"{k.name}: {', '.join(sorted(k.columns - columns)) or 'other ops'}" for k in nearest_first)
        raise FormatError(f"{name} is of no known kind; missing columns are, by kind, {need}")
    kind = found[0]
    refused: Counter[str] = Counter()
    tables = []
    taken = np.zeros(len(frame), dtype=bool)
    for table in kind.read(frame):
        taken[table.row.astype(np.int64)] = True
        clean, counts = cleaned(table)
        refused.update(counts)
        if len(clean):
            tables.append(clean)
    left = int((~taken).sum())
    if left:
        refused["no_model_of_this_op_or_dtype"] += left
    together = [[t for t in tables if t.family == name] for name in dict.fromkeys(t.family for t in tables)]
    return Imported(kind=kind.name, tables=tuple(map(concatenate, together)), rows=len(frame), refused=dict(refused))


def _renamed(frame: pd.DataFrame) -> pd.DataFrame:
    """Tables as they lie in the package aiconfigurator-core, or with other names of device and latency, with the column
    names of the shared data files."""
    if "latency" in frame.columns and "framework" in frame.columns:
        frame = frame.rename(columns={old: new for old, new in _PACKAGE_NAMES.items() if new not in frame.columns})
        frame = frame if "source" in frame.columns else frame.assign(source="aiconfigurator-core")
    device = next((name for name in ("system", "device", "gpu") if name in frame.columns), "system")
    frame = frame if device == "system" else frame.rename(columns={device: "system"})
    if "latency_ms" not in frame.columns and frame.columns.isin(["latency_us", "latency_s"]).any():
        milliseconds = 1e3 * latencies_s(frame)
        frame = frame.drop(columns=["latency_us", "latency_s"], errors="ignore").assign(latency_ms=milliseconds)
    return frame


_PACKAGE_NAMES = {
    "framework": "fw", "version": "fw_version", "device": "system", "latency": "latency_ms", "gemm_dtype": "dtype",
    "isl": "seq_len", "num_key_value_heads": "num_kv_heads", "moe_dtype": "dtype",
}  # fmt: skip


def cleaned(table: Measurements) -> tuple[Measurements, dict[str, int]]:
    """Rows that no rule speaks against, and how many each rule took out."""
    known = [name for name in table.devices() if not name.startswith("?")]
    sheets = sheets_for(known, FAMILY_MODELS[table.family])
    stand_in = next(iter(sheets), None)
    rows = None
    if stand_in is not None:
        names = np.array([n if n in sheets else stand_in for n in table.device.tolist()], dtype=object)
        rows = rows_of(replace(table, device=names), sheets)
    verdict = judge(table, sheets, rows)
    counts = Counter(v for v in verdict.tolist() if v)
    return table.at(verdict == ""), dict(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A form of file: the columns it needs, whether the ops in it fit, and how it becomes tables."""

    name: str
    columns: frozenset[str]
    read: Callable[[pd.DataFrame], Iterable[Measurements]]
    accepts: Callable[[pd.DataFrame], bool] = lambda frame: True


def _text(frame: pd.DataFrame, column: str, default: str = "") -> Any:
    import pandas as pd

    if column not in frame.columns:
        return np.full(len(frame), default, dtype=object)
    codes, values = pd.factorize(frame[column], use_na_sentinel=True)
    return np.array([*map(str, values), ""], dtype=object)[codes]  # missing is -1, the last


def _number(frame: pd.DataFrame, column: str, default: float | None = None) -> Floats:
    import pandas as pd

    if column not in frame.columns:
        if default is None:
            raise FormatError(f"column {column!r} is missing")
        return np.full(len(frame), default)
    values: Floats = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    return values if default is None else np.where(np.isnan(values), default, values)


def latencies_s(frame: pd.DataFrame) -> Floats:
    """Seconds from whichever columns there are; the unit stands in their names. NaN where two of them disagree."""
    units = (("latency_ms", 1e-3), ("latency_us", 1e-6), ("latency_s", 1.0))
    stated = [_number(frame, column) * scale for column, scale in units if column in frame.columns]
    if not stated and "median_ms" in frame.columns:
        stated = [_number(frame, "median_ms") * 1e-3]
    if not stated:
        raise FormatError("no latency column; one of latency_ms, latency_us, latency_s, median_ms is needed")
    found, *others = stated
    for other in others:
        agrees = np.isnan(other) | np.isclose(found, other, rtol=0.01, atol=0.0)
        found = np.where(np.isnan(found), other, np.where(agrees, found, np.nan))
    return found


def _table(
    family: str, frame: pd.DataFrame, rows: Any, dims: Mapping[str, Any], op: Any = "", software: Any = None
) -> Measurements:
    """Rows of a frame (`rows` are their positions) with dims as arrays over these rows or single numbers."""
    part = frame.iloc[rows]
    spelled = _text(part, "system")
    names = {s: device_named(s) or f"?{s}" for s in set(spelled.tolist())}
    if software is None:
        software = _software(part)
    count = len(part)
    return Measurements(
        family=family,
        op=np.full(count, op, dtype=object) if isinstance(op, str) else np.asarray(op, dtype=object),
        device=np.array([names[s] for s in spelled.tolist()], dtype=object),
        dtype=_text(part, "dtype" if "dtype" in part.columns else "attn_dtype", "float32"),
        software=np.asarray(software, dtype=object)
        if not isinstance(software, str)
        else np.full(count, software, dtype=object),
        source=_text(part, "source"),
        split=_text(part, "split"),
        dims={k: np.broadcast_to(np.asarray(v, dtype=np.float64), (count,)).copy() for k, v in dims.items()},
        latency_s=latencies_s(part),
        row=np.asarray(rows, dtype=np.float64),
    )


def _software(frame: pd.DataFrame) -> Any:
    """Framework, version and kernel as one text."""
    parts = [_text(frame, column) for column in ("fw", "fw_version", "kernel_source")]
    codes = row_codes(parts)
    _, first = np.unique(codes, return_index=True)
    words = [" ".join(filter(None, (part[i] for part in parts))) for i in first.tolist()]
    return np.array([*words, ""], dtype=object)[codes]


# --- matrix products: system dtype m n k -----------------------------------------------------------------------------
_PRODUCTS = {
    "bfloat16": "gemm16", "float16": "gemm16", "fp16": "gemm16", "half": "gemm16", "fp8": "gemm8",
    "fp8_block": "gemm8block", "nvfp4": "gemm4", "float32": "gemm32",
}  # fmt: skip


def _read_products(frame: pd.DataFrame) -> Iterable[Measurements]:
    dtype = _text(frame, "dtype")
    family = np.array([_PRODUCTS.get(d, "") for d in dtype.tolist()], dtype=object)
    for name in dict.fromkeys(f for f in family.tolist() if f):
        rows = np.flatnonzero(family == name)
        part = frame.iloc[rows]
        in_bytes = np.array([_BYTES[d] for d in dtype[rows].tolist()])
        dims = {
            "batch": 1.0,
            **{d: _number(part, d) for d in "mnk"},
            "in_bytes": in_bytes,
            "out_bytes": np.maximum(in_bytes, 2.0),
        }
        yield _table(name, frame, rows, dims)


# --- attention: batch_size seq_len num_heads (num_kv_heads) head_dim (window_size) -----------------------------------
def _read_attention(frame: pd.DataFrame) -> Iterable[Measurements]:
    """A row whose cache of keys and values has another dtype is none of a family: it casts, or its products run in the
    dtype of the cache (up to 1.8 times as fast, or slower by 1.2)."""
    dtype = _text(frame, "attn_dtype", "bfloat16")
    cache = _text(frame, "kv_cache_dtype", "")
    causal = "num_kv_heads" in frame.columns
    for family, names, size in (("attention16", ("bfloat16", "float16", "fp16"), 2.0), ("attention8", ("fp8",), 1.0)):
        rows = np.flatnonzero(np.isin(dtype, names) & np.isin(cache, (*names, "", "auto")))
        if not len(rows):
            continue
        part = frame.iloc[rows]
        heads = _number(part, "num_heads")
        dims = {
            "batch": _number(part, "batch_size"), "seq": _number(part, "seq_len"), "heads": heads,
            "kv_heads": _number(part, "num_kv_heads") if causal else heads, "head_dim": _number(part, "head_dim"),
            "window": _number(part, "window_size", 0.0), "causal": float(causal),
            "cached": float(causal), "in_bytes": size, "out_bytes": 2.0,
        }  # fmt: skip
        yield _table(family if causal or size < 2 else "attention16full", frame, rows, dims)


# --- mixture of experts: num_tokens hidden_size inter_size topk num_experts moe_tp_size moe_ep_size distribution ---
_EXPERTS = {
    "bfloat16": ("moe16", 2.0), "float16": ("moe16", 2.0), "fp8": ("moe8", 1.0), "fp8_block": ("moe8", 1.0),
    "nvfp4": ("moe4", 0.5625),
}  # fmt: skip


def _read_experts(frame: pd.DataFrame) -> Iterable[Measurements]:
    dtype, spread = _text(frame, "dtype"), _text(frame, "distribution")
    kernel = _text(frame, "kernel_source")
    family = np.array([_EXPERTS.get(d, ("", 0.0))[0] for d in dtype.tolist()], dtype=object)
    for name in dict.fromkeys(f for f in family.tolist() if f):
        rows = np.flatnonzero(family == name)
        part = frame.iloc[rows]
        shards = _number(part, "moe_ep_size", 1.0)
        skews = np.array([_skew(text) for text in spread[rows].tolist()])
        dims = {
            "pairs": _number(part, "num_tokens") * _number(part, "topk") / shards,
            "experts": np.maximum(1.0, _number(part, "num_experts") / shards), "hidden": _number(part, "hidden_size"),
            "inter": _number(part, "inter_size") / _number(part, "moe_tp_size", 1.0),
            "matrices": np.array([2.0 if "nongated" in k else 3.0 for k in kernel[rows].tolist()]), "skew": skews,
            "in_bytes": np.array([_EXPERTS[d][1] for d in dtype[rows].tolist()]), "out_bytes": 2.0,
        }  # fmt: skip
        yield _table(name, frame, rows, dims)


def _skew(distribution: str) -> float:
    """Exponent of `power_law_1.2`, 0 for an even spread, NaN where it is no number."""
    if not distribution.startswith("power_law"):
        return 0.0
    try:
        return float(distribution.rpartition("_")[2])
    except ValueError:
        return float("nan")


# --- NeuSight: op B M N K H ------------------------------------------------------------------------------------------
_ELEMENTWISE = {
    "add": ("add", 3), "mul": ("mul", 3), "div": ("div", 3), "pow": ("pow", 3), "addu": ("add_scalar", 2),
    "mulu": ("mul_scalar", 2), "divu": ("div_scalar", 2), "powu": ("pow_scalar", 2), "relu": ("relu", 2),
    "gelu": ("gelu", 2), "tanh": ("tanh", 2), "softmax": ("softmax", 2), "ln": ("layer_norm", 2),
}  # fmt: skip


def _read_neusight(frame: pd.DataFrame) -> Iterable[Measurements]:
    op = _text(frame, "op")
    software = "torch " + _text(frame, "torch") + " cuda " + _text(frame, "cuda")
    for name, family in (("linear", "gemm32"), ("bmm", "bgemm32")):
        rows = np.flatnonzero(op == name)
        if len(rows):
            part = frame.iloc[rows]
            batch, m = _number(part, "B"), _number(part, "M")
            sizes = (1.0, batch * m) if name == "linear" else (batch, m)
            dims = {
                "batch": sizes[0],
                "m": sizes[1],
                "n": _number(part, "N"),
                "k": _number(part, "K"),
                "in_bytes": 4.0,
                "out_bytes": 4.0,
            }
            yield _table(family, frame, rows, dims, name, software[rows])
    rows = np.flatnonzero(np.isin(op, list(_ELEMENTWISE)))
    if len(rows):
        part = frame.iloc[rows]
        batch, width = _number(part, "B"), _number(part, "H")
        passes = np.array([_ELEMENTWISE[o][1] for o in op[rows].tolist()], dtype=np.float64)
        reduces = np.isin(op[rows], ["softmax", "ln"]).astype(np.float64)
        dims = {"bytes": passes * 4.0 * batch * width, "rows": batch, "element_bytes": 4.0, "reduces": reduces}
        yield _table("memory32", frame, rows, dims, [_ELEMENTWISE[o][0] for o in op[rows].tolist()], software[rows])


# --- NeuSight convolutions -------------------------------------------------------------------------------------------
def _read_convolutions(frame: pd.DataFrame) -> Iterable[Measurements]:
    rows = np.arange(len(frame))
    kernel, stride, channels = (_number(frame, c) for c in ("kernel_size", "stride", "in_channels"))
    side = np.floor((_number(frame, "input_size") + 2 * _number(frame, "padding") - kernel) / stride) + 1
    dims = {
        "batch": 1.0, "m": _number(frame, "batch") * side**2, "n": _number(frame, "out_channels"),
        "k": channels * kernel**2, "in_bytes": 4.0, "out_bytes": 4.0, "kernel": kernel, "stride": stride,
        "channels": channels, "side": side,
    }  # fmt: skip
    yield _table("conv32", frame, rows, dims, "conv2d", "torch")


# --- Vidur: op num_tokens tp n_embd n_ffn … m n k median_ms ----------------------------------------------------------
def _read_vidur(frame: pd.DataFrame) -> Iterable[Measurements]:
    op = _text(frame, "op")
    product = ~np.isnan(_number(frame, "k"))
    products = np.flatnonzero(product)
    if len(products):
        part = frame.iloc[products]
        dims = {"batch": 1.0, **{d: _number(part, d) for d in "mnk"}, "in_bytes": 2.0, "out_bytes": 2.0}
        yield _table("gemm16", frame, products, dims, "", "vidur")
    tokens, tp = _number(frame, "num_tokens"), _number(frame, "tp")
    hidden, inner = _number(frame, "n_embd"), _number(frame, "n_ffn")
    heads = hidden * (_number(frame, "n_head") + _number(frame, "n_kv_head")) / _number(frame, "n_head") / tp
    gated = _text(frame, "gated") == "True"
    sizes = {  # elements moved per token
        "add": ("residual_add", 3 * hidden), "attn_rope": ("rope", 2 * heads), "emb": ("embedding", 2 * hidden),
        "input_layernorm": ("rms_norm", 2 * hidden), "post_attention_layernorm": ("rms_norm", 2 * hidden),
        "mlp_act": ("gated_activation", np.where(gated, 3, 2) * inner / tp),
    }  # fmt: skip
    for name, (as_op, elements) in sizes.items():
        rows = np.flatnonzero((op == name) & ~product)
        if len(rows):
            dims = {
                "bytes": 2.0 * (tokens * elements)[rows], "rows": tokens[rows], "element_bytes": 2.0,
                "reduces": float(as_op == "rms_norm"),
            }  # fmt: skip
            yield _table("memory16", frame, rows, dims, as_op, "vidur")


def _ops(*names: str) -> Callable[[pd.DataFrame], bool]:
    return lambda frame: bool(np.isin(_text(frame, "op"), names).any())


KINDS = (
    Kind(
        name="experts",
        columns=frozenset({"num_tokens", "hidden_size", "inter_size", "topk", "num_experts"}),
        read=_read_experts,
    ),
    Kind(name="products", columns=frozenset({"m", "n", "k", "dtype", "system", "latency_ms"}), read=_read_products),
    Kind(name="attention", columns=frozenset({"batch_size", "seq_len", "num_heads", "head_dim"}), read=_read_attention),
    Kind(
        name="convolutions",
        columns=frozenset({"in_channels", "out_channels", "kernel_size", "input_size", "batch"}),
        read=_read_convolutions,
    ),
    Kind(
        name="neusight",
        columns=frozenset({"op", "B", "H", "latency_ms"}),
        read=_read_neusight,
        accepts=_ops("linear", "bmm", *_ELEMENTWISE),
    ),
    Kind(name="vidur", columns=frozenset({"op", "num_tokens", "n_embd", "n_ffn", "tp"}), read=_read_vidur),
)
