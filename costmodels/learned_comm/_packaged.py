"""The collectives in aiconfigurator-core, with the columns that tables of collectives have.

Sizes there count elements, of the whole message as nccl-tests count bytes; links are told from the package's own data
sheets. A table that repeats another version's without saying so is marked as a copy, for the rules to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simpart.costmodels.learned._package import Package, Table, read_table, read_yaml
from simpart.errors import FormatError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["read_collectives"]

SOURCE = "aiconfigurator"
_ELEMENT_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4, "int8": 1, "fp8": 1}
_LIBRARIES = {"nccl": "NCCL", "oneccl": "oneCCL"}
_PCIE_LANES = {16e9: 3, 32e9: 4, 64e9: 5, 128e9: 6}  # bytes/s of sixteen lanes in one direction, by generation
_NEEDED = ("op_name", "message_size", "num_gpus", "latency", "kernel_source")
_DTYPES = ("nccl_dtype", "allreduce_dtype")
Progress = Callable[[str], None]


def read_collectives(package: Package, tables: Sequence[Table], progress: Progress = lambda text: None) -> pd.DataFrame:
    """Collectives of these tables with the columns that tables of collectives have."""
    import pandas as pd

    frames = []
    for table in tables:
        progress(f"reading {table.system} {table.framework} {table.version}")
        raw = read_table(table.path)
        missing = [name for name in _NEEDED if name not in raw]
        named = next((name for name in _DTYPES if name in raw), "")
        if missing or not named:
            raise FormatError(f"{table.path}: columns are missing: {', '.join(missing or _DTYPES)}; install it anew")
        if not len(raw):
            continue
        dtype = raw[named].astype(str)
        version, library = table.version, _LIBRARIES.get(table.framework, table.framework)
        if table.path.stem == "nccl_perf" and table.framework != "nccl":  # kept beside a framework's own
            library, version = "NCCL", str(raw["version"].iloc[0])
        frames.append(pd.DataFrame({
            "op": raw["op_name"].astype(str), "size_bytes": raw["message_size"] * dtype.map(_ELEMENT_BYTES),
            "num_gpus": raw["num_gpus"], "latency_us": raw["latency"] * 1e3, "dtype": dtype,
            "kernel": raw["kernel_source"].astype(str), "gpu": table.system, "lib": f"{library} {version}",
            "interconnect": _interconnect(package, table.system), "nodes": 1, "source": SOURCE,
            "own": str(raw["version"].iloc[0] if "version" in raw else table.version) == table.version,
        }))  # fmt: skip
    frame = pd.concat(frames, ignore_index=True)
    frame["quality"] = np.where(_copies(frame), "reused copy of another version", "")
    return frame.drop(columns="own")


def _copies(frame: pd.DataFrame) -> Any:
    """Rows of a library's kernel that all equal those of another on the same system: of such the one counts as
    measured whose columns state the version of its own folder, else the first."""
    columns = ["op", "dtype", "num_gpus", "size_bytes", "latency_us"]
    copied, seen = np.zeros(len(frame), dtype=bool), set()
    groups = [(key, rows) for key, rows in frame.groupby(["gpu", "lib", "kernel"], sort=True)]
    for (system, _, kernel), rows in sorted(groups, key=lambda group: not group[1]["own"].iloc[0]):
        content = (system, kernel, rows[columns].sort_values(columns).to_csv(index=False))
        copied[rows.index.to_numpy()] = content in seen
        seen.add(content)
    return copied


def _interconnect(package: Package, system: str) -> str:
    """Words for the links inside a host, from the package's own data sheet of the system; empty when it has none."""
    path = package.systems / f"{system}.yaml"
    node = read_yaml(path).get("node") or {} if path.is_file() else {}
    try:
        direct, bus = float(node["intra_node_bw"]), float(node["pcie_bw"])
    except (KeyError, TypeError, ValueError):
        return ""
    return "NVLink + NVSwitch" if direct > 1.5 * bus else f"PCIe{_PCIE_LANES.get(bus, '')} (no NVLink)"
