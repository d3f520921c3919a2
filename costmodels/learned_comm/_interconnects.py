"""What a data set's words for links mean: rates in one direction per device, from data sheets.

Inside a host: a device's NVLink rate where the words say NVLink, else PCI Express of the generation they state. Between
hosts only what the words state (`4x100Gb/node`): without it nobody can tell, and rows are refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FABRICS", "Fabric", "Interconnect", "interconnect_of", "nvlink_of", "through_host"]

Fabric = Literal["nvlink", "mesh", "pcie", "staged"]
FABRICS: tuple[Fabric, ...] = ("nvlink", "mesh", "pcie", "staged")
"""NVLink through switches; NVLink from device to device; PCI Express peer to peer; PCI Express through host memory."""

# NVLink per device in one direction, from NVIDIA's data sheets and architecture papers, by device family.
_NVLINK: Mapping[str, float] = {
    "P100": 80e9, "V100": 150e9, "A100": 300e9, "A800": 200e9, "A30": 100e9, "A40": 56.25e9, "H100": 450e9,
    "H800": 200e9, "H200": 450e9, "GH200": 450e9, "B200": 900e9, "B300": 900e9, "GB200": 900e9, "GB300": 900e9,
}  # fmt: skip
_NVLINK_GENERATION: Mapping[str, float] = {"1": 80e9, "2": 150e9, "3": 300e9, "4": 450e9, "5": 900e9}
_PAIR: Mapping[str, float] = {"V100": 25e9, "P100": 20e9}  # one link, on meshes
# PCI Express x16 by generation, less 128b/130b coding (PCI-SIG base specifications).
_PCIE: Mapping[str, float] = {"3": 15.75e9, "4": 31.5e9, "5": 63e9, "6": 121e9}
_PCIE_OF: Mapping[str, float] = {"Arc-Pro-B60": 31.5e9}  # x8 of generation 5 (Intel's product specification)
_DEVICE_PCIE: Mapping[str, str] = {
    "A100": "4",
    "A30": "4",
    "A40": "4",
    "L40S": "4",
    "L4": "4",
    "H100": "5",
    "V100": "3",
}
_NAMED_Gb: Mapping[str, float] = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
_NETWORK = re.compile(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*(Gb|GB|G)\w*(?:/s)?(?:\s*/\s*(node|gpu))?", re.IGNORECASE)
_ETHERNET = re.compile(r"EFA|TCP|Ethernet|ENA\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """Links of one system. `pair_bytes_per_s` is what a mesh gives two devices; `bridge_bytes_per_s` joins pairs of
    devices with direct links to the others of the host; `network_bytes_per_s` is per host, None when not stated.
    `network_latency_s` is what cluster files assume: 14 us on InfiniBand, 30 us on Ethernet with its own transport."""

    fabric: Fabric
    bytes_per_s: float
    pair_bytes_per_s: float | None = None
    pairs: bool = False
    bridge_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    network_latency_s: float = 14e-6


def interconnect_of(words: str, device: str) -> Interconnect | None:
    """The links that these words name on a device; None when they name none known.

    >>> interconnect_of("NVLink4 + EFA 32x100Gb/node", "H100-SXM-80GB").network_bytes_per_s
    400000000000.0
    >>> interconnect_of("PCIe4 (no NVLink)", "L40S").fabric
    'staged'
    """
    text = re.sub(r"\(no [^)]*\)", "", words)
    family = device.partition("-")[0]
    network: dict[str, Any] = {
        "network_bytes_per_s": _network(text),
        "network_latency_s": 30e-6 if _ETHERNET.search(text) else 14e-6,
    }
    found = re.search(r"NVLink\s*(\d)?", text, re.IGNORECASE)
    pcie = re.search(r"PCIe?\s*(?:gen\s*)?(\d)?", text, re.IGNORECASE)
    generation = (pcie.group(1) if pcie else None) or _DEVICE_PCIE.get(family)
    bridge = _PCIE_OF.get(device) or _PCIE.get(generation or "")
    if found:
        pairs = "pair" in text.lower()
        if pairs and family == "A40":  # profiled there: pairs of neighbours by number have no bridge between them
            return Interconnect(fabric="pcie", bytes_per_s=bridge or _PCIE["4"], **network)
        rate = _NVLINK.get(family) or _NVLINK_GENERATION.get(found.group(1) or "")
        if rate is None:
            return None
        mesh = family in _PAIR and "switch" not in text.lower()
        return Interconnect(
            fabric="mesh" if mesh else "nvlink", bytes_per_s=rate, pair_bytes_per_s=_PAIR[family] if mesh else None,
            pairs=pairs, bridge_bytes_per_s=bridge if pairs else None, **network,
        )  # fmt: skip
    if pcie and bridge:
        staged = through_host(device)
        return Interconnect(fabric="staged" if staged else "pcie", bytes_per_s=bridge, **network)
    return None


def nvlink_of(device: str) -> float | None:
    """NVLink of a device in one direction, bytes/s; None without."""
    return _NVLINK.get(device.partition("-")[0])


def through_host(device: str) -> bool:
    """Boards for graphics have no access to one another's memory; the accelerators among PCIe boards do."""
    return device.startswith(("L4", "RTX", "T4"))


def _network(text: str) -> float | None:
    """Bytes/s of a host's network cards together."""
    found = _NETWORK.search(text)
    if found:
        unit = 1e9 if found.group(3) == "GB" else 1e9 / 8
        return (
            float(found.group(1)) * float(found.group(2)) * unit * (8 if (found.group(4) or "").lower() == "gpu" else 1)
        )
    for name, gigabits in _NAMED_Gb.items():
        if re.search(rf"\b{name}\b", text):
            return gigabits * 1e9 / 8 * 8  # a card for each of eight devices, as in the vendors' own systems
    return None
