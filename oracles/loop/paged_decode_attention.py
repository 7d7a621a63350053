"""Decode attention, scalar by scalar, over the pages that the block table names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from pagefuzz.oracles.loop.memory import Memory
from pagefuzz.strategies.case import arguments_of
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.tensors import Tensor


def right_answer(case: PagedDecodeAttentionCase) -> list[list[list[float]]]:
    """out[b][h][d]; zeros for a context length of 0."""
    return attention(case, arguments_of(case).tensors)


def attention(case: PagedDecodeAttentionCase, tensors: dict[str, Tensor]) -> list[list[list[float]]]:
    """The same over these tensors."""
    q, k_cache, v_cache = (Memory(tensors[name]) for name in ("q", "k_cache", "v_cache"))
    table, lengths = Memory(tensors["block_tables"]), Memory(tensors["context_lens"])
    out = []
    for b in range(len(case.sequences)):
        n = int(lengths.at(b))
        places = [(int(table.at(b, j // case.block_size)), j % case.block_size) for j in range(n)]
        heads = []
        for kv_head in range(case.num_kv_heads):
            keys = [k_cache.row(block, offset, kv_head) for block, offset in places]
            columns = list(zip(*(v_cache.row(block, offset, kv_head) for block, offset in places), strict=True))
            for h in range(kv_head * case.group_size, (kv_head + 1) * case.group_size):
                query = q.row(b, h)
                scores = [case.scale * _sum_of_products(query, key) for key in keys]
                largest = max(scores, default=0.0)
                weights = [math.exp(score - largest) for score in scores]
                total = math.fsum(weights)
                weighed = [_sum_of_products(weights, column) / total for column in columns]
                heads.append(weighed if n else [0.0] * case.head_dim)
        out.append(heads)
    return out


def _sum_of_products(left: Sequence[float], right: Sequence[float]) -> float:
    try:
        return math.fsum(map(mul, left, right))
    except (ValueError, OverflowError):  # infinities of both signs, as they lie where nobody owns
        return math.nan
