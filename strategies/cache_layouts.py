"""How the two caches lie in memory: the order of their dims, gaps, and both in one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Self

import numpy as np

from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration
from pagefuzz.strategies.case import Blocks, Name, Padding, Size, WithFloats, first_beyond, require
from pagefuzz.strategies.number_formats import FORMATS, ITEMSIZE
from pagefuzz.strategies.tensors import Buffer, Tensor, row_major

NHD, HND = "NSHD", "NHSD"
PACKED = ("N2SHD", "NSH2D")
ORDERS = (NHD, HND, *PACKED)
WORDS = {"N": "N", "S": "bs", "H": "KVH", "D": "D", "2": "2"}


@dataclass(frozen=True)
class CacheLayout:
    """The memory that a cache [N, bs, KVH, D] is a view of.

    order: its dims from the outermost to the innermost: N blocks, S slots, H kv heads, D dim; 2 where keys and values
    lie in one tensor, so that NSH2D is [N, bs, KVH, 2D]. padding: for each of them, the elements between two entries
    that neither of them has; () for none.
    """

    order: Name = NHD
    padding: tuple[Padding, ...] = ()

    def padding_of(self, dim: str) -> int:
        return self.padding[self.order.index(dim)] if self.padding else 0

    def strides(self, sizes: dict[str, int]) -> dict[str, int]:
        """The stride of each dim in elements, for dims of these sizes."""
        strides, inner = {}, 1
        for place in reversed(range(len(self.order))):
            dim = self.order[place]
            strides[dim] = inner + (self.padding[place] if self.padding else 0)
            inner = strides[dim] * sizes[dim]
        return strides

    def __str__(self) -> str:
        dims = ", ".join(WORDS[dim] for dim in self.order)
        gaps = [f"{gap} after each {WORDS[dim]}" for dim, gap in zip(self.order, self.padding, strict=False) if gap]
        return f"[{dims}]" + (f" with gaps ({', '.join(gaps)})" if gaps else "")


CONTIGUOUS = CacheLayout()
# Layouts that a kernel which does not declare them rejects or gets right; no declaration covers the last one.
LAYOUT_FAULTS = {
    "HND caches": CacheLayout(HND),
    "caches in one tensor": CacheLayout("N2SHD"),
    "caches with gaps between blocks": CacheLayout(NHD, (1, 0, 0, 0)),
    "caches with gaps between kv heads": CacheLayout(NHD, (0, 0, 1, 0)),
    "caches with their last dim strided": CacheLayout(NHD, (0, 0, 0, 1)),
}


@dataclass(frozen=True)
class Cache:
    """One of the two caches: its buffer, where in it the first element lies, and the strides of block, slot, kv head
    and dim, all in elements."""

    name: str
    buffer: str
    offset: int
    strides: tuple[int, int, int, int]

    def elements(self, slots: np.ndarray, block_size: int, heads: int, dims: int) -> np.ndarray:
        """int64[len(slots), heads * dims]: the elements of the buffer where the tokens of the given slots lie."""
        block, slot, head, dim = self.strides
        inside = (np.arange(heads)[:, None] * head + np.arange(dims) * dim).reshape(-1)
        first = self.offset + slots // block_size * block + slots % block_size * slot
        return first[:, None] + inside


@dataclass(frozen=True, kw_only=True)
class WithCaches(WithFloats):
    """A case with k_cache and v_cache [N, bs, KVH, D].

    k_layout, v_layout: how they lie in memory; the same one where they lie in one tensor.
    """

    block_size: Size
    num_blocks: Blocks
    num_kv_heads: Size = 1
    head_dim: Size = 1
    k_layout: CacheLayout = CONTIGUOUS
    v_layout: CacheLayout = CONTIGUOUS

    @property
    def row(self) -> int:
        """Elements of one token in one cache."""
        return self.num_kv_heads * self.head_dim

    @property
    def layouts(self) -> tuple[CacheLayout, CacheLayout]:
        return self.k_layout, self.v_layout

    @property
    def packed(self) -> bool:
        """Whether keys and values lie in one tensor."""
        return "2" in self.k_layout.order

    def cache_kind(self) -> str:
        """What a kernel must declare: contiguous, hnd, packed or strided; "" where the last dim is strided, which no
        declaration covers."""
        if self.head_dim > 1 and any(layout.padding_of("D") for layout in self.layouts):
            return ""
        if any(any(layout.padding) for layout in self.layouts) or self.k_layout != self.v_layout:
            return "strided"
        return {NHD: "contiguous", HND: "hnd"}.get(self.k_layout.order, "packed")

    def check(self) -> None:
        super().check()
        for name, layout in (("k_layout", self.k_layout), ("v_layout", self.v_layout)):
            require(layout.order in ORDERS, f"{name}: order {layout.order!r} is not one of {', '.join(ORDERS)}")
            require(len(layout.padding) in (0, len(layout.order)), f"{name}: padding must name every dim of the order")
        require(
            self.k_layout == self.v_layout or not ("2" in self.k_layout.order or "2" in self.v_layout.order),
            "k_layout and v_layout must be equal where keys and values lie in one tensor",
        )

    def beyond(self, declared: Declaration) -> str:
        said = f"{self.cache_kind() or 'dim-strided'} caches"
        return super().beyond(declared) or first_beyond((self._layouts_declared(declared), said))

    def _layouts_declared(self, declared: Declaration) -> bool:
        kind, layouts = self.cache_kind(), declared.cache_layouts
        return kind in layouts or ("strided" in layouts and kind != "")

    def broken(self, fault: str, declared: Declaration) -> Self:
        if fault not in LAYOUT_FAULTS:
            return super().broken(fault, declared)
        twin = replace(self, k_layout=LAYOUT_FAULTS[fault], v_layout=LAYOUT_FAULTS[fault])
        require(not twin._layouts_declared(declared), f"fault={fault!r} needs a kernel that does not declare these")
        require(not twin._lie_in_order(), f"fault={fault!r} needs more than one of what would move")
        twin.check()
        twin.arguments()
        return twin

    def _lie_in_order(self) -> bool:
        """Whether both caches have the strides of contiguous ones wherever there are two entries to put apart."""
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        places = [zip(shape, cache.strides, row_major(shape), strict=True) for cache in self.caches().values()]
        return all(size == 1 or stride == usual for place in places for size, stride, usual in place)

    def caches(self) -> dict[str, Cache]:
        """Where k_cache and v_cache lie."""
        return _caches(self.k_layout, self.v_layout, self.block_size, self.num_kv_heads, self.head_dim)

    def elements_of(self, slots: Iterable[int]) -> dict[str, tuple[str, np.ndarray]]:
        """By cache, its buffer and the elements where the tokens of these slots lie, as `Case.watched` gives them."""
        named = np.array(list(slots), dtype=np.int64)
        return {
            name: (cache.buffer, cache.elements(named, self.block_size, self.num_kv_heads, self.head_dim))
            for name, cache in self.caches().items()
        }

    def block_elements(self) -> int:
        """Elements from the start of one block to the start of the next, in the cache where they are further apart."""
        return max(cache.strides[0] for cache in self.caches().values())

    def itemsize(self) -> int:
        """Bytes of one element of a cache."""
        return ITEMSIZE[self.dtype]

    def block_period(self) -> int:
        """After how many blocks addresses repeat modulo 64 bytes, in both caches."""
        strides = (cache.strides[0] * self.itemsize() for cache in self.caches().values())
        return math.lcm(*(64 // math.gcd(64, stride) for stride in strides))

    def cache_tensors(
        self, blocks: list[int], contents: Callable[[str, np.ndarray, int], np.ndarray]
    ) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
        """The two caches with `blocks` filled, and by buffer the bits [len(blocks), elements of a block] that fill it,
        gaps and all: what is written there is written to the tensors. contents(buffer, blocks, elements) gives them."""
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        named = np.array(blocks, dtype=np.uint64)
        buffers: dict[str, Buffer] = {}
        tensors, filled = {}, {}
        for name, cache in self.caches().items():
            stride = cache.strides[0]
            if cache.buffer not in buffers:
                bits = filled[cache.buffer] = contents(cache.buffer, named, stride)
                size = self.num_blocks * stride
                buffer = buffers[cache.buffer] = Buffer(cache.buffer, self.dtype, size, is_cache=True)
                buffer.pieces = [(block * stride, row) for block, row in zip(blocks, bits, strict=True)]
            tensors[name] = Tensor(name, buffers[cache.buffer], shape, cache.strides, cache.offset)
        return tensors, filled

    def contiguous(self) -> Self:
        """The same call with every tensor contiguous."""
        return replace(self, k_layout=CONTIGUOUS, v_layout=CONTIGUOUS)

    def cache_words(self, buffer: str, element: int) -> str:
        """An element of a cache's buffer in words: its block, offset, kv head and dim."""
        block = element // self.block_elements()
        for cache in self.caches().values():
            if cache.buffer != buffer:
                continue
            block, inside = divmod(element, cache.strides[0])
            places = {}
            inside -= cache.offset
            sizes = (self.block_size, self.num_kv_heads, self.head_dim)
            for dim in sorted(range(3), key=lambda dim: -cache.strides[dim + 1]):
                places[dim] = min(inside // cache.strides[dim + 1], sizes[dim] - 1)
                inside -= places[dim] * cache.strides[dim + 1]
            if inside == 0 and min(places.values()) >= 0:
                which = f" of {cache.name}" if self.packed else ""
                return f"block {block}, offset {places[0]}, kv head {places[1]}, dim {places[2]}{which}"
        return f"block {block}, in a gap between its rows"

    def words(self) -> Iterator[tuple[str, bool]]:
        yield from super().words()
        mine = self.cache_kind() or "dim-strided"
        for kind in (*CACHE_LAYOUTS, "dim-strided"):
            yield f"caches {kind}", mine == kind
        for form in FORMATS:
            yield form, self.dtype == form
        for recipe in self.value_recipes:
            yield f"values {recipe}", self.values == recipe

    def sizes(self) -> dict[str, tuple[int, ...]]:
        sizes = {"bs": self.block_size, "N": self.num_blocks, "KVH": self.num_kv_heads, "D": self.head_dim}
        return {**super().sizes(), **{letters: (size,) for letters, size in sizes.items()}}

    def layout_lines(self) -> list[str]:
        if self.cache_kind() == "contiguous":
            return []
        if self.packed:
            return [f"k_cache and v_cache are views of one tensor {self.k_layout}"]
        return [f"k_cache is a view of {self.k_layout}, v_cache of {self.v_layout}"]

    def simpler(self) -> Iterator[Self]:
        yield from super().simpler()
        if self.layouts == (CONTIGUOUS, CONTIGUOUS):
            return
        yield replace(self, k_layout=CONTIGUOUS, v_layout=CONTIGUOUS)
        for name, layout in (("k_layout", self.k_layout), ("v_layout", self.v_layout)):
            for reduced in _simpler_layouts(layout):
                changes: dict[str, Any] = {name: reduced}
                if self.packed and "2" not in reduced.order:
                    continue
                yield replace(self, **({"k_layout": reduced, "v_layout": reduced} if self.packed else changes))


def _simpler_layouts(layout: CacheLayout) -> Iterator[CacheLayout]:
    if any(layout.padding):
        yield replace(layout, padding=())
    if "2" not in layout.order and layout.order != NHD:
        yield CacheLayout(NHD, tuple(layout.padding_of(dim) for dim in NHD) if layout.padding else ())
    for place, gap in enumerate(layout.padding):
        for less in {0, 1} - {gap} if gap else ():
            padding = (*layout.padding[:place], less, *layout.padding[place + 1 :])
            yield replace(layout, padding=padding if any(padding) else ())


@lru_cache(maxsize=64)
def _caches(
    k_layout: CacheLayout, v_layout: CacheLayout, block_size: int, num_kv_heads: int, head_dim: int
) -> dict[str, Cache]:
    sizes = {"N": 1, "S": block_size, "H": num_kv_heads, "D": head_dim, "2": 2}
    found = {}
    for name, layout in (("k_cache", k_layout), ("v_cache", v_layout)):
        strides = layout.strides(sizes)
        packed = "2" in layout.order
        offset = strides["2"] if packed and name == "v_cache" else 0
        steps = (strides["N"], strides["S"], strides["H"], strides["D"])
        found[name] = Cache(name, "kv_cache" if packed else name, offset, steps)
    return found


# ---- drawing

_KINDS = ("contiguous", "strided", "contiguous", "hnd", "contiguous", "packed")
# Elements after each block, slot and kv head; the last dim is contiguous unless it has one element only.
_GAPS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 2, 1), (0, 0, 0), (8, 0, 0), (0, 0, 8), (64, 0, 0), (5, 0, 2))


