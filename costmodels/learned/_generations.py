"""Which devices are of one generation: what a leave-one-generation-out split leaves out together."""

from __future__ import annotations

__all__ = ["generation_of"]

_PREFIXES = (
    ("P", "pascal"), ("V100", "volta"), ("T4", "turing"), ("A100", "ampere"), ("A30", "ampere"), ("A40", "ampere"),
    ("L4", "ada"), ("H100", "hopper"), ("H200", "hopper"), ("B200", "blackwell"), ("B300", "blackwell"),
    ("GB", "blackwell"), ("RTX-PRO-6000", "blackwell workstation"), ("MI", "cdna"), ("Arc", "battlemage"),
    ("K80", "kepler"),
)  # fmt: skip


def generation_of(device: str) -> str:
    """Generation of a device by its name; an unknown one is a generation of its own.

    >>> generation_of("H200-SXM-141GB"), generation_of("L40S")
    ('hopper', 'ada')
    """
    return next((name for prefix, name in _PREFIXES if device.startswith(prefix)), device)
