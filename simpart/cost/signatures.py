"""Signatures of a graph's kernels at a micro-batch: sizes filled in, equal work told by equal values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from simpart.cost import Signature, TensorForm
from simpart.errors import MismatchError
from simpart.files import dump_json
from simpart.graph import Graph
from simpart.graph.sizes import DTYPE_BYTES, TensorSpec, size_at, size_from_json
from simpart.kernels import Mode, kernels

__all__ = ["MEMBER", "fill_sizes", "form_of", "signatures_of", "total_bytes"]

MEMBER = Signature("simpart.member", (), (), mode="compiled", view=True)
"""Stands for a kernel whose work is priced with the first kernel of its fused group; costs nothing."""

_SIZE = re.compile(r"-?\d*b([+-]\d+)?")
_HAS_SIZES = re.compile(r'"-?\d*b([+-]\d+)?"|{"\d')
Form = Callable[[TensorSpec], TensorForm]


def signatures_of(graph: Graph, micro_batch: int, mode: Mode = "eager") -> list[Signature]:
    """The signature of each kernel class of `graph.at(micro_batch)`.

    In compiled mode the first kernel of a fused group carries the group's signature, the others are `MEMBER`, so that
    a sum over kernels counts each group once. Raises MismatchError when a size is not known at this micro-batch.
    """
    graph = graph.at(micro_batch)

    @cache
    def form(spec: TensorSpec) -> TensorForm:
        return form_of(spec, micro_batch)

    single = [
        Signature(
            target=kernel.target,
            inputs=tuple(map(form, inputs)),
            outputs=tuple(map(form, kernel.outputs)),
            arguments=fill_sizes(kernel.arguments, micro_batch),
            mode=mode,
            view=kernel.view,
        )
        for kernel, inputs in zip(graph.kernel_classes, graph.kernel_class_inputs, strict=True)
    ]
    return single if mode == "eager" else _with_groups(graph, single, form)


def _with_groups(graph: Graph, single: list[Signature], form: Form) -> list[Signature]:
    groups = kernels(graph, "compiled")
    found = list(single)
    for members, inputs, outputs in zip(groups.members, groups.inputs, groups.outputs, strict=True):
        if len(members) == 1:
            continue
        parts = tuple(single[k] for k in members)
        found[members[0]] = Signature(
            target="fused",
            inputs=tuple(map(form, inputs)),
            outputs=tuple(map(form, outputs)),
            mode="compiled",
            view=all(part.view for part in parts),
            members=parts,
        )
        for k in members[1:]:
            found[k] = MEMBER
    return found


def form_of(spec: TensorSpec, micro_batch: int) -> TensorForm:
    """Shape and layout of a tensor at this micro-batch."""
    strides = None if spec.strides is None else tuple(size_at(s, micro_batch) for s in spec.strides)
    return TensorForm(spec.shape(micro_batch), spec.dtype, spec.order, strides)


@lru_cache(maxsize=65536)
def fill_sizes(arguments: str, micro_batch: int) -> str:
    """A call with numbers in place of its sizes.

    >>> fill_sizes('{"positional":[{"tensor":0},["2b+1",4]],"named":{}}', 3)
    '{"positional":[{"tensor":0},[7,4]],"named":{}}'
    """
    if not _HAS_SIZES.search(arguments):
        return arguments
    return dump_json(_filled(json.loads(arguments), micro_batch))


def _filled(item: Any, micro_batch: int) -> Any:
    if isinstance(item, list):
        return [_filled(part, micro_batch) for part in item]
    if isinstance(item, dict):
        if item and all(key.isdigit() for key in item):
            return _at(item, micro_batch)
        return {key: _filled(value, micro_batch) for key, value in item.items()}
    if isinstance(item, str) and _SIZE.fullmatch(item):
        return size_at(size_from_json(item), micro_batch)
    return item


def _at(table: dict[str, Any], micro_batch: int) -> Any:
    if str(micro_batch) not in table:
        raise MismatchError(
            f"an argument of a kernel was captured at micro-batches {', '.join(table)} only, got {micro_batch}; "
            f"capture again with that micro-batch"
        )
    return table[str(micro_batch)]


def total_bytes(forms: Sequence[TensorForm]) -> int:
    """Bytes of memory behind some tensors; a dim of stride 0 (an expanded one) counts once."""
    total = 0
    for form in forms:
        count = DTYPE_BYTES[form.dtype]
        for i, dim in enumerate(form.shape):
            count *= 1 if form.strides is not None and form.strides[i] == 0 and dim else dim
        total += count
    return total