def cache_layouts(chance: Random, declared: Declaration, head_dim: int) -> tuple[CacheLayout, CacheLayout]:
    """Layouts of both caches, inside what the kernel declares."""
    drawn = [kind for kind in _KINDS if kind in declared.cache_layouts or "strided" in declared.cache_layouts]
    return chance.choice(_layouts(head_dim == 1)[chance.choice(drawn)])


@lru_cache(maxsize=2)
def _layouts(single: bool) -> dict[str, list[tuple[CacheLayout, CacheLayout]]]:
    """Pairs of layouts by kind. single: the head dim is 1, so that its stride is nobody's business."""
    gapped = [_gapped(order, gaps, index % 3 * single) for index, gaps in enumerate(_GAPS) for order in (NHD, HND)]
    strided = [(layout, layout) for order in PACKED for layout in (_gapped(order, gaps, int(single)) for gaps in _GAPS)]
    for index, layout in enumerate(gapped):
        strided += [(layout, layout), (layout, gapped[(5 * index + 3) % len(gapped)])]
    return {
        "contiguous": [(CONTIGUOUS, CONTIGUOUS)],
        "hnd": [(CacheLayout(HND), CacheLayout(HND))],
        "packed": [(CacheLayout(order), CacheLayout(order)) for order in PACKED],
        "strided": [pair for pair in strided if pair[0] != pair[1] or any(pair[0].padding)],
    }


def _gapped(order: str, gaps: tuple[int, int, int], last: int) -> CacheLayout:
    named = dict(zip("NSHD", (*gaps, last), strict=True))
    padding = tuple(named.get(dim, 0) for dim in order)
    return CacheLayout(order, padding if any(padding) else ())
