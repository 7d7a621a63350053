"""Cases of write_then_decode: the last tokens of each sequence are written by the call that then reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np
from hypothesis import strategies as st

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies import paged_decode_attention
from pagefuzz.strategies.case import Arguments, Count, Limits, require, smaller
from pagefuzz.strategies.number_formats import encode
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.tensors import Tensor, contiguous
from pagefuzz.strategies.values import poison_bits

OPERATION = "write_then_decode"
NEW_TOKENS = (1, 1, 2, 1, 3, 4096)


@dataclass(frozen=True, kw_only=True)
class WriteThenDecodeCase(PagedDecodeAttentionCase):
    """A step of a serving engine.

    new_tokens: how many of each sequence's last tokens come through key, value and slot_mapping (all of a shorter one).
    Their slots hold poison before the call. A page that another sequence shares is not written to.
    """

    operation: ClassVar[str] = OPERATION
    faults: ClassVar[tuple[str, ...]] = ()
    value_faults: ClassVar[tuple[str, ...]] = ()

    new_tokens: Count = 1

    def check(self) -> None:
        super().check()
        if self.index_dtype == "int32":
            most = max(self.owned, default=0) * self.block_size + self.block_size
            require(most <= 2**31, f"slots of block {max(self.owned, default=0)} do not fit int32")

    def written(self) -> list[tuple[int, int, int]]:
        """(sequence, position, slot) of each new token."""
        owners: dict[int, int] = {}
        for row in self.sequences:
            for block in row.blocks:
                owners[block] = owners.get(block, 0) + 1
        found = []
        for b, row in enumerate(self.sequences):
            for position in range(max(row.context_len - self.new_tokens, 0), row.context_len):
                page, offset = divmod(position, self.block_size)
                if owners[row.blocks[page]] == 1:
                    found.append((b, position, row.blocks[page] * self.block_size + offset))
        return found

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot mapping."""
        return tuple(slot for _, _, slot in self.written())

    def new_token_ids(self) -> np.ndarray:
        """int64[T]: the ids of the tokens that the call writes."""
        written = self.written()
        ids = {b: self.token_ids(b) for b in {b for b, _, _ in written}}
        return np.array([ids[b][position] for b, position, _ in written], dtype=np.int64)

    def arguments(self) -> Arguments:
        decode = super().arguments().values
        tokens = self.new_token_ids()
        shape = (len(tokens), self.num_kv_heads, self.head_dim)
        slots = np.array(self.slots, dtype=self.index_dtype)
        for name, (_, elements) in self.watched().items():
            tensor = decode[name]
            assert isinstance(tensor, Tensor)
            pieces, stride = dict(tensor.buffer.pieces), tensor.strides[0]
            for slot, places in zip(self.slots, elements, strict=True):
                start = slot // self.block_size * stride
                pieces[start][places - start] = poison_bits(self.poison, self.dtype, len(places), self.seed)
        return Arguments(
            {
                "key": contiguous("key", self.dtype, shape, encode(self.key_values(tokens), self.dtype)),
                "value": contiguous("value", self.dtype, shape, encode(self.value_values(tokens), self.dtype)),
                "k_cache": decode["k_cache"],
                "v_cache": decode["v_cache"],
                "slot_mapping": contiguous("slot_mapping", self.index_dtype, slots.shape, slots),
                **{name: decode[name] for name in ("q", "block_tables", "context_lens", "scale")},
            }
        )

    def watched(self) -> dict[str, tuple[str, np.ndarray]]:
        return self.elements_of(self.slots)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"T": (len(self.slots),), **super().sizes()}

    def lines(self) -> list[str]:
        new = "all tokens" if self.new_tokens >= max(self.context_lens, default=0) else f"the last {self.new_tokens}"
        return [*super().lines(), f"the call writes {new} of each sequence, then reads"]

    def simpler(self) -> Iterator[Self]:
        yield from super().simpler()
        longest = max(self.context_lens, default=1) or 1
        for fewer in smaller(self.new_tokens) if self.new_tokens <= longest else (longest,):  # the same tokens
            yield replace(self, new_tokens=fewer)


def cases(
    declared: Declaration, limits: Limits, relations: tuple[str, ...] = (), shapes: tuple[int, ...] = ()
) -> st.SearchStrategy[WriteThenDecodeCase]:
    """Cases inside what both kernels declare. `relations`: the ids of the invariants that a case may pay for. `shapes`:
    seeds; with them every case has the shape that one of them gives (draws.shape_of)."""

    def with_new_tokens(case: PagedDecodeAttentionCase) -> WriteThenDecodeCase:
        known = {item.name: getattr(case, item.name) for item in fields(case)}
        found = WriteThenDecodeCase(**known, new_tokens=NEW_TOKENS[case.seed % len(NEW_TOKENS)])
        if max(found.owned, default=0) * found.block_size + found.block_size <= 2**31:
            return found
        if "int64" in declared.index_dtypes:  # a block's id may fit int32 where its slots do not
            return replace(found, index_dtype="int64")
        return found.elsewhere(found.in_pool())

    return paged_decode_attention.cases(declared, limits, relations, shapes).map(with_new_tokens)
