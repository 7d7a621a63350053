"""Cases of reshape_and_cache: what they hold, how they are drawn, what makes one simpler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, Self

import numpy as np
from hypothesis import strategies as st

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies import draws
from pagefuzz.strategies.cache_layouts import LAYOUT_FAULTS, WithCaches, cache_layouts
from pagefuzz.strategies.case import (
    FAR_ELEMENTS,
    MAX_ELEMENTS,
    Arguments,
    Count,
    Int64,
    Limits,
    Name,
    Padding,
    first_beyond,
    fits_pool,
    require,
    smaller,
    with_size,
)
from pagefuzz.strategies.number_formats import FORMATS, ITEMSIZE
from pagefuzz.strategies.tensors import Tensor, contiguous, padded_rows, row_major
from pagefuzz.strategies.values import copied_bits, poison_bits, sentinel_bits

OPERATION = "reshape_and_cache"
INT32_MIN = -(2**31)
MANY = 18  # tokens: more than a tile of 16, where blocks are small


@dataclass(frozen=True, kw_only=True)
class ReshapeAndCacheCase(WithCaches):
    """T tokens to their slots.

    slots: the slot mapping; a negative one is padding. extra_rows: T' - T, rows of key and value that do not count.
    key_padding, value_padding: elements behind each token's key and value. fused: both are views of one buffer, a
    token's key, padding, value and padding in a row, as a fused QKV projection leaves them.
    """

    operation: ClassVar[str] = OPERATION
    value_recipes: ClassVar[tuple[str, ...]] = ("ordinary", "bit_patterns", "signed_zeros")
    faults: ClassVar[tuple[str, ...]] = (
        "key of another dtype than the caches",
        "value with another head dim",
        "slot_mapping longer than key",
        "slot_mapping as floats",
        "slot_mapping two-dimensional",
        "v_cache with another block size",
        "k_cache with fewer heads",
        "key with its last dim strided",
        "key with strided heads",
        "value with its last dim strided",
        "slot_mapping with a stride",
        *LAYOUT_FAULTS,
    )
    value_faults: ClassVar[tuple[str, ...]] = ("slot past the pool", "the same slot twice")

    slots: tuple[Int64, ...] = ()
    extra_rows: Count = 0
    key_padding: Padding = 0
    value_padding: Padding = 0
    fused: bool = False
    index_dtype: Name = "int64"

    @property
    def rows(self) -> int:
        """T', the rows of key and value."""
        return len(self.slots) + self.extra_rows

    @property
    def padded(self) -> tuple[int, ...]:
        """The tokens whose slot is negative."""
        return tuple(t for t, slot in enumerate(self.slots) if slot < 0)

    def check(self) -> None:
        super().check()
        require(self.index_dtype in ("int32", "int64"), f"index_dtype={self.index_dtype!r} is not int32 or int64")
        addressed = [slot for slot in self.slots if slot >= 0]
        total = self.num_blocks * self.block_size
        for t, slot in enumerate(self.slots):
            require(slot < total, f"token {t}: slot {slot} is not in the pool of {total} slots")
            if self.index_dtype == "int32":
                require(INT32_MIN <= slot < 2**31, f"token {t}: slot {slot} does not fit int32")
        require(len(set(addressed)) == len(addressed), "two tokens have the same slot")
        require(len(self.slots) <= 4096, f"{len(self.slots)} tokens are more than a case may hold")
        touched = self.rows * (2 * self.row + self.key_padding + self.value_padding)
        blocks = {cache.buffer: cache.strides[0] for cache in self.caches().values()}
        touched += len(self._filled_blocks()) * sum(blocks.values())
        require(touched <= MAX_ELEMENTS, f"{touched} elements are more than a case may hold")
        if self.fault == "slot past the pool":
            require(bool(self.slots), f"fault={self.fault!r} needs a token")
        if self.fault == "the same slot twice":
            require(bool(addressed) and len(self.slots) >= 2, f"fault={self.fault!r} needs two tokens, one with a slot")

    def beyond(self, declared: Declaration) -> str:
        least = {"any": -(2**63), "minus_one": -1, "never": 0}[declared.negative_slots]
        views = self.fused or self.key_padding or self.value_padding
        return super().beyond(declared) or first_beyond(
            (declared.supports_size("block_sizes", self.block_size), f"block size {self.block_size}"),
            (declared.supports_size("head_dims", self.head_dim), f"head dim {self.head_dim}"),
            (self.index_dtype in declared.index_dtypes, f"{self.index_dtype} slots"),
            (declared.token_strides == "any" or not views, "key and value as views"),
            (fits_pool(declared, self.num_blocks * self.block_size), f"a pool of {self.num_blocks} blocks"),
            (min(self.slots, default=0) >= least, f"slot {min(self.slots, default=0)}"),
        )

    # ---- tensors

    def token_bits(self, role: str) -> np.ndarray:
        """[T', KVH * D] bits of key or value; a padded token holds its sentinel."""
        counters = np.arange(self.rows * self.row, dtype=np.uint64)
        bits = copied_bits(self.values, self.seed, role, counters, self.dtype).reshape(self.rows, self.row)
        for t in self.padded:
            bits[t] = sentinel_bits(t, self.row, self.dtype)
        return bits

    def rows_of_call(self) -> int:
        return len(self.slots)

    def arguments(self) -> Arguments:
        inner, form = (self.num_kv_heads, self.head_dim), self.dtype
        key, value = self.token_bits("key"), self.token_bits("value")
        key_gap = poison_bits(self.poison, form, self.key_padding, self.seed)
        value_gap = poison_bits(self.poison, form, self.value_padding, self.seed)
        if self.fused:
            gap = np.broadcast_to(key_gap, (self.rows, self.key_padding))
            line = np.concatenate([key, gap, value], axis=1)
            first = padded_rows("key", form, line, (line.shape[1],), value_gap)
            first.buffer.name = "qkv"
            stride = (first.strides[0], *row_major(inner))
            keys = Tensor("key", first.buffer, (self.rows, *inner), stride)
            values = Tensor("value", first.buffer, (self.rows, *inner), stride, offset=self.row + self.key_padding)
        else:
            keys = padded_rows("key", form, key, inner, key_gap)
            values = padded_rows("value", form, value, inner, value_gap)
        slots = np.array(self.slots, dtype=self.index_dtype)
        arguments: dict[str, Tensor | int | float] = {
            "key": keys,
            "value": values,
            **self.cache_tensors(self._filled_blocks(), self._previous)[0],
            "slot_mapping": contiguous("slot_mapping", self.index_dtype, slots.shape, slots),
        }
        if self.fault:
            self._break(arguments)
        return Arguments(arguments)

    def _previous(self, buffer: str, blocks: np.ndarray, count: int) -> np.ndarray:
        """[len(blocks), count] bits that lie in blocks before the call."""
        counters = blocks[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
        return copied_bits(self.values, self.seed, buffer, counters, self.dtype)

    def _filled_blocks(self) -> list[int]:
        """The blocks with previous contents: all of a small pool; else the addressed ones, their neighbours, the first
        and the last."""
        if self.num_blocks * self.block_elements() * self.itemsize() <= 8192:
            return list(range(self.num_blocks))
        addressed = {slot // self.block_size for slot in self.slots if slot >= 0}
        near = {block + step for block in addressed for step in (-1, 0, 1)} | {0, self.num_blocks - 1}
        return sorted(block for block in near if 0 <= block < self.num_blocks)

    def _break(self, arguments: dict[str, Tensor | int | float]) -> None:
        """Break the contract as `fault` says."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        key, slots = tensors["key"], tensors["slot_mapping"]
        if self.fault == "key of another dtype than the caches":
            other = "float16" if self.dtype != "float16" else "float32"
            bits = np.zeros((self.rows, self.row), dtype=FORMATS[other].bits)
            arguments["key"] = padded_rows("key", other, bits, (self.num_kv_heads, self.head_dim))
        elif self.fault == "value with another head dim":
            bits = np.zeros((self.rows, self.num_kv_heads * (self.head_dim + 1)), dtype=FORMATS[self.dtype].bits)
            inner = (self.num_kv_heads, self.head_dim + 1)
            arguments["value"] = padded_rows("value", self.dtype, bits, inner)
        elif self.fault == "slot_mapping longer than key":
            longer = np.full(self.rows + 1, -1, dtype=self.index_dtype)
            arguments["slot_mapping"] = contiguous("slot_mapping", self.index_dtype, longer.shape, longer)
        elif self.fault == "slot_mapping as floats":
            draws.recast(slots, "float32")
        elif self.fault == "slot_mapping two-dimensional":
            slots.shape, slots.strides = (len(self.slots), 1), (1, 1)
        elif self.fault == "v_cache with another block size":
            require(self.cache_kind() == "contiguous", f"fault={self.fault!r} needs contiguous caches")
            cache = tensors["v_cache"]
            cache.shape = (self.num_blocks, self.block_size + 1, self.num_kv_heads, self.head_dim)
            cache.strides = row_major(cache.shape)
            cache.buffer.size = math.prod(cache.shape)
        elif self.fault == "k_cache with fewer heads":
            require(self.num_kv_heads > 1, f"fault={self.fault!r} needs two kv heads")
            require(self.cache_kind() == "contiguous", f"fault={self.fault!r} needs contiguous caches")
            cache = tensors["k_cache"]
            cache.shape = (self.num_blocks, self.block_size, self.num_kv_heads - 1, self.head_dim)
            cache.strides = row_major(cache.shape)
        elif self.fault == "key with its last dim strided":
            arguments["key"] = draws.respaced(key, 2)
        elif self.fault == "key with strided heads":
            arguments["key"] = draws.respaced(key, 1)
        elif self.fault == "value with its last dim strided":
            arguments["value"] = draws.respaced(tensors["value"], 2)
        elif self.fault == "slot_mapping with a stride":
            arguments["slot_mapping"] = draws.respaced(slots, 0)
        elif self.fault == "slot past the pool":
            draws.poke(slots, 0, self.num_blocks * self.block_size)
        elif self.fault == "the same slot twice":
            t = next(t for t, slot in enumerate(self.slots) if slot >= 0)
            draws.poke(slots, t - 1 if t else 1, self.slots[t])

    def watched(self) -> dict[str, tuple[str, np.ndarray]]:
        return self.elements_of(slot for slot in self.slots if slot >= 0)

    # ---- words

    def is_far(self) -> bool:
        """Whether some addressed slot lies 2^31 elements or more into its cache."""
        return any(self._far(slot) for slot in self.slots)

    def _far(self, slot: int) -> bool:
        block, place = divmod(slot, self.block_size)
        return slot >= 0 and any(
            block * cache.strides[0] + place * cache.strides[1] >= FAR_ELEMENTS for cache in self.caches().values()
        )

    def words(self) -> Iterator[tuple[str, bool]]:
        yield from super().words()
        yield "T = 0", not self.slots
        yield "T >= 2", len(self.slots) >= 2
        yield "padded slots", bool(self.padded)
        yield "padded slots other than -1", any(slot < -1 for slot in self.slots)
        yield "every slot padded", bool(self.slots) and all(slot < 0 for slot in self.slots)
        yield "T' > T", self.extra_rows > 0
        yield "fused QKV view", self.fused
        yield "key and value strides differ", not self.fused and self.key_padding != self.value_padding
        yield "D >= 64", self.head_dim >= 64
        yield "KVH * D not a power of two", self.row & (self.row - 1) != 0
        yield "block size not a power of two", self.block_size & (self.block_size - 1) != 0
        yield "offset past 2^31", self.is_far()
        yield "int32 index", self.index_dtype == "int32"

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"T": (len(self.slots),), "T'": (self.rows,), **super().sizes()}

    def shapes(self) -> str:
        return (
            f"T={len(self.slots)} T'={self.rows} KVH={self.num_kv_heads} D={self.head_dim} bs={self.block_size} "
            f"N={self.num_blocks} {self.dtype}"
        )

    def lines(self) -> list[str]:
        drawn = [
            *super().lines(),
            f"pool of {self.num_blocks} blocks, {self.block_size} slots each",
            *self.layout_lines(),
        ]
        for t, slot in enumerate(self.slots):
            place = f"block {slot // self.block_size}, offset {slot % self.block_size}" if slot >= 0 else "padding"
            drawn.append(f"token {t}: slot {slot}  ({place})")
        if self.extra_rows:
            drawn.append(f"rows {len(self.slots)} to {self.rows - 1} of key and value do not count")
        return drawn

    # ---- other layouts of the same tokens

    def contiguous(self) -> Self:
        return replace(super().contiguous(), key_padding=0, value_padding=0, fused=False)

    def compact(self) -> Self | None:
        if not self.is_far():
            return None
        blocks = sorted({slot // self.block_size for slot in self.slots if slot >= 0})
        return self._renamed({block: index for index, block in enumerate(blocks)}, len(blocks))

    def _renamed(self, names: dict[int, int], num_blocks: int) -> Self:
        size = self.block_size
        slots = tuple(slot if slot < 0 else names[slot // size] * size + slot % size for slot in self.slots)
        return replace(self, slots=slots, num_blocks=num_blocks)

    def simpler(self) -> Iterator[Self]:
        yield from super().simpler()
        slots, count = self.slots, len(self.slots)
        if self.values == "bit_patterns":
            yield replace(self, values="signed_zeros")
        for t in range(count):
            if count > 1:
                yield replace(self, slots=(slots[t],))
        for t in range(count):
            yield replace(self, slots=slots[:t] + slots[t + 1 :])
        for rows in smaller(self.extra_rows, 0):
            yield replace(self, extra_rows=rows)
        for name in ("num_kv_heads", "head_dim", "block_size"):
            for size in smaller(getattr(self, name)):
                reduced = with_size(self, name, size)
                yield replace(reduced, num_blocks=max(1, -(-(max(slots, default=0) + 1) // reduced.block_size)))
                yield from self._far_again(reduced)
        if self.fused:
            yield replace(self, fused=False)
        for name in ("key_padding", "value_padding"):
            for size in smaller(getattr(self, name), 0):
                yield with_size(self, name, size)
        if self.index_dtype != "int64":
            yield replace(self, index_dtype="int64")
        if any(slot < -1 for slot in slots):
            yield replace(self, slots=tuple(max(slot, -1) for slot in slots))
        if any(slot < -2 for slot in slots):
            yield replace(self, slots=tuple(max(slot, -2) for slot in slots))
        blocks = list(dict.fromkeys(slot // self.block_size for slot in slots if slot >= 0))
        for order in (blocks, sorted(blocks)):
            if order != list(range(len(order))):
                names = {block: index for index, block in enumerate(order)}
                yield self._renamed(names, max(len(order), 1))
                yield self._renamed(names, max(self.num_blocks, 1))
        for place, slot in enumerate(sorted(slot for slot in slots if slot >= 0)):
            if slot > place and place not in slots:
                yield replace(self, slots=tuple(place if each == slot else each for each in slots))
        for pool in (max(blocks, default=0) + 1, max(blocks, default=0) + 2):
            if pool < self.num_blocks:
                yield replace(self, num_blocks=pool)
        yield from self._far_again(self)

    def _far_again(self, reduced: Self) -> Iterator[Self]:
        """`reduced`, a case with smaller tokens or blocks, with the far slots of this one at the first places whose
        offset passes 2^31 elements."""
        if not self.is_far():
            return
        block = -(-FAR_ELEMENTS // reduced.block_elements())
        far = sorted(slot for slot in self.slots if self._far(slot))
        names = {slot: block * reduced.block_size + place for place, slot in enumerate(far)}
        last = -(-len(far) // reduced.block_size)
        slots = tuple(names.get(slot, slot) for slot in self.slots)
        found = replace(reduced, slots=slots, num_blocks=block + last, index_dtype="int64")
        if found != self:
            yield found


def cases(
    declared: Declaration, limits: Limits, relations: tuple[str, ...] = (), shapes: tuple[int, ...] = ()
) -> st.SearchStrategy[ReshapeAndCacheCase]:
    """Cases inside what the kernel declares. `relations`: the ids of the invariants that a case may pay for. `shapes`:
    seeds; with them every case has the shape that one of them gives (draws.shape_of)."""
    strided = declared.token_strides == "any"
    head_dims = draws.sizes(declared, "head_dims", draws.HEAD_DIMS)
    block_sizes = draws.sizes(declared, "block_sizes", draws.BLOCK_SIZES)
    counts = st.sampled_from((2,) * 5 + (1, 3) * 4 + (4, 5, 6) * 2 + (0, MANY))
    pools = draws.one_of_each((1, 0, 2, 5), draws.ONE_IN_6, (FAR_ELEMENTS, 2 * FAR_ELEMENTS, FAR_ELEMENTS))
    negatives = draws.one_of_each(
        ("nowhere", "first", "last", "any", "nowhere", "any", "everywhere", "last"),
        ("-1",) if declared.negative_slots == "minus_one" else ("-1", "-1", "-2", "a block", "garbage", "least"),
    )
    contents = draws.one_of_each(draws.POISON_ORDER, (0, 0, 0, 1, 3))

    @st.composite
    def drawn(draw: st.DrawFn) -> ReshapeAndCacheCase:
        seed = draw(draws.SEEDS)
        chance = Random(seed)
        shape = draws.shape_of(draw, chance, shapes)
        dtype, index_dtype = shape.choice(declared.dtypes), shape.choice(declared.index_dtypes)
        head_dim, block_size = shape.choice(head_dims), shape.choice(block_sizes)
        num_kv_heads, fused = shape.choice((1, 2, 1, 2, 3, 4, 5, 8)), shape.choice((False, True))
        k_layout, v_layout = cache_layouts(shape, declared, head_dim)
        gaps = ("none", "one", "none", "a head", "three rows", "two")
        paddings = shape.choice(gaps), shape.choice(gaps)
        num_kv_heads = draws.fewer_heads(num_kv_heads, 2 * block_size * head_dim)
        count = min(draw(counts), max(1, MAX_ELEMENTS // (8 * block_size * num_kv_heads * head_dim) - 1))
        if chance.random() < draws.LARGE_SHARE and num_kv_heads * head_dim * block_size <= 512:
            count = chance.choice((33, 64, 130))
        spare, far, distance = draw(pools)
        case = ReshapeAndCacheCase(
            block_size=block_size,
            num_blocks=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            k_layout=k_layout,
            v_layout=v_layout,
        )
        block = case.block_elements()
        if count == MANY and block > 4096:
            count = 6
        num_blocks = pages = max(-(-count // block_size) + spare, 1)
        slots = chance.sample(range(pages * block_size), count)
        if far:
            jump = distance // block + 1
            most = limits.cache_bytes // (block * ITEMSIZE[dtype])
            if index_dtype == "int32":
                most = min(most, 2**31 // block_size)
            if declared.most_slots is not None:
                most = min(most, declared.most_slots // block_size)
            if jump * block >= 2 * FAR_ELEMENTS and jump + pages > most:
                jump = FAR_ELEMENTS // block + 1
            if jump + pages <= most:
                slots = [slot + jump * block_size if t % 3 != 2 else slot for t, slot in enumerate(slots)]
                num_blocks = jump + pages
        if declared.negative_slots != "never" and count:
            where, name = draw(negatives)
            negative = {"-1": -1, "-2": -2, "a block": -block_size - 1, "garbage": -99999, "least": INT32_MIN}[name]
            chosen = {
                "nowhere": [],
                "first": [0],
                "last": [count - 1],
                "everywhere": range(count),
                "any": chance.sample(range(count), chance.randint(1, count)),
            }[where]
            slots = [negative if t in chosen else slot for t, slot in enumerate(slots)]
        widths = {"none": 0, "one": 1, "two": 2, "a head": head_dim, "three rows": 3 * case.row}
        key_padding, value_padding = (widths[name] for name in paddings)
        poison, extra_rows = draw(contents)
        return replace(
            case,
            num_blocks=num_blocks,
            slots=tuple(slots),
            extra_rows=extra_rows,
            key_padding=key_padding if strided else 0,
            value_padding=value_padding if strided else 0,
            fused=fused and strided,
            index_dtype=index_dtype,
            dtype=dtype,
            values=chance.choice(("ordinary", "bit_patterns", "ordinary", "signed_zeros")),
            poison=poison,
            fresh=chance.choice(draws.FRESH_ORDER),
            seed=seed,
            relations=draws.some_of(draw, chance, relations),
            order=chance.choice(draws.ORDERS),
        )

    return drawn()
