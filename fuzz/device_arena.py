"""The arena on a device: one allocation, poison wherever no case has put anything."""

from __future__ import annotations

import os

import numpy as np
import torch

from pagefuzz.fuzz.arena import ALIGNMENT, POISON, TORCH_DTYPES, Arena, Runs
from pagefuzz.strategies.number_formats import ITEMSIZE
from pagefuzz.strategies.tensors import Buffer, Tensor

MOST_BYTES = 1 << 36
MARGIN = 1 << 16  # bytes around a small buffer, and around each piece of a large one, that are compared exactly
SMALL = 1 << 24  # bytes up to which all of a buffer is compared exactly
CHUNK = 1 << 26  # bytes in which a stray write far from everything is looked for


class DeviceArena(Arena):
    """Raises RuntimeError if the device has less than 1 GiB to give to this process.

    What a kernel only reads there leaves no trace; accesses of compiled kernels cannot be traced either.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        size = MOST_BYTES
        while size > _free(device) * 3 // 4 // workers:
            size //= 2
        if size < 1 << 30:
            raise RuntimeError(
                f"{device} has less than 1 GiB free for each of {workers} workers: free some, or use fewer (-n)"
            )
        self.size = size
        self.memory = torch.full((size,), POISON, dtype=torch.uint8, device=device)
        self.before: dict[tuple[int, int], torch.Tensor] = {}
        self.stray: Runs = []

    def _fill(self, start: int, buffer: Buffer) -> None:
        for first, data in self._pieces(start, buffer):
            if len(data):
                self.memory[first : first + len(data)] = torch.from_numpy(data.copy()).to(self.device)

    def _view(self, start: int, tensor: Tensor) -> torch.Tensor:
        buffer, dtype = tensor.buffer, TORCH_DTYPES[tensor.buffer.dtype]
        if buffer.size == 0:
            return torch.empty(0, dtype=dtype, device=self.device).as_strided(tensor.shape, tensor.strides)
        assert tensor.last_element() < buffer.size
        flat = self.memory[start : start + buffer.size * ITEMSIZE[buffer.dtype]].view(dtype)
        return flat[tensor.offset :].as_strided(tensor.shape, tensor.strides, flat.storage_offset() + tensor.offset)

    def _windows(self) -> Runs:
        """What is compared exactly: all of a small buffer, the pieces of a large one, and a margin around them."""
        wanted = []
        for start, buffer in self.places:
            nbytes = buffer.size * ITEMSIZE[buffer.dtype]
            spans = [(first, first + len(data)) for first, data in self._pieces(start, buffer)]
            wanted += [(start, start + nbytes)] if nbytes <= SMALL else spans
        merged: Runs = []
        for first, last in sorted((max(0, first - MARGIN), min(self.size, last + MARGIN)) for first, last in wanted):
            low, high = first // ALIGNMENT * ALIGNMENT, -(-last // ALIGNMENT) * ALIGNMENT
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged

    def _remember(self) -> None:
        self.before = {(first, last): self.memory[first:last].clone() for first, last in self._windows()}

    def _read(self, first: int, count: int) -> np.ndarray:
        return self.memory[first : first + count].cpu().numpy()

    def _differences(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        found = []
        for (first, last), before in self.before.items():
            now = self.memory[first:last]
            if not torch.equal(now, before):
                found.append((first, before.cpu().numpy(), now.cpu().numpy()))
        if any(buffer.size * ITEMSIZE[buffer.dtype] > SMALL for _, buffer in self.places):
            found += self._far_differences()
        return found

    def _far_differences(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """The first chunk outside all windows that is no longer poison: where a 32-bit product wraps to, say."""
        at = 0
        for first, last in [*sorted(self.before), (self.size, self.size)]:
            if first > at and not self._is_poison(at, first):
                for start in range(at, first, CHUNK):
                    end = min(start + CHUNK, first)
                    if not self._is_poison(start, end):
                        self.stray.append((start, end))
                        now = self._read(start, end - start)
                        return [(start, np.full_like(now, POISON), now)]
            at = last
        return []

    def _is_poison(self, first: int, last: int) -> bool:
        least, most = torch.aminmax(self.memory[first:last].view(torch.int64))  # no temporary as large as the arena
        return int(least) == int(most) == -1

    def touched(self) -> dict[str, Runs]:
        return {}

    def forget(self) -> None:
        for first, last in [*self.before, *self.stray]:
            self.memory[first:last] = POISON
        self.places, self.before, self.stray = [], {}, []


def _free(device: torch.device) -> int:
    """Bytes of the device that are free, as far as torch can tell."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    return 4 << 30
