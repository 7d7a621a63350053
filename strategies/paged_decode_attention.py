"""Cases of paged_decode_attention: what they hold, how they are drawn, what makes one simpler."""

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
    MAX_ELEMENTS,
    MAX_PRODUCTS,
    Arguments,
    Count,
    InvalidCase,
    Limits,
    Name,
    Padding,
    Size,
    first_beyond,
    require,
    smaller,
    with_size,
)
from pagefuzz.strategies.layouts import PAGE, Paged, context_length, sequences
from pagefuzz.strategies.number_formats import FORMATS, ITEMSIZE, encode
from pagefuzz.strategies.tensors import Tensor, contiguous, padded_rows, row_major
from pagefuzz.strategies.values import FRESH, MODEST_POISONS, POISONS, counter_hash, dyadic, grid, poison_bits

OPERATION = "paged_decode_attention"
TOKEN_VALUES = 100_000  # tokens times query heads times dims, of one sequence
POSITIONS = 1 << 20  # token id = sequence * POSITIONS + position

DRAWN_VALUES = (
    *("ordinary", "large_logits", "ordinary", "shifted_rows", "large_values", "ascending_rows", "low_scores"),
)
# Some cases are large along one axis, and small otherwise: what kernels do in tiles of 64 shows in no small case.
LARGE = ("tokens", "sequences", "kv heads", "group", "head dim")
SCALES = (0.0, 1.0, 0.0, 0.5, 0.125)  # 0 stands for 1 / sqrt(D)
# Drawn by no strategy: the special values of I3 and I5, and those of the relations whose runs may add in other orders.
PROBES = ("rows_modulo", "rows_quotient", "heads_by_value", "heads_by_key")
NEEDLES = "needles"
GAP = 200.0  # between the scores of needles and of all else: exp(-200) is 0 in float32


