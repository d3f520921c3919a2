"""Logs of nccl-tests (`all_reduce_perf` and its kin) as a table in the form of published data sets of collectives.

What a log says: ranks with host and device, and a line per size with the times out of place. What it does not say is
the network between hosts; a line `# interconnect: 4x100Gb/node` in the log states it, in the words of the data sets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpart.costmodels.learned._adapters import device_named
from simpart.costmodels.learned_comm._interconnects import nvlink_of
from simpart.errors import FormatError, UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SUFFIXES", "read_log"]

SUFFIXES = (".log", ".txt")
_LARGEST_BYTES = 50_000_000
_RANK = re.compile(r"#\s*Rank\s+(\d+).*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_TEST = re.compile(r"(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast)(?:_perf)?")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(?:(-?\d+)\s+)?(\d+(?:\.\d+)?)\s+\d")
_WORDS = re.compile(r"#\s*interconnect\s*[:=]\s*(.+?)\s*$", re.IGNORECASE)


def read_log(path: Path) -> pd.DataFrame:
    """One row per size. Raises FormatError when the text is no such log, or leaves out which test or devices it ran."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError("reading data sets needs pandas and pyarrow; install simpart[data]") from error
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise FormatError(f"{path} is too large for a log of nccl-tests ({path.stat().st_size} bytes)")
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
    hosts: dict[int, str] = {}
    devices, words, test, rows = set(), "", "", []
    for line in lines:
        if line.lstrip().startswith("#") or not _ROW.match(line):
            if rank := _RANK.search(line):
                hosts[int(rank[1])] = rank[2]
                devices.add(rank[3])
            elif stated := _WORDS.search(line):
                words = stated[1]
            elif not test and (name := _TEST.search(line)):
                test = name[1]
        elif row := _ROW.match(line):
            rows.append((int(row[1]), row[3], float(row[6])))
    name = _TEST.search(path.stem)
    test = test or (name[1] if name else "")
    if not rows or not hosts:
        raise FormatError(f"{path} is no log of nccl-tests: it has {len(rows)} rows of sizes and {len(hosts)} ranks")
    if not test:
        raise FormatError(f"{path} does not say which test it is of; name the file after it, as in all_reduce_perf.log")
    if len(devices) > 1:
        raise FormatError(f"{path} ran on {', '.join(sorted(devices))}; links of one kind of device are needed")
    (device,) = devices
    known = device_named(device)
    inside = "NVLink" if known and "SXM" in known.upper() and nvlink_of(known) else "PCIe"
    link = ", ".join(filter(None, (inside if "nvlink" not in words.casefold() else "", words)))
    content: dict[str, Any] = {
        "op": test, "size_bytes": [size for size, _, _ in rows], "dtype": [dtype for _, dtype, _ in rows],
        "latency_us": [time for _, _, time in rows], "num_gpus": len(hosts), "nodes": len(set(hosts.values())),
        "gpu": device, "interconnect": link, "lib": "NCCL", "source": "nccl-tests",
    }  # fmt: skip
    return pd.DataFrame(content)
