"""What the addressed slots hold after a write, from the tokens' own bits."""

from __future__ import annotations

import numpy as np

from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase


def right_answer(case: ReshapeAndCacheCase) -> dict[str, np.ndarray]:
    """k_cache, v_cache: [addressed tokens, KVH * D] bits, in token order."""
    addressed = [t for t, slot in enumerate(case.slots) if slot >= 0]
    return {
        "k_cache": case.token_bits("key")[addressed],
        "v_cache": case.token_bits("value")[addressed],
    }
