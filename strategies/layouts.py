"""Paged layouts: how sequences lie in pages, shared by every operation that reads a block table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Self

import numpy as np
from hypothesis import strategies as st

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies import draws
from pagefuzz.strategies.case import (
    FAR_ELEMENTS,
    MAX_ELEMENTS,
    Blocks,
    Case,
    Limits,
    Name,
    Padding,
    Sequence,
    Size,
    first_beyond,
    fits_pool,
    require,
    smaller,
)
from pagefuzz.strategies.number_formats import STORAGE
from pagefuzz.strategies.tensors import Tensor, padded_rows

INT32_MAX = 2**31 - 1
GARBAGE = 99999
PAGE = 4096  # bytes of a memory page


def pages_of(tokens: int, block_size: int) -> int:
    """ceil(tokens / block_size)"""
    return -(-tokens // block_size)


@dataclass(frozen=True, kw_only=True)
class Paged(Case):
    """A case with a block table.

    sequences: the rows, all of one width. num_blocks: of the pool. table_padding: elements between the end of a row of
    the table and the start of the next. index_dtype: of the table.
    """

    block_size: Size
    num_blocks: Blocks
    sequences: tuple[Sequence, ...] = ()
    table_padding: Padding = 0
    index_dtype: Name = "int64"

    @property
    def width(self) -> int:
        """M, the number of columns of the block table."""
        return len(self.sequences[0].blocks) + len(self.sequences[0].tail) if self.sequences else 1

    @property
    def owned(self) -> dict[int, int]:
        """Each owned block and how many of its slots some sequence owns."""
        filled: dict[int, int] = {}
        for sequence in self.sequences:
            for page, block in enumerate(sequence.blocks):
                slots = min(self.block_size, sequence.context_len - page * self.block_size)
                filled[block] = max(filled.get(block, 0), slots)
        return filled

    def block_elements(self) -> int:
        """Elements of one block in one cache (1 for an operation without a cache)."""
        return 1

    def itemsize(self) -> int:
        """Bytes of one element of a cache (64 for an operation without a cache: as if each had a line of its own)."""
        return 64

    def block_period(self) -> int:
        """After how many blocks addresses repeat modulo 64 bytes (1 for an operation without a cache)."""
        return 1

    def check(self) -> None:
        super().check()
        require(self.index_dtype in ("int32", "int64"), f"index_dtype={self.index_dtype!r} is not int32 or int64")
        place: dict[int, int] = {}
        for b, sequence in enumerate(self.sequences):
            pages = pages_of(sequence.context_len, self.block_size)
            require(
                len(sequence.blocks) == pages,
                f"sequence {b} has {len(sequence.blocks)} blocks; its context_len {sequence.context_len} needs {pages}",
            )
            require(
                len(sequence.blocks) + len(sequence.tail) == self.width,
                f"row {b} of the block table is not {self.width} wide like row 0",
            )
            for page, block in enumerate(sequence.blocks):
                require(
                    0 <= block < self.num_blocks,
                    f"sequence {b}, page {page}: block {block} is not in the pool of {self.num_blocks}",
                )
                require(
                    place.setdefault(block, page) == page and block not in sequence.blocks[:page],
                    f"block {block} is used as page {page} by sequence {b} and as another page elsewhere",
                )
            if self.index_dtype == "int32":
                for block in (*sequence.blocks, *sequence.tail):
                    require(-INT32_MAX - 1 <= block <= INT32_MAX, f"id {block} in row {b} does not fit int32")
        entries = len(self.sequences) * (self.width + self.table_padding)
        require(entries <= MAX_ELEMENTS, f"a block table of {entries} entries is more than a case may hold")

    def beyond(self, declared: Declaration) -> str:
        return super().beyond(declared) or first_beyond(
            (declared.supports_size("block_sizes", self.block_size), f"block size {self.block_size}"),
            (self.index_dtype in declared.index_dtypes, f"{self.index_dtype} block tables"),
            (declared.table_strides == "any" or not self.table_padding, "a block table narrower than its row stride"),
            (fits_pool(declared, self.num_blocks * self.block_size), f"a pool of {self.num_blocks} blocks"),
        )

    def block_table(self) -> Tensor:
        """block_tables[B, M], its rows `table_padding` entries apart, with garbage in the gaps."""
        rows = np.array([(*row.blocks, *row.tail) for row in self.sequences], dtype=np.int64)
        rows = rows.reshape(len(self.sequences), self.width).astype(STORAGE[self.index_dtype])
        fill = np.full(self.table_padding, GARBAGE, dtype=rows.dtype)
        return padded_rows("block_tables", self.index_dtype, rows, (self.width,), fill)

    def words(self) -> Iterator[tuple[str, bool]]:
        yield from super().words()
        rows, size = self.sequences, self.block_size
        yield "B = 0", not rows
        yield "B >= 2", len(rows) >= 2
        yield "3 pages or more", any(len(row.blocks) >= 3 for row in rows)
        yield "partial last page", any(row.context_len % size for row in rows)
        yield "full last page", any(row.context_len and row.context_len % size == 0 for row in rows)
        yield "context length 0", any(row.context_len == 0 for row in rows)
        yield "garbage tail", any(row.tail for row in rows)
        yield "no tail", any(row.blocks and not row.tail for row in rows)
        yield "shared pages", sum(len(row.blocks) for row in rows) > len(self.owned)
        yield "offset past 2^31", self.is_far()
        yield "block size not a power of two", size & (size - 1) != 0
        yield "narrowed block table", self.table_padding > 0
        yield "int32 index", self.index_dtype == "int32"

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {
            **super().sizes(),
            "B": (len(self.sequences),),
            "M": (self.width,),
            "n": tuple(row.context_len for row in self.sequences),
            "bs": (self.block_size,),
            "N": (self.num_blocks,),
        }

    def is_far(self) -> bool:
        """Whether some owned element lies 2^31 elements or more into its cache."""
        return max(self.owned, default=0) * self.block_elements() >= FAR_ELEMENTS

    # ---- other layouts of the same tokens

    def renamed(self, names: dict[int, int], num_blocks: int) -> Self:
        """The same tokens in other physical blocks. Ids in tails that `names` lacks stay as they are."""
        rows = tuple(
            replace(
                row,
                blocks=tuple(names[block] for block in row.blocks),
                tail=tuple(names.get(block, block) for block in row.tail),
            )
            for row in self.sequences
        )
        return replace(self, sequences=rows, num_blocks=num_blocks)

    def in_pool(self) -> list[int]:
        """The ids inside the pool that the table names, owned or in a tail, ascending."""
        tails = {block for row in self.sequences for block in row.tail if 0 <= block < self.num_blocks}
        return sorted(tails | set(self.owned))

    def elsewhere(self, ids: list[int], free: int = 0) -> Self:
        """The same tokens in a compact pool with `free` more blocks, the blocks `ids` in this order.

        A block keeps its address modulo 64 bytes: how rows happen to be aligned may choose the order of a kernel's
        sums, and with it the last bit; alignment is drawn by views, never by accident.
        """
        period = self.block_period()
        names = {block: index * period + block % period for index, block in enumerate(ids)}
        return self.renamed(names, max(names.values(), default=0) + 1 + free)

    def compact(self) -> Self | None:
        return self.elsewhere(self.in_pool()) if self.is_far() else None

    def with_harmless_tails(self) -> Self | None:
        """Every tail entry names a block that the row owns, or block 0."""
        if not any(row.tail for row in self.sequences):
            return None
        return replace(
            self,
            sequences=tuple(
                replace(row, tail=(row.blocks[0] if row.blocks else 0,) * len(row.tail)) for row in self.sequences
            ),
        )

    def fitted(self, rows: Iterable[Sequence], width: int | None = None) -> Self:
        """The same case with other rows, their tails cut or drawn out so that all are `width` wide (default: as wide
        as the longest row needs)."""
        kept = list(rows)
        least = max((len(row.blocks) for row in kept), default=0)
        width = max(width or 0, least)
        if width == 0 and kept:
            width = 1  # a table without columns holds nothing to look at
        return replace(
            self,
            sequences=tuple(
                replace(row, tail=(row.tail + (row.tail[-1:] or (GARBAGE,)) * width)[: width - len(row.blocks)])
                for row in kept
            ),
        )

    def simpler(self) -> Iterator[Self]:
        yield from super().simpler()
        rows = self.sequences
        count, size = len(rows), self.block_size
        if count > 1:
            for row in rows:
                yield self.fitted([row])
                yield self.fitted([row], self.width)
            for b in range(count):
                yield self.fitted(rows[:b] + rows[b + 1 :])
                yield self.fitted(rows[:b] + rows[b + 1 :], self.width)
        for b, row in enumerate(rows):
            n = row.context_len
            for fewer in sorted({0, 1, 2, size, size + 1, n // 2, n - size, n - 1}):
                if 0 <= fewer < n:
                    cut = replace(row, context_len=fewer, blocks=row.blocks[: pages_of(fewer, size)])
                    changed = (*rows[:b], cut, *rows[b + 1 :])
                    yield self.fitted(changed)
                    yield from self.far_again(self.fitted(changed))
                    end = replace(cut, blocks=row.blocks[len(row.blocks) - len(cut.blocks) :])
                    if end != cut:
                        yield self.fitted((*rows[:b], end, *rows[b + 1 :]))
                    if self.width > max(len(each.blocks) for each in changed):
                        yield self.fitted(changed, max(len(each.blocks) for each in changed) + 1)
        least = max((len(row.blocks) for row in rows), default=0)
        for width in (least, least + 1):
            if 0 < width < self.width:
                yield self.fitted(rows, width)
        for garbage in (GARBAGE, 0):
            tails = [replace(row, tail=(garbage,) * len(row.tail)) for row in rows]
            if tuple(tails) != rows and not all(set(row.tail) <= {GARBAGE} for row in rows):
                yield self.fitted(tails, self.width)
        for fewer_slots in smaller(size):
            yield self.repaged(fewer_slots)
            yield self.same_pages(fewer_slots)
            yield from self.far_again(self.same_pages(fewer_slots))
            yield from self.roomy(self.repaged(fewer_slots))
            yield from self.far_again(self.repaged(fewer_slots))
        if self.table_padding:
            yield replace(self, table_padding=0)
            if self.table_padding > 1:
                yield replace(self, table_padding=1)
        if self.index_dtype != "int64":
            yield replace(self, index_dtype="int64")
        ids = self.in_pool()
        if (ids and ids[-1] >= len(ids)) or self.num_blocks > max(len(ids), 1):
            yield self.renamed({block: index for index, block in enumerate(ids)}, max(len(ids), 1))
        order = list(dict.fromkeys(block for row in rows for block in row.blocks))
        order += [block for block in ids if block not in order]
        if order != list(range(len(order))):
            names = {block: index for index, block in enumerate(order)}
            yield self.renamed(names, max(len(order), 1))
            if self.num_blocks > len(order):
                yield self.renamed(names, self.num_blocks)
        last = max(self.owned, default=0)
        pools = {
            last + 1,
            last + 2,
            max(ids, default=0) + 1,
            self.num_blocks // 2,
            PAGE // (self.block_elements() * self.itemsize()) * 4,
        }
        yield from self.far_again(self)
        for num_blocks in sorted(pools):
            if last < num_blocks < self.num_blocks:
                yield replace(self, num_blocks=num_blocks)

    def far_again(self, reduced: Self) -> Iterator[Self]:
        """`reduced`, a case with smaller blocks, with its last owned block where offsets pass 2^31 elements, if this
        case is far."""
        if not self.is_far() or not reduced.owned:
            return
        ids, far = reduced.in_pool(), -(-FAR_ELEMENTS // reduced.block_elements())
        names = {block: index for index, block in enumerate(ids)}
        names[max(reduced.owned)] = far
        found = replace(reduced.renamed(names, far + 1), index_dtype="int64")
        if found != self:
            yield found

    def roomy(self, reduced: Self) -> Iterator[Self]:
        """`reduced`, a case with smaller blocks, in a pool of as many bytes, if that is more than a memory page: reads
        of untouched memory only show there."""
        before, after = (case.block_elements() * case.itemsize() for case in (self, reduced))
        if self.num_blocks * before > PAGE and after < before:
            num_blocks = max(self.num_blocks * before // after, reduced.num_blocks)
            rows = [
                replace(
                    row,
                    tail=tuple(
                        entry * before // after if 0 <= entry < self.num_blocks and entry not in self.owned else entry
                        for entry in row.tail
                    ),
                )
                for row in self.sequences
            ]
            tails = [row.tail for row in rows]
            yield replace(
                reduced,
                num_blocks=num_blocks,
                sequences=tuple(
                    replace(row, tail=(tail + row.tail)[: len(row.tail)])
                    for row, tail in zip(reduced.sequences, tails, strict=True)
                ),
            )

    def repaged(self, block_size: int) -> Self:
        """The same tokens under another block size: owned pages get ids in order, sharing is given up."""
        rows, next_id = [], 0
        for row in self.sequences:
            pages = pages_of(row.context_len, block_size)
            rows.append(replace(row, blocks=tuple(range(next_id, next_id + pages))))
            next_id += pages
        excess = min((len(row.tail) for row in self.sequences), default=0)
        width = max((len(row.blocks) for row in rows), default=0) + min(excess, 1)
        return replace(self, block_size=block_size, num_blocks=max(next_id, 1)).fitted(rows, width)

    def same_pages(self, block_size: int) -> Self:
        """Fewer tokens in the same blocks, each with fewer slots: where the blocks lie stays as it is."""
        lengths = [self._place(max(row.context_len - 1, 0), block_size) + 1 for row in self.sequences]
        rows = [
            replace(row, context_len=length if row.context_len else 0)
            for row, length in zip(self.sequences, lengths, strict=True)
        ]
        return replace(self, block_size=block_size).fitted(rows, self.width)

    def _place(self, position: int, block_size: int) -> int:
        """A position in the same page under a smaller block size."""
        page, offset = divmod(position, self.block_size)
        return page * block_size + min(offset, block_size - 1)

    def lines(self) -> list[str]:
        drawn = [*super().lines(), f"pool of {self.num_blocks} blocks, {self.block_size} slots each"]
        for b, row in enumerate(self.sequences):
            pages = []
            for page, block in enumerate(row.blocks):
                slots = min(self.block_size, row.context_len - page * self.block_size)
                if self.block_size <= 16:
                    pages.append(f"block {block} [{'#' * slots}{'.' * (self.block_size - slots)}]")
                else:
                    pages.append(f"block {block} [{slots} of {self.block_size}]")
            tail = f"  tail {', '.join(str(entry) for entry in row.tail)}" if row.tail else ""
            drawn.append(f"sequence {b}: {row.context_len} tokens  {'  '.join(pages) or 'no page'}{tail}")
        return drawn


# ---- drawing

TAILS = ("garbage", "minus_one", "live", "past_pool", "free", "int32_max", "distant")

_LENGTHS = ("any", "one less", "any", "one more", "multiple", "any", "one", "zero")
_PAGES = (3, 2, 1, 4, 3, 5, 2, 7)
# As many with one kind as with two.
_TAIL_KINDS = st.sampled_from(tuple((kind,) for kind in TAILS) * len(TAILS) + tuple(product(TAILS, repeat=2)))
_POOLS = draws.one_of_each((2, 1, 0, 4), (False, True, False, False))
_PLACES = draws.one_of_each(draws.ONE_IN_6, (FAR_ELEMENTS, 2 * FAR_ELEMENTS, FAR_ELEMENTS), (1, 0, 2, 1, 4))


def context_length(chance: Random, block_size: int, most: int, empty: bool) -> int:
    """A context length up to `most`: 0, 1, exact multiples, one off a multiple, several pages."""
    kind, pages = chance.choice(_LENGTHS), chance.choice(_PAGES)
    if kind == "zero":
        return 0 if empty else 1
    if kind == "one":
        return 1
    if kind == "multiple":
        tokens = pages * block_size
    elif kind == "one less":
        tokens = pages * block_size - 1
    elif kind == "one more":
        tokens = (pages - 1) * block_size + 1
    else:
        tokens = (pages - 1) * block_size + chance.randint(1, block_size)
    if tokens > most:  # keep what made it special: the distance from a multiple of the block size
        tokens = max(1, tokens - pages_of(tokens - most, block_size) * block_size)
    return max(1, min(tokens, most))


def sequences(
    draw: st.DrawFn,
    chance: Random,
    lengths: list[int],
    block_size: int,
    block_elements: int,
    itemsize: int,
    limits: Limits,
    int32: bool,
    most_slots: int | None = None,
) -> tuple[tuple[Sequence, ...], int]:
    """Rows of a block table for the given context lengths, and the number of blocks of their pool.

    Physical blocks are shuffled; a few are free; a prefix may be shared; some blocks may lie where their element offset
    passes 2^31 (or 2^32); every tail kind of I2 is drawn as far as its address stays inside the arena.
    """
    counts = [pages_of(length, block_size) for length in lengths]
    free, sharing = draw(_POOLS)
    far, distance, excess = draw(_PLACES)
    shared = _shared_prefix(lengths, block_size) if sharing else [0] * len(lengths)
    needed = sum(counts) - sum(shared)
    ids = list(range(needed + free))
    chance.shuffle(ids)
    block_bytes = block_elements * itemsize
    most_ids = min(limits.cache_bytes // block_bytes, INT32_MAX if int32 else 2**40)
    most_blocks = most_ids if most_slots is None else min(most_ids, most_slots // block_size)
    pool = max(needed + free, 1)
    # One free block with nothing filled around it: a read of it shows, even by a kernel whose accesses go untraced.
    distant = pool + 2 * (8192 // block_bytes + 1)
    if far:
        jump = distance // block_elements
        while jump + pool >= most_blocks and jump * block_elements > FAR_ELEMENTS:
            jump //= 2
        if jump * block_elements >= FAR_ELEMENTS and jump + pool < most_blocks:
            ids = [block + jump * (1 - (index % 3 == 2)) for index, block in enumerate(ids)]
            pool += jump
    tail_kinds = draw(_TAIL_KINDS) if lengths else ("garbage",)
    behind = distant + 8192 // block_bytes + 2
    if "distant" in tail_kinds and behind <= most_blocks:
        pool = max(pool, behind)
    owned, spare = ids[:needed], ids[needed:]
    takes = iter(owned)
    blocks: list[tuple[int, ...]] = []
    for b, count in enumerate(counts):
        prefix = blocks[0][: shared[b]] if b else ()
        blocks.append(prefix + tuple(next(takes) for _ in range(count - len(prefix))))
    width = max(counts, default=0) + excess
    rows = []
    for b, length in enumerate(lengths):
        tail = []
        for column in range(max(width, 1) - counts[b]):
            kind = tail_kinds[(b + column) % len(tail_kinds)]
            options = {
                "garbage": GARBAGE,
                "minus_one": -1,
                "live": owned[(b + column + 1) % len(owned)] if owned else 0,
                "past_pool": pool,
                "free": spare[(b + column) % len(spare)] if spare else 0,
                "int32_max": INT32_MAX,
                "distant": distant if distant < pool else GARBAGE,
            }
            entry = options[kind]
            tail.append(entry if entry < most_ids else pool if pool < most_ids else -1)
        rows.append(Sequence(blocks[b], tuple(tail), length))
    return tuple(rows), pool


def _shared_prefix(lengths: list[int], block_size: int) -> list[int]:
    """How many leading pages each sequence may share with sequence 0: full pages of both."""
    full = lengths[0] // block_size if lengths else 0
    return [0] + [min(full, length // block_size, 1 + b % 2) for b, length in enumerate(lengths[1:])]
