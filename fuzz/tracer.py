"""Traces and checks every memory access of interpreted kernels.

    with traced({"k_cache": k_cache, "block_tables": block_tables}) as trace:
        kernel[grid](...)
    trace.loads["block_tables"]  # element offsets that were read

An access is legal where a tensor argument of the launch has elements: to the element for strided views, so the gap of a
narrowed block table is illegal, and outputs and workspaces that a host function allocates itself are legal. Everything
else is a `WildAccess`, which is raised before anything is read or written, and kept in `trace.wild`, since Triton wraps
it in its own InterpreterError. Lanes that are masked off are no accesses.

Whose access it was: every tensor argument of a launch has a pointer type object of its own, and pointer arithmetic,
broadcasts and descriptors hand that object on, so a pointer says which argument it came from. `tl.where` of two
pointers says the second. The origin is lost where a kernel casts a pointer or makes one from an integer; then the
nearest argument in memory is named, one with elements of the accessed size if there is any. The origin is for the name
only: an access that lands in another argument is legal. An address that came in as a number has no origin at all; it
may also lie in a named tensor that is no argument of the launch.

Works with and without `pagefuzz.fuzz.interpreter.install`, on triton 3.6 to 3.9. All loads, stores, block pointers and
descriptors reach the builder's create_masked_load and create_masked_store; atomics have their own two methods. One
trace at a time: neither nested nor in several threads.

Which program accessed what is known too: where two programs of one launch write one address, or one reads what another
writes, `trace.race` says so. That is found out once a launch has ended, first from the bounds of its accesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pagefuzz.oracles.observation import Race

# Bytes of each access, their addresses (uint64), and the id of the program.
_Access = tuple[int, np.ndarray, tuple[int, int, int]]


class WildAccess(Exception):
    """A kernel was about to touch memory where no tensor argument of its launch has an element.

    kind: "load", "store" or "atomic". program: its id (x, y, z). tensor: the tensor that the address was made from, by
    its name in the trace or else by the kernel's parameter. index: offset of the first wild lane from that tensor's
    first element, in elements, rounded down; negative below it. lanes: how many lanes of this access were wild.
    value: the bits which the first wild lane would have stored, or the operand of its atomic; None for a load.
    """

    def __init__(
        self, kind: str, program: tuple[int, int, int], tensor: str, index: int, lanes: int, value: int | None
    ) -> None:
        super().__init__(kind, program, tensor, index, lanes, value)
        self.kind, self.program, self.tensor, self.index, self.lanes, self.value = self.args

    def __str__(self) -> str:
        value = "" if self.value is None else f" of bits {self.value:#x}"
        return (
            f"wild {self.kind}{value} by program {self.program}: {self.tensor}[{self.index}], counted in elements from "
            f"its first, is no element of any tensor argument ({self.lanes} wild lane{'s' if self.lanes > 1 else ''})"
        )


class _Extent:
    """The bytes that a tensor's elements occupy: a run of contiguous bytes, repeated along `dims` (count, stride)."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.base, self.itemsize = name, tensor.data_ptr(), tensor.element_size()
        self.run = self.itemsize if tensor.numel() else 0
        self.dims: list[tuple[int, int]] = []
        if tensor.numel():
            strides = [step * self.itemsize for step in tensor.stride()]
            for stride, count in sorted(zip(strides, tensor.shape, strict=True)):
                if count == 1 or stride == 0:
                    continue
                if not self.dims and stride == self.run:
                    self.run *= count
                else:
                    self.dims.insert(0, (count, stride))
        self.span = self.run + sum((count - 1) * stride for count, stride in self.dims)

    def all_inside(self, addresses: np.ndarray, size: int) -> bool:
        """Whether all accesses of `size` bytes at `addresses` (uint64, at least one) are elements."""
        if self.dims:
            return bool(self.inside(addresses, size).all())
        offsets = addresses - np.uint64(self.base)  # below the base it wraps to something large
        whole = int(np.bitwise_or.reduce(offsets)) & (min(size, self.itemsize) - 1) == 0
        return whole and int(offsets.max()) <= self.run - size

    def inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The same for each access, as booleans."""
        offsets = (addresses - np.uint64(self.base)).view(np.int64)
        part = min(size, self.itemsize)
        found = offsets & (part - 1) == 0
        for start in range(0, size, part):  # an access wider than an element is several elements
            found &= self._inside(offsets + start, part, self.dims)
        return found

    def _inside(self, offsets: np.ndarray, size: int, dims: list[tuple[int, int]]) -> np.ndarray:
        if not dims:
            return (offsets >= 0) & (offsets <= self.run - size)
        (count, stride), inner = dims[0], dims[1:]
        index = np.clip(offsets // stride, 0, count - 1)
        found = self._inside(offsets - index * stride, size, inner)
        inner_span = self.run + sum((count - 1) * stride for count, stride in inner)
        for _ in range((inner_span - 1) // stride):  # only in overlapping views do lower indices reach as far
            if found.all():
                break
            index = index - 1
            found |= (index >= 0) & self._inside(offsets - index * stride, size, inner)
        return found

    def distance(self, address: int) -> int:
        offset = (address - self.base + 2**63) % 2**64 - 2**63
        return max(-offset, offset - self.span + 1, 0)


class Trace:
    """What kernels did inside of `traced`.

    launches: how many there were. wild: the first wild access, or None. loads, stores: for every named tensor, the
    sorted distinct offsets (int64) of the elements accessed, counted in elements of memory from its first one
    (data_ptr), so that a row of a strided view starts at its stride. An atomic counts as both. An access that two named
    tensors share counts for both. What was refused counts for none. race: that of the first launch with one, or None.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.launches = 0
        self.wild: WildAccess | None = None
        self._named = [_Extent(name, tensor) for name, tensor in named.items()]
        self._accesses: dict[str, list[_Access]] = {"load": [], "store": []}
        self._race: Race | None = None
        self._ended = {"load": 0, "store": 0}  # how many accesses belong to launches that were looked at for races
        self._atomic = False  # whether the current launch has an atomic access
        self._sets: dict[str, tuple[int, dict[str, np.ndarray]]] = {}
        self._arguments: list[_Extent] = []
        self._origins: dict[int, tuple[Any, _Extent]] = {}  # by id of a pointer type, kept so that the id stays taken

    @property
    def loads(self) -> dict[str, np.ndarray]:
        return self._elements("load")

    @property
    def stores(self) -> dict[str, np.ndarray]:
        return self._elements("store")

    def _elements(self, kind: str) -> dict[str, np.ndarray]:
        accesses = self._accesses[kind]
        known = self._sets.get(kind)
        if known is None or known[0] != len(accesses):
            by_size: dict[int, list[np.ndarray]] = {}
            for size, addresses, _ in accesses:
                by_size.setdefault(size, []).append(addresses)
            distinct = {size: _distinct(np.concatenate(arrays)) for size, arrays in by_size.items()}
            sets = {extent.name: _offsets(extent, distinct) for extent in self._named}
            known = self._sets[kind] = (len(accesses), sets)
        return known[1]

    def _launch(self, arguments: dict[str, Any]) -> dict[int, _Extent]:
        """Starts a launch; returns the extent of every tensor among the arguments by the id of its object."""
        self._end_launch()
        self.launches += 1
        tensors = [pair for name, value in arguments.items() for pair in _tensors(name, value)]
        # triton.reinterpret wraps a tensor as its `base`.
        extents = {id(tensor): _Extent(name, getattr(tensor, "base", tensor)) for name, tensor in tensors}
        self._arguments, self._origins = list(extents.values()), {}
        return extents

    def _check(self, kind: str, program: Any, ptrs: Any, mask: Any, size: int, value: Any = None) -> None:
        addresses, lanes = ptrs.data, np.asarray(mask.data)
        if lanes.dtype != np.bool_:
            lanes = lanes.astype(np.bool_)
        if lanes.shape != addresses.shape:
            addresses, lanes = np.broadcast_arrays(addresses, lanes)
        active = addresses[lanes]
        if not active.size:
            return
        origin = self._origins.get(id(ptrs.dtype))
        if origin is None or not origin[1].all_inside(active, size):
            outside = np.ones(active.shape, np.bool_)
            # An address that came in as a number has no origin; it may mean any tensor of the call.
            for extent in self._arguments if origin else [*self._arguments, *self._named]:
                outside &= ~extent.inside(active, size)
            if outside.any():
                first = int(outside.argmax())
                bits = None
                if value is not None:
                    stored = np.broadcast_to(value.data, addresses.shape)[lanes][first : first + 1]
                    bits = int(stored.view(f"u{stored.itemsize}")[0])
                name, index = self._place(int(active[first]), size, origin[1] if origin else None)
                wild = WildAccess(kind, tuple(program), name, index, int(outside.sum()), bits)
                self.wild = self.wild or wild
                raise wild
        if kind != "store":
            self._accesses["load"].append((size, active, program))
        if kind != "load":
            self._accesses["store"].append((size, active, program))
        if kind == "atomic":
            self._atomic = True

    @property
    def race(self) -> Race | None:
        self._end_launch()
        return self._race

    def _end_launch(self) -> None:
        """Looks for a race in the accesses since this was called last."""
        stores, loads = (self._accesses[kind][self._ended[kind] :] for kind in ("store", "load"))
        self._ended = {kind: len(accesses) for kind, accesses in self._accesses.items()}
        if self._race is None and not self._atomic:
            found = _write_write(stores) or _write_read(stores, loads)
            if found is not None:
                kind, programs, addresses = found
                first = addresses[:1]
                origin = next((extent for extent in self._arguments if extent.inside(first, 1)[0]), None)
                extent = self._extent_of(int(first[0]), 1, origin)
                if extent is not None:
                    index = (addresses - np.uint64(extent.base)).astype(np.int64) // extent.itemsize
                    elements = len(np.unique(index[index * extent.itemsize < extent.span]))
                    self._race = Race(kind, programs, extent.name, int(index[0]), elements)
        self._atomic = False

    def _place(self, address: int, size: int, origin: _Extent | None) -> tuple[str, int]:
        extent = self._extent_of(address, size, origin)
        if extent is None:
            return "(a launch without tensors)", address
        offset = (address - extent.base + 2**63) % 2**64 - 2**63  # below address 0 a pointer wraps to the top
        return extent.name, offset // extent.itemsize

    def _extent_of(self, address: int, size: int, origin: _Extent | None) -> _Extent | None:
        """The tensor that a person would say an address belongs to; None in a launch without tensors."""
        if origin is None:
            alike = [extent for extent in self._arguments if extent.itemsize == size] or self._arguments
            if not alike:
                return None
            origin = min(alike, key=lambda extent: extent.distance(address))
        whole = [extent for extent in self._named if extent.base == origin.base]
        parts = [extent for extent in self._named if extent.base < origin.base < extent.base + extent.span]
        return (whole or parts or [origin])[0]


