"""The arena on a device: poison wherever no case has put anything.

A wait for the device is what costs there, most of all where several processes share it and take turns. So all that a
case places goes there in one copy, and all that is looked at afterwards comes back in one.
"""

from __future__ import annotations

import numpy as np
import torch

from pagefuzz.fuzz.arena import ALIGNMENT, POISON, TORCH_DTYPES, Arena, Runs, bytes_of
from pagefuzz.strategies.number_formats import ITEMSIZE
from pagefuzz.strategies.tensors import Buffer, Tensor

MOST_BYTES = 1 << 36
LEAST_BYTES = 1 << 30
MARGIN = 1 << 14  # bytes around a small buffer, and around each piece of a large one, that are compared exactly
SMALL = 1 << 22  # bytes up to which all of a buffer is compared exactly
CHUNK = 1 << 26  # bytes in which a stray write far from everything is looked for
_NOTHING = np.empty(0, dtype=np.uint8)


class DeviceArena(Arena):
    """One allocation of `size` bytes.

    What a kernel only reads there leaves no trace; accesses of compiled kernels cannot be traced either.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        super().__init__()
        self.device, self.size = device, size
        self.memory = self._reserved()
        self.staging = torch.empty(0, dtype=torch.uint8)
        self.pieces: list[tuple[int, np.ndarray]] = []
        self.windows: dict[tuple[int, int], slice] = {}  # what is compared exactly, and where it lies in `before`
        self.before = self.now = _NOTHING
        self.stray: Runs = []

    def _reserved(self) -> torch.Tensor:
        """uint8[size], all poison."""
        return torch.full((self.size,), POISON, dtype=torch.uint8, device=self.device)

    def _reach(self, windows: Runs) -> None:
        """Have memory of its own behind every byte of `windows`."""

    def _elsewhere(self) -> Runs:
        """Where a stray write is looked for, outside of all windows: near them, and everywhere if it may go far."""
        if any(buffer.size * ITEMSIZE[buffer.dtype] > SMALL for _, buffer in self.places):
            return [(0, self.size)]
        return _merged([(max(0, first - SMALL), min(self.size, last + SMALL)) for first, last in self.windows])

    def _fill(self, start: int, buffer: Buffer) -> None:
        self.pieces += [(first, data) for first, data in self._pieces(start, buffer) if len(data)]

    def _view(self, start: int, tensor: Tensor) -> torch.Tensor:
        buffer, dtype = tensor.buffer, TORCH_DTYPES[tensor.buffer.dtype]
        if buffer.size == 0:
            return torch.empty(0, dtype=dtype, device=self.device).as_strided(tensor.shape, tensor.strides)
        assert tensor.last_element() < buffer.size
        flat = self.memory[start : start + buffer.size * ITEMSIZE[buffer.dtype]].view(dtype)
        return flat[tensor.offset :].as_strided(tensor.shape, tensor.strides, flat.storage_offset() + tensor.offset)

    def _remember(self) -> None:
        wanted = []
        for start, buffer in self.places:
            nbytes = buffer.size * ITEMSIZE[buffer.dtype]
            spans = [(first, first + len(data)) for first, data in self._pieces(start, buffer)]
            wanted += [(start, start + nbytes)] if nbytes <= SMALL else spans
        runs = _merged([(max(0, first - MARGIN), min(self.size, last + MARGIN)) for first, last in wanted])
        self._reach(runs)
        at, self.windows = 0, {}
        for first, last in runs:
            self.windows[first, last] = slice(at, at + last - first)
            at += last - first
        self.before, self.now = np.full(at, POISON, dtype=np.uint8), _NOTHING
        for first, data in self.pieces:
            place = self._place(first, len(data))
            assert place is not None
            self.before[place] = data
        staged = self._staged(self.before)
        for (first, last), place in self.windows.items():
            self.memory[first:last].copy_(staged[place])

    def _place(self, first: int, count: int) -> slice | None:
        """Where `count` bytes from byte `first` on lie in `before` and `now`; None if no window holds them."""
        for (low, high), place in self.windows.items():
            if low <= first and first + count <= high:
                return slice(place.start + first - low, place.start + first - low + count)
        return None

    def _staged(self, data: np.ndarray) -> torch.Tensor:
        """Bytes on the device, from memory that the device reads by itself where there is such memory."""
        if self.device.type != "cuda":
            return torch.from_numpy(data).to(self.device)
        if self.staging.numel() < len(data):
            self.staging = torch.empty(2 * len(data), dtype=torch.uint8, pin_memory=True)
        self.staging.numpy()[: len(data)] = data
        # Nothing is written there again before this case has been looked at, which waits for the device.
        return self.staging[: len(data)].to(self.device, non_blocking=True)

    def fetch(self, tensor: torch.Tensor | None) -> np.ndarray | None:
        returned = self._look(None if tensor is None else bytes_of(tensor))
        return None if tensor is None else returned

    def _look(self, returned: torch.Tensor | None = None) -> np.ndarray:
        """Fetch what lies in the windows now, once, and leave poison there: what is no poison then is stray. Returns
        the bytes `returned`, which come along."""
        if len(self.now) or not self.windows:
            return _NOTHING
        found = torch.cat([self.memory[first:last] for first, last in self.windows])
        self._wipe()
        suspects = [
            (start, min(start + CHUNK, last))
            for first, last in self._elsewhere()
            for start in range(first, last, CHUNK)
        ]
        dirty = [(self.memory[first:last].view(torch.int64) != -1).any() for first, last in suspects]
        flags = torch.stack(dirty).to(torch.uint8) if dirty else found[:0]
        together = [found, flags] if returned is None else [found, flags, returned.to(self.device)]
        now, is_dirty, bits = np.split(torch.cat(together).cpu().numpy(), [len(found), len(found) + len(flags)])
        self.now = now
        self.stray = [run for run, dirty_one in zip(suspects, is_dirty, strict=True) if dirty_one]
        return bits.copy()

    def _wipe(self) -> None:
        for first, last in self.windows:
            self.memory[first:last] = POISON

    def _read(self, first: int, count: int) -> np.ndarray:
        self._look()
        place = self._place(first, count)
        return self.memory[first : first + count].cpu().numpy() if place is None else self.now[place]

    def _differences(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        self._look()
        found = []
        for (first, _), place in self.windows.items():
            before, now = self.before[place], self.now[place]
            if not np.array_equal(before, now):
                found.append((first, before, now))
        if self.stray:  # one is enough to say so; where a 32-bit product wraps to, say
            first, last = self.stray[0]
            now = self.memory[first:last].cpu().numpy()
            found.append((first, np.full_like(now, POISON), now))
        return found

    def touched(self) -> dict[str, Runs]:
        return {}

    def forget(self) -> None:
        if not len(self.now):
            self._wipe()
        for first, last in self.stray:
            self.memory[first:last] = POISON
        self.places, self.pieces, self.windows, self.stray = [], [], {}, []
        self.before = self.now = _NOTHING


def _merged(runs: Runs) -> Runs:
    """The same bytes in ascending runs that do not touch, each from one multiple of 64 bytes to another."""
    merged: Runs = []
    for first, last in sorted(runs):
        low, high = first // ALIGNMENT * ALIGNMENT, -(-last // ALIGNMENT) * ALIGNMENT
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def arena_bytes(total: int, workers: int) -> int:
    """Bytes of a dense arena where `workers` processes share a device of `total` bytes: of what it has and not of what
    is free just now, so that a seed draws the same cases in every process.

    Raises RuntimeError where that leaves less than 1 GiB for each.
    """
    size = MOST_BYTES
    while size > total * 3 // 4 // workers:
        size //= 2
    if size < LEAST_BYTES:
        raise RuntimeError(
            f"the device has {total / 2**30:.1f} GiB, and {workers} workers want 1 GiB each: use fewer (-n)"
        )
    return size
