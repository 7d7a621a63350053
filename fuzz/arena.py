"""The memory that a case's tensors lie in, with guard zones on both sides.

On the CPU it is one sparse file mapped into the process: a pool of many GiB costs the pages that are really touched,
`lseek(SEEK_DATA)` lists them, and what a kernel writes or looks at outside its tensors lands in the file and not in the
heap. On a device it is one allocation that is poison wherever no case has put anything.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pagefuzz.oracles.observation import Change
from pagefuzz.strategies.case import Arguments, InvalidCase, Limits
from pagefuzz.strategies.number_formats import ITEMSIZE, STORAGE
from pagefuzz.strategies.tensors import Buffer, Tensor

ALIGNMENT = 64
GUARD = 256  # bytes of poison right before and behind every buffer
PIECE = 1 << 26  # bytes that are compared at a time
POISON = 0xFF  # NaN in every float dtype, -1 in every integer dtype
_ZONE = np.full(GUARD, POISON, dtype=np.uint8)
EVERY = "*"  # small buffer
PROT_NONE = 0
GUARDED_ALIGNMENT = {"int32": 16, "int64": 16}  # of what has a guard page behind it; else ALIGNMENT
MAP_NORESERVE = 0x4000  # Linux; Python 3.11 has no name for it
_LIBC = ctypes.CDLL(None)
TORCH_DTYPES = {name: getattr(torch, name) for name in ITEMSIZE}

Runs = list[tuple[int, int]]  # [first byte, one past the last byte)


class Arena(ABC):
    """Where the tensors of one case at a time are placed, watched and forgotten.

    Small buffers lie at the start, the two caches at 1/4 and 5/8 of the arena: 2^31 elements below each, where an int32
    product wraps to, are still inside, and so are the garbage ids that the strategies draw (`limits`).
    """

    size: int
    device: torch.device

    def __init__(self) -> None:
        self.places: list[tuple[int, Buffer]] = []  # (first byte, buffer), ascending
        self.guards: list[int] = []  # the first bytes of pages that nobody can access, ascending

    @property
    def limits(self) -> Limits:
        """What the strategies may draw for this arena."""
        return Limits(cache_bytes=self.size // 4)

    def place(self, arguments: Arguments) -> list[torch.Tensor | int | float]:
        """The arguments of the call, filled in. Raises InvalidCase if they do not fit.

        Nothing else may be placed before `forget`.
        """
        assert not self.places, "the arena still holds another case"
        small, cache = GUARD, 0
        for buffer in arguments.buffers:
            nbytes = buffer.size * ITEMSIZE[buffer.dtype]
            if buffer.is_cache:
                start, room = (self.size // 4, self.size * 5 // 8)[cache], self.size // 4
                cache += 1
            else:
                start, room = self._start(buffer, small, nbytes), self.size // 8 - small
                small = -(-(self._behind(start + nbytes) + 2 * GUARD) // ALIGNMENT) * ALIGNMENT
            if nbytes > room:
                self.places.clear()
                self.guards = []
                raise InvalidCase(f"{buffer.name} takes {nbytes} bytes, more than the {room} that there are here")
            self.places.append((start, buffer))
        self.places.sort(key=lambda place: place[0])
        for start, buffer in self.places:
            self._fill(start, buffer)
        self._remember()
        starts = {id(buffer): start for start, buffer in self.places}
        return [
            self._view(starts[id(value.buffer)], value) if isinstance(value, Tensor) else value
            for value in arguments.values.values()
        ]

    def _start(self, buffer: Buffer, least: int, nbytes: int) -> int:
        """Where a small buffer of `nbytes` begins, not below `least`."""
        return least

    def _behind(self, end: int) -> int:
        """The first byte behind a small buffer that ends at `end` where something else may lie."""
        return end

    @abstractmethod
    def _fill(self, start: int, buffer: Buffer) -> None: ...

    @abstractmethod
    def _view(self, start: int, tensor: Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _remember(self) -> None:
        """Keep what is there now, for `changes`."""

    @abstractmethod
    def _read(self, first: int, count: int) -> np.ndarray:
        """uint8[count] from byte `first` on."""

    @abstractmethod
    def _differences(self) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
        """(first byte, uint8 before, uint8 after) of runs that differ somewhere, aligned to 64 bytes."""

    @abstractmethod
    def touched(self) -> dict[str, Runs]:
        """By buffer, the runs of its untouched bytes (first, last; from its start) that something looked at."""

    @abstractmethod
    def forget(self) -> None:
        """Leave nothing of the case behind."""

    def fetch(self, tensor: torch.Tensor | None) -> np.ndarray | None:
        """Wait for all that runs on the device; the bytes of a tensor there, as they are now."""
        if tensor is None:
            return None
        bits: np.ndarray = bytes_of(tensor).cpu().numpy().copy()
        return bits

    def watched(self, wanted: dict[str, tuple[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
        """The bits that lie now in the given elements of buffers: by tensor, a row for each row of elements."""
        found: dict[str, list[np.ndarray]] = {}
        for start, buffer in self.places:
            itemsize, storage = ITEMSIZE[buffer.dtype], STORAGE[buffer.dtype]
            for name, (where, rows) in wanted.items():
                if where != buffer.name:
                    continue
                found[name] = []
                for elements in rows:
                    first, last = int(elements.min()), int(elements.max())
                    bits: np.ndarray = self._read(start + first * itemsize, (last - first + 1) * itemsize).view(storage)
                    found[name].append(bits[elements - first])
        return found

    def changes(self) -> dict[str, Change]:
        """What differs from what was placed, by the buffer that it is in or nearest to."""
        changed: dict[str, list[Change]] = {}
        for first, before, after in self._differences():
            for name, change in self._by_buffer(first, before, after):
                changed.setdefault(name, []).append(change)
        return {
            name: Change(
                *(np.concatenate([getattr(part, field) for part in parts]) for field in ("elements", "before", "after"))
            )
            for name, parts in changed.items()
        }

    def _by_buffer(self, first: int, before: np.ndarray, after: np.ndarray) -> list[tuple[str, Change]]:
        at = first + np.flatnonzero(before != after)
        split = []
        for index, (start, buffer) in enumerate(self.places):
            low = 0 if index == 0 else self._border(index)
            high = self.size if index + 1 == len(self.places) else self._border(index + 1)
            mine = at[(at >= low) & (at < high)]
            if len(mine):
                itemsize, storage = ITEMSIZE[buffer.dtype], STORAGE[buffer.dtype]
                elements = np.unique((mine - start) // itemsize)
                places = (start + elements * itemsize - first)[:, None] + np.arange(itemsize)
                bits = [side[places].view(storage).reshape(-1) for side in (before, after)]
                split.append((buffer.name, Change(elements, *bits)))
        return split

    def _border(self, index: int) -> int:
        """The byte from which on the guard zone belongs to places[index] and no longer to the one before it."""
        start = self.places[index][0]
        before, previous = self.places[index - 1]
        end = before + previous.size * ITEMSIZE[previous.dtype]
        return start - ((start - end) // 2 // ALIGNMENT * ALIGNMENT)

    def _pieces(self, start: int, buffer: Buffer) -> list[tuple[int, np.ndarray]]:
        """(first byte, uint8 bits) of what is filled in: the guard zones and the buffer's pieces."""
        itemsize = ITEMSIZE[buffer.dtype]
        end = start + buffer.size * itemsize
        filled = [(start + first * itemsize, bits.view(np.uint8)) for first, bits in buffer.pieces]
        return [(start - GUARD, _ZONE), *filled, (end, _ZONE)]


