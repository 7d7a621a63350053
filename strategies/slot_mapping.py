"""Cases of slot_mapping: what they hold, how they are drawn, what makes one simpler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, ClassVar, Self

import numpy as np
from hypothesis import strategies as st
from msgspec import Meta

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies import draws
from pagefuzz.strategies.case import Arguments, Limits, Name, Sequence, first_beyond, require, smaller
from pagefuzz.strategies.layouts import GARBAGE, INT32_MAX, Paged, context_length, pages_of, sequences
from pagefuzz.strategies.tensors import Tensor, contiguous

OPERATION = "slot_mapping"
Index = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


@dataclass(frozen=True)
class Token:
    """One new token: its sequence and its position there. A negative position is padding; seq_id is then arbitrary."""

    seq_id: Index = 0
    position: Index = 0


@dataclass(frozen=True, kw_only=True)
class SlotMappingCase(Paged):
    """The slots of T tokens. token_dtype: of seq_ids and positions."""

    operation: ClassVar[str] = OPERATION
    faults: ClassVar[tuple[str, ...]] = (
        "block_tables as floats",
        "positions one short",
        "seq_ids as floats",
        "block_tables one-dimensional",
        "block_size 0",
        "block_size negative",
        "block_tables with strided columns",
        "positions with a stride",
    )
    value_faults: ClassVar[tuple[str, ...]] = ("position past the table", "seq_id past the batch", "seq_id negative")

    index_fields: ClassVar[tuple[str, ...]] = ("index_dtype", "token_dtype")

    tokens: tuple[Token, ...] = ()
    token_dtype: Name = "int64"

    def check(self) -> None:
        super().check()
        require(self.token_dtype in ("int32", "int64"), f"token_dtype={self.token_dtype!r} is not int32 or int64")
        require(len(self.tokens) <= 4096, f"{len(self.tokens)} tokens are more than a case may hold")
        require(bool(self.sequences) or not self.tokens, "tokens without a sequence")
        for t, token in enumerate(self.tokens):
            if token.position >= 0:
                require(0 <= token.seq_id < len(self.sequences), f"token {t}: there is no sequence {token.seq_id}")
                n = self.sequences[token.seq_id].context_len
                require(token.position < n, f"token {t}: position {token.position} of a sequence with {n} tokens")
        if self.fault in self.value_faults:
            require(any(token.position >= 0 for token in self.tokens), f"fault={self.fault!r} needs a token")

    def beyond(self, declared: Declaration) -> str:
        least = {"any": -(2**31), "minus_one": -1, "never": 0}[declared.negative_slots]
        lowest = min((token.position for token in self.tokens), default=0)
        return super().beyond(declared) or first_beyond(
            (self.token_dtype in declared.index_dtypes, f"{self.token_dtype} positions"),
            (lowest >= least, f"position {lowest}"),
        )

    def block_elements(self) -> int:
        return self.block_size  # ids are not bound by a cache here: the slot itself is what may pass 2^31

    def rows_of_call(self) -> int:
        return len(self.tokens)

    def arguments(self) -> Arguments:
        columns = {
            name: np.array([getattr(token, field) for token in self.tokens], dtype=self.token_dtype)
            for name, field in (("seq_ids", "seq_id"), ("positions", "position"))
        }
        arguments: dict[str, Tensor | int | float] = {
            "block_tables": self.block_table(),
            **{name: contiguous(name, self.token_dtype, bits.shape, bits) for name, bits in columns.items()},
            "block_size": self.block_size,
        }
        if self.fault:
            self._break(arguments)
        return Arguments(arguments)

    def _break(self, arguments: dict[str, Tensor | int | float]) -> None:
        """Break the contract as `fault` says."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        table = tensors["block_tables"]
        t = next((t for t, token in enumerate(self.tokens) if token.position >= 0), 0)
        if self.fault == "block_tables as floats":
            draws.recast(table, "float32")
        elif self.fault == "positions one short":
            require(bool(self.tokens), f"fault={self.fault!r} needs a token")
            tensors["positions"].shape = (len(self.tokens) - 1,)
        elif self.fault == "seq_ids as floats":
            draws.recast(tensors["seq_ids"], "float32")
        elif self.fault == "block_tables one-dimensional":
            table.shape, table.strides = (self.width,) if self.sequences else (0,), (1,)
        elif self.fault.startswith("block_size"):
            arguments["block_size"] = 0 if self.fault.endswith("0") else -self.block_size
        elif self.fault == "block_tables with strided columns":
            arguments["block_tables"] = draws.respaced(table, 1)
        elif self.fault == "positions with a stride":
            arguments["positions"] = draws.respaced(tensors["positions"], 0)
        elif self.fault == "position past the table":
            draws.poke(tensors["positions"], t, self.width * self.block_size)
        elif self.fault == "seq_id past the batch":
            draws.poke(tensors["seq_ids"], t, len(self.sequences))
        elif self.fault == "seq_id negative":
            draws.poke(tensors["seq_ids"], t, -1)

    def words(self) -> Iterator[tuple[str, bool]]:
        yield from super().words()
        yield "T = 0", not self.tokens
        yield "padded slots", any(token.position < 0 for token in self.tokens)
        places = [(token.seq_id, token.position) for token in self.tokens]
        yield "tokens out of order", places != sorted(places)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"T": (len(self.tokens),), **super().sizes()}

    def shapes(self) -> str:
        return f"T={len(self.tokens)} B={len(self.sequences)} M={self.width} bs={self.block_size}"

    def lines(self) -> list[str]:
        return super().lines() + [
            f"token {t}: sequence {token.seq_id}, position {token.position}"
            + (" (padding)" if token.position < 0 else "")
            for t, token in enumerate(self.tokens)
        ]

    def fitted(self, rows: Iterable[Sequence], width: int | None = None) -> Self:
        fitted = super().fitted(rows, width)
        kept = tuple(token for token in self.tokens if fitted._holds(token))
        return replace(fitted, tokens=kept)

    def same_pages(self, block_size: int) -> Self:
        moved = tuple(
            replace(token, position=self._place(token.position, block_size)) if token.position >= 0 else token
            for token in self.tokens
        )
        return replace(super(SlotMappingCase, replace(self, tokens=())).same_pages(block_size), tokens=moved)

    def _holds(self, token: Token) -> bool:
        if token.position < 0:
            return True
        return token.seq_id < len(self.sequences) and token.position < self.sequences[token.seq_id].context_len

    def simpler(self) -> Iterator[Self]:
        for t in range(len(self.tokens)):
            if len(self.tokens) > 1:
                yield replace(self, tokens=(self.tokens[t],))
        for t in range(len(self.tokens)):
            yield replace(self, tokens=self.tokens[:t] + self.tokens[t + 1 :])
        for b in range(len(self.sequences)):  # drop a sequence and renumber the tokens behind it
            rows = self.sequences[:b] + self.sequences[b + 1 :]
            kept = tuple(
                replace(token, seq_id=token.seq_id - (token.seq_id > b))
                for token in self.tokens
                if token.position < 0 or token.seq_id != b
            )
            if len(self.sequences) > 1:
                yield replace(replace(self, tokens=kept), sequences=rows).fitted(rows)
                yield replace(replace(self, tokens=kept), sequences=rows).fitted(rows, self.width)
        yield from super().simpler()
        for b, row in enumerate(self.sequences):  # cut a context, and keep its tokens: the last ones move along
            for fewer in smaller(row.context_len):
                cut = replace(row, context_len=fewer, blocks=row.blocks[: pages_of(fewer, self.block_size)])
                moved = tuple(
                    replace(token, position=min(token.position, fewer - 1)) if token.seq_id == b else token
                    for token in self.tokens
                )
                rows = (*self.sequences[:b], cut, *self.sequences[b + 1 :])
                reduced = replace(self, tokens=moved).fitted(rows)
                yield reduced
                yield from self.far_again(reduced)
        for t, token in enumerate(self.tokens):
            tries = [replace(token, position=fewer) for fewer in smaller(token.position, 0)]
            if token.position < 0:
                tries = [each for each in (Token(0, -1), Token(token.seq_id, -1)) if each != token]
            for each in tries:
                yield replace(self, tokens=(*self.tokens[:t], each, *self.tokens[t + 1 :]))
        if self.token_dtype != "int64":
            yield replace(self, token_dtype="int64")


