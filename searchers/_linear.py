"""The linear block model in which published planners are compared: costs grow with the samples a device holds.

A stage on r replicas holds b = ceil(ceil(BS / (R MB)) / r) samples per device; F = b sum f + c, B = b sum g + c,
bytes = sum w + b sum a, C = (what enters + what leaves) b / bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simpart.searchers._stages import StageCosts

__all__ = ["linear_costs", "replica_choices"]


def replica_choices(devices: int, samples: int, *, power_of_two: bool) -> tuple[int, ...]:
    """Replica counts a stage may have: at most `devices`, at most one per sample; powers of two if asked."""
    most = max(0, min(devices, samples))
    return tuple(1 << e for e in range(most.bit_length())) if power_of_two else tuple(range(1, most + 1))


def linear_costs(
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    weight_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    output_bytes: Sequence[float],
    constant_s: float,
    bandwidth: float | None,
    limit_bytes: float | None,
    devices: int,
    pipelines: int,
    micro_batches: int,
    global_batch: int,
    power_of_two: bool,
) -> StageCosts:
    """Dense costs under the linear model; all but weights and the constant are per sample, `bandwidth` None is free."""
    n = len(forward)
    samples = -(-global_batch // (pipelines * micro_batches))
    replicas = replica_choices(devices, samples, power_of_two=power_of_two)
    per_device = np.array([-(-samples // r) for r in replicas], dtype=np.float64)

    def sums(values: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        # Summed per segment, not as a difference of prefixes, so that values equal a plain sum to the last bit.
        table = np.zeros((n, n + 1))
        for i in range(n):
            table[i, i + 1 :] = np.cumsum(np.asarray(values[i:], dtype=np.float64))
        return table[:, :, None]

    shape = (n, n + 1, len(replicas))
    transfer = np.zeros(shape)
    if bandwidth is not None:
        outputs = np.asarray(output_bytes, dtype=np.float64)
        enters = np.concatenate(([0.0], outputs[:-1]))[:, None, None]
        leaves = np.concatenate(([0.0], outputs[:-1], [0.0]))[None, :, None]
        transfer = enters * per_device / bandwidth + leaves * per_device / bandwidth
    return StageCosts(
        replicas=replicas,
        forward_s=per_device * sums(forward) + constant_s,
        backward_s=per_device * sums(backward) + constant_s,
        transfer_s=transfer,
        allreduce_s=np.zeros(shape),
        static_bytes=sums(weight_bytes) + per_device * sums(activation_bytes),
        stash_bytes=np.zeros(shape),
        limit_bytes=float("inf") if limit_bytes is None else float(limit_bytes),
        micro_batches=micro_batches,
        allowed=np.ones(shape, dtype=np.bool_),
    )
