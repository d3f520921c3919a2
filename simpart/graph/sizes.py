"""Sizes that depend on the micro-batch, and tensors described by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from simpart.errors import FormatError, MismatchError

__all__ = ["DTYPE_BYTES", "Affine", "Size", "Table", "TensorSpec", "size_at", "size_from_json", "size_to_json"]

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Affine:
    """The size `base + slope · b` for micro-batch size b; slope is never 0 (that is an int).

    >>> str(Affine(0, 1)), str(Affine(1, 2)), Affine(1, 2).at(3)
    ('b', '2b+1', 7)
    """

    base: int
    slope: int

    def at(self, micro_batch: int) -> int:
        return self.base + self.slope * micro_batch

    def __str__(self) -> str:
        slope = {1: "", -1: "-"}.get(self.slope, str(self.slope))
        return f"{slope}b" + (f"{self.base:+d}" if self.base else "")


@dataclass(frozen=True, slots=True)
class Table:
    """A size known only at the micro-batches where it was captured (capacities such as `floor(1.25 b)`)."""

    values: tuple[tuple[int, int], ...]

    def at(self, micro_batch: int) -> int:
        for b, value in self.values:
            if b == micro_batch:
                return value
        known = ", ".join(str(b) for b, _ in self.values)
        raise MismatchError(
            f"a dim of this graph is not affine in the micro-batch and was captured at {known} only, "
            f"got micro-batch {micro_batch}; capture again with that micro-batch"
        )


Size = int | Affine | Table


def size_at(size: Size, micro_batch: int) -> int:
    return size if isinstance(size, int) else size.at(micro_batch)


def size_to_json(size: Size) -> int | str | dict[str, int]:
    if isinstance(size, Table):
        return {str(b): value for b, value in size.values}
    return size if isinstance(size, int) else str(size)


_AFFINE = re.compile(r"(-?\d*)b([+-]\d+)?")


def size_from_json(text: Any) -> Size:
    """The inverse of `size_to_json`; raises FormatError for anything else."""
    if isinstance(text, bool):
        raise FormatError(f"a size is an integer, '2b+1' or a table, got {text!r}")
    if isinstance(text, int):
        return text
    if isinstance(text, str) and (match := _AFFINE.fullmatch(text)):
        slope = {"": 1, "-": -1}.get(match[1]) or int(match[1])
        return Affine(int(match[2] or 0), slope) if slope else int(match[2] or 0)
    if isinstance(text, dict) and text and all(k.isdigit() and type(v) is int for k, v in text.items()):
        return Table(tuple((int(k), v) for k, v in text.items()))
    raise FormatError(f"a size is an integer, '2b+1' or a table, got {text!r}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dims, dtype and layout of one tensor.

    `order` lists dims from the outermost in memory to the innermost when the tensor is dense; else it is None and
    `strides` holds the stride of each dim in elements. With neither given the tensor is dense in natural order.
    """

    dims: tuple[Size, ...]
    dtype: str
    order: tuple[int, ...] | None = None
    strides: tuple[Size, ...] | None = None

    def __post_init__(self) -> None:
        if self.order is None and self.strides is None:
            object.__setattr__(self, "order", tuple(range(len(self.dims))))

    def shape(self, micro_batch: int) -> tuple[int, ...]:
        return tuple(size_at(d, micro_batch) for d in self.dims)

    def elements(self, micro_batch: int) -> int:
        return prod(self.shape(micro_batch))

    def bytes(self, micro_batch: int) -> int:
        return self.elements(micro_batch) * DTYPE_BYTES[self.dtype]

    @property
    def batched(self) -> bool:
        """True if some dim grows with the micro-batch."""
        return any(not isinstance(d, int) for d in self.dims)

    def to_json(self) -> list[Any]:
        """`[dims, dtype]` when dense in natural order, else `[dims, dtype, order or null, strides or null]`."""
        short: list[Any] = [[size_to_json(d) for d in self.dims], self.dtype]
        if self.strides is None and (self.order is None or self.order == tuple(range(len(self.dims)))):
            return short
        strides = None if self.strides is None else [size_to_json(s) for s in self.strides]
        return [*short, None if self.order is None else list(self.order), strides]

    @staticmethod
    def from_json(content: Any) -> TensorSpec:
        dims = tuple(size_from_json(d) for d in content[0])
        if content[1] not in DTYPE_BYTES:
            raise FormatError(f"unknown dtype {content[1]!r} in a tensor description")
        if len(content) == 2:
            return TensorSpec(dims, content[1], tuple(range(len(dims))))
        strides = None if content[3] is None else tuple(size_from_json(s) for s in content[3])
        return TensorSpec(dims, content[1], None if content[2] is None else tuple(content[2]), strides)
