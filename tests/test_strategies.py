"""The strategies: what quick really draws, that it is valid and inside the declaration, and that it shrinks."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from pagefuzz.fuzz import saved
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.session import SHARD
from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import answer, check_oracles
from pagefuzz.oracles.dense.paged_decode_attention import AttentionAnswer
from pagefuzz.strategies import CASES, STRATEGIES
from pagefuzz.strategies.case import FAR_ELEMENTS, Case, InvalidCase, Limits, Sequence
from pagefuzz.strategies.draws import BLOCK_SIZES, GROUP_SIZES, HEAD_DIMS
from pagefuzz.strategies.layouts import GARBAGE, INT32_MAX
from pagefuzz.strategies.number_formats import FORMATS, decode
from pagefuzz.strategies.paged_decode_attention import DRAWN_VALUES, PROBES, PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.strategies.values import MODEST_POISONS, POISONS

SLOTS, WRITE, DECODE = "slot_mapping", "reshape_and_cache", "paged_decode_attention"
BOTH = "write_then_decode"
RELATIONS = ("I2", "I7", "I8")
DEFAULT = Declaration()
STRIDED = Declaration(cache_layouts=("contiguous", "strided"))

each_operation = pytest.mark.parametrize("operation", STRATEGIES)
each_paged = pytest.mark.parametrize("operation", [SLOTS, DECODE, BOTH])


def draw(operation: str, declared: Declaration, count: int, seed: int) -> list[Any]:
    cases: list[Any] = []

    each_case(STRATEGIES[operation](declared, Limits(), RELATIONS), count, seed, cases.append)
    return cases


@cache
def drawn(operation: str) -> list[Any]:
    """2,000 cases as quick draws them for one kernel: in shards, each with a seed of its own."""
    assert 2000 % SHARD == 0
    seeds = [hashlib.sha256(f"0/torch_{operation}/{shard}".encode()) for shard in range(2000 // SHARD)]
    return [case for seed in seeds for case in draw(operation, DEFAULT, SHARD, int(seed.hexdigest()[:15], 16))]


@cache
def distinct(operation: str) -> list[Any]:
    return list(dict.fromkeys(drawn(operation)))


def share(operation: str, holds: Callable[[Any], bool]) -> float:
    cases = drawn(operation)
    return sum(map(holds, cases)) / len(cases)


def features(operation: str) -> Counter[str]:
    return Counter(word for case in drawn(operation) for word in case.features())


# -------------------------------------------------------------------------------------------------------- what is drawn


@each_operation
def test_as_many_cases_as_asked_for_and_few_twice(operation: str) -> None:
    assert len(drawn(operation)) == 2000
    assert len(distinct(operation)) > 1600


@pytest.mark.parametrize(
    ("operation", "feature", "least"),
    [
        *((operation, "B >= 2", 0.5) for operation in (SLOTS, DECODE, BOTH)),
        *((operation, "3 pages or more", 0.3) for operation in (SLOTS, DECODE, BOTH)),
        *((operation, "D >= 64", 0.1) for operation in (WRITE, DECODE, BOTH)),
        *((operation, "group >= 2", 0.5) for operation in (DECODE, BOTH)),
        *((operation, "offset past 2^31", 0.05) for operation in STRATEGIES),
        *((operation, "partial last page", 0.5) for operation in (SLOTS, DECODE, BOTH)),
        *((operation, "garbage tail", 0.5) for operation in (SLOTS, DECODE, BOTH)),
        *((operation, "programs in another order", 0.15) for operation in STRATEGIES),
        (WRITE, "padded slots", 0.5),
        (WRITE, "T >= 2", 0.5),
    ],
)
def test_share_of_a_layout_feature(operation: str, feature: str, least: float) -> None:
    assert features(operation)[feature] >= least * 2000, features(operation)


def test_the_features_are_what_they_say() -> None:
    """The shares above are only worth what the words are; here they are counted from the fields."""
    table: list[tuple[str, str, Callable[[Any], bool]]] = [
        (DECODE, "B >= 2", lambda case: len(case.context_lens) > 1),
        (DECODE, "3 pages or more", lambda case: any(n > 2 * case.block_size for n in case.context_lens)),
        (DECODE, "D >= 64", lambda case: case.head_dim > 63),
        (DECODE, "group >= 2", lambda case: case.num_heads >= 2 * case.num_kv_heads),
        (
            DECODE,
            "offset past 2^31",
            lambda case: any(
                block * case.block_size * case.num_kv_heads * case.head_dim >= 2**31
                for row in case.sequences
                for block in row.blocks
            ),
        ),
        (DECODE, "partial last page", lambda case: any(n % case.block_size for n in case.context_lens)),
        (DECODE, "garbage tail", lambda case: any(-(-n // case.block_size) < case.width for n in case.context_lens)),
        (WRITE, "padded slots", lambda case: any(slot < 0 for slot in case.slots)),
        (
            WRITE,
            "offset past 2^31",
            lambda case: any(s * case.num_kv_heads * case.head_dim >= 2**31 for s in case.slots),
        ),
        (
            SLOTS,
            "offset past 2^31",
            lambda case: any(block * case.block_size >= 2**31 for row in case.sequences for block in row.blocks),
        ),
        (SLOTS, "padded slots", lambda case: any(token.position < 0 for token in case.tokens)),
    ]
    for operation, word, holds in table:
        for case in distinct(operation):
            assert (word in case.features()) == holds(case), (word, case.one_line())


@each_operation
def test_every_case_is_valid_and_inside_the_declaration(operation: str) -> None:
    for case in distinct(operation):
        case.check()
        assert case.beyond(DEFAULT) == ""
        assert case.fault == ""
        assert isinstance(case, CASES[operation]) and hash(case) == hash(replace(case))


def equals(field: str, value: Any) -> Callable[[Any], bool]:
    return lambda case: bool(getattr(case, field) == value)


def scale_is(scale: float) -> Callable[[Any], bool]:
    return lambda case: case.scale == scale != case.head_dim**-0.5


ANY_DTYPE = {dtype: equals("dtype", dtype) for dtype in FORMATS}
OCCURS: dict[str, dict[str, Callable[[Any], bool]]] = {
    SLOTS: {
        "no sequence": lambda case: not case.sequences,
        "no token": lambda case: not case.tokens,
        "only padding": lambda case: bool(case.tokens) and all(token.position < 0 for token in case.tokens),
        "padding other than -1": lambda case: any(token.position < -1 for token in case.tokens),
        "padding of a sequence that is none": lambda case: any(
            token.position < 0 and not 0 <= token.seq_id < len(case.sequences) for token in case.tokens
        ),
        "a sequence twice": lambda case: len({t.seq_id for t in case.tokens if t.position >= 0}) < len(case.tokens),
        "first of a page": lambda case: any(t.position > 0 and t.position % case.block_size == 0 for t in case.tokens),
        "int32 tokens": lambda case: case.token_dtype == "int32",
        "int64 tokens": lambda case: case.token_dtype == "int64",
        "tokens of another dtype than tables": lambda case: case.token_dtype != case.index_dtype,
        "a slot past 2^32": lambda case: any(b * case.block_size >= 2**32 for b in case.owned),
    },
    WRITE: {
        "no token": lambda case: not case.slots,
        "padding first": lambda case: case.padded == (0,) and len(case.slots) > 1,
        "padding last": lambda case: case.padded == (len(case.slots) - 1,) and len(case.slots) > 1,
        "padding in the middle": lambda case: any(0 < t < len(case.slots) - 1 for t in case.padded),
        "padding everywhere": lambda case: len(case.slots) > 1 and len(case.padded) == len(case.slots),
        "padding nowhere": lambda case: len(case.slots) > 1 and not case.padded,
        "-1": lambda case: -1 in case.slots,
        "-2": lambda case: -2 in case.slots,
        "before the last block": lambda case: -case.block_size - 1 in case.slots,
        "-99999": lambda case: -GARBAGE in case.slots,
        "the smallest int32": lambda case: -(2**31) in case.slots,
        "rows that do not count": lambda case: case.extra_rows > 0,
        "rows that do not count, and padding": lambda case: case.extra_rows > 0 and bool(case.padded),
        "only rows that do not count": lambda case: case.extra_rows > 0 and not case.slots,
        "fused": lambda case: case.fused,
        "fused with unlike gaps": lambda case: case.fused and case.key_padding != case.value_padding,
        "key and value of unlike strides": lambda case: not case.fused and case.key_padding != case.value_padding,
        "key a view, value contiguous": lambda case: not case.fused and case.key_padding and not case.value_padding,
        "contiguous": lambda case: not (case.fused or case.key_padding or case.value_padding),
        "an odd stride": lambda case: (case.row + case.key_padding) % 2 == 1 and case.row % 2 == 0,
        "D no power of two": lambda case: case.head_dim & (case.head_dim - 1) != 0,
        "KVH no power of two": lambda case: case.num_kv_heads & (case.num_kv_heads - 1) != 0,
        "an element past 2^32": lambda case: max(case.slots, default=0) * case.row >= 2**32,
        "near and far": lambda case: case.is_far() and any(0 <= s * case.row < FAR_ELEMENTS for s in case.slots),
        "int32 and far": lambda case: case.is_far() and case.index_dtype == "int32",
        "out of order": lambda case: list(case.slots) != sorted(case.slots),
        **ANY_DTYPE,
        **{values: equals("values", values) for values in ReshapeAndCacheCase.value_recipes},
    },
    DECODE: {
        "a whole row shared": lambda case: any(
            row.blocks and row.blocks == other.blocks[: len(row.blocks)]
            for b, row in enumerate(case.sequences)
            for other in case.sequences[:b]
        ),
        "no sequence": lambda case: not case.sequences,
        "only empty sequences": lambda case: bool(case.sequences) and not any(case.context_lens),
        "an empty sequence among others": lambda case: 0 in case.context_lens and any(case.context_lens),
        "D no power of two": lambda case: case.head_dim & (case.head_dim - 1) != 0,
        "group no power of two": lambda case: case.group_size & (case.group_size - 1) != 0,
        "KVH no power of two": lambda case: case.num_kv_heads & (case.num_kv_heads - 1) != 0,
        "multi-head": lambda case: case.group_size == 1 and case.num_kv_heads > 1,
        "multi-query": lambda case: case.group_size > 1 and case.num_kv_heads == 1,
        "grouped": lambda case: case.group_size > 1 and case.num_kv_heads > 1,
        "H / KVH differs from KVH": lambda case: 1 < case.num_kv_heads != case.group_size > 1,
        "q contiguous": lambda case: not case.q_padding,
        "q at an odd stride": lambda case: case.q_padding == 1 and case.num_heads * case.head_dim % 2 == 0,
        "q in a fused view": lambda case: case.q_padding == 2 * case.num_kv_heads * case.head_dim,
        "scale 1/sqrt(D)": lambda case: case.scale == case.head_dim**-0.5 != 1,
        **{f"scale {scale}": scale_is(scale) for scale in (1, 0.5, 0.125)},
        "int32 lengths": lambda case: case.length_dtype == "int32",
        "lengths of another dtype than tables": lambda case: case.length_dtype != case.index_dtype,
        "an element past 2^32": lambda case: max(case.owned, default=0) * case.block_elements() >= 2**32,
        "int32 and far": lambda case: case.is_far() and case.index_dtype == "int32",
        **ANY_DTYPE,
        **{values: equals("values", values) for values in DRAWN_VALUES},
        **{f"poison {kind}": equals("poison", kind) for kind in POISONS},
    },
}
OCCURS[BOTH] = {
    **{word: holds for word, holds in OCCURS[DECODE].items() if word != "int32 and far"},  # few slots fit int32 there
    "nothing written": lambda case: not case.written(),
    "everything written": lambda case: len(case.written()) == sum(case.context_lens) > 1,
    "a shared page that is not written": lambda case: (
        0 < len(case.written()) < sum(min(n, case.new_tokens) for n in case.context_lens)
    ),
}
PAGED: dict[str, Callable[[Any], bool]] = {
    "context length 1": lambda case: any(row.context_len == 1 for row in case.sequences),
    "context length 0": lambda case: any(row.context_len == 0 for row in case.sequences),
    "a multiple": lambda case: any(
        row.context_len and row.context_len % case.block_size == 0 for row in case.sequences
    ),
    "one less than a multiple": lambda case: (
        case.block_size > 2 and any(row.context_len % case.block_size == case.block_size - 1 for row in case.sequences)
    ),
    "one more than a multiple": lambda case: (
        case.block_size > 2
        and any(row.context_len > 1 and row.context_len % case.block_size == 1 for row in case.sequences)
    ),
    "several pages": lambda case: any(len(row.blocks) > 3 for row in case.sequences),
    "as wide as its longest row": lambda case: any(row.blocks and not row.tail for row in case.sequences),
    "no row with a tail": lambda case: (
        len(case.sequences) > 1 and all(row.blocks and not row.tail for row in case.sequences)
    ),
    "a free block": lambda case: case.num_blocks > max(len(case.owned), 1),
    "no free block": lambda case: bool(case.owned) and case.num_blocks == len(case.owned),
    "block 0 owned": lambda case: 0 in case.owned,
    "block 0 free": lambda case: bool(case.owned) and 0 not in case.owned,
    "blocks out of order": lambda case: any(list(row.blocks) != sorted(row.blocks) for row in case.sequences),
    "a shared prefix": lambda case: sum(len(row.blocks) for row in case.sequences) > len(case.owned),
    "block size 1": lambda case: case.block_size == 1,
    "block size no power of two": lambda case: case.block_size & (case.block_size - 1) != 0,
    "a narrowed table": lambda case: case.table_padding > 0 and len(case.sequences) > 1,
    "int32 tables": lambda case: case.index_dtype == "int32",
    "int64 tables": lambda case: case.index_dtype == "int64",
    "near and far": lambda case: case.is_far() and min(case.owned) * case.block_elements() < FAR_ELEMENTS,
}


@each_operation
def test_everything_occurs(operation: str) -> None:
    """In one case of 250 at least, so that every run of quick meets it."""
    wanted = OCCURS[operation] | (PAGED if operation != WRITE else {})
    shares = {word: share(operation, holds) for word, holds in wanted.items()}
    assert {word: seen for word, seen in shares.items() if seen < 0.004} == {}


def filled_blocks(case: Any) -> set[int]:
    return {first // case.block_elements() for first, _ in case.arguments().tensors["k_cache"].buffer.pieces}


def inside_but_free(case: Any, entry: int) -> bool:
    return 0 <= entry < case.num_blocks and entry not in case.owned


TAILS: dict[str, Callable[[Any, Sequence, int], bool]] = {
    "99999": lambda case, row, entry: entry == 99999 >= case.num_blocks,
    "-1": lambda case, row, entry: entry == -1,
    "live, of another sequence": lambda case, row, entry: entry in case.owned and entry not in row.blocks,
    "live, of its own": lambda case, row, entry: entry in row.blocks,
    "just past the pool": lambda case, row, entry: entry == case.num_blocks,
    "free": lambda case, row, entry: inside_but_free(case, entry),
    "INT32_MAX": lambda case, row, entry: entry == INT32_MAX >= case.num_blocks,
}


@each_paged
@pytest.mark.parametrize("kind", TAILS)
def test_every_kind_of_tail_is_drawn(operation: str, kind: str) -> None:
    def holds(case: Any) -> bool:
        return any(TAILS[kind](case, row, entry) for row in case.sequences for entry in row.tail)

    # INT32_MAX is drawn last of the kinds, and for attention only where such a block would still lie in the arena.
    assert share(operation, holds) >= (0.01 if kind == "INT32_MAX" else 0.05)


def test_free_blocks_in_tails_hold_poison_or_were_never_touched() -> None:
    poisoned = untouched = 0
    for case in distinct(DECODE):
        free = {entry for row in case.sequences for entry in row.tail if inside_but_free(case, entry)}
        if free:
            filled = filled_blocks(case)
            poisoned += bool(free & filled)
            untouched += bool(free - filled)
    assert poisoned > 50 and untouched > 50


def test_what_no_sequence_owns_holds_poison() -> None:
    """In owned blocks behind the last token, in free blocks, and in the gaps of q."""
    seen = Counter[str]()
    for case in distinct(DECODE):
        if case.poison != "nan" or case.dtype != "float32":
            continue
        tensors, row = case.arguments().tensors, case.num_kv_heads * case.head_dim
        for name in ("k_cache", "v_cache"):
            for first, bits in tensors[name].buffer.pieces:
                slots = case.owned.get(first // case.block_elements(), 0)
                nan = np.isnan(decode(bits, case.dtype))
                assert not nan[: slots * row].any() and nan[slots * row :].all()
                seen["last page" if 0 < slots < case.block_size else "whole" if slots else "free"] += 1
        if case.q_padding and case.sequences:
            rows = decode(tensors["q"].buffer.pieces[0][1], case.dtype).reshape(len(case.sequences), -1)
            assert np.isnan(rows[:, case.num_heads * case.head_dim :]).all()
            assert not np.isnan(rows[:, : case.num_heads * case.head_dim]).any()
            seen["q"] += 1
    assert min(seen[word] for word in ("last page", "whole", "free", "q")) > 10, seen


def test_views_lie_as_they_say() -> None:
    fused = separate = 0
    for case in distinct(WRITE):
        tensors = case.arguments().tensors
        key, value = tensors["key"], tensors["value"]
        assert key.shape == value.shape == (case.rows, case.num_kv_heads, case.head_dim)
        assert case.rows == len(case.slots) + case.extra_rows
        assert key.strides[1:] == value.strides[1:] == (case.head_dim, 1)
        if case.fused:
            assert key.buffer is value.buffer
            assert key.strides[0] == value.strides[0] == 2 * case.row + case.key_padding + case.value_padding
            assert (key.offset, value.offset) == (0, case.row + case.key_padding)
            fused += 1
        else:
            assert key.buffer is not value.buffer
            assert key.strides[0] == case.row + case.key_padding
            assert value.strides[0] == case.row + case.value_padding
            separate += 1
    assert fused > 300 and separate > 300
    for case in distinct(DECODE):
        q, table = case.arguments().tensors["q"], case.arguments().tensors["block_tables"]
        assert q.strides == (case.num_heads * case.head_dim + case.q_padding, case.head_dim, 1)
        assert table.strides == (case.width + case.table_padding, 1)


def test_slots_are_unique_and_in_no_padding() -> None:
    for case in distinct(WRITE):
        addressed = [slot for slot in case.slots if slot >= 0]
        assert len(set(addressed)) == len(addressed)
        buffer, elements = case.watched()["k_cache"]
        rows = [list(range(slot * case.row, (slot + 1) * case.row)) for slot in addressed]
        assert buffer == "k_cache" and elements.tolist() == rows


def test_few_drawn_cases_are_loose() -> None:
    """The tolerance says little about a loose case (measured: none of 2,000)."""
    assert share(DECODE, lambda case: answer(case, DEFAULT).loose) <= 0.05


@each_operation
def test_relations_are_drawn_out_of_those_offered(operation: str) -> None:
    counts = Counter(len(case.relations) for case in drawn(operation))
    assert set(counts) == {0, 1, 2} and min(counts.values()) > 150
    assert {id for case in drawn(operation) for id in case.relations} == set(RELATIONS)


@each_operation
def test_the_same_seed_draws_the_same(operation: str) -> None:
    assert draw(operation, DEFAULT, 30, 7) == draw(operation, DEFAULT, 30, 7) != draw(operation, DEFAULT, 30, 8)


SHAPE = ("dtype", "index_dtype", "length_dtype", "token_dtype", "num_kv_heads", "group_size", "head_dim", "block_size")
STRIDES = ("k_layout", "v_layout", "q_padding", "key_padding", "value_padding", "fused")


@each_operation
def test_cases_of_a_pool_of_shapes_have_those_and_differ_in_all_else(operation: str) -> None:
    for pool in ((3,), (3, 4, 5)):
        cases: list[Any] = []
        each_case(STRATEGIES[operation](STRIDED, Limits(), RELATIONS, pool), 150, 1, cases.append)
        shapes = {tuple(getattr(case, name, None) for name in (*SHAPE, *STRIDES)) for case in cases}
        most = len(pool) * (2 if operation == BOTH else 1)  # whose slots may want int64 where blocks do not
        assert 0 < len(shapes) <= most and (len(pool) == 1 or len(shapes) > 1)
        assert len({replace(case, seed=0) for case in cases}) > 100
        assert {id for case in cases for id in case.relations} == set(RELATIONS)


def test_some_cases_are_large_along_one_axis() -> None:
    decodes, writes = drawn(DECODE), drawn(WRITE)
    large = {
        "tokens": [case for case in decodes if max(case.context_lens, default=0) > 256],
        "pages": [case for case in decodes if max(map(len, (row.blocks for row in case.sequences)), default=0) > 32],
        "sequences": [case for case in decodes if len(case.sequences) > 4],
        "kv heads": [case for case in decodes if case.num_kv_heads > 4],
        "group": [case for case in decodes if case.group_size > 12],
        "head dim": [case for case in decodes if case.head_dim > 128],
        "tokens of a write": [case for case in writes if len(case.slots) > 18],
    }
    assert all(large.values()), {name: len(cases) for name, cases in large.items()}
    assert sum(map(len, large.values())) < 0.1 * len(decodes)


# --------------------------------------------------------------------------------------------------------- declarations

RESTRICTED: dict[str, dict[str, Any]] = {
    "one dtype": {"dtypes": ("float16",)},
    "two dtypes": {"dtypes": ("bfloat16", "float32")},
    "a serving engine": {"head_dims": (64, 128), "block_sizes": (16,), "group_sizes": (1, 4, 8)},
    "sizes that nothing prefers": {"head_dims": (576,), "block_sizes": (7, 24), "group_sizes": (16, 6)},
    "large pages": {"head_dims": (256, 576, 1024), "block_sizes": (24, 128, 256)},
    "large pages in one tensor": {"head_dims": (256, 576), "block_sizes": (128, 256), "cache_layouts": ("packed",)},
    "preferred and other sizes": {"head_dims": (64, 192), "block_sizes": (16, 48), "group_sizes": (1, 9)},
    "predicates": {
        "head_dims": lambda size: size % 16 == 0,
        "block_sizes": lambda size: size & (size - 1) == 0,
        "group_sizes": lambda size: size % 2 == 1,
    },
    "predicates that nothing preferred fits": {
        "head_dims": lambda size: size > 130,
        "block_sizes": lambda size: 40 < size < 44,
        "group_sizes": lambda size: size == 11,
    },
    "ranges": {"head_dims": range(16, 257, 16), "block_sizes": range(1, 4), "group_sizes": range(2, 4)},
    "ones": {"head_dims": (1,), "block_sizes": (1,), "group_sizes": (1,)},
    "int32": {"index_dtypes": ("int32",)},
    "int64": {"index_dtypes": ("int64",)},
    "contiguous": {"token_strides": "contiguous", "table_strides": "contiguous"},
    "only -1 is padding": {"negative_slots": "minus_one"},
    "no padding": {"negative_slots": "never"},
    "no empty sequence": {"empty": "never"},
    "finite tails": {"unowned": "finite"},
    "all at once": {
        "dtypes": ("bfloat16",),
        "head_dims": (96,),
        "group_sizes": (5,),
        "block_sizes": (32,),
        "index_dtypes": ("int32",),
        "token_strides": "contiguous",
        "table_strides": "contiguous",
        "negative_slots": "never",
        "empty": "never",
        "unowned": "finite",
    },
}


@cache
def restricted(operation: str, name: str) -> list[Any]:
    return draw(operation, Declaration(**RESTRICTED[name]), 40, 3)


@each_operation
@pytest.mark.parametrize("name", RESTRICTED)
def test_a_restricted_declaration_is_kept_to(operation: str, name: str) -> None:
    declared = Declaration(**RESTRICTED[name])
    cases = restricted(operation, name)
    assert len(cases) == 40 and len(set(cases)) > 25
    for case in cases:
        case.check()
        assert case.beyond(declared) == "", case.one_line()


def all_of(name: str, field: str) -> set[Any]:
    return {
        getattr(case, field)
        for operation in (WRITE, DECODE)
        for case in restricted(operation, name)
        if hasattr(case, field)
    }


def test_every_declared_size_is_drawn() -> None:
    assert all_of("a serving engine", "head_dim") == {64, 128}
    assert all_of("sizes that nothing prefers", "head_dim") == {576}
    assert all_of("sizes that nothing prefers", "block_size") == {7, 24}
    assert all_of("sizes that nothing prefers", "group_size") == {16, 6}
    assert all_of("preferred and other sizes", "head_dim") == {64, 192}
    assert all_of("preferred and other sizes", "block_size") == {16, 48}
    assert all_of("preferred and other sizes", "group_size") == {1, 9}
    assert all_of("predicates that nothing preferred fits", "block_size") == {41, 42, 43}
    assert all_of("two dtypes", "dtype") == {"bfloat16", "float32"}
    for field, preferred in (("head_dim", HEAD_DIMS), ("block_size", BLOCK_SIZES)):
        assert {getattr(case, field) for case in drawn(WRITE)} == set(preferred)
    assert {case.group_size for case in drawn(DECODE)} == {*GROUP_SIZES, 16, 17}  # of large cases
    assert {case.head_dim for case in drawn(DECODE)} == {*HEAD_DIMS, 192, 256}


def test_what_stays_allowed_is_still_drawn() -> None:
    assert any(-1 in case.slots for case in restricted(WRITE, "only -1 is padding"))
    assert any(0 in case.context_lens for case in restricted(DECODE, "finite tails"))
    assert {case.poison for case in restricted(DECODE, "finite tails")} == set(MODEST_POISONS)
    assert any(case.q_padding and case.table_padding for case in restricted(DECODE, "int32"))
    assert any(case.is_far() for case in drawn(WRITE) if case.index_dtype == "int32")


@pytest.mark.parametrize("what", ["head_dims", "block_sizes"])
def test_a_declaration_that_admits_nothing_says_so(what: str) -> None:
    beyond_reach: dict[str, Any] = {what: lambda size: size > 2000}
    declared = Declaration(**beyond_reach)
    with pytest.raises(InvalidCase, match=f"^nothing to draw: the declared {what} admit no size up to 1024"):
        draw(WRITE, declared, 1, 0)


ROW = Sequence((0,), (), 2)
TABLE = PagedDecodeAttentionCase(block_size=2, num_blocks=3, sequences=(ROW,))
WRITES = ReshapeAndCacheCase(block_size=2, num_blocks=3, slots=(0, 5))
TOKENS = SlotMappingCase(block_size=2, num_blocks=3, sequences=(ROW,), tokens=(Token(0, 1),))
WIDE = Sequence((0,), (1,) * 65535, 2)
WITHIN = replace(
    PagedDecodeAttentionCase(block_size=2, num_blocks=2, sequences=(Sequence((0, 1), (9,), 3),)),
    num_kv_heads=2,
    group_size=3,
    head_dim=5,
    table_padding=1,
    q_padding=1,
    index_dtype="int32",
    length_dtype="int32",
    poison="nan",
)


@pytest.mark.parametrize(
    ("case", "declared", "words"),
    [
        (WITHIN, {}, ""),
        (WITHIN, {"dtypes": ("float16",)}, "dtype float32"),
        (WITHIN, {"head_dims": (4,)}, "head dim 5"),
        (WITHIN, {"group_sizes": lambda size: size != 3}, "group size 3"),
        (WITHIN, {"block_sizes": range(16, 32)}, "block size 2"),
        (WITHIN, {"index_dtypes": ("int64",)}, "int32 block tables"),
        (replace(WITHIN, index_dtype="int64"), {"index_dtypes": ("int64",)}, "int32 context_lens"),
        (WITHIN, {"table_strides": "contiguous"}, "a block table narrower than its row stride"),
        (WITHIN, {"token_strides": "contiguous"}, "q as a view"),
        (WITHIN, {"unowned": "finite"}, "nan in a last page"),
        (replace(WITHIN, poison="largest"), {"unowned": "finite"}, "largest in a last page"),
        (replace(WITHIN, poison="tenant"), {"unowned": "finite"}, ""),
        (replace(WITHIN, sequences=(Sequence((0, 1), (), 4),)), {"unowned": "finite"}, ""),
        (replace(WITHIN, sequences=(Sequence((), (9,), 0),)), {"empty": "never"}, "a context length of 0"),
        (replace(WITHIN, sequences=(Sequence((), (9,), 0),)), {"empty": "untouched"}, ""),
        (ReshapeAndCacheCase(block_size=1, num_blocks=1, slots=(-1,)), {"negative_slots": "never"}, "slot -1"),
        (ReshapeAndCacheCase(block_size=1, num_blocks=1, slots=(-1,)), {"negative_slots": "minus_one"}, ""),
        (ReshapeAndCacheCase(block_size=1, num_blocks=1, slots=(-2,)), {"negative_slots": "minus_one"}, "slot -2"),
        (
            ReshapeAndCacheCase(block_size=1, num_blocks=1, fused=True),
            {"token_strides": "contiguous"},
            "key and value as views",
        ),
        (
            ReshapeAndCacheCase(block_size=1, num_blocks=1, value_padding=1),
            {"token_strides": "contiguous"},
            "key and value as views",
        ),
        (ReshapeAndCacheCase(block_size=3, num_blocks=1), {"block_sizes": (1,)}, "block size 3"),
        (ReshapeAndCacheCase(block_size=3, num_blocks=1), {"head_dims": (2,)}, "head dim 1"),
        (ReshapeAndCacheCase(block_size=3, num_blocks=1), {"index_dtypes": ("int32",)}, "int64 slots"),
        (ReshapeAndCacheCase(block_size=3, num_blocks=1), {"dtypes": ("bfloat16",)}, "dtype float32"),
        (
            replace(TOKENS, tokens=(Token(0, -7),)),
            {"negative_slots": "never"},
            "position -7",
        ),
        (
            SlotMappingCase(block_size=1, num_blocks=1, token_dtype="int32"),
            {"index_dtypes": ("int64",)},
            "int32 positions",
        ),
    ],
)
def test_beyond_names_what_is_not_declared(case: Case, declared: dict[str, Any], words: str) -> None:
    case.check()
    assert case.beyond(Declaration(**declared)) == words


# -------------------------------------------------------------------------------------------------------------- simpler


def is_valid(case: Case) -> bool:
    try:
        case.check()
    except InvalidCase:
        return False
    return True


@each_operation
def test_simpler_cases_differ_and_most_are_valid(operation: str) -> None:
    tried = invalid = 0
    for case in distinct(operation)[:400]:
        for simpler in case.simpler():
            assert simpler != case, case.one_line()
            assert type(simpler) is type(case)
            tried += 1
            invalid += not is_valid(simpler)
    assert tried > 4000 and invalid <= 0.005 * tried, (tried, invalid)


@each_operation
def test_simpler_cases_stay_inside_what_the_kernel_declares(operation: str) -> None:
    """Not all do, which costs a shrink nothing but a try; most must, or it would not get anywhere."""
    for name in ("contiguous", "int64", "two dtypes", "ones"):
        declared = Declaration(**RESTRICTED[name])
        inside = outside = 0
        for case in dict.fromkeys(restricted(operation, name)):
            for simpler in case.simpler():
                inside, outside = (inside + 1, outside) if simpler.beyond(declared) == "" else (inside, outside + 1)
        assert inside > 2 * outside, (name, inside, outside)


def walk(case: Any, choose: Callable[[Iterator[Any]], Any | None], most: int) -> list[Any]:
    """The cases passed on the way down when every chosen step is accepted; fails where one comes twice."""
    passed, seen = [case], {case}
    for _ in range(most):
        step = choose(step for step in case.simpler() if is_valid(step))
        if step is None:
            return passed
        assert step not in seen, f"a circle from {step.one_line()} over {passed[-1].one_line()}"
        case = step
        passed.append(step)
        seen.add(step)
    raise AssertionError(f"no end after {most} steps: {case.one_line()}")


@each_operation
def test_the_boldest_steps_end_at_next_to_nothing(operation: str) -> None:
    for case in distinct(operation)[:400]:
        *_, last = walk(case, lambda steps: next(steps, None), 60)
        assert last.rows_of_call() <= 1 and last.shapes()
        assert (last.block_size, last.seed) == (1, 0)
        assert last.num_blocks <= 2 or last.is_far(), last.one_line()
        if operation != SLOTS:
            assert (last.num_kv_heads, last.head_dim, last.dtype) == (1, 1, "float32"), last.one_line()
            assert (last.poison, last.values) == ("zeros", "ordinary")


@each_operation
def test_steps_at_random_never_go_round_in_circles(operation: str) -> None:
    chance = random.Random(0)

    def any_of(steps: Iterator[Any]) -> Any | None:
        found = list(steps)
        return chance.choice(found) if found else None

    for case in distinct(operation)[:60:5]:
        walk(case, any_of, 120)


@each_operation
def test_the_most_timid_steps_never_go_round_in_circles(operation: str) -> None:
    def last_of(steps: Iterator[Any]) -> Any | None:
        *_, last = [None, *steps]
        return last

    for case in distinct(operation)[1:40:10]:
        walk(case, last_of, 2000)


# ----------------------------------------------------------------------------------------------------- saved and loaded


@each_operation
def test_json_gives_the_same_case(operation: str) -> None:
    for case in distinct(operation):
        text = msgspec.json.encode(asdict(case))
        assert saved.to_case(operation, msgspec.json.decode(text), "here") == case


@each_operation
def test_a_token_gives_the_same_case(operation: str) -> None:
    for case in distinct(operation)[::10]:
        told, found = saved.from_token(saved.token("mine", "I4", case))
        assert found == case
        assert (told.operation, told.kernel, told.invariant) == (operation, "mine", "I4")


def digest(case: Case) -> str:
    """Of every tensor and number of the call: where it lies and every bit of it."""
    found = hashlib.sha256()
    arguments = case.arguments()
    for name, value in arguments.values.items():
        found.update(f"{name} {value if isinstance(value, int | float) else (value.shape, value.strides)}".encode())
    for name, tensor in arguments.tensors.items():
        found.update(f"{name} {tensor.buffer.name} {tensor.offset}".encode())
    for buffer in arguments.buffers:
        found.update(f"{buffer.name} {buffer.dtype} {buffer.size} {buffer.is_cache}".encode())
        for first, bits in sorted(buffer.pieces, key=lambda piece: piece[0]):
            found.update(f"{first} {bits.dtype.str}".encode() + bits.astype(bits.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()


@each_operation
def test_a_saved_case_gives_the_same_bits(operation: str) -> None:
    for case in distinct(operation)[::10]:
        loaded = saved.to_case(operation, msgspec.json.decode(msgspec.json.encode(asdict(case))), "here")
        assert digest(loaded) == digest(case)
        other = replace(case, seed=case.seed + 1) if operation != SLOTS else replace(case, table_padding=7)
        assert digest(other) != digest(case) or case.rows_of_call() == 0 or getattr(case, "values", "") != "ordinary"


GOLDEN = [
    (
        '{"seed":41,"block_size":4,"num_blocks":536870920,"table_padding":3,"index_dtype":"int32","sequences":['
        '{"blocks":[9,536870919],"tail":[99999],"context_len":6},{"blocks":[9],"tail":[-1,0],"context_len":4}],'
        '"tokens":[{"seq_id":0,"position":5},{"seq_id":-1,"position":-2},{"seq_id":1,"position":3}]}',
        SLOTS,
        "843bf7a94d58e278572102e724cb30494770795d26db9d57e5f5736d429e86b5",
    ),
    (
        '{"seed":41,"block_size":3,"num_blocks":99999999,"slots":[299999996,-7,2],"extra_rows":2,"num_kv_heads":3,'
        '"head_dim":5,"key_padding":1,"value_padding":4,"fused":true,"index_dtype":"int32","dtype":"bfloat16",'
        '"values":"bit_patterns","poison":"tenant"}',
        WRITE,
        "4b4945f95a121699037053e05621819b30d290160ada1bee99279abb9131cffe",
    ),
    (
        '{"seed":41,"block_size":3,"num_blocks":99999999,"sequences":['
        '{"blocks":[7,99999998],"tail":[99999],"context_len":5},{"blocks":[7],"tail":[-1,8],"context_len":3}],'
        '"num_kv_heads":2,"group_size":3,"head_dim":6,"scale":0.125,"q_padding":1,"length_dtype":"int32",'
        '"dtype":"float16","values":"large_values","poison":"tenant"}',
        DECODE,
        "0c40faefc5e6f7852b749d7b1161d96f09be12ad455f5afbd3883dd680230073",
    ),
    (
        '{"seed":41,"block_size":3,"num_blocks":99999999,"slots":[299999996,-7,2],"extra_rows":2,"num_kv_heads":3,'
        '"head_dim":5,"k_layout":{"order":"NHSD","padding":[3,0,1,0]},"v_layout":{"order":"NSHD","padding":[0,2,0,0]},'
        '"dtype":"bfloat16","values":"bit_patterns"}',
        WRITE,
        "2dfc2a0a16945efafd596f6e24467f53bc17bc7f73b86f5580c7627929049c1c",
    ),
    (
        '{"seed":41,"block_size":3,"num_blocks":99999999,"sequences":['
        '{"blocks":[7,99999998],"tail":[99999],"context_len":5},{"blocks":[7],"tail":[-1,8],"context_len":3}],'
        '"num_kv_heads":2,"group_size":3,"head_dim":6,"scale":-0.125,"k_layout":{"order":"NSH2D","padding":[5,0,1,0,0]},'
        '"v_layout":{"order":"NSH2D","padding":[5,0,1,0,0]},"dtype":"float16","poison":"tenant","tokens_of":[[4,4],[4]],'
        '"queries_of":[2,0]}',
        DECODE,
        "6a0a7e43416d782b016f294f2709c315f02ab50c9a75fee79600f95666b6527d",
    ),
    (
        '{"seed":41,"block_size":3,"num_blocks":99999999,"sequences":['
        '{"blocks":[7,99999998],"tail":[99999],"context_len":5},{"blocks":[9],"tail":[-1,8],"context_len":3}],'
        '"num_kv_heads":2,"group_size":3,"head_dim":6,"scale":-0.125,"k_layout":{"order":"N2SHD"},'
        '"v_layout":{"order":"N2SHD"},"dtype":"float32","values":"needles","poison":"nan_and_garbage","new_tokens":4}',
        BOTH,
        "ca42d829a1c055cd1e8967c759419e9a92eeb0c6c9310f34664bee718189eb18",
    ),
]


@pytest.mark.parametrize(("text", "operation", "golden"), GOLDEN, ids=[operation for _, operation, _ in GOLDEN])
def test_golden_digest(text: str, operation: str, golden: str) -> None:
    """Another machine, numpy or version of the recipes that changes a bit of a saved case shows here."""
    assert digest(saved.to_case(operation, msgspec.json.decode(text), "here")) == golden


# ------------------------------------------------------------------------------------------- other layouts, same tokens


def right(case: Any) -> Any:
    check_oracles(case, DEFAULT)
    found = answer(case, DEFAULT)
    return found.exact if isinstance(found, AttentionAnswer) else found


def with_tokens() -> list[Any]:
    return [case for case in distinct(DECODE) if any(case.context_lens)][:150]


def test_renamed_blocks_hold_the_same_tokens() -> None:
    chance = random.Random(1)
    for case in with_tokens():
        ids = case.in_pool()
        names = dict(zip(ids, chance.sample(range(len(ids) + 5), len(ids)), strict=True))
        renamed = case.renamed(names, len(ids) + 5)
        renamed.check()
        assert [row.blocks for row in renamed.sequences] == [
            tuple(names[block] for block in row.blocks) for row in case.sequences
        ]
        assert [row.tail for row in renamed.sequences] == [
            tuple(names.get(entry, entry) for entry in row.tail) for row in case.sequences
        ]
        assert np.array_equal(right(renamed), right(case))


def test_elsewhere_keeps_tokens_and_alignment() -> None:
    for case in with_tokens():
        other = case.elsewhere(case.in_pool()[::-1], free=3)
        other.check()
        assert np.array_equal(right(other), right(case))
        size = case.block_elements() * case.itemsize()
        for row, moved in zip(case.sequences, other.sequences, strict=True):
            for block, new in zip(row.blocks, moved.blocks, strict=True):
                assert block * size % 64 == new * size % 64
        assert not other.is_far()
        assert other.num_blocks >= max(other.owned) + 4
        moved_ids = {block for row in other.sequences for block in row.blocks}
        if len(case.owned) > 1:
            assert [row.blocks for row in other.sequences] != [row.blocks for row in case.sequences] or (
                sorted(moved_ids) == sorted(case.owned)
            )


@each_operation
def test_compact_cases_hold_the_same_tokens_near(operation: str) -> None:
    far = [case for case in distinct(operation) if case.is_far()][:60]
    assert len(far) > 40
    for case in far:
        compact = case.compact()
        compact.check()
        assert not compact.is_far() and compact.compact() is None
        if operation == SLOTS:
            assert [slot % case.block_size for slot in right(compact)] == [
                slot % case.block_size for slot in right(case)
            ]
            assert [slot < 0 for slot in right(compact)] == [slot < 0 for slot in right(case)]
        elif operation == WRITE:
            for name in ("k_cache", "v_cache"):
                assert np.array_equal(right(compact)[name], right(case)[name])
            assert [s % case.block_size for s in compact.slots if s >= 0] == [
                s % case.block_size for s in case.slots if s >= 0
            ]
        else:
            assert np.array_equal(right(compact), right(case))


@each_paged
def test_harmless_tails_name_owned_blocks_and_change_nothing(operation: str) -> None:
    changed = 0
    for case in distinct(operation)[:300]:
        twin = case.with_harmless_tails()
        if not any(row.tail for row in case.sequences):
            assert twin is None
            continue
        twin.check()
        assert np.array_equal(right(twin), right(case))
        for row, before in zip(twin.sequences, case.sequences, strict=True):
            assert (row.blocks, row.context_len, len(row.tail)) == (before.blocks, before.context_len, len(before.tail))
            assert set(row.tail) <= (set(row.blocks) or {0})
        changed += twin != case
    assert changed > 100


def test_fitted_rows_keep_their_tokens() -> None:
    for case in with_tokens():
        wider = case.fitted(case.sequences, case.width + 3)
        tight = case.fitted(case.sequences)
        for fitted in (wider, tight):
            fitted.check()
            assert np.array_equal(right(fitted), right(case))
        assert wider.width == case.width + 3
        assert tight.width == max(len(row.blocks) for row in case.sequences)
        assert [row.tail[: len(old.tail)] for row, old in zip(wider.sequences, case.sequences, strict=True)] == [
            row.tail for row in case.sequences
        ]
    fewer = [case for case in with_tokens() if len(case.sequences) > 1]
    for case in fewer:  # the rows before the one that is dropped keep their numbers, and so their tokens
        kept = case.fitted(case.sequences[:-1], case.width)
        kept.check()
        assert np.array_equal(right(kept), right(case)[:-1])
    assert len(fewer) > 50


def test_fitted_slot_mappings_drop_the_tokens_of_rows_that_went() -> None:
    tokens = (Token(0, 2), Token(1, 0), Token(GARBAGE, -1))
    rows = (Sequence((0, 1), (), 3), Sequence((2,), (5,), 1))
    case = SlotMappingCase(block_size=2, num_blocks=3, sequences=rows, tokens=tokens)
    case.check()
    assert case.fitted(rows[:1]).tokens == (Token(0, 2), Token(GARBAGE, -1))
    cut = case.fitted((replace(rows[0], context_len=2, blocks=(0,)), rows[1]))
    cut.check()
    assert cut.tokens == (Token(1, 0), Token(GARBAGE, -1)) and cut.width == 1


def test_other_block_sizes_hold_the_same_tokens() -> None:
    unshared = [case for case in with_tokens() if sum(len(row.blocks) for row in case.sequences) == len(case.owned)]
    assert len(unshared) > 100
    for case in unshared:
        for block_size in {1, 2, case.block_size, case.block_size + 1}:
            repaged = case.repaged(block_size)
            repaged.check()
            assert repaged.block_size == block_size and repaged.context_lens == case.context_lens
            assert np.array_equal(right(repaged), right(case))


def test_a_shared_page_holds_the_tokens_of_its_first_owner() -> None:
    rows = (Sequence((1, 0), (), 3), Sequence((1, 2), (), 4))
    case = PagedDecodeAttentionCase(block_size=2, num_blocks=3, sequences=rows)
    assert case.token_ids(0).tolist() == [0, 1, 2]
    assert case.token_ids(1).tolist() == [0, 1, (1 << 20) + 2, (1 << 20) + 3]
    assert case.owned == {1: 2, 0: 1, 2: 2}
    right(case)


# ------------------------------------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        (TABLE, {"fault": "nonsense"}, "fault='nonsense' is unknown to paged_decode_attention"),
        (TABLE, {"dtype": "float64"}, "dtype='float64' is not one of float32, float16, bfloat16"),
        (TABLE, {"poison": "zero"}, f"poison='zero' is not one of {', '.join(POISONS)}"),
        (
            TABLE,
            {"values": "bit_patterns"},
            "values='bit_patterns' is not one of ordinary, large_logits, shifted_rows, large_values, ascending_rows, "
            "low_scores, rows_modulo, rows_quotient, heads_by_value, heads_by_key, needles",
        ),
        (WRITES, {"values": "rows_modulo"}, "values='rows_modulo' is not one of ordinary, bit_patterns, signed_zeros"),
        (TABLE, {"index_dtype": "int8"}, "index_dtype='int8' is not int32 or int64"),
        (TABLE, {"length_dtype": "float32"}, "length_dtype='float32' is not int32 or int64"),
        (WRITES, {"index_dtype": "uint64"}, "index_dtype='uint64' is not int32 or int64"),
        (TOKENS, {"token_dtype": "int16"}, "token_dtype='int16' is not int32 or int64"),
        (
            TABLE,
            {"sequences": (Sequence((0,), (), 3),)},
            "sequence 0 has 1 blocks; its context_len 3 needs 2",
        ),
        (TABLE, {"sequences": (Sequence((0, 1), (), 2),)}, "sequence 0 has 2 blocks; its context_len 2 needs 1"),
        (TABLE, {"sequences": (Sequence((0,), (), 0),)}, "sequence 0 has 1 blocks; its context_len 0 needs 0"),
        (
            TABLE,
            {"sequences": (ROW, Sequence((1,), (2,), 1))},
            "row 1 of the block table is not 1 wide like row 0",
        ),
        (
            TABLE,
            {"sequences": (ROW, Sequence((3,), (), 1))},
            "sequence 1, page 0: block 3 is not in the pool of 3",
        ),
        (TABLE, {"sequences": (Sequence((-1,), (), 1),)}, "sequence 0, page 0: block -1 is not in the pool of 3"),
        (
            TABLE,
            {"sequences": (Sequence((0, 1), (), 4), Sequence((1,), (2,), 2))},
            "block 1 is used as page 0 by sequence 1 and as another page elsewhere",
        ),
        (
            TABLE,
            {"sequences": (Sequence((1, 1), (), 4),)},
            "block 1 is used as page 1 by sequence 0 and as another page elsewhere",
        ),
        (
            TABLE,
            {"sequences": (Sequence((0,), (2**31,), 2),), "index_dtype": "int32"},
            "id 2147483648 in row 0 does not fit int32",
        ),
        (
            TABLE,
            {"sequences": (Sequence((2**31,), (), 2),), "num_blocks": 2**32, "index_dtype": "int32"},
            "id 2147483648 in row 0 does not fit int32",
        ),
        (
            TOKENS,
            {"sequences": (WIDE,) * 257},
            "a block table of 16842752 entries is more than a case may hold",
        ),
        (TABLE, {"scale": float("inf")}, "scale=inf is not a number up to 1e4"),
        (TABLE, {"scale": float("nan")}, "scale=nan is not a number up to 1e4"),
        (TABLE, {"scale": -10001.0}, "scale=-10001.0 is not a number up to 1e4"),
        (
            TABLE,
            {"block_size": 4096, "head_dim": 4096, "sequences": (Sequence((0,), (), 1),)},
            "elements are more than a case may hold",
        ),
        (TABLE, {"q_padding": 1 << 25}, "33554443 elements are more than a case may hold"),
        (
            TABLE,
            {"block_size": 4096, "sequences": (Sequence((0,), (), 4096),), "num_kv_heads": 64, "head_dim": 128},
            "are more than a case may hold",
        ),
        (
            TABLE,
            {"group_size": 512, "head_dim": 512, "block_size": 128, "sequences": (Sequence((0,), (), 128),)},
            "33554432 products are more than a case may hold",
        ),
        (TABLE, {"group_size": 4096, "sequences": (ROW, ROW)}, "8192 rows of heads are more than a case may hold"),
        (
            TABLE,
            {"fault": "negative context length", "sequences": (Sequence((), (0,), 0),)},
            "fault='negative context length' needs a sequence with a token",
        ),
        (WRITES, {"slots": (6,)}, "token 0: slot 6 is not in the pool of 6 slots"),
        (WRITES, {"slots": (0, 3, 0)}, "two tokens have the same slot"),
        (
            WRITES,
            {"slots": (2**31,), "num_blocks": 2**32, "index_dtype": "int32"},
            "token 0: slot 2147483648 does not fit int32",
        ),
        (WRITES, {"slots": (-(2**31) - 1,), "index_dtype": "int32"}, "token 0: slot -2147483649 does not fit int32"),
        (WRITES, {"slots": (-1,) * 4097}, "4097 tokens are more than a case may hold"),
        (WRITES, {"head_dim": 4096, "num_kv_heads": 4096}, "elements are more than a case may hold"),
        (WRITES, {"slots": (), "fault": "slot past the pool"}, "fault='slot past the pool' needs a token"),
        (
            WRITES,
            {"slots": (-1, -1), "fault": "the same slot twice"},
            "fault='the same slot twice' needs two tokens, one with a slot",
        ),
        (TOKENS, {"sequences": ()}, "tokens without a sequence"),
        (TOKENS, {"tokens": (Token(1, 0),)}, "token 0: there is no sequence 1"),
        (TOKENS, {"tokens": (Token(0, 0), Token(-1, 0))}, "token 1: there is no sequence -1"),
        (TOKENS, {"tokens": (Token(0, 2),)}, "token 0: position 2 of a sequence with 2 tokens"),
        (TOKENS, {"tokens": (Token(0, 0),) * 4097}, "4097 tokens are more than a case may hold"),
        (
            TOKENS,
            {"tokens": (Token(0, -1),), "fault": "seq_id negative"},
            "fault='seq_id negative' needs a token",
        ),
    ],
)
def test_a_case_that_contradicts_itself(case: Case, changes: dict[str, Any], sentence: str) -> None:
    case.check()
    with pytest.raises(InvalidCase) as caught:
        replace(case, **changes).check()
    assert str(caught.value).endswith(sentence)


@pytest.mark.parametrize("operation", [SLOTS, WRITE, DECODE])
def test_every_fault_breaks_something_or_says_what_it_needs(operation: str) -> None:
    kind = CASES[operation]
    assert kind.faults and kind.value_faults
    for fault in kind.faults + kind.value_faults:
        broken, refusals = 0, set[str]()
        for case in distinct(operation)[:120]:
            try:
                twin = case.broken(fault, DEFAULT)
                arguments = twin.arguments()
            except InvalidCase as error:
                refusals.add(str(error))
                continue
            before = case.arguments()
            shapes = [
                [(t.buffer.dtype, t.shape, t.strides) for t in side.tensors.values()]
                + [value for value in side.values.values() if isinstance(value, int | float)]
                for side in (before, arguments)
            ]
            broken += shapes[0] != shapes[1] or digest(twin) != digest(case)
        assert broken > 20, fault
        for sentence in refusals:
            assert f"fault={fault!r} needs" in sentence or "has no two entries in dim" in sentence, sentence


def test_the_probes_fit_every_dtype_however_long_the_context() -> None:
    rows = (Sequence((1, 0), (), 700),)
    case = PagedDecodeAttentionCase(block_size=512, num_blocks=2, sequences=rows, num_kv_heads=3, dtype="bfloat16")
    for values in (*PROBES, "needles"):
        replace(case, values=values).arguments()  # encode refuses what a dtype does not hold exactly
