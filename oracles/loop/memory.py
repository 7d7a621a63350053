"""Scalar reads of a tensor by index, through its strides, as Python numbers."""

from __future__ import annotations

from bisect import bisect_right
from operator import mul

from pagefuzz.strategies.number_formats import FORMATS, decode
from pagefuzz.strategies.tensors import Tensor


class Memory:
    """The filled pieces of one tensor's buffer as Python lists; what is not filled reads as 0."""

    def __init__(self, tensor: Tensor) -> None:
        self.strides, self.offset, self.inner = tensor.strides, tensor.offset, tensor.shape[-1] if tensor.shape else 1
        self.pieces = sorted(tensor.buffer.pieces, key=lambda piece: piece[0])
        self.starts = [start for start, _ in self.pieces]
        self.ends = [start + len(bits) for start, bits in self.pieces]
        self.lists: dict[int, list[float]] = {}
        self.dtype = tensor.buffer.dtype

    def _find(self, element: int) -> tuple[list[float], int]:
        index = bisect_right(self.starts, element) - 1
        if index < 0 or element >= self.ends[index]:
            return [], 0
        numbers = self.lists.get(index)
        if numbers is None:
            bits = self.pieces[index][1]
            numbers = self.lists[index] = (decode(bits, self.dtype) if self.dtype in FORMATS else bits).tolist()
        return numbers, element - self.starts[index]

    def at(self, *index: int) -> float:
        """One element."""
        numbers, place = self._find(self.offset + sum(map(mul, index, self.strides)))
        return numbers[place] if numbers else 0.0

    def row(self, *index: int) -> list[float]:
        """The last dim at the given leading indices."""
        numbers, place = self._find(self.offset + sum(map(mul, index, self.strides)))
        step = self.strides[-1]
        return numbers[place : place + (self.inner - 1) * step + 1 : step] if numbers else [0.0] * self.inner
