"""Which backward kernels make gradients of parameters only (W) and which carry gradients on to earlier ops (I).

Derived from `Graph.gradients`: a kernel is W where all it makes ends in gradients of parameters without leaving its op.
Adding up the gradients of a shared parameter counts as W too. A convolution's backward makes both in one kernel, for
about equal work: half of it is W.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from simpart.graph import Graph

__all__ = ["weight_share", "weight_share_of_classes"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

BOTH = "aten.convolution_backward"
_known: WeakKeyDictionary[Graph, Floats] = WeakKeyDictionary()


def weight_share(graph: Graph) -> Floats:
    """Of each kernel of `graph.flat`, the part of its work that a split backward does in W: 0, 1, or a half."""
    if graph in _known:
        return _known[graph]
    flat = graph.flat
    backward = ~flat.kernel_forward
    reader = np.repeat(np.arange(len(flat.kernel_op)), np.diff(flat.kernel_indptr))
    maker = flat.kernel_value_kernel[flat.kernel_inputs]
    inner = (maker >= 0) & backward[np.maximum(maker, 0)] & backward[reader]
    reader, maker = reader[inner], maker[inner]
    ends = np.zeros(len(backward), dtype=bool)
    final = flat.kernel_value_kernel[np.array(list(graph.gradients.values()), dtype=np.int64)]
    ends[final[final >= 0]] = True
    ends &= backward
    adds = np.array(["add" in k.target.rsplit(".", 2)[-2:][0] for k in graph.kernel_classes], dtype=bool)
    sums = adds[flat.kernel_class] & ends
    stays = (flat.kernel_op[reader] == flat.kernel_op[maker]) | sums[reader]
    weight = np.zeros(len(backward), dtype=bool)
    while True:
        useful = ends.copy()
        useful[maker[weight[reader]]] = True
        leaves = np.zeros(len(backward), dtype=bool)
        leaves[maker[~(weight[reader] & stays)]] = True
        grown = useful & ~leaves & backward
        if (grown == weight).all():
            break
        weight = grown
    share = weight.astype(np.float64)
    both = np.array([k.target.startswith(BOTH) for k in graph.kernel_classes], dtype=bool)[flat.kernel_class]
    trained = np.zeros(len(backward), dtype=bool)
    trained[maker[weight[reader]]] = True
    share[both & ~weight & (ends | trained)] = 0.5
    return _known.setdefault(graph, share)


def weight_share_of_classes(graph: Graph) -> Floats:
    """The same by kernel class: of the instance where it is least."""
    flat = graph.flat
    share = np.full(len(graph.kernel_classes), np.inf)
    np.minimum.at(share, flat.kernel_class, weight_share(graph))
    return np.where(np.isfinite(share), share, 0.0)
