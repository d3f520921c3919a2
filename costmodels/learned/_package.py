"""The tables in the Python package aiconfigurator-core (Apache-2.0), installed here or unpacked into a folder.

They lie at `systems/data/<system>/<family>/<framework>/<version>/<table>.parquet`; the folders say which device and
which software was measured; rows that state another device are left out. Nothing of the package is imported or run:
its place is looked up, its files are read. Tables of kernels that no model describes (MLA, sparse attention,
quantization, decoding, exchange among experts …) are counted and not read.

A `reuse.yaml` says that a version of a framework has no measurements of its own and serves those of another version.
They are read there, once; the declarations are counted. Collectives become rows in `learned_comm/_packaged.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from simpart.costmodels.learned._adapters import device_named, import_frame
from simpart.costmodels.learned._fittable import KERNELS_FROM
from simpart.costmodels.learned._measurements import Imported, Measurements
from simpart.costmodels.learned._sheet import Sheet, distance, sheet_of
from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.hardware import load_device

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLLECTIVES", "KERNELS", "NAME", "Package", "Table", "chosen", "find_package", "nearest_tables", "read_kernels",
    "read_table", "read_yaml",
]  # fmt: skip

NAME = "aiconfigurator-core"
KERNELS = ("gemm", "attention", "encoder_attention", "moe")
COLLECTIVES = "collectives"
_TABLES: Mapping[tuple[str, str], str] = {
    ("gemm", "gemm_perf"): "gemm",
    ("attention", "context_attention_perf"): "attention",
    ("encoder_attention", "encoder_attention_perf"): "encoder_attention",
    ("moe", "moe_perf"): "moe",
    ("comm", "nccl_perf"): COLLECTIVES,
    ("comm", "oneccl_perf"): COLLECTIVES,
    ("comm", "custom_allreduce_perf"): COLLECTIVES,
}
_TEXTS = ("device", "kernel_source", "gemm_dtype", "attn_dtype", "kv_cache_dtype", "moe_dtype", "distribution")
_DROPPED = ("framework", "version", "op_name", "device", "step", "beam_width", "power", "power_limit")
_RENAMED = {
    "latency": "latency_ms", "gemm_dtype": "dtype", "moe_dtype": "dtype", "isl": "seq_len",
    "num_key_value_heads": "num_kv_heads",
}  # fmt: skip
_NEAREST = 2
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One file of measurements; `content` is one of KERNELS or COLLECTIVES."""

    path: Path
    content: str
    system: str
    framework: str
    version: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Where the tables lie (`systems` holds a data sheet per system and the folder data), which version, the tables
    that are read, rows of those that are not by kind, and how many tables are declared to be another version's."""

    systems: Path
    version: str
    tables: tuple[Table, ...]
    not_read: Mapping[str, int]
    reused: int

    @property
    def source(self) -> str:
        """As rows of kernels name their source."""
        return f"{NAME}-{self.version}"


def find_package(text: str) -> Package | None:
    """The package that a user named: `aiconfigurator-core` where it is installed, or a folder that it was unpacked
    into. None for anything else; raises UserError when it is named and not installed, or still packed."""
    if text.replace("_", "-").casefold() == NAME and not Path(text).is_dir():
        spec = importlib.util.find_spec(NAME.replace("-", "_"))
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        found = next((p / "systems" for p in places if (p / "systems" / "data").is_dir()), None)
        if found is None:
            way_out = "install simpart[aic], or name the folder that its wheel was unpacked into"
            raise UserError(f"{NAME} is not installed here; {way_out}")
        return _listed(found)
    path = Path(text)
    if path.suffix == ".whl":
        raise UserError(f"{path} is packed; unpack it (python -m zipfile -e {path.name} FOLDER) and name the folder")
    for inside in ("aiconfigurator_core/systems", "systems", "."):
        if (path / inside / "data").is_dir() and any((path / inside / "data").glob("*/*/*/*/*_perf.parquet")):
            return _listed(path / inside)
    return None


def _listed(systems: Path) -> Package:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"reading the tables of {NAME} needs pandas and pyarrow; install simpart[aic]") from error
    tables, not_read, reused = [], Counter[str](), 0
    for path in sorted((systems / "data").glob("*/*/*/*/*.parquet")):
        system, family, framework, version = path.parts[-5:-1]
        try:
            rows = parquet.read_metadata(path).num_rows
        except Exception as error:  # pyarrow raises several kinds
            raise FormatError(f"cannot read {path}: {' '.join(str(error).split())[:200]}; install it anew") from error
        content = _TABLES.get((family, path.stem))
        if content is None:
            not_read[f"{family}: {path.stem.removesuffix('_perf')}"] += rows
        else:
            tables.append(Table(
                path=path, content=content, system=system, framework=framework, version=version, rows=rows,
            ))  # fmt: skip
    for path in sorted((systems / "data").glob("*/*/*/*/reuse.yaml")):
        declared = read_yaml(path).get("reuse")
        for entry in declared if isinstance(declared, list) else ():
            reused += isinstance(entry, dict) and (path.parts[-4], str(entry.get("table"))) in _TABLES
    return Package(
        systems=systems, version=_version(systems.resolve()), tables=tuple(tables),
        not_read=dict(not_read.most_common()), reused=reused,
    )  # fmt: skip


