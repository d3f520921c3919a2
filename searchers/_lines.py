"""Where equal pipelines lie on a cluster, and how many samples of a micro-batch each device of a stage takes.

On devices of several kinds a pipeline takes the next devices as they come, or an equal part of each kind, one kind
after the other: then the stages of all pipelines have the same kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from simpart.hardware import Cluster
from simpart.searchers._pipelines import PipelineShape

__all__ = ["kind_orders", "lines", "shares"]

MOST_PERMUTED = 3
"""Kinds whose every order is tried; of more only the cluster's and its reverse."""


def kind_orders(cluster: Cluster, pipelines: int, fewer_devices: bool) -> dict[tuple[int, ...], int]:
    """Orders in which pipelines may go through the kinds, with the devices that each takes; none on equal devices.

    >>> from simpart.hardware import load_cluster
    >>> kind_orders(load_cluster("a100-v100"), 2, False)
    {(0, 1): 8, (1, 0): 8}
    """
    counts = _counts(cluster)
    if len(counts) < 2 or (any(count % pipelines for count in counts) and not fewer_devices):
        return {}
    numbers = [k for k, count in enumerate(counts) if count >= pipelines]
    orders = [tuple(numbers), tuple(reversed(numbers))]
    if len(numbers) <= MOST_PERMUTED:
        orders = list(itertools.permutations(numbers))
    if pipelines == 1 and len(cluster.devices) == len(counts):
        orders.remove(tuple(range(len(counts))))  # as they come
    return {order: sum(counts[k] // pipelines for k in order) for order in orders}


def lines(cluster: Cluster, shape: PipelineShape) -> tuple[tuple[int, ...], ...]:
    """The devices of each pipeline, in the order of its stages."""
    if not shape.kinds:
        size = shape.devices
        return tuple(tuple(range(p * size, (p + 1) * size)) for p in range(shape.pipelines))
    found: list[list[int]] = [[] for _ in range(shape.pipelines)]
    for kind in shape.kinds:
        own = [d for d in range(cluster.size) if cluster.device(d) == cluster.kinds[kind]]
        part = len(own) // shape.pipelines
        for p, line in enumerate(found):
            line.extend(own[p * part : (p + 1) * part])
    return tuple(map(tuple, found))


def shares(
    kinds: Sequence[int], samples: int, least: int, seconds: Callable[[int, int], float], uneven: bool
) -> tuple[int, ...] | None:
    """Samples of each device; None where they cannot be shared. `kinds[d]` is the kind of device d.

    Equal shares, or with `uneven` those whose slowest device is fastest among equal ones and ones that follow speeds;
    at least `least` each. `seconds(kind, samples)` is what the whole model takes.

    >>> shares([0, 0, 1], 5, 1, lambda kind, samples: samples * (1 + kind), True)
    (2, 2, 1)
    """
    devices = len(kinds)
    equal, rest = divmod(samples, devices)
    if equal < least or (rest and not uneven):
        return None
    even = tuple(equal + (d < rest) for d in range(devices))
    if not uneven or len(set(kinds)) == 1:
        return even
    each_s = {kind: seconds(kind, equal) / equal for kind in sorted(set(kinds))}
    total = sum(1 / each_s[kind] for kind in kinds)
    taken = [max(least, int(samples / (each_s[kind] * total))) for kind in kinds]
    while sum(taken) > samples:  # the least ones got more than their part
        taken[max(range(devices), key=lambda d: (taken[d] > least, taken[d] * each_s[kinds[d]]))] -= 1
    while sum(taken) < samples:
        taken[min(range(devices), key=lambda d: ((taken[d] + 1) * each_s[kinds[d]], d))] += 1
    slowest = {
        option: max(seconds(kind, size) for kind, size in set(zip(kinds, option, strict=True)))
        for option in (even, tuple(taken))
    }
    return min(slowest, key=lambda option: slowest[option])


def _counts(cluster: Cluster) -> list[int]:
    """Devices of each kind."""
    return [sum(count for device, count in cluster.devices if device == kind) for kind in cluster.kinds]
