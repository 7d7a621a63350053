"""Dense decode attention in float64, from the logical tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.tolerance import LOOSE, Precision, attention_bound, rounded_bound
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase


@dataclass(frozen=True)
class AttentionAnswer:
    """exact, bound: float64 [B, H, D]; rows of a context length of 0 are zero. loose: some bound says little."""

    exact: np.ndarray
    bound: np.ndarray
    loose: bool


def right_answer(case: PagedDecodeAttentionCase, declared: Declaration) -> AttentionAnswer:
    """The exact output, and how far a correct kernel of the declared precision can be off."""
    shape = (len(case.sequences), case.num_heads, case.head_dim)
    exact, bound, loose = np.zeros(shape), np.zeros(shape), False
    precision = Precision.of(declared, case.dtype)
    queries = case.query_values()
    for b, n in enumerate(case.context_lens):
        if n == 0:
            continue
        tokens = case.token_ids(b)
        keys = np.repeat(case.key_values(tokens), case.group_size, axis=1)
        values = np.repeat(case.value_values(tokens), case.group_size, axis=1)
        scores = case.scale * np.einsum("hd,nhd->hn", queries[b], keys)
        magnitudes = abs(case.scale) * np.einsum("hd,nhd->hn", np.abs(queries[b]), np.abs(keys))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        exact[b] = np.einsum("hn,nhd->hd", weights, values)
        unrounded = attention_bound(scores, magnitudes, values, exact[b], case.head_dim, case.scale, precision)
        bound[b] = rounded_bound(unrounded, exact[b], case.dtype)
        loose = loose or not unrounded.max() <= LOOSE * np.abs(values).max()
    return AttentionAnswer(exact, bound, loose)