def _version(systems: Path) -> str:
    for path in sorted(systems.parent.parent.glob("aiconfigurator_core-*.dist-info")):
        return path.name.removesuffix(".dist-info").partition("-")[2]
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def chosen(package: Package, contents: Sequence[str], devices: Iterable[str] = ()) -> tuple[Table, ...]:
    """Tables with these contents, of these devices (names or spellings) or of all. Raises UserError when none is."""
    known = (*KERNELS, COLLECTIVES)
    for name in contents:
        if name not in known:
            raise UnknownNameError("table", name, known)
    tables = [table for table in package.tables if table.content in contents]
    measured = {table.system: device_named(table.system) for table in tables}
    wanted = set()
    for text in devices:
        device = device_named(text)
        if device is None or device not in measured.values():
            raise UnknownNameError("device of these tables", text, [n or s for s, n in measured.items()])
        wanted.add(device)
    tables = [table for table in tables if not wanted or measured[table.system] in wanted]
    if not tables:
        raise FormatError(f"{package.systems} has no table of {', '.join(contents)}")
    return tuple(tables)


def nearest_tables(package: Package, tables: Sequence[Table]) -> tuple[Table, ...]:
    """For each of these tables those with the same content of the two nearest other devices, by their data sheets,
    that models may learn from: what a prediction by ratio of data sheets starts from."""
    found: dict[Table, None] = {}
    for content, system in dict.fromkeys((table.content, table.system) for table in tables):
        mine = device_named(system)
        if mine is None:
            continue
        sheet = _sheet(mine)
        others: dict[float, list[Table]] = {}
        for table in package.tables:
            name = device_named(table.system)
            if table.content == content and name in KERNELS_FROM and name != mine:
                others.setdefault(distance(_sheet(str(name)), sheet), []).append(table)
        for near in sorted(others)[:_NEAREST]:
            found.update(dict.fromkeys(others[near]))
    return tuple(sorted(found, key=lambda table: table.path))


def _sheet(device: str) -> Sheet:
    return sheet_of(load_device(device), "bfloat16")[0]


def read_kernels(package: Package, tables: Sequence[Table], progress: Progress = lambda text: None) -> Imported:
    """Kernels of these tables by family, cleaned by the same rules as any file."""
    parts: list[Measurements] = []
    refused, rows = Counter[str](), 0
    for content in KERNELS:
        mine = [table for table in tables if table.content == content]
        if not mine:
            continue
        frame, left_out = _frame(mine, package.source, progress)
        progress(f"cleaning {len(frame)} rows of {content}")
        found = import_frame(frame, f"{NAME}, {content}")
        parts += found.tables
        refused.update(found.refused)
        refused.update(left_out)
        rows += found.rows + sum(left_out.values())
    return Imported(kind=NAME, tables=tuple(parts), rows=rows, refused=dict(refused))


def read_yaml(path: Path) -> Mapping[str, Any]:
    """A mapping from a YAML file, empty when it holds something else; raises FormatError when it cannot be read."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FormatError(f"cannot read {path}: {' '.join(str(error).split())[:200]}; install it anew") from error
    return content if isinstance(content, dict) else {}


def read_table(path: Path) -> pd.DataFrame:
    """A file as a table, texts as categories."""
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            raw = file.read()
        found: pd.DataFrame = raw.to_pandas(categories=[name for name in _TEXTS if name in raw.column_names])
        return found
    except Exception as error:  # pyarrow raises several kinds
        raise FormatError(f"cannot read {path}: {' '.join(str(error).split())[:200]}; install it anew") from error


def _frame(tables: Sequence[Table], source: str, progress: Progress) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows of several tables with the same content as one table with the names of columns that shared data has, texts
    as categories; and how many were left out by reason."""
    import numpy as np
    import pandas as pd

    parts, refused = [], Counter[str]()
    for table in tables:
        progress(f"reading {table.content} of {table.system}, {table.framework} {table.version}")
        part = read_table(table.path)
        left_out = np.full(len(part), "", dtype=object)
        if {"step", "beam_width"} <= set(part.columns):  # prompts that continue others, or are searched in beams
            left_out[((part["step"] != 0) | (part["beam_width"] != 1)).to_numpy()] = "continued_prompt"
        if "device" in part:
            named = device_named(table.system)
            strange = [n for n in part["device"].cat.categories if device_named(str(n)) not in (None, named)]
            left_out[part["device"].isin(strange).to_numpy()] = "other_device_than_its_folder"
        refused.update(name for name in left_out.tolist() if name)
        part = part.loc[left_out == ""].drop(columns=[name for name in _DROPPED if name in part])
        place = {"system": table.system, "fw": table.framework, "fw_version": table.version, "source": source}
        codes = np.zeros(len(part), dtype=np.int8)
        for name, text in place.items():
            part[name] = pd.Categorical.from_codes(codes, dtype=pd.CategoricalDtype([text]))
        parts.append(part.rename(columns=_RENAMED))
    return _joined(parts), dict(refused)


def _joined(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of several tables; what a table has no column for is missing there."""
    import numpy as np
    import pandas as pd
    from pandas.api.types import union_categoricals

    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        values = [part[name] if name in part else pd.Series(np.full(len(part), np.nan)) for part in parts]
        if all(isinstance(v.dtype, pd.CategoricalDtype) for v in values):
            columns[name] = union_categoricals(values)
        else:
            columns[name] = np.concatenate([v.to_numpy() for v in values])
    return pd.DataFrame(columns)