_Programs = tuple[tuple[int, int, int], tuple[int, int, int]]


def _write_write(stores: list[_Access]) -> tuple[str, _Programs, np.ndarray] | None:
    """The addresses (of bytes or wider, ascending) that two programs store to, and two of those that share the first.

    What lies apart needs no sorting: only where the bounds of two programs' stores overlap are addresses compared.
    """
    bounds = sorted((int(at.min()), int(at.max()) + size, program) for size, at, program in stores)
    end: int = 0
    owner: tuple[int, int, int] | None = None
    for low, high, program in bounds:
        if low < end and program != owner:
            break
        if high > end:
            end, owner = high, program
    else:
        return None
    ids, addresses, programs = _spread(stores, _unit(stores))
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    shared = (addresses[1:] == addresses[:-1]) & (programs[1:] != programs[:-1])
    if not shared.any():
        return None
    first = int(shared.argmax())
    return "store", (ids[programs[first]], ids[programs[first + 1]]), np.unique(addresses[1:][shared])


def _write_read(stores: list[_Access], loads: list[_Access]) -> tuple[str, _Programs, np.ndarray] | None:
    """The same for addresses that one program stores to and another loads. No two programs store to one address."""
    if not stores or not loads:
        return None
    low = min(int(at.min()) for _, at, _ in stores)
    high = max(int(at.max()) + size for size, at, _ in stores)
    bottom, top = np.uint64(max(low - 7, 0)), np.uint64(high)  # a load of 8 bytes may begin 7 below
    read = np.concatenate([at for _, at, _ in loads])
    if not ((read >= bottom) & (read < top)).any():
        return None
    near = [(size, at[(at >= bottom) & (at < top)], program) for size, at, program in loads]
    unit = _unit([*stores, *near])
    writers, written, wrote = _spread(stores, unit)
    readers, read, reads = _spread(near, unit)
    order = written.argsort(kind="stable")
    written, wrote = written[order], wrote[order]
    place = written.searchsorted(read).clip(max=len(written) - 1)
    # Programs are numbered within each list; `same` says which reader is which writer.
    same = np.array([writers.index(program) if program in writers else -1 for program in readers])
    shared = (written[place] == read) & (wrote[place] != same[reads])
    if not shared.any():
        return None
    first = np.lexsort((reads[shared], read[shared]))[0]
    programs = writers[wrote[place][shared][first]], readers[reads[shared][first]]
    return "load", programs, np.unique(read[shared])