class CpuArena(Arena):
    """A sparse file of up to 1 TiB, mapped shared. Raises OSError if not even 1 GiB can be mapped.

    guarded: the small buffer that a page which cannot be accessed lies right behind, so that whoever reads one element
    past its end is killed; EVERY for all of them, "" for none. The end is as near to that page as the buffer's
    alignment allows: 64 bytes, and 16 for integers, in whose arithmetic alignment changes nothing.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.guarded = ""
        self.file = os.memfd_create("pagefuzz-arena")
        for power in range(40, 29, -1):
            try:
                os.ftruncate(self.file, 1 << power)
                self.memory = mmap.mmap(self.file, 1 << power, flags=mmap.MAP_SHARED | MAP_NORESERVE)
            except (OSError, ValueError):
                if power == 30:
                    raise OSError(
                        "cannot map 1 GiB of sparse memory for the arena; raise the limit on address space (ulimit -v)"
                    ) from None
                continue
            self.memory.madvise(mmap.MADV_DONTFORK)  # a process of this one's has its own, and must not harm this
            self.size = 1 << power
            break
        self.memory[self.size // 2] = 1
        first, last = self._populated()[0]
        self.page = last - first  # what one touched byte populates; larger than 4096 with huge pages
        self.forget()
        self.base = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        self.before: dict[tuple[int, int], bytes] = {}
        # By first byte, what views of one buffer are views of. Triton's interpreter copies a storage back to where it
        # came from unless both are one, and of keys and values packed in one tensor that would be many GiB.
        self.flat: dict[int, torch.Tensor] = {}

    def _populated(self) -> Runs:
        runs: Runs = []
        at = 0
        while True:
            try:
                first = os.lseek(self.file, at, os.SEEK_DATA)
            except OSError:
                return runs
            at = os.lseek(self.file, first, os.SEEK_HOLE)
            runs.append((first, at))

    def _start(self, buffer: Buffer, least: int, nbytes: int) -> int:
        if not nbytes or self.guarded not in (EVERY, buffer.name):
            return least
        alignment = GUARDED_ALIGNMENT.get(buffer.dtype, ALIGNMENT)
        whole = -(-nbytes // alignment) * alignment
        self.guards.append(-(-(least + whole) // mmap.PAGESIZE) * mmap.PAGESIZE)
        return self.guards[-1] - whole

    def _behind(self, end: int) -> int:
        return self.guards[-1] + mmap.PAGESIZE if self.guards and self.guards[-1] >= end else end

    def _protect(self, access: int) -> None:
        for guard in self.guards:
            if _LIBC.mprotect(ctypes.c_void_p(self.base + guard), ctypes.c_size_t(mmap.PAGESIZE), access):
                raise OSError("a page behind a tensor cannot be protected")

    def _fill(self, start: int, buffer: Buffer) -> None:
        for first, data in self._pieces(start, buffer):
            last = first + len(data)
            for guard in self.guards:
                if first < guard < last:
                    last = guard
            self.memory[first:last] = data[: last - first].data

    def _view(self, start: int, tensor: Tensor) -> torch.Tensor:
        buffer, dtype = tensor.buffer, TORCH_DTYPES[tensor.buffer.dtype]
        if buffer.size == 0:
            return torch.empty(0, dtype=dtype).as_strided(tensor.shape, tensor.strides)
        assert tensor.last_element() < buffer.size
        if start not in self.flat:
            self.flat[start] = torch.frombuffer(self.memory, dtype=dtype, count=buffer.size, offset=start)
        return self.flat[start].as_strided(tensor.shape, tensor.strides, tensor.offset)

    def _remember(self) -> None:
        self._protect(PROT_NONE)
        self.before = {run: os.pread(self.file, run[1] - run[0], run[0]) for run in self._populated()}

    def _read(self, first: int, count: int) -> np.ndarray:
        return np.frombuffer(os.pread(self.file, count, first), dtype=np.uint8)

    def _differences(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        # In pieces: a kernel may look at all of a pool, and one pread gives 2 GiB at most.
        runs = [
            (start, min(start + PIECE, last))
            for first, last in self._populated()
            for start in range(first, last, PIECE)
        ]
        for first, last in runs:
            now = os.pread(self.file, last - first, first)
            if self.before.get((first, last)) == now:
                continue
            before = np.zeros(last - first, dtype=np.uint8)
            for (start, end), data in self.before.items():
                low, high = max(start, first), min(end, last)
                if low < high:
                    before[low - first : high - first] = np.frombuffer(data, dtype=np.uint8)[low - start : high - start]
            after = np.frombuffer(now, dtype=np.uint8)
            if not np.array_equal(before, after):
                yield first, before, after

    def touched(self) -> dict[str, Runs]:
        known = sorted(self.before)
        fresh = [run for first, last in self._populated() for run in _outside(first, last, known)]
        found: dict[str, Runs] = {}
        for start, buffer in self.places:
            end = start + buffer.size * ITEMSIZE[buffer.dtype]
            runs = [
                (max(low, start) - start, min(high, end) - 1 - start)
                for low, high in fresh
                if low < end and high > start and self.page == mmap.PAGESIZE
            ]
            if runs:
                found[buffer.name] = runs
        return found

    def forget(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.guards = []
        for first, last in self._populated():
            self.memory.madvise(mmap.MADV_REMOVE, first, last - first)
        self.places, self.before, self.flat = [], {}, {}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8: the elements of a tensor in their order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _outside(first: int, last: int, known: Runs) -> Runs:
    """The parts of [first, last) that lie in none of the ascending runs `known`."""
    parts = []
    for start, end in known:
        if end <= first or start >= last:
            continue
        if start > first:
            parts.append((first, start))
        first = max(first, end)
    return [*parts, (first, last)] if first < last else parts
