"""Each relation fails on a kernel that is wrong in its way alone, in words that say where to look.

The kernels call a good one and then spoil what it did, on cases small enough to follow by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagefuzz.fuzz.verdict import PASS, VIOLATION, Judge
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import CACHE_LAYOUTS, Declaration, Kernel
from pagefuzz.kernels.torch_paged_decode_attention import torch_paged_decode_attention as decode
from pagefuzz.kernels.torch_reshape_and_cache import torch_reshape_and_cache as write
from pagefuzz.strategies.cache_layouts import HND, CacheLayout
from pagefuzz.strategies.case import Case, Sequence
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase
from pagefuzz.tests.killing import runner

ULP = 1 + 2.0**-23
TWO = (Sequence((1,), (), 1), Sequence((0,), (), 1))  # one token weighs 1: every bit is known
DECODE = PagedDecodeAttentionCase(block_size=2, num_blocks=2, sequences=TWO, num_kv_heads=2, head_dim=2)
SHARED = replace(DECODE, sequences=(Sequence((1,), (), 1), Sequence((1,), (), 1)))
HEADS_OUTSIDE = replace(DECODE, k_layout=CacheLayout(HND), v_layout=CacheLayout(HND))
WRITE = ReshapeAndCacheCase(
    block_size=2, num_blocks=2, slots=(3, 0), num_kv_heads=2, k_layout=CacheLayout(HND), v_layout=CacheLayout(HND)
)
STEP = WriteThenDecodeCase(block_size=2, num_blocks=2, sequences=TWO, new_tokens=1)


def copies_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    out = decode(q, k, v, tables, lengths, scale)
    return out * ULP if len(set(tables[:, 0].tolist())) < len(tables) else out


def place_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (ULP if tables[0, 0] > tables[1, 0] else 1)


def fresh_added(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return torch.empty_like(q) + decode(q, k, v, tables, lengths, scale)


def tail_added(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    out = decode(q, k, v, tables, lengths, scale)
    out[1, 0, 0] += 0 * v[tables[1, 0], 1, 0, 0]
    return out


def contiguous_wanted(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    if not k.is_contiguous():
        raise ValueError("strides")
    return decode(q, k, v, tables, lengths, scale)


def strides_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (1 if k.is_contiguous() else ULP)


def neighbours_lost(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    out = decode(q, k, v, tables, lengths, scale)
    out[1:] = 0
    return out


def neighbours_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (ULP if len(q) > 1 else 1)


def needles_and_neighbours_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    out = decode(q, k, v, tables, lengths, scale)
    return out * (2 if len(q) > 1 and bool((out == out.round()).all()) else 1)


def only_small_pages(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (k.shape[1] != 2)


def page_size_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (ULP if k.shape[1] == 2 else 1)


def only_int32(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (tables.dtype == torch.int32)


def index_dtype_seen(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(q, k, v, tables, lengths, scale) * (ULP if tables.dtype == torch.int32 else 1)


def heads_not_looked_at(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
    return decode(torch.as_strided(q, q.shape, (4, 2, 1)), k, v, tables, lengths, scale)


def written_contiguously(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> Any:
    write(key, value, k_cache, torch.as_strided(v_cache, v_cache.shape, (4, 2, 1, 1)), slots)


def nothing_written(
    key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, q: Any, tables: Any, lengths: Any, scale: Any
) -> Any:
    return decode(q, k_cache, v_cache, tables, lengths, scale)


def said(call: Callable[..., Any], case: Case, asked: str, **declared: Any) -> tuple[str, str, str, str]:
    kernel = Kernel("spoilt", OPERATIONS[case.operation], call, Declaration(cache_layouts=CACHE_LAYOUTS, **declared))
    found = Judge(kernel, runner()).verdict(case, (asked,))
    assert found.violation is not None, found
    seen = re.sub(r" \(at \S+, line \d+\)$", "", found.violation.seen)
    return found.named, seen, found.violation.right, found.violation.where


EXPECTED = [
    pytest.param(
        copies_seen,
        SHARED,
        "I7",
        {},
        (
            (
                "out[0, 0, 0] = -0.223938018 (0xbe655002) with the pages shared, -0.223937988 (0xbe655000) "
                "with a copy of its own of each shared page"
            ),
            "the same bits; they differ by 2 units in the last place; the oracle says -0.223937988",
            "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ",
        ),
        id="copies_seen",
    ),
    pytest.param(
        place_seen,
        DECODE,
        "I7",
        {},
        (
            (
                "out[0, 0, 0] = -0.223938018 (0xbe655002) in these, -0.223937988 (0xbe655000) with the "
                "tokens in other blocks"
            ),
            "the same bits; they differ by 2 units in the last place; the oracle says -0.223937988",
            "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ",
        ),
        id="place_seen",
    ),
    pytest.param(
        fresh_added,
        DECODE,
        "I8",
        {},
        (
            (
                "out[0, 0, 0] = nan (0x7fc00000) with nan in fresh memory (torch.empty), -0.223937988 "
                "(0xbe655000) with zeros in it"
            ),
            "the same bits; the oracle says -0.223937988",
            "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ",
        ),
        id="fresh_added",
    ),
    pytest.param(
        tail_added,
        replace(DECODE, poison="nan"),
        "I8",
        {},
        (
            ("out[1, 0, 0] = nan (0x7fc00000) with nan where nobody owns, 0.356811523 (0x3eb6b000) with zeros there"),
            "the same bits; the oracle says 0.356811523",
            "sequence 1 (context length 1), head 0, dim 0; 1 of its 4 elements differ",
        ),
        id="tail_added",
    ),
    pytest.param(
        tail_added,
        replace(DECODE, poison="nan"),
        "I8",
        {"deterministic": False},
        (
            "out[1, 0, 0] = nan with nan where nobody owns",
            "0.356811523, give or take 4.09e-07; the kernel is right with zeros there",
            "sequence 1 (context length 1), head 0, dim 0",
        ),
        id="tail_added not deterministic",
    ),
    pytest.param(
        tail_added,
        replace(DECODE, poison="zeros"),
        "I8",
        {"deterministic": False},
        (
            "out[1, 0, 0] = nan with nan there",
            "0.356811523, give or take 4.09e-07; the kernel is right with zeros where nobody owns",
            "sequence 1 (context length 1), head 0, dim 0",
        ),
        id="tail_added not deterministic, the twin",
    ),
    pytest.param(
        contiguous_wanted,
        HEADS_OUTSIDE,
        "I10",
        {},
        (
            "raised ValueError: strides",
            "no error; the kernel is right on contiguous copies",
            "",
        ),
        id="contiguous_wanted",
    ),
    pytest.param(
        strides_seen,
        HEADS_OUTSIDE,
        "I10",
        {},
        (
            "out[0, 0, 0] = 67.0000076 (0x42860001) here, 67 (0x42860000) on contiguous copies",
            "the same bits; they differ in the last bit; the oracle says 67",
            (
                "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ; the values are "
                "needles: one token of each sequence and kv head weighs 1, all others 0"
            ),
        ),
        id="strides_seen",
    ),
    pytest.param(
        written_contiguously,
        WRITE,
        "I10",
        {},
        (
            "2 elements changed that the call must leave alone, first 0x3fa66e00 -> 0x3f301000",
            "nothing but the addressed slots changes; the kernel is right on contiguous copies",
            "v_cache, element 1 = block 0, offset 1, kv head 0, dim 0",
        ),
        id="written_contiguously",
    ),
    pytest.param(
        neighbours_lost,
        DECODE,
        "I11",
        {},
        (
            "out[1, 0, 0] = 0",
            "0.356811523, give or take 4.09e-07; the kernel is right where this sequence is alone",
            ("sequence 1 (context length 1), head 0, dim 0; 4 of 8 elements are wrong; context lengths (1, 1)"),
        ),
        id="neighbours_lost",
    ),
    pytest.param(
        neighbours_seen,
        DECODE,
        "I11",
        {},
        (
            "out[0, 0, 0] = 67.0000076 (0x42860001) here, 67 (0x42860000) alone",
            "the same bits; they differ in the last bit; the oracle says 67",
            (
                "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ; the values are "
                "needles: one token of each sequence and kv head weighs 1, all others 0"
            ),
        ),
        id="neighbours_seen",
    ),
    pytest.param(
        neighbours_seen,
        DECODE,
        "I11",
        {"batch_invariant": True},
        (
            "out[0, 0, 0] = -0.223938018 (0xbe655002) here, -0.223937988 (0xbe655000) alone",
            "the same bits; they differ by 2 units in the last place; the oracle says -0.223937988",
            "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ",
        ),
        id="neighbours_seen batch_invariant",
    ),
    pytest.param(
        needles_and_neighbours_seen,
        DECODE,
        "I11",
        {"deterministic": False},
        (
            "out[0, 0, 0] = 134 here",
            "67, give or take 3.99e-05; the kernel is right alone",
            "sequence 0 (context length 1), head 0, dim 0; 4 of 4 elements are wrong",
        ),
        id="needles_and_neighbours_seen not deterministic",
    ),
    pytest.param(
        only_small_pages,
        DECODE,
        "I12",
        {},
        (
            "out[0, 0, 0] = -0",
            "-0.223937988, give or take 2.66e-07; the kernel is right with block size 32",
            "sequence 0 (context length 1), head 0, dim 0; 8 of 8 elements are wrong",
        ),
        id="only_small_pages",
    ),
    pytest.param(
        page_size_seen,
        DECODE,
        "I12",
        {},
        (
            ("out[0, 0, 0] = 67.0000076 (0x42860001) with block size 2, 67 (0x42860000) with block size 32"),
            "the same bits; they differ in the last bit; the oracle says 67",
            (
                "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ; the values are "
                "needles: one token of each sequence and kv head weighs 1, all others 0"
            ),
        ),
        id="page_size_seen",
    ),
    pytest.param(
        only_int32,
        DECODE,
        "I14",
        {},
        (
            "out[0, 0, 0] = -0",
            "-0.223937988, give or take 2.66e-07; the kernel is right with int32 indices",
            "sequence 0 (context length 1), head 0, dim 0; 8 of 8 elements are wrong",
        ),
        id="only_int32",
    ),
    pytest.param(
        index_dtype_seen,
        DECODE,
        "I14",
        {},
        (
            ("out[0, 0, 0] = -0.223937988 (0xbe655000) here, -0.223938018 (0xbe655002) with int32 indices"),
            "the same bits; they differ by 2 units in the last place; the oracle says -0.223937988",
            "sequence 0 (context length 1), head 0, dim 0; 4 of its 4 elements differ",
        ),
        id="index_dtype_seen",
    ),
    pytest.param(
        heads_not_looked_at,
        replace(DECODE, seed=10),
        "I16",
        {"rejects": True},
        (
            "q with strided heads: no error, and then out[0, 1, 0] = nan",
            "a ValueError or another clear error from the host",
            "sequence 0 (context length 1), head 1, dim 0; 4 of 8 elements are wrong",
        ),
        id="heads_not_looked_at rejects",
    ),
    pytest.param(
        nothing_written,
        STEP,
        "I18",
        {},
        (
            "out[0, 0, 0] = 0",
            (
                "-0.223937988, give or take 1.88e-07; the kernel is right with the same tokens in the cache"
                " before the call"
            ),
            "sequence 0 (context length 1), head 0, dim 0; 2 of 2 elements are wrong",
        ),
        id="nothing_written",
    ),
]


@pytest.mark.parametrize(("call", "case", "asked", "declared", "words"), EXPECTED)
def test_what_it_says(
    call: Callable[..., Any], case: Case, asked: str, declared: dict[str, Any], words: tuple[str, str, str]
) -> None:
    assert said(call, case, asked, **declared) == (asked, *words)


@pytest.mark.parametrize(
    "case", [DECODE, SHARED, HEADS_OUTSIDE, WRITE, STEP], ids=["plain", "shared", "hnd", "write", "step"]
)
def test_a_good_kernel_is_silent_on_these_cases(case: Case) -> None:
    calls: dict[str, Callable[..., Any]] = {"paged_decode_attention": decode, "reshape_and_cache": write}

    def step(
        key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, q: Any, tables: Any, lengths: Any, scale: Any
    ) -> Any:
        write(key, value, k_cache, v_cache, slots)
        return decode(q, k_cache, v_cache, tables, lengths, scale)

    declared = Declaration(cache_layouts=CACHE_LAYOUTS)
    kernel = Kernel("good", OPERATIONS[case.operation], calls.get(case.operation, step), declared)
    judge = Judge(kernel, runner())
    relations = tuple(item.id for item in judge.invariants if item.relation)
    assert judge.verdict(replace(case, relations=relations)).kind == PASS


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", [DECODE, SHARED, HEADS_OUTSIDE], ids=["plain", "shared", "hnd"])
def test_a_kernel_that_promises_no_bits_is_held_to_the_bound_alone(case: Case, batch_invariant: bool) -> None:
    """Whatever the relation: this one gives other bits at each call, all within the bound."""
    calls = 0

    def noisy(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any) -> Any:
        nonlocal calls
        calls += 1
        return decode(q, k, v, tables, lengths, scale) * (1 + calls % 2 * 2.0**-23)

    def found(**declared: Any) -> str:
        declaration = Declaration(cache_layouts=CACHE_LAYOUTS, batch_invariant=batch_invariant, **declared)
        judge = Judge(Kernel("noisy", OPERATIONS[case.operation], noisy, declaration), runner())
        relations = tuple(item.id for item in judge.invariants if item.relation)
        return judge.verdict(replace(case, relations=relations)).kind

    assert found() == VIOLATION, "the bits do differ"
    for _ in range(2):  # from either end of the noise
        calls += 1
        assert found(deterministic=False) == PASS