def _unit(accesses: list[_Access]) -> int:
    """The largest power of two that divides all addresses and sizes: the granularity at which they can be compared."""
    bits = 0
    for size, addresses, _ in accesses:
        bits |= size | int(np.bitwise_or.reduce(addresses))
    return bits & -bits


def _spread(accesses: list[_Access], unit: int) -> tuple[list[tuple[int, int, int]], np.ndarray, np.ndarray]:
    """The ids of the programs, ascending; then the address of every `unit` bytes accessed and whose place in the ids
    accessed it."""
    ids = sorted({program for *_, program in accesses})
    number = {program: place for place, program in enumerate(ids)}
    addresses, programs = [], []
    for size, at, program in accesses:
        if size > unit:
            at = (at[:, None] + np.arange(0, size, unit, dtype=np.uint64)).reshape(-1)
        addresses.append(at)
        programs.append(np.full(len(at), number[program]))
    return ids, np.concatenate(addresses), np.concatenate(programs)


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """The distinct numbers, ascending; several times as fast as np.unique, which hashes them."""
    ascending = np.sort(numbers)
    first = np.ones(len(ascending), np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    return ascending[first]


def _offsets(extent: _Extent, distinct: dict[int, np.ndarray]) -> np.ndarray:
    found = [np.empty(0, np.int64)]
    for size, addresses in distinct.items():
        ends = np.array([max(extent.base - size + 1, 0), extent.base + extent.span], dtype=np.uint64)
        first, last = np.searchsorted(addresses, ends)
        if first == last:
            continue
        addresses = addresses[first:last]
        if size > extent.itemsize:  # one access, several elements
            addresses = (addresses[:, None] + np.arange(0, size, extent.itemsize, dtype=np.uint64)).reshape(-1)
        here = addresses[extent.inside(addresses, min(size, extent.itemsize))]
        found.append((here - np.uint64(extent.base)).astype(np.int64) // extent.itemsize)
    return _distinct(np.concatenate(found))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from _tensors(f"{name}[{place}]", item)
    elif hasattr(value, "data_ptr"):
        yield name, value
    elif hasattr(value, "base") and hasattr(value, "block_shape"):  # a tensor descriptor
        yield name, value.base


@contextmanager
def traced(named: Mapping[str, torch.Tensor]) -> Iterator[Trace]:
    """Trace and check all launches of interpreted kernels in the context; see the module and `Trace`.

    named: CPU tensors whose accessed elements are to be recorded, by name. They may be views, overlap, and be larger
    than memory (a sparse mapping): nothing as large as a tensor is allocated. A launch with a wild access raises
    WildAccess, wrapped in triton's InterpreterError. Raises RuntimeError where kernels are compiled or a trace is
    active already, and ValueError for a tensor that is not on the CPU.
    """
    import triton
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("only interpreted kernels can be traced: set TRITON_INTERPRET=1 before triton is imported")
    if "create_masked_load" in vars(builder):
        raise RuntimeError("a trace is active already: traces neither nest nor run at the same time; leave it first")
    for name, tensor in named.items():
        if tensor.device.type != "cpu":
            raise ValueError(
                f"tensor {name!r} is on {tensor.device}: only CPU tensors can be traced; move it or leave it out"
            )
    trace = Trace(named)
    extents: dict[int, _Extent] = {}
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw
    to_host, convert = interpreter.GridExecutor._init_args_hst, interpreter._implicit_cvt

    def create_masked_load(ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size = max(8, ptrs.get_element_ty().primitive_bitwidth) // 8
        trace._check("load", builder.grid_idx, ptrs, mask, size)
        return load(ptrs, mask, *rest, **options)

    def create_masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        trace._check("store", builder.grid_idx, ptrs, mask, value.data.itemsize, value)
        return store(ptrs, value, mask, *rest, **options)

    def create_atomic_cas(ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        trace._check("atomic", builder.grid_idx, ptr, np.ones(ptr.data.shape, np.bool_), val.data.itemsize, val)
        return cas(ptr, cmp, val, *rest)

    def create_atomic_rmw(op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        trace._check("atomic", builder.grid_idx, ptr, mask, val.data.itemsize, val)
        return rmw(op, ptr, val, mask, *rest)

    def init_args_hst(executor: Any, args_dev: Any, kwargs: Any) -> Any:
        nonlocal extents
        args, kwargs = to_host(executor, args_dev, kwargs)
        extents = trace._launch(dict(zip(executor.arg_names, args, strict=False)) | kwargs)
        return args, kwargs

    def implicit_cvt(arg: Any) -> Any:
        converted = convert(arg)
        if id(arg) in extents:
            pointer_type = converted.handle.dtype
            trace._origins[id(pointer_type)] = (pointer_type, extents[id(arg)])
        return converted

    wrappers = [create_masked_load, create_masked_store, create_atomic_cas, create_atomic_rmw]
    try:
        for wrapper in wrappers:
            setattr(builder, wrapper.__name__, wrapper)
        interpreter.GridExecutor._init_args_hst = init_args_hst
        interpreter._implicit_cvt = implicit_cvt
        yield trace
    finally:
        interpreter._implicit_cvt, interpreter.GridExecutor._init_args_hst = convert, to_host
        for wrapper in wrappers:
            vars(builder).pop(wrapper.__name__, None)
