"""What a case says of its tensors: sizes, strides and bits, without allocating anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np


@dataclass
class Buffer:
    """A run of memory: `size` elements of `dtype`, of which `pieces` are filled; the rest is never touched (zeros).

    A piece is (first element, bits). A buffer of many GiB costs only its pieces.
    """

    name: str
    dtype: str
    size: int
    pieces: list[tuple[int, np.ndarray]] = field(default_factory=list)
    is_cache: bool = False


@dataclass
class Tensor:
    """A view into a buffer: shape and strides in elements, `offset` of the first element from the buffer's start."""

    name: str
    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def last_element(self) -> int:
        """The buffer's element that lies furthest in, or -1 if the tensor is empty."""
        if 0 in self.shape:
            return -1
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def contiguous(name: str, dtype: str, shape: tuple[int, ...], bits: np.ndarray) -> Tensor:
    """A contiguous tensor with a buffer of its own, filled with `bits` (any shape of the right size)."""
    size = prod(shape)
    pieces = [(0, np.ascontiguousarray(bits).reshape(-1))] if size else []
    return Tensor(name, Buffer(name, dtype, size, pieces), shape, row_major(shape))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch counts them for empty ones too."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def padded_rows(
    name: str, dtype: str, rows: np.ndarray, inner: tuple[int, ...], fill: np.ndarray | None = None
) -> Tensor:
    """A tensor [len(rows), *inner] with `fill` behind each of its rows (default: nothing, so it is contiguous).

    rows: [R, prod(inner)] bits. fill: bits.
    """
    count, width, padding = len(rows), prod(inner), 0 if fill is None else len(fill)
    full = np.empty((count, width + padding), dtype=rows.dtype)
    full[:, :width] = rows
    if fill is not None:
        full[:, width:] = fill
    buffer = Buffer(name, dtype, full.size, [(0, full.reshape(-1))] if full.size else [])
    return Tensor(name, buffer, (count, *inner), (width + padding, *row_major(inner)))