def cases(
    declared: Declaration, limits: Limits, relations: tuple[str, ...] = (), shapes: tuple[int, ...] = ()
) -> st.SearchStrategy[SlotMappingCase]:
    """Cases inside what the kernel declares. `relations`: the ids of the invariants that a case may pay for. `shapes`:
    seeds; with them every case has the shape that one of them gives (draws.shape_of)."""
    negative = {"any": (-1, -1, -2, -GARBAGE), "minus_one": (-1,), "never": ()}[declared.negative_slots]
    block_sizes = draws.sizes(declared, "block_sizes", draws.BLOCK_SIZES)
    counts = draws.one_of_each((2,) * 5 + (1,) * 4 + (3,) * 2 + (4,) * 2 + (0,), (2, 1, 3, 5, 0, 4))

    @st.composite
    def drawn(draw: st.DrawFn) -> SlotMappingCase:
        chance = Random(draw(draws.SEEDS))
        shape = draws.shape_of(draw, chance, shapes)
        block_size = shape.choice(block_sizes)
        index_dtype, token_dtype = shape.choice(declared.index_dtypes), shape.choice(declared.index_dtypes)
        count, many = draw(counts)
        lengths = [context_length(chance, block_size, 96, True) for _ in range(count)]
        rows, num_blocks = sequences(
            draw,
            chance,
            lengths,
            block_size,
            block_size,
            1,
            Limits(2**62),
            int32=index_dtype == "int32",
            most_slots=declared.most_slots,
        )
        alive = [b for b, row in enumerate(rows) if row.context_len]
        tokens = []
        # Without a sequence there is no token, not even a padded one.
        for _ in range(many if count and (alive or negative) else 0):
            if not alive or (negative and chance.random() < 0.25):
                tokens.append(Token(chance.choice((0, GARBAGE, -1, INT32_MAX)), chance.choice(negative)))
                continue
            b = chance.choice(alive)
            n = rows[b].context_len
            kind = chance.choice(("any", "last", "any", "page start"))
            if kind == "last":
                position = n - 1
            elif kind == "page start":
                position = (n - 1) // block_size * block_size
            else:
                position = chance.randrange(n)
            tokens.append(Token(b, position))
        return SlotMappingCase(
            block_size=block_size,
            num_blocks=num_blocks,
            sequences=rows,
            table_padding=chance.choice((0, 0, 1, 3)) if declared.table_strides == "any" else 0,
            index_dtype=index_dtype,
            tokens=tuple(tokens),
            token_dtype=token_dtype,
            seed=0,
            relations=draws.some_of(draw, chance, relations),
            order=chance.choice(draws.ORDERS),
        )

    return drawn()
