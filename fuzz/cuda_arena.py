"""The arena on a CUDA device: 64 GiB of addresses that take 64 MiB or so of memory.

CUDA's driver maps addresses and memory apart (cuMemAddressReserve, cuMemCreate, cuMemMap). Every address of the arena
has memory behind it, so what a kernel reads or writes astray there is seen and does not end the process; but only where
a case puts something is it memory of its own. All other addresses name the same few MiB of poison, whose change shows a
stray write wherever it went. So offsets past 2^31 elements are drawn on the smallest card, and many workers share one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from pagefuzz.fuzz.arena import POISON, Runs
from pagefuzz.fuzz.device_arena import MOST_BYTES, DeviceArena
from pagefuzz.oracles.observation import Change
from pagefuzz.strategies.number_formats import STORAGE

NOWHERE = "memory far from every tensor, as where an int32 product wraps to"
GRANULES_OF_A_CHUNK = 16
MOST_GRANULES = 24  # of memory of their own that are kept from case to case
# The driver's CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Driver:
    """The few calls of CUDA's driver that map memory, on one device. Raises OSError where there is no such driver, and
    RuntimeError where a call fails."""

    def __init__(self, index: int) -> None:
        self.calls = ctypes.CDLL("libcuda.so.1")
        self.properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, index))
        self.access = _Access(_Location(_ON_DEVICE, index), _READ_WRITE)
        granule = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self.properties), 0)
        self.granule = granule.value

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self.calls, name)(*arguments):
            raise RuntimeError(f"{name} failed with CUDA's error {error}")

    def reserve(self, size: int) -> int:
        """The first of `size` addresses."""
        first, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(first), ctypes.c_size_t(size), ctypes.c_size_t(0), none, none)
        return first.value

    def create(self, size: int) -> ctypes.c_uint64:
        """Memory without an address."""
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self.properties)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0))
        return handle

    def map(self, first: int, size: int, handle: ctypes.c_uint64) -> None:
        """Put memory behind addresses that have none."""
        none = ctypes.c_uint64(0)
        self._call("cuMemMap", ctypes.c_uint64(first), ctypes.c_size_t(size), ctypes.c_size_t(0), handle, none)

    def unmap(self, first: int, size: int) -> None:
        """Leave nothing behind addresses. They must be all of what was mapped in one or more calls."""
        self._call("cuMemUnmap", ctypes.c_uint64(first), ctypes.c_size_t(size))

    def open(self, first: int, size: int) -> None:
        """Let the device read and write there."""
        access = ctypes.byref(self.access)
        self._call("cuMemSetAccess", ctypes.c_uint64(first), ctypes.c_size_t(size), access, ctypes.c_size_t(1))


class CudaArena(DeviceArena):
    """Raises OSError or RuntimeError where the driver cannot do this; DeviceArena can.

    Poison is named in chunks of 32 MiB, since opening 32,768 granules to the device takes nearly a second, and 2,048
    chunks 54 ms. A chunk in which a case puts something is named granule by granule from then on.
    """

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)  # torch makes the context
        index = torch.cuda.current_device() if device.index is None else device.index
        self.driver = _Driver(index)
        self.chunk = GRANULES_OF_A_CHUNK * self.driver.granule
        self.cut: set[int] = set()  # the chunks that are named granule by granule
        self.own: dict[int, ctypes.c_uint64] = {}  # by granule, the memory that only it has
        self.free: list[ctypes.c_uint64] = []
        super().__init__(device, MOST_BYTES)

    def _reserved(self) -> torch.Tensor:
        driver = self.driver
        self.first = driver.reserve(self.size)
        whole, self.common = driver.create(self.chunk), driver.create(driver.granule)
        for first in range(self.first, self.first + self.size, self.chunk):
            driver.map(first, self.chunk, whole)
        driver.open(self.first, self.size)
        described = {"shape": (self.size,), "typestr": "|u1", "data": (self.first, False), "version": 3}
        named = type("_Memory", (), {"__cuda_array_interface__": described})()
        memory = torch.as_tensor(named, device=self.device)
        assert memory.data_ptr() == self.first
        memory[: self.chunk] = POISON
        return memory

    def _reach(self, windows: Runs) -> None:
        granule = self.driver.granule
        wanted = {at for first, last in windows for at in range(first // granule, (last - 1) // granule + 1)}
        missing = sorted(wanted - self.own.keys())
        if not missing:
            return
        torch.cuda.synchronize(self.device)  # nothing may be on its way to addresses that lose their memory
        if len(self.own) + len(missing) > MOST_GRANULES:
            for at in sorted(self.own.keys() - wanted):
                self.free.append(self.own.pop(at))
                self._rename(at, self.common)
        for chunk in sorted({at // GRANULES_OF_A_CHUNK for at in missing} - self.cut):
            self._cut(chunk)
        for at in missing:
            self.own[at] = self.free.pop() if self.free else self.driver.create(granule)
            self._rename(at, self.own[at])
            self.memory[at * granule : (at + 1) * granule] = POISON

    def _cut(self, chunk: int) -> None:
        first, granule = self.first + chunk * self.chunk, self.driver.granule
        self.driver.unmap(first, self.chunk)
        for at in range(first, first + self.chunk, granule):
            self.driver.map(at, granule, self.common)
        self.driver.open(first, self.chunk)
        if not self.cut:
            self.memory[chunk * self.chunk : (chunk + 1) * self.chunk] = POISON  # what it names is new
        self.cut.add(chunk)

    def _rename(self, at: int, memory: ctypes.c_uint64) -> None:
        first, granule = self.first + at * self.driver.granule, self.driver.granule
        self.driver.unmap(first, granule)
        self.driver.map(first, granule, memory)
        self.driver.open(first, granule)

    def _by_buffer(self, first: int, before: np.ndarray, after: np.ndarray) -> list[tuple[str, Change]]:
        if first // self.driver.granule in self.own:
            return super()._by_buffer(first, before, after)
        storage = STORAGE[self.places[-1][1].dtype]  # of a cache, where there is one: they lie last, and wholly aligned
        was: np.ndarray = before.view(storage)
        now: np.ndarray = after.view(storage)
        elements = np.flatnonzero(was != now)
        return [(NOWHERE, Change(elements, was[elements], now[elements]))]

    def _elsewhere(self) -> Runs:
        """All memory that there is: what is own, and under one of their names the granule and the chunk of poison."""
        granule = self.driver.granule
        runs: Runs = []
        for at in sorted(self.own):
            if runs and runs[-1][1] == at * granule:
                runs[-1] = (runs[-1][0], (at + 1) * granule)
            else:
                runs.append((at * granule, (at + 1) * granule))
        cut = (
            at
            for chunk in sorted(self.cut)
            for at in range(chunk * GRANULES_OF_A_CHUNK, (chunk + 1) * GRANULES_OF_A_CHUNK)
        )
        common = next(at for at in cut if at not in self.own)
        whole = next(chunk for chunk in range(self.size // self.chunk) if chunk not in self.cut)
        return [*runs, (common * granule, (common + 1) * granule), (whole * self.chunk, (whole + 1) * self.chunk)]