@dataclass(frozen=True, kw_only=True)
class PagedDecodeAttentionCase(WithCaches, Paged):
    """One query a sequence over its pages.

    num_kv_heads, group_size, head_dim: KVH, H / KVH, D. scale: on the scores. q_padding: elements between the end of a
    row [H, D] of q and the start of the next. length_dtype: of context_lens. tokens_of, queries_of: the sequence whose
    tokens lie in each page of each row, and whose query each row has; () for the usual, a block's first owner and the
    row itself. Only relations use them: they move rows about and keep what is in them.
    """

    operation: ClassVar[str] = OPERATION
    value_recipes: ClassVar[tuple[str, ...]] = (*dict.fromkeys(DRAWN_VALUES), *PROBES, NEEDLES)
    faults: ClassVar[tuple[str, ...]] = (
        "q of another dtype than the caches",
        "q without its head dim",
        "query heads not a multiple of kv heads",
        "head dim of q and of the caches differ",
        "v_cache with another block size",
        "context_lens one short",
        "block_tables as floats",
        "block_tables one row short",
        "context_lens as floats",
        "q with its last dim strided",
        "q with strided heads",
        "context_lens with a stride",
        "block_tables with strided columns",
        *LAYOUT_FAULTS,
    )
    value_faults: ClassVar[tuple[str, ...]] = (
        "context length past the table",
        "negative context length",
        "owned block past the pool",
        "owned block negative",
    )

    index_fields: ClassVar[tuple[str, ...]] = ("index_dtype", "length_dtype")

    group_size: Size = 1
    scale: float = 1.0
    q_padding: Padding = 0
    length_dtype: Name = "int64"
    tokens_of: tuple[tuple[Count, ...], ...] = ()
    queries_of: tuple[Count, ...] = ()

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def context_lens(self) -> tuple[int, ...]:
        return tuple(row.context_len for row in self.sequences)

    def check(self) -> None:
        super().check()
        require(self.length_dtype in ("int32", "int64"), f"length_dtype={self.length_dtype!r} is not int32 or int64")
        require(math.isfinite(self.scale) and abs(self.scale) <= 1e4, f"scale={self.scale!r} is not a number up to 1e4")
        touched = (len(self.in_pool()) + 3) * self.block_elements() + sum(self.context_lens) * self.num_heads
        rows = len(self.sequences) * (self.num_heads * self.head_dim + self.q_padding)
        require(touched + rows <= MAX_ELEMENTS, f"{touched + rows} elements are more than a case may hold")
        products = sum(self.context_lens) * self.num_heads * self.head_dim
        require(products <= MAX_PRODUCTS, f"{products} products are more than a case may hold")
        programs = len(self.sequences) * self.num_heads
        require(programs <= 4096, f"{programs} rows of heads are more than a case may hold")
        require(
            [len(pages) for pages in self.tokens_of] in ([], [len(row.blocks) for row in self.sequences]),
            "tokens_of does not name the pages of each sequence",
        )
        require(len(self.queries_of) in (0, len(self.sequences)), "queries_of does not name each row")
        labelled: dict[int, int] = {}
        for row, labels in zip(self.sequences, self.tokens_of, strict=False):
            for block, label in zip(row.blocks, labels, strict=True):
                require(
                    labelled.setdefault(block, label) == label,
                    f"tokens_of gives block {block} the tokens of sequences {labelled[block]} and {label}",
                )
        require(self.values != NEEDLES or self.has_needles(), f"values={NEEDLES!r} is not exact for this case")
        if self.fault in self.value_faults:
            require(any(self.context_lens), f"fault={self.fault!r} needs a sequence with a token")

    def beyond(self, declared: Declaration) -> str:
        tails = any(n % self.block_size for n in self.context_lens)
        return super().beyond(declared) or first_beyond(
            (declared.supports_size("head_dims", self.head_dim), f"head dim {self.head_dim}"),
            (declared.supports_size("group_sizes", self.group_size), f"group size {self.group_size}"),
            (self.length_dtype in declared.index_dtypes, f"{self.length_dtype} context_lens"),
            (declared.token_strides == "any" or not self.q_padding, "q as a view"),
            (declared.empty != "never" or all(self.context_lens), "a context length of 0"),
            (_fits(self.values, declared), "scores beyond float16"),
            (declared.unowned == "any" or self.poison in MODEST_POISONS or not tails, f"{self.poison} in a last page"),
        )

    # ---- values

    def token_ids(self, b: int) -> np.ndarray:
        """int64[n]: one number for each token that sequence b sees; a shared page's tokens are its first owner's."""
        position = np.arange(self.sequences[b].context_len)
        owner = np.array(self.page_labels()[b], dtype=np.int64)
        return owner[position // self.block_size] * POSITIONS + position

    def page_labels(self) -> tuple[tuple[int, ...], ...]:
        """For each row and page, the sequence whose tokens lie there."""
        if self.tokens_of:
            return self.tokens_of
        owners: dict[int, int] = {}
        return tuple(
            tuple([owners.setdefault(block, b) for block in row.blocks]) for b, row in enumerate(self.sequences)
        )

    def key_values(self, tokens: np.ndarray) -> np.ndarray:
        """float64[len(tokens), KVH, D]: the keys of the given token ids."""
        if self.values in ("rows_modulo", "rows_quotient", "heads_by_value"):
            return np.zeros((len(tokens), self.num_kv_heads, self.head_dim))
        if self.values == "heads_by_key":
            keys = np.zeros((len(tokens), self.num_kv_heads, self.head_dim))
            keys[:, :, 0] = (tokens % POSITIONS)[:, None] == np.arange(self.num_kv_heads)[None, :] % self.key_places()
            return keys * self.key_strength()
        if self.values == NEEDLES:
            keys = np.zeros((len(tokens), self.num_kv_heads, self.head_dim))
            keys[:, :, 0] = np.where(self._is_needle(tokens), 0.0, self._needle_strength())
            return keys
        keys = 2 * dyadic(self.seed, "k", grid(tokens, self.num_kv_heads, self.head_dim), self.dtype)
        if self.values == "shifted_rows":  # every score moves by the same large amount
            keys[:, :, 0] = 24
        if self.values == "low_scores":  # all of them lie below what stands in for -inf in some kernels, as -5e4
            keys[:, :, 0] = -1024
        if self.values == "ascending_rows":  # the running maximum moves at every page
            keys[:, :, 0] = np.minimum((tokens % POSITIONS) // 2, 30)[:, None]
        return keys

    def value_values(self, tokens: np.ndarray) -> np.ndarray:
        """float64[len(tokens), KVH, D]: the values of the given token ids."""
        position, shape = tokens % POSITIONS, (len(tokens), self.num_kv_heads, self.head_dim)
        if self.values in ("rows_modulo", "rows_quotient"):
            if self.head_dim == 1:  # one-hot rows would all be alike: the row's number instead
                return np.broadcast_to((position % 63 + 1)[:, None, None], shape).astype(np.float64)
            hot = position % self.head_dim if self.values == "rows_modulo" else position // self.head_dim
            return np.broadcast_to((hot[:, None] == np.arange(self.head_dim))[:, None, :], shape).astype(np.float64)
        if self.values == "heads_by_value":
            return np.broadcast_to(np.arange(1.0, self.num_kv_heads + 1)[None, :, None], shape).astype(np.float64)
        if self.values == "heads_by_key":  # no further than bfloat16 counts: keys point at the first positions only
            return np.broadcast_to((np.minimum(position, 254) + 1.0)[:, None, None], shape).astype(np.float64)
        if self.values == NEEDLES:  # small positive integers, which every dtype holds
            return 1.0 + (counter_hash(self.seed, "v", grid(tokens, *shape[1:])) % np.uint64(99)).astype(np.float64)
        values = 2 * dyadic(self.seed, "v", grid(tokens, self.num_kv_heads, self.head_dim), self.dtype)
        return values * 512 if self.values == "large_values" else values

    def query_values(self) -> np.ndarray:
        """float64[B, H, D]"""
        shape = (len(self.sequences), self.num_heads, self.head_dim)
        if self.values in ("rows_modulo", "rows_quotient", "heads_by_value"):
            return np.zeros(shape)
        if self.values == "heads_by_key":
            queries = np.zeros(shape)
            queries[:, :, 0] = 1
            return queries
        if self.values == NEEDLES:
            queries = np.zeros(shape)
            queries[:, :, 0] = math.copysign(32.0, -self.scale)
            return queries
        rows = np.array(self.queries_of or range(shape[0]), dtype=np.int64)
        queries = 2 * dyadic(self.seed, "q", grid(rows, *shape[1:]), self.dtype)
        if self.values == "large_logits":
            queries *= 32
        if self.values in ("shifted_rows", "ascending_rows"):
            queries[:, :, 0] = 4
        if self.values == "low_scores":
            queries[:, :, 0] = 64
        return queries

    def key_places(self) -> int:
        """At how many positions the keys of "heads_by_key" point: as many as the shortest sequence has."""
        return min((n for n in self.context_lens if n), default=1)

    def key_strength(self) -> float:
        """A power of two that makes a score of "heads_by_key" 32 or more, as far as float16 holds it."""
        return min(2.0 ** math.ceil(math.log2(32 / max(abs(self.scale), 2**-10))), 32768.0)

    # Needles: for each sequence and kv head one token has the score 0 and all others one that is GAP less, so that its
    # weight is exactly 1, theirs are 0, and the logarithm of the sum of all is 0. Whatever the order of the sums, the
    # split, the base of the exponential and the precision of what a kernel declares to round, correct kernels give the
    # same bits; and a row too many that weighs 1e-7 shows. (Two needles would weigh exp(-log 2) each in a kernel that
    # merges splits by their LSE, which is 1/2 only if both functions are that good.)

    def has_needles(self) -> bool:
        """Whether the recipe "needles" is exact for this case: no sequence sees a part of another's tokens, and the
        scale is not so small that keys which make up for it overflow float16 in q k^T."""
        lengths: dict[int, int] = {}
        for row, pages in zip(self.sequences, self.page_labels(), strict=True):
            if len(set(pages)) > 1 or (pages and lengths.setdefault(pages[0], row.context_len) != row.context_len):
                return False
        return self._needle_strength() <= 2.0**10

    def _needle_strength(self) -> float:
        return 2.0 ** math.ceil(math.log2(GAP / (32 * max(abs(self.scale), 2**-30))))

    def _is_needle(self, tokens: np.ndarray) -> np.ndarray:
        """bool[len(tokens), KVH]"""
        lengths = {pages[0]: n for pages, n in zip(self.page_labels(), self.context_lens, strict=True) if n}
        known = np.array(sorted(lengths), dtype=np.uint64)
        of_each = np.array([lengths[int(label)] for label in known], dtype=np.uint64)
        counters = known[:, None] * np.uint64(self.num_kv_heads) + np.arange(self.num_kv_heads, dtype=np.uint64)
        labels, positions = np.divmod(tokens, POSITIONS)
        rows = np.searchsorted(known, labels.astype(np.uint64))
        needles = counter_hash(self.seed, "k", counters) % of_each[:, None]
        found: np.ndarray = needles[rows] == positions[:, None].astype(np.uint64)
        return found

    # ---- tensors

    def rows_of_call(self) -> int:
        return len(self.sequences)

    def arguments(self) -> Arguments:
        sizes, form = self.num_heads * self.head_dim, self.dtype
        q = padded_rows(
            "q",
            form,
            encode(self.query_values(), form).reshape(len(self.sequences), sizes),
            (self.num_heads, self.head_dim),
            poison_bits(self.poison, form, self.q_padding, self.seed),
        )
        lengths = contiguous(
            "context_lens",
            self.length_dtype,
            (len(self.sequences),),
            np.array(self.context_lens, dtype=self.length_dtype),
        )
        arguments: dict[str, Tensor | int | float] = {
            "q": q,
            **self._caches(),
            "block_tables": self.block_table(),
            "context_lens": lengths,
            "scale": self.scale,
        }
        if self.fault:
            self._break(arguments)
        return Arguments(arguments)

    def _caches(self) -> dict[str, Tensor]:
        blocks, owned = self._filled_blocks(), self.owned
        tensors, contents = self.cache_tensors(blocks, self._unowned)
        mine = [place for place, block in enumerate(blocks) if block in owned]
        if mine:
            # A probe's rows go on to the end of the page.
            known = np.array([self.block_size if self.values in PROBES else owned[blocks[place]] for place in mine])
            first = self._first_tokens()
            at, slots = np.nonzero(np.arange(self.block_size) < known[:, None])
            tokens = np.array([first[blocks[place]] for place in mine])[at] + slots
            for name, values in (("k_cache", self.key_values), ("v_cache", self.value_values)):
                cache = self.caches()[name]
                places = cache.elements(slots, self.block_size, self.num_kv_heads, self.head_dim)
                bits = encode(values(tokens), self.dtype).reshape(places.shape)
                contents[cache.buffer][np.array(mine)[at][:, None], places] = bits
        return tensors

    def _first_tokens(self) -> dict[int, int]:
        """The token id of the first slot of each owned block."""
        found: dict[int, int] = {}
        for row, labels in zip(self.sequences, self.page_labels(), strict=True):
            for page, (block, label) in enumerate(zip(row.blocks, labels, strict=True)):
                found.setdefault(block, label * POSITIONS + page * self.block_size)
        return found

    def _filled_blocks(self) -> list[int]:
        """The blocks that hold something: the whole of a small pool; else what the table names, and what lies around
        it, except a block with nothing filled near it, which is left untouched so that a read of it shows."""
        if self.num_blocks * self.block_elements() * self.itemsize() <= PAGE:
            return list(range(self.num_blocks))
        owned = set(self.owned)
        near = {block + step for block in owned for step in (-1, 0, 1)} | {0}
        reach = PAGE // (self.block_elements() * self.itemsize()) + 1
        for block in self.in_pool():
            if any(abs(block - other) <= reach for other in owned):
                near.add(block)
        return sorted(block for block in near if 0 <= block < self.num_blocks)

    def _unowned(self, buffer: str, blocks: np.ndarray, count: int) -> np.ndarray:
        """[len(blocks), count] bits of blocks before their owners' tokens are put in: poison."""
        if self.values in PROBES:
            bits = encode(np.full((len(blocks), count), 0.0 if buffer == "k_cache" else 8.0), self.dtype)
            if self.packed:
                slots = np.arange(self.block_size)
                keys = self.caches()["k_cache"].elements(slots, self.block_size, self.num_kv_heads, self.head_dim)
                bits[:, keys] = 0
            return bits
        seeds = counter_hash(self.seed, buffer, blocks) & np.uint64(0xFFFF)
        return poison_bits(self.poison, self.dtype, count, seeds)

    def _break(self, arguments: dict[str, Tensor | int | float]) -> None:
        """Break the contract as `fault` says."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        b = next((b for b, n in enumerate(self.context_lens) if n), 0)
        table, lengths = tensors["block_tables"], tensors["context_lens"]
        entry = b * (self.width + self.table_padding)
        if self.fault == "q of another dtype than the caches":
            draws.recast(tensors["q"], "float16" if self.dtype != "float16" else "float32")
        elif self.fault == "q without its head dim":
            tensors["q"].shape, tensors["q"].strides = tensors["q"].shape[:2], tensors["q"].strides[:2]
        elif self.fault == "query heads not a multiple of kv heads":
            wide = self.num_heads + 1
            rows = np.zeros((len(self.sequences), wide * self.head_dim), dtype=FORMATS[self.dtype].bits)
            arguments["q"] = padded_rows("q", self.dtype, rows, (wide, self.head_dim))
            if self.num_kv_heads == 1:  # every number is a multiple of 1: no query head at all, then
                raise InvalidCase(f"fault={self.fault!r} needs two kv heads")
        elif self.fault == "head dim of q and of the caches differ":
            rows = np.zeros((len(self.sequences), self.num_heads * (self.head_dim + 1)), FORMATS[self.dtype].bits)
            arguments["q"] = padded_rows("q", self.dtype, rows, (self.num_heads, self.head_dim + 1))
        elif self.fault == "v_cache with another block size":
            require(self.cache_kind() == "contiguous", f"fault={self.fault!r} needs contiguous caches")
            shape = (self.num_blocks, self.block_size + 1, self.num_kv_heads, self.head_dim)
            tensors["v_cache"].shape, tensors["v_cache"].strides = shape, row_major(shape)
            tensors["v_cache"].buffer.size = math.prod(shape)
        elif self.fault == "context_lens one short":
            lengths.shape = (max(len(self.sequences) - 1, 0),)
            require(bool(self.sequences), f"fault={self.fault!r} needs a sequence")
        elif self.fault == "block_tables one row short":
            table.shape = (max(len(self.sequences) - 1, 0), self.width)
            require(bool(self.sequences), f"fault={self.fault!r} needs a sequence")
        elif self.fault == "block_tables as floats":
            draws.recast(table, "float32")
        elif self.fault == "context_lens as floats":
            draws.recast(lengths, "float32")
        elif self.fault == "q with its last dim strided":
            arguments["q"] = draws.respaced(tensors["q"], 2)
        elif self.fault == "q with strided heads":
            arguments["q"] = draws.respaced(tensors["q"], 1)
        elif self.fault == "context_lens with a stride":
            arguments["context_lens"] = draws.respaced(lengths, 0)
        elif self.fault == "block_tables with strided columns":
            arguments["block_tables"] = draws.respaced(table, 1)
        elif self.fault == "context length past the table":
            draws.poke(lengths, b, self.width * self.block_size + 1)
        elif self.fault == "negative context length":
            draws.poke(lengths, b, -1)
        elif self.fault == "owned block past the pool":
            draws.poke(table, entry, self.num_blocks)
        elif self.fault == "owned block negative":
            draws.poke(table, entry, -1)

    # ---- words

    def words(self) -> Iterator[tuple[str, bool]]:
        yield from super().words()
        yield "D >= 64", self.head_dim >= 64
        yield "D not a power of two", self.head_dim & (self.head_dim - 1) != 0
        yield "group >= 2", self.group_size >= 2
        yield "group not a power of two", self.group_size & (self.group_size - 1) != 0
        yield "q as a view", self.q_padding > 0
        yield "scale other than 1/sqrt(D)", self.scale != self.head_dim**-0.5
        for poison in POISONS:
            yield f"poison {poison}", self.poison == poison
        for fresh in FRESH:
            yield f"fresh memory {fresh}", self.fresh == fresh

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {**super().sizes(), "H": (self.num_heads,), "group": (self.group_size,)}

    def lines(self) -> list[str]:
        drawn = [*super().lines(), *self.layout_lines()]
        if self.poison != "zeros":
            drawn.append(f"{self.poison} lies where nobody owns")
        if self.fresh != "nan":
            drawn.append(f"fresh memory (torch.empty) holds {self.fresh}")
        return drawn

    def shapes(self) -> str:
        return (
            f"B={len(self.sequences)} H={self.num_heads} KVH={self.num_kv_heads} D={self.head_dim} "
            f"bs={self.block_size} {self.dtype} scale={self.scale:g}"
        )

    # ---- other cases of the same tokens

    def batch(self, rows: list[int]) -> Self:
        """A call with these sequences only, in this order; each may come more than once."""
        labels = self.page_labels()
        queries = self.queries_of or range(len(self.sequences))
        return replace(
            self,
            sequences=tuple(self.sequences[b] for b in rows),
            tokens_of=tuple(labels[b] for b in rows),
            queries_of=tuple(queries[b] for b in rows),
        )

    def unshared(self) -> Self | None:
        """Every sequence with copies of its own of the pages that it shares, or None where nothing is shared."""
        if sum(len(row.blocks) for row in self.sequences) == len(self.owned):
            return None
        seen: set[int] = set()
        period, rows, free = self.block_period(), [], self.num_blocks
        for row in self.sequences:
            blocks = list(row.blocks)
            for page, block in enumerate(blocks):
                if block in seen:  # at the same address modulo 64 bytes: see `elsewhere`
                    free += (block - free) % period
                    blocks[page], free = free, free + 1
            seen |= set(row.blocks)
            rows.append(replace(row, blocks=tuple(blocks)))
        return replace(self, sequences=tuple(rows), num_blocks=free, tokens_of=self.page_labels())

    def repaged(self, block_size: int) -> Self:
        found = super().repaged(block_size)
        if not self.tokens_of:
            return found
        labels = [pages[-1:] for pages in self.tokens_of]  # of a shared prefix and what follows, what follows
        rows = zip(labels, found.sequences, strict=True)
        return replace(found, tokens_of=tuple(label * len(row.blocks) for label, row in rows))

    def contiguous(self) -> Self:
        """Contiguous caches and queries. The table keeps its stride: what lies in its gaps is a tail for I2."""
        return replace(super().contiguous(), q_padding=0)

    def simpler(self) -> Iterator[Self]:
        yield from super().simpler()
        if self.cache_kind() != "contiguous":
            yield from self.far_again(super().contiguous())
        for name in ("num_kv_heads", "group_size", "head_dim"):
            for size in smaller(getattr(self, name)):
                reduced = with_size(self, name, size)
                yield reduced
                yield from self.roomy(reduced)
                yield from self.far_again(reduced)
        if self.q_padding:
            yield replace(self, q_padding=0)
            if self.q_padding > 1:
                yield replace(self, q_padding=1)
        if self.length_dtype != "int64":
            yield replace(self, length_dtype="int64")
        if self.scale != 1.0:
            yield replace(self, scale=1.0)


def _fits(values: str, declared: Declaration) -> bool:
    """Whether the kernel's scores can hold what a recipe makes of them: float16 ends at 65504."""
    names = {declared.unit_roundoff.get(what, "float32") for what in ("scores", "products", "sums")}
    return values != "low_scores" or not names & {"float16", "float8_e4m3fn", "input"}


def cases(
    declared: Declaration, limits: Limits, relations: tuple[str, ...] = (), shapes: tuple[int, ...] = ()
) -> st.SearchStrategy[PagedDecodeAttentionCase]:
    """Cases inside what the kernel declares. `relations`: the ids of the invariants that a case may pay for. `shapes`:
    seeds; with them every case has the shape that one of them gives (draws.shape_of)."""
    empty = declared.empty != "never"
    poisons = MODEST_POISONS if declared.unowned == "finite" else draws.POISON_ORDER
    group_sizes = draws.sizes(declared, "group_sizes", draws.GROUP_SIZES)
    head_dims = draws.sizes(declared, "head_dims", draws.HEAD_DIMS)
    block_sizes = draws.sizes(declared, "block_sizes", draws.BLOCK_SIZES)
    counts = draws.one_of_each((2,) * 10 + (1,) * 6 + (3,) * 5 + (4,) * 2 + (0,), (0, 0, 1, 3))
    contents = draws.one_of_each(poisons, tuple(values for values in DRAWN_VALUES if _fits(values, declared)))

    @st.composite
    def drawn(draw: st.DrawFn) -> PagedDecodeAttentionCase:
        seed = draw(draws.SEEDS)
        chance = Random(seed)
        shape = draws.shape_of(draw, chance, shapes)
        dtype = shape.choice(declared.dtypes)
        index_dtype, length_dtype = shape.choice(declared.index_dtypes), shape.choice(declared.index_dtypes)
        num_kv_heads, group_size = shape.choice((1, 2, 1, 2, 3, 4)), shape.choice(group_sizes)
        head_dim, block_size = shape.choice(head_dims), shape.choice(block_sizes)
        large = shape.choice(LARGE) if shape.random() < draws.LARGE_SHARE else ""
        if large == "kv heads":
            num_kv_heads, group_size = shape.choice((6, 8, 9)), min(group_sizes)
        elif large in ("group", "head dim", "tokens"):
            num_kv_heads = 1
        if large == "group":
            group_size = shape.choice(draws.large_sizes(declared, "group_sizes", (16, 17)) or [group_size])
        if large == "head dim":
            head_dim = shape.choice(draws.large_sizes(declared, "head_dims", (192, 256)) or [head_dim])
        k_layout, v_layout = cache_layouts(shape, declared, head_dim)
        num_kv_heads = draws.fewer_heads(num_kv_heads, block_size * head_dim)
        q_padding = shape.choice((0, 1, 0, head_dim, 2 * num_kv_heads * head_dim))
        count, table_padding = draw(counts)
        # Three pages at least, however large; no more tokens than the loop oracle walks in a few milliseconds.
        tokens = max(TOKEN_VALUES // (num_kv_heads * group_size * head_dim), 2 * block_size + 1)
        most = min(max(4 * block_size, 24), max(160, 2 * block_size + 1), tokens)
        count = min(count, max(tokens // (block_size + 1), 1))
        lengths = [context_length(chance, block_size, most, empty) for _ in range(count)]
        if large == "tokens":
            most = min(40 * block_size, 1100, max(4 * TOKEN_VALUES // (group_size * head_dim), most))
            lengths = [chance.randint(most // 2 + 1, most)]
        elif large == "sequences":
            short = 2 * block_size
            lengths = [context_length(chance, block_size, short, empty) for _ in range(chance.choice((5, 8, 9)))]
        case = PagedDecodeAttentionCase(
            block_size=block_size,
            num_blocks=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            k_layout=k_layout,
            v_layout=v_layout,
        )
        rows, num_blocks = sequences(
            draw,
            chance,
            lengths,
            block_size,
            case.block_elements(),
            ITEMSIZE[dtype],
            limits,
            int32=index_dtype == "int32",
            most_slots=declared.most_slots,
        )
        poison, values = draw(contents)
        return replace(
            case,
            num_blocks=num_blocks,
            sequences=rows,
            table_padding=table_padding if declared.table_strides == "any" else 0,
            index_dtype=index_dtype,
            group_size=group_size,
            scale=chance.choice(SCALES) or head_dim**-0.5,
            q_padding=q_padding if declared.token_strides == "any" else 0,
            length_dtype=length_dtype,
            dtype=dtype,
            poison=poison,
            fresh=chance.choice(draws.FRESH_ORDER),
            values=values,
            seed=seed,
            relations=draws.some_of(draw, chance, relations),
            order=chance.choice(draws.ORDERS),
        )

    return drawn()
