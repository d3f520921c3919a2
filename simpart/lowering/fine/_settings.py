"""What may be chosen about a fine-grain lowering; the defaults say what is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from simpart.errors import UserError
from simpart.lowering.group_costs import BUCKET_BYTES

__all__ = ["FineSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FineSettings:
    """`prefetch`: how many layers ahead of its use a gather of sharded parameters may begin (0: when the compute stream
    gets there, so that it waits in full). Without `overlap` every collective runs on the compute stream; without
    `slowdown` kernels beside communication run as fast as alone whatever `Costs.overlap_slowdown` says: two ablations.
    Gradients are reduced in buckets of `bucket_bytes`."""

    prefetch: int = 1
    overlap: bool = True
    slowdown: bool = True
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise UserError(f"prefetch must be at least 0 layers, got {self.prefetch}; try 1")
        if self.bucket_bytes < 1:
            raise UserError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}; try {BUCKET_BYTES}")
