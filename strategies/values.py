"""Value recipes: what lies in the tensors of a case, bit for bit the same on every machine.

Every number is a hash of (seed, role, token, head, dim), mapped to a dyadic number that its dtype holds exactly.
torch.randn gives other bits on other processors.
"""

from __future__ import annotations

import numpy as np

from pagefuzz.strategies.number_formats import FORMATS, encode

# What lies in the memory that no sequence owns. All but the first four are finite.
POISONS = ("nan", "infinity", "minus_infinity", "nan_and_garbage", "zeros", "largest", "smallest", "tenant")
FINITE_POISONS = POISONS[4:]
# What fresh memory (torch.empty and its kin) is filled with.
FRESH = ("nan", "infinity", "minus_infinity", "zeros", "largest", "smallest", "tenant")
# For kernels that declare unowned="finite": numbers whose products stay finite too.
MODEST_POISONS = ("zeros", "tenant", "smallest")

_NAMES = ("q", "k", "v", "key", "value", "tenant", "k_cache", "v_cache", "order", "kv_cache")
_ROLES = {name: number for number, name in enumerate(_NAMES, 1)}


def counter_hash(seed: int | np.ndarray, role: str, counters: np.ndarray) -> np.ndarray:
    """uint64 hashes of uint64 counters (the finaliser of splitmix64, Steele et al. 2014, over a keyed counter); seeds
    of an array are broadcast with the counters."""
    with np.errstate(over="ignore"):
        key = np.asarray(seed, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = counters.astype(np.uint64) + (key + np.uint64(_ROLES[role] * 0xD1342543DE82EF95 % 2**64))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def dyadic(seed: int | np.ndarray, role: str, counters: np.ndarray, dtype: str) -> np.ndarray:
    """float64 numbers in [-1, 1) that `dtype` holds exactly, spread evenly; about as many bits as the dtype has."""
    bits = min(FORMATS[dtype].precision, 16)
    half = 1 << (bits - 1)
    return ((counter_hash(seed, role, counters) >> np.uint64(64 - bits)).astype(np.int64) - half) / half


def grid(tokens: np.ndarray, heads: int, dims: int) -> np.ndarray:
    """uint64 counters [len(tokens), heads, dims] that name each element of the given tokens."""
    flat = tokens.astype(np.uint64)[:, None] * np.uint64(heads * dims) + np.arange(heads * dims, dtype=np.uint64)
    return flat.reshape(len(tokens), heads, dims)


def poison_bits(kind: str, dtype: str, count: int, seed: int | np.ndarray) -> np.ndarray:
    """`count` bit patterns of `dtype` for memory that nobody owns; for an array of seeds, as many for each."""
    form = FORMATS[dtype]
    patterns = {
        "zeros": [0],
        "nan": [form.nan],
        "infinity": [form.infinity],
        "minus_infinity": [form.infinity | form.sign],
        "nan_and_garbage": [form.nan | 1, form.largest, form.infinity | form.sign, form.nan | form.sign],
        "largest": [form.largest, form.largest | form.sign],
        "smallest": [1, 1 | form.sign],
    }
    if kind == "tenant":  # what the previous owner of the page left: ordinary numbers
        seeds = np.asarray(seed, dtype=np.uint64)[..., None]
        return encode(2 * dyadic(seeds, "tenant", np.arange(count, dtype=np.uint64), dtype), dtype)
    bits = np.empty((*np.shape(seed), count), dtype=form.bits)
    for place, pattern in enumerate(patterns[kind]):
        bits[..., place :: len(patterns[kind])] = pattern
    return bits


# A padded token's bits: high byte(s) that nothing else in a write case carries, then the token's number.
_SENTINEL = {16: 0x7A00, 32: 0x7A5A0000}
_SENTINEL_MASK = {16: 0xFF00, 32: 0xFFFF0000}


def sentinel_bits(token: int, count: int, dtype: str) -> np.ndarray:
    """`count` bit patterns that name the padded token `token`."""
    width = FORMATS[dtype].bits(0).itemsize * 8
    return np.full(count, _SENTINEL[width] | (token & 0xFF), dtype=FORMATS[dtype].bits)


def is_sentinel(bits: np.ndarray) -> np.ndarray:
    """Which of the bit patterns (uint16 or uint32) are sentinels of a padded token."""
    width = bits.dtype.itemsize * 8
    return (bits & bits.dtype.type(_SENTINEL_MASK[width])) == _SENTINEL[width]


def copied_bits(recipe: str, seed: int, role: str, counters: np.ndarray, dtype: str) -> np.ndarray:
    """Bit patterns for a copy, never a sentinel's.

    "ordinary": numbers of order 1. "bit_patterns": any bits at all, so NaN payloads, infinities and subnormal numbers.
    "signed_zeros": +0.0 and -0.0 in turn with NaNs of either sign.
    """
    form = FORMATS[dtype]
    if recipe == "ordinary":
        return encode(2 * dyadic(seed, role, counters, dtype), dtype)
    if recipe == "signed_zeros":
        special = np.array([form.sign, 0, form.nan | 1, form.sign | form.nan | 2], dtype=form.bits)
        return special[(counters.astype(np.int64) + seed) & 3]
    hashed = counter_hash(seed, role, counters)
    width = form.bits(0).itemsize * 8
    bits = (hashed >> np.uint64(64 - width)).astype(form.bits)
    bits[is_sentinel(bits)] ^= form.bits(form.sign)
    return bits
