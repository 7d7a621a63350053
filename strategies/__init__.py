"""Draws cases. One module an operation, named after it; `CASES` and `STRATEGIES` find them by that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagefuzz.strategies import paged_decode_attention, reshape_and_cache, slot_mapping, write_then_decode
from pagefuzz.strategies.case import Case

CASES: dict[str, type[Case]] = {
    "slot_mapping": slot_mapping.SlotMappingCase,
    "reshape_and_cache": reshape_and_cache.ReshapeAndCacheCase,
    "paged_decode_attention": paged_decode_attention.PagedDecodeAttentionCase,
    "write_then_decode": write_then_decode.WriteThenDecodeCase,
}
# operation -> cases(declared, limits, relations, shapes), a Hypothesis strategy
STRATEGIES: dict[str, Callable[..., Any]] = {
    "slot_mapping": slot_mapping.cases,
    "reshape_and_cache": reshape_and_cache.cases,
    "paged_decode_attention": paged_decode_attention.cases,
    "write_then_decode": write_then_decode.cases,
}
