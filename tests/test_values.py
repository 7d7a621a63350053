"""Value recipes and number formats: the same bits on every machine, exact in their dtype, and never a sentinel.

The golden values were printed once and are copied here by hand, so that another processor, numpy or Python shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagefuzz.strategies.case import Sequence
from pagefuzz.strategies.number_formats import FORMATS, ITEMSIZE, STORAGE, decode, encode
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.values import (
    FINITE_POISONS,
    MODEST_POISONS,
    POISONS,
    copied_bits,
    counter_hash,
    dyadic,
    grid,
    is_sentinel,
    poison_bits,
    sentinel_bits,
)

DTYPES = tuple(FORMATS)
COUNTERS = np.array([0, 1, 2, 12345, 2**40 + 7], dtype=np.uint64)
MANY = np.arange(1 << 17, dtype=np.uint64)

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ints(bits: np.ndarray) -> list[int]:
    return [int(each) for each in bits]


# -------------------------------------------------------------------------------------------------------- golden values


@pytest.mark.parametrize(
    ("seed", "role", "golden"),
    [
        (0, "q", [0xAD53D5472392EDEC, 0x97E5DF3F4209048E, 0x84BDC3B0F151CF0A, 0xE4A150E477584566, 0xA89CB02BF7E60A39]),
        (7, "key", [0xA650F910E2A53ECC, 0x66D3DC19228DF28F, 0xDC8E04BCEF6E2731, 0x42B23FF38132A44D, 0x5E514657715BA61]),
        (
            65536,
            "v_cache",
            [0x8EAEA24127EE2E1B, 0x35F9162FC99DFF8B, 0xBCCF156E8830389, 0xA07F3615975265BC, 0xB9851FD7EDF6F1E2],
        ),
    ],
)
def test_golden_hashes(seed: int, role: str, golden: list[int]) -> None:
    assert ints(counter_hash(seed, role, COUNTERS)) == golden


def test_golden_hashes_of_every_role() -> None:
    golden = {
        "q": 0x9C9EB454C0319D18,
        "k": 0x938CAEEC011A55D1,
        "v": 0x7152B6AEE4B89695,
        "key": 0x3475927456EF1AD4,
        "value": 0x194BB3A7642B3EB8,
        "tenant": 0x59AA3AB1D726D509,
        "k_cache": 0x1ACB69AA12CBFB37,
        "v_cache": 0xA55B3F6065D0CC41,
    }
    five = np.array([5], dtype=np.uint64)
    assert {role: int(counter_hash(3, role, five)[0]) for role in golden} == golden


def test_the_hash_is_splitmix64() -> None:
    """The published first outputs of splitmix64 from state 1234567, whose steps are 0x9E3779B97F4A7C15 apart."""
    step, key = 0x9E3779B97F4A7C15, (1 * 0xD1342543DE82EF95) % 2**64  # seed 0, role "q"
    counters = np.array([(1234567 + (i + 1) * step - key) % 2**64 for i in range(3)], dtype=np.uint64)
    assert ints(counter_hash(0, "q", counters)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize(
    ("dtype", "golden"),
    [
        ("float32", [0.565338134765625, -0.206298828125, -0.31292724609375, 0.861358642578125, 0.541961669921875]),
        ("float16", [0.564453125, -0.20703125, -0.3134765625, 0.861328125, 0.541015625]),
        ("bfloat16", [0.5625, -0.2109375, -0.3203125, 0.859375, 0.5390625]),
    ],
)
def test_golden_dyadic_numbers(dtype: str, golden: list[float]) -> None:
    assert dyadic(7, "k", COUNTERS, dtype).tolist() == golden


@pytest.mark.parametrize(
    ("recipe", "dtype", "golden"),
    [
        ("ordinary", "float32", [0x3F194000, 0xBEC96800, 0x3FB91C00, 0xBF753800, 0xBFF43600]),
        ("bit_patterns", "float32", [0xA650F910, 0x66D3DC19, 0xDC8E04BC, 0x42B23FF3, 0x05E51465]),
        ("signed_zeros", "float32", [0xFFC00002, 0x80000000, 0x00000000, 0x80000000, 0x7FC00001]),
        ("ordinary", "float16", [0x38C8, 0xB650, 0x3DC8, 0xBBAC, 0xBFA2]),
        ("bit_patterns", "float16", [0xA650, 0x66D3, 0xDC8E, 0x42B2, 0x05E5]),
        ("signed_zeros", "float16", [0xFE02, 0x8000, 0x0000, 0x8000, 0x7E01]),
        ("ordinary", "bfloat16", [0x3F18, 0xBED0, 0x3FB8, 0xBF78, 0xBFF6]),
        ("bit_patterns", "bfloat16", [0xA650, 0x66D3, 0xDC8E, 0x42B2, 0x05E5]),
        ("signed_zeros", "bfloat16", [0xFFC2, 0x8000, 0x0000, 0x8000, 0x7FC1]),
    ],
)
def test_golden_copied_bits(recipe: str, dtype: str, golden: list[int]) -> None:
    assert ints(copied_bits(recipe, 7, "key", COUNTERS, dtype)) == golden


GOLDEN_POISONS = {
    "float32": {
        "nan": [0x7FC00000, 0x7FC00000, 0x7FC00000, 0x7FC00000, 0x7FC00000],
        "infinity": [0x7F800000, 0x7F800000, 0x7F800000, 0x7F800000, 0x7F800000],
        "minus_infinity": [0xFF800000, 0xFF800000, 0xFF800000, 0xFF800000, 0xFF800000],
        "nan_and_garbage": [0x7FC00001, 0x7F7FFFFF, 0xFF800000, 0xFFC00000, 0x7FC00001],
        "zeros": [0, 0, 0, 0, 0],
        "largest": [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7FFFFF],
        "smallest": [0x00000001, 0x80000001, 0x00000001, 0x80000001, 0x00000001],
        "tenant": [0xBFC9B800, 0xBFE13A00, 0x3F789000, 0x3FE44E00, 0x3F1A4400],
    },
    "float16": {
        "nan": [0x7E00, 0x7E00, 0x7E00, 0x7E00, 0x7E00],
        "infinity": [0x7C00, 0x7C00, 0x7C00, 0x7C00, 0x7C00],
        "minus_infinity": [0xFC00, 0xFC00, 0xFC00, 0xFC00, 0xFC00],
        "nan_and_garbage": [0x7E01, 0x7BFF, 0xFC00, 0xFE00, 0x7E01],
        "zeros": [0, 0, 0, 0, 0],
        "largest": [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF, 0x7BFF],
        "smallest": [0x0001, 0x8001, 0x0001, 0x8001, 0x0001],
        "tenant": [0xBE4E, 0xBF0A, 0x3BC4, 0x3F22, 0x38D0],
    },
    "bfloat16": {
        "nan": [0x7FC0, 0x7FC0, 0x7FC0, 0x7FC0, 0x7FC0],
        "infinity": [0x7F80, 0x7F80, 0x7F80, 0x7F80, 0x7F80],
        "minus_infinity": [0xFF80, 0xFF80, 0xFF80, 0xFF80, 0xFF80],
        "nan_and_garbage": [0x7FC1, 0x7F7F, 0xFF80, 0xFFC0, 0x7FC1],
        "zeros": [0, 0, 0, 0, 0],
        "largest": [0x7F7F, 0xFF7F, 0x7F7F, 0xFF7F, 0x7F7F],
        "smallest": [0x0001, 0x8001, 0x0001, 0x8001, 0x0001],
        "tenant": [0xBFCA, 0xBFE2, 0x3F78, 0x3FE4, 0x3F18],
    },
}


@each_dtype
def test_golden_poison(dtype: str) -> None:
    assert {kind: ints(poison_bits(kind, dtype, 5, 3)) for kind in POISONS} == GOLDEN_POISONS[dtype]


# One sequence of three tokens in blocks of two slots, two kv heads, two dims, float16: q [1, 2, 2], keys and values
# [3, 2, 2], row by row.
Q = [-0.861328125, 0.224609375, 1.349609375, -1.69921875]
K = [-1.49609375, 1.525390625, -1.169921875, 1.330078125]
K += [-1.390625, 0.556640625, -1.927734375, 1.130859375]
K += [-1.77734375, -0.044921875, 1.185546875, -0.900390625]
V = [0.125, 0.537109375, 1.59765625, -0.953125]
V += [-1.91796875, 1.6953125, -0.71484375, 1.623046875]
V += [1.5078125, -1.52734375, 0.328125, -0.087890625]
GOLDEN_ATTENTION: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "ordinary": (Q, K, V),
    "large_logits": ([-27.5625, 7.1875, 43.1875, -54.375], K, V),
    "shifted_rows": (
        [4, 0.224609375, 4, -1.69921875],
        [24, 1.525390625, 24, 1.330078125, 24, 0.556640625, 24, 1.130859375, 24, -0.044921875, 24, -0.900390625],
        V,
    ),
    "large_values": (Q, K, [64, 275, 818, -488, -982, 868, -366, 831, 772, -782, 168, -45]),
    "ascending_rows": (
        [4, 0.224609375, 4, -1.69921875],
        [0, 1.525390625, 0, 1.330078125, 0, 0.556640625, 0, 1.130859375, 1, -0.044921875, 1, -0.900390625],
        V,
    ),
    "low_scores": (
        [64, 0.224609375, 64, -1.69921875],
        [each for dim in K[1::2] for each in (-1024, dim)],
        V,
    ),
    "rows_modulo": ([0] * 4, [0] * 12, [1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0]),
    "rows_quotient": ([0] * 4, [0] * 12, [1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1]),
    "heads_by_value": ([0] * 4, [0] * 12, [1, 1, 2, 2] * 3),
    "heads_by_key": ([1, 0, 1, 0], [64, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0], [1] * 4 + [2] * 4 + [3] * 4),
    "needles": (
        [-32, 0, -32, 0],
        [0, 0, 16, 0, 16, 0, 16, 0, 16, 0, 0, 0],
        [62, 30, 75, 31, 41, 76, 80, 2, 71, 97, 86, 46],
    ),
}


def attention_case(values: str, **changes: Any) -> PagedDecodeAttentionCase:
    fields: dict[str, Any] = {
        "block_size": 2,
        "num_blocks": 2,
        "sequences": (Sequence((1, 0), (), 3),),
        "num_kv_heads": 2,
        "head_dim": 2,
        "scale": 0.5,
        "dtype": "float16",
        "seed": 5,
    }
    return PagedDecodeAttentionCase(values=values, **fields | changes)


def test_golden_numbers_of_every_attention_recipe() -> None:
    assert set(GOLDEN_ATTENTION) == set(PagedDecodeAttentionCase.value_recipes)
    for recipe, golden in GOLDEN_ATTENTION.items():
        case = attention_case(recipe)
        tokens = case.token_ids(0)
        made = [case.query_values(), case.key_values(tokens), case.value_values(tokens)]
        assert [each.shape for each in made] == [(1, 2, 2), (3, 2, 2), (3, 2, 2)]
        assert [each.reshape(-1).tolist() for each in made] == list(golden), recipe


def test_every_copy_recipe_has_golden_bits() -> None:
    assert set(ReshapeAndCacheCase.value_recipes) == {"ordinary", "bit_patterns", "signed_zeros"}


def test_probe_values_of_one_dim_number_their_rows() -> None:
    case = attention_case("rows_modulo", head_dim=1, block_size=64, sequences=(Sequence((0, 1), (), 65),))
    assert case.value_values(case.token_ids(0))[:, 0, 0].tolist() == [*range(1, 64), 1, 2]


def test_counters_name_each_element_of_a_token() -> None:
    """Tokens 0 and 3 of 2 heads and 2 dims."""
    assert grid(np.array([0, 3]), 2, 2).tolist() == [[[0, 1], [2, 3]], [[12, 13], [14, 15]]]


# -------------------------------------------------------------------------------------------------------- what they are


@each_dtype
def test_dyadic_numbers_fill_their_range_evenly(dtype: str) -> None:
    numbers = dyadic(1, "k", MANY, dtype)
    assert numbers.min() >= -1 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=16, range=(-1, 1))
    assert counts.min() > 0.95 * len(MANY) / 16
    assert len(np.unique(numbers)) == {"float32": 56550, "float16": 2048, "bfloat16": 256}[dtype]


@each_dtype
def test_seeds_and_roles_give_other_numbers(dtype: str) -> None:
    drawn = [dyadic(seed, role, MANY[:4096], dtype) for seed in (0, 1) for role in ("q", "k", "v")]
    for i, left in enumerate(drawn):
        for right in drawn[:i]:
            assert (left == right).mean() < 0.02
            assert abs(np.corrcoef(left, right)[0, 1]) < 0.06


@each_dtype
def test_signed_zeros_hold_both_zeros_and_both_nans(dtype: str) -> None:
    bits = copied_bits("signed_zeros", 0, "key", MANY[:8], dtype)
    numbers = decode(bits, dtype)
    zeros = numbers == 0
    assert zeros.sum() == 4 and np.isnan(numbers).sum() == 4
    assert np.signbit(numbers[zeros]).sum() == 2
    assert sorted(set(ints(bits & FORMATS[dtype].sign))) == [0, FORMATS[dtype].sign]


@each_dtype
def test_bit_patterns_hold_every_kind_of_number(dtype: str) -> None:
    form = FORMATS[dtype]
    bits = copied_bits("bit_patterns", 0, "key", np.arange(1 << 20, dtype=np.uint64), dtype)
    exponent = bits & form.bits(form.infinity)
    fraction = bits & form.bits(form.largest & ~form.infinity)
    assert ((exponent == 0) & (fraction != 0)).any(), "subnormals"
    special = exponent == form.infinity
    quiet = form.bits(form.nan & ~form.infinity)
    assert len(np.unique(fraction[special & (fraction & quiet != 0)])) > 30, "payloads of quiet NaNs"
    assert len(np.unique(fraction[special & (fraction & quiet == 0)])) > 30, "payloads of signalling NaNs"
    if dtype != "float32":
        assert len(np.unique(bits)) == 65536 - 256, "all patterns but the sentinels"


@each_dtype
@pytest.mark.parametrize("recipe", ReshapeAndCacheCase.value_recipes)
def test_no_recipe_makes_a_sentinel(recipe: str, dtype: str) -> None:
    for seed, role in ((0, "key"), (1, "value"), (2, "k_cache"), (65536, "v_cache")):
        assert not is_sentinel(copied_bits(recipe, seed, role, np.arange(1 << 19, dtype=np.uint64), dtype)).any()


def test_a_hash_that_would_be_a_sentinel_changes_its_sign() -> None:
    """In float32 one of 65536 patterns is one: here the counter is worked out from the hash."""
    key = (4 * 0xD1342543DE82EF95) % 2**64  # seed 0, role "key"
    z = _unmixed(0x7A5A123456789ABC)
    counters = np.array([(z - key) % 2**64], dtype=np.uint64)
    assert ints(counter_hash(0, "key", counters)) == [0x7A5A123456789ABC]
    for dtype, golden in (("float32", 0xFA5A1234), ("float16", 0xFA5A), ("bfloat16", 0xFA5A)):
        assert ints(copied_bits("bit_patterns", 0, "key", counters, dtype)) == [golden]


def _unmixed(hashed: int) -> int:
    """What the finaliser of splitmix64 turns into `hashed`."""
    z = hashed ^ (hashed >> 31) ^ (hashed >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = z ^ (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return z ^ (z >> 30) ^ (z >> 60)


@each_dtype
@pytest.mark.parametrize("kind", POISONS)
def test_no_poison_is_a_sentinel(kind: str, dtype: str) -> None:
    assert not is_sentinel(poison_bits(kind, dtype, 1 << 16, 3)).any()


@each_dtype
def test_sentinels_name_their_token(dtype: str) -> None:
    drawn = {token: sentinel_bits(token, 3, dtype) for token in (0, 1, 2, 255)}
    for token, bits in drawn.items():
        assert bits.dtype == FORMATS[dtype].bits and len(set(ints(bits))) == 1
        assert is_sentinel(bits).all() and int(bits[0]) & 0xFF == token
        assert np.isfinite(decode(bits, dtype)).all(), "so that arithmetic keeps them apart from NaN"
    assert len({int(bits[0]) for bits in drawn.values()}) == len(drawn)
    assert not is_sentinel(~drawn[0]).any()


@each_dtype
def test_poison_is_finite_where_it_is_declared_so(dtype: str) -> None:
    for kind in POISONS:
        numbers = decode(poison_bits(kind, dtype, 64, 9), dtype)
        assert np.isfinite(numbers).all() == (kind in FINITE_POISONS), kind
    for kind in MODEST_POISONS:
        assert (np.abs(decode(poison_bits(kind, dtype, 4096, 9), dtype)) <= 2).all(), kind
    largest = decode(poison_bits("largest", dtype, 2, 0), dtype)
    smallest = decode(poison_bits("smallest", dtype, 2, 0), dtype)
    info = torch.finfo(getattr(torch, dtype))
    assert largest.tolist() == [info.max, -info.max]
    assert smallest.tolist() == [info.smallest_normal * info.eps, -info.smallest_normal * info.eps]


@each_dtype
def test_poison_of_no_length(dtype: str) -> None:
    for kind in POISONS:
        assert poison_bits(kind, dtype, 0, 0).shape == (0,)


@each_dtype
@pytest.mark.parametrize("recipe", PagedDecodeAttentionCase.value_recipes)
def test_every_attention_recipe_is_exact(recipe: str, dtype: str) -> None:
    """The largest of everything that is drawn: `encode` raises where a number would be rounded."""
    lengths = (160, 1, 0, 97)
    blocks = [tuple(range(10 * b, 10 * b + -(-n // 16))) for b, n in enumerate(lengths)]
    rows = tuple(Sequence(ids, (0,) * (10 - len(ids)), n) for ids, n in zip(blocks, lengths, strict=True))
    for head_dim, scale, seed in ((1, 0.125, 0), (3, 1.0, 65536), (128, 128**-0.5, 7)):
        case = attention_case(
            recipe,
            block_size=16,
            num_blocks=40,
            sequences=rows,
            head_dim=head_dim,
            scale=scale,
            seed=seed,
            dtype=dtype,
            num_kv_heads=4,
        )
        case.check()
        for b in range(4):
            tokens = case.token_ids(b)
            for numbers in (case.query_values(), case.key_values(tokens), case.value_values(tokens)):
                assert np.array_equal(decode(encode(numbers, dtype), dtype), numbers)


# -------------------------------------------------------------------------------------------------------------- formats


def torch_float64(bits: np.ndarray, dtype: str) -> np.ndarray:
    signed = torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int32).copy())
    return signed.view(getattr(torch, dtype)).double().numpy()


def float32_sample() -> np.ndarray:
    """Every exponent with both signs and telling fractions, and a million patterns of the hash."""
    fractions = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x555555, 0x7FFFFE, 0x7FFFFF], dtype=np.uint32)
    heads = np.arange(512, dtype=np.uint32) << np.uint32(23)
    hashed = (counter_hash(0, "key", np.arange(1 << 20, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return np.concatenate([(heads[:, None] | fractions).reshape(-1), hashed])


def patterns(dtype: str) -> np.ndarray:
    return float32_sample() if dtype == "float32" else np.arange(65536, dtype=np.uint16)


@each_dtype
@pytest.mark.filterwarnings("error")
def test_decode_is_torchs_conversion(dtype: str) -> None:
    bits = patterns(dtype)
    ours, theirs = decode(bits, dtype), torch_float64(bits, dtype)
    assert ours.dtype == np.float64
    nan = np.isnan(theirs)
    assert nan.any() and np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.uint64), theirs[~nan].view(np.uint64)), "the sign of zero too"


@each_dtype
@pytest.mark.filterwarnings("error")
def test_encode_undoes_decode(dtype: str) -> None:
    bits = patterns(dtype)
    numbers = decode(bits, dtype)
    kept = ~np.isnan(numbers)
    assert np.array_equal(encode(numbers[kept], dtype), bits[kept])


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float32", 1 + 2.0**-24),
        ("float32", 2.0**-150),
        ("float32", 2.0**128),
        ("float32", 0.1),
        ("float16", 1 + 2.0**-11),
        ("float16", 2.0**-25),
        ("float16", 65520.0),
        ("float16", 2049.0),
        ("bfloat16", 1 + 2.0**-8),
        ("bfloat16", 257.0),
        ("bfloat16", 1 + 2.0**-30),
        ("bfloat16", 2.0**-134),
        ("bfloat16", 2.0**128),
        *((dtype, float("nan")) for dtype in DTYPES),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_encode_refuses_what_the_dtype_cannot_hold(dtype: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"^a value recipe made a number that {dtype} cannot hold exactly$"):
        encode(np.array([1.0, number]), dtype)


@each_dtype
def test_formats_are_torchs(dtype: str) -> None:
    form, info, its = FORMATS[dtype], torch.finfo(getattr(torch, dtype)), getattr(torch, dtype)
    assert form.unit_roundoff == info.eps / 2
    assert decode(np.array([form.largest], form.bits), dtype)[0] == info.max
    assert decode(np.array([form.infinity], form.bits), dtype)[0] == np.inf
    assert np.isnan(decode(np.array([form.nan], form.bits), dtype)[0])
    assert np.signbit(decode(np.array([form.sign], form.bits), dtype)[0])
    assert ITEMSIZE[dtype] == its.itemsize == np.dtype(STORAGE[dtype]).itemsize
