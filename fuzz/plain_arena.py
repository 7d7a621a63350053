"""An arena for a tool that watches memory itself: every buffer is an allocation of its own, of exactly its size.

Inside one large allocation every access is legal to such a tool; here one element past a tensor is past what was
allocated. Nothing is sparse, so no case whose offsets pass 2^31 fits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pagefuzz.fuzz.arena import TORCH_DTYPES, Arena, Runs
from pagefuzz.strategies.number_formats import ITEMSIZE
from pagefuzz.strategies.tensors import Buffer, Tensor

SIZE = 1 << 28  # bytes that the arena pretends to be one run of; a quarter of it is the most that a cache takes


class PlainArena(Arena):
    """filled: what a case leaves unwritten is zeros; else it is left as it was allocated."""

    size = SIZE

    def __init__(self, device: torch.device, filled: bool = True) -> None:
        super().__init__()
        self.device, self.filled = device, filled
        self.memory: dict[int, torch.Tensor] = {}  # by first byte, uint8: a buffer's allocation
        self.before: dict[int, np.ndarray] = {}
        # (name, address, bytes, bytes of an element) of every buffer of the case that there is, or was last.
        self.addresses: list[tuple[str, int, int, int]] = []

    def _fill(self, start: int, buffer: Buffer) -> None:
        itemsize = ITEMSIZE[buffer.dtype]
        if not buffer.size:
            return
        made = torch.zeros if self.filled else torch.empty
        memory = self.memory[start] = made(buffer.size * itemsize, dtype=torch.uint8, device=self.device)
        for first, bits in buffer.pieces:
            data = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8).copy())
            memory[first * itemsize : first * itemsize + len(data)].copy_(data)

    def _view(self, start: int, tensor: Tensor) -> torch.Tensor:
        dtype = TORCH_DTYPES[tensor.buffer.dtype]
        if start not in self.memory:
            return torch.empty(0, dtype=dtype, device=self.device).as_strided(tensor.shape, tensor.strides)
        assert tensor.last_element() < tensor.buffer.size
        return self.memory[start].view(dtype).as_strided(tensor.shape, tensor.strides, tensor.offset)

    def _remember(self) -> None:
        self.before = {start: _bytes(memory) for start, memory in self.memory.items()}
        self.addresses = [
            (buffer.name, self.memory[start].data_ptr(), self.memory[start].numel(), ITEMSIZE[buffer.dtype])
            for start, buffer in self.places
            if start in self.memory
        ]

    def _read(self, first: int, count: int) -> np.ndarray:
        start = max(start for start in self.memory if start <= first)
        return _bytes(self.memory[start][first - start : first - start + count])

    def _differences(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for start, memory in self.memory.items():
            now = _bytes(memory)
            if not np.array_equal(self.before[start], now):
                yield start, self.before[start], now

    def touched(self) -> dict[str, Runs]:
        return {}

    def forget(self) -> None:
        self.places, self.memory, self.before = [], {}, {}


def _bytes(memory: torch.Tensor) -> np.ndarray:
    """A copy of what lies there, fetched without a kernel: one would be watched like the kernel under test."""
    bits: np.ndarray = memory.cpu().numpy().copy()
    return bits
