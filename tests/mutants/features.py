"""What a case holds, in words, finer than `Case.features`: whatever could be switched off."""

from __future__ import annotations

from typing import Any

from pagefuzz.strategies.case import FAR_ELEMENTS, Case
from pagefuzz.strategies.layouts import GARBAGE, INT32_MAX, PAGE, Paged
from pagefuzz.strategies.values import FINITE_POISONS


def words(case: Case) -> frozenset[str]:
    """Every feature of a case that could be switched off."""
    return case.features() | frozenset(word for word, holds in _more(case) if holds)


def _more(case: Any) -> list[tuple[str, bool]]:
    found = [
        ("order descending", case.order == 1),
        ("order shuffled", case.order > 1),
        ("pays for a relation", bool(case.relations)),
        ("block size 1", case.block_size == 1),
        ("block size 16 or more", case.block_size >= 16),
        *((f"{name} int32", getattr(case, name) == "int32") for name in case.index_fields),
        *((f"{name} int64", getattr(case, name) == "int64") for name in case.index_fields),
    ]
    if hasattr(case, "poison"):
        found += [
            (f"poison {case.poison}", True),
            ("poison not zeros", case.poison != "zeros"),
            ("poison not finite", case.poison not in FINITE_POISONS),
            (f"fresh memory {case.fresh}", True),
            ("fresh memory not zeros", case.fresh != "zeros"),
            (f"values {case.values}", True),
            ("values not ordinary", case.values != "ordinary"),
            (case.dtype, True),
            ("KVH >= 2", case.num_kv_heads >= 2),
            ("KVH = 1", case.num_kv_heads == 1),
            ("D = 1", case.head_dim == 1),
            ("D >= 2", case.head_dim >= 2),
            ("caches not contiguous", case.cache_kind() != "contiguous"),
            ("cache layouts differ", case.k_layout != case.v_layout),
        ]
    if hasattr(case, "slots"):
        found += [
            ("key padding", case.key_padding > 0),
            ("value padding", case.value_padding > 0),
            ("key or value as a view", bool(case.fused or case.key_padding or case.value_padding)),
            ("T = 1", len(case.slots) == 1),
        ]
    if isinstance(case, Paged):
        found += _paged(case)
    return found


def _paged(case: Paged) -> list[tuple[str, bool]]:
    kinds = {kind for row in case.sequences for kind in _tail_kinds(case, row.tail)}
    blocks = [block for row in case.sequences for block in row.blocks]
    lengths = [row.context_len for row in case.sequences]
    return [
        *((f"tail {kind}", True) for kind in sorted(kinds)),
        ("2 pages or more", any(len(row.blocks) >= 2 for row in case.sequences)),
        ("free blocks", case.num_blocks > len(case.owned)),
        ("blocks out of order", blocks != sorted(blocks)),
        ("lengths differ", len(set(lengths)) > 1),
        ("context length 1", 1 in lengths),
        ("offset past 2^32", max(case.owned, default=0) * case.block_elements() >= 2 * FAR_ELEMENTS),
        ("pool larger than a memory page", case.num_blocks * case.block_elements() * case.itemsize() > PAGE),
    ]


def _tail_kinds(case: Paged, tail: tuple[int, ...]) -> set[str]:
    """The kinds of strategies.layouts.TAILS, told from the entries; a distant block is a free one."""
    named = {GARBAGE: "garbage", -1: "minus_one", INT32_MAX: "int32_max"}

    def kind(entry: int) -> str:
        if entry in case.owned:
            return "live"
        if 0 <= entry < case.num_blocks:
            return "free"
        return named.get(entry, "past_pool")

    return {kind(entry) for entry in tail}
